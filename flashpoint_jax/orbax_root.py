"""Orbax's root on one node: which of its steps are final, making one, taking some away. File-system work only.

A step is final when neither its own folder nor the item's bears Orbax's temporary suffix. What is made or removed
here goes through such a name too, so that no crash leaves half a step that looks like one.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

from flashpoint.errors import ManifestError
from flashpoint.ids import CheckpointObjectId
from flashpoint.located import TEMPORARY, ItemFolder, final_name
from flashpoint.manifest import MANIFEST_NAME, decode_summary
from flashpoint_jax.folder import holds_blobs, step_of, write_files

STEP_FILE: Final = "_CHECKPOINT_METADATA"
METRICS_FILE: Final = "metrics/metrics"  # by which Orbax ranks steps, with `best_fn`
_STANDARD: Final = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"


def final_steps(root: str) -> dict[int, str]:
    """Step -> path of its folder, of all steps that Orbax takes for finished, whoever wrote them."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return {}
    found = {step: f"{root}/{name}" for name in names if (step := step_of(name)) is not None}
    return {step: found[step] for step in sorted(found) if os.path.isdir(found[step])}


def final_items(root: str, item: str) -> Iterator[ItemFolder]:
    """The finished versions of an item that Flashpoint wrote, oldest first."""
    for step, path in final_steps(root).items():
        if holds_blobs(f"{path}/{item}"):
            yield ItemFolder(root, step, f"{path}/{item}")


def final_of(container: ItemFolder) -> ItemFolder:
    """Where an item's folder will be when Orbax has renamed it and its step."""
    step = final_name(os.path.basename(os.path.dirname(container.folder)))
    return ItemFolder(container.job_root, container.step, f"{container.job_root}/{step}/{container.item}")


def is_of_step(container: ItemFolder) -> bool:
    """Whether an item lies in a step of a manager, and not alone."""
    return os.path.dirname(os.path.dirname(container.folder)) == container.job_root


def digest_of(folder: str) -> str:
    """Digest of the manifest in a folder; empty where there is none that can be read."""
    try:
        with open(f"{folder}/{MANIFEST_NAME}", "rb") as file:
            return decode_summary(file.read())[1]
    except (OSError, ManifestError):
        return ""


def link_over(source: str, target: str) -> None:
    """Give a file a second name, in place of whatever other file has it."""
    try:
        os.link(source, target)
    except FileExistsError:
        if not os.path.samefile(source, target):
            os.unlink(target)
            os.link(source, target)


# ---- making a step --------------------------------------------------------------------------------


def shared_files(root: str, step: int) -> dict[str, bytes]:
    """The files of a step that are alike on every node, as far as this one has them."""
    path = final_steps(root).get(step)
    found = {}
    for name in (STEP_FILE, METRICS_FILE):
        with contextlib.suppress(OSError):
            if path is not None:
                with open(f"{path}/{name}", "rb") as file:
                    found[name] = file.read()
    return found


def put_item(
    target: ItemFolder,
    objects: Mapping[str, str],
    manifest: bytes,
    files: Callable[[str], Mapping[str, bytes]],
    shared: Mapping[str, bytes],
) -> None:
    """Make an item's folder, and its step's where that is missing; renamed when all is there.

    Args:
        target: the final folder; one that is there is replaced.
        objects: name -> file to link under that name.
        files: Orbax's own files for a folder in which the objects lie, in the order of writing.
        shared: of the step (`shared_files` of any node that has it).
    """
    step = os.path.dirname(target.folder)
    is_new = not os.path.isdir(step)
    suffix = f"{TEMPORARY}-{secrets.token_hex(4)}"
    around = f"{step}{suffix}" if is_new else step
    folder = f"{around}/{target.item}" if is_new else f"{target.folder}{suffix}"
    os.makedirs(folder, mode=0o700)
    try:
        for name, path in objects.items():
            os.link(path, f"{folder}/{name}")
        write_files(folder, files(folder))
        write_files(folder, {MANIFEST_NAME: manifest})
        if is_new:
            if METRICS_FILE in shared:
                write_files(around, {METRICS_FILE: shared[METRICS_FILE]})
            items = [target.item, *(["metrics"] if METRICS_FILE in shared else [])]
            write_files(around, {STEP_FILE: _step_file(shared.get(STEP_FILE, b""), items)})
            os.rename(around, step)
            return
        remove_folder(target.folder)
        os.rename(folder, target.folder)
    except BaseException:
        shutil.rmtree(around if is_new else folder, ignore_errors=True)
        raise


def _step_file(known: bytes, items: Collection[str]) -> bytes:
    """Contents of ``_CHECKPOINT_METADATA`` for a step that has these items, after that of another node."""
    now_ns = time.time_ns()
    text = json.loads(known or b"{}")
    handlers = text.get("item_handlers") or {}
    return json.dumps(
        {
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": now_ns,
            "commit_timestamp_nsecs": now_ns,
            "custom_metadata": {},
            **text,
            "item_handlers": {item: handlers.get(item, _STANDARD) for item in items},
        }
    ).encode()


def mend_item(folder: str, good: str, wanted: Collection[str]) -> None:
    """Have an item's objects, and those wanted besides, be the files that another folder has under their names."""
    for name in {*os.listdir(folder), *wanted}:
        with contextlib.suppress(ValueError):
            if os.path.lexists(f"{good}/{CheckpointObjectId.parse(name).name}"):
                link_over(f"{good}/{name}", f"{folder}/{name}")


def remove_folder(path: str) -> None:
    """Delete a step, or an item: under a temporary name first."""
    gone = f"{path}{TEMPORARY}-{secrets.token_hex(4)}"
    try:
        os.rename(path, gone)
    except FileNotFoundError:
        return
    shutil.rmtree(gone, ignore_errors=True)
