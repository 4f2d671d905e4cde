"""What a user gets wrong is answered with a message that helps."""

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import flashpoint_torch as fpt
from flashpoint.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    FlashpointError,
    InvalidIdError,
    MismatchError,
)
from tests.torch.states import same

# ---- the job root -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("root", "says"),
    [
        ("job-1", "relative.*'/dev/shm/job-1'"),
        ("", "relative"),
        ("/dev/shm/../x", "holds '..'"),
        ("/", "root cannot be a job root"),
        ("/dev/shm/a\0b", "NUL"),
        (b"/dev/shm/job", "must be str"),
        (7, "must be str"),
    ],
)
def test_a_job_root_that_is_no_path(root: Any, says: str) -> None:
    with pytest.raises(InvalidIdError, match=says):
        fpt.init(root)


def test_a_job_root_that_is_a_file(job_root: str) -> None:
    Path(job_root, "file").touch()
    with pytest.raises(FlashpointError, match="job root .*file' cannot be made.*writable tmpfs"):
        fpt.init(f"{job_root}/file")


def test_a_job_root_on_a_read_only_file_system() -> None:
    with pytest.raises(FlashpointError, match="job root '/proc/flashpoint' cannot be made"):
        fpt.init("/proc/flashpoint")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_job_root_that_may_not_be_written(job_root: str) -> None:
    os.chmod(job_root, 0o500)
    with pytest.raises(FlashpointError, match="not writable"):
        fpt.init(job_root)


def test_a_job_root_on_disk_works_and_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = f"{tmp_path}/job"
    for step in (1, 2):
        with fpt.init(root) as fp:
            assert fp.save({"w": torch.ones(3)}, step).error is None
            target = {"w": torch.zeros(3)}
            fp.recover(target)
            assert torch.equal(target["w"], torch.ones(3))
    warnings = [record.message for record in caplog.records if "not on a tmpfs" in record.message]
    assert len(warnings) == 1
    assert root in warnings[0]
    assert "/dev/shm" in warnings[0]


