"""`Mirror`: copies on other nodes of what Orbax keeps, one item of one root.

    <root>/100/default/                             Orbax's: renamed, and with that committed; deleted when it likes
    <root>/.flashpoint/default/step-100_ckpt/       ours: hard links to the same objects, and the manifest
    <root>/.flashpoint/default/.agent, .pool        the node's agent, and the copies that it holds for peers

The core's agent, inventory and recovery work on job roots of ``step-<n>_ckpt`` containers. A mirror is one, and no
byte is copied for it: a version is *published* by linking it, after Orbax's rename. From then on it is the agent's:
it copies, serves, and gives up what newer replicated versions supersede, whatever Orbax has deleted meanwhile.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import os
import queue
import threading
import time
from typing import Final, NamedTuple

import msgspec
from jax._src import distributed

from flashpoint.config import FlashpointConfig
from flashpoint.coordinator import Coordinator
from flashpoint.errors import (
    CheckpointNotFoundError,
    CorruptObjectError,
    DeadlineError,
    FlashpointError,
    reason_of,
)
from flashpoint.job import open_job, raise_any
from flashpoint.loader import MLFlashpointCheckpointLoader
from flashpoint.located import ItemFolder
from flashpoint.manifest import decode_summary
from flashpoint.objects import CheckpointObjectManager, ManifestSummary
from flashpoint.retention import NOTHING, Version
from flashpoint.telemetry import count, logger, warn_once
from flashpoint_jax.coordinator import default_coordinator
from flashpoint_jax.folder import write_files
from flashpoint_jax.orbax_root import digest_of, final_items, final_of, final_steps, link_over

MIRRORS_NAME: Final = ".flashpoint"
_PUBLISHED_NAME: Final = ".published"
_FOLLOWED_MAX: Final = 8  # committed versions that wait for Orbax's rename
_POLL_S: Final = 0.005
_DRAIN_S: Final = 10.0  # at the end of the process, for what is committed and not yet published


class _Committed(NamedTuple):
    """A version that Flashpoint has committed, and Orbax is to rename."""

    container: ItemFolder
    digest: str
    topic: str
    coordinator: Coordinator


class Mirror:
    """The copies of one item, for this process. Made on all processes together (`mirror_of`).

    Args:
        root: Orbax's, on this node.
        config: settings; the mirror keeps one replicated version, whatever Orbax keeps.

    Attributes:
        epoch: how often the job was started, this time included: that of all versions saved from now on.
        node_ranks: the processes that share this node's root.
        node_count: nodes of the job.
    """

    def __init__(self, root: str, item: str, config: FlashpointConfig) -> None:
        self.root = root
        self.item = item
        self.path = f"{root}/{MIRRORS_NAME}/{item}"
        self.config = dataclasses.replace(
            config, keep=1, failure_domain=config.failure_domain or _this_host()
        )
        self.coordinator = default_coordinator(f"copies/{item}")
        self._agreements = 0
        self._borrowed: set[int] = set()
        self._outcomes: list[str] = []
        self._queue: queue.Queue[_Committed] = queue.Queue(_FOLLOWED_MAX)
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._around = CheckpointObjectManager(root, rank=self.coordinator.rank, config=self.config)
        self._raise_epoch()
        job = open_job(self.path, self.config, self.coordinator, leader_host=_leader_host())
        assert job.replication is not None
        assert job.replication.membership is not None
        self.objects = job.objects
        self.epoch = job.epoch
        self.replication = job.replication
        self.node_ranks = job.node_ranks
        self.node_count = len(job.replication.membership.members)
        self.is_first = self.coordinator.rank == job.node_ranks[0]
        self.loader = MLFlashpointCheckpointLoader(job.objects, self.coordinator, replication=job.replication)
        if self.is_first and self._around.read_epoch() < self.epoch:
            self._around.write_epoch(self.epoch)  # for starts without copies: theirs is above, too
        self.reconcile(everything=False)

    def _raise_epoch(self) -> None:
        """Have this start's epoch be above those of all that Orbax keeps: it may be of times without copies."""
        with contextlib.suppress(FlashpointError, OSError):  # of which `open_job` tells all processes
            objects = CheckpointObjectManager(self.path, rank=self.coordinator.rank, config=self.config)
            versions = [self._version_at(folder) for folder in final_items(self.root, self.item)]
            known = max((version.epoch for version in versions if version is not None), default=0)
            known = max(known, self._around.read_epoch())
            if objects.read_epoch() < known:
                objects.write_epoch(known)

    # ---- publishing -----------------------------------------------------------------------------

    def follow(self, container: ItemFolder, digest: str, topic: str, coordinator: Coordinator) -> None:
        """Publish a version as soon as Orbax has renamed it, in the background. All processes call it."""
        if not self.is_first:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="flashpoint-copies", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(_Committed(container, digest, topic, coordinator))
        except queue.Full:
            warn_once(
                f"follow:{self.path}",
                f"{_FOLLOWED_MAX} steps of {self.root} wait to be renamed already: step {container.step} gets "
                "no copies",
            )

    def _run(self) -> None:
        while True:
            try:
                one = self._queue.get(timeout=_POLL_S * 10)
            except queue.Empty:
                if self._closing.is_set():
                    return
                continue
            try:
                self._publish_together(one)
            except Exception as error:  # the thread lives on: the next version may well be published
                count("copies_failed")
                # A step may come and go before its turn, where saves are that quick: no news, if another follows.
                level = logging.INFO if not self._queue.empty() else logging.WARNING
                logger.log(level, "step %d gets no copies yet: %s", one.container.step, reason_of(error))
            finally:
                self._queue.task_done()

    def _publish_together(self, one: _Committed) -> None:
        """Publish a version here; when every node has, tell the agent that it is complete."""
        error = ""
        try:
            self._await_rename(one)
            self._publish(final_of(one.container), one.digest)
        except (FlashpointError, OSError) as failure:
            error = reason_of(failure)
        failures = self._exchange(one, error)
        if failures:
            # No node can complete it: here it would only be in the way, until a newer one is replicated.
            container = self.objects.container(one.container.step)
            if digest_of(container.path) == one.digest:
                self.objects.remove_container(container)
            raise FlashpointError("; ".join(f"rank {rank}: {text}" for rank, text in failures.items()))
        self.replication.completed(Version(self.epoch, one.container.step))

    def _await_rename(self, one: _Committed) -> None:
        final, deadline = final_of(one.container), time.monotonic() + self.config.commit_timeout_s
        while True:
            # When the next version is committed, Orbax has long done with this one, or will never be.
            is_over = not self._queue.empty() or self._closing.is_set() or time.monotonic() > deadline
            if digest_of(final.folder) == one.digest:
                return
            if is_over:
                raise DeadlineError(f"Orbax did not rename step {final.step} to {final.folder}")
            time.sleep(_POLL_S)

    def _exchange(self, one: _Committed, error: str) -> dict[int, str]:
        """What the nodes say of a version; on all nodes the same."""
        coordinator, timeout_s = one.coordinator, self.config.commit_timeout_s
        outcome = f"{one.topic}/published"
        membership = self.replication.membership
        assert membership is not None
        if not coordinator.is_leader:
            coordinator.publish(f"{outcome}/{coordinator.rank}", error.encode(errors="replace"))
            answer = coordinator.fetch(outcome, 3 * timeout_s)
            return msgspec.msgpack.decode(answer, type=dict[int, str])
        failures = {coordinator.rank: error} if error else {}
        deadline, is_full = time.monotonic() + 2 * timeout_s, True
        for rank in (member.ranks[0] for member in membership.members if member.ranks[0] != coordinator.rank):
            key = f"{outcome}/{rank}"
            try:
                text = coordinator.fetch(key, max(deadline - time.monotonic(), 0.0)).decode()
                coordinator.remove(key)
            except DeadlineError:
                text = f"did not tell within {2 * timeout_s:g} s of step {one.container.step}"
                is_full = False
            if text:
                failures[rank] = text
        if is_full:  # who speaks of this version has heard what came of the one before
            for key in self._outcomes:
                coordinator.remove(key)
            self._outcomes.clear()
        if coordinator.world_size > 1:
            coordinator.publish(outcome, msgspec.msgpack.encode(failures))
            self._outcomes.append(outcome)
        return failures

    def _publish(self, source: ItemFolder, digest: str = "") -> Version:
        """Link a final version into the mirror, the manifest last.

        Args:
            digest: of the very save that is meant; then all of this node's own objects must be there.

        Raises:
            FlashpointError: it was deleted meanwhile, or the mirror has a newer save of that step.
        """
        data = self.objects.manifest_bytes(source)
        record, found = decode_summary(data)
        if record.step != source.step or (digest and found != digest):
            raise CheckpointNotFoundError(f"{source} holds another save than that of step {source.step}")
        container = self.objects.container(record.step)
        known = self._summary(container.step)
        if known is not None and known.digest != found:
            if known.record.epoch > record.epoch:
                raise FlashpointError(f"{container} holds a newer save of step {record.step}")
            self.objects.remove_container(container)
            known = None
        self.objects.create_container(container)
        try:
            if known is None:
                self.objects.drop_strays(container, {one.name for one in record.objects})
            for name in self.objects.held_objects(source, record.objects):
                link_over(f"{source.path}/{name}", f"{container.path}/{name}")
            held = self.objects.held_objects(container, record.objects)
            own = {one.name for one in record.objects if one.id.rank in self.node_ranks} if digest else set()
            if lost := own - held:
                raise CorruptObjectError(f"{source} lacks {min(lost)}")
            if known is None:
                self.objects.write_manifest(container, data)
        except BaseException:
            if known is None:
                self.objects.remove_container(container)
            raise
        self._remember(record.step, found)
        return Version(record.epoch, record.step)

    def _summary(self, step: int) -> ManifestSummary | None:
        try:
            return self.objects.read_summary(self.objects.container(step))
        except (FlashpointError, OSError):
            return None

    def _version_at(self, folder: ItemFolder) -> Version | None:
        """The version in an Orbax folder; None for one that was copied from another step, or is garbled."""
        try:
            with open(f"{folder.path}/.metadata", "rb") as file:
                record = decode_summary(file.read())[0]
        except (FlashpointError, OSError):
            return None
        return Version(record.epoch, record.step) if record.step == folder.step else None

    # ---- after a start --------------------------------------------------------------------------

    def reconcile(self, *, everything: bool) -> None:
        """Publish what a crash kept from it, and drop what was deleted by hand. On all processes together.

        Args:
            everything: also what is older than the newest here, for a recovery to choose from; `settle` takes
                it back.
        """
        if self.is_first:
            try:
                self._drop_deleted()
                newest = max(self.objects.complete_versions(), default=NOTHING)
                for folder in final_items(self.root, self.item):
                    version = self._version_at(folder)
                    if version is None or not (everything or version > newest):
                        continue
                    is_new = not os.path.lexists(self.objects.container(version.step).path)
                    with _told(f"step {version.step} of {self.root} gets no copies"):
                        self._publish(folder)
                        if is_new and version < newest:
                            self._borrowed.add(version.step)
            except (FlashpointError, OSError) as error:
                logger.warning("%s could not be looked through: %s", self.root, error)
        self.agree("published")

    def _drop_deleted(self) -> None:
        """Drop versions that were Orbax's newest and are not there any more: the user deleted them.

        Older ones went by Orbax's own retention; they stay as long as the agent wants them.
        """
        published, newest = self._published(), max(final_steps(self.root), default=-1)
        for step in self.objects.steps():
            if step > newest and step in published:
                logger.info("step %d was deleted from %s: its copy goes, too", step, self.root)
                self.objects.remove_container(self.objects.container(step))

    def _published(self) -> dict[int, str]:
        """Step -> digest of versions that this node's Orbax root had, and the mirror still has."""
        try:
            with open(f"{self.path}/{_PUBLISHED_NAME}", "rb") as file:
                known = msgspec.json.decode(file.read(1 << 20), type=dict[int, str])
        except (OSError, msgspec.MsgspecError):
            return {}
        return {step: known[step] for step in self.objects.steps() if step in known}

    def _remember(self, step: int, digest: str) -> None:
        known = self._published()
        if known.get(step) != digest:
            write_files(self.path, {_PUBLISHED_NAME: json.dumps({**known, step: digest}).encode()})

    def drop_newer(self, step: int) -> None:
        """Drop what earlier starts of the job saved after this step: no node can complete it."""
        for other in self.objects.steps():
            container = self.objects.container(other)
            version = self.objects.version_of(container)
            if other > step and version is not None and version < (self.epoch, 0):
                self.objects.remove_container(container)

    def settle(self, version: Version) -> None:
        """The job goes on from this version, which Orbax's root has now on every node."""
        if self.is_first:
            self._remember(version.step, digest_of(self.objects.container(version.step).path))
            for step in self._borrowed:
                container = self.objects.container(step)
                older = self.objects.version_of(container)
                if older is not None and older < version:
                    self.objects.remove_container(container)
        self._borrowed.clear()
        self.replication.settled(version)

    # ---- asking ---------------------------------------------------------------------------------

    def agree(self, topic: str, error: Exception | None = None) -> None:
        """Wait for all processes; raise on each what any of them found."""
        answers = self.exchange(topic, b"" if error is None else reason_of(error).encode(errors="replace"))
        raise_any(error, {rank: answer.decode() for rank, answer in enumerate(answers) if answer})

    def exchange(self, topic: str, value: bytes) -> list[bytes]:
        self._agreements += 1
        return self.coordinator.all_gather(
            f"{topic}/{self._agreements}", value, self.config.recovery_timeout_s
        )

    def await_replicated(self, step: int, timeout_s: float) -> bool:
        """Wait until a step is replicated; False if it is not in time, or was given up for a newer one."""
        deadline = time.monotonic() + timeout_s
        self.drain(timeout_s)
        while (version := self._published_version(step)) is None:
            if time.monotonic() > deadline or self._closing.is_set():
                return False
            time.sleep(_POLL_S)
        with contextlib.suppress(FlashpointError):
            return self.replication.await_replicated(version, max(deadline - time.monotonic(), 0.0))
        return False

    def _published_version(self, step: int) -> Version | None:
        """A step's version here, if it is the very one that Orbax has, or Orbax has none any more."""
        summary, final = self._summary(step), final_steps(self.root).get(step)
        if summary is None:
            return None
        current = digest_of(f"{final}/{self.item}") if final is not None else ""
        return Version(summary.record.epoch, step) if current in ("", summary.digest) else None

    def drain(self, timeout_s: float) -> bool:
        """Wait until all that is committed is published, or cannot be."""
        deadline = time.monotonic() + timeout_s
        while self._queue.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return not self._queue.unfinished_tasks

    def close(self) -> None:
        """Publish what is left and release the agent: it ends when what is complete is replicated."""
        if self._closing.is_set():
            return
        self.drain(min(_DRAIN_S, self.config.commit_timeout_s))
        self._closing.set()
        self.replication.close()
        self.objects.close()
        self._around.close()


