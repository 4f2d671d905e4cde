"""The complete training state, killed at any moment and resumed: what follows is what would have followed."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import flashpoint_torch as fpt
from flashpoint.errors import ConfigError, FlashpointError, MismatchError
from tests.torch import recovering
from tests.torch.faults import Launcher, Worker, log_lines
from tests.torch.recovering import Counter, Training, begins, losses
from tests.torch.workers import Workers

ON = fpt.RecoverConfig(mode="on", freq_steps=1, sigterm_timeout_s=0)
DEADLINE_S = 60.0


def wait_for(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} within {DEADLINE_S:g} s"
        time.sleep(0.005)


def steps_done(log: str, rank: int = 0) -> int:
    return sum(words[0] == "loss" for words in log_lines(log, rank))


def straight(tmp_path: Path, world_size: int, total: int) -> list[dict[int, str]]:
    """The losses of every rank of a run that nothing happens to, and that never saves."""
    log = str(tmp_path / "straight")
    Launcher(world_size).run(recovering.train, str(tmp_path / "unused"), log, total, mode="off")
    return [losses(log, rank) for rank in range(world_size)]


def kill_after(log: str, workers: list[Worker], lines: int) -> None:
    wait_for(lambda: steps_done(log) >= lines, f"{lines} steps were not done")
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join()


@pytest.mark.parametrize("world_size", [2])
def test_losses_after_kills_at_any_step(job_root: str, tmp_path: Path, world_size: int) -> None:
    total, log, launcher = 30, str(tmp_path / "log"), Launcher(world_size)
    for _ in range(2):
        lines = steps_done(log) + random.randrange(1, 10)
        kill_after(log, launcher.start(recovering.train, job_root, log, total), lines)
    launcher.run(recovering.train, job_root, log, total)
    wanted = straight(tmp_path, world_size, total)
    assert [losses(log, rank) for rank in range(world_size)] == wanted
    assert len(wanted[0]) == total
    attempts = begins(log)
    assert attempts == sorted(attempts) and attempts[-1] > 0


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_after_many_kills(job_root: str, tmp_path: Path, world_size: int) -> None:
    total, log, launcher = 190, str(tmp_path / "log"), Launcher(world_size)
    for _ in range(25):
        lines = min(steps_done(log) + random.randrange(1, 14), total - 5)
        kill_after(log, launcher.start(recovering.train, job_root, log, total), lines)
    launcher.run(recovering.train, job_root, log, total)
    assert [losses(log, rank) for rank in range(world_size)] == straight(tmp_path, world_size, total)


@pytest.mark.soak
def test_a_loader_with_workers_of_its_own(job_root: str, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    first = Launcher(1).start(recovering.train, job_root, log, 40, loader_workers=2)
    kill_after(log, first, 10)
    Launcher(1).run(recovering.train, job_root, log, 20, loader_workers=2)
    wanted = str(tmp_path / "wanted")
    Launcher(1).run(recovering.train, job_root, wanted, 20, loader_workers=2, mode="off")
    assert losses(log) == losses(wanted) | {k: v for k, v in losses(log).items() if k >= 20}


# ---- SIGTERM ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [(1,), pytest.param((0, 1), marks=pytest.mark.soak)])
@pytest.mark.fault("I")
def test_sigterm_saves_on_all_ranks(job_root: str, tmp_path: Path, told: tuple[int, ...]) -> None:
    log, launcher, total = str(tmp_path / "log"), Launcher(2), 10**6
    workers = launcher.start(recovering.train, job_root, log, total, freq_steps=None)
    wait_for(lambda: min(steps_done(log, rank) for rank in (0, 1)) >= 2, "two steps were not done")
    assert launcher.world_size == len(workers) == 2
    for rank in told:
        os.kill(workers[rank].process.pid, signal.SIGTERM)
    for worker in workers:
        wait_for(lambda worker=worker: worker.process.exitcode is not None or worker.answers.poll(), "no end")
    # The helper reports what it caught: SystemExit(143), on every rank.
    for worker in workers:
        _, error = worker.answers.recv()
        assert "SystemExit: 143" in error
        worker.join()
    done = [max(losses(log, rank)) for rank in (0, 1)]
    assert done[0] == done[1]
    launcher.run(recovering.train, job_root, log, done[0] + 4, freq_steps=None)
    assert begins(log)[-1] == done[0] + 1
    assert losses(log) == straight(tmp_path, 2, done[0] + 4)[0]


def ends_without_exit(job_root: str) -> None:
    config = fpt.RecoverConfig(mode="on", exit_on_sigterm=False)
    before = signal.getsignal(signal.SIGTERM)
    with fpt.init(job_root) as fp:
        with fpt.RecoverHandler(fp, config, model=nn.Linear(2, 2)) as recover:
            step = fpt.StepInfo.first(10)
            assert recover.dump(step) is None
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + DEADLINE_S
            while not recover.ending:
                assert time.monotonic() < deadline
                time.sleep(0.01)
                step = step.next()
                handle = recover.dump(step)
            assert handle is not None and handle.done("complete") and handle.step == step.global_step
            readable, writable = os.pipe()
            pid = os.fork()  # a child may be ended as ever
            if pid == 0:
                os.write(writable, b".")  # CPython forgets signals that come before it is here
                time.sleep(DEADLINE_S)
                os._exit(0)
            assert os.read(readable, 1)
            os.kill(pid, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) == before


def test_a_loop_may_end_by_itself(workers: Workers, job_root: str) -> None:
    workers.run(1, ends_without_exit, job_root)


# ---- what is saved when -----------------------------------------------------------------------------


def model_and_optimizer(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    return model, torch.optim.Adam(model.parameters())


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_off_does_nothing(job_root: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with fpt.init(job_root) as fp:
        for mode in ("off", "disabled"):
            recover = fpt.RecoverHandler(
                fp, fpt.RecoverConfig(mode=mode, freq_steps=1), model=nn.Linear(2, 2)
            )
            assert recover.load() is None
            assert recover.dump(fpt.StepInfo.first(1), force=True) is None
            assert signal.getsignal(signal.SIGTERM) is before
        assert fp.steps() == []


def test_saves_by_frequency_and_by_force(job_root: str) -> None:
    with fpt.init(job_root, keep=0) as fp:
        config = fpt.RecoverConfig(mode="auto", freq_steps=3, freq_epochs=1, sigterm_timeout_s=0)
        recover = fpt.RecoverHandler(fp, config, model=nn.Linear(2, 2))
        assert recover.load() is None
        step = fpt.StepInfo.first(4)
        for _ in range(8):
            recover.dump(step)
            last, step = step, step.next()
        forced = recover.dump(last, force=True)
        assert forced is not None and forced.wait("complete")
        assert fp.steps() == [7, 5, 3, 2]
        recover.dump(step)
        assert recover.dump(step, force=True) is not None
    with fpt.init(job_root) as fp:
        found = fpt.RecoverHandler(fp, config, model=nn.Linear(2, 2)).load()
        assert found is not None
        assert (found.last_step, found.next_step.global_step) == (step, step.global_step + 1)
        assert found.result.tier == "local"


def test_everything_comes_back(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        training = Training(0)
        recover = training.handler(fp, ON)
        assert recover.load() is None
        step = fpt.StepInfo.first(recovering.BATCHES)
        for batch in training.loader:
            training.step(batch)
            recover.dump(step)
            step = step.next()
        fp.wait()
    with fpt.init(job_root) as fp:
        other = Training(0, seed=99)
        assert other.handler(fp, ON).load()
        assert other.schedule.state_dict() == training.schedule.state_dict()
        assert other.scaler.state_dict() == training.scaler.state_dict()
        assert other.log.seen == training.log.seen
        for a, b in zip(other.actor.parameters(), training.actor.parameters(), strict=True):
            assert torch.equal(a, b)
        old, new = training.optimizer.state_dict(), other.optimizer.state_dict()
        assert old["param_groups"] == new["param_groups"]
        for number, moments in old["state"].items():
            for name, value in moments.items():
                assert torch.equal(value, new["state"][number][name])


def test_moments_keep_their_own_dtype(job_root: str) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 2, dtype=torch.bfloat16)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = make()
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 1 / 3, dtype=torch.float32)
    with fpt.init(job_root) as fp:
        handler = fpt.RecoverHandler(fp, ON, model=model, optimizer=optimizer)
        assert handler.dump(fpt.StepInfo.first(1))
        other, fresh = make()
        assert fpt.RecoverHandler(fp, ON, model=other, optimizer=fresh).load()
        for parameter in other.parameters():
            assert torch.equal(
                fresh.state[parameter]["momentum_buffer"],
                torch.full_like(parameter, 1 / 3, dtype=torch.float32),
            )


def fsdp(job_root: str) -> list[str]:
    """A sharded model: saving before the optimizer's first step changes nothing, and a resume is exact."""

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> str:
        loss = model(torch.randn(3, 8, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item().hex()

    model, optimizer = make(0)
    with fpt.init(job_root) as fp:
        recover = fpt.RecoverHandler(fp, ON, model=model, optimizer=optimizer)
        assert recover.dump(fpt.StepInfo.first(9)) is None
        assert not optimizer.state
        train(model, optimizer, 0)
        handle = recover.dump(fpt.StepInfo.first(9))
        assert handle is not None and handle.wait("complete", timeout_s=DEADLINE_S)
        dist.barrier()
        wanted = [train(model, optimizer, step) for step in (1, 2, 3)]
        other, fresh = make(1)
        assert fpt.RecoverHandler(fp, ON, model=other, optimizer=fresh).load()
        assert [train(other, fresh, step) for step in (1, 2, 3)] == wanted
        return wanted


def test_a_sharded_model(workers: Workers, job_root: str) -> None:
    workers.run(2, fsdp, job_root)


# ---- what cannot be restored ------------------------------------------------------------------------


@pytest.fixture
def saved_root(job_root: str) -> str:
    """A job root with a version of a model, an optimizer, and an auxiliary state."""
    model, optimizer = model_and_optimizer()
    trained(model, optimizer)
    with fpt.init(job_root) as fp:
        recover = fpt.RecoverHandler(
            fp, ON, model=model, optimizer=optimizer, auxiliary={"log": Counter()}, dataloader=Counter()
        )
        assert recover.dump(fpt.StepInfo.first(5))
    return job_root


def refused(root: str, match: str, kind: type[Exception] = MismatchError, **parts: Any) -> None:
    with fpt.init(root) as fp:
        recover = fpt.RecoverHandler(
            fp, ON, **{"auxiliary": {"log": Counter()}, "dataloader": Counter()} | parts
        )
        with pytest.raises(kind, match=match):
            recover.load()


def test_a_model_with_other_keys(saved_root: str) -> None:
    model = nn.Linear(3, 2, bias=False)
    refused(saved_root, "engine.model.bias", model=model, optimizer=torch.optim.Adam(model.parameters()))
    model = nn.Linear(4, 2)
    refused(saved_root, "shape", model=model, optimizer=torch.optim.Adam(model.parameters()))


def test_an_optimizer_with_other_groups(saved_root: str) -> None:
    model, _ = model_and_optimizer()
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    refused(saved_root, "param_groups.1", model=model, optimizer=torch.optim.Adam(groups))
    turned = [{"params": [model.bias, model.weight]}]
    refused(saved_root, "group 0 .* in another order", model=model, optimizer=torch.optim.Adam(turned))
    refused(saved_root, "param_groups", model=model, optimizer=torch.optim.SGD(model.parameters()))
    refused(saved_root, "engine.optimizer", model=model)


def test_parts_that_came_or_went(saved_root: str) -> None:
    model, optimizer = model_and_optimizer()
    both = {"model": model, "optimizer": optimizer}
    refused(saved_root, "dataloader", dataloader=None, **both)
    refused(saved_root, "auxiliary_log", auxiliary=None, **both)
    refused(saved_root, "auxiliary_more", auxiliary={"log": Counter(), "more": Counter()}, **both)
    refused(saved_root, "critic", engines={"critic": fpt.Engine(nn.Linear(2, 2))}, **both)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    refused(saved_root, "initial_lr|lr_scheduler", lr_scheduler=schedule, **both)


def test_a_part_that_cannot_take_its_state_back(saved_root: str) -> None:
    class Other(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError("the data set has changed")

    model, optimizer = model_and_optimizer()
    refused(saved_root, "has changed", ValueError, model=model, optimizer=optimizer, dataloader=Other())


def test_versions_that_nobody_can_use_are_no_start_from_scratch(saved_root: str) -> None:
    blob = next(Path(saved_root, "step-0_ckpt").glob("rank00000-0.safetensors"))
    with open(blob, "r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(b"\xff" * 4096)
    model, optimizer = model_and_optimizer()
    refused(saved_root, "delete it to start from scratch", FlashpointError, model=model, optimizer=optimizer)


def test_a_part_without_a_state_is_told_at_once(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        loader = torch.utils.data.DataLoader([1, 2, 3])
        with pytest.raises(ConfigError, match="the dataloader, a DataLoader, has no state_dict"):
            fpt.RecoverHandler(fp, ON, model=nn.Linear(2, 2), dataloader=loader)
        with pytest.raises(ConfigError, match="without dots"):
            fpt.RecoverHandler(fp, ON, model=nn.Linear(2, 2), auxiliary={"a.b": Counter()})
        with pytest.raises(ConfigError, match="nothing to recover"):
            fpt.RecoverHandler(fp, ON)


@pytest.mark.parametrize(
    "bad",
    [{"mode": "yes"}, {"retries": -1}, {"freq_steps": 0}, {"freq_secs": -1.0}, {"sigterm_timeout_s": -1.0}],
)
def test_a_configuration_that_cannot_be(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        fpt.RecoverConfig(**bad)


# ---- another number of ranks ------------------------------------------------------------------------


def save_as(job_root: str) -> None:
    model, optimizer = model_and_optimizer()
    trained(model, optimizer)
    with fpt.init(job_root) as fp:
        loader = Counter()
        loader.seen = [float(dist.get_rank())]
        recover = fpt.RecoverHandler(fp, ON, model=model, optimizer=optimizer, dataloader=loader)
        assert recover.dump(fpt.StepInfo.first(5))


def load_as(job_root: str) -> tuple[str, int, list[float], bool, bool]:
    """In another world: the error; and, where that is allowed, the next step, what became of the loader, whether the
    weights are those that were saved, and whether the dice stayed as they were."""
    saved, optimizer = model_and_optimizer()
    trained(saved, optimizer)
    model, optimizer = model_and_optimizer(seed=1)
    loader, error = Counter(), ""
    config = fpt.RecoverConfig(mode="on", sigterm_timeout_s=0, allow_world_change=True)
    with fpt.init(job_root) as fp:
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "dataloader": loader}
        try:
            fpt.RecoverHandler(fp, ON, **parts).load()
        except FlashpointError as failure:
            error = str(failure)
        dice = torch.get_rng_state()
        found = fpt.RecoverHandler(fp, config, **parts).load()
        assert found is not None
        same_dice = torch.equal(dice, torch.get_rng_state())
        return (
            error,
            found.next_step.global_step,
            loader.seen,
            torch.equal(model.weight, saved.weight),
            same_dice,
        )


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_another_number_of_ranks(workers: Workers, job_root: str, before: int, after: int) -> None:
    workers.run(before, save_as, job_root)
    for error, step, seen, same_weights, same_dice in workers.run(after, load_as, job_root):
        assert f"saved by {before} ranks, the job has {after}" in error
        assert (step, seen, same_weights, same_dice) == (1, [], True, True)
