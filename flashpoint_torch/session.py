"""A job's checkpoints on one rank: `init` opens them, the `Flashpoint` saves and recovers."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner

from flashpoint import trace
from flashpoint.buffers import BufferObject
from flashpoint.config import FlashpointConfig
from flashpoint.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DeadlineError,
    FlashpointError,
    NoSpaceError,
    RecoveryError,
    SaveError,
    reason_of,
)
from flashpoint.handle import SaveHandle
from flashpoint.ids import CheckpointContainerId
from flashpoint.job import Job, open_job, raise_any
from flashpoint.layout import plan_layout
from flashpoint.loader import MLFlashpointCheckpointLoader
from flashpoint.memory import human_bytes
from flashpoint.peers import Needs
from flashpoint.recovery import left_out, left_out_sentences, mismatch
from flashpoint.replication.orders import ScrubReport, StorageReport
from flashpoint.retention import NOTHING, Version
from flashpoint.retrieval import Need
from flashpoint.saver import MLFlashpointCheckpointSaver, PendingCheckpoint
from flashpoint.status import VersionStatus, status_here, statuses_of
from flashpoint.storage.loading import StorageLoader
from flashpoint.telemetry import Timings, count, logger
from flashpoint.view import CheckpointView
from flashpoint_torch.coordinator import default_coordinator
from flashpoint_torch.plan import Extras, PlanCache
from flashpoint_torch.planned import planned_state
from flashpoint_torch.reader import FlashpointReader
from flashpoint_torch.restore import Restore
from flashpoint_torch.staging import page_lock, stage_into, views_of
from flashpoint_torch.tree import resolve_stateful
from flashpoint_torch.writer import FlashpointWriter, write_blobs

WRITER_NAME = f"flashpoint_torch, torch {torch.__version__}"
"""What a manifest says wrote it."""

# Failures of the machine, not of the caller: a save that meets one is skipped, and training goes on.
DEGRADES = (NoSpaceError, SaveError, DeadlineError, OSError)

Fallback = str | os.PathLike[str] | Callable[[Mapping[str, Any]], int | None]
"""The path of a checkpoint that ``dcp.load`` reads, or what fills a state and returns its step."""


@dataclass(frozen=True)
class RecoverResult:
    """What `Flashpoint.recover` loaded.

    Attributes:
        step: of the version.
        tier: where it was: ``local`` memory; memory of a ``peer``, for some node at least; or long-term
            ``storage``, that of the configuration or the fallback.
        seconds: from the call to its return.
        nbytes: of tensors that this rank loaded; 0 from the fallback.
        timings: seconds by part: ``find`` (agree, fetch and verify), ``fill`` (copy).
    """

    step: int | None
    tier: str
    seconds: float
    nbytes: int
    timings: Mapping[str, float] = field(default_factory=dict)


def init(job_root: str | os.PathLike[str], **settings: Any) -> Flashpoint:
    """Open a job's checkpoints: on every rank, after ``init_process_group`` where there are several.

    Cleans up what a crash of the job left unfinished.

    Args:
        job_root: absolute path of a folder on a tmpfs; it keeps its name when the job restarts.
        settings: fields of `flashpoint.FlashpointConfig`, such as ``keep``, ``strict``,
            ``memory_limit_bytes``; what is not given comes from ``FLASHPOINT_*`` variables.

    Raises:
        ConfigError: a setting is wrong.
        FlashpointError: a rank cannot use the job root; the message names it.
    """
    config = FlashpointConfig.from_env(**settings)
    coordinator, prefix = default_coordinator()
    leader_host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    return Flashpoint(open_job(job_root, config, coordinator, leader_host=leader_host), prefix=prefix)


class Flashpoint:
    """A job's checkpoints on one rank; made by `init`. Every rank makes the same calls in the same order.

    Attributes:
        job_root: where they lie.
        config: the settings in force.
        epoch: how often the job was started, this time included.
        objects: the job root's containers and buffers.
        coordinator: of the ranks; a topic of one's own comes from `new_topic`.
    """

    def __init__(self, job: Job, *, prefix: str = "flashpoint") -> None:
        objects, coordinator = job.objects, job.coordinator
        self.job_root = objects.job_root
        self.config: FlashpointConfig = objects.config
        self.epoch = job.epoch
        self.objects = objects
        self.coordinator = coordinator
        self._replication = job.replication
        self._prefix = prefix
        self._saver = MLFlashpointCheckpointSaver(
            objects,
            coordinator,
            epoch=job.epoch,
            writer=WRITER_NAME,
            node_ranks=job.node_ranks,
            gives_up=job.replication is None,
        )
        self._loader = MLFlashpointCheckpointLoader(objects, coordinator, replication=job.replication)
        self._storage = (
            StorageLoader(objects.job_root, self.config, coordinator) if self.config.storage else None
        )
        self._plans = PlanCache()
        # One thread, one save in it at a time; `_begin` waits for its turn, so its queue holds at most two.
        self._background = ThreadPoolExecutor(1, thread_name_prefix="flashpoint")
        self._running: Future[None] | None = None
        self._last: SaveHandle | None = None
        self._stop = threading.Event()
        self._agreements = 0

    # ---- names ----------------------------------------------------------------------------------

    def path(self, step: int) -> str:
        """The checkpoint id of a step, for ``dcp.save`` and ``dcp.load``."""
        return self.objects.container(step).path

    def steps(self) -> list[int]:
        """Steps that are complete on this node, newest first."""
        return self.objects.complete_steps()

    def status(self) -> list[VersionStatus]:
        """Every version of this node's memory, newest first: how it stands, and who holds its objects.

        Raises:
            FlashpointError: the node's agent does not answer.
        """
        if self._replication is None:
            versions = self.objects.complete_versions()
            return [status_here(self.objects, self.objects.container(version.step)) for version in versions]
        return statuses_of(self._replication.report())

    def storage_status(self) -> StorageReport:
        """How draining to storage goes, on this node: the newest drained version it knows, and the last error.

        Raises:
            FlashpointError: the node's agent does not answer, or the job has no storage.
        """
        found = self._replication.report().storage if self._replication is not None else None
        if found is None:
            raise FlashpointError("this job drains to no storage: give init storage=...")
        return found

    def scrub_status(self) -> ScrubReport:
        """What the node's agent has found, and repaired, in verifying again what lies in memory.

        Raises:
            FlashpointError: the node's agent does not answer, or nothing is scrubbed.
        """
        found = self._replication.report().scrub if self._replication is not None else None
        if found is None:
            raise FlashpointError(
                "nothing is scrubbed: that takes copies or storage, and scrub_bytes_per_s above 0"
            )
        return found

    def writer(self, *, overwrite: bool = False) -> FlashpointWriter:
        """A storage writer for ``dcp.save`` and ``dcp.async_save`` into this job root."""
        return FlashpointWriter(
            overwrite=overwrite,
            objects=self.objects,
            epoch=self.epoch,
            gives_up=self._replication is None,
        )

    def reader(self) -> FlashpointReader:
        """A storage reader for ``dcp.load``."""
        return FlashpointReader(verify=self.config.verify, allow_pickle=self.config.allow_pickle)

    # ---- saving ---------------------------------------------------------------------------------

    def warmup(self, state: Mapping[str, Any]) -> None:
        """Plan ``state`` and prepare its buffers, so that the first save is as quick as the second.

        Call it once, before training: it allocates and touches as many buffers as ``keep`` needs.
        """
        self._check_open()
        plan, leaves = self._plans.plan(resolve_stateful(state))
        layout, pool = plan.layout, self.objects.pool
        assert layout.header and layout.digest  # computed once, now
        self.wait()
        wanted = self._buffers_wanted()
        if pool.reserve(layout.nbytes, wanted, stop=self._stop) < wanted:
            logger.warning(
                "rank %d: %s has no room for %d buffers of %s: saves will be skipped",
                self.coordinator.rank, self.job_root, wanted, human_bytes(layout.nbytes),
            )  # fmt: skip
        on_gpu = any(tensor.is_cuda for tensor in plan.sources(leaves))
        for buffer in pool.take_free(layout.nbytes):  # those that a version names have been used before
            views_of(buffer, layout)
            if on_gpu:
                page_lock(buffer)
            pool.release(buffer)

    def async_save(
        self,
        state: Mapping[str, Any],
        step: int,
        *,
        planner: SavePlanner | None = None,
        overwrite: bool = False,
    ) -> SaveHandle:
        """Save a state; returns when it is staged, and training may change it again.

        Args:
            state: nested dicts and lists of tensors, DTensors, Stateful objects and plain values.
            step: of the version; saved once, unless ``overwrite``.
            planner: a DCP planner of your own, used rank-locally: what it plans is what is stored.

        Returns:
            The handle. A save that cannot be made for want of space, or on account of another rank,
            fails there, with a warning, unless the configuration is ``strict``.

        Raises:
            InvalidIdError, CheckpointExistsError, FlashpointError: a step or state that cannot be saved.
        """
        self._check_open()
        step = CheckpointContainerId(self.job_root, step).step
        handle = SaveHandle(step, strict=self.config.strict, has_copies=self._replication is not None)
        if self.config.strict and self._last is not None and self._last.error is not None:
            error, self._last = self._last.error, None
            raise error
        pending = None
        with handle.blocking(), trace.span("save: training waits", step=step):
            try:
                in_time = self._wait_for_turn()
                pending = self._saver.begin(step)
                if not in_time:
                    raise DeadlineError(
                        f"step {step} is skipped: the save before it still runs after {self.config.overlap_wait_s:g} s"
                    )
                self._saver.initialize_checkpoint(pending, overwrite=overwrite)
                with handle.timings.span("stage"):
                    self._stage(pending, state, planner)
            except Exception as error:
                self._fail(handle, pending, error)
                return handle
            handle.nbytes = sum(part.layout.nbytes for part in pending.staged)
            handle.reach("staged")
            self._submit(handle, lambda: self._complete(handle, pending))
        return handle

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        *,
        planner: SavePlanner | None = None,
        overwrite: bool = False,
    ) -> SaveHandle:
        """Save a state and wait until it is complete; otherwise as `async_save`."""
        handle = self.async_save(state, step, planner=planner, overwrite=overwrite)
        if handle.error is None or self.config.strict:
            # Every wait within has a deadline of its own; this one is there should they add up.
            handle.wait("complete", timeout_s=10 * self.config.commit_timeout_s)
        return handle

    def _stage(
        self, pending: PendingCheckpoint, state: Mapping[str, Any], planner: SavePlanner | None
    ) -> None:
        resolved = resolve_stateful(state)
        if planner is None:
            with trace.span("plan"):
                plan, leaves = self._plans.plan(resolved)
                layout, sources, extras = plan.layout, plan.sources(leaves), plan.extras(leaves)
        else:
            planned = planned_state(planner, resolved, is_coordinator=self.coordinator.is_leader)
            layout, sources = plan_layout(planned.entries), planned.tensors
            extras = Extras(planned.values, planned.blobs)

        def fill(buffer: BufferObject) -> None:
            with trace.span("copy", bytes=layout.nbytes):
                stage_into(buffer, layout, sources)

        pending.staged.append(self._saver.stage(layout, fill))
        pending.values = extras.values
        if extras.blobs:
            pending.staged.append(write_blobs(self._saver, extras.blobs))

    def _complete(self, handle: SaveHandle, pending: PendingCheckpoint) -> None:
        """The rest of a save, in the background."""
        saver = self._saver
        try:
            with handle.timings.span("write"):
                saver.write(pending)
        except Exception as error:
            saver.withdraw(pending, error)
            raise
        try:
            with handle.timings.span("commit"):
                saver.write_metadata(pending)
                saver.finalize(pending)
        except Exception:
            saver.abandon(pending)  # where its outcome is known already, this changes nothing
            raise
        handle.reach("complete")
        trace.record("save", handle.begin_s, time.perf_counter(), step=handle.step, bytes=handle.nbytes)
        count("saves_complete")
        logger.info("step %d is complete after %.3f s", handle.step, handle.timings["complete"])
        if self._replication is not None:
            self._replication.follow(handle, Version(self.epoch, handle.step))
        if self.config.prefault:
            for part in pending.staged:
                self._reserve(part.layout.nbytes)

    def _fail(self, handle: SaveHandle, pending: PendingCheckpoint | None, error: Exception) -> None:
        """End a save that failed in the caller's thread; raises what is the caller's to mend."""
        if pending is not None:
            self._submit(None, lambda: self._saver.withdraw(pending, error))
        handle.fail(error)
        self._report(handle.step, error)
        if self.config.strict or not isinstance(error, DEGRADES) or isinstance(error, CheckpointExistsError):
            raise error
        error.__traceback__ = None  # its frames would hold the state for as long as anyone has the handle
        self._last = handle

    def _submit(self, handle: SaveHandle | None, work: Callable[[], None]) -> None:
        submitted_s = time.perf_counter()

        def run() -> None:
            trace.record("wait for the background", submitted_s, time.perf_counter())
            try:
                work()
            except Exception as error:  # the thread lives on: the next save may well succeed
                if handle is None:
                    logger.warning("cleaning up after a failed save: %s", error)
                else:
                    self._report(handle.step, error)
                    handle.fail(error)

        if handle is not None:
            self._last = handle
        self._running = self._background.submit(run)

    def _report(self, step: int, error: Exception) -> None:
        count("saves_failed")
        if self._replication is not None:
            self._replication.observed("save", "failed", {})
        logger.warning(
            "rank %d: the save of step %d did not become complete, older steps stay: %s",
            self.coordinator.rank,
            step,
            reason_of(error),
            exc_info=error if logger.isEnabledFor(logging.DEBUG) else None,
        )

    def _wait_for_turn(self) -> bool:
        if self._running is None:
            return True
        try:
            with trace.span("wait for the save before"):
                self._running.result(self.config.overlap_wait_s)
        except TimeoutError:
            return False
        return True

    def _buffers_wanted(self) -> int:
        return self.config.keep + 1 if self.config.keep else 1

    def _reserve(self, nbytes: int) -> None:
        if self.config.keep:
            self.objects.pool.reserve(
                nbytes, self._buffers_wanted(), budget_bytes=self._saver.budget_bytes, stop=self._stop
            )

    # ---- recovering -----------------------------------------------------------------------------

    def recover(
        self,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        partial: bool = False,
        fallback: Fallback | None = None,
    ) -> RecoverResult | None:
        """Fill ``state`` in place from the newest complete version that every rank can verify.

        What this node's memory lacks, because it was replaced or the world has changed, comes from peers.

        Args:
            state: as it is given to a save; its tensors are overwritten, its values replaced, its
                Stateful objects get ``load_state_dict``. A mapping that is empty, such as the ``state``
                of a fresh optimizer, gets whatever the version holds there.
            step: this step, instead of the newest.
            partial: allow all ranks to leave out names that the version holds. Without it, a rank may leave out
                what another one's state has, such as the layers of another stage.
            fallback: where memory, and the ``storage`` of the configuration, have nothing: the path of a
                checkpoint that ``dcp.load`` reads, or what to call with the state: it fills it, and returns
                the step (or None, if there is nothing there either).

        Returns:
            What was loaded, or None where there is nothing; then the state is untouched.

        Raises:
            MismatchError: names, shapes or dtypes differ; the message lists the first ten.
            CheckpointNotFoundError: the ``step`` asked for cannot be loaded.
            RecoveryError: there are versions, but none could be loaded, for a reason that may pass, such as no
                space for what a replaced node lacks; and there is no fallback.
        """
        self._check_open()
        start_s = time.perf_counter()
        timings = Timings()
        self.wait()
        restores: list[Restore] = []

        def needs(view: CheckpointView) -> Sequence[Need]:
            for restore in restores:
                restore.undo()  # of a version that was not to be had
            restores[:] = [self._restore(state, view)]
            return restores[0].needs()

        with timings.span("find"):
            view: CheckpointView | None
            try:
                view = (
                    self._loader.latest_complete(warm=True, needs=needs)
                    if step is None
                    else self._loader.load(step, warm=True, needs=needs)
                )
            except CheckpointNotFoundError:
                if self._storage is None:
                    raise
                view = None
            tier = "peer" if self._loader.fetched_nbytes else "local"
            if view is None and self._storage is not None:
                tier = "storage"
                view = self._from_storage(needs, step)
        if view is None:
            self._saver.settled = NOTHING  # what lies here of earlier starts is in nobody's way
            return self._fall_back(state, fallback, start_s)
        with view, timings.span("fill"):
            restore: Restore | None = None
            error: Exception | None = None
            try:
                restore = restores[0] if restores else self._restore(state, view)
                restore.check()
            except Exception as failure:  # whatever a user's state_dict may raise
                error = failure
            try:
                self.agree("recover", error)
                assert restore is not None
                if not partial:
                    self._check_nothing_is_left_out(view, restore.left_out)
            except FlashpointError:
                if restore is not None:
                    restore.undo()
                raise
            try:
                restore.fill()
            except Exception as failure:  # whatever a user's load_state_dict may raise
                error = failure
            # No rank trains on, and gives up this version, while another still reads it.
            self.agree("recovered", error)
        version = Version(view.manifest.record.epoch, view.manifest.step)
        self._saver.settled = version if tier != "storage" else NOTHING
        if self._replication is not None and tier != "storage":
            self._replication.settled(version)
        count("recoveries")
        seconds = time.perf_counter() - start_s
        trace.record("recover", start_s, start_s + seconds, step=version.step, tier=tier)
        if self._replication is not None:
            self._replication.observed("recovery", tier, {"recovery": seconds})
        place = "storage" if tier == "storage" else f"{tier} memory"
        logger.info("step %d was recovered from %s in %.3f s", version.step, place, seconds)
        return RecoverResult(version.step, tier, seconds, restore.nbytes, timings)

    def _restore(self, state: Mapping[str, Any], view: CheckpointView) -> Restore:
        return Restore(state, view, plans=self._plans, allow_pickle=self.config.allow_pickle)

    def _check_nothing_is_left_out(self, view: CheckpointView, names: Sequence[str]) -> None:
        """Raise on every rank if the version holds a name that no rank's state has.

        One rank may well leave out what another has: a stage of a pipeline, an expert.

        Args:
            names: what this rank's state leaves out.
        """
        rank = self.coordinator.rank
        everything = left_out(view.manifest, (), rank)
        mine = set(names)
        bits = np.packbits([name in mine for name in everything]).tobytes() if names else b""
        answers = self._all_gather("left-out", bits)
        if not all(answers):
            return
        by_all = np.bitwise_and.reduce([np.frombuffer(answer, np.uint8) for answer in answers])
        flags = np.unpackbits(by_all, count=len(everything))
        found = [name for name, flag in zip(everything, flags, strict=True) if flag]
        if found:
            raise mismatch(view.manifest, left_out_sentences(found), rank)

    def _from_storage(self, needs: Needs, step: int | None) -> CheckpointView | None:
        assert self._storage is not None
        logger.warning(
            "memory holds no usable %s below %s: falling back to %s",
            "checkpoint" if step is None else f"step {step}",
            self.job_root,
            self.config.storage,
        )
        view = self._storage.latest(needs, step=step)
        if view is None and step is not None:
            raise CheckpointNotFoundError(
                f"there is no usable step {step}, neither in {self.job_root} nor in {self.config.storage}"
            )
        return view

    def _fall_back(
        self, state: Mapping[str, Any], fallback: Fallback | None, start_s: float
    ) -> RecoverResult | None:
        """Load from long-term storage, since no node's memory has a version that every rank can use."""
        if fallback is None:
            self._check_nothing_was_there()
            return None
        logger.warning("memory holds no usable checkpoint below %s: falling back to storage", self.job_root)
        error: Exception | None = None
        step: int | None = None
        found = True
        try:
            if callable(fallback):
                step = fallback(state)
                found = step is not None
            else:
                _load_from_storage(state, os.fspath(fallback))
                step = _step_in(os.fspath(fallback))
        except Exception as failure:
            error = failure
        self.agree("fallback", error)
        if not found:
            self._check_nothing_was_there()
            return None
        count("recoveries")
        return RecoverResult(step, "storage", time.perf_counter() - start_s, 0)

    def _check_nothing_was_there(self) -> None:
        """Raise if there are versions that only could not be loaded this time."""
        if self._loader.unloadable:
            raise RecoveryError(
                f"rank {self.coordinator.rank}: steps {self._loader.unloadable} are below {self.job_root} or on its "
                "peers, but none could be loaded; the warnings before this say why. Mend that and start again, "
                "pass a fallback that has a checkpoint, or remove the steps to start from scratch"
            )

    def open_version(self, step: int) -> CheckpointView:
        """A complete version, opened and verified by all ranks together; what a node lacks comes from peers.

        Raises:
            CheckpointNotFoundError: there is none that every rank can use.
        """
        return self._loader.load(step)

    def agree(self, topic: str, error: Exception | None) -> None:
        """Raise on every rank what any rank found; every rank calls it, with its own error or None."""
        reason = b"" if error is None else reason_of(error).encode(errors="replace")
        answers = self._all_gather(topic, reason)
        raise_any(error, {rank: answer.decode() for rank, answer in enumerate(answers) if answer})

    def _all_gather(self, topic: str, data: bytes) -> list[bytes]:
        return self.coordinator.all_gather(self.new_topic(topic), data, self.config.recovery_timeout_s)

    def new_topic(self, name: str) -> str:
        """One that nobody else has in this session; every rank makes the same ones in the same order."""
        self._agreements += 1
        return f"{name}/{self._agreements}"

    # ---- life -----------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no save is running; False if one still is after ``timeout_s`` (by default, 10 commits')."""
        if self._running is None:
            return True
        try:
            self._running.result(10 * self.config.commit_timeout_s if timeout_s is None else timeout_s)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Finish the running save and let go of the buffers; the checkpoints stay."""
        self._stop.set()  # buffers for a next save are not wanted any more
        self.wait()
        self._background.shutdown(wait=False, cancel_futures=True)
        if self._replication is not None:
            self._replication.close()
        self.objects.close()

    def _check_open(self) -> None:
        if self._stop.is_set():
            raise FlashpointError(f"this session of {self.job_root} is closed: open another with init")

    def __enter__(self) -> Flashpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<Flashpoint at {self.job_root}: rank {self.coordinator.rank} of {self.coordinator.world_size}>"
        )


def _load_from_storage(state: Mapping[str, Any], path: str) -> None:
    """Fill a state with ``dcp.load``, which puts plain values at the top into the dict that it is given."""
    loaded = dict(state)
    try:
        dcp.load(loaded, checkpoint_id=path)
    except CheckpointException as error:  # which is no `Exception`
        reasons = "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items())
        raise FlashpointError(f"the fallback {path!r} could not be loaded: {reasons}") from error
    new = {key: value for key, value in loaded.items() if value is not state[key]}
    if new and not isinstance(state, MutableMapping):
        raise FlashpointError(f"{min(new)!r} is a plain value in a {type(state).__name__}: give a dict")
    if isinstance(state, MutableMapping):
        state.update(new)


def _step_in(path: str) -> int | None:
    """The step that a folder's name states: its last number, as in ``step-100_ckpt`` or ``iter_0000100``."""
    numbers = re.findall(r"[0-9]+", os.path.basename(path.rstrip("/")))
    return int(numbers[-1]) if numbers else None
