"""A load, on one rank and on three: which version, whether it is sound, and what each rank gets."""

import json
import logging
import os
import shutil
import threading

import numpy as np
import pytest

from flashpoint.errors import CheckpointNotFoundError, CorruptObjectError, DeadlineError, MismatchError
from flashpoint.ids import CheckpointContainerId
from flashpoint.layout import Entry
from flashpoint.manifest import MANIFEST_NAME, VERSION, section_digest
from flashpoint.markers import Marker
from flashpoint.retention import Version
from tests.core.world import Job, Rank, contents, shard


@pytest.fixture
def three(job_root):
    job = Job(job_root, 3, keep=3)
    yield job
    job.close()


def newest(job: Job) -> list[int | None]:
    """The step that each rank recovers, after checking what it gets there."""

    def recover(rank: Rank) -> int | None:
        view = rank.loader.latest_complete()
        if view is None:
            return None
        with view:
            step = view.manifest.step
            for name, array in contents(step, rank.rank).items():
                np.testing.assert_array_equal(view[name], array)
            assert view["step"] == step
            return step

    return job.each(recover)


def flip(root: str, step: int, rank: int, position: int = 5000) -> None:
    with open(f"{root}/step-{step}_ckpt/rank{rank:05d}-0.safetensors", "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))


# ---- which version --------------------------------------------------------------------------------


def test_where_nothing_was_saved_there_is_nothing_to_load(three):
    assert newest(three) == [None] * 3
    for error in three.on_all(lambda rank: rank.loader.load()):
        assert isinstance(error, CheckpointNotFoundError)
        assert "no complete checkpoint" in str(error)


def test_the_newest_version_is_loaded_by_all_ranks_with_their_own_contents(three):
    for step in (9, 10, 11):
        three.save(step)
    assert newest(three) == [11] * 3
    assert [v.step for v in three.each(lambda rank: rank.loader.candidates())[0]] == [11, 10, 9]


def test_a_later_epoch_is_newer_than_a_higher_step(job_root):
    first = Job(job_root, 2, keep=0)
    first.save(100)
    first.close()
    second = Job(job_root, 2, keep=0, epoch=1)
    second.save(60)
    assert newest(second) == [60, 60]
    assert second.each(lambda rank: rank.loader.candidates())[1] == [Version(1, 60), Version(0, 100)]
    second.close()


def test_a_step_can_be_asked_for(three):
    for step in (1, 2):
        three.save(step)
    for rank, view in enumerate(three.each(lambda rank: rank.loader.load(1))):
        assert view.manifest.step == 1
        assert view["own"] == rank
        view.close()
    for error in three.on_all(lambda rank: rank.loader.load(7)):
        assert isinstance(error, CheckpointNotFoundError)
        assert "step 7" in str(error)


# ---- what vetoes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [True, False])
def test_a_marker_of_any_rank_vetoes_its_version(three, live):
    for step in (1, 2):
        three.save(step)
    marker = Marker.create(CheckpointContainerId(three.root, 2), 1)
    if not live:
        marker.release()
    assert newest(three) == [1] * 3
    for error in three.on_all(lambda rank: rank.loader.load(2)):
        assert isinstance(error, CheckpointNotFoundError)
    assert os.path.exists(f"{three.root}/step-2_ckpt/{MANIFEST_NAME}")  # not ours to remove


@pytest.mark.fault(25)
def test_a_torn_manifest_is_stepped_over_and_then_removed(three):
    for step in (1, 2):
        three.save(step)
    os.truncate(f"{three.root}/step-2_ckpt/{MANIFEST_NAME}", 900)
    assert newest(three) == [1] * 3
    assert not os.path.exists(f"{three.root}/step-2_ckpt")
    three.save(2)
    assert newest(three) == [2] * 3


def test_a_manifest_without_a_readable_line_is_no_candidate(three):
    for step in (1, 2):
        three.save(step)
    with open(f"{three.root}/step-2_ckpt/{MANIFEST_NAME}", "wb") as file:
        file.write(b"garbage")
    assert newest(three) == [1] * 3
    three.save(2)
    assert newest(three) == [2] * 3


def test_a_version_of_a_newer_release_is_stepped_over_and_left_to_it(three):
    for step in (1, 2):
        three.save(step)
    path = f"{three.root}/step-2_ckpt/{MANIFEST_NAME}"
    with open(path, "rb") as file:
        head, _, rest = file.read().partition(b"\n")
    head = json.dumps(json.loads(head) | {"version": VERSION + 1}).encode()
    body = head + b"\n" + rest[:-33]
    with open(path, "wb") as file:
        file.write(body + section_digest(body).encode() + b"\n")
    assert newest(three) == [1] * 3
    assert os.path.exists(path)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("damage", ["flipped", "header", "missing", "truncated", "folder"])
@pytest.mark.fault("E")
def test_one_bad_object_steps_all_ranks_back_and_the_version_goes(three, rank, damage, caplog):
    for step in (1, 2, 3):
        three.save(step)
    path = f"{three.root}/step-3_ckpt/rank{rank:05d}-0.safetensors"
    if damage in ("missing", "folder"):
        os.unlink(path)
        if damage == "folder":
            os.mkdir(path)
    elif damage == "truncated":
        os.truncate(path, 4096)
    else:
        flip(three.root, 3, rank, 5000 if damage == "flipped" else 30)
    with caplog.at_level(logging.WARNING):
        assert newest(three) == [2] * 3
    assert f"rank{rank:05d}-0.safetensors" in caplog.text
    assert "step 3 cannot be loaded" in caplog.text
    assert three.ranks[0].objects.complete_steps() == [2, 1]
    if damage == "folder":
        os.rmdir(path)
    assert not os.path.exists(f"{three.root}/step-3_ckpt") or damage == "folder"
    three.save(3)
    assert newest(three) == [3] * 3


def test_several_bad_versions_are_stepped_over(three):
    for step in (1, 2, 3):
        three.save(step)
    flip(three.root, 3, 0)
    flip(three.root, 2, 1)
    assert newest(three) == [1] * 3
    assert three.ranks[0].objects.complete_steps() == [1]


def test_where_every_version_is_bad_none_is_removed(three):
    for step in (1, 2):
        three.save(step)
        flip(three.root, step, 0)
    assert newest(three) == [None] * 3
    assert three.ranks[0].objects.complete_steps() == [2, 1]  # for whoever wants to look


def test_a_rank_that_cannot_look_condemns_nothing(three, monkeypatch):
    for step in (1, 2):
        three.save(step)
    (_, second, _) = three.ranks
    real = second.objects.map_object

    def out_of_descriptors(container, *args, **options):
        if container.step == 2:
            raise OSError(24, "Too many open files")
        return real(container, *args, **options)

    monkeypatch.setattr(second.objects, "map_object", out_of_descriptors)
    assert newest(three) == [1] * 3
    assert three.ranks[0].objects.complete_steps() == [2, 1]


def test_without_verification_a_flipped_byte_is_not_looked_for(job_root):
    job = Job(job_root, 2, verify=False)
    job.save(1)
    flip(job_root, 1, 0, 30)
    assert newest(job) == [1] * 2
    job.close()


def test_a_rank_that_does_not_come_is_named(job_root):
    job = Job(job_root, 3, recovery_timeout_s=0.3)
    job.save(1)
    results = job.on_all(lambda rank: None if rank.rank == 1 else rank.loader.latest_complete())
    for rank in (0, 2):
        assert isinstance(results[rank], DeadlineError)
        assert "[1]" in str(results[rank])
    job.close()


# ---- several nodes --------------------------------------------------------------------------------


@pytest.fixture
def nodes(job_root):
    """Rank 0 on one node, ranks 1 and 2 on another."""
    job = Job(job_root, 3, keep=3, roots=[f"{job_root}/a", f"{job_root}/b", f"{job_root}/b"])
    for step in (1, 2):
        job.save(step)
    yield job
    job.close()


def test_a_version_counts_where_all_nodes_hold_it(nodes, job_root):
    assert newest(nodes) == [2] * 3
    shutil.rmtree(f"{job_root}/b/step-2_ckpt")
    assert newest(nodes) == [1] * 3


def test_a_marker_on_any_node_vetoes(nodes, job_root):
    Marker.create(CheckpointContainerId(f"{job_root}/b", 2), 1).release()
    assert newest(nodes) == [1] * 3


def test_a_marker_vetoes_also_on_a_node_that_holds_nothing_complete(nodes, job_root):
    shutil.rmtree(f"{job_root}/b/step-1_ckpt")
    Marker.create(CheckpointContainerId(f"{job_root}/b", 2), 1).release()
    assert [v.step for v in nodes.each(lambda rank: rank.loader.candidates())[0]] == [1]


def test_a_node_that_lost_its_memory_vetoes_nothing_but_its_objects_are_missed(nodes, job_root):
    shutil.rmtree(f"{job_root}/b")
    os.mkdir(f"{job_root}/b")
    assert [v.step for v in nodes.each(lambda rank: rank.loader.candidates())[1]] == [2, 1]
    assert newest(nodes) == [None] * 3
    assert nodes.ranks[0].objects.complete_steps() == [2, 1]  # a peer's copy may yet make them whole


@pytest.mark.fault(24)
def test_two_versions_of_one_step_are_never_mixed(nodes, job_root):
    # Both nodes hold a sound step 2, but not of the same save.
    other = Job(f"{job_root}/x", 3, roots=[f"{job_root}/c", f"{job_root}/d", f"{job_root}/d"])
    other.each(lambda rank: rank.save(2, contents(77, rank.rank), {"step": 77}))
    shutil.rmtree(f"{job_root}/b/step-2_ckpt")
    shutil.copytree(f"{job_root}/d/step-2_ckpt", f"{job_root}/b/step-2_ckpt")
    assert newest(nodes) == [1] * 3
    other.close()


# ---- another world --------------------------------------------------------------------------------


def save_sharded(job: Job, step: int, rows: np.ndarray) -> None:
    world_size = len(job.ranks)

    def save(rank: Rank) -> None:
        part, entry = shard(rows, rank.rank, world_size)
        rank.save(step, {"sharded": part}, {"rank": rank.rank}, [entry])

    job.each(save)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (3, 1), (3, 2), (1, 3), (2, 3)])
