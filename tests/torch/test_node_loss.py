"""Nodes that are lost with their memory: what the copies on other nodes give back, and what is said if they cannot."""

import gc
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

import flashpoint_torch as fpt
from flashpoint.errors import RecoveryError
from flashpoint.replication.placement import Slot, place
from tests.torch import states
from tests.torch.faults import JOIN_S, report
from tests.torch.nodes import (
    KIB,
    Cluster,
    blank_state,
    last_of,
    lines_of,
    node_state,
    recover,
    train,
    wait_for,
)

SETTLE_S = 20.0  # for what agents do by themselves
SAVES = 3


def until(condition: Callable[[], Any], what: str, cluster: Cluster, timeout_s: float = SETTLE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}\n{cluster.agent_logs()}"
        time.sleep(0.005)


def placed(cluster: Cluster) -> list[set[int]]:
    """For each node, the ranks whose objects are to lie there, by the placement."""
    holders = place([Slot(node.index) for node in cluster.nodes], cluster.settings["copies"])
    return [
        {
            rank
            for other in cluster.nodes
            if node.index in (other.index, *holders[other.index])
            for rank in other.ranks
        }
        for node in cluster.nodes
    ]


def held(cluster: Cluster, step: int) -> list[set[int]]:
    """For each node, the ranks both of whose objects (tensors, and what is pickled) lie there."""
    return [
        {
            rank
            for rank in range(cluster.world_size)
            if {f"rank{rank:05}-{n}.safetensors" for n in (0, 1)} <= names
        }
        for names in cluster.objects(step)
    ]


def save_and_idle(cluster: Cluster, log: Path, **kwargs: Any) -> None:
    """Recover, save some steps, each replicated, and leave the ranks at rest."""
    cluster.start(train, str(log), lingers=True, **{"saves": SAVES, **kwargs})
    wait_for(str(log), cluster, "idle")


def recovered(cluster: Cluster, log: Path) -> list[list[str]]:
    """``STEP TIER`` as every rank's log has it; `train` has compared every bit by then."""
    return [line[1:] for lines in lines_of(str(log), cluster) for line in lines if line[0] == "recovered"]


# ---- losing nodes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "ranks", "copies"),
    [(2, 1, 1), (2, 2, 1), (3, 1, 1), (3, (2, 1, 2), 2), (4, 1, 2), (5, 2, 1), (8, 1, 1)],
)
@pytest.mark.fault(6, 8)
def test_what_was_lost_comes_back_from_peers(tmp_path: Path, nodes: int, ranks: Any, copies: int) -> None:
    per_node = ranks if isinstance(ranks, int) else list(ranks)
    losses = list(itertools.combinations(range(nodes), copies))
    losses = random.Random(nodes).sample(losses, min(len(losses), 4 if nodes < 5 else 2))
    with Cluster(nodes, ranks_per_node=per_node, copies=copies, kib=8) as cluster:
        save_and_idle(cluster, tmp_path / "first")
        expected, step = placed(cluster), SAVES
        for number, lost in enumerate(losses):
            cluster.lose(*lost)
            assert all(not cluster.objects(step)[node] for node in lost)
            log = tmp_path / f"lost-{number}"
            # Every other time without another save: the next loss may come before one.
            save_and_idle(cluster, log, saves=number % 2)
            assert recovered(cluster, log) == [[str(step), "peer"]] * cluster.world_size
            step += number % 2
            until(lambda step=step: held(cluster, step) == expected, f"{expected} is held of {step}", cluster)


@pytest.mark.fault(6)
def test_every_node_may_be_replaced_one_after_the_other(tmp_path: Path) -> None:
    with Cluster(3) as cluster:
        save_and_idle(cluster, tmp_path / "first")
        for node in (0, 1, 2):
            cluster.lose(node)
            answers = cluster.run(recover, replicates=True)
            assert all(answer["exact"] and answer["tier"] == "peer" for answer in answers), answers
            assert {answer["step"] for answer in answers} == {SAVES + node}


