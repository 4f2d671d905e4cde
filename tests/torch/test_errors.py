"""What fails on one rank reaches every rank, by name, and the saves after it succeed."""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flashpoint_torch as fpt
from flashpoint.errors import (
    CheckpointExistsError,
    DeadlineError,
    FlashpointError,
    MismatchError,
    NoSpaceError,
    SaveError,
)
from tests.torch.states import same
from tests.torch.workers import Died, Workers

WAIT_S = 30


class Broken:
    """A Stateful whose ``state_dict`` or ``load_state_dict`` raises where it is told to."""

    def __init__(self, *, on_rank: int = -1, loading: bool = False) -> None:
        self.on_rank = on_rank
        self.loading = loading

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == self.on_rank and not self.loading:
            raise ValueError("the data loader is closed")
        return {"x": torch.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if dist.get_rank() == self.on_rank:
            raise ValueError("the data loader is closed")


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((1000,), float(step * 10 + dist.get_rank())), "step": step}


def assert_saves(fp: fpt.Flashpoint, step: int) -> None:
    """The session is in order: every rank saves and loads."""
    begin = time.monotonic()
    handle = fp.save(state_of(step), step)
    assert handle.error is None, handle.error
    assert time.monotonic() - begin < fp.config.commit_timeout_s
    target = state_of(0)
    found = fp.recover(target)
    assert found is not None
    assert found.step == step
    assert same(target, state_of(step))


# ---- saving -----------------------------------------------------------------------------------------


def stateful_raises_on_rank_1(job_root: str) -> str:
    with fpt.init(job_root, commit_timeout_s=10) as fp:
        broken = {**state_of(1), "loader": Broken(on_rank=1)}
        if dist.get_rank() == 1:
            with pytest.raises(ValueError, match="data loader is closed"):
                fp.async_save(broken, 1)
            text = ""
        else:
            handle = fp.async_save(broken, 1)
            assert not handle.wait("complete", timeout_s=WAIT_S)
            assert isinstance(handle.error, SaveError)
            text = str(handle.error)
        assert fp.steps() == []
        assert_saves(fp, 2)
    return text


def test_a_stateful_that_raises_is_reported_on_every_rank_by_name(workers: Workers, job_root: str) -> None:
    texts = workers.run(2, stateful_raises_on_rank_1, job_root)
    assert "step 1" in texts[0]
    assert "rank 1: ValueError: the data loader is closed" in texts[0]


def no_space_on_rank_1(job_root: str, strict: bool) -> str:
    rank = dist.get_rank()
    with fpt.init(job_root, memory_limit_bytes="1MiB", strict=strict, commit_timeout_s=10) as fp:
        state = {"weight": torch.full((500_000 if rank == 1 else 1000,), float(rank))}
        if strict and rank == 1:
            with pytest.raises(NoSpaceError):
                fp.async_save(state, 1)
            return ""
        handle = fp.async_save(state, 1)
        if strict:
            with pytest.raises(SaveError):
                handle.wait("complete", timeout_s=WAIT_S)
            with pytest.raises(SaveError, match="rank 1"):
                fp.async_save(state, 2)
            return str(handle.error)
        assert not handle.wait("complete", timeout_s=WAIT_S)
        assert isinstance(handle.error, NoSpaceError if rank == 1 else SaveError)
        assert fp.steps() == []
        assert_saves(fp, 2)
        return str(handle.error)


@pytest.mark.parametrize("strict", [False, True])
def test_no_space_on_one_rank_skips_the_save_on_all(workers: Workers, job_root: str, strict: bool) -> None:
    texts = workers.run(2, no_space_on_rank_1, job_root, strict)
    assert "rank 1: " in texts[0]
    assert "raise memory_limit_bytes or lower keep" in texts[0]


def rank_1_leaves_a_save_out(job_root: str) -> tuple[str, float]:
    with fpt.init(job_root, commit_timeout_s=2) as fp:
        text, seconds = "", 0.0
        if dist.get_rank() == 0:
            begin = time.monotonic()
            handle = fp.save(state_of(1), 1)
            text, seconds = str(handle.error), time.monotonic() - begin
            assert isinstance(handle.error, SaveError)
        dist.barrier()
        assert_saves(fp, 2)
        assert_saves(fp, 3)
    return text, seconds


@pytest.mark.fault("H")
def test_a_rank_that_does_not_save_is_named_and_the_next_save_succeeds(
    workers: Workers, job_root: str
) -> None:
    (text, seconds), _ = workers.run(2, rank_1_leaves_a_save_out, job_root)
    assert "rank 1: did not report within 2 s" in text
    assert 1.5 < seconds < 10


