"""A save, step by step, on one rank and on three."""

import os
import shutil
import threading
from collections import OrderedDict

import msgspec
import numpy as np
import pytest

import flashpoint
from flashpoint.commit import Vote
from flashpoint.errors import (
    CheckpointExistsError,
    DeadlineError,
    FlashpointError,
    InvalidIdError,
    LayoutError,
    NoSpaceError,
    SaveError,
)
from flashpoint.ids import CheckpointContainerId
from flashpoint.layout import Entry
from flashpoint.manifest import MANIFEST_NAME, Value
from flashpoint.markers import Marker
from tests.core.processes import process
from tests.core.world import Job, Rank, contents, shard

MIB = 1 << 20


@pytest.fixture
def one(job_root):
    job = Job(job_root, 1)
    yield job
    job.close()


@pytest.fixture
def three(job_root):
    job = Job(job_root, 3)
    yield job
    job.close()


@pytest.fixture(params=[1, 3], ids=["one rank", "three ranks"])
def job(request, job_root):
    opened = Job(job_root, request.param)
    yield opened
    opened.close()


def tree(root: str) -> list[str]:
    """Every file and folder below the root but those of the pool and the epoch."""
    found = []
    for folder, folders, names in os.walk(root):
        if ".pool" in folders:
            folders.remove(".pool")
        found += [os.path.relpath(os.path.join(folder, name), root) for name in folders + names]
    return sorted(name for name in found if not name.startswith(".epoch"))


def complete_tree(step: int, world_size: int) -> list[str]:
    objects = [f"step-{step}_ckpt/rank{rank:05d}-0.safetensors" for rank in range(world_size)]
    return sorted([f"step-{step}_ckpt", f"step-{step}_ckpt/{MANIFEST_NAME}", *objects])


def manifest_of(root: str, step: int) -> bytes:
    with open(f"{root}/step-{step}_ckpt/{MANIFEST_NAME}", "rb") as file:
        return file.read()


def check(job: Job, step: int) -> None:
    """The version holds what `Job.save` put there, for every rank."""
    for rank in range(len(job.ranks)):
        with flashpoint.open(f"{job.root}/step-{step}_ckpt", rank=rank) as view:
            view.verify()
            for name, array in contents(step, rank).items():
                np.testing.assert_array_equal(view[name], array)
            assert view["step"] == step


def nothing_is_held(job: Job) -> None:
    """Every buffer that no version names can be taken again."""
    for rank in job.ranks:
        assert not rank.objects.pool._in_use


# ---- the flow -------------------------------------------------------------------------------------


def test_a_save_leaves_the_objects_and_the_manifest_and_nothing_else(job):
    job.save(5)
    assert tree(job.root) == complete_tree(5, len(job.ranks))
    check(job, 5)
    nothing_is_held(job)


def test_the_marker_comes_first_and_goes_last(three):
    seen: dict[str, list[str]] = {}
    lead = three.ranks[0]

    def save(rank: Rank) -> None:
        pending = rank.saver.begin(5)

        def look(moment: str) -> None:
            if rank is lead:
                seen[moment] = tree(three.root)

        real = rank.objects.create_container
        rank.objects.create_container = lambda container: (look("before the folder"), real(container))[1]
        rank.saver.initialize_checkpoint(pending)
        look("initialized")
        rank.stage(pending, contents(5, rank.rank))
        look("staged")
        rank.saver.write(pending)
        look("written")
        rank.saver.write_metadata(pending)
        look("manifest")
        rank.saver.finalize(pending)

    three.each(save)
    marker, folder = "step-5_ckpt__0__unfinished", "step-5_ckpt"
    assert marker in seen["before the folder"]
    for moment in ("initialized", "staged", "written", "manifest"):
        assert {marker, folder} <= set(seen[moment]), moment
    assert f"{folder}/rank00000-0.safetensors" not in seen["staged"]
    assert f"{folder}/rank00000-0.safetensors" in seen["written"]
    assert f"{folder}/{MANIFEST_NAME}" not in seen["written"]
    assert set(complete_tree(5, 3)) <= set(seen["manifest"])
    assert tree(three.root) == complete_tree(5, 3)


