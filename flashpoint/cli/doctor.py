"""Look at this host as a place for checkpoints: each finding is ok, warn or bad, with the command that mends it.

Looks at JOB_ROOT, which need not be there yet, or at /dev/shm; run it as the job's user, with the job's environment, in
the job's container. Measures for about a second, unless --quick. Changes nothing. Exits with 1 if anything is bad.

JSON:
  place, level (the worst)
  findings[]     check, level (ok, warn, bad), value, why, fix (a command; empty where all is well)
  rates          memcpy, new_pages, recycled_pages, loopback (bytes per second; null if not measured)
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Final

from flashpoint.cli.exit_codes import BAD, FINE
from flashpoint.cli.output import Page, plural, print_json

NAME: Final = "doctor"
HELP: Final = "check this host: memory, limits, network, leftovers"
DEFAULT_PLACE: Final = "/dev/shm"

_STYLES: Final = {"ok": "green", "warn": "yellow", "bad": "bold red"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job_root",
        metavar="JOB_ROOT",
        nargs="?",
        help=f"a job's folder, or where one is to be (default: {DEFAULT_PLACE})",
    )
    parser.add_argument("--quick", action="store_true", help="measure nothing")
    parser.add_argument("--why", action="store_true", help="say of every check why it matters")


def run(args: argparse.Namespace) -> int:
    from flashpoint.cli.doctor_checks import examine
    from flashpoint.cli.doctor_readings import read

    job_root = os.path.abspath(args.job_root) if args.job_root else None
    place = _existing(job_root or DEFAULT_PLACE)
    readings = read(job_root, place, is_quick=args.quick)
    findings = examine(readings)
    levels = [finding.level for finding in findings]
    worst = next(level for level in ("bad", "warn", "ok") if level in levels)
    if args.json:
        rates = dataclasses.asdict(readings.rates) if readings.rates else None
        print_json(
            {
                "place": place,
                "level": worst,
                "findings": [dataclasses.asdict(finding) for finding in findings],
                "rates": rates,
            }
        )
        return BAD if worst == "bad" else FINE
    page = Page()
    page.line((place, "bold"), "" if place == (job_root or place) else f"  ({job_root} is not there yet)")
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        style = _STYLES[finding.level]
        page.line("  ", (f"{finding.level:<4}", style), f"  {finding.check:<{width}}  {finding.value}")
        if finding.level != "ok" or args.why:
            page.line(" " * (width + 10), (finding.why, "dim"))
        if finding.fix:
            page.line(" " * (width + 10), ("fix: ", "dim"), (finding.fix, "bold"))
    counts = [plural(levels.count("bad"), "thing") + " bad", plural(levels.count("warn"), "warning")]
    page.line(", ".join(counts) if worst != "ok" else "all is well")
    page.show()
    return BAD if worst == "bad" else FINE


def _existing(path: str) -> str:
    """The path, or the nearest folder above it that is there; raises `OSError` where this user may not look."""
    while True:
        try:
            os.listdir(path)
            return path
        except (FileNotFoundError, NotADirectoryError):
            path = os.path.dirname(path)
