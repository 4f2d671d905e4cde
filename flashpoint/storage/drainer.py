"""`Drainer`: the thread of an agent that brings versions to storage, one after the other.

The agent's loop tells it which replicated versions there are (`offer`), and never waits for it. Whatever the storage
does, refuse, hang or fill up, costs at most the memory of one version, for ``storage_timeout_s`` without progress.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from typing import Final

from flashpoint.config import FlashpointConfig
from flashpoint.errors import CheckpointNotFoundError, FlashpointError, ManifestError, reason_of
from flashpoint.manifest import decode_summary
from flashpoint.objects import CheckpointObjectManager
from flashpoint.replication.inventory import Item
from flashpoint.replication.messages import Key
from flashpoint.retention import Version
from flashpoint.storage import claim, schedule
from flashpoint.storage.catalogue import Catalogue
from flashpoint.storage.drain import POLL_S, Drain, Stopped, abandon, refuse
from flashpoint.storage.local import is_temporary
from flashpoint.storage.records import DRAINS_NAME, drain_name, is_ours, manifest_name, node_name, parse_drain
from flashpoint.storage.schedule import Candidate
from flashpoint.storage.source import Source
from flashpoint.storage.store import open_store
from flashpoint.storage.throttle import Throttle
from flashpoint.telemetry import count, logger, warn_once

IDLE_POLL_S: Final = 15.0  # between two looks for a drain that the leader began and this node did not expect
AGAIN_S: Final = 1.0
AGAIN_MAX_S: Final = 60.0
_FAILURES_MAX: Final = 3  # of drains in a row, before an agent that is not needed for anything else may leave
_CLOSE_S: Final = 1.0


class Drainer:
    """Drains the versions of one job root, in one epoch.

    Args:
        job: of the job's keys.
        index, leader: of this node, and of the one that decides.
        ranks: of this node, whose objects it drains.
    """

    def __init__(
        self,
        objects: CheckpointObjectManager,
        config: FlashpointConfig,
        *,
        job: str,
        epoch: int,
        index: int,
        leader: int,
        ranks: Collection[int],
    ) -> None:
        self.error = ""
        self._objects, self._config = objects, config
        self._job, self._epoch = job, epoch
        self._index, self._leader = index, leader
        self._ranks = ranks
        self._store = open_store(config)
        self._catalogue = Catalogue(self._store)
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._throttle = Throttle(config.storage_bytes_per_s, self._stop)
        self._lock = threading.Lock()  # over what follows; never held while the storage is asked
        self._items: dict[Key, Item] = {}
        self._seen: set[Version] = set()
        self._last: Candidate | None = None
        self._knows_last = False
        self._pinned: Source | None = None
        self._may_repin = True
        self._active: Source | None = None
        self._is_final = False
        self._refused: Key | None = None
        self._failures = 0
        self._not_before_s = 0.0
        self._moved_s = time.monotonic()
        self._next_poll_s = self._next_look_s = 0.0
        self._thread = threading.Thread(target=self._run, name="flashpoint-drain", daemon=True)
        self._thread.start()

    # ---- for the agent's loop ---------------------------------------------------------------------

    def offer(self, items: Sequence[Item]) -> None:
        """These replicated versions are in memory now. Returns at once."""
        with self._lock:
            self._items = {item.key: item for item in items}
            self._seen.update(_version(item.key) for item in items)
            if self._active is not None and self._stalled_s > self._config.storage_timeout_s:
                self._active.let_go()  # memory is the job's before it is the storage's
            self._pin()
        self._wake.set()

    def release(self) -> None:
        """The job is over: what it ends with is drained too, whatever the rules say."""
        with self._lock:
            self._is_final = True
            self._pin()
        self._wake.set()

    @property
    def is_busy(self) -> bool:
        """Whether something is being drained, or is about to be; not where the storage hangs or refuses."""
        with self._lock:
            if self._stalled_s > 2 * self._config.storage_timeout_s:
                return False
            if self._failures >= _FAILURES_MAX:
                return False
            return self._active is not None or self._pinned is not None or self._due() is not None

    def close(self) -> None:
        """End it. A thread that hangs in a file system is left behind: it writes nothing of a later epoch."""
        self._stop.set()
        self._wake.set()
        with self._lock:
            for source in (self._active, self._pinned):
                if source is not None:
                    source.let_go()
            self._pinned = None
        self._thread.join(_CLOSE_S)

    @property
    def last(self) -> Version | None:
        """The newest version that was drained."""
        with self._lock:
            return self._last.version if self._last is not None else None

    # ---- what to drain: called with the lock held -------------------------------------------------

    @property
    def _stalled_s(self) -> float:
        return time.monotonic() - self._moved_s

    def _due(self) -> Key | None:
        if not self._knows_last:
            return None
        last = self._last
        candidates = [_candidate(item) for item in self._items.values()]
        version = schedule.next_to_drain(
            candidates,
            last,
            sum(last is None or seen > last.version for seen in self._seen),
            every_n=self._config.storage_every_n,
            every_s=self._config.storage_every_s,
            is_final=self._is_final,
        )
        return next((key for key in self._items if _version(key) == version), None)

    def _pin(self) -> None:
        """Hold the version that is due until its turn comes; on a node that waits for the leader, it may go before."""
        if self._active is not None or self._stop.is_set() or time.monotonic() < self._not_before_s:
            return
        key = self._due()
        if key is None or (self._pinned is not None and (self._pinned.key == key or not self._may_repin)):
            return
        source = self._source(key)
        if source is None:
            return
        if self._pinned is not None:
            self._pinned.let_go()
        self._pinned, self._may_repin = source, self._is_leader
        if self._active is None:
            self._moved_s = time.monotonic()

    def _source(self, key: Key) -> Source | None:
        item = self._items.get(key)
        if item is None:
            return None
        try:
            here = sum(record.nbytes for name, record in item.records.items() if name in item.held)
            pool = self._objects.pool
            hold = schedule.may_hold(pool.linked_bytes(), here, pool.memory_limit_bytes)
            if not hold:
                warn_once(
                    f"drain-holds:{self._objects.job_root}",
                    f"the memory of {self._objects.job_root} has no room to keep a version while it is drained: "
                    "one that is superseded meanwhile is not drained; raise memory_limit_bytes",
                )
            return Source(self._objects, item, item.own(self._ranks), hold=hold)
        except (FlashpointError, OSError) as error:
            logger.info("step %d is not drained: %s", key.step, error)
            return None

    @property
    def _is_leader(self) -> bool:
        return self._index == self._leader

    # ---- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(POLL_S)
            self._wake.clear()
            if self._stop.is_set() or time.monotonic() < self._not_before_s:
                continue
            try:
                self._turn()
                self._failures, self.error = 0, ""
            except Stopped:
                continue
            except Exception as error:  # whatever a storage may do: the next version may well be drained
                self._fail(error)
            finally:
                self._end_turn()

    def _fail(self, error: Exception) -> None:
        count("drains_failed")
        self.error = reason_of(error)
        again_s = min(AGAIN_S * 2**self._failures, AGAIN_MAX_S)
        logger.warning("draining to storage failed, the next try is in %.0f s: %s", again_s, self.error)
        with self._lock:
            self._failures += 1
            self._not_before_s = time.monotonic() + again_s
            if self._pinned is not None:
                self._pinned.let_go()
            self._pinned = None

    def _end_turn(self) -> None:
        with self._lock:
            if self._active is not None:
                self._active.let_go()
            self._active = None
            self._may_repin = True

    def _turn(self) -> None:
        if not self._knows_last:
            self._learn()
        if self._is_leader:
            source = self._take(None)
            if source is not None:
                self._lead(source)
            return
        if time.monotonic() < self._next_poll_s:
            return
        with self._lock:
            waits = self._pinned is not None
        if not waits and time.monotonic() >= self._next_look_s:
            self._next_look_s = time.monotonic() + IDLE_POLL_S
            self._learn()  # it may have been drained without this node's help
            waits = True
        if waits:
            self._next_poll_s = time.monotonic() + POLL_S
            self._follow()

    def _learn(self) -> None:
        """What the storage has already."""
        newest = max(self._catalogue.look(), default=None)
        last = None
        if newest is not None:
            try:
                record, _ = decode_summary(self._store.read(manifest_name(newest.step)))
                last = Candidate(newest, record.created_unix_s)
            except (CheckpointNotFoundError, ManifestError) as error:
                logger.warning("step %d in storage is not usable: %s", newest.step, error)
        with self._lock:
            self._last, self._knows_last = last, True
            self._pin()

    def _take(self, key: Key | None) -> Source | None:
        """What is pinned, or the version asked for, to be drained now."""
        with self._lock:
            source = self._pinned
            if source is None or (key is not None and source.key != key):
                source = self._source(key) if key is not None else None
            if source is None:
                return None
            if source is not self._pinned and self._pinned is not None:
                self._pinned.let_go()
            self._pinned, self._active = None, source
            self._moved()
            return source

    def _moved(self) -> None:
        self._moved_s = time.monotonic()

    def _drain(self, source: Source) -> Drain:
        return Drain(
            self._store,
            source,
            index=self._index,
            leader=self._leader,
            throttle=self._throttle,
            stop=self._stop,
            moved=self._moved,
        )

    def _finished(self, source: Source) -> None:
        with self._lock:
            version = Version(source.key.epoch, source.key.step)
            self._last = Candidate(version, source.commit.created_unix_s)
            self._seen = {seen for seen in self._seen if seen > version}
        count("versions_drained")
        logger.info("step %d is drained to %s", source.key.step, self._store.url)

    # ---- as the leader ----------------------------------------------------------------------------

    def _lead(self, source: Source) -> None:
        claim.require(self._store, self._job, self._epoch)
        drain = self._drain(source)
        if not drain.is_committed():
            # Where it ends early, what is there is gone on with, or deleted when another version is begun.
            drain.begin()
            drain.upload()
            source.let_go()
            drain.commit()
            self._catalogue.forget(source.key.step)
        self._finished(source)
        self._tidy(source.key)

    def _tidy(self, key: Key) -> None:
        """Delete drained versions that need not be kept, and what drains have left that came to no end."""
        drained = self._catalogue.look()
        config = self._config
        old = schedule.to_delete(
            drained, keep_last=config.storage_keep_last, keep_every=config.storage_keep_every
        )
        for step in [*(version.step for version in old), *self._catalogue.unfinished]:
            self._delete(step)
            self._catalogue.forget(step)
        folder = f"step-{key.step}_ckpt"
        debris = [name for name in self._store.files(folder) if is_temporary(name)]
        self._store.delete([f"{folder}/{name}" for name in debris])
        for name in self._store.folders(DRAINS_NAME):
            other = parse_drain(name)
            if other is not None:
                abandon(self._store, other, self._leader)

    def _delete(self, step: int) -> None:
        folder = f"step-{step}_ckpt"
        names = [name for name in self._store.files(folder) if is_ours(name) or is_temporary(name)]
        # The manifest first: the version is no more. Also where it is gone, so that a folder left empty goes too.
        first = manifest_name(step)
        paths = [f"{folder}/{name}" for name in names]
        self._store.delete([first, *(path for path in paths if path != first)])

    # ---- as another node --------------------------------------------------------------------------

    def _follow(self) -> None:
        """Upload this node's objects of what the leader has begun."""
        key = self._begun()
        with self._lock:
            self._may_repin = True
        if key is None:
            return
        claim.require(self._store, self._job, self._epoch)
        source = self._take(key)
        if source is None:
            self._refused = key
            refuse(self._store, key, self._index, "it is not in this node's memory any more")
            return
        drain = self._drain(source)
        drain.upload()
        source.let_go()
        drain.await_commit()
        if drain.is_committed():
            self._finished(source)

    def _begun(self) -> Key | None:
        """The version that the leader drains now, unless this node has done its part."""
        keys = [key for name in self._store.folders(DRAINS_NAME) if (key := parse_drain(name)) is not None]
        for key in sorted(keys, reverse=True):
            said = self._store.files(f"{DRAINS_NAME}/{drain_name(key)}")
            if node_name(self._leader) in said:
                return None if key == self._refused and node_name(self._index) in said else key
        return None


def _version(key: Key) -> Version:
    return Version(key.epoch, key.step)


def _candidate(item: Item) -> Candidate:
    return Candidate(_version(item.key), item.summary.record.created_unix_s)
