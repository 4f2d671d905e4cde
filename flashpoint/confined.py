"""Opening files by names that came from outside: from a peer, a manifest, an index, a listing of a folder.

Whatever the name, what is opened lies below the folder that was meant, is a regular file of that folder's owner or
of this process's user, was reached through no symbolic link, and was not waited for (a pipe without a writer is
none that hangs). The kernel sees to the way: `openat2` (Linux 5.6) with ``RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS``;
where a kernel or a container's filter lacks it, each folder on the way is opened by itself with ``O_NOFOLLOW``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from functools import cache
from typing import Any, Final

_OPENAT2: Final = 437  # its number on every architecture, linux/scripts/syscall.tbl
_RESOLVE_NO_MAGICLINKS: Final = 0x02  # linux/openat2.h
_RESOLVE_NO_SYMLINKS: Final = 0x04
_RESOLVE_BENEATH: Final = 0x08
_RESOLVE: Final = _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS
# What `open_file` raises where there is nothing that could be ours; other errors tell nothing about the file.
NO_FILE: Final = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.EINVAL,
    errno.ENXIO,
    errno.EISDIR,
    errno.EPERM,
)
_MISSING: Final = (errno.ENOSYS, errno.EPERM, errno.EINVAL)  # what seccomp filters and old kernels say
_TRIES_MAX: Final = 8  # EAGAIN: something was renamed while the kernel walked


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_file(root: str, path: str, flags: int = os.O_RDONLY, *, of_any_owner: bool = False) -> int:
    """Open the regular file at ``path``, relative to the folder ``root``; its descriptor.

    Args:
        root: is trusted, links in it are followed.
        path: plain names with ``/`` between them.
        flags: as of `os.open`; those that keep it from blocking and following are added.
        of_any_owner: for folders that several users write to.

    Raises:
        OSError: ``ENOENT`` or ``ENOTDIR``, it is not there; ``ELOOP``, a link is on the way; ``EINVAL``, it is no
            regular file, or no plain path; ``EPERM``, it belongs to another user.
    """
    parts = path.split("/")
    if "\0" in path or not {"", ".", ".."}.isdisjoint(parts):
        raise OSError(errno.EINVAL, "it is not a plain path below its folder", path)
    base = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        fd = _openat2(base, path, flags) if has_openat2() else _walk(base, parts, flags)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file", path)
            # A hard link to what others may change at any time. Link counts say nothing: objects have two names.
            if not of_any_owner and status.st_uid not in (os.geteuid(), os.fstat(base).st_uid):
                raise OSError(errno.EPERM, f"it belongs to user {status.st_uid}", path)
        except BaseException:
            os.close(fd)
            raise
        return fd
    finally:
        os.close(base)


def read_file(root: str, path: str, nbytes_max: int) -> bytes:
    """The contents of a file, at most ``nbytes_max``; ``EFBIG`` for a larger one, else as `open_file`."""
    with open(open_file(root, path), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > nbytes_max:
            raise OSError(errno.EFBIG, f"it has {nbytes} bytes, over {nbytes_max}", path)
        return file.read(nbytes)  # not nbytes_max: that would be allocated


@cache
def has_openat2() -> bool:
    """Whether this process may call `openat2`."""
    base = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.close(_openat2(base, ".", os.O_PATH | os.O_CLOEXEC))
        return True
    except OSError as error:
        if error.errno in _MISSING:
            return False
        raise
    finally:
        os.close(base)


@cache
def _syscall() -> Any:
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    function.argtypes = (
        ctypes.c_long,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.POINTER(_OpenHow),
        ctypes.c_size_t,
    )
    return function


def _openat2(base: int, path: str, flags: int) -> int:
    how = _OpenHow(flags, 0, _RESOLVE)
    for _ in range(_TRIES_MAX):
        fd: int = _syscall()(_OPENAT2, base, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(number, os.strerror(number), path)


def _walk(base: int, parts: list[str], flags: int) -> int:
    """As `_openat2`, one folder after the other."""
    folder = os.dup(base)
    try:
        for part in parts[:-1]:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = below
        return os.open(parts[-1], flags, dir_fd=folder)
    finally:
        os.close(folder)