@pytest.mark.fault("D")
def test_a_version_is_dirty_until_the_last_rank_has_finalized(three):
    ranks_may_finalize = [threading.Event() for _ in range(3)]
    has_written = threading.Barrier(4)

    def save(rank: Rank) -> None:
        pending = rank.saver.begin(5)
        rank.saver.initialize_checkpoint(pending)
        rank.stage(pending, contents(5, rank.rank), {"step": 5})
        rank.saver.write(pending)
        rank.saver.write_metadata(pending)
        has_written.wait(30)
        assert ranks_may_finalize[rank.rank].wait(30)
        rank.saver.finalize(pending)

    saving = threading.Thread(target=three.each, args=(save,))
    saving.start()
    has_written.wait(30)
    objects = three.ranks[0].objects
    for rank in (2, 0, 1):
        assert objects.complete_steps() == []
        assert objects.dirty_steps() == {5}
        with pytest.raises(FlashpointError, match="unfinished"):
            flashpoint.open(f"{three.root}/step-5_ckpt")
        ranks_may_finalize[rank].set()
    saving.join(30)
    assert objects.complete_steps() == [5]
    check(three, 5)


def test_an_object_has_the_modes_of_a_private_file(one):
    one.save(5)
    for name in tree(one.root):
        assert os.stat(f"{one.root}/{name}").st_mode & 0o077 == 0, name


def test_a_version_may_have_several_objects_of_a_rank(one):
    (rank,) = one.ranks
    pending = rank.saver.begin(5)
    rank.saver.initialize_checkpoint(pending)
    rank.stage(pending, {"a": np.arange(10)})
    rank.stage(pending, {"b": np.arange(2000)})
    rank.saver.write(pending)
    rank.saver.write_metadata(pending)
    rank.saver.finalize(pending)
    with flashpoint.open(f"{one.root}/step-5_ckpt") as view:
        assert [record.name[-14:] for record in view.manifest.objects] == ["-0.safetensors", "-1.safetensors"]
        assert view["a"].tolist() == list(range(10))
        assert view["b"].tolist() == list(range(2000))


def test_nothing_of_an_earlier_version_stays_between_the_entries(one):
    one.each(lambda rank: rank.save(1, {"secret": np.full(4000, 0xAA, np.uint8)}))
    one.each(lambda rank: rank.save(2, {"secret": np.full(4000, 0xAA, np.uint8)}))
    one.each(lambda rank: rank.save(3, {"small": np.zeros(10, np.uint8)}))
    (name,) = [name for name in tree(one.root) if name.endswith(".safetensors")]
    with open(f"{one.root}/{name}", "rb") as file:
        assert b"\xaa\xaa" not in file.read()


def test_the_buffers_of_a_run_are_allocated_once(job):
    for step in range(10):
        job.save(step)
    assert [rank.objects.pool.allocations for rank in job.ranks] == [2] * len(job.ranks)
    assert job.ranks[0].objects.complete_steps() == [9]
    check(job, 9)


def test_descriptors_do_not_grow_with_the_number_of_saves(job):
    for step in range(3):
        job.save(step)
    before = len(os.listdir("/proc/self/fd"))
    for step in range(3, 12):
        job.save(step)
    assert len(os.listdir("/proc/self/fd")) == before


def test_keys_do_not_pile_up_in_the_store(three):
    for step in range(3):
        three.save(step)
    before = len(three.store.values)
    for step in range(3, 12):
        three.save(step)
    assert len(three.store.values) <= before


def test_ranks_with_equal_layouts_share_nothing_in_the_store(job):
    # Plain data parallelism: every rank saves the same names and shapes.
    for step in range(3):
        arrays = {"w": np.full(10, step), "step": np.array(step)}
        job.each(lambda rank, arrays=arrays: rank.save(rank.objects.rank * 0 + int(arrays["step"]), arrays))
    with flashpoint.open(f"{job.root}/step-2_ckpt") as view:
        assert len({record.layout for record in view.manifest.objects}) == 1
        assert len(view.manifest.objects) == len(job.ranks)


