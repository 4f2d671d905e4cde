"""What is drained and deleted, as tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashpoint.retention import Version
from flashpoint.storage.schedule import Candidate, is_due, may_hold, next_to_drain, to_delete


def candidate(epoch: int, step: int, created: float = 0.0) -> Candidate:
    return Candidate(Version(epoch, step), created)


@pytest.mark.parametrize(
    ("version", "last", "since", "every_n", "every_s", "is_final", "due"),
    [
        ((1, 10, 0), None, 1, 5, 60, False, True),  # nothing is there yet
        ((1, 10, 0), (1, 9, 0), 1, 0, 0, False, True),  # no rule: every version
        ((1, 9, 0), (1, 9, 0), 0, 0, 0, False, False),
        ((1, 9, 0), (1, 9, 0), 0, 0, 0, True, False),
        ((1, 8, 0), (1, 9, 0), 1, 1, 0, False, False),
        ((2, 8, 0), (1, 9, 0), 1, 0, 0, False, True),  # a restarted job's overrules
        ((1, 9, 0), (2, 8, 0), 1, 0, 0, False, False),
        ((1, 12, 0), (1, 10, 0), 2, 3, 0, False, False),
        ((1, 13, 0), (1, 10, 0), 3, 3, 0, False, True),
        ((1, 13, 59), (1, 10, 0), 3, 0, 60, False, False),
        ((1, 13, 60), (1, 10, 0), 3, 0, 60, False, True),
        ((1, 13, 60), (1, 10, 0), 1, 5, 60, False, True),  # either rule
        ((1, 13, 10), (1, 10, 0), 5, 5, 60, False, True),
        ((1, 13, 10), (1, 10, 0), 4, 5, 60, False, False),
        ((1, 13, 10), (1, 10, 0), 1, 5, 60, True, True),  # the job is over
        ((1, 13, 0), (1, 10, 600), 1, 0, 60, False, True),  # the clock was set back
    ],
)
def test_when_a_version_is_due(version, last, since, every_n, every_s, is_final, due):
    known = candidate(*last) if last else None
    rules = {"every_n": every_n, "every_s": every_s, "is_final": is_final}
    assert is_due(candidate(*version), known, since, **rules) is due


def test_the_newest_is_drained_and_what_was_missed_is_not_made_up_for():
    found = [candidate(1, 5), candidate(2, 3), candidate(1, 9)]
    assert next_to_drain(found, candidate(1, 4), 3, every_n=0, every_s=0) == (2, 3)
    assert next_to_drain(found, candidate(2, 3), 0, every_n=0, every_s=0) is None
    assert next_to_drain([], None, 0, every_n=0, every_s=0) is None


@pytest.mark.parametrize(
    ("drained", "keep_last", "keep_every", "deleted"),
    [
        ([(1, 1), (1, 2), (1, 3)], 0, 0, []),
        ([(1, 1), (1, 2), (1, 3)], 1, 0, [(1, 1), (1, 2)]),
        ([(1, 1), (1, 2), (1, 3)], 2, 0, [(1, 1)]),
        ([(1, 1), (1, 2), (1, 3)], 9, 0, []),
        ([(1, 100), (1, 150), (1, 200), (1, 250)], 1, 100, [(1, 150)]),
        ([(1, 100), (2, 50), (2, 60)], 2, 0, [(1, 100)]),  # a lower step of a later start is newer
        ([(1, 0), (1, 1), (1, 2)], 1, 10, [(1, 1)]),
        ([], 1, 0, []),
    ],
)
def test_what_is_deleted(drained, keep_last, keep_every, deleted):
    found = to_delete([Version(*pair) for pair in drained], keep_last=keep_last, keep_every=keep_every)
    assert found == deleted


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 50))), st.integers(1, 5), st.integers(0, 7))
def test_the_newest_ones_and_those_for_ever_always_stay(pairs, keep_last, keep_every):
    drained = [Version(*pair) for pair in pairs]
    deleted = to_delete(drained, keep_last=keep_last, keep_every=keep_every)
    stay = set(drained) - set(deleted)
    assert stay >= set(sorted(drained)[-keep_last:])
    assert all(version in stay for version in drained if keep_every and version.step % keep_every == 0)
    assert len(stay) <= keep_last or keep_every


def test_a_version_is_held_only_where_the_next_save_has_room_beside_it():
    assert may_hold(linked_nbytes=10, version_nbytes=10, limit_nbytes=30)
    assert not may_hold(linked_nbytes=10, version_nbytes=10, limit_nbytes=29)
