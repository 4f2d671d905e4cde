"""Locks on files: held through an open descriptor, dropped by the kernel when the process dies.

A forked child shares its parent's open files, and the locks with them. A data loader's worker that outlives
a killed trainer would so keep its markers live and its buffers taken, for as long as it lives itself. So
what holds a lock registers here, and a child closes it the moment it is forked.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from typing import Final, Protocol

_POLL_S: Final = 0.005


class LockHolder(Protocol):
    """Anything with the descriptor of a locked file; -1 where it holds none any more."""

    fd: int


_holders: weakref.WeakSet[LockHolder] = weakref.WeakSet()
_inherited: list[LockHolder] = []


def keep_from_children(holder: LockHolder) -> None:
    """Close ``holder.fd`` in every process that is forked from this one from now on."""
    _holders.add(holder)


def try_lock(fd: int, kind: int, timeout_s: float = 0.0) -> bool:
    """Lock the open file: ``kind`` is `fcntl.LOCK_EX` or `fcntl.LOCK_SH`; False if others still hold it."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)


def _after_fork_in_child() -> None:
    # For ever, since what a holder has mapped may not be here: to unmap it would hit whatever is.
    _inherited.extend(_holders)
    for holder in _inherited:
        if holder.fd >= 0:
            os.close(holder.fd)
            holder.fd = -1


os.register_at_fork(after_in_child=_after_fork_in_child)
