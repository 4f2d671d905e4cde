"""Buffers: the mapped tmpfs files behind objects, allocated once, kept mapped, and recycled.

First touch of a page costs many times a copy into a touched one, so a file that a version no longer
names is written again instead of being deleted. Whether it is free is read from the file itself, never
from memory, so it holds after a crash too: every file has a name in the pool and, while a version
needs it, a second one in that version's container. **Free** means link count 1 and an exclusive lock
to be had. Whoever deletes a container only drops links; readers hold shared locks; writers exclusive
ones; the kernel drops the locks of the dead.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from flashpoint.checksums import Bytes
from flashpoint.errors import NoSpaceError
from flashpoint.locks import keep_from_children, try_lock
from flashpoint.memory import PREFAULT_BYTES, cgroup_memory_left, file_system, human_bytes, prefault
from flashpoint.trace import traced

POOL_NAME: Final = ".pool"
TURN_WAIT_S: Final = 5.0
# Where a signal interrupts a call, the kernel gives back what it had allocated and Python begins it anew:
# with a profiler's signals for ever, were a call longer than the time between two. This takes about 1 ms.
_FALLOCATE_BYTES: Final = 4 << 20
AGENT: Final = "agent"
_FILE: Final = re.compile(r"(rank(?P<rank>[0-9]{5,10})|agent)-[0-9a-f]{16}\.buf", re.ASCII)

Owner = int | Literal["agent"]
"""Whose a pool file is: a rank's, by its number, or `AGENT`: the node's agent's, which holds copies for peers."""


class BufferObject:
    """One pool file, mapped for reading and writing, that this process holds exclusively.

    Attributes:
        data: its bytes, a writable uint8 array over the mapping.
        views: what adapters keep per layout digest over `data` (such as tensors), so that a recycled
            buffer needs no new ones.
        before_unmap: what to call before the mapping may go (such as unregistering page-locked memory).
        recycled: whether its pages were there before this use.
    """

    def __init__(self, path: str, fd: int, nbytes: int) -> None:
        self.path = path
        self.fd = fd
        self.nbytes = nbytes
        self.recycled = False
        self.views: dict[str, Any] = {}
        self.before_unmap: list[Callable[[], None]] = []
        status = os.fstat(fd)
        self.inode = (status.st_dev, status.st_ino)
        # A mapping keeps its descriptor: through one of its own, it does not keep the lock.
        own_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            mapping = mmap.mmap(own_fd, nbytes)
        finally:
            os.close(own_fd)
        # A forked data loader has no use for it, and its page tables cost time.
        mapping.madvise(mmap.MADV_DONTFORK)
        self.data: Bytes = np.frombuffer(mapping, dtype=np.uint8)
        keep_from_children(self)

    @property
    def link_count(self) -> int:
        return os.fstat(self.fd).st_nlink

    def try_lock(self) -> bool:
        """Take the exclusive lock; False while anyone else reads or writes the file."""
        return try_lock(self.fd, fcntl.LOCK_EX)

    def unlock(self) -> None:
        if self.fd >= 0:
            fcntl.flock(self.fd, fcntl.LOCK_UN)

    def rested_s(self) -> float:
        """Seconds since the file's last link was added or dropped, by the wall clock."""
        return max(time.time() - os.fstat(self.fd).st_ctime, 0.0)

    def close(self) -> None:
        """Forget the file. The mapping goes when the last view of it does."""
        while self.before_unmap:
            self.before_unmap.pop()()
        self.views.clear()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class _NewFile(NamedTuple):
    path: str
    fd: int
    nbytes: int
    inode: tuple[int, int]


