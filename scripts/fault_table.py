"""Run the fault table (`tests/faults/table.py`) and write `docs/faults.md` from what was seen.

    python -m scripts.fault_table [arguments of pytest]
    python -m scripts.fault_table --from RESULTS.xml ...    # of runs that were made already

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
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.table import PAGE, ROWS, SEEN_ELSEWHERE, marked_tests

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
faults prints what it did. The interleavings that no real test meets are the simulator's part
(`python -m flashpoint simulate`, [design.md](design.md) section 11). A job of three nodes that saves every second while
random faults happen to them is `python -m tests.faults.soak --seconds 3600`.
"""

OUTCOMES = ("failed", "passed", "skipped", "not run")


@dataclass
class Seen:
    """What became of one test, all its parameters together.

    Attributes:
        trials: faults that it put in, as far as it tells (`record_property("trials", ...)`).
    """

    outcomes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    reasons: set[str] = field(default_factory=set)
    seconds: float = 0.0
    trials: int = 0


def read(*paths: Path) -> dict[str, Seen]:
    """What was seen of each test, from JUnit files of pytest's; a later one counts."""
    cases: dict[str, tuple[ET.Element, int]] = {}
    for path in paths:
        for case in ET.parse(path).iter("testcase"):
            told = {item.get("name"): item.get("value", "") for item in case.iter("property")}
            if "fault" in told:
                cases[told["test"]] = case, int(told.get("trials", 0))
    found: dict[str, Seen] = defaultdict(Seen)
    for name, (case, trials) in cases.items():
        outcome, reason = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                outcome = "failed"
            elif child.tag == "skipped" and outcome == "passed":
                outcome, reason = "skipped", child.get("message", "")
        seen = found[name.partition("[")[0]]
        seen.outcomes[outcome] += 1
        seen.trials += trials
        seen.seconds += float(case.get("time", 0))
        if reason:
            seen.reasons.add(" ".join(reason.split()))
    return found


class Page:
    """The page, of the tests that are marked and of what was seen of them."""

    def __init__(self, found: dict[str, Seen], wall_s: float, runs: int = 1) -> None:
        self.wall = f"{wall_s:.0f} s" + (f" in {runs} runs" if runs > 1 else "")
        self.rows = {
            row: {test: found.get(test, Seen(defaultdict(int, {"not run": 1}))) for test in sorted(tests)}
            for row, tests in marked_tests().items()
        }

    def text(self) -> str:
        good = [row for row in ROWS if self.is_good(row)]
        where = f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
        parts = [
            INTRODUCTION,
            "## The table\n",
            f"**{len(good)} of {len(ROWS)} rows**, {time.strftime('%Y-%m-%d')} ({where}, {os.cpu_count()} cores, "
            f"{self.wall}).\n",
            *self.table(ROWS),
            "\n## Seen elsewhere\n\nFailures of other checkpointers, from their issues and post-mortems.\n",
            *self.table(SEEN_ELSEWHERE),
            "\n## The tests\n\nWith the number of their cases, where there are several.\n",
            *self.names(ROWS | SEEN_ELSEWHERE),
        ]
        return "\n".join(parts).rstrip() + "\n"

    def is_good(self, row: str) -> bool:
        """Some case of each test has passed, and none has failed."""
        tests = self.rows[row].values()
        return bool(tests) and all(seen.outcomes["passed"] and not seen.outcomes["failed"] for seen in tests)

    def table(self, rows: dict[str, tuple[str, str]]) -> list[str]:
        lines = ["| # | fault | expected | seen | s |", "|-|-|-|-|-|"]
        for row, (fault, expected) in rows.items():
            seconds = sum(seen.seconds for seen in self.rows[row].values())
            lines.append(f"| {row} | {fault} | {expected} | {self.sentence(row)} | {seconds:.0f} |")
        return lines

    def sentence(self, row: str) -> str:
        """``3 passed, 1 skipped (no tc here)``."""
        counts: Counter[str] = Counter()
        for seen in self.rows[row].values():
            counts.update(seen.outcomes)
        trials = sum(seen.trials for seen in self.rows[row].values())
        reasons = sorted({reason for seen in self.rows[row].values() for reason in seen.reasons})
        told = [f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome]]
        told += [f"{trials:,} trials"] if trials else []
        return ", ".join(told) + (f" ({'; '.join(reasons)})" if reasons else "") if told else "**no test**"

    def names(self, rows: dict[str, tuple[str, str]]) -> list[str]:
        lines = []
        for row, (fault, _) in rows.items():
            lines += [f"**{row}** {fault}", ""]
            for test, seen in self.rows[row].items():
                count = sum(seen.outcomes.values())
                failed = ": failed" if seen.outcomes["failed"] else ""
                lines.append(f"- `{test}`" + (f" ({count})" if count > 1 else "") + failed)
            lines.append("")
        return lines


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--from"]:
        files = [Path(name) for name in arguments[1:]]
        suites = [next(ET.parse(file).iter("testsuite")) for file in files]
        wall_s = sum(float(suite.get("time", 0)) for suite in suites)
        PAGE.write_text(Page(read(*files), wall_s, len(files)).text())
        return 0
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        start_s = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-m", "fault", "-n", "2", "--dist", "worksteal"]
        command += [f"--junitxml={results}", "-o", "junit_family=xunit1", *arguments]
        code = subprocess.run(command, check=False).returncode
        if code in (0, 1):  # else nothing was run
            PAGE.write_text(Page(read(results), time.monotonic() - start_s).text())
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
