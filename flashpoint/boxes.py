"""Boxes within arrays: where a shard lies, what two shards share, whether shards leave a hole. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

CELLS_MAX: Final = 10_000_000  # that `covers` looks at: a manifest may come from anywhere

Index = tuple[int, ...]


class Box(NamedTuple):
    """A rectangular part of an array; ``start`` and ``shape`` in elements, one for each dimension."""

    start: Index
    shape: Index

    @classmethod
    def whole(cls, shape: Index) -> Box:
        return cls((0,) * len(shape), shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def overlap(a: Box, b: Box) -> Box | None:
    """The part that both boxes share, in the array's own coordinates; None where they share nothing."""
    start = tuple(map(max, a.start, b.start))
    shape = tuple(
        min(s + m, t + n) - o for s, m, t, n, o in zip(a.start, a.shape, b.start, b.shape, start, strict=True)
    )
    return Box(start, shape) if all(n > 0 for n in shape) else None


def inverse(axes: Sequence[int]) -> Index:
    """The axes by which `numpy.transpose` undoes a transposition by ``axes``."""
    return tuple(sorted(range(len(axes)), key=axes.__getitem__))


def untransposed(box: Box, axes: Sequence[int]) -> Box:
    """Where a box of an array that was transposed by ``axes`` lies in the array as it was."""
    back = inverse(axes)
    return Box(tuple(box.start[i] for i in back), tuple(box.shape[i] for i in back))


def slabs(shape: Index, elements_max: int) -> Iterator[Box]:
    """Boxes of at most ``elements_max`` elements that are the whole array one after the other, in C order."""
    if 0 in shape:
        return
    cut = len(shape)  # dimensions from here on are taken whole
    rest = 1
    while cut and rest * shape[cut - 1] <= elements_max:
        cut -= 1
        rest *= shape[cut]
    if cut == 0:
        yield Box.whole(shape)
        return
    rows, behind = max(elements_max // rest, 1), shape[cut:]
    zeros, ones = (0,) * len(behind), (1,) * (cut - 1)
    for before in np.ndindex(shape[: cut - 1]):
        for row in range(0, shape[cut - 1], rows):
            yield Box((*before, row, *zeros), (*ones, min(rows, shape[cut - 1] - row), *behind))


def covers(box: Box, parts: Collection[Box]) -> bool:
    """Whether every element of ``box`` lies in one of ``parts``, which may overlap each other.

    Parts that divide one dimension are intervals. Otherwise the box is cut at the edges of all parts: a
    regular sharding has about as many cells as shards. Parts that cut it into more than `CELLS_MAX` are no
    sharding that anybody wrote, and count as leaving a hole.
    """
    if box.size == 0 or box in parts:
        return True
    found = _covers_along_one_dimension(box, parts)
    if found is not None:
        return found
    inside = [shared for part in parts if (shared := overlap(box, part)) is not None]
    if sum(part.size for part in inside) < box.size:
        return False
    edges = [
        sorted({edge for part in inside for edge in (part.start[dim], part.start[dim] + part.shape[dim])})
        for dim in range(len(box.shape))
    ]
    if any((cut[0], cut[-1]) != (s, s + n) for cut, s, n in zip(edges, box.start, box.shape, strict=True)):
        return False
    cells = [len(cut) - 1 for cut in edges]
    if math.prod(cells) > CELLS_MAX:
        return False
    cell_of = [{edge: i for i, edge in enumerate(cut)} for cut in edges]
    covered = np.zeros(cells, dtype=bool)
    budget = 2 * CELLS_MAX  # with parts that overlap each other, cells are seen more than once
    for part in inside:
        spans = [(of[s], of[s + n]) for of, s, n in zip(cell_of, part.start, part.shape, strict=True)]
        budget -= math.prod(end - begin for begin, end in spans)
        if budget < 0:
            return False
        covered[tuple(slice(*span) for span in spans)] = True
    return bool(covered.all())


def _covers_along_one_dimension(box: Box, parts: Collection[Box]) -> bool | None:
    """`covers`, where all parts are as wide as the box in every dimension but one; else None."""
    first = next(iter(parts), None)
    if first is None:
        return None
    cut = [
        dim
        for dim, (a, b) in enumerate(zip(zip(*box, strict=True), zip(*first, strict=True), strict=True))
        if a != b
    ]
    if len(cut) != 1:
        return None
    dim = cut[0]
    after = dim + 1
    before, behind = (box.start[:dim], box.shape[:dim]), (box.start[after:], box.shape[after:])
    spans = []
    for start, shape in parts:
        if (start[:dim], shape[:dim]) != before or (start[after:], shape[after:]) != behind:
            return None
        spans.append((start[dim], start[dim] + shape[dim]))
    position, last = box.start[dim], box.start[dim] + box.shape[dim]
    for begin, end in sorted(spans):
        if begin > position or position >= last:
            break
        position = max(position, end)
    return position >= last
