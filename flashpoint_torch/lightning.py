"""Flashpoint under ``lightning``'s Trainer: a callback that saves, and a `CheckpointIO` that resumes.

    memory = FlashpointCheckpointIO("/dev/shm/job-1", fallback="checkpoints/")
    trainer = pl.Trainer(plugins=[memory], callbacks=[FlashpointCallback(memory, every_n_steps=10)], ...)
    trainer.fit(model, ckpt_path=memory.resume)     # the newest step in memory, the fallback, or from scratch

Every rank saves what the trainer would write to a file: model, optimizers, schedulers, loops, callbacks, the state
of data loaders that have one; and beside it the rank's generators.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from flashpoint.errors import FlashpointError
from flashpoint.ids import CheckpointContainerId
from flashpoint.telemetry import logger
from flashpoint_torch.packed import Unpacked, pack, recover_packed
from flashpoint_torch.session import Flashpoint, init
from flashpoint_torch.training_state import rng_state, set_rng_state

try:
    import lightning
    import lightning.pytorch as pl
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
    from lightning.fabric.utilities.data import _set_sampler_epoch
    from lightning.pytorch.plugins import CheckpointIO
    from lightning.pytorch.strategies import Strategy
except ImportError as error:
    raise ImportError(f"{error}: install lightning with `pip install flashpoint[lightning]`") from error

RESUME: Final = "flashpoint"
"""The ``ckpt_path`` that asks for the newest checkpoint, wherever it is."""

_OWN_KEY: Final = "flashpoint"  # in a checkpoint: what this module adds to the trainer's

Path_ = str | Path


class _FromScratch(dict[str, Any]):
    """A checkpoint to which the trainer pays no attention, since there is none to resume from."""

    def __bool__(self) -> bool:
        return False


class FlashpointCheckpointIO(CheckpointIO):
    """Loads the job's checkpoints from memory, and all others by another `CheckpointIO`.

    Args:
        job_root: as `flashpoint_torch.init` takes it.
        fallback: where memory has nothing, a checkpoint of the trainer's own: its path, a folder of which the
            newest ``*.ckpt`` is taken, or what returns the path or None. Rank 0 decides for all.
        checkpoint_io: what reads and writes ordinary paths.
        settings: fields of `flashpoint.FlashpointConfig`.

    Attributes:
        fallback: as it was given; it may be changed until training begins.
    """

    resume = RESUME

    def __init__(
        self,
        job_root: Path_,
        *,
        fallback: Path_ | Callable[[], Path_ | None] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        **settings: Any,
    ) -> None:
        self.job_root = os.fspath(job_root)
        self.fallback = fallback
        self._files = checkpoint_io or TorchCheckpointIO()
        self._settings = settings
        self._session: Flashpoint | None = None

    @property
    def session(self) -> Flashpoint:
        """The job's session; opened at first use, on all ranks at once, after the process group."""
        if self._session is None:
            self._session = init(self.job_root, **self._settings)
        return self._session

    def load_checkpoint(
        self, path: Path_, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The trainer's checkpoint at ``path``: `RESUME`, a container of this job, or a file."""
        step = self._step_of(path)
        if os.fspath(path) != RESUME and step is None:
            return self._files.load_checkpoint(path, map_location, weights_only=weights_only)
        stored = None if step is not None else self._fallback_path()

        def load_stored() -> tuple[Any, int | None]:
            assert stored is not None
            loaded = self._files.load_checkpoint(stored, map_location, weights_only=weights_only)
            return loaded, loaded.get("global_step")

        found = recover_packed(self.session, step=step, fallback=load_stored if stored else None)
        if found is None:
            logger.info("no checkpoint in memory or below the fallback: training starts from scratch")
            return _FromScratch({"pytorch-lightning_version": lightning.__version__})
        return _checkpoint_in(found)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Path_, storage_options: Any = None) -> None:
        """Write a file; a container of this job is saved in memory, where one process is the whole job."""
        step = self._step_of(path)
        if step is None:
            self._files.save_checkpoint(checkpoint, path, storage_options)
            return
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise FlashpointError(
                f"{path}: the trainer lets rank 0 alone save a checkpoint, but a version in memory is saved by "
                "every rank: use FlashpointCallback for it, and another folder for this one"
            )
        self.save(checkpoint, step, ends_epoch=False)

    def save(self, checkpoint: dict[str, Any], step: int, *, ends_epoch: bool) -> None:
        """Save the checkpoint that the trainer dumped; on every rank. Returns when it is staged."""
        own = {"rng": rng_state(), "ends_epoch": ends_epoch}
        self.session.async_save(pack({"checkpoint": checkpoint, "own": own}), step, overwrite=True)

    def remove_checkpoint(self, path: Path_) -> None:
        """Remove a file; how many versions memory keeps is the session's to say."""
        if self._step_of(path) is None:
            self._files.remove_checkpoint(path)

    def teardown(self) -> None:
        self.close()
        self._files.teardown()

    def close(self) -> None:
        """Finish the running save and let go of the buffers; the checkpoints stay."""
        if self._session is not None:
            session, self._session = self._session, None
            session.close()

    def _step_of(self, path: Path_) -> int | None:
        try:
            container = CheckpointContainerId.parse(path)
        except FlashpointError:
            return None
        return container.step if container.job_root == self.job_root.rstrip("/") else None

    def _fallback_path(self) -> str | None:
        chosen: list[str | None] = [None]
        if not dist.is_initialized() or dist.get_rank() == 0:
            path = self.fallback() if callable(self.fallback) else self.fallback
            chosen = [None if path is None else _newest_in(os.fspath(path))]
        if dist.is_initialized():
            dist.broadcast_object_list(chosen, src=0)
        return chosen[0]


