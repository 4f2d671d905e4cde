"""Stock Orbax, TensorStore and safetensors, in a process that has nothing of ours, read every byte."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import flashpoint_jax
from flashpoint.errors import CorruptObjectError
from flashpoint.manifest import decode
from flashpoint_jax.folder import holds_blobs
from flashpoint_jax.zarr_index import CRC_BYTES
from tests.jax import trees
from tests.jax.workers import Workers

Args = ocp.args
READER = str(Path(__file__).with_name("stock_reader.py"))
Expected = dict[str, tuple[str, str, tuple[int, ...], bytes]]


def manager(root: str, ts_checksums: bool = False, **options: Any) -> Any:
    return ocp.CheckpointManager(
        root,
        options=ocp.CheckpointManagerOptions(**options),
        handler_registry=flashpoint_jax.registry(ts_checksums=ts_checksums),
    )


def expected_of(tree: Any) -> Expected:
    """Kind, dtype, shape and bytes of every leaf, by the name that Orbax gives it."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        parts = (next(getattr(key, n) for n in ("key", "idx", "name") if hasattr(key, n)) for key in path)
        kind = "jax" if isinstance(leaf, jax.Array) else "numpy" if isinstance(leaf, np.ndarray) else "scalar"
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            kind, leaf = str(jax.random.key_impl(leaf)), jax.random.key_data(leaf)
        host = np.asarray(leaf)
        found[".".join(map(str, parts))] = (kind, host.dtype.name, host.shape, host.tobytes())
    return found


