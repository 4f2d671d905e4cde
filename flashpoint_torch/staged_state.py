"""What ``dcp.async_save`` gets to save: a state whose tensors already lie in a pool buffer.

Stock ``dcp.async_save`` stages, then saves the staged state in a thread or in another process. Ours is a
dict of views of the buffer that will be the object, so nothing is copied again; pickled for the
process executor, it is the buffer's path and the places of the views, so nothing is copied then either.

A state that could not be staged is a dict that says so, under `NOT_STAGED`: an error raised while staging
would leave other ranks waiting in DCP's collectives; the writer raises it within them, and all ranks hear.
"""

from __future__ import annotations

import copy
import io
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from flashpoint.buffers import BufferObject, BufferPool
from flashpoint.errors import FlashpointError, reason_of
from flashpoint.layout import ObjectLayout, decode_layout, plan_layout
from flashpoint.saver import StagedObject
from flashpoint_torch.dtypes import TORCH_DTYPES
from flashpoint_torch.plan import StatePlan
from flashpoint_torch.staging import copy_tensors, require_memory, views_of
from flashpoint_torch.tree import Skeleton

NOT_STAGED: Final = "flashpoint could not stage this state: "


class _Place(NamedTuple):
    """Stands for the tensor over one entry of the buffer, on its way to another process."""

    entry: int
    spec: DTensorSpec | None


class StagedState(dict[str, Any]):
    """A staged state dict; its buffer is given back to the pool when it is garbage, unless it was saved."""

    staged: StagedObject
    skeleton: Skeleton
    places: list[Any]
    pool: BufferPool | None  # that the buffer is of; None where another process took it

    def __reduce__(self) -> tuple[Any, ...]:
        buffer, layout = self.staged.buffer, self.staged.layout
        try:
            # By torch.save, since the pickle of torch.multiprocessing has a file descriptor for each tensor
            # and loses what a quantized one means; and as bytes, so that `_attach` sees them fail.
            rest = _saved((self.skeleton, self.places))
        except Exception as error:
            return dict, (not_staged(error),)
        return _attach, (buffer.path, buffer.nbytes, layout.encoded, rest)


class CopiedState(dict[str, Any]):
    """A staged state dict in one piece of this process's own memory: pickled, it is one file descriptor.

    (A DTensor whose local part does not begin its storage is not to be pickled at all: torch crashes.)
    """

    memory: torch.Tensor
    layout: ObjectLayout
    skeleton: Skeleton
    places: list[Any]

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            rest = _saved((self.skeleton, self.places))
        except Exception as error:
            return dict, (not_staged(error),)
        return _attach_copied, (self.memory, self.layout.encoded, rest)


_live: weakref.WeakValueDictionary[int, StagedState] = weakref.WeakValueDictionary()
_live_lock = threading.Lock()


def make_staged(
    staged: StagedObject, plan: StatePlan, leaves: Sequence[Any], pool: BufferPool
) -> StagedState:
    """The staged state of a plan: stored tensors become views, everything else is copied."""
    return _build(staged, plan.skeleton, _places(plan, leaves), pool)


def make_copied(plan: StatePlan, leaves: Sequence[Any]) -> dict[str, Any]:
    """A staged state in this process's own memory, for when no job root is known to stage into."""
    layout = staged_layout(plan)
    memory = torch.empty(layout.nbytes, dtype=torch.uint8)
    with torch.no_grad():
        sources = staged_sources(plan, leaves)
        require_memory(sources, (entry.name for entry in layout.entries))
        copy_tensors(_views(memory, layout), sources, None)
    return _build_copied(memory, layout, plan.skeleton, _places(plan, leaves))


def _build_copied(
    memory: torch.Tensor, layout: ObjectLayout, skeleton: Skeleton, places: list[Any]
) -> CopiedState:
    state = CopiedState(skeleton.rebuild(_leaves(_views(memory, layout), places)))
    state.memory, state.layout, state.skeleton, state.places = memory, layout, skeleton, places
    return state