def test_a_world_of_another_size_reads_the_whole(job_root, before, after):
    rows = np.random.default_rng(0).standard_normal((11, 3)).astype(np.float32)
    old = Job(job_root, before)
    save_sharded(old, 5, rows)
    old.close()
    new = Job(job_root, after)

    def load(rank: Rank) -> None:
        with rank.loader.load() as view:
            np.testing.assert_array_equal(view["sharded"], rows)
            array = np.zeros((11, 3), np.float32)
            rank.loader.read(view, {"sharded": array})
            np.testing.assert_array_equal(array, rows)
            assert view["rank"] == (rank.rank if rank.rank < before else 0)
            part, entry = shard(rows, rank.rank, after)
            for read in rank.loader.plan(view, [entry]):
                source = view.array(read.record, read.entry)
                begin, start = read.source_start[0], read.target_start[0]
                np.testing.assert_array_equal(
                    source[begin : begin + read.lengths[0]], part[start : start + read.lengths[0]]
                )

    new.each(load)
    save_sharded(new, 6, rows + 1)
    for view in new.each(lambda rank: rank.loader.load()):
        assert view.manifest.step == 6
        np.testing.assert_array_equal(view["sharded"], rows + 1)
        view.close()
    new.close()


# ---- reading in place -----------------------------------------------------------------------------


