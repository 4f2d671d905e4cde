"""An Orbax item's folder as a Flashpoint container: its names, and what Flashpoint puts there.

Orbax writes ``<root>/<step>.orbax-checkpoint-tmp/<item>.orbax-checkpoint-tmp`` and renames both when all is there.
The item's folder is the container: manifest, objects (hard links to pool files of the root) and the files that
stock Orbax reads lie in it, so whoever deletes the folder frees the memory.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from typing import Final

from flashpoint.ids import STEP_MAX
from flashpoint.located import TEMPORARY, ItemFolder, final_name
from flashpoint.manifest import MANIFEST_NAME
from flashpoint.markers import Marker
from flashpoint.memory import file_system

SUMS_FILE: Final = ".sidecars"  # see `flashpoint_jax.sidecars`
_OURS: Final = re.compile(r"\.sidecars|rank[0-9]{5}-[0-9]+\.safetensors|nodes-[0-9a-f]{32}\.ocdbt", re.ASCII)
# `100`, `prefix_100`, `00000100`, and Flashpoint's own `step-100_ckpt`.
_STEP: Final = re.compile(r"(?:step-(?P<own>[0-9]{1,19})_ckpt|(?:.+_)?(?P<step>[0-9]{1,19}))", re.ASCII)


def parse_folder(path: str | os.PathLike[str]) -> ItemFolder:
    """The item folder at an absolute path.

    Its root is Orbax's root, two levels up; of a checkpoint that lies alone, not in a step's folder, the folder
    around it.
    """
    folder = os.path.normpath(os.fspath(path))
    parent, own = os.path.split(folder)
    around, above = os.path.split(parent)
    step = step_of(final_name(above))
    # Whatever its name: a folder that is still to be renamed is a checkpoint's, and no root.
    if (step is not None or TEMPORARY in above) and around != "/":
        return ItemFolder(around, 0 if step is None else step, folder)
    step = step_of(final_name(own))
    return ItemFolder(parent, 0 if step is None else step, folder)


def step_of(name: str) -> int | None:
    """The step that a folder's name tells, or None."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    step = int(match["own"] or match["step"])
    return step if step <= STEP_MAX else None


def is_local(path: str) -> bool:
    """Whether a path is one of this machine's file systems, and not a bucket's."""
    return os.path.isabs(path)


def holds_blobs(folder: str | os.PathLike[str]) -> bool:
    """Whether Flashpoint wrote this item, and not a stock handler.

    Also of one whose manifest is lost, or whose deletion was cut off: stock readers, who check no sums, must not be
    let loose on what is left.
    """
    path = os.fspath(folder)
    if os.path.lexists(f"{path}/{MANIFEST_NAME}"):
        return True
    try:
        return any(map(_OURS.fullmatch, os.listdir(path)))
    except (FileNotFoundError, NotADirectoryError):
        return False


def write_files(folder: str, files: Mapping[str, bytes]) -> None:
    """Write small files, each whole or not at all, in the order given; names may have a subfolder."""
    syncs = not file_system(folder).is_tmpfs
    for name, data in files.items():
        path = f"{folder}/{name}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = f"{path}.{secrets.token_hex(4)}.tmp"
        with open(temporary, "xb") as file:
            file.write(data)
            if syncs:
                file.flush()
                os.fsync(file.fileno())
        os.rename(temporary, path)


def unfinished_items(root: str) -> Iterator[ItemFolder]:
    """The items below a root that Orbax did not rename to their final names, with objects of ours in them."""
    for step in _folders(root):
        if step_of(final_name(os.path.basename(step))) is None and TEMPORARY not in os.path.basename(step):
            continue
        for item in _folders(step):
            if TEMPORARY in f"{os.path.basename(step)}/{os.path.basename(item)}":
                yield parse_folder(item)


def _folders(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []


class StepMarkers:
    """The markers of one process below one root: one for each step that is being saved, for all its items."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Marker, int]] = {}
        self._lock = threading.Lock()  # one item may be done while the next begins

    def create(self, container: ItemFolder, local_rank: int) -> Marker:
        """A share of the step's marker, which is there until the last share is gone.

        Raises:
            BlockingIOError: another live process is saving the same step as the same local rank.
        """
        key = f"{container.name}/{local_rank}"
        with self._lock:
            marker, shares = self._held.get(key) or (Marker.create(container, local_rank), 0)
            self._held[key] = marker, shares + 1
        return _Share(marker.path, marker.fd, self, key)

    def let_go(self, key: str, *, remove: bool) -> None:
        """Give a share back; if not to ``remove`` the marker, the step stays dirty, whatever others do."""
        with self._lock:
            marker, shares = self._held[key]
            if not remove:
                marker.release()
            if shares > 1:
                self._held[key] = marker, shares - 1
                return
            del self._held[key]
            marker.remove()


class _Share(Marker):
    def __init__(self, path: str, fd: int, markers: StepMarkers, key: str) -> None:
        super().__init__(path, fd)
        self._markers = markers
        self._key = key
        self._held = True

    @property
    def is_set(self) -> bool:
        return self._held

    def remove(self) -> None:
        if self._held:
            self._held = False
            self._markers.let_go(self._key, remove=True)

    def release(self) -> None:
        if self._held:
            self._held = False
            self._markers.let_go(self._key, remove=False)
