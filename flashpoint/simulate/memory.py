"""One node's memory: containers by step, as `flashpoint.objects` keeps them in tmpfs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from flashpoint.replication.messages import Key
from flashpoint.replication.replicator import Local
from flashpoint.retention import Version


class Content(NamedTuple):
    """Bytes of an object: of which save, by which rank, and whether they are still as they were written."""

    save: str
    rank: int
    good: bool = True


@dataclass
class Container:
    """One step's folder. Objects are found by their names alone: whose bytes they are is only seen by a checksum."""

    manifest: Key | None = None
    objects: dict[int, Content] = field(default_factory=dict)
    markers: set[int] = field(default_factory=set)
    set_aside: set[int] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        return self.manifest is not None and not self.markers


class Memory:
    """A node's tmpfs. One that was replaced has another identity, and nothing in it."""

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self.epoch = 0
        self.is_full = False
        self.containers: dict[int, Container] = {}

    def container(self, step: int) -> Container:
        return self.containers.setdefault(step, Container())

    def complete(self) -> list[Key]:
        return [c.manifest for c in self.containers.values() if c.manifest is not None and not c.markers]

    def versions(self) -> set[Version]:
        return {Version(key.epoch, key.step) for key in self.complete()}

    def get(self, key: Key) -> Container | None:
        """The version with this very manifest, if it is complete here."""
        found = self.containers.get(key.step)
        return found if found is not None and found.is_complete and found.manifest == key else None

    def local(self, ranks: Iterable[int], world_size: int) -> dict[Key, Local]:
        """What the replicator is told, as `inventory.local_of` tells it."""
        everything = tuple(name_of(rank) for rank in range(world_size))
        own = tuple(name_of(rank) for rank in ranks)
        return {
            key: Local(
                100,
                everything,
                own,
                frozenset(map(name_of, found.objects)),
                is_ours=True,
                is_withdrawn=bool(found.set_aside - found.objects.keys()),
            )
            for key in self.complete()
            if (found := self.containers[key.step])
        }

    def collect_garbage(self) -> None:
        """As `CheckpointObjectManager.collect_garbage`, while no rank of this node lives."""
        for step in [step for step, c in self.containers.items() if not c.is_complete]:
            del self.containers[step]


def name_of(rank: int) -> str:
    return f"rank{rank:05d}-0.safetensors"


def rank_of(name: str) -> int:
    return int(name[4:9])
