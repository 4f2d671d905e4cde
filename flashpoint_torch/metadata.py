"""DCP's ``Metadata``, rebuilt from a manifest: it is never stored, so nothing is ever unpickled."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from flashpoint.gc_pause import gc_paused
from flashpoint.manifest import Manifest, ObjectRecord
from flashpoint.recovery import preferred_entries, values_source
from flashpoint.telemetry import warn_once
from flashpoint_torch.dtypes import TORCH_DTYPES
from flashpoint_torch.tree import dcp_path

Location = tuple[ObjectRecord, int]


@gc_paused()
def metadata_of(manifest: Manifest, rank: int, *, checkpoint_id: str) -> Metadata:
    """The metadata of a version as ``rank`` should load it: its own replica of what every rank stored."""
    state: dict[str, Any] = {}
    planner_data: dict[str, tuple[str | int, ...]] = {}
    for name in manifest.by_name:
        entries = [manifest.entry(*found) for found in preferred_entries(manifest, name, rank)]
        first = entries[0]
        if not first.codec and first.dtype not in TORCH_DTYPES:
            warn_once(
                f"dtype:{manifest.digest}",
                f"step {manifest.step} holds {name[:200]!r} of dtype {first.dtype}, which torch has no tensors "
                "for: it is as if it were not there, and so are others of its kind",
            )
            continue
        planner_data[name] = dcp_path(first.tree_path)
        if first.codec:
            state[name] = BytesStorageMetadata()
            continue
        state[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=TORCH_DTYPES[first.dtype]),
            size=torch.Size(first.whole_shape),
            chunks=[ChunkStorageMetadata(torch.Size(e.origin), torch.Size(e.shape)) for e in entries],
        )
    source = value_owners(manifest, rank)
    tables = {owner: manifest.values_of(owner) for owner in set(source.values())}
    for name, owner in source.items():
        state[name] = BytesStorageMetadata()
        planner_data[name] = dcp_path(tables[owner][name].tree_path)
    return Metadata(
        state_dict_metadata=state,
        planner_data=planner_data,
        storage_data={},
        storage_meta=StorageMeta(checkpoint_id=checkpoint_id, save_id=manifest.digest),
    )


def value_owners(manifest: Manifest, rank: int) -> dict[str, int]:
    """Name of every plain value that ``rank`` loads -> whose copy it is: as `values_source`, but what
    this rank stored under that name as an entry comes before another rank's value."""

    def has_own_entry(name: str) -> bool:
        return any(manifest.rank(record) == rank for record, _ in manifest.by_name.get(name, ()))

    source = values_source(manifest, rank)
    return {name: owner for name, owner in source.items() if owner == rank or not has_own_entry(name)}


@gc_paused()
def locations_of(manifest: Manifest, rank: int) -> dict[MetadataIndex, Location]:
    """Where each chunk of that metadata lies: its object and the index of its entry."""
    found: dict[MetadataIndex, Location] = {}
    for name in manifest.by_name:
        for record, i in preferred_entries(manifest, name, rank):
            entry = manifest.entry(record, i)
            offset = None if entry.codec else torch.Size(entry.origin)
            found[MetadataIndex(name, offset)] = (record, i)
    return found
