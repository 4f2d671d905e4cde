"""A job with a real agent, killed at random moments: what looks drained is right, and draining goes on."""

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flashpoint.config import FlashpointConfig
from flashpoint.coordinator import SingleProcessCoordinator
from flashpoint.errors import ReplicationError
from flashpoint.handle import SaveHandle
from flashpoint.job import open_job
from flashpoint.replication.agent import stop_agent
from flashpoint.replication.agent_folder import AgentFolder
from flashpoint.retention import Version
from flashpoint.saver import MLFlashpointCheckpointSaver
from tests.core.processes import Process
from tests.core.storage.nodes import WAIT_S, check, steps_in
from tests.core.world import Rank, contents

MIB = 1 << 20
SIZE = 3 * MIB  # integers of 8 bytes: an object of several parts


def train(say: Callable[[object], None], job_root: str, url: str) -> None:
    """Save a version whenever the test says so."""
    config = FlashpointConfig.from_env({}, storage=url, storage_keep_last=2, storage_bytes_per_s=100 * MIB)
    job = open_job(job_root, config, SingleProcessCoordinator())
    assert job.replication is not None
    rank = Rank.__new__(Rank)
    rank.saver = MLFlashpointCheckpointSaver(
        job.objects,
        job.coordinator,
        epoch=job.epoch,
        writer="tests",
        node_ranks=job.node_ranks,
        gives_up=False,
    )
    step = max(job.objects.complete_steps(), default=0)
    say(step)
    while True:
        step += 1
        rank.save(step, contents(step, 0, SIZE), {"step": step})
        handle = SaveHandle(step, strict=False, has_copies=True)
        job.replication.follow(handle, Version(job.epoch, step))
        say(step)


def agent_pid(job_root: str) -> int | None:
    try:
        folder = AgentFolder(job_root, create=False)
    except ReplicationError:
        return None
    about = folder.agent()
    folder.close()
    return int(re.search(r"pid ([0-9]+)", about)[1]) if about else None


@pytest.mark.parametrize("kills", [10, pytest.param(50, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
def test_kills_leave_nothing_that_reads_wrong_and_draining_goes_on(
    job_root: str, tmp_path: Path, kills: int
) -> None:
    folder = str(tmp_path)
    rng = random.Random(kills)
    errors: list[BaseException] = []
    over = threading.Event()

    def watch() -> None:
        """Read what looks drained, all the time."""
        while not over.is_set() and not errors:
            try:
                check(folder)
            except BaseException as error:
                errors.append(error)
            over.wait(0.1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    process = Process(train, job_root, f"file://{folder}")
    try:
        process.hear()
        step = 0
        for number in range(kills):
            process.go_on()
            step = process.hear()
            time.sleep(rng.uniform(0, 0.5))
            pid = agent_pid(job_root)
            if pid is not None and number % 4 != 3:
                os.kill(pid, signal.SIGKILL)
            elif pid is not None:
                process.kill()
                if number % 8 == 7:
                    os.kill(pid, signal.SIGKILL)  # both at once
                process = Process(train, job_root, f"file://{folder}")
                process.hear()
            check(folder)
            assert not errors, errors
        process.go_on()
        step = process.hear()
        deadline = time.monotonic() + WAIT_S
        while step not in steps_in(folder):
            assert time.monotonic() < deadline, Path(job_root, ".agent", "log").read_text()[-3000:]
            time.sleep(0.05)
        assert step in check(folder)
    finally:
        over.set()
        watcher.join()
        process.end()
        stop_agent(job_root)
    assert not errors, errors
