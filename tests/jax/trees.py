"""Trees for tests: every kind of leaf and container that a JAX program saves."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def mesh(*shape: int, names: tuple[str, ...] = ("x", "y")) -> Mesh:
    """A mesh over the first devices of the job."""
    shape = shape or (2, 2)
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names[: len(shape)])


def sharded(value: Any, over: Mesh, *spec: Any) -> jax.Array:
    """A global array with the given contents, whatever processes its mesh is over."""
    host = np.asarray(value)
    sharding = NamedSharding(over, PartitionSpec(*spec))
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    bias: Any


@flax.struct.dataclass
class Block:
    inner: Layer
    scale: Any
    depth: int = flax.struct.field(pytree_node=False, default=2)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4)(nn.relu(nn.Dense(8)(x)))


def dtypes() -> dict[str, Any]:
    names = ("bool", "int8", "uint8", "int32", "uint32", "float16", "float32", "complex64")
    extended = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    tree = {name: jnp.arange(6).astype(name) for name in names}
    return tree | {name: jnp.arange(6, dtype=getattr(ml_dtypes, name)) for name in extended}


def containers() -> dict[str, Any]:
    return {
        "dataclass": Layer(jnp.ones((2, 3)), jnp.zeros(3)),
        "flax": Block(Layer(jnp.full((2,), 2.0), jnp.arange(3)), jnp.float32(0.5)),
        "list": [jnp.arange(2), (jnp.arange(3), {"deep": jnp.arange(4)})],
        "empty": {"dict": {}, "list": [], "none": None},
    }


def shardings() -> dict[str, Any]:
    m = mesh()
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    return {
        "rows": sharded(value, m, "x", None),
        "columns": sharded(value, m, None, "y"),
        "both": sharded(value, m, "y", "x"),
        "together": sharded(value, m, ("x", "y")),
        "replicated": sharded(value, m),
        "scalar": sharded(np.float32(3), m),
        "single": jnp.asarray(value),
    }


def host() -> dict[str, Any]:
    return {
        "numpy": np.arange(12, dtype=np.int64).reshape(3, 4),
        "strided": np.arange(24).reshape(4, 6)[:, ::2],
        "bf16": np.arange(4).astype(ml_dtypes.bfloat16),
        "int": 7,
        "float": 2.5,
    }


def keys() -> dict[str, Any]:
    return {
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4), 4),
        "rbg": jax.random.key(5, impl="rbg"),
        "raw": jax.random.PRNGKey(6),
    }


def optimizer() -> dict[str, Any]:
    parameters = {"w": jnp.ones((4, 4)), "b": jnp.zeros(4)}
    optimizer = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    return {"params": parameters, "opt": optimizer.init(parameters)}


def linen() -> Any:
    model = Dense()
    variables = model.init(jax.random.key(0), jnp.ones((1, 4)))
    return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.adam(1e-3))


def nnx_state() -> Any:
    return nnx.state(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))


ALL = {
    "dtypes": dtypes,
    "containers": containers,
    "shardings": shardings,
    "host": host,
    "keys": keys,
    "optimizer": optimizer,
    "linen": linen,
    "nnx": nnx_state,
}


def abstract(tree: Any) -> Any:
    """The tree with shapes and shardings in place of arrays."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return leaf

    return jax.tree.map(one, tree)


def bits(leaf: Any) -> Any:
    """What is compared of a leaf: type, dtype, shape and bytes of all that this process has of it."""
    if isinstance(leaf, jax.Array):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return "key", str(jax.random.key_impl(leaf)), bits(jax.random.key_data(leaf))
        parts = {
            str(shard.index): np.asarray(shard.data).tobytes()
            for shard in sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)
        }
        return "jax", leaf.dtype.name, leaf.shape, parts
    if isinstance(leaf, np.ndarray):
        return "numpy", leaf.dtype.name, leaf.shape, leaf.tobytes()
    return type(leaf).__name__, leaf


def assert_equal(found: Any, expected: Any, *, structure: bool = True) -> None:
    if structure:
        assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert bits(one) == bits(other), jax.tree_util.keystr(path)
