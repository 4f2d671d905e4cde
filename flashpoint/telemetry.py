"""What happened, for people and for programs: the logger, counters, and the timings of one operation."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from flashpoint import trace

logger: Final = logging.getLogger("flashpoint")

_lock = threading.Lock()
_counters: Counter[str] = Counter()
_warned: set[str] = set()


def count(name: str, amount: int = 1) -> None:
    """Add to a counter of this process, such as ``saves_skipped`` or ``bytes_staged``."""
    with _lock:
        _counters[name] += amount


def counters() -> dict[str, int]:
    """All counters of this process since it started."""
    with _lock:
        return dict(_counters)


def warn_once(key: str, message: str) -> None:
    """Warn about a lasting condition (a root that is not a tmpfs) once per process and ``key``."""
    with _lock:
        if key in _warned:
            return
        _warned.add(key)
    logger.warning(message)


class Timings(dict[str, float]):
    """Seconds by the name of a part, filled by ``with timings.span("stage"):``."""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with trace.span(name):
                yield
        finally:
            self[name] = self.get(name, 0.0) + time.perf_counter() - start
