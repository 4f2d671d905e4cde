"""Flashpoint under Megatron-Core's ``dist_checkpointing``: strategies that save into memory and load from it.

    memory = FlashpointStrategies("/dev/shm/job-1", keep=1)
    found = memory.resume()                                                    # on every rank
    if found:
        state = dist_checkpointing.load(sharded_state, found.folder, memory.load_strategy)
    dist_checkpointing.save(sharded_state, memory.folder(step), memory.save_strategy)

Megatron keeps what is not sharded in files of a folder that rank 0 writes. The version holds that too, once on
every node, and `FlashpointStrategies.resume` makes the folder anew wherever it is asked for.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan

from flashpoint.errors import FlashpointError
from flashpoint.handle import SaveHandle
from flashpoint.telemetry import logger
from flashpoint_torch.session import Flashpoint, init

try:
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies import torch as mcore
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy
    from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
except ImportError as error:
    raise ImportError(f"{error}: install Megatron-Core with `pip install flashpoint[megatron]`") from error

BACKEND: Final = "flashpoint"
_VERSION: Final = 1
_COMMON: Final = "flashpoint/common"  # in a version: the bytes of Megatron's common file


@dataclass(frozen=True)
class Found:
    """What `FlashpointStrategies.resume` found.

    Attributes:
        step: of the version.
        folder: what ``dist_checkpointing.load`` is to be given.
    """

    step: int
    folder: str


class FlashpointStrategies:
    """A job's session, and the two strategies that use it. Every rank makes the same calls in the same order.

    Args:
        job_root: as `flashpoint_torch.init` takes it; to be made after the process group.
        settings: fields of `flashpoint.FlashpointConfig`.
    """

    def __init__(self, job_root: str | os.PathLike[str], **settings: Any) -> None:
        self.session: Flashpoint = init(job_root, **settings)
        self._parent = f"{self.session.job_root}.mcore"
        self._leads_node = os.environ.get("LOCAL_RANK", "0") == "0"
        if self._leads_node:
            shutil.rmtree(self._parent, ignore_errors=True)  # of an earlier start
        self._folders: list[str] = []  # that rank 0 made
        self.save_strategy = SaveStrategy(self)
        self.load_strategy = LoadStrategy(self)

    def folder(self, step: int) -> str:
        """The folder to give ``dist_checkpointing.save`` for a step. It holds only Megatron's own small files."""
        folder = f"{self._parent}/step-{step}"
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            for older in self._folders[:-1]:  # the last may belong to a save that is not finalized yet
                shutil.rmtree(older, ignore_errors=True)
            os.makedirs(folder, mode=0o700)
            self._folders = [*self._folders[-1:], folder]
        return folder

    def resume(self) -> Found | None:
        """The newest step that is complete in memory, ready to be loaded; None where there is none."""
        state: dict[str, Any] = {_COMMON: None}
        result = self.session.recover(state, partial=True)
        if result is None or result.step is None:
            return None
        folder = f"{self._parent}/step-{result.step}"
        error: Exception | None = None
        try:
            if self._leads_node:
                os.makedirs(folder, mode=0o700, exist_ok=True)
                Path(folder, COMMON_STATE_FNAME).write_bytes(state[_COMMON].numpy().tobytes())
                save_config(CheckpointingConfig(BACKEND, _VERSION), folder)
        except OSError as failure:
            error = failure
        self.session.agree("mcore", error)
        return Found(result.step, folder)

    def close(self) -> None:
        """Finish the running save and let go of the buffers; the checkpoints stay."""
        self.session.close()
        if self._leads_node:
            shutil.rmtree(self._parent, ignore_errors=True)

    def _common(self, folder: str) -> io.BytesIO | None:
        """What rank 0 wrote of the state that is not sharded, on the first rank of each node."""
        data: list[bytes | None] = [None]
        if dist.get_rank() == 0:
            data = [Path(folder, COMMON_STATE_FNAME).read_bytes()]
        dist.broadcast_object_list(data, src=0)
        if not self._leads_node:
            return None
        assert data[0] is not None
        stream = io.BytesIO()
        torch.save(torch.frombuffer(bytearray(data[0]), dtype=torch.uint8), stream)
        return stream


