import gc
import os
import shutil

import ml_dtypes
import numpy as np
import pytest

import flashpoint
from flashpoint.config import FlashpointConfig
from flashpoint.dtypes import DTYPES
from flashpoint.errors import CheckpointNotFoundError, CorruptObjectError, FlashpointError, ManifestError
from flashpoint.layout import Entry
from flashpoint.loader import MLFlashpointCheckpointLoader
from flashpoint.manifest import MANIFEST_NAME
from flashpoint.markers import Marker
from flashpoint.objects import CheckpointObjectManager
from flashpoint.saver import MLFlashpointCheckpointSaver
from tests.core.processes import process
from tests.core.world import Job, contents, shard

CHUNK = 4096


class Single:
    """A job of one process."""

    def __init__(self, root: str, **settings) -> None:
        self.config = FlashpointConfig.from_env({}, **({"chunk_bytes": CHUNK} | settings))
        self.objects = CheckpointObjectManager(root, config=self.config)
        self.saver = MLFlashpointCheckpointSaver(self.objects)
        self.loader = MLFlashpointCheckpointLoader(self.objects)

    def save(self, step, arrays=None, values=None, **options):
        return self.saver.save(step, contents(step) if arrays is None else arrays, values, **options)

    def path(self, step: int) -> str:
        return self.objects.container(step).path


@pytest.fixture
def job(job_root):
    opened = Single(job_root)
    yield opened
    opened.objects.close()


