"""A state as a DCP planner sees it: used when the user brings a planner of their own.

Rank-local: the planner makes its local plan, a global plan of this one rank, and finishes it. What it
would leave to other ranks by looking at their plans, every rank stores itself.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from flashpoint.checksums import Bytes
from flashpoint.errors import FlashpointError
from flashpoint.gc_pause import gc_paused
from flashpoint.layout import Entry, Path
from flashpoint.manifest import Value
from flashpoint.values import NotPlainDataError, to_json
from flashpoint_torch.dtypes import NAMES
from flashpoint_torch.plan import encode_object, is_storable, meta_error, pickled_entry


class PlannedState(NamedTuple):
    """What a finished plan stores: tensors with their entries, plain values, and bytes of the rest."""

    entries: list[Entry]
    tensors: list[torch.Tensor]
    values: list[Value]
    blobs: list[tuple[Entry, Bytes]]


def planned_state(planner: SavePlanner, state: Mapping[str, Any], *, is_coordinator: bool) -> PlannedState:
    """Run a planner over ``state``, on this rank alone, and resolve its items."""
    planner.set_up_planner(dict(state), None, is_coordinator)
    plans, _ = planner.create_global_plan([planner.create_local_plan()])
    return resolve_plan(planner.finish_plan(plans[0]), planner)


@gc_paused()
def resolve_plan(plan: SavePlan, planner: SavePlanner) -> PlannedState:
    """The data behind the items of a finished plan, in its order.

    Raises:
        FlashpointError: an item is of a dtype or kind that cannot be stored.
    """
    paths = paths_of(plan)
    planned = PlannedState([], [], [], [])
    for item in plan.items:
        path = paths.get(item.index.fqn, ())
        if item.type == WriteItemType.BYTE_IO:
            _resolve_value(item, path, planner, planned)
            continue
        tensor = planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor) or item.tensor_data is None:
            raise FlashpointError(
                f"the planner gave {type(tensor).__name__} for the tensor {item.index.fqn[:200]!r}"
            )
        tensor = tensor.detach()
        if tensor.is_meta:
            raise meta_error(item.index.fqn)
        if not is_storable(tensor):  # sparse, quantized, and the like
            if tuple(tensor.shape) != tuple(item.tensor_data.size):
                raise FlashpointError(
                    f"{item.index.fqn[:200]!r} has shards of type {type(tensor).__name__}, dtype {tensor.dtype} "
                    f"and layout {tensor.layout}, which cannot be stored: make them dense"
                )
            reason = f"{tensor.dtype} {tensor.layout}"
            planned.blobs.append(encode_object(item.index.fqn, path, tensor, reason))
            continue
        planned.entries.append(entry_of(item, tensor, path))
        planned.tensors.append(tensor)
    return planned


def entry_of(item: WriteItem, tensor: torch.Tensor, path: Path) -> Entry:
    assert item.tensor_data is not None
    shape, whole = tuple(tensor.shape), tuple(item.tensor_data.size)
    name, dtype = item.index.fqn, NAMES[tensor.dtype]
    if shape == whole:
        return Entry(name, dtype, shape, path=path)
    offsets = tuple(min(o, n) for o, n in zip(item.tensor_data.chunk.offsets, whole, strict=True))
    return Entry(name, dtype, shape, offsets, whole, path)


def paths_of(plan: SavePlan) -> dict[str, Path]:
    """Paths of the names that a planner's data maps to others than themselves (DCP's FLATTEN_MAPPING)."""
    data = plan.planner_data
    if not isinstance(data, dict):
        return {}
    return {
        name: path
        for name, path in data.items()
        if isinstance(path, tuple) and path != (name,) and all(type(part) in (str, int) for part in path)
    }


def _resolve_value(item: WriteItem, path: Path, planner: SavePlanner, planned: PlannedState) -> None:
    name = item.index.fqn
    if isinstance(planner, DefaultSavePlanner) and _gives_objects(planner):
        value = planner.lookup_object(item.index)
        try:
            planned.values.append(Value(name, to_json(value), path))
        except NotPlainDataError as reason:
            planned.blobs.append(encode_object(name, path, value, str(reason)))
        return
    stream = planner.resolve_data(item)
    if not isinstance(stream, io.BytesIO):
        raise FlashpointError(f"the planner gave {type(stream).__name__} for the object {name[:200]!r}")
    planned.blobs.append(pickled_entry(name, path, stream.getvalue()))


def _gives_objects(planner: DefaultSavePlanner) -> bool:
    """Whether the planner encodes values as stock DCP does, so that the value itself may be taken instead."""
    kind = type(planner)
    return (
        kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object
    )
