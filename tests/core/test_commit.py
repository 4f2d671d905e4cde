import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashpoint.commit import Vote, decide, failures_of, node_leaders, uncovered_arrays
from flashpoint.layout import Entry, plan_layout
from flashpoint.manifest import FORMAT, VERSION, ObjectRecord, decode, encode, encode_values, section_digest
from flashpoint.manifest import Value as PlainValue

LAYOUT = plan_layout([Entry("w", "float32", (4,))])


def record_of(rank: int) -> ObjectRecord:
    return ObjectRecord(f"rank{rank:05d}-0.safetensors", LAYOUT.nbytes, LAYOUT.digest, 4096, bytes(16))


def vote(rank: int, step: int = 7, node: str = "n0", **changes) -> Vote:
    return msgspec.structs.replace(Vote(step=step, node=node, objects=(record_of(rank),)), **changes)


def votes(world_size: int, **changes) -> dict[int, Vote]:
    return {rank: vote(rank, **changes) for rank in range(world_size)}


def failures(given_votes, world_size=3) -> dict[int, str]:
    return failures_of(given_votes, step=7, world_size=world_size, timeout_s=2.5)


# ---- failures_of ----------------------------------------------------------------------------------


def test_a_unanimous_vote_has_no_failures():
    assert failures(votes(3)) == {}


def test_a_rank_that_does_not_come_is_named_with_the_deadline():
    given_votes = votes(3)
    del given_votes[1]
    found = failures(given_votes)
    assert list(found) == [1]
    assert "2.5 s" in found[1]


def test_every_rank_that_failed_is_named_with_its_own_reason():
    given_votes = votes(3) | {0: vote(0, error="no space"), 2: vote(2, error="tmpfs is gone")}
    assert failures(given_votes) == {0: "no space", 2: "tmpfs is gone"}


def test_a_rank_at_another_step_is_named_with_both_steps():
    found = failures(votes(3) | {2: vote(2, step=8)})
    assert list(found) == [2]
    assert "8" in found[2]
    assert "7" in found[2]


def test_a_rank_whose_objects_carry_another_ranks_name_is_refused():
    # Two processes that believe to be the same rank would otherwise write over each other's objects.
    found = failures(votes(3) | {2: vote(1)})
    assert list(found) == [2]
    assert "rank00001-0" in found[2]


# ---- decide ---------------------------------------------------------------------------------------


def decision(given_votes, uncovered=()):
    return decide(given_votes, step=7, epoch=2, writer="w", created_unix_s=1.0, uncovered=uncovered)


def test_a_decision_is_a_record_of_all_ranks_objects_in_order():
    record = decision(votes(3)).record
    assert record is not None
    assert (record.format, record.version, record.step, record.epoch) == (FORMAT, VERSION, 7, 2)
    assert (record.world_size, record.writer, record.created_unix_s) == (3, "w", 1.0)
    assert [obj.id.rank for obj in record.objects] == [0, 1, 2]


def test_what_is_decided_can_be_encoded_and_read_back():
    values = encode_values([PlainValue("step", 7)])
    found = decision(votes(3) | {1: vote(1, values=values)})
    lines = {LAYOUT.digest: LAYOUT.encoded, section_digest(values): values}
    manifest = decode(encode(found.record, lines))
    assert manifest.values_of(1)["step"].value == 7
    assert manifest.values_of(0) == {}


def test_equal_values_of_ranks_are_sent_once():
    shared, own = encode_values([PlainValue("a", 1)]), encode_values([PlainValue("a", 2)])
    found = decision({rank: vote(rank, values=own if rank == 3 else shared) for rank in range(5)})
    assert found.values == (shared, own)
    assert found.record.values == tuple(section_digest(own if rank == 3 else shared) for rank in range(5))


def test_without_any_values_the_record_carries_none():
    assert decision(votes(2)).record.values == ()


def test_uncovered_arrays_abort_and_are_named():
    found = decision(votes(2), uncovered=[f"w{i}" for i in range(12)])
    assert found.record is None
    assert "12 arrays" in found.failures[0]
    assert "'w0'" in found.failures[0]


