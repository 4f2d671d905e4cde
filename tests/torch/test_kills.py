"""Processes that are killed at any moment, and what the next ones find."""

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.torch.faults import (
    Launcher,
    Look,
    check,
    digests,
    log_lines,
    look,
    phase_of,
    report,
    train,
)

SLACK_BYTES = 64 << 10  # of a job root, for its epoch file, folders and the like
SETTINGS = {"chunk_bytes": 64 << 10, "commit_timeout_s": 20.0, "recovery_timeout_s": 20.0}


INSIDE = ("stage", "write", "commit", "retire")


class Job:
    """A job that is started, killed and looked at, over and over, in one job root."""

    def __init__(
        self, job_root: str, folder: Path, *, keep: int, world_size: int = 1, kib: int = 512
    ) -> None:
        self.job_root = job_root
        self.keep = keep
        self.kib = kib
        self.settings = {**SETTINGS, "keep": keep}
        self.launcher = Launcher(world_size)
        self.folder = folder
        self.folder.mkdir(exist_ok=True)
        self.version_bytes = 0
        self.newest = 0  # step that some rank was told is complete
        self.begun = 0
        self.compared = 0
        self.phases: Counter[str] = Counter()
        self._log = 0
        self._digests: dict[str, str] = {}

    def train(self, **kwargs: object):
        self._log += 1
        self.log_path = str(self.folder / f"log-{self._log}")
        return self.launcher.start(
            train, self.job_root, self.log_path, kib=self.kib, **{**self.settings, **kwargs}
        )

    def lines(self, rank: int = 0) -> list[list[str]]:
        return log_lines(self.log_path, rank)

    def wait_for(self, word: str, *, rank: int = 0) -> None:
        deadline = time.monotonic() + 30
        while word not in (line[0] for line in self.lines(rank)):
            assert time.monotonic() < deadline, f"rank {rank} never said {word!r}: {self.lines(rank)}"
            time.sleep(0.0005)

    def let_run(self, rng: random.Random) -> None:
        """Give a started job a random time: until its start, its first save, or a later one."""
        stop = rng.choice(["start", "recovered", "complete", "complete"])
        self.wait_for(stop)
        time.sleep(rng.uniform(0, 0.03 if stop == "start" else 0.01))

    def settle(self, *, spare: int = 0) -> str:
        """Look at what a killed job left; then recover in fresh processes, and check everything.

        Args:
            spare: versions that may be held beyond the budget.
        """
        found = look(self.job_root)
        phase = phase_of(found, self.lines(), keep=self.keep)
        self.phases[phase] += 1
        for rank in range(self.launcher.world_size):
            for line in self.lines(rank):
                if line[0] == "complete":
                    self.newest = max(self.newest, int(line[1]))
                elif line[0] == "saving":
                    self.begun = max(self.begun, int(line[1]))
        where = f"killed in phase {phase}: {self.lines()[-4:]}, {found}"
        self._compare_bytes(where)
        self._check_budget(found, where, spare)

        answers = self.launcher.run(check, self.job_root, kib=self.kib, **self.settings)
        after = look(self.job_root)
        where = f"{where}; then {answers}, {after}"
        for answer in answers:
            assert answer["exact"], where
            assert answer["step"] == answers[0]["step"], where
            assert self.newest <= answer["step"] <= self.begun, f"{self.newest} was complete; {where}"
            assert answer["rejected"] == 0, where
        self.newest = answers[0]["step"]  # what was recovered once is never lost again
        assert not after.markers, where
        assert not after.strays, where
        assert after.containers == after.manifests, where
        assert self.newest == max(after.complete, default=0), where
        self._check_budget(after, where, spare)
        return phase

    def _check_budget(self, found: Look, where: str, spare: int = 0) -> None:
        self.version_bytes = max(self.version_bytes, found.version_bytes)
        if self.version_bytes:
            versions = self.keep + 1 + spare
            held = (found.nbytes - found.manifest_bytes - SLACK_BYTES) / self.version_bytes
            assert held <= versions, f"{held:.2f} versions are held instead of {versions}: {where}"

    def _compare_bytes(self, where: str) -> None:
        """A complete version that was there before has the bytes it had."""
        now = digests(self.job_root)
        has_saved = any(line[0] == "complete" for line in self.lines())
        for name, digest in now.items():
            if name in self._digests:
                assert digest == self._digests[name], f"{name} has changed: {where}"
                self.compared += has_saved
        self._digests = now


def kill_one_process(job_root: str, folder: Path, seeds: range, kills: int) -> None:
    phases: Counter[str] = Counter()
    compared = 0
    for seed in seeds:
        rng = random.Random(seed)
        job = Job(f"{job_root}/{seed}", folder / str(seed), keep=1 + seed % 2 * 2)
        for _ in range(kills):
            slow_seed = rng.choice([None, rng.getrandbits(32)])
            [worker] = job.train(waits=rng.random() < 0.5, slow_seed=slow_seed)
            job.let_run(rng)
            worker.kill()
            assert worker.join() == -9
            job.settle()
        report(f"seed {seed}:", **job.phases, compared=job.compared, recovered=job.newest)
        phases += job.phases
        compared += job.compared
    report(f"{len(seeds) * kills} kills of one process:", **phases)
    assert sum(phases[phase] for phase in INSIDE) >= phases.total() / 4
    assert phases["init"] + phases["recover"] >= phases.total() / 20
    assert phases["commit"] + phases["retire"] >= 1
    assert compared >= kills / 4  # versions from before a restart, after saves that came after it


