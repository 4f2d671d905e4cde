import os
import shutil
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest

from flashpoint.storage import claim
from tests.core.cli.roots import crashed, rows, saved, saved_by_two_ranks, until
from tests.core.replication.nodes import Nodes


def with_racks(nodes, names):
    membership = nodes.membership()
    members = (
        msgspec.structs.replace(one, domain=name) for one, name in zip(membership.members, names, strict=True)
    )
    return msgspec.structs.replace(membership, members=tuple(members))


@pytest.fixture
def four_nodes():
    """Two racks of two nodes, one copy of everything, an agent that can be killed on node 2."""
    with Nodes(4, processes=[2], copies=1, keep=2) as nodes:
        nodes.start(configure=False)
        nodes.configure(with_racks(nodes, ["a", "a", "b", "b"]))
        yield nodes


def loss(report, kind, name):
    return next(one for one in report["losses"] if (one["kind"], one["name"]) == (kind, name))


def test_status_of_a_healthy_job_says_that_no_node_and_no_rack_is_missed(four_nodes, run, run_json):
    four_nodes.save(80)
    four_nodes.replicated(80)
    root = four_nodes[0].job_root
    code, report = run_json("status", root)
    assert (code, report["agent"]["state"], report["this_node"]) == (0, "alive", 0)
    assert [node["agent"] for node in report["nodes"]] == ["here", "alive", "alive", "alive"]
    (version,) = report["versions"]
    assert version["standing"] == "replicated"
    assert version["holders"] == [{"nodes": [0, 2], "objects": 2}, {"nodes": [1, 3], "objects": 2}]
    on_memory = {"tier": "memory", "epoch": 1, "step": 80, "steps_back": 0}
    assert all(one["goes_on_from"] == on_memory for one in report["losses"])
    assert {one["kind"] for one in report["losses"]} == {"node", "domain"}
    code, out, err = run("status", root)
    assert (code, err) == (0, "")
    shown = rows(out)
    assert "epoch 1: 4 ranks on 4 nodes, copies=1, keep=2; this is node 0 in a" in shown
    assert any(row.startswith("80 1 complete replicated") and row.endswith("2 nodes each") for row in shown)
    assert "any one of nodes 0-3 step 80, memory 0" in shown
    assert "any one of 2 domains (a, b) step 80, memory 0" in shown
    assert "all nodes nothing: from scratch -" in shown


def test_status_tells_what_a_silent_node_costs(four_nodes, run_json, run):
    four_nodes.save(80)
    four_nodes.replicated(80)
    four_nodes[2].kill()
    four_nodes.save(100)
    root = four_nodes[0].job_root
    until(lambda: run_json("status", root)[1]["nodes"][2]["agent"] == "silent")
    until(lambda: {"nodes": [0], "objects": 1} in run_json("status", root)[1]["versions"][0]["holders"])
    code, report = run_json("status", root)
    assert code == 0
    # Node 0's copies are to lie on node 2: they do not, and node 2's own are not copied.
    assert loss(report, "node", "0")["goes_on_from"]["step"] == 80
    assert loss(report, "silent", "")["nodes"] == [2]
    assert loss(report, "silent", "")["lost_objects"][0] == {"epoch": 1, "step": 100, "objects": 1}
    assert report["lag_steps"] == {"replicated": 20, "drained": None}
    assert report["recovery"]["after_a_crash"]["step"] == 100
    assert report["recovery"]["after_a_node"] == {"tier": "memory", "epoch": 1, "step": 80, "steps_back": 20}
    out = run("status", root)[1]
    assert "copies lag: 20 steps" in out and "all that is silent (node 2)" in out


def test_status_waits_no_longer_than_it_is_told_for_an_agent_that_hangs(run):
    with Nodes(1, processes=[0], copies=0) as nodes:
        nodes.start()
        nodes.save(80)
        nodes[0].signal(signal.SIGSTOP)
        try:
            code, out, err = run("status", nodes[0].job_root, "--timeout-s", "0.5")
        finally:
            nodes[0].signal(signal.SIGCONT)
        assert (code, err) == (5, "")
        assert "agent silent" in out and "did not answer Identify within 0.5 s" in out
        assert f"kill -9 {nodes[0].pid}; flashpoint agent {nodes[0].job_root} &" in out
        assert any(row.startswith("80 1 complete - ") for row in rows(out))


