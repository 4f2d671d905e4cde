"""Search seeded schedules of faults for one that breaks an invariant of replication or recovery.

Each seed is one schedule: ranks, agents and nodes die, messages are late, lost, doubled or cut off, bytes rot, memory
is full; the decisions under test are those of production. A seed that fails is run again with fewer faults, until
none can be left out, and printed; the same seed and options replay it (exit code 1).

JSON:
  seeds, events, seconds, events_per_second, saves, replicated, messages
  violations[]   seed, violation, faults[] {at_s, kind, nodes, seconds, chance}   (those that are needed)
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Final

from flashpoint.cli.output import Page, print_json
from flashpoint.simulate import Fault, Outcome, Settings, shrunk, simulate

NAME: Final = "simulate"
HELP: Final = "search schedules of faults for one that breaks an invariant"
VIOLATED: Final = 1
_SHOWN_MAX: Final = 5
_SEEDS_AT_ONCE: Final = 20


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=1000, help="how many schedules (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--nodes", type=int, default=4, help="nodes of the job (default: 4)")
    parser.add_argument("--copies", type=int, default=1, help="copies of each object (default: 1)")
    parser.add_argument("--keep", type=int, default=1, help="versions to keep (default: 1)")
    parser.add_argument("--faults", type=int, default=8, help="most faults in a schedule (default: 8)")
    parser.add_argument("--seconds", type=float, default=12.0, help="simulated, with faults (default: 12)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)"
    )


def run(args: argparse.Namespace) -> int:
    settings = Settings(
        nodes=args.nodes, copies=args.copies, keep=args.keep, seconds=args.seconds, faults=args.faults
    )
    begin_s = time.perf_counter()
    with ProcessPoolExecutor(args.jobs) as pool:
        seeds = range(args.first, args.first + args.seeds)
        outcomes = list(pool.map(partial(simulate, settings=settings), seeds, chunksize=_SEEDS_AT_ONCE))
    seconds = time.perf_counter() - begin_s
    failed = [outcome for outcome in outcomes if outcome.violation]
    needed = {outcome.seed: _needed(outcome, settings) for outcome in failed[:_SHOWN_MAX]}
    if args.json:
        print_json(_report(outcomes, seconds, needed))
    else:
        _show(outcomes, seconds, needed)
    return VIOLATED if failed else 0


def _needed(outcome: Outcome, settings: Settings) -> list[Fault]:
    def fails(faults: Sequence[Fault]) -> bool:
        return bool(simulate(outcome.seed, settings, faults).violation)

    return shrunk(outcome.faults, fails)


def _report(outcomes: list[Outcome], seconds: float, needed: dict[int, list[Fault]]) -> dict[str, object]:
    events = sum(outcome.events for outcome in outcomes)
    return {
        "seeds": len(outcomes),
        "events": events,
        "seconds": round(seconds, 3),
        "events_per_second": round(events / seconds),
        "saves": sum(outcome.saves for outcome in outcomes),
        "replicated": sum(outcome.replicated for outcome in outcomes),
        "messages": sum(outcome.messages for outcome in outcomes),
        "violations": [
            {
                "seed": outcome.seed,
                "violation": outcome.violation,
                "faults": [fault._asdict() for fault in needed.get(outcome.seed, outcome.faults)],
            }
            for outcome in outcomes
            if outcome.violation
        ],
    }


def _show(outcomes: list[Outcome], seconds: float, needed: dict[int, list[Fault]]) -> None:
    page = Page()
    events = sum(outcome.events for outcome in outcomes)
    for outcome in outcomes:
        if outcome.seed in needed:
            page.line((f"seed {outcome.seed}: {outcome.violation}", "red"))
            for fault in needed[outcome.seed]:
                page.line(f"  {fault}")
    failed = sum(bool(outcome.violation) for outcome in outcomes)
    page.line(
        f"{len(outcomes):,} schedules, {sum(o.saves for o in outcomes):,} saves, "
        f"{sum(o.recoveries for o in outcomes):,} starts of the job, {events:,} events in {seconds:.1f} s "
        f"({events / seconds:,.0f} a second): {failed or 'no'} violation{'s' if failed > 1 else ''}"
    )
    page.show()
