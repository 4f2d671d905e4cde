import errno
import fcntl
import os
import shutil
import signal
import subprocess
import threading
import time

import numpy as np
import pytest

from flashpoint import buffers
from flashpoint.buffers import AGENT, BufferPool, Owner
from flashpoint.errors import NoSpaceError
from tests.core.processes import fork_to_sleep, process

MIB = 1 << 20
LIMIT = 64 * MIB


def pool_of(job_root: str, owner: Owner = 0, **settings) -> BufferPool:
    return BufferPool(job_root, owner, **({"memory_limit_bytes": LIMIT} | settings))


@pytest.fixture
def pool(job_root):
    opened = pool_of(job_root)
    yield opened
    opened.close()


def files(job_root: str) -> list[str]:
    folder = f"{job_root}/.pool"
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def path_in_container(job_root: str, name: str = "object") -> str:
    folder = f"{job_root}/container"
    os.makedirs(folder, exist_ok=True)
    return f"{folder}/{name}"


def link(job_root: str, buffer, name: str = "object") -> str:
    path = path_in_container(job_root, name)
    os.link(buffer.path, path)
    return path


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- taking and giving back -----------------------------------------------------------------------


def test_a_buffer_has_exactly_the_size_asked_for_and_all_its_pages(pool):
    buffer = pool.acquire(3 * 4096)
    status = os.stat(buffer.path)
    assert (buffer.nbytes, len(buffer.data), status.st_size) == (3 * 4096,) * 3
    assert status.st_blocks * 512 >= status.st_size
    assert status.st_mode & 0o777 == 0o600
    assert not buffer.recycled
    assert not buffer.data.any()
    buffer.data[:] = 7
    with open(buffer.path, "rb") as file:
        assert file.read() == b"\7" * (3 * 4096)


@pytest.mark.fault(18)
def test_a_large_buffer_is_allocated_though_a_signal_comes_every_few_milliseconds(pool, monkeypatch):
    # As a kernel does that is interrupted: nothing of a long call stays, and it is made again.
    real, tries = os.posix_fallocate, []

    def interrupted(fd: int, offset: int, nbytes: int) -> None:
        tries.append(nbytes)
        assert len(tries) < 1000, "it would go on for ever"
        if nbytes > 8 * MIB:
            interrupted(fd, offset, nbytes)
        real(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    buffer = pool.acquire(33 * MIB + 4096)
    assert os.fstat(buffer.fd).st_blocks * 512 == buffer.nbytes == 33 * MIB + 4096


def test_a_released_buffer_is_recycled_with_its_mapping(pool):
    first = pool.acquire(MIB)
    first.data[:] = 1
    first.views["layout"] = "tensors"
    pool.release(first)
    second = pool.acquire(MIB)
    assert second is first
    assert second.recycled
    assert second.views == {"layout": "tensors"}
    assert pool.allocations == 1


def test_a_buffer_in_use_is_never_handed_out(pool, job_root):
    taken = [pool.acquire(MIB) for _ in range(3)]
    assert len({buffer.inode for buffer in taken}) == 3
    assert len(files(job_root)) == 3
    assert pool.free_files() == 3  # by their links; their locks say otherwise


def test_a_buffer_that_a_container_names_is_never_handed_out(pool, job_root):
    buffer = pool.acquire(MIB)
    buffer.data[:] = 9
    path = link(job_root, buffer)
    pool.release(buffer)
    for _ in range(3):
        other = pool.acquire(MIB)
        assert other.inode != buffer.inode
        other.data[:] = 1
        pool.release(other)
    assert pool.allocations == 2
    with open(path, "rb") as file:
        assert set(file.read()) == {9}
    os.unlink(path)  # whoever deletes the container only drops a link
    assert {pool.acquire(MIB).inode, pool.acquire(MIB).inode} == {buffer.inode, other.inode}
    assert pool.allocations == 2


def test_a_buffer_is_only_recycled_for_its_own_size(pool):
    small = pool.acquire(MIB)
    pool.release(small)
    assert pool.acquire(2 * MIB).inode != small.inode
    assert pool.acquire(MIB - 4096).inode != small.inode
    assert pool.acquire(MIB) is small


def test_releasing_twice_does_not_take_a_buffer_from_its_next_owner(pool):
    buffer = pool.acquire(MIB)
    pool.release(buffer)
    pool.release(buffer)
    assert pool.acquire(MIB) is buffer


def test_a_file_with_a_lock_on_it_is_never_handed_out(pool, job_root):
    buffer = pool.acquire(MIB)
    pool.release(buffer)
    for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX):
        with open(buffer.path, "rb") as reader:
            fcntl.flock(reader, kind)
            other = pool.acquire(MIB)
            assert other.inode != buffer.inode
            pool.release(other)
    assert {pool.acquire(MIB).inode, pool.acquire(MIB).inode} == {buffer.inode, other.inode}


