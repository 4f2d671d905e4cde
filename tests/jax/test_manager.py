"""Through the stock `CheckpointManager`, in one process: what works with it works with us behind it."""

from __future__ import annotations

import asyncio
import json
import os
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

import flashpoint
import flashpoint_jax
from flashpoint.errors import CorruptObjectError, FlashpointError, NoSpaceError
from flashpoint.telemetry import counters
from flashpoint_jax import session
from flashpoint_jax.folder import holds_blobs
from tests.jax import trees

Args = ocp.args
REPOSITORY = str(Path(__file__).parents[2])


def manager(root: str, *, settings: dict[str, Any] | None = None, **options: Any) -> Any:
    return ocp.CheckpointManager(
        root,
        options=ocp.CheckpointManagerOptions(**options),
        handler_registry=flashpoint_jax.registry(**(settings or {})),
    )


def small(step: int = 0) -> dict[str, Any]:
    return {"w": jnp.arange(8.0) + step, "n": np.arange(3) + step, "step": step}


def blob_of(root: str, step: int, item: str = "default") -> str:
    return f"{root}/{step}/{item}/rank00000-0.safetensors"


@pytest.fixture(params=["standard", "pytree", "flashpoint"])
def api(request: pytest.FixtureRequest) -> Any:
    """(save, restore) arguments of each pair."""
    return {
        "standard": (Args.StandardSave, Args.StandardRestore),
        "pytree": (
            Args.PyTreeSave,
            lambda item=None: Args.PyTreeRestore(
                item, restore_args=None if item is None else ocp.checkpoint_utils.construct_restore_args(item)
            ),
        ),
        "flashpoint": (flashpoint_jax.FlashpointSave, flashpoint_jax.FlashpointRestore),
    }[request.param]


# ---- trees ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", trees.ALL, ids=str)
def test_every_kind_of_tree_comes_back_bit_for_bit(job_root: str, tree: str, api: Any) -> None:
    save, restore = api
    state = trees.ALL[tree]()
    with manager(job_root) as m:
        m.save(1, args=save(state))
        m.wait_until_finished()
        assert holds_blobs(f"{job_root}/1/default")
        trees.assert_equal(m.restore(1, args=restore(trees.abstract(state))), state)


