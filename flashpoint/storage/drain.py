"""`Drain`: one version's way from this node's memory to storage.

The leader marks the drain as begun; every node uploads the objects of its own ranks and confirms each; when all
objects of the manifest are confirmed, the leader writes the manifest, which is the commit. The storage itself is
where the nodes meet: they say nothing to each other. An interrupted drain is gone on with by whoever finds the
version still in memory, and what was confirmed is not uploaded again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from flashpoint.errors import StorageError
from flashpoint.manifest import ObjectRecord
from flashpoint.replication.messages import Key
from flashpoint.storage.records import (
    DRAINS_NAME,
    Confirmation,
    decode,
    drain_name,
    encode,
    is_node,
    is_ours,
    manifest_name,
    node_name,
    parse_drain,
)
from flashpoint.storage.source import Source, part_bytes
from flashpoint.storage.store import Store, Stored
from flashpoint.storage.throttle import Throttle
from flashpoint.telemetry import count, logger

POLL_S: Final = 1.0
NODES_WAIT_S: Final = 3600.0  # without a sign of any node: the job, or its agents, are dead


class Stopped(Exception):
    """The agent ends, or a new epoch has begun."""


class Drain:
    """One version's drain, on one node.

    Args:
        index: of this node.
        leader: index of the node that begins and commits.
        moved: called whenever something has been done.
        nodes_wait_s: longest that the leader waits without a sign of any other node.
    """

    def __init__(
        self,
        store: Store,
        source: Source,
        *,
        index: int,
        leader: int,
        throttle: Throttle,
        stop: threading.Event,
        moved: Callable[[], None],
        nodes_wait_s: float = NODES_WAIT_S,
    ) -> None:
        self._nodes_wait_s = nodes_wait_s
        self._store = store
        self._source = source
        self._index, self._leader = index, leader
        self._throttle = throttle
        self._stop = stop
        self._moved = moved
        self._folder = f"step-{source.key.step}_ckpt"
        self._drain = f"{DRAINS_NAME}/{drain_name(source.key)}"
        self._read: dict[str, tuple[Stored, Confirmation]] = {}

    # ---- every node -------------------------------------------------------------------------------

    def is_committed(self) -> bool:
        """Whether the storage has this very version."""
        manifest, name = self._source.manifest, manifest_name(self._source.key.step)
        stored = self._store.head(name)
        return stored is not None and stored.nbytes == len(manifest) and self._store.read(name) == manifest

    def upload(self) -> None:
        """Bring this node's objects there, and confirm them; ends early where the leader has given the drain up.

        Raises:
            StorageError, CorruptObjectError: one cannot be written, or is not what it should be.
        """
        known = self._confirmed()
        there = self._store.files(self._folder)
        mine = dict(self._read[self._mine][1].objects) if self._mine in self._read else {}
        for record in self._source.records:
            stored = there.get(record.name)
            if stored is None or stored.nbytes != record.nbytes or known.get(record.name) != tuple(stored):
                stored = self._upload(record)
            mine[record.name] = (stored.nbytes, stored.tag)
            self._confirm(Confirmation(objects=mine))
            if self._index != self._leader and not self._is_wanted():
                return

    def unconfirmed(self) -> list[str]:
        """Objects of the version that no node has confirmed yet."""
        confirmed = self._confirmed()
        return [record.name for record in self._source.commit.objects if record.name not in confirmed]

    def _upload(self, record: ObjectRecord) -> Stored:
        name, size = f"{self._folder}/{record.name}", part_bytes(record)
        if record.nbytes <= size:
            self._store.write(name, b"".join(self._parts(record)))
        else:
            self._store.write_parts(name, self._parts(record), size)
        stored = self._store.head(name)
        if stored is None or stored.nbytes != record.nbytes:
            raise StorageError(f"{self._store.url}/{name} is not what was written there: {stored}")
        count("bytes_drained", record.nbytes)
        return stored

    def _parts(self, record: ObjectRecord) -> Iterator[bytes]:
        for part in self._source.parts(record):
            self._throttle.take(len(part), self._moved)
            if self._stop.is_set():
                raise Stopped
            self._moved()
            yield part

    def _confirm(self, confirmation: Confirmation) -> None:
        self._store.write(f"{self._drain}/{self._mine}", encode(confirmation))
        self._moved()

    @property
    def _mine(self) -> str:
        return node_name(self._index)

    def _confirmed(self) -> dict[str, tuple[int, str]]:
        """What all nodes have confirmed; raises `StorageError` where one cannot go on."""
        found = {name: stored for name, stored in self._store.files(self._drain).items() if is_node(name)}
        for name, stored in found.items():
            if name not in self._read or self._read[name][0] != stored:
                data = self._store.read(f"{self._drain}/{name}")
                self._read[name] = (stored, decode(data, Confirmation, f"{self._drain}/{name}"))
                self._moved()
        self._read = {name: read for name, read in self._read.items() if name in found}
        return {name: entry for _, said in self._read.values() for name, entry in said.objects.items()}

    def _is_wanted(self) -> bool:
        return self._store.head(f"{self._drain}/{node_name(self._leader)}") is not None

    def _pause(self) -> None:
        if self._stop.wait(POLL_S):
            raise Stopped

    # ---- another node than the leader -------------------------------------------------------------

    def await_commit(self) -> None:
        """Wait until the leader has committed the version, or given up."""
        while self._is_wanted():
            self._pause()

    # ---- the leader -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Tell the other nodes that this version is being drained now, in an empty folder."""
        for name in self._store.folders(DRAINS_NAME):
            key = parse_drain(name)
            if key is not None and key != self._source.key:
                abandon(self._store, key, self._leader)
        name = manifest_name(self._source.key.step)
        if (
            self._store.head(name) is not None
        ):  # an earlier save of this step, which the job has gone back behind
            self._store.delete([name])
        wanted = {record.name for record in self._source.commit.objects}
        strays = [
            found for found in self._store.files(self._folder) if is_ours(found) and found not in wanted
        ]
        self._store.delete([f"{self._folder}/{stray}" for stray in strays])
        self._confirmed()
        refusals = [name for name, (_, said) in self._read.items() if said.reason]
        self._store.delete([f"{self._drain}/{name}" for name in refusals])
        if self._mine not in self._read or self._mine in refusals:
            self._confirm(Confirmation())

    def commit(self) -> None:
        """Write the manifest when all nodes have confirmed all objects.

        Raises:
            StorageError: a node cannot go on, gives no sign, or an object was changed meanwhile.
        """
        key, records = self._source.key, self._source.commit.objects
        last: dict[str, tuple[int, str]] = {}
        last_s = time.monotonic()
        while True:
            confirmed = self._confirmed()
            for name, (_, said) in self._read.items():
                if said.reason:
                    raise StorageError(f"{name} cannot drain step {key.step}: {said.reason}")
            if all(record.name in confirmed for record in records):
                break
            if confirmed != last:
                last, last_s = confirmed, time.monotonic()
            elif time.monotonic() - last_s > self._nodes_wait_s:
                missing = next(record.name for record in records if record.name not in confirmed)
                raise StorageError(
                    f"no node has drained {missing} of step {key.step} in {self._nodes_wait_s:.0f} s"
                )
            self._pause()
        there = self._store.files(self._folder)
        for record in records:
            stored = there.get(record.name)
            if stored is None or stored.nbytes != record.nbytes or tuple(stored) != confirmed[record.name]:
                abandon(self._store, key, self._leader)  # what was confirmed is not true: all anew
                raise StorageError(f"{self._folder}/{record.name} has changed since it was drained: {stored}")
        self._store.write(manifest_name(key.step), self._source.manifest)
        if not self.is_committed():
            raise StorageError(f"{manifest_name(key.step)} is not what was written there")
        abandon(self._store, key, self._leader)


def abandon(store: Store, key: Key, leader: int) -> None:
    """Delete what nodes have said of a drain, the leader's word first: with it, the drain is over."""
    folder = f"{DRAINS_NAME}/{drain_name(key)}"
    first = node_name(leader)
    # Also where it is gone: a folder that a crash left empty goes with the last name that is deleted in it.
    names = sorted({first, *store.files(folder)}, key=lambda name: (name != first, name))
    store.delete([f"{folder}/{name}" for name in names])


def refuse(store: Store, key: Key, index: int, reason: str) -> None:
    """Tell the leader that this node has not got the version that is being drained."""
    logger.warning("step %d cannot be drained: %s", key.step, reason)
    name = f"{DRAINS_NAME}/{drain_name(key)}/{node_name(index)}"
    store.write(name, encode(Confirmation(reason=reason)))
