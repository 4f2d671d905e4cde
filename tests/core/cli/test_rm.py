import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import flashpoint as package
from flashpoint.replication.agent_folder import AgentFolder
from tests.core.cli.roots import (
    ARRAYS,
    REPOSITORY,
    begun,
    crashed,
    flip_byte,
    object_of,
    saved,
    saved_by_two_ranks,
    saver_of,
)
from tests.core.processes import process
from tests.core.replication.nodes import Nodes

BIG = {"x": np.zeros(1 << 20, np.uint8)}


def names(root):
    return sorted(os.listdir(root))


def test_rm_removes_the_steps_it_is_given_and_gives_their_memory_back(job_root, run_json):
    for step in (1, 2, 3):
        saved(job_root, BIG, step=step)
    code, report = run_json("rm", job_root, "1", "2", "--yes")
    assert code == 0
    assert [(one["step"], one["state"]) for one in report["removed"]] == [(2, "complete"), (1, "complete")]
    assert (report["job_removed"], report["left"]) == (False, [])
    assert 2 << 20 <= report["freed_bytes"] < 3 << 20
    assert names(job_root) == [".pool", "step-3_ckpt"]
    assert len(names(f"{job_root}/.pool")) == 1
    with package.open(f"{job_root}/step-3_ckpt") as view:
        view.verify()


def test_rm_takes_a_containers_path_too(job_root, run):
    saved(job_root, step=1)
    saved(job_root, step=2)
    assert run("rm", f"{job_root}/step-1_ckpt/", "--yes")[:2] == (
        0,
        f"{job_root}: step 1 removed\n  8.0 KiB of memory given back\n",
    )
    assert names(job_root) == [".pool", "step-2_ckpt"]


def test_rm_refuses_to_leave_nothing_that_could_be_loaded(job_root, run):
    saved(job_root, step=1)
    Path(saved(job_root, step=2), ".metadata").write_bytes(b"{}\n")  # corrupt
    os.unlink(object_of(saved(job_root, step=3)))  # an object is missing
    crashed(job_root, 4)
    code, out, err = run("rm", job_root, "1", "--yes")
    assert (code, out) == (4, "")
    assert (
        "nothing that could be loaded would be left here: it would be the last, step 1" in err
        and "--force" in err
    )
    assert run("rm", job_root, "2", "3", "4", "--yes")[0] == 0  # what cannot be loaded is no loss
    assert names(job_root) == [".pool", "step-1_ckpt"]
    assert run("rm", job_root, "1", "--yes", "--force")[0] == 0
    assert names(job_root) == [".pool"]


def test_a_version_whose_other_ranks_are_on_other_nodes_is_loadable_here(job_root, run):
    container = saved_by_two_ranks(job_root, np.zeros((4, 2), np.float32), step=5)
    os.unlink(object_of(container, rank=1))
    code, _, err = run("rm", job_root, "5", "--yes")
    assert code == 4
    assert "it would be the last, step 5" in err


def keep_buffers_mapped(say, root):
    saver = saver_of(root)
    saver.save(1, ARRAYS)
    saver.save(2, ARRAYS)
    say("saved")


def test_rm_refuses_while_a_trainer_without_an_agent_lives(job_root, run):
    with process(keep_buffers_mapped, job_root) as trainer:
        trainer.hear()
        code, _, err = run("rm", job_root, "1", "--yes")
        assert code == 4
        assert f"its buffers are mapped by process {trainer.pid}" in err
        code, out, _ = run("rm", job_root, "1", "--yes", "--force")
        assert code == 0
        assert "its buffers stay with the trainer" in out
        assert len(names(f"{job_root}/.pool")) == 2
    assert run("rm", job_root, "2", "--yes", "--force")[0] == 0


def test_rm_refuses_while_an_agent_or_its_trainer_lives_and_force_ends_the_agent(run, run_json):
    with Nodes(1, copies=0) as nodes:
        nodes.start()
        nodes.save(1)
        root = nodes[0].job_root
        code, _, err = run("rm", "--job", root, "--yes")
        assert code == 4
        assert f"`flashpoint agent {root} --stop` ends it" in err
        code, report = run_json("rm", "--job", root, "--yes", "--force")
        assert (code, report["job_removed"]) == (0, True)
        assert not os.path.exists(root)


def test_rm_refuses_while_a_trainer_holds_its_lock(job_root, run):
    saved(job_root, step=1)
    saved(job_root, step=2)
    folder = AgentFolder(job_root)
    user = folder.join_users()
    code, _, err = run("rm", job_root, "1", "--yes")
    assert code == 4
    assert "a trainer lives" in err
    user.release()
    folder.close()
    assert run("rm", job_root, "1", "--yes")[0] == 0


def test_what_is_being_saved_is_never_removed(job_root, run):
    saved(job_root, step=1)
    _, pending = begun(job_root, 2)
    for args in ([job_root, "2"], ["--job", job_root]):
        code, _, err = run("rm", *args, "--yes", "--force")
        assert (code, err) == (
            4,
            f"flashpoint rm: step 2 of {job_root} is being saved: end the trainer first\n",
        )
    pending.marker.release()
    assert len(names(job_root)) == 4


