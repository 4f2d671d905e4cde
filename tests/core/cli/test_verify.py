import contextlib
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from flashpoint import manifest
from flashpoint.checksums import chunk_digests
from flashpoint.cli import verify
from tests.core.cli.roots import (
    REPOSITORY,
    crashed,
    flashpoint,
    flip_byte,
    object_of,
    position_of,
    rows,
    saved,
    saved_by_two_ranks,
)


def test_verify_of_a_good_version_exits_with_0(job_root):
    result = flashpoint("verify", saved(job_root))
    assert (result.returncode, result.stderr) == (0, "")
    assert "ok 8.0 KiB 1 rank00000-0.safetensors" in rows(result.stdout)
    assert "1 version ok; 8.0 KiB in" in result.stdout and "GiB/s" in result.stdout


def test_verify_names_the_corrupt_chunks_and_the_entries_in_them(job_root, run_json):
    arrays = {f"w{i}": np.full(1024, i, np.float32) for i in range(6)}
    container = saved(job_root, arrays, chunk_bytes=4096)
    flip_byte(object_of(container), position_of(container, "w3"))
    result = flashpoint("verify", container)
    assert result.returncode == 1
    assert "1 of 7 chunks do not match their checksums, in 'w3'" in result.stdout
    code, report = run_json("verify", container)
    found = report["versions"][0]["objects"][0]
    assert (code, report["status"], found["status"]) == (1, "corrupt", "corrupt")
    assert (found["broken_chunks"], found["broken_entries"]) == ([4], ["w3"])


def test_verify_of_a_job_root_looks_at_every_complete_version(job_root, run, run_json):
    saved(job_root, step=1)
    flip_byte(object_of(saved(job_root, step=2)), 5000)
    crashed(job_root, 3)
    code, report = run_json("verify", job_root)
    assert code == 1
    found = [(version["step"], version["status"]) for version in report["versions"]]
    assert found == [(3, "unfinished"), (2, "corrupt"), (1, "ok")]
    shutil.rmtree(f"{job_root}/step-2_ckpt")
    assert run("verify", job_root)[0] == 0  # a job that is saving is no reason to fail
    shutil.rmtree(f"{job_root}/step-1_ckpt")
    code, _, err = run("verify", job_root)
    assert code == 2
    assert err == f"flashpoint verify: {job_root} has no complete version to verify\n"


def test_verify_of_an_unfinished_version_exits_with_2(job_root, run):
    code, out, _ = run("verify", crashed(job_root, 3))
    assert code == 2
    assert "unfinished: a crash left its marker" in out
    assert run("verify", saved(job_root, step=4), f"{job_root}/step-3_ckpt")[0] == 2


def test_verify_finds_missing_truncated_and_emptied_objects(job_root, run):
    container = saved(job_root, step=1)
    os.unlink(object_of(container))
    code, out, _ = run("verify", container)
    assert code == 1
    assert "missing 8.0 KiB 1 rank00000-0.safetensors it is not there" in rows(out)
    for nbytes in (0, 4096):
        container = saved(job_root, step=2 + nbytes)
        os.truncate(object_of(container), nbytes)
        code, out, _ = run("verify", container)
        assert code == 1
        assert f"has {nbytes} bytes, its manifest says 8192" in out


def test_objects_of_other_nodes_are_no_error_if_told_so(job_root, run, run_json):
    container = saved_by_two_ranks(job_root, np.zeros((4, 2), np.float32))
    os.unlink(object_of(container, rank=1))
    code, out, _ = run("verify", container)
    assert code == 1
    assert "if other nodes hold the objects of ranks 1, add --this-node" in out
    code, report = run_json("verify", container, "--this-node")
    assert code == 0
    assert [obj["status"] for obj in report["versions"][0]["objects"]] == ["ok", "elsewhere"]
    os.unlink(object_of(container, rank=0))
    assert run("verify", container, "--this-node")[0] == 1  # nothing at all is here


def test_verify_finds_a_manifest_whose_checksum_does_not_match(job_root, run):
    container = saved(job_root)
    flip_byte(f"{container}/.metadata", 100)
    code, out, err = run("verify", container)
    assert (code, err) == (1, "")
    assert "the manifest's checksum does not match its contents" in out


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (b'"ids":', b'"idz":', "its safetensors header and the manifest's layout disagree about 'idz'"),
        (b'"I64"', b'"F64"', "its safetensors header and the manifest's layout disagree about 'ids'"),
        (b'"I64"', b'"Q64"', "not a safetensors header: 'ids' does not fill its byte range"),
        (b'{"__meta', b'("__meta', "not a safetensors header"),
    ],
)
def test_verify_compares_each_objects_header_with_the_manifest(job_root, run, old, new, problem):
    container = saved(job_root)
    path = object_of(container)
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    # As if a faulty writer had sealed it so: its checksums are those of the wrong header.
    decoded = manifest.decode(Path(container, ".metadata").read_bytes())
    record = decoded.objects[0]
    chunks = chunk_digests(np.fromfile(path, np.uint8), record.chunk_bytes)
    record = msgspec.structs.replace(record, chunks=chunks)
    head = msgspec.structs.replace(decoded.record, objects=(record,))
    Path(container, ".metadata").write_bytes(manifest.encode(head, decoded.sections))
    code, out, _ = run("verify", container)
    assert code == 1
    assert problem in out
    assert "do not match their checksums" not in out


def test_a_version_given_up_while_it_is_verified_is_gone_and_not_corrupt(job_root, run, monkeypatch):
    container = saved(job_root, step=1)
    saved(job_root, step=2)

    @contextlib.contextmanager
    def give_up(name, nbytes):
        shutil.rmtree(container, ignore_errors=True)
        yield lambda done: None

    monkeypatch.setattr(verify, "progress_bar", give_up)
    code, out, _ = run("verify", container)
    assert code == 2
    assert out.startswith(f"gone  {container}\n")
    assert run("verify", job_root)[0] == 0


def test_verify_folds_the_good_objects_of_a_large_job(job_root, run, monkeypatch):
    monkeypatch.setattr(verify, "_ROWS_MAX", 1)
    container = saved_by_two_ranks(job_root, np.zeros((4, 2), np.float32))
    flip_byte(object_of(container, rank=1), 5000)
    code, out, _ = run("verify", container)
    assert code == 1
    assert "1 more object: nothing wrong (--all lists them)" in out
    assert "rank00000-0" not in out and "rank00001-0" in out
    assert "rank00000-0" in run("verify", container, "--all")[1]


def test_progress_goes_to_a_terminal_on_stderr_and_never_to_stdout(job_root):
    container = saved(job_root)
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "flashpoint", "verify", container, "--json"]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm"}
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=follower, env=env, timeout=60)
    os.close(follower)
    drawn = b""
    with contextlib.suppress(OSError):  # EIO: nobody holds the other end any more
        while data := os.read(leader, 4096):
            drawn += data
    os.close(leader)
    assert json.loads(result.stdout)["status"] == "ok"
    assert b"step-100_ckpt" in drawn
