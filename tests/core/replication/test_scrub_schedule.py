"""The schedule of a scrub, with a clock that is turned by hand."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashpoint.replication.messages import Key
from flashpoint.replication.scrub_schedule import (
    AGAIN_LAST_S,
    AGAIN_S,
    GIVE_WAY_S,
    IDLE_S,
    PIECE_BYTES,
    Held,
    Piece,
    ScrubSchedule,
)

MIB = 1 << 20
KEY = Key(1, 10, "a" * 32)
OLD = Key(1, 9, "b" * 32)


def run(
    schedule: ScrubSchedule, seconds: float, *, begin_s: float = 0.0, is_busy: bool = False
) -> list[tuple[float, Piece]]:
    """The pieces of so many seconds, all of them good, with the time of each."""
    now_s, done = begin_s, []
    while now_s < begin_s + seconds:
        step = schedule.next(now_s, is_busy=is_busy)
        if isinstance(step, Piece):
            done.append((now_s, step))
            schedule.verified(step, now_s)
        else:
            assert step > 0
            now_s += step
    return done


@given(
    rate=st.integers(MIB // 4, 256 * MIB),
    sizes=st.lists(st.integers(1, 40 * MIB), min_size=1, max_size=5),
    chunk_bytes=st.sampled_from([4096, MIB, 4 * MIB, 16 * MIB]),
    seed=st.integers(0, 1000),
)
def test_the_rate_is_kept_over_any_time(rate: int, sizes: list[int], chunk_bytes: int, seed: int) -> None:
    rng = random.Random(seed)
    schedule = ScrubSchedule(rate, rest_s=0.0)
    schedule.found({KEY: {str(i): Held(n, chunk_bytes) for i, n in enumerate(sizes)}})
    now_s, done = 0.0, []
    for _ in range(300):
        step = schedule.next(now_s, is_busy=rng.random() < 0.1)
        if isinstance(step, Piece):
            done.append((now_s, step.nbytes))
            schedule.verified(step, now_s)
            now_s += rng.choice([0.0, 0.001, 0.3])  # it takes a while, or does not
        else:
            now_s += step * rng.choice([0.5, 1.0, 2.0])  # and who waits wakes too early or too late
    for i, (begin_s, _) in enumerate(done):
        for j in range(i, len(done)):
            nbytes = sum(n for _, n in done[i : j + 1])
            assert nbytes <= rate * (done[j][0] - begin_s) + max(PIECE_BYTES, chunk_bytes) + 1


def test_what_was_verified_longest_ago_is_the_first() -> None:
    schedule = ScrubSchedule(8 * MIB, rest_s=1.0)
    schedule.found({KEY: {name: Held(4 * MIB, MIB) for name in "abc"}})
    assert [piece.name for _, piece in run(schedule, 3.0)] == [*"abcabc"]
    schedule.found({KEY: {name: Held(4 * MIB, MIB) for name in "abcd"}})
    # What has never been is before all others; then they go on in turn.
    assert [piece.name for _, piece in run(schedule, 2.0, begin_s=3.0)] == [*"dabc"]


def test_an_object_is_verified_whole_before_the_next_one_begins() -> None:
    schedule = ScrubSchedule(100 * MIB)
    schedule.found({KEY: {"a": Held(9 * MIB, MIB), "b": Held(MIB, MIB)}})
    pieces = [(p.name, p.first, p.end, p.nbytes, p.is_last) for _, p in run(schedule, 1.0)]
    assert pieces == [
        ("a", 0, 4, 4 * MIB, False),
        ("a", 4, 8, 4 * MIB, False),
        ("a", 8, 9, MIB, True),
        ("b", 0, 1, MIB, True),
    ]


def test_an_object_rests_after_it_was_verified() -> None:
    schedule = ScrubSchedule(100 * MIB, rest_s=60.0)
    schedule.found({KEY: {"a": Held(MIB, MIB)}})
    times = [at_s for at_s, _ in run(schedule, 200.0)]
    assert times[0] == 0.0
    assert times[1:] == pytest.approx([60.0, 120.0, 180.0], abs=4 * IDLE_S)


def test_what_is_gone_is_forgotten_and_what_has_changed_begins_anew() -> None:
    schedule = ScrubSchedule(4 * MIB, rest_s=0.0)
    schedule.found({OLD: {"a": Held(9 * MIB, MIB)}, KEY: {"a": Held(MIB, MIB)}})
    piece = schedule.next(0.0, is_busy=False)
    assert isinstance(piece, Piece) and piece.key == OLD
    schedule.found({KEY: {"a": Held(MIB, MIB)}})
    schedule.verified(piece, 0.5)  # too late
    assert {p.key for _, p in run(schedule, 2.0, begin_s=1.0)} == {KEY}
    schedule.found({})
    assert run(schedule, 5.0, begin_s=3.0) == []


def test_it_gives_way_to_copies_but_not_for_ever() -> None:
    schedule = ScrubSchedule(100 * MIB, rest_s=1.0)
    schedule.found({KEY: {"a": Held(MIB, MIB)}})
    done = run(schedule, 2 * GIVE_WAY_S, is_busy=True)
    assert done[0][0] == pytest.approx(GIVE_WAY_S, abs=2 * IDLE_S)
    assert run(schedule, 5.0, begin_s=2 * GIVE_WAY_S)  # nothing is copied any more
    assert not run(schedule, GIVE_WAY_S - 10, begin_s=2 * GIVE_WAY_S + 10, is_busy=True)


def test_what_could_not_be_mended_is_tried_again_less_and_less_often_and_holds_nothing_up() -> None:
    schedule = ScrubSchedule(100 * MIB, rest_s=1.0)
    schedule.found({KEY: {"bad": Held(MIB, MIB), "good": Held(MIB, MIB)}})
    now_s, tries, good = 0.0, [], 0
    while now_s < 4000:
        step = schedule.next(now_s, is_busy=False)
        if not isinstance(step, Piece):
            now_s += step
        elif step.name == "bad":
            tries.append(now_s)
            schedule.failed(step.key, step.name, now_s)
        else:
            good += 1
            schedule.verified(step, now_s)
    waits = [b - a for a, b in itertools.pairwise(tries)]
    assert waits[0] == pytest.approx(AGAIN_S, abs=2 * IDLE_S)
    assert waits[-1] == pytest.approx(AGAIN_LAST_S, abs=2 * IDLE_S)
    assert len(tries) < 20
    assert good > 1000
