import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint.dtypes import dtype_of
from flashpoint.layout import Entry, plan_layout
from flashpoint.manifest import FORMAT, VERSION, CommitRecord, Manifest, ObjectRecord
from flashpoint.recovery import Read, plan_reads
from flashpoint.retrieval import Fetch, Need, missing_objects, needs_of_reads, plan_fetches

KIB = 1 << 10


def manifest_of(*ranks: list[Entry], chunk_bytes: int = 4096) -> Manifest:
    """The manifest of a world whose ranks hold one object each, of these entries."""
    layouts = [plan_layout(entries) for entries in ranks]
    objects = tuple(
        ObjectRecord(f"rank{rank:05d}-0.safetensors", layout.nbytes, layout.digest, chunk_bytes, b"")
        for rank, layout in enumerate(layouts)
    )
    record = CommitRecord(
        format=FORMAT, version=VERSION, step=7, epoch=0, world_size=len(ranks), objects=objects
    )
    return Manifest(record, {layout.digest: layout.encoded for layout in layouts}, "")


def object_of(kib: float = 40, *, rank: int = 0, chunk_kib: int = 4) -> ObjectRecord:
    return ObjectRecord(f"rank{rank:05d}-0.safetensors", int(kib * KIB), "", chunk_kib * KIB, b"")


def need(begin_kib: float, end_kib: float, record: ObjectRecord | None = None) -> Need:
    return Need(record or object_of(), int(begin_kib * KIB), int(end_kib * KIB))


def fetch_one(*needs: Need, holders=None, node: int = 0, domains=None) -> Fetch:
    """The only fetch of a node that holds nothing, from two others that hold everything."""
    names = {one.record.name for one in needs}
    (found,) = plan_fetches(needs, holders or {1: names, 2: names}, node=node, domains=domains or {})
    return found


# ---- which bytes ----------------------------------------------------------------------------------