@pytest.mark.parametrize("save", [Args.StandardSave, Args.PyTreeSave], ids=["standard", "pytree"])
@pytest.mark.parametrize("tree", [*trees.ALL, "scalars"], ids=str)
def test_without_arguments_there_comes_what_stock_orbax_gives(job_root: str, tree: str, save: Any) -> None:
    state = {**trees.ALL, "scalars": scalars}[tree]()
    with manager(f"{job_root}/ours") as m, ocp.CheckpointManager(f"{job_root}/theirs") as theirs:
        for one in (m, theirs):
            one.save(1, args=save(state))
            one.wait_until_finished()
        assert holds_blobs(f"{job_root}/ours/1/default")
        found, expected = m.restore(1), theirs.restore(1)
    trees.assert_equal(found, expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if isinstance(other, jax.Array):
            assert one.sharding == other.sharding
    if tree != "shardings":  # stock Orbax may cut a replicated array among its replicas
        ours, theirs_too = f"{job_root}/ours/1/default", f"{job_root}/theirs/1/default"
        for name in ("_METADATA", "_sharding", "array_metadatas/process_0"):
            if os.path.exists(f"{theirs_too}/{name}"):
                assert _json(f"{ours}/{name}") == _json(f"{theirs_too}/{name}"), name


def scalars() -> dict[str, Any]:
    return {"float32": np.float32(1.5), "int64": np.int64(3), "true": True, "large": 2**62, "negative": -1.5}


def _json(path: str) -> Any:
    """Contents of a file, lists of arrays in the order of their names."""
    with open(path) as file:
        found = json.load(file)
    if "array_metadatas" in found:
        found["array_metadatas"].sort(key=lambda row: row["array_metadata"]["param_name"])
    return found


def test_strings_go_the_stock_way_beside_the_blob(job_root: str) -> None:
    state = {"w": jnp.arange(4.0), "name": "llama", "deep": {"text": "x"}}
    with manager(job_root) as m:
        m.save(1, args=Args.PyTreeSave(state))
        m.wait_until_finished()
        assert holds_blobs(f"{job_root}/1/default")
        trees.assert_equal(m.restore(1, args=Args.PyTreeRestore()), state)


def test_what_no_blob_holds_sends_the_item_the_stock_way(job_root: str) -> None:
    state = {"w": jnp.arange(4.0), "big-endian": np.arange(3, dtype=">i4")}
    with manager(job_root) as m:
        m.save(1, args=Args.StandardSave(state))
        m.wait_until_finished()
        assert not holds_blobs(f"{job_root}/1/default")
        assert np.array_equal(m.restore(1)["big-endian"], state["big-endian"])


@pytest.mark.parametrize(
    ("state", "error"),
    [({"z": jnp.zeros((0, 3))}, "zero size"), ({"z": object()}, "Unsupported type"), ({}, "empty")],
    ids=["zero-size", "object", "nothing"],
)
def test_what_orbax_refuses_is_refused(job_root: str, state: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error), manager(job_root) as m:
        m.save(1, args=Args.StandardSave(state))


# ---- restoring as something else --------------------------------------------------------------------


@pytest.mark.parametrize("source", [("x", None), (None, "y"), ("y", "x"), (("x", "y"),), ()], ids=str)
@pytest.mark.parametrize(
    ("shape", "target"), [((4,), ("x",)), ((2, 2), ("y", "x")), ((1, 4), (None, "y")), ((2,), ())], ids=str
)
def test_any_sharding_is_restored_into_any_other(
    job_root: str, source: Any, shape: tuple[int, ...], target: Any
) -> None:
    value = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    sharding = NamedSharding(trees.mesh(*shape), PartitionSpec(*target))
    with manager(job_root) as m:
        m.save(1, args=Args.StandardSave({"w": trees.sharded(value, trees.mesh(), *source)}))
        m.wait_until_finished()
        wanted = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)}
        found = m.restore(1, args=Args.StandardRestore(wanted))["w"]
    assert found.sharding == sharding
    assert np.array_equal(found, value)


def test_one_replica_of_a_shard_is_written(job_root: str) -> None:
    value = np.ones((1024, 1024), np.float32)
    state = {f"w{i}": trees.sharded(value, trees.mesh(), "x", None) for i in range(2)}
    before = counters().get("bytes_staged", 0)
    with manager(job_root) as m:
        m.save(1, args=Args.StandardSave(state))
    assert counters()["bytes_staged"] - before < 2 * value.nbytes + (64 << 10)


@pytest.mark.parametrize("target", ["bfloat16", "float16", "float64", "int32"])
def test_a_dtype_is_cast_while_it_is_restored(job_root: str, target: str) -> None:
    with jax.enable_x64(True):
        wanted = jax.ShapeDtypeStruct(
            (8,), jnp.dtype(target), sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
        )
        value = jnp.arange(8, dtype=jnp.float32) / 3
        with manager(job_root) as m:
            m.save(1, args=Args.StandardSave({"w": value}))
            m.wait_until_finished()
            found = m.restore(1, args=Args.StandardRestore({"w": wanted}))["w"]
        assert trees.bits(found) == trees.bits(jnp.asarray(np.asarray(value).astype(target)))


def test_save_args_cast_what_is_stored(job_root: str) -> None:
    state = {"w": jnp.arange(8.0) / 3, "n": np.arange(3.0)}
    save_args = {"w": ocp.SaveArgs(dtype=jnp.bfloat16), "n": ocp.SaveArgs(dtype=np.dtype(np.float32))}
    with manager(job_root) as m:
        m.save(1, args=Args.PyTreeSave(state, save_args=save_args))
        m.wait_until_finished()
        found = m.restore(1, args=Args.PyTreeRestore())
    assert (found["w"].dtype, found["n"].dtype) == (jnp.bfloat16, np.float32)
    assert trees.bits(found["w"]) == trees.bits(state["w"].astype(jnp.bfloat16))


