"""A `Coordinator` over torch's own key-value store: no collective, a deadline on every wait."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final, TypeVar, cast

import torch.distributed as dist

from flashpoint.coordinator import Coordinator, SingleProcessCoordinator
from flashpoint.errors import DeadlineError, FlashpointError

T = TypeVar("T")
PIECE_BYTES: Final = 4 << 20  # a TCPStore drops the connection of who sends it more than 8 MiB at once
ANSWER_S = 30.0  # for a store to answer what it need not wait for
_STUCK_MAX: Final = 16  # calls that were left behind in a store that does not answer
_WAIT_MIN: Final = timedelta(milliseconds=1)  # a store takes zero for "no timeout"


class TorchStoreCoordinator(Coordinator):
    """Ranks that share a ``torch.distributed.Store``.

    Args:
        store: any of them; it is cloned for each call at a time, because a wait holds a store's connection.
        prefix: under which all keys lie, so that nobody else's are touched.
    """

    def __init__(
        self, store: dist.Store, *, rank: int, world_size: int, local_rank: int, prefix: str = "flashpoint"
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self._store = store
        self._prefix = prefix
        self._pieces: dict[str, int] = {}  # of each large value that was published or fetched here
        self._idle: list[_Connection] = []
        self._stuck: set[Future[Any]] = set()
        self._lock = threading.Lock()

    def publish(self, key: str, value: bytes) -> None:
        name = f"{self._prefix}/{key}"
        pieces = [value[i : i + PIECE_BYTES] for i in range(0, len(value), PIECE_BYTES)] or [b""]
        if len(pieces) > 1:
            self._pieces[key] = len(pieces)

        def publish(store: dist.Store) -> None:
            # The first piece comes last: who finds it finds the others. (The stubs know no bytes.)
            for n in reversed(range(1, len(pieces))):
                store.set(f"{name}/{n}", pieces[n])  # type: ignore[arg-type]
            store.set(name, b"%d=%b" % (len(pieces), pieces[0]))  # type: ignore[arg-type]

        self._call(publish, f"{key!r} was published", ANSWER_S)

    def fetch(self, key: str, timeout_s: float) -> bytes:
        name = f"{self._prefix}/{key}"

        def fetch(store: dist.Store) -> bytes | DeadlineError:
            try:
                store.wait([name], max(timedelta(seconds=timeout_s), _WAIT_MIN))
            except RuntimeError as error:
                if not isinstance(error, dist.DistStoreError) and "timeout" not in str(error).lower():
                    raise
                deadline = DeadlineError(f"nothing was published under {key!r} within {timeout_s:g} s")
                deadline.__cause__ = error
                return deadline
            count, _, value = bytes(store.get(name)).partition(b"=")
            if int(count) == 1:
                return value
            self._pieces[key] = int(count)
            rest = [bytes(store.get(f"{name}/{n}")) for n in range(1, int(count))]
            return b"".join((value, *rest))

        found = self._call(fetch, f"{key!r} was awaited", timeout_s + ANSWER_S)
        if isinstance(found, DeadlineError):
            raise found
        return found

    def remove(self, key: str) -> None:
        name = f"{self._prefix}/{key}"
        count = self._pieces.pop(key, 1)

        def remove(store: dist.Store) -> None:
            store.delete_key(name)
            for n in range(1, count):
                store.delete_key(f"{name}/{n}")

        self._call(remove, f"{key!r} was removed", ANSWER_S)

    def _call(self, work: Callable[[dist.Store], T], what: str, timeout_s: float) -> T:
        """Have ``work`` done over an idle connection, or a new one where all are waiting."""
        with self._lock:
            if len(self._stuck) >= _STUCK_MAX:
                raise DeadlineError(f"the job's store does not answer: {what} was not tried")
            connection = self._idle.pop() if self._idle else _Connection(self._store)
        call = connection.begin(work)
        try:
            answer = call.result(timeout_s)
        except TimeoutError:
            with self._lock:
                self._stuck.add(call)
            call.add_done_callback(self._stuck.discard)
            raise DeadlineError(
                f"the job's store did not answer within {timeout_s:g} s while {what}"
            ) from None
        except RuntimeError as error:  # this connection is not used again
            raise FlashpointError(f"the job's store is gone while {what}: {error}") from error
        with self._lock:
            self._idle.append(connection)
        return answer


class _Connection:
    """A clone of a store, and a thread that waits in it.

    Nothing that a `TCPStore` does ends by itself while its server is stopped or cut off, not even a wait with a
    timeout: that asks the server to cancel it. Who calls has a deadline; the thread is left behind.
    """

    def __init__(self, store: dist.Store) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[dist.Store], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(
            target=_serve, args=(store, self._calls), name="flashpoint-store", daemon=True
        ).start()

    def begin(self, work: Callable[[dist.Store], T]) -> Future[T]:
        call: Future[T] = Future()
        self._calls.put((work, call))
        return call

    def __del__(self) -> None:
        self._calls.put(None)


def _serve(
    store: dist.Store, calls: queue.SimpleQueue[tuple[Callable[[dist.Store], Any], Future[Any]] | None]
) -> None:
    clone: dist.Store | None = None
    while (order := calls.get()) is not None:
        work, call = order
        try:
            if clone is None:
                clone = cast(dist.Store, store.clone())  # type: ignore[attr-defined]
            call.set_result(work(clone))
        except BaseException as error:
            call.set_exception(error)
        del order, work, call


def default_coordinator() -> tuple[Coordinator, str]:
    """A new coordinator of the default process group, or of this process alone where there is none, and the
    prefix of its keys.

    Raises:
        FlashpointError: the process was started as one of several ranks, but has no process group yet.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise FlashpointError(
                f"this process is rank {os.environ.get('RANK', '?')} of {os.environ['WORLD_SIZE']}, but "
                "torch.distributed is not initialised: call torch.distributed.init_process_group first"
            )
        return SingleProcessCoordinator(), "flashpoint"
    if dist.get_world_size() == 1:
        return SingleProcessCoordinator(), "flashpoint"
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    # Counted in the store, not in the process, which may have been in other groups before this one. A store of
    # torchrun's may outlive an attempt in which some ranks came here and others did not: each counts for itself.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    base = "flashpoint" if attempt is None else f"flashpoint/attempt-{attempt}"
    prefix = f"{base}/{store.add(f'{base}/sessions/{rank}', 1)}"
    return TorchStoreCoordinator(
        store, rank=rank, world_size=dist.get_world_size(), local_rank=local_rank(rank), prefix=prefix
    ), prefix


def local_rank(rank: int) -> int:
    """This process's rank on its node: torchrun's, or the global rank, which is as unique."""
    return int(os.environ.get("LOCAL_RANK", rank))
