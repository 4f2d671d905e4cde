"""Plain Python values as data: a typed JSON encoding that gives back exactly what went in.

``encode`` takes None, bool, int, float, complex, str, bytes, small numpy arrays and scalars, and lists,
tuples, sets and dicts of them, of exactly these types (a subclass may mean more than its contents, so it
is refused). JSON's own types stand for themselves; what JSON cannot say is an object with one key that
begins with ``$``:

    {"$tuple": [..]}  {"$set": [..]}  {"$frozenset": [..]}  {"$dict": [[key, value], ..]}
    {"$int": "0x1f"}  {"$float": "nan"}  {"$complex": ["1.0", "nan"]}  {"$bytes": "<base64>"}
    {"$ndarray": ["float64", [2, 3], "<base64>"]}   {"$scalar": ["float64", [], "<base64>"]}

Pure. Nothing here imports, executes or unpickles: any bytes can be decoded safely.
"""

from __future__ import annotations

import base64
import math
from typing import Any, Final

import msgspec
import numpy as np

DEPTH_MAX: Final = 100
ARRAY_BYTES_MAX: Final = 64 << 10  # a random generator's state is plain data, a data set is not
_ARRAY_DTYPES: Final = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
_JSON_INT_MAX: Final = 2**63 - 1


class NotPlainDataError(TypeError):
    """The value is, or holds, something that is not plain data; the adapter must store it otherwise."""


def encode(value: Any) -> bytes:
    """JSON of ``value``; raises `NotPlainDataError` where it is not plain data."""
    return msgspec.json.encode(to_json(value))


def decode(data: bytes) -> Any:
    """The value behind `encode`'s JSON; raises ValueError where it is not that."""
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise ValueError("not a stored value: nested too deeply") from None
    return from_json(value)


def to_json(value: Any, depth: int = DEPTH_MAX) -> Any:
    """``value`` in JSON's own types, with ``$`` objects for the rest."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return _utf8(value)
    if kind is int:
        return value if -_JSON_INT_MAX <= value <= _JSON_INT_MAX else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if depth == 0:
        raise NotPlainDataError(f"nested deeper than {DEPTH_MAX} levels")
    if kind is list:
        return [to_json(item, depth - 1) for item in value]
    if kind is tuple:
        return {"$tuple": [to_json(item, depth - 1) for item in value]}
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {_utf8(key): to_json(item, depth - 1) for key, item in value.items()}
        return {"$dict": [[to_json(key, depth - 1), to_json(item, depth - 1)] for key, item in value.items()]}
    if kind is np.ndarray or issubclass(kind, np.generic):
        return _array_to_json(value)
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is complex:
        return {"$complex": [repr(value.real), repr(value.imag)]}
    if kind is set or kind is frozenset:
        items = sorted((to_json(item, depth - 1) for item in value), key=repr)  # equal sets, equal bytes
        return {f"${kind.__name__}": items}
    raise NotPlainDataError(f"{kind.__module__}.{kind.__qualname__} is not plain data")


def _array_to_json(value: Any) -> Any:
    dtype = value.dtype
    if dtype.name not in _ARRAY_DTYPES or not dtype.isnative or value.nbytes > ARRAY_BYTES_MAX:
        raise NotPlainDataError(f"a numpy value of dtype {dtype} and {value.nbytes} bytes is not plain data")
    tag = "$ndarray" if type(value) is np.ndarray else "$scalar"
    data = base64.b64encode(np.asarray(value, dtype.newbyteorder("<")).tobytes()).decode()
    return {tag: [dtype.name, list(value.shape), data]}


def _array_from_json(dtype: str, shape: list[int], data: str) -> Any:
    if dtype not in _ARRAY_DTYPES or any(n < 0 for n in shape):
        raise ValueError(f"{dtype!r} of shape {shape!r} is no dtype or shape of a stored value")
    kind = np.dtype(dtype)
    flat = np.frombuffer(base64.b64decode(data, validate=True), kind.newbyteorder("<"))
    return flat.astype(kind).reshape(shape)  # a copy: writable, and in native byte order


def from_json(value: Any) -> Any:
    """The inverse of `to_json`; raises ValueError where it is not of `to_json`'s making."""
    try:
        return _from_json(value)
    except (TypeError, RecursionError) as error:  # a list as a key, a number where a pair belongs, ...
        raise ValueError(f"not a stored value: {error}") from None


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, body),) = value.items()
        if tag.startswith("$"):
            return _from_tagged(tag, body)
    if any(key.startswith("$") for key in value):
        raise ValueError(f"a stored mapping has a key like a tag among others: {sorted(value)[:3]!r}")
    return {key: _from_json(item) for key, item in value.items()}


def _from_tagged(tag: str, body: Any) -> Any:
    if tag == "$tuple" and isinstance(body, list):
        return tuple(_from_json(item) for item in body)
    if tag == "$dict" and isinstance(body, list):
        return {_from_json(key): _from_json(item) for key, item in body}
    if tag == "$int" and isinstance(body, str):
        return int(body, 16)
    if tag == "$float" and isinstance(body, str):
        return float(body)
    if tag == "$complex" and isinstance(body, list):
        real, imag = body
        return complex(float(real), float(imag))
    if tag == "$bytes" and isinstance(body, str):
        return base64.b64decode(body, validate=True)
    if tag in ("$ndarray", "$scalar") and isinstance(body, list):
        array = _array_from_json(*body)
        if tag == "$scalar" and array.shape:
            raise ValueError("a stored scalar has a shape")
        return array if tag == "$ndarray" else array[()]
    if tag == "$set" and isinstance(body, list):
        return {_from_json(item) for item in body}
    if tag == "$frozenset" and isinstance(body, list):
        return frozenset(_from_json(item) for item in body)
    raise ValueError(f"unknown tag {tag!r} in a stored value: was it written by a newer release?")


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise NotPlainDataError("a string with a lone surrogate has no UTF-8 form") from None
    return text
