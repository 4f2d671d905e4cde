"""The files beside the objects that stock Orbax reads: made from the plan and the manifest, none holds array data.

| file | what it says | made |
|---|---|---|
| ``_METADATA`` | the tree: its keys, the type of each leaf | once for each plan |
| ``_sharding`` | how each array was sharded | once for each plan |
| ``array_metadatas/process_<n>`` | shard shapes; which arrays are random keys | once for each plan |
| ``.sidecars`` | digests of those above, and of the manifest | for each version |
| ``manifest.ocdbt``, ``nodes-*.ocdbt`` | where each shard's bytes lie | for each version |

Orbax reads the first three and has no sums for them. A restore of ours believes them once they match ``.sidecars``; the
index it does not read.

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

import msgspec
import xxhash
from orbax.checkpoint._src.metadata import sharding as sharding_metadata

from flashpoint.confined import read_file
from flashpoint.errors import CheckpointNotFoundError, CorruptObjectError, ManifestError
from flashpoint.ids import CheckpointContainerId
from flashpoint.manifest import Manifest, Value, plain_value
from flashpoint.telemetry import warn_once
from flashpoint_jax.folder import SUMS_FILE, step_of, write_files
from flashpoint_jax.plan import ArrayInfo
from flashpoint_jax.zarr_index import ZarrFormat, index_files, plan_index, sources_of, uuid_of

TREE_FILE: Final = "_METADATA"
SHARDING_FILE: Final = "_sharding"
ARRAYS_FOLDER: Final = "array_metadatas"
KEY_IMPL: Final = "random_key_impl"
STRINGS_FILE: Final = "_strings.json"  # Orbax's own handler writes it
_SUMS_BYTES_MAX: Final = 1 << 20
_SIDECAR_BYTES_MAX: Final = 1 << 30

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
        ts_checksums: the index is of zarr v3, with a checksum behind every chunk; else of v2.
        remembered: the plan's, for what is made once for each plan.
    """

    tree: dict[str, Any]
    arrays: Sequence[ArrayInfo]
    custom_metadata: Any
    container: CheckpointContainerId
    rank: int
    per_host: bool
    remembered: dict[str, Any]
    ts_checksums: bool = False

    def files(self, manifest: Manifest) -> dict[str, bytes]:
        """Name -> contents, in the order of writing: what names others comes after them."""
        made = {
            TREE_FILE: json.dumps({**self.tree, "custom_metadata": self.custom_metadata}).encode(),
        }
        if self.arrays:
            made |= self._files_of_arrays()
        made[SUMS_FILE] = sums_file(made, manifest.digest)
        folder = self.container.path
        return {
            **made,
            **index_of(manifest, folder, per_host=self.per_host, ts_checksums=self.ts_checksums),
        }

    def _files_of_arrays(self) -> dict[str, bytes]:
        if "files of arrays" not in self.remembered:
            self.remembered["files of arrays"] = {
                SHARDING_FILE: sharding_file(self.arrays),
                f"{ARRAYS_FOLDER}/process_{self.rank}": arrays_file(self.arrays),
            }
        return self.remembered["files of arrays"]  # type: ignore[no-any-return]

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


class _Sums(msgspec.Struct):
    """Contents of ``.sidecars``: the manifest that the files belong to, and the digest of each by name."""

    manifest: str
    files: dict[str, str]


def sums_file(files: Mapping[str, bytes], manifest_digest: str) -> bytes:
    """Contents of ``.sidecars``: one line of JSON, and the line's own digest behind it."""
    sums = {name: xxhash.xxh3_128_hexdigest(data) for name, data in files.items()}
    return _sealed(_Sums(manifest_digest, sums))


def add_strings(folder: str) -> None:
    """Add the file of strings to the sums, if there is one: it is written while the version is committed."""
    try:
        with open(f"{folder}/{STRINGS_FILE}", "rb") as file:
            strings = file.read()
    except FileNotFoundError:
        return
    sums = _read_sums(folder)
    sums.files[STRINGS_FILE] = xxhash.xxh3_128_hexdigest(strings)
    write_files(folder, {SUMS_FILE: _sealed(sums)})


def check_sidecars(folder: str, manifest: Manifest) -> None:
    """Check every file that a restore takes something from beside the manifest.

    Raises:
        CorruptObjectError: one changed, is gone, or is another version's.
    """
    sums = _read_sums(folder)
    if sums.manifest != manifest.digest:
        raise _corrupt(folder, SUMS_FILE, "belongs to another save")
    for name, digest in sums.files.items():
        try:
            data = read_file(folder, name, _SIDECAR_BYTES_MAX)
        except OSError as error:
            raise _corrupt(folder, name, f"cannot be read ({error.strerror})") from None
        if xxhash.xxh3_128_hexdigest(data) != digest:
            raise _corrupt(folder, name, "does not match its digest")


