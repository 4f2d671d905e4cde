"""What is spoiled, changed, or not ours at all: an error that names it, and never a wrong value."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import flashpoint_jax
from flashpoint.errors import CheckpointNotFoundError, CorruptObjectError, FlashpointError, SaveError
from flashpoint.memory import file_system
from flashpoint.saver import MLFlashpointCheckpointSaver
from flashpoint_jax.folder import parse_folder
from flashpoint_jax.session import ItemSaver
from tests.jax import trees
from tests.jax.test_manager import REPOSITORY, manager, small
from tests.jax.test_processes import manager as manager_of_two
from tests.jax.test_processes import root_of, state
from tests.jax.workers import Workers

Args = ocp.args
BLOB = "rank00000-0.safetensors"


def wipe(folder: str) -> None:
    for name in os.listdir(folder):
        path = f"{folder}/{name}"
        shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def becomes(**files: bytes) -> Callable[[str], None]:
    def spoil(folder: str) -> None:
        wipe(folder)
        for name, data in files.items():
            Path(folder, name.replace("__dot__", ".")).write_bytes(data)

    return spoil


def without(name: str) -> Callable[[str], None]:
    return lambda folder: os.unlink(f"{folder}/{name}")


SPOILED: dict[str, tuple[Callable[[str], None], type[Exception], str]] = {
    "no-manifest": (without(".metadata"), CheckpointNotFoundError, "not their manifest"),
    "no-blob": (without(BLOB), CheckpointNotFoundError, f"lacks {BLOB}"),
    "cut-blob": (lambda folder: os.truncate(f"{folder}/{BLOB}", 4096), CorruptObjectError, BLOB),
    "cut-manifest": (lambda folder: os.truncate(f"{folder}/.metadata", 50), FlashpointError, "torn"),
    "empty": (wipe, CheckpointNotFoundError, "no checkpoint of Orbax's.*it is empty"),
    "torch": (
        becomes(__dot__metadata=pickle.dumps({"a": 1}), __0_0=b"x"),
        FlashpointError,
        "torch.distributed.checkpoint",
    ),
    "safetensors": (
        becomes(model=b"xx"),
        CheckpointNotFoundError,
        "no checkpoint of Orbax's, nor one of Flashpoint's: it holds model",
    ),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_folder_that_is_not_what_it_was_is_refused_by_what_it_is(job_root: str, what: str) -> None:
    spoil, kind, message = SPOILED[what]
    with manager(job_root) as m:
        for step in (1, 2):
            m.save(step, args=Args.StandardSave(small(step)))
        m.wait_until_finished()
        spoil(f"{job_root}/2/default")
        with pytest.raises(kind, match=message) as caught:
            m.restore(2, args=Args.StandardRestore(small()))
        assert f"{job_root}/2/default" in str(caught.value) or BLOB in str(caught.value)
        with pytest.raises((FlashpointError, FileNotFoundError)):
            m.restore(2)
        trees.assert_equal(m.restore(1, args=Args.StandardRestore(small())), small(1))


def test_a_step_that_lacks_a_blob_is_never_advertised(job_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Stock TensorStore reads an empty value where the file of a reference is not there.
    write = MLFlashpointCheckpointSaver.write

    def losing(self: Any, pending: Any) -> None:
        write(self, pending)
        if pending.step == 2:
            os.unlink(f"{pending.container.path}/{BLOB}")

    monkeypatch.setattr(ItemSaver, "write", losing)
    with manager(job_root) as m:
        m.save(1, args=Args.StandardSave(small(1)))
        m.save(2, args=Args.StandardSave(small(2)))
        with pytest.raises(SaveError, match=f"lacks {BLOB}"):
            m.wait_until_finished()
        m.reload()
        assert m.latest_step() == 1
        m.save(3, args=Args.StandardSave(small(3)))
    with ocp.CheckpointManager(job_root) as stock:
        assert stock.all_steps() == [1, 3]


# ---- the state changed ------------------------------------------------------------------------------


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "renamed": ({"v": jnp.zeros(8), "n": np.zeros(3), "step": 0}, r"(?s)\bv:.*\bw:"),
    "deeper": ({"w": {"deep": jnp.zeros(8)}, "n": np.zeros(3), "step": 0}, r"\bw:"),
    "missing": ({"w": jnp.zeros(8), "step": 0}, r"\bn:"),
    "shape": ({"w": jnp.zeros(9), "n": np.zeros(3), "step": 0}, r"\(9,\).*\(8,\).*\(w\)"),
    "rank": ({"w": jnp.zeros((8, 1)), "n": np.zeros(3), "step": 0}, r"\(8, 1\).*\(8,\).*\(w\)"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_state_that_changed_is_refused_by_its_paths(job_root: str, what: str) -> None:
    wanted, message = CHANGED[what]
    with manager(job_root) as m:
        m.save(1, args=Args.StandardSave(small(1)))
        m.wait_until_finished()
        with pytest.raises(ValueError, match=message):
            m.restore(1, args=Args.StandardRestore(wanted))


def test_a_state_that_changes_from_save_to_save_is_saved_as_it_is(job_root: str) -> None:
    states = [small(0), {"w": jnp.zeros(9)}, {"v": [jnp.ones((2, 2))]}, small(3)]
    with manager(job_root) as m:
        for step, one in enumerate(states):
            m.save(step, args=Args.StandardSave(one))
        m.wait_until_finished()
        for step, one in enumerate(states):
            trees.assert_equal(m.restore(step, args=Args.StandardRestore(one)), one)


def test_a_leaf_that_nobody_writes_is_refused_by_its_path(job_root: str) -> None:
    with manager(job_root) as m:
        with pytest.raises(ValueError, match=r"TypeHandler lookup failed.*key='odd'"):
            m.save(1, args=Args.PyTreeSave({"a": {"odd": object(), "w": jnp.ones(2)}}))
        m.save(2, args=Args.PyTreeSave({"a": {"w": jnp.ones(2)}}))
        m.wait_until_finished()
        assert m.all_steps() == [2]


def test_a_sharding_that_does_not_divide_is_refused_by_the_arrays_name(job_root: str) -> None:
    uneven = NamedSharding(trees.mesh(3), PartitionSpec("x"))
    with manager(job_root) as m:
        m.save(1, args=Args.StandardSave({"deep": {"w": jnp.zeros(8)}}))
        m.wait_until_finished()
        wanted = {"deep": {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=uneven)}}
        with pytest.raises(ValueError, match=r"deep\.w: .*8"):
            m.restore(1, args=Args.StandardRestore(wanted))


# ---- where it lies ----------------------------------------------------------------------------------


def test_a_root_on_a_disk_works_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if file_system(str(tmp_path)).is_tmpfs:
        pytest.skip("the temporary folder lies on a tmpfs")
    with caplog.at_level("WARNING", "flashpoint"), manager(str(tmp_path / "job"), max_to_keep=2) as m:
        for step in range(4):
            m.save(step, args=Args.StandardSave(small(step)))
        m.wait_until_finished()
        trees.assert_equal(m.restore(3, args=Args.StandardRestore(small())), small(3))
        assert m.all_steps() == [2, 3]
    assert caplog.text.count("not on a tmpfs") == 1


def test_two_managers_of_a_program_may_share_a_root(job_root: str) -> None:
    with manager(job_root) as one, manager(job_root) as other:
        for step in range(0, 8, 2):
            one.save(step, args=Args.StandardSave(small(step)))
            other.save(step + 1, args=Args.StandardSave(small(step + 1)))
        one.wait_until_finished()
        other.wait_until_finished()
        one.reload()
        assert one.all_steps() == list(range(8))
        for step in range(8):
            trees.assert_equal(one.restore(step, args=Args.StandardRestore(small())), small(step))


OTHER_PROGRAM = """
import sys, jax.numpy as jnp, numpy as np, orbax.checkpoint as ocp, flashpoint_jax
from tests.jax.test_manager import manager, small
with manager(sys.argv[1]) as m:
    for step in range(1, 12, 2):
        m.save(step, args=ocp.args.StandardSave(small(step)))
        print(step, flush=True)
