"""Staging is writing: tensors go once, in one batched call, into views of the version's own buffer.

On a GPU the buffer is page-locked, so the device writes into it at link speed, and the copies run on a
stream of their own, after what the training stream has queued so far.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, Final

import torch

from flashpoint.buffers import BufferObject
from flashpoint.checksums import Bytes
from flashpoint.errors import FlashpointError
from flashpoint.gc_pause import gc_paused
from flashpoint.layout import ObjectLayout
from flashpoint.telemetry import logger, warn_once
from flashpoint_torch.dtypes import TORCH_DTYPES

_PINNED: Final = "page-locked"
_HOST_REGISTER_PORTABLE: Final = 1  # cudaHostRegisterPortable: locked for every device

# Up to here one thread copies as fast as two (measured on 2 cores), and more have little to share.
_SMALL_BYTES_MAX: Final = 2 << 20

_is_cpu = attrgetter("is_cpu")
_nbytes = attrgetter("nbytes")
_storage = torch.Tensor.untyped_storage
_storage_nbytes = torch.UntypedStorage.nbytes
_streams: dict[torch.device, Any] = {}


def views_of(buffer: BufferObject, layout: ObjectLayout) -> list[torch.Tensor]:
    """A tensor over each entry of the layout in this buffer; made once for each pair of the two."""
    views = buffer.views.get(layout.digest)
    if views is None:
        # A buffer sees few layouts in its life; those of a state that changed shape are not kept.
        for stale in [key for key in buffer.views if key != _PINNED]:
            del buffer.views[stale]
        views = buffer.views[layout.digest] = tensors_over(buffer.data, layout)
    return views


@gc_paused()
def tensors_over(data: Bytes, layout: ObjectLayout) -> list[torch.Tensor]:
    """A tensor over each entry of the layout in ``data`` (uint8), sharing its memory."""
    tensors = []
    with warnings.catch_warnings():
        # Read-only memory: these tensors are only ever copied from.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        for entry, begin, end in zip(layout.entries, layout.begins, layout.ends, strict=True):
            dtype = TORCH_DTYPES.get(entry.dtype)
            if begin == end:
                tensors.append(torch.empty(entry.shape, dtype=dtype or torch.uint8))
                continue
            if dtype is None:  # one of JAX's alone: its bytes, which nobody asks for
                tensors.append(torch.frombuffer(data, dtype=torch.uint8, count=end - begin, offset=begin))
                continue
            flat = torch.frombuffer(data, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=begin)
            tensors.append(flat.view(entry.shape))
    return tensors


def stage_into(buffer: BufferObject, layout: ObjectLayout, sources: Sequence[torch.Tensor]) -> None:
    """Copy ``sources`` to their places in the buffer and wait for it: one call, one release of the GIL.

    Raises:
        FlashpointError: a source has lost its memory.
    """
    require_memory(sources, (entry.name for entry in layout.entries))
    # Inference mode spares thousands of small copies their bookkeeping for autograd.
    with torch.inference_mode():
        views = views_of(buffer, layout)
        if sources and all(map(_is_cpu, sources)):  # as the views are: not one more look at each
            _copy_on_cpu(views, sources)
        else:
            copy_tensors(views, sources, buffer)


def require_memory(tensors: Sequence[torch.Tensor], names: Iterable[str]) -> None:
    """Refuse tensors whose storage was freed under them: to copy them ends the process.

    Raises:
        FlashpointError: naming the first of them.
    """
    held = map(_storage_nbytes, map(_storage, tensors))
    if not any(map(operator.lt, held, map(_nbytes, tensors))):
        return
    for tensor, name in zip(tensors, names, strict=True):
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = tensor.storage_offset() + last + 1  # an expanded tensor needs less than its size
        if tensor.numel() and tensor.untyped_storage().nbytes() < end * tensor.itemsize:
            raise FlashpointError(
                f"{name[:200]!r} has no memory: its storage was freed or cut, as FSDP1 does with parameters "
                "that are not in use; take the state from the wrapper's state_dict()"
            )


def copy_tensors(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], buffer: BufferObject | None
) -> None:
    """Copy all sources into their targets, wherever they are, and wait for it.

    ``buffer`` is what one of the two sides are views of; it is page-locked for copies with a GPU.
    """
    if not sources:
        return  # torch refuses empty lists
    if all(map(_is_cpu, sources)) and all(map(_is_cpu, targets)):
        _copy_on_cpu(targets, sources)
        return
    devices = {tensor.device for tensor in (*sources, *targets)} - {torch.device("cpu")}
    pinned = buffer is not None and page_lock(buffer)
    for device in devices:
        _copy_with_device(device, targets, sources, non_blocking=pinned)
    here = [n for n, (t, s) in enumerate(zip(targets, sources, strict=True)) if t.is_cpu and s.is_cpu]
    if here:
        _copy_on_cpu([targets[n] for n in here], [sources[n] for n in here])
    for device in devices:
        if device.type == "cuda":
            _streams[device].synchronize()


def _copy_on_cpu(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy small tensors with one thread, large ones with all.

    Torch opens an OpenMP region for each tensor of more than 32k elements. Where another process wants the
    cores too, every region waits for a thread that is not running: seconds, with thousands of tensors.
    """
    sizes = list(map(_nbytes, sources))
    if min(sizes) > _SMALL_BYTES_MAX or torch.get_num_threads() == 1:
        torch._foreach_copy_(list(targets), list(sources))
        return
    if max(sizes) > _SMALL_BYTES_MAX:
        large = [n for n, size in enumerate(sizes) if size > _SMALL_BYTES_MAX]
        torch._foreach_copy_([targets[n] for n in large], [sources[n] for n in large])
        small = [n for n, size in enumerate(sizes) if size <= _SMALL_BYTES_MAX]
        targets, sources = [targets[n] for n in small], [sources[n] for n in small]
    with _one_thread():
        torch._foreach_copy_(list(targets), list(sources))