def test_a_file_that_a_version_takes_in_the_last_moment_is_left_to_it(pool, job_root, monkeypatch):
    # Its owner, a process about to end, links it between our look at it and our lock on it.
    buffer = pool.acquire(MIB)
    pool.release(buffer)
    real = buffers.BufferObject.try_lock

    def linked_meanwhile(self):
        link(job_root, self, f"object-{time.monotonic_ns()}")
        return real(self)

    monkeypatch.setattr(buffers.BufferObject, "try_lock", linked_meanwhile)
    other = pool.acquire(MIB)
    assert other.inode != buffer.inode
    assert buffer.try_lock()  # and its lock was given back
    buffer.unlock()


def test_a_file_that_a_version_takes_in_the_last_moment_is_not_evicted(pool, job_root, monkeypatch):
    buffer = pool.acquire(MIB)
    pool.release(buffer)
    real = fcntl.flock

    def linked_meanwhile(fd, kind):
        if not os.path.exists(path_in_container(job_root)):
            link(job_root, buffer)
        real(fd, kind)

    monkeypatch.setattr(fcntl, "flock", linked_meanwhile)
    assert pool._evict_other_sizes(7) == 0
    assert os.path.exists(buffer.path)


def test_threads_that_acquire_at_once_get_different_buffers(pool):
    for buffer in [pool.acquire(MIB) for _ in range(4)]:
        pool.release(buffer)
    for _ in range(20):
        start, taken = threading.Barrier(8), []

        def work(start=start, taken=taken):
            start.wait()
            taken.append(pool.acquire(MIB))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({buffer.inode for buffer in taken}) == 8
        for buffer in taken:
            pool.release(buffer)
    assert pool.allocations == 8


def test_ranks_never_take_each_others_files(job_root):
    one, other = pool_of(job_root, 1), pool_of(job_root, 10)
    buffer = one.acquire(MIB)
    one.release(buffer)
    assert other.acquire(MIB).inode != buffer.inode
    assert other.buffer_of(buffer.inode) is None
    other._evict_other_sizes(7)
    assert one.acquire(MIB) is buffer
    one.close()
    other.close()


def test_the_agents_files_are_its_own(job_root):
    agent, rank = pool_of(job_root, AGENT), pool_of(job_root)
    buffer = agent.acquire(MIB)
    agent.release(buffer)
    assert [name[:6] for name in files(job_root)] == ["agent-"]
    assert rank.acquire(MIB).inode != buffer.inode
    rank._evict_other_sizes(7)
    assert rank.drop_ranks_other_than([]) == 0
    assert rank.used_bytes() == agent.used_bytes() == 2 * MIB
    assert agent.acquire(MIB) is buffer
    agent.close()
    rank.close()


# ---- many at once ---------------------------------------------------------------------------------


