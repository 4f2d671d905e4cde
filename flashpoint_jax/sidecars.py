"""The files beside the objects that stock Orbax reads: made from the plan and the manifest, none holds array data.

| file | what it says | made |
|---|---|---|
| ``_METADATA`` | the tree: its keys, the type of each leaf | once for each plan |
| ``_sharding`` | how each array was sharded | once for each plan |
| ``array_metadatas/process_<n>`` | shard shapes; which arrays are random keys | once for each plan |
| ``manifest.ocdbt``, ``nodes-*.ocdbt`` | where each shard's bytes lie | for each version |

In a job with copies the manifest has the first three too, as plain values of the first process: on a node that lost
everything they are written again from there (`files_again`).
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from orbax.checkpoint._src.metadata import sharding as sharding_metadata

from flashpoint.errors import CheckpointNotFoundError
from flashpoint.ids import CheckpointContainerId
from flashpoint.manifest import Manifest, Value, plain_value
from flashpoint.telemetry import warn_once
from flashpoint_jax.plan import ArrayInfo
from flashpoint_jax.zarr_index import index_files, plan_index, sources_of, uuid_of

TREE_FILE: Final = "_METADATA"
SHARDING_FILE: Final = "_sharding"
ARRAYS_FOLDER: Final = "array_metadatas"
KEY_IMPL: Final = "random_key_impl"

_STEP_VALUE: Final = (
    ".orbax/step"  # names of the plain values; no leaf's name has a slash and begins with a dot
)
_CUSTOM_VALUE: Final = ".orbax/custom_metadata"
_FILES_VALUE: Final = ".orbax/files"


@dataclass(frozen=True)
class Sidecars:
    """What one process would write beside a version, if it is the one that does.

    Attributes:
        tree: contents of ``_METADATA`` but for the user's own metadata.
        arrays: every `jax.Array`.
        custom_metadata: the user's.
        container: where it goes; what another node holds alone is not in the index of a per-host folder.
    """

    tree: dict[str, Any]
    arrays: Sequence[ArrayInfo]
    custom_metadata: Any
    container: CheckpointContainerId
    rank: int
    per_host: bool

    def files(self, manifest: Manifest) -> dict[str, bytes]:
        """Name -> contents, in the order of writing: what names others comes after them."""
        made = {
            TREE_FILE: json.dumps({**self.tree, "custom_metadata": self.custom_metadata}).encode(),
        }
        if self.arrays:
            made[SHARDING_FILE] = sharding_file(self.arrays)
            made[f"{ARRAYS_FOLDER}/process_{self.rank}"] = arrays_file(self.arrays)
        return {**made, **index_of(manifest, self.container.path, per_host=self.per_host)}

    def values(self, step_name: str, packed: dict[str, Any]) -> list[Value]:
        """The same for the manifest, but for the index.

        Args:
            step_name: of Orbax's folder.
            packed: what was packed for the plan before, to be looked at and changed here.
        """
        if packed.get("tree") is not self.tree or packed.get("arrays") is not self.arrays:
            files = {TREE_FILE: json.dumps(self.tree)}
            if self.arrays:
                files[SHARDING_FILE] = sharding_file(self.arrays).decode()
                files[ARRAYS_FOLDER] = arrays_file(self.arrays).decode()
            text = base64.b64encode(zlib.compress(json.dumps(files).encode(), 1)).decode()
            packed.update(tree=self.tree, arrays=self.arrays, text=text)
        return [
            Value(_STEP_VALUE, step_name),
            Value(_CUSTOM_VALUE, json.dumps(self.custom_metadata)),
            Value(_FILES_VALUE, packed["text"]),
        ]


def index_of(manifest: Manifest, folder: str, *, per_host: bool) -> dict[str, bytes]:
    """The files of the index over a version's objects; of a folder that has not all of them, with errors there."""
    sources = sources_of(manifest)
    absent = [one.file for one in sources if per_host and not os.path.lexists(f"{folder}/{one.file}")]
    if refused := plan_index(sources, absent=absent).refused:
        names = ", ".join(f"{name[:200]!r} ({why})" for name, why in list(refused.items())[:5])
        warn_once(
            f"index:{manifest.objects[0].layout}",
            f"stock Orbax cannot read {len(refused)} arrays: {names}",
        )
    return index_files(sources, uuid_of(manifest), partial=True, absent=absent)


