"""What would be lost if a node, or all that fails with it, were lost now. Pure.

An object survives a loss if a node that is known to hold it does; a version, if all its objects do. Whoever asks knows
less than all nodes together, so the answer errs on one side only: what is called safe is safe.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flashpoint.replication.placement import Slot
from flashpoint.retention import Version

Kind = Literal["node", "domain", "silent"]


@dataclass(frozen=True)
class Loss:
    """Nodes that are lost together.

    Attributes:
        kind: ``node``, ``domain`` (a failure domain of several nodes) or ``silent`` (all whose agents give no sign).
        name: the node's index, or the domain's name.
    """

    kind: Kind
    name: str
    nodes: frozenset[int]


@dataclass(frozen=True)
class Aftermath:
    """What is left after a loss.

    Attributes:
        lost_objects: of each version, how many objects no node that is left is known to hold.
        memory: the newest version that is whole in the memory of what is left; None where there is none.
        storage: the newest drained version, where memory has nothing that is whole: only then is storage asked.
    """

    loss: Loss
    lost_objects: Mapping[Version, int]
    memory: Version | None
    storage: Version | None

    @property
    def goes_on_from(self) -> Version | None:
        """The version that the job would go on from; None where it would begin from scratch."""
        return self.memory or self.storage


def losses(slots: Sequence[Slot], silent: Collection[int] = ()) -> list[Loss]:
    """Every loss to ask about: each node, each failure domain of several, and those that are silent, together."""
    found = [Loss("node", str(slot.index), frozenset({slot.index})) for slot in slots]
    domains: defaultdict[str, set[int]] = defaultdict(set)
    for slot in slots:
        if slot.domain:
            domains[slot.domain].add(slot.index)
    found += [
        Loss("domain", name, frozenset(nodes)) for name, nodes in sorted(domains.items()) if len(nodes) > 1
    ]
    if silent:
        found.append(Loss("silent", "", frozenset(silent)))
    return found


def what_if(
    holders: Mapping[Version, Mapping[str, Collection[int]]],
    losses: Iterable[Loss],
    drained: Version | None = None,
) -> list[Aftermath]:
    """What each of the losses would leave.

    Args:
        holders: of each version without markers, object name -> nodes known to hold it.
        drained: the newest version in long-term storage.
    """
    indexed = {version: _by_lowest(objects.values()) for version, objects in holders.items()}
    found = []
    for loss in losses:
        lost = {version: _lost(by_lowest, loss.nodes) for version, by_lowest in indexed.items()}
        memory = max((version for version, count in lost.items() if count == 0), default=None)
        found.append(Aftermath(loss, lost, memory, drained if memory is None else None))
    return found


_Holders = frozenset[int]


def _by_lowest(objects: Iterable[Collection[int]]) -> dict[int, dict[_Holders, int]]:
    """Lowest holder -> the sets of holders that begin with it -> how many objects have just these.

    Placement gives all objects of a node the same holders, so there are few sets, and a loss needs to look only
    at those whose lowest member is lost. What nobody is known to hold stands under -1.
    """
    found: defaultdict[int, defaultdict[_Holders, int]] = defaultdict(lambda: defaultdict(int))
    for nodes in objects:
        found[min(nodes, default=-1)][frozenset(nodes)] += 1
    return {lowest: dict(sets) for lowest, sets in found.items()}


def _lost(by_lowest: Mapping[int, Mapping[_Holders, int]], nodes: frozenset[int]) -> int:
    return sum(
        count
        for lowest in (-1, *nodes)
        for holders, count in by_lowest.get(lowest, {}).items()
        if holders <= nodes
    )
