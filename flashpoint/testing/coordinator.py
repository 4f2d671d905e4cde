"""What every `Coordinator` must do. Inherit, give the fixture ``world``, and pytest runs it all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

from flashpoint.coordinator import Coordinator
from flashpoint.errors import DeadlineError

T = TypeVar("T")


def on_all_ranks(world: Sequence[Coordinator], call: Callable[[Coordinator], T]) -> list[T]:
    """Run ``call`` on every rank at once, one thread each; the results in the order of ranks."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(coordinator: Coordinator) -> None:
        try:
            results[coordinator.rank] = call(coordinator)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(coordinator,), daemon=True) for coordinator in world]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(len(world))]


class CoordinatorConformance:
    """Give a fixture ``world``: one coordinator for each rank of one job, in the order of ranks."""

    def test_ranks_are_numbered_from_zero(self, world: Sequence[Coordinator]) -> None:
        assert [coordinator.rank for coordinator in world] == list(range(len(world)))
        assert all(coordinator.world_size == len(world) for coordinator in world)
        assert [coordinator.is_leader for coordinator in world] == [True] + [False] * (len(world) - 1)

    def test_what_one_rank_publishes_every_rank_fetches(self, world: Sequence[Coordinator]) -> None:
        payload = bytes(range(256)) * 5000  # larger than any small-message buffer, and not text
        world[-1].publish("greeting", payload)
        assert all(coordinator.fetch("greeting", 10) == payload for coordinator in world)

    def test_an_empty_value_is_a_value(self, world: Sequence[Coordinator]) -> None:
        world[0].publish("empty", b"")
        assert world[-1].fetch("empty", 10) == b""

    def test_fetch_waits_for_a_value_that_comes_later(self, world: Sequence[Coordinator]) -> None:
        timer = threading.Timer(0.2, world[0].publish, ("late", b"here"))
        timer.start()
        assert world[-1].fetch("late", 30) == b"here"
        timer.join()

    def test_fetch_keeps_its_deadline_and_names_the_key(self, world: Sequence[Coordinator]) -> None:
        start = time.monotonic()
        with pytest.raises(DeadlineError, match="never-published"):
            world[-1].fetch("never-published", 0.3)
        assert time.monotonic() - start < 10

    def test_a_waiting_fetch_does_not_block_another_thread(self, world: Sequence[Coordinator]) -> None:
        found: list[bytes] = []
        waiting = threading.Thread(target=lambda: found.append(world[0].fetch("awaited", 30)))
        waiting.start()
        start = time.monotonic()
        world[0].publish("meanwhile", b"x")
        assert world[0].fetch("meanwhile", 10) == b"x"
        assert time.monotonic() - start < 10
        world[0].publish("awaited", b"y")
        waiting.join(60)
        assert found == [b"y"]

    def test_a_value_that_is_there_is_fetched_with_no_time_left(self, world: Sequence[Coordinator]) -> None:
        world[0].publish("there", b"x")
        assert world[-1].fetch("there", 10) == b"x"  # it has arrived
        assert world[-1].fetch("there", 0.0) == b"x"

    def test_removed_keys_are_gone_and_removing_twice_is_no_error(self, world: Sequence[Coordinator]) -> None:
        world[0].publish("gone", b"x")
        world[0].remove("gone")
        world[0].remove("gone")
        with pytest.raises(DeadlineError):
            world[-1].fetch("gone", 0.1)

    def test_gather_brings_all_values_to_the_leader(self, world: Sequence[Coordinator]) -> None:
        results = on_all_ranks(world, lambda c: c.gather("gather", b"from %d" % c.rank, 30))
        assert results[0] == {rank: b"from %d" % rank for rank in range(len(world))}
        assert results[1:] == [None] * (len(world) - 1)

    def test_gather_leaves_out_who_does_not_come(self, world: Sequence[Coordinator]) -> None:
        assert world[0].gather("nobody-else", b"me", 0.2) == {0: b"me"}

    def test_broadcast_gives_everyone_the_leaders_value(self, world: Sequence[Coordinator]) -> None:
        results = on_all_ranks(
            world, lambda c: c.broadcast("broadcast", b"decided" if c.is_leader else None, 30)
        )
        assert results == [b"decided"] * len(world)

    def test_all_gather_gives_everyone_everything_in_order(self, world: Sequence[Coordinator]) -> None:
        results = on_all_ranks(world, lambda c: c.all_gather("all", b"%d" % c.rank, 30))
        assert results == [[b"%d" % rank for rank in range(len(world))]] * len(world)

    def test_all_gather_names_the_ranks_that_are_missing(self, world: Sequence[Coordinator]) -> None:
        if len(world) == 1:
            pytest.skip("a world of one is never incomplete")
        with pytest.raises(DeadlineError, match=r"ranks \[.*1"):
            world[0].all_gather("lonely", b"me", 0.2)
