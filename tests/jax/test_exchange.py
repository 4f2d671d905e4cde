"""A container that PyTorch wrote is loaded by JAX, and the other way round, bit for bit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import torch
import torch.distributed.checkpoint as dcp
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import flashpoint
import flashpoint_jax
import flashpoint_torch as fpt
from flashpoint.dtypes import DTYPES
from flashpoint.errors import CheckpointNotFoundError, CorruptObjectError, InvalidIdError, MismatchError
from flashpoint_torch.dtypes import TORCH_DTYPES
from tests.jax import trees
from tests.jax.torch_ranks import Model, bits, blank, load_as_dtensors, save_sharded
from tests.jax.workers import Workers
from tests.torch.workers import Workers as Ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

Abstract = jax.ShapeDtypeStruct
ROWS, COLUMNS, BOTH = ("x", None), (None, "y"), ("y", "x")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Torch processes that stay up."""
    pool = Ranks()
    try:
        yield pool
    finally:
        pool.close()


def random_array(name: str, *shape: int) -> np.ndarray[Any, Any]:
    """Random bits of a dtype."""
    dtype = DTYPES[name].numpy
    assert dtype is not None
    count = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng([7, count]).integers(0, 256, count, np.uint8)
    if name == "bool":
        data &= 1
    if name in ("int2", "uint2", "int4", "uint4", "float4_e2m1fn"):
        data = np.arange(count, dtype=np.uint8) % (4 if "2" in name[-1:] else 7)
        return data.astype(np.int8).astype(dtype).reshape(shape)
    return data.view(dtype).reshape(shape)


# ---- torch -> JAX -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch_run(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The container of a model that two ranks hold in shards."""
    root = Path("/dev/shm", f"flashpoint-test-{tmp_path_factory.mktemp('exchange').name}-{os.getpid()}")
    try:
        ranks.run(2, save_sharded, f"{root}/job")
        yield f"{root}/job/step-7_ckpt"
    finally:
        shutil.rmtree(root, ignore_errors=True)


def wanted(mesh: Any) -> dict[str, Any]:
    """A tree of another shape than the state dict, every leaf with a sharding that it was not saved with."""

    def leaf(shape: tuple[int, ...], dtype: Any, *spec: Any) -> Any:
        return Abstract(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    return {
        "model": {
            "embed": {"weight": leaf((16, 8), jnp.float32, *BOTH)},
            "layers": [
                {"weight": leaf((12, 8), jnp.float32, *COLUMNS), "bias": leaf((12,), jnp.float32, "y")},
                {"weight": leaf((8, 12), jnp.bfloat16, *BOTH), "bias": leaf((8,), jnp.bfloat16)},
            ],
            "scales": leaf((8, 4), jnp.float8_e4m3fn, *ROWS),
        },
        "step": leaf((), jnp.int32),
        "lr": 0.0,
        "name": "",
    }


def expect_model(found: Any, *, step: int = 7) -> None:
    """Every shard that this process has is that part of the model, bit for bit."""
    named = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(found["model"])
    }
    expected = Model().state_dict()
    assert named.keys() == expected.keys()
    for name, array in named.items():
        dtype, shape, data = bits(expected[name])
        whole = np.frombuffer(data, DTYPES[dtype].numpy).reshape(shape)
        assert (array.dtype.name, array.shape) == (dtype, shape), name
        for shard in array.addressable_shards:
            assert bits(shard.data) == bits(whole[shard.index]), name
    assert int(found["step"].addressable_data(0)) == step
    assert (found["lr"], found["name"]) == (3e-4, "run 1")


def test_a_torch_model_fills_a_sharded_tree(torch_run: str) -> None:
    expect_model(flashpoint_jax.load(torch_run, wanted(trees.mesh(2, 2))))


def load_together(container: str) -> int:
    tree = wanted(trees.mesh(4, 2))
    found = flashpoint_jax.load(container, tree)
    expect_model(found)
    assert found["model"]["embed"]["weight"].sharding == tree["model"]["embed"]["weight"].sharding
    return len(found["model"]["embed"]["weight"].addressable_shards)


def test_two_processes_each_load_their_shards(torch_run: str, workers: Workers) -> None:
    assert workers.run(load_together, torch_run) == [4, 4]


def load_on_the_first(container: str) -> int:
    """Onto devices that are all the first process's."""
    found = flashpoint_jax.load(container, wanted(trees.mesh(2, 2)))["model"]
    return sum(len(leaf.addressable_shards) for leaf in jax.tree.leaves(found))


