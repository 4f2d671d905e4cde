"""The pool against a model: whatever happens, in whatever order, no byte that is still wanted changes."""

import fcntl
import itertools
import mmap
import os
import shutil
import tempfile

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from flashpoint.buffers import BufferPool
from flashpoint.errors import NoSpaceError
from tests.conftest import SHARED_MEMORY

SIZES = (4096, 8192)
LIMIT = 20 * 4096


class PoolMachine(RuleBasedStateMachine):
    """Saves hold buffers and link them, readers lock and map them, anyone deletes, and processes crash."""

    held = Bundle("held")
    linked = Bundle("linked")
    readers = Bundle("readers")

    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.mkdtemp(prefix="flashpoint-test-", dir=SHARED_MEMORY)
        self.numbers = itertools.count(1)
        self.pool = self.new_pool()
        self.writing: dict[int, tuple] = {}  # number: buffer and the byte that it is full of
        self.files: dict[str, int] = {}  # path in a container: byte
        self.reading: dict[int, tuple] = {}  # descriptor: mapping and byte

    def new_pool(self) -> BufferPool:
        return BufferPool(self.root, 0, memory_limit_bytes=LIMIT)

    def teardown(self) -> None:
        for fd in self.reading:
            os.close(fd)
        self.pool.close()
        shutil.rmtree(self.root)

    @rule(target=held, nbytes=st.sampled_from(SIZES))
    def acquire(self, nbytes):
        try:
            buffer = self.pool.acquire(nbytes)
        except NoSpaceError:
            assert self.pool.used_bytes() + nbytes > LIMIT
            return None
        assert buffer.inode not in {other.inode for other, _ in self.writing.values()}
        assert buffer.nbytes == nbytes
        number = next(self.numbers)
        buffer.data[:] = number % 251
        self.writing[number] = (buffer, number % 251)
        return number

    @rule(sizes=st.lists(st.sampled_from(SIZES), max_size=4), may_allocate=st.booleans())
    def acquire_many_and_release(self, sizes, may_allocate):
        before = self.pool.allocations
        try:
            taken = self.pool.acquire_many(sizes, may_allocate=may_allocate)
        except NoSpaceError:
            assert self.pool.allocations == before
            assert not may_allocate or self.pool.used_bytes() + sum(sizes) > LIMIT
            return
        assert [buffer.nbytes for buffer in taken] == sizes
        inodes = {buffer.inode for buffer in taken}
        assert len(inodes) == len(sizes)
        assert not inodes & {other.inode for other, _ in self.writing.values()}
        for buffer in taken:
            buffer.data[:] = 252
            self.pool.release(buffer)

    @rule(target=linked, number=held)
    def link(self, number):
        if number not in self.writing:
            return None
        buffer, byte = self.writing[number]
        path = f"{self.root}/object-{next(self.numbers)}"
        try:
            os.link(buffer.path, path)
        except FileNotFoundError:
            return None  # the pool's folder was deleted under it
        self.files[path] = byte
        return path

    @rule(number=consumes(held))
    def release(self, number):
        if number in self.writing:
            self.pool.release(self.writing.pop(number)[0])

    @rule(path=consumes(linked))
    def give_up(self, path):
        if self.files.pop(path, None) is not None:
            os.unlink(path)

    @rule(target=readers, path=linked)
    def read(self, path):
        if path not in self.files:
            return None
        fd = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)  # it is being saved: its version is not complete
            return None
        self.reading[fd] = (mmap.mmap(fd, 0, prot=mmap.PROT_READ), self.files[path])
        return fd

    @rule(fd=consumes(readers))
    def read_no_more(self, fd):
        if fd in self.reading:
            mapping, byte = self.reading.pop(fd)
            assert set(mapping[:]) == {byte}
            mapping.close()
            os.close(fd)

    @rule(nbytes=st.sampled_from(SIZES), count=st.integers(0, 3))
    def reserve(self, nbytes, count):
        self.pool.reserve(nbytes, count)

    @rule()
    def delete_the_pool_by_hand(self):
        shutil.rmtree(self.pool.path, ignore_errors=True)

    @rule()
    def crash_and_restart(self):
        for buffer in [*self.pool._mapped.values(), *(buffer for buffer, _ in self.writing.values())]:
            buffer.close()  # what the kernel does
        self.writing.clear()
        self.pool = self.new_pool()

    @invariant()
    def wanted_bytes_are_as_they_were(self):
        for path, byte in self.files.items():
            with open(path, "rb") as file:
                assert set(file.read()) == {byte}, path
        for mapping, byte in self.reading.values():
            assert set(mapping[:]) == {byte}
        for buffer, byte in self.writing.values():
            assert buffer.data[0] == buffer.data[-1] == byte

    @invariant()
    def the_limit_holds(self):
        assert self.pool.used_bytes() <= LIMIT


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=40)
