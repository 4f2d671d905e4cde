"""Copying arrays into a version's buffer: every byte at its place, whoever of several threads copies it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from flashpoint.layout import Entry, plan_layout
from flashpoint_jax import staging
from flashpoint_jax.handlers import FlashpointStandardHandler
from flashpoint_jax.plan import PlanCache, Writers
from tests.jax import trees


class Buffer:
    """What `stage_into` looks at of a pool buffer."""

    def __init__(self, nbytes: int) -> None:
        self.data = np.full(nbytes, 0xA5, np.uint8)
        self.views: dict[str, Any] = {}


def arrays_of_all_sizes() -> list[np.ndarray[Any, Any]]:
    """Small ones that are copied without a break, large ones that threads share, and odd ones."""
    rng = np.random.default_rng(0)
    limit = staging._SMALL_BYTES_MAX
    sizes = [1, 3, limit - 1, limit, limit + 1, 3 * limit + 5, *rng.integers(1, 2 * limit, 30)]
    found = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    found += [np.float32(3.5).reshape(()), rng.normal(size=(300, 500)).astype(ml_dtypes.bfloat16)]
    found += [np.zeros((0, 4), np.int16), rng.normal(size=(60, 70)).T, rng.normal(size=(400, 300)).T]
    found += [np.arange(999, dtype=np.int32)[::3], np.arange(999, dtype=np.int32)[::-1]]
    return found


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_array_lies_at_its_place(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(staging, "_THREADED_BYTES_MIN", 1)
    arrays = arrays_of_all_sizes()
    layout = plan_layout(Entry(f"a{n}", one.dtype.name, one.shape) for n, one in enumerate(arrays))
    buffer: Any = Buffer(layout.nbytes)
    for _ in range(2):  # the second time with the places that are remembered
        sources = list(arrays)
        buffer.data[:] = 0xA5
        staging.stage_into(buffer, layout, sources, threads=threads)
        assert not sources
        by_name = {f"a{n}": one for n, one in enumerate(arrays)}
        for entry, begin, end in zip(layout.entries, layout.begins, layout.ends, strict=True):
            assert buffer.data[begin:end].tobytes() == by_name[entry.name].tobytes(), entry
        for begin, end in layout.gaps:
            assert (buffer.data[begin:end] == 0xA5).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_an_array_that_cannot_be_copied_is_an_error_whoever_copies_it(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(staging, "_THREADED_BYTES_MIN", 1)

    class Broken:
        def __array__(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("the device is gone")

    sources: list[Any] = [np.ones(1 << 18, np.uint8) for _ in range(40)]
    layout = plan_layout(Entry(f"a{n}", "uint8", (1 << 18,)) for n in range(40))
    buffer: Any = Buffer(layout.nbytes)
    for place in (0, 20, 39):
        with pytest.raises(RuntimeError, match="the device is gone"):
            staging.stage_into(
                buffer, layout, [*sources[:place], Broken(), *sources[place + 1 :]], threads=threads
            )


def test_what_is_stored_as_it_is_needs_no_second_look() -> None:
    """Casts and random keys do: their bytes are others than the array's own."""
    tree = {
        "as it is": jnp.arange(4.0),
        "cast": jnp.arange(4.0),
        "cast to its own": jnp.arange(4.0),
        "key": jax.random.key(1),
        "numpy": np.arange(3),
    }
    names = sorted(tree)
    casts = [jnp.bfloat16 if name == "cast" else jnp.float32 if "own" in name else None for name in names]
    plan, leaves = PlanCache().plan(tree, casts, Writers())
    direct = {names[source.leaf] for source in plan.sources if source.is_direct}
    assert direct == {"as it is", "cast to its own"}
    found = dict(zip(plan.sources, staging.start_copies(plan, leaves), strict=True))
    for source, value in found.items():
        name = names[source.leaf]
        wanted = jax.random.key_data(tree[name]) if name == "key" else tree[name]
        wanted = wanted.astype(jnp.bfloat16) if name == "cast" else wanted
        assert np.array_equal(np.asarray(value), np.asarray(wanted)), name
        assert np.asarray(value).dtype == wanted.dtype


# ---- Orbax's check of what is saved -----------------------------------------------------------------


class Odd:
    pass


@pytest.mark.parametrize("tree", trees.ALL, ids=str)
def test_what_orbax_takes_is_taken(tree: str) -> None:
    state = trees.ALL[tree]()
    stock, ours = ocp.StandardCheckpointHandler(), FlashpointStandardHandler()
    trees.assert_equal(ours._validate_save_state(state), stock._validate_save_state(state))


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"a": {"w": np.ones(2), "odd": Odd()}}, id="odd"),
        pytest.param({"a": ["text"]}, id="text"),
        pytest.param({"a": np.float32(1.5), "b": 2}, id="a number of numpy's"),
        pytest.param(None, id="nothing"),
        pytest.param(np.ones(2), id="an array alone"),
        pytest.param(jnp.ones(2), id="a jax.Array alone"),
        pytest.param(3, id="a number alone"),
        pytest.param({}, id="empty"),
    ],
)
@pytest.mark.parametrize("has_args", [False, True])
def test_what_orbax_refuses_or_converts_is_refused_or_converted_alike(state: Any, has_args: bool) -> None:
    def outcome(handler: Any) -> Any:
        args = jax.tree.map(lambda _: ocp.SaveArgs(aggregate=True), state) if has_args else None
        try:
            return jax.tree.map(
                lambda leaf: (type(leaf), str(leaf)), handler._validate_save_state(state, args)
            )
        except ValueError as error:
            return str(error)

    assert outcome(FlashpointStandardHandler()) == outcome(ocp.StandardCheckpointHandler())
