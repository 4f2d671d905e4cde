import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint.errors import MismatchError
from flashpoint.layout import Entry, plan_layout
from flashpoint.manifest import (
    FORMAT,
    VERSION,
    CommitRecord,
    Manifest,
    ObjectRecord,
    Value,
    encode_values,
    section_digest,
)
from flashpoint.recovery import (
    differences,
    left_out,
    left_out_sentences,
    mismatch,
    plan_reads,
    preferred_entries,
    values_source,
)


def manifest_of(*ranks: list[Entry], values: tuple[list[Value], ...] = ()) -> Manifest:
    """The manifest of a world whose ranks hold one object each, of these entries."""
    layouts = [plan_layout(entries) for entries in ranks]
    sections = [encode_values(own) for own in values]
    record = CommitRecord(
        format=FORMAT,
        version=VERSION,
        step=7,
        epoch=0,
        world_size=len(ranks),
        objects=tuple(
            ObjectRecord(f"rank{rank:05d}-0.safetensors", layout.nbytes, layout.digest, 4096, b"")
            for rank, layout in enumerate(layouts)
        ),
        values=tuple(section_digest(section) for section in sections),
    )
    lines = {layout.digest: layout.encoded for layout in layouts}
    lines.update((section_digest(section), section) for section in sections)
    return Manifest(record, lines, "")


def whole(name: str = "w", shape=(8,), dtype: str = "float32", codec: str = "") -> Entry:
    return Entry(name, dtype, shape, codec=codec)


def shard(begin: int, end: int, name: str = "w", size: int = 8) -> Entry:
    return Entry(name, "float32", (end - begin,), (begin,), (size,))


def ranks_of(manifest: Manifest, name: str, rank: int) -> list[int]:
    return [record.id.rank for record, _ in preferred_entries(manifest, name, rank)]


# ---- which copy -----------------------------------------------------------------------------------


def test_a_rank_takes_its_own_copy_of_what_every_rank_stored_whole():
    manifest = manifest_of([whole()], [whole()], [whole()])
    assert [ranks_of(manifest, "w", rank) for rank in range(4)] == [[0], [1], [2], [0]]


def test_each_shard_is_read_once_from_the_own_object_first():
    manifest = manifest_of([shard(0, 4)], [shard(0, 4)], [shard(4, 8)], [shard(4, 8)])
    assert [sorted(ranks_of(manifest, "w", rank)) for rank in range(4)] == [[0, 2], [1, 2], [0, 2], [0, 3]]


def test_a_whole_copy_elsewhere_is_better_than_an_own_shard():
    manifest = manifest_of([shard(0, 4)], [whole()])
    assert ranks_of(manifest, "w", 0) == [1]


def test_an_unknown_name_has_no_entries():
    assert preferred_entries(manifest_of([whole()]), "x", 0) == []


def test_plain_values_come_from_the_own_rank_else_from_the_lowest():
    manifest = manifest_of([], [], [], values=([Value("a", 1)], [Value("a", 2), Value("b", 3)], []))
    assert values_source(manifest, 1) == {"a": 1, "b": 1}
    assert values_source(manifest, 0) == {"a": 0, "b": 1}
    assert values_source(manifest, 2) == values_source(manifest, 9) == {"a": 0, "b": 1}


# ---- reads ----------------------------------------------------------------------------------------


@st.composite
def boxes(draw, shape):
    """A grid of boxes that fills an array of this shape."""
    found = [((), ())]
    for n in shape:
        edges = [0, *sorted(draw(st.sets(st.integers(1, max(n - 1, 1)), max_size=3)) - {n}), n]
        found = [((*start, a), (*size, b - a)) for start, size in found for a, b in itertools.pairwise(edges)]
    return found


