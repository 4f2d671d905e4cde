import os
from pathlib import Path

import numpy as np
import pytest

from flashpoint import manifest
from flashpoint.cli import discovery, versions
from flashpoint.storage import claim
from tests.core.cli.roots import (
    ARRAYS,
    begun,
    crashed,
    flashpoint,
    object_of,
    rows,
    saved,
    saved_by_two_ranks,
    saver_of,
    until,
)
from tests.core.replication.nodes import Nodes


def test_ls_tells_complete_saving_and_dirty_versions_apart_newest_first(job_root):
    saved(job_root, step=9)
    saved(job_root, step=10)
    crashed(job_root, 11)
    _, pending = begun(job_root, 12)
    result = flashpoint("ls", job_root)
    pending.marker.release()
    assert (result.returncode, result.stderr) == (0, "")
    listed = rows(result.stdout)
    assert listed[0] == job_root
    assert [row.split()[0] for row in listed[2:6]] == ["12", "11", "10", "9"]
    assert "12 - saving 8.0 KiB 1 -" in listed[2] and "it is being saved" in listed[2]
    assert "11 - dirty" in listed[3] and "a crash left its marker" in listed[3]
    assert "10 0 complete 8.0 KiB 1 1" in listed[4]
    assert any(row.startswith("pool: 4 files, 32.0 KiB; free: 0") for row in listed)
    assert any(row.startswith("tmpfs /dev/shm:") for row in listed)


def test_ls_finds_the_job_roots_one_level_below_a_folder(job_root, run_json):
    parent = Path(job_root).parent
    saved(job_root)
    saved(str(parent / "other"))
    (parent / "no job root").mkdir()
    code, found = run_json("ls", parent)
    assert code == 0
    assert [root["path"] for root in found["job_roots"]] == [job_root, f"{parent}/other"]


def test_ls_without_an_argument_finds_this_users_job_roots_and_no_others(
    job_root, run, run_json, monkeypatch
):
    parent = Path(job_root).parent
    monkeypatch.setattr(
        discovery, "memory_places", lambda: [str(parent), "/dev/shm/flashpoint-no-such-place"]
    )
    assert run("ls")[1].startswith(f"no checkpoints of user {os.geteuid()} in ")
    saved(job_root)
    saved(str(parent / "alice" / "deeper"))
    saved(str(parent / "too" / "deep" / "job"))
    os.symlink(job_root, parent / "link")
    assert [root["path"] for root in run_json("ls")[1]["job_roots"]] == [job_root, f"{parent}/alice/deeper"]
    if os.geteuid() == 0:
        os.chown(job_root, 12345, 12345)
        assert [root["path"] for root in run_json("ls")[1]["job_roots"]] == [f"{parent}/alice/deeper"]


def test_dev_shm_is_the_first_place_to_look_into():
    assert discovery.memory_places()[0] == "/dev/shm"


def test_ls_tells_which_tiers_hold_a_version(run, run_json, tmp_path):
    with Nodes(2, copies=1, keep=2, storage=f"file://{tmp_path}") as nodes:
        nodes.start()
        claim.claim(nodes.config, nodes[0].job_root, nodes.keys.job, nodes.epoch, None)
        nodes.save(10)
        nodes.replicated(10)
        until(lambda: nodes[0].client.inquire().storage.step == 10)
        nodes[1].stop()  # what comes now is never replicated
        nodes.save(20)
        code, found = run_json("ls", nodes[0].job_root)
        (root,) = found["job_roots"]
        assert (code, root["agent"]) == (0, "alive")
        tiers = {version["step"]: version["tiers"] for version in root["versions"]}
        assert tiers == {20: ["memory"], 10: ["memory", "peer", "storage"]}
        assert root["storage"] == {"drained_epoch": 1, "drained_step": 10, "error": ""}
        out = run("ls", nodes[0].job_root)[1]
        assert "memory peer storage" in out and "storage: step 10 of epoch 1 is drained" in out
        assert run("ls", nodes[1].job_root)[1].startswith(f"{nodes[1].job_root}  agent dead: ")