def test_many_buffers_come_in_the_order_of_their_sizes_and_free_ones_first(pool):
    free = [pool.acquire(nbytes) for nbytes in (MIB, 2 * MIB, 2 * MIB)]
    for buffer in free:
        pool.release(buffer)
    sizes = [2 * MIB, 4096, MIB, 2 * MIB, 4096, 2 * MIB]
    taken = pool.acquire_many(sizes)
    assert [buffer.nbytes for buffer in taken] == sizes
    assert len({buffer.inode for buffer in taken}) == len(sizes)
    assert {buffer.inode for buffer in free} == {buffer.inode for buffer in taken if buffer.recycled}
    assert pool.allocations == 6
    for buffer in taken:
        buffer.data[:] = 1
        pool.release(buffer)
    assert {id(buffer) for buffer in pool.acquire_many(sizes)} == {id(buffer) for buffer in taken}
    assert pool.acquire_many([]) == []


def test_where_not_all_fit_none_is_taken_and_none_is_made(job_root):
    pool = pool_of(job_root, memory_limit_bytes=5 * MIB)
    kept, free = pool.acquire(MIB), pool.acquire(2 * MIB)
    pool.release(free)
    before = files(job_root)
    with pytest.raises(NoSpaceError, match=r"holds 3.0 MiB and may hold 5.0 MiB.* needs 3.0 MiB more"):
        pool.acquire_many([2 * MIB, 2 * MIB, MIB])
    assert files(job_root) == before
    assert pool.acquire(2 * MIB) is free
    assert kept.data is not None
    pool.close()


def test_many_buffers_can_be_asked_for_without_making_any(pool, job_root):
    free = pool.acquire(MIB)
    pool.release(free)
    with pytest.raises(NoSpaceError, match="free"):
        pool.acquire_many([MIB, MIB], may_allocate=False)
    assert len(files(job_root)) == 1
    assert pool.acquire_many([MIB], may_allocate=False) == [free]


def test_the_grace_period_ends_for_many_when_space_is_short(job_root):
    pool = pool_of(job_root, recycle_grace_s=3600, memory_limit_bytes=4 * MIB)
    resting = pool.acquire_many([MIB, MIB])
    for buffer in resting:
        pool.release(buffer)
    taken = pool.acquire_many([MIB] * 4)
    assert {buffer.inode for buffer in resting} < {buffer.inode for buffer in taken}
    pool.close()


def test_a_file_that_cannot_be_made_takes_the_others_along(pool, job_root, monkeypatch):
    real, calls = os.posix_fallocate, []

    def third_fails(fd, begin, length):
        calls.append(fd)
        if len(calls) == 3:
            raise OSError(errno.EIO, "broken")
        real(fd, begin, length)

    free = pool.acquire(2 * MIB)
    pool.release(free)
    held, used = descriptors(), os.statvfs(job_root).f_bfree
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", third_fails)
        with pytest.raises(OSError, match="broken"):
            pool.acquire_many([2 * MIB] + [8 * MIB] * 4)
    assert files(job_root) == [os.path.basename(free.path)]
    assert descriptors() == held
    assert (
        used - os.statvfs(job_root).f_bfree
    ) * 4096 < 8 * MIB  # other users of /dev/shm: a little tolerance
    assert pool.acquire(2 * MIB) is free


def test_the_files_are_looked_at_once_for_many(pool, monkeypatch):
    real, looks = os.listdir, []

    def counted(path):
        looks.append(path)
        return real(path)

    monkeypatch.setattr(os, "listdir", counted)
    taken = pool.acquire_many([4096] * 300)
    assert len(looks) == 2  # for what is free, and for what is used
    for buffer in taken:
        pool.release(buffer)
    pool.acquire_many([4096] * 300)
    assert len(looks) == 3


# ---- the world as it is ---------------------------------------------------------------------------


