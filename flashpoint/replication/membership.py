"""Who is in the job, where each node listens, and who holds copies of whose objects. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import Meta

from flashpoint.manifest import ObjectRecord
from flashpoint.replication import limits
from flashpoint.replication.messages import Count, Host, Index, Job, Node, Port
from flashpoint.replication.placement import Slot, place, sources


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One node of the job.

    Attributes:
        index: its place in the job, which a replacement takes over.
        node: identity of its memory, which a replacement does not have.
        domain: failure domain, such as a rack; empty for none but its own.
        ranks: that share its memory.
        host, port, bulk_port: where its agent listens, for messages and for bulk data.
    """

    index: Index
    node: Node
    domain: Annotated[str, Meta(max_length=limits.DOMAIN_CHARS_MAX)] = ""
    ranks: Annotated[tuple[Count, ...], Meta(max_length=limits.RANKS_MAX)]
    host: Host = ""
    port: Port = 0
    bulk_port: Port = 0


class Membership(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The nodes of one epoch of a job, by index, and the goal of its versions."""

    job: Job
    epoch: Count
    copies: Annotated[int, Meta(ge=0, le=64)]
    members: Annotated[tuple[Member, ...], Meta(min_length=1, max_length=limits.NODES_MAX)]

    def __post_init__(self) -> None:
        if [member.index for member in self.members] != list(range(len(self.members))):
            raise ValueError("members must be in the order of their indexes, none left out")

    @property
    def world_size(self) -> int:
        return sum(len(member.ranks) for member in self.members)

    @property
    def leader(self) -> int:
        """The node that learns from all others when a version is replicated."""
        return 0

    def holders(self, index: int) -> tuple[int, ...]:
        """Nodes that hold copies of this node's objects."""
        return self._placement[index]

    def sources(self, index: int) -> tuple[int, ...]:
        """Nodes whose objects this node holds copies of."""
        return tuple(sources(self._placement, index))

    def keeps(self, index: int, records: Iterable[ObjectRecord], world_size: int) -> set[str]:
        """Names of the objects of a version that this node is to hold: its own ranks', and those it holds copies of.

        Args:
            records: the version's objects.
            world_size: of the job that wrote it. What another number of ranks wrote is not this membership's to place.
        """
        if world_size != self.world_size:
            return set()
        nodes = {index, *self.sources(index)}
        return {record.name for record in records if self.node_of_rank(record.id.rank) in nodes}

    def neighbours(self, index: int) -> frozenset[int]:
        """Nodes that this one has something to say to, and that have something to say to it."""
        if index == self.leader:
            return frozenset(range(len(self.members))) - {index}
        return frozenset({*self.holders(index), *self.sources(index), self.leader}) - {index}

    def node_of_rank(self, rank: int) -> int | None:
        return self._node_of_rank.get(rank)

    @cached_property
    def _placement(self) -> Mapping[int, tuple[int, ...]]:
        return place([Slot(member.index, member.domain) for member in self.members], self.copies)

    @cached_property
    def _node_of_rank(self) -> dict[int, int]:
        return {rank: member.index for member in self.members for rank in member.ranks}