class BufferPool:
    """The buffers of one owner, below ``<job root>/.pool``. Thread-safe.

    Args:
        job_root: the folder; made if it is not there.
        owner: whose files these are. Owners never take each other's, so none loses its warm mappings.
        memory_limit_bytes: most that all owners' pool files of this node may hold together.
        recycle_grace_s: how long a freed file rests before it is reused, unless space is short.
    """

    def __init__(
        self, job_root: str, owner: Owner, *, memory_limit_bytes: int, recycle_grace_s: float = 0.0
    ) -> None:
        self.path = f"{job_root}/{POOL_NAME}"
        self.owner = owner
        self.memory_limit_bytes = memory_limit_bytes
        self.recycle_grace_s = recycle_grace_s
        self.allocations = 0  # files made so far: constant once a job is in its stride
        self._job_root = job_root
        self._mapped: dict[tuple[int, int], BufferObject] = {}
        self._in_use: set[tuple[int, int]] = set()
        self._closed = False
        self._lock = threading.Lock()

    # ---- taking and giving back -----------------------------------------------------------------

    @traced("acquire buffer")
    def acquire(self, nbytes: int) -> BufferObject:
        """A buffer of exactly ``nbytes``, locked for this process: recycled if one is free, else new.

        Raises:
            NoSpaceError: neither is possible within the memory limit and the tmpfs.
        """
        return self.acquire_many([nbytes])[0]

    def acquire_many(self, sizes: Sequence[int], *, may_allocate: bool = True) -> list[BufferObject]:
        """A buffer for each of ``sizes``, in their order, as by `acquire`, but with one look at the files.

        All or none: where one cannot be had, what was recycled is released and what was made is deleted.

        Args:
            may_allocate: False for free buffers only.

        Raises:
            NoSpaceError: not all are possible within the memory limit and the tmpfs.
        """
        missing = Counter(sizes)
        taken = self._recycle(missing, self.recycle_grace_s)
        try:
            try:
                taken += self._allocate(missing, may_allocate=may_allocate)
            except NoSpaceError:  # space is short: the grace period ends
                again = self._recycle(missing, 0.0)
                if not again:
                    raise
                taken += again
                taken += self._allocate(missing, may_allocate=may_allocate)
        except BaseException:
            for buffer in taken:
                self.release(buffer)
            raise
        by_size: defaultdict[int, list[BufferObject]] = defaultdict(list)
        for buffer in taken:
            by_size[buffer.nbytes].append(buffer)
        return [by_size[nbytes].pop() for nbytes in sizes]

    def take_free(self, nbytes: int) -> list[BufferObject]:
        """All free buffers of this size, locked for this process as by `acquire`; none is made."""
        return self._recycle(Counter({nbytes: sys.maxsize}), 0.0)

    def release(self, buffer: BufferObject) -> None:
        """End this process's use of a buffer: it is free as soon as no container names it."""
        with self._lock:
            if buffer.inode in self._in_use:
                self._in_use.discard(buffer.inode)
                buffer.unlock()
                if self._closed:
                    self._forget(buffer)

    def reserve(
        self,
        nbytes: int,
        count: int,
        *,
        budget_bytes: int | None = None,
        stop: threading.Event | None = None,
    ) -> int:
        """Make sure that ``count`` buffers of ``nbytes`` exist, touched, whatever they hold now.

        Buffers that a version names count too: with ``count = keep + 1`` the next save always finds
        one free. Stops early, and quietly, where there is no space, or where this owner's files, of
        whatever size, would exceed the budget. Returns how many there are.
        """
        sizes = [status.st_size for _, status in self._own_files() if _is_allocated(status)]
        have, room = sizes.count(nbytes), None if budget_bytes is None else budget_bytes - sum(sizes)
        if room is not None:
            count = min(count, have + max(room // nbytes, 0))
        # Several at a time, since each allocation looks at all files: of thousands that would take minutes.
        together = max(PREFAULT_BYTES // nbytes, 1)
        while have < count and not (stop and stop.is_set()):
            together = min(together, count - have)
            try:
                buffers = self._allocate(Counter({nbytes: together}))
            except NoSpaceError:
                if together == 1:
                    break
                together //= 2
                continue
            try:
                for buffer in buffers:
                    self.touch(buffer, stop=stop)
            finally:
                for buffer in buffers:
                    self.release(buffer)
            have += together
        return have

    def touch(self, buffer: BufferObject, *, stop: threading.Event | None = None) -> None:
        """Map all pages of a buffer now, in pieces, with the GIL released."""
        for begin in range(0, buffer.nbytes, PREFAULT_BYTES):
            if stop and stop.is_set():
                return
            prefault(buffer.data, begin, min(begin + PREFAULT_BYTES, buffer.nbytes))

    def buffer_of(self, inode: tuple[int, int]) -> BufferObject | None:
        """This owner's buffer behind a file, mapped now if it was not, or None for another owner's file.

        Reading through it also touches its pages for the save that will recycle it.
        """
        with self._lock:
            if inode not in self._mapped:
                self._known()
            return self._mapped.get(inode)

    def close(self) -> None:
        """Forget all mappings, those in use once they are released. Files stay: they are the checkpoints."""
        with self._lock:
            self._closed = True
            for buffer in list(self._mapped.values()):
                if buffer.inode not in self._in_use:
                    self._forget(buffer)

    # ---- the files ------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """Bytes of tmpfs that the pool files of all owners on this node hold, or are about to."""
        return sum(max(status.st_size, status.st_blocks * 512) for _, status in _files(self.path))

    def linked_bytes(self) -> int:
        """Bytes of pool files, of all owners on this node, that versions have now."""
        return sum(status.st_size for _, status in _files(self.path) if status.st_nlink > 1)

    def free_files(self) -> int:
        """How many of this owner's files could be recycled now."""
        return sum(status.st_nlink == 1 for _, status in self._own_files())

    def drop_ranks_other_than(self, ranks: Collection[int]) -> int:
        """Delete the free files of ranks that this node has no more, never the agent's.

        Returns the bytes given back.
        """
        keep = {AGENT, *ranks}
        with self._lock:
            return self._evict(lambda name, _: _owner_of(name) not in keep)

    def drop_unfinished(self) -> int:
        """Delete files that a crash cut off in their making; returns how many bytes they held."""
        try:
            with _turn(self.path), self._lock:  # or else one that another owner has made but not locked yet
                return self._evict(lambda name, status: not _is_allocated(status))
        except FileNotFoundError:
            return 0  # there is no pool

    def trim(self, budget_bytes: int) -> int:
        """Delete free files of this owner until it has no more than the budget; returns the bytes given back.

        Those free for longest go first: of sizes that no save has asked for in a while.
        """
        with self._lock:
            files = sorted(self._own_files(), key=lambda file: file[1].st_ctime_ns)
            excess = sum(status.st_size for _, status in files) - budget_bytes
            freed = 0
            for name, status in files:
                inode = (status.st_dev, status.st_ino)
                if freed < excess and status.st_nlink == 1 and inode not in self._in_use:
                    freed += self._delete(f"{self.path}/{name}", inode)
            return freed

    def _recycle(self, missing: Counter[int], grace_s: float) -> list[BufferObject]:
        """Take what is free of the sizes ``missing``, and strike it off there."""
        taken: list[BufferObject] = []
        with self._lock:
            for buffer in self._known():
                if not missing:
                    break
                if missing[buffer.nbytes] <= 0 or buffer.inode in self._in_use or buffer.link_count != 1:
                    continue
                if (grace_s <= 0 or buffer.rested_s() >= grace_s) and buffer.try_lock():
                    # Still so, now that nobody else can act?
                    if buffer.link_count == 1 and os.path.exists(buffer.path):
                        buffer.recycled = True
                        self._in_use.add(buffer.inode)
                        taken.append(buffer)
                        _strike_off(missing, buffer.nbytes)
                    else:
                        buffer.unlock()
        return taken

    def _known(self) -> list[BufferObject]:
        """This owner's buffers: those mapped, and those that an earlier process of this owner left."""
        mine = {(status.st_dev, status.st_ino): (name, status) for name, status in self._own_files()}
        for inode in self._mapped.keys() - mine.keys() - self._in_use:
            # Its pool name was deleted: what is written to it reaches nobody, what it holds nobody sees.
            self._forget(self._mapped[inode])
        for inode, (name, status) in mine.items():
            if inode in self._in_use:
                continue
            buffer = self._mapped.get(inode)
            if buffer is not None and not (status.st_size == buffer.nbytes and _is_allocated(status)):
                self._forget(buffer)  # somebody cut it, or a piece out of it: to write there is a SIGBUS
                self._delete(f"{self.path}/{name}", inode)
            elif buffer is None and _is_allocated(status):
                buffer = self._open(f"{self.path}/{name}", inode)
                if buffer is not None:
                    self._mapped[inode] = buffer
        return list(self._mapped.values())

    def _open(self, path: str, inode: tuple[int, int]) -> BufferObject | None:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) == inode:  # or else replaced meanwhile
                return BufferObject(path, fd, status.st_size)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def _allocate(self, missing: Counter[int], *, may_allocate: bool = True) -> list[BufferObject]:
        """New buffers of the sizes ``missing``, all or none; they are struck off there."""
        if not missing:
            return []
        if not may_allocate:
            raise NoSpaceError(
                f"{self._job_root} has not all {missing.total()} buffers that are asked for free"
            )
        files = self._create(missing)
        made: list[BufferObject] = []
        try:
            for file in files:
                self._reserve_pages(file.fd, file.nbytes)
                made.append(BufferObject(file.path, file.fd, file.nbytes))
        except BaseException:
            for buffer in made:
                buffer.data = np.empty(0, dtype=np.uint8)  # its mapping would keep the pages
                buffer.close()
            for file in files[len(made) :]:
                os.close(file.fd)
            with self._lock:
                for file in files:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(file.path)
                    self._in_use.discard(file.inode)
            raise
        with self._lock:
            self.allocations += len(made)
            self._mapped.update((buffer.inode, buffer) for buffer in made)
        missing.clear()
        return made

    def _create(self, sizes: Counter[int]) -> list[_NewFile]:
        """New files of these sizes, locked and in use; their pages come later, since that takes long.

        Their sizes count at once, and owners take turns here: together they stay within the limit.
        """
        nbytes = sum(size * count for size, count in sizes.items())
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        with _turn(self.path), self._lock:
            used = self.used_bytes()
            if used + nbytes > self.memory_limit_bytes or self._fills_the_cgroup(nbytes):
                used -= self._evict_other_sizes(*sizes)
            if used + nbytes > self.memory_limit_bytes:
                raise NoSpaceError(
                    f"{self._job_root} holds {human_bytes(used)} and may hold "
                    f"{human_bytes(self.memory_limit_bytes)}, this version needs {human_bytes(nbytes)} more: "
                    "raise memory_limit_bytes or lower keep"
                )
            if self._fills_the_cgroup(nbytes):
                raise NoSpaceError(
                    f"the cgroup has {human_bytes(cgroup_memory_left() or 0)} of memory left, this version needs "
                    f"{human_bytes(nbytes)} more: raise the container's memory limit, or lower keep"
                )
            files: list[_NewFile] = []
            try:
                files.extend(self._create_file(size) for size in sizes.elements())
            except BaseException:
                for file in files:
                    os.unlink(file.path)
                    os.close(file.fd)
                    self._in_use.discard(file.inode)
                raise
            return files

    def _fills_the_cgroup(self, nbytes: int) -> bool:
        """Whether new pages are more than it has left: there the kernel does not refuse, it kills."""
        left = cgroup_memory_left()
        if left is None:
            return False
        promised = sum(max(status.st_size - status.st_blocks * 512, 0) for _, status in _files(self.path))
        return nbytes > left - promised

    def _create_file(self, nbytes: int) -> _NewFile:
        path = f"{self.path}/{_prefix(self.owner)}{secrets.token_hex(8)}.buf"
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, nbytes)
            status = os.fstat(fd)
        except BaseException:
            os.unlink(path)
            os.close(fd)
            raise
        inode = (status.st_dev, status.st_ino)
        self._in_use.add(inode)
        return _NewFile(path, fd, nbytes, inode)

    def _reserve_pages(self, fd: int, nbytes: int) -> None:
        """Allocate the file's pages now: a full tmpfs is an error here, not a SIGBUS in a copy later."""
        for may_evict in (True, False):
            try:
                for begin in range(0, nbytes, _FALLOCATE_BYTES):
                    os.posix_fallocate(fd, begin, min(_FALLOCATE_BYTES, nbytes - begin))
                return
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
                    raise
            with self._lock:
                if not may_evict or not self._evict_other_sizes(nbytes):
                    break
        fs = file_system(self._job_root)
        raise NoSpaceError(
            f"{fs.kind} {fs.mount_point} has {human_bytes(fs.free_bytes)} of "
            f"{human_bytes(fs.total_bytes)} free, this version needs {human_bytes(nbytes)}: "
            "raise the mount's size, or lower keep"
        )

    def _evict(self, unwanted: Callable[[str, os.stat_result], bool]) -> int:
        """Delete free files whose (name, status) is ``unwanted``; returns the bytes given back."""
        freed = 0
        for name, status in _files(self.path):
            inode = (status.st_dev, status.st_ino)
            if status.st_nlink == 1 and inode not in self._in_use and unwanted(name, status):
                freed += self._delete(f"{self.path}/{name}", inode)
        return freed

    def _evict_other_sizes(self, *sizes: int) -> int:
        wanted, prefix = frozenset(sizes), _prefix(self.owner)
        return self._evict(
            lambda name, status: (
                name.startswith(prefix) and (status.st_size not in wanted or not _is_allocated(status))
            )
        )

    def _delete(self, path: str, inode: tuple[int, int]) -> int:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return 0
        try:
            mapped = self._mapped.get(inode)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(fd)
            if status.st_nlink != 1 or (status.st_dev, status.st_ino) != inode:
                return 0
            os.unlink(path)
            if mapped is not None:
                self._forget(mapped)
            return status.st_blocks * 512
        except (BlockingIOError, FileNotFoundError):
            return 0
        finally:
            os.close(fd)

    def _forget(self, buffer: BufferObject) -> None:
        self._mapped.pop(buffer.inode, None)
        buffer.close()

    def _own_files(self) -> list[tuple[str, os.stat_result]]:
        return list(_files(self.path, _prefix(self.owner)))


@contextlib.contextmanager
def _turn(pool: str) -> Iterator[None]:
    """A turn among the owners on this node. Who waits for it in vain goes on: at worst, over the limit."""
    fd = os.open(pool, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try_lock(fd, fcntl.LOCK_EX, TURN_WAIT_S)
        yield
    finally:
        # What was done in the turn is done: nothing here may undo it.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child forked meanwhile has the descriptor too
        with contextlib.suppress(OSError):
            os.close(fd)


def _strike_off(missing: Counter[int], nbytes: int) -> None:
    missing[nbytes] -= 1
    if not missing[nbytes]:
        del missing[nbytes]


def _prefix(owner: Owner) -> str:
    """What the names of an owner's files begin with."""
    return f"{owner}-" if isinstance(owner, str) else f"rank{owner:05d}-"


def _owner_of(name: str) -> Owner | None:
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    return AGENT if match["rank"] is None else int(match["rank"])


def is_pool_file(name: str) -> bool:
    """Whether a file of this name is one that a pool has made."""
    return _FILE.fullmatch(name) is not None


def _is_allocated(status: os.stat_result) -> bool:
    """Whether all of a file's pages are there: a hole that a full tmpfs cannot fill is a SIGBUS."""
    return 0 < status.st_size <= status.st_blocks * 512


def _files(pool: str, prefix: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """(name, status) of the pool's files. ``os.scandir`` caches no link counts, so each is stat-ed."""
    try:
        names = os.listdir(pool)
    except FileNotFoundError:
        return
    for name in sorted(names):
        if name.startswith(prefix) and _FILE.fullmatch(name):
            try:
                yield name, os.stat(f"{pool}/{name}", follow_symlinks=False)
            except FileNotFoundError:
                continue
