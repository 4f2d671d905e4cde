"""A job root's folders and files: what is listed, written whole, removed, and left alone."""

import errno
import fcntl
import logging
import os
import stat
import threading

import numpy as np
import pytest

from flashpoint.config import FlashpointConfig
from flashpoint.errors import CheckpointNotFoundError, CorruptObjectError, FlashpointError, InvalidIdError
from flashpoint.ids import CheckpointObjectId
from flashpoint.manifest import MANIFEST_NAME
from flashpoint.markers import Marker
from flashpoint.objects import CheckpointObjectManager, is_job_root
from flashpoint.retention import Version
from flashpoint.saver import MLFlashpointCheckpointSaver


@pytest.fixture
def objects(job_root):
    opened = CheckpointObjectManager(job_root, config=FlashpointConfig(keep=0))
    yield opened
    opened.close()


def save(objects: CheckpointObjectManager, step: int, *, epoch: int = 0) -> str:
    MLFlashpointCheckpointSaver(objects, epoch=epoch).save(step, {"x": np.full(100, step)})
    return objects.container(step).path


def dirty(objects: CheckpointObjectManager, step: int, *, with_manifest: bool = False) -> Marker:
    """A version as a save leaves it in the middle; its marker is live until it is released."""
    if with_manifest:
        save(objects, step)
    container = objects.container(step)
    marker = Marker.create(container, 0)
    if not with_manifest:
        objects.create_container(container)
        buffer = objects.pool.acquire(4096)
        objects.link_object(container, CheckpointObjectId(0, 0), buffer)
        objects.pool.release(buffer)
    return marker


# ---- the job root ---------------------------------------------------------------------------------


def test_a_job_root_is_made_for_its_owner_only(job_root):
    root = f"{job_root}/new/job"
    CheckpointObjectManager(root).close()
    assert stat.S_IMODE(os.stat(root).st_mode) == 0o700


def test_a_job_root_that_cannot_be_is_refused(job_root):
    with open(f"{job_root}/file", "w"):
        pass
    for path in (f"{job_root}/file", f"{job_root}/file/below"):
        with pytest.raises(FlashpointError, match="cannot be made"):
            CheckpointObjectManager(path)
    with pytest.raises(InvalidIdError):
        CheckpointObjectManager("relative/job")


def test_looking_makes_nothing(job_root):
    objects = CheckpointObjectManager(f"{job_root}/nowhere", create=False)
    assert objects.steps() == objects.complete_steps() == []
    assert objects.dirty_steps() == set()
    assert objects.read_epoch() == 0
    assert not os.path.exists(f"{job_root}/nowhere")
    objects.close()


def test_a_root_that_is_no_tmpfs_is_warned_about_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            CheckpointObjectManager(tmp_path / "job").close()
    assert [record.message.count("not on a tmpfs") for record in caplog.records] == [1]


def test_checkpoints_work_on_a_disk_too(tmp_path):
    objects = CheckpointObjectManager(tmp_path / "job")
    for step in (1, 2, 3):
        save(objects, step)
    assert objects.complete_steps() == [3]
    objects.close()


def test_ranks_that_share_a_root_share_a_node(job_root):
    one, same, other = (CheckpointObjectManager(path) for path in (job_root, job_root, f"{job_root}/other"))
    assert one.node == same.node != other.node


def test_a_job_root_is_known_by_its_contents(objects, job_root):
    assert not is_job_root(job_root)
    assert not is_job_root(f"{job_root}/nowhere")
    save(objects, 1)
    assert is_job_root(job_root)
    assert not is_job_root(objects.container(1).path)


# ---- what is listed -------------------------------------------------------------------------------


def test_steps_are_listed_by_number_and_nothing_else_is_a_step(objects, job_root):
    for step in (100, 9, 10):
        save(objects, step)
    for name in ("step-09_ckpt", "step-7_ckpt.bak", "step-8", "other"):
        os.mkdir(f"{job_root}/{name}")
    with open(f"{job_root}/step-5_ckpt", "w"):
        pass  # no folder
    os.symlink("step-100_ckpt", f"{job_root}/step-6_ckpt")
    assert objects.steps() == [9, 10, 100]
    assert objects.complete_steps() == [100, 10, 9]