@pytest.mark.parametrize("tree", trees.ALL, ids=str)
def test_save_args_of_every_kind_of_tree(job_root: str, tree: str) -> None:
    # Orbax has some of empty containers too, which are no leaves.
    state = trees.ALL[tree]()
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(), state)
    with manager(job_root) as m:
        m.save(1, args=Args.PyTreeSave(state, save_args=save_args))
        m.wait_until_finished()
        assert holds_blobs(f"{job_root}/1/default")
        wanted = trees.abstract(state)
        restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
        trees.assert_equal(m.restore(1, args=Args.PyTreeRestore(wanted, restore_args=restore_args)), state)


def test_a_part_of_a_tree_is_restored(job_root: str) -> None:
    state = {"params": {"w": jnp.arange(4.0), "b": jnp.ones(2)}, "opt": {"mu": jnp.zeros(4)}}
    wanted = {"params": {"w": state["params"]["w"]}}
    with manager(job_root) as m:
        m.save(1, args=Args.PyTreeSave(state))
        m.wait_until_finished()
        args = ocp.checkpoint_utils.construct_restore_args(wanted)
        found = m.restore(1, args=Args.PyTreeRestore(wanted, restore_args=args, partial_restore=True))
        trees.assert_equal(found, wanted)
        held = {"params": {"w": state["params"]["w"], "b": ...}, "opt": {"mu": ...}}
        found = m.restore(1, args=Args.PyTreeRestore(held, restore_args=jax.tree.map(_array_args, held)))
    assert np.array_equal(found["params"]["w"], state["params"]["w"])
    assert found["opt"]["mu"] is ...


def _array_args(leaf: Any) -> Any:
    return ocp.RestoreArgs() if leaf is ... else ocp.ArrayRestoreArgs(sharding=leaf.sharding)


def test_transforms_are_orbaxs_own(job_root: str) -> None:
    with manager(job_root) as m:
        m.save(1, args=Args.PyTreeSave({"old": jnp.arange(4.0)}))
        m.wait_until_finished()
        wanted = {"new": jnp.zeros(4)}
        found = m.restore(
            1,
            args=Args.PyTreeRestore(
                wanted,
                restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
                transforms={"new": ocp.Transform(original_key="old")},
            ),
        )
    assert np.array_equal(found["new"], np.arange(4.0))


@pytest.mark.parametrize("size", [5, 12])
def test_shapes_are_cut_and_filled_up_if_that_is_asked_for(job_root: str, size: int) -> None:
    sharding = NamedSharding(trees.mesh(1), PartitionSpec("x"))
    wanted = {"w": jax.ShapeDtypeStruct((size,), jnp.float32, sharding=sharding)}
    with manager(job_root) as m:
        m.save(1, args=Args.StandardSave({"w": jnp.arange(8.0)}))
        m.wait_until_finished()
        with pytest.raises(ValueError, match="not compatible with the stored shape"):
            m.restore(1, args=Args.StandardRestore(wanted))
        found = m.restore(1, args=Args.StandardRestore(wanted, strict=False))["w"]
    expected = np.zeros(size)
    expected[: min(size, 8)] = np.arange(8.0)[:size]
    assert np.array_equal(found, expected)


def test_a_tree_of_another_shape_is_refused_by_name(job_root: str) -> None:
    with manager(job_root) as m:
        m.save(1, args=Args.StandardSave(small()))
        m.wait_until_finished()
        with pytest.raises(ValueError, match="do not match"):
            m.restore(1, args=Args.StandardRestore({"other": jnp.zeros(8)}))