def test_a_process_without_shards_reads_nothing(torch_run: str, job_root: str, workers: Workers) -> None:
    tree = wanted(trees.mesh(2, 2))
    tree = {"model": tree["model"]}
    assert workers.run(load_on_the_first, torch_run) == [4 * len(jax.tree.leaves(tree)), 0]


def load_rows(container: str) -> str:
    """The rows of a matrix that this process's devices have; the first half is all in rank 0's object."""
    sharding = NamedSharding(trees.mesh(8, names=("x",)), PartitionSpec("x"))
    leaf = Abstract((8, 4), jnp.float8_e4m3fn, sharding=sharding)
    try:
        found = flashpoint_jax.load(container, {"model": {"scales": leaf}})
    except CorruptObjectError as error:
        return str(error)
    return f"{len(found['model']['scales'].addressable_shards)} shards"


def test_a_process_reads_no_more_than_it_needs(torch_run: str, job_root: str, workers: Workers) -> None:
    copy = f"{job_root}/step-7_ckpt"
    shutil.copytree(torch_run, copy)
    os.unlink(f"{copy}/rank00001-0.safetensors")
    first, second = workers.run(load_rows, copy)
    assert first == "4 shards"
    assert "step 7: object rank00001-0.safetensors cannot be opened" in second


def save_torch(root: str, state: dict[str, Any], step: int = 1) -> str:
    with fpt.init(root, keep=0) as fp:
        handle = fp.save(state, step=step)
        assert handle.error is None, handle.error
        return fp.path(step)


def test_a_leaf_without_a_sharding_is_on_one_device_and_an_array_gives_its_own(torch_run: str) -> None:
    sharded = trees.sharded(np.zeros((16, 8), np.float32), trees.mesh(2, 2), "x", "y")
    device = jax.devices()[0]
    tree = {"model": {"scales": Abstract((8, 4), jnp.float8_e4m3fn), "embed": {"weight": sharded}}}
    found = flashpoint_jax.load(torch_run, tree)["model"]
    assert found["scales"].devices() == {device}
    assert found["embed"]["weight"].sharding == sharded.sharding


BOTH_KNOW = [name for name in TORCH_DTYPES if DTYPES[name].numpy is not None]


def test_every_dtype_of_torch(job_root: str) -> None:
    """What JAX has no arrays of, without x64, comes as numpy's."""
    arrays = {name: random_array(name, 5, 6) for name in BOTH_KNOW}
    tensors = {
        name: torch.from_numpy(array.view(np.uint8).copy()).view(TORCH_DTYPES[name])
        for name, array in arrays.items()
    }
    path = save_torch(job_root, {"t": tensors})
    wide = {
        name for name in arrays if jax.dtypes.canonicalize_dtype(arrays[name].dtype) != arrays[name].dtype
    }
    assert wide == {"int64", "uint64", "float64", "complex128"}
    tree = {
        name: np.zeros_like(array) if name in wide else Abstract(array.shape, array.dtype)
        for name, array in arrays.items()
    }
    found = flashpoint_jax.load(path, {"t": tree})["t"]
    assert {name: bits(found[name]) for name in found} == {name: bits(arrays[name]) for name in arrays}


def test_a_transposed_weight_is_cut_as_the_leaf_asks(torch_run: str) -> None:
    mesh = trees.mesh(2, 2)
    kernels = {
        str(n): {"kernel": Abstract(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec("x", "y")))}
        for n, (shape, dtype) in enumerate([((8, 12), jnp.float32), ((12, 8), jnp.bfloat16)])
    }
    found = flashpoint_jax.load(
        torch_run,
        {"params": kernels},
        rename=lambda name: name.replace("params", "model/layers").replace("kernel", "weight"),
        transpose=lambda name: (1, 0) if name.endswith("kernel") else None,
    )
    for n, layer in enumerate(Model().layers):
        kernel = found["params"][str(n)]["kernel"]
        assert bits(kernel) == bits(layer.weight.T)
        assert kernel.sharding.spec == PartitionSpec("x", "y")


def test_axes_are_those_of_numpy_on_both_sides(job_root: str) -> None:
    stored = random_array("float32", 2, 3, 4)
    axes = (2, 0, 1)
    path = save_torch(job_root, {"w": torch.from_numpy(stored)})
    turned = stored.transpose(axes)
    sharding = NamedSharding(trees.mesh(2, 2), PartitionSpec("x", "y"))
    leaf = Abstract(turned.shape, jnp.float32, sharding=sharding)
    assert bits(flashpoint_jax.load(path, {"w": leaf}, transpose={"w": axes})["w"]) == bits(turned)
    state = {"w": torch.zeros(turned.shape)}
    fpt.load(path, state, transpose={"w": axes})
    assert bits(state["w"]) == bits(turned)