def only_rank_1_saves(job_root: str) -> str:
    with fpt.init(job_root, commit_timeout_s=1) as fp:
        text = ""
        if dist.get_rank() == 1:
            handle = fp.save(state_of(1), 1)
            assert isinstance(handle.error, DeadlineError)
            text = str(handle.error)
        dist.barrier()
        assert_saves_after = fp.save(state_of(2), 2)
        assert assert_saves_after.error is None
    return text


@pytest.mark.fault(12, "H")
def test_a_leader_that_does_not_save_is_named(workers: Workers, job_root: str) -> None:
    text = workers.run(2, only_rank_1_saves, job_root)[1]
    assert "step 1" in text
    assert "rank 0" in text


def ranks_save_different_steps(job_root: str) -> str:
    with fpt.init(job_root, commit_timeout_s=1) as fp:
        handle = fp.save(state_of(1), 10 + dist.get_rank())
        assert handle.error is not None
        text = str(handle.error)
        dist.barrier()
        assert_saves_after = fp.save(state_of(2), 20)
        assert assert_saves_after.error is None
        assert fp.steps() == [20]
    return text


def test_ranks_that_save_different_steps_save_nothing(workers: Workers, job_root: str) -> None:
    texts = workers.run(2, ranks_save_different_steps, job_root)
    assert "step 10" in texts[0]
    assert "step 11" in texts[1]
    assert "rank 0" in texts[1]


def dies_in_a_save(job_root: str) -> tuple[str, list[int]]:
    fp = fpt.init(job_root, commit_timeout_s=2)
    assert_saves(fp, 1)
    if dist.get_rank() == 1:
        fp.async_save({**state_of(2), "bomb": _Bomb()}, 2)
    handle = fp.save(state_of(2), 2)
    text, steps = str(handle.error), fp.steps()
    fp.close()
    return text, steps


class _Bomb:
    def __reduce__(self) -> str:
        os._exit(3)


def test_a_rank_that_dies_in_a_save_is_named_and_the_version_before_it_stays(
    workers: Workers, job_root: str
) -> None:
    (text, steps), died = workers.run(2, dies_in_a_save, job_root, dies=True)
    assert died == Died(3)
    assert "rank 1: did not report" in text
    assert steps == [1]


def the_saves_after_a_death(job_root: str) -> int:
    with fpt.init(job_root) as fp:
        target = state_of(0)
        found = fp.recover(target)
        assert found is not None
        assert same(target, state_of(1))
        assert_saves(fp, 2)
        return found.step


def test_the_next_start_recovers_the_version_before_the_death(workers: Workers, job_root: str) -> None:
    workers.run(2, dies_in_a_save, job_root, dies=True)
    assert workers.run(2, the_saves_after_a_death, job_root) == [1, 1]


def partial_coverage(job_root: str) -> str:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    with fpt.init(job_root) as fp:
        state = {"w": sharded} if dist.get_rank() == 0 else {"other": torch.ones(1)}
        return str(fp.save(state, 1).error)


def test_shards_that_nobody_stored_fail_the_save(workers: Workers, job_root: str) -> None:
    texts = workers.run(2, partial_coverage, job_root)
    assert all("'w'" in text and "not covered" in text for text in texts)