# ---- memory -----------------------------------------------------------------------------------------


def pool_mappings(root: str) -> list[range]:
    """Addresses of this process's mappings of files below a root."""
    with open("/proc/self/maps") as file:
        spans = [line.split()[0].split("-") for line in file if f" {root}/" in line]
    return [range(int(begin, 16), int(end, 16)) for begin, end in spans]


def test_what_was_restored_does_not_change_when_its_buffer_is_written_again(job_root: str) -> None:
    # JAX takes over memory that is aligned to 64 bytes; here all entries are. A view would also hold its file's
    # lock, and keep it from being written again for as long as training holds the state.
    state = {
        "w": jnp.arange(1 << 16, dtype=jnp.float32),
        "sharded": trees.sharded(np.arange(64.0, dtype=np.float32), trees.mesh(), "x"),
        "n": np.arange(1 << 10),
    }
    with manager(job_root, max_to_keep=1) as m:
        m.save(0, args=Args.StandardSave(state))
        m.wait_until_finished()
        found = m.restore(0, args=Args.StandardRestore(state))
        addresses = [shard.data.unsafe_buffer_pointer() for shard in found["w"].addressable_shards]
        addresses += [shard.data.unsafe_buffer_pointer() for shard in found["sharded"].addressable_shards]
        addresses.append(found["n"].ctypes.data)
        mappings = pool_mappings(job_root)
        assert mappings
        assert not [address for address in addresses if any(address in span for span in mappings)]
        first, later = os.stat(blob_of(job_root, 0)).st_ino, set()
        for step in range(1, 6):
            m.save(step, args=Args.StandardSave(jax.tree.map(lambda x: x * 0 - 1, state)))
            m.wait_until_finished()
            later.add(os.stat(blob_of(job_root, step)).st_ino)
        assert first in later
        trees.assert_equal(found, state)


@pytest.mark.fault("B")
def test_what_is_saved_is_the_state_at_the_call(job_root: str) -> None:
    step = jax.jit(lambda w: w + 1, donate_argnums=0)
    host = np.zeros(1 << 16)
    w = jnp.zeros(1 << 18)
    with manager(job_root) as m:
        m.save(0, args=Args.StandardSave({"w": w, "n": host}))
        host[:] = 7
        w = step(w)
        m.wait_until_finished()
        found = m.restore(0)
    assert not np.any(found["w"])
    assert not np.any(found["n"])


def test_saving_does_not_keep_training_from_donating(job_root: str) -> None:
    step = jax.jit(lambda w: w + 1, donate_argnums=0)
    with manager(job_root) as m:
        # Made by a computation: what JAX took over from numpy it donates to nobody.
        zeros = jax.jit(
            jnp.zeros, static_argnums=0, out_shardings=NamedSharding(trees.mesh(), PartitionSpec("x"))
        )
        for n, state in enumerate((jnp.zeros(1 << 18), zeros((64, 64)))):
            addresses = [shard.data.unsafe_buffer_pointer() for shard in state.addressable_shards]
            m.save(n, args=Args.StandardSave({"w": state}))
            state = step(state)
            assert [s.data.unsafe_buffer_pointer() for s in state.addressable_shards] == addresses


def test_an_array_that_was_given_away_is_named(job_root: str) -> None:
    w = jnp.zeros(8)
    w.delete()
    with pytest.raises(FlashpointError, match="'w'"), manager(job_root) as m:
        m.save(0, args=Args.PyTreeSave({"w": w}))


def test_the_pool_stays_bounded_and_learns_of_deletions(job_root: str) -> None:
    state = {"w": jnp.zeros(1 << 20)}
    with manager(job_root, max_to_keep=2) as m:
        for step in range(10):
            m.save(step, args=Args.StandardSave(state))
            m.wait_until_finished()
        files = [entry.stat() for entry in os.scandir(f"{job_root}/.pool")]
        assert len(files) <= 4
        assert sum(status.st_nlink == 2 for status in files) == 2
        m.delete(9)
        assert (
            sum(os.stat(f"{job_root}/.pool/{n}").st_nlink == 2 for n in os.listdir(f"{job_root}/.pool")) == 1
        )