def test_a_pool_folder_deleted_by_hand_is_made_again(pool, job_root):
    free, taken = pool.acquire(MIB), pool.acquire(MIB)
    pool.release(free)
    shutil.rmtree(f"{job_root}/.pool")
    fresh = pool.acquire(MIB)
    assert fresh.inode not in (free.inode, taken.inode)
    assert files(job_root) == [os.path.basename(fresh.path)]
    taken.data[:] = 3  # its owner may go on, and lets go without an error
    pool.release(taken)
    pool.release(fresh)
    assert pool.acquire(MIB) is fresh


def test_a_job_root_deleted_by_hand_is_made_again(pool, job_root):
    pool.release(pool.acquire(MIB))
    shutil.rmtree(job_root)
    assert pool.acquire(MIB).link_count == 1
    assert len(files(job_root)) == 1


def mapped_though_deleted(job_root):
    """This process's mappings of files in the pool that have no name there any more."""
    with open("/proc/self/maps") as maps:
        return [line for line in maps if f"{job_root}/.pool/" in line and line.endswith("(deleted)\n")]


def test_files_deleted_by_hand_give_their_memory_back(pool, job_root):
    # A mapping keeps a deleted file's pages in the tmpfs, where no listing shows them.
    made = [pool.acquire(nbytes) for nbytes in (8 * MIB, 4 * MIB, 4 * MIB)]
    linked = link(job_root, made[2])
    for buffer in made:
        pool.release(buffer)
    del buffer, made
    shutil.rmtree(f"{job_root}/.pool")
    held = descriptors()
    assert len(mapped_though_deleted(job_root)) == 3
    pool.release(pool.acquire(MIB))
    assert descriptors() < held
    assert not mapped_though_deleted(job_root)
    with open(linked, "rb") as file:
        assert len(file.read()) == 4 * MIB  # the version whose pool name is gone is whole


def test_other_files_in_the_pool_are_left_alone(pool, job_root):
    os.makedirs(f"{job_root}/.pool")
    names = [
        "README",
        "rank00000-xyz.buf",
        "rank00000-0123456789abcdef.buf.bak",
        "rank0-0123456789abcdef.buf",
        "agent-xyz.buf",
        "agent00000-0123456789abcdef.buf",
    ]
    for name in names:
        with open(f"{job_root}/.pool/{name}", "wb") as file:
            file.write(bytes(MIB))
    os.symlink("/etc/passwd", f"{job_root}/.pool/rank00000-{'0' * 16}.buf")
    assert pool.used_bytes() < 4096
    for _ in range(3):
        pool.release(pool.acquire(MIB))
    pool.drop_ranks_other_than([])
    assert set(names) <= set(files(job_root))
    assert os.path.exists("/etc/passwd")


def test_what_a_crash_cut_off_in_its_making_is_neither_used_nor_kept(pool, job_root):
    os.makedirs(f"{job_root}/.pool")
    for i, nbytes in enumerate((0, MIB)):
        with open(f"{job_root}/.pool/rank00000-{i:016x}.buf", "wb") as file:
            file.truncate(nbytes)  # no pages: writing to its mapping could be a SIGBUS
    buffer = pool.acquire(MIB)
    assert not buffer.recycled
    pool.release(buffer)
    assert pool.drop_unfinished() == 0
    assert files(job_root) == [os.path.basename(buffer.path)]


def test_a_new_pool_finds_the_files_of_the_one_before(job_root):
    first = pool_of(job_root)
    kept, free = first.acquire(MIB), first.acquire(MIB)
    kept.data[:] = 5
    path = link(job_root, kept)
    first.release(kept)
    first.release(free)
    first.close()
    second = pool_of(job_root)
    buffer = second.acquire(MIB)
    assert buffer.inode == free.inode
    assert buffer.recycled
    assert second.acquire(MIB).inode != kept.inode
    with open(path, "rb") as file:
        assert set(file.read()) == {5}
    second.close()


def test_closing_leaves_a_buffer_to_whoever_still_writes_to_it(job_root):
    first, second = pool_of(job_root), pool_of(job_root)
    buffer = first.acquire(MIB)
    first.close()
    assert second.acquire(MIB).inode != buffer.inode
    buffer.data[:] = 1
    first.release(buffer)
    assert second.acquire(MIB).inode == buffer.inode
    second.close()


