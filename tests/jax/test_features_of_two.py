"""The features of the manager once more, with two real processes: one folder for all, and one on each host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import flashpoint_jax
from flashpoint.errors import FlashpointError
from flashpoint_jax.folder import holds_blobs
from tests.jax import trees
from tests.jax.test_manager import Iterator_, IteratorArgs
from tests.jax.test_processes import expect, manager, mesh, root_of, state
from tests.jax.workers import Workers

Args = ocp.args


def over_all(leaf: Any) -> Any:
    """An array as one of the whole job: by rows where they divide, else everywhere."""
    if not isinstance(leaf, jax.Array):
        return leaf
    host = np.asarray(leaf)
    spec = ("x",) if host.ndim and host.shape[0] % mesh().shape["x"] == 0 else ()
    return trees.sharded(host, mesh(), *spec)


def steps_kept(root: str, per_host: bool) -> None:
    options = {"max_to_keep": 2, "keep_period": 4, "save_interval_steps": 2}
    with manager(root, per_host=per_host, **options) as m:
        saved = [m.save(step, args=Args.StandardSave(state(step))) for step in range(11)]
        m.wait_until_finished()
        assert saved == [step % 2 == 0 for step in range(11)]
        assert m.all_steps() == [0, 4, 8, 10]
        assert m.latest_step() == 10
        assert not m.should_save(11)
    with manager(root, per_host=per_host, **options) as m:
        assert m.all_steps() == [0, 4, 8, 10]
        for step in m.all_steps():
            expect(m.restore(step, args=Args.StandardRestore(trees.abstract(state()))), state(step))


def best_steps(root: str, per_host: bool) -> None:
    with manager(root, per_host=per_host, max_to_keep=2, best_fn=lambda metrics: metrics["score"]) as m:
        for step, score in enumerate([1.0, 5.0, 3.0, 4.0, 0.0]):
            m.save(step, args=Args.StandardSave(state(step)), metrics={"score": score})
        m.wait_until_finished()
        assert m.best_step() == 1
        assert set(m.all_steps()) >= {1, 3}
        expect(m.restore(1, args=Args.StandardRestore(trees.abstract(state()))), state(1))


def policies(root: str, per_host: bool) -> None:
    managers = ocp.checkpoint_managers
    keeping = managers.AnyPreservationPolicy([managers.LatestN(1), managers.CustomSteps(steps=[3])])
    with manager(
        root,
        per_host=per_host,
        save_decision_policy=managers.FixedIntervalPolicy(3),
        preservation_policy=keeping,
    ) as m:
        for step in range(10):
            m.save(step, args=Args.StandardSave(state(step)))
        m.wait_until_finished()
        assert m.all_steps() == [3, 9]


def metadata(root: str, per_host: bool) -> None:
    with manager(root, per_host=per_host) as m:
        m.save(1, args=Args.StandardSave(state(1), custom_metadata={"lr": 0.1}))
        m.wait_until_finished()
        found = m.item_metadata(1)
        expected = trees.abstract(state())
        assert found.custom_metadata == {"lr": 0.1}
        for name, leaf in expected.items():
            if isinstance(leaf, jax.ShapeDtypeStruct):
                assert (found.tree[name].shape, found.tree[name].dtype) == (leaf.shape, leaf.dtype)
                assert found.tree[name].sharding.to_jax_sharding() == leaf.sharding


def parts_and_casts(root: str, per_host: bool) -> None:
    with manager(root, per_host=per_host) as m:
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(dtype=np.float16), state())
        m.save(1, args=Args.PyTreeSave(state(1), save_args=save_args))
        m.wait_until_finished()
        sharding = NamedSharding(mesh(), PartitionSpec("x", None))
        wanted = {"rows": jax.ShapeDtypeStruct((16, 8), jnp.bfloat16, sharding=sharding)}
        restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
        found = m.restore(1, args=Args.PyTreeRestore(wanted, restore_args=restore_args, partial_restore=True))
        whole = state(1)["rows"].astype(np.float16).astype(jnp.bfloat16)
        expect(found, {"rows": whole})


def a_reload(root: str, per_host: bool) -> None:
    with manager(root, per_host=per_host) as one, manager(root, per_host=per_host) as other:
        one.save(1, args=Args.StandardSave(state(1)))
        one.wait_until_finished()
        assert other.latest_step() is None
        other.reload()
        assert other.latest_step() == 1
        expect(other.restore(1, args=Args.StandardRestore(trees.abstract(state()))), state(1))
        other.delete(1)
        one.reload()
        assert one.all_steps() == []


def items_beside_stock_ones(root: str, per_host: bool) -> None:
    data = Iterator_()
    with manager(root, per_host=per_host, max_to_keep=1) as m:
        for step in range(2):
            data.position = step * 10 + jax.process_index() * per_host
            m.save(
                step,
                args=Args.Composite(
                    state=Args.StandardSave(state(step)),
                    average=flashpoint_jax.FlashpointSave({"w": state(step)["rows"]}),
                    config=Args.JsonSave({"step": step}),
                    data=IteratorArgs(data),
                ),
            )
        m.wait_until_finished()
        assert holds_blobs(f"{root}/1/state")
        assert holds_blobs(f"{root}/1/average")
        found = m.restore(
            1,
            args=Args.Composite(
                state=Args.StandardRestore(trees.abstract(state())),
                average=flashpoint_jax.FlashpointRestore(),
                config=Args.JsonRestore(),
                data=IteratorArgs(Iterator_()),
            ),
        )
        expect(found.state, state(1))
        expect(found.average, {"w": state(1)["rows"]})
        assert (found.config, found.data.position) == ({"step": 1}, data.position)


def kinds_of_trees(root: str, per_host: bool) -> None:
    kinds = ("dtypes", "containers", "host", "optimizer", "linen", "nnx")
    saved = {kind: jax.tree.map(over_all, trees.ALL[kind]()) for kind in kinds}
    with manager(root, per_host=per_host) as m:
        for step, (kind, tree) in enumerate(saved.items()):
            m.save(step, args=(Args.StandardSave, Args.PyTreeSave)[step % 2](tree))
            m.wait_until_finished()
            assert holds_blobs(f"{root}/{step}/default"), kind
        for step, tree in enumerate(saved.values()):
            wanted = trees.abstract(tree)
            restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
            pytree = Args.PyTreeRestore(wanted, restore_args=restore_args)
            expect(m.restore(step, args=(Args.StandardRestore(wanted), pytree)[step % 2]), tree)


def small_floats(root: str, per_host: bool) -> None:
    host = np.arange(128, dtype=np.float32).reshape(16, 8)
    names = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
    cuts = {"rows": ("x",), "both": ("x", "y"), "everywhere": ()}
    saved = {
        f"{name}-{cut}": trees.sharded(host.astype(getattr(ml_dtypes, name, name)), mesh(), *spec)
        for name in names
        for cut, spec in cuts.items()
    }
    with manager(root, per_host=per_host) as m:
        m.save(1, args=Args.StandardSave(saved))
        m.wait_until_finished()
        expect(m.restore(1, args=Args.StandardRestore(trees.abstract(saved))), saved)
        expect(m.restore(1), saved)


def what_one_host_has_not(root: str, per_host: bool) -> None:
    """Another sharding needs what lies on the other host: an error, and no zeros."""
    everywhere = NamedSharding(mesh(), PartitionSpec())
    with manager(root, per_host=per_host) as m:
        m.save(1, args=Args.StandardSave(state(1)))
        m.wait_until_finished()
        wanted = trees.abstract(state())
        wanted["replicated"] = jax.ShapeDtypeStruct(
            (16, 8), jnp.float32, sharding=NamedSharding(mesh(), PartitionSpec("y", None))
        )
        found = m.restore(1, args=Args.StandardRestore(wanted))
        again = jax.jit(lambda x: x, out_shardings=everywhere)(found["replicated"])
        expect({"replicated": again}, {"replicated": state(1)["replicated"]})
        wanted["rows"] = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=everywhere)
        if not per_host:
            assert np.array_equal(
                m.restore(1, args=Args.StandardRestore(wanted))["rows"].addressable_data(0),
                state(1)["replicated"].addressable_data(0),
            )
            return
        with pytest.raises(FlashpointError, match="part of one host"):
            m.restore(1, args=Args.StandardRestore(wanted))


WORKS: list[Callable[[str, bool], None]] = [
    steps_kept,
    best_steps,
    policies,
    metadata,
    parts_and_casts,
    a_reload,
    items_beside_stock_ones,
    kinds_of_trees,
    small_floats,
    what_one_host_has_not,
]


def on_its_root(work: Callable[[str, bool], None], root: str, per_host: bool) -> None:
    work(root_of(root, per_host), per_host)


@pytest.mark.parametrize("per_host", [False, True], ids=["a-folder-for-all", "a-folder-each"])
@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_on_two_processes(
    workers: Workers, job_root: str, work: Callable[[str, bool], None], per_host: bool
) -> None:
    if work is items_beside_stock_ones and not per_host:
        # Where a manager of folders on each host has been, Orbax tells its own handlers on process 1 of no
        # folder any more: they write before it is there (docs/jax.md, known limits).
        workers.close()
    workers.run(on_its_root, work, job_root, per_host)
