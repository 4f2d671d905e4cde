"""Copies of what a stock `CheckpointManager` saves, on other nodes: what they give back when nodes are lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import flashpoint_jax
from flashpoint.errors import FlashpointError
from flashpoint_jax import mirror, session
from tests.jax import trees
from tests.jax.nodes import REPOSITORY, Cluster, heard, until
from tests.jax.workers import Workers

Args = ocp.args
VALUE = np.random.default_rng(0).normal(size=(48, 16)).astype(np.float32)
REPLICATED_S = 60.0


def options(per_host: bool = True) -> Any:
    return ocp.options.MultiprocessingOptions(primary_host=None if per_host else 0)


def manager(root: str, settings: Any, *, per_host: bool = True, **more: Any) -> Any:
    return ocp.CheckpointManager(
        root,
        options=ocp.CheckpointManagerOptions(
            **{"max_to_keep": 2, **more},
            multiprocessing_options=options(per_host),
            enable_per_process_directory_creation=per_host,
        ),
        handler_registry=flashpoint_jax.registry(multiprocessing_options=options(per_host), **settings),
    )


def state(step: int) -> dict[str, Any]:
    """Arrays over all devices of the job, sharded and not, keys, numpy, scalars."""
    over = trees.mesh(len(jax.devices()), names=("x",))
    key = jax.jit(lambda: jax.random.key(step), out_shardings=NamedSharding(over, PartitionSpec()))()
    return {
        "rows": trees.sharded(VALUE + step, over, "x"),
        "columns": trees.sharded((VALUE * step).T.repeat(3, 0), over, "x").astype(jnp.bfloat16),
        "replicated": trees.sharded(VALUE[:5] - step, over),
        "key": key,
        "n": np.arange(3) + step,
        "step": step,
    }


def expect(found: Any, step: int) -> None:
    trees.assert_equal(found, state(step))


def save(root: str, settings: Any, steps: list[int], waits: bool = True, **more: Any) -> None:
    with manager(root, settings, **more) as m:
        for step in steps:
            m.save(step, args=Args.StandardSave(state(step), custom_metadata={"step": step}))
            m.wait_until_finished()
        if waits:
            assert flashpoint_jax.wait_until_replicated(m, steps[-1], timeout_s=REPLICATED_S)
            newest = flashpoint_jax.status(m)[0]
            assert (newest.step, newest.state) == (steps[-1], "replicated")
            assert all(len(nodes) >= 2 for nodes in newest.holders.values())


def recover(
    root: str,
    settings: Any,
    *,
    saves_on: bool = True,
    by_root: bool = False,
    fallback: Any = None,
    **more: Any,
) -> dict[str, Any]:
    """Recover, have the stock manager see and restore that step too, and save the next one."""
    with heard() as warnings, contextlib.ExitStack() as stack:
        m = None if by_root else stack.enter_context(manager(root, settings, **more))
        abstract = trees.abstract(state(0))
        if by_root:
            found = flashpoint_jax.recover(root, abstract, fallback=fallback, **settings)
        else:
            found = flashpoint_jax.recover(m, abstract, fallback=fallback)
        m = m or stack.enter_context(manager(root, settings, **more))
        answer: dict[str, Any] = {"warnings": "\n".join(warnings), "steps": list(m.all_steps())}
        if found is None:
            return {**answer, "step": None, "tier": None}
        assert found.step is not None
        expect(found.state, found.step)
        if found.tier != "storage":
            assert m.latest_step() == found.step
            expect(m.restore(found.step, args=Args.StandardRestore(abstract)), found.step)
            assert m.item_metadata(found.step).custom_metadata == {"step": found.step}
        if not saves_on:
            # No save is needed for it to have its copies again, wherever those were lost.
            assert flashpoint_jax.wait_until_replicated(m, found.step, timeout_s=REPLICATED_S)
        else:
            following = found.step + 1
            m.save(following, args=Args.StandardSave(state(following), custom_metadata={"step": following}))
            m.wait_until_finished()
            assert m.latest_step() == following
            assert flashpoint_jax.wait_until_replicated(m, following, timeout_s=REPLICATED_S)
        return {**answer, "step": found.step, "tier": found.tier}


def files_of(root: str, step: int) -> dict[str, bytes]:
    """Everything in a step's item, but for what tells times."""
    folder = Path(root, str(step), "default")
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "commit_success.txt"
    }


# ---- nodes are lost -------------------------------------------------------------------------------


