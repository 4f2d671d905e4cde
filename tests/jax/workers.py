"""JAX processes for tests: a job of real ones, over `jax.distributed`, that stays up for the whole session.

Starting two costs seconds. So each test sends them a function, which all run at once; the results come back in
the order of ranks. A job with a process that died or hangs is started anew.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any, Final

DEVICES: Final = 4  # of each process
RUN_S: Final = 120.0  # a run that takes longer has failed
FAILED_S: Final = 10.0  # for the other processes, when one has failed
_REPOSITORY: Final = str(Path(__file__).parents[2])
_KEY: Final = b"flashpoint tests"


@dataclass
class _Process:
    process: subprocess.Popen[bytes]
    pipe: Connection


class Workers:
    """``world_size`` processes of one JAX job, each with `DEVICES` CPU devices."""

    def __init__(self, world_size: int = 2) -> None:
        self.world_size = world_size
        self._processes: list[_Process] = []

    def run(self, work: Callable[..., Any], *args: Any, timeout_s: float = RUN_S) -> list[Any]:
        """``work(*args)`` on every process at once; the results in the order of ranks.

        Args:
            work: a function at the top of a module.
        """
        if any(one.process.poll() is not None for one in self._processes):
            self.close()
        if not self._processes:
            self._start()
        for one in self._processes:
            one.pipe.send((work, args))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(self._processes) and time.monotonic() < deadline:
            left = {one.pipe: rank for rank, one in enumerate(self._processes) if rank not in answers}
            for pipe in wait(list(left), timeout=max(deadline - time.monotonic(), 0)):
                rank = left[pipe]
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = False, "it died"
                if not answers[rank][0]:  # the others may wait for it in vain
                    deadline = min(deadline, time.monotonic() + FAILED_S)
        failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in sorted(answers.items()) if not ok]
        failed += [f"rank {rank}: no answer" for rank in range(self.world_size) if rank not in answers]
        if failed:
            self.close()  # who has got out of step with the others would fail the tests after this one, too
            raise AssertionError(f"{work.__name__}: " + "\n".join(failed))
        return [answers[rank][1] for rank in sorted(answers)]

    def close(self) -> None:
        for one in self._processes:
            one.process.kill()
            one.process.wait()
            one.pipe.close()
        self._processes = []

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with Listener(("127.0.0.1", 0), authkey=_KEY) as listener:
            started = [
                subprocess.Popen(
                    [sys.executable, "-m", "tests.jax.workers", str(listener.address[1]), str(rank)],
                    cwd=_REPOSITORY,
                    env={
                        **os.environ,
                        "JAX_PLATFORMS": "cpu",
                        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
                        "FLASHPOINT_TEST_JOB": f"127.0.0.1:{port}/{self.world_size}",
                    },
                )
                for rank in range(self.world_size)
            ]
            pipes = [listener.accept() for _ in started]
        by_rank = {pipe.recv(): pipe for pipe in pipes}
        self._processes = [_Process(one, by_rank[rank]) for rank, one in enumerate(started)]


def _main(port: int, rank: int) -> None:
    import jax

    address, world_size = os.environ["FLASHPOINT_TEST_JOB"].split("/")
    jax.distributed.initialize(
        address, num_processes=int(world_size), process_id=rank, initialization_timeout=60
    )
    pipe = Client(("127.0.0.1", port), authkey=_KEY)
    pipe.send(rank)
    with contextlib.suppress(EOFError):
        while True:
            work, args = pipe.recv()
            try:
                answer = True, work(*args)
            except BaseException:
                answer = False, traceback.format_exc()
            pipe.send(answer)
    os._exit(0)  # the others may be gone: there is nobody to shut down with


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]))
