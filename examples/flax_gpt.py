"""A small GPT in Flax NNX and the text it reads: what train_flax.py trains, and what anybody can load again.

There is nothing of Flashpoint in here: read_with_stock_orbax.py imports it where Flashpoint is not installed.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from real_text import standard_library

LAYERS, HEADS, WIDTH, CONTEXT = 2, 4, 256, 64
VOCABULARY = 256  # every byte is a token
BATCH, DROPOUT, LEARNING_RATE, WARM_UP = 8, 0.1, 1e-3, 10  # BATCH is that of all devices

dense = partial(nnx.Linear, use_bias=False, kernel_init=nnx.initializers.normal(0.02))


class Block(nnx.Module):
    """One transformer layer: causal self-attention, then a two-layer perceptron, each added to its input."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.qkv, self.out = dense(WIDTH, 3 * WIDTH, rngs=rngs), dense(WIDTH, WIDTH, rngs=rngs)
        self.up, self.down = dense(WIDTH, 4 * WIDTH, rngs=rngs), dense(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(DROPOUT, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, _ = x.shape
        q, k, v = jnp.split(self.qkv(self.norm1(x)).reshape(batch, length, HEADS, -1), 3, axis=-1)
        seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(seen.reshape(batch, length, WIDTH)))
        return x + self.dropout(self.down(jax.nn.gelu(self.up(self.norm2(x)))))


class GPT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        small = nnx.initializers.normal(0.02)
        self.token = nnx.Embed(VOCABULARY, WIDTH, embedding_init=small, rngs=rngs)
        self.place = nnx.Embed(CONTEXT, WIDTH, embedding_init=small, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = dense(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.token(tokens) + self.place(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: GPT, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets).mean()


# --- the whole state of the training ---


def new(seed: int, steps: int) -> tuple[GPT, nnx.Optimizer]:
    model = GPT(nnx.Rngs(params=seed, dropout=seed + 1))
    rate = optax.warmup_cosine_decay_schedule(0, LEARNING_RATE, WARM_UP, max(steps, WARM_UP + 1))
    update = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1))
    return model, nnx.Optimizer(model, update, wrt=nnx.Param)


def state_of(model: GPT, optimizer: nnx.Optimizer) -> dict[str, Any]:
    """Everything that decides the next step, as one tree: what is left out makes a resumed run go another way.

    Dropout's dice lie in the model's state; the optimizer's has the number of steps done, and the batch of a
    step follows from that number.
    """
    return {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}


def abstract_state(seed: int, steps: int, mesh: jax.sharding.Mesh | None = None) -> dict[str, Any]:
    """The state's shapes and dtypes, with the sharding that each array has on a mesh, or on one device."""
    shapes = nnx.eval_shape(lambda: state_of(*new(seed, steps)))
    return jax.tree.map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding_of(path, leaf, mesh)
        ),
        shapes,
    )


def sharding_of(path: Any, leaf: Any, mesh: jax.sharding.Mesh | None) -> jax.sharding.Sharding:
    """Matrices are cut over both axes of the mesh; the rest is small, and whole on every device.

    The one axis runs between the nodes, so no node has a whole matrix: what a lost node had, only it had.
    """
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    if leaf.ndim != 2:
        return NamedSharding(mesh, PartitionSpec())
    # The second matrix of a pair takes its input as the first one leaves it: cut over "model".
    adds = any(name in jax.tree_util.keystr(path) for name in ("'out'", "'down'"))
    return NamedSharding(mesh, PartitionSpec(*(("model", "data") if adds else ("data", "model"))))


# --- data ---


def windows(text: np.ndarray, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The batch of a step: windows of CONTEXT bytes, and for each byte the one that follows."""
    starts = np.random.default_rng((seed, step)).integers(len(text) - CONTEXT - 1, size=BATCH)
    rows = np.stack([text[start : start + CONTEXT + 1] for start in starts]).astype(np.int32)
    return rows[:, :-1], rows[:, 1:]


def text_to_read() -> np.ndarray:
    return np.frombuffer(standard_library(), np.uint8)


def exam(parameters: nnx.State, seed: int) -> float:
    """The loss of a model on a batch that is none of the training's, without dropout, on one device.

    Args:
        parameters: those of a `GPT`, whole.
    """

    @jax.jit
    def loss(parameters: nnx.State, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        model, _ = new(seed, steps=1)
        nnx.update(model, parameters)
        model.eval()
        return loss_of(model, tokens, targets)

    with jax.default_device(jax.local_devices()[0]):
        return float(loss(parameters, *windows(text_to_read(), seed, step=0)))
