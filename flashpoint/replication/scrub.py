"""`Scrubber`: the thread of an agent that verifies again, slowly, what lies in its node's memory.

It reads files and takes no lock for it, so that it keeps no buffer from being recycled: what matches its checksum is
good, whatever happened meanwhile, and only what does not is looked at again under a shared lock. What is
corrupt then is repaired by the agent's loop, from the other nodes that hold it; what nobody can give any more is
set aside, and with it the version is withdrawn on this node.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final

import msgspec
import numpy as np

from flashpoint.checksums import DIGEST_BYTES, Bytes, mismatches
from flashpoint.confined import NO_FILE
from flashpoint.errors import CheckpointNotFoundError, FlashpointError, ManifestError
from flashpoint.ids import CheckpointContainerId
from flashpoint.locks import try_lock
from flashpoint.manifest import MANIFEST_NAME, ObjectRecord
from flashpoint.memory import file_system
from flashpoint.objects import CheckpointObjectManager
from flashpoint.replication import limits
from flashpoint.replication.inventory import Item
from flashpoint.replication.messages import Key
from flashpoint.replication.orders import ScrubReport
from flashpoint.replication.scrub_schedule import IDLE_S, Held, Piece, ScrubSchedule
from flashpoint.telemetry import count, logger

_CLOSE_S: Final = 5.0


class Mending(Enum):
    """What came of an attempt to repair an object."""

    REPAIRED = "it is whole again"
    LOST = "every node that should hold it has no good copy of it either"
    FAILED = "it could not be had this time"


Mend = Callable[[Key, str], tuple[Mending, str]]
"""Repair an object, and say what came of it, and why; blocks."""


class Scrubber:
    """Scrubs the objects of one job root.

    Args:
        bytes_per_s: at most.
        is_busy: whether copies are being made; asked from this thread.
        mend: called in this thread.
    """

    def __init__(
        self,
        objects: CheckpointObjectManager,
        bytes_per_s: int,
        *,
        is_busy: Callable[[], bool],
        mend: Mend,
    ) -> None:
        self.report = ScrubReport()
        self._objects = objects
        self._is_busy = is_busy
        self._mend = mend
        self._schedule = ScrubSchedule(bytes_per_s)
        self._items: Mapping[Key, Item] = {}
        self._known: Mapping[Key, Item] = {}
        self._buffer: Bytes = np.empty(0, dtype=np.uint8)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flashpoint-scrub", daemon=True)
        self._thread.start()

    def offer(self, items: Mapping[Key, Item]) -> None:
        """These versions are in memory now. Returns at once."""
        self._items = dict(items)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(_CLOSE_S)

    # ---- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        wait_s = 0.0
        while not self._stop.wait(wait_s):
            try:
                wait_s = self._turn()
            except Exception as error:  # whatever it was: the next object may well be read
                count("agent_errors")
                logger.warning("the scrub of %s met an error", self._objects.job_root, exc_info=error)
                wait_s = IDLE_S

    def _turn(self) -> float:
        """Verify a piece; or for how long there is nothing to do."""
        items = self._items
        if items is not self._known:
            self._known = items
            self._schedule.found({key: self._held(item) for key, item in items.items()})
        piece = self._schedule.next(time.monotonic(), is_busy=self._is_busy())
        if not isinstance(piece, Piece):
            return min(piece, IDLE_S)
        try:
            bad = self._verify(items[piece.key], piece)
        except (FlashpointError, OSError) as error:
            logger.debug("%s of %s could not be verified: %s", piece.name, piece.key, error)
            bad = None
        now_s = time.monotonic()
        if bad is None:
            self._schedule.failed(piece.key, piece.name, now_s)
        elif bad:
            self._repair(piece.key, piece.name, bad)
        else:
            self._schedule.verified(piece, now_s)
            self._count(verified_bytes=piece.nbytes)
        return 0.0

    def _held(self, item: Item) -> dict[str, Held]:
        """What there is to verify of a version: also what has another size than it should."""
        held = {MANIFEST_NAME: Held(item.summary.nbytes, item.summary.nbytes)}
        for name in self._objects.object_names(self._objects.container(item.key.step)) & item.records.keys():
            record = item.records[name]
            held[name] = Held(record.nbytes, record.chunk_bytes)
        return held

    # ---- verifying --------------------------------------------------------------------------------

    def _verify(self, item: Item, piece: Piece) -> list[int] | None:
        """Its chunks that are not as its manifest says; None if that cannot be said: it is gone, or written anew."""
        container = self._objects.container(item.key.step)
        if piece.name == MANIFEST_NAME:
            return self._verify_manifest(container, item.key)
        record = item.records[piece.name]
        try:
            fd = self._objects.open_object(container, piece.name)
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
            is_there = piece.name in self._objects.object_names(container)
            return _all_of(piece) if is_there and self._is_still(container, item.key) else None
        with open(fd, "rb", buffering=0):
            if not self._bad_chunks(fd, record, piece):
                return []
            # Now in earnest. Under the lock, and with its name, it is what it was sealed to be, or corrupt.
            if not try_lock(fd, fcntl.LOCK_SH):
                return None
            named = os.stat(f"{container.path}/{piece.name}", follow_symlinks=False)
            if not os.path.samestat(named, os.fstat(fd)) or not self._is_still(container, item.key):
                return None
            return self._bad_chunks(fd, record, piece)

    def _bad_chunks(self, fd: int, record: ObjectRecord, piece: Piece) -> list[int]:
        status = os.fstat(fd)
        if status.st_size != record.nbytes:
            return _all_of(piece)
        if status.st_blocks * 512 < record.nbytes and file_system(self._objects.job_root).is_tmpfs:
            return _all_of(piece)  # a loader would not read holes: on a full tmpfs that is a SIGBUS
        data = self._bytes(piece.nbytes)
        position = 0
        while position < piece.nbytes:
            read = os.preadv(fd, [data[position:].data], piece.first * record.chunk_bytes + position)
            if not read:
                return _all_of(piece)
            position += read
        digests = record.chunks[piece.first * DIGEST_BYTES : piece.end * DIGEST_BYTES]
        bad = mismatches(data, record.chunk_bytes, digests, range(piece.end - piece.first))
        return [piece.first + chunk for chunk in bad]

    def _bytes(self, nbytes: int) -> Bytes:
        if len(self._buffer) < nbytes:
            self._buffer = np.empty(nbytes, dtype=np.uint8)
        return self._buffer[:nbytes]

    def _verify_manifest(self, container: CheckpointContainerId, key: Key) -> list[int] | None:
        try:
            return [] if self._objects.read_summary(container).digest == key.digest else None
        except CheckpointNotFoundError:
            return None
        except ManifestError:
            return None if key.step in self._objects.dirty_steps() else [0]

    def _is_still(self, container: CheckpointContainerId, key: Key) -> bool:
        """Whether the version here is the one that was looked at."""
        is_dirty = key.step in self._objects.dirty_steps()
        return not is_dirty and self._objects.read_summary(container).digest == key.digest

    # ---- what is corrupt --------------------------------------------------------------------------

    def _repair(self, key: Key, name: str, chunks: list[int]) -> None:
        which = f"chunk {', '.join(map(str, chunks[:5]))}{' ...' if len(chunks) > 5 else ''}"
        text = f"{key}: {name} is corrupt in this node's memory ({self._objects.job_root}), {which}"
        count("objects_corrupt")
        self._count(corrupt=1, last=text)
        logger.error("%s: getting it from a node that has it", text)
        mending, why = self._mend(key, name)
        now_s = time.monotonic()
        if mending is Mending.REPAIRED:
            count("objects_repaired")
            self._schedule.mended(key, name, now_s)
            self._count(repaired=1, last=f"{text}; repaired {why}")
            logger.warning("%s: %s is repaired %s", key, name, why)
        elif mending is Mending.LOST:
            self._withdraw(key, name, text, why)
        else:
            self._schedule.failed(key, name, now_s)
            self._count(last=f"{text}; not repaired yet: {why}")
            logger.error("%s: %s is not repaired yet: %s", key, name, why)

    def _withdraw(self, key: Key, name: str, text: str, why: str) -> None:
        container = self._objects.container(key.step)
        self._schedule.failed(key, name, time.monotonic())
        if not self._is_still(container, key):
            return
        self._objects.set_aside(container, name)
        count("versions_withdrawn")
        self._count(withdrawn=1, last=f"{text}; withdrawn: {why}")
        logger.error(
            "%s IS WITHDRAWN on this node: no good copy of %s is left (%s). A recovery goes to an older version, or to "
            "storage. The corrupt bytes stay beside it, as %s.corrupt, until the version is given up",
            key, name, why, name,
        )  # fmt: skip

    def _count(self, *, last: str | None = None, **more: int) -> None:
        changed: dict[str, Any] = {name: getattr(self.report, name) + value for name, value in more.items()}
        if last is not None:
            changed["last"] = last[: limits.REASON_CHARS_MAX]
        self.report = msgspec.structs.replace(self.report, **changed)


def _all_of(piece: Piece) -> list[int]:
    return list(range(piece.first, piece.end))