class FlashpointCallback(pl.Callback):
    """Saves the trainer's whole state into memory, and puts the generators back when it resumes.

    Args:
        memory: the plug-in that the trainer has too.
        every_n_steps: optimizer steps from one save to the next.
        skip_every_n_steps: save nothing at multiples of this: the trainer's own checkpoint is written there.
    """

    def __init__(
        self, memory: FlashpointCheckpointIO, *, every_n_steps: int, skip_every_n_steps: int | None = None
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("skip_every_n_steps", skip_every_n_steps)):
            if value is not None and (type(value) is not int or value < 1):
                raise FlashpointError(f"{name} must be a whole number from 1 on, not {value!r}")
        self._memory = memory
        self._every, self._skip = every_n_steps, skip_every_n_steps
        self._last = 0  # step after which it was last asked whether to save
        self._own: dict[str, Any] | None = None
        self._loaders: list[Any] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        if strategy.checkpoint_io is not self._memory:
            raise FlashpointError("give the trainer the same plug-in: Trainer(plugins=[memory], ...)")
        if type(strategy).load_checkpoint is not Strategy.load_checkpoint:
            raise FlashpointError(
                f"{type(strategy).__name__} reads checkpoints by itself, past every CheckpointIO: use a strategy such "
                "as ddp here, or save sharded states with flashpoint_torch.init(...) in the training step"
            )
        assert self._memory.session  # opened here, where every rank is

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._own = checkpoint.get(_OWN_KEY)
        self._loaders = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if any(isinstance(optimizer, ZeroRedundancyOptimizer) for optimizer in trainer.optimizers):
            raise FlashpointError("ZeroRedundancyOptimizer gives its state to rank 0 alone, not to each rank")
        self._last = trainer.global_step
        if self._own is None:
            return
        own, self._own = self._own, None
        loop = trainer.fit_loop
        progress: Any = loop.epoch_progress
        if own["ends_epoch"] and progress.total.ready == progress.total.processed:
            # The trainer goes on with the next epoch, but counts it as not begun: the next resume would repeat it.
            progress.increment_ready()
            progress.increment_started()
        # It has made its iterator already, before samplers knew their epoch, and that threw dice.
        for loader in loop._combined_loader.flattened if loop._combined_loader else ():
            _set_sampler_epoch(loader, progress.current.processed)
        if own["ends_epoch"]:  # then the next epoch's iterator is what comes first
            set_rng_state(own["rng"])
            _make_iterator(trainer, [])
        else:
            _make_iterator(trainer, self._loaders)
            set_rng_state(own["rng"])
        self._loaders = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        before, self._last = self._last, step
        if is_due(before, step, self._every, self._skip):
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            self._memory.save(checkpoint, step, ends_epoch=trainer.is_last_batch)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._memory.session.wait()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._memory.close()


def _make_iterator(trainer: pl.Trainer, states: list[Any]) -> None:
    """Make the iterator over batches anew, from the place that loaders had, where there are ``states`` of theirs."""
    loop = trainer.fit_loop
    if loop._combined_loader is not None and states:
        loop._combined_loader._load_state_dicts(states)
    if loop._data_fetcher is not None:
        iter(loop._data_fetcher)


def is_due(before: int, step: int, every: int, skip: int | None) -> bool:
    """Whether a multiple of ``every``, and none of ``skip``, was reached since ``before``: with several
    optimizers steps are counted by twos."""
    return step // every > before // every and (skip is None or step // skip == before // skip)


def _checkpoint_in(found: Unpacked) -> dict[str, Any]:
    result = found.result
    if result.tier == "storage":
        return dict(found.tree)
    logger.info("resuming from step %s, found in %s memory", result.step, result.tier)
    checkpoint: dict[str, Any] = found.tree["checkpoint"]
    return {**checkpoint, _OWN_KEY: found.tree["own"]} if found.own else checkpoint


def _newest_in(path: str) -> str | None:
    """``path`` itself, or the newest ``*.ckpt`` where it is a folder; None if there is nothing."""
    if os.path.isdir(path):
        files = sorted(Path(path).rglob("*.ckpt"), key=lambda file: (file.stat().st_mtime_ns, file.name))
        return str(files[-1]) if files else None
    return path if os.path.exists(path) else None