@contextlib.contextmanager
def _told(what: str):  # type: ignore[no-untyped-def]
    """Log what fails, and go on."""
    try:
        yield
    except (FlashpointError, OSError) as error:
        logger.warning("%s: %s", what, reason_of(error))


def _leader_host() -> str:
    """Where JAX's coordination service runs, which is where process 0 does."""
    address = distributed.global_state.coordinator_address or "127.0.0.1"
    return address.rpartition(":")[0].strip("[]") or "127.0.0.1"


def _this_host() -> str:
    """What roots on one host share: copies go to another, where there is one."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


_mirrors: dict[tuple[str, str], Mirror] = {}
_mirrors_lock = threading.Lock()


def mirror_of(root: str, item: str, config: FlashpointConfig) -> Mirror:
    """The mirror of an item in this process. All processes ask for the same items in the same order."""
    with _mirrors_lock:
        if (root, item) not in _mirrors:
            if not _mirrors:
                # Here, so that it runs before JAX's own farewell, which was registered before.
                atexit.register(close_mirrors)
            _mirrors[root, item] = Mirror(root, item, config)
        return _mirrors[root, item]


def open_mirror(root: str, item: str) -> Mirror | None:
    """The mirror of an item, if this process has opened it."""
    with _mirrors_lock:
        return _mirrors.get((root, item))


def close_mirrors(root: str | None = None) -> None:
    """Close the mirrors of one root, or all."""
    with _mirrors_lock:
        chosen = [key for key in _mirrors if root in (None, key[0])]
        closing = [_mirrors.pop(key) for key in chosen]
    for mirror in closing:
        mirror.close()
