"""How a restore reads: the short way beside Orbax's own, and the memory that arrays are given."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint._src.handlers import base_pytree_checkpoint_handler as stock

from flashpoint.boxes import Box
from flashpoint.layout import LARGE_ENTRY_BYTES
from flashpoint.manifest import ObjectRecord
from flashpoint_jax.handlers import FlashpointPyTreeHandler
from flashpoint_jax.restore import _GAP_BYTES_MAX, _RANGE_BYTES_MAX, _neighbours, _Shard
from tests.jax import trees
from tests.jax.test_manager import manager


class Item:
    """A saved item, restored either way."""

    def __init__(self, root: str, state: Any) -> None:
        self._folder = stock.epath.Path(f"{root}/1/default")
        self._impl: Any = FlashpointPyTreeHandler()._handler_impl
        with manager(root) as m:
            m.save(1, args=ocp.args.PyTreeSave(state))

    def short_way(self, item: Any, args: Any) -> tuple[Any] | None:
        with self._impl.opened(self._folder) as view:
            found: tuple[Any] | None = self._impl._direct.restore(view, self._folder, item, args)
        return found

    def orbaxs_way(self, item: Any, args: Any) -> Any:
        asked = stock.BasePyTreeRestoreArgs(item, restore_args=args)
        with self._impl.opened(self._folder):
            return stock.BasePyTreeCheckpointHandler.restore(self._impl, self._folder, asked)


def args_of(item: Any) -> Any:
    return ocp.checkpoint_utils.construct_restore_args(item)


# ---- the short way ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", trees.ALL, ids=str)
def test_the_short_way_gives_what_orbaxs_own_gives(job_root: str, tree: str) -> None:
    state = trees.ALL[tree]()
    item, target = Item(job_root, state), trees.abstract(state)
    for _ in range(2):  # the second time with what is remembered of the first
        found = item.short_way(target, args_of(target))
        assert found is not None
        trees.assert_equal(found[0], item.orbaxs_way(target, args_of(target)))
        trees.assert_equal(found[0], state)


def test_arguments_without_shape_and_dtype_take_them_from_the_target(job_root: str) -> None:
    item = Item(job_root, {"w": jnp.arange(4.0)})
    target = {"w": jnp.zeros(4, jnp.bfloat16)}
    args = {"w": ocp.ArrayRestoreArgs(sharding=target["w"].sharding)}
    found = item.short_way(target, args)
    assert found is not None
    trees.assert_equal(found[0], item.orbaxs_way(target, args))
    assert found[0]["w"].dtype == jnp.bfloat16


STATE = {"a": {"w": 0.0, "b": 1.0}, "list": [2.0, 3.0], "none": None}


@pytest.mark.parametrize(
    "target",
    [
        pytest.param({**STATE, "more": 4.0}, id="more"),
        pytest.param({"a": STATE["a"], "none": None}, id="less"),
        pytest.param({**STATE, "a": {"w": 0.0, "c": 1.0}}, id="another name"),
        pytest.param({**STATE, "list": {"0": 2.0, "1": 3.0}}, id="names for indices"),
        pytest.param({**STATE, "none": 4.0}, id="a leaf for none"),
        pytest.param({**STATE, "list": None}, id="none for leaves"),
        pytest.param({key: STATE[key] for key in ("a", "list")}, id="no none"),
    ],
)
def test_another_structure_is_left_to_orbax(job_root: str, target: Any) -> None:
    def arrays(tree: Any) -> Any:
        return jax.tree.map(jnp.float32, tree)

    item = Item(job_root, arrays(STATE))
    target = arrays(target)
    assert item.short_way(arrays(STATE), args_of(arrays(STATE))) is not None
    assert item.short_way(target, args_of(target)) is None


def test_placeholders_and_foreign_handlers_are_left_to_orbax(job_root: str) -> None:
    item = Item(job_root, {"w": jnp.arange(4.0), "name": "text"})
    target = {"w": jnp.zeros(4), "name": ""}
    assert item.short_way(target, args_of(target)) is None
    assert (
        item.short_way({**target, "name": ...}, {"w": args_of(target["w"]), "name": ocp.RestoreArgs()})
        is None
    )
    assert item.short_way(target, None) is None


def test_what_is_remembered_is_of_one_structure_and_one_item(job_root: str) -> None:
    one, other = {"a": jnp.arange(4.0), "b": jnp.ones(3)}, {"a": jnp.ones(3), "c": jnp.arange(4.0)}
    with manager(job_root) as m:
        for step, state in enumerate((one, other)):
            m.save(step, args=ocp.args.StandardSave(state))
        m.wait_until_finished()
        for step, state in [*enumerate((one, other))] * 2:
            trees.assert_equal(m.restore(step, args=ocp.args.StandardRestore(state)), state)
            with pytest.raises(ValueError, match="do not match"):
                m.restore(1 - step, args=ocp.args.StandardRestore(state))


# ---- memory -----------------------------------------------------------------------------------------


def test_an_array_outlives_those_it_was_copied_with_and_its_buffer(job_root: str) -> None:
    state = {f"{i:03}": jnp.full(1024, i, jnp.float32) for i in range(200)}
    with manager(job_root, max_to_keep=1) as m:
        m.save(0, args=ocp.args.StandardSave(state))
        found = m.restore(0, args=ocp.args.StandardRestore(trees.abstract(state)))
        addresses = sorted(array.unsafe_buffer_pointer() for array in found.values())
        # One copy for all, taken over by JAX as it is: they lie beside each other as in the file.
        assert addresses[-1] - addresses[0] == 199 * 4096
        one = found["123"]
        del found
        for step in range(1, 4):
            gc.collect()
            m.save(step, args=ocp.args.StandardSave(jax.tree.map(lambda x: x - 1, state)))
            m.wait_until_finished()
            m.restore(step, args=ocp.args.StandardRestore(trees.abstract(state)))
    assert np.array_equal(one, np.full(1024, 123))


def test_numpy_arrays_that_were_copied_together_can_be_written(job_root: str) -> None:
    state = {"a": np.arange(16), "b": np.arange(16), "c": np.arange(16)}
    with manager(job_root) as m:
        m.save(0, args=ocp.args.StandardSave(state))
        found = m.restore(0, args=ocp.args.StandardRestore(state))
        found["b"][:] = -1
        trees.assert_equal({**found, "b": state["b"]}, state)
        trees.assert_equal(m.restore(0, args=ocp.args.StandardRestore(state)), state)


def shards_of(*spans: tuple[int, int], record: str = "rank00000-0.safetensors") -> list[_Shard]:
    of = ObjectRecord(record, 1 << 40, "", 1 << 20, b"")
    return [_Shard(0, Box((), ()), np.dtype(np.uint8), of, begin, begin + size) for begin, size in spans]


def sizes(shards: list[_Shard]) -> list[int]:
    return [len(run) for run in _neighbours(shards)]


def test_neighbours_are_small_near_and_bounded() -> None:
    assert sizes([]) == []
    assert sizes(shards_of((0, 64), (64, 64), (192, 64))) == [3]
    assert sizes(shards_of((0, 64), (64 + _GAP_BYTES_MAX, 64), (1 << 20, 64))) == [2, 1]
    large = LARGE_ENTRY_BYTES
    assert sizes(shards_of((0, 64), (64, large), (64 + large, 64), (128 + large, 64))) == [1, 1, 2]
    assert sizes(shards_of((0, 64)) + shards_of((64, 64), record="rank00001-0.safetensors")) == [1, 1]
    half = LARGE_ENTRY_BYTES // 2
    runs = list(_neighbours(shards_of(*((i * half, half) for i in range(200)))))
    assert all(run[-1].end - run[0].begin <= _RANGE_BYTES_MAX for run in runs)
    assert len(runs) == -(-200 * half // _RANGE_BYTES_MAX)