def test_no_marker_is_left(job_root: str) -> None:
    with manager(job_root) as m:
        m.save(0, args=Args.StandardSave(small()))
    assert not [name for name in os.listdir(job_root) if name.endswith("unfinished")]


# ---- the manager's own features ---------------------------------------------------------------------


def test_synchronous_and_asynchronous_saves(job_root: str) -> None:
    for n, is_async in enumerate((False, True)):
        with manager(f"{job_root}/{n}", enable_async_checkpointing=is_async) as m:
            assert m.save(0, args=Args.StandardSave(small()))
            m.wait_until_finished()
            trees.assert_equal(m.restore(0, args=Args.StandardRestore(small())), small())


def test_steps_are_kept_and_deleted_as_orbax_decides(job_root: str) -> None:
    with manager(job_root, max_to_keep=2, keep_period=4, save_interval_steps=2) as m:
        saved = [m.save(step, args=Args.StandardSave(small(step))) for step in range(11)]
        m.wait_until_finished()
        assert saved == [step % 2 == 0 for step in range(11)]
        assert m.all_steps() == [0, 4, 8, 10]
        assert m.latest_step() == 10
        for step in m.all_steps():
            trees.assert_equal(m.restore(step, args=Args.StandardRestore(small())), small(step))


def test_the_best_steps_are_kept(job_root: str) -> None:
    with manager(job_root, max_to_keep=2, best_fn=lambda metrics: metrics["score"]) as m:
        for step, score in enumerate([1.0, 5.0, 3.0, 4.0, 0.0]):
            m.save(step, args=Args.StandardSave(small(step)), metrics={"score": score})
        m.wait_until_finished()
        assert m.best_step() == 1
        assert set(m.all_steps()) >= {1, 3}
        assert m.metrics(1) == {"score": 5.0}


def test_preservation_and_decision_policies(job_root: str) -> None:
    policies = ocp.checkpoint_managers
    with manager(
        job_root,
        save_decision_policy=policies.FixedIntervalPolicy(3),
        preservation_policy=policies.AnyPreservationPolicy(
            [policies.LatestN(1), policies.CustomSteps(steps=[3])]
        ),
    ) as m:
        for step in range(10):
            m.save(step, args=Args.StandardSave(small(step)))
        m.wait_until_finished()
        assert m.all_steps() == [3, 9]


def test_a_new_manager_finds_and_restores_what_the_last_one_saved(job_root: str, api: Any) -> None:
    save, restore = api
    with manager(job_root) as m:
        m.save(3, args=save(small(3)))
    with manager(job_root) as m:
        assert m.latest_step() == 3
        trees.assert_equal(m.restore(3, args=restore(small())), small(3))
    with manager(job_root) as m:
        assert np.array_equal(m.restore(3)["w"], small(3)["w"])
    with manager(job_root) as m:
        assert np.array_equal(m.restore(None, args=restore())["w"], small(3)["w"])


def test_reload_sees_what_another_manager_saved(job_root: str) -> None:
    with manager(job_root) as one, manager(job_root) as other:
        one.save(1, args=Args.StandardSave(small(1)))
        one.wait_until_finished()
        assert other.latest_step() is None
        other.reload()
        assert other.latest_step() == 1


