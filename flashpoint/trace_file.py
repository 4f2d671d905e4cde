"""Spans as a file for Chrome's ``about:tracing`` and Perfetto, which any number of processes append to.

The format is the JSON Array Format of the Trace Event Format
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): one event a line, and the closing
bracket left out, as it permits: a process that is killed leaves a file that opens.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import tempfile
import threading
import time
from collections import deque
from typing import Any, Final

from flashpoint import trace
from flashpoint.telemetry import count, logger
from flashpoint.trace import Span

FLUSH_S: Final = 0.25  # what a SIGKILL loses
_WAITING_MAX: Final = 65_536  # spans between two flushes; more are dropped, and counted
_BEGIN: Final = b"[\n"


class TraceFile:
    """Takes spans, and writes them in a thread of its own: a slow disk holds nobody up.

    Args:
        path: of the file, made if it is not there; each line is appended by one ``write``.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._waiting: deque[Span] = deque(maxlen=_WAITING_MAX)
        self._begin()
        os.register_at_fork(after_in_child=self._begin)
        atexit.register(self.flush)

    def _begin(self) -> None:
        """In a new process: nothing of its parent's is written twice."""
        self._waiting.clear()
        self._named: set[int] = set()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._failed = False

    def add(self, one: Span) -> None:
        if self._failed:
            return
        if len(self._waiting) == _WAITING_MAX:
            count("spans_dropped")
        self._waiting.append(one)
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="flashpoint-trace", daemon=True)
                    self._thread.start()

    def flush(self) -> None:
        """Write what waits. Never raises: tracing that cannot go on is over, and is told once."""
        with self._lock:
            lines = []
            while self._waiting:
                lines += self._lines(self._waiting.popleft())
            if not lines or self._failed:
                return
            try:
                self._append("".join(lines).encode())
            except OSError as error:
                self._failed = True
                logger.warning("no more spans are written to %s: %s", self.path, error)

    def _run(self) -> None:
        while not self._failed:
            time.sleep(FLUSH_S)
            self.flush()

    def _append(self, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        try:
            fd = os.open(self.path, flags)
        except FileNotFoundError:
            self._create()
            fd = os.open(self.path, flags)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)

    def _create(self) -> None:
        """Make the file with its first line, for whichever process comes first."""
        fd, name = tempfile.mkstemp(dir=os.path.dirname(self.path), prefix=".trace-")
        try:
            os.write(fd, _BEGIN)
            with contextlib.suppress(FileExistsError):
                os.link(name, self.path)
        finally:
            os.close(fd)
            os.unlink(name)

    def _lines(self, one: Span) -> list[str]:
        pid, lines = os.getpid(), []
        if one.thread not in self._named:
            if not self._named:
                lines.append(
                    _line("M", pid, 0, "process_name", args={"name": trace.process_name() or f"pid {pid}"})
                )
            self._named.add(one.thread)
            if one.thread:
                lines.append(_line("M", pid, one.thread, "thread_name", args={"name": one.thread_name}))
        begin_us, end_us = one.begin_s * 1e6, one.end_s * 1e6
        if one.thread:
            lines.append(
                _line("X", pid, one.thread, one.name, ts=begin_us, dur=end_us - begin_us, args=one.facts)
            )
        else:  # a line of its own, since several may overlap
            mark = {"cat": "flashpoint", "id": f"{pid}.{one.name}.{one.begin_s}", "args": one.facts}
            lines.append(_line("b", pid, 0, one.name, ts=begin_us, **mark))
            lines.append(_line("e", pid, 0, one.name, ts=end_us, **mark))
        return lines


def _line(kind: str, pid: int, tid: int, name: str, **more: Any) -> str:
    return json.dumps({"ph": kind, "pid": pid, "tid": tid, "name": name, **more}, default=str) + ",\n"


def read_trace(path: str) -> list[dict[str, Any]]:
    """The events of such a file, as Chrome and Perfetto would have them. A last line that was cut off is left out."""
    with open(path, encoding="utf-8") as file:
        lines = file.read().split("\n")
    if lines[0] != "[":
        raise ValueError(f"{path} is no trace: it begins with {lines[0][:40]!r}")
    return [json.loads(line.removesuffix(",")) for line in lines[1:-1]]
