import os
import subprocess

import pytest

from flashpoint.cli import mount
from flashpoint.cli.mount import Host, recommended, size_of
from flashpoint.errors import FlashpointError
from flashpoint.memory import mount_of

NEW = Host((6, 8), True, 256 << 30)
OLD = Host((5, 4), False, 256 << 30)


def test_the_options_are_those_that_the_kernel_knows():
    options = recommended(NEW, 64 << 30, (1000, 100), None)
    assert options == [
        "size=64g", "mode=0700", "uid=1000", "gid=100", "nodev", "nosuid", "noexec", "huge=within_size", "noswap",
    ]  # fmt: skip
    assert recommended(OLD, 64 << 30, (1000, 100), "always")[-1] == "noexec"
    assert "huge=always" in recommended(NEW, 1 << 30, (0, 0), "always")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("64G", 64 << 30), ("64GiB", 64 << 30), ("1.5g", 3 << 29), ("512MiB", 512 << 20), ("1048577", 1 << 20)],
)
def test_sizes_are_read_as_people_write_them(text, nbytes):
    assert size_of(text) == nbytes


@pytest.mark.parametrize("text", ["64", "lots", "", "-1G", "64GB"])
def test_what_is_no_size_is_an_error(text):
    with pytest.raises(FlashpointError, match="--size"):
        size_of(text)


def test_mount_prints_the_commands_and_changes_nothing(tmp_path, run, run_json):
    place = f"{tmp_path}/mem-1"
    code, out, err = run("mount", place, "--size", "1G", "--user", "1234")
    assert (code, err) == (0, "")
    assert f"sudo mkdir -p {place}\nsudo mount -t tmpfs -o size=1g,mode=0700,uid=1234,gid=1234,nodev" in out
    assert f"flashpoint {place} tmpfs size=1g" in out
    assert "mem\\x2d1.mount" in out and f"Where={place}" in out
    assert "medium: Memory\n    sizeLimit: 1024Mi" in out
    assert f"docker run --tmpfs {place}:size=1g,mode=0700,uid=1234,gid=1234,nodev,nosuid,noexec\n" in out
    assert not os.path.exists(place)
    code, report = run_json("mount", place, "--size", "1G")
    assert (code, report["done"], report["bytes"]) == (0, False, 1 << 30)


def test_a_mount_that_leaves_the_trainer_nothing_is_warned_of(tmp_path, run, monkeypatch):
    monkeypatch.setattr(mount, "_this_host", lambda: OLD)
    out = run("mount", f"{tmp_path}/m", "--size", "250G", "--huge", "always")[1]
    assert "warning: 250.0 GiB of 256.0 GiB memory leaves too little" in out
    assert "warning: this kernel has no huge pages" in out and "warning: this kernel has no noswap" in out


@pytest.mark.root
def test_do_mounts_it_and_only_once(tmp_path, run, run_json):
    place = f"{tmp_path}/mem"
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    code, report = run_json("mount", place, "--size", "16M", "--do")
    if code != 0:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        found = mount_of(place)
        assert (report["done"], found.kind, found.option("size")) == (True, "tmpfs", "16384k")
        assert {"noexec", "nodev", "nosuid", "mode=700"} <= found.options
        assert os.stat(place).st_mode & 0o777 == 0o700
        code, out, err = run("mount", place, "--size", "16M", "--do")
        assert (code, out) == (4, "")
        assert "is a mount point already" in err
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.mark.root
def test_do_hides_nothing(tmp_path, run):
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    code, _, err = run("mount", tmp_path / "full", "--size", "16M", "--do")
    assert code == 4
    assert "is not empty: a mount would hide what is in it" in err
    os.symlink(tmp_path / "full", tmp_path / "link")
    assert run("mount", tmp_path / "link", "--size", "16M", "--do")[0] == 2
    assert mount_of(str(tmp_path / "full")).mount_point != str(tmp_path / "full")


def test_do_without_root_says_so(tmp_path, run, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    code, out, err = run("mount", f"{tmp_path}/m", "--size", "16M", "--do")
    assert (code, out) == (2, "")
    assert "only root may mount: put sudo before it" in err


def test_paths_that_break_fstab_are_refused(tmp_path, run):
    code, _, err = run("mount", f"{tmp_path}/a b", "--size", "16M")
    assert code == 2
    assert "letters, digits" in err
