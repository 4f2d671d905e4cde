"""Every system call of a save is a place to die, or to fail: what was whole before stays whole.

The calls are counted where Python makes them. A child is killed at the n-th, for every n; in another run
the n-th raises, once. (`tests/crash` sees what the kernel sees, and more operations, and takes longer.)
"""

import errno
import fcntl
import os
import signal
import tempfile
import threading

import numpy as np
import pytest

from flashpoint.config import FlashpointConfig
from flashpoint.errors import FlashpointError
from flashpoint.loader import MLFlashpointCheckpointLoader
from flashpoint.manifest import MANIFEST_NAME
from flashpoint.objects import CheckpointObjectManager
from flashpoint.saver import MLFlashpointCheckpointSaver
from tests.core.processes import process
from tests.core.world import Job, contents

CALLS = [
    (os, name)
    for name in (
        "open",
        "link",
        "unlink",
        "rename",
        "rmdir",
        "mkdir",
        "ftruncate",
        "posix_fallocate",
        "listdir",
    )
] + [(fcntl, "flock")]
CALLS_MAX = 400  # of one save: more would mean that the count never ends


class At:
    """Do something at the n-th of `CALLS`; for ever restored by `undo`."""

    def __init__(self, n: int, then, counts=lambda: True) -> None:
        self.left = n
        self._then = then
        self._counts = counts
        self._real = [(module, name, getattr(module, name)) for module, name in CALLS]
        for module, name, real in self._real:
            setattr(module, name, self._counted(name, real))

    def _counted(self, name, real):
        def call(*args, **options):
            if self._counts() and args[-1] != fcntl.LOCK_UN:  # which cannot fail
                self.left -= 1
                if self.left == 0:
                    self._then(name)
            return real(*args, **options)

        return call

    def undo(self) -> None:
        for module, name, real in self._real:
            setattr(module, name, real)

    @property
    def reached(self) -> bool:
        return self.left <= 0


class Single:
    def __init__(self, root: str, keep: int = 1) -> None:
        self.objects = CheckpointObjectManager(root, config=FlashpointConfig(chunk_bytes=4096, keep=keep))
        self.saver = MLFlashpointCheckpointSaver(self.objects)

    def save(self, step: int, **options) -> None:
        self.saver.save(step, contents(step), {"step": step}, **options)


def newest_sound(root: str) -> int:
    """The step that a restarted job recovers; every byte of it is looked at."""
    objects = CheckpointObjectManager(root, config=FlashpointConfig(chunk_bytes=4096))
    objects.collect_garbage()
    assert objects.dirty_steps() == set()
    with MLFlashpointCheckpointLoader(objects).load() as view:
        view.verify()
        step = view.manifest.step
        for name, array in contents(step).items():
            np.testing.assert_array_equal(view[name], array)
        assert view["step"] == step
    objects.close()
    return step


def goes_on(root: str) -> None:
    """A restarted job saves as ever, and holds no more than ever."""
    job = Single(root)
    for step in (8, 9):
        job.save(step)
    assert sorted(name for name in os.listdir(root) if name != ".pool") == ["step-9_ckpt"]
    assert sorted(os.listdir(f"{root}/step-9_ckpt")) == [MANIFEST_NAME, "rank00000-0.safetensors"]
    assert len(os.listdir(f"{root}/.pool")) <= 3
    assert newest_sound(root) == 9
    job.objects.close()


def die_at_every_call(say, parent: str, overwrite: bool) -> None:
    outcomes = []
    for n in range(1, CALLS_MAX):
        root = tempfile.mkdtemp(dir=parent)
        first = Single(root, keep=2)
        for step in (1, 2) if overwrite else (1,):
            first.save(step)
        first.objects.close()
        child = os.fork()
        if child == 0:
            job = Single(root)
            at = At(n, lambda name: os.kill(os.getpid(), signal.SIGKILL))
            job.save(2, overwrite=overwrite)
            os._exit(0 if not at.reached else 1)
        status = os.waitpid(child, 0)[1]
        outcomes.append(newest_sound(root))
        goes_on(root)
        if os.waitstatus_to_exitcode(status) == 0:
            break
    say(outcomes)


