"""A `Coordinator` over torch's own key-value store: no collective, a deadline on every wait."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, cast

import torch.distributed as dist

from flashpoint.coordinator import Coordinator, SingleProcessCoordinator
from flashpoint.errors import DeadlineError, FlashpointError

PIECE_BYTES: Final = 4 << 20  # a TCPStore drops the connection of who sends it more than 8 MiB at once
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
        self._idle: list[dist.Store] = []
        self._lock = threading.Lock()

    def publish(self, key: str, value: bytes) -> None:
        name = f"{self._prefix}/{key}"
        pieces = [value[i : i + PIECE_BYTES] for i in range(0, len(value), PIECE_BYTES)] or [b""]
        if len(pieces) > 1:
            self._pieces[key] = len(pieces)
        with self._connection(f"{key!r} was published") as store:
            # The first piece comes last: who finds it finds the others. (The stubs know no bytes.)
            for n in reversed(range(1, len(pieces))):
                store.set(f"{name}/{n}", pieces[n])  # type: ignore[arg-type]
            store.set(name, b"%d=%b" % (len(pieces), pieces[0]))  # type: ignore[arg-type]

    def fetch(self, key: str, timeout_s: float) -> bytes:
        name = f"{self._prefix}/{key}"
        with self._connection(f"{key!r} was awaited") as store:
            try:
                store.wait([name], max(timedelta(seconds=timeout_s), _WAIT_MIN))
            except RuntimeError as error:
                if not isinstance(error, dist.DistStoreError) and "timeout" not in str(error).lower():
                    raise
                deadline = DeadlineError(f"nothing was published under {key!r} within {timeout_s:g} s")
                deadline.__cause__ = error
            else:
                count, _, value = bytes(store.get(name)).partition(b"=")
                if int(count) == 1:
                    return value
                self._pieces[key] = int(count)
                rest = [bytes(store.get(f"{name}/{n}")) for n in range(1, int(count))]
                return b"".join((value, *rest))
        raise deadline

    def remove(self, key: str) -> None:
        name = f"{self._prefix}/{key}"
        with self._connection(f"{key!r} was removed") as store:
            store.delete_key(name)
            for n in range(1, self._pieces.pop(key, 1)):
                store.delete_key(f"{name}/{n}")

    @contextmanager
    def _connection(self, what: str) -> Iterator[dist.Store]:
        """A connection for one call: an idle one, or a new one where all are waiting."""
        with self._lock:
            store = self._idle.pop() if self._idle else None
        try:
            if store is None:
                store = cast(dist.Store, self._store.clone())  # type: ignore[attr-defined]
            yield store
        except RuntimeError as error:  # this connection is not used again
            raise FlashpointError(f"the job's store is gone while {what}: {error}") from error
        with self._lock:
            self._idle.append(store)


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
