"""`FlashpointWriter`: DCP's StorageWriter, and its own stager, into a job root in memory.

With stock planners DCP decides by collectives who stores what; we store it where it belongs and commit it by
our own vote, so ``.metadata`` on every node is the manifest and a version is complete when `write_data`
returns. DCP's ``Metadata`` is not stored: `flashpoint_torch.metadata` rebuilds it.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future as TorchFuture

from flashpoint.buffers import BufferObject, BufferPool
from flashpoint.checksums import Bytes
from flashpoint.config import FlashpointConfig
from flashpoint.coordinator import Coordinator, SingleProcessCoordinator
from flashpoint.errors import FlashpointError, NoSpaceError, SaveError, reason_of
from flashpoint.gc_pause import gc_paused
from flashpoint.ids import CheckpointContainerId
from flashpoint.layout import Entry, plan_layout
from flashpoint.objects import CheckpointObjectManager
from flashpoint.saver import MLFlashpointCheckpointSaver, PendingCheckpoint, StagedObject
from flashpoint.telemetry import logger
from flashpoint_torch.coordinator import TorchStoreCoordinator
from flashpoint_torch.plan import PlanCache
from flashpoint_torch.planned import PlannedState, resolve_plan
from flashpoint_torch.staged_state import (
    NOT_STAGED,
    StagedState,
    make_copied,
    make_staged,
    not_staged,
    staged_behind,
    staged_layout,
    staged_sources,
)
from flashpoint_torch.staging import stage_into

WRITER_NAME: Final = "flashpoint_torch"
_SAVERS_MAX: Final = 8  # as many groups of ranks, or job roots, that save in turn


@dataclasses.dataclass(frozen=True)
class _Ticket:
    """What the coordinator tells every rank with its plan: who commits together, and under which name.

    Attributes:
        session: of the coordinator's saves in this store.
        rank, world_size: in the group that saves.
        number: of the save. A planner that caches its plans may give out an old one again.
    """

    session: str
    rank: int
    world_size: int
    number: int


class _Save(threading.local):
    """What a writer has been told of the save that runs in this thread: DCP makes all its calls in one.

    Attributes:
        names: what the planner has chosen of the state on this rank, before replicas were left out; None if
            it did not say.
    """

    container: CheckpointContainerId | None = None
    rank: int = 0
    uses_collectives: bool = True
    names: frozenset[str] | None = None


class FlashpointWriter(StorageWriter, AsyncStager):
    """Saves with ``dcp.save`` and ``dcp.async_save``.

    Args:
        path: of the container, ``<job root>/step-<n>_ckpt``; ``checkpoint_id`` overrides it.
        overwrite: replace a step that is complete already.
        settings: fields of `flashpoint.FlashpointConfig`; here ``keep`` is 0 (all) unless given.

    ``flashpoint_torch.init(...).writer()`` makes one that shares the buffers and settings of its session.
    """

    _synchronize_after_execute = False  # `stage` returns when everything is staged

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = False,
        objects: CheckpointObjectManager | None = None,
        epoch: int | None = None,
        gives_up: bool = True,
        **settings: Any,
    ) -> None:
        self._gives_up = gives_up
        if objects is not None:
            self.config = objects.config
        else:
            self.config = FlashpointConfig.from_env(**{"keep": 0, **settings})
        self._overwrite = overwrite
        self._epoch = epoch
        self._container = None if path is None else CheckpointContainerId.parse(path)
        self._job_root = None if self._container is None else self._container.job_root
        # Read here: DCP's process executor sets a LOCAL_RANK of its own, the same for all ranks.
        self._local_rank = os.environ.get("LOCAL_RANK")
        self._start(objects)

    def _start(self, objects: CheckpointObjectManager | None) -> None:
        self._objects = objects
        self._save = _Save()
        self._plans = PlanCache(for_loading=True)

    def __getstate__(self) -> dict[str, Any]:
        # For DCP's process executor: the other process opens the job root for itself.
        return {k: v for k, v in self.__dict__.items() if k not in ("_objects", "_save", "_plans")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start(None)

    # ---- StorageWriter --------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._save.container = CheckpointContainerId.parse(checkpoint_id)
            self._job_root = self._save.container.job_root

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._target()
        self._save.rank = kwargs.get("rank") or 0
        self._save.uses_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        names = frozenset(item.index.fqn for item in plan.items)
        for name in names:
            if name.startswith(NOT_STAGED):
                raise FlashpointError(f"{self.checkpoint_id}: {name}")
        self._save.names = names if plan.usable else None
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self._save.uses_collectives:
            world_size, ranks = len(plans), range(len(plans))
            session, number = _new_save(world_size)
        else:  # every rank is called with its own plan alone, and must come to the same name
            world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
            ranks = range(self._save.rank, self._save.rank + 1)
            session, number = "flashpoint/dcp-rank-local", 0
        return [
            dataclasses.replace(plan, storage_data=_Ticket(session, rank, world_size, number))
            for rank, plan in zip(ranks, plans, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Store this rank's part, vote, and return when the version is complete on every node."""
        ticket: _Ticket = plan.storage_data
        container = self._target()
        saver = self._saver_for(container.job_root, ticket)
        pending = saver.begin(container, tag=f"{ticket.number}/")
        try:
            saver.initialize_checkpoint(pending, overwrite=self._overwrite)
            self._stage_plan(saver, pending, resolve_plan(plan, planner))
            saver.write(pending)
        except Exception as error:
            saver.withdraw(pending, error)
            if not isinstance(error, NoSpaceError) or self.config.strict:
                raise
            self._skipped(error)
        else:
            self._commit(saver, pending)
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result([])  # the manifest holds what results would say
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_meta = self.storage_meta()

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    @property
    def checkpoint_id(self) -> str | None:
        container = self._save.container or self._container
        return None if container is None else container.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            CheckpointContainerId.parse(checkpoint_id)
        except FlashpointError:
            return False
        return True

    # ---- AsyncStager ----------------------------------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state into the buffer that will be this rank's object; returns views of it.

        The first ``dcp.async_save`` of a writer that was not told a path is copied twice: the checkpoint
        id, and with it the job root, comes only after this. A failure is raised by the save, on all ranks.
        """
        try:
            return self._stage(state_dict)
        except Exception as error:
            logger.warning("a state could not be staged: %s", reason_of(error))
            return not_staged(error)

    def _stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        plan, leaves = self._plans.plan(state_dict)
        if self._objects is None and self._job_root is None:
            return make_copied(plan, leaves)
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        objects = self._objects or _shared_objects(self._job_root or "", rank, self.config)
        layout, sources = staged_layout(plan), staged_sources(plan, leaves)
        buffer = objects.pool.acquire(layout.nbytes)
        try:
            stage_into(buffer, layout, sources)
            return make_staged(StagedObject(layout, buffer), plan, leaves, objects.pool)
        except BaseException:
            objects.pool.release(buffer)
            raise

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` returns when everything is staged."""

    def close(self) -> None:
        """Nothing to let go of: buffers are the session's, or shared by all writers of this process."""

    # ---- steps ----------------------------------------------------------------------------------

    def _target(self) -> CheckpointContainerId:
        container = self._save.container or self._container
        if container is None:
            raise FlashpointError("there is no checkpoint_id: give dcp.save the path of a container")
        return container

    def _stage_plan(
        self, saver: MLFlashpointCheckpointSaver, pending: PendingCheckpoint, planned: PlannedState
    ) -> None:
        state = staged_behind(planned.tensors)
        if state is not None and self._is_all_of(state, planned, saver.objects.pool):
            staged = state.staged
        else:
            with gc_paused():
                layout = saver.plan(planned.entries)

            def fill(buffer: BufferObject) -> None:
                stage_into(buffer, layout, planned.tensors)

            staged = saver.stage(layout, fill)
        pending.staged.append(staged)
        pending.values = planned.values
        if planned.blobs:
            pending.staged.append(write_blobs(saver, planned.blobs))

    def _is_all_of(self, state: StagedState, planned: PlannedState, pool: BufferPool) -> bool:
        """Whether a staged object may stand for a plan: it holds all that is planned, and nothing else, apart
        from replicas that other ranks were told to store."""
        if state.pool not in (None, pool) or os.path.dirname(state.staged.buffer.path) != pool.path:
            return False  # another rank's, or another job root's
        chosen = self._save.names or {entry.name for entry in planned.entries}
        names = {entry.name for entry in state.staged.layout.entries}
        return names <= chosen and _holds(state.staged, planned)

    def _commit(self, saver: MLFlashpointCheckpointSaver, pending: PendingCheckpoint) -> None:
        try:
            saver.write_metadata(pending)
            saver.finalize(pending)
        except SaveError as error:
            saver.abandon(pending)
            if self.config.strict:
                raise
            self._skipped(error)
        except Exception:
            saver.abandon(pending)
            raise

    def _skipped(self, error: FlashpointError) -> None:
        logger.warning("%s was not saved, older steps stay: %s", self.checkpoint_id, error)

    def _saver_for(self, job_root: str, ticket: _Ticket) -> MLFlashpointCheckpointSaver:
        """The saver of a group of ranks in a job root. It outlives the writer: it knows what keys of the last
        save are to be forgotten at the next."""
        objects = self._objects
        if objects is None or objects.job_root != job_root or objects.rank != ticket.rank:
            objects = _shared_objects(job_root, ticket.rank, self.config)
        store = dist.distributed_c10d._get_default_store() if ticket.world_size > 1 else None
        epoch = objects.read_epoch() if self._epoch is None else self._epoch
        key = (job_root, ticket.session, ticket.rank, ticket.world_size)
        with _savers_lock:
            saver, its_store = _savers.pop(key, (None, None))
            if saver is None or its_store is not store or (saver.objects, saver.epoch) != (objects, epoch):
                coordinator = _coordinator(ticket, store, self._local_rank)
                saver = MLFlashpointCheckpointSaver(
                    objects, coordinator, epoch=epoch, writer=WRITER_NAME, gives_up=self._gives_up
                )
            _savers[key] = saver, store
            if len(_savers) > _SAVERS_MAX:
                del _savers[next(iter(_savers))]
        return saver