# ---- node leaders ---------------------------------------------------------------------------------


def test_the_lowest_rank_of_each_node_writes_its_manifest():
    nodes = ["a", "b", "a", "c", "b", "c"]
    assert node_leaders({rank: vote(rank, node=node) for rank, node in enumerate(nodes)}) == (0, 1, 3)
    assert node_leaders(votes(5)) == (0,)
    assert node_leaders(dict(reversed(votes(5).items()))) == (0,)


# ---- coverage -------------------------------------------------------------------------------------


def layouts_of(*shards: Entry, world_size: int = 2):
    return [plan_layout(shards[rank::world_size]) for rank in range(world_size)]


def shard(begin: int, end: int, *, whole: int = 8, name: str = "w", dtype: str = "float32") -> Entry:
    return Entry(name, dtype, (end - begin,), (begin,), (whole,))


def test_shards_that_fill_their_array_cover_it():
    assert uncovered_arrays(layouts_of(shard(0, 4), shard(4, 8))) == []


def test_replicas_of_a_shard_count_once():
    same = [plan_layout([shard(0, 4)]), plan_layout([shard(0, 4)])]
    assert uncovered_arrays(same) == ["w"]
    assert uncovered_arrays([*same, plan_layout([shard(4, 8)])]) == []


def test_a_hole_names_its_array():
    layouts = layouts_of(shard(0, 4), shard(4, 7), shard(0, 4, name="v"), shard(4, 8, name="v"))
    assert uncovered_arrays(layouts) == ["w"]


@pytest.mark.parametrize(
    "shards",
    [
        (shard(0, 4), shard(4, 6, whole=6)),  # the ranks do not agree on the shape
        (shard(0, 4), shard(4, 8, dtype="int32")),  # nor on the dtype
    ],
)
def test_shards_that_disagree_are_not_one_array(shards):
    assert uncovered_arrays(layouts_of(*shards)) == ["w"]


def test_arrays_that_are_cut_alike_are_judged_each_by_its_own_parts():
    whole_ones = [part for name in "abc" for part in (shard(0, 4, name=name), shard(4, 8, name=name))]
    broken = [shard(0, 4, name="d"), shard(5, 8, name="d"), shard(0, 4, name="e"), shard(5, 8, name="e")]
    short = [shard(0, 4, name="f", whole=9), shard(4, 8, name="f", whole=9)]
    assert uncovered_arrays(layouts_of(*whole_ones, *broken, *short)) == ["d", "e", "f"]


def test_a_whole_copy_on_any_rank_covers_the_array():
    layouts = layouts_of(shard(0, 4), Entry("w", "float32", (8,)))
    assert uncovered_arrays(layouts) == []


def test_whole_arrays_scalars_and_empty_ones_are_covered():
    whole = [Entry("s", "float32", ()), Entry("e", "float32", (0, 3)), Entry("w", "float32", (2, 2))]
    empty = [Entry("z", "float32", (0, 2), (0, 0), (0, 4)), Entry("z", "float32", (0, 2), (0, 2), (0, 4))]
    assert uncovered_arrays(layouts_of(*whole, *empty)) == []


@given(st.lists(st.integers(1, 5), min_size=2, max_size=3), st.data())
def test_a_grid_of_shards_covers_and_one_shard_less_does_not(shape, data):
    cuts = [sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=2)) if n > 1 else []) for n in shape]
    boxes = [()]
    for n, cut in zip(shape, cuts, strict=True):
        edges = [0, *cut, n]
        boxes = [(*box, (a, b)) for box in boxes for a, b in itertools.pairwise(edges)]
    entries = [
        Entry("w", "int8", tuple(b - a for a, b in box), tuple(a for a, _ in box), tuple(shape))
        for box in boxes
    ]
    assert sum(math.prod(entry.shape) for entry in entries) == math.prod(shape)
    assert uncovered_arrays(layouts_of(*entries, world_size=3)) == []
    if len(entries) > 1:
        assert uncovered_arrays(layouts_of(*entries[:-1], world_size=3)) == ["w"]
