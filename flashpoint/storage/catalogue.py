"""Which versions a storage holds."""

from __future__ import annotations

from flashpoint.errors import CheckpointNotFoundError, ManifestError
from flashpoint.manifest import decode_record
from flashpoint.retention import Version
from flashpoint.storage.records import HEAD_BYTES, epoch_in_head, manifest_name, step_of
from flashpoint.storage.store import Store


class Catalogue:
    """The drained versions of a storage. Asks again only about those that it does not know."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[int, Version] = {}
        self.unfinished: list[int] = []
        """Steps with a folder and no manifest, as of the last look. One that cannot be read is one all the same."""

    def look(self) -> list[Version]:
        """The versions that have a manifest. Whether they are sound is for who loads them to see.

        Raises:
            StorageError: the storage cannot be listed.
        """
        steps = {step for name in self._store.folders() if (step := step_of(name)) is not None}
        self._known = {step: version for step, version in self._known.items() if step in steps}
        self.unfinished = []
        for step in sorted(steps - self._known.keys()):
            stored = self._store.head(manifest_name(step))
            if stored is None:
                self.unfinished.append(step)
            elif (version := self._version_of(step, stored.nbytes)) is not None:
                self._known[step] = version
        return list(self._known.values())

    def forget(self, step: int) -> None:
        """Look anew at this step: it was written or deleted."""
        self._known.pop(step, None)

    def _version_of(self, step: int, nbytes: int) -> Version | None:
        name = manifest_name(step)
        try:
            epoch = epoch_in_head(self._store.read(name, 0, min(HEAD_BYTES, nbytes)), step)
            if epoch is None:  # of another implementation: its members come in another order
                record = decode_record(self._store.read(name, 0, None).partition(b"\n")[0])
                epoch = record.epoch if record.step == step else None
        except (CheckpointNotFoundError, ManifestError):
            return None
        return None if epoch is None else Version(epoch, step)