def test_no_descriptor_is_left_behind(job_root):
    before = descriptors()
    for _ in range(5):
        pool = pool_of(job_root)
        for _ in range(3):
            pool.release(pool.acquire(MIB))
            pool.release(pool.acquire(2 * MIB))
        pool.buffer_of((0, 0))
        with pytest.raises(NoSpaceError):
            pool.acquire(LIMIT + 1)
        pool.close()
    assert descriptors() == before


# ---- space ----------------------------------------------------------------------------------------


def test_over_budget_is_refused_with_numbers_before_anything_is_allocated(job_root):
    pool = pool_of(job_root, memory_limit_bytes=5 * MIB)
    first = pool.acquire(3 * MIB)
    with pytest.raises(NoSpaceError, match=r"holds 3.0 MiB and may hold 5.0 MiB.* needs 3.0 MiB more"):
        pool.acquire(3 * MIB)
    assert files(job_root) == [os.path.basename(first.path)]
    pool.release(first)
    assert pool.acquire(3 * MIB) is first
    pool.close()


def test_the_budget_counts_the_files_of_all_ranks(job_root):
    one, other = (pool_of(job_root, rank, memory_limit_bytes=5 * MIB) for rank in (0, 1))
    one.acquire(3 * MIB)
    assert other.used_bytes() == 3 * MIB
    with pytest.raises(NoSpaceError):
        other.acquire(3 * MIB)
    other.acquire(2 * MIB)
    one.close()
    other.close()


def test_ranks_that_allocate_at_once_stay_within_the_budget(job_root):
    # At the first save of a job all ranks of a node ask at the same moment.
    for attempt in range(10):
        root = f"{job_root}/{attempt}"
        pools = [pool_of(root, rank, memory_limit_bytes=16 * MIB) for rank in range(6)]
        start, outcomes = threading.Barrier(6), []

        def work(pool, start=start, outcomes=outcomes):
            start.wait()
            try:
                outcomes.append(pool.acquire(5 * MIB))
            except NoSpaceError:
                outcomes.append(None)

        threads = [threading.Thread(target=work, args=(pool,)) for pool in pools]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(buffer is not None for buffer in outcomes) == 3
        for pool in pools:
            pool.close()
        shutil.rmtree(root)


def test_what_another_rank_is_about_to_fill_counts(job_root, monkeypatch):
    one, other = (pool_of(job_root, rank, memory_limit_bytes=5 * MIB) for rank in (0, 1))
    going, go_on = threading.Event(), threading.Event()
    real = os.posix_fallocate

    def slow(fd, begin, length):
        going.set()
        assert go_on.wait(30)
        real(fd, begin, length)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    filling = threading.Thread(target=one.acquire, args=(3 * MIB,))
    filling.start()
    assert going.wait(30)
    with pytest.raises(NoSpaceError, match=r"holds 3.0 MiB"):
        other.acquire(3 * MIB)
    go_on.set()
    filling.join()
    one.close()
    other.close()


def test_free_files_of_other_sizes_make_room(job_root):
    pool = pool_of(job_root, memory_limit_bytes=6 * MIB)
    old = [pool.acquire(2 * MIB), pool.acquire(2 * MIB)]
    kept = link(job_root, old[0])
    for buffer in old:
        pool.release(buffer)
    new = pool.acquire(4 * MIB)
    assert new.nbytes == 4 * MIB
    assert os.path.exists(kept)
    assert pool.used_bytes() == 6 * MIB
    with pytest.raises(NoSpaceError):
        pool.acquire(2 * MIB)
    pool.close()


def test_a_file_in_use_is_never_evicted(job_root):
    pool, other_rank = (pool_of(job_root, rank, memory_limit_bytes=4 * MIB) for rank in (0, 1))
    taken = pool.acquire(2 * MIB)
    other_rank.release(other_rank.acquire(MIB))
    with pytest.raises(NoSpaceError):
        pool.acquire(3 * MIB)
    assert taken.link_count == 1
    assert len(files(job_root)) == 2
    pool.close()
    other_rank.close()


