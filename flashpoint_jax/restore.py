"""Filling arrays from a version's blobs: any sharding from any other, by the intersection of boxes.

Every array that is handed out has memory of its own. JAX takes over numpy memory that is aligned to 64 bytes, and does
so without a word and even where it is asked not to; a view of a pool file would make a training state change when
its buffer is recycled. So bytes are copied out of the mapping first, and what JAX then takes over is a copy that
nobody else holds.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax.experimental.layout import Format

from flashpoint.boxes import Box, overlap
from flashpoint.dtypes import dtype_of
from flashpoint.errors import MismatchError
from flashpoint.gc_pause import gc_paused
from flashpoint.layout import Entry
from flashpoint.recovery import plan_reads, preferred_entries
from flashpoint.view import CheckpointView
from flashpoint_jax.plan import box_of

ALIGN_BYTES: Final = 64  # what JAX takes over without another copy
_HUGE_BYTES: Final = 2 << 20
_THREAD_BYTES_MIN: Final = 32 << 20

Array = np.ndarray[Any, Any]


class Stored(NamedTuple):
    """What the version says of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_shape: tuple[int, ...]


@dataclass(frozen=True)
class Target:
    """What to restore an array as.

    Attributes:
        sharding: of the `jax.Array` to make; None for a numpy array.
        layout: of each shard in its device's memory, None for the device's own.
        shape: of the whole; None for the stored one. Where it differs, what is over is cut off and what is
            missing is zero, unless ``strict``.
        dtype: None for the stored one.
    """

    name: str
    sharding: jax.sharding.Sharding | None = None
    layout: Any = None
    shape: tuple[int, ...] | None = None
    dtype: np.dtype[Any] | None = None
    strict: bool = True


class _Piece(NamedTuple):
    """A box of one target on the host, and the devices that get it."""

    target: int
    box: Box
    host: Array
    devices: list[jax.Device]


def stored(view: CheckpointView, name: str) -> Stored:
    """What the version holds under a name.

    Raises:
        MismatchError: nothing.
    """
    found = preferred_entries(view.manifest, name, view.rank)
    if not found:
        raise MismatchError(f"step {view.manifest.step} holds no array {name[:200]!r}")
    entry = view.entry(*found[0])
    known = dtype_of(entry.dtype).numpy
    assert known is not None
    return Stored(entry.whole_shape, known, entry.shape)


def wanted_entries(view: CheckpointView, targets: Sequence[Target]) -> list[Entry]:
    """The boxes of stored arrays that `restore_arrays` reads here; of names that are not there, nothing."""
    found = []
    for target in targets:
        if target.name not in view.manifest.by_name:
            continue
        known = stored(view, target.name)
        shape = known.shape if target.shape is None else tuple(target.shape)
        for box, _ in _boxes(target, shape):
            shared = box if shape == known.shape else _shared(box, known.shape)
            if shared is not None:
                found.append(Entry(target.name, known.dtype.name, shared.shape, shared.start, known.shape))
    return found


@gc_paused()
def restore_arrays(view: CheckpointView, targets: Sequence[Target], *, threads: int = 1) -> list[Any]:
    """A `jax.Array` or numpy array for each target.

    Args:
        view: opened; what is read of it is verified.

    Raises:
        ValueError: the stored shape is another, in Orbax's own words.
        MismatchError: a name is not in the version, or not all of the array that is needed.
        CorruptObjectError: bytes do not match their digests.
    """
    pieces: list[_Piece] = []
    wanted: list[Entry] = []
    into: list[Array] = []
    shapes: list[tuple[int, ...]] = []
    for number, target in enumerate(targets):
        known = stored(view, target.name)
        shape = known.shape if target.shape is None else tuple(target.shape)
        shapes.append(shape)
        if shape != known.shape and target.strict:
            raise ValueError(
                f"Requested shape: {shape} is not compatible with the stored shape: {known.shape}. "
                f"Truncating/padding is disabled. To enable it, set `strict=False`. ({target.name})"
            )
        dtype = known.dtype if target.dtype is None else np.dtype(target.dtype)
        for box, devices in _boxes(target, shape):
            piece = _Piece(number, box, empty(box.shape, dtype), devices)
            pieces.append(piece)
            shared = box if shape == known.shape else _shared(box, known.shape)
            if shared != box:
                piece.host.fill(0)
            if shared is not None:
                wanted.append(Entry(target.name, known.dtype.name, shared.shape, shared.start, known.shape))
                into.append(piece.host[_slices(box, shared)])
    _copy(view, wanted, into, threads)
    return _arrays(targets, shapes, pieces)