def test_item_metadata_tells_shapes_and_dtypes(job_root: str) -> None:
    state = {**trees.shardings(), "n": np.arange(3), "s": 4, "bf": jnp.ones(2, jnp.bfloat16)}
    with manager(job_root) as m:
        m.save(1, args=Args.StandardSave(state, custom_metadata={"lr": 0.1}))
        m.wait_until_finished()
        found = m.item_metadata(1)
    stock = ocp.CheckpointManager(
        job_root, handler_registry=_stock_registry(), options=ocp.CheckpointManagerOptions(read_only=True)
    ).item_metadata(1)
    assert found.custom_metadata == stock.custom_metadata == {"lr": 0.1}
    assert jax.tree.structure(found.tree) == jax.tree.structure(stock.tree)
    for one, other in zip(jax.tree.leaves(found.tree), jax.tree.leaves(stock.tree), strict=True):
        assert one == other


def _stock_registry() -> Any:
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("default", Args.StandardSave)
    registry.add("default", Args.StandardRestore)
    return registry


class Iterator_:
    """A data iterator with a state of its own, as grain's."""

    def __init__(self) -> None:
        self.position = 0


class IteratorHandler(ocp.CheckpointHandler):  # type: ignore[misc]
    def save(self, directory: Any, args: Any) -> None:
        (directory / "position").write_text(str(args.item.position))

    def restore(self, directory: Any, args: Any) -> Any:
        args.item.position = int((directory / "position").read_text())
        return args.item


@ocp.args.register_with_handler(IteratorHandler, for_save=True, for_restore=True)
class IteratorArgs(ocp.args.CheckpointArgs):  # type: ignore[misc]
    def __init__(self, item: Any = None) -> None:
        self.item = item


def test_composite_items_beside_stock_handlers(job_root: str) -> None:
    data = Iterator_()
    data.position = 17
    state, average = small(1), {"w": jnp.arange(8.0)}
    with manager(job_root, max_to_keep=2) as m:
        for step in range(4):
            m.save(
                step,
                args=Args.Composite(
                    state=Args.StandardSave(state),
                    average=Args.PyTreeSave(average),
                    config=Args.JsonSave({"lr": 1}),
                    data=IteratorArgs(data),
                ),
            )
        m.wait_until_finished()
        assert holds_blobs(f"{job_root}/3/state")
        assert holds_blobs(f"{job_root}/3/average")
        found = m.restore(
            3,
            args=Args.Composite(
                state=Args.StandardRestore(state),
                average=Args.PyTreeRestore(),
                config=Args.JsonRestore(),
                data=IteratorArgs(Iterator_()),
            ),
        )
        trees.assert_equal(found.state, state)
        trees.assert_equal(found.average, average)
        assert (found.config, found.data.position) == ({"lr": 1}, 17)
        assert set(m.restore(3, args=Args.Composite(average=Args.PyTreeRestore())).keys()) == {"average"}


def test_item_handlers_take_our_handler(job_root: str) -> None:
    with ocp.CheckpointManager(job_root, item_handlers=flashpoint_jax.FlashpointCheckpointHandler()) as m:
        m.save(1, args=flashpoint_jax.FlashpointSave(small(1)))
        m.wait_until_finished()
        assert holds_blobs(f"{job_root}/1/default")
        trees.assert_equal(m.restore(1, args=flashpoint_jax.FlashpointRestore(small())), small(1))
        assert np.array_equal(m.restore(1)["w"], small(1)["w"])


@pytest.mark.parametrize(
    "name_format",
    [
        ocp.path.step.standard_name_format(step_prefix="ckpt"),
        ocp.path.step.standard_name_format(step_format_fixed_length=8),
        flashpoint_jax.StepNameFormat(),
    ],
    ids=["prefix", "fixed", "flashpoint"],
)
def test_step_name_formats(job_root: str, name_format: Any) -> None:
    with manager(job_root, step_name_format=name_format, max_to_keep=2) as m:
        for step in range(10, 14):
            m.save(step, args=Args.StandardSave(small(step)))
    with manager(job_root, step_name_format=name_format, max_to_keep=2) as m:
        assert m.all_steps() == [12, 13]
        assert os.path.isdir(f"{job_root}/{name_format.build_name(13)}/default")
        trees.assert_equal(m.restore(12, args=Args.StandardRestore(small())), small(12))
        with pytest.raises((FileNotFoundError, ValueError)):
            m.restore(11, args=Args.StandardRestore(small()))
        m.delete(12)
        m.reload()
        assert m.all_steps() == [13]


