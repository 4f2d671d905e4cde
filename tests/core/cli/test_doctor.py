import importlib.metadata
import os
import re
import socket
from dataclasses import replace

import numpy as np
import pytest

from flashpoint.cli import doctor_measurements, doctor_readings
from flashpoint.cli.doctor_checks import CHECKS, examine
from flashpoint.cli.doctor_measurements import Rates
from flashpoint.cli.doctor_readings import Leftover, Package, Readings, read
from flashpoint.memory import Mount
from tests.core.cli.roots import saved

GIB = 1 << 30
TMPFS = Mount("/mnt/f", "tmpfs", "0:99", frozenset({"rw", "size=64g", "huge=always"}))
SHM = Mount("/dev/shm", "tmpfs", "0:98", frozenset({"rw", "huge=always"}))
GOOD = Readings(
    place="/mnt/f/job",
    mode=0o700,
    owner=1000,
    user=1000,
    mount=TMPFS,
    total_bytes=64 * GIB,
    free_bytes=50 * GIB,
    checkpoint_bytes=14 * GIB,
    version_bytes=10 * GIB,
    memory_total=256 * GIB,
    memory_available=200 * GIB,
    swap_total=0,
    swap_free=0,
    shmem_huge="never",
    kernel=(6, 8),
    nofile=(1024, 1_048_576),
    port_range=(32768, 60999),
    is_clock_synchronised=True,
    python=(3, 11, 9),
    packages=(Package("numpy", "2.4.6", "", False), Package("torch", "2.13.0+cpu", "2.13", True)),
    rates=Rates(12 * GIB, 2 * GIB, 11 * GIB, 3 * GIB),
)


def found(check, **changes):
    """The findings of one check, where these readings are not good."""
    return [one for one in examine(replace(GOOD, **changes)) if one.check == check]


def test_all_is_well_on_a_good_host():
    findings = examine(GOOD)
    assert [one for one in findings if one.level != "ok" or one.fix] == []
    assert len(findings) >= len(CHECKS) - 1  # settings say nothing where nothing is wrong
    assert all(one.why.endswith(tuple("abcdefghijklmnopqrstuvwxyz")) and one.value for one in findings)


def mount_with(kind="tmpfs", *options):
    return Mount("/mnt/f", kind, "0:99", frozenset({"rw", "huge=always", *options}))