def test_versions_are_listed_by_epoch_then_step(objects):
    save(objects, 100)
    save(objects, 60, epoch=1)
    assert objects.complete_versions() == [Version(1, 60), Version(0, 100)]


def test_a_dirty_version_is_not_complete_even_with_a_manifest(objects):
    marker = dirty(objects, 5, with_manifest=True)
    assert objects.steps() == [5]
    assert objects.complete_steps() == []
    assert objects.dirty_steps() == {5}
    assert not objects.is_complete(objects.container(5))
    marker.remove()
    assert objects.complete_steps() == [5]
    assert objects.is_complete(objects.container(5))


def test_a_manifest_is_written_whole_or_not_at_all(objects, monkeypatch):
    path = save(objects, 5)
    with open(f"{path}/{MANIFEST_NAME}", "rb") as file:
        before = file.read()

    def fail(*args):
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="no space"):
        objects.write_manifest(objects.container(5), b"other")
    with open(f"{path}/{MANIFEST_NAME}", "rb") as file:
        assert file.read() == before
    assert sorted(os.listdir(path)) == [MANIFEST_NAME, "rank00000-0.safetensors"]


def test_readers_see_one_manifest_or_the_other(objects):
    container = objects.container(5)
    objects.create_container(container)
    contents = [bytes([i]) * 100_000 for i in range(2)]
    objects.write_manifest(container, contents[0])
    stop, torn = threading.Event(), []

    def read():
        while not stop.is_set():
            with open(f"{container.path}/{MANIFEST_NAME}", "rb") as file:
                data = file.read()
            if data not in contents:
                torn.append(len(data))

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(300):
        objects.write_manifest(container, contents[i % 2])
    stop.set()
    reader.join()
    assert not torn


# ---- giving up ------------------------------------------------------------------------------------


def test_a_container_is_removed_with_what_is_ours_and_without_what_is_not(objects):
    path = save(objects, 5)
    for name in (".metadata.0123abcd.tmp", "rank00007-3.safetensors"):
        with open(f"{path}/{name}", "w"):
            pass
    for name in ("notes.txt", "rank00007-3.safetensors.bak", ".metadata.orig"):
        with open(f"{path}/{name}", "w"):
            pass
    objects.remove_container(objects.container(5))
    assert sorted(os.listdir(path)) == [".metadata.orig", "notes.txt", "rank00007-3.safetensors.bak"]
    save(objects, 6)
    objects.remove_container(objects.container(6))
    assert not os.path.exists(objects.container(6).path)
    objects.remove_container(objects.container(6))  # twice is no error


def test_the_manifest_goes_first(objects, monkeypatch):
    save(objects, 5)
    gone = []
    real = os.unlink
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda path: (gone.append(os.path.basename(path)), real(path)))
        objects.remove_container(objects.container(5))
    assert gone == [MANIFEST_NAME, "rank00000-0.safetensors"]


def test_a_rank_takes_back_its_own_objects_only(objects):
    path = save(objects, 5)
    with open(f"{path}/rank00001-0.safetensors", "w"):
        pass
    objects.remove_objects_of(objects.container(5), 0)
    assert os.listdir(path) == ["rank00001-0.safetensors"]
    objects.remove_objects_of(objects.container(5), 1)
    assert not os.path.exists(path)


def test_folders_where_files_belong_are_left_alone(objects):
    path = save(objects, 5)
    for name in ("rank00003-0.safetensors", ".metadata.0123abcd.tmp"):
        os.mkdir(f"{path}/{name}")
    objects.remove_container(objects.container(5))
    assert sorted(os.listdir(path)) == [".metadata.0123abcd.tmp", "rank00003-0.safetensors"]
    os.mkdir(f"{path}/{MANIFEST_NAME}")
    objects.remove_container(objects.container(5))
    objects.remove_objects_of(objects.container(5), 3)


