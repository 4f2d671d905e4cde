"""A program without Flashpoint: it reads items with stock libraries, and compares all bytes with what was saved.

Run as ``python -I -S stock_reader.py <site-packages> <expected>``: no working directory, no ``PYTHONPATH`` and no
``.pth`` file can bring Flashpoint in, and a finder refuses its names. It prints how long each way of reading took.

``<expected>`` is a pickle of ``(has_devices, {folder: {name: (kind, dtype, shape, bytes)}})``: whether this program has
the devices that the arrays were saved from, without which stock Orbax restores nothing unless it is told where to; the
kind is ``jax``, ``numpy``, ``scalar``, or the implementation of a random key.
"""

import json
import os
import pickle
import sys
import time


class _Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("flashpoint", "flashpoint_jax", "flashpoint_torch", "tests"):
            raise ModuleNotFoundError(name)


sys.path.append(sys.argv[1])
sys.meta_path.insert(0, _Refusing())
for absent in ("flashpoint", "flashpoint_jax", "flashpoint_torch"):
    try:
        __import__(absent)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{absent} can be imported: this proves nothing")

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax  # noqa: E402
import ml_dtypes  # noqa: E402, F401
import numpy as np  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
import tensorstore as ts  # noqa: E402
from safetensors import safe_open  # noqa: E402

NUMPY_KNOWS = {"BOOL", "U8", "I8", "U16", "I16", "F16", "U32", "I32", "F32", "U64", "I64", "F64"}


def compare(found, expected, where):
    assert found.keys() == expected.keys(), (where, found.keys() ^ expected.keys())
    for name, (kind, dtype, shape, data) in expected.items():
        value = found[name]
        if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            assert str(jax.random.key_impl(value)) == kind, (where, name)
            value = jax.random.key_data(value)
        value = np.asarray(value)
        assert (value.dtype.name, value.shape) == (dtype, shape), (where, name, value.dtype, value.shape)
        assert value.tobytes() == data, (where, name)


def by_name(tree):
    """Leaves by the names that Orbax gives them."""

    def part(key):
        return str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {".".join(map(part, path)): leaf for path, leaf in leaves}


def standard(folder, expected):
    with ocp.StandardCheckpointer() as checkpointer:
        found = by_name(checkpointer.restore(folder))
    compare(found, expected, "StandardCheckpointer")


def standard_with_target(folder, expected):
    """As replicas on all devices, whatever the sharding was."""
    mesh = jax.make_mesh((4,), ("z",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def target(path, leaf):
        kind, dtype, shape, _ = expected[next(iter(by_name(one(path, leaf))))]
        if kind == "scalar":
            return 0 if dtype == "int64" else 0.0
        if kind == "numpy":
            return np.zeros(shape, dtype)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    def one(path, leaf):
        for key in reversed(path):
            leaf = {str(next(getattr(key, n) for n in ("key", "idx", "name") if hasattr(key, n))): leaf}
        return leaf

    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.metadata(folder).item_metadata.tree
        wanted = jax.tree_util.tree_map_with_path(target, tree)
        found = by_name(checkpointer.restore(folder, wanted))
    for name, (kind, *_) in expected.items():
        if kind not in ("numpy", "scalar"):
            assert len(found[name].sharding.device_set) == 4, name
    compare(found, expected, "StandardCheckpointer with a target")


def pytree(folder, expected):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        compare(by_name(checkpointer.restore(folder)), expected, "PyTreeCheckpointHandler")


def tensorstore(folder, expected):
    store = f"file://{folder}/|ocdbt:"
    keys = set(ts.KvStore.open(store).result().list().result())
    context = ts.Context()
    opened = {}
    for name in expected:
        is_v3 = f"{name}/zarr.json".encode() in keys
        assert is_v3 != (f"{name}/.zarray".encode() in keys), name
        spec = {"driver": "zarr3" if is_v3 else "zarr", "kvstore": f"{store}{name}/"}
        opened[name] = ts.open(spec, context=context, open=True)
    reads = {name: array.result().read() for name, array in opened.items()}
    compare({name: read.result() for name, read in reads.items()}, expected, "TensorStore")


def safetensors(folder, expected):
    found = {}
    for blob in sorted(name for name in os.listdir(folder) if name.endswith(".safetensors")):
        with safe_open(f"{folder}/{blob}", "np") as file:
            info = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for key in file.keys():  # noqa: SIM118
                if key.startswith("__pad__."):
                    continue
                name = key if key in expected else key.rpartition("@")[0]  # of several shards in one file
                _, dtype, shape, _ = expected[name]
                if file.get_slice(key).get_dtype() in NUMPY_KNOWS:
                    part = file.get_tensor(key)
                else:
                    with safe_open(f"{folder}/{blob}", "pt") as other:
                        import torch

                        tensor = other.get_tensor(key)
                        part = tensor.reshape(-1).view(torch.uint8).numpy().view(dtype).reshape(tensor.shape)
                start = info[key]["saved_offsets"]
                if part.dtype != dtype:  # one that safetensors has no name for: its bytes
                    assert part.dtype == np.uint8, key
                    part = np.ascontiguousarray(part).view(dtype)[..., 0]
                    start = start[:-1]
                whole = found.setdefault(name, np.zeros(shape, dtype))
                whole[tuple(slice(s, s + n) for s, n in zip(start, part.shape, strict=True))] = part
    compare(found, expected, "safetensors")


def main():
    with open(sys.argv[2], "rb") as file:
        has_devices, folders = pickle.load(file)
    ways = [standard_with_target, tensorstore, safetensors]
    if has_devices:
        ways += [standard, pytree]
    seconds = {}
    for folder, expected in folders.items():
        for way in ways:
            began = time.perf_counter()
            try:
                way(folder, expected)
            except Exception as error:
                raise AssertionError(f"{way.__name__} of {folder}") from error
            seconds[way.__name__] = seconds.get(way.__name__, 0) + time.perf_counter() - began
    assert not [name for name in sys.modules if name.startswith("flashpoint")]
    print("read", json.dumps({name: round(value, 1) for name, value in seconds.items()}), flush=True)
    os._exit(0)


main()