@pytest.mark.parametrize(
    ("check", "changes", "level", "value", "fix"),
    [
        (
            "file system",
            {"mount": mount_with("ext4")},
            "bad",
            "ext4",
            "sudo flashpoint mount /mnt/flashpoint --size 128GiB --do",
        ),
        (
            "file system",
            {"mount": Mount("/mnt/f", "tmpfs", "", frozenset({"ro"}))},
            "bad",
            "read-only",
            "remount,rw /mnt/f",
        ),
        (
            "size",
            {"total_bytes": 64 << 20, "version_bytes": 0},
            "bad",
            "64.0 MiB",
            "remount,size=128G /mnt/f",
        ),
        (
            "size",
            {"total_bytes": 64 << 20, "version_bytes": 0, "mount": SHM, "in_container": True},
            "bad",
            "64.0 MiB",
            "--shm-size=128g",
        ),
        ("size", {"total_bytes": 15 * GIB}, "bad", "a version takes 10.0 GiB", "remount,size=30G /mnt/f"),
        ("size", {"total_bytes": 250 * GIB}, "warn", "250.0 GiB of 256.0 GiB memory", "remount,size=128G"),
        (
            "room",
            {"free_bytes": 1 * GIB, "checkpoint_bytes": 63 * GIB},
            "bad",
            "1.0 GiB free; a version takes 10.0 GiB",
            "flashpoint rm",
        ),
        (
            "room",
            {"free_bytes": 1 * GIB, "checkpoint_bytes": 63 * GIB, "reusable_bytes": 10 * GIB},
            "ok",
            "10.0 GiB in buffers",
            "",
        ),
        (
            "room",
            {"free_bytes": 0, "checkpoint_bytes": 63 * GIB, "version_bytes": 0},
            "bad",
            "0 B free",
            "flashpoint rm",
        ),
        (
            "room",
            {"free_bytes": GIB, "checkpoint_bytes": 63 * GIB, "version_bytes": 0},
            "warn",
            "1.0 GiB free",
            "flashpoint rm",
        ),
        ("owner", {"owner": 7}, "bad", "belongs to user 7, this is user 1000", "chown -R 1000 /mnt/f/job"),
        ("owner", {"mode": 0o755}, "warn", "mode 0755", "chmod 700 /mnt/f/job"),
        (
            "huge pages",
            {"mount": Mount("/mnt/f", "tmpfs", "", frozenset())},
            "warn",
            "huge=never",
            "huge=within_size /mnt/f",
        ),
        ("huge pages", {"shmem_huge": "deny"}, "warn", "deny", "echo never | sudo tee /sys/kernel/mm/"),
        ("huge pages", {"shmem_huge": ""}, "ok", "none", ""),
        (
            "memory",
            {"memory_available": 8 * GIB},
            "warn",
            "8.0 GiB of 256.0 GiB",
            "FLASHPOINT_MEMORY_LIMIT_BYTES=18GiB",
        ),
        (
            "cgroup",
            {"cgroup_limit": 100 * GIB, "cgroup_used": 95 * GIB},
            "bad",
            "95.0 GiB of 100.0 GiB",
            "limits.memory",
        ),
        (
            "cgroup",
            {"cgroup_limit": 32 * GIB, "cgroup_used": 4 * GIB},
            "warn",
            "4.0 GiB of 32.0 GiB",
            "MEMORY_LIMIT_BYTES=16GiB",
        ),
        ("cgroup", {"cgroup_limit": 128 * GIB, "cgroup_used": 4 * GIB}, "ok", "4.0 GiB of 128.0 GiB", ""),
        (
            "swap",
            {"swap_total": 8 * GIB, "swap_free": 7 * GIB},
            "warn",
            "1.0 GiB of 8.0 GiB used",
            "sudo swapoff -a  # or",
        ),
        (
            "swap",
            {"swap_total": 8 * GIB, "swap_free": 7 * GIB, "kernel": (5, 15)},
            "warn",
            "1.0 GiB",
            "sudo swapoff -a",
        ),
        ("swap", {"swap_total": 8 * GIB, "mount": mount_with("tmpfs", "noswap")}, "ok", "noswap", ""),
        (
            "locked memory",
            {"has_gpu": True, "memlock": (8 << 20, -1)},
            "warn",
            "8.0 MiB",
            "ulimit -l unlimited",
        ),
        ("locked memory", {"has_gpu": False, "memlock": (8 << 20, 8 << 20)}, "ok", "no GPU", ""),
        ("open files", {"nofile": (256, 4096)}, "warn", "256, at most 4,096", "nofile=65536"),
        ("open files", {"nofile": (256, 512)}, "bad", "at most 512", "nofile=65536"),
        ("kernel", {"kernel": (5, 4)}, "warn", "Linux 5.4", "upgrade"),
        ("ports", {"listen_error": "Operation not permitted"}, "bad", "Operation not permitted", "allow"),
        ("ports", {"wanted_ports": (40000,)}, "warn", "40000 is among them", "ip_local_reserved_ports=40000"),
        ("ports", {"wanted_ports": (40000,), "reserved_ports": "1,39000-41000"}, "ok", "40000 free", ""),
        (
            "ports",
            {"wanted_ports": (7000,), "taken_ports": (7000,)},
            "warn",
            "7000 taken",
            "ss -ltnp 'sport = :7000'",
        ),
        ("ports", {"port_range": (60000, 60999)}, "warn", "60000 to 60999", "ip_local_port_range"),
        ("clock", {"is_clock_synchronised": False}, "warn", "not synchronised", "timedatectl set-ntp true"),
        ("clock", {"is_clock_synchronised": None}, "ok", "cannot be told", ""),
        ("python", {"python": (3, 10, 1)}, "bad", "3.10.1", "3.11 or later"),
        (
            "libraries",
            {"packages": (Package("torch", "2.9.1", "2.13", True),)},
            "warn",
            "torch 2.9.1 (needs 2.13)",
            "pip install 'torch>=2.13'",
        ),
        (
            "libraries",
            {"packages": (Package("pyzmq", "", "", False),)},
            "bad",
            "pyzmq is missing",
            "pip install pyzmq",
        ),
        ("libraries", {"packages": (Package("obstore", "", "", True),)}, "ok", "", ""),
        ("settings", {"settings_error": "keep must be 0 or more"}, "bad", "keep must be", "unset"),
        ("memcpy", {"rates": Rates(GIB, GIB, GIB, GIB)}, "warn", "1.0 GiB/s", "quiet machine"),
        (
            "tmpfs rate",
            {"rates": Rates(12 * GIB, GIB, 3 * GIB, GIB)},
            "warn",
            "3.0 GiB/s into recycled",
            "quiet machine",
        ),
        (
            "loopback",
            {"rates": Rates(12 * GIB, GIB, 9 * GIB, 0)},
            "bad",
            "no connection",
            "ip link set lo up",
        ),
        (
            "copy rate",
            {"rates": None, "measure_error": "No space left"},
            "warn",
            "No space left",
            "free some",
        ),
        (
            "dead jobs",
            {"leftovers": (Leftover("/mnt/f/old", GIB, 2, 1, 7200.0),)},
            "warn",
            "1.0 GiB, 2 versions, 1 of them dirty",
            "flashpoint rm --job /mnt/f/old",
        ),
        (
            "dead jobs",
            {"leftovers": (Leftover("/mnt/f/new", GIB, 2, 1, 60.0),)},
            "ok",
            "less than an hour: 1",
            "",
        ),
    ],
)
def test_each_check_tells_what_is_wrong_and_what_mends_it(check, changes, level, value, fix):
    (finding,) = found(check, **changes)
    assert finding.level == level
    assert value in finding.value
    assert fix in finding.fix and bool(fix) == bool(finding.fix)