@pytest.fixture
def saved(job_root):
    job = Job(job_root, 1)
    arrays = {"a": np.arange(12.0).reshape(3, 4), "s": np.array(3), "e": np.zeros((0, 2)), "b": np.arange(5)}
    job.each(lambda rank: rank.save(1, arrays))
    view = job.ranks[0].loader.load()
    yield job.ranks[0].loader, view, arrays
    view.close()
    job.close()


def test_arrays_are_filled_in_place_whatever_their_memory_looks_like(saved):
    loader, view, arrays = saved
    targets = {
        "a": np.zeros((4, 3)).T,
        "s": np.zeros((), np.int64),
        "e": np.zeros((0, 2)),
        "b": np.zeros(10, np.int64)[::2],
    }
    loader.read(view, targets)
    for name, target in targets.items():
        np.testing.assert_array_equal(target, arrays[name])


@pytest.mark.parametrize(
    "target",
    [
        {"a": np.zeros((3, 5))},
        {"a": np.zeros((4, 3))},
        {"a": np.zeros(12)},
        {"a": np.zeros((3, 4), np.float32)},
        {"s": np.zeros(1, np.int64)},
        {"missing": np.zeros(3)},
        {"missing": np.zeros(0)},
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_touched(saved, target):
    loader, view, _ = saved
    first = np.full(5, -1)
    with pytest.raises(MismatchError):
        loader.read(view, {"b": first, **target})
    assert set(first) == {-1}


def test_a_corrupt_source_touches_no_array(job_root):
    job = Job(job_root, 1, verify=False, chunk_bytes=4096)
    job.each(lambda rank: rank.save(1, {"a": np.ones(4096, np.uint8), "b": np.ones(4096, np.uint8)}))
    flip(job_root, 1, 0, 4096 + 4096 + 7)
    loader = job.ranks[0].loader
    from flashpoint.view import CheckpointView

    targets = {"a": np.zeros(4096, np.uint8), "b": np.zeros(4096, np.uint8)}
    with CheckpointView(job.ranks[0].objects, CheckpointContainerId(job_root, 1)) as view:
        with pytest.raises(CorruptObjectError):
            loader.read(view, targets)
    assert not targets["a"].any()
    assert not targets["b"].any()
    job.close()


# ---- beside a running save ------------------------------------------------------------------------


def test_loads_beside_saves_see_whole_versions_only(job_root):
    job = Job(job_root, 1, keep=1)
    (rank,) = job.ranks
    job.save(1)
    stop, seen, wrong = threading.Event(), set(), []

    def read() -> None:
        reader = Job(job_root, 1)
        while not stop.is_set():
            for step in reader.ranks[0].objects.complete_steps():
                try:
                    with reader.ranks[0].loader.load(step) as view:
                        value, array = view["step"], view["of_rank_0"]
                        if set(array.tolist()) != {step * 1000} or value != step:
                            wrong.append(step)
                        seen.add(step)
                except CheckpointNotFoundError:
                    pass  # it was given up meanwhile
        reader.close()

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    for step in range(2, 60):
        rank.saver.save(step, contents(step), {"step": step})
    stop.set()
    for thread in readers:
        thread.join(30)
    assert not wrong
    assert len(seen) > 3
    job.close()


def test_an_entry_of_the_test_world_is_what_it_says():
    assert shard(np.arange(11), 0, 1)[1] == Entry("sharded", "int64", (11,), (0,), (11,))
