"""A version as a TensorStore key-value store, and its arrays."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

from flashpoint.errors import CheckpointNotFoundError, CorruptObjectError, InvalidIdError
from flashpoint.layout import Entry
from flashpoint.manifest import MANIFEST_NAME
from flashpoint.markers import Marker
from flashpoint_jax import kvstore, ocdbt
from flashpoint_jax.errors import OcdbtError
from flashpoint_jax.zarr_index import index_files, sources_of, uuid_of
from tests.core.world import Job, contents
from tests.jax.databases import UUID, version, write

W = np.arange(24, dtype=np.float32).reshape(4, 6)
SHARDS = [Entry("params.dense.kernel", "float32", (2, 6), (i, 0), (4, 6)) for i in (0, 2)]


@pytest.fixture(params=[2, 3], ids=["zarr v2", "zarr v3"])
def folder(request, tmp_path):
    sources = version(str(tmp_path), {"params.dense.kernel": W}, [[shard] for shard in SHARDS])
    write(str(tmp_path), index_files(sources, UUID, zarr_format=request.param))
    return str(tmp_path)


@pytest.fixture
def job(job_root):
    opened = Job(job_root, 2)
    yield opened
    opened.close()


def indexed(job: Job, step: int) -> str:
    job.save(step)
    objects = job.ranks[0].objects
    manifest = objects.read_manifest(objects.container(step))
    path = objects.container(step).path
    write(path, index_files(sources_of(manifest), uuid_of(manifest)))
    return path


@pytest.mark.parametrize("name", ["params.dense.kernel", "params/dense/kernel"])
def test_an_array_is_opened_by_its_spec(folder, name):
    array = ts.open(kvstore.array_spec(folder, name)).result()
    assert (array.read().result() == W).all()
    assert array.shape == W.shape
    assert array.dtype == ts.float32
    assert (array[1:3, 2:].read().result() == W[1:3, 2:]).all()


def test_the_store_lists_and_reads(folder):
    store = kvstore.open(folder)
    listed = sorted(key.decode() for key in store.list().result())
    assert listed == kvstore.keys(folder)
    assert kvstore.array_names(folder) == ["params.dense.kernel"]
    chunks = [store.read(key).result().value for key in listed if key.endswith(("0/0", "0.0"))]
    assert chunks == [W[:2].tobytes()]


def test_a_spec_is_json_that_another_program_can_open(folder):
    spec = kvstore.array_spec(folder, "params/dense/kernel")
    program = (
        "import sys, json, tensorstore as ts\n"
        "print(ts.open(json.load(sys.stdin)).result().read().result().sum())\n"
        "assert not [name for name in sys.modules if name.startswith('flashpoint')]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(spec), capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == str(W.sum()), done.stderr


def test_reads_are_of_mapped_pages(folder):
    spec = kvstore.spec(folder)
    assert spec["base"]["context"]["file_io_mode"] == {"mode": "memmap"}
    assert kvstore.open(folder).spec().to_json()["driver"] == "ocdbt"


def test_a_spec_opens_only_the_version_that_it_was_made_for(folder, tmp_path):
    spec = kvstore.array_spec(folder, "params/dense/kernel")
    sources = version(folder, {"params.dense.kernel": W + 1}, [[shard] for shard in SHARDS])
    zarr_format = 2 if spec["driver"] == "zarr" else 3
    write(folder, index_files(sources, b"x" * 16, zarr_format=zarr_format))
    with pytest.raises(ValueError, match="uuid"):
        ts.open(spec).result()
    array = ts.open(kvstore.array_spec(folder, "params/dense/kernel")).result()
    assert (array.read().result() == W + 1).all()


def test_what_is_not_there_is_an_error_and_not_zeros(folder):
    with pytest.raises(KeyError, match="params/dense/bias"):
        kvstore.array_spec(folder, "params/dense/bias")
    array = ts.open(kvstore.array_spec(folder, "params/dense/kernel")).result()
    os.unlink(f"{folder}/rank00001-0.safetensors")
    assert (array[:2].read().result() == W[:2]).all()
    with pytest.raises(ValueError):
        array.read().result()


def test_a_folder_without_an_index_is_not_taken_for_an_empty_store(tmp_path):
    for call in (kvstore.open, kvstore.keys, kvstore.spec, lambda path: kvstore.array_spec(path, "w")):
        with pytest.raises(CheckpointNotFoundError, match="no index"):
            call(tmp_path)
        with pytest.raises(CheckpointNotFoundError, match="no index"):
            call(tmp_path / "nothing")
    with pytest.raises(InvalidIdError, match="absolute"):
        kvstore.keys("relative")


def test_a_broken_index_is_an_error_of_ours(folder):
    (name,) = [name for name in os.listdir(folder) if name.startswith("nodes-")]
    data = Path(folder, name).read_bytes()
    write(folder, {name: data[:-1]})
    with pytest.raises(OcdbtError, match="torn"):
        kvstore.keys(folder)
    write(folder, {name: data[:20] + bytes([data[20] ^ 1]) + data[21:]})
    with pytest.raises(OcdbtError, match="corrupt"):
        kvstore.keys(folder)
    os.unlink(f"{folder}/{name}")
    with pytest.raises(OcdbtError, match="cannot be read"):
        kvstore.keys(folder)


def test_the_index_is_not_read_through_links_or_pipes(folder):
    (name,) = [name for name in os.listdir(folder) if name.startswith("nodes-")]
    os.rename(f"{folder}/{name}", f"{folder}/elsewhere")
    os.symlink("elsewhere", f"{folder}/{name}")
    with pytest.raises(OcdbtError, match="cannot be read"):
        kvstore.keys(folder)
    os.unlink(f"{folder}/{name}")
    os.mkfifo(f"{folder}/{name}")
    with pytest.raises(OcdbtError, match="regular file"):
        kvstore.keys(folder)


# ---- versions of a job --------------------------------------------------------------------------


def test_a_saved_version_is_read_where_it_lies(job):
    path = indexed(job, 1)
    for name, array in contents(1).items():
        assert (ts.open(kvstore.array_spec(path, name)).result().read().result() == array).all()
    assert (ts.open(kvstore.array_spec(path, "of_rank_1")).result().read().result() == 1001).all()


def test_an_unfinished_version_is_refused(job):
    path = indexed(job, 1)
    marker = Marker.create(job.ranks[0].objects.container(1), 5)
    for call in (kvstore.open, kvstore.keys, kvstore.spec):
        with pytest.raises(CheckpointNotFoundError, match="unfinished"):
            call(path)
    assert marker.is_set


def test_while_a_version_is_read_its_buffers_are_not_used_again(job):
    path = indexed(job, 1)
    with kvstore.reading(path) as spec:
        array = ts.open({"driver": "zarr", "kvstore": {**spec, "path": "of_rank_0/"}}).result()
        view = array.read().result()
        for step in range(2, 6):
            job.save(step)  # which supersede it, and would use its buffers
        assert (view == 1000).all()
    del array, view


def test_a_version_is_verified_before_it_is_read(job):
    path = indexed(job, 1)
    with open(f"{path}/rank00001-0.safetensors", "r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-100, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(CorruptObjectError, match="rank00001-0"):
        with kvstore.reading(path):
            pass
    with kvstore.reading(path, verify=False):
        pass


def test_one_key_of_many_is_found_quickly(tmp_path):
    pairs = {b"layers.%d.kernel/.zarray" % i: b"{}" for i in range(50_000)}
    nodes = ocdbt.encode_nodes(pairs, "nodes.ocdbt")
    write(str(tmp_path), {"nodes.ocdbt": nodes.data, ocdbt.MANIFEST_NAME: ocdbt.manifest_of(nodes, UUID)})
    began = time.process_time()
    spec = kvstore.array_spec(str(tmp_path), "layers/777/kernel")
    assert time.process_time() - began < 1.0  # of reading all: several
    assert spec["driver"] == "zarr"
    assert MANIFEST_NAME not in os.listdir(tmp_path)
