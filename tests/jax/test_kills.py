"""Training with a stock `CheckpointManager` over our handlers, killed at any moment, and what the next one finds."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import flashpoint_jax
from tests.jax.faults import KEEP, Server, await_end, free_port, kill, log_lines, look, phase_of

_WAIT_S = 60.0
_NOTICED_S = 10.0
_SPARE_VERSIONS = 4  # that the pool may hold beyond those kept: one being saved, one being deleted, two free


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server()
    try:
        yield started
    finally:
        started.close()


class Job:
    """A job that is started, killed and looked at, over and over, in one root."""

    def __init__(self, server: Server, root: str, folder: Path, world_size: int) -> None:
        self.server = server
        self.root = root
        self.world_size = world_size
        self.folder = folder
        self.newest = 0  # the last step whose save was waited for, or that was found
        self.begun = 0
        self.version_nbytes = 0
        self.phases: Counter[str] = Counter()
        self.refused = 0
        self._attempts = 0

    def start(self, **kwargs: object) -> None:
        """Start all processes, on what the last attempt left."""
        self._attempts += 1
        port = free_port()
        self._logs = [str(self.folder / f"log-{self._attempts}.{rank}") for rank in range(self.world_size)]
        self.pids = [
            self.server.start(
                log_path=log, rank=rank, world_size=self.world_size, port=port, root=self.root, **kwargs
            )
            for rank, log in enumerate(self._logs)
        ]

    def lines(self, rank: int) -> list[list[str]]:
        return log_lines(self._logs[rank])

    def wait_for(self, word: str, *, rank: int = 0, times: int = 1) -> None:
        deadline = time.monotonic() + _WAIT_S
        while [line[0] for line in self.lines(rank)].count(word) < times:
            self._no_errors()
            assert time.monotonic() < deadline, f"rank {rank} never said {word!r}: {self.lines(rank)[-4:]}"
            time.sleep(0.0005)

    def end(self, rng: random.Random) -> None:
        """Kill all processes, one after the other, in any order."""
        rng.shuffle(self.pids)
        for pid in self.pids:
            kill(pid)
            time.sleep(rng.choice([0.0, rng.uniform(0, 0.02)]) if pid != self.pids[-1] else 0.0)
        for pid in self.pids:
            await_end(pid)
        phase = phase_of(look(self.root), self.lines(0), self.newest)
        self.phases[phase] += 1
        self._take_note(phase)

    def ended_by_itself(self) -> bool:
        """Wait until a process is dead, or all are done; whether they are."""
        deadline = time.monotonic() + _WAIT_S
        while self._all_run():
            if self._errors():
                self._await_a_death()  # of which whoever lives on may tell sooner than the kernel
                return False
            if all(["done"] in self.lines(rank) for rank in range(self.world_size)):
                self.finish()
                return True
            assert time.monotonic() < deadline, [self.lines(rank)[-4:] for rank in range(self.world_size)]
            time.sleep(0.002)
        return False

    def finish(self) -> None:
        """Let a job that saves a few steps come to its end."""
        for rank, pid in enumerate(self.pids):
            self.wait_for("done", rank=rank)
            kill(pid)  # JAX's own end takes its time
        for pid in self.pids:
            await_end(pid)
        self._take_note("end")

    def _take_note(self, where: str) -> None:
        for rank in range(self.world_size):
            for line in self.lines(rank):
                if line[0] == "recovered":
                    found = int(line[1])
                    assert self.newest <= found <= self.begun, (
                        f"killed in {where}; {self.newest} was complete"
                    )
                elif line[0] == "refused":
                    self.refused += 1
        self.newest = max(self.newest, *self._numbers("recovered"), *self._numbers("complete"))
        self.begun = max(self.begun, *self._numbers("saving"))
        found = look(self.root)
        self.version_nbytes = max(self.version_nbytes, found.version_nbytes)
        if self.version_nbytes:
            versions = found.pool_nbytes / self.version_nbytes
            assert versions <= KEEP + _SPARE_VERSIONS, f"{versions:.1f} versions are held: {found}"

    def _numbers(self, word: str) -> list[int]:
        return [
            0,
            *(int(line[1]) for n in range(self.world_size) for line in self.lines(n) if line[0] == word),
        ]

    def _all_run(self) -> bool:
        return all(os.path.exists(f"/proc/{pid}") for pid in self.pids)

    def _await_a_death(self) -> None:
        """Wait a little until a process is dead: else the errors of the others are errors."""
        deadline = time.monotonic() + _NOTICED_S
        while self._all_run():
            if time.monotonic() > deadline:
                self._no_errors()
            time.sleep(0.002)

    def _errors(self) -> list[str]:
        return [
            f"rank {rank}: " + json.loads(" ".join(line[1:]))
            for rank in range(self.world_size)
            for line in self.lines(rank)
            if line[0] == "error"
        ]

    def _no_errors(self) -> None:
        assert not self._errors(), self._errors()[0]


def kill_at_random(
    server: Server, root: str, folder: Path, *, world_size: int, seed: int, kills: int
) -> None:
    rng = random.Random(seed)
    job = Job(server, root, folder, world_size)
    for n in range(kills):
        job.start(waits=rng.random() < 0.5, slow_seed=rng.choice([None, rng.getrandbits(32)]))
        if n % 8 == 7:  # while it starts, or checks what the last one left
            job.wait_for("start")
            time.sleep(rng.uniform(0, 0.05))
        else:
            for rank in range(world_size):
                job.wait_for("recovered", rank=rank)
            job.wait_for(rng.choice(["saving", "staged", "complete"]), times=rng.randint(1, 4))
            time.sleep(rng.uniform(0, 0.02))
        job.end(rng)
    job.start(saves=3)
    job.finish()
    found = look(root)
    assert not found.markers
    assert sorted(found.steps)[-KEEP:] == [job.newest - 1, job.newest]
    assert found.linked == KEEP * world_size, "something is held by a version that is no more"
    print(
        f"{kills} kills of {world_size}:",
        json.dumps(dict(sorted(job.phases.items()))),
        job.newest,
        job.refused,
    )
    return sum(job.phases[phase] for phase in ("stage", "write", "rename", "retire"))


@pytest.mark.fault(1, 2, 3, 5, "G")
def test_one_process_killed_at_14_random_moments(server: Server, job_root: str, tmp_path: Path) -> None:
    assert kill_at_random(server, job_root, tmp_path, world_size=1, seed=0, kills=14)


@pytest.mark.fault(1, 2, 3)
def test_two_processes_killed_at_6_random_moments(server: Server, job_root: str, tmp_path: Path) -> None:
    kill_at_random(server, job_root, tmp_path, world_size=2, seed=0, kills=6)


def test_a_step_that_a_crash_cut_off_is_saved_again(job_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orbax removes what is left of it, in a thread, while our first save cleans up too."""
    debris = Path(job_root, "1.orbax-checkpoint-tmp", "default.orbax-checkpoint-tmp")
    debris.mkdir(parents=True)
    for name in (".metadata", "rank00000-0.safetensors", "rank00007-0.safetensors", *map(str, range(20))):
        (debris / name).write_bytes(b"x")
    unlink = os.unlink

    def slow(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.005)
        unlink(*args, **kwargs)

    monkeypatch.setattr(os, "unlink", slow)
    with ocp.CheckpointManager(job_root, handler_registry=flashpoint_jax.registry()) as m:
        m.save(1, args=ocp.args.StandardSave({"w": np.arange(9)}))
        m.wait_until_finished()
        assert np.array_equal(m.restore(1)["w"], np.arange(9))


