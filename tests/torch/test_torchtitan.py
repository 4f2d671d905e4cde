"""torchtitan's own checkpoint manager, optimizers and schedulers over FSDP2, killed and resumed from memory.

Its `Trainer` asks for an accelerator, so the loop around them is ours, with the calls that the trainer makes.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flashpoint.errors import ConfigError
from tests.torch import faults
from tests.torch.trainers import die, losses, resumed, run_attempts

pytest.importorskip("torchtitan", reason="needs torchtitan: pip install 'flashpoint[torchtitan]'")

STEPS, EVERY, FILE_EVERY = 16, 2, 5


class TrainState:
    """What the trainer has of it."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


def fit(rank: int, *, job_root: str, folder: str, die_at: tuple[int, int] | None = None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
    from torchtitan.components.optimizer.optimizer import ParamGroupConfig

    from flashpoint_torch.torchtitan import FlashpointCheckpointManager

    log = faults.Log(f"{folder}/log.{rank}")
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    adam = ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})
    optimizers = OptimizersContainer.Config(param_groups=[adam], implementation="for-loop").build(
        model_parts=[model]
    )
    schedulers = LRSchedulersContainer(optimizers, lambda step: 1 / (1 + step))
    batches = torch.arange(STEPS * 2 * 8.0).view(STEPS * 2, 8).sin()
    loader = StatefulDataLoader(list(batches[rank::2].split(1)), batch_size=None, shuffle=True)
    train = TrainState()
    manager = FlashpointCheckpointManager.Config(
        enable=True, interval=FILE_EVERY, job_root=job_root, memory_interval=EVERY, last_save_model_only=False
    ).build(
        dataloader=loader, model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers,
        states={"train_state": train}, sd_adapter=None, base_folder=folder,
    )  # fmt: skip
    loaded = manager.load(step=-1)
    log.write("began", train.step, loaded)
    for batch in loader:
        train.step += 1
        if die_at == (rank, train.step):
            assert manager.memory.wait(60)
            die()
        optimizers.zero_grad()
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        optimizers.step()
        schedulers.step()
        log.write("loss", train.step, loss.item().hex())
        manager.save(train.step, last_step=train.step == STEPS)
    manager.close()


def test_losses_after_a_kill_are_those_of_the_uninterrupted_run(job_root: str, tmp_path: Path) -> None:
    first = random.Random().randrange(EVERY + 2, STEPS)
    peace, war = tmp_path / "peace", tmp_path / "war"
    peace.mkdir()
    war.mkdir()
    killed = {"job_root": f"{job_root}/war", "folder": str(war)}
    lost = {"job_root": f"{job_root}/lost", "folder": str(peace)}
    codes = run_attempts(
        [
            "torchtitan.components.checkpointer.dcp",
            "flashpoint_torch.torchtitan",
            "torchdata.stateful_dataloader",
        ],
        2,
        fit,
        [
            {"job_root": f"{job_root}/peace", "folder": str(peace)},
            {**killed, "die_at": (1, first)},
            killed,
            lost,
        ],
    )
    assert [-9 in attempt for attempt in codes] == [False, True, False, False], (codes, first)
    for rank in range(2):
        assert sorted(losses(peace, rank)) == list(range(1, STEPS + 1))
        assert losses(war, rank) == losses(peace, rank), first
        began = resumed(war, rank)
        assert began[0] == 0 and 0 < began[1] < first and began[1] % EVERY == 0, (began, first)
        assert resumed(peace, rank) == [0, STEPS]  # memory has nothing: torchtitan's own newest checkpoint
    assert {path.name for path in Path(war, "checkpoint").iterdir()} == {
        f"step-{step}" for step in (*range(FILE_EVERY, STEPS, FILE_EVERY), STEPS)
    }


def test_what_is_set_wrong_is_said_at_once() -> None:
    from flashpoint_torch.torchtitan import FlashpointCheckpointManager

    with pytest.raises(ConfigError, match="job_root is missing"):
        FlashpointCheckpointManager.Config(enable=True)
    with pytest.raises(ConfigError, match="memory_interval must be at least 1"):
        FlashpointCheckpointManager.Config(job_root="/dev/shm/job", memory_interval=0)
