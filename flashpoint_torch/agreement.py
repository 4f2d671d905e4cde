"""Ranks agree on a step at which all do the same, without a collective and without a look at the store per step.

Rank 0's clock says that it is time, or one rank is told to end: all must act at one and the same step, though
each may be in another. So whoever wants it tells rank 0, whose thread asks every rank's thread for the last step
that it has passed. Once it has answered, a rank passes no further step before it hears the outcome: a step
after the highest answer. A step in which nobody asks anything costs the look at a flag.

    any rank     --wanted-->   rank 0
    rank 0       --ask-->      every rank   from here on it holds at its next step
    every rank   --report-->   rank 0       the last step that it passed
    rank 0       --target-->   every rank   the step at which all act
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Final

from flashpoint.coordinator import Coordinator
from flashpoint.errors import DeadlineError, FlashpointError
from flashpoint.telemetry import logger
from flashpoint_torch.frequency import Frequency
from flashpoint_torch.progress import StepInfo

GATHER_S: Final = 20.0  # in which threads answer; they wait for nobody's training
HOLD_S: Final = 3 * GATHER_S
_IDLE_S: Final = 600.0  # a wait for the next question, before it is waited for again
_CLOSE_S: Final = 5.0
_CALLED_OFF: Final = b"-1"


class StepAgreement:
    """One question, asked again and again: at which step? Every rank makes one, with the same topic."""

    def __init__(self, coordinator: Coordinator, topic: str) -> None:
        self._coordinator = coordinator
        self._topic = topic
        self._alone = coordinator.world_size == 1
        self._changed = threading.Condition()
        self._last = -1  # step that this rank has passed
        self._targets: list[int] = []  # agreed on, not reached yet; ascending
        self._holding = False
        self._round = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        if not self._alone:
            work = self._lead if coordinator.is_leader else self._follow
            self._thread = threading.Thread(target=self._run, args=(work,), name=topic, daemon=True)
            self._thread.start()

    def ask(self) -> None:
        """All ranks are to act soon. From any thread of any rank, but not from a signal handler."""
        with self._changed:
            if self._alone:
                self._targets = [self._last + 1]
                return
            if self._coordinator.is_leader:
                self._holding = True  # or it might pass a step before its thread has woken up
            key = self._key("wanted")
        self._coordinator.publish(key, b"yes")

    def reached(self, step: int) -> bool:
        """Whether this is the step at which all act; called by every rank at the same steps, ascending."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._holding, HOLD_S):
                self._holding = False
                logger.warning(
                    "%s: no rank told within %g s at which step; training goes on", self._topic, HOLD_S
                )
            self._last = step
            due = [target for target in self._targets if target <= step]
            del self._targets[: len(due)]
            return bool(due)

    def close(self) -> None:
        """Let the thread end."""
        self._closed = True
        if self._thread is not None and self._thread.is_alive():
            key = (
                self._key("wanted")
                if self._coordinator.is_leader
                else self._key(f"ask/{self._coordinator.rank}")
            )
            with contextlib.suppress(FlashpointError, RuntimeError):  # a store that is gone has let it go
                self._coordinator.publish(key, b"close")
            self._thread.join(_CLOSE_S)

    # ---- in the background ----------------------------------------------------------------------

    def _run(self, work: Callable[[], None]) -> None:
        try:
            while not self._closed:
                work()
        except (FlashpointError, RuntimeError) as error:  # the store went with its host
            if not self._closed:
                logger.debug("%s: ranks cannot agree any more: %s", self._topic, error)
        self._settle(None)

    def _lead(self) -> None:
        key = self._key("wanted")
        if not self._awaited(key):
            return
        ranks = self._coordinator.world_size
        for rank in range(1, ranks):
            self._coordinator.publish(self._key(f"ask/{rank}"), b"?")
        last = self._hold()
        reports = self._coordinator.gather(self._key("report"), b"%d" % last, GATHER_S)
        assert reports is not None
        missing = sorted(set(range(ranks)).difference(reports))
        if missing:
            logger.warning("%s: ranks %s did not answer within %g s", self._topic, missing[:20], GATHER_S)
        # Ranks in step with this one may have passed its next step, which it has not itself. One more is ahead of
        # them in any case: at which step all act does not hang on whose thread was quick.
        target = None if missing else max(last + 2, max(map(int, reports.values())) + 1)
        self._coordinator.publish(self._key("target"), _CALLED_OFF if target is None else b"%d" % target)
        self._coordinator.remove(key)
        if self._round:  # every rank that answers now has read the one before
            self._coordinator.remove(self._key("target", self._round - 1))
        self._settle(target)

    def _follow(self) -> None:
        key = self._key(f"ask/{self._coordinator.rank}")
        if not self._awaited(key):
            return
        last = self._hold()
        self._coordinator.gather(self._key("report"), b"%d" % last, GATHER_S)
        try:
            target = int(self._coordinator.fetch(self._key("target"), 2 * GATHER_S))
        except DeadlineError:
            target = -1
        self._coordinator.remove(key)
        self._settle(target if target >= 0 else None)

    def _awaited(self, key: str) -> bool:
        while not self._closed:
            with contextlib.suppress(DeadlineError):
                return self._coordinator.fetch(key, _IDLE_S) != b"close" and not self._closed
        return False

    def _hold(self) -> int:
        with self._changed:
            self._holding = True
            return self._last

    def _settle(self, target: int | None) -> None:
        with self._changed:
            self._holding = False
            if target is not None:
                self._targets.append(target)
            self._round += 1
            self._changed.notify_all()

    def _key(self, what: str, number: int | None = None) -> str:
        return f"{self._topic}/{self._round if number is None else number}/{what}"


class Cadence:
    """A `Frequency` on which all ranks agree: steps and epochs they count alike, seconds are by rank 0's clock.

    With several ranks seconds fire two steps after the one at which rank 0 saw that time was up.
    """

    def __init__(self, frequency: Frequency, coordinator: Coordinator, topic: str) -> None:
        self._frequency = frequency
        self._is_leader = coordinator.is_leader
        self._agreement = (
            StepAgreement(coordinator, topic)
            if frequency.secs is not None and coordinator.world_size > 1
            else None
        )
        self._asked_at: int | None = None

    def due(self, step: StepInfo) -> bool:
        """Whether it is due at this step; called once a step, by every rank."""
        counted = self._frequency.count(ends_epoch=step.ends_epoch)
        timed = self._timed(step.global_step)
        return counted or timed

    def _timed(self, step: int) -> bool:
        if self._agreement is None:
            fired = self._frequency.time_is_up()
        else:
            fired = self._agreement.reached(step)
        if fired:
            self._frequency.restart_clock()
            self._asked_at = None
        elif (
            self._agreement is not None
            and self._is_leader
            and self._frequency.time_is_up()
            and (self._asked_at is None or step > self._asked_at + 1)  # called off, so it is asked again
        ):
            self._asked_at = step
            self._agreement.ask()
        return fired

    def state_dict(self) -> dict[str, Any]:
        return self._frequency.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._frequency.load_state_dict(state)

    def close(self) -> None:
        if self._agreement is not None:
            self._agreement.close()