def test_arrays_do_not_change_with_the_file(job_root: str) -> None:
    """On a CPU, JAX takes over memory that is aligned, and entries of an object are."""
    path = save_torch(job_root, {"w": torch.ones(1024, 1024), "b": torch.ones(16)})
    found = flashpoint_jax.load(
        path, {"w": Abstract((1024, 1024), jnp.float32), "b": Abstract((16,), jnp.float32)}
    )
    view = flashpoint.open(path)["w"]
    blob = f"{path}/rank00000-0.safetensors"
    with open(blob, "r+b") as file:
        file.write(bytes(os.path.getsize(blob)))
    assert (view[0, 0], float(found["w"].min()), float(found["b"].min())) == (0, 1, 1)


# ---- JAX -> torch -----------------------------------------------------------------------------------


def save_orbax(root: str, state: Any, step: int = 5, **options: Any) -> str:
    """Through a stock manager; the path of the item."""
    with ocp.CheckpointManager(root, handler_registry=flashpoint_jax.registry(), **options) as manager:
        manager.save(step, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    return f"{root}/{step}/default"


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4, name="out")(nn.relu(nn.Dense(8, name="hidden")(nn.Embed(16, 4, name="embed")(x))))


def train_state() -> TrainState:
    model = Net()
    params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    params["hidden"] = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params["hidden"])
    over = trees.mesh(2, 2)
    params["embed"]["embedding"] = trees.sharded(params["embed"]["embedding"], over, "x", "y")
    params["out"]["kernel"] = trees.sharded(params["out"]["kernel"], over, "y", None)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
    return state.apply_gradients(grads=jax.tree.map(lambda leaf: leaf * 0.5, params))


def names_of(state: TrainState) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


@pytest.mark.parametrize("how", ["load", "dcp", "open"])
def test_a_flax_state_as_a_state_dict(job_root: str, how: str) -> None:
    expected = names_of(train_state())
    assert {"params.hidden.kernel", "opt_state.0.mu.out.kernel", "opt_state.0.count"} <= expected.keys()
    path = save_orbax(job_root, train_state())
    if how == "open":
        state: Any = flashpoint.open(path)
    else:
        state = {name: blank(array) for name, array in expected.items() if name != "step"} | {"step": 0}
        if how == "load":
            fpt.load(path, state)
            assert state["step"] == 1  # a number, as it was saved
        else:
            state["step"] = torch.zeros((), dtype=torch.int64)
            dcp.load(state, checkpoint_id=path, storage_reader=fpt.FlashpointReader())
        del expected["step"], state["step"]
    assert {name: bits(state[name]) for name in expected} == {name: bits(expected[name]) for name in expected}


class Twin(torch.nn.Module):
    """The same network."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 4)
        self.hidden = torch.nn.Linear(4, 8, dtype=torch.bfloat16)
        self.out = torch.nn.Linear(8, 4)


def flax_name(name: str) -> str:
    kind = "embedding" if name == "embed.weight" else name.split(".")[1].replace("weight", "kernel")
    return f"params.{name.split('.')[0]}.{kind}"


def test_a_module_is_filled_where_it_is(job_root: str) -> None:
    path = save_orbax(job_root, train_state())
    expected = names_of(train_state())
    module = Twin()
    held = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    fpt.load(
        path,
        module.state_dict(),
        rename=flax_name,
        transpose={"hidden.weight": (1, 0), "out.weight": (1, 0)},
    )
    for name, tensor in module.state_dict().items():
        stored = np.asarray(expected[flax_name(name)])
        assert bits(tensor) == bits(stored.T if name in ("hidden.weight", "out.weight") else stored)
        assert tensor.data_ptr() == held[name]


class Tracker:
    """A Stateful of the user's."""

    def __init__(self) -> None:
        self.mean = torch.zeros(3)
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "count": 0, "seen": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def test_stateful_objects_load_what_was_found(job_root: str) -> None:
    path = save_orbax(job_root, {"tracker": {"mean": jnp.arange(3.0), "count": 4, "seen": np.arange(2)}})
    tracker = Tracker()
    fpt.load(path, {"tracker": tracker})
    assert tracker.loaded["mean"] is tracker.mean
    assert tracker.mean.tolist() == [0, 1, 2]
    assert (tracker.loaded["count"], tracker.loaded["seen"].tolist()) == (4, [0, 1])