def test_a_job_of_one_node_has_no_peers_and_loses_all(tmp_path: Path) -> None:
    with Cluster(1) as cluster:
        save_and_idle(cluster, tmp_path / "log")
        cluster.kill_ranks()
        (answer,) = cluster.run(recover)
        assert (answer["step"], answer["tier"], answer["exact"]) == (SAVES, "local", True)
        assert "copies=1 wants 2 nodes" in "".join(answer["warnings"])
        cluster.lose(0)
        (answer,) = cluster.run(recover, fallback=77)
        assert (answer["step"], answer["tier"], answer["exact"]) == (77, "storage", True)


@pytest.mark.fault(9, "E")
def test_more_nodes_lost_than_copies(tmp_path: Path) -> None:
    with Cluster(3, ranks_per_node=2) as cluster:
        save_and_idle(cluster, tmp_path / "log")
        cluster.lose(0, 1)
        for answer in cluster.run(recover):
            assert (answer["step"], answer["tier"]) == (0, None)
            assert answer["exact"], "a state was touched that could not be loaded"
            said = "\n".join(answer["warnings"])
            assert f"step {SAVES} is not whole any more" in said
            assert "more nodes were lost than there were copies" in said
        for answer in cluster.run(recover, fallback=77):
            assert (answer["step"], answer["tier"], answer["exact"]) == (77, "storage", True)
            assert "falling back to storage" in "\n".join(answer["warnings"])


def test_training_begins_anew_where_all_was_lost(tmp_path: Path) -> None:
    """What cannot be loaded any more stands in no new version's way, not even in that of its own step."""
    with Cluster(2) as cluster:
        save_and_idle(cluster, tmp_path / "log", saves=1)
        for node in cluster.nodes:
            for path in Path(node.job_root).glob("step-*_ckpt/rank00001-0.safetensors"):
                path.unlink()
        cluster.kill_ranks()
        save_and_idle(cluster, tmp_path / "again")
        assert recovered(cluster, tmp_path / "again") == [["0"]] * 2
        until(lambda: held(cluster, SAVES) == placed(cluster), "the new versions are replicated", cluster)


def store(rank: int, job_root: str, path: str, **settings: Any) -> None:
    dcp.save({"weights": node_state(5, rank)["model"]}, checkpoint_id=path)


def recover_weights(rank: int, job_root: str, path: str, **settings: Any) -> tuple[Any, bool]:
    with fpt.init(job_root, **settings) as fp:
        state = {"weights": blank_state()["model"]}
        found = fp.recover(state, fallback=path)
        assert found is not None
        return (found.step, found.tier), states.same(state["weights"], node_state(5, rank)["model"])


def test_a_fallback_may_be_the_path_of_a_dcp_checkpoint(tmp_path: Path) -> None:
    path = str(tmp_path / "iter_0000005")
    with Cluster(1) as cluster:
        cluster.run(store, path)
        assert cluster.run(recover_weights, path) == [((5, "storage"), True)]


# ---- at any moment --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.fault(7)),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 5)),
    ],
)
def test_a_node_is_lost_while_replication_is_under_way(tmp_path: Path, seed: int) -> None:
    """At 20 random moments for each seed: the newest version that was replicated loads, or a newer one."""
    rng, under_way, lost_steps = random.Random(seed), 0, 0
    with Cluster(3, kib=1024) as cluster:
        newest = begun = 0
        for number in range(20):
            log = str(tmp_path / f"log-{number}")
            cluster.start(train, log, kib=1024)
            wait_for(log, cluster, "replicated", times=rng.randint(1, 4))
            time.sleep(rng.uniform(0, 0.06))
            cluster.lose(rng.randrange(3))
            told = lines_of(log, cluster)
            for lines in told:
                step = int(next(line[1] for line in lines if line[0] == "recovered"))
                assert newest <= step <= begun, f"step {newest} was replicated, step {step} came back"
            lost_steps += begun - int(told[0][1][1])
            newest = max(last_of(lines, "replicated") for lines in told)
            begun = max(last_of(lines, "saving") for lines in told)
            under_way += max(last_of(lines, "complete") for lines in told) > newest
        answers = cluster.run(recover, kib=1024)
        assert all(answer["exact"] for answer in answers), answers
        assert newest <= answers[0]["step"] <= begun
        report(
            "lost while replicating:", rounds=20, between_complete_and_replicated=under_way, steps=lost_steps
        )
        assert under_way > 0


