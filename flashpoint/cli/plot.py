"""The picture of `flashpoint plan`. Imports matplotlib: only to be imported where a picture is asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from flashpoint.errors import FlashpointError
from flashpoint.planning import Job, Plan, Rates, plan

_COLORS: Final = ("#999999", "#d95f02", "#1b9e77", "#2b8cbe", "#7b5ea7")  # told apart on white and on black
_POINTS: Final = 120


def draw_plans(path: str, job: Job, rates: Rates, plans: Sequence[Plan]) -> None:
    """Draw goodput over the interval, a line for each policy, into a file; its name says the kind.

    Raises:
        FlashpointError: there is no matplotlib, or it knows no such kind of file.
    """
    try:
        import matplotlib
    except ImportError:
        raise FlashpointError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    draw_goodput(axis, job, rates, plans)
    kinds = figure.canvas.get_supported_filetypes()
    kind = os.path.splitext(path)[1].lstrip(".").lower()
    if kind not in kinds:
        raise FlashpointError(
            f"--plot {path}: its name must end with one of {', '.join(f'.{one}' for one in kinds)}"
        )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_goodput(axis: Any, job: Job, rates: Rates, plans: Sequence[Plan]) -> None:
    """Goodput over the interval into an axis; a dot where each policy is best."""
    least_s = min(one.interval_s for one in plans) / 8
    most_s = max(one.interval_s for one in plans) * 8
    steps = sorted(
        {
            max(round(least_s * (most_s / least_s) ** (i / _POINTS) / job.step_s), 1)
            for i in range(_POINTS + 1)
        }
    )
    lowest = 1.0
    for number, (one, color) in enumerate(zip(plans, _COLORS, strict=False)):
        line = [plan(job, rates, one.policy, steps=n) for n in steps]
        dashes = {"dashes": (4, 4)} if number == len(_COLORS) - 1 else {}  # it lies on the line before it
        works_s, goodputs = [n * job.step_s for n in steps], [at.goodput for at in line]
        axis.plot(works_s, goodputs, color=color, label=one.policy.name, **dashes)
        axis.plot(one.interval_s, one.goodput, "o", color=color)
        lowest = min(lowest, one.goodput)
    axis.set_xscale("log")
    axis.set_ylim(max(1 - 4 * (1 - lowest), 0), 1)
    axis.set_xlabel("work between two saves, seconds (dot: the best)")
    axis.set_ylabel("goodput: part of the time that training gets on")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
