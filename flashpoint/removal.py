"""Removing versions, or a dead job's whole root, by hand: manifest first, as retention does, and only what is ours.

A crash in between leaves nothing that looks complete, and the same call again goes on. No link is followed.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterable
from typing import Final

from flashpoint.buffers import POOL_NAME, is_pool_file
from flashpoint.errors import FlashpointError
from flashpoint.ids import CheckpointContainerId
from flashpoint.markers import is_live, parse_marker_name
from flashpoint.objects import EPOCH_NAME, CheckpointObjectManager
from flashpoint.replication import agent_folder, keys

_is_epoch_file: Final = re.compile(rf"{re.escape(EPOCH_NAME)}(\.[0-9a-f]+\.tmp)?", re.ASCII).fullmatch
_AGENT_NAMES: Final = "|".join(
    re.escape(name)
    for name in (
        agent_folder.LOCK_NAME,
        agent_folder.USERS_NAME,
        agent_folder.ORDERS_NAME,
        agent_folder.MEMBERSHIP_NAME,
        agent_folder.PORTS_NAME,
        agent_folder.LOG_NAME,
        keys.KEYS_NAME,
    )
)
_is_agent_file: Final = re.compile(rf"({_AGENT_NAMES})(\.[0-9a-f]+\.tmp)?", re.ASCII).fullmatch


def remove_versions(objects: CheckpointObjectManager, steps: Iterable[int]) -> None:
    """Remove versions, with the markers that a crash left on them.

    Raises:
        FlashpointError: one is being saved, or a link stands in its place. Those before it are removed.
    """
    for step in steps:
        container = objects.container(step)
        markers = _markers(container)
        if any(is_live(path) for path in markers):
            raise FlashpointError(f"step {step} is being saved: end the trainer first")
        _require_no_link(container.path)
        objects.remove_container(container)
        for path in markers:  # last: until then, what is left of the version stays dirty
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def free_buffers(objects: CheckpointObjectManager) -> None:
    """Give the memory of all buffers back that no version and no reader needs. ``objects`` must be the agent's."""
    _require_no_link(objects.pool.path)
    objects.pool.drop_ranks_other_than(())
    objects.pool.trim(0)


def remove_job_root(objects: CheckpointObjectManager) -> list[str]:
    """Remove all of a dead job; returns the names in its root that are not ours, and so were left.

    Raises:
        FlashpointError: an agent has been started meanwhile, a version is being saved, or a link stands in the way.
    """
    root = objects.job_root
    for name in ("", POOL_NAME, agent_folder.AGENT_NAME):
        _require_no_link(f"{root}/{name}".rstrip("/"))
    lock = _agents_lock(root)
    try:
        dirty = {found[0] for name in os.listdir(root) if (found := parse_marker_name(name)) is not None}
        remove_versions(objects, sorted(dirty.union(objects.steps())))
        objects.drop_fetched()
        _remove_files(f"{root}/{POOL_NAME}", is_pool_file)
        _remove_files(root, _is_epoch_file, folder_too=False)
        _remove_files(f"{root}/{agent_folder.AGENT_NAME}", _is_agent_file)
    finally:
        if lock is not None:
            lock.release()
    left = sorted(os.listdir(root))
    if not left:
        with contextlib.suppress(OSError):  # a mount point stays, and somebody may have come meanwhile
            os.rmdir(root)
    return left


def _agents_lock(root: str) -> agent_folder.HeldLock | None:
    """The agent's lock, so that none starts meanwhile; None where there is no folder for it."""
    if not os.path.lexists(f"{root}/{agent_folder.AGENT_NAME}"):
        return None
    folder = agent_folder.AgentFolder(root, create=False)
    try:
        lock = folder.take_lock()
        if lock is None:
            raise FlashpointError(f"{root} has a living agent: `flashpoint agent {root} --stop` ends it")
        return lock
    finally:
        folder.close()


def _markers(container: CheckpointContainerId) -> list[str]:
    found = []
    for name in os.listdir(container.job_root):
        parsed = parse_marker_name(name)
        if parsed is not None and parsed[0] == container.step:
            found.append(f"{container.job_root}/{name}")
    return found


def _remove_files(folder: str, is_ours: Callable[[str], object], *, folder_too: bool = True) -> None:
    try:
        _require_no_link(folder)
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    for name in names:
        if is_ours(name):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(f"{folder}/{name}")
    if folder_too:
        with contextlib.suppress(OSError):  # others have put something there
            os.rmdir(folder)


def _require_no_link(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        raise FlashpointError(f"{path} is no folder but a link or a file: look at it, and remove it by hand")
