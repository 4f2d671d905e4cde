"""`status`: how the steps of an item stand in the memory of this node, and of its peers."""

from __future__ import annotations

from typing import Any

import jax

from flashpoint.errors import FlashpointError
from flashpoint.objects import CheckpointObjectManager
from flashpoint.status import VersionStatus, status_here, statuses_of
from flashpoint.telemetry import logger
from flashpoint_jax.mirror import open_mirror
from flashpoint_jax.orbax_root import final_items
from flashpoint_jax.recovery import root_of


def status(manager_or_root: Any, *, item: str = "default") -> list[VersionStatus]:
    """Every version of an item on this node, newest first: how it stands, and who holds its objects.

    With copies, as the node's agent knows it, once this process has saved or recovered; else what Orbax has
    finished and Flashpoint wrote. Of a step that lost an object afterwards, that one has no holder: Orbax still
    lists the step, a restore refuses it, and `recover` goes past it.

    Args:
        manager_or_root: the `ocp.CheckpointManager`, or its directory.

    Raises:
        FlashpointError: the node's agent does not answer.
    """
    root = root_of(manager_or_root)
    mirror = open_mirror(root, item)
    if mirror is not None:
        return statuses_of(mirror.replication.report())
    objects = CheckpointObjectManager(root, rank=jax.process_index(), create=False)
    found = []
    for folder in final_items(root, item):
        try:
            found.append(status_here(objects, folder))
        except (FlashpointError, OSError) as error:
            logger.warning("%s is none of the versions: %s", folder, error)
    return found[::-1]