def test_layouts_may_change_from_save_to_save(three):
    for step in range(6):
        size = 100 + step // 2

        def save(rank, step=step, size=size):
            names = ["a", "b"] if (step + rank.rank) % 2 else ["a"]
            rank.save(step, {name: np.full(size, step) for name in names})

        three.each(save)
        with flashpoint.open(f"{three.root}/step-{step}_ckpt") as view:
            assert view["b"].tolist() == [step] * size


def test_the_ranks_values_are_stored_once_where_they_are_equal(three):
    three.each(lambda rank: rank.save(1, contents(1, rank.rank), {"common": "x" * 1000}))
    assert manifest_of(three.root, 1).count(b"x" * 1000) == 1


def test_a_job_on_two_nodes_has_a_manifest_on_each(job_root):
    roots = [f"{job_root}/a", f"{job_root}/b", f"{job_root}/b"]
    job = Job(job_root, 3, roots=roots)
    for step in (1, 2):
        job.save(step)
    assert len({manifest_of(root, 2) for root in roots}) == 1
    assert tree(roots[0]) == ["step-2_ckpt", "step-2_ckpt/.metadata", "step-2_ckpt/rank00000-0.safetensors"]
    assert [name for name in tree(roots[1]) if name.endswith("safetensors")] == [
        "step-2_ckpt/rank00001-0.safetensors",
        "step-2_ckpt/rank00002-0.safetensors",
    ]
    job.close()


def test_a_rank_that_begins_late_does_not_sweep_away_the_folder_that_another_is_about_to_use(job_root):
    job = Job(job_root, 2)
    first, late = job.ranks
    made, swept, written = threading.Event(), threading.Event(), threading.Event()
    real = late.objects.remove_objects_of

    def sweep(*args, **options):
        real(*args, **options)
        swept.set()
        assert written.wait(30)

    late.objects.remove_objects_of = sweep

    def save(rank: Rank) -> None:
        pending = rank.saver.begin(5)
        try:
            assert rank is first or made.wait(30)
            rank.saver.initialize_checkpoint(pending)
            made.set()
            rank.stage(pending, contents(5, rank.rank), {"step": 5})
            assert rank is late or swept.wait(30)
            rank.saver.write(pending)
        except Exception as error:
            rank.saver.withdraw(pending, error)
            raise
        finally:
            if rank is first:
                written.set()
        rank.saver.write_metadata(pending)
        rank.saver.finalize(pending)

    job.each(save)
    check(job, 5)
    job.close()


# ---- what is there already ------------------------------------------------------------------------


def test_a_complete_step_is_not_saved_again(job):
    job.save(5)
    before = tree(job.root)
    for error in job.on_all(lambda rank: rank.save(5, contents(6, rank.rank))):
        assert isinstance(error, CheckpointExistsError)
        assert "overwrite=True" in str(error)
    assert tree(job.root) == before
    check(job, 5)
    job.save(6)  # and the ranks are still in step
    check(job, 6)


def test_a_complete_step_is_replaced_on_demand(job):
    job.save(5)
    job.each(lambda rank: rank.save(5, contents(9, rank.rank), {"step": 9}, overwrite=True))
    with flashpoint.open(f"{job.root}/step-5_ckpt") as view:
        np.testing.assert_array_equal(view["of_rank_0"], contents(9)["of_rank_0"])
    assert tree(job.root) == complete_tree(5, len(job.ranks))
    nothing_is_held(job)


def test_what_a_crashed_attempt_left_is_replaced(job):
    rank = job.ranks[-1]
    pending = rank.saver.begin(5)
    rank.saver.initialize_checkpoint(pending)
    rank.stage(pending, {"other": np.arange(3)})
    rank.saver.write(pending)
    pending.marker.release()
    rank.objects.pool.release(pending.staged[0].buffer)
    for other in job.ranks:
        if other is not rank:
            other.saver.begin(5)
    job.save(5)
    assert tree(job.root) == complete_tree(5, len(job.ranks))
    check(job, 5)


def test_strays_of_a_larger_world_are_removed(job_root):
    large = Job(job_root, 3)

    def crash(rank: Rank) -> None:
        pending = rank.saver.begin(5)
        rank.saver.initialize_checkpoint(pending)
        rank.stage(pending, contents(5, rank.rank))
        rank.saver.write(pending)
        pending.marker.remove()

    large.each(crash)
    assert len([name for name in tree(job_root) if name.endswith(".safetensors")]) == 3
    large.close()
    small = Job(job_root, 1)
    small.save(5)
    assert tree(job_root) == complete_tree(5, 1)
    small.close()


