"""When something is due: every combination of epochs, steps and seconds, by a clock that is turned by hand."""

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch.distributed as dist

from flashpoint.coordinator import SingleProcessCoordinator
from flashpoint.errors import ConfigError, FlashpointError
from flashpoint_torch.agreement import Cadence, StepAgreement
from flashpoint_torch.coordinator import default_coordinator
from flashpoint_torch.frequency import Frequency
from flashpoint_torch.progress import StepInfo
from tests.torch.workers import Workers

PER_EPOCH = 4
STEP_S = 10.0  # that the clock is turned for each step


class Clock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def steps(number: int, first: StepInfo | None = None) -> Iterable[StepInfo]:
    step = first or StepInfo.first(PER_EPOCH)
    for _ in range(number):
        yield step
        step = step.next()


def fired(
    cadence: Cadence, clock: Clock, number: int, *, together: Callable[[], None] = lambda: None
) -> list[int]:
    """The steps of ``number`` at which it is due; the clock has gone on by `STEP_S` when each is done."""
    found = []
    for step in steps(number):
        clock.now += STEP_S
        together()
        if cadence.due(step):
            found.append(step.global_step)
    return found


# epochs end at steps 3, 7, 11; 30 s are over at steps 2, 5, 8, 11; 25 s as well, since clocks are read at steps
TABLE = [
    # (epochs, steps, secs), due at
    ((None, None, None), []),
    ((1, None, None), [3, 7, 11]),
    ((2, None, None), [7]),
    ((None, 1, None), list(range(12))),
    ((None, 5, None), [4, 9]),
    ((None, None, 30.0), [2, 5, 8, 11]),
    ((None, None, 25.0), [2, 5, 8, 11]),
    ((None, None, 1e9), []),
    ((1, 3, None), [2, 3, 5, 7, 8, 11]),
    ((1, None, 50.0), [3, 4, 7, 9, 11]),
    ((None, 5, 30.0), [2, 4, 5, 8, 9, 11]),
    ((2, 5, 40.0), [3, 4, 7, 9, 11]),
]


@pytest.mark.parametrize(("frequencies", "wanted"), TABLE)
def test_when_it_is_due(frequencies: tuple[Any, Any, Any], wanted: list[int]) -> None:
    clock = Clock(1e6)
    cadence = Cadence(Frequency(*frequencies, clock=clock), SingleProcessCoordinator(), "t")
    assert fired(cadence, clock, 12) == wanted


@pytest.mark.parametrize("bad", [(0, None, None), (None, -1, None), (None, 2.5, None), (True, None, None),
                                 (None, None, 0), (None, None, float("nan")), (None, None, True)])  # fmt: skip
def test_a_frequency_that_cannot_be(bad: tuple[Any, Any, Any]) -> None:
    with pytest.raises(ConfigError, match="freq_"):
        Frequency(*bad)


# ---- after a resume ---------------------------------------------------------------------------------


def resumed(state: dict[str, Any], *frequencies: Any, clock: Clock) -> Cadence:
    after = Frequency(*frequencies, clock=clock)
    after.load_state_dict(state)
    return Cadence(after, SingleProcessCoordinator(), "t")


def test_counting_goes_on_after_a_resume() -> None:
    clock = Clock()
    before = Frequency(None, 5, None, clock=clock)
    fired(Cadence(before, SingleProcessCoordinator(), "t"), clock, 3)
    assert fired(resumed(before.state_dict(), None, 5, None, clock=clock), clock, 8) == [1, 6]


def test_the_configuration_wins_over_what_was_saved() -> None:
    clock = Clock()
    before = Frequency(None, 100, 1e6, clock=clock)
    fired(Cadence(before, SingleProcessCoordinator(), "t"), clock, 3)
    state = before.state_dict()
    assert fired(resumed(state, None, 4, None, clock=clock), clock, 6) == [0, 4]
    assert fired(resumed(state, None, None, 50.0, clock=clock), clock, 6) == [1]
    assert fired(resumed(state, None, None, None, clock=clock), clock, 6) == []


