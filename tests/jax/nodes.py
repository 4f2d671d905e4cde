"""JAX jobs of several nodes on one host: each node has a root, a process and an agent of its own, and can be lost.

A node's identity is the inode of a folder of its root, so one whose folder was deleted comes back as another. The
processes are real ones in a real ``jax.distributed`` job. They stay up until they are killed; what they do is a
function ``work(root, settings, *args)`` of a module, sent to all at once. They are forked from a server that has
imported JAX.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing as mp
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest.mock import patch

from flashpoint.telemetry import logger
from tests.conftest import SHARED_MEMORY
from tests.jax.workers import DEVICES

REPOSITORY: Final = str(Path(__file__).parents[2])
RUN_S: Final = 120.0
GONE_S: Final = 20.0
SETTINGS: Final = {
    "copies": 1,
    "agent_idle_s": 60.0,  # should the test be killed, and clean nothing up
    "chunk_bytes": 64 << 10,
    "commit_timeout_s": 30.0,
    "recovery_timeout_s": 60.0,
}


class Cluster:
    """A job on several nodes. Leave its block, and every process and file of it is gone.

    Args:
        nodes: how many.
        settings: of Flashpoint, over `SETTINGS`.
    """

    def __init__(self, nodes: int, **settings: Any) -> None:
        self.folder = tempfile.mkdtemp(prefix="flashpoint-test-", dir=SHARED_MEMORY)
        self.roots = [f"{self.folder}/node-{index}/job" for index in range(nodes)]
        for root in self.roots:
            os.makedirs(root, mode=0o700)
        self.settings = {**SETTINGS, **settings}
        self._processes: list[tuple[Any, Connection]] = []

    # ---- running ----------------------------------------------------------------------------------

    def run(self, work: Callable[..., Any], *args: Any, timeout_s: float = RUN_S, **kwargs: Any) -> list[Any]:
        """``work(root, settings, *args, **kwargs)`` on every node; the results in the order of nodes."""
        self.send(work, *args, **kwargs)
        deadline = time.monotonic() + timeout_s
        answers = []
        for _, pipe in self._processes:
            assert pipe.poll(max(deadline - time.monotonic(), 0)), f"{work.__name__} hangs: {answers}"
            answers.append(pipe.recv())
        failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        assert not failed, "\n".join(failed)
        return [value for _, value in answers]

    def send(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """As `run`, without waiting for what becomes of it."""
        if not self._processes:
            self._start()
        for root, (_, pipe) in zip(self.roots, self._processes, strict=True):
            pipe.send((work, (root, self.settings, *args), kwargs))

    def await_deaths(self) -> None:
        """Wait until every process has ended by itself."""
        for process, _ in self._processes:
            process.join(RUN_S)
            assert process.exitcode is not None
        self.kill()

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        for rank in range(len(self.roots)):
            ours, theirs = mp.Pipe()
            process = mp.get_context("forkserver").Process(
                target=_serve, args=(theirs, address, len(self.roots), rank)
            )
            with (
                patch.object(mp.forkserver, "connect_to_new_process", _fork_server().connect_to_new_process),
                patch.dict(sys.modules, {"__main__": ModuleType("__main__")}),  # or it would import pytest
            ):
                process.start()
            theirs.close()
            self._processes.append((process, ours))

    # ---- losing -----------------------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL every process; agents live on."""
        for process, _ in self._processes:
            if process.exitcode is None:
                process.kill()
        for process, pipe in self._processes:
            process.join(GONE_S)
            pipe.close()
        self._processes = []

    def lose(self, *nodes: int) -> None:
        """These nodes die: process, agents and memory. A job does not outlive one process, so all of them die."""
        pids = [pid for index in nodes for pid in self.agents(index)]
        _kill(pids)
        self.kill()
        for index in nodes:
            _kill(self.agents(index))
            root = self.roots[index]
            shutil.rmtree(root, ignore_errors=True)
            # What makes new folders other ones is their inodes, which must not be given out again.
            with tempfile.TemporaryDirectory(dir=os.path.dirname(root)):
                os.makedirs(root, mode=0o700)

    def agents(self, node: int | None = None) -> list[int]:
        """Process ids of the agents of a node, or of all."""
        below = self.folder if node is None else f"{self.folder}/node-{node}/"
        return [
            pid
            for pid, words in _command_lines()
            if "agent" in words and any(word.startswith(below) for word in words)
        ]

    def await_no_agents(self, timeout_s: float = 60.0) -> None:
        """Wait until every agent has ended by itself, as they do when a job has released them."""
        until(lambda: not self.agents(), f"agents end; {self.agent_logs()}", timeout_s)

    def agent_logs(self) -> str:
        """What the agents have to say, for messages of failed tests."""
        return "\n".join(
            f"{path.relative_to(self.folder)}: {line}"
            for path in sorted(Path(self.folder).glob("*/job/.flashpoint/*/.agent/log"))
            for line in path.read_text(errors="replace").splitlines()[-20:]
        )

    # ---- looking ----------------------------------------------------------------------------------

    def mirrored(self, step: int, item: str = "default") -> list[set[str]]:
        """For each node, the names of the objects of a version that lie in its mirror."""
        return [
            {path.name for path in Path(root, ".flashpoint", item, f"step-{step}_ckpt").glob("*.safetensors")}
            for root in self.roots
        ]

    def mirrored_steps(self, item: str = "default") -> list[set[int]]:
        """For each node, the steps that have a folder in its mirror."""
        return [
            {int(path.name[5:-5]) for path in Path(root, ".flashpoint", item).glob("step-*_ckpt")}
            for root in self.roots
        ]

    def nbytes(self, node: int) -> int:
        """Bytes of memory that a node's files occupy; a file counts once, however many names it has."""
        sizes = {}
        for parent, _, names in os.walk(self.roots[node]):
            for name in names:
                with suppress(FileNotFoundError):
                    status = os.lstat(os.path.join(parent, name))
                    sizes[status.st_ino] = status.st_blocks * 512
        return sum(sizes.values())

    # ---- life -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Kill and delete everything."""
        with ExitStack() as stack:  # each of these, whatever becomes of the others
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            stack.callback(lambda: _kill(self.agents()))
            stack.callback(lambda: _kill(self.agents()))
            stack.callback(self.kill)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


