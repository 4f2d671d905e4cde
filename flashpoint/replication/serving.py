"""`Served`: the objects of this node that peers fetch from, mapped for as long as they do."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import numpy as np

from flashpoint.checksums import Bytes
from flashpoint.errors import ProtocolError
from flashpoint.manifest import MANIFEST_NAME
from flashpoint.objects import CheckpointObjectManager
from flashpoint.replication.inventory import Inventory
from flashpoint.replication.messages import Key

_MAPPED_MAX: Final = 4_096
_IDLE_S: Final = 2.0
_UNMAPPED_MAX: Final = 32  # at a time, since each takes its time


class Served:
    """Objects by version and name. Each mapping carries a shared lock, so that its buffer is not recycled.

    Args:
        look: has the inventory look again, for a version that it does not know yet.
    """

    def __init__(
        self, objects: CheckpointObjectManager, inventory: Inventory, look: Callable[[], None]
    ) -> None:
        self._objects, self._inventory, self._look = objects, inventory, look
        # (the bytes, when they were asked for), unused for longest first
        self._mapped: OrderedDict[tuple[Key, str], tuple[Bytes, float]] = OrderedDict()

    def bytes_of(self, key: Key, name: str) -> Bytes:
        """A whole object (or the manifest) of this very version.

        Raises:
            ProtocolError: this node does not hold the version, or the version has no such object.
            FlashpointError, OSError: it cannot be read.
        """
        found = self._mapped.pop((key, name), None)
        data = found[0] if found is not None else self._map(key, name)
        self._mapped[key, name] = (data, time.monotonic())
        while len(self._mapped) > _MAPPED_MAX:
            self._mapped.popitem(last=False)
        return data

    def _map(self, key: Key, name: str) -> Bytes:
        item = self._inventory.get(key)
        if item is None:
            self._look()
            item = self._inventory.get(key)
        if item is None:
            raise ProtocolError("no-version", f"this node does not hold {key}")
        container = self._objects.container(key.step)
        if name == MANIFEST_NAME:
            return np.frombuffer(self._objects.manifest_bytes(container), dtype=np.uint8)
        if name not in item.records:
            raise ProtocolError("no-object", f"{key} has no object {name}")
        return self._objects.map_object(container, item.records[name]).data

    def forget_one(self, key: Key, name: str) -> None:
        """Unmap what was replaced."""
        self._mapped.pop((key, name), None)

    def forget(self, is_gone: Callable[[Key], bool]) -> None:
        """Unmap versions that are gone: their locks would keep the buffers from being recycled."""
        for served in [served for served in self._mapped if is_gone(served[0])]:
            del self._mapped[served]

    def forget_idle(self) -> None:
        """Unmap what nobody has asked for in a while."""
        until_s = time.monotonic() - _IDLE_S
        for _ in range(_UNMAPPED_MAX):
            if not self._mapped or next(iter(self._mapped.values()))[1] > until_s:
                return
            self._mapped.popitem(last=False)

    def clear(self) -> None:
        self._mapped.clear()