def test_what_another_program_is_about_to_rename_is_not_taken_for_debris(job_root: str) -> None:
    """An item is complete, its marker gone, and its step not renamed yet: alive a moment ago, or dead for a while."""
    age_s = {1: 0.0, 2: 3600.0}
    for step, age in age_s.items():
        folder = Path(job_root, f"{step}.orbax-checkpoint-tmp", "default.orbax-checkpoint-tmp")
        folder.mkdir(parents=True)
        for name in (".metadata", "rank00000-0.safetensors"):
            (folder / name).write_bytes(b"x")
            os.utime(folder / name, (time.time() - age, time.time() - age))
    with ocp.CheckpointManager(job_root, handler_registry=flashpoint_jax.registry()) as m:
        m.save(3, args=ocp.args.StandardSave({"w": np.arange(9)}))
        m.wait_until_finished()
    left = {path.parts[-3]: path.name for path in Path(job_root).glob("*-tmp/*/.metadata")}
    assert left == {"1.orbax-checkpoint-tmp": ".metadata"}
    assert not list(Path(job_root).glob("2.*/*/rank*"))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("world_size", "kills"), [(1, 140), (2, 60)])
def test_killed_at_200_random_moments(
    server: Server, job_root: str, tmp_path: Path, world_size: int, kills: int
) -> None:
    inside = kill_at_random(server, job_root, tmp_path, world_size=world_size, seed=1, kills=kills)
    assert inside >= kills / 5


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_before_every_change_to_the_file_system(
    server: Server, job_root: str, tmp_path: Path, world_size: int
) -> None:
    """Of a start on a crash's debris, three saves, and what Orbax removes for them."""
    job = Job(server, job_root, tmp_path, world_size)
    points = 0
    while True:
        points += 1
        job.start(saves=3, kill_at=points)
        if job.ended_by_itself():
            break
        job.end(random.Random(points))
    print(
        f"killed before each of {points - 1} changes:",
        json.dumps(dict(sorted(job.phases.items()))),
        job.newest,
    )
    assert points >= 40
    job.start(saves=3)
    job.finish()
    assert look(job_root).linked == KEEP * world_size
