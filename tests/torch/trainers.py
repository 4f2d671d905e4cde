"""Jobs under somebody else's trainer: started, killed and started again, in processes that are quick to start.

A trainer's library takes seconds to import. One process imports it, and forks the ranks of every attempt.
"""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.torch import faults

ATTEMPT_S = 150.0  # of one start of the job, on a machine that does much else


def run_attempts(
    imports: Sequence[str], world_size: int, target: Callable[..., Any], attempts: Sequence[dict[str, Any]]
) -> list[list[int]]:
    """``target(rank, **attempt)`` on every rank, once for each attempt; the exit codes of each one's ranks.

    Where a rank is killed the rest of the job is, as by whoever supervises it.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    worker = faults.start(_attempts, tuple(imports), world_size, store.port, target, list(attempts))
    if not worker.answers.poll(ATTEMPT_S * (len(attempts) + 1)):
        worker.kill()
        raise AssertionError("the attempts did not end in time")
    codes: list[list[int]] = worker.answer()
    return codes


def _attempts(
    imports: Sequence[str],
    world_size: int,
    port: int,
    target: Callable[..., Any],
    attempts: Sequence[dict[str, Any]],
) -> list[list[int]]:
    for name in imports:
        importlib.import_module(name)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    return [_attempt(number, world_size, port, target, attempt) for number, attempt in enumerate(attempts, 1)]


def _attempt(
    number: int, world_size: int, port: int, target: Callable[..., Any], kwargs: dict[str, Any]
) -> list[int]:
    ranks = [
        mp.get_context("fork").Process(target=_rank, args=(rank, world_size, port, number, target, kwargs))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + ATTEMPT_S
    try:
        running = {rank.sentinel: rank for rank in ranks}
        while running:
            ended = wait(list(running), max(deadline - time.monotonic(), 0.0))
            assert ended, f"attempt {number} did not end within {ATTEMPT_S:g} s"
            for sentinel in ended:
                rank = running.pop(sentinel)  # type: ignore[arg-type]
                rank.join()
                if rank.exitcode:
                    for other in running.values():
                        other.kill()
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    return [rank.exitcode or 0 for rank in ranks]


def _rank(
    rank: int, world_size: int, port: int, number: int, target: Callable[..., Any], kwargs: dict[str, Any]
) -> None:
    os.environ.update(  # what torchrun tells its workers
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="test",
    )
    faults._as_rank(rank, world_size, port, number, target, (), kwargs)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def losses(folder: Path, rank: int) -> dict[int, str]:
    """The loss of every step in a rank's log; a step that was trained twice must have had the same both times."""
    found: dict[int, str] = {}
    for word, *rest in faults.log_lines(str(folder / "log"), rank):
        if word == "loss":
            step, loss = int(rest[0]), rest[1]
            assert found.setdefault(step, loss) == loss, f"rank {rank}, step {step}: {found[step]} and {loss}"
    return found


def resumed(folder: Path, rank: int) -> list[int]:
    """The steps at which the attempts began."""
    return [int(line[1]) for line in faults.log_lines(str(folder / "log"), rank) if line[0] == "began"]
