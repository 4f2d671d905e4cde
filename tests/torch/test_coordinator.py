"""The coordinator over torch's stores."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from flashpoint.coordinator import Coordinator, SingleProcessCoordinator
from flashpoint.errors import DeadlineError, FlashpointError
from flashpoint.testing import CoordinatorConformance
from flashpoint_torch import coordinator
from flashpoint_torch.coordinator import PIECE_BYTES, TorchStoreCoordinator, default_coordinator
from tests.core.processes import process
from tests.torch.workers import Workers


def over(stores: Sequence[dist.Store]) -> list[Coordinator]:
    return [
        TorchStoreCoordinator(store, rank=rank, world_size=len(stores), local_rank=rank)
        for rank, store in enumerate(stores)
    ]


@pytest.fixture(scope="module")
def tcp_server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(scope="module")
def tcp_clients(tcp_server: dist.TCPStore) -> list[dist.TCPStore]:
    return [dist.TCPStore("127.0.0.1", tcp_server.port, is_master=False) for _ in range(3)]


class TestOverTCPStore(CoordinatorConformance):
    """As `init_process_group` makes it: every rank has a client of its own."""

    @pytest.fixture
    def world(self, request: pytest.FixtureRequest, tcp_clients: list[dist.TCPStore]) -> list[Coordinator]:
        return over([dist.PrefixStore(request.node.name, client) for client in tcp_clients])


class TestOverFileStore(CoordinatorConformance):
    @pytest.fixture
    def world(self, tmp_path: Path) -> list[Coordinator]:
        return over([dist.FileStore(f"{tmp_path}/store", 2) for _ in range(2)])


class TestOverHashStore(CoordinatorConformance):
    @pytest.fixture
    def world(self) -> list[Coordinator]:
        store = dist.HashStore()
        return over([store, store])


class TestOverPrefixesOfPrefixes(CoordinatorConformance):
    @pytest.fixture
    def world(self, tcp_server: dist.TCPStore, request: pytest.FixtureRequest) -> list[Coordinator]:
        store = dist.PrefixStore("inner", dist.PrefixStore(request.node.name, tcp_server))
        return over([store, store])


class TestAlone(CoordinatorConformance):
    @pytest.fixture
    def world(self) -> Iterator[list[Coordinator]]:
        yield [SingleProcessCoordinator()]


# ---- what is torch's own about it -------------------------------------------------------------------


def test_a_store_that_is_gone_is_told_from_a_deadline() -> None:
    server: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=2))
    (coordinator,) = over([client])
    coordinator.publish("here", b"x")
    assert coordinator.fetch("here", 5) == b"x"
    del server
    for call in (
        lambda: coordinator.fetch("here", 1),
        lambda: coordinator.publish("more", b"x"),
        lambda: coordinator.remove("here"),
    ):
        with pytest.raises(FlashpointError, match="store is gone") as failure:
            call()
        assert not isinstance(failure.value, DeadlineError)


@pytest.mark.parametrize("pieces", [1, 2, 5])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_values_of_any_size_pass_through(tcp_server: dist.TCPStore, pieces: int, more: int) -> None:
    # The records of a large job are larger than what a TCPStore takes at once.
    store = dist.PrefixStore(f"sizes-{pieces}-{more}", tcp_server)
    writer, reader = over([store, store])
    value = random.Random(pieces).randbytes(pieces * PIECE_BYTES + more)
    writer.publish("large", value)
    assert reader.fetch("large", 30) == value
    writer.publish("other", b"x")
    reader.remove("large")
    assert store.list_keys() == ["flashpoint/other"]
    writer.publish("large", value)
    writer.remove("large")
    assert store.list_keys() == ["flashpoint/other"]


def test_there_are_as_many_connections_as_calls_at_a_time(tcp_server: dist.TCPStore) -> None:
    (coordinator,) = over([dist.PrefixStore("connections", tcp_server)])
    assert isinstance(coordinator, TorchStoreCoordinator)

    def in_threads(count: int) -> None:
        threads = [threading.Thread(target=coordinator.fetch, args=(f"late-{n}", 30)) for n in range(count)]
        for thread in threads:
            thread.start()
        for n in range(count):
            coordinator.publish(f"late-{n}", b"")
        for thread in threads:
            thread.join(30)

    in_threads(3)
    connections = len(coordinator._idle)
    assert 1 <= connections <= 4
    for _ in range(10):  # threads come and go, as they do with dcp.async_save
        in_threads(1)
    assert len(coordinator._idle) <= max(connections, 2)


def test_a_deadline_does_not_cost_the_connection(tcp_server: dist.TCPStore) -> None:
    (coordinator,) = over([dist.PrefixStore("deadlines", tcp_server)])
    assert isinstance(coordinator, TorchStoreCoordinator)
    for n in range(5):
        with pytest.raises(DeadlineError):
            coordinator.fetch("never", 0.01)
        coordinator.publish(f"{n}", b"%d" % n)
        assert coordinator.fetch(f"{n}", 5) == b"%d" % n
    assert len(coordinator._idle) == 1


def prefixes() -> list[str]:
    return [default_coordinator()[1] for _ in range(3)]


def test_every_session_has_keys_of_its_own_and_all_ranks_the_same(workers: Workers) -> None:
    workers.run(1, prefixes)
    for found in workers.run(3, prefixes):
        assert found == ["flashpoint/1", "flashpoint/2", "flashpoint/3"]


def test_one_rank_needs_no_store(workers: Workers) -> None:
    assert workers.run(1, kind_of_coordinator) == ["SingleProcessCoordinator"]
    assert workers.run(2, kind_of_coordinator) == ["TorchStoreCoordinator"] * 2


def kind_of_coordinator() -> str:
    return type(default_coordinator()[0]).__name__


def hold_a_store(say: Callable[[object], None]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    say(store.port)
    say("the end")


def test_a_store_that_is_stopped_holds_nobody_up_and_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "ANSWER_S", 0.2)
    with process(hold_a_store) as server:
        store = dist.TCPStore("127.0.0.1", server.hear(), is_master=False)
        one = TorchStoreCoordinator(store, rank=0, world_size=2, local_rank=0)
        one.publish("a", b"1")
        os.kill(server.pid, signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            for _ in range(20):  # no thread more than a bound is left behind
                with pytest.raises(DeadlineError, match="the job's store does not|within"):
                    one.fetch("b", 0.1)
            assert time.monotonic() - began_s < 60
            assert sum(thread.name == "flashpoint-store" for thread in threading.enumerate()) < 40
        finally:
            os.kill(server.pid, signal.SIGCONT)
        deadline = time.monotonic() + 60
        while True:
            try:
                assert one.fetch("a", 5.0) == b"1"
                break
            except DeadlineError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
