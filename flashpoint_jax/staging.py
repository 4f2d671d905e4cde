"""Staging is writing: arrays go once, from their devices into the version's own buffer.

All copies from devices are started before the first is waited for. Nothing that is returned or kept shares memory
with an array: what training donates or overwrites next is its own again.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import jax
import numpy as np

from flashpoint.buffers import BufferObject
from flashpoint.checksums import Bytes
from flashpoint.dtypes import dtype_of
from flashpoint.gc_pause import gc_paused
from flashpoint.layout import ObjectLayout
from flashpoint_jax.plan import JAX, StatePlan, host_array, stored_array

_VIEWS: Final = "numpy:"
# Up to here numpy's own way of letting others run costs more than the copy (see `copy_into`).
_SMALL_BYTES_MAX: Final = 1 << 20

Array = np.ndarray[Any, Any]


def start_copies(plan: StatePlan, leaves: Sequence[Any]) -> list[Any]:
    """What to store, in the order of the layout's entries: arrays on their way to the host, or there already."""
    stored: dict[int, Any] = {}
    on_way = []
    for leaf, shard in plan.sources:
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
        threads: that share the large arrays, while this one copies the small.
    """
    views = views_of(buffer, layout)
    with ThreadPoolExecutor(threads, thread_name_prefix="flashpoint-stage") as pool:
        copies = []
        for n, view in enumerate(views):
            # Let go at once: on a CPU this is a view of the array, and what is viewed cannot be donated.
            source, sources[n] = sources[n], None
            if threads > 1 and view.nbytes > _SMALL_BYTES_MAX:
                copies.append(pool.submit(copy_into, view, np.asarray(source)))
            else:
                copy_into(view, np.asarray(source))
        while copies:
            copies.pop().result()
    sources.clear()


def copy_into(target: Array, source: Array) -> None:
    """``target[...] = source``, for arrays of one shape and dtype.

    numpy lets other threads run during each copy, and then has to win its turn back from them: up to 5 ms, for
    microseconds' worth of bytes. So small ones are copied without a break.
    """
    if source.nbytes <= _SMALL_BYTES_MAX and source.flags.c_contiguous and source.size:
        target.reshape(-1).view(np.uint8).data[:] = source.reshape(-1).view(np.uint8).data
    else:
        np.copyto(target, source)


def views_of(buffer: BufferObject, layout: ObjectLayout) -> list[Array]:
    """An array over each entry of the layout in this buffer; made once for each pair of the two."""
    key = f"{_VIEWS}{layout.digest}"
    views = buffer.views.get(key)
    if views is None:
        # A buffer sees few layouts in its life; those of a state that changed shape are not kept.
        for stale in [other for other in buffer.views if other.startswith(_VIEWS)]:
            del buffer.views[stale]
        views = buffer.views[key] = arrays_over(buffer.data, layout)
    return list(views)


@gc_paused()
def arrays_over(data: Bytes, layout: ObjectLayout) -> list[Array]:
    """An array over each entry of the layout in ``data``, sharing its memory."""
    views = []
    for entry, begin, end in zip(layout.entries, layout.begins, layout.ends, strict=True):
        dtype = dtype_of(entry.dtype).numpy
        assert dtype is not None  # JAX has none that numpy has not
        views.append(data[begin:end].view(dtype).reshape(entry.shape))
    return views