def test_files_of_ranks_that_are_gone_are_dropped_unless_a_version_needs_them(job_root):
    pools = [pool_of(job_root, rank) for rank in range(4)]
    for pool in pools:
        buffer = pool.acquire(MIB)
        if pool.owner == 3:
            kept = link(job_root, buffer)
        pool.release(buffer)
    assert pools[0].drop_ranks_other_than([0, 1]) == MIB
    assert [name[:9] for name in files(job_root)] == ["rank00000", "rank00001", "rank00003"]
    os.unlink(kept)
    assert pools[0].drop_ranks_other_than(range(2)) == MIB
    for pool in pools:
        pool.close()


def test_a_freed_file_rests_for_the_grace_period(job_root, monkeypatch):
    real, later_s = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: real() + later_s)
    pool = pool_of(job_root, recycle_grace_s=1000)
    buffer = pool.acquire(MIB)
    path = link(job_root, buffer)
    pool.release(buffer)
    os.unlink(path)  # it rests from now on
    later_s = 500
    assert pool.acquire(MIB).inode != buffer.inode
    later_s = 1001
    assert pool.acquire(MIB) is buffer
    pool.close()


def test_the_grace_period_ends_when_space_is_short(job_root):
    pool = pool_of(job_root, recycle_grace_s=3600, memory_limit_bytes=3 * MIB)
    buffer = pool.acquire(2 * MIB)
    pool.release(buffer)
    assert pool.acquire(2 * MIB) is buffer
    pool.close()


def test_reserving_makes_buffers_ahead_of_the_saves(pool, job_root):
    assert pool.reserve(2 * MIB, 3) == 3
    assert pool.reserve(2 * MIB, 3) == 3
    assert pool.reserve(2 * MIB, 1) == 3
    assert pool.allocations == 3
    taken = [pool.acquire(2 * MIB) for _ in range(3)]
    assert all(buffer.recycled for buffer in taken)
    link(job_root, taken[0])
    for buffer in taken:
        pool.release(buffer)
    assert pool.reserve(2 * MIB, 3) == 3  # one that a version names counts too
    assert pool.allocations == 3


def test_reserving_stops_where_there_is_no_space_or_on_demand(job_root):
    pool = pool_of(job_root, memory_limit_bytes=5 * MIB)
    assert pool.reserve(2 * MIB, 9) == 2
    stop = threading.Event()
    stop.set()
    assert pool.reserve(MIB, 1, stop=stop) == 0
    pool.close()


def test_reserved_files_of_an_earlier_process_count(job_root):
    first = pool_of(job_root)
    first.reserve(MIB, 2)
    first.close()
    second = pool_of(job_root)
    assert second.reserve(MIB, 2) == 2
    assert second.allocations == 0
    second.close()


def test_reserving_keeps_within_the_ranks_own_budget(pool):
    pool.release(pool.acquire(MIB))
    assert pool.reserve(2 * MIB, 3, budget_bytes=6 * MIB) == 2
    assert pool.used_bytes() == 5 * MIB


def test_trimming_gives_back_the_longest_free_files_first(pool, job_root):
    made = [pool.acquire(nbytes) for nbytes in (MIB, 2 * MIB, 3 * MIB, 4 * MIB)]
    kept = link(job_root, made[0])
    for buffer in (made[2], made[0], made[3]):
        pool.release(buffer)
        os.utime(buffer.path)  # stamps the moment
        time.sleep(0.01)
    assert pool.trim(10 * MIB) == 0
    assert pool.trim(9 * MIB) == 3 * MIB
    assert pool.trim(0) == 4 * MIB  # one is linked, one in use
    assert pool.used_bytes() == 3 * MIB
    assert os.path.exists(kept)
    made[1].data[:] = 1