# ---- settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kept": 1}, "'kept' is not a setting; settings are: keep"),
        ({"keep": -1}, "keep must be at least 0"),
        ({"memory_limit_bytes": "12 apples"}, "write it like 512MiB"),
        ({"commit_timeout_s": 0}, "positive"),
    ],
)
def test_a_wrong_setting(job_root: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        fpt.init(job_root, **settings)


def test_one_of_several_ranks_without_a_process_group(job_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(FlashpointError, match=r"rank 2 of 4.*init_process_group"):
        fpt.init(job_root)
    monkeypatch.setenv("WORLD_SIZE", "1")
    fpt.init(job_root).close()


# ---- steps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [-1, 2**63, 1.5, "7", True, None])
def test_a_step_that_is_none(job_root: str, step: Any) -> None:
    with fpt.init(job_root) as fp:
        for call in (lambda: fp.save({"w": torch.ones(1)}, step), lambda: fp.path(step)):
            with pytest.raises(InvalidIdError, match=r"step .*(out of range|must be an integer)"):
                call()
        assert fp.save({"w": torch.ones(1)}, 0).error is None
        assert fp.save({"w": torch.ones(1)}, 2**63 - 1).error is None


def test_a_step_that_exists(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        fp.save({"n": 1}, 5)
        for save in (fp.save, fp.async_save):
            with pytest.raises(CheckpointExistsError, match="step 5 is complete already.*overwrite=True"):
                save({"n": 2}, 5)
        target = {"n": 0}
        fp.recover(target)
        assert target["n"] == 1
        assert fp.save({"n": 3}, 5, overwrite=True).error is None
        fp.recover(target)
        assert target["n"] == 3


def test_a_step_that_is_unfinished_is_replaced(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        os.mkdir(fp.path(5))
        Path(fp.path(5), "rank00000-0.safetensors").write_bytes(b"half")
        Path(f"{fp.path(5)}__0__unfinished").touch()
        assert fp.steps() == []
        assert fp.save({"n": 2}, 5).error is None
        assert fp.steps() == [5]


def test_recovering_a_step_that_is_not_there(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        assert fp.recover({"n": 0}) is None
        fp.save({"n": 1}, 5)
        with pytest.raises(CheckpointNotFoundError, match=f"no usable step 7 in {job_root}"):
            fp.recover({"n": 0}, step=7)


# ---- states -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [None, [torch.ones(1)], torch.ones(1), torch.nn.Linear(1, 1)])
def test_a_state_that_is_no_dict(job_root: str, state: Any) -> None:
    with fpt.init(job_root) as fp:
        with pytest.raises(FlashpointError, match=f"dict of names to values, not a {type(state).__name__}"):
            fp.save(state, 1)
        fp.save({"w": torch.ones(1)}, 2)
        with pytest.raises(FlashpointError, match="dict of names to values"):
            fp.recover(state)


def test_an_empty_state(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        assert fp.save({}, 1).error is None
        target: dict[str, Any] = {}
        found = fp.recover(target)
        assert found is not None
        assert found.step == 1
        assert target == {}
        assert fp.save({"a": {}, "b": []}, 2).error is None
        target = {"a": {}, "b": None}
        fp.recover(target)
        assert target == {"a": {}, "b": []}


def test_a_meta_tensor(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        with pytest.raises(FlashpointError, match=r"'model.w' is on the meta device.*materialise"):
            fp.save({"model": {"w": torch.empty(2, device="meta")}}, 1)
        fp.save({"model": {"w": torch.ones(2)}}, 1)
        with pytest.raises(FlashpointError, match=r"'model.w' is on the meta device"):
            fp.recover({"model": {"w": torch.empty(2, device="meta")}})


def test_a_name_that_is_no_unicode(job_root: str) -> None:
    with fpt.init(job_root) as fp, pytest.raises(FlashpointError, match="surrogate"):
        fp.save({"bad \udc80": torch.ones(1)}, 1)


def differences() -> dict[str, tuple[Any, Any, str]]:
    """What is saved, what it is loaded into, and what the message says."""
    f32 = torch.ones(2)
    return {
        "shape": (f32, torch.zeros(3), "shape [2] there, [3] here"),
        "ndim": (f32, torch.zeros(2, 1), "shape [2] there, [2, 1] here"),
        "dtype": (f32, torch.zeros(2, dtype=torch.float16), "dtype float32 there, float16 here"),
        "value": (5, torch.zeros(2), "a plain value there, a tensor here"),
        "tensor": (f32, 5, "a tensor there, a plain value here"),
        "object": ((f32,), torch.zeros(2), "a Python object there, a tensor here"),
    }


@pytest.mark.parametrize("name", differences())
def test_one_difference(job_root: str, name: str) -> None:
    saved, target, says = differences()[name]
    with fpt.init(job_root) as fp:
        fp.save({name: saved, "w": torch.ones(2), "n": 1}, 3)
        state = {name: target, "w": torch.zeros(2), "n": 0}
        with pytest.raises(MismatchError, match="does not fit step 3 in 1 places") as failure:
            fp.recover(state)
        assert f"'{name}': {says}" in str(failure.value)
        assert torch.equal(state["w"], torch.zeros(2))  # nothing was touched
        assert state["n"] == 0


def test_the_first_ten_differences_are_listed(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        fp.save({f"w{n:02}": torch.ones(2) for n in range(15)}, 3)
        with pytest.raises(MismatchError) as failure:
            fp.recover({f"w{n:02}": torch.zeros(3) for n in range(15)})
        text = str(failure.value)
        assert "in 15 places" in text
        assert "and 5 more" in text
        assert "partial=True" in text
        assert len(re.findall(r"'w\d\d': shape", text)) == 10


def test_names_that_differ_and_partial_loads(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        fp.save({"a": torch.ones(2), "b": torch.ones(2), "n": 1}, 3)
        with pytest.raises(MismatchError, match="'b': in the checkpoint, not in the state"):
            fp.recover({"a": torch.zeros(2), "n": 0})
        with pytest.raises(MismatchError, match="'n': in the checkpoint, not in the state"):
            fp.recover({"a": torch.zeros(2), "b": torch.zeros(2)})
        with pytest.raises(MismatchError, match="'c': not in the checkpoint"):
            fp.recover({"a": torch.zeros(2), "b": torch.zeros(2), "n": 0, "c": torch.zeros(1)})
        target: dict[str, Any] = {"a": torch.zeros(2)}
        assert fp.recover(target, partial=True)
        assert same(target, {"a": torch.ones(2)})
        with pytest.raises(MismatchError, match="'c': not in the checkpoint"):
            fp.recover({"a": torch.zeros(2), "c": 0}, partial=True)


def test_a_state_that_does_not_fit_stays_as_empty_as_it_was(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        fp.save({"optimizer": {"state": {0: {"m": torch.ones(2)}}}, "w": torch.ones(2)}, 3)
        target: dict[str, Any] = {"optimizer": {"state": {}}, "w": torch.zeros(3)}
        with pytest.raises(MismatchError):
            fp.recover(target)
        assert target["optimizer"] == {"state": {}}


# ---- the manifest -----------------------------------------------------------------------------------


def test_a_manifest_of_a_later_format(job_root: str, caplog: pytest.LogCaptureFixture) -> None:
    with fpt.init(job_root, keep=0) as fp:
        fp.save({"n": 1}, 1)
        fp.save({"n": 2}, 2)
        path = Path(fp.path(2), ".metadata")
        head, rest = path.read_bytes()[:-33].split(b"\n", 1)
        record = json.loads(head) | {"version": 2}
        body = json.dumps(record).encode() + b"\n" + rest
        path.write_bytes(body + xxhash.xxh3_128_hexdigest(body).encode() + b"\n")
        target = {"n": 0}
        found = fp.recover(target)
        assert found is not None
        assert (found.step, target["n"]) == (1, 1)
        with caplog.at_level(logging.WARNING), pytest.raises(FlashpointError):
            fp.recover(target, step=2)
        assert any("format version 2" in record.message for record in caplog.records)
        assert path.exists()  # another release may read it


# ---- a session that is over -------------------------------------------------------------------------


def test_a_session_that_is_closed(job_root: str) -> None:
    fp = fpt.init(job_root)
    fp.save({"n": 1}, 1)
    fp.close()
    fp.close()
    for call in (
        lambda: fp.save({"n": 2}, 2),
        lambda: fp.async_save({"n": 2}, 2),
        lambda: fp.recover({"n": 0}),
        lambda: fp.warmup({"n": 0}),
    ):
        with pytest.raises(FlashpointError, match="closed"):
            call()
    assert os.listdir(job_root).count("step-2_ckpt") == 0
    assert fp.steps() == [1]  # to look is no harm


def test_a_moment_that_is_none(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        handle = fp.save({"n": 1}, 1)
        with pytest.raises(ValueError, match="'finished' is no moment of a save.*staged, complete"):
            handle.wait("finished")
        with pytest.raises(ValueError, match="no moment"):
            handle.done("finished")