def read_without_us(
    folders: dict[str, Expected], tmp_path: Path, *, has_devices: bool = True, timeout_s: float = 240
) -> str:
    """Have `stock_reader` compare all folders; what it printed."""
    path = tmp_path / "expected"
    path.write_bytes(pickle.dumps((has_devices, folders)))
    done = subprocess.run(
        [sys.executable, "-I", "-S", READER, sysconfig.get_paths()["purelib"], str(path)],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("read"), done.stdout
    return done.stdout


def every_dtype() -> dict[str, Any]:
    names = ("int16", "uint16", "int64", "uint64", "float64", "complex128")
    more = ("int4", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz")
    return {
        **trees.dtypes(),
        "host": {name: np.arange(6).astype(name) for name in names},
        "jax": {name: jnp.arange(6).astype(getattr(ml_dtypes, name)) for name in more},
    }


STATES = {**trees.ALL, "every dtype": every_dtype, "one": lambda: {"w": jnp.arange(3.0)}}


def test_every_dtype_and_sharding_is_read_by_stock_libraries(job_root: str, tmp_path: Path) -> None:
    folders = {}
    for ts_checksums in (False, True):
        root = f"{job_root}/{ts_checksums}"
        with manager(root, ts_checksums) as m:
            for step, make in enumerate(STATES.values()):
                state = make()
                m.save(step, args=Args.StandardSave(state))
                folders[f"{root}/{step}/default"] = expected_of(state)
    assert all(map(holds_blobs, folders))
    read_without_us(folders, tmp_path)


# ---- two processes ----------------------------------------------------------------------------------


def state_of_two() -> dict[str, Any]:
    over = trees.mesh(4, 2)
    value = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
    specs = {"rows": ("x",), "columns": (None, "y"), "both": ("x", "y"), "together": (("y", "x"),), "all": ()}
    arrays = {name: trees.sharded(value, over, *spec) for name, spec in specs.items()}
    arrays["bf16"] = trees.sharded(value.astype(ml_dtypes.bfloat16), over, "y", "x")
    return {**arrays, "host": np.arange(5), "step": 7}


def save_on_two(root: str, ts_checksums: bool) -> Any:
    with manager(root, ts_checksums) as m:
        m.save(1, args=Args.StandardSave(state_of_two()))
        m.wait_until_finished()
        wanted = trees.abstract(state_of_two())
        trees.assert_equal(m.restore(1, args=Args.StandardRestore(wanted)), state_of_two())


def test_what_two_processes_saved_is_read_by_stock_libraries(
    workers: Workers, job_root: str, tmp_path: Path
) -> None:
    value = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
    whole = {name: jnp.asarray(value) for name in ("rows", "columns", "both", "together", "all")}
    whole["bf16"] = jnp.asarray(value, jnp.bfloat16)
    expected = expected_of({**whole, "host": np.arange(5), "step": 7})
    folders = {}
    for ts_checksums in (False, True):
        workers.run(save_on_two, f"{job_root}/{ts_checksums}", ts_checksums)
        folders[f"{job_root}/{ts_checksums}/1/default"] = expected
    read_without_us(folders, tmp_path, has_devices=False)


# ---- many arrays ------------------------------------------------------------------------------------


def read_many(
    job_root: str, tmp_path: Path, count: int, *, ts_checksums: bool, timeout_s: float = 240
) -> None:
    over, rng = trees.mesh(), np.random.default_rng(0)
    values = rng.normal(size=(count, 4, 2)).astype(np.float32)
    state = {
        f"layer-{i // 100}": {
            f"w{j}": trees.sharded(values[j], over, "x") for j in range(i, min(i + 100, count))
        }
        for i in range(0, count, 100)
    }
    with manager(job_root, ts_checksums) as m:
        began = time.perf_counter()
        m.save(1, args=Args.StandardSave(state))
        m.wait_until_finished()
        seconds = time.perf_counter() - began
    folders = {f"{job_root}/1/default": expected_of(state)}
    print(
        f"{count} arrays, saved in {seconds:.1f} s,", read_without_us(folders, tmp_path, timeout_s=timeout_s)
    )


def test_1000_arrays_are_read_by_stock_libraries(job_root: str, tmp_path: Path) -> None:
    read_many(job_root, tmp_path, 1000, ts_checksums=False)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("ts_checksums", [False, True], ids=["zarr2", "zarr3"])
def test_50000_arrays_are_read_by_stock_libraries(job_root: str, tmp_path: Path, ts_checksums: bool) -> None:
    read_many(job_root, tmp_path, 50_000, ts_checksums=ts_checksums, timeout_s=3000)


# ---- checksums that stock readers verify ------------------------------------------------------------


@pytest.mark.usefixtures("stock_failures")
def test_stock_readers_find_every_flipped_byte_where_there_are_checksums(job_root: str) -> None:
    over = trees.mesh()
    value = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    state = {
        "rows": trees.sharded(value, over, "x"),
        "whole": jnp.asarray(value),
        "large": jnp.arange(600_000, dtype=jnp.int32),
        "bf16": jnp.ones(5, jnp.bfloat16),
        "host": np.arange(4),
        "step": 3,
    }
    with manager(job_root, True) as ours:
        ours.save(1, args=Args.StandardSave(state))
        ours.wait_until_finished()
        folder = f"{job_root}/1/default"
        manifest = decode(Path(folder, ".metadata").read_bytes())
        [record] = manifest.objects
        layout = manifest.layout(record)
        stock = ocp.StandardCheckpointer()
        wanted = trees.abstract(state)
        trees.assert_equal(stock.restore(folder, wanted), state)
        for entry, begin, end in zip(layout.entries, layout.begins, layout.ends, strict=True):
            for offset in {begin, (begin + end) // 2, end - 1, end, end + CRC_BYTES - 1}:
                flip(f"{folder}/{record.name}", offset)
                with pytest.raises(Exception, match="Encountered error while reading|crc32c|[Dd]igest"):
                    stock.restore(folder, wanted)
                spec = {"driver": "zarr3", "kvstore": f"file://{folder}/|ocdbt:{entry.name}/"}
                with pytest.raises(ValueError, match="crc32c|[Dd]igest"):
                    ts.open(spec, open=True).result().read().result()
                with pytest.raises(CorruptObjectError):
                    ours.restore(1, args=Args.StandardRestore(wanted))
                flip(f"{folder}/{record.name}", offset)
            assert entry.nbytes == end - begin
        trees.assert_equal(stock.restore(folder, wanted), state)
        trees.assert_equal(ours.restore(1, args=Args.StandardRestore(wanted)), state)


def flip(path: str, offset: int) -> None:
    with open(path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 16]), offset)


def test_checksums_are_those_of_the_bytes_that_are_there_in_recycled_buffers_too(job_root: str) -> None:
    with manager(job_root, True, max_to_keep=1) as m:
        for step in range(5):
            state = {"w": jnp.full(1000, step, jnp.float32), "n": np.full(3, step)}
            m.save(step, args=Args.StandardSave(state))
            m.wait_until_finished()
            found = ocp.StandardCheckpointer().restore(f"{job_root}/{step}/default")
            trees.assert_equal(found, state)


def test_what_is_read_of_an_item_does_not_depend_on_the_reader(job_root: str) -> None:
    """Either kind of folder is restored by handlers of either setting, and their metadata are as stock Orbax has."""
    state = {**trees.shardings(), **trees.keys(), "host": np.arange(3)}
    for written in (False, True):
        with manager(f"{job_root}/{written}", written) as m:
            m.save(1, args=Args.StandardSave(state))
        tree = ocp.StandardCheckpointer().metadata(f"{job_root}/{written}/1/default").item_metadata.tree
        for read in (False, True):
            with manager(f"{job_root}/{written}", read) as m:
                found = m.restore(1, args=Args.StandardRestore(trees.abstract(state)))
                trees.assert_equal(found, state)
                ours = m.item_metadata(1).tree
                assert jax.tree.leaves(ours) == jax.tree.leaves(tree)