def write_blobs(saver: MLFlashpointCheckpointSaver, blobs: Sequence[tuple[Entry, Bytes]]) -> StagedObject:
    """Stage the object that holds what is neither a tensor nor plain data."""
    layout = plan_layout(entry for entry, _ in blobs)

    def fill(buffer: BufferObject) -> None:
        for (_, data), begin, end in zip(blobs, layout.begins, layout.ends, strict=True):
            buffer.data[begin:end] = data

    return saver.stage(layout, fill)


@gc_paused()
def _holds(staged: StagedObject, planned: PlannedState) -> bool:
    """Whether the staged object has every tensor of a plan, under its name, at the tensor's own address."""
    base = staged.buffer.data.ctypes.data
    there = {
        (entry.name, entry.origin): (entry, base + begin)
        for entry, begin in zip(staged.layout.entries, staged.layout.begins, strict=True)
    }
    for entry, tensor in zip(planned.entries, planned.tensors, strict=True):
        found = there.get((entry.name, entry.origin))
        if found is None or (found[0].shape, found[0].dtype) != (entry.shape, entry.dtype):
            return False
        if tensor.numel() and tensor.data_ptr() != found[1]:
            return False
    return True


def _coordinator(ticket: _Ticket, store: dist.Store | None, local_rank: str | None) -> Coordinator:
    if store is None:
        return SingleProcessCoordinator()
    return TorchStoreCoordinator(
        store,
        rank=ticket.rank,
        world_size=ticket.world_size,
        local_rank=ticket.rank if local_rank is None else int(local_rank),
        prefix=f"{ticket.session}-{ticket.world_size}",
    )