def test_other_peoples_files_in_a_container_stay(one):
    one.save(1)
    with open(f"{one.root}/step-1_ckpt/README", "w") as file:
        file.write("mine")
    one.save(2)
    assert "step-1_ckpt/README" in tree(one.root)
    assert one.ranks[0].objects.complete_steps() == [2]


def test_a_step_that_another_process_is_saving_is_refused(one):
    marker = Marker.create(CheckpointContainerId(one.root, 5), 0)
    with pytest.raises(FlashpointError, match=r"step 5 .*another process.*one job root for each job"):
        one.save(5)
    assert tree(one.root) == ["step-5_ckpt__0__unfinished"]
    marker.remove()
    one.save(5)
    check(one, 5)


def test_a_container_of_another_job_root_is_refused(one, job_root):
    foreign = CheckpointContainerId(f"{job_root}0", 5)  # /x/job0 under /x/job
    with pytest.raises(InvalidIdError, match="job0"):
        one.ranks[0].saver.begin(foreign)
    assert not os.path.exists(foreign.job_root)


# ---- failures -------------------------------------------------------------------------------------


def fails_to_stage(error: Exception):
    def save(rank: Rank) -> None:
        if rank.rank != 1:
            rank.save(5, contents(5, rank.rank), {"step": 5})
            return

        def broken(*args: object) -> None:
            raise error

        rank.stage = broken
        try:
            rank.save(5)
        finally:
            del rank.stage

    return save


@pytest.mark.parametrize(
    ("error", "text"),
    [(NoSpaceError("tmpfs is full"), "tmpfs is full"), (ValueError("odd"), "ValueError: odd")],
)
def test_one_ranks_failure_is_every_ranks_failure_by_name(three, error, text):
    three.save(4)
    results = three.on_all(fails_to_stage(error))
    assert results[1] is error
    for rank in (0, 2):
        assert isinstance(results[rank], SaveError)
        assert (results[rank].step, results[rank].failures) == (5, {1: text})
    assert tree(three.root) == complete_tree(4, 3)  # nothing remains but the older version
    check(three, 4)
    nothing_is_held(three)
    three.save(5)
    check(three, 5)


def test_the_leaders_own_failure_reaches_the_others(three):
    def save(rank: Rank) -> None:
        if rank.rank == 0:
            rank.objects.link_object = lambda *args: (_ for _ in ()).throw(OSError(5, "no link"))
        try:
            rank.save(5, contents(5, rank.rank))
        finally:
            rank.objects.__dict__.pop("link_object", None)

    results = three.on_all(save)
    assert isinstance(results[0], OSError)
    assert [set(error.failures) for error in results[1:]] == [{0}, {0}]
    assert "no link" in str(results[1])
    assert tree(three.root) == []
    nothing_is_held(three)


def test_a_rank_without_space_fails_the_save_and_not_the_job(job_root):
    job = Job(job_root, 3, memory_limit_bytes=24 * MIB)

    def save(step: int, size: int):
        def on_rank(rank: Rank) -> None:
            rank.save(step, {"w": np.full(size if rank.rank == 2 else 1000, step, np.uint8)})

        return on_rank

    job.each(save(1, 8 * MIB))
    results = job.on_all(save(2, 20 * MIB))
    assert isinstance(results[2], NoSpaceError)
    assert "needs 20.0 MiB more" in results[0].failures[2]
    assert job.ranks[0].objects.complete_steps() == [1]
    job.each(save(3, 8 * MIB))
    assert job.ranks[0].objects.complete_steps() == [3]
    job.close()


def test_a_rank_that_does_not_come_is_named_with_the_deadline(job_root):
    job = Job(job_root, 3)

    def save(rank: Rank) -> None:
        if rank.rank == 2:
            rank.saver.begin(5)  # and then it hangs
            return
        rank.save(5, contents(5, rank.rank))

    with job.impatient(0.5):
        results = job.on_all(save)
    for rank in (0, 1):
        assert isinstance(results[rank], SaveError)
        assert list(results[rank].failures) == [2]
        assert "0.5 s" in results[rank].failures[2]
    assert tree(job_root) == []
    nothing_is_held(job)
    job.save(6)
    check(job, 6)
    job.close()


