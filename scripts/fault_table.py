"""Run the fault table (`tests/faults/table.py`) and write `docs/faults.md` from what was seen.

    python -m scripts.fault_table [--from RESULTS.xml] [arguments of pytest]

Exits as pytest does. The page is written also if tests failed: it then says which.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.table import PAGE, ROWS, SEEN_ELSEWHERE

INTRODUCTION = """\
# What it survives

This page is written by `make faults`: it says what was seen when that was run last. Each row is a fault that training
jobs meet, what is expected of it, and the tests that put the fault in and look whether what is expected holds.

**A row counts** when at least one test with real processes or threads, a real tmpfs and real sockets shows it, and
every test of the row passes. Tests of decisions alone stand beside those, never in their place. A test may belong to
several rows. One that is skipped says why, and its row says so.

**How the faults are made.** Processes are killed and stopped by signals, or frozen by a cgroup. Memory is short by
tmpfs mounts of a given size and by a cgroup's limit. The network is a proxy in user space (`tests/chaos.py`), which
delays, throttles, flips, drops, doubles, swaps, cuts and swallows bytes, or a network namespace whose route is a black
hole. Clocks are those of a time namespace, or injected; the machine's are never set. What needs root, or a tool that is
absent, is skipped.

**To repeat**: `make faults`, some minutes on two cores, as root. One row: the tests in `tests/faults` begin with their
row's number (`pytest tests/faults -k test_13`); the others are named below. Seeds are fixed, and a test of random
faults prints what it did. The interleavings that no real test meets are the simulator's part (`python -m flashpoint
simulate`, [design.md](design.md) section 11). A job of three nodes that saves every second while random faults happen to
them is `python -m tests.faults.soak --seconds 3600`.
"""

ORDER = {"failed": 0, "skipped": 1, "passed": 2}


@dataclass
class Seen:
    """What became of one test, all its parameters together."""

    outcomes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    reasons: set[str] = field(default_factory=set)
    seconds: float = 0.0


def read(path: Path) -> dict[str, dict[str, Seen]]:
    """For each row, what was seen of its tests, from a JUnit file of pytest's."""
    found: dict[str, dict[str, Seen]] = defaultdict(lambda: defaultdict(Seen))
    for case in ET.parse(path).iter("testcase"):
        told = {item.get("name"): item.get("value", "") for item in case.iter("property")}
        if "fault" not in told:
            continue
        test = told["test"].partition("[")[0]
        outcome, reason = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                outcome = "failed"
            elif child.tag == "skipped" and outcome == "passed":
                outcome, reason = "skipped", child.get("message", "")
        for row in told["fault"].split():
            seen = found[row][test]
            seen.outcomes[outcome] += 1
            seen.seconds += float(case.get("time", 0))
            if reason:
                seen.reasons.add(" ".join(reason.split()))
    return found


def sentence(tests: dict[str, Seen]) -> str:
    """``3 passed, 1 skipped (no strace here)``."""
    counts: dict[str, int] = defaultdict(int)
    for seen in tests.values():
        for outcome, count in seen.outcomes.items():
            counts[outcome] += count
    reasons = sorted({reason for seen in tests.values() for reason in seen.reasons})
    told = [f"{counts[outcome]} {outcome}" for outcome in sorted(counts, key=ORDER.__getitem__)]
    return ", ".join(told) + (f" ({'; '.join(reasons)})" if reasons else "") if told else "**no test**"


def table(rows: dict[str, tuple[str, str]], found: dict[str, dict[str, Seen]]) -> list[str]:
    lines = ["| # | fault | expected | seen | s |", "|-|-|-|-|-|"]
    for row, (fault, expected) in rows.items():
        tests = found.get(row, {})
        seconds = sum(seen.seconds for seen in tests.values())
        lines.append(f"| {row} | {fault} | {expected} | {sentence(tests)} | {seconds:.0f} |")
    return lines


def names(rows: dict[str, tuple[str, str]], found: dict[str, dict[str, Seen]]) -> list[str]:
    lines = []
    for row, (fault, _) in rows.items():
        lines += [f"**{row}** {fault}", ""]
        for test, seen in sorted(found.get(row, {}).items()):
            count = sum(seen.outcomes.values())
            lines.append(
                f"- `{test}`"
                + (f" ({count})" if count > 1 else "")
                + (" FAILED" if seen.outcomes["failed"] else "")
            )
        lines.append("")
    return lines


def page(found: dict[str, dict[str, Seen]], wall_s: float) -> str:
    good = [
        row for row in ROWS if found.get(row) and all(seen.outcomes["passed"] for seen in found[row].values())
    ]
    good = [row for row in good if not any(seen.outcomes["failed"] for seen in found[row].values())]
    where = f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}, {os.cpu_count()} cores"
    words = [
        INTRODUCTION,
        f"## The table\n\n**{len(good)} of {len(ROWS)} rows**, {time.strftime('%Y-%m-%d')} ({where}; {wall_s:.0f} s).\n",
        *table(ROWS, found),
        "\n## Seen elsewhere\n\nFailures of other checkpointers, from their issues and post-mortems.\n",
        *table(SEEN_ELSEWHERE, found),
        "\n## The tests\n\nWith the number of their cases, where there are several.\n",
        *names(ROWS | SEEN_ELSEWHERE, found),
    ]
    return "\n".join(words).rstrip() + "\n"


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--from"]:
        results = Path(arguments[1])
        wall_s = float(next(ET.parse(results).iter("testsuite")).get("time", 0))
        PAGE.write_text(page(read(results), wall_s))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        start_s = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-m", "fault", f"--junitxml={results}", *arguments]
        code = subprocess.run(command, check=False).returncode
        if code in (0, 1):  # else nothing was run
            PAGE.write_text(page(read(results), time.monotonic() - start_s))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
