"""Draining one version by hand: the agents' way to storage, gone by a person, with or without an agent.

Each node brings what it holds. Where that is not all, the same call on other nodes, in any order, adds what they hold,
and whoever is last writes the manifest: so nobody waits for anybody. Called again, it goes on where it was cut off.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from flashpoint.checksums import chunk_digests
from flashpoint.config import FlashpointConfig
from flashpoint.errors import (
    CheckpointNotFoundError,
    CorruptObjectError,
    DeadlineError,
    ProtocolError,
    ReplicationError,
    StorageError,
)
from flashpoint.ids import CheckpointObjectId
from flashpoint.manifest import ObjectRecord
from flashpoint.objects import CheckpointObjectManager
from flashpoint.replication.agent_folder import AGENT_NAME, AgentFolder
from flashpoint.replication.inventory import Inventory, Item
from flashpoint.replication.keys import read_keys
from flashpoint.replication.messages import Key
from flashpoint.retention import Version
from flashpoint.storage import claim
from flashpoint.storage.drain import Drain
from flashpoint.storage.records import DRAINS_NAME, parse_drain
from flashpoint.storage.source import Source, part_bytes
from flashpoint.storage.store import Store, open_store
from flashpoint.storage.throttle import Throttle

_WATCH_S: Final = 0.2

Advance = Callable[[int], None]  # told the bytes that are done


@dataclass(frozen=True)
class Drained:
    """How a drain by hand ended.

    Attributes:
        was_there: the storage had this very version already.
        uploaded_nbytes: written to storage now; the rest was there from an earlier call.
        missing: objects that no node has brought yet: the version is not drained before they are.
    """

    key: Key
    was_there: bool
    nbytes: int
    uploaded_nbytes: int
    seconds: float
    missing: tuple[str, ...]


class _Counted(Source):
    """A source that tells of each part that was read from it to be uploaded."""

    advance: Advance
    uploaded_nbytes = 0

    def parts(self, record: ObjectRecord) -> Iterator[bytes]:
        for part in super().parts(record):
            yield part
            self.uploaded_nbytes += len(part)
            self.advance(len(part))


class _Moved:
    """When something was last done."""

    def __init__(self) -> None:
        self.last_s = time.monotonic()

    def __call__(self) -> None:
        self.last_s = time.monotonic()


def choose(objects: CheckpointObjectManager, step: int | None) -> Item:
    """The version of this step, or the newest; it must be complete.

    Raises:
        CheckpointNotFoundError: there is none.
    """
    items = Inventory(objects).look()
    if step is not None:
        found = next((item for key, item in items.items() if key.step == step), None)
        if found is None:
            raise CheckpointNotFoundError(f"{objects.job_root} has no complete version of step {step}")
        return found
    if not items:
        raise CheckpointNotFoundError(f"{objects.job_root} has no complete version that this user can read")
    return max(items.values(), key=lambda item: (item.key.epoch, item.key.step))


def others_under_way(config: FlashpointConfig, key: Key) -> list[Version]:
    """Other versions whose drains to this storage were begun, and came to no end yet."""
    keys = [parse_drain(name) for name in open_store(config).folders(DRAINS_NAME)]
    return sorted(Version(one.epoch, one.step) for one in keys if one is not None and one != key)


def drain(
    objects: CheckpointObjectManager,
    config: FlashpointConfig,
    item: Item,
    *,
    read_back: bool = True,
    advance: Advance = lambda nbytes: None,
) -> Drained:
    """Bring what this node holds of a version to ``config.storage``, and commit it if that, with what is there, is all.

    Args:
        read_back: read every object that this node brings again, and compare it with its checksums.
        advance: told the bytes that are done, of those that this node holds; twice of each with ``read_back``.

    Raises:
        StorageError, CorruptObjectError: it cannot be written, or is not what it should be, in memory or in storage.
        DeadlineError: the storage made no progress for ``config.storage_timeout_s``.
    """
    begin_s = time.perf_counter()
    owner = claim.check(config, objects.job_root)
    epoch = max(objects.read_epoch(), item.key.epoch)
    if owner is None or owner.epoch < epoch:
        # So that a job which has lost all of its memory goes on with a later epoch than what it finds there.
        claim.claim(config, objects.job_root, _job_of(objects) or (owner.job if owner else ""), epoch, owner)
    store = open_store(config)
    source = _Counted(objects, item, sorted(item.held), hold=True)
    source.advance = advance
    stop, moved = threading.Event(), _Moved()
    index = _index_of(objects, item)
    work = Drain(
        store,
        source,
        index=index,
        leader=index,  # whoever comes last commits
        throttle=Throttle(config.storage_bytes_per_s, stop),
        stop=stop,
        moved=moved,
        nodes_wait_s=0.0,
    )
    nbytes = sum(record.nbytes for record in source.records)
    missing: list[str] = []

    def go() -> bool:
        if work.is_committed():
            return True
        work.begin()
        work.upload()
        if read_back:
            _read_back(store, source, moved, advance)
        missing.extend(work.unconfirmed())
        if not missing:
            try:
                work.commit()
            except StorageError:
                if not work.is_committed():  # by another node, this very moment
                    raise
        return False

    try:
        was_there = _watched(go, moved, stop, config)
    finally:
        source.let_go()
    seconds = time.perf_counter() - begin_s
    return Drained(item.key, was_there, nbytes, source.uploaded_nbytes, seconds, tuple(missing))


def _watched(go: Callable[[], bool], moved: _Moved, stop: threading.Event, config: FlashpointConfig) -> bool:
    """``go()`` in a thread, for as long as it makes progress: a file system that hangs cannot be told to return."""
    done: list[bool] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            done.append(go())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="flashpoint-drain", daemon=True)
    moved()
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_WATCH_S)
            if time.monotonic() - moved.last_s > 2 * config.storage_timeout_s:  # one request may be repeated
                raise DeadlineError(
                    f"{config.storage} made no progress for {2 * config.storage_timeout_s:g} s: called again, "
                    "the drain goes on from there"
                )
    finally:
        stop.set()
    if failure:
        raise failure[0]
    return done[0]


def _read_back(store: Store, source: Source, moved: _Moved, advance: Advance) -> None:
    for record in source.records:
        name, size = f"step-{source.key.step}_ckpt/{record.name}", part_bytes(record)
        digests = b""
        for begin in range(0, record.nbytes, size):
            part = store.read(name, begin, min(begin + size, record.nbytes))
            digests += chunk_digests(np.frombuffer(part, dtype=np.uint8), record.chunk_bytes)
            moved()
            advance(len(part))
        if digests != record.chunks:
            store.delete([name])  # so that it is written again by the next call
            raise CorruptObjectError(
                f"{store.url}/{name} does not read back as it was written: it was deleted there; try again"
            )


def _job_of(objects: CheckpointObjectManager) -> str:
    """The name of the job's keys; empty where it has none, or none that can be used."""
    try:
        keys = read_keys(f"{objects.job_root}/{AGENT_NAME}")
    except (ProtocolError, OSError):
        return ""
    return keys.job if keys is not None else ""


def _index_of(objects: CheckpointObjectManager, item: Item) -> int:
    """A number that no other node of the job has: its index, or in a job without copies its first rank."""
    try:
        folder = AgentFolder(objects.job_root, create=False)
        try:
            assignment = folder.read_assignment()
        finally:
            folder.close()
    except (ReplicationError, ProtocolError):
        assignment = None
    if assignment is not None:
        return assignment.index
    return min((CheckpointObjectId.parse(name).rank for name in item.held), default=0)