# ---- garbage --------------------------------------------------------------------------------------


def test_only_debris_is_collected(objects, job_root):
    save(objects, 1)
    live = dirty(objects, 2)
    dirty(objects, 3).release()
    dirty(objects, 4, with_manifest=True).release()
    os.mkdir(objects.container(5).path)  # a folder and nothing else
    Marker.create(objects.container(6), 0).release()  # a marker and nothing else
    os.mkdir(f"{job_root}/other")
    with open(f"{job_root}/step-7_ckpt", "w"):
        pass
    assert objects.collect_garbage() == [3, 4, 5, 6]
    assert objects.steps() == [1, 2]
    assert objects.dirty_steps() == {2}
    assert {"other", "step-7_ckpt"} <= set(os.listdir(job_root))
    live.release()
    assert objects.collect_garbage() == [2]
    assert objects.collect_garbage() == []
    assert objects.complete_steps() == [1]


def test_one_live_rank_keeps_its_version_from_being_collected(objects):
    dirty(objects, 3).release()
    other = Marker.create(objects.container(3), 7)
    assert objects.collect_garbage() == []
    other.release()
    assert objects.collect_garbage() == [3]


def test_a_save_that_begins_meanwhile_is_not_taken_for_debris(objects, monkeypatch):
    begun = []
    real = objects._names

    def names(*args):
        found = real(*args)
        if not begun:  # the moment after the first look
            begun.append(dirty(objects, 9))
        return found

    monkeypatch.setattr(objects, "_names", names)
    assert objects.collect_garbage() == []
    assert os.listdir(objects.container(9).path) == ["rank00000-0.safetensors"]


def test_what_garbage_held_is_free_again(objects):
    dirty(objects, 3).release()
    before = objects.pool.allocations
    objects.collect_garbage()
    objects.pool.acquire(4096)
    assert objects.pool.allocations == before


def test_leftovers_of_a_crash_in_the_epochs_file_go_too(objects, job_root):
    objects.write_epoch(3)
    with open(f"{job_root}/.epoch.0123abcd.tmp", "w"):
        pass
    objects.collect_garbage()
    assert [name for name in os.listdir(job_root) if name.startswith(".epoch")] == [".epoch"]


@pytest.mark.fault(18)
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EINTR])
def test_a_version_that_cannot_be_looked_at_is_not_taken_for_debris(objects, monkeypatch, number):
    save(objects, 1)
    save(objects, 2)
    real = os.lstat

    def lstat(path, **options):
        if str(path).endswith(MANIFEST_NAME):
            raise OSError(number, os.strerror(number))
        return real(path, **options)

    for clean_up in (objects.collect_garbage, objects.finish_unfinished):
        with monkeypatch.context() as patch:
            patch.setattr(os, "lstat", lstat)
            with pytest.raises(OSError):
                clean_up()
        assert objects.complete_steps() == [2, 1]


def test_versions_whose_end_was_cut_off_go_while_others_are_being_saved(objects):
    for step in (1, 2, 3, 4, 7):
        save(objects, step)
    for step in (1, 3):
        os.unlink(f"{objects.container(step).path}/{MANIFEST_NAME}")
    with open(f"{objects.container(3).path}/notes.txt", "w"):
        pass  # somebody else's, so the folder stays
    live = dirty(objects, 5)
    dirty(objects, 6).release()  # the next start's to judge
    os.mkdir(objects.container(8).path)  # later than what is complete: its save cleans up itself
    assert objects.finish_unfinished() == [1]
    assert objects.steps() == [2, 3, 4, 5, 6, 7, 8]
    assert os.listdir(objects.container(3).path) == ["notes.txt"]
    assert objects.complete_steps() == [7, 4, 2]
    assert os.listdir(objects.container(5).path) == ["rank00000-0.safetensors"]
    live.release()


