"""The invariants, asserted by one who sees all memories at once and shares no decision with those that are tested."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flashpoint.replication.messages import Key
from flashpoint.replication.placement import Slot, place
from flashpoint.retention import Version
from flashpoint.simulate.memory import Content, Memory

if TYPE_CHECKING:
    from flashpoint.simulate.world import World


class Violation(Exception):
    """An invariant does not hold."""


class Checker:
    """What was ever true of each version, and what therefore must hold."""

    def __init__(self, world: World) -> None:
        self._world = world
        settings = world.settings
        # By the placement's definition, not by asking any node.
        placement = place([Slot(i) for i in range(settings.nodes)], settings.copies)
        self._homes = {rank: {rank, *placement[rank]} for rank in range(settings.nodes)}
        self.committed: set[Key] = set()
        self.retired: set[Key] = set()
        self.met: set[Key] = set()
        self.lost_since: dict[Key, set[int]] = {}
        self.announced_keys: set[Key] = set()

    # ---- what happens -----------------------------------------------------------------------------

    def commits(self, key: Key) -> None:
        self.committed.add(key)
        self.lost_since[key] = set()

    def loses(self, node: int) -> None:
        """A node's memory is gone."""
        self.look()
        for lost in self.lost_since.values():
            lost.add(node)

    def retires(self, key: Key) -> None:
        """All ranks know it to be complete."""
        self.retired.add(key)

    def announced(self, node: int, key: Key) -> None:
        """I3's ground: what is called replicated has been so."""
        self._note_if_met(key)
        is_past = any(other > key for other in self.announced_keys)  # then nobody relies on it any more
        self.announced_keys.add(key)
        if key not in self.met and not is_past:
            raise Violation(f"I3: node {node} calls {key} replicated, and it never was")

    def gives_up(self, node: int, key: Key) -> None:
        """I3: an older version goes only for newer ones that are as high."""
        newer = [other for other in self.committed if _version(other) > _version(key)]
        for other in newer:
            self._note_if_met(other)
        keep = self._world.settings.keep
        if sum(other in self.met for other in newer) >= keep:
            return
        if key in self.announced_keys or sum(other in self.retired for other in newer) < keep:
            raise Violation(
                f"I3: node {node} gives up {key}, and there are not {keep} newer ones that met their goal"
            )

    def keeps(self, node: int, key: Key, content: Content) -> None:
        """I1: what comes from a peer is right, or is not kept."""
        if not content.good or content.save != key.digest:
            raise Violation(f"I1: node {node} keeps {content} as an object of {key}")

    def sets_aside(self, node: int, key: Key, content: Content) -> None:
        """A node takes an object for lost: only what is corrupt may be."""
        self.look()  # what was met is met, also if it is lost now
        if content == Content(key.digest, content.rank):
            raise Violation(f"I3: node {node} sets {content} of {key} aside, and it is good")

    def replaces(self, node: int, old: Key, new: Key) -> None:
        """A copy takes the place of another save of the same step."""
        if old.epoch >= new.epoch:
            raise Violation(f"I2: node {node} replaces {old} by {new}")

    def loads(self, version: Version | None, contents: Mapping[int, Content], newest: Key | None) -> None:
        """I1, I2, I3: what a recovery loads is one version, whole, and the newest that there was."""
        if version is None:
            if newest is not None:
                raise Violation(f"I3: nothing was recovered, and {newest} is there")
            return
        saves = {content.save for content in contents.values()}
        if len(saves) > 1:
            raise Violation(f"I2: {version} is loaded from {len(saves)} saves")
        for rank, content in contents.items():
            if not content.good or content.rank != rank:
                raise Violation(f"I1: rank {rank} loads {content} as {version}")
        keys = {key.digest: key for key in self.committed}
        if not saves or _version(keys[next(iter(saves))]) != version:
            raise Violation(f"I1: {version} is loaded from {saves}")
        if newest is not None and version < _version(newest):
            raise Violation(f"I3: {version} is recovered, and {newest} is there")

    # ---- what is true -----------------------------------------------------------------------------

    def newest_whole(self) -> Key | None:
        """The newest committed version of which every object has a good copy somewhere, and no node a marker."""
        memories = self._world.memories
        dirty = {step for memory in memories for step, c in memory.containers.items() if c.markers}
        here = {key for memory in memories for key in memory.complete() if key.step not in dirty}
        for key in sorted(here, reverse=True):
            if all(self._holders(key, rank, memories) for rank in self._homes):
                return key
        return None

    def rotten(self, key: Key) -> str:
        """A node that lacks a good copy of what it should hold of a version, in words; empty if there is none."""
        for rank, homes in sorted(self._homes.items()):
            if lacking := homes - self._holders(key, rank, self._world.memories):
                return f"node {min(lacking)} has no good copy of rank {rank}'s object"
        return ""

    def is_met(self, key: Key) -> bool:
        """Whether all copies are, or were before a fault took them, where they should be."""
        memories, lost = self._world.memories, self.lost_since.get(key, set())
        return all(
            homes - lost <= self._holders(key, rank, memories, even_bad=True)
            for rank, homes in self._homes.items()
        )

    def look(self) -> None:
        """Remember what has been reached: later it may be lost again."""
        for key in self.committed - self.met:
            self._note_if_met(key)

    def _note_if_met(self, key: Key) -> None:
        if key not in self.met and self.is_met(key):
            self.met.add(key)

    def _holders(self, key: Key, rank: int, memories: list[Memory], *, even_bad: bool = False) -> set[int]:
        fine = {Content(key.digest, rank), Content(key.digest, rank, good=not even_bad)}
        return {
            index
            for index, memory in enumerate(memories)
            if (found := memory.get(key)) is not None and found.objects.get(rank) in fine
        }


def _version(key: Key) -> Version:
    return Version(key.epoch, key.step)