def flip(path: str, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def base_of(array: np.ndarray) -> object:
    while isinstance(array, np.ndarray):
        array = array.base
    return array.obj if isinstance(array, memoryview) else array


# ---- what one gets --------------------------------------------------------------------------------


def test_arrays_and_values_come_back_under_their_names(job):
    arrays, values = contents(7), {"step": 7, "nested": {"a": (1, [2.5])}}
    job.save(7, arrays, values)
    with flashpoint.open(job.path(7)) as view:
        assert set(view) == {*arrays, *values}
        assert len(view) == len(arrays) + len(values)
        for name, array in arrays.items():
            assert view[name].dtype == array.dtype
            np.testing.assert_array_equal(view[name], array)
        assert view["nested"] == {"a": (1, [2.5])}
        assert "step" in view
        assert "other" not in view
        assert view.get("other") is None
        with pytest.raises(KeyError):
            view["other"]
        assert "step-7_ckpt" in repr(view)


def test_what_comes_back_is_a_read_only_view_of_the_mapped_file(job):
    job.save(1, {"a": np.arange(100), "b": np.arange(100.0)})
    with flashpoint.open(job.objects.container(1)) as view:
        record = view.manifest.objects[0]
        whole = view.object_bytes(record)
        for name in ("a", "b"):
            assert np.shares_memory(view[name], whole)
            assert not view[name].flags.writeable
            with pytest.raises(ValueError):
                view[name][0] = 1
        assert view["a"].ctypes.data % 64 == 0


@pytest.mark.parametrize("name", [name for name in DTYPES if DTYPES[name].numpy is not None])
def test_every_dtype_comes_back_as_itself(job, name):
    dtype = DTYPES[name].numpy
    array = np.arange(6).reshape(2, 3).astype(dtype)
    job.save(1, {"x": array, "scalar": array[0, 1], "empty": array[:0]})
    with flashpoint.open(job.path(1)) as view:
        for key, expected in (("x", array), ("scalar", array[0, 1]), ("empty", array[:0])):
            assert view[key].dtype == dtype
            assert view[key].shape == expected.shape
            assert view[key].tobytes() == expected.tobytes()


def test_bf16_and_fp8_are_ml_dtypes(job):
    arrays = {"b": np.ones(3, ml_dtypes.bfloat16), "f": np.ones(3, ml_dtypes.float8_e4m3fn)}
    job.save(1, arrays)
    with flashpoint.open(job.path(1)) as view:
        assert view["b"].dtype == ml_dtypes.bfloat16
        assert view["f"].astype(np.float32).tolist() == [1, 1, 1]


def test_any_array_layout_is_stored_as_its_values(job):
    arrays = {
        "transposed": np.arange(12).reshape(3, 4).T,
        "strided": np.arange(20)[::3],
        "broadcast": np.broadcast_to(np.float32(2), (3, 4)),
        "reversed": np.arange(5)[::-1],
        "": np.arange(3),
        "a/b\nc.権": np.arange(3),
    }
    job.save(1, arrays)
    with flashpoint.open(job.path(1)) as view:
        for name, array in arrays.items():
            np.testing.assert_array_equal(view[name], array)


def test_a_version_may_hold_values_only_or_nothing(job):
    job.save(1, {}, {"only": "values"})
    with flashpoint.open(job.path(1)) as view:
        assert dict(view) == {"only": "values"}
    job.save(2, {})
    with flashpoint.open(job.path(2)) as view:
        assert dict(view) == {}


def test_values_handed_out_do_not_change_what_comes_next(job):
    job.save(1, {}, {"list": [1, [2]]})
    with flashpoint.open(job.path(1)) as view:
        view["list"][1].append("changed")
        assert view["list"] == [1, [2]]


# ---- several ranks --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex128"])
def test_shards_are_put_together(job_root, dtype):
    rows = np.arange(35).reshape(7, 5).astype(DTYPES[dtype].numpy)
    job = Job(job_root, 3)

    def save(rank):
        part, entry = shard(rows, rank.rank, 3)
        rank.save(4, {"sharded": part}, None, [entry])

    job.each(save)
    with flashpoint.open(f"{job_root}/step-4_ckpt") as view:
        assert view["sharded"].dtype == rows.dtype
        np.testing.assert_array_equal(view["sharded"], rows)
        assert not view["sharded"].flags.writeable
    job.close()


def test_shards_of_a_dtype_without_a_numpy_type_are_put_together_as_bytes(job_root):
    halves = np.arange(8 * 4, dtype=np.uint8).reshape(8, 4)  # 8 elements of complex32
    job = Job(job_root, 2)

    def save(rank):
        entry = Entry("x", "complex32", (4,), (4 * rank.rank,), (8,))
        rank.save(4, {"x": halves[4 * rank.rank :][:4].reshape(-1)}, None, [entry])

    job.each(save)
    with flashpoint.open(f"{job_root}/step-4_ckpt") as view:
        np.testing.assert_array_equal(view["x"], halves)
    job.close()


def test_each_rank_opens_its_own_copy_and_values(job_root):
    job = Job(job_root, 2)
    job.each(
        lambda rank: rank.save(1, {"w": np.array([rank.rank])}, {"v": rank.rank, f"only{rank.rank}": True})
    )
    for rank in (0, 1):
        with flashpoint.open(f"{job_root}/step-1_ckpt", rank=rank) as view:
            assert view["w"].tolist() == [rank]
            assert view["v"] == rank
            assert view["only0"] and view["only1"]
            assert sorted(view) == ["only0", "only1", "v", "w"]
    job.close()


def test_a_name_that_is_an_array_on_one_rank_and_a_value_on_another_is_listed_once(job_root):
    job = Job(job_root, 2)
    job.each(lambda rank: rank.save(1, *(({"x": np.ones(2)}, {}) if rank.rank == 0 else ({}, {"x": 3}))))
    with flashpoint.open(f"{job_root}/step-1_ckpt") as view:
        assert list(view) == ["x"]
        assert len(view) == 1
    job.close()


# ---- verification ---------------------------------------------------------------------------------


def test_a_flipped_byte_is_found_on_first_use_and_only_in_its_own_chunks(job):
    names = [f"t{i}" for i in range(8)]
    job.save(3, {name: np.full(CHUNK, i, np.uint8) for i, name in enumerate(names)})
    with flashpoint.open(job.path(3)) as view:
        record = view.manifest.objects[0]
        layout = view.manifest.layout(record)
        position = layout.begins[5] + 100
        assert layout.begins[5] % CHUNK == 0  # so that no two entries share a chunk
        flip(f"{view.container.path}/{record.name}", position)
        begin = position // CHUNK * CHUNK
        for name in names:
            if name == "t5":
                with pytest.raises(
                    CorruptObjectError, match=rf"step 3.*{record.name}.*{begin} to {begin + CHUNK}"
                ):
                    view[name]
            else:
                assert set(view[name].tolist()) == {int(name[1:])}
        with pytest.raises(CorruptObjectError):
            view["t5"]  # as bad the second time
        with pytest.raises(CorruptObjectError):
            view.verify()
    with flashpoint.open(job.path(3), verify=False) as view:
        assert view["t5"][100] == 5 ^ 1


def test_verification_can_be_asked_for_as_a_whole(job):
    job.save(3)
    with flashpoint.open(job.path(3)) as view:
        view.verify()
        record = view.manifest.objects[0]
        flip(f"{view.container.path}/{record.name}", 20)  # the header, that no array's chunk need hold
    with flashpoint.open(job.path(3)) as view, pytest.raises(CorruptObjectError):
        view.verify()


def test_a_view_that_was_closed_verifies_anew(job):
    job.save(3, {"a": np.arange(10)})
    view = flashpoint.open(job.path(3))
    record = view.manifest.objects[0]
    assert view["a"].tolist() == list(range(10))
    view.close()
    flip(f"{view.container.path}/{record.name}", view.manifest.layout(record).begins[0])
    with pytest.raises(CorruptObjectError):
        view["a"]
    view.close()


@pytest.mark.parametrize("damage", ["missing", "shorter", "longer", "folder", "link", "other"])
def test_an_object_that_is_not_what_the_manifest_says_is_corrupt(job, damage):
    job.save(3)
    record = job.objects.read_manifest(job.objects.container(3)).objects[0]
    path = f"{job.path(3)}/{record.name}"
    with open(path, "rb") as file:
        data = file.read()
    os.unlink(path)
    if damage == "folder":
        os.mkdir(path)
    elif damage == "link":
        with open(f"{job.path(3)}/target", "wb") as file:
            file.write(data)
        os.symlink("target", path)
    elif damage != "missing":
        other = {"shorter": data[:-1], "longer": data + b"\0", "other": bytes(len(data))}[damage]
        with open(path, "wb") as file:
            file.write(other)
    with (
        flashpoint.open(job.path(3)) as view,
        pytest.raises(CorruptObjectError, match=f"step 3.*{record.name}"),
    ):
        view["own"]


@pytest.mark.fault(24)
def test_objects_swapped_between_versions_are_noticed(job_root):
    job = Single(job_root, keep=2)
    for step in (1, 2):
        job.save(step)
    name = job.objects.read_manifest(job.objects.container(1)).objects[0].name
    one, two = (f"{job.path(step)}/{name}" for step in (1, 2))
    os.rename(one, f"{job_root}/aside")
    os.rename(two, one)
    os.rename(f"{job_root}/aside", two)
    for step in (1, 2):
        with flashpoint.open(job.path(step)) as view, pytest.raises(CorruptObjectError):
            view["of_rank_0"]
    job.objects.close()


# ---- what is not complete -------------------------------------------------------------------------


def test_a_dirty_version_is_refused(job):
    job.save(3)
    marker = Marker.create(job.objects.container(3), 5)
    for live in (True, False):
        with pytest.raises(CheckpointNotFoundError, match="unfinished"):
            flashpoint.open(job.path(3))
        if live:
            marker.release()
    os.unlink(marker.path)
    flashpoint.open(job.path(3)).close()


def test_what_is_not_there_is_said_to_be_so(job, job_root):
    for path in (job.path(9), f"{job_root}/nowhere/step-1_ckpt"):
        with pytest.raises(CheckpointNotFoundError):
            flashpoint.open(path)
    assert not os.path.exists(f"{job_root}/nowhere")
    os.mkdir(job.path(9))
    with pytest.raises(CheckpointNotFoundError, match="no manifest"):
        flashpoint.open(job.path(9))


def test_a_manifest_that_is_torn_or_of_another_step_is_refused(job):
    job.save(3)
    os.mkdir(job.path(4))
    shutil.copy(f"{job.path(3)}/{MANIFEST_NAME}", job.path(4))
    with pytest.raises(ManifestError, match=r"manifest of step 3.*moved"):
        flashpoint.open(job.path(4))
    os.truncate(f"{job.path(3)}/{MANIFEST_NAME}", 100)
    with pytest.raises(ManifestError, match="torn"):
        flashpoint.open(job.path(3))


@pytest.mark.parametrize("kind", ["folder", "link", "fifo"])
def test_a_manifest_that_is_no_regular_file_is_an_error_of_ours(job, kind):
    path = f"{job.path(4)}/{MANIFEST_NAME}"
    os.mkdir(job.path(4))
    if kind == "folder":
        os.mkdir(path)
    elif kind == "link":
        job.save(3)
        os.symlink(f"{job.path(3)}/{MANIFEST_NAME}", path)
    else:
        os.mkfifo(path)
    with pytest.raises(FlashpointError):
        flashpoint.open(job.path(4))
    assert 4 not in job.objects.complete_steps()


# ---- how long it lasts ----------------------------------------------------------------------------


def open_plainly(job, step):
    return flashpoint.open(job.path(step))


def open_warm(job, step):
    return job.loader.load(step, warm=True)


OPENERS = pytest.mark.parametrize("opener", [open_plainly, open_warm])


@OPENERS
def test_an_array_outlives_its_view_its_version_and_its_job(job, opener):
    job.save(1)
    expected = contents(1)["of_rank_0"]
    view = opener(job, 1)
    array = view["of_rank_0"][1:]
    view.close()
    del view
    gc.collect()
    for step in range(2, 6):
        job.save(step)  # keep=1: step 1 is given up, and its buffer would be next
        np.testing.assert_array_equal(array, expected[1:])
    shutil.rmtree(job.path(5))
    job.objects.close()
    np.testing.assert_array_equal(array, expected[1:])


@OPENERS
def test_a_buffer_is_recycled_once_the_last_array_over_it_is_gone(job, opener):
    job.save(1)
    inode = os.stat(f"{job.path(1)}/rank00000-0.safetensors").st_ino
    view = opener(job, 1)
    arrays = [view["of_rank_0"][5:], view["own"]]
    used = []
    view.close()
    for step in range(2, 8):
        job.save(step)
        used.append(os.stat(f"{job.path(step)}/rank00000-0.safetensors").st_ino)
        if step in (3, 4):
            arrays.pop()
            gc.collect()
    assert inode not in used[:3]
    assert inode in used[3:]


@OPENERS
def test_a_view_that_is_never_closed_holds_nothing_once_it_is_forgotten(job, opener):
    job.save(1)
    opener(job, 1)["own"]
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        opener(job, 1)["own"]
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    for step in range(2, 6):
        job.save(step)
    assert job.objects.pool.allocations == 2


def test_a_warm_view_reads_the_mapping_that_the_next_save_will_write_to(job):
    job.save(1)
    view = job.loader.load(1, warm=True)
    record = view.manifest.objects[0]
    mapped = view.mapped(record, 0, record.nbytes)
    assert mapped.buffer is not None
    assert np.shares_memory(view["own"], mapped.buffer.data)
    assert not view["own"].flags.writeable
    with pytest.raises(ValueError):
        view["own"].flags.writeable = True
    view.close()


def test_a_plain_view_has_a_mapping_of_its_own(job):
    job.save(1)
    view = flashpoint.open(job.path(1))
    record = view.manifest.objects[0]
    assert view.mapped(record, 0, record.nbytes).buffer is None
    with pytest.raises(ValueError):
        view["own"].flags.writeable = True
    view.close()


def read_and_hold(say, path):
    view = flashpoint.open(path)
    array = view["of_rank_0"]
    before = array.copy()
    view.close()
    say("reading")
    assert np.array_equal(array, before), "the bytes changed under a reader"
    del array, view
    gc.collect()
    say("no longer")


@pytest.mark.parametrize("end", ["lets go", "is killed"])
def test_a_reader_in_another_process_keeps_its_bytes_until_it_ends(job, end):
    job.save(1)
    inode = os.stat(f"{job.path(1)}/rank00000-0.safetensors").st_ino
    with process(read_and_hold, job.path(1)) as reader:
        assert reader.hear() == "reading"
        shutil.rmtree(job.path(1))
        for step in range(2, 6):
            job.save(step)
            assert os.stat(f"{job.path(step)}/rank00000-0.safetensors").st_ino != inode
        if end == "is killed":
            reader.kill()
        else:
            reader.go_on()
            assert reader.hear() == "no longer"
        used = []
        for step in range(6, 9):
            job.save(step)
            used.append(os.stat(f"{job.path(step)}/rank00000-0.safetensors").st_ino)
        assert inode in used


def test_a_view_may_be_read_by_many_threads(job):
    from concurrent.futures import ThreadPoolExecutor

    arrays = {f"t{i}": np.full(1000, i) for i in range(50)}
    job.save(1, arrays)
    with flashpoint.open(job.path(1)) as view, ThreadPoolExecutor(8) as pool:
        for name, found in zip(
            list(arrays) * 4, pool.map(lambda name: view[name], list(arrays) * 4), strict=True
        ):
            np.testing.assert_array_equal(found, arrays[name])