def try_to_recover(rank: int, job_root: str, **settings: Any) -> str:
    """What a fresh process is told where nothing can be loaded; its state is as it was."""
    with fpt.init(job_root, **settings) as fp:
        state = blank_state()
        for fallback in (None, lambda _: None):  # without one, and with one that has nothing either
            with pytest.raises(RecoveryError) as failure:
                fp.recover(state, fallback=fallback)
        assert states.same(state, blank_state())
        return str(failure.value)


@pytest.mark.fault(14)
def test_without_room_for_what_was_lost_nobody_starts_from_scratch(tmp_path: Path) -> None:
    with Cluster(3) as cluster:
        save_and_idle(cluster, tmp_path / "log")
        cluster.lose(0)
        for text in cluster.run(try_to_recover, memory_limit_bytes=KIB):
            assert f"steps [{SAVES}] are below" in text
        for index in range(3):  # whose agents have that limit
            cluster.nodes[index].kill_agent()
        for answer in cluster.run(recover):
            assert (answer["step"], answer["tier"], answer["exact"]) == (SAVES, "peer", True)


# ---- the agent ------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["complete", "replicated"])
@pytest.mark.fault(4, "F")
def test_a_killed_agent_is_started_again_and_catches_up(tmp_path: Path, moment: str) -> None:
    log = str(tmp_path / "log")
    with Cluster(3) as cluster:
        cluster.start(train, log, waits_for=moment)
        for node in (cluster.nodes[0], cluster.nodes[2]):
            wait_for(log, cluster, moment, times=3)
            assert node.kill_agent() == 1
            before = [last_of(lines, moment) for lines in lines_of(log, cluster)]
            until(
                lambda before=before: all(
                    last_of(lines, moment) >= step + 5
                    for lines, step in zip(lines_of(log, cluster), before, strict=True)
                ),
                f"every rank goes on from {before}",
                cluster,
            )
            until(lambda node=node: len(node.agents()) == 1, f"node {node.index} has an agent again", cluster)
        assert not any(line[0] == "failed" for lines in lines_of(log, cluster) for line in lines)
        cluster.kill_ranks()
        save_and_idle(cluster, tmp_path / "after", saves=1)
        step = last_of(lines_of(str(tmp_path / "after"), cluster)[0], "replicated")
        assert held(cluster, step) == placed(cluster)


