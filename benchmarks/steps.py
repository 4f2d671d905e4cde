"""Steps of a training loop, of about 5 ms each, and the loop: what saves and drains run beside."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def matmul_step() -> Callable[[], object]:
    matrix = torch.rand(384, 384)

    def step() -> None:
        for _ in range(5):
            matrix @ matrix

    return _of_5_ms(step)


def python_step() -> Callable[[], object]:
    def step() -> None:
        total = 0
        for i in range(5000):
            total += i * i

    return _of_5_ms(step)


def _of_5_ms(piece: Callable[[], None]) -> Callable[[], None]:
    """Repeats of ``piece`` that take about 5 ms on a quiet machine."""
    durations = []
    for _ in range(50):
        start_s = time.perf_counter()
        piece()
        durations.append(time.perf_counter() - start_s)
    repeats = max(round(0.005 / statistics.median(durations)), 1)

    def step() -> None:
        for _ in range(repeats):
            piece()

    return step


def train(
    step: Callable[[], object], seconds: float, save: Callable[[], bool] | None = None
) -> dict[str, list[float]]:
    """Durations of steps, so many seconds in all, and of the calls between them that began a save."""
    steps: list[float] = []
    saves: list[float] = []
    while sum(steps) < seconds:
        start_s = time.perf_counter()
        if save is not None and save():
            saves.append(time.perf_counter() - start_s)
        now_s = time.perf_counter()
        step()
        steps.append(time.perf_counter() - now_s)
    return {"steps": steps, "saves": saves}