def test_a_job_that_was_down_is_not_late() -> None:
    clock = Clock()
    before = Frequency(None, None, 60.0, clock=clock)
    fired(Cadence(before, SingleProcessCoordinator(), "t"), clock, 3)  # 30 s of training
    state = before.state_dict()
    after = Frequency(None, None, 60.0, clock=Clock(5e8))  # another machine's clock, days later
    after.load_state_dict(state)
    clock = Clock(5e8)
    after._clock = clock
    assert fired(Cadence(after, SingleProcessCoordinator(), "t"), clock, 5) == [2]  # after 30 s more


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(FlashpointError, match="not the state of a frequency"):
        Frequency(1).load_state_dict({"steps": 3})


# ---- several ranks ----------------------------------------------------------------------------------


SECONDS_AMONG_RANKS = [
    ((None, None, 30.0), [4, 9]),  # two steps after rank 0's clock has said so
    ((1, None, 50.0), [3, 6, 7, 11]),
    ((None, 4, 30.0), [3, 4, 7, 9, 11]),
    ((2, 5, None), [4, 7, 9]),
    ((None, None, None), []),
]


def on_ranks(skews: list[tuple[float, float]]) -> list[list[int]]:
    """Due where, on this rank, whose clock begins elsewhere and runs at another speed."""
    coordinator, _ = default_coordinator()
    offset, speed = skews[coordinator.rank]
    found = []
    for frequencies, _ in SECONDS_AMONG_RANKS:
        clock = Clock(offset)
        frequency = Frequency(*frequencies, clock=lambda clock=clock: clock.now * speed)
        cadence = Cadence(frequency, coordinator, f"case-{len(found)}")
        found.append(fired(cadence, clock, 12, together=dist.barrier))
        dist.barrier()
        cadence.close()
    return found


@pytest.mark.parametrize(
    "skews", [[(0.0, 1.0), (1e9, 1.0)], [(0.0, 1.0), (0.0, 50.0)], [(1e9, 1.0), (0.0, 1e-3)]]
)
@pytest.mark.fault(39)
def test_ranks_agree_though_their_clocks_do_not(workers: Workers, skews: list[tuple[float, float]]) -> None:
    wanted = [due for _, due in SECONDS_AMONG_RANKS]
    assert workers.run(2, on_ranks, skews) == [wanted, wanted]


def run_apart(number: int) -> list[int]:
    """The first steps of ``number`` at which all act; ranks have no step in common: one races, one is slow, and
    the last one asks again and again."""
    coordinator, _ = default_coordinator()
    agreement = StepAgreement(coordinator, "apart")
    found = []
    deadline = time.monotonic() + 60
    for step in itertools.count():
        time.sleep(0.0005 if coordinator.rank == 1 else 0.003)
        if agreement.reached(step):
            found.append(step)
        if len(found) == number:
            break
        assert time.monotonic() < deadline
        if coordinator.rank == coordinator.world_size - 1 and step % 10 == 0:
            agreement.ask()
    dist.barrier()
    agreement.close()
    return found


def test_ranks_that_run_apart_act_at_the_same_steps(workers: Workers) -> None:
    first, *others = workers.run(3, run_apart, 4)
    assert others == [first, first]


# ---- progress ---------------------------------------------------------------------------------------


def test_the_step_after_a_step() -> None:
    found = [(step.epoch, step.epoch_step, step.global_step) for step in steps(6, StepInfo(1, 2, 6, 4))]
    assert found == [(1, 2, 6), (1, 3, 7), (2, 0, 8), (2, 1, 9), (2, 2, 10), (2, 3, 11)]
    assert StepInfo(0, 3, 3, 4).ends_epoch
    assert not StepInfo(0, 2, 2, 4).ends_epoch


@pytest.mark.parametrize("bad", [(0, 4, 4, 4), (0, 0, 0, 0), (-1, 0, 0, 4), (0, 0, 1.5, 4), (True, 0, 0, 4)])
def test_a_step_that_cannot_be(bad: tuple[Any, ...]) -> None:
    with pytest.raises(FlashpointError):
        StepInfo(*bad)
