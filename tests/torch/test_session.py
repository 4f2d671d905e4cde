"""The contract of `init`, and what a loop that saves every few steps may count on."""

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import flashpoint
import flashpoint_torch as fpt
from flashpoint.errors import NoSpaceError
from tests.torch.states import same
from tests.torch.workers import Workers

WAIT_S = 30


def state_of(step: int, elements: int = 100_000) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {
        "model": {
            "w": torch.full((elements,), float(step)),
            "b": torch.full((7,), step, dtype=torch.bfloat16),
        },
        "optimizer": [torch.full((elements,), step * 2.0), {"lr": 0.1 * step}],
        "step": step,
        "rank": rank,
    }


def pool_of(fp: fpt.Flashpoint) -> Any:
    return fp.objects.pool


# ---- the first page ---------------------------------------------------------------------------------


def first_page(job_root: str) -> None:
    with fpt.init(job_root, keep=1) as fp:
        state = state_of(0)
        assert fp.recover(state) is None
        assert same(state, state_of(0))
        handle = fp.async_save(state_of(20), step=20)
        assert handle.done("staged")
        assert handle.wait("complete", timeout_s=WAIT_S)
        assert handle.error is None
        assert fp.steps() == [20]
        assert fp.save(state_of(30), step=30).done()
        dcp.async_save(state_of(40), checkpoint_id=fp.path(40), storage_writer=fp.writer()).result(WAIT_S)
        assert fp.steps() == [40]
        assert fp.path(40) == f"{job_root}/step-40_ckpt"
        assert repr(fp).startswith(f"<Flashpoint at {job_root}: rank {dist.get_rank()} of")
    if dist.get_world_size() > 1:
        dist.barrier()
    with fpt.init(job_root, keep=1) as fp:
        state = state_of(0)
        found = fp.recover(state)
        assert found is not None
        assert (found.step, found.tier) == (40, "local")
        assert found.seconds >= found.timings["find"] + found.timings["fill"] > 0
        assert found.nbytes == 2 * 400_000 + 14
        assert same(state, state_of(40) | {"rank": state["rank"]})
        assert fp.epoch == 2


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_first_page(workers: Workers, job_root: str, world_size: int) -> None:
    workers.run(world_size, first_page, job_root)


