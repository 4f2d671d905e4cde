"""Grids of chunks that are ranges of shards: pure geometry, checked by putting arrays together from them."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashpoint.boxes import Box
from flashpoint_jax.chunk_grid import CHUNKS_PER_SHARD_MAX, Grid, GridError, grids


def boxes_of(parts: list[tuple[int, ...]]) -> tuple[Box, ...]:
    """The shards of an array whose dimensions are cut into parts of these sizes."""
    starts = [[sum(sizes[:i]) for i in range(len(sizes))] for sizes in parts]
    cells = itertools.product(*(zip(s, sizes, strict=True) for s, sizes in zip(starts, parts, strict=True)))
    return tuple(Box(tuple(s for s, _ in cell), tuple(n for _, n in cell)) for cell in cells)


def put_together(shape: tuple[int, ...], boxes: tuple[Box, ...], grid: Grid, array: np.ndarray) -> np.ndarray:
    """The array as zarr would read it: every chunk whole, what lies beyond the array thrown away."""
    counts = [-(-n // c) for n, c in zip(shape, grid.shape, strict=True)]
    read = np.full([n * c for n, c in zip(counts, grid.shape, strict=True)], -1)
    for at, number, begin, stored in grid.chunks:
        start, size = boxes[number]
        shard = array[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))].ravel()
        assert 0 < stored <= grid.size
        behind = np.full(grid.size, -2)  # whatever lies there
        values = np.concatenate((shard[begin:], behind))[: grid.size]
        place = tuple(slice(a * c, a * c + c) for a, c in zip(at, grid.shape, strict=True))
        assert (read[place] == -1).all()
        read[place] = values.reshape(grid.shape)
    return read[tuple(map(slice, shape))]


PARTS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3)


@given(PARTS)
def test_an_array_is_put_together_from_any_of_its_grids(parts):
    shape, boxes = tuple(map(sum, parts)), boxes_of(parts)
    array = np.arange(math.prod(shape)).reshape(shape)
    found = list(grids(shape, boxes))
    assert found
    for grid in found:
        assert (put_together(shape, boxes, grid, array) == array).all()


@given(PARTS)
def test_the_coarsest_grid_comes_first(parts):
    sizes = [grid.size for grid in grids(tuple(map(sum, parts)), boxes_of(parts))]
    assert sizes == sorted(sizes, reverse=True)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=3))
def test_an_even_sharding_has_one_chunk_for_each_shard(even):
    parts = [(size,) * count for size, count in even]
    grid = next(grids(tuple(map(sum, parts)), boxes_of(parts)))
    assert len(grid.chunks) == math.prod(count for _, count in even)
    assert grid.shape == tuple(size for size, _ in even)
    assert all(chunk.stored == grid.size for chunk in grid.chunks)


@given(PARTS, st.data())
def test_shards_with_a_hole_or_one_too_many_have_no_grid(parts, data):
    shape, boxes = tuple(map(sum, parts)), boxes_of(parts)
    left_out = data.draw(st.integers(0, len(boxes) - 1))
    with pytest.raises(GridError, match="do not cover it"):
        list(grids(shape, boxes[:left_out] + boxes[left_out + 1 :]))
    with pytest.raises(GridError, match="overlap"):
        list(grids(shape, (*boxes, boxes[left_out])))


def test_too_many_chunks_are_an_error_before_they_are_made():
    n = 10**12
    assert n > CHUNKS_PER_SHARD_MAX
    with pytest.raises(GridError, match="more than"):
        next(grids((2 * n + 2,), (Box((0,), (n,)), Box((n,), (n + 1,)), Box((2 * n + 1,), (1,)))))