def _views(memory: torch.Tensor, layout: ObjectLayout) -> list[torch.Tensor]:
    return [
        memory[begin:end].view(TORCH_DTYPES[entry.dtype]).view(entry.shape)
        for entry, begin, end in zip(layout.entries, layout.begins, layout.ends, strict=True)
    ]


def _attach_copied(memory: torch.Tensor, layout: bytes, rest: bytes) -> dict[str, Any]:
    try:
        return _build_copied(memory, decode_layout(layout), *_loaded(rest))
    except Exception as error:  # as in `_attach`
        return not_staged(error)


def staged_layout(plan: StatePlan) -> ObjectLayout:
    """The layout of what is staged as views: all stored tensors, or none where a leaf has several."""
    return plan.layout if plan.direct_leaves() else plan_layout([])


def staged_sources(plan: StatePlan, leaves: Sequence[Any]) -> list[torch.Tensor]:
    return plan.sources(leaves) if plan.direct_leaves() else []


def not_staged(error: Exception) -> dict[str, Any]:
    return {NOT_STAGED + reason_of(error): None}


def _places(plan: StatePlan, leaves: Sequence[Any]) -> list[Any]:
    places: list[Any] = [None] * len(leaves)
    stored = plan.direct_leaves()
    for entry, i in enumerate(stored):
        leaf = leaves[i]
        places[i] = _Place(entry, leaf._spec if isinstance(leaf, DTensor) else None)
    for i in set(range(len(leaves))).difference(stored):
        places[i] = _copy_of(leaves[i])
    return places


def _copy_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor):
        return value.detach().clone()
    try:
        return copy.deepcopy(value)
    except Exception:  # torch deep-copies no tensor that is compressed, or a step of a computation
        return _loaded(_saved(value))


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)  # what this job wrote a moment ago, to no file


def _build(
    staged: StagedObject, skeleton: Skeleton, places: list[Any], pool: BufferPool | None
) -> StagedState:
    views = views_of(staged.buffer, staged.layout)
    state = StagedState(skeleton.rebuild(_leaves(views, places)))
    state.staged, state.skeleton, state.places, state.pool = staged, skeleton, places, pool
    if pool is not None:
        weakref.finalize(state, staged.release, pool)
    with _live_lock:
        _live[id(state)] = state
    return state


def _leaves(views: Sequence[torch.Tensor], places: Sequence[Any]) -> Iterator[Any]:
    for place in places:
        if not isinstance(place, _Place):
            yield place
        elif place.spec is None:
            yield views[place.entry]
        else:
            yield DTensor(views[place.entry], place.spec, requires_grad=False)


def _attach(path: str, nbytes: int, layout: bytes, rest: bytes) -> dict[str, Any]:
    """The same state in another process, over its own mapping of the buffer."""
    try:
        skeleton, places = _loaded(rest)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        if os.fstat(fd).st_size != nbytes:
            os.close(fd)
            raise FlashpointError(f"the staged buffer {path} has changed its size")
        staged = StagedObject(decode_layout(layout), BufferObject(path, fd, nbytes))
        return _build(staged, skeleton, places, None)
    except Exception as error:  # raised in here, while it unpickles, it would end DCP's process
        return not_staged(error)


def staged_behind(tensors: Sequence[torch.Tensor]) -> StagedState | None:
    """The staged state whose buffer all these tensors are views of, if there is one.

    Raises:
        FlashpointError: it was saved already, and its buffer may hold something else by now.
    """
    addressed = [tensor.data_ptr() for tensor in tensors if tensor.numel()]
    if not addressed:
        return None
    with _live_lock:
        states = list(_live.values())
    found: StagedState | None = None
    for state in states:
        base = state.staged.buffer.data.ctypes.data
        if base <= min(addressed) and max(addressed) < base + state.staged.buffer.nbytes:
            found = state
            if not state.staged.released:  # else it is an older state, whose buffer was recycled for this one
                return state
    if found is not None:
        raise FlashpointError("this staged state was saved before: stage the state again for another save")
    return None
