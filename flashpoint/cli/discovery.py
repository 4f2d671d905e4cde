"""Which job roots of this user lie in this host's memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

from flashpoint.memory import mounts
from flashpoint.objects import is_job_root

_DEPTH: Final = 2  # /dev/shm/job-1, and /dev/shm/alice/job-1
_FOLDERS_MAX: Final = 10_000  # looked into below one place


def memory_places() -> list[str]:
    """Mount points of the tmpfs that this process sees, /dev/shm before all others."""
    found = {mount.mount_point for mount in mounts() if mount.kind == "tmpfs" and "rw" in mount.options}
    return sorted(found, key=lambda place: (place != "/dev/shm", place))


def job_roots_of_this_user(places: Sequence[str] | None = None) -> list[str]:
    """This user's job roots in these places, or up to two folders below them; no link is followed."""
    found = []
    for place in memory_places() if places is None else places:
        found += [path for path in _folders_of_this_user(place) if is_job_root(path)]
    # A mount may show what lies in another one, too.
    return list({_identity(path): path for path in reversed(found)}.values())[::-1]


def _folders_of_this_user(place: str) -> Iterator[str]:
    user = os.geteuid()
    level, left = [place], _FOLDERS_MAX
    for depth in range(_DEPTH + 1):
        below: list[str] = []
        for path in level:
            try:
                is_ours = os.stat(path, follow_symlinks=False).st_uid == user
                if is_ours:
                    yield path
                if depth < _DEPTH and not (is_ours and is_job_root(path)):
                    with os.scandir(path) as entries:
                        names = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
                    below += names[:left]
                    left -= min(left, len(names))
            except OSError:
                continue  # another user's, or deleted this moment
        level = below


def _identity(path: str) -> tuple[int, int] | str:
    try:
        status = os.stat(path)
    except OSError:
        return path
    return status.st_dev, status.st_ino
