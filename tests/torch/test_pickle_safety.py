"""Nothing from a checkpoint is executed, unless the user says so."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import flashpoint
import flashpoint_torch as fpt
from flashpoint.errors import FlashpointError, ManifestError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Evil:
    """Whoever unpickles it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


class Own:
    """A user's class: harmless, but no plain data."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


def save_with_evil(job_root: str, trap: Path) -> None:
    with fpt.init(job_root) as fp:
        fp.save({"w": torch.ones(3), "n": 5, "evil": Evil(trap)}, 1)
    trap.unlink(missing_ok=True)


@pytest.mark.fault(38)
def test_a_planted_value_is_not_executed_by_recover(job_root: str, tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    save_with_evil(job_root, trap)
    target = {"w": torch.zeros(3), "n": 0, "evil": None}
    with fpt.init(job_root) as fp:
        with pytest.raises(FlashpointError, match=r"'evil' of step 1 .*allow_pickle=True"):
            fp.recover(target)
        assert torch.equal(target["w"], torch.zeros(3))  # untouched
        assert target["n"] == 0
    assert not trap.exists()
    with fpt.init(job_root, allow_pickle=True) as fp:
        fp.recover(target)
    assert trap.exists()  # the trap works


@pytest.mark.fault(38)
def test_a_planted_value_is_not_executed_by_dcp_load(job_root: str, tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    save_with_evil(job_root, trap)
    path = f"{job_root}/step-1_ckpt"
    target: dict[str, Any] = {"w": torch.zeros(3), "n": 0, "evil": None}
    with pytest.raises(CheckpointException, match=r"'evil' of step 1 .*allow_pickle=True"):
        dcp.load(target, checkpoint_id=path, storage_reader=fpt.FlashpointReader())
    assert torch.equal(target["w"], torch.zeros(3))
    with fpt.init(job_root) as fp, pytest.raises(CheckpointException, match="allow_pickle"):
        dcp.load(target, checkpoint_id=path, storage_reader=fp.reader())
    assert not trap.exists()
    dcp.load(target, checkpoint_id=path, storage_reader=fpt.FlashpointReader(allow_pickle=True))
    assert trap.exists()


def test_a_value_left_out_is_not_looked_at(job_root: str, tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    save_with_evil(job_root, trap)
    with fpt.init(job_root) as fp:
        target = {"w": torch.zeros(3)}
        assert fp.recover(target, partial=True)
        assert torch.equal(target["w"], torch.ones(3))
    with flashpoint.open(f"{job_root}/step-1_ckpt") as view:
        assert view["n"] == 5
        assert isinstance(view["evil"], np.ndarray)  # its bytes
    assert not trap.exists()


@pytest.mark.fault(38)
def test_a_pickle_planted_as_manifest_is_not_executed(job_root: str, tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    with fpt.init(job_root) as fp:
        fp.save({"w": torch.ones(3)}, 1)
        path = fp.path(1)
    for data in (pickle.dumps(Evil(trap)), torch_bytes(Evil(trap))):
        trap.unlink(missing_ok=True)
        Path(path, ".metadata").write_bytes(data)
        with pytest.raises(ManifestError):
            flashpoint.open(path)
        with pytest.raises(CheckpointException):
            dcp.load({"w": torch.zeros(3)}, checkpoint_id=path, storage_reader=fpt.FlashpointReader())
        with fpt.init(job_root) as fp:
            assert fp.recover({"w": torch.zeros(3)}) is None
        assert not trap.exists()


def torch_bytes(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def test_the_first_save_warns_of_a_value_that_will_not_load(
    job_root: str, caplog: pytest.LogCaptureFixture
) -> None:
    with fpt.init(job_root, keep=0) as fp:
        for step in range(3):
            fp.save({"w": torch.ones(1), "a value of its own": Own(step)}, step)
    warnings = [record.message for record in caplog.records if "a value of its own" in record.message]
    assert len(warnings) == 1
    assert "allow_pickle=True" in warnings[0]
    assert "test_pickle_safety.Own is not plain data" in warnings[0]


def test_with_trust_any_object_comes_back(job_root: str) -> None:
    state = {
        "own": Own(3),
        "nested": {"tuple": (Own(4), torch.ones(2))},
        "object": np.array([Own(1)], object),
    }
    with fpt.init(job_root, allow_pickle=True) as fp:
        fp.save(state, 1)
        target: dict[str, Any] = {"own": None, "nested": {"tuple": None}, "object": None}
        fp.recover(target)
    assert target["own"] == Own(3)
    assert target["nested"]["tuple"][0] == Own(4)
    assert target["object"][0] == Own(1)


def test_a_type_that_is_named_safe_needs_no_trust(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        fp.save({"own": Own(3)}, 1)
        for load in (fp.recover, lambda t: dcp.load(t, checkpoint_id=fp.path(1), storage_reader=fp.reader())):
            target: dict[str, Any] = {"own": None}
            with torch.serialization.safe_globals([Own]):
                load(target)
            assert target["own"] == Own(3)


def test_a_value_that_nothing_can_pickle_is_an_error_at_once(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        with pytest.raises(Exception, match="'hook'"):
            fp.save({"w": torch.ones(1), "hook": lambda: None}, 1)
        assert fp.save({"w": torch.ones(1)}, 1).error is None


def test_the_setting_may_come_from_the_environment(job_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPOINT_ALLOW_PICKLE", "yes")
    with fpt.init(job_root) as fp:
        fp.save({"own": Own(3)}, 1)
        target: dict[str, Any] = {"own": None}
        fp.recover(target)
        assert target["own"] == Own(3)
