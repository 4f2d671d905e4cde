"""Spans: what took how long, for whoever listens. By default nobody does, and a span costs next to nothing.

``FLASHPOINT_TRACE=/path/trace.json`` has every process of the job (the agent too) append its spans to one file that
Chrome's ``about:tracing`` and https://ui.perfetto.dev open; see `flashpoint.trace_file`. `flashpoint.otel` hands them
to OpenTelemetry. Anything else is a function given to `listen`.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

VARIABLE: Final = "FLASHPOINT_TRACE"


class Span(NamedTuple):
    """Something that is over.

    Attributes:
        name: such as ``stage``.
        begin_s, end_s: of ``time.perf_counter()``, which on Linux is one clock for all processes of a host.
        thread: the thread that did it, by its native id; 0 for what no single thread did, such as a save from
            the call to its completion.
        thread_name: for people.
        facts: what else there is to say: step, bytes, the tier of a recovery.
    """

    name: str
    begin_s: float
    end_s: float
    thread: int
    thread_name: str
    facts: Mapping[str, Any]


Listener = Callable[[Span], None]

_listeners: tuple[Listener, ...] = ()
_process_name = ""
_nothing: Final = nullcontext()
_P = ParamSpec("_P")
_R = TypeVar("_R")


def listen(listener: Listener) -> Callable[[], None]:
    """Have every span from now on; returns what to call when that is enough.

    Args:
        listener: called in the thread that ends a span, training's among them: it must be quick, and what it
            raises is the caller's.
    """
    global _listeners
    _listeners = (*_listeners, listener)

    def stop() -> None:
        global _listeners
        _listeners = tuple(one for one in _listeners if one is not listener)

    return stop


def span(name: str, **facts: Any) -> AbstractContextManager[Any]:
    """Around what is to be timed. It is recorded also when it raises."""
    return _Timed(name, facts) if _listeners else _nothing


def traced(name: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A function whose every call is a span."""

    def wrap(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def timed(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if not _listeners:
                return function(*args, **kwargs)
            with _Timed(name, {}):
                return function(*args, **kwargs)

        return timed

    return wrap


def record(name: str, begin_s: float, end_s: float, **facts: Any) -> None:
    """Tell of what no single thread did, from one moment of ``time.perf_counter()`` to another."""
    if _listeners:
        _tell(Span(name, begin_s, end_s, 0, "", facts))


def name_process(name: str) -> None:
    """What people call this process: ``rank 3``, ``agent``. The first name stays."""
    global _process_name
    _process_name = _process_name or name


def process_name() -> str:
    return _process_name


class _Timed:
    __slots__ = ("_begin_s", "_facts", "_name")

    def __init__(self, name: str, facts: dict[str, Any]) -> None:
        self._name, self._facts = name, facts

    def __enter__(self) -> None:
        self._begin_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        thread = threading.current_thread()
        end_s = time.perf_counter()
        _tell(Span(self._name, self._begin_s, end_s, thread.native_id or 0, thread.name, self._facts))


def _tell(one: Span) -> None:
    for listener in _listeners:
        listener(one)


def _listen_for_file() -> None:
    if path := os.environ.get(VARIABLE, "").strip():
        from flashpoint.trace_file import TraceFile

        listen(TraceFile(path).add)


_listen_for_file()
