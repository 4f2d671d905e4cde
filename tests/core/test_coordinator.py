import threading
import time

import pytest

from flashpoint.coordinator import SingleProcessCoordinator
from flashpoint.errors import DeadlineError
from flashpoint.testing import CoordinatorConformance
from flashpoint.testing.coordinator import on_all_ranks
from tests.core.world import coordinators


class TestSingleProcess(CoordinatorConformance):
    @pytest.fixture
    def world(self):
        return [SingleProcessCoordinator()]


class TestTwoThreads(CoordinatorConformance):
    @pytest.fixture
    def world(self):
        return coordinators(2)


class TestThreeThreads(CoordinatorConformance):
    @pytest.fixture
    def world(self):
        return coordinators(3)


def test_a_rank_that_comes_too_late_for_a_gather_is_left_out_and_the_others_are_not():
    world = coordinators(3)

    def call(coordinator):
        if coordinator.rank == 1:
            return None
        return coordinator.gather("topic", b"%d" % coordinator.rank, 0.3)

    assert on_all_ranks(world, call)[0] == {0: b"0", 2: b"2"}


def test_a_gather_waits_no_longer_than_its_deadline_for_all_ranks_together():
    start = time.monotonic()
    assert coordinators(20)[0].gather("topic", b"", 0.3) == {0: b""}
    assert time.monotonic() - start < 19 * 0.3  # if each rank were waited for in turn


def test_an_all_gather_names_all_missing_ranks_and_waits_once():
    world = coordinators(20)
    world[3].publish("topic/3", b"")
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"rank 0 .*'topic'.* ranks \[1, 2, 4, .*19\] of 20"):
        world[0].all_gather("topic", b"", 0.3)
    assert time.monotonic() - start < 19 * 0.3  # if each rank were waited for in turn


def test_a_broadcast_that_never_comes_is_a_deadline_error():
    with pytest.raises(DeadlineError, match="decision"):
        coordinators(2)[1].broadcast("decision", None, 0.1)


def test_repeated_operations_leave_few_keys_behind():
    world = coordinators(3)
    for i in range(10):
        on_all_ranks(world, lambda c, i=i: c.gather(f"gather/{i}", b"x", 20))
        on_all_ranks(world, lambda c, i=i: c.all_gather(f"all/{i}", b"x", 20))
    assert len(world[0].store.values) <= 3


def test_many_threads_may_use_one_coordinator():
    (coordinator,) = coordinators(1)
    threads = [
        threading.Thread(target=lambda i=i: coordinator.publish(f"key/{i}", b"%d" % i)) for i in range(20)
    ]
    for thread in threads:
        thread.start()
    assert [coordinator.fetch(f"key/{i}", 10) for i in range(20)] == [b"%d" % i for i in range(20)]
    for thread in threads:
        thread.join()