def test_a_rank_that_left_a_save_out_is_back_in_step_with_the_next(job_root):
    job = Job(job_root, 2)
    with job.impatient():
        results = job.on_all(lambda rank: None if rank.rank == 1 else rank.save(5, contents(5, rank.rank)))
    assert isinstance(results[0], SaveError)
    job.save(6)
    check(job, 6)
    job.close()


def test_a_rank_that_comes_late_hears_what_was_decided(job_root):
    job = Job(job_root, 2)
    decided = threading.Event()

    def save(rank: Rank) -> None:
        if rank.rank == 1:
            assert decided.wait(30)
        try:
            rank.save(5, contents(5, rank.rank))
        finally:
            decided.set()

    with job.impatient():
        results = job.on_all(save)
    assert [list(error.failures) for error in results] == [[1], [1]]
    assert tree(job_root) == []
    nothing_is_held(job)
    job.save(6)
    check(job, 6)
    job.close()


def test_a_leader_that_never_answers_is_a_deadline_error_that_names_it(job_root):
    job = Job(job_root, 2)
    job.each(lambda rank: rank.save(4, contents(4, rank.rank), {"step": 4}))
    with job.impatient():
        results = job.on_all(lambda rank: None if rank.rank == 0 else rank.save(5, contents(5, rank.rank)))
    assert isinstance(results[1], DeadlineError)
    assert "rank 0" in str(results[1])
    assert "step 5" in str(results[1])
    check(job, 4)
    job.close()


def test_a_save_whose_outcome_is_unknown_gives_its_memory_back(job_root):
    job = Job(job_root, 2)
    job.save(1)
    (_, follower) = job.ranks
    for step in (2, 3, 4):
        with job.impatient(0.1), pytest.raises(DeadlineError):
            follower.saver.save(step, contents(step, 1), {"step": step})
        job.ranks[0].saver.begin(step)
    assert follower.objects.pool.allocations == 2
    nothing_is_held(job)
    assert follower.objects.complete_steps() == [1]
    assert follower.objects.collect_garbage() == [2, 3, 4]
    job.save(5)
    assert tree(job_root) == complete_tree(5, 2)
    job.close()


@pytest.mark.parametrize(
    "bad", ["a name with a surrogate", "a name that is no text", "a value JSON cannot say"]
)
def test_values_that_cannot_be_written_fail_the_save_by_name_and_at_once(three, bad):
    value = {
        "a name with a surrogate": Value("\ud800", 1),
        "a name that is no text": Value(3, 1),
        "a value JSON cannot say": Value("x", object()),
    }[bad]

    def save(rank: Rank) -> None:
        pending = rank.saver.begin(5)
        rank.saver.initialize_checkpoint(pending)
        rank.stage(pending, contents(5, rank.rank))
        if rank.rank == 1:
            pending.values = [value]
        rank.saver.write(pending)
        rank.saver.write_metadata(pending)
        rank.saver.finalize(pending)

    results = three.on_all(save)
    for error in results:
        assert isinstance(error, SaveError), error
        assert list(error.failures) == [1]
    assert tree(three.root) == []
    nothing_is_held(three)
    three.save(6)
    check(three, 6)


def test_saves_of_unknown_outcome_hold_no_memory_once_a_later_one_is_complete(job_root):
    # The leader hears nothing of rank 1's last step; rank 1 has let go of the version by then.
    job = Job(job_root, 2)
    job.save(1)

    def save(step: int):
        def on_rank(rank: Rank) -> None:
            pending = rank.saver.begin(step)
            rank.saver.initialize_checkpoint(pending)
            rank.stage(pending, contents(step, rank.rank), {"step": step})
            rank.saver.write(pending)
            rank.saver.write_metadata(pending)
            if rank.rank == 1:
                rank.saver.abandon(pending)
            else:
                rank.saver.finalize(pending)

        return on_rank

    for step in (2, 4, 6):
        with job.impatient():
            results = job.on_all(save(step))
        assert isinstance(results[0], SaveError)
        assert job.ranks[0].objects.complete_steps() == [step - 1]
        job.save(step + 1)
        assert tree(job_root) == complete_tree(step + 1, 2)
        check(job, step + 1)
    for rank in job.ranks:
        assert len([name for name in os.listdir(f"{job_root}/.pool") if f"rank{rank.rank:05d}" in name]) <= 3
    job.close()


