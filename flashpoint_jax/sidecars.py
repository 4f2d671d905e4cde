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
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict

import msgspec
import xxhash
from orbax.checkpoint._src.metadata import sharding as sharding_metadata

from flashpoint.errors import CorruptObjectError
from flashpoint.ids import CheckpointContainerId
from flashpoint.manifest import Manifest
from flashpoint.telemetry import warn_once
from flashpoint_jax.folder import SUMS_FILE, write_files
from flashpoint_jax.plan import ArrayInfo
from flashpoint_jax.zarr_index import ZarrFormat, index_files, plan_index, sources_of, uuid_of

TREE_FILE: Final = "_METADATA"
SHARDING_FILE: Final = "_sharding"
ARRAYS_FOLDER: Final = "array_metadatas"
KEY_IMPL: Final = "random_key_impl"
STRINGS_FILE: Final = "_strings.json"  # Orbax's own handler writes it
_SUMS_BYTES_MAX: Final = 1 << 20


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
        files = {
            TREE_FILE: json.dumps({**self.tree, "custom_metadata": self.custom_metadata}).encode(),
        }
        if self.arrays:
            files |= self._files_of_arrays()
        sources = sources_of(manifest)
        zarr: _Zarr = {"zarr_format": 3 if self.ts_checksums else 2, "checksums": self.ts_checksums}
        if self.per_host:
            sources = [one for one in sources if os.path.lexists(f"{self.container.path}/{one.file}")]
        elif refused := plan_index(sources, **zarr).refused:
            names = ", ".join(f"{name[:200]!r} ({why})" for name, why in list(refused.items())[:5])
            warn_once(
                f"index:{manifest.objects[0].layout}",
                f"stock Orbax cannot read {len(refused)} arrays: {names}",
            )
        files[SUMS_FILE] = sums_file(files, manifest.digest)
        return {**files, **index_files(sources, uuid_of(manifest), partial=True, **zarr)}

    def _files_of_arrays(self) -> dict[str, bytes]:
        if "files of arrays" not in self.remembered:
            self.remembered["files of arrays"] = {
                SHARDING_FILE: sharding_file(self.arrays),
                f"{ARRAYS_FOLDER}/process_{self.rank}": arrays_file(self.arrays),
            }
        return self.remembered["files of arrays"]  # type: ignore[no-any-return]


class _Zarr(TypedDict):
    zarr_format: ZarrFormat
    checksums: bool


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
            with open(f"{folder}/{name}", "rb") as file:
                data = file.read()
        except OSError as error:
            raise _corrupt(folder, name, f"cannot be read ({error.strerror})") from None
        if xxhash.xxh3_128_hexdigest(data) != digest:
            raise _corrupt(folder, name, "does not match its digest")


def _sealed(sums: _Sums) -> bytes:
    line = msgspec.json.encode(sums)
    return line + b"\n" + xxhash.xxh3_128_hexdigest(line).encode() + b"\n"


def _read_sums(folder: str) -> _Sums:
    try:
        with open(f"{folder}/{SUMS_FILE}", "rb") as file:
            line, _, trailer = file.read(_SUMS_BYTES_MAX).partition(b"\n")
        if trailer != xxhash.xxh3_128_hexdigest(line).encode() + b"\n":
            raise _corrupt(folder, SUMS_FILE, "is torn or garbled")
        return msgspec.json.decode(line, type=_Sums)
    except OSError as error:
        raise _corrupt(folder, SUMS_FILE, f"cannot be read ({error.strerror})") from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise _corrupt(folder, SUMS_FILE, "is torn or garbled") from None


def _corrupt(folder: str, name: str, what: str) -> CorruptObjectError:
    return CorruptObjectError(
        f"the file {name} of {folder} {what}: the version is corrupt, restore another step"
    )


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
