"""Safetensors files of bounded size and the index over them, as Hugging Face lays models out. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from flashpoint.dtypes import dtype_of
from flashpoint.errors import FlashpointError

INDEX_NAME: Final = "model.safetensors.index.json"
_ALIGN_BYTES: Final = 8  # of the header, as the format wants


class Item(NamedTuple):
    """One tensor to export: ``source`` is its name in the version, ``name`` that in the export."""

    name: str
    source: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


class File(NamedTuple):
    """One safetensors file: its header, then its items, in this order and without a gap."""

    name: str
    header: bytes
    items: tuple[Item, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(item.nbytes for item in self.items)


def plan_files(items: Sequence[Item], *, max_shard_bytes: int) -> list[File]:
    """Files of at most ``max_shard_bytes`` each, but for a tensor that is larger by itself.

    Raises:
        FlashpointError: there is no tensor, two have one name, or one a dtype that safetensors does not know.
    """
    if not items:
        raise FlashpointError("there is no tensor to export")
    names = [item.name for item in items]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FlashpointError(f"two tensors would be exported as {twice[:200]!r}: change the renaming")
    groups: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if groups[-1] and size + item.nbytes > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.nbytes
    total = len(groups)
    return [
        _file("model.safetensors" if total == 1 else f"model-{n:05d}-of-{total:05d}.safetensors", group)
        for n, group in enumerate(groups, 1)
    ]


def index_of(files: Sequence[File]) -> bytes:
    """The index over several files, as Transformers reads it."""
    items = [(item, file.name) for file in files for item in file.items]
    total = sum(item.nbytes for item, _ in items)
    weight_map = {item.name: name for item, name in sorted(items)}
    text = msgspec.json.encode({"metadata": {"total_size": total}, "weight_map": weight_map})
    return msgspec.json.format(text, indent=2) + b"\n"


def _file(name: str, items: Iterable[Item]) -> File:
    # The widest first, so that each begins on a multiple of its own width.
    ordered = sorted(items, key=lambda item: -dtype_of(item.dtype).itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for item in ordered:
        code = dtype_of(item.dtype).code
        if code is None:
            raise FlashpointError(
                f"{item.name[:200]!r} has dtype {item.dtype}, for which safetensors has no code"
            )
        header[item.name] = {
            "dtype": code, "shape": item.shape, "data_offsets": (position, position + item.nbytes),
        }  # fmt: skip
        position += item.nbytes
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGN_BYTES)
    return File(name, len(text).to_bytes(8, "little") + text, tuple(ordered))