def test_a_version_that_is_complete_here_stays_though_another_node_did_not_say_so(job_root):
    roots = [f"{job_root}/a", f"{job_root}/b"]
    job = Job(job_root, 2, roots=roots, keep=2)
    job.each(lambda rank: rank.save(1, contents(1, rank.rank), {"step": 1}))

    def save(rank: Rank) -> None:
        pending = rank.saver.begin(2)
        rank.saver.initialize_checkpoint(pending)
        rank.stage(pending, contents(2, rank.rank), {"step": 2})
        rank.saver.write(pending)
        rank.saver.write_metadata(pending)
        if rank.rank == 0:
            rank.saver.finalize(pending)
        else:
            pending.marker.remove()  # and its word is lost

    with job.impatient():
        assert isinstance(job.on_all(save)[0], SaveError)
    job.each(lambda rank: rank.save(3, contents(3, rank.rank), {"step": 3}))
    assert job.ranks[0].objects.complete_steps() == [3, 2]
    job.close()


def test_a_manifest_that_cannot_be_written_fails_the_save_on_all_ranks(job_root):
    roots = [f"{job_root}/a", f"{job_root}/b", f"{job_root}/b"]
    job = Job(job_root, 3, roots=roots)

    def save(rank: Rank) -> None:
        if rank.rank == 1:  # the leader of the second node
            rank.objects.write_manifest = lambda *args: (_ for _ in ()).throw(OSError(28, "no space left"))
        rank.save(5, contents(5, rank.rank))

    results = job.on_all(save)
    for error in results:
        assert isinstance(error, SaveError)
        assert list(error.failures) == [1]
        assert "no space left" in error.failures[1]
    assert tree(roots[0]) == tree(roots[1]) == []
    nothing_is_held(job)
    job.close()


def test_shards_that_leave_a_hole_fail_the_save(three):
    rows = np.arange(30.0).reshape(10, 3)

    def save(rank: Rank) -> None:
        part, entry = shard(rows, rank.rank, 4)  # the fourth share is nobody's
        rank.save(5, {"sharded": part}, None, [entry])

    for error in three.on_all(save):
        assert isinstance(error, SaveError)
        assert "'sharded'" in str(error)
    assert tree(three.root) == []


def test_ranks_at_different_steps_fail_by_name(three):
    def save(rank: Rank) -> None:
        pending = rank.saver.begin(5 if rank.rank < 2 else 6)
        pending.topic = "save/5.1"
        rank.saver.initialize_checkpoint(pending)
        rank.stage(pending, contents(5, rank.rank))
        rank.saver.write(pending)
        rank.saver.write_metadata(pending)

    for error in three.on_all(save):
        assert isinstance(error, SaveError)
        assert "step 6" in error.failures[2]
    assert tree(three.root) == []


def test_a_vote_that_is_garbage_fails_the_save_by_name(three):
    def save(rank: Rank) -> None:
        pending = rank.saver.begin(5)
        if rank.rank == 1:
            rank.coordinator.publish(f"{pending.topic}/vote/1", b"\xc1garbage")
            return
        rank.saver.initialize_checkpoint(pending)
        rank.stage(pending, contents(5, rank.rank))
        rank.saver.write(pending)
        rank.saver.write_metadata(pending)

    results = three.on_all(save)
    for rank in (0, 2):
        assert isinstance(results[rank], SaveError), results[rank]
        assert list(results[rank].failures) == [1]
    assert tree(three.root) == []