def test_torch_ranks_load_their_shards(ranks: Ranks, job_root: str) -> None:
    matrices = {
        name: np.asarray(leaf) for name, leaf in names_of(train_state()).items() if np.ndim(leaf) == 2
    }
    ranks.run(2, load_as_dtensors, save_orbax(job_root, train_state()), matrices)


def test_every_dtype_of_jax(job_root: str) -> None:
    arrays = {name: random_array(name, 5, 6) for name, dtype in DTYPES.items() if dtype.numpy is not None}
    state = {
        name: jnp.asarray(array) if jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype else array
        for name, array in arrays.items()
    }
    path = save_orbax(job_root, {"t": state})
    known = {name: blank(arrays[name]) for name in BOTH_KNOW}
    fpt.load(path, {"t": known})
    assert {name: bits(known[name]) for name in known} == {name: bits(arrays[name]) for name in known}
    unknown = {"int4", "float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz"}
    with pytest.raises(MismatchError) as caught:
        fpt.load(path, {"t": {name: torch.zeros(5, 6) for name in unknown}})
    assert all(f"torch has no tensors of dtype {name}" in str(caught.value) for name in unknown)
    known = {name: torch.zeros_like(known[name]) for name in ("bfloat16", "float8_e5m2")}
    dcp.load({"t": known}, checkpoint_id=path, storage_reader=fpt.FlashpointReader())
    assert {name: bits(known[name]) for name in known} == {name: bits(arrays[name]) for name in known}


# ---- either ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", trees.ALL)
def test_jax_loads_its_own_as_it_was(job_root: str, kind: str) -> None:
    tree = trees.ALL[kind]()
    path = save_orbax(job_root, tree)
    trees.assert_equal(flashpoint_jax.load(path, trees.abstract(tree)), tree)


def test_a_key_of_another_kind_is_refused(job_root: str) -> None:
    path = save_orbax(job_root, {"key": jax.random.key(1, impl="rbg")})
    found = flashpoint_jax.load(path, {"key": Abstract((), jax.random.key(0, impl="rbg").dtype)})
    assert jax.random.key_impl(found["key"]) == "rbg"
    with pytest.raises(MismatchError, match="'key': a random key of rbg there, of unsafe_rbg here"):
        flashpoint_jax.load(path, {"key": Abstract((), jax.random.key(0, impl="unsafe_rbg").dtype)})


@pytest.fixture
def stored(job_root: str) -> str:
    state = {
        "model": {"layers.0.weight": torch.arange(6.0).view(2, 3), "layers.0.bias": torch.arange(2)},
        "a/b": torch.zeros(1),
        "a": {"c": torch.zeros(2), "d": torch.zeros(2), "d/e": torch.zeros(2)},
        "big": torch.tensor([1, 2**40]),
        "wide": torch.zeros(2, dtype=torch.float64),
        "step": 7,
        "lr": 0.5,
        "sparse": torch.eye(2).to_sparse(),
    }
    return save_torch(job_root, state)


def test_renamed_by_a_mapping_or_by_a_function(stored: str) -> None:
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    leaf = Abstract((2, 3), jnp.float32)
    jax_rules = [
        {"x/w": "model.layers.0.weight"},
        {"x.w": "model/layers/0/weight"},
        {"x/w": "model/layers.0.weight"},
    ]
    for rule in [*jax_rules, lambda name: name.replace("x/w", "model.layers.0.weight")]:
        found = flashpoint_jax.load(
            stored, {"x": {"w": leaf}, "a/b": Abstract((1,), jnp.float32)}, rename=rule
        )
        assert bits(found["x"]["w"]) == bits(weight)
        state: dict[str, Any] = {"x.w": torch.zeros(2, 3), "a/b": torch.ones(1)}
        torch_rule = (
            rule if isinstance(rule, dict) else lambda name: name.replace("x.w", "model.layers.0.weight")
        )
        fpt.load(stored, state, rename=torch_rule)
        assert bits(state["x.w"]) == bits(weight)
        assert state["a/b"] == 0


def test_numbers_become_what_the_leaf_is(stored: str) -> None:
    found = flashpoint_jax.load(stored, {"step": Abstract((), jnp.int32), "lr": Abstract((), jnp.bfloat16)})
    assert (found["step"].dtype, int(found["step"])) == (jnp.int32, 7)
    assert (found["lr"].dtype, float(found["lr"])) == (jnp.bfloat16, 0.5)
    assert flashpoint_jax.load(stored, {"step": 0.0, "lr": np.float32(0)}) == {
        "step": 7.0,
        "lr": np.float32(0.5),
    }


