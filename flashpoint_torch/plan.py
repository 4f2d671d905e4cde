"""What of a state one rank stores, and the test that tells that nothing about this has changed.

Planning is rank-local. A `StatePlan` is made once and reused as long as it `matches`: same names, types,
dtypes, shapes and, for DTensors, the same specs (mesh, placements, global shape) and local parts. The test
runs over whole lists at C speed, since thousands of tensors must not cost a Python statement each.
"""

from __future__ import annotations

import io
import operator
import zlib
from collections.abc import Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Partial, Placement

from flashpoint.checksums import Bytes
from flashpoint.dtypes import DTYPES
from flashpoint.errors import FlashpointError
from flashpoint.gc_pause import gc_paused
from flashpoint.layout import Entry, ObjectLayout, Path, plan_layout
from flashpoint.manifest import Value
from flashpoint.telemetry import warn_once
from flashpoint.values import NotPlainDataError, to_json
from flashpoint_torch.dtypes import NAMES
from flashpoint_torch.tree import Skeleton, is_branch

PICKLE_CODEC: Final = "torch"  # the bytes of torch.save
NUMPY_CODEC: Final = "numpy"  # an array that came as a numpy array and goes back as one

_TRAITS: Final = tuple(map(attrgetter, ("dtype", "shape", "layout", "is_meta")))
_OFFSETS_MAX: Final = 16_384  # remembered
_specs = attrgetter("_spec")
_locals = attrgetter("_local_tensor")


class Shard(NamedTuple):
    """One tensor to store: what the layout says of it, and how to get it from its leaf."""

    entry: Entry
    leaf: int
    tensor: torch.Tensor


class Extras(NamedTuple):
    """What a state holds beside its tensors, as of one moment: plain data, and bytes of the rest."""

    values: list[Value]
    blobs: list[tuple[Entry, Bytes]]


