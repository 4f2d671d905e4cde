"""One schedule: nodes, agents, a job and its faults, from a seed to an outcome."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from flashpoint.retention import Standing
from flashpoint.simulate.agent import Agent
from flashpoint.simulate.checker import Checker, Violation
from flashpoint.simulate.faults import Fault, plan_faults
from flashpoint.simulate.job import Job
from flashpoint.simulate.memory import Memory
from flashpoint.simulate.network import Network, Weather
from flashpoint.simulate.scheduler import Scheduler

__all__ = ["Outcome", "Settings", "Violation", "World", "simulate"]

_QUIET_S: Final = 150.0  # long enough for what is told again more and more rarely
_SILENT_S: Final = 40.0  # longer than anything waits before it is told again
_LOOK_S: Final = 2.0


@dataclass(frozen=True)
class Settings:
    """Of all schedules of a run.

    Attributes:
        nodes: with one rank each.
        copies, keep: as in `FlashpointConfig`.
        seconds: simulated, in which there are faults.
        faults: how many at most.
        interval_s: between two saves, at most.
    """

    nodes: int = 4
    copies: int = 1
    keep: int = 1
    seconds: float = 12.0
    faults: int = 8
    interval_s: float = 1.0


@dataclass
class Outcome:
    """Of one schedule.

    Attributes:
        violation: of an invariant, in words; empty if there was none.
        faults: all that were planned.
        events, messages, saves, replicated: how much was simulated.
    """

    seed: int
    faults: Sequence[Fault]
    violation: str = ""
    events: int = 0
    messages: int = 0
    saves: int = 0
    replicated: int = 0
    recoveries: int = 0
    log: list[str] = field(default_factory=list)


class World:
    """Everything that there is in a schedule."""

    def __init__(self, settings: Settings, rng: random.Random) -> None:
        self.settings, self.rng = settings, rng
        self.scheduler = Scheduler()
        weather = Weather(delay_s=rng.choice([0.002, 0.02, 0.3]), loss=rng.choice([0.0, 0.0, 0.1, 0.3]))
        self.network = Network(self.scheduler, rng, weather)
        self.memories = [Memory(f"node-{index}") for index in range(settings.nodes)]
        self.checker = Checker(self)
        self.agents: list[Agent] = []
        self.digests = itertools.count()  # no two saves are the same bytes
        self.is_quiet = False
        self.waits = rng.random() < 0.5  # whether a save waits for the one before it to be replicated
        self.jobs = 1
        for index in range(settings.nodes):
            self.agents.append(Agent(self, index, None))
        self.job = Job(self)

    # ---- agents and jobs ----------------------------------------------------------------------------

    def start_agent(self, index: int) -> None:
        """One that lives already goes on; a restarted one goes on from what its folder says."""
        before = self.agents[index]
        if before.is_alive:
            return
        is_same_memory = before.memory is self.memories[index]
        assigned = before.replicator.membership if before.replicator is not None and is_same_memory else None
        self.agents[index] = Agent(self, index, assigned)

    def restart_job(self) -> None:
        if not self.job.is_alive:
            self.jobs += 1
            self.job = Job(self)

    # ---- faults -----------------------------------------------------------------------------------

    def befall(self, fault: Fault) -> None:
        seconds, after = fault.seconds, self.scheduler.after
        if fault.kind in ("crash", "lose"):
            self.job.crash()
            after(seconds, self.restart_job)
        if fault.kind in ("agent", "lose"):
            for node in fault.nodes:
                self.agents[node].die()
        if fault.kind == "lose":
            for node in fault.nodes:
                self.checker.loses(node)
                self.memories[node] = Memory(f"{self.memories[node].identity}'")
        elif fault.kind == "partition":
            for node in fault.nodes:
                for other in range(self.settings.nodes):
                    if fault.chance > 0.3:
                        self.network.cut(node, other, self.scheduler.now_s + 4 * seconds)
                    if fault.chance < 0.7:
                        self.network.cut(other, node, self.scheduler.now_s + 4 * seconds)
        elif fault.kind == "rot":
            self._rot(fault)
        elif fault.kind == "full":
            memory = self.memories[fault.nodes[0]]
            memory.is_full = True
            after(seconds, _has_room, memory)
        elif fault.kind == "weather":
            self.network.weather = Weather(
                delay_s=0.5 * fault.chance, loss=0.4 * fault.chance, doubling=0.3, rot=0.2 * fault.chance
            )
            after(seconds, self._clears_up)

    def _clears_up(self) -> None:
        self.network.weather = Weather()

    def _rot(self, fault: Fault) -> None:
        """Change one object's bytes in memory."""
        memory = self.memories[fault.nodes[0]]
        places = [(step, rank) for step, c in sorted(memory.containers.items()) for rank in sorted(c.objects)]
        if places:
            step, rank = places[int(fault.chance * len(places))]
            objects = memory.containers[step].objects
            objects[rank] = objects[rank]._replace(good=False)

    # ---- time -------------------------------------------------------------------------------------

    def run(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            self.scheduler.after(fault.at_s, self.befall, fault)
        self.scheduler.run(self.settings.seconds)
        self._settle_down()

    def _settle_down(self) -> None:
        """I4: when nothing goes wrong any more, all that was begun comes to an end."""
        self.network.heal()
        for memory in self.memories:
            memory.is_full = False
        self.restart_job()
        self.is_quiet = True
        self._await_rest()
        self._rot_all_over()
        self._await_rest()
        for indexes in (
            range(self.settings.nodes),
            [0],
        ):  # the leader once more, when no other has news for it
            self._restart_agents(indexes)
            self._await_rest()
        self.scheduler.run(self.scheduler.now_s + _SILENT_S)
        messages = self.network.messages
        self.scheduler.run(self.scheduler.now_s + _SILENT_S)
        if self.network.messages != messages:
            raise Violation("I4: something is told for ever")

    def _rot_all_over(self) -> None:
        """One copy of each object of the newest version rots: with another one left, it is repaired."""
        newest = self.checker.newest_whole()
        if newest is None or not self.settings.copies:
            return
        for rank in range(self.settings.nodes):
            held = [found.objects for memory in self.memories if (found := memory.get(newest)) is not None]
            good = [objects for objects in held if rank in objects and objects[rank].good]
            if len(good) > 1:
                objects = self.rng.choice(good)
                objects[rank] = objects[rank]._replace(good=False)

    def _await_rest(self) -> None:
        until_s = self.scheduler.now_s + _QUIET_S
        while (wrong := self._what_is_unfinished()) and self.scheduler.now_s < until_s:
            self.scheduler.run(self.scheduler.now_s + _LOOK_S)
        if wrong:
            raise Violation(wrong)

    def _restart_agents(self, indexes: Sequence[int]) -> None:
        """One after the other; each finds its way back to what all know."""
        for index in indexes:
            self.agents[index].die()
            self.scheduler.run(self.scheduler.now_s + self.rng.uniform(0, 1))
            self.start_agent(index)
            self.scheduler.run(self.scheduler.now_s + self.rng.uniform(0, 1))
            self.agents[index].configure(self.job.membership)

    def _what_is_unfinished(self) -> str:
        for agent in self.agents:
            if not agent.is_alive:
                return f"I4: the agent of node {agent.index} is not started again"
            if not agent.is_idle:
                return f"I4: node {agent.index} is busy for ever"
        newest = self.checker.newest_whole()
        if newest is None or not self.job.is_done:
            return f"I4: the job does not come to its end with {newest}"
        for agent in self.agents:
            if agent.replicator is None or agent.replicator.standing(newest) is not Standing.REPLICATED:
                return f"I4: node {agent.index} never hears that {newest} is replicated"
        if rotten := self.checker.rotten(newest):
            return f"I1: {rotten} of {newest}, and others have"
        for index, memory in enumerate(self.memories):
            if len(memory.complete()) > self.settings.keep:
                return f"I6: node {index} keeps {sorted(memory.complete())}"
        return ""


def _has_room(memory: Memory) -> None:
    memory.is_full = False


def simulate(seed: int, settings: Settings | None = None, faults: Sequence[Fault] | None = None) -> Outcome:
    """Run one schedule.

    Args:
        seed: makes the faults, and all chance in network and job.
        faults: instead of the seed's own.
    """
    settings = settings or Settings()
    rng = random.Random(seed)
    planned = plan_faults(
        rng,
        nodes=settings.nodes,
        copies=settings.copies,
        seconds=settings.seconds,
        count=rng.randint(0, settings.faults),
    )
    world = World(settings, rng)
    outcome = Outcome(seed, planned if faults is None else list(faults))
    try:
        world.run(outcome.faults)
    except Violation as violation:
        outcome.violation = f"at {world.scheduler.now_s:.3f} s: {violation}"
    outcome.events, outcome.messages = world.scheduler.events, world.network.messages
    outcome.saves, outcome.replicated = len(world.checker.committed), len(world.checker.met)
    outcome.recoveries = world.jobs
    return outcome