def exists_already(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        assert fp.save(state_of(1), 1).error is None
        with pytest.raises(CheckpointExistsError, match="step 1 is complete already.*overwrite=True"):
            fp.save(state_of(2), 1)
        assert_saves(fp, 2)


def test_a_step_that_exists_is_refused_on_all_ranks(workers: Workers, job_root: str) -> None:
    workers.run(2, exists_already, job_root)


# ---- starting ---------------------------------------------------------------------------------------


def root_of_rank_1_is_a_file(job_root: str) -> str:
    rank = dist.get_rank()
    path = f"{job_root}/root"
    if rank == 1:
        path = f"{job_root}/file"
        with open(path, "w"):
            pass
    with pytest.raises(FlashpointError) as failure:
        fpt.init(path, recovery_timeout_s=20)
    fpt.init(job_root, recovery_timeout_s=20).close()
    return str(failure.value)


def test_a_job_root_that_one_rank_cannot_use_is_reported_on_all(workers: Workers, job_root: str) -> None:
    texts = workers.run(2, root_of_rank_1_is_a_file, job_root)
    assert "rank 1" in texts[0]
    assert all("job root" in text for text in texts)


def garbage_that_cannot_be_collected(job_root: str) -> str:
    from flashpoint.objects import CheckpointObjectManager

    def refuse(self: CheckpointObjectManager) -> list[int]:
        raise PermissionError(13, "Permission denied", job_root)

    original = CheckpointObjectManager.collect_garbage
    CheckpointObjectManager.collect_garbage = refuse  # type: ignore[method-assign]
    begin = time.monotonic()
    try:
        with pytest.raises((FlashpointError, OSError)) as failure:
            fpt.init(job_root, recovery_timeout_s=20)
    finally:
        CheckpointObjectManager.collect_garbage = original  # type: ignore[method-assign]
    assert time.monotonic() - begin < 10
    return str(failure.value)


def test_a_clean_up_that_fails_on_one_rank_is_reported_on_all(workers: Workers, job_root: str) -> None:
    texts = workers.run(2, garbage_that_cannot_be_collected, job_root)
    assert all("Permission denied" in text for text in texts)
    assert "rank 0" in texts[1]


def sessions_of_some_ranks(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        assert_saves(fp, dist.get_world_size())


def test_ranks_that_opened_more_sessions_than_others_meet(workers: Workers, job_root: str) -> None:
    workers.run(1, sessions_of_some_ranks, f"{job_root}/a")
    workers.run(2, sessions_of_some_ranks, f"{job_root}/b")
    workers.run(3, sessions_of_some_ranks, f"{job_root}/c")


# ---- recovering -------------------------------------------------------------------------------------


def recover_fails_on_rank_1(job_root: str, how: str) -> str:
    rank = dist.get_rank()
    with fpt.init(job_root, recovery_timeout_s=20) as fp:
        assert fp.save({**state_of(1), "loader": Broken()}, 1).error is None
        target = {**state_of(0), "loader": Broken()}
        if how == "state_dict":
            target["loader"] = Broken(on_rank=1)
        elif how == "load_state_dict":
            target["loader"] = Broken(on_rank=1, loading=True)
        elif rank == 1:
            target["weight"] = torch.zeros(999)
        begin = time.monotonic()
        with pytest.raises((FlashpointError, ValueError)) as failure:
            fp.recover(target)
        assert time.monotonic() - begin < 10
        if how != "load_state_dict":
            untouched = {**state_of(0), "loader": target["loader"]}
            untouched["weight"] = torch.zeros(999) if how == "shape" and rank == 1 else untouched["weight"]
            assert same(target["weight"], untouched["weight"])
            assert target["step"] == 0
        if how == "shape" and rank == 1:
            assert isinstance(failure.value, MismatchError)
        assert_saves(fp, 2)
        return str(failure.value)


@pytest.mark.parametrize("how", ["state_dict", "load_state_dict", "shape"])
def test_a_recovery_that_fails_on_one_rank_fails_on_all(workers: Workers, job_root: str, how: str) -> None:
    texts = workers.run(2, recover_fails_on_rank_1, job_root, how)
    assert "rank 1" in texts[0]
    assert ("data loader is closed" if how != "shape" else "shape [1000] there, [999] here") in texts[0]


def pickle_is_refused_on_rank_1(job_root: str) -> str:
    rank = dist.get_rank()
    with fpt.init(job_root, recovery_timeout_s=20) as fp:
        state: dict[str, Any] = state_of(1)
        state["extra"] = Died(3) if rank == 1 else 3  # not plain data: pickled on rank 1
        assert fp.save(state, 1).error is None
        target = {**state_of(0), "extra": None}
        with pytest.raises(FlashpointError) as failure:
            fp.recover(target)
        assert same(target, {**state_of(0), "extra": None})  # untouched, on every rank
        return str(failure.value)


def test_a_pickle_refused_on_one_rank_leaves_the_state_of_all_untouched(
    workers: Workers, job_root: str
) -> None:
    texts = workers.run(2, pickle_is_refused_on_rank_1, job_root)
    assert all("'extra'" in text and "allow_pickle" in text for text in texts)


# ---- overlap ----------------------------------------------------------------------------------------


def overlapping_saves(job_root: str) -> tuple[str, float]:
    rank = dist.get_rank()
    with fpt.init(job_root, overlap_wait_s=0.5, commit_timeout_s=10) as fp:
        assert fp.save(state_of(1), 1).error is None
        if rank == 1:
            write = fp._saver.write

            def slow(pending: Any) -> None:
                time.sleep(2)
                write(pending)

            fp._saver.write = slow  # type: ignore[method-assign]
        first = fp.async_save(state_of(2), 2)
        begin = time.monotonic()
        second = fp.async_save(state_of(3), 3)
        blocked = time.monotonic() - begin
        assert first.wait("complete", timeout_s=WAIT_S)
        assert not second.wait("complete", timeout_s=WAIT_S)
        assert fp.steps() == [2]
        if rank == 1:
            del fp._saver.write
        assert_saves(fp, 4)
        return str(second.error), blocked


def test_a_save_while_another_runs_waits_a_little_and_is_skipped_on_all_ranks(
    workers: Workers, job_root: str
) -> None:
    (text, _), (_, blocked) = workers.run(2, overlapping_saves, job_root)
    assert "step 3" in text
    assert "still runs after 0.5 s" in text
    assert 0.4 < blocked < 1.9
