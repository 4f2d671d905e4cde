"""A training that dies is run again, by `supervise` and by torchrun, and ends as if it had not."""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

import flashpoint_torch as fpt
from flashpoint.errors import ConfigError
from tests.torch import recovering
from tests.torch.faults import REPOSITORY, Launcher
from tests.torch.recovering import begins, losses

TOTAL = 16
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", REPOSITORY)
    monkeypatch.chdir(REPOSITORY)


def wanted(tmp_path: Path, world_size: int) -> list[dict[int, str]]:
    log = str(tmp_path / "straight")
    Launcher(world_size).run(recovering.train, str(tmp_path / "unused"), log, TOTAL, mode="off")
    return [losses(log, rank) for rank in range(world_size)]


def test_supervise_runs_a_killed_training_again(job_root: str, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    command = [sys.executable, "-m", "tests.torch.recovering", job_root, log, str(TOTAL), "0:0:5"]
    assert fpt.supervise(command, retries=1, pause_s=0) == 0
    # The save of the step at which it died may not have been complete.
    first, second = begins(log)
    assert first == 0 and second in (3, 6)
    assert losses(log) == wanted(tmp_path, 1)[0]


def test_torchrun_runs_killed_ranks_again(job_root: str, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2",
        "--local-addr=127.0.0.1", "-m", "tests.torch.recovering", job_root, log, str(TOTAL), "0:1:5", "1:0:11",
    ]  # fmt: skip
    # Torch 2.13 keeps one store over all restarts: a restarted rank may find its predecessor's address in it.
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(command, timeout=4 * WAIT_S, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [len(begins(log, rank)) for rank in (0, 1)] == [3, 3]
    assert begins(log)[0] == 0 and begins(log)[2] >= 6
    assert [losses(log, rank) for rank in (0, 1)] == wanted(tmp_path, 2)


# ---- how often, and when not ------------------------------------------------------------------------


def counting(path: str, code: int) -> None:
    """A training that fails: it notes its attempt."""
    with open(path, "a") as file:
        print(os.environ["FLASHPOINT_ATTEMPT"], os.getpid(), file=file)
    sys.exit(code)


def test_a_function_is_run_again_as_often_as_allowed(tmp_path: Path) -> None:
    path = tmp_path / "attempts"
    assert fpt.supervise(partial(counting, str(path), 7), retries=1, pause_s=0) == 7
    lines = [line.split() for line in path.read_text().splitlines()]
    assert [attempt for attempt, _ in lines] == ["0", "1"]
    assert len({pid for _, pid in lines} | {str(os.getpid())}) == 3


def shell(script: str, *arguments: object, retries: int = 3, **options: float) -> int:
    command = ["sh", "-c", script, "sh", *map(str, arguments)]
    return fpt.supervise(command, retries=retries, pause_s=0, **options)


def test_one_that_succeeds_is_run_once(tmp_path: Path) -> None:
    assert shell('echo x >> "$1"', tmp_path / "log") == 0
    assert (tmp_path / "log").read_text() == "x\n"
    assert shell("kill -9 $$", retries=0) == 128 + signal.SIGKILL
    assert shell("exit 3", retries=0) == 3


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_what_an_attempt_leaves_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "child"
    assert shell('sleep 1000 & echo $! > "$1"; exit 1', path, retries=0) == 1
    child = int(path.read_text())
    deadline = time.monotonic() + WAIT_S
    while is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("listens", [True, False])
def test_a_training_that_was_told_to_end_is_not_run_again(tmp_path: Path, listens: bool) -> None:
    log = tmp_path / "log"
    trap = 'trap "exit 143" TERM' if listens else 'trap "" TERM'

    def tell() -> None:
        deadline = time.monotonic() + WAIT_S
        while not log.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=tell)
    thread.start()
    code = shell(
        f'{trap}; echo x >> "$1"; while :; do sleep 0.05; done', log, term_timeout_s=60 if listens else 0.2
    )
    thread.join()
    assert code == (143 if listens else 137)
    assert log.read_text() == "x\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_retries_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="retries"):
        fpt.supervise(["true"], retries=-1)