def test_a_store_that_is_gone_leaves_no_memory_behind(job_root):
    job = Job(job_root, 2)
    (_, follower) = job.ranks

    def gone(*args: object) -> None:
        raise ConnectionError("the store is gone")

    follower.coordinator.publish = gone
    for error in (None, NoSpaceError("and before that, no space")):
        pending = follower.saver.begin(5)
        follower.saver.initialize_checkpoint(pending)
        follower.stage(pending, contents(5, 1))
        with pytest.raises(ConnectionError):
            if error is None:
                follower.saver.save(6, contents(6, 1))
            follower.saver.withdraw(pending, error)
        if error is None:
            follower.saver.abandon(pending)
    nothing_is_held(job)
    assert [name for name in tree(job_root) if name.endswith(".safetensors")] == []
    job.close()


def test_arrays_that_cannot_be_stored_are_refused_by_name(one):
    (rank,) = one.ranks
    for arrays in (
        {"x": np.array([object()])},
        {"x": np.array(["text"])},
        {"\ud800": np.ones(1)},
        {3: np.ones(1)},
    ):
        with pytest.raises(LayoutError):
            rank.saver.save(5, arrays)
    with pytest.raises(TypeError, match="plain data"):
        rank.saver.save(5, {}, {"x": object()})
    assert tree(one.root) == []
    nothing_is_held(one)
    one.save(5)
    check(one, 5)


def test_a_name_for_both_an_array_and_a_value_is_refused(one):
    with pytest.raises(FlashpointError, match="'w'"):
        one.ranks[0].saver.save(5, {"w": np.ones(1)}, {"w": 1})
    assert tree(one.root) == []


# ---- the world as it is ---------------------------------------------------------------------------


def test_after_rm_rf_of_the_job_root_the_next_save_is_as_good_as_any(job):
    job.save(1)
    shutil.rmtree(job.root)
    job.save(2)
    assert tree(job.root) == complete_tree(2, len(job.ranks))
    check(job, 2)


def test_a_container_deleted_by_hand_gives_its_buffers_back(one):
    one.save(1)
    for step in range(2, 6):
        shutil.rmtree(f"{one.root}/step-{step - 1}_ckpt")
        one.save(step)
    assert one.ranks[0].objects.pool.allocations <= 2
    check(one, 5)


def test_a_container_deleted_during_the_save_is_an_error_and_not_a_version(one):
    (rank,) = one.ranks
    pending = rank.saver.begin(5)
    rank.saver.initialize_checkpoint(pending)
    rank.stage(pending, contents(5))
    rank.saver.write(pending)
    shutil.rmtree(f"{one.root}/step-5_ckpt")
    with pytest.raises(SaveError, match="manifest"):
        rank.saver.write_metadata(pending)
    assert tree(one.root) == []
    nothing_is_held(one)


def save_until_told(say, job_root):
    job = Job(job_root, 1)
    job.save(1)
    (rank,) = job.ranks
    pending = rank.saver.begin(2)
    rank.saver.initialize_checkpoint(pending)
    rank.stage(pending, contents(2), {"step": 2})
    rank.saver.write(pending)
    say("written")
    rank.saver.write_metadata(pending)
    rank.saver.finalize(pending)
    say("complete")


def test_a_killed_save_leaves_the_version_before_it(job_root):
    with process(save_until_told, job_root) as other:
        other.hear()
        objects = Job(job_root, 1).ranks[0].objects
        assert objects.complete_steps() == [1]
        assert objects.collect_garbage() == []  # a live save is left alone
        other.kill()
    assert objects.complete_steps() == [1]
    assert objects.collect_garbage() == [2]
    assert tree(job_root) == complete_tree(1, 1)
    job = Job(job_root, 1)
    check(job, 1)
    job.save(2)
    check(job, 2)
    assert len(os.listdir(f"{job_root}/.pool")) == 2  # the killed save's buffer was recycled
    job.close()


def test_a_save_is_not_disturbed_by_garbage_collection_elsewhere(job_root):
    with process(save_until_told, job_root) as other:
        other.hear()
        assert Job(job_root, 1).ranks[0].objects.collect_garbage() == []
        other.go_on()
        assert other.hear() == "complete"
    check(Job(job_root, 1), 2)


# ---- retention ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [5, 4]), (4, [5, 4, 3, 2]), (0, [5, 4, 3, 2, 1])])
def test_the_newest_versions_are_kept(job_root, keep, left):
    job = Job(job_root, 3, keep=keep)
    for step in range(1, 6):
        job.save(step)
    assert job.ranks[0].objects.complete_steps() == left
    assert tree(job_root) == sorted(name for step in left for name in complete_tree(step, 3))
    assert job.ranks[0].objects.pool.allocations == len(left) + bool(keep)
    for step in left:
        check(job, step)
    job.close()


