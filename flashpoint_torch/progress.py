"""Where training stands: epoch, step of the epoch, step of the run. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from flashpoint.errors import FlashpointError


@dataclass(frozen=True)
class StepInfo:
    """One training step. All numbers but ``steps_per_epoch`` count from 0.

    Attributes:
        epoch: that the step is of.
        epoch_step: of the epoch, less than ``steps_per_epoch``.
        global_step: of the run.
        steps_per_epoch: how many steps an epoch has.
    """

    epoch: int
    epoch_step: int
    global_step: int
    steps_per_epoch: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 0:
                raise FlashpointError(f"{field.name} of a step must be an int from 0 on, not {value!r}")
        if self.epoch_step >= self.steps_per_epoch:
            raise FlashpointError(
                f"an epoch of {self.steps_per_epoch} steps has no step {self.epoch_step}: they count from 0"
            )

    @classmethod
    def first(cls, steps_per_epoch: int) -> StepInfo:
        """The first step of a run."""
        return cls(0, 0, 0, steps_per_epoch)

    @property
    def ends_epoch(self) -> bool:
        return self.epoch_step == self.steps_per_epoch - 1

    def next(self) -> StepInfo:
        """The step after this one."""
        epoch, epoch_step = (self.epoch + 1, 0) if self.ends_epoch else (self.epoch, self.epoch_step + 1)
        return StepInfo(epoch, epoch_step, self.global_step + 1, self.steps_per_epoch)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
