"""Which nodes hold copies of whose objects: decided alike on every node, so nobody asks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flashpoint.errors import ConfigError


class Slot(NamedTuple):
    """A node's place in the job.

    Attributes:
        index: stays when the node behind it is replaced.
        domain: what fails together, such as a rack; empty for a node that is a domain of its own.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody misses
    domain: str = ""


def place(slots: Sequence[Slot], copies: int) -> dict[int, tuple[int, ...]]:
    """For each slot, the slots that hold copies of its objects: ``copies`` others, or all there are.

    An object and its copies lie in as many domains as there are for them: two lie in one domain only where
    every domain has one already. Within that rule the load (for how many slots a slot holds copies) is as
    even as it can be. Nothing but indexes and domains is looked at, not even their order, so a replaced
    node changes nothing.

    The slots stand in a ring, domain beside domain, and a slot's copies go to those that divide the ring
    into equal parts with it. No part is shorter than the largest domain, or, where there are fewer domains
    than copies, longer than the smallest; so the copies meet no domain twice, or meet them all, and each
    slot holds exactly as many as it has. A domain too large or too small for that is set aside first: each
    slot of the others has one copy there, the most (or the least) that the rule leaves to it, and the same
    holds for the rest of the ring with one copy less. The slots that were set aside stand between those
    of the ring, in its first part, and divide it as well.

    Raises:
        ConfigError: ``copies`` is negative, or two slots have one index.
    """
    if copies < 0:
        raise ConfigError(f"copies is {copies}: it must be 0 or more")
    holders: dict[int, list[int]] = {slot.index: [] for slot in slots}
    if len(holders) < len(slots):
        raise ConfigError(f"{len(slots)} nodes have {len(holders)} different indexes: each needs its own")
    if not slots:
        return {}
    copies = min(copies, len(slots) - 1)

    domains = _domains(slots)
    enough = len(domains) > copies
    domains.sort(key=lambda members: (len(members) if enough else -len(members), members))
    aside: list[list[int]] = []
    size, parts = len(slots), copies + 1
    # Set aside what has more than a part, or less than one. What is left has at least as many domains as
    # parts, or at most: the loop ends before the ring is empty, and with at least one part.
    while parts * len(domains[-1]) > size if enough else parts * len(domains[-1]) < size:
        aside.append(domains.pop())
        size -= len(aside[-1])
        parts -= 1

    ring = [index for members in domains for index in members]
    for position, index in enumerate(ring):
        holders[index] = [ring[(position + part * size // parts) % size] for part in range(1, parts)]
    strangers = [index for members in aside for index in members]
    # `parts` turns of all strangers go once around the ring, so each slot is met equally often, but for one.
    turns = parts * len(strangers)
    for position, index in enumerate(strangers):
        holders[index] = [ring[step * size // turns] for step in range(position, turns, len(strangers))]
    for members in aside:
        others = sorted(holders.keys() - members)
        for position, index in enumerate(others):
            holders[index].append(members[position % len(members)])
    return {index: tuple(holders[index]) for index in sorted(holders)}


def sources(placement: Mapping[int, Iterable[int]], index: int) -> tuple[int, ...]:
    """The slots whose objects slot ``index`` holds copies of."""
    return tuple(sorted(source for source, holders in placement.items() if index in holders))


def _domains(slots: Iterable[Slot]) -> list[list[int]]:
    """The indexes in each domain, sorted."""
    found: dict[tuple[str, int], list[int]] = {}
    for index, domain in slots:
        found.setdefault((domain, -1) if domain else ("", index), []).append(index)
    return [sorted(members) for members in found.values()]
