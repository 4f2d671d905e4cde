"""When something is due: every so many epochs, steps or seconds, whichever comes first. Pure but for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from flashpoint.errors import ConfigError, FlashpointError

_COUNTED: Final = ("epochs", "steps")


class Frequency:
    """Three independent triggers. Each counts from when *it* fired last; None disables it.

    What is saved is how far each has counted, never how often it is to fire: that is the configuration's, also
    after a resume. Seconds are counted while the job runs; a job that was down is not late.

    Args:
        epochs: fires at the end of every so many epochs.
        steps: fires at every so many steps.
        secs: fires when so many seconds have passed.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        epochs: int | None = None,
        steps: int | None = None,
        secs: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (("freq_epochs", epochs), ("freq_steps", steps)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be a whole number from 1 on, or None, not {value!r}")
        if secs is not None and (isinstance(secs, bool) or not 0 < secs < float("inf")):
            raise ConfigError(
                f"freq_secs must be a positive, finite number of seconds, or None, not {secs!r}"
            )
        self.secs = secs
        self._every = {"epochs": epochs, "steps": steps}
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._clock = clock
        self._since = clock()

    def count(self, *, ends_epoch: bool) -> bool:
        """Count one step; whether epochs or steps fire. The same on every rank."""
        fired = False
        for name, amount in (("epochs", int(ends_epoch)), ("steps", 1)):
            self._counts[name] += amount
            every = self._every[name]
            if every is not None and self._counts[name] >= every:
                self._counts[name] = 0
                fired = True
        return fired

    def time_is_up(self) -> bool:
        """Whether seconds fire, by this process's clock alone."""
        return self.secs is not None and self._clock() - self._since >= self.secs

    def restart_clock(self) -> None:
        """Seconds have fired."""
        self._since = self._clock()

    def state_dict(self) -> dict[str, Any]:
        return {**self._counts, "elapsed_s": self._clock() - self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self._counts = {name: int(state[name]) for name in _COUNTED}
            self._since = self._clock() - float(state["elapsed_s"])
        except (KeyError, TypeError, ValueError) as error:
            raise FlashpointError(f"not the state of a frequency: {dict(state)!r} ({error!r})") from None
