"""Copies of what a stock `CheckpointManager` saves, on other nodes: what they give back when nodes are lost."""

from __future__ import annotations

import contextlib
import os
import signal
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
from tests.jax.nodes import Cluster, heard, until

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
        if saves_on:
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
