"""Runs a scene at its points: one run records the calls, then each of them is struck in a run of its own."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.crash.scenes import Scene
from tests.crash.tracer import Event, Fault, Kind


@dataclass
class Report:
    """What came of a scene.

    Attributes:
        points: calls that the operation makes.
        runs: faults that were tried; those not reached did not happen in that run.
        violations: fault -> what was wrong.
    """

    scene: str
    points: int = 0
    runs: int = 0
    not_reached: int = 0
    seconds: float = 0.0
    violations: dict[str, list[str]] = field(default_factory=dict)


def record(scene: Scene) -> list[Event]:
    """The calls of an operation; what is wrong without any fault is an error of the harness."""
    result = scene.run()
    assert not result.wrong, f"{scene.name}, with no fault: {result.wrong}"
    return result.events


def faults_of(events: Sequence[Event], kinds: Sequence[Kind]) -> list[Fault]:
    return [Fault(kind, event.call) for event in events for kind in kinds if kind.applies(event.call)]


def sample(faults: Sequence[Fault], count: int, seed: int) -> list[Fault]:
    """So many of them, of each kind alike, in their order."""
    if count >= len(faults):
        return list(faults)
    chosen = set(random.Random(seed).sample(range(len(faults)), count))
    return [fault for number, fault in enumerate(faults) if number in chosen]


def strike(
    scene: Scene,
    faults: Sequence[Fault | None],
    report: Report,
    *,
    stop_at_first: bool = False,
) -> None:
    begun = time.monotonic()
    for fault in faults:
        result = scene.run(fault)
        report.runs += 1
        report.seconds = time.monotonic() - begun
        report.not_reached += fault is not None and not result.struck
        if result.wrong:
            report.violations["none" if fault is None else str(fault)] = result.wrong
            if stop_at_first:
                break