@pytest.mark.fault(11)
def test_training_goes_on_while_an_agent_hangs(tmp_path: Path) -> None:
    """A save may be skipped while the one before it waits for the agent's answer, but that is all."""
    log = str(tmp_path / "log")
    with Cluster(2, overlap_wait_s=0.5) as cluster:
        cluster.start(train, log, waits_for="complete")
        wait_for(log, cluster, "complete", times=3)
        (pid,) = cluster.nodes[1].agents()
        os.kill(pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        begun = max(last_of(lines, "saving") for lines in lines_of(log, cluster))
        until(
            lambda: min(last_of(lines, "saving") for lines in lines_of(log, cluster)) >= begun + 4,
            "steps go on",
            cluster,
        )
        waited_s = time.monotonic() - stopped_s
        os.kill(pid, signal.SIGCONT)
        report("with an agent that hangs:", steps=4, seconds=round(waited_s, 2))
        cluster.kill_ranks()
        save_and_idle(cluster, tmp_path / "after", saves=1)
        step = last_of(lines_of(str(tmp_path / "after"), cluster)[0], "replicated")
        assert held(cluster, step) == placed(cluster)


def test_a_job_that_ends_leaves_one_version_and_no_agent(tmp_path: Path) -> None:
    with Cluster(3) as cluster:
        for number in range(4):
            cluster.run(train, str(tmp_path / f"log-{number}"), saves=SAVES, waits_for="complete")
            cluster.await_no_agents(timeout_s=SETTLE_S)
            step = SAVES * (number + 1)
            assert cluster.containers() == [{step}] * 3, cluster.agent_logs()
            assert held(cluster, step) == placed(cluster)


# ---- retention ------------------------------------------------------------------------------------


@pytest.mark.fault(7)
def test_an_older_version_goes_only_when_the_newer_is_replicated(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    with Cluster(2) as cluster:
        cluster.start(save_when_told, log, str(tmp_path / "go"))
        wait_for(log, cluster, "replicated", times=1)
        (pid,) = cluster.nodes[1].agents()
        os.kill(pid, signal.SIGSTOP)  # what node 1 holds does not grow, and it confirms nothing
        (tmp_path / "go").touch()
        wait_for(log, cluster, "complete", times=2)
        for _ in range(20):
            time.sleep(0.05)
            assert cluster.containers() == [{1, 2}] * 2
            assert held(cluster, 1) == placed(cluster)
        os.kill(pid, signal.SIGCONT)
        wait_for(log, cluster, "replicated", times=2)
        until(lambda: cluster.containers() == [{2}] * 2, "step 1 is given up", cluster)
        assert held(cluster, 2) == placed(cluster)


def save_when_told(rank: int, job_root: str, log_path: str, go: str, **settings: Any) -> None:
    """Step 1 at once, step 2 when the file ``go`` is there; then idle."""
    from tests.torch.faults import Log

    log = Log(f"{log_path}.{rank}")
    with fpt.init(job_root, **settings) as fp:
        for step in (1, 2):
            while step == 2 and not os.path.exists(go):
                time.sleep(0.005)
            handle = fp.async_save(node_state(step, rank), step)
            for moment in ("complete", "replicated"):
                assert handle.wait(moment, timeout_s=JOIN_S), handle.error or handle.replication_error
                log.write(moment, step)
        time.sleep(JOIN_S)


# ---- for a long time ------------------------------------------------------------------------------


def cycles(rank: int, job_root: str, count: int, **settings: Any) -> list[dict[str, float]]:
    """Save, replicate, recover, ``count`` times; what the process uses, at each tenth of them."""
    used = []
    with fpt.init(job_root, **settings) as fp:
        for step in range(1, count + 1):
            handle = fp.async_save(node_state(step, rank), step)
            assert handle.wait("replicated", timeout_s=JOIN_S), handle.error or handle.replication_error
            state = blank_state()
            found = fp.recover(state)
            assert found is not None
            assert found.step == step
            assert states.same(state, node_state(step, rank))
            if step % (count // 10) == 0:
                del state
                gc.collect()
                used.append(usage(os.getpid()))
    return used


def usage(pid: int) -> dict[str, float]:
    words = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(words["Threads"]),
        "anonymous_kib": int(words["RssAnon"].split()[0]),
    }


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.soak)])
def test_cycles_leave_nothing_behind(count: int) -> None:
    agents: list[list[dict[str, float]]] = []
    nbytes: list[int] = []
    with Cluster(2) as cluster:
        workers = cluster.start(cycles, count)
        start_s = time.monotonic()
        while not all(worker.answers.poll(0.2) for worker in workers):
            assert time.monotonic() - start_s < 0.5 * count + JOIN_S
            pids = cluster.agents()
            if len(pids) == 2 and not any(worker.answers.poll() for worker in workers):
                agents.append([usage(pid) for pid in pids])
                nbytes.append(cluster.nbytes())
        seconds = time.monotonic() - start_s
        ranks = [worker.answer() for worker in workers]
        cluster.await_no_agents()
    everyone = [*ranks, *zip(*agents, strict=True)]
    for used in everyone:
        # An agent keeps what it served open for two seconds: how much that is, varies.
        for name, slack in (("fds", 24), ("threads", 2), ("anonymous_kib", 2048 + 2 * count)):
            series = [one[name] for one in used]
            early, late = series[: len(series) // 2], series[len(series) // 2 :]
            assert max(late) <= max(early) + slack, f"{name} grew over {count} cycles: {series}"
    assert max(nbytes[len(nbytes) // 2 :]) <= max(nbytes[: len(nbytes) // 2]) + KIB * 1024, nbytes
    report(
        f"{count} cycles:",
        seconds=round(seconds, 1),
        first=[used[0] for used in everyone],
        last=[used[-1] for used in everyone],
        tmpfs=[nbytes[0], nbytes[-1]],
    )