@pytest.mark.parametrize("damage", ["cut short", "hole"])
def test_a_free_file_that_somebody_cut_is_not_written_to(pool, damage):
    # A page that is not there is a SIGBUS for whoever writes through the mapping.
    buffer = pool.acquire(MIB)
    pool.release(buffer)
    if damage == "cut short":
        os.truncate(buffer.path, 4096)
    else:
        subprocess.run(["fallocate", "-p", "-o", "0", "-l", "65536", buffer.path], check=True)
    fresh = pool.acquire(MIB)
    assert fresh.inode != buffer.inode
    fresh.data[:] = 1


def test_touching_keeps_what_a_buffer_holds(pool):
    buffer = pool.acquire(MIB)
    buffer.data[:] = np.arange(MIB, dtype=np.uint8)
    expected = buffer.data.copy()
    pool.touch(buffer)
    np.testing.assert_array_equal(buffer.data, expected)


def test_a_buffer_can_be_taken_while_another_is_reserved(pool, monkeypatch):
    # Allocating gigabytes takes seconds; a save that finds a free buffer must not wait for that.
    pool.release(pool.acquire(MIB))
    going, go_on = threading.Event(), threading.Event()
    real = os.posix_fallocate

    def slow(fd, begin, length):
        going.set()
        assert go_on.wait(30)
        real(fd, begin, length)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    background = threading.Thread(target=pool.reserve, args=(2 * MIB, 1))
    background.start()
    assert going.wait(30)
    taken: list = []
    saving = threading.Thread(target=lambda: taken.append(pool.acquire(MIB)))
    saving.start()
    saving.join(20)
    was_quick = bool(taken)
    go_on.set()
    saving.join()
    background.join()
    assert was_quick
    assert pool.reserve(2 * MIB, 1) == 1
    assert pool.allocations == 2


# ---- a full tmpfs ---------------------------------------------------------------------------------


