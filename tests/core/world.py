"""A job of several ranks in one process: threads that share one dict, one saver and loader each."""

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from flashpoint.buffers import BufferObject
from flashpoint.config import FlashpointConfig
from flashpoint.coordinator import Coordinator
from flashpoint.dtypes import name_of
from flashpoint.errors import DeadlineError
from flashpoint.layout import Entry, ObjectLayout
from flashpoint.loader import MLFlashpointCheckpointLoader
from flashpoint.manifest import CommitRecord, Value
from flashpoint.objects import CheckpointObjectManager
from flashpoint.saver import MLFlashpointCheckpointSaver, PendingCheckpoint
from flashpoint.testing.coordinator import on_all_ranks
from flashpoint.values import to_json

T = TypeVar("T")
JOIN_S = 60


class Store:
    """The keys and values of one job."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()


class ThreadCoordinator(Coordinator):
    """One rank of a job whose ranks are threads. As strict as the strictest store: keys are written once."""

    def __init__(self, store: Store, rank: int, world_size: int, local_rank: int | None = None) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.local_rank = rank if local_rank is None else local_rank

    def publish(self, key: str, value: bytes) -> None:
        with self.store.changed:
            assert key not in self.store.values, f"{key} is published twice"
            self.store.values[key] = value
            self.store.changed.notify_all()

    def fetch(self, key: str, timeout_s: float) -> bytes:
        with self.store.changed:
            if not self.store.changed.wait_for(lambda: key in self.store.values, timeout_s):
                raise DeadlineError(f"nothing was published under {key!r} within {timeout_s:g} s")
            return self.store.values[key]

    def remove(self, key: str) -> None:
        with self.store.changed:
            self.store.values.pop(key, None)


def coordinators(world_size: int) -> list[ThreadCoordinator]:
    store = Store()
    return [ThreadCoordinator(store, rank, world_size) for rank in range(world_size)]


class Rank:
    """One rank's view of the job."""

    def __init__(
        self, root: str, coordinator: ThreadCoordinator, config: FlashpointConfig, epoch: int
    ) -> None:
        self.rank = coordinator.rank
        self.coordinator = coordinator
        self.objects = CheckpointObjectManager(root, rank=coordinator.rank, config=config)
        self.saver = MLFlashpointCheckpointSaver(self.objects, coordinator, epoch=epoch, writer="tests")
        self.loader = MLFlashpointCheckpointLoader(self.objects, coordinator)

    def stage(
        self,
        pending: PendingCheckpoint,
        arrays: Mapping[str, np.ndarray],
        values: Mapping[str, Any] | None = None,
        entries: Sequence[Entry] | None = None,
    ) -> None:
        """The staging of `saver.save`, also for shards: ``entries`` describe ``arrays`` where they are."""
        found = entries or [Entry(name, name_of(array.dtype), array.shape) for name, array in arrays.items()]
        layout = self.saver.plan(found)
        pending.values = [Value(name, to_json(value)) for name, value in (values or {}).items()]
        pending.staged.append(
            self.saver.stage(layout, lambda buffer: fill(buffer, layout, list(arrays.values())))
        )

    def save(self, step: int, *args: Any, overwrite: bool = False) -> CommitRecord:
        """As `saver.save`, with the arguments of `stage`."""
        pending = self.saver.begin(step)
        try:
            self.saver.initialize_checkpoint(pending, overwrite=overwrite)
            self.stage(pending, *args)
            self.saver.write(pending)
        except Exception as error:
            self.saver.withdraw(pending, error)
            raise
        record = self.saver.write_metadata(pending)
        self.saver.finalize(pending)
        return record


def fill(buffer: BufferObject, layout: ObjectLayout, arrays: Sequence[np.ndarray]) -> None:
    for array, begin, end in zip(arrays, layout.begins, layout.ends, strict=True):
        np.copyto(buffer.data[begin:end].view(array.dtype).reshape(array.shape), array)


class Job:
    """All ranks of a job. ``roots`` gives each rank's job root where they are not on one node."""

    def __init__(
        self,
        root: str,
        world_size: int,
        *,
        epoch: int = 0,
        roots: Sequence[str] | None = None,
        **settings: Any,
    ) -> None:
        config = FlashpointConfig.from_env(
            {}, **({"commit_timeout_s": 20, "recovery_timeout_s": 20} | settings)
        )
        self.root = root
        places = roots or [root] * world_size
        self.ranks = [
            Rank(place, coordinator, config, epoch)
            for place, coordinator in zip(places, coordinators(world_size), strict=True)
        ]

    @property
    def store(self) -> Store:
        return self.ranks[0].coordinator.store

    def on_all(self, call: Callable[[Rank], T]) -> list[T]:
        """``call`` on every rank at once; the results in the order of ranks, errors in their place."""

        def guarded(rank: Rank) -> Any:
            try:
                return call(rank)
            except Exception as error:
                return error

        return on_all_ranks(self.ranks, guarded)  # type: ignore[arg-type, type-var]

    def each(self, call: Callable[[Rank], T]) -> list[T]:
        """As `on_all`, where no rank may fail."""
        results = self.on_all(call)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def save(self, step: int, **options: Any) -> list[CommitRecord]:
        """A version whose contents name the step and the rank."""
        return self.each(lambda rank: rank.save(step, contents(step, rank.rank), {"step": step}, **options))

    @contextmanager
    def impatient(self, timeout_s: float = 0.3) -> Iterator[None]:
        """For saves that somebody will wait in vain for; all others have all the time in the world."""
        usual = self.ranks[0].saver.config
        for rank in self.ranks:
            rank.saver.config = dataclasses.replace(usual, commit_timeout_s=timeout_s)
        yield
        for rank in self.ranks:
            rank.saver.config = usual

    def close(self) -> None:
        for rank in self.ranks:
            rank.objects.close()


def contents(step: int, rank: int = 0, size: int = 1000) -> dict[str, np.ndarray]:
    """Arrays that tell which step and rank they are of."""
    return {
        f"of_rank_{rank}": np.full(size, step * 1000 + rank, np.int64),
        "same_everywhere": np.full((2, 3), step, np.float32),
        "own": np.array(rank, np.int32),
    }


def shard(rows: np.ndarray, rank: int, world_size: int) -> tuple[np.ndarray, Entry]:
    """The rank's even share of the rows of an array, and the entry that describes it."""
    begin, end = (len(rows) * r // world_size for r in (rank, rank + 1))
    part = rows[begin:end]
    origin = (begin, *(0 for _ in rows.shape[1:]))
    return part, Entry("sharded", name_of(rows.dtype), part.shape, origin, rows.shape)
