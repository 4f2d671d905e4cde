import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import flashpoint as package
from flashpoint import cli
from flashpoint.config import FlashpointConfig
from flashpoint.errors import StorageError
from flashpoint.storage import by_hand
from flashpoint.storage.local import LocalStore
from flashpoint.storage.records import Owner, decode, drain_name
from tests.core.cli.roots import (
    ARRAYS,
    REPOSITORY,
    crashed,
    flip_byte,
    object_of,
    position_of,
    saved,
    saver_of,
    until,
)
from tests.core.storage.nodes import check, steps_in
from tests.core.world import Job, contents

MIB = 1 << 20


def url_of(folder):
    return f"file://{folder}"


def test_drain_brings_the_newest_complete_version_and_it_can_be_loaded(job_root, run, run_json, tmp_path):
    saved(job_root, step=1)
    saved(job_root, step=2)
    crashed(job_root, 3)
    code, report = run_json("drain", job_root, "--to", url_of(tmp_path))
    assert code == 0
    assert (report["step"], report["status"], report["read_back"]) == (2, "drained", True)
    assert report["bytes"] == report["uploaded_bytes"] == 8192
    assert steps_in(str(tmp_path)) == [2]
    with package.open(f"{tmp_path}/step-2_ckpt") as view:
        view.verify()
        assert np.array_equal(view["ids"], ARRAYS["ids"])
    code, out, err = run("drain", job_root, "--to", tmp_path, "--step", "1")  # a plain folder will do
    assert (code, err) == (0, "")
    assert out.startswith(f"step 1 is drained to file://{tmp_path}\n  8.0 KiB written, in ")
    assert out.endswith(", and read back\n")
    code, report = run_json("drain", job_root, "--to", url_of(tmp_path))
    assert (code, report["status"], report["uploaded_bytes"]) == (0, "already", 0)


def test_a_storage_that_nobody_owned_is_this_jobs_then_and_its_epochs_go_on(job_root, run, tmp_path):
    saver = saver_of(job_root)
    saver.epoch = 7
    saver.save(1, ARRAYS)
    assert run("drain", job_root, "--to", tmp_path)[0] == 0
    owner = decode(Path(tmp_path, ".flashpoint").read_bytes(), Owner, "owner")
    assert (owner.name, owner.epoch) == (os.path.basename(job_root), 7)
    saver.epoch = 9
    saver.save(2, ARRAYS)
    assert run("drain", job_root, "--to", tmp_path)[0] == 0
    assert decode(Path(tmp_path, ".flashpoint").read_bytes(), Owner, "owner").epoch == 9


def test_the_storage_of_another_job_is_left_alone(job_root, run, tmp_path):
    saved(job_root)
    assert run("drain", job_root, "--to", tmp_path)[0] == 0
    other = str(Path(job_root).parent / "other")
    saved(other, step=5)
    code, out, err = run("drain", other, "--to", tmp_path)
    assert (code, out) == (2, "")
    assert "holds the checkpoints of another job, 'job'" in err
    assert steps_in(str(tmp_path)) == [100]


@pytest.fixture
def two_nodes(job_root):
    """A version of two nodes, each with its own objects only; (job roots)."""
    roots = [f"{job_root}/a/job", f"{job_root}/b/job"]
    job = Job(job_root, 2, roots=roots)
    job.save(10)
    job.close()
    return roots


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_nodes_add_up_in_any_order_and_the_last_one_commits(two_nodes, run_json, run, tmp_path, order):
    first, last = two_nodes[order[0]], two_nodes[order[1]]
    code, report = run_json("drain", first, "--to", tmp_path)
    assert (code, report["status"]) == (2, "unfinished")
    assert (report["missing_objects"], report["missing_ranks"]) == (1, [order[1]])
    out = run("drain", first, "--to", tmp_path)[1]
    assert f"flashpoint drain {first} --to file://{tmp_path} --step 10" in out
    assert steps_in(str(tmp_path)) == []
    code, report = run_json("drain", last, "--to", tmp_path)
    assert (code, report["status"]) == (0, "drained")
    assert check(str(tmp_path)) == [10]
    assert os.listdir(tmp_path / ".drains") == []


