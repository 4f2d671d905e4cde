"""The dtypes an entry can have: their names, sizes, and what safetensors and numpy call them.

Names are numpy's and ml_dtypes' own (``float32``, ``bfloat16``, ``float8_e4m3fn``), which PyTorch and
JAX share. A dtype that safetensors has no code for is stored as bytes (``U8`` with one more dimension
of its item size); its true name stands in the manifest.

Codes: https://github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

from typing import Final, NamedTuple

import ml_dtypes
import numpy as np

from flashpoint.errors import LayoutError


class DType(NamedTuple):
    """One row of the table: ``itemsize`` in bytes; ``code`` is safetensors', None where it has none."""

    name: str
    itemsize: int
    code: str | None
    numpy: np.dtype | None


def _table() -> dict[str, DType]:
    standard = {
        "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
        "int32": "I32", "uint64": "U64", "int64": "I64", "float16": "F16", "float32": "F32",
        "float64": "F64", "complex64": "C64", "complex128": None,
    }  # fmt: skip
    extended = {
        "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
        # safetensors names these too, but not in every reader's release: bytes are read by all.
        "float8_e8m0fnu": None, "float8_e4m3fnuz": None, "float8_e5m2fnuz": None, "float8_e4m3b11fnuz": None,
        "float8_e4m3": None, "float8_e3m4": None, "int4": None, "uint4": None, "int2": None, "uint2": None,
        "float4_e2m1fn": None,
    }  # fmt: skip
    table = {
        name: DType(name, np.dtype(name).itemsize, code, np.dtype(name)) for name, code in standard.items()
    }
    for name, code in extended.items():
        dtype = np.dtype(getattr(ml_dtypes, name))
        table[name] = DType(name, dtype.itemsize, code, dtype)
    # Kinds without a numpy type: PyTorch's half-precision complex and its packed pairs of 4-bit floats.
    table["complex32"] = DType("complex32", 4, None, None)
    table["float4_e2m1fn_x2"] = DType("float4_e2m1fn_x2", 1, None, None)
    return table


DTYPES: Final[dict[str, DType]] = _table()


def dtype_of(name: str) -> DType:
    """The row of a dtype's name; raises `LayoutError` for an unknown one."""
    try:
        return DTYPES[name]
    except KeyError:
        raise LayoutError(f"dtype {name!r} is unknown: it must be one of {', '.join(DTYPES)}") from None


def name_of(dtype: np.dtype) -> str:
    """The name of a numpy (or ml_dtypes) dtype; raises `LayoutError` where an entry cannot have it."""
    if dtype.name in DTYPES and dtype.isnative:
        return dtype.name
    raise LayoutError(
        f"numpy dtype {dtype!r} cannot be stored as an array: convert it to one of {', '.join(DTYPES)} "
        "in native byte order"
    )
