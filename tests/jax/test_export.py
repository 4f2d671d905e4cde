"""`flashpoint export --format orbax`: read by stock Orbax, in a process that cannot have anything of ours."""

import json
import pickle
import subprocess
import sys
import sysconfig
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import flashpoint
from flashpoint import cli
from flashpoint.export.selection import Selection
from flashpoint.layout import Entry
from flashpoint.manifest import Value
from flashpoint.objects import CheckpointObjectManager
from flashpoint.saver import MLFlashpointCheckpointSaver
from flashpoint.values import to_json
from flashpoint_jax.export import export_orbax

RNG = np.random.default_rng(0)
ARRAYS = {
    ("params", "dense", "kernel"): RNG.standard_normal((40, 30), np.float32),
    ("params", "dense", "bias"): RNG.standard_normal(30).astype(ml_dtypes.bfloat16),
    ("params", "blocks", 0, "scale"): RNG.standard_normal((8, 4)).astype(ml_dtypes.float8_e4m3fn),
    ("opt", "count"): np.int32(7),
    ("opt", "mask"): np.array([True, False]),
}
VALUES = {("lr",): 0.25, ("opt", "steps"): 7, ("name",): "run-1", ("betas",): (0.9, 0.95)}

# Nothing of ours can be imported: neither a working directory, nor PYTHONPATH, nor a .pth file takes part.
READER = """
import os, pickle, sys
sys.path.append(sys.argv[1])
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import numpy as np
import orbax.checkpoint as ocp
with ocp.StandardCheckpointer() as checkpointer:
    plain = checkpointer.restore(sys.argv[2])
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def wanted(leaf):
        is_array = isinstance(leaf, np.ndarray)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where) if is_array else leaf

    on_device = checkpointer.restore(sys.argv[2], jax.tree.map(wanted, plain))
for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(on_device), strict=True):
    assert isinstance(other, jax.Array if isinstance(one, np.ndarray) else type(one)), (one, other)
    assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
found = {}
for path, leaf in jax.tree_util.tree_leaves_with_path(plain):
    name = tuple(str(part.key) for part in path)
    found[name] = leaf if isinstance(leaf, (int, float, str)) else (
        np.asarray(leaf).dtype.name, np.asarray(leaf).shape, np.asarray(leaf).tobytes())
assert not [name for name in sys.modules if name.startswith("flashpoint")]
with open(sys.argv[3], "wb") as file:
    pickle.dump(found, file)
"""


def saved(root, arrays=ARRAYS, values=VALUES):
    saver = MLFlashpointCheckpointSaver(CheckpointObjectManager(root))
    pending = saver.begin(100)
    saver.initialize_checkpoint(pending)
    entries = [
        Entry(".".join(map(str, path)), array.dtype.name, array.shape, path=path)
        for path, array in arrays.items()
    ]
    layout = saver.plan(entries)

    def fill(buffer):
        for array, begin, end in zip(arrays.values(), layout.begins, layout.ends, strict=True):
            buffer.data[begin:end] = np.frombuffer(array.tobytes(), np.uint8)

    pending.staged.append(saver.stage(layout, fill))
    pending.values = [Value(".".join(path), to_json(value), path) for path, value in values.items()]
    saver.write(pending)
    saver.write_metadata(pending)
    saver.finalize(pending)
    saver.objects.close()
    return f"{root}/step-100_ckpt"


def read_by_stock_orbax(folder, tmp_path):
    answer = tmp_path / "answer"
    packages = sysconfig.get_path("purelib")
    command = [sys.executable, "-I", "-S", "-c", READER, packages, str(folder), str(answer)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return pickle.loads(answer.read_bytes())


def by_path(arrays):
    return {tuple(map(str, path)): (a.dtype.name, a.shape, a.tobytes()) for path, a in arrays.items()}


def test_stock_orbax_reads_what_was_exported(job_root, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["export", saved(job_root), str(out), "--format", "orbax", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["tensors"], report["left_out"]) == (5, ["name", "betas"])
    scalars = {("lr",): 0.25, ("opt", "steps"): 7}
    assert read_by_stock_orbax(out, tmp_path) == {**by_path(ARRAYS), **scalars}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answer", "out"]


def test_what_lies_below_a_prefix_is_exported_as_a_tree_of_its_own(job_root, tmp_path):
    with flashpoint.open(saved(job_root)) as view:
        export_orbax(
            str(tmp_path / "out"), Selection(view, prefix="params.", dtype="bfloat16"), lambda done: None
        )
    expected = {
        path[1:]: array.astype(ml_dtypes.bfloat16) for path, array in ARRAYS.items() if path[0] == "params"
    }
    assert read_by_stock_orbax(tmp_path / "out", tmp_path) == by_path(expected)


def test_an_orbax_export_overwrites_nothing_and_leaves_nothing_when_it_fails(job_root, tmp_path, capsys):
    container = saved(job_root, {("a",): np.ones(3), ("a", "b"): np.ones(3)}, {})
    assert cli.main(["export", container, str(tmp_path / "out"), "--format", "orbax"]) == 2
    assert "'a.b' lies below another leaf" in capsys.readouterr().err
    (tmp_path / "there").mkdir()
    assert cli.main(["export", container, str(tmp_path / "there"), "--format", "orbax"]) == 4
    assert [path.name for path in Path(tmp_path).iterdir()] == ["there"]


@pytest.mark.parametrize("position", [0, -1])
def test_corrupt_bytes_are_not_exported(job_root, tmp_path, capsys, position):
    container = saved(job_root)
    with flashpoint.open(container) as view:
        name = list(view.manifest.by_name)[position]
        record, i = view.manifest.by_name[name][0]
        begin = view.manifest.layout(record).begins[i]
    with open(f"{container}/{record.name}", "r+b") as file:
        file.seek(begin)
        byte = file.read(1)
        file.seek(begin)
        file.write(bytes([byte[0] ^ 255]))
    assert cli.main(["export", container, str(tmp_path / "out"), "--format", "orbax"]) == 1
    assert "is corrupt" in capsys.readouterr().err
    assert list(Path(tmp_path).glob("out*")) == []
