"""Long-term storage, where memory has nothing: by a path that stock DCP reads, or by the caller's own means."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import flashpoint_torch as fpt
from flashpoint.errors import FlashpointError


def make_state(value: float) -> dict[str, Any]:
    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.weight, value)
    return {"model": model, "step": int(value), "nested": {"lr": value}, "loose": torch.full((3,), value)}


def is_like(state: Mapping[str, Any], value: float) -> bool:
    return (
        bool((state["model"].weight == value).all())
        and state["step"] == int(value)
        and state["nested"] == {"lr": value}
        and bool((state["loose"] == value).all())
    )


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "step-900"
    dcp.save(make_state(9.0), checkpoint_id=str(path))
    return path


def test_an_empty_memory_falls_back_to_what_stock_dcp_wrote(job_root: str, stored: Path) -> None:
    state = make_state(0.0)
    with fpt.init(job_root) as fp:
        result = fp.recover(state, fallback=stored)
    assert result is not None
    assert (result.step, result.tier) == (900, "storage")
    assert is_like(state, 9.0)


def test_memory_comes_first(job_root: str, stored: Path) -> None:
    state = make_state(0.0)
    with fpt.init(job_root) as fp:
        fp.save(make_state(5.0), 5)
        result = fp.recover(state, fallback=stored)
    assert result is not None
    assert (result.step, result.tier) == (5, "local")
    assert is_like(state, 5.0)


def test_the_callers_own_means(job_root: str) -> None:
    def load(state: Mapping[str, Any]) -> int:
        state["loose"].fill_(7.0)
        return 700

    state = make_state(0.0)
    with fpt.init(job_root) as fp:
        result = fp.recover(state, fallback=load)
    assert result is not None
    assert (result.step, result.tier) == (700, "storage")
    assert bool((state["loose"] == 7.0).all())


def test_nothing_anywhere(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        assert fp.recover(make_state(0.0), fallback=lambda state: None) is None


def test_a_storage_that_cannot_be_read_is_an_error_and_not_a_start_from_scratch(
    job_root: str, tmp_path: Path
) -> None:
    with fpt.init(job_root) as fp, pytest.raises(FlashpointError, match="nowhere"):
        fp.recover(make_state(0.0), fallback=tmp_path / "nowhere")


def test_falling_back_is_told(job_root: str, stored: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fpt.init(job_root) as fp, caplog.at_level(logging.WARNING, logger="flashpoint"):
        fp.recover(make_state(0.0), fallback=str(stored))
    assert "falling back to storage" in caplog.text


def test_what_could_not_be_used_is_in_nobodys_way(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        fp.save(make_state(1.0), 1)
        object_path = Path(fp.path(1)) / "rank00000-0.safetensors"
    with object_path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 8)
    with fpt.init(job_root) as fp:
        assert fp.recover(make_state(0.0)) is None
        handle = fp.save(make_state(2.0), 1)  # the same step, of a run that begins anew
        assert handle.done(), handle.error
    with fpt.init(job_root) as fp:
        state = make_state(0.0)
        assert fp.recover(state) is not None
        assert is_like(state, 2.0)


def test_a_step_that_is_complete_is_not_saved_over_without_a_word(job_root: str) -> None:
    with fpt.init(job_root, keep=0) as fp:
        fp.save(make_state(1.0), 1)
    with fpt.init(job_root, keep=0) as fp, pytest.raises(FlashpointError, match="complete already"):
        fp.save(make_state(2.0), 1)