@pytest.fixture
def small_tmpfs(tmp_path):
    """A tmpfs of 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    point = tmp_path / "small"
    point.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "flashpoint-test", point], check=False)
    if mounted.returncode != 0:
        pytest.skip("this root may not mount")
    try:
        yield str(point)
    finally:
        subprocess.run(["umount", "--lazy", point], check=True)


@pytest.mark.root
@pytest.mark.fault(14)
def test_a_full_tmpfs_is_an_error_with_numbers_and_leaves_no_file(small_tmpfs):
    root = f"{small_tmpfs}/job"
    pool = pool_of(root)
    first = pool.acquire(5 * MIB)
    with pytest.raises(NoSpaceError, match=r"tmpfs .*small has 3.0 MiB of 8.0 MiB free.* needs 4.0 MiB"):
        pool.acquire(4 * MIB)
    assert files(root) == [os.path.basename(first.path)]
    first.data[:] = 1  # no SIGBUS: every page was there before
    with pytest.raises(NoSpaceError):
        pool.acquire_many([MIB] * 4)
    assert files(root) == [os.path.basename(first.path)]
    second = pool.acquire(2 * MIB)
    second.data[:] = 2
    pool.release(first)
    assert pool.acquire(5 * MIB) is first
    pool.close()


@pytest.mark.root
def test_a_full_tmpfs_makes_free_files_of_other_sizes_go_and_ends_the_grace_period(small_tmpfs):
    root = f"{small_tmpfs}/job"
    pool = pool_of(root, recycle_grace_s=3600)
    old = pool.acquire(5 * MIB)
    pool.release(old)
    del old
    new = pool.acquire(6 * MIB)
    assert files(root) == [os.path.basename(new.path)]
    pool.release(new)
    assert pool.acquire(6 * MIB) is new
    pool.close()


@pytest.mark.root
@pytest.mark.fault(14)
def test_a_tmpfs_that_others_filled_meanwhile_is_a_clean_error_too(small_tmpfs):
    pool = pool_of(f"{small_tmpfs}/job")
    with open(f"{small_tmpfs}/other", "wb") as file:
        file.write(bytes(7 * MIB))
    with pytest.raises(NoSpaceError):
        pool.acquire(2 * MIB)
    assert pool.reserve(2 * MIB, 2) == 0
    os.unlink(f"{small_tmpfs}/other")
    assert pool.reserve(2 * MIB, 2) == 2
    pool.close()


# ---- several processes ----------------------------------------------------------------------------


def save_and_wait(say, job_root):
    """Hold one linked, one free and one taken buffer."""
    pool = pool_of(job_root)
    linked, free, taken = (pool.acquire(MIB) for _ in range(3))
    linked.data[:] = 5
    os.link(linked.path, path_in_container(job_root))
    pool.release(linked)
    pool.release(free)
    say((linked.inode, free.inode, taken.inode))


def test_after_a_kill_all_but_the_linked_files_are_free(job_root):
    with process(save_and_wait, job_root) as other:
        linked, free, taken = other.hear()
        other.kill()
    pool = pool_of(job_root)
    found = {pool.acquire(MIB).inode for _ in range(3)}
    assert {free, taken} < found
    assert linked not in found
    with open(path_in_container(job_root), "rb") as file:
        assert set(file.read()) == {5}
    pool.close()


def test_what_a_living_process_writes_to_is_not_taken_even_by_the_same_rank(job_root):
    with process(save_and_wait, job_root) as other:
        linked, free, taken = other.hear()
        pool = pool_of(job_root)
        found = {pool.acquire(MIB).inode for _ in range(3)}
        assert free in found
        assert not found & {linked, taken}
        pool.close()


def fork_while_saving(say, job_root):
    pool = pool_of(job_root)
    taken = pool.acquire(MIB)
    child = fork_to_sleep()
    say((child, taken.inode))
    pool.release(taken)
    say(pool.acquire(MIB).inode)


def test_a_forked_child_that_outlives_its_parent_does_not_keep_its_buffers(job_root):
    with process(fork_while_saving, job_root) as other:
        child, taken = other.hear()
        try:
            pool = pool_of(job_root)
            assert pool.acquire(MIB).inode != taken
            other.kill()
            assert pool.acquire(MIB).inode == taken
            pool.close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_fork_in_between_does_not_keep_the_parent_from_recycling(job_root):
    with process(fork_while_saving, job_root) as other:
        child, taken = other.hear()
        other.go_on()
        try:
            assert other.hear() == taken
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_child_forked_at_the_wrong_moment_does_not_keep_other_ranks_waiting(job_root, monkeypatch):
    monkeypatch.setattr(buffers, "TURN_WAIT_S", 30)
    one, other = pool_of(job_root, 0), pool_of(job_root, 1)
    real, children = os.ftruncate, []

    def forked_meanwhile(fd, nbytes):
        real(fd, nbytes)
        if not children:
            children.append(os.fork())
            if children[0] == 0:
                time.sleep(60)
                os._exit(0)

    monkeypatch.setattr(os, "ftruncate", forked_meanwhile)
    try:
        one.acquire(MIB)
        start = time.monotonic()
        other.acquire(MIB)
        assert time.monotonic() - start < 10
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)
    one.close()
    other.close()


def fork_and_use(say, job_root):
    pool = pool_of(job_root)
    taken = pool.acquire(MIB)
    taken.data[:] = 5
    child = os.fork()
    if child == 0:  # what a child might do at its end must not touch what is the parent's
        pool.release(taken)
        pool.close()
        del pool, taken
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    say(taken.inode)
    assert taken.data.all()


def test_a_forked_child_cannot_give_its_parents_buffers_away(job_root):
    with process(fork_and_use, job_root) as other:
        taken = other.hear()
        pool = pool_of(job_root)
        assert pool.acquire(MIB).inode != taken
        pool.close()
        other.go_on()
        other.join()
