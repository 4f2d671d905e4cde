"""Stock `dcp.async_save`, with threads and with DCP's process."""

import os
import shutil
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flashpoint_torch as fpt
from tests.torch.states import blank, differences, same
from tests.torch.test_round_trip import KINDS, for_dcp
from tests.torch.workers import Workers, use_dcp_process

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

WAIT_S = 60
THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
EXECUTORS = ("THREAD", "PROCESS")


def state_of(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(400.0).view(50, 8) + step
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "replicated": distribute_tensor(whole * 3, mesh, [Replicate()]),
        "plain": torch.full((1000,), float(step)),
        "parameter": torch.nn.Parameter(torch.full((3,), float(step))),
        "nested": {"items": [whole[1] * 5, "text", step], "rank": dist.get_rank()},
    }


def blank_state() -> dict[str, Any]:
    state = state_of(-1)
    state["nested"] = {"items": [torch.zeros(8), None, None], "rank": None}
    return state


def start(
    state: dict[str, Any], path: str, writer: fpt.FlashpointWriter, executor: str, **options: Any
) -> Any:
    if executor == "PROCESS":
        use_dcp_process()
    return dcp.async_save(
        state,
        checkpoint_id=path,
        storage_writer=writer,
        async_checkpointer_type=AsyncCheckpointerType[executor],
        **options,
    )


def loaded(path: str) -> dict[str, Any]:
    target = blank_state()
    dcp.load(target, checkpoint_id=path, storage_reader=fpt.FlashpointReader())
    target["nested"]["rank"] = dist.get_rank()  # DCP keeps rank 0's
    return target


def spoil(state: dict[str, Any]) -> None:
    """Training goes on: every tensor changes in place."""
    for value in (
        state["rows"].to_local(),
        state["plain"],
        state["parameter"].data,
        state["nested"]["items"][0],
    ):
        value.fill_(-5)
    state["replicated"].to_local().fill_(-5)
    state["nested"]["items"][1] = "spoilt"


# ---- saves in a row ---------------------------------------------------------------------------------


def consecutive(job_root: str, executor: str, who: str) -> None:
    with fpt.init(job_root, keep=0) as fp:
        own = {"session": fp.writer, "path": lambda: None, "bare": fpt.FlashpointWriter, "one": fp.writer}
        one = fp.writer()
        for step in range(1, 5):
            path = fp.path(step)
            writer = fpt.FlashpointWriter(path) if who == "path" else one if who == "one" else own[who]()
            assert writer is not None
            state = state_of(step)
            future = start(state, path, writer, executor)
            spoil(state)
            future.result(WAIT_S)
            assert differences(loaded(path), state_of(step)) == []
        assert fp.steps() == [4, 3, 2, 1]
        for step in range(1, 5):
            assert differences(loaded(fp.path(step)), state_of(step)) == []


@pytest.mark.parametrize("who", ["session", "path", "bare", "one"])
def test_saves_in_a_row_with_threads(workers: Workers, job_root: str, who: str) -> None:
    workers.run(2, consecutive, job_root, "THREAD", who)


@pytest.mark.parametrize("who", ["session", "path", "bare", "one"])
def test_saves_in_a_row_with_dcps_process(workers: Workers, job_root: str, who: str) -> None:
    workers.run(2, consecutive, job_root, "PROCESS", who)


def retention(job_root: str, executor: str) -> list[int]:
    with fpt.init(job_root, keep=1) as fp:
        allocations = []
        for step in range(1, 7):
            start(state_of(step), fp.path(step), fp.writer(), executor).result(WAIT_S)
            dist.barrier()
            assert fp.steps() == [step]
            allocations.append(fp.objects.pool.allocations)
        assert differences(loaded(fp.path(6)), state_of(6)) == []
    return allocations


@pytest.mark.parametrize("executor", EXECUTORS)
def test_buffers_are_recycled(workers: Workers, job_root: str, executor: str) -> None:
    for allocations in workers.run(2, retention, job_root, executor):
        assert allocations[-1] == allocations[1]


