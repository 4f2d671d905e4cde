"""`MLFlashpointCheckpointSaver`: the steps of a save, one method each, on one rank.

    initialize_checkpoint -> plan -> stage -> write -> write_metadata -> finalize

`stage` is the critical path: training goes on when it returns. What follows is background work in any
thread, since it uses no collective of the training job, only the coordinator's store.
Whatever fails on this rank goes to every rank through `withdraw` or `write_metadata`.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np

from flashpoint import manifest as manifests
from flashpoint.buffers import BufferObject, BufferPool
from flashpoint.checksums import chunk_digests, chunk_size
from flashpoint.commit import Decision, Report, Vote, decide, failures_of, uncovered_arrays
from flashpoint.coordinator import Coordinator, SingleProcessCoordinator
from flashpoint.dtypes import name_of
from flashpoint.errors import (
    CheckpointExistsError,
    DeadlineError,
    FlashpointError,
    InvalidIdError,
    LayoutError,
    SaveError,
    reason_of,
)
from flashpoint.ids import CheckpointContainerId, CheckpointObjectId
from flashpoint.layout import Entry, ObjectLayout, decode_layout, plan_layout
from flashpoint.manifest import CommitRecord, ObjectRecord, Value
from flashpoint.markers import Marker
from flashpoint.objects import CheckpointObjectManager
from flashpoint.retention import Version, left_over, superseded
from flashpoint.telemetry import logger
from flashpoint.trace import span, traced
from flashpoint.values import to_json

_LAYOUTS_MAX: Final = 4096  # remembered by the leader, so that unchanged ones are not sent again
_STEPS_MAX: Final = 1024  # of which is remembered how often they were begun
_SIZES_MAX: Final = 16  # of this rank's last versions


@dataclass
class StagedObject:
    """A buffer that holds one object's data; its header and checksums come with `write`."""

    layout: ObjectLayout
    buffer: BufferObject
    released: bool = False

    def release(self, pool: BufferPool) -> None:
        """Give the buffer back, once: it may have been taken again since."""
        if not self.released:
            self.released = True
            pool.release(self.buffer)


@dataclass
class PendingCheckpoint:
    """A version that this rank is saving."""

    container: CheckpointContainerId
    topic: str
    marker: Marker | None = None
    writes_manifest: bool = False
    staged: list[StagedObject] = field(default_factory=list)
    records: list[ObjectRecord] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)

    @property
    def step(self) -> int:
        return self.container.step


