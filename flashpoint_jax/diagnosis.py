"""What an item's folder is, when it is not what was hoped for."""

from __future__ import annotations

import os
from collections.abc import Iterable

from flashpoint.errors import CheckpointNotFoundError, FlashpointError, InvalidIdError, ManifestError
from flashpoint.ids import CheckpointObjectId
from flashpoint.manifest import MANIFEST_NAME, Manifest, decode
from flashpoint_jax.folder import holds_blobs, is_local
from flashpoint_jax.sidecars import TREE_FILE

_NAMES_MAX = 5
_PICKLE = b"\x80"
# What Orbax's handlers know a checkpoint of theirs by: its tree, an OCDBT database, an old aggregate file.
_STOCK_FILES = frozenset({TREE_FILE, "manifest.ocdbt", "checkpoint"})


def is_ours(path: str | os.PathLike[str]) -> bool:
    """Whether Flashpoint wrote a folder, be it that the half of it is gone since.

    Raises:
        CheckpointNotFoundError: neither Flashpoint nor Orbax did.
    """
    folder = os.fspath(path)
    if not is_local(folder) or holds_blobs(folder):
        return is_local(folder)
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{folder} does not exist") from None
    except NotADirectoryError:
        raise CheckpointNotFoundError(f"{folder} is a file, and not a checkpoint's folder") from None
    if any(_is_object(name) for name in names):
        return True
    if _STOCK_FILES.isdisjoint(names) and not any(
        os.path.exists(f"{folder}/{name}/{array}") for name in names for array in (".zarray", "zarr.json")
    ):
        what = f"it holds {_some(names)}" if names else "it is empty"
        raise CheckpointNotFoundError(
            f"{folder} is no checkpoint of Orbax's, nor one of Flashpoint's: {what}"
        )
    return False


def explained(error: Exception, folder: str, rank: int | None) -> Exception:
    """The error of a version that could not be opened, with what is wrong with its folder where that is seen.

    Args:
        rank: whose objects have to be there; None for all.
    """
    why = _fault_of(folder, rank)
    return error if not why or why in str(error) else type(error)(f"{folder} {why}")


def _fault_of(folder: str, rank: int | None) -> str:
    try:
        with open(f"{folder}/{MANIFEST_NAME}", "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return "holds objects of Flashpoint's, but not their manifest: half of it was deleted; restore another step"
    except OSError as error:
        return f"cannot be read: {error}"
    if data.startswith(_PICKLE):
        return (
            "is a checkpoint of torch.distributed.checkpoint's, and neither Orbax's nor Flashpoint's: "
            "load it with torch"
        )
    try:
        missing = missing_objects(folder, decode(data), rank)
    except FlashpointError as error:
        return f"has a manifest that is torn ({error}); restore another step"
    return f"lacks {_some(missing)}, which its manifest names; restore another step" if missing else ""


def missing_objects(folder: str, manifest: Manifest, rank: int | None = None) -> list[str]:
    """The objects that a manifest names and the folder lacks.

    Args:
        rank: whose; None for all.
    """
    return [
        record.name
        for record in manifest.objects
        if rank in (None, record.id.rank) and not os.path.exists(f"{folder}/{record.name}")
    ]


def require_objects(folder: str, manifest: Manifest, rank: int | None = None) -> None:
    """See to it that no step is finished that lacks an object: stock TensorStore would read nothing in its place.

    Raises:
        ManifestError: one is missing.
    """
    if missing := missing_objects(folder, manifest, rank):
        raise ManifestError(f"{folder} lacks {_some(missing)}, which its manifest names")


def _is_object(name: str) -> bool:
    try:
        CheckpointObjectId.parse(name)
    except InvalidIdError:
        return False
    return True


def _some(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - _NAMES_MAX} more" if len(shown) > _NAMES_MAX else ""
    return ", ".join(name[:200] for name in shown[:_NAMES_MAX]) + more