def test_rm_job_removes_all_that_is_ours_and_nothing_else(job_root, run, run_json):
    saved(job_root, step=1)
    crashed(job_root, 2)
    AgentFolder(job_root).take_lock().release()
    Path(job_root, ".epoch").write_text("3")
    Path(job_root, "notes.txt").write_text("mine")
    Path(job_root, "step-1_ckpt", "mine.txt").write_text("mine")
    code, report = run_json("rm", "--job", job_root, "--yes", "--force")
    assert (code, report["job_removed"], report["left"]) == (0, False, ["notes.txt", "step-1_ckpt"])
    assert names(f"{job_root}/step-1_ckpt") == ["mine.txt"]
    assert names(job_root) == ["notes.txt", "step-1_ckpt"]


def test_rm_job_of_what_cannot_be_loaded_needs_no_force(job_root, run):
    crashed(job_root, 2)
    code, out, _ = run("rm", "--job", job_root, "--yes")
    assert code == 0
    assert out.startswith(f"{job_root} is gone, with 1 version\n")
    assert not os.path.exists(job_root)


@pytest.mark.parametrize("name", ["step-1_ckpt", ".pool", ".agent", ".fetched"])
def test_no_link_is_followed(job_root, run, tmp_path, name):
    kept = tmp_path / "kept"
    kept.mkdir()
    inside = ["rank00000-0.safetensors", ".metadata", "rank00000-0123456789abcdef.buf", "lock", "users"]
    for file in inside:
        (kept / file).write_text("precious")
    saved(job_root, step=9)
    if os.path.lexists(f"{job_root}/{name}"):
        os.rename(f"{job_root}/{name}", f"{job_root}-moved")
    os.symlink(kept, f"{job_root}/{name}")
    assert run("rm", "--job", job_root, "--yes", "--force")[0] == (2 if name in (".pool", ".agent") else 0)
    run("rm", job_root, "1", "--yes", "--force")
    assert names(kept) == sorted(inside)
    assert os.path.islink(f"{job_root}/{name}")


def test_a_link_to_a_job_root_is_not_removed_by(job_root, run, tmp_path):
    saved(job_root, step=1)
    os.symlink(job_root, tmp_path / "link")
    code, _, err = run("rm", "--job", tmp_path / "link", "--yes", "--force")
    assert code == 2
    assert "no folder but a link" in err
    assert names(job_root) == [".pool", "step-1_ckpt"]


@pytest.mark.parametrize("after", range(1, 8))
def test_rm_that_is_cut_off_leaves_nothing_half_and_goes_on_when_called_again(
    job_root, run, monkeypatch, after
):
    saved(job_root, step=1)
    saved(job_root, step=2)
    AgentFolder(job_root).take_lock().release()
    unlink, calls = os.unlink, []

    def cut_off(path, *args, **options):
        calls.append(path)
        if len(calls) == after:
            raise KeyboardInterrupt
        unlink(path, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", cut_off)
        assert run("rm", "--job", job_root, "--yes", "--force")[0] == 130
    for name in names(job_root):
        if name.startswith("step-") and os.path.exists(f"{job_root}/{name}/.metadata"):
            with package.open(f"{job_root}/{name}") as view:
                view.verify()  # what looks complete is
    assert run("rm", "--job", job_root, "--yes", "--force")[0] == 0
    assert not os.path.exists(job_root)


def test_a_reader_keeps_what_it_has_open(job_root, run):
    container = saved(job_root, BIG | {"y": np.arange(1000)}, step=1)
    with package.open(container) as view:
        array = view["y"]
        assert run("rm", "--job", job_root, "--yes", "--force")[0] == 0
        assert np.array_equal(array, np.arange(1000))


def asked(answer, *args):
    """Run a command on a terminal and type the answer."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "flashpoint", *map(str, args)]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    running = subprocess.Popen(command, stdin=follower, stderr=follower, stdout=subprocess.PIPE, env=env)
    os.close(follower)
    shown = b""
    while b"[y/N]" not in shown:
        shown += os.read(leader, 4096)
    os.write(leader, answer)
    running.communicate(timeout=60)
    os.close(leader)
    return running.returncode, shown.decode()


def test_rm_asks_on_a_terminal_and_elsewhere_wants_yes(job_root, run):
    for step in (1, 2):
        saved(job_root, step=step)
    code, out, err = run("rm", job_root, "1")
    assert (code, out) == (4, "")
    assert "--yes must say that it is meant" in err
    code, shown = asked(b"\n", "rm", job_root, "1")
    assert code == 4
    assert "step 1 (complete, 8.0 KiB)" in shown and "remove it? [y/N]" in shown
    assert names(job_root) == [".pool", "step-1_ckpt", "step-2_ckpt"]
    assert asked(b"y\n", "rm", job_root, "1")[0] == 0
    assert names(job_root) == [".pool", "step-2_ckpt"]


def test_what_is_asked_for_must_be_clear_and_there(job_root, run):
    saved(job_root, step=1)
    for args, problem in {
        (job_root,): "say which steps",
        (job_root, "1", "--job"): "say which steps",
        (job_root, "7"): f"{job_root} has no step 7; it has 1",
        (f"{job_root}/step-1_ckpt", "--job"): "give either it, or its job root",
        (f"{job_root}/step-7_ckpt",): "has no step 7",
    }.items():
        code, out, err = run("rm", *args, "--yes", "--force")
        assert (code, out) == (2, "")
        assert problem in err
    assert names(job_root) == [".pool", "step-1_ckpt"]


def test_corrupt_bytes_are_not_looked_for(job_root, run):
    """`verify` looks for them: rm goes by names and sizes, so that it is quick where memory is short."""
    flip_byte(object_of(saved(job_root, step=1)), 5000)
    assert run("rm", job_root, "1", "--yes")[0] == 4
