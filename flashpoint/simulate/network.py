"""What lies between nodes: every message is late, and some are lost, doubled, overtaken or cut off."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashpoint.simulate.scheduler import Scheduler


@dataclass
class Weather:
    """How bad it is.

    Attributes:
        delay_s: of a message, at most; the least is a tenth of it.
        loss, doubling, rot: shares of messages that are lost, that come twice, and of data that come changed.
    """

    delay_s: float = 0.02
    loss: float = 0.0
    doubling: float = 0.0
    rot: float = 0.0


class Network:
    """Directed: a message may come through one way and not the other."""

    def __init__(self, scheduler: Scheduler, rng: random.Random, weather: Weather) -> None:
        self.weather = weather
        self.messages = 0
        self._scheduler, self._rng = scheduler, rng
        self._cut: dict[tuple[int, int], float] = {}

    def cut(self, sender: int, receiver: int, until_s: float) -> None:
        self._cut[sender, receiver] = max(until_s, self._cut.get((sender, receiver), 0.0))

    def is_cut(self, sender: int, receiver: int) -> bool:
        return self._cut.get((sender, receiver), 0.0) > self._scheduler.now_s

    def heal(self) -> None:
        self.weather = Weather()
        self._cut.clear()

    def send(self, sender: int, receiver: int, deliver: Callable[..., None], *args: Any) -> None:
        """Have ``deliver(*args)`` called where the message arrives."""
        weather, rng = self.weather, self._rng
        self.messages += 1
        if self.is_cut(sender, receiver) or (weather.loss and rng.random() < weather.loss):
            return
        for _ in range(2 if weather.doubling and rng.random() < weather.doubling else 1):
            self._scheduler.after(weather.delay_s * rng.uniform(0.1, 1.0), deliver, *args)

    def spoils(self) -> bool:
        """Whether the bytes that come now have changed on their way."""
        return self.weather.rot > 0 and self._rng.random() < self.weather.rot
