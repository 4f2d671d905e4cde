import mmap
import os

import numpy as np
import pytest

from flashpoint import memory
from flashpoint.memory import (
    cgroup_memory_left,
    cgroup_memory_limit,
    default_memory_limit,
    file_system,
    human_bytes,
    prefault,
    prefault_read,
)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3328599655, "3.1 GiB"),
        (5 << 40, "5.0 TiB"),
        (5000 << 40, "5000.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_sizes_are_written_for_people(nbytes, text):
    assert human_bytes(nbytes) == text


def test_a_tmpfs_is_known_as_one(job_root, tmp_path):
    fs = file_system(job_root)
    assert (fs.is_tmpfs, fs.kind, fs.mount_point) == (True, "tmpfs", "/dev/shm")
    assert 0 < fs.free_bytes <= fs.total_bytes
    assert file_system("/proc").kind == "proc"
    assert not file_system("/proc").is_tmpfs


def test_the_default_limit_is_most_of_the_tmpfs_but_no_more_than_the_cgroups(job_root, monkeypatch):
    total = file_system(job_root).total_bytes
    monkeypatch.setattr(memory, "cgroup_memory_limit", lambda: None)
    assert 0.9 * total < default_memory_limit(job_root) < total
    monkeypatch.setattr(memory, "cgroup_memory_limit", lambda: 1 << 20)
    assert 0.9 * (1 << 20) < default_memory_limit(job_root) < 1 << 20


def test_the_tightest_limit_on_the_way_to_the_cgroup_counts(tmp_path, monkeypatch):
    paths = [tmp_path / name for name in ("max", "outer", "inner", "huge", "missing")]
    for path, text in zip(paths, ("max\n", "3000\n", "2000\n", f"{2**62}\n"), strict=False):
        path.write_text(text)
    monkeypatch.setattr(memory, "_cgroup_files", lambda: [str(path) for path in paths])
    assert cgroup_memory_limit() == 2000
    monkeypatch.setattr(memory, "_cgroup_files", lambda: [str(paths[0]), str(paths[3])])
    assert cgroup_memory_limit() is None


@pytest.mark.parametrize("populates", [True, False])
def test_prefaulting_maps_pages_whatever_the_kernel_can(monkeypatch, populates):
    if not populates:
        monkeypatch.setattr(memory, "_populate", lambda *args: False)
    data = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    prefault(data, 0, 1 << 20)
    prefault(data, 5000, 5000)
    prefault(data, 4097, 12345)
    assert not data.any()


def test_prefaulting_keeps_what_is_there_and_reads_read_only_memory(job_root):
    path = f"{job_root}/file"
    with open(path, "wb") as file:
        file.write(bytes(range(256)) * 64)
    with open(path, "r+b") as file:
        data = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
    prefault(data, 0, len(data))
    assert data.tobytes() == bytes(range(256)) * 64
    with open(path, "rb") as file:
        readable = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
    prefault_read(readable, 0, len(readable))
    assert readable.tobytes() == data.tobytes()
    assert os.path.getsize(path) == len(data)


@pytest.mark.parametrize("version", [1, 2])
def test_what_a_cgroup_has_left_counts_files_that_can_be_dropped_and_leaves_a_twentieth(
    tmp_path, monkeypatch, version
):
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        if version == 1
        else ("memory.max", "memory.current", "")
    )
    outer, inner = tmp_path, tmp_path / "inner"
    inner.mkdir()
    for folder, limit, used in ((outer, "10000", 2000), (inner, "4000", 1000)):
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(
            f"{names[2]}inactive_file 300\n{names[2]}active_file 200\nother 7\n"
        )
    monkeypatch.setattr(memory, "_cgroup_files", lambda: [f"{inner}/{names[0]}", f"{outer}/{names[0]}"])
    assert cgroup_memory_left() == 3800 - 1000 + 500
    (outer / names[1]).write_text("9000")
    assert cgroup_memory_left() == 9500 - 9000 + 500
    (outer / names[1]).write_text("12000")
    assert cgroup_memory_left() == 0
    monkeypatch.setattr(memory, "_cgroup_files", lambda: [f"{tmp_path}/missing/{names[0]}"])
    assert cgroup_memory_left() is None