def test_casts_where_the_leaf_asks(stored: str) -> None:
    name = "model.layers.0.bias"
    found = flashpoint_jax.load(
        stored, {name: Abstract((2,), jnp.bfloat16), "wide": Abstract((2,), jnp.float32)}
    )
    assert bits(found[name]) == bits(np.arange(2).astype(ml_dtypes.bfloat16))
    state = {name: torch.zeros(2, dtype=torch.float16)}
    fpt.load(stored, state)
    assert bits(state[name]) == bits(np.arange(2).astype(np.float16))


ARRAY = Abstract((2,), jnp.float32)
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "missing": (
        {"layers.0.weight": ARRAY},
        {},
        "'layers.0.weight': not in the checkpoint; near: 'model.layers.0.weight'",
    ),
    "near": ({"model": {"layers.0.wieght": ARRAY}}, {}, "near: 'model.layers.0.weight'"),
    "renamed": ({"x": ARRAY}, {"rename": {"x": "y"}}, "'x' (renamed 'y'): not in the checkpoint"),
    "no leaf": ({"big": Abstract((2,), jnp.int32)}, {"rename": {"x": "big"}}, "'x': rename= names it, but"),
    "shape": ({"big": Abstract((3,), jnp.int32)}, {}, "'big': shape [2] there, [3] here"),
    "turned": (
        {"model": {"layers.0.weight": Abstract((3, 2), jnp.float32)}},
        {},
        "[3, 2] here: transpose= turns it",
    ),
    "axes": (
        {"big": ARRAY},
        {"transpose": {"big": (1, 0)}},
        "transpose=(1, 0) does not order the 1 axes of [2]",
    ),
    "kind": ({"wide": Abstract((2,), jnp.int32)}, {}, "'wide': dtype float64 there cannot be cast to int32"),
    "no casts": (
        {"wide": ARRAY},
        {"cast": False},
        "'wide': dtype float64 there, float32 here, and cast=False",
    ),
    "too large": ({"big": Abstract((2,), jnp.int32)}, {}, "'big': holds int64 values that int32 does not"),
    "an object": ({"sparse": ARRAY}, {}, "'sparse': a Python object there, an array here"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named(stored: str, case: str) -> None:
    tree, options, message = WRONG[case]
    with pytest.raises(MismatchError) as caught:
        flashpoint_jax.load(stored, tree, **options)
    assert message in str(caught.value)
    assert f"the state does not fit step 1 ({stored}) in 1 places" in str(caught.value)
    state = jax.tree.map(lambda leaf: torch.full(leaf.shape, 3, dtype=TORCH_DTYPES[leaf.dtype.name]), tree)
    with pytest.raises(MismatchError) as caught:
        fpt.load(stored, state, **options)
    assert message in str(caught.value)
    assert all(bool((tensor == 3).all()) for tensor in jax.tree.leaves(state))


def test_what_only_jax_refuses(stored: str) -> None:
    columns = NamedSharding(trees.mesh(2, 2), PartitionSpec(None, "x"))
    uneven = Abstract((2, 3), jnp.float32, sharding=columns)
    nowhere = NamedSharding(jax.sharding.AbstractMesh((2,), ("x",)), PartitionSpec("x"))
    abstract = Abstract((2,), jnp.int32, sharding=nowhere)
    for tree, message in [
        ({"wide": Abstract((2,), np.float64)}, "'wide': float64 arrays need jax_enable_x64"),
        ({"step": Abstract((2,), jnp.int32)}, "'step': shape [] there, [2] here"),
        ({"step": ""}, "'step': int there, str here"),
        ({"lr": 1}, "'lr': float there, int here"),
        ({"wide": object()}, "'wide': an array there, object here"),
        ({"wide": np.array(["a", "b"])}, "'wide': dtype <U1 is none that can be stored"),
        ({"model": {"layers.0.weight": uneven}}, "evenly divide the shape"),
        ({"big": abstract}, "'big': a sharding over devices is needed"),
    ]:
        with pytest.raises(MismatchError) as caught:
            flashpoint_jax.load(stored, tree)
        assert message in str(caught.value)


def test_names_that_may_be_several_are_not_guessed(job_root: str) -> None:
    state = {
        "a": {"b/c": torch.zeros(1)},
        "a/b": {"c": torch.ones(1)},
        "d": {"e": torch.ones(1)},
        "d/e": torch.zeros(1),
    }
    path = save_torch(job_root, state)
    leaf = Abstract((1,), jnp.float32)
    with pytest.raises(
        MismatchError, match=r"'a/b/c': may be any of '(a\.b/c|a/b\.c)', .*: say which with rename="
    ):
        flashpoint_jax.load(path, {"a": {"b": {"c": leaf}}})
    # The leaf's own way through the tree, with dots, is no guess.
    found = flashpoint_jax.load(path, {"d": {"e": leaf}, "d/e": leaf, "a": {"b/c": leaf}, "a/b": {"c": leaf}})
    assert [float(x[0]) for x in jax.tree.leaves(found)] == [0, 1, 1, 0]
    assert (found["d"]["e"], found["d/e"]) == (1, 0)


def test_a_flipped_bit_is_found_on_both_sides(job_root: str) -> None:
    path = save_torch(job_root, {"w": torch.ones(16)})
    blob = f"{path}/rank00000-0.safetensors"
    place = flashpoint.open(path).manifest.layout(flashpoint.open(path).manifest.objects[0]).begins[0]
    with open(blob, "r+b") as file:
        file.seek(place)
        file.write(b"\x01")
    state = {"w": torch.zeros(16)}
    with pytest.raises(CorruptObjectError, match="rank00000-0.safetensors is corrupt"):
        flashpoint_jax.load(path, {"w": Abstract((16,), jnp.float32)})
    with pytest.raises(CorruptObjectError, match="rank00000-0.safetensors is corrupt"):
        fpt.load(path, state)
    assert not state["w"].any()
    assert float(flashpoint_jax.load(path, {"w": Abstract((16,), jnp.float32)}, verify=False)["w"][1]) == 1


# ---- where a container is ----------------------------------------------------------------------------


def test_an_orbax_step_stands_for_its_one_item(job_root: str) -> None:
    item = save_orbax(job_root, {"w": jnp.arange(3)})
    for path in (item, os.path.dirname(item)):
        with flashpoint.open(path) as view:
            assert (view.container.path, view.container.step, view.container.job_root) == (item, 5, job_root)
            assert view["w"].tolist() == [0, 1, 2]
    shutil.copytree(item, f"{job_root}/copy")
    assert flashpoint.open(f"{job_root}/copy")["w"].tolist() == [0, 1, 2]


def test_steps_may_have_flashpoints_names(job_root: str) -> None:
    options = ocp.CheckpointManagerOptions(step_name_format=flashpoint_jax.StepNameFormat())
    save_orbax(job_root, {"w": jnp.arange(3)}, options=options)
    assert flashpoint.open(f"{job_root}/step-5_ckpt")["w"].tolist() == [0, 1, 2]


def test_a_step_with_several_items_asks_which(job_root: str) -> None:
    with ocp.CheckpointManager(job_root, handler_registry=flashpoint_jax.registry()) as manager:
        items = {name: ocp.args.StandardSave({"w": jnp.arange(3)}) for name in ("model", "ema")}
        manager.save(1, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
    with pytest.raises(InvalidIdError, match=r"has 2 items: give the path of one of them \(ema, model\)"):
        flashpoint.open(f"{job_root}/1")
    assert flashpoint.open(f"{job_root}/1/ema")["w"].tolist() == [0, 1, 2]


def test_what_is_unfinished_or_stock_is_refused(job_root: str) -> None:
    item = save_orbax(job_root, {"w": jnp.arange(3)})
    unfinished = f"{job_root}/6.orbax-checkpoint-tmp"
    shutil.copytree(os.path.dirname(item), unfinished)
    for path in (unfinished, f"{unfinished}/default"):
        with pytest.raises(CheckpointNotFoundError, match="is unfinished: Orbax has not given it its name"):
            flashpoint.open(path)
    marker = Path(job_root, "step-5_ckpt__0__unfinished")
    marker.touch()
    with pytest.raises(CheckpointNotFoundError, match="its marker is still there"):
        fpt.load(item, {"w": torch.zeros(3)})
    marker.unlink()
    with ocp.CheckpointManager(f"{job_root}/stock") as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": jnp.arange(3)}))
        manager.wait_until_finished()
    for path in (f"{job_root}/stock/1", f"{job_root}/stock/1/default"):
        with pytest.raises(
            CheckpointNotFoundError, match="Flashpoint's handlers did not write: load it with Orbax"
        ):
            flashpoint.open(path)
