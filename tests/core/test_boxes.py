"""Boxes: what they share, and whether together they leave a hole."""

import itertools
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashpoint.boxes import Box, covers, inverse, overlap, slabs, untransposed

EXTENT = 5


@st.composite
def boxes(draw: st.DrawFn, ndim: int) -> Box:
    start = tuple(draw(st.integers(0, EXTENT)) for _ in range(ndim))
    return Box(start, tuple(draw(st.integers(0, EXTENT - s)) for s in start))


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(s, s + n) for s, n in zip(box.start, box.shape, strict=True))))


@given(st.integers(0, 3).flatmap(lambda n: st.tuples(boxes(n), boxes(n))))
def test_an_overlap_holds_exactly_the_cells_that_both_boxes_have(pair):
    shared = overlap(*pair)
    assert (cells(shared) if shared else set()) == cells(pair[0]) & cells(pair[1])


@given(st.integers(0, 4).flatmap(lambda n: st.tuples(boxes(n), st.permutations(range(n)))))
def test_a_box_of_a_transposed_array_is_found_in_the_array_as_it_was(case):
    box, axes = case
    stored = np.arange(EXTENT ** len(axes)).reshape((EXTENT,) * len(axes))
    turned = stored.transpose(axes)
    there = untransposed(box, axes)
    assert np.array_equal(cut(stored, there).transpose(axes), cut(turned, box))
    assert np.array_equal(turned.transpose(inverse(axes)), stored)


def cut(array, box):
    return array[tuple(slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True))]


@given(st.lists(st.integers(0, 5), max_size=4), st.integers(1, 200))
def test_slabs_are_the_whole_array_in_order_and_none_is_too_large(shape, elements_max):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    found = list(slabs(tuple(shape), elements_max))
    assert [element for box in found for element in cut(array, box).flat] == list(array.flat)
    assert all(0 < box.size <= elements_max for box in found)
    assert len(found) <= 1 or array.size > elements_max


@given(st.integers(0, 3).flatmap(lambda n: st.tuples(boxes(n), st.lists(boxes(n), max_size=6))))
def test_parts_cover_a_box_if_every_cell_of_it_is_in_one_of_them(case):
    box, parts = case
    assert covers(box, parts) == (cells(box) <= set().union(*map(cells, parts)))


def test_overlapping_parts_do_not_hide_a_hole_by_their_volume():
    assert not covers(Box((0,), (4,)), [Box((0,), (2,)), Box((1,), (2,))])
    assert covers(Box((0,), (4,)), [Box((0,), (3,)), Box((1,), (3,))])


def test_a_thousand_shards_are_judged_at_once():
    rows = [Box((i, 0), (1, 64)) for i in range(1000)]
    assert covers(Box.whole((1000, 64)), rows)
    assert not covers(Box.whole((1000, 64)), rows[:-1])
    assert np.prod(Box.whole((1000, 64)).shape) == Box.whole((1000, 64)).size


@given(st.data())
def test_slabs_cover_a_box_if_their_intervals_do(data):
    box = data.draw(boxes(3))
    dim = data.draw(st.integers(0, 2))
    spans = data.draw(st.lists(st.tuples(st.integers(0, EXTENT), st.integers(0, EXTENT)), max_size=5))
    slabs = [
        Box(
            (*box.start[:dim], min(span), *box.start[dim + 1 :]),
            (*box.shape[:dim], max(span) - min(span), *box.shape[dim + 1 :]),
        )
        for span in spans
    ]
    assert covers(box, slabs) == (cells(box) <= set().union(*map(cells, slabs)))


@pytest.mark.parametrize("ndim", [4, 8, 30])
def test_parts_that_cut_a_box_into_too_many_cells_are_no_cover_and_take_no_memory(ndim):
    n = 100
    hostile = [Box((i,) * ndim, (n - 1,) * ndim) for i in range(n)]
    tracemalloc.start()
    assert not covers(Box.whole((n,) * ndim), hostile)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20


def test_parts_that_overlap_each_other_over_and_over_end_in_time():
    ndim, n = 3, 200
    hostile = [Box((i % 2, i // 2 % 2, 0), (n - 1, n - 1, i + 1)) for i in range(n)]
    began = time.monotonic()
    assert not covers(Box.whole((n,) * ndim), hostile * 1000)
    assert time.monotonic() - began < 30
