"""Orbax's step folders under Flashpoint's own names: ``step-100_ckpt``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from etils import epath
from orbax.checkpoint.path import step as steps

from flashpoint.ids import parse_container_name

_PREFIX: Final = "step-"
_SUFFIX: Final = "_ckpt"


class StepNameFormat(steps.NameFormat[steps.Metadata]):
    """For ``CheckpointManagerOptions(step_name_format=flashpoint_jax.StepNameFormat())``.

    As with Orbax's own formats, only finished steps are found.
    """

    def __str__(self) -> str:
        return f'StepNameFormat("{self.build_name(1234)}")'

    def build_name(self, step: int) -> str:
        return f"{_PREFIX}{step}{_SUFFIX}"

    def find_all(self, base_path: Any) -> Iterator[Any]:
        """The finished steps below a folder; none where there is no folder."""
        base = epath.Path(base_path)
        if not base.is_dir():
            return iter(())
        found: Iterator[Any] = steps.build_step_metadatas(base.iterdir(), self._metadata_of)
        return found

    def find_step(self, base_path: Any, step: int) -> Any:
        """One finished step.

        Raises:
            ValueError: it is not there.
        """
        found = self._metadata_of(epath.Path(base_path) / self.build_name(step))
        if found is None:
            raise ValueError(f"there is no finished step {self.build_name(step)!r} below {base_path}")
        return found

    def _metadata_of(self, path: Any) -> Any:
        step = parse_container_name(path.name)
        if step is None or not path.is_dir() or not steps.is_path_finalized(path):
            return None
        return steps.Metadata(step=step, path=path)
