"""What the agent finds and repairs in memory, as the trainer sees it."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flashpoint_torch as fpt
from flashpoint.errors import FlashpointError
from flashpoint.replication import scrub_schedule
from flashpoint.replication.agent import stop_agent

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(autouse=True)
def no_agents(job_root: str) -> Iterator[None]:
    yield
    stop_agent(job_root)


def flip(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


@pytest.mark.fault(21)
def test_a_job_sees_what_is_withdrawn_and_recovers_the_one_before(
    job_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub_schedule, "REST_S", 0.2)
    storage = tmp_path / "storage"
    storage.mkdir()
    settings = {"storage": f"file://{storage}", "storage_every_n": 1000, "agent": "embedded", "keep": 2}
    state = {"w": torch.zeros(50_000)}
    with fpt.init(job_root, **settings) as fp:
        for step in (1, 2):
            state["w"].fill_(step)
            fp.save(state, step).wait("replicated", 60)
        flip(f"{fp.path(2)}/rank00000-0.safetensors")
        until = time.monotonic() + 60
        while fp.scrub_status().withdrawn != 1 or fp.status()[0].state != "withdrawn":
            assert time.monotonic() < until, (fp.scrub_status(), fp.status())
            time.sleep(0.05)
        assert (fp.status()[0].step, fp.status()[0].holders) == (2, {"rank00000-0.safetensors": ()})
        assert "step 2" in fp.scrub_status().last
        found = {"w": torch.zeros(50_000)}
        result = fp.recover(found)
        assert result.step == 1
        assert torch.equal(found["w"], torch.ones(50_000))


def test_without_an_agent_nothing_is_scrubbed(job_root: str) -> None:
    with fpt.init(job_root) as fp, pytest.raises(FlashpointError, match="nothing is scrubbed"):
        fp.scrub_status()