def _boxes(target: Target, shape: tuple[int, ...]) -> list[tuple[Box, list[jax.Device]]]:
    if target.sharding is None:
        return [(Box.whole(shape), [])]
    found: dict[Box, list[jax.Device]] = {}
    for device, index in target.sharding.addressable_devices_indices_map(shape).items():
        found.setdefault(box_of(index or (), shape), []).append(device)
    return list(found.items())


def _shared(box: Box, shape: tuple[int, ...]) -> Box | None:
    return overlap(box, Box.whole(shape)) if len(shape) == len(box.shape) else None


def _slices(box: Box, part: Box) -> tuple[Any, ...]:
    """A part of a box, in the box's own coordinates; as `_range`."""
    return _range([p - b for p, b in zip(part.start, box.start, strict=True)], part.shape)


def _copy(view: CheckpointView, wanted: Sequence[Entry], into: Sequence[Array], threads: int) -> None:
    """Fill the arrays with the boxes that are wanted; verified all before the first is copied."""
    reads = plan_reads(view.manifest, wanted, view.rank)
    copies: list[Callable[[], None]] = []
    nbytes = 0
    for read in reads:
        source = view.array(read.record, read.entry)[_range(read.source_start, read.lengths)]
        target = into[read.target][_range(read.target_start, read.lengths)]
        copies.append(_copier(target, source))
        nbytes += target.nbytes
    if threads > 1 and nbytes >= _THREAD_BYTES_MIN and len(copies) > 1:
        with ThreadPoolExecutor(threads, thread_name_prefix="flashpoint-restore") as pool:
            for done in [pool.submit(copy) for copy in copies]:
                done.result()
    else:
        for copy in copies:
            copy()


def _copier(target: Array, source: Array) -> Callable[[], None]:
    return lambda: np.copyto(target, source, casting="unsafe")


def _arrays(
    targets: Sequence[Target], shapes: Sequence[tuple[int, ...]], pieces: Sequence[_Piece]
) -> list[Any]:
    found: list[Any] = [None] * len(targets)
    shards: list[list[jax.Array]] = [[] for _ in targets]
    hosts: list[Array] = []
    places: list[Any] = []
    owners: list[int] = []
    known: dict[Any, Any] = {}
    for number, _, host, devices in pieces:
        sharding, layout = targets[number].sharding, targets[number].layout
        if sharding is None:
            found[number] = host
            continue
        for device in devices:
            place = (device, sharding.memory_kind, layout)
            if place not in known:
                on_device: Any = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
                known[place] = on_device if layout is None else Format(layout, on_device)
            hosts.append(host)
            places.append(known[place])
            owners.append(number)
    # One call for all: thousands cost more than their bytes.
    for number, shard in zip(owners, jax.device_put(hosts, places), strict=True):
        shards[number].append(shard)
    for number, target in enumerate(targets):
        if target.sharding is not None:
            found[number] = jax.make_array_from_single_device_arrays(
                shapes[number], target.sharding, shards[number]
            )
    return found


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """New memory, aligned so that JAX takes it over as it is; large pieces on huge pages, where there are any.

    numpy's own begins 16 bytes behind a page, which costs a second copy.
    """
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if nbytes >= _HUGE_BYTES:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(mapping, np.uint8).view(dtype).reshape(shape)
    raw = np.empty(nbytes + ALIGN_BYTES, np.uint8)
    begin = -raw.ctypes.data % ALIGN_BYTES
    return raw[begin : begin + nbytes].view(dtype).reshape(shape)


def _range(start: Sequence[int], lengths: Sequence[int]) -> tuple[Any, ...]:
    """An index that gives a view, also of an array without dimensions."""
    return (*(slice(s, s + n) for s, n in zip(start, lengths, strict=True)), ...)
