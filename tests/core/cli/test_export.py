import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from flashpoint.errors import FlashpointError
from flashpoint.export.folder import write_folder
from flashpoint.export.safetensors_files import Item, plan_files
from tests.core.cli.roots import (
    REPOSITORY,
    flashpoint,
    flip_byte,
    object_of,
    position_of,
    rows,
    saved,
    saved_by_two_ranks,
)

RNG = np.random.default_rng(0)
ARRAYS = {
    "model.embed": RNG.standard_normal((300, 40), np.float32),
    "model.layers.0.weight": RNG.standard_normal((40, 40)).astype(ml_dtypes.bfloat16),
    "model.layers.0.scale": RNG.standard_normal(40).astype(ml_dtypes.float8_e4m3fn),
    "model.count": np.int64(7),
    "model.none": np.zeros((0, 3), np.float16),
    "optimizer.moment": RNG.standard_normal((300, 40), np.float32),
}


def exported(run_json, container, out, *args):
    code, report = run_json("export", container, out, "--format", "safetensors", *args)
    assert code == 0
    return report


def read(folder):
    """All tensors of a folder, by the stock library alone; of several files, those that the index says."""
    index = Path(folder, "model.safetensors.index.json")
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
    else:
        with safe_open(Path(folder, "model.safetensors"), "np") as file:
            weight_map = dict.fromkeys(file.keys(), "model.safetensors")
    found = {}
    for key, name in weight_map.items():
        with safe_open(Path(folder, name), "pt") as file:  # its numpy side has no fp8
            tensor = file.get_tensor(key)
            found[key] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _bytes(tensor))
    return found


def _bytes(tensor):
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def described(arrays):
    return {name: (array.dtype.name, array.shape, array.tobytes()) for name, array in arrays.items()}


@pytest.mark.parametrize("max_shard_size", ["5GiB", "20KiB"])
def test_the_stock_library_reads_what_was_exported(job_root, run_json, tmp_path, max_shard_size):
    out = tmp_path / "out"
    report = exported(run_json, saved(job_root, ARRAYS), out, "--max-shard-size", max_shard_size)
    assert read(out) == described(ARRAYS)
    files = list(out.iterdir())
    assert len(files) == report["files"] == (1 if max_shard_size == "5GiB" else 4)
    assert (report["tensors"], report["bytes"]) == (6, sum(array.nbytes for array in ARRAYS.values()))
    if max_shard_size == "20KiB":
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == report["bytes"]
        assert {path.name for path in files} == {
            *index["weight_map"].values(),
            "model.safetensors.index.json",
        }


def test_sharded_tensors_are_put_together_in_slabs(job_root, run_json, tmp_path, monkeypatch):
    monkeypatch.setattr("flashpoint.export.selection.SLAB_BYTES", 100)  # so that some lie in both shards
    whole = RNG.standard_normal((10, 7), np.float32)
    exported(run_json, saved_by_two_ranks(job_root, whole), tmp_path / "out")
    assert read(tmp_path / "out") == described({"sharded": whole, "twice": np.int32([1, 2, 3])})


def test_names_and_dtypes_as_asked_for(job_root, run_json, tmp_path):
    container = saved(job_root, ARRAYS)
    exported(run_json, container, tmp_path / "a", "--prefix", "model.", "--dtype", "bfloat16")
    found = read(tmp_path / "a")
    assert set(found) == {"embed", "layers.0.weight", "layers.0.scale", "count", "none"}
    assert found["embed"] == described({"embed": ARRAYS["model.embed"].astype(ml_dtypes.bfloat16)})["embed"]
    assert (found["count"][0], found["layers.0.scale"][0]) == ("int64", "bfloat16")
    exported(run_json, container, tmp_path / "b", "--name", "*.moment")
    assert set(read(tmp_path / "b")) == {"optimizer.moment"}


def test_what_is_no_tensor_is_left_out_and_told(job_root, tmp_path):
    container = saved(job_root, {"w": np.ones(3)}, {"lr": 0.1, "step": 7})
    result = flashpoint("export", container, tmp_path / "out", "--format", "safetensors")
    assert (result.returncode, result.stderr) == (0, "")
    assert rows(result.stdout)[0].startswith(
        f"{tmp_path}/out step 100 as safetensors: 1 tensor, 1 file, 24 B in"
    )
    assert "left out, as no tensors: 'lr', 'step'" in result.stdout
    assert set(read(tmp_path / "out")) == {"w"}


# ---- whole or not at all ------------------------------------------------------------------------


def test_nothing_is_ever_overwritten(job_root, run, tmp_path):
    container = saved(job_root)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("precious")
    os.symlink("nowhere", tmp_path / "link")
    for name in ("empty", "file", "link"):
        code, out, err = run("export", container, tmp_path / name, "--format", "safetensors")
        assert (code, out) == (4, "")
        assert err == f"flashpoint export: {tmp_path}/{name} is there already: give a folder that is not\n"
    assert (tmp_path / "file").read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "link"]


def test_what_comes_to_be_there_meanwhile_is_not_overwritten_either(tmp_path):
    def slabs(item):
        (tmp_path / "out").mkdir()
        yield memoryview(bytes(item.nbytes))

    with pytest.raises(FileExistsError):
        write_folder(
            f"{tmp_path}/out", plan_files([Item("w", "w", "int8", (4,))], max_shard_bytes=9), slabs, {}
        )
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(tmp_path / "out") == []


