"""The coordinator over JAX's coordination service, with two real processes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import pytest

from flashpoint.coordinator import Coordinator, SingleProcessCoordinator
from flashpoint.errors import DeadlineError
from flashpoint.testing import CoordinatorConformance
from tests.jax.workers import Workers

_KEY = b"flashpoint coordinators"
_numbers = itertools.count()


class Remote(Coordinator):
    """A coordinator that lives in another process: every call is made there, in a thread of its own."""

    def __init__(self, pipe: Connection) -> None:
        self.rank, self.world_size, self.local_rank = pipe.recv()
        self._pipe = pipe
        self._waiting: dict[int, Future[Any]] = {}
        self._ids = itertools.count()
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def publish(self, key: str, value: bytes) -> None:
        self._call("publish", key, value)

    def fetch(self, key: str, timeout_s: float) -> bytes:
        return bytes(self._call("fetch", key, timeout_s))

    def remove(self, key: str) -> None:
        self._call("remove", key)

    def stop(self) -> None:
        self._pipe.send(None)

    def _call(self, name: str, *args: Any) -> Any:
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._ids)
            self._waiting[number] = answer
            self._pipe.send((number, name, args))
        return answer.result(120)

    def _listen(self) -> None:
        while True:
            try:
                number, value, error = self._pipe.recv()
            except (EOFError, OSError):
                return
            answer = self._waiting.pop(number)
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)


def serve(port: int, name: str) -> None:
    """In a process of the job: make its coordinator, and do what the test asks of it."""
    from flashpoint_jax.coordinator import JaxCoordinator, default_coordinator

    coordinator = default_coordinator(name)
    assert isinstance(coordinator, JaxCoordinator)
    lock = threading.Lock()
    with Client(("127.0.0.1", port), authkey=_KEY) as pipe, ThreadPoolExecutor(16) as threads:
        pipe.send((coordinator.rank, coordinator.world_size, coordinator.local_rank))

        def call(number: int, method: str, args: tuple[Any, ...]) -> None:
            value, error = None, None
            try:
                value = getattr(coordinator, method)(*args)
            except Exception as failure:
                # Pickled by its own class and words; its cause stays here.
                error = type(failure)(str(failure))
            with lock:
                pipe.send((number, value, error))

        while (order := pipe.recv()) is not None:
            threads.submit(call, *order)


class TestOverTwoProcesses(CoordinatorConformance):
    @pytest.fixture
    def world(self, workers: Workers) -> Iterator[list[Coordinator]]:
        with Listener(("127.0.0.1", 0), authkey=_KEY) as listener:
            job = threading.Thread(
                target=workers.run, args=(serve, listener.address[1], f"conformance-{next(_numbers)}")
            )
            job.start()
            remotes = sorted((Remote(listener.accept()) for _ in range(2)), key=lambda remote: remote.rank)
        try:
            yield list(remotes)
        finally:
            for remote in remotes:
                remote.stop()
            job.join()

    def test_values_of_any_size_pass_through(self, world: Sequence[Coordinator]) -> None:
        # The records of a large job are larger than what gRPC carries by default, 4 MiB.
        value = bytes(range(256)) * (1 << 17)
        world[0].publish("large", value)
        assert world[1].fetch("large", 60) == value

    def test_a_key_is_removed_without_those_below_it(self, world: Sequence[Coordinator]) -> None:
        # The service itself takes a key for a folder.
        world[0].publish("above", b"x")
        world[0].publish("above/below", b"y")
        world[0].remove("above")
        assert world[1].fetch("above/below", 10) == b"y"
        with pytest.raises(DeadlineError):
            world[1].fetch("above", 0.1)


def prefixes() -> list[str]:
    from flashpoint_jax.coordinator import JaxCoordinator, default_coordinator

    found = [default_coordinator("prefixes") for _ in range(3)]
    return [one._prefix for one in found if isinstance(one, JaxCoordinator)]


def test_every_coordinator_has_keys_of_its_own_and_all_processes_the_same(workers: Workers) -> None:
    one, other = workers.run(prefixes)
    assert one == other
    assert len(set(one)) == 3


def test_one_process_needs_no_service() -> None:
    from flashpoint_jax.coordinator import default_coordinator

    assert isinstance(default_coordinator(), SingleProcessCoordinator)