"""


def test_two_programs_on_one_root_lose_nothing(job_root: str) -> None:
    os.makedirs(job_root, exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_PROGRAM, job_root], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "1\n"
            with manager(job_root) as m:
                for step in range(0, 12, 2):
                    m.save(step, args=Args.StandardSave(small(step)))
                m.wait_until_finished()
            assert other.wait(timeout=60) == 0
        finally:
            other.kill()
    with manager(job_root) as m:
        assert m.all_steps() == list(range(12))
        for step in range(12):
            trees.assert_equal(m.restore(step, args=Args.StandardRestore(small())), small(step))


def test_a_step_that_another_program_is_saving_is_refused(job_root: str) -> None:
    holding = """
import sys, orbax.checkpoint as ocp, flashpoint_jax
from flashpoint_jax.session import ItemSaver
from tests.jax.test_manager import manager, small
write = ItemSaver.write
def slow(self, pending):
    print("saving", flush=True)
    sys.stdin.readline()
    write(self, pending)
ItemSaver.write = slow
with manager(sys.argv[1]) as m:
    m.save(1, args=ocp.args.StandardSave(small(1)))
"""
    with subprocess.Popen(
        [sys.executable, "-c", holding, job_root],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "saving\n"
            handler = flashpoint_jax.FlashpointCheckpointHandler()
            with (
                ocp.Checkpointer(handler) as c,
                pytest.raises(FlashpointError, match="use one root for each"),
            ):
                c.save(f"{job_root}/other_1/state", args=flashpoint_jax.FlashpointSave(small(1)))
            other.stdin.write("\n")
            other.stdin.flush()
            assert other.wait(timeout=60) == 0
        finally:
            other.kill()
    with manager(job_root) as m:
        trees.assert_equal(m.restore(1, args=Args.StandardRestore(small())), small(1))


def test_what_stock_orbax_wrote_is_restored_by_stock_code_beside_ours(job_root: str) -> None:
    with ocp.CheckpointManager(job_root) as m:
        m.save(1, args=Args.StandardSave(small(1)))
    with manager(job_root) as m:
        m.save(2, args=Args.StandardSave(small(2)))
        m.wait_until_finished()
        for step in (1, 2):
            trees.assert_equal(m.restore(step, args=Args.StandardRestore(small())), small(step))
            assert np.array_equal(m.restore(step)["w"], small(step)["w"])
            assert m.item_metadata(step).tree["w"].shape == (8,)


@pytest.mark.parametrize(
    ("path", "root", "step", "item"),
    [
        ("/r/100/default", "/r", 100, "default"),
        ("/r/100.orbax-checkpoint-tmp/default.orbax-checkpoint-tmp", "/r", 100, "default"),
        ("/r/best", "/r", 0, "best"),
        ("/r/best.orbax-checkpoint-tmp/state", "/r", 0, "state"),
    ],
)
def test_the_root_of_a_folder(path: str, root: str, step: int, item: str) -> None:
    found = parse_folder(path)
    assert (found.job_root, found.step, found.item) == (root, step, item)


# ---- two processes ----------------------------------------------------------------------------------


def save(root: str, per_host: bool) -> None:
    with manager_of_two(root_of(root, per_host), per_host=per_host) as m:
        m.save(1, args=Args.StandardSave(state(1)))


def restore(root: str, per_host: bool) -> str:
    with manager_of_two(root_of(root, per_host), per_host=per_host) as m:
        try:
            m.restore(1, args=Args.StandardRestore(trees.abstract(state())))
        except FlashpointError as error:
            return str(error)
    return "restored"


@pytest.mark.parametrize("name", [".metadata", "rank00001-0.safetensors"])
def test_a_half_deleted_folder_is_refused_on_all_processes(
    workers: Workers, job_root: str, name: str
) -> None:
    workers.run(save, job_root, False)
    os.unlink(f"{job_root}/1/default/{name}")
    message = "not their manifest" if name == ".metadata" else f"lacks {name}"
    for answer in workers.run(restore, job_root, False):
        assert message in answer


def test_a_host_that_lost_half_of_its_folder_is_heard_of_on_the_other(
    workers: Workers, job_root: str
) -> None:
    workers.run(save, job_root, True)
    os.unlink(f"{job_root}/1/1/default/.metadata")
    one, other = workers.run(restore, job_root, True)
    assert "cannot be used by all" in one
    assert "not their manifest" in other