def kill_two_ranks(job_root: str, folder: Path, seeds: range, kills: int) -> None:
    phases: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        job = Job(f"{job_root}/{seed}", folder / str(seed), keep=1 + seed % 2, world_size=2)
        for _ in range(kills):
            workers = job.train(waits=rng.random() < 0.5, slow_seed=rng.choice([None, rng.getrandbits(32)]))
            job.let_run(rng)
            rng.shuffle(workers)
            workers[0].kill()
            time.sleep(rng.choice([0.0, rng.uniform(0, 0.03)]))  # the other goes on alone
            workers[1].kill()
            assert workers[0].join() == -9
            workers[1].join()  # it may have ended by itself, with an error, if its peer died before the start
            job.settle()
        report(f"seed {seed}, two ranks:", **job.phases, compared=job.compared, recovered=job.newest)
        phases += job.phases
        # One rank alone, on what two have left.
        job.launcher = Launcher(1)
        job.settle()
    report(f"{len(seeds) * kills} kills of two ranks:", **phases)
    assert sum(phases[phase] for phase in INSIDE) >= phases.total() / 4


@pytest.mark.fault(1, 2, 3, 5, "G")
def test_killed_at_160_random_moments(job_root: str, tmp_path: Path) -> None:
    kill_one_process(job_root, tmp_path, range(4), 40)


@pytest.mark.fault(1, 2, 3, 5)
def test_two_ranks_killed_at_40_random_moments(job_root: str, tmp_path: Path) -> None:
    kill_two_ranks(job_root, tmp_path, range(2), 20)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kill", [kill_one_process, kill_two_ranks])
def test_killed_at_2000_random_moments(job_root: str, tmp_path: Path, kill: Callable[..., None]) -> None:
    kill(job_root, tmp_path, range(100, 120), 100)


@pytest.mark.fault(1, 2, 3, 10)
def test_killed_before_every_change_to_the_file_system(job_root: str, tmp_path: Path) -> None:
    """Of a start on a crash's debris, a recovery, three saves, and the retirement of what is older.

    A kill after one change and before the next finds the same files wherever it comes, so these are all
    moments there are, but for those within a copy (below).
    """
    job = Job(job_root, tmp_path, keep=1, kib=64)
    points = 0
    killed = True
    while killed:
        points += killed
        [worker] = job.train(saves=3, kill_at=points)
        killed = worker.join() == -9
        job.settle()
    report(f"killed before each of {points - 1} changes:", **job.phases)
    assert points >= 35
    assert all(job.phases[phase] for phase in ("init", "stage", "write", "commit", "retire"))


@pytest.mark.fault(3, 10)
def test_one_of_two_ranks_killed_before_its_changes(job_root: str, tmp_path: Path) -> None:
    """So that the protocol between the ranks is cut everywhere; the other is killed a little later."""
    rng = random.Random(0)
    job = Job(job_root, tmp_path, keep=1, world_size=2, kib=64)
    for _ in range(2):  # the second time on what the first has left, as all that follow
        changes = [worker.answer() for worker in job.train(saves=2)]
    job.settle()
    points = [(rank, point) for rank in (0, 1) for point in range(1, changes[rank] + 1)]
    for rank, point in points[::2]:
        workers = job.train(saves=10**9, kill_at=point, kill_rank=rank)
        assert workers[rank].join() == -9
        time.sleep(rng.choice([0.0, rng.uniform(0, 0.05)]))
        workers[1 - rank].kill()
        workers[1 - rank].join()
        job.settle()
    report(f"a rank killed before each of {len(points[::2])} changes:", **job.phases)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.fault("H")
def test_one_rank_is_killed_and_the_other_goes_on(job_root: str, tmp_path: Path, victim: int) -> None:
    """Its saves fail within their deadline and name the missing rank; what was complete stays."""
    job = Job(job_root, tmp_path, keep=1, world_size=2)
    workers = job.train(commit_timeout_s=0.3)
    job.wait_for("complete")
    time.sleep(0.05)
    workers[victim].kill()
    workers[victim].join()
    survivor = 1 - victim
    deadline = time.monotonic() + 20
    while len(failed := [line for line in job.lines(survivor) if line[0] == "failed"]) < 4:
        assert time.monotonic() < deadline, failed
        time.sleep(0.01)
    workers[survivor].kill()
    workers[survivor].join()
    for _, step, *error in failed:
        assert f"step {step}" in " ".join(error)
        assert f"rank {victim}" in " ".join(error)
    # However many saves failed, what they took was given back, up to one buffer, which goes with the next.
    job.settle(spare=1)
    for worker in job.train(saves=1):
        worker.answer()
    job.settle()


def test_children_that_outlive_a_killed_trainer_hold_nothing_up(job_root: str, tmp_path: Path) -> None:
    job = Job(job_root, tmp_path, keep=1)
    for seed in range(8):
        [worker] = job.train(forks=True, slow_seed=seed)
        job.wait_for("forked")
        time.sleep(0.002 * seed)
        worker.kill()
        worker.join()
        job.settle()
    report("8 kills of a trainer with children:", **job.phases)


@pytest.mark.parametrize("where", ["half staged", "half sealed", "half a manifest"])
@pytest.mark.fault(1, 2)
def test_killed_in_the_middle_of_a_copy(job_root: str, tmp_path: Path, where: str) -> None:
    """Between two file-system calls: with half the bytes of a buffer or of the manifest written."""
    job = Job(job_root, tmp_path, keep=2)
    for number in (1, 3, 7):  # into new buffers, and into recycled ones
        [worker] = job.train(kill_in=(where, number))
        assert worker.join() == -9
        job.settle()
    assert job.newest >= 3
