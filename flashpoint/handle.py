"""The handle of a save: what a training loop waits on, looks at, or ignores."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from flashpoint.errors import DeadlineError
from flashpoint.telemetry import Timings

MOMENTS: Final = ("staged", "complete", "replicated")


class SaveHandle:
    """One save on this rank.

    Args:
        has_copies: whether the version is to be copied to other nodes.

    A failed save does not stop training: `wait` returns False and `error` says why, unless the
    configuration is ``strict``.

    Attributes:
        step: of the version.
        nbytes: staged by this rank, in bytes.
        error: why the save did not become complete, on whichever rank that was; None otherwise.
        replication_error: why a complete version did not become replicated; None otherwise.
        timings: seconds by part: ``blocking`` (what training waited for), ``stage``, ``write``,
            ``commit``, ``complete`` and ``replicated`` (from the call to the moment).
        begin_s: when it was called for, of ``time.perf_counter()``.
    """

    def __init__(self, step: int, *, strict: bool, has_copies: bool = False) -> None:
        self.step = step
        self.nbytes = 0
        self.error: Exception | None = None
        self.replication_error: Exception | None = None
        self.timings = Timings()
        self._strict = strict
        self.begin_s = time.perf_counter()
        self._moments = {moment: threading.Event() for moment in MOMENTS}
        if not has_copies:
            self._moments["replicated"] = self._moments["complete"]
        self._settled = threading.Condition()

    def done(self, moment: str = "complete") -> bool:
        """Whether the version has reached ``moment`` (``staged``, ``complete`` or ``replicated``)."""
        return self._event(moment).is_set()

    def wait(self, moment: str = "complete", timeout_s: float = 60.0) -> bool:
        """Wait until the version has reached ``moment``.

        *Replicated* is reached when every node that should hold copies has confirmed them; in a job without
        copies, with *complete*.

        Returns:
            True when it has; False when the save failed, or has not got there within ``timeout_s``
            (then `error`, and for *replicated* also `replication_error`, is still None).

        Raises:
            SaveError, NoSpaceError, DeadlineError: instead of False, when the save is ``strict``.
        """
        event = self._event(moment)
        with self._settled:
            self._settled.wait_for(lambda: event.is_set() or self._failure(moment) is not None, timeout_s)
        if event.is_set():
            return True
        if self._strict:
            raise self._failure(moment) or DeadlineError(
                f"step {self.step} was not {moment} within {timeout_s:g} s"
            )
        return False

    def _failure(self, moment: str) -> Exception | None:
        return self.error or (self.replication_error if moment == "replicated" else None)

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Around what training waits for (used by the saver): from this handle's making to the end of it."""
        try:
            yield
        finally:
            self.timings["blocking"] = time.perf_counter() - self.begin_s

    def reach(self, moment: str) -> None:
        """Tell that the version has reached ``moment`` (called by the saver)."""
        with self._settled:
            self.timings[moment] = time.perf_counter() - self.begin_s
            self._event(moment).set()
            self._settled.notify_all()

    def fail(self, error: Exception) -> None:
        """Tell that the version will not become complete (called by the saver)."""
        with self._settled:
            self.error = error
            self._settled.notify_all()

    def fail_replication(self, error: Exception) -> None:
        """Tell that the version, complete as it is, will not become replicated (called by the saver)."""
        with self._settled:
            self.replication_error = error
            self._settled.notify_all()

    def _event(self, moment: str) -> threading.Event:
        try:
            return self._moments[moment]
        except KeyError:
            raise ValueError(
                f"{moment!r} is no moment of a save: wait for one of {', '.join(MOMENTS)}"
            ) from None

    def __repr__(self) -> str:
        reached = [moment for moment in MOMENTS if moment in self.timings]
        state = "failed" if self.error else (reached or ["started"])[-1]
        return f"<SaveHandle of step {self.step}: {state}>"
