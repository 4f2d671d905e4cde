"""A job of three nodes that saves every second while random faults happen to it.

    python -m tests.faults.soak --seconds 3600 --seed 0

After each fault it must save and replicate again; after each restart every rank has, to the last bit, a state that was
saved, and none older than it may be; and neither tmpfs nor processes grow. Prints what happened, exits with 1 after a
violation.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tests.torch.nodes import Cluster, last_of, lines_of, train

NODES: Final = 3
KIB: Final = 1024  # of a rank's state
INTERVAL_S: Final = 1.0
CALM_S: Final = 60.0  # for a step to be replicated again after a fault
PAUSE_S: Final = (1.0, 4.0)  # between that and the next fault
SETTINGS: Final = {"commit_timeout_s": 5.0, "overlap_wait_s": 1.0}


class Violation(Exception):
    """Something that must never be."""


class Soak:
    """One run; `run` it."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.cluster = Cluster(NODES, copies=1, **SETTINGS)
        self.tally: Counter[str] = Counter()
        self.replicated = self.complete = self.begun = 0  # steps, over all starts
        self.samples: list[dict[str, float]] = []
        self._starts = 0
        self.log = ""

    def run(self, seconds: float) -> dict[str, Any]:
        faults: list[Callable[[], None]] = [
            self.kill_an_agent, self.stop_an_agent, self.stop_a_rank, self.kill_all_ranks,
            self.lose_a_node, self.flip_a_bit,
        ]  # fmt: skip
        start_s = time.monotonic()
        try:
            self.start(lambda step: step == 0)
            while time.monotonic() - start_s < seconds:
                fault = self.rng.choice(faults)
                fault()
                self.tally[fault.__name__] += 1
                self.await_progress(fault.__name__)
                self.rest(self.rng.uniform(*PAUSE_S))
            self.is_flat()
        finally:
            self.cluster.close()
        return {
            "seconds": round(time.monotonic() - start_s),
            "faults": dict(self.tally),
            "starts": self._starts,
            "saves": self.begun,
            "newest_replicated": self.replicated,
            "first": self.samples[0],
            "last": self.samples[-1],
            "peak_tmpfs_mib": max(sample["tmpfs_mib"] for sample in self.samples),
        }

    # ---- faults -----------------------------------------------------------------------------------

    def kill_an_agent(self) -> None:
        self.rng.choice(self.cluster.nodes).kill_agent()

    def stop_an_agent(self) -> None:
        pids = self.rng.choice(self.cluster.nodes).agents()
        self.stop(pids[0] if pids else None, self.rng.uniform(0.5, 4.0))

    def stop_a_rank(self) -> None:
        self.stop(self.rng.choice(self.cluster.workers).process.pid, self.rng.uniform(0.2, 3.0))

    def stop(self, pid: int | None, seconds: float) -> None:
        if pid is None:
            return
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def kill_all_ranks(self) -> None:
        self.cluster.kill_ranks()
        self.read()
        complete = self.complete
        self.start(lambda step: complete <= step <= self.begun)

    def lose_a_node(self) -> None:
        self.cluster.lose(self.rng.randrange(NODES))
        self.read()
        replicated = self.replicated
        self.start(lambda step: replicated <= step <= self.begun)

    def flip_a_bit(self) -> None:
        """In one object of one node, while all are down."""
        self.cluster.kill_ranks()
        self.read()
        replicated = self.replicated
        node = self.rng.choice(self.cluster.nodes)
        paths = sorted(Path(node.job_root).glob("step-*_ckpt/rank*.safetensors"))
        with suppress(FileNotFoundError, IndexError):  # its agent may give it up just now
            with self.rng.choice(paths).open("r+b") as file:
                offset = self.rng.randrange(os.fstat(file.fileno()).st_size)
                byte = os.pread(file.fileno(), 1, offset)[0]
                os.pwrite(file.fileno(), bytes([byte ^ 1 << self.rng.randrange(8)]), offset)
        self.start(lambda step: replicated <= step <= self.begun)

    # ---- looking ----------------------------------------------------------------------------------

    def start(self, is_right: Callable[[int], bool]) -> None:
        """Start the job; `train` compares every bit of what each rank recovers."""
        self._starts += 1
        self.log = str(self.folder / f"log-{self._starts}")
        self.cluster.start(
            train, self.log, waits_for="replicated", patience_s=6.0, interval_s=INTERVAL_S, kib=KIB
        )
        deadline = time.monotonic() + CALM_S
        while not all(any(line[0] == "recovered" for line in lines) for lines in self.lines()):
            self.look_at_ranks()
            if time.monotonic() > deadline:
                raise Violation(f"not recovered within {CALM_S:g} s:\n{self.cluster.agent_logs()}")
            time.sleep(0.02)
        steps = {last_of(lines, "recovered") for lines in self.lines()}
        if len(steps) != 1 or not is_right(next(iter(steps))):
            raise Violation(
                f"recovered {steps}; complete {self.complete}, replicated {self.replicated}, begun {self.begun}"
            )

    def await_progress(self, after: str) -> None:
        """Wait until every rank has replicated a step that it began from now on."""
        begun = max(last_of(lines, "saving") for lines in self.lines())
        start_s = time.monotonic()
        while not all(last_of(lines, "replicated") > begun for lines in self.lines()):
            self.look_at_ranks()
            if time.monotonic() - start_s > CALM_S:
                told = [lines[-4:] for lines in self.lines()]
                raise Violation(f"after {after} nothing is replicated: {told}\n{self.cluster.agent_logs()}")
            time.sleep(0.05)
        self.read()

    def rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.look_at_ranks()
            time.sleep(0.2)
        self.samples.append(self.sample())

    def look_at_ranks(self) -> None:
        for worker in self.cluster.workers:
            if worker.process.exitcode is not None:
                try:
                    raise Violation(f"a rank ended: {worker.answer()!r}")
                except AssertionError as error:
                    raise Violation(f"a rank failed: {error}") from None

    def lines(self) -> list[list[list[str]]]:
        return lines_of(self.log, self.cluster)

    def read(self) -> None:
        """What ranks were told of their saves so far. A step that was begun, lost and begun again counts once."""
        for lines in self.lines():
            self.begun = max(self.begun, last_of(lines, "saving"))
        # Of this start only: what was complete before it and lost with a node since may be gone.
        self.complete = max(
            max(last_of(lines, w) for w in ("recovered", "complete")) for lines in self.lines()
        )
        self.replicated = max(last_of(lines, "replicated") for lines in self.lines())

    def sample(self) -> dict[str, float]:
        agents = [memory_mib(pid) for pid in self.cluster.agents()]
        ranks = [memory_mib(worker.process.pid) for worker in self.cluster.workers]
        fds = [len(os.listdir(f"/proc/{pid}/fd")) for pid in self.cluster.agents()]
        return {
            "tmpfs_mib": round(self.cluster.nbytes() / (1 << 20), 1),
            "agents_mib": round(max(agents, default=0), 1),
            "ranks_mib": round(max(ranks, default=0), 1),
            "agent_fds": max(fds, default=0),
        }

    def is_flat(self) -> None:
        """The second half of the run takes no more than the first."""
        half = len(self.samples) // 2
        if half < 5:
            return
        for name, slack in (
            ("tmpfs_mib", 4.0),
            ("agents_mib", 16.0),
            ("ranks_mib", 32.0),
            ("agent_fds", 24.0),
        ):
            early, late = ([one[name] for one in part] for part in (self.samples[:half], self.samples[half:]))
            if statistics.median(late) > statistics.median(early) + slack:
                raise Violation(
                    f"{name} has grown from {statistics.median(early)} to {statistics.median(late)}"
                )


def memory_mib(pid: int) -> float:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
    return 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(chosen.seed, Path(folder))
        try:
            print(json.dumps(soak.run(chosen.seconds)))
        except Violation as violation:
            print(f"seed {chosen.seed}, after {dict(soak.tally)}: {violation}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