_turns_lock = threading.Lock()
_turns = 0  # threads that are in `_one_thread` now
_threads_before = 1


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch's operators of this thread run on it alone, for a copy.

    OpenMP keeps the number for each thread, so those that run already are not slowed. What is global is
    torch's number for threads that come to it later; the first to enter remembers it, and whoever leaves puts
    it back. A thread whose very first operator falls into a copy keeps one thread until it is told otherwise.
    """
    global _turns, _threads_before
    if not _uses_openmp():  # torch's own pool cannot be changed once it runs
        yield
        return
    with _turns_lock:
        if _turns == 0:
            _threads_before = torch.get_num_threads()
        _turns += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _turns_lock:
            _turns -= 1
            torch.set_num_threads(_threads_before)


@cache
def _uses_openmp() -> bool:
    return "backend: OpenMP" in torch.__config__.parallel_info()


def _copy_with_device(
    device: torch.device,
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    *,
    non_blocking: bool,
) -> None:
    pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if device in (t.device, s.device)]
    ours, theirs = [t for t, _ in pairs], [s for _, s in pairs]
    if device.type != "cuda":
        torch._foreach_copy_(ours, theirs)  # other accelerators: correct, without the overlap
        return
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    stream = _streams[device]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch._foreach_copy_(ours, theirs, non_blocking=non_blocking)


def page_lock(buffer: BufferObject) -> bool:
    """Page-lock a buffer for CUDA, once in its life; False where there is no CUDA or it refuses."""
    if not torch.cuda.is_available():
        return False
    if _PINNED not in buffer.views:
        buffer.views[_PINNED] = _register(buffer)
    return bool(buffer.views[_PINNED])


def _register(buffer: BufferObject) -> bool:
    cudart = torch.cuda.cudart()
    address = buffer.data.ctypes.data
    error = cudart.cudaHostRegister(address, buffer.nbytes, _HOST_REGISTER_PORTABLE)
    if int(error) != 0:
        _forget_error()
        warn_once(
            "cudaHostRegister",
            f"a buffer of {buffer.nbytes} bytes could not be page-locked (CUDA error {int(error)}): copies "
            "from the GPU run slower; raise the limit of locked memory (ulimit -l)",
        )
        return False

    def unregister() -> None:
        error = cudart.cudaHostUnregister(address)
        if int(error) != 0:  # as at the end of the process, when CUDA has gone before us
            _forget_error()
            logger.debug("a page-locked buffer was not released by CUDA (error %d)", int(error))

    buffer.before_unmap.append(unregister)
    return True


def _forget_error() -> None:
    """CUDA reports a failed call once more at the next kernel's launch: let that be ours, not training's."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
