"""A writer, a reader, or a planner that fails at any stage of a save or load.

Every rank hears of it, by the name of the rank where it happened; nothing is left half done; and what
comes next succeeds.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import flashpoint_torch as fpt
from tests.torch.states import differences
from tests.torch.workers import Workers


def broken(kind: type, stage: str, ranks: tuple[int, ...], after: bool = False) -> type:
    """The class, with a method that raises on some ranks, before or after it has done its work."""
    original: Callable[..., Any] = getattr(kind, stage)

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() not in ranks:
            return original(self, *args, **kwargs)
        if after:
            original(self, *args, **kwargs)
        raise RuntimeError(f"{stage} is broken")

    if stage in ("set_up_storage_writer", "set_up_storage_reader"):
        # DCP looks for a parameter of this very name.
        def fails_with_kwargs(self: Any, *args: Any, **kwargs: Any) -> Any:
            return fails(self, *args, **kwargs)

        return type(f"Broken{kind.__name__}", (kind,), {stage: fails_with_kwargs})
    if stage == "set_up_planner":
        if issubclass(kind, DefaultSavePlanner):

            def save_set_up(
                self: Any, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
            ) -> Any:
                return fails(self, state_dict, storage_meta, is_coordinator)

            return type("BrokenSavePlanner", (kind,), {stage: save_set_up})
        return type("BrokenLoadPlanner", (kind,), {stage: fails})
    return type(f"Broken{kind.__name__}", (kind,), {stage: fails})


def state_of(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "rows": distribute_tensor(torch.arange(40.0).view(5, 8) + step, mesh, [Shard(0)]),
        "plain": torch.full((100,), float(step)),
        "set": {1, step},
    }


def blank_state() -> dict[str, Any]:
    return state_of(-1) | {"set": None}


def leftovers(job_root: str) -> list[str]:
    return sorted(name for name in os.listdir(job_root) if not name.startswith("."))


SAVING = [
    (fpt.FlashpointWriter, "set_up_storage_writer", (1,)),
    (fpt.FlashpointWriter, "prepare_local_plan", (1,)),
    (fpt.FlashpointWriter, "prepare_local_plan", (0, 1)),
    (fpt.FlashpointWriter, "prepare_global_plan", (0,)),
    (fpt.FlashpointWriter, "write_data", (0,)),
    (fpt.FlashpointWriter, "write_data", (1,)),
    (fpt.FlashpointWriter, "write_data", (0, 1)),
    (DefaultSavePlanner, "set_up_planner", (1,)),
    (DefaultSavePlanner, "create_local_plan", (0,)),
    (DefaultSavePlanner, "create_global_plan", (0,)),
    (DefaultSavePlanner, "finish_plan", (1,)),
    (DefaultSavePlanner, "resolve_data", (1,)),
    (DefaultSavePlanner, "resolve_data", (0, 1)),
]


def failing_save(
    job_root: str, kind: type, stage: str, ranks: tuple[int, ...], how: str
) -> tuple[set[int], str]:
    with fpt.init(job_root, keep=0, commit_timeout_s=1) as fp:
        dcp.save(state_of(1), checkpoint_id=fp.path(1), storage_writer=fp.writer())
        writer, planner = fp.writer(), None
        if kind is fpt.FlashpointWriter:
            writer = broken(kind, stage, ranks)(objects=fp.objects, epoch=fp.epoch)
        else:
            planner = broken(kind, stage, ranks)()
        begin = time.monotonic()
        with pytest.raises(CheckpointException) as failure:
            if how == "save":
                dcp.save(state_of(2), checkpoint_id=fp.path(2), storage_writer=writer, planner=planner)
            else:
                dcp.async_save(
                    state_of(2), checkpoint_id=fp.path(2), storage_writer=writer, planner=planner
                ).result(30)
        assert time.monotonic() - begin < 20
        dist.barrier()
        if (stage, ranks) != ("write_data", (0,)):
            assert leftovers(job_root) == ["step-1_ckpt"]
        else:  # rank 0 leads; without a word from it the others leave their markers, since dirty is safe
            assert "step-2_ckpt__1__unfinished" in leftovers(job_root)
        assert fp.steps() == [1]
        # The very same step can be saved again, and others as well.
        for step in (2, 3):
            dcp.save(state_of(step), checkpoint_id=fp.path(step), storage_writer=fp.writer())
            target = blank_state()
            dcp.load(target, checkpoint_id=fp.path(step), storage_reader=fp.reader())
            assert differences(target, state_of(step)) == []
        assert fp.steps() == [3, 2, 1]
        assert leftovers(job_root) == ["step-1_ckpt", "step-2_ckpt", "step-3_ckpt"]
        assert fp.objects.pool.free_files() <= 2
        return set(failure.value.failures), str(failure.value)


@pytest.mark.parametrize(
    ("how", "kind", "stage", "ranks"),
    # The stages of async_save are those of save, in a thread: a few of them will do.
    [("save", *case) for case in SAVING] + [("async", *case) for case in SAVING if case[1] == "write_data"],
)
def test_a_save_that_fails_at_a_stage(
    workers: Workers, job_root: str, kind: type, stage: str, ranks: tuple[int, ...], how: str
) -> None:
    for failed, text in workers.run(2, failing_save, job_root, kind, stage, ranks, how):
        # A rank that waits for rank 0's vote in vain fails as well, and says so.
        assert failed == ({0, 1} if stage == "write_data" and 0 in ranks else set(ranks))
        assert f"{stage} is broken" in text


def finish_fails(job_root: str) -> str:
    with fpt.init(job_root, keep=0) as fp:
        writer = broken(fpt.FlashpointWriter, "finish", (0,))(objects=fp.objects, epoch=fp.epoch)
        with pytest.raises(CheckpointException) as failure:
            dcp.save(state_of(1), checkpoint_id=fp.path(1), storage_writer=writer)
        target = blank_state()
        dcp.load(target, checkpoint_id=fp.path(1), storage_reader=fp.reader())
        assert differences(target, state_of(1)) == []
        return str(failure.value)


def test_a_failure_after_the_version_was_complete_leaves_it_complete(workers: Workers, job_root: str) -> None:
    assert all("finish is broken" in text for text in workers.run(2, finish_fails, job_root))


LOADING = [
    (fpt.FlashpointReader, "read_metadata", (0,)),
    (fpt.FlashpointReader, "read_metadata", (1,)),
    (fpt.FlashpointReader, "set_up_storage_reader", (1,)),
    (fpt.FlashpointReader, "prepare_local_plan", (1,)),
    (fpt.FlashpointReader, "prepare_global_plan", (0,)),
    (fpt.FlashpointReader, "read_data", (0,)),
    (fpt.FlashpointReader, "read_data", (0, 1)),
    (DefaultLoadPlanner, "set_up_planner", (1,)),
    (DefaultLoadPlanner, "create_local_plan", (1,)),
    (DefaultLoadPlanner, "create_global_plan", (0,)),
    (DefaultLoadPlanner, "finish_plan", (1,)),
    (DefaultLoadPlanner, "resolve_tensor", (1,)),
    (DefaultLoadPlanner, "load_bytes", (0,)),
]


def failing_loads(job_root: str) -> list[tuple[set[int], str]]:
    answers = []
    path = f"{job_root}/step-1_ckpt"
    dcp.save(state_of(1), checkpoint_id=path, storage_writer=fpt.FlashpointWriter())
    for kind, stage, ranks in LOADING:
        reader, planner = fpt.FlashpointReader(), None
        if kind is fpt.FlashpointReader:
            reader = broken(kind, stage, ranks)()
        else:
            planner = broken(kind, stage, ranks)()
        target, untouched = blank_state(), blank_state()
        with pytest.raises(CheckpointException) as failure:
            dcp.load(target, checkpoint_id=path, storage_reader=reader, planner=planner)
        answers.append((set(failure.value.failures), str(failure.value)))
        if dist.get_rank() in ranks and stage != "load_bytes":
            assert differences(target, untouched) == []
        target = blank_state()
        dcp.load(target, checkpoint_id=path, storage_reader=fpt.FlashpointReader())
        assert differences(target, state_of(1)) == []
    return answers


def test_loads_that_fail_at_each_stage(workers: Workers, job_root: str) -> None:
    for answers in workers.run(2, failing_loads, job_root):
        for (_, stage, ranks), (failed, text) in zip(LOADING, answers, strict=True):
            assert failed == set(ranks), stage
            assert f"{stage} is broken" in text


# ---- the file system fails --------------------------------------------------------------------------


def failing_system_call(job_root: str, name: str, rank: int) -> list[str]:
    """A save in which a call of one rank to the operating system fails, then one without."""
    original = getattr(os, name)
    texts = []
    with fpt.init(job_root, keep=1, commit_timeout_s=5) as fp:
        assert fp.save(state_of(1), 1).error is None

        def fails(path: Any, *args: Any, **kwargs: Any) -> Any:
            if dist.get_rank() == rank and f"{job_root}/step-2" in str((path, *args)):
                raise OSError(5, "Input/output error", str(path))
            return original(path, *args, **kwargs)

        setattr(os, name, fails)
        try:
            handle = fp.save(state_of(2), 2)
        finally:
            setattr(os, name, original)
        texts.append(str(handle.error))
        dist.barrier()
        assert fp.steps() in ([1], [2])  # whole, one or the other
        target = blank_state()
        assert fp.recover(target)
        assert differences(target, state_of(fp.steps()[0])) == []
        handle = fp.save(state_of(3), 3)
        assert handle.error is None, handle.error
        dist.barrier()
        assert fp.steps() == [3]
    return texts


@pytest.mark.parametrize(
    ("name", "rank"),
    [("link", 0), ("link", 1), ("makedirs", 0), ("makedirs", 1), ("rename", 0)],  # rank 0 writes the manifest
)
@pytest.mark.fault(18)
def test_a_system_call_that_fails_on_one_rank_fails_the_save_on_all(
    workers: Workers, job_root: str, name: str, rank: int
) -> None:
    for (text,) in workers.run(2, failing_system_call, job_root, name, rank):
        assert "Input/output error" in text
        assert f"rank {rank}" in text or text.startswith("[Errno 5]")
