"""Readers with nothing of ours on their path read our checkpoints."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import flashpoint_torch as fpt
from tests.torch.states import DTYPES, LONG_NAME, same, tensor
from tests.torch.workers import Workers


def sharded_model(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 15), nn.ReLU(), nn.Linear(15, 7)).to(torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return get_model_state_dict(model)


def save_sharded(job_root: str, through_dcp: bool) -> str:
    with fpt.init(job_root) as fp:
        state = sharded_model(0) | {"buffer": torch.arange(5.0)}
        state["columns"] = distribute_tensor(
            torch.arange(24.0).view(4, 6), state["0.weight"].device_mesh, [Shard(1)]
        )
        if through_dcp:
            dcp.save(state, checkpoint_id=fp.path(1), storage_writer=fp.writer())
        else:
            assert fp.save(state, 1).error is None
        return fp.path(1)


def load_with_hugging_face(path: str) -> None:
    wanted = sharded_model(0)
    target = sharded_model(1) | {"buffer": torch.zeros(5)}
    mesh = target["0.weight"].device_mesh
    target["columns"] = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)])
    dcp.load(target, storage_reader=HuggingFaceStorageReader(path))
    assert torch.equal(target.pop("buffer"), torch.arange(5.0))
    columns = target.pop("columns")
    assert isinstance(columns, DTensor)
    assert torch.equal(columns.full_tensor(), torch.arange(24.0).view(4, 6))
    for name in wanted:
        assert same(target[name], wanted[name]), name


@pytest.mark.parametrize("through_dcp", [False, True])
@pytest.mark.parametrize("loaded_by", [1, 2, 3])
def test_torchs_hugging_face_reader_loads_a_sharded_checkpoint(
    workers: Workers, job_root: str, through_dcp: bool, loaded_by: int
) -> None:
    (path, _) = workers.run(2, save_sharded, job_root, through_dcp)
    if loaded_by == 2:
        workers.run(2, load_with_hugging_face, path)
        return
    # The random weights of another world are the same, but sharded otherwise.
    workers.run(loaded_by, load_with_hugging_face, path)


def test_the_hugging_face_reader_in_a_process_without_our_code(workers: Workers, job_root: str) -> None:
    path = workers.run(2, save_sharded, job_root, False)[0]
    program = f"""
import sys
import torch
import torch.distributed.checkpoint as dcp
target = {{"columns": torch.zeros(4, 6), "0.bias": torch.zeros(15, dtype=torch.bfloat16)}}
dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader({path!r}))
assert torch.equal(target["columns"], torch.arange(24.0).view(4, 6))
assert target["0.bias"].any()
assert not any(name.startswith("flashpoint") for name in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd="/", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_safe_open_opens_every_object(workers: Workers, job_root: str) -> None:
    path = workers.run(2, save_sharded, job_root, False)[0]
    files = sorted(Path(path).glob("*.safetensors"))
    assert [file.name for file in files] == ["rank00000-0.safetensors", "rank00001-0.safetensors"]
    rows = []
    for file in files:
        with safe_open(file, "pt") as opened:
            assert {"0.weight", "2.bias", "columns"} <= set(opened.keys())
            rows.append(opened.get_tensor("0.weight"))
    assert torch.cat(rows).shape == (15, 10)


def test_safe_open_gives_every_dtype_bit_for_bit(job_root: str) -> None:
    state = {str(dtype): tensor(3, 5, dtype=dtype, seed=3) for dtype in DTYPES}
    state |= {
        LONG_NAME: torch.ones(2),
        "größe/大\n": torch.ones(3),
        "": torch.ones(1),
        "empty": torch.empty(0, 3),
    }
    with fpt.init(job_root) as fp:
        assert fp.save(state | {"blob": {torch.float16}}, 1).error is None
        with safe_open(f"{fp.path(1)}/rank00000-0.safetensors", "pt") as opened:
            assert set(state) == {key for key in opened.keys() if not key.startswith("__pad__.")}  # noqa: SIM118
            for name, value in state.items():
                got = opened.get_tensor(name)
                if got.dtype != value.dtype:  # one that safetensors has no name for: its bytes
                    assert got.dtype == torch.uint8
                    got = got.reshape(-1).view(value.dtype).reshape(value.shape)
                assert same(got, value), name
        with safe_open(f"{fp.path(1)}/rank00000-1.safetensors", "pt") as opened:
            assert "blob" in opened.keys()  # noqa: SIM118
