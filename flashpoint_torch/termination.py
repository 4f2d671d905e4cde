"""SIGTERM on any rank, and all ranks know a step at which to save before they end."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from types import FrameType
from typing import Any, Final

from flashpoint.coordinator import Coordinator
from flashpoint.telemetry import logger
from flashpoint_torch.agreement import StepAgreement

ASK_AGAIN_S: Final = 5.0


class Termination:
    """Catches SIGTERM while it is open. Made on every rank, in the main thread.

    Args:
        timeout_s: from the signal to the end of the save.
    """

    def __init__(self, coordinator: Coordinator, topic: str, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._agreement = StepAgreement(coordinator, topic)
        self._received_s: float | None = None
        self._over = threading.Event()
        self._pid = os.getpid()
        # A handler may interrupt whoever holds a lock, so it takes none: it hands over to a thread.
        self._signals: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._pass_on, name="flashpoint-sigterm", daemon=True)
        self._thread.start()
        self._before: Any = None
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
        else:
            logger.warning("SIGTERM will not be followed by a save: only the main thread can catch signals")

    def reached(self, step: int) -> bool:
        """Whether this is the step at which all ranks save for the last time; called by every rank at each."""
        if not self._agreement.reached(step) or self._over.is_set():
            return False
        self._over.set()
        if self._received_s is None:  # another rank was told
            self._received_s = time.monotonic()
        return True

    @property
    def left_s(self) -> float:
        """Of the time that a save has."""
        if self._received_s is None:
            return self.timeout_s
        return max(self._received_s + self.timeout_s - time.monotonic(), 0.0)

    def close(self) -> None:
        """SIGTERM means again what it did before."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
        self._over.set()
        self._signals.put(False)
        self._agreement.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child has inherited this: it ends as it would have
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if self._received_s is None:
            self._received_s = time.monotonic()
            self._signals.put(True)

    def _pass_on(self) -> None:
        if not self._signals.get():
            return
        logger.warning("SIGTERM: the next step is saved, then this process ends, within %g s", self.timeout_s)
        try:
            self._agreement.ask()
            while not self._over.wait(ASK_AGAIN_S):  # an answer may be called off, where some rank gave none
                self._agreement.ask()
        except Exception as error:
            logger.warning("SIGTERM: no step can be agreed on to save: %s", error)