_numbers = itertools.count(1)  # of the saves that this process has coordinated
_sessions: weakref.WeakKeyDictionary[dist.Store, str] = weakref.WeakKeyDictionary()
_savers: dict[tuple[str, str, int, int], tuple[MLFlashpointCheckpointSaver, dist.Store | None]] = {}
_savers_lock = threading.Lock()
_objects: dict[tuple[str, int, FlashpointConfig], CheckpointObjectManager] = {}


def _new_save(world_size: int) -> tuple[str, int]:
    """The session and number of a save that this process coordinates, found nowhere else in its store."""
    if world_size == 1:
        return "", 0
    store = dist.distributed_c10d._get_default_store()
    if store not in _sessions:
        _sessions[store] = f"flashpoint/dcp-{store.add('flashpoint/dcp', 1)}"
    return _sessions[store], next(_numbers)


def _shared_objects(job_root: str, rank: int, config: FlashpointConfig) -> CheckpointObjectManager:
    """One manager for each job root, rank and settings in this process: writers share warm buffers."""
    with _savers_lock:
        for key in [key for key in _objects if not os.path.isdir(key[0])]:
            _objects.pop(key).close()  # a deleted job root's memory is given back when its mappings go
        key = (job_root, rank, config)
        if key not in _objects:
            _objects[key] = CheckpointObjectManager(job_root, rank=rank, config=config)
        return _objects[key]