def test_nodes_may_come_at_once(two_nodes, tmp_path):
    codes = []

    def go(root):
        codes.append(cli.main(["drain", root, "--to", str(tmp_path)]))

    threads = [threading.Thread(target=go, args=(root,)) for root in two_nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if steps_in(str(tmp_path)) != [10]:  # each looked before the other had brought its own
        go(two_nodes[0])
    assert check(str(tmp_path)) == [10]


def test_a_drain_that_was_killed_goes_on_and_writes_nothing_twice(job_root, run_json, tmp_path):
    job = Job(job_root, 3)
    job.each(lambda rank: rank.save(5, contents(5, rank.rank, MIB // 2), {"step": 5}))
    job.close()
    command = [sys.executable, "-m", "flashpoint", "drain", job_root, "--to", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    slow = subprocess.Popen([*command, "--bytes-per-s", "4MiB"], env=env, stdout=subprocess.DEVNULL)
    folder = tmp_path / "step-5_ckpt"
    until(lambda: (folder / "rank00001-0.safetensors").exists())
    slow.send_signal(signal.SIGKILL)
    slow.wait(60)
    assert steps_in(str(tmp_path)) == []
    before = {path.name: path.stat().st_ino for path in folder.iterdir() if path.suffix == ".safetensors"}
    assert "rank00002-0.safetensors" not in before
    code, report = run_json("drain", job_root, "--to", tmp_path)
    assert (code, report["status"]) == (0, "drained")
    assert report["uploaded_bytes"] < report["bytes"]
    assert (folder / "rank00000-0.safetensors").stat().st_ino == before["rank00000-0.safetensors"]
    assert check(str(tmp_path)) == [5]


def test_what_is_corrupt_in_memory_is_not_drained(job_root, run, tmp_path):
    container = saved(job_root)
    flip_byte(object_of(container), position_of(container, "ids"))
    code, out, err = run("drain", job_root, "--to", tmp_path)
    assert (code, out) == (1, "")
    assert "object rank00000-0.safetensors is corrupt in memory" in err
    assert steps_in(str(tmp_path)) == []


def test_what_does_not_read_back_is_not_committed_and_is_written_again(job_root, run, tmp_path, monkeypatch):
    saved(job_root)
    write = LocalStore.write

    def lose_a_bit(self, name, data):
        if name.endswith(".safetensors"):
            data = bytes(data[:-1]) + bytes([data[-1] ^ 1])
        write(self, name, data)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "write", lose_a_bit)
        code, _, err = run("drain", job_root, "--to", tmp_path)
        assert code == 1
        assert "does not read back as it was written" in err
        assert steps_in(str(tmp_path)) == []
    assert run("drain", job_root, "--to", tmp_path)[0] == 0
    assert check_bytes(tmp_path)


def check_bytes(folder):
    with package.open(f"{folder}/step-100_ckpt") as view:
        view.verify()
    return True


def test_another_versions_drain_is_given_up_only_by_force(job_root, run, tmp_path):
    saved(job_root, step=1)
    saved(job_root, step=2)
    other = by_hand.choose(saver_of(job_root).objects, 1).key
    begun = tmp_path / ".drains" / drain_name(other)
    begun.mkdir(parents=True)
    (begun / "node00000").write_text("{}")
    code, out, err = run("drain", job_root, "--to", tmp_path)
    assert (code, out) == (4, "")
    assert "a drain of step 1 was begun there" in err
    assert begun.exists()
    assert run("drain", job_root, "--to", tmp_path, "--force")[0] == 0
    assert not begun.exists()


def test_a_storage_that_hangs_is_waited_for_no_longer_than_it_is_told(job_root, tmp_path, monkeypatch):
    saved(job_root)
    let_go = threading.Event()
    monkeypatch.setattr(LocalStore, "write_parts", lambda *_: let_go.wait(60))
    config = FlashpointConfig.from_env({}, storage=url_of(tmp_path), storage_timeout_s=0.3)
    objects = saver_of(job_root).objects
    with pytest.raises(package.errors.DeadlineError):
        by_hand.drain(objects, config, by_hand.choose(objects, None))
    let_go.set()


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--to", "ftp://x"], "storage must be a URL that begins with one of file://, s3://, gs://"),
        (["--to", "{tmp}/missing"], "cannot be used: listing file://{tmp}/missing"),
        (["--to", "{tmp}", "--step", "7"], "{root} has no complete version of step 7"),
    ],
)
def test_what_cannot_be_done_is_one_line(job_root, run, tmp_path, args, problem):
    saved(job_root)
    code, out, err = run("drain", job_root, *(arg.format(tmp=tmp_path) for arg in args))
    assert (code, out) == (2, "")
    assert problem.format(tmp=tmp_path, root=job_root) in err
    assert err.count("\n") == 1


def test_an_error_of_the_storage_is_not_swallowed(job_root, run, tmp_path, monkeypatch):
    saved(job_root)

    def refuse(self, name, data):
        raise StorageError("the disk is full")

    monkeypatch.setattr(LocalStore, "write", refuse)
    code, out, err = run("drain", job_root, "--to", tmp_path)
    assert (code, out) == (2, "")
    assert "the disk is full" in err


def test_progress_is_shown_on_a_terminal(job_root, tmp_path):
    saved(job_root)
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "flashpoint", "drain", job_root, "--to", str(tmp_path), "--json"]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm"}
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=follower, env=env, timeout=60)
    os.close(follower)
    drawn = b""
    with contextlib.suppress(OSError):  # EIO: nobody holds the other end any more
        while data := os.read(leader, 4096):
            drawn += data
    os.close(leader)
    assert result.stdout.startswith(b'{"job_root"')
    assert b"step 100" in drawn