def _sealed(sums: _Sums) -> bytes:
    line = msgspec.json.encode(sums)
    return line + b"\n" + xxhash.xxh3_128_hexdigest(line).encode() + b"\n"


def _read_sums(folder: str) -> _Sums:
    try:
        line, _, trailer = read_file(folder, SUMS_FILE, _SUMS_BYTES_MAX).partition(b"\n")
        if trailer != xxhash.xxh3_128_hexdigest(line).encode() + b"\n":
            raise _corrupt(folder, SUMS_FILE, "is torn or garbled")
        return msgspec.json.decode(line, type=_Sums)
    except OSError as error:
        raise _corrupt(folder, SUMS_FILE, f"cannot be read ({error.strerror})") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise _corrupt(folder, SUMS_FILE, "is torn or garbled") from None


def _corrupt(folder: str, name: str, what: str) -> CorruptObjectError:
    return CorruptObjectError(
        f"the file {name} of {folder} {what}: the version is corrupt, restore another step"
    )


def index_of(
    manifest: Manifest, folder: str, *, per_host: bool, ts_checksums: bool = False
) -> dict[str, bytes]:
    """The files of the index over a version's objects; of a folder that has not all of them, with errors there."""
    sources = sources_of(manifest)
    absent = [one.file for one in sources if per_host and not os.path.lexists(f"{folder}/{one.file}")]
    zarr_format: ZarrFormat = 3 if ts_checksums else 2
    index = plan_index(sources, zarr_format=zarr_format, checksums=ts_checksums, absent=absent)
    if refused := index.refused:
        names = ", ".join(f"{name[:200]!r} ({why})" for name, why in list(refused.items())[:5])
        warn_once(
            f"index:{manifest.objects[0].layout}",
            f"stock Orbax cannot read {len(refused)} arrays: {names}",
        )
    return index_files(
        sources,
        uuid_of(manifest),
        zarr_format=zarr_format,
        checksums=ts_checksums,
        partial=True,
        absent=absent,
    )


def step_name_of(manifest: Manifest) -> str | None:
    """The name of Orbax's folder for this step; None where the version was saved without copies."""
    value = manifest.values_of(0).get(_STEP_VALUE)
    if value is None:
        return None
    name = str(plain_value(value))
    if "/" in name or "\0" in name or step_of(name) is None:  # it is going to be a folder's
        raise ManifestError(f"step {manifest.step} has no step's name: {name[:200]!r}")
    return name


def files_again(manifest: Manifest, ranks: Iterable[int]) -> dict[str, bytes]:
    """The files that `Sidecars.files` gave, without the index, from the manifest alone.

    Args:
        ranks: of the processes on this node.

    Raises:
        CheckpointNotFoundError: they are not in it.
        ManifestError: they are garbled, or others than these.
    """
    values: Mapping[str, Value] = manifest.values_of(0)
    if _FILES_VALUE not in values:
        raise CheckpointNotFoundError(
            f"step {manifest.step} was saved without copies: a node that lost it cannot have it again"
        )
    try:
        files = _unpacked(plain_value(values[_FILES_VALUE]))
        tree = msgspec.json.decode(files.pop(TREE_FILE), type=dict[str, Any])
        tree["custom_metadata"] = json.loads(plain_value(values[_CUSTOM_VALUE]))
    except (ValueError, TypeError, KeyError, RecursionError, zlib.error) as error:
        raise ManifestError(
            f"step {manifest.step}: the files beside its objects are garbled: {error}"
        ) from None
    found = {TREE_FILE: json.dumps(tree).encode()}
    arrays = files.pop(ARRAYS_FOLDER, None)
    found |= {name: text.encode() for name, text in files.items()}
    if arrays is not None:
        found |= {f"{ARRAYS_FOLDER}/process_{rank}": arrays.encode() for rank in ranks}
    if not found.keys() <= {TREE_FILE, SHARDING_FILE, *(f"{ARRAYS_FOLDER}/process_{rank}" for rank in ranks)}:
        raise ManifestError(
            f"step {manifest.step} names files that do not lie beside objects: {sorted(files)[:5]!r}"
        )
    return {**found, SUMS_FILE: sums_file(found, manifest.digest)}


def _unpacked(text: str) -> dict[str, str]:
    unpacking = zlib.decompressobj()
    data = unpacking.decompress(base64.b64decode(text, validate=True), _SIDECAR_BYTES_MAX)
    if not unpacking.eof:
        raise ValueError("it is cut off, or too long")
    return msgspec.json.decode(data, type=dict[str, str])


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