# ---- what is staged ---------------------------------------------------------------------------------


def test_staged_tensors_lie_in_the_buffer_that_becomes_the_object(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        writer = fp.writer()
        tensor = torch.arange(1000.0)
        staged = writer.stage({"w": tensor, "n": [1]})
        assert same(dict(staged), {"w": tensor, "n": [1]})
        assert staged["w"].data_ptr() != tensor.data_ptr()
        allocations = fp.objects.pool.allocations
        dcp.save(staged, checkpoint_id=fp.path(1), storage_writer=writer)
        assert fp.objects.pool.allocations == allocations  # nothing was copied again


def test_two_staged_states_share_no_memory(job_root: str) -> None:
    with fpt.init(job_root, keep=0) as fp:
        writer = fp.writer()
        first = writer.stage({"w": torch.full((1000,), 1.0)})
        second = writer.stage({"w": torch.full((1000,), 2.0)})
        assert torch.equal(first["w"], torch.full((1000,), 1.0))
        for step, staged in ((2, second), (1, first)):
            dcp.save(staged, checkpoint_id=fp.path(step), storage_writer=writer)
        for step in (1, 2):
            target = {"w": torch.zeros(1000)}
            fp.recover(target, step=step)
            assert torch.equal(target["w"], torch.full((1000,), float(step)))


def test_a_staged_state_is_saved_once(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        writer = fp.writer()
        staged = writer.stage({"w": torch.ones(1000)})
        dcp.save(staged, checkpoint_id=fp.path(1), storage_writer=writer)
        fp.save({"w": torch.zeros(1000)}, 2)
        fp.save({"w": torch.zeros(1000)}, 3)  # may well lie where the staged one lay
        with pytest.raises(CheckpointException, match="stage the state again"):
            dcp.save(staged, checkpoint_id=fp.path(4), storage_writer=writer)
        assert fp.steps() == [3]


def test_a_staged_state_that_is_never_saved_gives_its_buffer_back(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        for _ in range(10):
            fp.writer().stage({"w": torch.ones(1000)})
        assert fp.objects.pool.allocations == 1


def test_saves_that_overlap_go_where_they_were_sent(job_root: str) -> None:
    # One writer, one thread for each save: DCP resets the writer in the thread.
    with fpt.init(job_root, keep=0) as fp:
        writer = fp.writer()
        futures: list[Future[Any]] = [
            start({"w": torch.full((1000,), float(step))}, fp.path(step), writer, "THREAD")
            for step in range(1, 9)
        ]
        for future in futures:
            future.result(WAIT_S)
        for step in range(1, 9):
            target = {"w": torch.zeros(1000)}
            fp.recover(target, step=step)
            assert torch.equal(target["w"], torch.full((1000,), float(step)))


# ---- failures ---------------------------------------------------------------------------------------


def no_space_on_rank_1(job_root: str, executor: str) -> list[str]:
    texts = []
    with fpt.init(job_root, keep=1, commit_timeout_s=20, memory_limit_bytes="1MiB") as fp:
        start(state_of(1), fp.path(1), fp.writer(), executor).result(WAIT_S)
        big = state_of(2)
        if dist.get_rank() == 1:
            big["plain"] = torch.zeros(500_000)
        future = start(big, fp.path(2), fp.writer(), executor)
        with pytest.raises(CheckpointException) as failure:
            future.result(WAIT_S)
        texts.append(str(failure.value))
        assert fp.steps() == [1]
        start(state_of(3), fp.path(3), fp.writer(), executor).result(WAIT_S)
        assert differences(loaded(fp.path(3)), state_of(3)) == []
    return texts


@pytest.mark.parametrize("executor", EXECUTORS)
def test_no_space_on_one_rank_fails_the_save_on_all_and_not_the_next(
    workers: Workers, job_root: str, executor: str
) -> None:
    for (text,) in workers.run(2, no_space_on_rank_1, job_root, executor):
        assert "RANK 1" in text
        assert "raise memory_limit_bytes or lower keep" in text


def not_from_torchrun(job_root: str) -> None:
    # DCP's process gives every rank LOCAL_RANK 0 where there is no torchrun to say better.
    assert "LOCAL_RANK" not in os.environ
    start(state_of(1), f"{job_root}/step-1_ckpt", fpt.FlashpointWriter(), "PROCESS").result(WAIT_S)
    assert differences(loaded(f"{job_root}/step-1_ckpt"), state_of(1)) == []


def test_ranks_that_no_launcher_numbered_do_not_collide(workers: Workers, job_root: str) -> None:
    workers.run(2, not_from_torchrun, job_root)


def failing_saves(job_root: str, world_size: int) -> None:
    with fpt.init(job_root, keep=0, commit_timeout_s=20) as fp:
        start(state_of(1), fp.path(1), fp.writer(), "PROCESS").result(WAIT_S)
        process = _async_process_executor._CHECKPOINT_PROCESS
        assert process is not None
        pid = process._save_process.pid
        with pytest.raises(CheckpointException, match="step 1 is complete already"):
            start(state_of(1), fp.path(1), fp.writer(), "PROCESS").result(WAIT_S)
        with pytest.raises(Exception, match="not a container"):
            start(state_of(1), f"{job_root}/latest", fp.writer(), "PROCESS").result(WAIT_S)
        bad = state_of(2) | {"function": lambda: None}  # no pickle of any kind
        with pytest.raises(CheckpointException, match="could not stage|pickle"):
            start(bad, fp.path(2), fp.writer(), "PROCESS").result(WAIT_S)
        # The job root is gone when the process comes to save: it must live through that, too.
        gone = f"{job_root}/gone"
        if dist.get_rank() == 0:
            os.mkdir(gone, mode=0o700)
        dist.barrier()
        writer = fpt.FlashpointWriter(f"{gone}/step-1_ckpt")
        stage = writer.stage

        def stage_and_lose(state: dict[str, Any]) -> dict[str, Any]:
            staged = stage(state)
            dist.barrier()
            shutil.rmtree(gone, ignore_errors=True)
            dist.barrier()
            return staged

        stager = type("Stager", (), {})()  # DCP takes anything of this shape
        stager.stage = stage_and_lose
        stager.should_synchronize_after_execute = False
        with pytest.raises(CheckpointException, match="could not stage"):
            start(state_of(1), f"{gone}/step-1_ckpt", writer, "PROCESS", async_stager=stager).result(WAIT_S)
        assert process._save_process.is_alive()
        start(state_of(3), fp.path(3), fp.writer(), "PROCESS").result(WAIT_S)
        assert _async_process_executor._CHECKPOINT_PROCESS is process
        assert process._save_process.pid == pid
        assert differences(loaded(fp.path(3)), state_of(3)) == []
        assert fp.steps() == [3, 1]


@pytest.mark.parametrize("world_size", [2, 1])
def test_dcps_process_lives_through_saves_that_fail(workers: Workers, job_root: str, world_size: int) -> None:
    workers.run(world_size, failing_saves, job_root, world_size)


def test_a_failure_while_staging_is_raised_by_the_save(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        state = {"w": torch.empty(3, device="meta")}
        future = start(state, fp.path(1), fp.writer(), "THREAD")
        with pytest.raises(CheckpointException, match="'w' is on the meta device"):
            future.result(WAIT_S)
        assert fp.steps() == []


# ---- every kind of value ----------------------------------------------------------------------------


def every_kind(job_root: str) -> list[str]:
    with fpt.init(job_root, keep=0) as fp:
        found = []
        for step, kind in enumerate(KINDS):
            state = for_dcp(kind())
            writer = fp.writer() if step else fpt.FlashpointWriter()
            start(state, fp.path(step), writer, "PROCESS").result(WAIT_S)
            target = blank(state)
            assert fp.recover(target, step=step)
            found += differences(target, state)
        return found


def test_every_kind_of_value_passes_through_dcps_process(workers: Workers, job_root: str) -> None:
    assert workers.run(1, every_kind, job_root) == [[]]
