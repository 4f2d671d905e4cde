"""The blob: a safetensors file whose header also tells PyTorch's reader where each shard belongs.

Format (https://github.com/huggingface/safetensors#format): 8 bytes of header length, little-endian; a
JSON object ``key -> {dtype, shape, data_offsets}``, padded with spaces; then the data, without holes.
We pad the header so that data begins on a page, and fill alignment gaps with ``U8`` tensors named
``__pad__.<n>``. ``__metadata__["DCP_SHARDING_INFO"]`` gives every key's offset in its global array, as
``torch.distributed.checkpoint.HuggingFaceStorageReader`` reads it.

Pure: bytes in, bytes out. The parser trusts nothing and allocates nothing beyond the header.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from flashpoint.errors import CorruptObjectError

LENGTH_BYTES: Final = 8
HEADER_BYTES_MAX: Final = 100_000_000  # the reference implementation's own limit
PAD_PREFIX: Final = "__pad__."
SHARDING_KEY: Final = "DCP_SHARDING_INFO"

_ITEM_BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class Tensor(NamedTuple):
    """One key of the header; ``begin`` and ``end`` count bytes from the start of the data section."""

    key: str
    code: str
    shape: tuple[int, ...]
    begin: int
    end: int
    saved_offsets: tuple[int, ...]


def fill_gaps(tensors: Sequence[Tensor], data_bytes: int) -> list[Tensor]:
    """The tensors in file order, with a pad wherever they leave a hole, up to ``data_bytes``."""
    filled: list[Tensor] = []
    position = pads = 0

    def pad_to(end: int) -> None:
        nonlocal position, pads
        if end > position:
            filled.append(Tensor(f"{PAD_PREFIX}{pads}", "U8", (end - position,), position, end, (0,)))
            pads += 1
            position = end

    for tensor in sorted(tensors, key=lambda t: (t.begin, t.end)):
        pad_to(tensor.begin)
        filled.append(tensor)
        position = tensor.end
    pad_to(data_bytes)
    return filled


def padded_header_bytes(tensors: Iterable[Tensor], multiple: int) -> int:
    """Size of the header of ``tensors`` with its length prefix, rounded up to ``multiple`` bytes."""
    return -(-(LENGTH_BYTES + len(_json(tensors))) // multiple) * multiple


def encode_header(tensors: Iterable[Tensor], header_bytes: int) -> bytes:
    """The header with its length prefix, padded with spaces to ``header_bytes``."""
    text = _json(tensors)
    room = header_bytes - LENGTH_BYTES
    if len(text) > room:
        raise ValueError(f"a header of {len(text)} bytes does not fit into {room}")
    return room.to_bytes(LENGTH_BYTES, "little") + text + b" " * (room - len(text))


def _json(tensors: Iterable[Tensor]) -> bytes:
    header: dict[str, Any] = {}
    sharding: dict[str, Any] = {}
    for tensor in tensors:
        header[tensor.key] = {
            "dtype": tensor.code, "shape": tensor.shape, "data_offsets": (tensor.begin, tensor.end),
        }  # fmt: skip
        sharding[tensor.key] = {"saved_offsets": tensor.saved_offsets}
    metadata = {"format": "pt", SHARDING_KEY: msgspec.json.encode(sharding).decode()}
    return msgspec.json.encode({"__metadata__": metadata, **header})


class _HeaderItem(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def header_length(prefix: bytes, file_bytes: int) -> int:
    """Length in bytes of the JSON header after its prefix, checked against the file's size."""
    if len(prefix) < LENGTH_BYTES:
        raise CorruptObjectError(f"not a safetensors file: only {file_bytes} bytes long")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > HEADER_BYTES_MAX or LENGTH_BYTES + length > file_bytes:
        raise CorruptObjectError(f"not a safetensors file: its header claims {length} bytes of {file_bytes}")
    return length


def parse_header(text: bytes, data_bytes: int) -> tuple[list[Tensor], dict[str, str]]:
    """The tensors (in file order) and metadata of a JSON header over ``data_bytes`` of data.

    Raises:
        CorruptObjectError: the header breaks a rule of the format.
    """
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__", b"{}"), type=dict[str, str])
        items = {key: msgspec.json.decode(value, type=_HeaderItem) for key, value in raw.items()}
        sharding = msgspec.json.decode(
            metadata.get(SHARDING_KEY, "{}"), type=dict[str, dict[str, tuple[int, ...]]]
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptObjectError(f"not a safetensors header: {error}") from None
    tensors = []
    for key, item in items.items():
        begin, end = item.data_offsets
        bits = _ITEM_BITS.get(item.dtype)
        if (
            bits is None
            or any(n < 0 for n in item.shape)
            or (end - begin) * 8 != math.prod(item.shape) * bits
        ):
            raise CorruptObjectError(f"not a safetensors header: {key[:200]!r} does not fill its byte range")
        offsets = sharding.get(key, {}).get("saved_offsets", (0,) * len(item.shape))
        tensors.append(Tensor(key, item.dtype, item.shape, begin, end, offsets))
    tensors.sort(key=lambda t: (t.begin, t.end))
    position = 0
    for tensor in tensors:
        if tensor.begin != position:
            raise CorruptObjectError(
                f"not a safetensors header: a hole or overlap before {tensor.key[:200]!r}"
            )
        position = tensor.end
    if position != data_bytes:
        raise CorruptObjectError(f"not a safetensors header: it covers {position} of {data_bytes} data bytes")
    return tensors, metadata