class MLFlashpointCheckpointSaver:
    """Saves versions below one job root, for one rank.

    Args:
        objects: the job root's containers and buffers.
        coordinator: of the ranks that save together; a job of one process by default.
        epoch: the job's restart count, stamped on every version; by default, as the job root knows it.
        writer: program and version, for the manifest.
        node_ranks: the ranks that share this node; by default, all.
        gives_up: whether older versions are given up here, when a newer one is complete; else the node's
            agent does it, when a newer one is replicated.

    Attributes:
        settled: the version that the job goes on from; newer ones of earlier epochs are in nobody's way.

    Every rank makes the same saves in the same order; `begin` gives each its name.
    """

    def __init__(
        self,
        objects: CheckpointObjectManager,
        coordinator: Coordinator | None = None,
        *,
        epoch: int | None = None,
        writer: str = "flashpoint",
        node_ranks: Collection[int] | None = None,
        gives_up: bool = True,
    ) -> None:
        self.objects = objects
        self.settled: Version | None = None
        self.coordinator = coordinator or SingleProcessCoordinator()
        self.config = objects.config
        self.epoch = objects.read_epoch() if epoch is None else epoch
        self.writer = writer
        self._node_ranks = range(self.coordinator.world_size) if node_ranks is None else node_ranks
        self._gives_up = gives_up
        self._begun: dict[tuple[str, int], int] = {}
        self._sizes: deque[int] = deque(maxlen=_SIZES_MAX)
        self._published: set[str] = set()
        self._keys: list[str] = []
        self._unsettled: list[CheckpointContainerId] = []
        self._layouts: OrderedDict[str, ObjectLayout] = OrderedDict()
        self._covered: tuple[str, ...] = ()
        self._planned: ObjectLayout | None = None
        self._node = objects.node

    # ---- 1. initialize --------------------------------------------------------------------------

    def begin(self, container: CheckpointContainerId | int, *, tag: str = "") -> PendingCheckpoint:
        """Name this save, alike on every rank: by its step, and by how often that step was begun.

        A rank that leaves out a save fails that one; a count of all saves would put every later one out
        of joint. Each save is ended with `finalize` or `withdraw`.

        Args:
            tag: what else all ranks know of this save.
        """
        if not isinstance(container, CheckpointContainerId):
            container = self.objects.container(container)
        if container.job_root != self.objects.job_root:
            raise InvalidIdError(f"{container} does not lie in the job root {self.objects.job_root}")
        times = self._begun.pop((tag, container.step), 0) + 1
        self._begun[tag, container.step] = times
        if len(self._begun) > _STEPS_MAX:
            del self._begun[next(iter(self._begun))]
        return PendingCheckpoint(container, f"save/{tag}{container.step}.{times}")

    @traced("initialize")
    def initialize_checkpoint(self, pending: PendingCheckpoint, *, overwrite: bool = False) -> None:
        """Declare the version dirty on this node, then make its folder.

        Raises:
            CheckpointExistsError: the step is complete already and ``overwrite`` is False.
            FlashpointError: another process is saving this step into this job root.
        """
        container = pending.container
        overwrite = overwrite or self._is_left_behind(container)
        if not overwrite and self.objects.is_complete(container):
            raise CheckpointExistsError(
                f"step {container.step} is complete already in {container.path}: save another step, "
                "or pass overwrite=True to replace it"
            )
        try:
            pending.marker = Marker.create(container, self.coordinator.local_rank)
        except BlockingIOError:
            raise FlashpointError(
                f"step {container.step} is being saved by another process as local rank "
                f"{self.coordinator.local_rank} in {container.job_root}: use one job root for each job"
            ) from None
        self._give_up_left_over()
        self.objects.create_container(container)
        # Of an attempt that a crash cut off. The folder stays: other ranks may be about to use it.
        self.objects.remove_objects_of(container, self.objects.rank, keep_folder=True)

    def _is_left_behind(self, container: CheckpointContainerId) -> bool:
        """Whether the job went on from an older version than this one, which could not be used."""
        version = self.objects.version_of(container) if self.settled is not None else None
        return version is not None and self.settled is not None and self.settled < version < (self.epoch, 0)

    # ---- 2. plan --------------------------------------------------------------------------------

    def plan(self, entries: Iterable[Entry]) -> ObjectLayout:
        """The layout of an object of these entries; where they are those of the last call, the same one.

        It keeps what was computed of it: its line, digest and header.
        """
        entries, planned = tuple(entries), self._planned
        if planned is None or planned.entries != entries:
            planned = self._planned = plan_layout(entries)
        return planned

    # ---- 3. stage -------------------------------------------------------------------------------

    @traced("stage object")
    def stage(self, layout: ObjectLayout, fill: Callable[[BufferObject], None]) -> StagedObject:
        """Take a buffer and have ``fill`` copy every entry's bytes to its place in it.

        Raises:
            NoSpaceError: there is no room for another version; nothing was changed.
        """
        buffer = self.objects.pool.acquire(layout.nbytes)
        try:
            fill(buffer)
        except BaseException:
            self.objects.pool.release(buffer)
            raise
        return StagedObject(layout, buffer)

    # ---- 4. write -------------------------------------------------------------------------------

    @traced("write objects")
    def write(self, pending: PendingCheckpoint) -> None:
        """Name ``pending.staged`` as this version's objects of this rank, in order, and seal them.

        From here on their bytes do not change; the checksums made here are those that every later
        reader, peer and scrub compares with.
        """
        for index, part in enumerate(pending.staged):
            layout, buffer = part.layout, part.buffer
            obj = CheckpointObjectId(self.objects.rank, index)
            self.objects.link_object(pending.container, obj, buffer)
            buffer.data[: layout.header_bytes] = memoryview(layout.header)
            self._fill_gaps(pending, part)
            chunk_bytes = chunk_size(layout.nbytes, self.config.chunk_bytes)
            with span("seal", object=obj.name, bytes=layout.nbytes):
                digests = chunk_digests(buffer.data, chunk_bytes, threads=self.config.seal_threads)
            pending.records.append(ObjectRecord(obj.name, layout.nbytes, layout.digest, chunk_bytes, digests))

    def _fill_gaps(self, pending: PendingCheckpoint, part: StagedObject) -> None:
        """Fill what lies between the entries: nothing of an earlier version stays there."""
        for begin, end in part.layout.gaps:
            part.buffer.data[begin:end] = 0

    # ---- 5. metadata ----------------------------------------------------------------------------

    @traced("write metadata")
    def write_metadata(self, pending: PendingCheckpoint) -> CommitRecord:
        """Vote for this rank's part; when all ranks have, the manifest is written on every node.

        Returns:
            The record that all ranks agreed on, without ``sections``: these are the file's, which one rank
            of each node has written.

        Raises:
            SaveError: a rank voted against it, did not vote, or could not write; the version was
                withdrawn on this rank.
            DeadlineError: the leader did not answer; the version stays dirty.
        """
        decision = self._vote(pending, error="")
        return self._write_manifest(pending, decision)

    def withdraw(self, pending: PendingCheckpoint, error: Exception) -> None:
        """Tell every rank that this rank's part of a version failed, and take it back.

        Takes the place of all steps after the failed one, up to and including `write_metadata`.
        """
        try:
            with contextlib.suppress(DeadlineError):  # nobody is there to be told
                self._vote(pending, error=reason_of(error))
        finally:
            self._discard(pending)

    def _vote(self, pending: PendingCheckpoint, *, error: str) -> Decision:
        coordinator, timeout_s = self.coordinator, self.config.commit_timeout_s
        values = b""
        if pending.values and not error:
            try:
                values = manifests.encode_values(pending.values)
            except FlashpointError as failure:
                error = str(failure)
        layouts = {} if error else {part.layout.digest: part.layout for part in pending.staged}
        self._remember(layouts)
        vote = Vote(
            step=pending.step,
            node=self._node,
            error=error,
            objects=() if error else tuple(pending.records),
            values=values,
        )
        if not error:
            self._publish_layouts(layouts)
        with span("gather votes"):
            votes = coordinator.gather(f"{pending.topic}/vote", msgspec.msgpack.encode(vote), timeout_s)
        if votes is None:
            # The leader waits up to timeout_s for the votes, and again for layouts, before it answers.
            return self._hear(pending, "decision", 2 * timeout_s)
        if len(votes) == coordinator.world_size:
            self._forget_keys()  # who votes on this save has left the one before
        return self._say(pending, "decision", self._decide(pending, votes))

    def _decide(self, pending: PendingCheckpoint, encoded: dict[int, bytes]) -> Decision:
        timeout_s = self.config.commit_timeout_s
        world_size = self.coordinator.world_size
        votes = {rank: self._decode_vote(vote) for rank, vote in encoded.items()}
        failures = failures_of(votes, step=pending.step, world_size=world_size, timeout_s=timeout_s)
        if failures:
            return Decision(failures=failures)
        try:
            layouts = self._layouts_of(record for vote in votes.values() for record in vote.objects)
        except FlashpointError as error:
            return Decision(failures={self.coordinator.rank: str(error)})
        digests = tuple(record.layout for vote in votes.values() for record in vote.objects)
        uncovered = [] if digests == self._covered else uncovered_arrays(layouts.values())
        if not uncovered:
            self._covered = digests
        return decide(
            votes,
            step=pending.step,
            epoch=self.epoch,
            writer=self.writer,
            created_unix_s=time.time(),
            uncovered=uncovered,
        )

    def _decode_vote(self, data: bytes) -> Vote:
        try:
            return msgspec.msgpack.decode(data, type=Vote)
        except msgspec.MsgspecError as error:
            return Vote(step=-1, node="", error=f"its vote cannot be read: {error}")

    def _write_manifest(self, pending: PendingCheckpoint, decision: Decision) -> CommitRecord:
        if decision.record is None:
            self._discard(pending)
            raise SaveError(pending.step, decision.failures)
        error = ""
        pending.writes_manifest = self.coordinator.rank in decision.writers
        if pending.writes_manifest:
            try:
                self._put_manifest(pending, decision.record, decision.values)
            except (OSError, FlashpointError) as failure:
                error = f"the manifest could not be written: {failure}"
        failures = self._collect(pending, "written", Report(error), decision.writers)
        if failures is not None:
            self._say(pending, "finish", Decision(failures=failures))
        else:
            failures = self._hear(pending, "finish", 2 * self.config.commit_timeout_s).failures
        if failures:
            self._discard(pending)
            raise SaveError(pending.step, failures)
        return decision.record

    @traced("write manifest")
    def _put_manifest(
        self, pending: PendingCheckpoint, record: CommitRecord, values: Iterable[bytes]
    ) -> None:
        lines = {digest: layout.encoded for digest, layout in self._layouts_of(record.objects).items()}
        lines.update((manifests.section_digest(section), section) for section in values)
        data = manifests.encode(record, lines)
        # Whatever else is called like an object: a crashed attempt's, or peers' of what is saved over.
        self.objects.drop_strays(
            pending.container, {obj.name for obj in record.objects if self._is_here(obj)}
        )
        self.objects.write_manifest(pending.container, data)

    def _is_here(self, record: ObjectRecord) -> bool:
        return record.id.rank in self._node_ranks

    # ---- 6. finalize ----------------------------------------------------------------------------

    @traced("finalize")
    def finalize(self, pending: PendingCheckpoint) -> None:
        """Take the markers away; when all are gone, the version is complete and older ones are given up.

        Raises:
            SaveError: a rank did not report its marker gone. The version may be complete, or stay
                dirty on that rank's node; either way nothing older was given up.
        """
        assert pending.marker is not None
        error = ""
        older = self._older_than(pending)  # asked before anyone can have given one up
        try:
            for part in pending.staged:
                part.release(
                    self.objects.pool
                )  # its second link protects it; readers may come any moment now
            pending.marker.remove()
        except OSError as failure:  # the others are told, or they would wait for it until their deadline
            error = f"its marker could not be removed: {failure}"
        failures = self._collect(pending, "cleared", Report(error), range(self.coordinator.world_size))
        if failures is not None:
            self._say(pending, "retire", Decision(failures=failures))
        else:
            failures = self._hear(pending, "retire", 2 * self.config.commit_timeout_s).failures
        if failures:
            self._leave_unsettled(pending.container)
            raise SaveError(pending.step, failures)
        self._sizes.append(sum(part.layout.nbytes for part in pending.staged))
        try:
            for version in older:
                self._give_up(self.objects.container(version.step), whole=pending.writes_manifest)
            self._settle()
            if self.budget_bytes is not None:
                self.objects.pool.trim(self.budget_bytes)
        except OSError as error:  # the version is complete all the same
            logger.warning("after step %d, memory could not be given back: %s", pending.step, error)

    def _older_than(self, pending: PendingCheckpoint) -> list[Version]:
        """The versions that this one will supersede: never itself, whatever lies there."""
        if not self._gives_up:
            return []
        this = Version(self.epoch, pending.step)
        try:
            complete = [*self.objects.complete_versions(), this]
        except OSError as error:  # the next version supersedes them too
            logger.warning("older versions than step %d could not be looked up: %s", pending.step, error)
            return []
        return [version for version in superseded(complete, keep=self.config.keep) if version != this]

    @property
    def budget_bytes(self) -> int | None:
        """What this rank's buffers may hold between saves: ``keep`` versions, and room for the next.

        As large as the largest of the last few, since states may take turns; None while nothing is known.
        """
        versions = self.config.keep + 1 + (not self._gives_up)  # one more may wait to be replicated
        return versions * max(self._sizes) if self.config.keep and self._sizes else None

    def _leave_unsettled(self, container: CheckpointContainerId) -> None:
        if container not in self._unsettled:
            self._unsettled.append(container)

    def _settle(self) -> None:
        """Take back this rank's part of versions that not every rank knew to be complete.

        Every rank has gone on to a newer one since. What is complete on this node is `superseded`'s to judge.
        """
        while self._unsettled:
            container = self._unsettled.pop()
            if self.objects.is_complete(container):
                continue
            with contextlib.suppress(OSError):  # it is being saved again, or cannot be reached
                marker = Marker.create(container, self.coordinator.local_rank)
                self._give_up(container, whole=False)
                marker.remove()

    def _give_up_left_over(self) -> None:
        """Finish what a crash cut off between a version's completion and the end of older ones.

        Not before the first save: who only looks, or recovers an older step, finds everything there.
        """
        agreed, self.objects.agreed = self.objects.agreed, []
        if not self._gives_up:
            return
        complete = self.objects.complete_versions() if agreed else []
        for version in left_over(agreed, complete, keep=self.config.keep):
            self._give_up(self.objects.container(version.step), whole=True)

    def _give_up(self, container: CheckpointContainerId, *, whole: bool) -> None:
        # Every rank takes its own objects, so that its buffers are free when its next save begins.
        try:
            if whole:
                self.objects.remove_container(container)
                # It may have been of a larger world: nobody is left here to recycle those ranks' files.
                self.objects.pool.drop_ranks_other_than(self._node_ranks)
            else:
                self.objects.remove_objects_of(container, self.objects.rank)
        except OSError as error:
            logger.warning("step %d could not be given up: %s", container.step, error)

    # ---- all of it, for numpy arrays ------------------------------------------------------------

    def save(
        self,
        step: int,
        arrays: Mapping[str, np.ndarray],
        values: Mapping[str, Any] | None = None,
        *,
        overwrite: bool = False,
    ) -> CommitRecord:
        """Save numpy (and ml_dtypes) arrays and plain values as one version, all steps in a row.

        Raises:
            FlashpointError: the version was not saved; on another rank's account, `SaveError`.
        """
        pending = self.begin(step)
        try:
            if clash := arrays.keys() & (values or {}).keys():
                raise LayoutError(f"{min(clash)!r} is the name of both an array and a value")
            self.initialize_checkpoint(pending, overwrite=overwrite)
            pending.values = [Value(name, to_json(value)) for name, value in (values or {}).items()]
            entries = [Entry(name, name_of(array.dtype), array.shape) for name, array in arrays.items()]
            layout = self.plan(entries)

            def fill(buffer: BufferObject) -> None:
                for array, begin, end in zip(arrays.values(), layout.begins, layout.ends, strict=True):
                    target = buffer.data[begin:end].view(array.dtype).reshape(array.shape)
                    np.copyto(target, array)

            pending.staged.append(self.stage(layout, fill))
            self.write(pending)
        except Exception as error:
            self.withdraw(pending, error)
            raise
        try:
            record = self.write_metadata(pending)
            self.finalize(pending)
        except BaseException:
            self.abandon(pending)  # unless it was withdrawn already
            raise
        return record

    # ---- helpers --------------------------------------------------------------------------------

    def _say(self, pending: PendingCheckpoint, name: str, decision: Decision) -> Decision:
        """Broadcast the leader's answer; its key is forgotten once every rank has voted on the next save."""
        key = f"{pending.topic}/{name}"
        self._keys.append(key)
        self.coordinator.broadcast(key, msgspec.msgpack.encode(decision), 0)
        return decision

    @traced("wait for the leader")
    def _hear(self, pending: PendingCheckpoint, name: str, timeout_s: float) -> Decision:
        try:
            answer = self.coordinator.broadcast(f"{pending.topic}/{name}", None, timeout_s)
        except DeadlineError as error:
            raise DeadlineError(
                f"step {pending.step}: rank 0 gave no {name!r} within {timeout_s:g} s: it died, hangs, or "
                f"does not save this step ({error})"
            ) from error
        return msgspec.msgpack.decode(answer, type=Decision)

    def _forget_keys(self) -> None:
        for key in self._keys:
            self.coordinator.remove(key)
        self._keys.clear()

    @traced("collect reports")
    def _collect(
        self, pending: PendingCheckpoint, name: str, report: Report, ranks: Sequence[int]
    ) -> dict[int, str] | None:
        """On the leader: failures among the reports of ``ranks``; elsewhere: report, and return None."""
        coordinator, timeout_s = self.coordinator, self.config.commit_timeout_s
        if not coordinator.is_leader:
            if coordinator.rank in ranks:
                coordinator.publish(
                    f"{pending.topic}/{name}/{coordinator.rank}", msgspec.msgpack.encode(report)
                )
            return None
        deadline = time.monotonic() + timeout_s
        failures = {}
        for rank in ranks:
            if rank == coordinator.rank:
                error = report.error
            else:
                key = f"{pending.topic}/{name}/{rank}"
                try:
                    data = coordinator.fetch(key, max(deadline - time.monotonic(), 0.0))
                    error = msgspec.msgpack.decode(data, type=Report).error
                    coordinator.remove(key)
                except DeadlineError:
                    error = f"did not report {name!r} within {timeout_s:g} s"
            if error:
                failures[rank] = error
        return failures

    def _discard(self, pending: PendingCheckpoint) -> None:
        """Take back what this rank put into a version that will not be; the marker goes last."""
        for part in pending.staged:
            part.release(self.objects.pool)
        if pending.marker is not None:
            self.objects.remove_objects_of(pending.container, self.objects.rank)
            pending.marker.remove()

    def abandon(self, pending: PendingCheckpoint) -> None:
        """Leave a version whose outcome this rank does not know: dirty, for the next start to clean up.

        Its memory is given back at once. As long as this rank's marker is there, no rank can have been told
        that the version is complete, and none can have given up an older one for it.
        """
        for part in pending.staged:
            part.release(self.objects.pool)
        if pending.marker is not None and pending.marker.is_set:
            self.objects.remove_objects_of(pending.container, self.objects.rank)
            pending.marker.release()
            self._leave_unsettled(pending.container)

    def _layouts_of(self, records: Iterable[ObjectRecord]) -> dict[str, ObjectLayout]:
        """Layouts by digest, of this rank's own knowledge or as their writers published them."""
        wanted = {record.layout: record.id.rank for record in records}
        for digest, rank in wanted.items():
            if digest not in self._layouts:
                line = self.coordinator.fetch(f"layout/{rank}/{digest}", self.config.commit_timeout_s)
                if manifests.section_digest(line) != digest:
                    raise FlashpointError(f"layout {digest} arrived damaged from the coordinator's store")
                self._remember({digest: decode_layout(line)})
        return {digest: self._layouts[digest] for digest in wanted}

    def _publish_layouts(self, layouts: dict[str, ObjectLayout]) -> None:
        """Let the other nodes and the leader fetch this rank's layouts, each once; take back those gone.

        Under this rank's own keys, even where ranks share a layout: none takes back what another needs.
        """
        if self.coordinator.world_size == 1:
            return
        for digest in self._published - layouts.keys():
            self.coordinator.remove(f"layout/{self.coordinator.rank}/{digest}")
        for digest in layouts.keys() - self._published:
            self.coordinator.publish(f"layout/{self.coordinator.rank}/{digest}", layouts[digest].encoded)
        self._published = set(layouts)

    def _remember(self, layouts: dict[str, ObjectLayout]) -> None:
        for digest, layout in layouts.items():
            self._layouts[digest] = layout
            self._layouts.move_to_end(digest)
            manifests.keep_layout(digest, layout)
        while len(self._layouts) > max(_LAYOUTS_MAX, 4 * self.coordinator.world_size):
            self._layouts.popitem(last=False)
