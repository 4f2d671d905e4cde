import fcntl
import os
import threading
import time

import pytest

from flashpoint.ids import STEP_MAX, CheckpointContainerId
from flashpoint.markers import Marker, is_live, marker_name, parse_marker_name
from tests.core.processes import fork_to_sleep, process

# ---- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "local_rank"), [(0, 0), (9, 3), (100, 12), (STEP_MAX, 1023)])
def test_a_markers_name_reads_back_as_step_and_local_rank(step, local_rank):
    name = marker_name(CheckpointContainerId("/job", step), local_rank)
    assert name == f"step-{step}_ckpt__{local_rank}__unfinished"
    assert parse_marker_name(name) == (step, local_rank)


@pytest.mark.parametrize(
    "name",
    [
        "step-9_ckpt",
        "step-9_ckpt__0__unfinished.bak",
        "step-9_ckpt__0__unfinished\n",
        "step-9_ckpt__00__unfinished",
        "step-9_ckpt__-1__unfinished",
        "step-9_ckpt__+1__unfinished",
        "step-9_ckpt__٠__unfinished",
        "step-9_ckpt____unfinished",
        "step-9_ckpt__unfinished",
        "step-09_ckpt__0__unfinished",
        "step-9_ckpt_0__unfinished",
        "step-9_ckpt__0__0__unfinished",
        "xstep-9_ckpt__0__unfinished",
        f"step-{STEP_MAX + 1}_ckpt__0__unfinished",
        "step-9_ckpt__12345678901__unfinished",
        "",
    ],
)
def test_only_the_exact_name_is_a_marker(name):
    assert parse_marker_name(name) is None


# ---- one process ----------------------------------------------------------------------------------


@pytest.fixture
def container(job_root) -> CheckpointContainerId:
    return CheckpointContainerId(job_root, 9)


def path_of(container, local_rank=0) -> str:
    return f"{container.job_root}/{marker_name(container, local_rank)}"


def test_a_marker_is_live_until_it_is_removed(container):
    marker = Marker.create(container, 0)
    assert marker.path == path_of(container)
    assert is_live(marker.path)
    marker.remove()
    assert not os.path.exists(marker.path)
    assert not is_live(marker.path)
    marker.remove()  # twice is no error


def test_a_released_marker_stays_and_is_not_live(container):
    marker = Marker.create(container, 0)
    marker.release()
    assert os.path.exists(marker.path)
    assert not is_live(marker.path)
    marker.remove()  # not ours any more
    assert os.path.exists(marker.path)


def test_asking_leaves_the_marker_as_it_is(container):
    Marker.create(container, 0).release()
    for _ in range(3):
        assert not is_live(path_of(container))
    Marker.create(container, 0).remove()


def test_the_same_marker_is_set_only_once(container):
    marker = Marker.create(container, 0)
    with pytest.raises(BlockingIOError):
        Marker.create(container, 0)
    assert is_live(marker.path)
    Marker.create(container, 1).remove()  # another local rank's is another file
    marker.remove()
    Marker.create(container, 0).remove()


def test_a_marker_without_a_job_root_is_made_with_it(container):
    os.rmdir(container.job_root)
    marker = Marker.create(container, 0)
    assert is_live(marker.path)
    os.unlink(marker.path)
    os.rmdir(container.job_root)
    marker.remove()  # deleted by hand: no error


def test_a_marker_never_follows_a_link(container, tmp_path):
    target = tmp_path / "victim"
    target.write_text("precious")
    os.symlink(target, path_of(container))
    with pytest.raises(OSError):
        Marker.create(container, 0)
    assert target.read_text() == "precious"


def test_of_many_threads_one_sets_the_marker(container):
    for _ in range(3):
        start, markers, refused = threading.Barrier(4), [], []

        def work(start=start, markers=markers, refused=refused):
            start.wait()
            try:
                markers.append(Marker.create(container, 0))
            except BlockingIOError as error:
                refused.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(markers), len(refused)) == (1, 3)
        markers[0].remove()


def test_a_marker_that_is_removed_while_it_is_taken_over_is_set_again(container, monkeypatch):
    Marker.create(container, 0).release()
    real, removed = fcntl.flock, []

    def removed_meanwhile(fd, kind):
        if not removed:
            removed.append(os.unlink(path_of(container)))
        real(fd, kind)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    marker = Marker.create(container, 0)
    assert removed
    assert is_live(path_of(container))
    marker.remove()
    assert os.listdir(container.job_root) == []


def test_no_descriptor_is_left_behind(container):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        marker = Marker.create(container, 0)
        with pytest.raises(BlockingIOError):
            Marker.create(container, 0)
        is_live(marker.path)
        marker.remove()
        is_live(marker.path)
    assert len(os.listdir("/proc/self/fd")) == before


# ---- several processes ----------------------------------------------------------------------------


def hold_marker(say, container):
    marker = Marker.create(container, 0)
    say("set")
    marker.remove()
    say("removed")


def test_the_marker_of_another_process_is_live_and_cannot_be_set(container):
    with process(hold_marker, container) as other:
        assert other.hear() == "set"
        assert is_live(path_of(container))
        with pytest.raises(BlockingIOError):
            Marker.create(container, 0)
        other.go_on()
        assert other.hear() == "removed"
        Marker.create(container, 0).remove()


def test_the_marker_of_a_killed_process_stays_and_is_taken_over(container):
    with process(hold_marker, container) as other:
        other.hear()
        other.kill()
    assert os.path.exists(path_of(container))
    assert not is_live(path_of(container))
    marker = Marker.create(container, 0)
    assert is_live(marker.path)
    marker.remove()
    assert os.listdir(container.job_root) == []


def fork_while_holding(say, container, child_removes):
    marker = Marker.create(container, 0)
    say(fork_to_sleep(marker.remove if child_removes else lambda: None))


def test_a_forked_child_that_outlives_its_parent_does_not_keep_the_marker_live(container):
    # A DataLoader's workers are forked, and a killed trainer leaves them behind for some seconds.
    with process(fork_while_holding, container, False) as other:
        child = other.hear()
        try:
            assert is_live(path_of(container))
            other.kill()
            assert not is_live(path_of(container))
        finally:
            os.kill(child, 9)


def test_a_forked_child_cannot_remove_its_parents_marker(container):
    with process(fork_while_holding, container, True) as other:
        child = other.hear()
        try:
            assert is_live(path_of(container))
        finally:
            os.kill(child, 9)


def test_a_child_forked_while_somebody_asks_does_not_make_the_marker_live(container, monkeypatch):
    Marker.create(container, 0).release()
    real, children = fcntl.flock, []

    def forked_meanwhile(fd, kind):
        real(fd, kind)
        if not children:
            children.append(os.fork())
            if children[0] == 0:
                time.sleep(60)
                os._exit(0)

    monkeypatch.setattr(fcntl, "flock", forked_meanwhile)
    try:
        assert not is_live(path_of(container))
        assert not is_live(path_of(container))
        Marker.create(container, 0).remove()
    finally:
        os.kill(children[0], 9)
        os.waitpid(children[0], 0)