@pytest.mark.fault(39)
def test_the_version_of_a_later_epoch_overrules_even_at_a_lower_step(job_root):
    first = Job(job_root, 1)
    first.save(100)
    first.close()
    second = Job(job_root, 1, epoch=1)
    second.save(60)
    assert second.ranks[0].objects.complete_steps() == [60]
    second.close()


def test_the_version_just_saved_is_never_the_one_given_up(job_root):
    first = Job(job_root, 1, epoch=3)
    first.save(100)
    first.close()
    second = Job(job_root, 1, epoch=0)
    second.save(60)
    assert 60 in second.ranks[0].objects.complete_steps()
    assert 100 in second.ranks[0].objects.complete_steps()
    second.close()


@pytest.mark.fault("D")
def test_nothing_older_is_given_up_before_every_rank_has_cleared_its_marker(job_root):
    job = Job(job_root, 2)
    job.save(1)

    def save(rank: Rank) -> None:
        pending = rank.saver.begin(2)
        rank.saver.initialize_checkpoint(pending)
        rank.stage(pending, contents(2, rank.rank), {"step": 2})
        rank.saver.write(pending)
        rank.saver.write_metadata(pending)
        if rank.rank == 0:
            rank.saver.finalize(pending)  # rank 1 died just before its own

    with job.impatient():
        results = job.on_all(save)
    assert isinstance(results[0], SaveError)
    assert list(results[0].failures) == [1]
    assert job.ranks[0].objects.complete_steps() == [1]
    check(job, 1)
    job.close()


def test_dirty_versions_do_not_count_and_are_not_given_up(job_root):
    job = Job(job_root, 1, keep=2)
    marker = Marker.create(CheckpointContainerId(job_root, 99), 7)
    for step in (1, 2, 3):
        job.save(step)
    assert job.ranks[0].objects.complete_steps() == [3, 2]
    assert os.path.exists(marker.path)
    marker.remove()
    job.close()


def test_a_vote_is_small_and_carries_no_layout():
    # What each rank sends at every save must not grow with the number of its tensors.
    vote = Vote(step=1, node="n")
    assert len(msgspec.msgpack.encode(vote)) < 100


def test_a_shard_entry_is_what_the_saver_is_given():
    part, entry = shard(np.arange(10), 1, 2)
    assert entry == Entry("sharded", "int64", (5,), (5,), (10,))
    assert part.tolist() == [5, 6, 7, 8, 9]


def test_every_rank_gets_the_record_that_was_committed(job):
    committed = job.ranks[0].objects
    for record in job.save(3):
        stored = committed.read_manifest(committed.container(3)).record
        assert record == msgspec.structs.replace(stored, sections=())  # what only the file has


# ---- layouts that this process knows ------------------------------------------------------------


def test_what_this_process_saved_is_opened_without_decoding_layouts(three, monkeypatch):
    monkeypatch.setattr("flashpoint.manifest._layouts", OrderedDict())
    three.save(1)

    def decode(line: bytes) -> None:
        raise AssertionError("a layout was decoded that was planned here")

    monkeypatch.setattr("flashpoint.manifest.decode_layout", decode)
    view = flashpoint.open(three.ranks[0].objects.container(1))
    assert {f"of_rank_{rank}" for rank in range(3)} < set(view)
    np.testing.assert_array_equal(view["of_rank_2"], contents(1, 2)["of_rank_2"])


def test_a_layout_is_planned_once_for_entries_that_stay_the_same(one):
    saver = one.ranks[0].saver
    entries = [Entry(name, "float32", (4, 4)) for name in "abc"]
    planned = saver.plan(entries)
    assert saver.plan([Entry(name, "float32", (4, 4)) for name in "abc"]) is planned
    other = saver.plan(entries[:2])
    assert other.entries == tuple(entries[:2])
    assert saver.plan(reversed(entries)).entries == tuple(reversed(entries))
    assert saver.plan(entries) == planned
