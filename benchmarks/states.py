"""The states that benchmarks save and load: how many tensors, of which bytes, dtypes and shapes.

torch and JAX are imported by what makes states for them, so that neither runs beside the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

MIXED_DTYPES: Final = ("float32", "bfloat16", "float16", "int64")
MIXED_SHARES: Final = (0.45, 0.35, 0.15, 0.05)
TINY_BYTES: Final = 64
_SEED: Final = 20
_PATTERN_BYTES: Final = 16 << 20
_ALIGN_BYTES: Final = 64  # as torch's own allocator aligns


@dataclass(frozen=True)
class Workload:
    """One state.

    Attributes:
        key: its name on the command line.
        title: its name in the table.
        tensors: how many there are.
        nbytes: of this many bytes together, on each rank.
        ranks: processes that hold it; with several, every tensor is a DTensor, sharded by rows.
        mixed: dtypes and shapes differ; otherwise all are equal and float32.
    """

    key: str
    title: str
    tensors: int
    nbytes: int
    ranks: int = 1
    mixed: bool = False

    @property
    def is_tiny(self) -> bool:
        """So small that only the overhead is of interest, not the bytes."""
        return self.nbytes == self.tensors * TINY_BYTES


def workloads(nbytes: int) -> dict[str, Workload]:
    """All of them by key; ``nbytes`` is the size of the large ones, over all their ranks."""
    size = f"{nbytes >> 20} MiB" if nbytes < 1 << 30 else f"{nbytes >> 30} GiB"
    found = (
        Workload("large", f"{size}, 64 tensors, 1 rank", 64, nbytes),
        Workload("small", f"{size}, 5,000 mixed tensors, 1 rank", 5000, nbytes, mixed=True),
        Workload("large-2", f"{size}, 64 DTensors, 2 ranks", 64, nbytes // 2, ranks=2),
        Workload("small-2", f"{size}, 5,000 mixed DTensors, 2 ranks", 5000, nbytes // 2, ranks=2, mixed=True),
        Workload("tiny", "5,000 tensors of 64 bytes: overhead only", 5000, 5000 * TINY_BYTES),
    )
    return {workload.key: workload for workload in found}


@dataclass
class State:
    """A state in memory.

    Attributes:
        tree: what is saved: tensors under ``model``, and a plain value.
        source: the bytes of all its tensors (of this rank) as one contiguous array.
    """

    tree: dict[str, Any]
    source: np.ndarray[Any, np.dtype[np.uint8]]


def make(workload: Workload, mesh: DeviceMesh | None = None) -> State:
    """The state of one rank. Its tensors have storages of their own, one after the other in ``source``."""
    import torch
    from torch.distributed.tensor import DTensor, Shard

    specs = _specs(workload)
    places, position = [], 0
    for _, dtype, shape in specs:
        places.append(position)
        position += -(-_nbytes(dtype, shape) // _ALIGN_BYTES) * _ALIGN_BYTES
    source = torch.empty(position, dtype=torch.uint8).numpy()  # torch's memory: as its users have it
    _fill(source)
    model: dict[str, torch.Tensor] = {}
    for (name, dtype, shape), begin in zip(specs, places, strict=True):
        count = _nbytes(dtype, shape) // dtype.itemsize
        # frombuffer, since a view of one large storage would make stock DCP clone every tensor.
        local = torch.frombuffer(source, dtype=dtype, count=count, offset=begin).view(shape)
        model[name] = local if mesh is None else DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return State({"model": model, "trained_steps": 0}, source)


def make_arrays(workload: Workload) -> State:
    """The state of one process with JAX: float32 arrays of one size, ten to a block of the tree."""
    import jax

    nbytes = workload.nbytes // workload.tensors // 4096 * 4096  # rows of 1,024
    raw = np.empty(nbytes * workload.tensors + _ALIGN_BYTES, np.uint8)
    begin = -raw.ctypes.data % _ALIGN_BYTES
    source = raw[begin : begin + nbytes * workload.tensors]
    _fill(source)
    source.view(np.uint32)[:] &= 0x3FFFFFFF  # all finite: nobody has to compare NaNs
    # On a CPU, JAX takes this memory over, so that a memcpy of `source` reads the arrays themselves.
    hosts = source.view(np.float32).reshape(workload.tensors, -1, 1024)
    arrays = jax.block_until_ready(jax.device_put(list(hosts)))
    model: dict[str, dict[str, jax.Array]] = {}
    for i, array in enumerate(arrays):
        model.setdefault(f"block_{i // 10}", {})[f"part_{i % 10}"] = array
    return State({"model": model}, source)


def _fill(source: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    pattern = np.random.default_rng(_SEED).integers(0, 256, min(_PATTERN_BYTES, len(source)), dtype=np.uint8)
    for begin in range(0, len(source), len(pattern)):
        source[begin : begin + len(pattern)] = pattern[: len(source) - begin]


def _specs(workload: Workload) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """(name, dtype, shape on each rank) of every tensor; the same in every process."""
    import torch

    if not workload.mixed:
        elements = workload.nbytes // workload.tensors // 4
        shape = (elements,) if elements < 1024 else (elements // 1024, 1024)
        return [(_name(i), torch.float32, shape) for i in range(workload.tensors)]
    rng = np.random.default_rng(_SEED)
    weights = rng.lognormal(0.0, 1.0, workload.tensors)
    kinds = rng.choice(len(MIXED_DTYPES), workload.tensors, p=MIXED_SHARES)
    specs = []
    for i, share in enumerate(weights / weights.sum()):
        dtype = getattr(torch, MIXED_DTYPES[kinds[i]])
        elements = max(round(share * workload.nbytes / dtype.itemsize), 64)
        shape = ((elements,), (elements // 16, 16), (elements // 64, 4, 16))[i % 3]
        specs.append((_name(i), dtype, shape))
    return specs


def _name(i: int) -> str:
    return f"transformer.blocks.{i // 10}.part_{i % 10}.weight"


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * dtype.itemsize
