"""``python -m tests.crash``: strike operations at their system calls, and say what was wrong.

python -m tests.crash                                       every operation, every call, every fault
python -m tests.crash --scene save --sample 40 --seed 7     some of one operation's
python -m tests.crash --scene save --only killed-before:rename/manifest/1
python -m tests.crash --scene save --mutant skip_the_marker
python -m tests.crash --mutants                             every bug that is put in is found
python -m tests.crash --scene save --list                   what there is
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time

from tests.crash.all_scenes import SCENES
from tests.crash.harness import Report, faults_of, record, sample, strike
from tests.crash.mutants import MUTANTS
from tests.crash.tracer import Fault, Kind, why_not

KINDS = [kind.value for kind in Kind]
BEGUN = time.monotonic()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__.split("\n")[0])
    parser.add_argument("--scene", action="append", choices=SCENES, metavar="NAME", help=", ".join(SCENES))
    parser.add_argument("--kind", action="append", choices=KINDS, help="by default all")
    parser.add_argument("--only", action="append", default=[], help="faults, as a violation names them")
    parser.add_argument(
        "--sample", type=int, help="so many faults of each scene, a quarter of the slow ones'"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", default="0/1", help="the i-th of n parts of the faults: i/n")
    parser.add_argument("--mutant", default="", help="put this bug in, and stop at the first violation")
    parser.add_argument(
        "--mutants", action="store_true", help="each bug, at the fault at which it is known to show"
    )
    parser.add_argument("--folder", default="", help="below which job roots are made; on a tmpfs")
    parser.add_argument("--list", action="store_true", help="the calls, and no fault")
    options = parser.parse_args()
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 77
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folder = tempfile.mkdtemp(prefix="flashpoint-crash-", dir=options.folder or "/dev/shm")
    reports: list[Report] = []
    try:
        if options.mutants:
            return try_mutants(folder)
        for name in options.scene or SCENES:
            report = Report(name)
            reports.append(report)
            try:
                run(report, folder, options)
            finally:  # also what there was when somebody ended it
                print(line(report), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if any(report.violations for report in reports) else 0


def try_mutants(folder: str) -> int:
    """Whether every bug shows; which fault shows it is printed."""
    survivors = 0
    for name, mutant in MUTANTS.items():
        report = Report(mutant.scene)
        fault = None if mutant.fault == "none" else Fault.parse(mutant.fault)
        strike(SCENES[mutant.scene](folder, mutant=name), [fault], report)
        survivors += not report.violations
        what = next((wrong[0] for wrong in report.violations.values()), "NOT FOUND")
        print(f"{name}: {mutant.scene}, {mutant.fault}: {what}", flush=True)
    print(f"{len(MUTANTS)} bugs, {survivors} not found, {time.monotonic() - BEGUN:.0f} s")
    return 1 if survivors else 0


def run(report: Report, folder: str, options: argparse.Namespace) -> None:
    name = report.scene
    if not options.only:
        events = record(SCENES[name](folder))
        report.points = len(events)
    if options.list:
        for event in events:
            print(event.call, *event.paths)
        return
    faults: list[Fault | None] = [None if text == "none" else Fault.parse(text) for text in options.only]
    if not faults:
        part, parts = map(int, options.shard.split("/"))
        every = faults_of(events, [Kind(kind) for kind in options.kind or KINDS])
        faults = [*every[part::parts]]
        if options.sample is not None:
            count = options.sample // (4 if SCENES[name].is_slow else 1)
            faults = [*sample(faults, count, options.seed)]
    if options.mutant:
        faults.insert(0, None)  # it may show without any
    scene = SCENES[name](folder, mutant=options.mutant)
    strike(scene, faults, report, stop_at_first=bool(options.mutant))


def line(report: Report) -> str:
    text = (
        f"{report.scene}: {report.points} calls, {report.runs} faults ({report.not_reached} not reached), "
        f"{len(report.violations)} violations, {report.seconds:.0f} s"
    )
    return "\n".join(
        [text, *(f"  {fault}: {'; '.join(wrong)}" for fault, wrong in report.violations.items())]
    )


if __name__ == "__main__":
    sys.exit(main())