def test_what_cannot_be_read_is_no_finding():
    unread = Readings(place="/mnt/f", rates=None)
    assert {one.check for one in examine(unread)}.isdisjoint(
        {"memory", "swap", "kernel", "memcpy", "loopback"}
    )


@pytest.mark.root
def test_a_tmpfs_that_is_too_small_and_full_is_bad_and_the_remedy_cures_it(mount_tmpfs, run, run_json):
    place = mount_tmpfs("size=48m,huge=never")
    root = f"{place}/job"
    saved(root, {"x": np.zeros(30 << 20, np.uint8)})
    with open(f"{place}/filler", "wb") as file:
        file.write(bytes(16 << 20))
    code, report = run_json("doctor", root, "--quick")
    levels = {finding["check"]: finding for finding in report["findings"]}
    assert (code, report["level"], report["place"]) == (1, "bad", root)
    assert levels["size"]["level"] == levels["room"]["level"] == "bad"
    assert "a version takes 30.0 MiB" in levels["size"]["value"]
    assert "16.0 MiB are no checkpoints" in levels["room"]["value"] and "du -ah" in levels["room"]["fix"]
    code, out, _ = run("doctor", root, "--quick")
    assert code == 1
    assert re.search(r"bad   size +48.0 MiB, and a version takes 30.0 MiB", out)
    assert f"{place}\n" in out  # the command names the mount
    fix = levels["huge pages"]["fix"].replace("sudo ", "") if "huge pages" in levels else ""
    if fix and "deny" not in levels["huge pages"]["value"]:
        assert os.system(fix) == 0
        assert f"huge={read(root, root, is_quick=True).mount.option('huge')}" == "huge=within_size"


def test_doctor_of_a_job_root_that_is_not_there_yet_looks_at_where_it_would_be(job_root, run):
    code, out, err = run("doctor", f"{job_root}/to/come", "--quick")
    assert err == "" and code in (0, 1)
    assert out.startswith(f"{job_root}  ({job_root}/to/come is not there yet)\n")


def test_doctor_measures_and_leaves_nothing_behind(job_root, run_json, monkeypatch):
    monkeypatch.setattr(doctor_measurements, "MEMORY_BYTES", 4 << 20)
    monkeypatch.setattr(doctor_measurements, "LOOPBACK_BYTES", 4 << 20)
    _, report = run_json("doctor", job_root)
    assert all(rate > 0 for rate in report["rates"].values())
    assert os.listdir(job_root) == []
    _, report = run_json("doctor", job_root, "--quick")
    assert report["rates"] is None


def test_doctor_reads_this_host(job_root, monkeypatch):
    saved(job_root, {"x": np.zeros(1 << 20, np.uint8)})
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("FLASHPOINT_AGENT_PORT", str(port))
        readings = read(job_root, job_root, is_quick=True)
    assert readings.taken_ports == (port,)
    assert readings.mount.kind == "tmpfs" and readings.version_bytes > 1 << 20
    assert (readings.mode, readings.owner) == (0o700, os.geteuid())
    assert readings.memory_total > readings.memory_available > 0
    assert readings.kernel >= (3, 0) and readings.port_range[0] < readings.port_range[1]
    assert readings.python >= (3, 11)
    monkeypatch.setenv("FLASHPOINT_KEEP", "many")
    assert "FLASHPOINT_KEEP" in read(job_root, job_root, is_quick=True).settings_error


def test_every_requirement_of_the_package_is_understood():
    requirements = [one for one in importlib.metadata.requires("flashpoint") if "extra == " not in one]
    names = {re.match(r"[A-Za-z0-9_.-]+", one)[0] for one in requirements}
    packages = {one.name: one for one in doctor_readings._packages()}
    assert names and names <= packages.keys()
    assert not any(packages[name].is_optional for name in names)
    assert packages["torch"].is_optional and packages["torch"].at_least
    assert "pytest" not in packages and "flashpoint" not in packages


def test_what_dead_jobs_left_is_found_and_what_is_in_use_is_not(job_root, monkeypatch):
    from flashpoint.cli import agents

    other = f"{os.path.dirname(job_root)}/other"
    saved(other, {"x": np.zeros(1 << 20, np.uint8)})
    monkeypatch.setattr(doctor_readings, "job_roots_of_this_user", lambda places: [job_root, other])
    (left,) = doctor_readings._leftovers(job_root, "/dev/shm")
    assert (left.path, left.versions, left.dirty) == (other, 1, 0) and left.nbytes >= 1 << 20
    monkeypatch.setattr(agents, "users_of", lambda root: ["its trainer"])
    assert doctor_readings._leftovers(job_root, "/dev/shm") == []