def test_what_is_there_is_found_before_anything_is_written(tmp_path):
    files = plan_files([Item("w", "w", "int8", (4,))], max_shard_bytes=9)
    with pytest.raises(FileExistsError):
        write_folder(str(tmp_path), files, lambda item: pytest.fail("it began to write"), {})


def test_corrupt_bytes_are_not_exported_and_nothing_is_left(job_root, run, tmp_path):
    container = saved(job_root, ARRAYS)
    flip_byte(object_of(container), position_of(container, "optimizer.moment"))
    code, out, err = run("export", container, tmp_path / "out", "--format", "safetensors")
    assert (code, out) == (1, "")
    assert "object rank00000-0.safetensors is corrupt" in err
    assert os.listdir(tmp_path) == []


def test_a_full_disk_leaves_nothing(job_root, tmp_path, run, monkeypatch):
    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flashpoint.export.folder._write", full)
    code, _, err = run("export", saved(job_root), tmp_path / "out", "--format", "safetensors")
    assert (code, err) == (2, "flashpoint export: No space left on device\n")
    assert os.listdir(tmp_path) == []


def test_little_memory_is_used_however_large_the_tensors_are(job_root, run_json, tmp_path):
    container = saved_by_two_ranks(job_root, np.zeros((96, 1 << 18), np.float32))  # 96 MiB, in two shards
    tracemalloc.start()
    try:
        exported(run_json, container, tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20


# ---- errors -------------------------------------------------------------------------------------


def test_objects_of_another_node_are_named(job_root, run, tmp_path):
    container = saved_by_two_ranks(job_root, np.zeros((4, 2), np.float32))
    os.unlink(object_of(container, rank=1))
    code, _, err = run("export", container, tmp_path / "out", "--format", "safetensors")
    assert code == 2
    assert "1 of 2 objects of step 100 are not on this node, such as rank00001-0.safetensors" in err


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (
            ["--format", "safetensors", "--prefix", "nets."],
            "step 100 has no tensor whose name begins with 'nets.'",
        ),
        (["--format", "safetensors", "--name", "x*"], "step 100 has no tensor that matches 'x*'"),
        (["--format", "huggingface"], "--format huggingface needs --config"),
        (["--format", "safetensors", "--config", "c.json"], "and no other format does"),
        (["--format", "huggingface", "--config", "/nowhere"], "--config: there is no /nowhere"),
        (["--format", "huggingface", "--config", "{root}/list.json"], "is no configuration of a model"),
        (["--format", "gguf"], "invalid choice: 'gguf'"),
        (["--format", "safetensors", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["--format", "safetensors", "--max-shard-size", "0"], "'0' is not a size"),
    ],
)
def test_what_cannot_be_exported_exits_with_2(job_root, run, tmp_path, args, problem):
    container = saved(job_root)
    Path(job_root, "list.json").write_text("[]")
    code, out, err = run("export", container, tmp_path / "out", *(arg.format(root=job_root) for arg in args))
    assert (code, out) == (2, "")
    assert problem in err
    assert os.listdir(tmp_path) == []


def test_a_dtype_that_safetensors_does_not_know_is_named(job_root, run, tmp_path):
    container = saved(job_root, {"spectrum": np.zeros(3, np.complex128)})
    code, _, err = run("export", container, tmp_path / "out", "--format", "safetensors")
    assert code == 2
    assert "'spectrum' has dtype complex128, for which safetensors has no code" in err


def test_without_jax_an_orbax_export_says_what_to_install(job_root, run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashpoint_jax.export", None)
    monkeypatch.setitem(os.environ, "JAX_PLATFORMS", "cpu")
    code, _, err = run("export", saved(job_root), tmp_path / "out", "--format", "orbax")
    assert code == 2
    assert "--format orbax needs JAX and Orbax" in err and "pip install 'flashpoint[jax]'" in err


def test_a_safetensors_export_imports_no_framework(job_root, tmp_path):
    code = (
        "import sys\n"
        "from flashpoint.cli import main\n"
        "assert main(['export', *sys.argv[1:], '--format', 'safetensors', '--json']) == 0\n"
        "assert not {'torch', 'jax', 'safetensors', 'transformers'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", code, saved(job_root), str(tmp_path / "out")]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run(command, check=True, env=env, timeout=60, stdout=subprocess.DEVNULL)


# ---- pure ---------------------------------------------------------------------------------------


def test_files_are_filled_in_order():
    items = [Item(f"t{i}", f"s{i}", "float32", (size,)) for i, size in enumerate([5, 5, 5, 30, 1])]
    files = plan_files(items, max_shard_bytes=40)
    assert [[item.name for item in file.items] for file in files] == [["t0", "t1"], ["t2"], ["t3"], ["t4"]]
    assert files[0].name == "model-00001-of-00004.safetensors"
    with pytest.raises(FlashpointError, match="two tensors"):
        plan_files([items[0], items[0]], max_shard_bytes=40)
    with pytest.raises(FlashpointError, match="no code"):
        plan_files([Item("a", "a", "complex128", (1,))], max_shard_bytes=40)
