"""How the ranks of a job agree: a small key-value interface with deadlines, and what is built on it.

Implementations stand on the framework's own store (torch's ``Store``, JAX's coordination service), so
nothing in the background ever enters the training job's collectives. An implementation is three
methods; it proves itself by inheriting `flashpoint.testing.CoordinatorConformance`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod

from flashpoint.errors import DeadlineError


class Coordinator(ABC):
    """Bytes under keys, seen by all ranks of the job.

    A key is written once. It is removed once too: by its reader, where that is one rank (as in `gather`),
    else by its writer, when all have read it. Topics are chosen so that no two operations share keys; every
    rank calls the same operations with the same topics.

    Attributes:
        rank: of this process, 0 to ``world_size - 1``; rank 0 leads.
        world_size: number of ranks.
        local_rank: of this process among those of its node.
    """

    rank: int
    world_size: int
    local_rank: int
    _last_key = ""  # this rank's key of its last all_gather, to be removed at the next

    @abstractmethod
    def publish(self, key: str, value: bytes) -> None:
        """Make ``value`` visible to every rank under ``key``."""

    @abstractmethod
    def fetch(self, key: str, timeout_s: float) -> bytes:
        """The value under ``key``, as soon as it is there.

        Raises:
            DeadlineError: it was not published within ``timeout_s``.
        """

    @abstractmethod
    def remove(self, key: str) -> None:
        """Forget ``key``; one that is not there is no error."""

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def gather(self, topic: str, value: bytes, timeout_s: float) -> dict[int, bytes] | None:
        """The leader gets the values of all ranks that came within ``timeout_s``; others get None.

        Missing ranks are missing in the answer: who did not come is for the caller to judge. What the leader
        has read it removes; what comes too late stays.
        """
        if not self.is_leader:
            self.publish(f"{topic}/{self.rank}", value)
            return None
        deadline = time.monotonic() + timeout_s
        found = {self.rank: value}
        for rank in range(1, self.world_size):
            key = f"{topic}/{rank}"
            try:
                found[rank] = self.fetch(key, max(deadline - time.monotonic(), 0.0))
            except DeadlineError:
                continue
            self.remove(key)
        return found

    def broadcast(self, topic: str, value: bytes | None, timeout_s: float) -> bytes:
        """Every rank gets the leader's ``value`` (others pass None)."""
        if self.is_leader:
            assert value is not None
            if self.world_size > 1:
                self.publish(topic, value)
            return value
        return self.fetch(topic, timeout_s)

    def all_gather(self, topic: str, value: bytes, timeout_s: float) -> list[bytes]:
        """Every rank gets every rank's value, in the order of ranks.

        Raises:
            DeadlineError: naming the ranks that did not come.
        """
        for_all = self.world_size > 1
        if for_all:
            self.publish(f"{topic}/{self.rank}", value)
        deadline = time.monotonic() + timeout_s
        values, missing = [], []
        for rank in range(self.world_size):
            if rank == self.rank:
                values.append(value)
                continue
            try:
                values.append(self.fetch(f"{topic}/{rank}", max(deadline - time.monotonic(), 0.0)))
            except DeadlineError:
                missing.append(rank)
        if missing:
            raise DeadlineError(
                f"rank {self.rank} waited {timeout_s:g} s in {topic!r} for ranks {missing[:20]} of "
                f"{self.world_size}: they died, hang, or did not make the same call"
            )
        if for_all:
            # Everyone has come here, so everyone has left the all_gather before this one.
            if self._last_key:
                self.remove(self._last_key)
            self._last_key = f"{topic}/{self.rank}"
        return values


class SingleProcessCoordinator(Coordinator):
    """A job of one process: every operation answers at once."""

    rank = 0
    world_size = 1
    local_rank = 0

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def publish(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def fetch(self, key: str, timeout_s: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise DeadlineError(f"nothing was published under {key!r} within {timeout_s:g} s")
            return self._values[key]

    def remove(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)
