"""What the operating system says and does about memory: tmpfs, cgroup, prefaulting."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from typing import Final, NamedTuple

from flashpoint.checksums import Bytes

PREFAULT_BYTES: Final = (
    32 << 20
)  # per call: the kernel blocks this process's mmap calls for about 10 ms of it
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14, include/uapi/asm-generic/mman-common.h
_MADV_POPULATE_READ: Final = 22
_TMPFS_SHARE: Final = 0.95  # of a tmpfs that we plan with: manifests and other files live there too

_libc = ctypes.CDLL(None, use_errno=True)  # calls through ctypes release the GIL, mmap.madvise does not
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class FileSystem(NamedTuple):
    """The file system under a path; sizes in bytes."""

    is_tmpfs: bool
    kind: str
    total_bytes: int
    free_bytes: int
    mount_point: str


def file_system(path: str) -> FileSystem:
    """The file system that ``path`` lies on, which must exist."""
    usage = os.statvfs(path)
    mount = mount_of(path)
    mount_point, kind = (mount.mount_point, mount.kind) if mount is not None else (path, "unknown")
    return FileSystem(
        is_tmpfs=kind in ("tmpfs", "ramfs", "hugetlbfs"),
        kind=kind,
        total_bytes=usage.f_blocks * usage.f_frsize,
        free_bytes=usage.f_bavail * usage.f_frsize,
        mount_point=mount_point,
    )


class Mount(NamedTuple):
    """A mount of this process's view of the file system.

    Attributes:
        device: ``major:minor`` of what lies on it.
        options: of the mount and of its file system, such as ``noexec``, ``size=67108864k`` or ``huge=advise``.
    """

    mount_point: str
    kind: str
    device: str
    options: frozenset[str]

    def option(self, name: str) -> str | None:
        """The value of ``name=value``; None where there is no such option."""
        return next((o.partition("=")[2] for o in self.options if o.startswith(f"{name}=")), None)


def mounts() -> list[Mount]:
    """All mounts, in the order in which they were made; none where there is no /proc."""
    found = []
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:  # format: proc(5), /proc/pid/mountinfo
                before, _, after = line.partition(" - ")
                fields, (kind, _, more) = before.split(" "), after.rstrip("\n").split(" ", 2)
                options = frozenset(fields[5].split(",")).union(more.split(","))
                found.append(Mount(_unescaped(fields[4]), kind, fields[2], options))
    except OSError:
        pass  # no /proc: report what we know
    return found


def mount_of(path: str) -> Mount | None:
    """The mount that holds ``path``, which must exist; None where that cannot be told."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    return next((mount for mount in mounts() if mount.device == wanted), None)


def _unescaped(mount_point: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount_point)


def default_memory_limit(path: str) -> int:
    """Bytes the job root at ``path`` may hold: most of the tmpfs, less where the cgroup allows less."""
    limit = int(file_system(path).total_bytes * _TMPFS_SHARE)
    cgroup = cgroup_memory_limit()
    return limit if cgroup is None else min(limit, int(cgroup * _TMPFS_SHARE))


def cgroup_memory_limit() -> int | None:
    """The memory limit of this process's cgroup in bytes (v2 or v1), or None where there is none."""
    return min((limit for _, limit in _cgroup_limits()), default=None)


def cgroup_memory_left() -> int | None:
    """Bytes that this process's cgroups may still take before the kernel kills in them, or None without a limit.

    All that lives in the cgroup counts: trainers, agents, and the tmpfs pages that they touched first. What the kernel
    would drop by itself, the cache of files on disks, does not. A twentieth of the limit is left alone.
    """
    left = []
    for path, limit in _cgroup_limits():
        folder, name = os.path.split(path)
        is_v2 = name == "memory.max"
        used = _number_in(f"{folder}/{'memory.current' if is_v2 else 'memory.usage_in_bytes'}")
        if used is not None:
            droppable = _droppable_bytes(f"{folder}/memory.stat", "" if is_v2 else "total_")
            left.append(int(limit * _TMPFS_SHARE) - used + droppable)
    return max(min(left), 0) if left else None


def _cgroup_limits() -> list[tuple[str, int]]:
    """(file, limit in bytes) of each cgroup on the way to this process's that has one."""
    limits = ((path, _number_in(path)) for path in _cgroup_files())
    return [(path, limit) for path, limit in limits if limit is not None and limit < 1 << 60]  # v1: no limit


def _number_in(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _droppable_bytes(path: str, prefix: str) -> int:
    """Of files on disks: the kernel counts the pages of a tmpfs as anonymous here."""
    wanted = {f"{prefix}{name}" for name in ("inactive_file", "active_file", "slab_reclaimable")}
    try:
        with open(path, encoding="ascii") as file:
            pairs = [line.split() for line in file]
    except OSError:
        return 0
    return sum(int(number) for name, number in pairs if name in wanted)


def cgroup_memory_used() -> int | None:
    """What the cgroup with the tightest limit uses in bytes, tmpfs included; None where there is no limit."""
    limits = [(limit, path) for path, limit in _cgroup_limits()]
    if not limits:
        return None
    folder = os.path.dirname(min(limits)[1])
    used = (_number_in(f"{folder}/{name}") for name in ("memory.current", "memory.usage_in_bytes"))
    return next((number for number in used if number is not None), None)


def _cgroup_files() -> list[str]:
    try:
        with open("/proc/self/cgroup", encoding="ascii", errors="replace") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return []
    files = []
    for _, controllers, group in (line for line in lines if len(line) == 3):
        if controllers == "":
            base, name = "/sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in group.split("/") if part]
        files += ["/".join([base, *parts[:depth], name]) for depth in range(len(parts), -1, -1)]
    return files


def prefault(data: Bytes, begin: int, end: int) -> None:
    """Touch the pages of ``data[begin:end]`` for writing, keeping their contents; releases the GIL.

    Contents are only kept where the kernel has MADV_POPULATE_WRITE (5.14); before that the pages are
    zeroed by touching, so call it for buffers that hold nothing yet.
    """
    if not _populate(data, begin, end, _MADV_POPULATE_WRITE):
        data[begin : end : mmap.PAGESIZE] = 0


def prefault_read(data: Bytes, begin: int, end: int) -> None:
    """Map the pages of ``data[begin:end]`` for reading, where the kernel can; releases the GIL."""
    _populate(data, begin, end, _MADV_POPULATE_READ)


def _populate(data: Bytes, begin: int, end: int, advice: int) -> bool:
    if end <= begin:
        return True
    address = data.ctypes.data + begin
    aligned = address & -mmap.PAGESIZE
    return bool(_libc.madvise(aligned, end - begin + address - aligned, advice) == 0)


def human_bytes(nbytes: float) -> str:
    """``3328599655`` -> ``3.1 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
