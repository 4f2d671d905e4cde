"""`StorageLoader`: the newest version that every rank can read from storage, when memory has none.

A `StorageView` is a view like any other, whose bytes come by range reads: only the chunks that a rank is going to
use, each compared with its digest in the manifest before a value of it is seen.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
import numpy as np

from flashpoint import manifest as manifests
from flashpoint.checksums import Bytes
from flashpoint.config import FlashpointConfig
from flashpoint.coordinator import Coordinator
from flashpoint.errors import (
    CheckpointNotFoundError,
    CorruptObjectError,
    FlashpointError,
    ManifestError,
    StorageError,
    reason_of,
)
from flashpoint.ids import CheckpointContainerId
from flashpoint.manifest import Manifest, ObjectRecord
from flashpoint.objects import MappedObject
from flashpoint.peers import Needs
from flashpoint.retention import Version, newest_first
from flashpoint.retrieval import Need
from flashpoint.storage.catalogue import Catalogue
from flashpoint.storage.records import manifest_name
from flashpoint.storage.store import Readable, Store, bounded, open_store
from flashpoint.telemetry import count, logger
from flashpoint.view import CheckpointView

READ_BYTES: Final = 16 << 20  # of one request, at most
_READERS: Final = 4  # requests at a time, of each rank


class _StoredObjects:
    """A storage's manifests and objects; an object's bytes are there once they were read."""

    def __init__(self, store: Readable, config: FlashpointConfig) -> None:
        self.config = config
        self.store = store

    def read_manifest(self, container: CheckpointContainerId) -> Manifest:
        name = manifest_name(container.step)
        data = self.store.read(name)
        try:
            manifest = manifests.decode(data)
        except ManifestError as error:
            raise ManifestError(f"{self.store.url}/{name}: {error}") from error
        if manifest.step != container.step:
            raise ManifestError(f"{self.store.url}/{name} is the manifest of step {manifest.step}")
        return manifest

    def held_objects(self, container: CheckpointContainerId, records: Iterable[ObjectRecord]) -> set[str]:
        return {record.name for record in records}  # all are within reach

    def map_object(
        self, container: CheckpointContainerId, record: ObjectRecord, *, warm: bool = False
    ) -> MappedObject:
        memory = mmap.mmap(-1, max(record.nbytes, 1))  # takes no memory until something is read into it
        data = np.frombuffer(memory, dtype=np.uint8, count=record.nbytes)
        return MappedObject(record, f"{self.store.url}/{container.name}/{record.name}", data)


class StorageView(CheckpointView):
    """A drained version, opened by one rank. Its bytes are always verified."""

    def __init__(
        self, store: Readable, config: FlashpointConfig, container: CheckpointContainerId, *, rank: int
    ) -> None:
        super().__init__(_StoredObjects(store, config), container, rank=rank, verify=True)
        self._store = store
        self._read: dict[str, set[int]] = {}
        self.read_nbytes = 0

    def mapped(self, record: ObjectRecord, begin: int, end: int) -> MappedObject:
        self.fetch([Need(record, begin, end)])
        return super().mapped(record, begin, end)

    def fetch(self, needs: Iterable[Need]) -> None:
        """Read what is not here yet of these ranges, several at a time, and verify it.

        Raises:
            CorruptObjectError: an object is missing, too short, or not what the manifest says.
            StorageError: the storage fails.
        """
        needs = list(needs)
        runs = [run for need in needs for run in self._missing(need)]
        if runs:
            with ThreadPoolExecutor(
                min(_READERS, len(runs)), thread_name_prefix="flashpoint-storage"
            ) as pool:
                list(pool.map(self._fill, runs))
        for need in needs:
            if need.begin < need.end:
                super().mapped(need.record, need.begin, need.end)

    def _missing(self, need: Need) -> list[tuple[ObjectRecord, Bytes, int, int]]:
        """Runs of chunks to be read; from now on they count as read."""
        record = need.record
        if need.begin >= need.end:
            return []
        data = super().mapped(record, 0, 0).data
        size, read = record.chunk_bytes, self._read.setdefault(record.name, set())
        wanted = [i for i in range(need.begin // size, -(-need.end // size)) if i not in read]
        read.update(wanted)
        runs: list[tuple[ObjectRecord, Bytes, int, int]] = []
        for i in wanted:
            begin, end = i * size, min((i + 1) * size, record.nbytes)
            if runs and runs[-1][3] == begin and end - runs[-1][2] <= READ_BYTES:
                runs[-1] = (record, data, runs[-1][2], end)
            else:
                runs.append((record, data, begin, end))
        return runs

    def _fill(self, run: tuple[ObjectRecord, Bytes, int, int]) -> None:
        record, data, begin, end = run
        name = f"{self.container.name}/{record.name}"
        try:
            found = self._store.read(name, begin, end)
        except CheckpointNotFoundError:
            raise CorruptObjectError(
                f"step {self.container.step}: object {record.name} is missing in {self._store.url}"
            ) from None
        if len(found) != end - begin:
            raise CorruptObjectError(
                f"step {self.container.step}: object {record.name} in {self._store.url} is cut off: it has "
                f"{begin + len(found)} bytes, its manifest says {record.nbytes}"
            )
        data[begin:end] = np.frombuffer(found, dtype=np.uint8)
        self.read_nbytes += len(found)


class StorageLoader:
    """Loads drained versions, for one rank; all ranks make the same calls.

    Args:
        job_root: of this node, for names.
    """

    def __init__(self, job_root: str, config: FlashpointConfig, coordinator: Coordinator) -> None:
        self._job_root = job_root
        self._config = config
        self._coordinator = coordinator
        self._agreements = 0

    def latest(self, needs: Needs, *, step: int | None = None) -> StorageView | None:
        """The newest drained version of which every rank has read and verified what it needs; None if there is none.

        Args:
            needs: what this rank is going to read of a version.
            step: this one, and no other.

        Raises:
            FlashpointError: on all ranks, where the storage cannot be read, or holds only what is not usable: that
                is no reason to start from scratch.
        """
        store = open_store(self._config)
        reasons = []
        for version in self._candidates(store, step):
            view, reason = self._open(store, version, needs)
            if view is not None:
                return view
            reasons.append(reason)
            count("versions_rejected")
            logger.warning("step %d in storage cannot be loaded: %s", version.step, reason)
        if reasons:
            raise CorruptObjectError(
                f"no version in {store.url} can be loaded; the newest one because: {reasons[0]}"
            )
        return None

    def _candidates(self, store: Store, step: int | None) -> list[Version]:
        """Newest first, as the leader sees them: all ranks must try the same."""
        found: list[Version] = []
        error = ""
        if self._coordinator.is_leader:
            try:
                found = bounded(lambda: Catalogue(store).look(), self._patience_s, store.url)
            except (FlashpointError, OSError) as failure:
                error = reason_of(failure)
        answer = self._all_gather((error, found))[0]
        if answer[0]:
            raise StorageError(f"the storage cannot be read: {answer[0]}")
        versions = newest_first(Version(*pair) for pair in answer[1])
        return [version for version in versions if step in (None, version.step)]

    def _open(self, store: Store, version: Version, needs: Needs) -> tuple[StorageView | None, str]:
        container = CheckpointContainerId(self._job_root, version.step)
        rank = self._coordinator.rank
        view, error = None, ""
        try:
            view = bounded(
                lambda: StorageView(store, self._config, container, rank=rank), self._patience_s, store.url
            )
            wanted = needs(view)
            opened = view
            bounded(lambda: opened.fetch(wanted), self._patience_s, store.url)
        except (FlashpointError, OSError) as failure:
            error = reason_of(failure)
        answers = self._all_gather((error, view.manifest.digest if view is not None else ""))
        reasons = [f"rank {rank}: {reason}" for rank, (reason, _) in enumerate(answers) if reason]
        if not reasons and len({digest for _, digest in answers}) > 1:
            reasons = ["the ranks found different saves of it"]
        if not reasons:
            return view, ""
        if view is not None:
            view.close()
        return None, "; ".join(reasons)

    @property
    def _patience_s(self) -> float:
        return self._config.recovery_timeout_s

    def _all_gather(self, value: Sequence[Any]) -> list[Any]:
        self._agreements += 1
        answers = self._coordinator.all_gather(
            f"storage/{self._agreements}", msgspec.msgpack.encode(value), self._config.recovery_timeout_s
        )
        return [msgspec.msgpack.decode(answer) for answer in answers]