def test_status_of_a_dead_agent_says_so_and_what_to_do_and_shows_the_folder(four_nodes, run, run_json):
    four_nodes.save(80)
    four_nodes.replicated(80)
    four_nodes[2].kill()
    root = four_nodes[2].job_root
    code, out, err = run("status", root)
    assert (code, err) == (5, "")
    assert "agent dead: nothing is copied, drained or served to other nodes" in out
    assert f"flashpoint agent {root} &" in out
    assert "what other nodes hold is for their agents to say" in out
    code, report = run_json("status", root)
    assert (code, report["agent"]["state"], report["losses"]) == (5, "dead", [])
    assert report["nodes"][2]["agent"] == "dead" and report["nodes"][0]["port"] > 0
    assert [version["objects_here"] for version in report["versions"]] == [2]


def test_status_counts_on_storage_where_memory_would_have_nothing(run_json, run, tmp_path):
    with Nodes(2, copies=0, keep=2, storage=f"file://{tmp_path}") as nodes:
        nodes.start()
        claim.claim(nodes.config, nodes[0].job_root, nodes.keys.job, nodes.epoch, None)
        nodes.save(10)
        until(lambda: nodes[0].client.inquire().storage.step == 10)
        tmp_path.joinpath(".flashpoint").unlink()  # no further drain comes to an end
        nodes.save(30)
        until(lambda: nodes[0].client.inquire().storage.error)
        code, report = run_json("status", nodes[0].job_root)
        assert code == 0
        on_storage = {"tier": "storage", "epoch": 1, "step": 10, "steps_back": 20}
        assert loss(report, "node", "1")["goes_on_from"] == on_storage
        assert report["recovery"]["after_all_nodes"] == on_storage
        assert report["storage"]["drained_step"] == 10 and ".flashpoint is gone" in report["storage"]["error"]
        out = run("status", nodes[0].job_root)[1]
        assert "storage: step 10 is drained, 20 steps behind" in out and "the last drain failed" in out


def test_status_of_a_job_without_an_agent_is_fine(job_root, run, run_json):
    saved_by_two_ranks(job_root, np.zeros((4, 2), np.float32))
    crashed(job_root, 101)
    code, out, err = run("status", job_root)
    assert (code, err) == (0, "")
    assert "no agent: this job's versions have no copies on other nodes, nor in storage" in out
    assert any(row.startswith("101 - dirty") for row in rows(out))
    code, report = run_json("status", job_root)
    assert (report["agent"]["state"], report["nodes"], report["losses"]) == ("none", [], [])
    assert report["recovery"]["after_a_crash"]["step"] == 100


def test_status_exits_with_1_where_a_version_is_corrupt(job_root, run):
    Path(saved(job_root), ".metadata").write_bytes(b"{}\n")
    code, out, _ = run("status", job_root)
    assert code == 1
    assert "corrupt" in out


def test_an_agent_folder_that_others_may_enter_is_told_and_not_used(job_root, run):
    saved(job_root)
    os.mkdir(f"{job_root}/.agent", 0o700)
    os.chmod(f"{job_root}/.agent", 0o755)
    code, out, _ = run("status", job_root)
    assert code == 5
    assert "delete it" in out


def test_status_survives_a_job_root_that_goes_while_it_looks(job_root, run, monkeypatch):
    from flashpoint.cli import agents

    saved(job_root)
    monkeypatch.setattr(agents, "ask", lambda *_: shutil.rmtree(job_root) or agents.Heard("none"))
    code, out, err = run("status", job_root)
    assert (code, out) == (2, "")
    assert err == f"flashpoint status: {job_root}: No such file or directory\n"


def test_status_of_what_is_no_job_root_says_what_to_give(job_root, run):
    container = saved(job_root)
    code, _, err = run("status", container)
    assert (code, err) == (
        2,
        f"flashpoint status: {container} is one version: give its job root, {job_root}\n",
    )
    code, _, err = run("status", Path(job_root).parent)
    assert code == 2
    assert err.endswith("is no job root: `flashpoint ls` lists those of this user\n")


def test_inspect_names_the_nodes_that_hold_each_object(four_nodes, run, run_json):
    four_nodes.save(80)
    four_nodes.replicated(80)
    container = f"{four_nodes[0].job_root}/step-80_ckpt"
    held = [obj["holders"] for obj in run_json("inspect", container)[1]["objects"]]
    assert held == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert any("0, 2 rank00000-0.safetensors" in row for row in rows(run("inspect", container)[1]))
