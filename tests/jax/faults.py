"""JAX programs that tests start in processes of their own, kill, and look at from outside.

They are forked from a server that has imported JAX and Orbax, and started no backend: a start costs a fraction of a
second. A state is a function of its step, so whatever is restored can be checked to the last bit. What happened
is read from logs outside the job root, one line written before and after each thing that counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np

REPOSITORY: Final = str(Path(__file__).parents[2])
DEVICES: Final = 4  # of each process
WAIT_S: Final = 60.0
KEEP: Final = 2
TEMPORARY: Final = ".orbax-checkpoint-tmp"
_ROWS: Final = 512


# ---- the server -------------------------------------------------------------------------------------


class Server:
    """Forks programs, and reaps them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.jax.faults"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
            },
        )

    def start(self, **kwargs: Any) -> int:
        """Start `train` with these arguments in a process of its own; its id."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(kwargs) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the server, and with it all that it started."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _serve() -> None:
    import orbax.checkpoint  # noqa: F401

    import flashpoint_jax  # noqa: F401
    from tests.jax import trees  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    server = os.getpid()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() == server:
                os.dup2(os.open(os.devnull, os.O_RDWR), 0)
                os.dup2(2, 1)
                _run(json.loads(line))
            os._exit(0)
        print(pid, flush=True)


def _run(kwargs: dict[str, Any]) -> None:
    log = Log(kwargs.pop("log_path"))
    try:
        train(log, **kwargs)
    except BaseException:
        log.write("error", json.dumps(traceback.format_exc()))


def await_end(pid: int) -> None:
    """Wait until a process is gone, and its locks with it."""
    deadline = time.monotonic() + WAIT_S
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline, f"process {pid} did not end within {WAIT_S:g} s"
        time.sleep(0.001)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- the trainer ------------------------------------------------------------------------------------


class Log:
    """Lines outside the job root; each is one write, so what a killed process did before it is there."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, *words: Any) -> None:
        os.write(self._fd, (" ".join(map(str, words)) + "\n").encode())


def log_lines(path: str) -> list[list[str]]:
    """The words of every line of a log; none where its program never came so far."""
    try:
        with open(path, encoding="utf-8") as file:
            return [line.split(" ", 2) for line in file.read().splitlines()]
    except FileNotFoundError:
        return []


def state_of(step: int) -> dict[str, Any]:
    """About half a MiB, no page of which is equal to one of another step."""
    import jax

    from tests.jax import trees

    over = trees.mesh(2 * jax.process_count(), 2)
    mask = np.uint32((step + 1) * 0x9E3779B9 % 2**32)  # a bijection
    values = (np.arange(_ROWS * 256, dtype=np.uint32) ^ mask).reshape(_ROWS, 256)
    return {
        "rows": trees.sharded(values[: _ROWS // 2], over, "x", None),
        "both": trees.sharded(values[_ROWS // 2 :].view(np.int32), over, "x", "y"),
        "replicated": trees.sharded(values[0].astype(np.float32), over),
        "host": values[:9].copy(),
        "step": step,
    }


def train(
    log: Log,
    *,
    rank: int = 0,
    world_size: int = 1,
    port: int = 0,
    root: str,
    saves: int = 10**9,
    waits: bool = True,
    slow_seed: int | None = None,
    kill_at: int | None = None,
) -> None:
    """Check every step that is there, then save one after the other, through a stock manager.

    Args:
        waits: for each save to be complete, before the next begins.
        slow_seed: make every change to the file system take a random moment first, so that a kill may come at any.
        kill_at: die before this change, counted from the start.
    """
    import jax
    import orbax.checkpoint as ocp

    import flashpoint_jax
    from tests.jax import trees

    if world_size > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{port}", num_processes=world_size, process_id=rank, initialization_timeout=60
        )
    log.write("start")
    options = ocp.CheckpointManagerOptions(max_to_keep=KEEP, enable_async_checkpointing=True)
    with (
        _changes(slow_seed, kill_at),
        ocp.CheckpointManager(
            root, options=options, handler_registry=flashpoint_jax.registry(commit_timeout_s=20)
        ) as m,
    ):
        wanted = trees.abstract(state_of(0))
        last, steps = m.latest_step() or 0, sorted(m.all_steps(), reverse=True)
        for number, step in enumerate(steps):
            try:
                found = m.restore(step, args=ocp.args.StandardRestore(wanted))
            except Exception as error:  # of Orbax's, too
                if number < KEEP:
                    raise
                log.write("refused", step, type(error).__name__)  # half deleted when its process was killed
                continue
            trees.assert_equal(found, state_of(step))
        log.write("recovered", last)
        before = None
        for step in range(last + 1, last + 1 + saves):
            state = state_of(step)
            log.write("saving", step)
            m.save(step, args=ocp.args.StandardSave(state))
            if before is not None:
                log.write("complete", before)  # Orbax waits for one before it begins the next
            log.write("staged", step)
            before = step
            state["host"][:] = 0  # training goes on
            for name in ("rows", "both"):
                state[name].delete()
            if waits:
                m.wait_until_finished()
                log.write("complete", step)
                before = None
        m.wait_until_finished()
        log.write("done")


CHANGING: Final = ("ftruncate", "link", "mkdir", "posix_fallocate", "rename", "replace", "rmdir", "unlink")


@contextmanager
def _changes(slow_seed: int | None, kill_at: int | None) -> Iterator[None]:
    """Do what `train` was asked to before each change to the file system, whoever makes it."""
    rng = random.Random(slow_seed)
    numbers = itertools.count(1)

    def patched(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(numbers) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if slow_seed is not None:
                time.sleep(rng.expovariate(1 / 0.001))
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in CHANGING if (slow_seed, kill_at) != (None, None) else ():
            stack.enter_context(patch.object(os, name, patched(getattr(os, name))))
        yield


# ---- the look from outside --------------------------------------------------------------------------


@dataclass
class Look:
    """What lies below a root.

    Attributes:
        steps: that have their final names.
        unfinished: steps that have not.
        linked, pool_nbytes: pool files that some version uses; allocated bytes of all.
        version_nbytes: of the blobs of the largest version.
    """

    markers: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    unfinished: list[int] = field(default_factory=list)
    linked: int = 0
    pool_nbytes: int = 0
    version_nbytes: int = 0


def look(root: str) -> Look:
    found = Look()
    for name in os.listdir(root) if os.path.isdir(root) else []:
        if name.endswith("__unfinished"):
            found.markers.append(name)
        elif name.isdigit():
            found.steps.append(int(name))
            blobs = Path(root, name).glob("default/*.safetensors")
            found.version_nbytes = max(
                found.version_nbytes, sum(blob.stat().st_blocks * 512 for blob in blobs)
            )
        elif TEMPORARY in name:
            found.unfinished.append(int(name.partition(".")[0]))
    for path in Path(root, ".pool").glob("*.buf"):
        status = path.stat()
        found.linked += status.st_nlink > 1
        found.pool_nbytes += status.st_blocks * 512
    return found


def phase_of(found: Look, lines: list[list[str]], newest: int) -> str:
    """In which phase of its life a trainer was killed."""
    words = [line[0] for line in lines]
    if "recovered" not in words:
        return "start"
    if found.markers:
        return "write" if any(step > newest for step in found.unfinished) else "stage"
    if any(step > newest for step in found.unfinished):
        return "rename"
    return "retire" if len(found.steps) > KEEP else "between"


if __name__ == "__main__":
    _serve()
