"""The simulator: no schedule breaks an invariant, and each of a dozen bugs that are put in is found."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from flashpoint.replication import replicator as decisions
from flashpoint.replication.replicator import Answer, Replicator, Stage
from flashpoint.replication.transfer import Transfer
from flashpoint.retention import Standing, given_up
from flashpoint.simulate import Settings, shrunk, simulate
from flashpoint.simulate import job as recovery
from flashpoint.simulate.agent import Agent

Patch = pytest.MonkeyPatch


def settings_of(seed: int, nodes: int) -> Settings:
    return Settings(nodes=nodes, copies=1 + (seed % 3 == 0), keep=1 + (seed % 5 == 0))


@pytest.mark.parametrize(("nodes", "seeds"), [(2, 100), (3, 100), (4, 100), (8, 50)])
def test_no_schedule_breaks_an_invariant(nodes: int, seeds: int) -> None:
    outcomes = [simulate(seed, settings_of(seed, nodes)) for seed in range(seeds)]
    assert not [(outcome.seed, outcome.violation) for outcome in outcomes if outcome.violation]
    assert sum(outcome.recoveries for outcome in outcomes) > seeds
    assert sum(outcome.replicated for outcome in outcomes) > 3 * seeds


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("nodes", "seeds"), [(3, 10_000), (8, 10_000)])
def test_ten_thousand_schedules(nodes: int, seeds: int) -> None:
    for seed in range(seeds):
        outcome = simulate(seed, settings_of(seed, nodes))
        assert not outcome.violation, (seed, outcome.violation)


def test_a_seed_is_a_schedule() -> None:
    code = "from flashpoint.simulate import *; o = simulate(7); print(o.events, o.messages, o.saves, o.replicated)"
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)  # in two processes: the order of sets of strings differs between them
    ]
    assert runs[0] == runs[1]


# ---- bugs that are put in ---------------------------------------------------------------------------


def given_up_too_soon(patch: Patch) -> None:
    def careless(standings: Any, *, keep: int, busy: Any = ()) -> Any:
        return given_up(dict.fromkeys(standings, Standing.REPLICATED), keep=keep, busy=busy)

    patch.setattr(decisions, "given_up", careless)


def met_by_one_holder_of_all(patch: Patch) -> None:
    patch.setattr(
        Replicator,
        "_is_met",
        lambda self, key: any(self._copies_on(key, h).stage is Stage.HELD for h in self.holders),
    )


def a_leader_that_waits_for_nobody(patch: Patch) -> None:
    patch.setattr(Replicator, "_heard_met", lambda self, index, key: self._learn_replicated(key))


def held_before_it_is(patch: Patch) -> None:
    held = decisions.Held
    patch.setattr(Replicator, "_offered", lambda self, index, offer: [Answer(index, held(offer.key))])


def wrong_chunks_are_taken(patch: Patch) -> None:
    verified = Transfer.verified
    patch.setattr(Transfer, "verified", lambda self, want, chunk, ok: verified(self, want, chunk, True))


def a_restarted_leader_is_told_nothing_again(patch: Patch) -> None:
    patch.setattr(Replicator, "_unconfirmed", lambda self: [])


def a_new_order_to_configure_forgets_all(patch: Patch) -> None:
    configure = Agent.configure

    def forgetful(self: Agent, membership: Any) -> None:
        replicator, self.replicator = self.replicator, None
        if replicator is None or replicator.membership.epoch <= membership.epoch:
            configure(self, membership)
        else:
            self.replicator = replicator

    patch.setattr(Agent, "configure", forgetful)


def what_a_lost_holder_was_offered_is_not_offered_again(patch: Patch) -> None:
    for stage in (Stage.OFFERED, Stage.COPYING):
        patch.delitem(decisions.TRANSITIONS, (stage, "lost"))  # type: ignore[arg-type]
    patch.setattr(decisions._Repeat, "is_due", lambda self, now_s: self.next_s == 0.0)


def met_is_no_promise(patch: Patch) -> None:
    patch.setattr(Replicator, "_is_free", lambda self, key: True)


def recovery_steps_over_the_newest(patch: Patch) -> None:
    newest_first = recovery.newest_first
    patch.setattr(
        recovery, "newest_first", lambda versions: newest_first(versions)[1:] or newest_first(versions)
    )


def recovery_does_not_look_whether_all_is_there(patch: Patch) -> None:
    patch.setattr(recovery, "missing_objects", lambda manifest, holders: [])


def held_though_it_did_not_come(patch: Patch) -> None:
    acquired = Replicator.acquired
    patch.setattr(
        Replicator, "acquired", lambda self, key, source, _, now_s: acquired(self, key, source, None, now_s)
    )


def recovery_does_not_verify(patch: Patch) -> None:
    patch.setattr(recovery, "_is_right", lambda content, key, rank: True)


def a_scrub_takes_bad_for_good(patch: Patch) -> None:
    patch.setattr(Agent, "_is_as_sealed", lambda self, content, key, rank: True)


def a_scrub_sets_aside_without_asking(patch: Patch) -> None:
    patch.setattr(Agent, "_is_as_sealed", lambda self, content, key, rank: False)
    patch.setattr(Agent, "_mend", lambda self, key, rank: self._set_aside(key, rank))


def a_repair_is_not_kept(patch: Patch) -> None:
    patch.setattr(Agent, "_mend", lambda self, key, rank: None)


BUGS: list[Callable[[Patch], None]] = [
    given_up_too_soon,
    met_by_one_holder_of_all,
    a_leader_that_waits_for_nobody,
    held_before_it_is,
    wrong_chunks_are_taken,
    a_restarted_leader_is_told_nothing_again,
    a_new_order_to_configure_forgets_all,
    what_a_lost_holder_was_offered_is_not_offered_again,
    met_is_no_promise,
    recovery_steps_over_the_newest,
    recovery_does_not_look_whether_all_is_there,
    held_though_it_did_not_come,
    recovery_does_not_verify,
    a_scrub_takes_bad_for_good,
    a_scrub_sets_aside_without_asking,
    a_repair_is_not_kept,
]


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_that_is_put_in_is_found(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    for seed in range(300):
        outcome = simulate(seed, settings_of(seed, 4))
        if outcome.violation:
            print(f"{bug.__name__}: seed {seed}: {outcome.violation}")
            return
    pytest.fail(f"no schedule finds {bug.__name__}")


def test_a_failing_schedule_is_made_short(monkeypatch: Patch) -> None:
    recovery_steps_over_the_newest(monkeypatch)
    outcome = next(o for o in map(simulate, range(100)) if o.violation and len(o.faults) > 3)
    needed = shrunk(outcome.faults, lambda faults: bool(simulate(outcome.seed, None, faults).violation))
    assert len(needed) <= 2
    assert simulate(outcome.seed, None, needed).violation


def test_from_the_command_line() -> None:
    command = [sys.executable, "-m", "flashpoint", "simulate", "--seeds", "8", "--nodes", "3"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "8 schedules" in text
    assert "no violation" in text
    report = json.loads(subprocess.run([*command, "--json"], capture_output=True, check=True).stdout)
    assert report["seeds"] == 8
    assert report["violations"] == []
    assert report["events"] > 1000
