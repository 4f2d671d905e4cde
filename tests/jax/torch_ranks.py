"""What PyTorch's ranks do for the tests of exchange; imports no JAX, since that would cost each of them seconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flashpoint_torch as fpt
from flashpoint_torch.dtypes import TORCH_DTYPES


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(16, 8)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)])
        self.layers[1].bfloat16()
        self.register_buffer("scales", torch.randn(8, 4).to(torch.float8_e4m3fn))


def bits(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """What is compared of a tensor or array of either framework: dtype, shape, every bit."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(plain.dtype).removeprefix("torch."), tuple(plain.shape), data
    host = np.asarray(value)
    return host.dtype.name, host.shape, host.tobytes()


def blank(array: Any) -> torch.Tensor:
    """Zeros of an array's shape and dtype."""
    return torch.zeros(np.shape(array), dtype=TORCH_DTYPES[np.asarray(array).dtype.name])


def save_sharded(job_root: str) -> None:
    """Save a model of which each parameter is cut along another dimension, or not at all."""
    mesh = init_device_mesh("cpu", (2,))
    cuts = [Shard(0), Shard(1), Replicate()]
    weights = {
        # gloo sends no float8: each rank cuts its own.
        name: distribute_tensor(
            tensor, mesh, [cuts[n % 3] if tensor.ndim == 2 else Shard(0)], src_data_rank=None
        )
        for n, (name, tensor) in enumerate(Model().state_dict().items())
    }
    assert weights["scales"].placements == (Shard(0),)
    with fpt.init(job_root) as fp:
        handle = fp.save({"model": weights, "step": 7, "lr": 3e-4, "name": "run 1"}, step=7)
        assert handle.error is None, handle.error


def load_as_dtensors(path: str, matrices: dict[str, np.ndarray[Any, Any]]) -> None:
    """Load what a JAX program saved into shards of every kind, one of them transposed."""
    mesh = init_device_mesh("cpu", (2,))
    kernel = matrices["params.out.kernel"]
    for cut in (Shard(0), Shard(1), Replicate()):
        state, through_dcp = (
            {name: distribute_tensor(blank(array), mesh, [cut]) for name, array in matrices.items()}
            for _ in range(2)
        )
        turned = {"kernel": distribute_tensor(blank(kernel.T), mesh, [cut])}
        fpt.load(path, state)
        dcp.load(through_dcp, checkpoint_id=path, storage_reader=fpt.FlashpointReader())
        fpt.load(path, turned, rename={"kernel": "params.out.kernel"}, transpose={"kernel": (1, 0)})
        for name, tensor in [*state.items(), *through_dcp.items()]:
            assert bits(tensor.full_tensor()) == bits(matrices[name]), name
        assert bits(turned["kernel"].full_tensor()) == bits(kernel.T)
