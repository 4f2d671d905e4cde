"""A pickle in the place of every file that a recovery reads: it does not run, and the recovery goes on."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flashpoint_torch as fpt
from tests.torch.test_pickle_safety import Evil, torch_bytes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
FILES = [".metadata", "rank00000-0.safetensors", "rank00000-1.safetensors"]


def with_pickle(path: str, data: bytes) -> None:
    """The pickle instead of the file; of its size too, so that no other check comes first."""
    size = os.path.getsize(path)
    os.unlink(path)
    Path(path).write_bytes(data.ljust(size, b"\0"))


@pytest.mark.fault(38)
@pytest.mark.parametrize("encode", [pickle.dumps, torch_bytes], ids=["pickle", "torch"])
@pytest.mark.parametrize("name", FILES)
def test_a_recovery_steps_over_it(
    job_root: str, tmp_path: Path, name: str, encode: Callable[[Any], bytes]
) -> None:
    trap = tmp_path / "executed"
    state = {"w": torch.zeros(100), "blob": torch.Generator().get_state(), "n": 0, "value": {1, 2}}
    state["other"] = Own()  # what is no plain data makes the second object
    with fpt.init(job_root, keep=2) as fp:
        for step in (1, 2):
            state["w"].fill_(step)
            state["n"] = step
            fp.save(state, step)
        assert os.path.exists(f"{fp.path(2)}/{name}")
        with_pickle(f"{fp.path(2)}/{name}", encode(Evil(trap)))
    with fpt.init(job_root, keep=2) as fp:
        found: dict[str, Any] = {"w": torch.zeros(100), "n": 0}
        result = fp.recover(found, partial=True)
    assert result.step == 1
    assert found["n"] == 1 and torch.equal(found["w"], torch.ones(100))
    assert not trap.exists()
    pickle.loads(pickle.dumps(Evil(trap)))
    assert trap.exists()  # the trap works


@pytest.mark.fault(38)
@pytest.mark.parametrize("name", [".epoch", ".agent/keys", ".agent/membership", ".agent/ports", ".agent/log"])
def test_files_beside_the_versions_are_not_executed(job_root: str, tmp_path: Path, name: str) -> None:
    trap = tmp_path / "executed"
    with fpt.init(job_root) as fp:
        fp.save({"w": torch.ones(3)}, 1)
    os.makedirs(f"{job_root}/.agent", mode=0o700, exist_ok=True)
    Path(job_root, name).write_bytes(pickle.dumps(Evil(trap)))
    os.chmod(f"{job_root}/{name}", 0o600)
    with fpt.init(job_root) as fp:
        found = {"w": torch.zeros(3)}
        assert fp.recover(found).step == 1
    assert torch.equal(found["w"], torch.ones(3))
    assert not trap.exists()


class Own:
    """No plain data."""