@pytest.mark.fault(6)
def test_a_lost_node_has_all_again_from_its_peers() -> None:
    with Cluster(3) as cluster:
        cluster.run(save, [1, 2, 3])
        until(lambda: cluster.mirrored_steps() == [{3}] * 3, "older versions are given up")
        before = files_of(cluster.roots[1], 3)
        assert before.keys() >= {"_METADATA", "_sharding", "array_metadatas/process_1", "manifest.ocdbt"}
        cluster.lose(1)
        for answer in cluster.run(recover):
            assert (answer["step"], answer["tier"], answer["warnings"]) == (3, "peer", "")
        assert files_of(cluster.roots[1], 3) == before
        for objects, (own, other) in zip(cluster.mirrored(4), ((0, 2), (1, 0), (2, 1)), strict=True):
            assert objects == {f"rank{own:05d}-0.safetensors", f"rank{other:05d}-0.safetensors"}
        cluster.lose(0)  # the one that leads
        for answer in cluster.run(recover, timeout_s=200):
            assert (answer["step"], answer["tier"], answer["warnings"]) == (4, "peer", "")
        cluster.run(end)
        cluster.await_no_agents()


def end(root: str, settings: Any) -> None:
    mirror.close_mirrors()


@pytest.mark.fault(7)
def test_what_is_not_replicated_is_lost_with_its_node_and_the_one_before_comes_back() -> None:
    """Orbax has deleted the one before by then, and keeps on the survivor the one that nobody can complete."""
    with Cluster(2) as cluster:
        cluster.run(save, [1])
        (pid,) = cluster.agents(1)
        os.kill(pid, signal.SIGSTOP)
        cluster.run(save, [2], waits=False, max_to_keep=1)
        assert not Path(cluster.roots[1], "1").exists()
        cluster.lose(0)
        os.kill(pid, signal.SIGCONT)
        answers = cluster.run(recover)
        for answer in answers:
            assert (answer["step"], answer["tier"], answer["steps"]) == (1, "peer", [1])
            assert "step 2 is not whole any more" in answer["warnings"]
        assert "step 2 is removed" in answers[1]["warnings"]
        cluster.kill()
        for answer in cluster.run(recover):
            assert (answer["step"], answer["tier"]) == (2, "local")


@pytest.mark.fault(9)
def test_more_nodes_are_lost_than_there_are_copies(tmp_path: Path) -> None:
    with Cluster(3) as cluster:
        cluster.run(save, [1])
        cluster.lose(0, 2)
        for rank, answer in enumerate(cluster.run(recover)):
            assert (answer["step"], answer["steps"]) == (None, [])
            assert "more nodes were lost than there were copies" in answer["warnings"]
            assert ("step 1 is removed" in answer["warnings"]) == (rank == 1)
        assert cluster.run(fall_back, str(tmp_path)) == ["ok"] * 3


def fall_back(root: str, settings: Any, storage: str) -> str:
    """From a stock manager, from paths, from a function; then saves go on."""
    abstract = trees.abstract(state(0))
    with ocp.CheckpointManager(f"{storage}/stock") as stock:
        assert flashpoint_jax.recover(root, abstract, fallback=stock, **settings) is None
        stock.save(7, args=Args.StandardSave(state(7)))
        stock.wait_until_finished()
        stock.reload()
        for fallback in (stock, f"{storage}/stock", f"{storage}/stock/7", f"{storage}/stock/7/default"):
            found = flashpoint_jax.recover(root, abstract, fallback=fallback, **settings)
            assert found is not None
            assert (found.step, found.tier) == (7, "storage")
            expect(found.state, 7)
    found = flashpoint_jax.recover(root, abstract, fallback=lambda _: (5, "own"), **settings)
    assert found is not None
    assert (found.step, found.state) == (5, "own")
    with pytest.raises(FlashpointError, match="different steps"):
        flashpoint_jax.recover(root, abstract, fallback=lambda _: (jax.process_index(), 0), **settings)
    save(root, settings, [8])
    return "ok"


@pytest.mark.fault(40)
def test_fewer_processes_go_on_from_what_more_have_saved() -> None:
    with Cluster(3) as cluster:
        cluster.run(save, [1, 2])
        cluster.lose(1)
        del cluster.roots[1]
        for answer in cluster.run(recover):
            assert (answer["step"], answer["tier"]) == (2, "peer")
        cluster.kill()
        for answer in cluster.run(recover, timeout_s=200):
            assert (answer["step"], answer["tier"]) == (3, "local")


@pytest.mark.fault(40)
def test_processes_may_find_themselves_on_other_nodes() -> None:
    with Cluster(3) as cluster:
        cluster.run(save, [1])
        cluster.kill()
        cluster.roots.insert(0, cluster.roots.pop())
        for answer in cluster.run(recover):
            assert (answer["step"], answer["tier"]) == (1, "peer")


# ---- processes are killed -------------------------------------------------------------------------


