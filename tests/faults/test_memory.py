"""Memory that runs out where the kernel kills instead of refusing."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import flashpoint_torch as fpt
from flashpoint.errors import NoSpaceError
from tests.faults.machine import Cgroup, cgroup
from tests.torch.faults import Launcher

MIB = 1 << 20
LIMIT_BYTES = 384 * MIB
SETTINGS = {"chunk_bytes": 64 << 10, "commit_timeout_s": 20.0, "recovery_timeout_s": 20.0}


def of_size(mib: int, step: int) -> dict[str, Any]:
    return {"weight": torch.full((mib, MIB), step, dtype=torch.uint8)}


def train_in(rank: int, procs: str, job_root: str, sizes: list[int]) -> list[str]:
    """Save a state of each size in turn; what became of each."""
    Path(procs).write_text(str(os.getpid()))
    outcomes = []
    with fpt.init(job_root, **SETTINGS) as fp:
        for step, size in enumerate(sizes, 1):
            handle = fp.save(of_size(size, step), step)
            fp.wait()
            if handle.done():
                outcomes.append("saved")
            else:
                assert isinstance(handle.error, NoSpaceError), handle.error
                assert "cgroup" in str(handle.error)
                outcomes.append("skipped")
        newest = max(step for step, outcome in enumerate(outcomes, 1) if outcome == "saved")
        target = of_size(sizes[newest - 1], 0)
        found = fp.recover(target)
        assert found is not None and found.step == newest
        assert torch.equal(target["weight"], of_size(sizes[newest - 1], newest)["weight"])
    return outcomes


@pytest.fixture
def limited() -> Any:
    with cgroup("memory") as made:
        made.limit_memory(LIMIT_BYTES)
        yield made


@pytest.mark.root
@pytest.mark.fault(16)
def test_16_a_save_that_would_fill_the_cgroup_is_skipped_and_nobody_is_killed(
    limited: Cgroup, job_root: str
) -> None:
    """The budget alone would allow it: it does not know what the trainer itself takes."""
    procs = str(limited.path / "cgroup.procs")
    # 200 MiB of the trainer's own, and as many in a buffer beside what is there already; then it shrinks again.
    [outcomes] = Launcher(1).run(train_in, procs, job_root, [40, 40, 200, 200, 40, 40])
    assert limited.kills == 0
    assert outcomes == ["saved", "saved", "skipped", "skipped", "saved", "saved"]
