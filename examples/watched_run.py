"""A training job that a demo starts, watches, kills, and starts again: the same commands, as often as it takes."""

import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

PATIENCE_S = 120  # without a new step for so long, the job hangs
TAG = "FLASHPOINT_DEMO"  # an environment variable that marks all processes of the job

console = Console(highlight=False)


class DemoFailed(Exception):
    pass


class Run:
    """A training run in a folder of its own: `checkpoints/` for Flashpoint, and the journals beside it."""

    survives = ""  # the word that marks the command lines of those that a kill of the job spares

    def __init__(self, folder: Path, steps: int, save_every: int, seed: int, ranks: int = 2) -> None:
        self.folder, self.steps, self.save_every, self.seed = folder, steps, save_every, seed
        self.ranks = ranks
        self.attempt = 0
        self.kills: list[dict] = []
        folder.mkdir()

    def commands(self) -> list[tuple[list, dict]]:
        """What starts the job: the command of each torchrun, and what it finds in its environment."""
        launcher = f"-m torch.distributed.run --standalone --nproc-per-node {self.ranks}".split()
        return [([sys.executable, *launcher, *self.training(self.folder / "checkpoints")], {})]

    def training(self, root: Path) -> list:
        """The part of a command that torchrun runs in each rank."""
        script = Path(__file__).with_name("train_gpt.py")
        arguments = f"""
            train --root {root} --journal {self.folder}/attempt{self.attempt}
            --steps {self.steps} --save-every {self.save_every} --seed {self.seed}
        """.split()
        return [script, *arguments]

    def start(self) -> None:
        self.attempt += 1
        self.started = self.progressed = time.time()
        self.output = self.folder / f"attempt{self.attempt}.txt"
        self.processes = []
        with self.output.open("a") as output:
            for command, environment in self.commands():
                self.processes.append(
                    subprocess.Popen(
                        command,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=os.environ | {TAG: str(self.folder), "TMPDIR": str(self.folder)} | environment,
                        start_new_session=True,  # Ctrl-C reaches only the demo, which then cleans up
                    )
                )

    def events(self, attempt: int, rank: int) -> list[dict]:
        try:
            lines = (self.folder / f"attempt{attempt}-rank{rank}.jsonl").read_text().split("\n")
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines[:-1]]  # what follows the last newline is no whole line

    def step(self) -> int:
        """The last step that any rank has done in this attempt."""
        ranks = [self.events(self.attempt, rank) for rank in range(self.ranks)]
        return max((event["step"] for events in ranks for event in events if "step" in event), default=0)

    def running(self) -> bool:
        """True while the job runs, False when it is done; raises when it failed or hangs."""
        codes = [process.poll() for process in self.processes]
        if not any(codes):  # each is at work or done
            if None not in codes:
                return False
            if time.time() - self.progressed < PATIENCE_S:
                return True
        what = f"ended with {next(filter(None, codes))}" if any(codes) else "hangs"
        printed = self.output.read_text(errors="replace")
        printed = printed[max(0, printed.find("Traceback")) :]  # a rank's comes before torchrun's
        raise DemoFailed(f"{self.folder.name}, attempt {self.attempt}, {what}:\n{printed[:4000]}")

    def until(self, step: int, status) -> bool:
        """Watch the job up to this step; False if it ended before."""
        before = -1
        while self.running():
            if (now := self.step()) != before:
                before, self.progressed = now, time.time()
                status.update(f"{self.folder.name}: step {now} of {self.steps}")
            if now >= step:
                return True
            time.sleep(0.02)
        return False

    def unfinished(self) -> dict[int, list[int]]:
        """{step: local ranks} of the marker files that lie beside a step's folder while it is being saved."""
        found: dict[int, list[int]] = {}
        for folder, _, names in os.walk(self.folder):
            for name in names:
                marker = re.fullmatch(r"step-(\d+)_ckpt__(\d+)__unfinished", name)
                if marker and self.mtime(Path(folder, name)) >= self.started:  # not one of an attempt before
                    found.setdefault(int(marker[1]), []).append(int(marker[2]))
        return found

    @staticmethod
    def mtime(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except FileNotFoundError:  # gone since we listed it
            return 0.0

    def until_inside_a_save(self, usual_s: float, last_step: int) -> None:
        """Return at a random moment of the next save, however short a save is; give up after `last_step`."""
        while self.running() and self.step() < last_step:
            # A look for markers is quick; the look at the job, above, is not, and so it is rarer.
            deadline = time.time() + 0.5
            while time.time() < deadline:
                if self.unfinished():
                    time.sleep(random.uniform(0, usual_s))
                    if self.unfinished():
                        return
                    usual_s /= 2  # too late for this save; a bit earlier in the next one
                time.sleep(0.0005)

    def kill(self) -> None:
        """SIGKILL torchrun and all ranks at once."""
        if not self.running():
            return  # too late
        self.sweep(spare=self.survives)
        killed_at = time.time()
        for process in self.processes:
            process.wait()
        # What lies there now tells for certain whether the kill cut a save off.
        self.kills.append({"at": killed_at, "step": self.step(), "unfinished": self.unfinished()})
        where = " in the middle of a save" if self.kills[-1]["unfinished"] else ""
        console.print(f"{self.folder.name}: SIGKILL after step {self.kills[-1]['step']}{where}")

    def sweep(self, variable: str = TAG, value: str | None = None, spare: str = "") -> None:
        """SIGKILL every process with our mark in its environment, until there is none.

        torchrun puts each rank in a session of its own, so there is no one process group to aim at.
        """
        mark, spare = f"{variable}={value or self.folder}".encode(), spare.encode()
        while True:
            found = []
            for entry in os.scandir("/proc"):
                try:
                    if not entry.name.isdigit() or mark not in words(entry, "environ"):
                        continue
                    if not spare or spare not in words(entry, "cmdline"):
                        os.kill(int(entry.name), signal.SIGKILL)
                        found.append(entry.name)
                except OSError:  # another user's, or gone
                    pass
            if not found:
                return
            time.sleep(0.005)

    # What the journals say afterwards.

    def losses(self, only: int | None = None) -> dict[tuple[int, int], str]:
        """(rank, step): loss, of one attempt or all. A step that was done again counts as it was done last."""
        found = {}
        for attempt in [only] if only else range(1, self.attempt + 1):
            for rank in range(self.ranks):
                found |= {(rank, e["step"]): e["loss"] for e in self.events(attempt, rank) if "step" in e}
        return found

    def saves(self) -> list[dict]:
        """For each save: the seconds to its moments on the slower rank; the bytes of all ranks."""
        found = []
        for attempt in range(1, self.attempt + 1):
            ranks = [[e for e in self.events(attempt, rank) if "saved" in e] for rank in range(self.ranks)]
            for parts in zip(*ranks, strict=False):  # a kill may have come between two ranks' lines
                names = set.intersection({"blocking", "complete", "replicated"}, *map(set, parts))
                worst = {name: max(part[name] for part in parts) for name in names}
                found.append(worst | {"bytes": sum(part["saved"] for part in parts)})
        return found

    def step_seconds(self) -> float:
        times = [e["at"] for e in self.events(self.attempt, 0) if "step" in e]
        return statistics.median(b - a for a, b in itertools.pairwise(times))

    def recovery(self, kill: int) -> dict:
        """What the attempt after this kill (from 0) says of its start."""
        ranks = [self.events(kill + 2, rank) for rank in range(self.ranks)]
        resumed = [e for events in ranks for e in events if "resumed" in e]
        if len(resumed) != self.ranks:
            raise DemoFailed(f"attempt {kill + 2} did not resume: it found no complete step")
        return {
            "step": resumed[0]["resumed"],
            "tiers": [e["tier"] for e in resumed],
            "seconds": max(e["seconds"] for e in resumed),
            "training": min(e["at"] for events in ranks for e in events if "step" in e),
        }


def words(process: os.DirEntry, name: str) -> list[bytes]:
    return Path(process, name).read_bytes().split(b"\0")


def equal_losses(one: Run, two: Run) -> tuple[int, int]:
    """How many losses of two runs are equal in every bit, and of how many."""
    a, b = one.losses(), two.losses()
    expected = {(rank, step) for rank in range(one.ranks) for step in range(1, one.steps + 1)}
    if a.keys() != expected or b.keys() != expected:
        raise DemoFailed("a step is missing in the journals")
    return sum(a[key] == b[key] for key in expected), len(expected)
