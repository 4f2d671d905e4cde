"""Staging is writing: arrays go once, from their devices into the version's own buffer.

All copies from devices are started before the first is waited for. Nothing that is returned or kept shares memory
with an array: what training donates or overwrites next is its own again.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from flashpoint.buffers import BufferObject
from flashpoint.checksums import Bytes
from flashpoint.dtypes import dtype_of
from flashpoint.gc_pause import gc_paused
from flashpoint.layout import ObjectLayout
from flashpoint_jax.plan import JAX, StatePlan, host_array, stored_array

_PLACES: Final = "places:"
# Up to here numpy's own way of letting others run costs more than threads that share the copies gain (`copy_into`).
_SMALL_BYTES_MAX: Final = 128 << 10
_THREADED_BYTES_MIN: Final = 16 << 20  # of larger ones: below, a copy is sooner done than a thread is started

Array = np.ndarray[Any, Any]


def start_copies(plan: StatePlan, leaves: Sequence[Any]) -> list[Any]:
    """What to store, in the order of the layout's entries: arrays on their way to the host, or there already."""
    stored: dict[int, Any] = {}
    on_way = []
    for leaf, shard, is_direct in plan.sources:
        if is_direct:
            on_way.append(leaves[leaf].addressable_data(shard))
            continue
        if leaf not in stored:
            cast = plan.casts[leaf] if plan.casts else None
            stored[leaf] = (
                stored_array(leaves[leaf], cast)
                if plan.kinds[leaf] == JAX
                else host_array(leaves[leaf], cast)
            )
        value = stored[leaf]
        if shard is not None:
            value = value.addressable_data(shard)
            if value.device.platform != "cpu":
                # Through an array of its own: the copy that it keeps on the host goes with it, not with the state.
                value = jax.make_array_from_single_device_arrays(value.shape, value.sharding, [value])
                value.copy_to_host_async()
        on_way.append(value)
    return on_way


def stage_into(buffer: BufferObject, layout: ObjectLayout, sources: list[Any], *, threads: int = 1) -> None:
    """Copy what `start_copies` gave to its place in the buffer; takes it from the list, piece by piece.

    Args:
        threads: that share the copies, this one among them.
    """
    places = _places_in(buffer, layout)
    turns = iter(range(len(places)))  # whoever is done with one array takes the next

    def copy() -> None:
        for n in turns:
            # Let go at once: on a CPU this is a view of the array, and what is viewed cannot be donated.
            source, sources[n] = sources[n], None
            copy_into(places[n], np.asarray(source))

    large_bytes = sum(place.array.nbytes for place in places if place.small is None)
    if threads > 1 and large_bytes >= _THREADED_BYTES_MIN:
        with ThreadPoolExecutor(threads - 1, thread_name_prefix="flashpoint-stage") as pool:
            others = [pool.submit(copy) for _ in range(threads - 1)]
            copy()
            for other in others:
                other.result()
    else:
        copy()
    sources.clear()


class Place(NamedTuple):
    """Where one entry lies in a buffer.

    Attributes:
        array: over its bytes.
        small: the same bytes, of an entry that is copied without letting other threads run; else None.
    """

    array: Array
    small: memoryview | None


def copy_into(place: Place, source: Array) -> None:
    """Copy an array of the place's shape and dtype to it.

    numpy lets other threads run during each copy, and then has to win its turn back from them: up to 5 ms, for
    microseconds' worth of bytes. So small ones are copied without a break.
    """
    if place.small is not None and source.flags.c_contiguous:
        place.small[:] = source.reshape(-1).view(np.uint8).data
    else:
        np.copyto(place.array, source)


def _places_in(buffer: BufferObject, layout: ObjectLayout) -> list[Place]:
    """The place of each entry of the layout in this buffer; made once for each pair of the two."""
    key = f"{_PLACES}{layout.digest}"
    places = buffer.views.get(key)
    if places is None:
        # A buffer sees few layouts in its life; those of a state that changed shape are not kept.
        for stale in [other for other in buffer.views if other.startswith(_PLACES)]:
            del buffer.views[stale]
        places = buffer.views[key] = places_in(buffer.data, layout)
    return places


@gc_paused()
def places_in(data: Bytes, layout: ObjectLayout) -> list[Place]:
    """The place of each entry of the layout in ``data``, sharing its memory."""
    places = []
    for entry, begin, end in zip(layout.entries, layout.begins, layout.ends, strict=True):
        dtype = dtype_of(entry.dtype).numpy
        assert dtype is not None  # JAX has none that numpy has not
        part = data[begin:end]
        small = part.data if 0 < end - begin <= _SMALL_BYTES_MAX else None
        places.append(Place(part.view(dtype).reshape(entry.shape), small))
    return places
