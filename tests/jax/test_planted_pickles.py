"""A pickle that would execute something, in the place of every file of an Orbax item: nothing runs."""

import os
import pickle
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import flashpoint_jax
from tests.jax.test_corruption import manager, saved

Args = ocp.args


class Evil:
    """Whoever unpickles it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.fault(38)
def test_no_file_of_an_item_is_executed(job_root: str, tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    assert flashpoint_jax.registry  # the adapter is what reads below
    m = saved(job_root)
    m.close()
    item = next(path for path in Path(job_root, "2").iterdir() if path.is_dir())
    files = sorted(str(path.relative_to(item)) for path in item.rglob("*") if path.is_file())
    assert {".metadata", ".sidecars", "_METADATA", "_sharding", "manifest.ocdbt"} <= set(files)
    outcomes = {}
    for name in files:
        path = item / name
        whole = path.read_bytes()
        with open(path, "r+b") as file:  # in place: objects have two names
            data = pickle.dumps(Evil(trap))
            file.write(data[: len(whole)])
            if len(whole) > len(data):
                file.write(bytes(len(whole) - len(data)))
        opened = manager(job_root)
        try:
            found = opened.restore(2)
            outcomes[name] = "restored"
            np.testing.assert_array_equal(found["bf16"], jnp.asarray(found["bf16"]))
        except Exception as error:
            outcomes[name] = type(error).__name__
        found = opened.restore(1)
        assert found["step"] == 1  # the other step is as good as ever
        opened.close()
        with open(path, "r+b") as file:
            file.write(whole)
            file.truncate(len(whole))
        assert not trap.exists(), name
    assert outcomes[".metadata"] != "restored" and outcomes["_METADATA"] != "restored"
    assert sum(outcome != "restored" for outcome in outcomes.values()) >= 4, outcomes
    pickle.loads(pickle.dumps(Evil(trap)))
    assert trap.exists()  # the trap works
