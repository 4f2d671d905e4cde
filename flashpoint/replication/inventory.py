"""What lies in a node's job root, as replication sees it: read from the files, never remembered as true."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from flashpoint.errors import FlashpointError, ManifestError
from flashpoint.manifest import MANIFEST_NAME, ObjectRecord
from flashpoint.objects import CheckpointObjectManager, ManifestSummary
from flashpoint.replication.messages import Key
from flashpoint.replication.replicator import Local

_Stamp = tuple[int, int, int]
_TICK_NS: Final = 100_000_000  # of a file's times, at the very most


@dataclass
class Item:
    """A version in this node's memory.

    Attributes:
        summary: of its manifest.
        records: its objects, by name.
        held: names of those that lie here.
        set_aside: names of those that were found corrupt here, without a good copy anywhere.
        is_fresh: whether its folder changed so lately that the next change might bear the same time.
    """

    key: Key
    summary: ManifestSummary
    records: dict[str, ObjectRecord]
    held: frozenset[str]
    set_aside: frozenset[str]
    stamp: _Stamp
    is_fresh: bool
    _own: tuple[Collection[int], tuple[str, ...]] | None = None

    def own(self, ranks: Collection[int]) -> tuple[str, ...]:
        """Objects that these ranks wrote; remembered, since to parse thousands of names takes milliseconds."""
        if self._own is None or self._own[0] != ranks:
            names = tuple(name for name, record in self.records.items() if record.id.rank in ranks)
            self._own = (ranks, names)
        return self._own[1]


class Inventory:
    """The versions without markers of one job root. Looks again only at folders that have changed."""

    def __init__(self, objects: CheckpointObjectManager) -> None:
        self._objects = objects
        self._items: dict[int, Item] = {}

    def look(self) -> dict[Key, Item]:
        """What is there now."""
        dirty = self._objects.dirty_steps()
        found: dict[int, Item] = {}
        for step in self._objects.steps():
            item = None if step in dirty else self._item(step)
            if item is not None:
                found[step] = item
        self._items = found
        return {item.key: item for item in found.values()}

    def get(self, key: Key) -> Item | None:
        """The version with this very content, as of the last look."""
        item = self._items.get(key.step)
        return item if item is not None and item.key == key else None

    def _item(self, step: int) -> Item | None:
        container = self._objects.container(step)
        known = self._items.get(step)
        try:
            stamp = _stamp(container.path)
            if known is not None and known.stamp == stamp and not known.is_fresh:
                return known
            summary = self._objects.read_summary(container)
            records = {record.name: record for record in summary.record.objects}
            held = self._objects.held_objects(container, summary.record.objects)
            key = Key(summary.record.epoch, step, summary.digest)
            is_fresh = abs(time.time_ns() - stamp[0]) < _TICK_NS
            set_aside = self._objects.objects_set_aside(container)
            return Item(key, summary, records, frozenset(held), frozenset(set_aside), stamp, is_fresh)
        except ManifestError:  # if it was whole before, a scrub mends it; or else it is the loader's to judge
            return known
        except (FlashpointError, OSError):  # given up this moment
            return None


def local_of(item: Item, ranks: Collection[int], world_size: int) -> Local:
    """What the replicator is told of an item, on a node of these ranks.

    A version that another number of ranks wrote is not this membership's to place.
    """
    is_ours = item.summary.record.world_size == world_size
    return Local(
        item.summary.nbytes, tuple(item.records), item.own(ranks), item.held, is_ours, bool(item.set_aside)
    )


def _stamp(path: str) -> _Stamp:
    # A rename into the folder and a link in it both change its time; so does a manifest's replacement.
    folder, manifest = os.stat(path), os.stat(f"{path}/{MANIFEST_NAME}", follow_symlinks=False)
    return folder.st_mtime_ns, manifest.st_ino, manifest.st_mtime_ns