def test_ls_of_an_empty_folder_finds_nothing_and_is_fine(job_root, run):
    code, out, err = run("ls", job_root)
    assert (code, err) == (0, "")
    assert out == f"no checkpoints in {job_root}, nor in the folders directly below\n"


def test_ls_shows_a_garbled_manifest_as_corrupt_and_exits_with_1(job_root, run_json):
    saved(job_root, step=1)
    Path(saved(job_root, step=2), ".metadata").write_bytes(b"{}\n")
    code, found = run_json("ls", job_root)
    assert code == 1
    states = [(version["step"], version["state"]) for version in found["job_roots"][0]["versions"]]
    assert states == [(2, "corrupt"), (1, "complete")]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path), os.mkdir])
def test_ls_neither_waits_for_nor_follows_what_stands_in_a_manifests_place(
    job_root, run_json, monkeypatch, make
):
    container = saved(job_root)
    os.unlink(f"{container}/.metadata")
    make(f"{container}/.metadata")
    read = []
    monkeypatch.setattr(
        versions, "decode_record", lambda head: read.append(head) or manifest.decode_record(head)
    )
    code, found = run_json("ls", job_root)
    assert code == 1
    assert found["job_roots"][0]["versions"][0]["problem"]
    assert not any(read)


def test_ls_counts_free_pool_files_and_ranks_whose_objects_are_elsewhere(job_root, run, run_json):
    container = saved_by_two_ranks(job_root, np.zeros((4, 2), np.float32))
    os.unlink(object_of(container, rank=1))
    _, found = run_json("ls", job_root)
    version, pool = found["job_roots"][0]["versions"][0], found["job_roots"][0]["pool"]
    assert (version["objects_here"], version["objects"], version["world_size"]) == (1, 2, 2)
    assert (pool["files"], pool["free_files"]) == (2, 1)
    assert pool["bytes"] == 2 * pool["free_bytes"] == version["bytes"] == 2 * version["bytes_here"]
    assert "1 of 2" in run("ls", job_root)[1]


def test_ls_orders_by_epoch_before_step(job_root, run_json):
    saved(job_root, step=50)
    saver = saver_of(job_root)
    saver.epoch = 1
    saver.save(20, ARRAYS)
    _, found = run_json("ls", job_root)
    assert [(v["epoch"], v["step"]) for v in found["job_roots"][0]["versions"]] == [(1, 20), (0, 50)]


def test_looking_changes_nothing(job_root, run):
    saved(job_root, step=1)
    crashed(job_root, 2)
    Path(job_root, "step-3_ckpt").write_text("a file in a container's place")

    def everything():
        return {str(path): path.stat().st_mtime_ns for path in Path(job_root).rglob("*")}

    before = everything()
    assert run("ls", job_root)[0] == 0
    assert run("inspect", f"{job_root}/step-2_ckpt")[0] == 0
    assert run("verify", job_root)[0] == 0
    assert run("inspect", f"{job_root}/step-3_ckpt")[0] == 2
    assert everything() == before


def test_what_another_user_may_not_read_is_unreadable_and_hides_nothing_else(job_root, run_json):
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    saved(job_root, step=1)
    saved(str(Path(job_root).parent / "other"), step=2)
    for path in (Path(job_root).parent, Path(job_root), Path(job_root).parent / "other"):
        path.chmod(0o755)
    os.chmod(f"{Path(job_root).parent}/other/step-2_ckpt", 0o755)
    os.seteuid(65534)
    try:
        code, found = run_json("ls", Path(job_root).parent)
    finally:
        os.seteuid(0)
    states = {root["path"]: [version["state"] for version in root["versions"]] for root in found["job_roots"]}
    assert code == 0
    assert states[job_root] == ["unreadable"] and len(states) == 2


def test_ls_does_not_depend_on_the_settings(job_root, run, monkeypatch):
    container = saved(job_root)
    monkeypatch.setenv("FLASHPOINT_KEEP", "many")
    for args in (["ls", job_root], ["status", job_root], ["inspect", container], ["verify", container]):
        assert run(*args)[0] == 0
