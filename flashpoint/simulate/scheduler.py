"""Simulated time: what happens when, and processes that wait for a while or for one another."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator
from typing import Any

Process = Generator["float | Gate", None, None]
"""Yields seconds to sleep, or a gate to wait at."""


class Scheduler:
    """Calls in the order of their times; at equal times in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._numbers), call, args))

    def spawn(self, process: Process, alive: Callable[[], bool]) -> None:
        """Run a process from now on, as long as whoever it belongs to is alive."""
        self._resume(process, alive)

    def _resume(self, process: Process, alive: Callable[[], bool]) -> None:
        if not alive():
            process.close()
            return
        try:
            waits_for = next(process)
        except StopIteration:
            return
        if isinstance(waits_for, Gate):
            waits_for.wait(lambda: self._resume(process, alive))
        else:
            self.after(waits_for, self._resume, process, alive)

    def run(self, until_s: float) -> None:
        queue = self._queue
        while queue and queue[0][0] <= until_s:
            self.now_s, _, call, args = heapq.heappop(queue)
            self.events += 1
            call(*args)
        self.now_s = until_s


class Gate:
    """Opens for all when so many have come."""

    def __init__(self, count: int) -> None:
        self.left = count
        self._waiting: list[Callable[[], None]] = []

    def come(self) -> Gate:
        self.left -= 1
        if self.left == 0:
            waiting, self._waiting = self._waiting, []
            for go_on in waiting:
                go_on()
        return self

    def wait(self, go_on: Callable[[], None]) -> None:
        if self.left <= 0:
            go_on()
        else:
            self._waiting.append(go_on)
