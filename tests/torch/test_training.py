"""Training that is interrupted and resumed ends where training in one go does, to the last bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import flashpoint_torch as fpt
from tests.torch.workers import Workers, use_dcp_process

STEPS, CUT = 8, 4
BATCH = 12  # of all ranks together


class Trainer:
    """A small model, AdamW, a schedule; the batch of a step is the same for any number of ranks."""

    def __init__(self, parallel: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True)
        self.model: nn.Module = nn.Sequential(nn.Linear(10, 14), nn.ReLU(), nn.Linear(14, 7), nn.LayerNorm(7))
        world_size = dist.get_world_size()
        self.ranks = world_size
        if parallel == "fsdp":
            mesh = init_device_mesh("cpu", (world_size,))
            for layer in self.model:
                if list(layer.parameters()):
                    fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        elif parallel == "fsdp+tp":
            mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(self.model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            fully_shard(self.model, mesh=mesh["dp"])
            self.ranks = world_size // 2
        elif parallel == "hsdp":
            fully_shard(
                self.model, mesh=init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("r", "s"))
            )
        elif parallel == "ddp":
            self.model = DistributedDataParallel(self.model)
        self.data_rank = dist.get_rank() * self.ranks // world_size
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.step = 0

    def train(self, until: int) -> list[str]:
        losses = []
        while self.step < until:
            generator = torch.Generator().manual_seed(self.step)
            batch = torch.randn(BATCH, 10, generator=generator).tensor_split(self.ranks)[self.data_rank]
            loss = self.model(batch).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.step += 1
            losses.append(loss.item().hex())
        return losses

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        schedule = self.schedule.state_dict()
        return {"model": model, "optimizer": optimizer, "schedule": schedule, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.schedule.load_state_dict(state["schedule"])
        self.step = state["step"]


def recovered(fp: fpt.Flashpoint, trainer: Trainer, how: str) -> None:
    if how == "session":
        assert fp.recover({"trainer": trainer})
    else:
        dcp.load({"trainer": trainer}, checkpoint_id=fp.path(CUT), storage_reader=fp.reader())


def saved(fp: fpt.Flashpoint, trainer: Trainer, how: str) -> None:
    state = {"trainer": trainer}
    if how == "session":
        handle = fp.async_save(state, CUT)
        trainer.train(CUT + 1)  # it goes on while the save runs
        assert handle.wait("complete", timeout_s=60)
        return
    if how == "process":
        use_dcp_process()
    executor = AsyncCheckpointerType.PROCESS if how == "process" else AsyncCheckpointerType.THREAD
    future = dcp.async_save(
        state, checkpoint_id=fp.path(CUT), storage_writer=fp.writer(), async_checkpointer_type=executor
    )
    future.result(60)


def interrupted(job_root: str, parallel: str, how: str) -> list[str]:
    with fpt.init(job_root) as fp:
        trainer = Trainer(parallel)
        trainer.train(CUT)
        saved(fp, trainer, how)
    dist.barrier()
    with fpt.init(job_root) as fp:
        trainer = Trainer(parallel, seed=1)  # other weights, no optimizer state yet
        recovered(fp, trainer, how)
        assert trainer.step == CUT
        return trainer.train(STEPS)


def in_one_go(parallel: str) -> list[str]:
    return Trainer(parallel).train(STEPS)


@pytest.mark.parametrize("how", ["session", "thread", "process"])
@pytest.mark.parametrize(("parallel", "world_size"), [("fsdp", 2), ("ddp", 2)])
def test_losses_after_a_resume(
    workers: Workers, job_root: str, parallel: str, world_size: int, how: str
) -> None:
    straight = workers.run(world_size, in_one_go, parallel)
    resumed = workers.run(world_size, interrupted, job_root, parallel, how)
    assert resumed == [losses[CUT:] for losses in straight]


@pytest.mark.parametrize("how", ["session", "thread"])
@pytest.mark.parametrize("parallel", ["fsdp+tp", "hsdp"])
def test_losses_after_a_resume_on_a_mesh_of_two_dimensions(
    workers: Workers, job_root: str, parallel: str, how: str
) -> None:
    straight = workers.run(4, in_one_go, parallel)
    resumed = workers.run(4, interrupted, job_root, parallel, how)
    assert resumed == [losses[CUT:] for losses in straight]


# ---- another number of ranks ------------------------------------------------------------------------


def train_and_save(job_root: str, parallel: str) -> None:
    with fpt.init(job_root) as fp:
        trainer = Trainer(parallel)
        trainer.train(CUT)
        assert fp.save({"trainer": trainer}, CUT).error is None


def parameters(job_root: str, parallel: str, how: str) -> list[tuple[str, list[str]]]:
    """Every parameter and its moments as recovered, whole, in hex."""
    with fpt.init(job_root) as fp:
        trainer = Trainer(parallel, seed=1)
        recovered(fp, trainer, how)
        assert trainer.step == CUT
        state = trainer.state_dict()
        found = []

        def add(name: str, value: Any) -> None:
            if isinstance(value, torch.Tensor):
                full = value.full_tensor() if hasattr(value, "full_tensor") else value
                found.append((name, [x.hex() for x in full.flatten().tolist()]))
            elif isinstance(value, dict):
                for key in sorted(value):
                    add(f"{name}.{key}", value[key])

        add("model", state["model"])
        add("optimizer", state["optimizer"]["state"])
        assert len(found) == 6 + 6 * 3
        trainer.train(STEPS)
        return found


@pytest.mark.parametrize("how", ["session", "dcp"])
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [
        ((2, "fsdp"), [(1, "fsdp"), (3, "fsdp"), (4, "fsdp+tp"), (4, "hsdp")]),
        ((4, "fsdp+tp"), [(2, "fsdp"), (4, "hsdp"), (1, "fsdp")]),
    ],
)
def test_weights_and_moments_on_another_number_of_ranks(
    workers: Workers,
    job_root: str,
    saved_by: tuple[int, str],
    loaded_by: list[tuple[int, str]],
    how: str,
) -> None:
    workers.run(saved_by[0], train_and_save, job_root, saved_by[1])
    wanted = workers.run(saved_by[0], parameters, job_root, saved_by[1], how)[0]
    for world_size, parallel in loaded_by:
        for found in workers.run(world_size, parameters, job_root, parallel, how):
            assert found == wanted


@pytest.mark.parametrize("saved_by", [1, 2, 3, 4])
def test_every_number_of_ranks_loads_what_any_other_saved(
    workers: Workers, job_root: str, saved_by: int
) -> None:
    workers.run(saved_by, train_and_save, job_root, "fsdp")
    wanted = workers.run(saved_by, parameters, job_root, "fsdp", "session")[0]
    for loaded_by in (1, 2, 3, 4):
        for found in workers.run(loaded_by, parameters, job_root, "fsdp", "session"):
            assert found == wanted, loaded_by


# ---- as on the first page of the README -------------------------------------------------------------


def module_and_optimizer(make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]], job_root: str) -> None:
    model, optimizer = make()
    for _ in range(3):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    with fpt.init(job_root) as fp:
        assert fp.save({"model": model, "optimizer": optimizer, "step": 3}, 3).error is None
        other, fresh = make()
        state = {"model": other, "optimizer": fresh, "step": 0}
        fp.recover(state)
        assert state["step"] == 3
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)
        old, new = optimizer.state_dict(), fresh.state_dict()
        assert old["param_groups"] == new["param_groups"]
        assert list(old["state"]) == list(new["state"])
        for key, entry in old["state"].items():
            for name, value in entry.items():
                assert torch.equal(value, new["state"][key][name]), name
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        other.zero_grad()
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            b.grad = a.grad.clone() if a.grad is not None else None
        fresh.step()
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)


def sharded_module_and_optimizer(job_root: str) -> list[str]:
    """Losses of six steps; or of the last three, where there are three to go on from."""
    trainer = Trainer("fsdp", seed=dist.get_world_size())
    state = {"model": trainer.model, "optimizer": trainer.optimizer, "step": 0}
    with fpt.init(job_root) as fp:
        if fp.recover(state) is None:
            first = trainer.train(3)
            assert fp.save(state | {"step": 3}, 3).error is None
            return first + trainer.train(6)
    trainer.step = state["step"]
    assert all(isinstance(s["exp_avg"], DTensor) for s in trainer.optimizer.state.values())
    return trainer.train(6)


def test_a_sharded_module_and_its_fresh_optimizer_as_they_are(workers: Workers, job_root: str) -> None:
    losses = workers.run(2, sharded_module_and_optimizer, job_root)
    assert workers.run(2, sharded_module_and_optimizer, job_root) == [one[3:] for one in losses]
    # Over another number of ranks sums are rounded otherwise: it is the same training, but for the last bits.
    (other,) = workers.run(1, sharded_module_and_optimizer, job_root)
    mean = [sum(map(float.fromhex, step)) / 2 for step in zip(*(one[3:] for one in losses), strict=True)]
    assert [float.fromhex(loss) for loss in other] == pytest.approx(mean, rel=1e-4)


def adamw() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 3)
    return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))


def sgd() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 3)
    groups = [{"params": [model.weight], "lr": 0.2}, {"params": [model.bias]}]
    return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def adagrad() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 3)
    return model, torch.optim.Adagrad(model.parameters(), lr=0.1)


@pytest.mark.parametrize("make", [adamw, sgd, adagrad])
def test_a_module_and_an_optimizer_as_they_are(
    job_root: str, make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
) -> None:
    module_and_optimizer(make, job_root)