def test_steps_under_our_names_survive_a_restart(job_root: str, caplog: pytest.LogCaptureFixture) -> None:
    # A container without a manifest of its own is debris to the core; these hold items, which are not.
    options = {"step_name_format": flashpoint_jax.StepNameFormat(), "cleanup_tmp_directories": True}
    with manager(job_root, **options) as m:
        m.save(1, args=Args.StandardSave(small(1)))
    session._sessions.clear()  # as in a new process
    with manager(job_root, **options) as m, caplog.at_level("INFO", "flashpoint"):
        m.save(2, args=Args.StandardSave(small(2)))
        m.wait_until_finished()
        assert m.all_steps() == [1, 2]
        trees.assert_equal(m.restore(1, args=Args.StandardRestore(small())), small(1))
    assert "removed the unfinished" not in caplog.text


def test_a_checkpointer_alone_works_too(job_root: str) -> None:
    with ocp.Checkpointer(flashpoint_jax.FlashpointCheckpointHandler()) as checkpointer:
        checkpointer.save(f"{job_root}/best", args=flashpoint_jax.FlashpointSave(small()))
        found = checkpointer.restore(f"{job_root}/best", args=flashpoint_jax.FlashpointRestore(small()))
    trees.assert_equal(found, small())


def test_a_folder_may_be_copied_elsewhere(job_root: str, tmp_path: Path) -> None:
    with manager(job_root) as m:
        m.save(5, args=Args.StandardSave(small(5)))
    subprocess.run(["cp", "-r", f"{job_root}/5", f"{tmp_path}/7"], check=True)
    with manager(str(tmp_path)) as m:
        trees.assert_equal(m.restore(7, args=Args.StandardRestore(small())), small(5))


# ---- failures ---------------------------------------------------------------------------------------


def test_a_wrong_byte_is_an_error_and_not_a_value(job_root: str) -> None:
    with manager(job_root) as m:
        m.save(1, args=Args.StandardSave(small()))
        m.wait_until_finished()
        with open(blob_of(job_root, 1), "r+b") as file:
            file.seek(-4096, os.SEEK_END)
            byte = file.read(1)
            file.seek(-4096, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))
        with pytest.raises(CorruptObjectError, match="corrupt"):
            m.restore(1, args=Args.StandardRestore(small()))


def test_want_of_space_fails_one_save_and_leaves_the_others(job_root: str) -> None:
    with manager(job_root, settings={"memory_limit_bytes": 3 << 20}, max_to_keep=3) as m:
        m.save(1, args=Args.StandardSave({"w": jnp.zeros(1 << 18)}))
        m.wait_until_finished()
        m.save(2, args=Args.StandardSave({"w": jnp.zeros(1 << 20)}))
        with pytest.raises(NoSpaceError, match="needs"):
            m.wait_until_finished()
        m.reload()
        assert m.all_steps() == [1]
        assert not [name for name in os.listdir(job_root) if name.endswith("unfinished")]
        m.save(3, args=Args.StandardSave({"w": jnp.ones(1 << 18)}))
        m.wait_until_finished()
        assert np.all(m.restore(3)["w"] == 1)


CRASHING = """
import os, sys, jax.numpy as jnp, orbax.checkpoint as ocp, flashpoint_jax
from flashpoint_jax.session import ItemSaver
m = ocp.CheckpointManager(sys.argv[1], handler_registry=flashpoint_jax.registry())
m.save(1, args=ocp.args.StandardSave({"w": jnp.ones(1 << 18)}))
m.wait_until_finished()
ItemSaver.finalize = lambda *args: os._exit(9)
m.save(2, args=ocp.args.StandardSave({"w": jnp.ones(1 << 18)}))
m.wait_until_finished()
"""


