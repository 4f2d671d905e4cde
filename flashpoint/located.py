"""Where a container is, by a path of its user's: a job's ``step-<n>_ckpt``, or an item of an Orbax checkpoint.

Orbax names its folders as it likes: ``<root>/100/default``. Such an item is told by Orbax's ``_METADATA`` beside our
manifest, and its step is the one that the manifest names.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Final

from flashpoint.errors import CheckpointNotFoundError, InvalidIdError
from flashpoint.ids import CheckpointContainerId, validate_job_root
from flashpoint.manifest import MANIFEST_NAME, decode_record
from flashpoint.objects import CheckpointObjectManager

_ITEM_METADATA: Final = "_METADATA"
_STEP_METADATA: Final = "_CHECKPOINT_METADATA"
TEMPORARY: Final = ".orbax-checkpoint-tmp"  # in the name of a folder that Orbax has not finished
_SHOWN_MAX: Final = 10


@dataclass(frozen=True, order=True, slots=True)
class ItemFolder(CheckpointContainerId):
    """A container that is an item of an Orbax checkpoint.

    Attributes:
        folder: its absolute path, temporary or final.
    """

    folder: str = ""

    @property
    def item(self) -> str:
        """The item's name, without what Orbax puts behind it while the folder is written."""
        return final_name(os.path.basename(self.folder))

    @property
    def path(self) -> str:
        return self.folder

    def __str__(self) -> str:
        return self.folder

    def __fspath__(self) -> str:
        return self.folder


def final_name(name: str) -> str:
    """The name that Orbax gives a folder when it is finished."""
    return name.partition(TEMPORARY)[0]


def container_at(path: str | os.PathLike[str]) -> CheckpointContainerId:
    """The container at an absolute path; of an Orbax step with one item of ours, that item.

    Raises:
        InvalidIdError: the path is neither ``step-<n>_ckpt`` nor an Orbax item, or a step with several items.
        CheckpointNotFoundError: Orbax has not finished it, or another handler wrote it.
        ManifestError: its manifest cannot be trusted.
    """
    folder = validate_job_root(path)
    if _is_item(folder):
        return _item(folder)
    if not _has(folder, MANIFEST_NAME):
        items = [name for name in _folders(folder) if _is_item(f"{folder}/{name}")]
        if len(items) == 1:
            return _item(f"{folder}/{items[0]}")
        if items:
            names = ", ".join(items[:_SHOWN_MAX])
            raise InvalidIdError(f"{folder} has {len(items)} items: give the path of one of them ({names})")
        if _has(folder, _ITEM_METADATA) or _has(folder, _STEP_METADATA):
            raise CheckpointNotFoundError(
                f"{folder} is an Orbax checkpoint that Flashpoint's handlers did not write: load it with Orbax"
            )
    return CheckpointContainerId.parse(path)


def _item(folder: str) -> ItemFolder:
    around, own = os.path.split(folder)
    above, step_folder = os.path.split(around)
    if TEMPORARY in own or TEMPORARY in step_folder:
        raise CheckpointNotFoundError(f"{folder} is unfinished: Orbax has not given it its name")
    in_step = _has(around, _STEP_METADATA) and above != "/"
    container = ItemFolder(above if in_step else around, 0, folder)
    objects = CheckpointObjectManager(container.job_root, create=False)
    # Only to learn its name: who opens it checks every byte.
    record = decode_record(objects.manifest_bytes(container).partition(b"\n")[0])
    return dataclasses.replace(container, step=record.step)


def _is_item(folder: str) -> bool:
    return _has(folder, MANIFEST_NAME) and _has(folder, _ITEM_METADATA)


def _has(folder: str, name: str) -> bool:
    return os.path.lexists(f"{folder}/{name}")


def _folders(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