class SaveStrategy(AsyncSaveShardedStrategy):
    """Saves through the session, with Megatron's planner. Staged when `async_save` returns."""

    def __init__(self, owner: FlashpointStrategies) -> None:
        super().__init__(BACKEND, _VERSION)
        self._owner = owner

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> AsyncRequest:
        folder = os.fspath(checkpoint_dir)
        sharded, _, _ = mcore._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        state: dict[str, Any] = mcore.mcore_to_pyt_state_dict(sharded, False)
        common = self._owner._common(folder)
        if common is not None:
            state[_COMMON] = common
        handle = self._owner.session.async_save(
            state, _step_of(folder), planner=_RankLocalPlanner(flatten_state_dict=False), overwrite=True
        )
        return AsyncRequest(None, (), [lambda: _finish(handle)])


class LoadStrategy(mcore.TorchDistLoadShardedStrategy):
    """Loads from the session's memory, with Megatron's planner; what a node lacks is fetched from its peers."""

    def __init__(self, owner: FlashpointStrategies) -> None:
        super().__init__()
        self._owner = owner

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        session, step = self._owner.session, _step_of(os.fspath(checkpoint_dir))
        tensors = [value for value in nested_values(sharded_state_dict) if isinstance(value, ShardedTensor)]
        sharded, mapping, renamed = mcore._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state: dict[str, Any] = mcore.mcore_to_pyt_state_dict(sharded, True)
        planner = mcore.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[t for t in tensors if not t.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={t.key: t for t in tensors if t.allow_shape_mismatch},
        )
        with session.open_version(step):  # here, and verified, before anything is overwritten
            try:
                dcp.load(
                    state,
                    checkpoint_id=session.path(step),
                    storage_reader=session.reader(),
                    planner=planner,
                )
            except CheckpointException as error:  # which is no `Exception`
                reasons = "; ".join(
                    f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items()
                )
                raise FlashpointError(f"step {step} could not be loaded: {reasons}") from error
        loaded = {key: mcore._unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        loaded = mcore._replace_sharded_keys_with_state_dict_keys(loaded, mapping, renamed)
        mcore._restore_dict_types(loaded, sharded_state_dict)
        return loaded

    def load_tensors_metadata(self, checkpoint_dir: str | Path, metadata: Any = None) -> Any:
        return super().load_tensors_metadata(checkpoint_dir, metadata or self._metadata(checkpoint_dir))

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
        raise FlashpointError(
            "strict=... that lists what a checkpoint holds beside the state is not supported"
        )

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        raise FlashpointError("a version in memory is never changed: save another step")

    def _metadata(self, checkpoint_dir: str | Path) -> Any:
        reader = self._owner.session.reader()
        reader.reset(self._owner.session.path(_step_of(os.fspath(checkpoint_dir))))
        return reader.read_metadata()

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != BACKEND:
            raise FlashpointError(
                f"the checkpoint was saved by {loaded_backend!r}: load it with its own strategy"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version > _VERSION:
            raise FlashpointError(f"the checkpoint is of version {loaded_version}: upgrade Flashpoint")


class _RankLocalPlanner(mcore.MCoreSavePlanner):
    """Megatron's planner where each rank's plan is final: its state dicts say which replica is the main one."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Any]:
        return [self.create_decentralized_global_plan(plan) for plan in all_plans], None


def _step_of(folder: str) -> int:
    found = re.fullmatch(r"step-(\d+)", os.path.basename(folder.rstrip("/")))
    if found is None:
        raise FlashpointError(
            f"{folder!r} is not of this job: save to folder(step), load from resume().folder"
        )
    return int(found[1])


def _finish(handle: SaveHandle) -> None:
    """Wait as Megatron's finalization does. A save that failed has been reported, and stops nobody."""
    if handle.error is None:
        try:
            handle.wait("complete")
        except FlashpointError as error:
            logger.warning("step %d was not saved: %s", handle.step, error)
