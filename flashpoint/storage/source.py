"""`Source`: a version's objects on this node, read from memory for a drain and verified on the way."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from flashpoint.checksums import DIGEST_BYTES, Bytes, chunk_digests
from flashpoint.errors import CorruptObjectError, StorageError
from flashpoint.manifest import CommitRecord, ObjectRecord, decode_summary
from flashpoint.objects import CheckpointObjectManager
from flashpoint.replication.inventory import Item

PART_BYTES: Final = 8 << 20
_PARTS_MAX: Final = 9_000  # of one object: S3 takes 10,000


class Source:
    """Objects of one version, and its manifest.

    Args:
        names: of the objects that this node drains.
        hold: keep them from being recycled until `let_go`, also when the version is given up. Else each is locked
            only for as long as a part of it is copied out, and one that is given up meanwhile ends the drain.

    Raises:
        FlashpointError, OSError: the version is not there any more.
    """

    def __init__(
        self, objects: CheckpointObjectManager, item: Item, names: Sequence[str], *, hold: bool
    ) -> None:
        self.key = item.key
        self.records = [item.records[name] for name in names]
        self._objects = objects
        self._container = objects.container(item.key.step)
        self._lock = threading.Lock()
        self._is_gone = False
        self._held: dict[str, Bytes] = {}
        self.manifest = objects.manifest_bytes(self._container)
        self.commit: CommitRecord
        self.commit, digest = decode_summary(self.manifest)
        if digest != self.key.digest:
            raise StorageError(f"step {self.key.step} was saved again")
        if hold:
            for record in self.records:
                self._held[record.name] = objects.map_object(self._container, record).data

    def parts(self, record: ObjectRecord) -> Iterator[bytes]:
        """The object's bytes, in parts of `part_bytes`, each compared with the manifest's digests.

        Raises:
            CorruptObjectError: they do not match.
            FlashpointError: the version was given up, or let go of.
        """
        size = part_bytes(record)
        for begin in range(0, record.nbytes, size):
            yield self._part(record, begin, min(begin + size, record.nbytes))

    def _part(self, record: ObjectRecord, begin: int, end: int) -> bytes:
        with self._lock:
            if self._is_gone:
                raise StorageError(f"step {self.key.step} was let go of: the storage makes no progress")
            data = self._held.get(record.name)
            if data is None:
                data = self._objects.map_object(self._container, record).data
            part = data[begin:end].tobytes()  # a copy: what is verified is what is written
            del data
        first, last = begin // record.chunk_bytes, -(-end // record.chunk_bytes)
        digests = chunk_digests(np.frombuffer(part, dtype=np.uint8), record.chunk_bytes)
        if digests != record.chunks[first * DIGEST_BYTES : last * DIGEST_BYTES]:
            raise CorruptObjectError(
                f"step {self.key.step}: object {record.name} is corrupt in memory between bytes {begin} and {end}: "
                "it is not drained"
            )
        return part

    def let_go(self) -> None:
        """Let the buffers be recycled; from any thread. What is read after that is an error."""
        with self._lock:
            self._is_gone = True
            self._held.clear()


def part_bytes(record: ObjectRecord) -> int:
    """Bytes of one part: whole chunks, about `PART_BYTES`, and no more parts than a storage takes."""
    wanted = max(PART_BYTES, -(-record.nbytes // _PARTS_MAX))
    return -(-wanted // record.chunk_bytes) * record.chunk_bytes
