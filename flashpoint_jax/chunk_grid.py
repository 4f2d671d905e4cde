"""Which regular grid has chunks that are ranges of the shards an array is stored in. Pure geometry, in elements.

Zarr cuts an array by a regular grid and stores each chunk in C order, whole, even where it reaches beyond the
array. A chunk that is a range of a shard (itself in C order) is one element thick in the first dimensions, divides
one dimension, and spans the shard in the rest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Final, NamedTuple

from flashpoint.boxes import Box, Index

CHUNKS_PER_SHARD_MAX: Final = 1024


class GridError(ValueError):
    """No grid will do; the message says why."""


class Chunk(NamedTuple):
    """One chunk: a range of a shard.

    Attributes:
        at: its index in the grid.
        box: number of the shard.
        begin: first element, within the shard.
        stored: elements that the shard has of it; the array's end cuts off the rest.
    """

    at: Index
    box: int
    begin: int
    stored: int


class Grid(NamedTuple):
    """A grid of chunks of one ``shape``, each ``size`` elements, that together cover the array once."""

    shape: Index
    size: int
    chunks: list[Chunk]


def grids(shape: Index, boxes: tuple[Box, ...]) -> Iterator[Grid]:
    """Every way to cut these shards of an array, none of them without elements, the coarsest first.

    Where the array's end cuts a grid's last chunks short, the next one has whole chunks only, if it can.

    Raises:
        GridError: the shards overlap, or do not cover the array, or there are too many chunks in the next grid.
    """
    if not boxes:
        raise GridError("its shards do not cover it")
    for dim in range(len(shape)):
        for short in (True, False):
            chunk = _chunk_shape(shape, boxes, dim, short)
            if chunk is not None:
                yield Grid(chunk, math.prod(chunk), _chunks(shape, boxes, chunk, dim))


def _chunk_shape(shape: Index, boxes: tuple[Box, ...], dim: int, short: bool) -> Index | None:
    """The largest chunk that is 1 thick before ``dim``, divides it, and spans each box behind it."""
    behind, divisor = boxes[0].shape[dim + 1 :], 0
    for start, size in boxes:
        if size[dim + 1 :] != behind or any(s % n for s, n in zip(start[dim + 1 :], behind, strict=True)):
            return None
        divisor = math.gcd(divisor, start[dim])
        end = start[dim] + size[dim]
        if not (short and end == shape[dim]):
            divisor = math.gcd(divisor, end)
    return (*(1 for _ in range(dim)), divisor or shape[dim], *behind)


def _chunks(shape: Index, boxes: tuple[Box, ...], chunk: Index, dim: int) -> list[Chunk]:
    found: list[Chunk] = []
    for number, (start, size) in enumerate(boxes):
        row = math.prod(size[dim + 1 :])  # elements of one step in `dim`
        first = tuple(s // c for s, c in zip(start, chunk, strict=True))
        counts = [*size[:dim], -(-size[dim] // chunk[dim])]
        if math.prod(counts) > CHUNKS_PER_SHARD_MAX:
            raise GridError(f"its shards would be cut into more than {CHUNKS_PER_SHARD_MAX} chunks each")
        for i, steps in enumerate(itertools.product(*map(range, counts))):
            outer, inner = divmod(i, counts[-1])
            at = (*(f + s for f, s in zip(first, steps, strict=False)), *first[dim + 1 :])
            begin = (outer * size[dim] + inner * chunk[dim]) * row
            found.append(Chunk(at, number, begin, min(chunk[dim], size[dim] - inner * chunk[dim]) * row))
    if len({one.at for one in found}) < len(found):
        raise GridError("its shards overlap")
    if len(found) != math.prod(-(-n // c) for n, c in zip(shape, chunk, strict=True)):
        raise GridError("its shards do not cover it")
    return found
