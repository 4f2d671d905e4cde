"""Markers: ``step-100_ckpt__<local rank>__unfinished``, beside the container, while a version is dirty.

A marker exists from before the container's folder until every rank has written and the manifest lies.
Its writer holds an exclusive lock on it, which the kernel drops when the process dies: a locked marker
is a save that goes on, an unlocked one is debris of a crash.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from dataclasses import dataclass
from typing import Final

from flashpoint.confined import NO_FILE, open_file
from flashpoint.ids import CheckpointContainerId, parse_container_name
from flashpoint.locks import keep_from_children

_PROBE_S: Final = 0.2
_MARKER: Final = re.compile(r"(?P<container>.+)__(?P<local_rank>0|[1-9][0-9]{0,9})__unfinished", re.ASCII)


def marker_name(container: CheckpointContainerId, local_rank: int) -> str:
    return f"{container.name}__{local_rank}__unfinished"


def parse_marker_name(name: str) -> tuple[int, int] | None:
    """(step, local rank) of a marker's file name, or None for any other name."""
    match = _MARKER.fullmatch(name)
    if match is None:
        return None
    step = parse_container_name(match["container"])
    return None if step is None else (step, int(match["local_rank"]))


@dataclass(eq=False)
class Marker:
    """A marker this process has set; `remove` it last, or `release` it to leave the version dirty."""

    path: str
    fd: int

    @classmethod
    def create(cls, container: CheckpointContainerId, local_rank: int) -> Marker:
        """Set the marker. One that a crash left behind is taken over.

        Raises:
            BlockingIOError: another live process is saving the same step as the same local rank.
        """
        path = f"{container.job_root}/{marker_name(container, local_rank)}"
        while True:
            os.makedirs(container.job_root, mode=0o700, exist_ok=True)  # it may have been deleted by hand
            fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                _lock(fd)
                if _same_file(fd, path):  # it may have been removed between open and lock
                    marker = cls(path, fd)
                    keep_from_children(marker)
                    return marker
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    @property
    def is_set(self) -> bool:
        """Whether this process still holds it."""
        return self.fd >= 0

    def remove(self) -> None:
        """Take the marker away: the version is no longer dirty on account of this rank."""
        if self.is_set:
            with contextlib.suppress(FileNotFoundError):  # the whole job root may have been deleted by hand
                os.unlink(self.path)
            self.release()

    def release(self) -> None:
        """Leave the marker, unlocked: the version stays dirty and may be cleaned up by others."""
        if self.is_set:
            os.close(self.fd)
            self.fd = -1


def is_live(path: str) -> bool:
    """Whether the marker at ``path`` belongs to a process that still holds it."""
    root, name = os.path.split(path)
    try:
        fd = open_file(root, name, os.O_RDWR)
    except OSError as error:
        if error.errno not in NO_FILE:
            raise
        return False  # it is gone, or something else has its name
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        # Closing would do, but for a child that was forked meanwhile and has the descriptor too.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _lock(fd: int) -> None:
    """Take the exclusive lock; whoever only asks `is_live` holds it for an instant, and is waited for."""
    deadline = time.monotonic() + _PROBE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)


def _same_file(fd: int, path: str) -> bool:
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (mine.st_dev, mine.st_ino) == (named.st_dev, named.st_ino)