def die_before_rename(root: str, settings: Any) -> None:
    session.Session.committed = lambda *args: os._exit(9)  # type: ignore[method-assign]
    save(root, settings, [2])


def die_before_publication(root: str, settings: Any) -> None:
    mirror.Mirror._publish_together = lambda *args: None  # type: ignore[method-assign]
    save(root, settings, [3], waits=False)


def test_the_rename_is_what_counts() -> None:
    with Cluster(2) as cluster:
        cluster.run(save, [1])
        cluster.send(die_before_rename)
        cluster.await_deaths()
        assert not any(Path(root, "2").exists() for root in cluster.roots)
        for answer in cluster.run(recover, saves_on=False):
            assert (answer["step"], answer["tier"], answer["steps"]) == (1, "local", [1])
        cluster.run(die_before_publication)
        assert cluster.mirrored(3) == [set(), set()]
        cluster.kill()
        for answer in cluster.run(recover):
            assert (answer["step"], answer["tier"], answer["steps"][-1]) == (3, "local", 3)


# ---- deletions --------------------------------------------------------------------------------------


def delete(root: str, settings: Any, step: int) -> None:
    with manager(root, settings) as m:
        m.delete(step)


def test_what_the_user_deleted_does_not_come_back() -> None:
    with Cluster(2) as cluster:
        cluster.run(save, [1, 2])
        until(lambda: cluster.mirrored_steps() == [{2}] * 2, "the older version is given up")
        cluster.run(delete, 2)
        cluster.kill()
        for answer in cluster.run(recover, saves_on=False, by_root=True):
            assert (answer["step"], answer["tier"], answer["warnings"]) == (1, "local", "")
        assert cluster.mirrored_steps() == [{1}] * 2
        cluster.run(delete, 1)
        cluster.kill()
        for answer in cluster.run(recover):
            assert (answer["step"], answer["steps"]) == (None, [])


def save_many(root: str, settings: Any, first: int, last: int) -> None:
    big = trees.sharded(np.ones((512, 1024), np.float32), trees.mesh(len(jax.devices()), names=("x",)), "x")
    with manager(root, settings, max_to_keep=1) as m:
        for step in range(first, last + 1):
            m.save(step, args=Args.StandardSave({"big": big}))
        m.wait_until_finished()
        assert flashpoint_jax.wait_until_replicated(m, last, timeout_s=REPLICATED_S)


def test_memory_is_bounded_however_many_steps_are_saved() -> None:
    part = 512 * 1024 * 4 // 2  # of each node
    with Cluster(2) as cluster:
        for first, last in ((1, 15), (16, 30)):
            cluster.run(save_many, first, last)
            until(lambda last=last: cluster.mirrored_steps() == [{last}] * 2, "older versions are given up")
            # Own and copies: each a replicated version, one on its way, one behind it, one that is written, and two
            # to spare. Fifteen saves would hold thirty.
            used = max(cluster.nbytes(0), cluster.nbytes(1))
            assert used <= 13 * part, used
        for root in cluster.roots:
            links = [os.stat(path).st_nlink for path in Path(root, ".pool").glob("*.buf")]
            assert sorted(links)[-2:] == [1, 3], "in the pool, in Orbax's step and in the mirror: one version"


# ---- several items, corrupt copies ------------------------------------------------------------------


RANKED: dict[str, Any] = {
    "best_fn": lambda metrics: metrics["loss"],
    "step_name_format": flashpoint_jax.StepNameFormat(),
    "max_to_keep": 5,
}


def save_two(root: str, settings: Any, steps: list[int]) -> None:
    with manager(root, settings, **RANKED) as m:
        for step in steps:
            items = {"model": Args.StandardSave(state(step)), "average": Args.PyTreeSave(state(step + 100))}
            m.save(step, args=Args.Composite(**items), metrics={"loss": 1.0 / step})
            m.wait_until_finished()
        for item in ("model", "average"):
            assert flashpoint_jax.wait_until_replicated(m, steps[-1], item=item, timeout_s=REPLICATED_S)


def recover_two(root: str, settings: Any) -> tuple[int | None, str]:
    abstract = {"model": trees.abstract(state(0)), "average": trees.abstract(state(0))}
    with manager(root, settings, **RANKED) as m:
        found = flashpoint_jax.recover(m, abstract, item=("model", "average"))
        assert found is not None
        assert found.step is not None
        expect(found.state["model"], found.step)
        expect(found.state["average"], found.step + 100)
        assert m.latest_step() == found.step
        assert m.metrics(found.step) == {"loss": 1.0 / found.step}
        loaded = m.restore(
            found.step,
            args=Args.Composite(**{name: Args.StandardRestore(tree) for name, tree in abstract.items()}),
        )
        expect(loaded["average"], found.step + 100)
        return found.step, found.tier