@contextmanager
def heard() -> Iterator[list[str]]:
    """The warnings of Flashpoint in this process, as texts."""
    texts: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logger.addHandler(listener)
    try:
        yield texts
    finally:
        logger.removeHandler(listener)


def _serve(pipe: Connection, address: str, world_size: int, rank: int) -> None:
    import jax

    if world_size > 1:
        jax.distributed.initialize(
            address, num_processes=world_size, process_id=rank, initialization_timeout=60
        )
    with suppress(EOFError):
        while True:
            work, args, kwargs = pipe.recv()
            try:
                answer = True, work(*args, **kwargs)
            except BaseException:
                answer = False, traceback.format_exc()
            pipe.send(answer)
    os._exit(0)


@functools.cache
def _fork_server() -> ForkServer:
    """A server of our own, which imports JAX and starts nothing of it."""
    server = ForkServer()
    server.set_forkserver_preload(["tests.jax.test_copies"])
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, [REPOSITORY, os.environ.get("PYTHONPATH")])),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
    }
    with patch.dict(os.environ, environment):
        server.ensure_running()
    return server


def _command_lines() -> list[tuple[int, list[str]]]:
    """(process id, words) of every living process; one that is dead and not yet reaped has no words."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                data = Path(entry.path, "cmdline").read_bytes()
                found.append((int(entry.name), data.decode(errors="replace").split("\0")))
    return found


def _kill(pids: Iterable[int]) -> None:
    """SIGKILL, and wait until they are gone."""
    left = set(pids)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(
        lambda: not left & {pid for pid, words in _command_lines() if words != [""]},
        f"processes {left} outlive SIGKILL",
    )