@given(st.lists(st.integers(1, 6), max_size=3), st.data())
@settings(max_examples=100)
def test_any_sharding_is_read_as_any_other(shape, data):
    shape = tuple(shape)
    stored = data.draw(boxes(shape))
    wanted = data.draw(boxes(shape))
    world = data.draw(st.integers(1, 3))
    truth = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    entries = [Entry("w", "int64", size, start, shape) for start, size in stored]
    manifest = manifest_of(*(entries[rank::world] for rank in range(world)))
    for rank in range(world + 1):
        targets = [Entry("w", "int64", size, start, shape) for start, size in wanted]
        filled = [np.full(target.shape, -1) for target in targets]
        for read in plan_reads(manifest, targets, rank):
            entry = manifest.entry(read.record, read.entry)
            source = truth[tuple(slice(o, o + n) for o, n in zip(entry.origin, entry.shape, strict=True))]
            box = tuple(slice(s, s + n) for s, n in zip(read.source_start, read.lengths, strict=True))
            place = tuple(slice(s, s + n) for s, n in zip(read.target_start, read.lengths, strict=True))
            filled[read.target][place] = source[box]
        for target, array in zip(targets, filled, strict=True):
            box = tuple(slice(o, o + n) for o, n in zip(target.origin, target.shape, strict=True))
            np.testing.assert_array_equal(array, truth[box])


def test_a_scalar_and_an_empty_tensor_are_read_too():
    manifest = manifest_of([whole("s", ()), whole("e", (0, 3))])
    reads = plan_reads(manifest, [whole("s", ()), whole("e", (0, 3))], 0)
    assert [(read.target, read.lengths) for read in reads] == [(0, ())]


def test_a_hole_in_what_was_stored_is_an_error():
    manifest = manifest_of([shard(0, 4)], [shard(5, 8)])
    with pytest.raises(MismatchError, match=r"step 7 does not hold all of 'w' that rank 1 needs"):
        plan_reads(manifest, [whole()], 1)


@pytest.mark.parametrize("target", [whole("x"), whole("x", (0,)), whole("x", ())])
def test_a_target_that_was_never_stored_is_an_error_even_if_it_is_empty(target):
    with pytest.raises(MismatchError, match="'x'"):
        plan_reads(manifest_of([whole()]), [target], 0)


@pytest.mark.parametrize("shape", [(), (4,), (16,), (8, 1), (2, 4), (0,)])
def test_a_target_of_another_shape_is_an_error_that_shows_both(shape):
    with pytest.raises(MismatchError, match=r"'w'.*\[8\]"):
        plan_reads(manifest_of([whole()]), [whole("w", shape)], 0)


# ---- differences ----------------------------------------------------------------------------------

STORED = manifest_of(
    [
        whole("w"),
        whole("m", (2, 2), "bfloat16"),
        whole("object", (100,), "uint8", codec="torch"),
        shard(0, 4, "s"),
    ],
    [shard(4, 8, "s")],
    values=([Value("step", 7)], [Value("seed", 1)]),
)
FITTING = [whole("w"), whole("m", (2, 2), "bfloat16"), shard(2, 7, "s")]


def test_a_state_that_fits_has_no_differences():
    assert differences(STORED, FITTING, ["step", "object", "seed"], 0) == []


def test_a_part_of_a_state_fits_and_what_it_leaves_out_is_told():
    assert differences(STORED, FITTING[:1], [], 0) == []
    assert left_out(STORED, ["w", "new"], 0) == ["m", "object", "s", "seed", "step"]
    assert left_out(STORED, ["m", "object", "s", "seed", "step", "w"], 1) == []
    assert left_out_sentences(["m"]) == ["'m': in the checkpoint, not in the state"]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (whole("new"), "'new': not in the checkpoint"),
        (whole("w", (9,)), "'w': shape [8] there, [9] here"),
        (shard(0, 4, "w", 16), "'w': shape [8] there, [16] here"),
        (whole("w", (8,), "float16"), "'w': dtype float32 there, float16 here"),
        (whole("step"), "'step': a plain value there, a tensor here"),
        (whole("object", (9,), "uint8"), "'object': a Python object there, a tensor here"),
    ],
)
def test_each_difference_of_a_tensor_is_a_sentence(target, words):
    assert differences(STORED, [target], [], 0) == [words]


@pytest.mark.parametrize(
    ("name", "words"),
    [("new", "'new': not in the checkpoint"), ("w", "'w': a tensor there, a plain value here")],
)
def test_each_difference_of_a_plain_value_is_a_sentence(name, words):
    assert differences(STORED, [], [name], 0) == [words]


def test_the_error_lists_ten_and_counts_the_rest():
    found = [f"'w{i}': not in the checkpoint" for i in range(14)]
    text = str(mismatch(STORED, found, 3))
    assert "rank 3" in text
    assert "step 7" in text
    assert "in 14 places" in text
    assert "'w9'" in text
    assert "'w10'" not in text
    assert "4 more" in text
