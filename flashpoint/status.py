"""How the versions of a node's memory stand: what an adapter's ``status`` answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashpoint.ids import CheckpointContainerId
from flashpoint.objects import CheckpointObjectManager

if TYPE_CHECKING:
    from flashpoint.replication.orders import Report


@dataclass(frozen=True)
class VersionStatus:
    """How one version stands.

    Attributes:
        state: ``complete`` (on every node); ``replicated`` (its goal is met); ``unproven`` (it lies here, and
            this start of the job does not know more); ``withdrawn`` (an object is corrupt, and no good copy of it is
            left).
        holders: object name -> indexes of the nodes known to hold it.
    """

    step: int
    epoch: int
    state: str
    holders: Mapping[str, tuple[int, ...]]


def statuses_of(report: Report) -> list[VersionStatus]:
    """What the node's agent knows of its versions, newest first."""
    return [VersionStatus(one.key.step, one.key.epoch, one.state, one.holders) for one in report.versions]


def status_here(objects: CheckpointObjectManager, container: CheckpointContainerId) -> VersionStatus:
    """A complete version of a job without copies: this node, 0, holds what lies in its memory.

    Raises:
        FlashpointError: its manifest is gone, or cannot be trusted.
    """
    record = objects.read_summary(container).record
    held = objects.held_objects(container, record.objects)
    holders = {one.name: (0,) if one.name in held else () for one in record.objects}
    return VersionStatus(record.step, record.epoch, "complete", holders)
