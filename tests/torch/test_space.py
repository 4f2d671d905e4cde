"""A tmpfs that is too small, gets full, or loses room; and what many saves leave behind.

Everything runs in processes of its own: where a page cannot be had, a mistake is a SIGBUS.
"""

import ctypes
import gc
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import flashpoint_torch as fpt
from flashpoint.errors import NoSpaceError, SaveError
from flashpoint.objects import CheckpointObjectManager
from tests.torch.faults import Launcher, blank_state, check, look, report, same, state_of

MIB = 1 << 20
SETTINGS = {"chunk_bytes": 64 << 10, "commit_timeout_s": 20.0, "recovery_timeout_s": 20.0}

Mount = Callable[..., str]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mount a tmpfs with these options; its path. All go away afterwards, whatever happened."""
    paths: list[Path] = []

    def do_mount(options: str) -> str:
        path = tmp_path / f"tmpfs-{len(paths)}"
        path.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        paths.append(path)
        return str(path)

    try:
        yield do_mount
    finally:
        for path in paths:
            subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def alone() -> Callable[..., Any]:
    """Run a function in a process of its own, without a rank; what it returns."""

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return Launcher(1).run(_without_rank, function, *args, **kwargs)[0]

    return run


def _without_rank(rank: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def of_size(mib: int, step: int) -> dict[str, Any]:
    return {"weight": torch.full((mib, MIB), step, dtype=torch.uint8)}


@contextmanager
def warnings_seen() -> Iterator[list[str]]:
    seen: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flashpoint")
    logger.addHandler(handler)
    try:
        yield seen
    finally:
        logger.removeHandler(handler)


def fill(path: str, *, leave: int = 0) -> None:
    """Take all room of the file system at ``path`` but ``leave`` bytes."""
    fd = os.open(f"{path}/filler", os.O_CREAT | os.O_WRONLY)
    usage = os.statvfs(path)
    nbytes = usage.f_bavail * usage.f_frsize - leave
    if nbytes > 0:
        os.posix_fallocate(fd, os.fstat(fd).st_size, nbytes)
    os.close(fd)


def holds_only(job_root: str, steps: list[int], *, versions: float) -> None:
    """Nothing half done is left, and no more memory than this many of the largest version here."""
    found = look(job_root)
    assert not found.markers and not found.strays, found
    assert found.containers == found.manifests == set(steps), found
    held = found.nbytes - found.manifest_bytes
    assert held <= versions * found.version_bytes + (64 << 10), found


def recovers(fp: fpt.Flashpoint, step: int) -> None:
    target = blank_state()
    found = fp.recover(target)
    assert found is not None and found.step == step
    assert same(target, state_of(step))


# ---- too large --------------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize(
    ("limit", "numbers"), [(0, ["60.8 MiB", "80.0 MiB"]), (1 << 30, ["of 64.0 MiB free", "80.0 MiB"])]
)
@pytest.mark.fault(14)
def test_a_state_larger_than_the_tmpfs(mount: Mount, alone: Any, limit: int, numbers: list[str]) -> None:
    """By the budget, or, where that was set too high, by the tmpfs itself."""
    alone(_larger_than_the_tmpfs, mount("size=64m") + "/job", limit, numbers)


def _larger_than_the_tmpfs(job_root: str, limit: int, numbers: list[str]) -> None:
    with fpt.init(job_root, memory_limit_bytes=limit, **SETTINGS) as fp, warnings_seen() as warnings:
        assert fp.save(state_of(1), 1).done()
        assert not warnings
        handle = fp.async_save(of_size(80, 2), 2)
        assert isinstance(handle.error, NoSpaceError)
        assert not handle.wait(timeout_s=10)
        fp.wait()
        [warning] = warnings
        for text in (str(handle.error), warning):
            assert all(number in text for number in numbers), text
        assert "step 2" in warning
        holds_only(job_root, [1], versions=2)
        recovers(fp, 1)
        dcp.save(of_size(80, 3), checkpoint_id=fp.path(3), storage_writer=fp.writer(), no_dist=True)
        assert len(warnings) == 2
        holds_only(job_root, [1], versions=2)
        assert fp.save(state_of(4), 4).done()  # training went on
        recovers(fp, 4)
        holds_only(job_root, [4], versions=2)


@pytest.mark.root
def test_a_state_larger_than_the_tmpfs_where_strict(mount: Mount, alone: Any) -> None:
    alone(_strict, mount("size=64m") + "/job")


def _strict(job_root: str) -> None:
    with fpt.init(job_root, strict=True, **SETTINGS) as fp:
        assert fp.save(state_of(1), 1).done()
        with pytest.raises(NoSpaceError, match=r"80\.0 MiB"):
            fp.async_save(of_size(80, 2), 2)
        with pytest.raises(NoSpaceError, match=r"80\.0 MiB"):
            fp.save(of_size(80, 3), 3)
        with pytest.raises(dcp.CheckpointException, match=r"80\.0 MiB"):
            dcp.save(of_size(80, 3), checkpoint_id=fp.path(3), storage_writer=fp.writer(), no_dist=True)
        fp.wait()
        holds_only(job_root, [1], versions=2)
        assert fp.save(state_of(4), 4).done()
        recovers(fp, 4)


@pytest.mark.root
@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_room_for_one_version_only(mount: Mount, alone: Any, limit: int) -> None:
    alone(_room_for_one, mount("size=64m") + "/job", limit)


def _room_for_one(job_root: str, limit: int) -> None:
    with fpt.init(job_root, memory_limit_bytes=limit, **SETTINGS) as fp:
        assert fp.save(of_size(40, 1), 1).done()
        for step in (2, 3):
            handle = fp.save(of_size(40, step), step)
            assert isinstance(handle.error, NoSpaceError)
            assert fp.steps() == [1]
        fp.wait()
        holds_only(job_root, [1], versions=1)
        target = of_size(40, 0)
        assert fp.recover(target).step == 1
        assert same(target, of_size(40, 1))


def test_the_memory_limit_is_kept(job_root: str, alone: Any) -> None:
    alone(_memory_limit, job_root)


def _memory_limit(job_root: str) -> None:
    with fpt.init(job_root, memory_limit_bytes=10 * MIB, **SETTINGS) as fp:
        for step in range(1, 4):
            assert fp.save(of_size(4, step), step).done()
            assert look(job_root).nbytes < 10 * MIB
        handle = fp.save(of_size(8, 4), 4)
        assert isinstance(handle.error, NoSpaceError)
        assert "8.0 MiB" in str(handle.error) and "10.0 MiB" in str(handle.error)
        assert fp.steps() == [3]
        assert fp.save(of_size(5, 5), 5).done()  # in the place of the free one of 4 MiB
        assert fp.steps() == [5]
        assert look(job_root).nbytes < 10 * MIB


# ---- full -------------------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.fault(14)
def test_room_that_comes_back(mount: Mount, alone: Any) -> None:
    alone(_comes_back, mount("size=32m"))


def _comes_back(path: str) -> None:
    job_root = f"{path}/job"
    with fpt.init(job_root, memory_limit_bytes=1 << 30, prefault=False, **SETTINGS) as fp:
        assert fp.save(state_of(1), 1).done()
        for leave in (0, 4096, 64 << 10, 512 << 10):
            fill(path, leave=leave)
            handle = fp.save(state_of(2), 2)
            fp.wait()
            assert isinstance(handle.error, NoSpaceError), leave
            holds_only(job_root, [1], versions=1)
            recovers(fp, 1)
            os.unlink(f"{path}/filler")
        assert fp.save(state_of(2), 2).done()
        recovers(fp, 2)


@pytest.mark.root
@pytest.mark.parametrize("leave", [0, 2048, 4096])
@pytest.mark.fault(14)
def test_full_between_the_allocation_and_the_manifest(mount: Mount, alone: Any, leave: int) -> None:
    alone(_full_before_manifest, mount("size=32m"), leave)


def _full_before_manifest(path: str, leave: int) -> None:
    job_root = f"{path}/job"
    write_manifest = CheckpointObjectManager.write_manifest

    def full(objects: CheckpointObjectManager, container: Any, data: bytes) -> None:
        fill(path, leave=leave)
        write_manifest(objects, container, data + b" " * 8192)  # of several pages, as large worlds have it

    with fpt.init(job_root, **SETTINGS) as fp:
        assert fp.save(state_of(1), 1).done()
        CheckpointObjectManager.write_manifest = full  # type: ignore[method-assign]
        handle = fp.save(state_of(2), 2)
        CheckpointObjectManager.write_manifest = write_manifest  # type: ignore[method-assign]
        assert isinstance(handle.error, SaveError)
        assert "manifest" in str(handle.error) and "No space left" in str(handle.error)
        holds_only(job_root, [1], versions=2)
        recovers(fp, 1)
        os.unlink(f"{path}/filler")
        assert fp.save(state_of(2), 2).done()
        recovers(fp, 2)


@pytest.mark.root
@pytest.mark.fault(15)
def test_a_tmpfs_that_is_made_smaller(mount: Mount, alone: Any) -> None:
    alone(_made_smaller, mount("size=64m"))


def _made_smaller(path: str) -> None:
    job_root = f"{path}/job"

    def resize(spare: int) -> None:
        usage = os.statvfs(path)
        used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        subprocess.run(["mount", "-o", f"remount,size={used + spare}", path], check=True)

    with fpt.init(job_root, prefault=False, **SETTINGS) as fp:
        assert fp.save(state_of(1), 1).done()
        for spare in (0, 64 << 10):
            resize(spare)
            handle = fp.save(state_of(2), 2)
            fp.wait()
            assert handle.error is not None
            holds_only(job_root, [1], versions=1)
            recovers(fp, 1)
        resize(16 * MIB)
        assert fp.save(state_of(2), 2).done()
        assert fp.save(state_of(3), 3).done()
        resize(0)
        handle = fp.save(state_of(4), 4)  # into the recycled buffer; but there is no page for the manifest
        fp.wait()
        assert isinstance(handle.error, SaveError)
        holds_only(job_root, [3], versions=2)
        recovers(fp, 3)


@pytest.mark.root
def test_a_tmpfs_without_inodes(mount: Mount, alone: Any) -> None:
    alone(_without_inodes, mount("size=64m,nr_inodes=40"))


def _without_inodes(path: str) -> None:
    job_root = f"{path}/job"
    with fpt.init(job_root, **SETTINGS) as fp:
        assert fp.save(state_of(1), 1).done()
        fp.wait()
        fillers = []
        while os.statvfs(path).f_ffree:
            fillers.append(f"{path}/filler-{len(fillers)}")
            Path(fillers[-1]).touch()
        step = 2
        while fillers:  # so that every name that a save makes is once the first to fail
            handle = fp.save(state_of(step), step)
            fp.wait()
            if handle.done():
                break
            assert "No space left" in str(handle.error), handle.error
            holds_only(job_root, [1], versions=2)
            recovers(fp, 1)
            os.unlink(fillers.pop())
            step += 1
        assert handle.done() and step >= 5
        recovers(fp, step)


@pytest.mark.root
@pytest.mark.parametrize("fresh", [False, True], ids=["same process", "fresh process"])
@pytest.mark.fault(23)
def test_a_hole_in_an_object_of_a_full_tmpfs(mount: Mount, alone: Any, fresh: bool) -> None:
    """To read it would need a page that is not to be had, which is a SIGBUS."""
    path = mount("size=32m")
    if fresh:
        alone(_two_steps, path)
        alone(_hole_when_full, path)
    else:
        alone(_two_steps, path, then=_hole_when_full)


def _two_steps(path: str, then: Callable[[str], None] | None = None) -> None:
    with fpt.init(f"{path}/job", keep=2, **SETTINGS) as fp:
        for step in (1, 2):
            assert fp.save(state_of(step), step).done()
        fp.wait()
        if then is not None:
            then(path)


def _hole_when_full(path: str) -> None:
    name = f"{path}/job/step-2_ckpt/rank00000-0.safetensors"
    fd = os.open(name, os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.fallocate64(fd, 3, ctypes.c_long(64 << 10), ctypes.c_long(64 << 10)) == 0
    os.close(fd)
    fill(path)
    with fpt.init(f"{path}/job", keep=2, **SETTINGS) as fp:
        recovers(fp, 1)


# ---- one rank of several ----------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.fault(14)
def test_two_nodes_of_which_one_lacks_room(mount: Mount, job_root: str, short: int) -> None:
    roots = [f"{job_root}/node-0", f"{job_root}/node-1"]
    roots[short] = mount("size=16m") + "/job"
    for rank, (error, warning) in enumerate(Launcher(2).run(_one_lacks_room, roots)):
        assert "24.0 MiB" in error and roots[short] in error, f"rank {rank} says: {error}"
        assert f"rank {short}" in warning and "step 2" in warning, f"rank {rank} says: {warning}"
    for root in roots:
        holds_only(root, [3], versions=2)


def _one_lacks_room(rank: int, roots: list[str]) -> tuple[str, str]:
    with fpt.init(roots[rank], **SETTINGS) as fp, warnings_seen() as warnings:
        assert fp.save(state_of(1, rank), 1).done()
        handle = fp.save(of_size(24, rank), 2)
        assert not handle.done()
        assert fp.steps() == [1]
        target = blank_state()
        assert fp.recover(target).step == 1
        assert same(target, state_of(1, rank))
        assert fp.save(state_of(3, rank), 3).done()
        return str(handle.error), warnings[0]


# ---- what stays -------------------------------------------------------------------------------------


@pytest.mark.fault("G")
def test_300_saves_and_30_starts_leave_nothing_behind(job_root: str, alone: Any) -> None:
    first, last = alone(_many_saves, job_root)
    report("before and after 300 saves and 30 starts:", before=first, after=last)
    assert last["fds"] <= first["fds"] + 2
    assert last["threads"] <= first["threads"]
    assert last["tmpfs"] <= first["tmpfs"] + (16 << 10)
    assert last["mappings"] <= first["mappings"] + 10
    assert last["rss"] <= first["rss"] + 8 * MIB


def _many_saves(job_root: str) -> list[dict[str, int]]:
    measured = []
    for rounds in (5, 25):
        step = 0
        for _ in range(rounds):
            with fpt.init(job_root, **SETTINGS) as fp:
                found = fp.recover(blank_state())
                last = found.step if found else 0
                for step in range(last + 1, last + 11):
                    fp.async_save(state_of(step), step)
                fp.wait()
                assert fp.steps() == [step]
        assert step == 10 * rounds + (0 if rounds == 5 else 50)
        measured.append(_resources(job_root))
    return measured


def _resources(job_root: str) -> dict[str, int]:
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = file.read().split()
    with open("/proc/self/maps", encoding="ascii") as file:
        mappings = len(file.readlines())
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tmpfs": look(job_root).nbytes,
        "mappings": mappings,
        "rss": (int(pages[1]) - int(pages[2]))
        * os.sysconf("SC_PAGE_SIZE"),  # without what is shared: the tmpfs
    }


@pytest.mark.parametrize("keep", [1, 3])
def test_values_that_grow_do_not_fill_the_tmpfs(job_root: str, alone: Any, keep: int) -> None:
    """Each size needs a buffer of its own; those of sizes that are not asked for any more go."""
    alone(_growing, job_root, keep)
    [answer] = Launcher(1).run(check, job_root, keep=keep, **SETTINGS)
    assert answer["step"] == 42 and answer["exact"]


def _growing(job_root: str, keep: int) -> None:
    largest = 0
    with fpt.init(job_root, keep=keep, **SETTINGS) as fp:
        for step in range(1, 41):
            state = of_size(1, step) | {"text": "x" * (step % 7), "list": {"a": bytearray(10_000 * step)}}
            assert fp.save(state, step).done()
            fp.wait()
            found = look(job_root)
            largest = max(largest, found.version_bytes)
            assert found.nbytes - found.manifest_bytes <= (keep + 1) * largest + (64 << 10), found
        for step in (41, 42):
            assert fp.save(state_of(step), step).done()
        for _ in range(3):
            fp.recover(blank_state())


def test_states_that_take_turns_keep_their_buffers(job_root: str, alone: Any) -> None:
    alone(_taking_turns, job_root)


def _taking_turns(job_root: str) -> None:
    with fpt.init(job_root, **SETTINGS) as fp:
        pool = fp.objects.pool
        for step in range(1, 21):
            assert fp.save(of_size(4 if step % 2 else 3, step), step).done()
            fp.wait()
            if step == 6:
                allocations = pool.allocations
        assert pool.allocations == allocations
        assert look(job_root).nbytes <= 9 * MIB
