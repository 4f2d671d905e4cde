"""Filling arrays from a version's blobs: any sharding from any other, by the intersection of boxes.

Every array that is handed out lies in memory that no file and no other version shares. JAX takes over numpy memory
that is aligned to 64 bytes, and does so without a word and even where it is asked not to; a view of a pool file would
make a training state change when its buffer is recycled. So bytes are copied out of the mapping first, and what JAX
then takes over is that copy.

What is wanted as it is stored, which is nearly all, is copied as ranges of the file: small arrays that are neighbours
there stay neighbours in memory, so that thousands of them are a few copies and a few allocations.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax._src import core
from jax._src.interpreters.pxla import batched_device_put
from jax.experimental.layout import Format

from flashpoint.boxes import Box, inverse, overlap, untransposed
from flashpoint.dtypes import dtype_of
from flashpoint.errors import MismatchError
from flashpoint.gc_pause import gc_paused
from flashpoint.layout import LARGE_ENTRY_BYTES, Entry
from flashpoint.manifest import ObjectRecord
from flashpoint.recovery import plan_reads, preferred_entries
from flashpoint.view import CheckpointView
from flashpoint_jax.plan import box_of

ALIGN_BYTES: Final = 64  # what JAX takes over without another copy
_HUGE_BYTES: Final = 2 << 20
_THREAD_BYTES_MIN: Final = 32 << 20
_RANGE_BYTES_MAX: Final = 32 << 20  # that one array may keep alive of others
_GAP_BYTES_MAX: Final = 4096  # between neighbours: it is copied along

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
        axes: by which the stored array is transposed, as of `numpy.transpose`; empty for as it is stored.
    """

    name: str
    sharding: jax.sharding.Sharding | None = None
    layout: Any = None
    shape: tuple[int, ...] | None = None
    dtype: np.dtype[Any] | None = None
    strict: bool = True
    axes: tuple[int, ...] = ()


class _Copy(NamedTuple):
    """``target[...] = source``, to be called."""

    target: Array
    source: Array

    def __call__(self) -> None:
        np.copyto(self.target, self.source, casting="unsafe")


class _Shard(NamedTuple):
    """A box of one target that is stored just so, as one entry."""

    target: int
    box: Box
    dtype: np.dtype[Any]
    record: ObjectRecord
    begin: int
    end: int


def stored(view: CheckpointView, name: str) -> Stored:
    """What the version holds under a name.

    Raises:
        MismatchError: nothing.
    """
    return _stored(view, _found(view, name))


def _found(view: CheckpointView, name: str) -> list[tuple[ObjectRecord, int]]:
    found = preferred_entries(view.manifest, name, view.rank)
    if not found:
        raise MismatchError(f"step {view.manifest.step} holds no array {name[:200]!r}")
    return found


def _stored(view: CheckpointView, found: Sequence[tuple[ObjectRecord, int]]) -> Stored:
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
        for box in dict.fromkeys(places_of(target.sharding, shape).boxes):
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
    cached_places = functools.cache(places_of)  # layers share theirs
    aval_of = functools.cache(_aval)
    hosts: list[dict[Box, Array]] = [{} for _ in targets]  # of each target, its boxes on the host
    shapes: list[tuple[int, ...]] = []
    dtypes: list[np.dtype[Any]] = []
    shards: list[_Shard] = []
    wanted: list[Entry] = []
    into: list[Array] = []
    for number, target in enumerate(targets):
        found = _found(view, target.name)
        known = _stored(view, found)
        whole = known.shape
        if target.axes:
            known = known._replace(shape=tuple(whole[axis] for axis in target.axes))
        shape = known.shape if target.shape is None else tuple(target.shape)
        if shape != known.shape and target.strict:
            raise ValueError(
                f"Requested shape: {shape} is not compatible with the stored shape: {known.shape}. "
                f"Truncating/padding is disabled. To enable it, set `strict=False`. ({target.name})"
            )
        dtype = known.dtype if target.dtype is None else np.dtype(target.dtype)
        shapes.append(shape)
        dtypes.append(dtype)
        as_stored = (shape, dtype, target.axes) == (known.shape, known.dtype, ())
        stored_so = _entries_of(view, found) if as_stored else {}
        try:
            boxes = cached_places(target.sharding, shape).boxes
        except ValueError as error:  # the sharding does not cut the shape into equal shards
            raise ValueError(f"{target.name}: {error}") from error
        for box in dict.fromkeys(boxes):
            if box in stored_so:
                record, begin, end = stored_so[box]
                shards.append(_Shard(number, box, dtype, record, begin, end))
                continue
            host = hosts[number][box] = empty(box.shape, dtype)
            shared = box if shape == known.shape else _shared(box, known.shape)
            if shared != box:
                host.fill(0)
            if shared is not None:
                there, part = shared, host[_slices(box, shared)]
                if target.axes:
                    there, part = untransposed(shared, target.axes), part.transpose(inverse(target.axes))
                wanted.append(Entry(target.name, known.dtype.name, there.shape, there.start, whole))
                into.append(part)
    # All is verified before the first byte is copied.
    copies = _ranges(view, shards, hosts) + _parts(view, wanted, into)
    _copy(copies, threads)
    arrays: list[Any] = []
    for target, shape, dtype, parts in zip(targets, shapes, dtypes, hosts, strict=True):
        places = cached_places(target.sharding, shape)
        hosts_of_devices = [parts[box] for box in places.boxes]
        if target.sharding is None:
            arrays += hosts_of_devices
        elif not places.devices:  # all of it is other processes'
            empty_here: list[jax.Array] = []
            arrays.append(
                jax.make_array_from_single_device_arrays(shape, target.sharding, empty_here, dtype=dtype)
            )
        elif target.layout is None and jax.dtypes.canonicalize_dtype(dtype) == dtype:
            # What `make_array_from_callback` comes down to, without asking again what is known: 6 us of CPU time
            # for each array instead of 18.
            aval = aval_of(target.sharding, shape, dtype)
            arrays.append(batched_device_put(aval, target.sharding, hosts_of_devices, places.devices))
        else:
            arrays.append(_array(target.sharding, target.layout, shape, dtype, parts))
    return arrays


