"""torchtitan's checkpoint manager, with every few steps in memory beside its own checkpoints.

    config.checkpoint = FlashpointCheckpointManager.Config(
        enable=True, interval=500, job_root="/dev/shm/job-1", memory_interval=10
    )

The trainer builds it and calls it as its own. Ordinary checkpoints are written and kept as before.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from flashpoint.errors import ConfigError
from flashpoint.telemetry import logger
from flashpoint_torch.session import Flashpoint, init

try:
    from torchtitan.components.checkpointer.base import MODEL
    from torchtitan.components.checkpointer.dcp import CheckpointManager
except ImportError as error:
    raise ImportError(
        f"{error}: install torchtitan, 0.3 or newer, with `pip install flashpoint[torchtitan]`"
    ) from error


class FlashpointCheckpointManager(CheckpointManager):
    """Saves model, optimizers, schedulers, data loader and train state into memory; resumes from there first.

    Attributes:
        memory: the job's session, where checkpoints are enabled.
    """

    memory: Flashpoint | None = None

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """As of torchtitan's own; settings of the session come from ``FLASHPOINT_*`` variables."""

        job_root: str = ""
        """A folder on a tmpfs that keeps its name when the job restarts."""

        memory_interval: int = 10
        """Steps from one save into memory to the next."""

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            if self.memory_interval < 1:
                raise ConfigError(f"memory_interval must be at least 1, not {self.memory_interval!r}")
            if self.enable and not self.job_root:
                raise ConfigError("job_root is missing: a folder on a tmpfs, such as /dev/shm/job-1")

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        if self.enable:
            self._memory_interval = config.memory_interval
            self.memory = init(config.job_root)

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save into memory, by the trainer's step; then as torchtitan does. A save into memory never stops training."""
        assert self.memory is not None
        saves = not self.load_only and not last_step and curr_step % self._memory_interval == 0
        if saves:
            self.memory.async_save(self._flattened_model_states_sd(), curr_step, overwrite=True)
        return bool(super()._save(curr_step, last_step)) or saves

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """The newest step in memory, own or a peer's; else, or for a ``step`` that is asked for, as torchtitan does."""
        assert self.memory is not None
        if step == -1:
            start_s = time.perf_counter()
            states = self._states_to_load(model_only=False)
            result = self.memory.recover(states, partial=bool(self.exclude_from_loading))
            if result is not None:
                self.states[MODEL].load_state_dict(states)
                seconds = time.perf_counter() - start_s
                logger.info(
                    "resuming from step %s, found in %s memory, after %.2f s",
                    result.step,
                    result.tier,
                    seconds,
                )
                return True
        return bool(super()._load(step))

    def _close(self) -> None:
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.close()
        super()._close()
