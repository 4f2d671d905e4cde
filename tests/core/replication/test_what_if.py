import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashpoint.replication.placement import Slot, place
from flashpoint.replication.what_if import losses, what_if
from flashpoint.retention import Version

OLD, NEW = Version(1, 80), Version(1, 100)
FOUR = [Slot(0, "a"), Slot(1, "a"), Slot(2, "b"), Slot(3, "b")]


def objects_of(nodes, copies=(), slots=FOUR):
    """One object of each of the nodes, and who holds it: the node itself and those it copies to."""
    placement = place(slots, 1)
    return {f"rank{n:05d}-0": {n, *(placement[n] if n in copies else ())} for n in nodes}


def outcome(aftermaths, kind, name):
    (found,) = (one for one in aftermaths if (one.loss.kind, one.loss.name) == (kind, name))
    return found


def test_a_replicated_version_survives_each_node_and_each_rack():
    found = what_if({NEW: objects_of(range(4), copies=range(4))}, losses(FOUR))
    assert {(one.loss.kind, one.loss.name) for one in found} == {
        ("node", "0"), ("node", "1"), ("node", "2"), ("node", "3"), ("domain", "a"), ("domain", "b"),
    }  # fmt: skip
    assert all(one.memory == NEW and one.lost_objects == {NEW: 0} for one in found)


def test_what_is_only_complete_falls_back_to_what_is_replicated():
    holders = {
        NEW: objects_of(range(4), copies=[0]),
        OLD: objects_of(range(4), copies=range(4)),
    }
    found = what_if(holders, losses(FOUR))
    assert outcome(found, "node", "0").memory == NEW  # all its objects have copies already
    lost = outcome(found, "node", "2")
    assert (lost.memory, lost.lost_objects) == (OLD, {NEW: 1, OLD: 0})
    assert outcome(found, "domain", "b").lost_objects[NEW] == 2


def test_storage_is_what_is_left_where_memory_has_nothing_and_only_there():
    holders = {NEW: objects_of(range(4), copies=[0])}
    found = what_if(holders, losses(FOUR), drained=OLD)
    assert (outcome(found, "node", "1").memory, outcome(found, "node", "1").goes_on_from) == (None, OLD)
    assert (outcome(found, "node", "0").storage, outcome(found, "node", "0").goes_on_from) == (None, NEW)
    assert outcome(what_if(holders, losses(FOUR)), "node", "1").goes_on_from is None


def test_an_object_that_nobody_is_known_to_hold_is_lost_whatever_fails():
    holders = {NEW: {"rank00000-0": {0, 1}, "rank00001-0": set()}}
    assert [one.memory for one in what_if(holders, losses([Slot(0), Slot(1)]))] == [None, None]


def test_nodes_that_are_silent_are_also_asked_about_together():
    found = what_if({NEW: objects_of(range(4), copies=range(4))}, losses(FOUR, silent={0, 2}))
    silent = outcome(found, "silent", "")
    assert silent.loss.nodes == {0, 2}
    assert silent.memory is None  # each holds the other's only copy: their racks differ


def test_no_version_leaves_nothing():
    (only,) = what_if({}, losses([Slot(0)]))
    assert (only.memory, only.goes_on_from, only.lost_objects) == (None, None, {})


@given(
    st.dictionaries(st.integers(0, 30).map(str), st.sets(st.integers(0, 6)), max_size=12),
    st.sets(st.integers(0, 6), min_size=1),
)
def test_counts_are_those_of_the_definition(holders, silent):
    slots = [Slot(index, "abc"[index % 3]) for index in range(7)]
    for one in what_if({NEW: holders}, losses(slots, silent)):
        gone = sum(not (set(nodes) - one.loss.nodes) for nodes in holders.values())
        assert one.lost_objects == {NEW: gone}
        assert one.memory == (None if gone else NEW)


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_placement_keeps_its_promise_about_domains(copies):
    slots = [Slot(index, f"rack{index // 3}") for index in range(18)]
    placement = place(slots, copies)
    holders = {f"rank{n:05d}-0": {n, *placement[n]} for n in range(18)}
    assert all(one.memory == NEW for one in what_if({NEW: holders}, losses(slots)))