@st.composite
def entries_and_boxes(draw):
    """An entry of few elements, and a box in it, perhaps empty."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    lengths = tuple(draw(st.integers(0, n - s)) for s, n in zip(start, shape, strict=True))
    return (
        Entry("w", draw(st.sampled_from(["float32", "int8", "bfloat16", "float64"])), shape),
        start,
        lengths,
    )


@given(entries_and_boxes())
@settings(max_examples=200)
def test_a_box_needs_the_bytes_from_its_first_to_its_last(case):
    entry, start, lengths = case
    manifest = manifest_of([Entry("other", "uint8", (100,)), entry])
    (record,) = manifest.objects
    numbers = np.arange(np.prod(entry.shape, dtype=int)).reshape(entry.shape)
    inside = numbers[tuple(slice(s, s + n) for s, n in zip(start, lengths, strict=True))]

    found = needs_of_reads(manifest, [Read(0, record, 1, start, start, lengths)])

    if inside.size == 0:
        assert found == []
    else:
        begin, itemsize = manifest.layout(record).begins[1], dtype_of(entry.dtype).itemsize
        end = begin + (int(inside.max()) + 1) * itemsize
        assert found == [Need(record, begin + int(inside.min()) * itemsize, end)]


@st.composite
def plans(draw):
    """A sharded array of rows and columns, and the reads of one rank of another sharding."""
    shape = tuple(draw(st.integers(1, 40)) for _ in range(2))
    cuts = [[0, *sorted(draw(st.sets(st.integers(1, n), max_size=3)) - {n}), n] for n in shape]
    stored = [
        Entry("w", "int64", (b - a, d - c), (a, c), shape)
        for (a, b), (c, d) in itertools.product(*map(itertools.pairwise, cuts))
    ]
    world = draw(st.integers(1, 4))
    chunk_bytes = draw(st.sampled_from([64, 512, 4096, 1 << 20]))
    manifest = manifest_of(*(stored[rank::world] for rank in range(world)), chunk_bytes=chunk_bytes)
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(draw(st.integers(1, n - s)) for s, n in zip(start, shape, strict=True))
    reads = plan_reads(manifest, [Entry("w", "int64", size, start, shape)], 0)
    return manifest, reads


def bytes_read(manifest: Manifest, reads: list[Read]) -> dict[str, set[int]]:
    """Object name -> the bytes of it that lie in the boxes read, one by one."""
    found: dict[str, set[int]] = {}
    for read in reads:
        entry, begin = (
            manifest.entry(read.record, read.entry),
            manifest.layout(read.record).begins[read.entry],
        )
        itemsize = dtype_of(entry.dtype).itemsize
        numbers = np.arange(begin, begin + entry.nbytes).reshape(*entry.shape, itemsize)
        box = tuple(slice(s, s + n) for s, n in zip(read.source_start, read.lengths, strict=True))
        found.setdefault(read.record.name, set()).update(numbers[box].ravel().tolist())
    return found


@given(plans())
def test_needs_are_in_order_apart_from_each_other_and_hold_all_that_is_read(plan):
    manifest, reads = plan
    needs = needs_of_reads(manifest, reads)
    assert needs == needs_of_reads(manifest, reads[::-1])
    for one, other in itertools.pairwise(needs):
        assert (one.record.name, one.end) < (other.record.name, other.begin)
    needed: dict[str, set[int]] = {}
    for record, begin, end in needs:
        needed.setdefault(record.name, set()).update(range(begin, end))
    wanted = bytes_read(manifest, reads)
    assert needed.keys() == wanted.keys()
    for name, numbers in wanted.items():
        assert numbers <= needed[name]
        assert (min(needed[name]), max(needed[name])) == (min(numbers), max(numbers))


def test_an_entry_without_elements_needs_nothing():
    manifest = manifest_of([Entry("s", "float32", ()), Entry("e", "float32", (0, 3))])
    (record,) = manifest.objects
    layout = manifest.layout(record)
    reads = [Read(0, record, 0, (), (), ()), Read(1, record, 1, (0, 0), (0, 0), (0, 3))]
    assert needs_of_reads(manifest, reads) == [Need(record, layout.begins[0], layout.begins[0] + 4)]


# ---- which chunks ---------------------------------------------------------------------------------


@given(plans(), st.data())
@settings(max_examples=100)
def test_every_byte_that_is_needed_is_held_or_fetched_and_no_other_chunk(plan, data):
    manifest, reads = plan
    names = [record.name for record in manifest.objects]
    held, keeps = data.draw(st.sets(st.sampled_from(names))), data.draw(st.sets(st.sampled_from(names)))
    needs = needs_of_reads(manifest, reads)
    fetches = plan_fetches(needs, {0: held, 1: names}, node=0, domains={}, keeps=keeps)
    fetched = {fetch.record.name: fetch for fetch in fetches}
    wanted = bytes_read(manifest, reads)
    assert fetched.keys() == wanted.keys() - held
    for name, fetch in fetched.items():
        chunk_bytes, nbytes = fetch.record.chunk_bytes, fetch.record.nbytes
        spans = [(one.begin, one.end) for one in needs if one.record.name == name]
        touched = {number // chunk_bytes for begin, end in spans for number in range(begin, end)}
        assert list(fetch.chunks) == sorted(set(fetch.chunks))
        assert set(fetch.chunks) >= {number // chunk_bytes for number in wanted[name]}
        if name in keeps:
            assert fetch.is_whole
        else:
            assert set(fetch.chunks) == touched
        assert fetch.is_whole == (set(fetch.chunks) == set(range(-(-nbytes // chunk_bytes))))


@pytest.mark.parametrize(
    ("needs", "chunks"),
    [
        ([need(0, 4)], [0]),
        ([need(0, 4.001)], [0, 1]),
        ([need(3.999, 4)], [0]),
        ([need(39, 40), need(1, 2)], [0, 9]),
        ([need(1, 2), need(3, 6), need(2, 3)], [0, 1]),
        ([need(0, 20)], [0, 1, 2, 3, 4]),
        ([need(0, 20), need(10, 20)], [0, 1, 2, 3, 4]),  # what is needed twice counts once
        ([need(0, 20), need(30, 30.001)], [0, 1, 2, 3, 4, 7]),
        ([need(0, 36)], range(9)),
        ([need(0, 36.001)], range(10)),
    ],
)
def test_only_the_chunks_that_are_touched_are_fetched(needs, chunks):
    fetch = fetch_one(*needs)
    assert fetch.chunks == tuple(chunks)
    assert fetch.is_whole == (len(chunks) == 10)


def test_what_the_node_is_to_hold_is_fetched_whole():
    kept, other = object_of(rank=1), object_of(rank=2)
    needs = [need(0, 4, kept), need(0, 4, other)]
    fetches = plan_fetches(needs, {1: [kept.name, other.name]}, node=0, domains={}, keeps=[kept.name])
    assert {fetch.record.name: fetch.is_whole for fetch in fetches} == {kept.name: True, other.name: False}


def test_the_last_chunk_may_be_short_and_an_object_of_one_chunk_is_always_whole():
    record = object_of(41)
    assert fetch_one(need(40.5, 41, record)).chunks == (10,)
    assert fetch_one(need(40.5, 41, record)).is_whole is False
    assert fetch_one(need(0, 0.001, object_of(4))).is_whole


def test_nothing_is_fetched_that_is_here_or_of_which_nothing_is_needed():
    record = object_of()
    assert plan_fetches([need(0, 40)], {0: [record.name], 1: [record.name]}, node=0, domains={}) == []
    assert plan_fetches([need(8, 8)], {1: [record.name]}, node=0, domains={}) == []


# ---- from whom ------------------------------------------------------------------------------------


def test_every_holder_is_a_source_and_the_nearest_come_first():
    record = object_of()
    holders = {index: [record.name] for index in range(1, 7)} | {7: ["rank00009-0.safetensors"], 8: []}
    domains = {0: "a", 1: "b", 2: "a", 3: "", 4: "b", 5: "a", 7: "a"}
    sources = fetch_one(need(0, 40), holders=holders, domains=domains).sources
    assert sorted(sources) == [1, 2, 3, 4, 5, 6]
    assert set(sources[:2]) == {2, 5}


def test_nodes_without_a_domain_are_not_near_each_other():
    record = object_of()
    holders = {index: [record.name] for index in (1, 2, 3)}
    for domains in ({}, {0: "", 1: "", 2: "a", 3: ""}):
        sources = {
            fetch_one(need(0, 40), holders=holders, node=n, domains=domains).sources for n in (0, 4, 5)
        }
        assert {first for first, *_ in sources} == {1, 2, 3}


@pytest.mark.parametrize("near", [False, True])
def test_nodes_that_need_the_same_object_ask_its_holders_evenly(near):
    record = object_of()
    holders = {index: [record.name] for index in (90, 91, 95)}
    domains = dict.fromkeys(range(100), "a") if near else {}
    asked = Counter(
        fetch_one(need(0, 40), holders=holders, node=node, domains=domains).sources[0] for node in range(30)
    )
    assert asked == {90: 10, 91: 10, 95: 10}


def test_a_node_that_needs_many_objects_asks_all_their_holders():
    records = [object_of(rank=rank) for rank in range(64)]
    names = {record.name for record in records}
    fetches = plan_fetches(
        [need(0, 40, record) for record in records], {2: names, 3: names, 4: names}, node=0, domains={}
    )
    asked = Counter(fetch.sources[0] for fetch in fetches)
    assert set(asked) == {2, 3, 4}
    assert max(asked.values()) < 2 * min(asked.values())


@given(st.permutations(range(1, 6)), st.integers(6, 9))
def test_the_order_in_which_holders_are_told_does_not_matter(order, node):
    names = {object_of().name}
    told = dict.fromkeys(order, names)
    assert fetch_one(need(0, 40), holders=told, node=node) == fetch_one(
        need(0, 40), holders=dict(sorted(told.items())), node=node
    )


def test_an_object_that_nobody_holds_is_missing_and_has_no_source():
    manifest = manifest_of(*([Entry("w", "int8", (4,), (4 * rank,), (16,))] for rank in range(4)))
    names = [record.name for record in manifest.objects]
    holders = {0: {names[0]}, 1: [names[0], names[3]], 2: []}
    assert missing_objects(manifest, holders) == names[1:3]
    assert missing_objects(manifest, {}) == names
    assert missing_objects(manifest, {5: names}) == []
    needs = [Need(record, 0, record.nbytes) for record in manifest.objects]
    assert [fetch.sources for fetch in plan_fetches(needs, holders, node=0, domains={})] == [(), (), (1,)]
