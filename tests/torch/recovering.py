"""A training whose every next step hangs on everything a `RecoverHandler` saves; run in processes that are killed.

One line of its log for each step: the loss, in hex, which dropout, the sampler, Python's and NumPy's dice, the moments,
the scheduler and the scaler all have a part in.
"""

from __future__ import annotations

import math
import os
import random
import signal
import sys
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import flashpoint_torch as fpt
from tests.torch.faults import Log

BATCHES, BATCH = 7, 2  # of an epoch of one rank, so that epochs end between saves too
WIDTH = 24


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Rows that hang on their index alone."""

    def __init__(self, rank: int) -> None:
        self.rows = torch.randn(BATCHES * BATCH, WIDTH, generator=torch.Generator().manual_seed(77 + rank))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Counter:
    """An auxiliary state: what a logger keeps."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, WIDTH), nn.LayerNorm(WIDTH)
    )


class Training:
    """Actor and critic with all that belongs to them, on one rank."""

    def __init__(self, rank: int, *, seed: int = 5, loader_workers: int = 0) -> None:
        self.actor, self.critic = net(seed), net(seed + 1)
        self.optimizer = torch.optim.AdamW(self.actor.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.02, total_steps=200)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.01, momentum=0.9)
        random.seed(seed + rank)
        np.random.seed(seed + rank)
        torch.manual_seed(seed + 100 + rank)
        self.loader = StatefulDataLoader(
            Rows(rank),
            batch_size=BATCH,
            shuffle=True,
            num_workers=loader_workers,
            # Forked, they notice when this process dies.
            multiprocessing_context="fork" if loader_workers else None,
        )
        self.log = Counter()

    def handler(self, fp: fpt.Flashpoint, config: fpt.RecoverConfig, **more: Any) -> fpt.RecoverHandler:
        return fpt.RecoverHandler(
            fp,
            config,
            engines={
                "actor": fpt.Engine(self.actor, self.optimizer, self.schedule, self.scaler),
                "critic": fpt.Engine(self.critic, self.critic_optimizer),
            },
            dataloader=self.loader,
            auxiliary={"log": self.log},
            **more,
        )

    def step(self, batch: torch.Tensor) -> float:
        batch = batch * (1 + random.random()) + np.random.rand()
        loss = (self.actor(batch) - self.critic(batch)).square().mean() + len(self.log.seen) * 1e-3
        self.scaler.scale(loss).backward()
        for parameter in self.critic.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.scaler.get_scale()
        for parameter in [*self.actor.parameters(), *self.critic.parameters()]:
            if dist.is_initialized() and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        self.scaler.step(self.optimizer)
        self.critic_optimizer.step()
        self.scaler.update()
        self.optimizer.zero_grad()
        self.critic_optimizer.zero_grad()
        self.schedule.step()
        self.log.seen.append(loss.item())
        return loss.item()


def train(
    rank: int,
    job_root: str,
    log_path: str,
    total: int,
    *,
    loader_workers: int = 0,
    dies_at: int | None = None,
    **settings: Any,
) -> int:
    """Train until ``total`` steps are done, from wherever the last attempt was; returns where it began.

    Args:
        dies_at: kill this process by SIGKILL after this step.
    """
    log = Log(f"{log_path}.{rank}")
    config = fpt.RecoverConfig(**{"mode": "on", "freq_steps": 3} | settings)
    with fpt.init(job_root) as fp:
        training = Training(rank, loader_workers=loader_workers)
        with training.handler(fp, config) as recover:
            found = recover.load()
            step = found.next_step if found else fpt.StepInfo.first(BATCHES)
            begun = step.global_step
            log.write("begin", begun)
            while step.global_step < total:
                for batch in training.loader:
                    log.write("loss", step.global_step, training.step(batch).hex())
                    recover.dump(step)
                    if step.global_step == dies_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    step = step.next()
                    if step.global_step == total:
                        break
    log.write("end")
    return begun


def losses(log_path: str, rank: int = 0) -> dict[int, str]:
    """The loss of every step; fails where two attempts do not agree on one."""
    found: dict[int, str] = {}
    with open(f"{log_path}.{rank}") as file:
        for words in map(str.split, file):
            if words[0] == "loss":
                step = int(words[1])
                assert math.isfinite(float.fromhex(words[2])), f"step {step} tells nothing"
                assert found.setdefault(step, words[2]) == words[2], f"step {step} went another way"
    return found


def begins(log_path: str, rank: int = 0) -> list[int]:
    """At which step each attempt began."""
    with open(f"{log_path}.{rank}") as file:
        return [int(line.split()[1]) for line in file if line.startswith("begin")]


def main() -> None:
    """As a program: JOB_ROOT LOG TOTAL [ATTEMPT:RANK:STEP ...] dies by SIGKILL where it is told to."""
    job_root, log_path, total, *deaths = sys.argv[1:]
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", os.environ.get("FLASHPOINT_ATTEMPT", "0"))
    places = [death.split(":") for death in deaths]
    dies_at = next((int(place[2]) for place in places if place[:2] == [attempt, str(rank)]), None)
    if "RANK" in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    train(rank, job_root, log_path, int(total), dies_at=dies_at)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