def step_name_of(manifest: Manifest) -> str | None:
    """The name of Orbax's folder for this step; None where the version was saved without copies."""
    value = manifest.values_of(0).get(_STEP_VALUE)
    return None if value is None else str(plain_value(value))


def files_again(manifest: Manifest, ranks: Iterable[int]) -> dict[str, bytes]:
    """The files that `Sidecars.files` gave, without the index, from the manifest alone.

    Args:
        ranks: of the processes on this node.

    Raises:
        CheckpointNotFoundError: they are not in it.
    """
    values: Mapping[str, Value] = manifest.values_of(0)
    if _FILES_VALUE not in values:
        raise CheckpointNotFoundError(
            f"step {manifest.step} was saved without copies: a node that lost it cannot have it again"
        )
    packed = base64.b64decode(plain_value(values[_FILES_VALUE]))
    files: dict[str, str] = json.loads(zlib.decompress(packed))
    custom = json.loads(plain_value(values[_CUSTOM_VALUE]))
    tree = {**json.loads(files.pop(TREE_FILE)), "custom_metadata": custom}
    found = {TREE_FILE: json.dumps(tree).encode()}
    arrays = files.pop(ARRAYS_FOLDER, None)
    found |= {name: text.encode() for name, text in files.items()}
    if arrays is not None:
        found |= {f"{ARRAYS_FOLDER}/process_{rank}": arrays.encode() for rank in ranks}
    return found


def sharding_file(arrays: Sequence[ArrayInfo]) -> bytes:
    """Contents of ``_sharding``: serialized shardings by base64 of the arrays' names."""
    texts: dict[Any, str | None] = {}
    found = {}
    for info in arrays:
        if info.sharding not in texts:
            metadata = sharding_metadata.from_jax_sharding(info.sharding)
            texts[info.sharding] = None if metadata is None else metadata.to_serialized_string()
        if (text := texts[info.sharding]) is not None:
            found[base64.urlsafe_b64encode(info.name.encode()).decode()] = text
    return json.dumps(found).encode()


def read_shardings(folder: str) -> dict[str, str]:
    """Name -> serialized sharding of the arrays in a folder; empty where there is no such file."""
    try:
        with open(f"{folder}/{SHARDING_FILE}", encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError:
        return {}
    return {base64.urlsafe_b64decode(name).decode(): text for name, text in found.items()}


def arrays_file(arrays: Sequence[ArrayInfo]) -> bytes:
    """Contents of ``array_metadatas/process_<n>``."""
    rows = [
        {
            "array_metadata": {
                "param_name": info.name,
                "write_shape": info.shard_shape,
                "chunk_shape": info.shard_shape,
                "ext_metadata": {KEY_IMPL: info.key_impl} if info.key_impl else None,
            }
        }
        for info in arrays
    ]
    return json.dumps({"array_metadatas": rows}).encode()


def read_key_impls(folder: str) -> dict[str, str]:
    """Name -> implementation of the random keys in a folder."""
    try:
        names = sorted(os.listdir(f"{folder}/{ARRAYS_FOLDER}"))
    except FileNotFoundError:
        return {}
    for name in names[:1]:  # every process writes of all arrays
        with open(f"{folder}/{ARRAYS_FOLDER}/{name}", encoding="utf-8") as file:
            rows = [row["array_metadata"] for row in json.load(file)["array_metadatas"]]
        return {
            row["param_name"]: row["ext_metadata"][KEY_IMPL]
            for row in rows
            if (row.get("ext_metadata") or {}).get(KEY_IMPL)
        }
    return {}