def _aval(sharding: jax.sharding.Sharding, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """What JAX calls the type of an array."""
    return core.update_aval_with_sharding(core.ShapedArray(shape, dtype), sharding)


def _array(
    sharding: jax.sharding.Sharding,
    layout: Any,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    parts: dict[Box, Array],
) -> Any:
    """A `jax.Array` in a layout of its own, or of numbers that JAX cuts to 32 bits."""
    return jax.make_array_from_callback(
        shape,
        sharding if layout is None else Format(layout, sharding),
        lambda index: parts[box_of(index or (), shape)],
        dtype=jax.dtypes.canonicalize_dtype(dtype),
    )


class Places(NamedTuple):
    """Where an array goes on this process: its devices, and the box of each."""

    devices: list[jax.Device]
    boxes: list[Box]


def places_of(sharding: jax.sharding.Sharding | None, shape: tuple[int, ...]) -> Places:
    """The boxes of an array that this process needs, in the order of its devices that get them."""
    if sharding is None:
        return Places([], [Box.whole(shape)])
    indices = sharding.addressable_devices_indices_map(shape)
    return Places(list(indices), [box_of(index or (), shape) for index in indices.values()])


def _entries_of(
    view: CheckpointView, found: Sequence[tuple[ObjectRecord, int]]
) -> dict[Box, tuple[ObjectRecord, int, int]]:
    """The boxes that are stored as one entry, each with its object and its bytes there."""
    boxes = {}
    for record, i in found:
        layout = view.manifest.layout(record)
        entry = layout.entries[i]
        boxes[Box(entry.origin, entry.shape)] = (record, layout.begins[i], layout.ends[i])
    return boxes


def _shared(box: Box, shape: tuple[int, ...]) -> Box | None:
    return overlap(box, Box.whole(shape)) if len(shape) == len(box.shape) else None


def _slices(box: Box, part: Box) -> tuple[Any, ...]:
    """A part of a box, in the box's own coordinates; as `_range`."""
    return _range([p - b for p, b in zip(part.start, box.start, strict=True)], part.shape)


def _ranges(view: CheckpointView, shards: Sequence[_Shard], hosts: Sequence[dict[Box, Array]]) -> list[_Copy]:
    """Memory for shards as they are stored, put among ``hosts``, and the copies that fill it.

    An array keeps the range that it was copied in from being freed: alone where it is large, and so not more than
    `_RANGE_BYTES_MAX` where it is small.
    """
    copies: list[_Copy] = []
    for together in _neighbours(sorted(shards, key=lambda shard: (shard.record.name, shard.begin))):
        record, begin, end = together[0].record, together[0].begin, max(shard.end for shard in together)
        source = view.object_bytes(record, begin, end)[begin:end]
        memory = empty((end - begin,), np.dtype(np.uint8))
        for cut in range(0, end - begin, _RANGE_BYTES_MAX):  # so that threads share what is large
            stop = cut + _RANGE_BYTES_MAX
            copies.append(_Copy(memory[cut:stop], source[cut:stop]))
        for shard in together:
            # Entries begin on multiples of 64 bytes, and so does the memory: JAX takes each over as it is.
            hosts[shard.target][shard.box] = np.ndarray(
                shard.box.shape, shard.dtype, memory, shard.begin - begin
            )
    return copies


def _neighbours(shards: Iterable[_Shard]) -> Iterator[list[_Shard]]:
    """Runs of shards, given in the order of their bytes, to be copied at once."""
    run: list[_Shard] = []
    for shard in shards:
        if run and not (
            shard.record is run[0].record
            and shard.end - shard.begin < LARGE_ENTRY_BYTES
            and run[-1].end <= shard.begin <= run[-1].end + _GAP_BYTES_MAX
            and shard.end - run[0].begin <= _RANGE_BYTES_MAX
        ):
            yield run
            run = []
        run.append(shard)
        if shard.end - shard.begin >= LARGE_ENTRY_BYTES:
            yield run
            run = []
    if run:
        yield run


def _parts(view: CheckpointView, wanted: Sequence[Entry], into: Sequence[Array]) -> list[_Copy]:
    """The copies that fill arrays with the boxes that are wanted, cast to their dtypes."""
    copies = []
    for read in plan_reads(view.manifest, wanted, view.rank):
        source = view.array(read.record, read.entry)[_range(read.source_start, read.lengths)]
        copies.append(_Copy(into[read.target][_range(read.target_start, read.lengths)], source))
    return copies


def _copy(copies: Sequence[_Copy], threads: int) -> None:
    nbytes = sum(copy.target.nbytes for copy in copies)
    if threads > 1 and nbytes >= _THREAD_BYTES_MIN and len(copies) > 1:
        with ThreadPoolExecutor(threads, thread_name_prefix="flashpoint-restore") as pool:
            for _ in pool.map(_Copy.__call__, copies):
                pass  # its error is raised here
    else:
        for copy in copies:
            copy()


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