def test_what_a_crash_left_is_taken_back_at_the_next_save(job_root: str) -> None:
    crashed = subprocess.run([sys.executable, "-c", CRASHING, job_root], cwd=REPOSITORY, check=False)
    assert crashed.returncode == 9
    assert [name for name in os.listdir(job_root) if name.endswith("unfinished")]
    with manager(job_root) as m:
        assert m.all_steps() == [1]
        m.save(3, args=Args.StandardSave({"w": jnp.ones(1 << 18) * 3}))
        m.wait_until_finished()
        assert np.all(m.restore(1)["w"] == 1)
    assert not [name for name in os.listdir(job_root) if name.endswith("unfinished")]
    linked = [os.stat(f"{job_root}/.pool/{name}").st_nlink for name in os.listdir(f"{job_root}/.pool")]
    assert sorted(linked)[-2:] == [2, 2]
    assert linked.count(2) == 2


# ---- stock Orbax reads it ---------------------------------------------------------------------------

STOCK = """
import sys, jax, numpy as np, orbax.checkpoint as ocp
m = ocp.CheckpointManager(sys.argv[1])
found = m.restore(1)
assert np.array_equal(found["rows"], np.arange(64).reshape(8, 8))
assert found["rows"].sharding.spec == jax.sharding.PartitionSpec("x", None)
assert np.array_equal(jax.random.key_data(found["key"]), jax.random.key_data(jax.random.key(3)))
assert found["text"] == "hello" and found["s"] == 4 and found["bf"].dtype == "bfloat16"
mesh = jax.make_mesh((4,), ("z",))
spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "z"))
wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"rows": found["rows"]})
wanted["rows"] = jax.ShapeDtypeStruct((8, 8), np.float16, sharding=spec)
args = ocp.args.PyTreeRestore(
    wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
)
part = ocp.CheckpointManager(sys.argv[1]).restore(1, args=args)["rows"]
assert part.dtype == np.float16 and part.sharding == spec and np.asarray(part)[7, 7] == 63
with ocp.StandardCheckpointer() as checkpointer:
    tree = checkpointer.restore(sys.argv[1] + "/1/default")
assert np.array_equal(tree["columns"], np.arange(64).reshape(8, 8))
assert checkpointer.metadata(sys.argv[1] + "/1/default").item_metadata.tree["rows"].shape == (8, 8)
assert not [name for name in sys.modules if name.startswith("flashpoint")]
print("read")
"""


def test_stock_orbax_reads_it_without_us(job_root: str) -> None:
    state = {
        **trees.shardings(),
        **trees.keys(),
        "s": 4,
        "text": "hello",
        "bf": jnp.ones(3, jnp.bfloat16),
        "empty": {},
    }
    with manager(job_root) as m:
        m.save(1, args=Args.PyTreeSave(state))
    done = subprocess.run(
        [sys.executable, "-c", STOCK, job_root], cwd="/", capture_output=True, text=True, check=False
    )
    assert done.stdout == "read\n", done.stderr


def test_safetensors_and_flashpoint_read_the_blob(job_root: str) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    with manager(job_root) as m:
        m.save(1, args=Args.StandardSave(small(1)))
    assert np.array_equal(safetensors.load_file(blob_of(job_root, 1))["w"], small(1)["w"])
    assert flashpoint.__version__


def test_what_stock_orbax_wrote_is_restored(job_root: str) -> None:
    with ocp.CheckpointManager(job_root) as m:
        m.save(1, args=Args.StandardSave(small(1)))
    with manager(job_root) as m:
        trees.assert_equal(m.restore(1, args=Args.StandardRestore(small())), small(1))
        assert m.item_metadata(1) is None or m.item_metadata(1).tree["w"].shape == (8,)


@pytest.fixture(autouse=True)
def no_loop_is_left() -> Iterator[None]:
    yield
    assert asyncio._get_running_loop() is None