def flip_a_byte(root: str, step: int) -> None:
    (path,) = Path(root, str(step), "default").glob("rank*")
    with path.open("r+b") as file:
        file.seek(-200, os.SEEK_END)
        byte = file.read(1)
        file.seek(-200, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))


def test_several_items_come_back_of_one_step() -> None:
    with Cluster(2) as cluster:
        cluster.run(save_two, [1, 2])
        cluster.lose(1)
        assert cluster.run(recover_two) == [(2, "peer")] * 2


@pytest.mark.fault(20)
def test_a_corrupt_object_is_replaced_by_a_peers_copy_in_orbax_s_folder_too() -> None:
    with Cluster(2) as cluster:
        cluster.run(save, [1])
        cluster.kill()
        flip_a_byte(cluster.roots[0], 1)
        for answer in cluster.run(recover):
            assert (answer["step"], answer["tier"]) == (1, "peer")


# ---- one node ---------------------------------------------------------------------------------------


@pytest.fixture
def no_mirror_is_left() -> Iterator[None]:
    yield
    mirror.close_mirrors()


@pytest.mark.usefixtures("no_mirror_is_left")
def test_one_node_has_no_peers_and_says_so_once(job_root: str) -> None:
    settings = {"copies": 1, "agent": "embedded"}
    with heard() as warnings, manager(job_root, settings, per_host=False) as m:
        for step in (1, 2):
            m.save(step, args=Args.StandardSave(state(step)))
        m.wait_until_finished()
        assert flashpoint_jax.wait_until_replicated(m, 2, timeout_s=REPLICATED_S)
        found = flashpoint_jax.recover(m, trees.abstract(state(0)))
        assert found is not None
        assert (found.step, found.tier) == (2, "local")
        expect(found.state, 2)
    assert [text for text in warnings if "copies=1 wants 2 nodes" in text] == warnings


def share_a_root(root: str) -> tuple[int | None, str, list[int]]:
    settings = {"copies": 1, "agent_idle_s": 20.0, "commit_timeout_s": 30.0}
    with manager(root, settings, per_host=False) as m:
        for step in (1, 2, 3):
            m.save(step, args=Args.StandardSave(state(step)))
        m.wait_until_finished()
        assert flashpoint_jax.wait_until_replicated(m, 3, timeout_s=REPLICATED_S)
        found = flashpoint_jax.recover(m, trees.abstract(state(0)))
        assert found is not None
        expect(found.state, 3)
        mirror.close_mirrors(root)
        return found.step, found.tier, list(m.all_steps())


def test_two_processes_on_one_node_share_a_root(workers: Workers, job_root: str) -> None:
    assert workers.run(share_a_root, job_root) == [(3, "local", [2, 3])] * 2


def local_only(root: str) -> tuple[int | None, str, list[int]]:
    with manager(root, {"commit_timeout_s": 30.0}, per_host=False, max_to_keep=3) as m:
        assert flashpoint_jax.recover(m, trees.abstract(state(0))) is None
        for step in (1, 2, 3):
            m.save(step, args=Args.StandardSave(state(step)))
        m.wait_until_finished()
        if jax.process_index() == 0:
            flip_a_byte_of_rank(root, 3)
        found = flashpoint_jax.recover(m, trees.abstract(state(0)))
        assert found is not None
        assert found.step is not None
        expect(found.state, found.step)
        return found.step, found.tier, list(m.all_steps())


def flip_a_byte_of_rank(root: str, step: int) -> None:
    path = Path(root, str(step), "default", "rank00001-0.safetensors")
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    with path.open("r+b") as file:
        file.write(data)


def test_without_copies_it_recovers_what_all_processes_can_use(workers: Workers, job_root: str) -> None:
    assert workers.run(local_only, job_root) == [(2, "local", [1, 2])] * 2
    assert not Path(job_root, ".flashpoint").exists()


PROGRAM = """
import sys, jax.numpy as jnp, orbax.checkpoint as ocp, flashpoint_jax
m = ocp.CheckpointManager(sys.argv[1], handler_registry=flashpoint_jax.registry(copies=1))
m.save(1, args=ocp.args.StandardSave({"w": jnp.ones(1 << 10)}))
m.close()
"""


def test_a_program_that_ends_releases_its_agent(job_root: str) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, job_root], cwd=REPOSITORY, check=True, timeout=120)
    assert Path(job_root, ".flashpoint", "default", "step-1_ckpt", ".metadata").exists()
    lock = Path(job_root, ".flashpoint", "default", ".agent", "lock")
    pid = int(lock.read_text().split()[1])
    until(lambda: not Path(f"/proc/{pid}").exists(), "the agent ends")
