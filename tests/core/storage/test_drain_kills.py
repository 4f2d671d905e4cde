"""A job with a real agent, killed in the middle of drains: what looks drained is right, and draining goes on."""

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
from flashpoint.replication import node
from flashpoint.replication.agent import stop_agent
from flashpoint.replication.agent_folder import AgentFolder
from flashpoint.retention import Version
from flashpoint.saver import MLFlashpointCheckpointSaver
from flashpoint.storage.records import DRAINS_NAME, parse_drain
from flashpoint.storage.store import open_store
from tests.core.processes import Process
from tests.core.storage.nodes import WAIT_S, check, check_stored
from tests.core.world import Rank, contents
from tests.s3 import S3Server

MIB = 1 << 20
SIZE = 3 * MIB  # integers of 8 bytes: an object of several parts


def train(say: Callable[[object], None], job_root: str, url: str) -> None:
    """Save a version whenever the test says so."""
    node.REVIVAL_S = 0.1  # type: ignore[misc]  # a killed agent is there again for the next kill
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


SOAK = [pytest.mark.soak, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    "kills", [pytest.param(10, marks=pytest.mark.fault(4, "F")), pytest.param(50, marks=SOAK)]
)
def test_kills_leave_nothing_that_reads_wrong_and_draining_goes_on(
    job_root: str, tmp_path: Path, kills: int
) -> None:
    kill_drains(job_root, f"file://{tmp_path}", kills, lambda: check(str(tmp_path)))


@pytest.mark.parametrize("kills", [pytest.param(50, marks=SOAK)])
def test_kills_beside_a_bucket_leave_nothing_that_reads_wrong(
    job_root: str, s3: S3Server, kills: int
) -> None:
    url = s3.make_bucket("bucket-of-kills") + "/job"
    kill_drains(job_root, url, kills, lambda: check_stored(url))


def kill_drains(job_root: str, url: str, kills: int, sound: Callable[[], list[int]]) -> None:
    """SIGKILL the agent while it drains, at random moments, and sometimes the trainer with it or alone.

    Args:
        kills: of agents in the middle of a drain: what the storage shows after each says that it was one.
        sound: the steps that look drained; raises if any byte of them is wrong.
    """
    rng = random.Random(kills)
    store = open_store(FlashpointConfig.from_env({}, storage=url))
    errors: list[BaseException] = []
    seen: set[int] = set()
    over = threading.Event()

    def watch() -> None:
        """Read what looks drained, all the time."""
        while not over.is_set() and not errors:
            try:
                seen.update(sound())
            except BaseException as error:
                errors.append(error)
            over.wait(0.1)

    def is_draining(step: int) -> bool:
        """Whether a drain of this step was begun, and has not come to its end."""
        keys = {name: parse_drain(name) for name in store.folders(DRAINS_NAME)}
        return any(
            key is not None and key.step == step and store.files(f"{DRAINS_NAME}/{name}")
            for name, key in keys.items()
        )

    def until(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, Path(job_root, ".agent", "log").read_text()[-3000:]
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    process = Process(train, job_root, url)
    try:
        process.hear()
        hits = tries = 0
        while hits < kills:
            tries += 1
            assert tries < 20 * kills, f"only {hits} of {tries} kills hit a drain"
            process.go_on()
            step = process.hear()
            until(
                lambda step=step: is_draining(step)
            )  # of the version just saved: by the agent that lives now
            pid = agent_pid(job_root)
            assert pid is not None
            time.sleep(rng.uniform(0, 0.4))
            if tries % 8 == 3:
                process.kill()  # the trainer alone: the agent drains on
            else:
                os.kill(pid, signal.SIGKILL)
                hits += is_draining(step)
                if tries % 8 == 7:
                    process.kill()
            if tries % 4 == 3:
                process = Process(train, job_root, url)
                process.hear()
            seen.update(sound())
            assert not errors, errors
        process.go_on()
        step = process.hear()
        until(lambda: step in sound())
    finally:
        over.set()
        watcher.join()
        process.end()
        stop_agent(job_root)
    assert not errors, errors
    print(f"{hits} of {tries} kills in the middle of a drain; {len(seen)} versions were drained meanwhile")
