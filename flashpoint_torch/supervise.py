"""Run a training again after it failed, for who has no launcher that does: a command, or a function."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

from flashpoint.errors import ConfigError
from flashpoint.telemetry import logger

ATTEMPT_VARIABLE: Final = "FLASHPOINT_ATTEMPT"
"""Tells the training how often it was started before."""

_POLL_S: Final = 0.05


class _Run(Protocol):
    """One attempt: `pid`, and its exit code once it has ended, negative for a signal."""

    pid: int

    def poll(self) -> int | None: ...


def supervise(
    training: Sequence[str] | Callable[[], Any],
    *,
    retries: int = 3,
    pause_s: float = 1.0,
    term_timeout_s: float = 60.0,
) -> int:
    """Run a training; run it again when it fails, up to ``retries`` times.

    SIGTERM and SIGINT are passed on, and end the whole: a training that was told to end is not run again. What an
    attempt has left of its process group is killed before the next begins.

    Args:
        training: a command, such as ``["torchrun", ..., "train.py"]``, or a function at the top of a module,
            which runs in a fresh process. Its process ends with 0 when it is done.
        retries: how often it is run again, all failures together.
        pause_s: before it is run again.
        term_timeout_s: how long it may take to end when it was told to, before it is killed.

    Returns:
        The exit code of the last attempt, as a shell has it (128 and the signal's number for one that was killed).
    """
    if type(retries) is not int or retries < 0:
        raise ConfigError(f"retries must be a whole number from 0 on, not {retries!r}")
    told = _Told()
    with told.listening():
        for attempt in range(retries + 1):
            code = _attempt(training, attempt, told, term_timeout_s)
            if code == 0 or told.came():
                return code
            left = retries - attempt
            logger.warning("the training ended with %d; it is run again %d times at most", code, left)
            if left:
                told.wait(pause_s)
                if told.came():
                    return code
    return code


class _Told:
    """The signal to end, if there was one. Only the main thread hears it."""

    def __init__(self) -> None:
        self.signal = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._hear) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def came(self) -> bool:
        return self.signal != 0

    def _hear(self, number: int, frame: Any) -> None:
        self.signal = number

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.signal and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def _attempt(training: Any, attempt: int, told: _Told, term_timeout_s: float) -> int:
    run = _start(training, attempt)
    code, deadline = None, None
    try:
        while (code := run.poll()) is None:
            if told.signal and deadline is None:
                deadline = time.monotonic() + term_timeout_s
                with contextlib.suppress(ProcessLookupError):
                    os.kill(run.pid, told.signal)
            if deadline is not None and time.monotonic() > deadline:
                logger.warning("the training did not end within %g s: it is killed", term_timeout_s)
                break
            time.sleep(_POLL_S)
    finally:
        # Workers that outlive their launcher would hold its memory and its devices.
        for kill in (os.killpg, os.kill) if code is None else (os.killpg,):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(run.pid, signal.SIGKILL)
    while code is None:
        code = run.poll()
        time.sleep(_POLL_S)
    return code if code >= 0 else 128 - code


def _start(training: Any, attempt: int) -> _Run:
    if not callable(training):
        environment = os.environ | {ATTEMPT_VARIABLE: str(attempt)}
        return subprocess.Popen(list(training), env=environment, start_new_session=True)
    process = multiprocessing.get_context("spawn").Process(target=_in_own_session, args=(training, attempt))
    process.start()
    return _Function(process)


class _Function:
    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    def poll(self) -> int | None:
        self._process.join(0)
        code: int | None = self._process.exitcode
        return code


def _in_own_session(training: Callable[[], Any], attempt: int) -> None:
    os.setsid()
    os.environ[ATTEMPT_VARIABLE] = str(attempt)
    training()