class StatePlan:
    """The plan of one state on one rank.

    Attributes:
        layout: of the object that holds its tensors.
        names, paths: of all leaves, in the order of the tree.
        tensor_leaves, value_leaves: indexes of the leaves that are stored as tensors, and of the others.
        stores_all: whether this rank stores something of every tensor, so that the plan serves a load too.
    """

    @gc_paused()
    def __init__(self, state: Mapping[str, Any], *, for_loading: bool = False) -> None:
        """Plan for storing ``state``, or for filling it: a replica is stored once, but filled everywhere."""
        self._all_replicas = for_loading
        self.skeleton = Skeleton(state)
        leaves = self.skeleton.leaves_of(state)
        assert leaves is not None
        named = self.skeleton.names()
        self.names = [name for name, _ in named]
        self.paths = [path if path != (name,) else () for name, path in named]
        shards: list[Shard] = []
        self.tensor_leaves: list[int] = []
        self.value_leaves: list[int] = []
        for i, leaf in enumerate(leaves):
            found = shards_of(self.names[i], self.paths[i], leaf, all_replicas=for_loading)
            if found is None:
                self.value_leaves.append(i)
                continue
            self.tensor_leaves.append(i)
            shards += (Shard(entry, i, tensor) for entry, tensor in found)
        self.entries = [shard.entry for shard in shards]
        self.stores_all = for_loading or {shard.leaf for shard in shards} == set(self.tensor_leaves)
        self.layout: ObjectLayout = plan_layout(self.entries)
        self._set_fingerprint(leaves, shards)

    def _set_fingerprint(self, leaves: Sequence[Any], shards: Sequence[Shard]) -> None:
        kinds = {i: type(leaves[i]) for i in self.tensor_leaves}
        self._others = [i for i, kind in kinds.items() if issubclass(kind, ShardedTensor)]
        self._dtensors = [i for i, kind in kinds.items() if issubclass(kind, DTensor)]
        self._plain = [i for i, kind in kinds.items() if not issubclass(kind, (ShardedTensor, DTensor))]
        self._kinds = [kinds[i] for i in self.tensor_leaves]
        self._traits = _traits_of(_pick(leaves, self._plain))
        dtensors = _pick(leaves, self._dtensors)
        self._specs = list(map(_specs, dtensors))
        self._local_traits = _traits_of(list(map(_locals, dtensors)))
        # Where each leaf gives one tensor, itself or its local part, sources are picked at C speed.
        stored = [shard.leaf for shard in shards]
        direct = all(
            shard.tensor is leaves[shard.leaf]
            or getattr(leaves[shard.leaf], "_local_tensor", None) is shard.tensor
            for shard in shards
        )
        self._stored = stored if direct and len(set(stored)) == len(stored) else None
        self._stored_dtensors = [n for n, i in enumerate(stored) if issubclass(kinds[i], DTensor)]

    def match(self, state: Mapping[str, Any]) -> list[Any] | None:
        """The leaves of a state that this plan fits, or None where anything about it has changed."""
        leaves = self.skeleton.leaves_of(state)
        if leaves is None or self._others:
            return None  # a ShardedTensor's shards may have changed; to look at them is to plan anew
        if list(map(type, _pick(leaves, self.tensor_leaves))) != self._kinds:
            return None
        if not _has_traits(_pick(leaves, self._plain), self._traits):
            return None
        if self._dtensors:
            dtensors = _pick(leaves, self._dtensors)
            if list(map(_specs, dtensors)) != self._specs:
                return None
            # A copy into another shape or dtype would broadcast or convert, without a word.
            if not _has_traits(list(map(_locals, dtensors)), self._local_traits):
                return None
        if any(is_branch(value) or _is_tensor_leaf(value) for value in _pick(leaves, self.value_leaves)):
            return None  # a list of numbers became a list of tensors, or a value a tensor
        return leaves

    def direct_leaves(self) -> Sequence[int]:
        """For each entry of the layout the leaf it is all of; empty where some leaf has several entries."""
        return self._stored or ()

    def sources(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors to copy, one for each entry of the layout, in its order."""
        if self._stored is None:
            found = []
            for i in self.tensor_leaves:
                shards = (
                    shards_of(self.names[i], self.paths[i], leaves[i], all_replicas=self._all_replicas) or []
                )
                found += [tensor for _, tensor in shards]
            return found
        tensors = list(_pick(leaves, self._stored))
        if len(self._stored_dtensors) == len(tensors):
            return list(map(_locals, tensors))
        for n in self._stored_dtensors:
            tensors[n] = tensors[n]._local_tensor
        return tensors

    def extras(self, leaves: Sequence[Any]) -> Extras:
        """The values of this moment, encoded: after this, training may change them."""
        values: list[Value] = []
        blobs: list[tuple[Entry, Bytes]] = []
        for i in self.value_leaves:
            name, path, leaf = self.names[i], self.paths[i], leaves[i]
            try:
                values.append(Value(name, to_json(leaf), path))
            except NotPlainDataError as reason:
                blobs.append(encode_object(name, path, leaf, str(reason)))
        return Extras(values, blobs)


def encode_object(name: str, path: Path, value: Any, reason: str) -> tuple[Entry, Bytes]:
    """A value that is not plain data: a large numpy array as its bytes, all else as torch.save writes it."""
    if type(value) is np.ndarray and value.dtype.name in DTYPES and value.dtype.isnative:
        entry = Entry(name, value.dtype.name, value.shape, path=path, codec=NUMPY_CODEC)
        return entry, np.frombuffer(np.ascontiguousarray(value).tobytes(), np.uint8)
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:  # whatever a value's own __reduce__ may raise
        raise FlashpointError(
            f"{name[:200]!r} ({reason}) cannot be pickled either: {error}; store plain data instead"
        ) from error
    data = stream.getvalue()
    if (name, type(value)) not in _examined:
        _examined.add((name, type(value)))
        _warn_if_unsafe(name, data, reason)
    return pickled_entry(name, path, data)


def pickled_entry(name: str, path: Path, data: bytes) -> tuple[Entry, Bytes]:
    """What torch.save made of a value, as an entry."""
    return Entry(name, "uint8", (len(data),), path=path, codec=PICKLE_CODEC), np.frombuffer(data, np.uint8)


_examined: set[tuple[str, type]] = set()


def _warn_if_unsafe(name: str, data: bytes, reason: str) -> None:
    """Say at the first save, not after the crash, that a value will not load without allow_pickle."""
    try:
        torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception:  # whatever the restricted unpickler objects to
        warn_once(
            f"pickle:{name}",
            f"{name[:200]!r} is stored as a pickle ({reason}): loading it runs code from the checkpoint and "
            "needs allow_pickle=True; store plain data (numbers, strings, lists, dicts, arrays, tensors) instead",
        )


def shards_of(
    name: str, path: Path, leaf: Any, *, all_replicas: bool = False
) -> list[tuple[Entry, torch.Tensor]] | None:
    """The entries and tensors that this rank stores of a leaf, or None for one stored as a value."""
    if isinstance(leaf, DTensor):
        return _dtensor_shards(name, path, leaf, all_replicas=all_replicas)
    if isinstance(leaf, ShardedTensor):
        return [
            (
                _entry(name, path, shard.tensor, shard.metadata.shard_offsets, tuple(leaf.size())),
                shard.tensor,
            )
            for shard in leaf.local_shards()
        ]
    if isinstance(leaf, torch.Tensor) and is_storable(leaf):
        return [(Entry(name, NAMES[leaf.dtype], tuple(leaf.shape), path=path), leaf)]
    if isinstance(leaf, torch.Tensor) and leaf.is_meta:
        raise meta_error(name)
    return None


def meta_error(name: str) -> FlashpointError:
    return FlashpointError(f"{name[:200]!r} is on the meta device and has no data: materialise it first")


def is_storable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are its strided elements, of a dtype that an entry can have."""
    return (
        tensor.layout is torch.strided
        and tensor.dtype in NAMES
        and not tensor.is_meta
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def _is_tensor_leaf(value: Any) -> bool:
    return isinstance(value, (DTensor, ShardedTensor)) or (
        isinstance(value, torch.Tensor) and (is_storable(value) or value.is_meta)
    )


def _dtensor_shards(
    name: str, path: Path, leaf: DTensor, *, all_replicas: bool
) -> list[tuple[Entry, torch.Tensor]]:
    mesh, placements = leaf.device_mesh, leaf.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the tensor's mesh
        return []
    if any(isinstance(placement, Partial) for placement in placements):
        raise FlashpointError(
            f"{name[:200]!r} has a Partial placement: reduce it (redistribute) before it is saved"
        )
    local = leaf._local_tensor
    if not is_storable(local):
        local = leaf.to_local()
        if not is_storable(local):
            raise FlashpointError(
                f"{name[:200]!r} has local parts of type {type(local).__name__}, dtype {local.dtype}"
            )
    if not all_replicas:
        # One replica stores it; which one differs by name, so that the work is spread. Each dimension takes
        # digits of its own from the hash: with the same ones, only the mesh's diagonal would store anything.
        digits = zlib.crc32(name.encode(errors="surrogatepass"))
        for dim, placement in enumerate(placements):
            if isinstance(placement, Replicate):
                digits, chosen = divmod(digits, mesh.size(dim))
                if coordinate[dim] != chosen:
                    return []
    global_shape = tuple(leaf.shape)
    offsets = _offsets(global_shape, mesh, tuple(coordinate), placements)
    return [(_entry(name, path, local, offsets, global_shape), local)]


_offsets_known: dict[tuple[Any, ...], tuple[int, ...]] = {}


def _offsets(
    global_shape: tuple[int, ...],
    mesh: DeviceMesh,
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> tuple[int, ...]:
    """Where this rank's shard begins. Torch takes 75 us for each; the layers of a model are cut alike."""
    key = (global_shape, tuple(mesh.shape), coordinate, placements)
    offsets = _offsets_known.get(key)
    if offsets is None:
        _, offsets = compute_local_shape_and_global_offset(global_shape, mesh, placements)
        if len(_offsets_known) >= _OFFSETS_MAX:
            _offsets_known.clear()
        _offsets_known[key] = offsets
    return offsets


def _entry(
    name: str, path: Path, tensor: torch.Tensor, offsets: Sequence[int], global_shape: tuple[int, ...]
) -> Entry:
    shape = tuple(tensor.shape)
    # An empty shard may be said to begin beyond the end; it has no place at all.
    offsets = tuple(min(o, n) for o, n in zip(offsets, global_shape, strict=True))
    if shape == global_shape:
        return Entry(name, NAMES[tensor.dtype], shape, path=path)
    return Entry(name, NAMES[tensor.dtype], shape, offsets, global_shape, path)


class PlanCache:
    """The last plan of a state, remade when the state's shape changes."""

    def __init__(self, *, for_loading: bool = False) -> None:
        self._for_loading = for_loading
        self._last: StatePlan | None = None

    def plan(self, state: Mapping[str, Any]) -> tuple[StatePlan, list[Any]]:
        """The plan of ``state`` and its leaves."""
        if self._last is not None:
            leaves = self._last.match(state)
            if leaves is not None:
                return self._last, leaves
        self._last = StatePlan(state, for_loading=self._for_loading)
        leaves = self._last.skeleton.leaves_of(state)
        assert leaves is not None
        return self._last, leaves


def _traits_of(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    return [list(map(trait, tensors)) for trait in _TRAITS]


def _has_traits(tensors: Sequence[torch.Tensor], traits: list[list[Any]]) -> bool:
    """Whether `_traits_of` the tensors would be these; one at a time, since thousands of shapes alive at once
    make Python collect garbage."""
    return all(
        all(map(operator.eq, map(trait, tensors), known))
        for trait, known in zip(_TRAITS, traits, strict=True)
    )


def _pick(items: Sequence[Any], indexes: Sequence[int]) -> Sequence[Any]:
    if len(indexes) == len(items):
        return items
    if len(indexes) > 1:
        return itemgetter(*indexes)(items)  # type: ignore[no-any-return]
    return [items[i] for i in indexes]
