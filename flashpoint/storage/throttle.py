"""`Throttle`: bounds how many bytes a second are written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

_SLICE_S: Final = 0.5  # of one wait, so that whoever watches sees that it goes on


class Throttle:
    """Lets bytes pass at a rate, evenly: what was not used before is not made up for.

    Args:
        bytes_per_s: the rate; 0 for none.
        stop: ends every wait at once.
    """

    def __init__(self, bytes_per_s: int, stop: threading.Event) -> None:
        self._rate = bytes_per_s
        self._stop = stop
        self._free_s = 0.0

    def take(self, nbytes: int, waiting: Callable[[], None]) -> None:
        """Wait until these bytes may pass; ``waiting`` is called now and then meanwhile."""
        if not self._rate:
            return
        begin_s = max(time.monotonic(), self._free_s)
        self._free_s = begin_s + nbytes / self._rate
        while (left_s := begin_s - time.monotonic()) > 0 and not self._stop.wait(min(left_s, _SLICE_S)):
            waiting()
