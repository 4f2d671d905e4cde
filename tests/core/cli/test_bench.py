import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.core.cli.roots import REPOSITORY, flashpoint

FIGURES = [
    "memcpy", "first save, blocking", "first save, complete", "save, blocking", "save, complete", "checksums",
    "load, verified", "load, not verified",
]  # fmt: skip


def test_bench_measures_over_a_memcpy_and_leaves_nothing(job_root, run_json):
    code, report = run_json("bench", job_root, "--bytes", "4MiB", "--repeats", "2")
    assert (code, report["bytes"], report["file_system"]) == (0, 4 << 20, "tmpfs")
    figures = {figure["name"]: figure for figure in report["figures"]}
    assert list(figures) == FIGURES
    assert figures["memcpy"]["ratio"] == 1
    assert all(figure["seconds"] > 0 and figure["ratio"] > 0 for figure in figures.values())
    assert report["memcpy_bytes_per_s"] == report["bytes"] / figures["memcpy"]["seconds"]
    assert figures["save, complete"]["seconds"] > figures["save, blocking"]["seconds"]
    assert os.listdir(job_root) == []


def test_bench_is_a_table_for_people(job_root):
    result = flashpoint("bench", job_root, "--bytes", "1MiB", "--repeats", "1")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert "a version, median of 1" in lines[0]
    assert [line.split("GiB/s  ")[1] for line in lines[2:]] == FIGURES


def test_bench_of_a_disk_says_so(tmp_path, run, monkeypatch):
    monkeypatch.setattr("flashpoint.cli.bench.file_system", lambda path: _OnDisk)
    out = run("bench", tmp_path, "--bytes", "1MiB", "--repeats", "1")[1]
    assert "ext4 is no tmpfs" in out


class _OnDisk:
    kind = "ext4"


def test_bench_begins_nothing_that_does_not_fit(job_root, run):
    code, out, err = run("bench", job_root, "--bytes", "900TiB")
    assert (code, out) == (2, "")
    assert "free, and this takes" in err and "give fewer --bytes" in err
    assert os.listdir(job_root) == []


def test_bench_that_is_told_to_end_leaves_nothing(job_root):
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [
        sys.executable,
        "-m",
        "flashpoint",
        "bench",
        job_root,
        "--bytes",
        "8MiB",
        "--repeats",
        "100000",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    deadline = time.monotonic() + 60
    while not list(Path(job_root).glob("*/job/*_ckpt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert os.listdir(job_root) == []
