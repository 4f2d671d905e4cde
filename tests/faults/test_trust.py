"""Links that somebody planted in a job root: what they lead to is neither read as a checkpoint nor changed."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flashpoint
import flashpoint_torch as fpt
from flashpoint.errors import FlashpointError

SETTINGS = {"chunk_bytes": 4096, "commit_timeout_s": 20.0, "recovery_timeout_s": 20.0, "prefault": False}
ELEMENTS = 5000
NAME = "rank00000-0.safetensors"

Link = Callable[[Path, Path], None]


def symbolic(target: Path, at: Path) -> None:
    at.symlink_to(target)


def hard(target: Path, at: Path) -> None:
    if target.is_dir():
        pytest.skip("folders have no hard links")
    os.link(target, at)


PLACES = {
    "a container": "step-2_ckpt",
    "an object": f"step-2_ckpt/{NAME}",
    "a manifest": "step-2_ckpt/.metadata",
    "a marker": "step-2_ckpt__0__unfinished",
    "a buffer": ".pool/rank00000-00000000000000aa.buf",
    "the epoch": ".epoch",
}


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((ELEMENTS,), float(step))}


def everything_in(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): (path.stat().st_mode, path.stat().st_ino, path.read_bytes()) for path in paths}


@pytest.mark.fault(36)
@pytest.mark.parametrize("link", [symbolic, hard], ids=["symbolic", "hard"])
@pytest.mark.parametrize("place", [*PLACES])
def test_36_a_planted_link_changes_nothing_elsewhere_and_gives_no_value(
    job_root: str, place: str, link: Link
) -> None:
    with fpt.init(job_root, **SETTINGS) as fp:
        assert fp.save(state_of(1), 1).done()
        size = os.path.getsize(f"{fp.path(1)}/{NAME}")
    # Of the same file system, so that a hard link can be made, and as long as a buffer is.
    victim = Path(job_root).parent / "victim"
    (victim / "inside").mkdir(parents=True)
    for name in ("file", "inside/" + NAME, "inside/.metadata"):
        (victim / name).write_bytes((b"mine" * size)[:size])
    target = victim / ("inside" if place == "a container" else "file")
    at = Path(job_root, PLACES[place])
    at.parent.mkdir(exist_ok=True)
    if place == "the epoch":
        at.unlink()
    before = everything_in(victim)
    link(target, at)

    with fpt.init(job_root, **SETTINGS) as fp:
        state = state_of(0)
        found = fp.recover(state)
        assert found is not None and found.step == 1
        assert torch.equal(state["w"], state_of(1)["w"])
        assert everything_in(victim) == before
        handle = fp.save(state_of(2), 2)
        if not handle.done():  # refused by name, and the next step is none the worse
            assert isinstance(handle.error, FlashpointError | OSError), handle.error
        for step in (3, 4):
            assert fp.save(state_of(step), step).done()
            with flashpoint.open(fp.path(step)) as view:
                view.verify()
        assert fp.recover(state) is not None
        assert torch.equal(state["w"], state_of(4)["w"])
    assert everything_in(victim) == before


@pytest.mark.fault(36)
@pytest.mark.parametrize("link", [symbolic, hard], ids=["symbolic", "hard"])
@pytest.mark.parametrize("name", [NAME, ".metadata"])
def test_36_a_link_to_foreign_bytes_in_a_complete_version_is_not_loaded(
    job_root: str, name: str, link: Link
) -> None:
    with fpt.init(job_root, keep=2, **SETTINGS) as fp:
        for step in (1, 2):
            assert fp.save(state_of(step), step).done()
        foreign = Path(job_root).parent / "foreign"
        foreign.write_bytes(Path(fp.path(2), name).read_bytes()[::-1])
        before = foreign.read_bytes()
        Path(fp.path(2), name).unlink()
        link(foreign, Path(fp.path(2), name))
        state = state_of(0)
        found = fp.recover(state)
        assert found is not None and found.step == 1
        assert torch.equal(state["w"], state_of(1)["w"])
        assert fp.save(state_of(2), 2).done()
    assert foreign.read_bytes() == before