def test_a_manifest_that_nobody_writes_any_more_goes_and_one_that_somebody_writes_stays(objects):
    save(objects, 1)
    folder = objects.container(1).path
    for name in (".metadata.01234567.tmp", ".metadata.89abcdef.tmp"):
        with open(f"{folder}/{name}", "w"):
            pass
    with open(f"{folder}/.metadata.89abcdef.tmp") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        objects.finish_unfinished()
        assert sorted(os.listdir(folder)) == [
            MANIFEST_NAME,
            ".metadata.89abcdef.tmp",
            "rank00000-0.safetensors",
        ]
    objects.finish_unfinished()
    assert sorted(os.listdir(folder)) == [MANIFEST_NAME, "rank00000-0.safetensors"]
    assert objects.complete_steps() == [1]


def test_without_a_complete_version_nothing_is_taken_for_one_that_was_given_up(objects):
    os.mkdir(objects.container(1).path)
    assert objects.finish_unfinished() == []
    assert objects.steps() == [1]


# ---- epoch ----------------------------------------------------------------------------------------


def test_the_epoch_is_remembered_and_zero_for_a_new_job(objects, job_root):
    assert objects.read_epoch() == 0
    for epoch in (1, 7, 123_456_789):
        objects.write_epoch(epoch)
        assert objects.read_epoch() == epoch
    with open(f"{job_root}/.epoch", "w") as file:
        file.write("garbage")
    assert objects.read_epoch() == 0
    with open(f"{job_root}/.epoch", "wb") as file:
        file.write(b"\xff\xfe")
    assert objects.read_epoch() == 0


def test_a_lost_epoch_is_taken_from_the_versions(objects, job_root):
    save(objects, 5, epoch=4)
    assert objects.read_epoch() == 4


# ---- mapping --------------------------------------------------------------------------------------


def test_an_object_under_a_writers_lock_is_not_read(objects, monkeypatch):
    monkeypatch.setattr("flashpoint.objects.WRITER_LETS_GO_S", 0.1)
    save(objects, 5)
    container = objects.container(5)
    (record,) = objects.read_manifest(container).objects
    (buffer,) = objects.pool._known()
    assert buffer.try_lock()
    with pytest.raises(CorruptObjectError, match="still being written"):
        objects.map_object(container, record)
    buffer.unlock()
    assert len(objects.map_object(container, record).data) == record.nbytes


def test_a_writer_that_lets_go_a_moment_later_is_waited_for(objects):
    save(objects, 5)
    container = objects.container(5)
    (record,) = objects.read_manifest(container).objects
    (buffer,) = objects.pool._known()
    assert buffer.try_lock()
    timer = threading.Timer(0.1, buffer.unlock)
    timer.start()
    assert len(objects.map_object(container, record).data) == record.nbytes
    timer.join()


@pytest.mark.parametrize("then", ["gone", "other", "version given up"])
def test_an_object_that_changes_hands_while_it_is_opened_is_not_read(objects, monkeypatch, then):
    save(objects, 5)
    container = objects.container(5)
    (record,) = objects.read_manifest(container).objects
    path = f"{container.path}/{record.name}"

    other = objects.pool.acquire(record.nbytes)

    def meanwhile(fd):
        if then == "version given up":
            objects.remove_container(container)
        else:
            os.unlink(path)
            if then == "other":
                objects.link_object(container, record.id, other)
        return True

    monkeypatch.setattr("flashpoint.objects._lock_shared", meanwhile)
    kind = CheckpointNotFoundError if then == "version given up" else CorruptObjectError
    with pytest.raises(kind, match="while it was opened"):
        objects.map_object(container, record)


def test_many_readers_may_map_an_object(objects):
    save(objects, 5)
    container = objects.container(5)
    (record,) = objects.read_manifest(container).objects
    mapped = [objects.map_object(container, record, warm=i % 2 == 1) for i in range(10)]
    assert len({one.data.tobytes() for one in mapped}) == 1
    assert not any(one.data.flags.writeable for one in mapped)