def test_without_a_process_group(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        assert fp.save(state_of(1), 1).error is None
        state = state_of(0)
        assert fp.recover(state)
        assert same(state, state_of(1))


def test_the_newest_epoch_wins_over_the_higher_step(job_root: str) -> None:
    with fpt.init(job_root, keep=0) as fp:
        fp.save(state_of(100), 100)
    with fpt.init(job_root, keep=0) as fp:  # begins anew, from an older step
        fp.save(state_of(10), 10)
        assert fp.steps() == [10, 100]
        state = state_of(0)
        found = fp.recover(state)
        assert found is not None
        assert found.step == 10
        assert fp.recover(state, step=100)
        assert state["step"] == 100


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_so_many_versions_are_kept(job_root: str, keep: int) -> None:
    with fpt.init(job_root, keep=keep) as fp:
        for step in range(1, 7):
            fp.save(state_of(step), step)
            assert fp.steps() == list(range(step, max(step - keep, 0), -1))
        for step in fp.steps():
            state = state_of(0)
            assert fp.recover(state, step=step)
            assert same(state, state_of(step))


# ---- copied, never aliased --------------------------------------------------------------------------


@pytest.mark.fault("B")
def test_training_may_change_everything_once_it_is_staged(job_root: str) -> None:
    held = threading.Event()
    with fpt.init(job_root) as fp:
        write = fp._saver.write

        def slow(pending: Any) -> None:
            assert held.wait(WAIT_S)
            write(pending)

        fp._saver.write = slow  # type: ignore[method-assign]
        state = state_of(1) | {"numbers": [1, [2]], "table": torch.arange(3).numpy()}
        handle = fp.async_save(state, 1)
        for tensor in (state["model"]["w"], state["model"]["b"], state["optimizer"][0]):
            tensor.fill_(-1)
        state["optimizer"][1]["lr"] = -1.0
        state["numbers"][1].append(-1)
        state["table"][:] = -1
        held.set()
        assert handle.wait("complete", timeout_s=WAIT_S)
        target = state_of(0) | {"numbers": None, "table": None}
        fp.recover(target)
        assert same(target, state_of(1) | {"numbers": [1, [2]], "table": torch.arange(3).numpy()})


def test_a_recovered_state_is_a_copy(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        fp.save(state_of(1), 1)
        first = state_of(0)
        fp.recover(first)
        first["model"]["w"].fill_(-1)
        second = state_of(0)
        fp.recover(second)
        assert same(second, state_of(1))


# ---- steady state -----------------------------------------------------------------------------------


def steady(job_root: str, asynchronous: bool, warm: bool) -> None:
    with fpt.init(job_root, keep=1) as fp:
        state = state_of(0)
        if warm:
            fp.warmup(state)
        allocations, free = [], []
        for step in range(1, 9):
            state["model"]["w"].fill_(step)
            state["step"] = step
            state["note"] = "x" * step  # values change in size
            if asynchronous:
                handle = fp.async_save(state, step)
                assert handle.wait("complete", timeout_s=WAIT_S)
            else:
                handle = fp.save(state, step)
            assert handle.error is None
            fp.wait()  # for the reserve, too
            dist.barrier()
            allocations.append(pool_of(fp).allocations)
            usage = os.statvfs(job_root)
            free.append(used_bytes(job_root))
            assert usage.f_bfree > 0
            dist.barrier()
        after = 0 if warm else 1
        assert set(allocations[after:]) == {2}
        manifest = Path(fp.path(8), ".metadata").stat().st_size
        assert max(free[1:]) - min(free[1:]) <= manifest + 4096
        assert fp.steps() == [8]


def used_bytes(job_root: str) -> int:
    """Memory that a job root holds, each file once. (The whole tmpfs is others' as well.)"""
    sizes = {}
    for folder, _, names in os.walk(job_root):
        for name in names:
            status = os.stat(f"{folder}/{name}")
            sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("warm", [False, True])
def test_from_the_second_save_on_no_buffer_is_made(
    workers: Workers, job_root: str, asynchronous: bool, warm: bool
) -> None:
    workers.run(2, steady, job_root, asynchronous, warm)


def test_warming_up_makes_all_buffers_and_the_first_save_none(job_root: str) -> None:
    with fpt.init(job_root, keep=2) as fp:
        fp.warmup(state_of(0))
        assert pool_of(fp).allocations == pool_of(fp).free_files() == 3
        fp.warmup(state_of(0))
        for step in range(1, 6):
            assert fp.save(state_of(step), step).error is None
        assert pool_of(fp).allocations == 3


def test_warming_up_after_a_recovery_makes_only_what_is_missing(job_root: str) -> None:
    with fpt.init(job_root, keep=1, prefault=False) as fp:
        fp.save(state_of(1), 1)
    with fpt.init(job_root, keep=1) as fp:
        state = state_of(0)
        fp.recover(state)
        fp.warmup(state)
        assert pool_of(fp).allocations == 1
        assert len(os.listdir(f"{job_root}/.pool")) == 2
        for step in (2, 3, 4):
            fp.save(state, step)
        assert pool_of(fp).allocations == 1


def test_warming_up_without_space_warns(job_root: str, caplog: pytest.LogCaptureFixture) -> None:
    with fpt.init(job_root, memory_limit_bytes="1MiB") as fp:
        fp.warmup(state_of(0))
    assert "no room for 2 buffers" in caplog.text


def test_a_new_start_recycles_the_buffers_of_the_old(job_root: str) -> None:
    for start in range(3):
        with fpt.init(job_root, keep=1) as fp:
            fp.recover(state_of(0))
            for step in range(10 * start, 10 * start + 3):
                assert fp.save(state_of(step), step).error is None
            fp.wait()
        assert len(os.listdir(f"{job_root}/.pool")) == 2


def test_nothing_is_left_open(job_root: str) -> None:
    def resources() -> tuple[int, int, int]:
        gc.collect()
        with open("/proc/self/maps") as maps:
            mapped = sum(job_root in line for line in maps)
        descriptors = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                descriptors += job_root in os.readlink(f"/proc/self/fd/{name}")
            except FileNotFoundError:
                continue
        return descriptors, mapped, threading.active_count()

    before = resources()
    for step in range(1, 6):
        with fpt.init(job_root, keep=1) as fp:
            state = state_of(0)
            fp.recover(state)
            fp.save(state_of(step), step)
            dcp.save(state_of(step), checkpoint_id=fp.path(step + 100), storage_writer=fp.writer())
            dcp.load(state_of(0), checkpoint_id=fp.path(step + 100), storage_reader=fp.reader())
    deadline = time.monotonic() + 5
    while resources() != before and time.monotonic() < deadline:
        time.sleep(0.05)  # a thread ends a moment after its pool
    assert resources() == before


# ---- handles ----------------------------------------------------------------------------------------


def test_timings(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        fp.save(state_of(1), 1)
        begin = time.perf_counter()
        handle = fp.async_save(state_of(2), 2)
        blocked = time.perf_counter() - begin
        assert handle.wait(timeout_s=WAIT_S)
        total = time.perf_counter() - begin
        times = handle.timings
        assert set(times) == {"blocking", "stage", "staged", "write", "commit", "complete"}
        assert 0 < times["stage"] <= times["blocking"] <= blocked
        assert times["stage"] <= times["staged"] <= times["blocking"]
        assert times["staged"] + times["write"] + times["commit"] <= times["complete"] <= total
        assert handle.nbytes > 2 * 400_000
        assert repr(handle) == "<SaveHandle of step 2: complete>"


def test_waiting_for_a_save_that_is_not_there_yet(job_root: str) -> None:
    go = threading.Event()
    with fpt.init(job_root) as fp:
        write = fp._saver.write
        fp._saver.write = lambda pending: (go.wait(WAIT_S), write(pending))[1]  # type: ignore[method-assign]
        handle = fp.async_save(state_of(1), 1)
        assert handle.done("staged")
        assert not handle.done("complete")
        assert not handle.wait("complete", timeout_s=0.1)
        assert handle.error is None
        assert not fp.wait(timeout_s=0.1)
        go.set()
        assert handle.wait("complete", timeout_s=WAIT_S)
        assert fp.wait()


# ---- strict or not ----------------------------------------------------------------------------------


def test_no_space_warns_and_training_goes_on(job_root: str, caplog: pytest.LogCaptureFixture) -> None:
    with fpt.init(job_root, memory_limit_bytes="1MiB") as fp:
        assert fp.save({"n": 1}, 1).error is None
        for save in (fp.save, fp.async_save):
            handle = save(state_of(2, elements=1_000_000), 2)
            assert not handle.wait("complete", timeout_s=WAIT_S)
            assert isinstance(handle.error, NoSpaceError)
            assert repr(handle) == "<SaveHandle of step 2: failed>"
        assert fp.steps() == [1]
        assert "the save of step 2 did not become complete, older steps stay" in caplog.text
        assert "raise memory_limit_bytes or lower keep" in caplog.text
        assert fp.save({"n": 3}, 3).error is None


def test_strict_raises_at_once_what_is_known_at_once(job_root: str) -> None:
    with fpt.init(job_root, memory_limit_bytes="1MiB", strict=True) as fp:
        for save in (fp.save, fp.async_save):
            with pytest.raises(NoSpaceError):
                save(state_of(2, elements=1_000_000), 2)
        assert fp.save({"n": 3}, 3).error is None


def fails_in_the_background(fp: fpt.Flashpoint) -> Callable[[], None]:
    write = fp._saver.write

    def fail(pending: Any) -> None:
        raise OSError(5, "Input/output error")

    def mend() -> None:
        fp._saver.write = write  # type: ignore[method-assign]

    fp._saver.write = fail  # type: ignore[method-assign]
    return mend


def test_strict_raises_later_what_fails_later(job_root: str) -> None:
    with fpt.init(job_root, strict=True) as fp:
        mend = fails_in_the_background(fp)
        handle = fp.async_save({"n": 1}, 1)
        with pytest.raises(OSError, match="Input/output error"):
            handle.wait("complete", timeout_s=WAIT_S)
        with pytest.raises(OSError, match="Input/output error"):
            fp.async_save({"n": 2}, 2)  # where nobody asked the handle
        mend()
        assert fp.save({"n": 3}, 3).error is None
        fails_in_the_background(fp)
        with pytest.raises(OSError, match="Input/output error"):
            fp.save({"n": 4}, 4)


def test_otherwise_a_failure_in_the_background_warns(job_root: str, caplog: pytest.LogCaptureFixture) -> None:
    with fpt.init(job_root) as fp:
        mend = fails_in_the_background(fp)
        handle = fp.save({"n": 1}, 1)
        assert isinstance(handle.error, OSError)
        assert "OSError: [Errno 5] Input/output error" in caplog.text
        mend()
        assert fp.save({"n": 2}, 2).error is None
        assert fp.steps() == [2]


def test_an_error_in_training_does_not_lose_the_running_save(job_root: str) -> None:
    with pytest.raises(ZeroDivisionError), fpt.init(job_root) as fp:
        fp.async_save(state_of(1), 1)
        raise ZeroDivisionError
    with flashpoint.open(f"{job_root}/step-1_ckpt") as view:
        assert view["step"] == 1


def test_no_verification_where_that_is_asked_for(job_root: str) -> None:
    with fpt.init(job_root, verify=False) as fp:
        fp.save({"w": torch.ones(1000)}, 1)
        with open(f"{fp.path(1)}/rank00000-0.safetensors", "r+b") as file:
            file.seek(4096)
            file.write(b"\xff")
        assert fp.recover({"w": torch.zeros(1000)})
    with fpt.init(job_root) as fp:
        assert fp.recover({"w": torch.zeros(1000)}) is None
