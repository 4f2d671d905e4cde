"""Other processes for tests: real ones, started anew, that say where they are and can be killed."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

_spawn = multiprocessing.get_context("spawn")
WAIT_S = 60


def fork_to_sleep(before: Callable[[], None] = lambda: None) -> int:
    """Fork a child that does ``before`` and sleeps; its id, once all that runs after a fork has run there."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        before()
        os.setsid()
        os.write(writable, b".")
        time.sleep(WAIT_S)
        os._exit(0)
    os.close(writable)
    os.read(readable, 1)
    os.close(readable)
    return child


class Process:
    """A spawned process that runs ``work(say, *args)``; ``say(x)`` sends to `hear`, and waits for `go_on`."""

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        self._ours, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=_run, args=(theirs, work, args), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def hear(self) -> Any:
        assert self._ours.poll(WAIT_S), "the process says nothing"
        kind, value = self._ours.recv()
        if kind == "error":
            raise AssertionError(f"the process failed: {value}")
        return value

    def go_on(self) -> None:
        self._ours.send(None)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.join()

    def join(self) -> None:
        # Process.join waits for a pipe, which the process's own forked children keep open.
        deadline = time.monotonic() + WAIT_S
        while self._process.exitcode is None:
            assert time.monotonic() < deadline, "the process does not end"
            time.sleep(0.002)

    def end(self) -> None:
        if self._process.exitcode is None:
            self._process.kill()
        self.join()
        self._ours.close()


@contextmanager
def process(work: Callable[..., None], *args: Any) -> Iterator[Process]:
    """A process that is gone at the end of the block, whatever happened."""
    running = Process(work, *args)
    try:
        yield running
    finally:
        running.end()


def _run(pipe: Connection, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    def say(value: Any) -> None:
        pipe.send(("said", value))
        pipe.recv()

    try:
        work(say, *args)
    except EOFError:
        pass  # the test is over
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        raise
