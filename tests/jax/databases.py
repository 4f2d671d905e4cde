"""Folders with OCDBT databases, and how the stock library and ours read them."""

import os
from collections.abc import Callable, Mapping

import numpy as np
import tensorstore as ts

from flashpoint.layout import Entry, ObjectLayout, plan_layout
from flashpoint_jax import ocdbt
from flashpoint_jax.ocdbt import Reader, Reference, Value
from flashpoint_jax.zarr_index import Source, array_name

UUID = bytes(range(16))


def write(folder: str, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)


def database(pairs: Mapping[bytes, Value], **options: int) -> dict[str, bytes]:
    nodes = ocdbt.encode_nodes(pairs, "nodes.ocdbt", **options)
    return {"nodes.ocdbt": nodes.data, ocdbt.MANIFEST_NAME: ocdbt.manifest_of(nodes, UUID)}


def fetch_from(files: Mapping[str, bytes]) -> Callable[[str, int, int | None], bytes]:
    return lambda path, offset, length: files[path][offset:][:length]


def files_below(folder: str) -> dict[str, bytes]:
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, folder)] = file.read()
    return found


def stock(folder: str) -> ts.KvStore:
    return ts.KvStore.open(f"file://{folder}/|ocdbt:").result()


def stock_contents(folder: str) -> dict[bytes, bytes]:
    store = stock(folder)
    reads = {key: store.read(key) for key in store.list().result()}
    return {key: read.result().value for key, read in reads.items()}


def resolve(value: Value, files: Mapping[str, bytes]) -> bytes:
    if isinstance(value, Reference):
        return files[value.file][value.offset : value.offset + value.length]
    return value


def our_contents(files: Mapping[str, bytes]) -> dict[bytes, bytes]:
    """Every key with its value's bytes, in order."""
    return {key: resolve(value, files) for key, value in Reader(fetch_from(files)).items()}


# ---- objects ------------------------------------------------------------------------------------


def random_array(dtype: np.dtype, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random bits, of those that the dtype's numbers have: NaNs and infinities too."""
    generator = np.random.default_rng(seed)
    if dtype == np.bool_:
        return generator.integers(0, 2, shape).astype(np.bool_)
    bits = {"int4": 4, "int2": 2, "float4_e2m1fn": 4}.get(dtype.name)
    if bits:
        return generator.integers(0, 1 << bits, shape).astype(np.int8).astype(np.int32).astype(dtype)
    return np.frombuffer(generator.bytes(dtype.itemsize * int(np.prod(shape))), dtype).reshape(shape)


def bytes_of(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def object_file(
    arrays: Mapping[str, np.ndarray], entries: list[Entry], **options: int
) -> tuple[ObjectLayout, bytearray]:
    """An object with these shards of ``arrays`` (whole ones, by the name of the entry)."""
    layout = plan_layout(entries, **options)
    # What lies between entries is not zero: nothing may depend on it.
    data = bytearray(b"\xa5" * layout.nbytes)
    data[: layout.header_bytes] = layout.header
    for entry, begin, end in zip(layout.entries, layout.begins, layout.ends, strict=True):
        box = tuple(slice(o, o + n) for o, n in zip(entry.origin, entry.shape, strict=True))
        data[begin:end] = bytes_of(arrays[array_name(entry)][box])
    return layout, data


def version(
    folder: str, arrays: Mapping[str, np.ndarray], objects: list[list[Entry]], **options: int
) -> list[Source]:
    """The objects of a version, one for each list of entries, written to ``folder``."""
    sources = []
    for rank, entries in enumerate(objects):
        layout, data = object_file(arrays, entries, **options)
        name = f"rank{rank:05d}-0.safetensors"
        write(folder, {name: bytes(data)})
        sources.append(Source(name, layout))
    return sources


def stock_array(folder: str, name: str, driver: str) -> np.ndarray:
    """As a stranger would read it."""
    spec = {
        "driver": driver,
        "kvstore": {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"},
        "fill_missing_data_reads": False,
    }
    return ts.open(spec).result().read().result()
