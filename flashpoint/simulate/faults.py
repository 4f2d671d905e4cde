"""What goes wrong in a schedule, and when: a list that a seed makes, and that can be shortened."""

from __future__ import annotations

import random
from typing import NamedTuple

KINDS = ("crash", "agent", "lose", "partition", "rot", "full", "weather")


class Fault(NamedTuple):
    """One fault.

    Attributes:
        at_s: simulated time.
        kind: "crash" (all ranks of the job), "agent" (a node's agent), "lose" (nodes with all their memory, and
            the job with them), "partition" (nodes from all others, for a while, maybe one way), "rot" (an object in a
            node's memory), "full" (a node's memory, for a while), "weather" (of the network, for a while).
        nodes: it befalls.
        seconds: it lasts, or until the job is started again.
        chance: picks what else there is to pick.
    """

    at_s: float
    kind: str
    nodes: tuple[int, ...] = ()
    seconds: float = 0.0
    chance: float = 0.0

    def __str__(self) -> str:
        nodes = f" of {', '.join(map(str, self.nodes))}" if self.nodes else ""
        return f"{self.at_s:7.3f} s  {self.kind}{nodes}, {self.seconds:.2f} s"


def plan_faults(rng: random.Random, *, nodes: int, copies: int, seconds: float, count: int) -> list[Fault]:
    """A schedule of faults, in the order of their times."""
    faults = []
    for _ in range(count):
        kind = rng.choice(KINDS)
        one = (0 if rng.random() < 0.2 else rng.randrange(nodes),)  # the leader somewhat more often
        if kind == "crash":
            hit: tuple[int, ...] = ()
        elif kind == "lose":
            hit = tuple(sorted(rng.sample(range(nodes), rng.randint(1, max(1, min(copies, nodes))))))
        else:
            hit = one
        faults.append(Fault(rng.uniform(0, seconds), kind, hit, rng.uniform(0.1, 4.0), rng.random()))
    return sorted(faults)