@pytest.mark.parametrize("overwrite", [False, True], ids=["a new step", "a step replaced"])
@pytest.mark.fault(2, 3, 10)
def test_wherever_a_save_is_killed_a_whole_version_is_there_and_the_next_job_goes_on(job_root, overwrite):
    with process(die_at_every_call, job_root, overwrite) as other:
        outcomes = other.hear()
    assert len(outcomes) > 20
    assert outcomes[-1] == 2
    while overwrite and outcomes[0] == 2:
        del outcomes[0]  # until its marker is there the old one counts
    assert outcomes[0] == 1
    assert outcomes == sorted(outcomes)  # once the new version counts, it counts


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EMFILE])
@pytest.mark.fault(18)
def test_wherever_a_call_fails_the_save_fails_or_succeeds_and_the_job_goes_on(job_root, number):
    for n in range(1, CALLS_MAX):
        root = tempfile.mkdtemp(dir=job_root)
        job = Single(root)
        job.save(1)

        def fail(name: str) -> None:
            raise OSError(number, f"{os.strerror(number)} in {name}")

        at = At(n, fail)
        try:
            job.save(2)
            saved = True
        except (OSError, FlashpointError):
            saved = False
        finally:
            at.undo()
        assert not job.objects.pool._in_use
        assert job.objects.complete_steps()[0] == (2 if saved else 1)
        job.save(3)
        assert newest_sound(root) == 3
        job.objects.close()
        goes_on(root)
        if not at.reached:
            assert saved
            break
    assert n > 20


def kill_a_world(say, parent: str, points: list[int]) -> None:
    for n in points:
        root = tempfile.mkdtemp(dir=parent)
        Job(root, 3).save(1)
        child = os.fork()
        if child == 0:
            job = Job(root, 3)
            At(n, lambda name: os.kill(os.getpid(), signal.SIGKILL))
            job.save(2)
            os._exit(0)
        os.waitpid(child, 0)
        job = Job(root, 3)
        job.ranks[0].objects.collect_garbage()
        steps = job.each(lambda rank: rank.loader.load().manifest.step)
        assert set(steps) in ({1}, {2}), steps
        for step in (8, 9):
            job.save(step)
        assert sorted(name for name in os.listdir(root) if name != ".pool") == ["step-9_ckpt"]
        assert len(os.listdir(f"{root}/.pool")) <= 9
        job.close()
    say("done")


@pytest.mark.fault(3, 10)
def test_wherever_a_world_of_three_is_killed_all_ranks_recover_the_same_step(job_root):
    with process(kill_a_world, job_root, list(range(1, 150, 7))) as other:
        assert other.hear() == "done"


@pytest.mark.fault(18)
def test_wherever_a_call_of_one_rank_fails_all_ranks_agree_and_go_on(job_root):
    for n in range(1, CALLS_MAX):
        root = tempfile.mkdtemp(dir=job_root)
        job = Job(root, 2)
        job.save(1)
        threads: dict[int, int] = {}
        failed: list[str] = []

        def fail(name: str, failed=failed) -> None:
            failed.append(name)
            raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} in {name}")

        at = At(n, fail, lambda threads=threads: threads.get(threading.get_ident()) == 1)

        def save(rank, threads=threads):
            threads[threading.get_ident()] = rank.rank
            rank.saver.save(2, contents(2, rank.rank), {"step": 2})

        try:
            with job.impatient(0.5):
                errors = job.on_all(save)
        finally:
            at.undo()
        assert [error is None for error in errors] in ([True, True], [False, False]), errors
        assert not any(rank.objects.pool._in_use for rank in job.ranks)
        assert job.ranks[0].objects.complete_steps()[0] == (1 if errors[0] else 2)
        job.save(3)
        job.save(4)
        left = {name for name in os.listdir(root) if name != ".pool"}
        if failed == ["flock"]:
            left.discard("step-2_ckpt__1__unfinished")  # whose it is could not be known: the next start's
        assert left == {"step-4_ckpt"}
        assert job.each(lambda rank: rank.loader.load().manifest.step) == [4, 4]
        job.close()
        if not at.reached:
            break
    assert n > 20
