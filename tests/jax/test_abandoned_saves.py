"""Saves that are refused, that fail before they have a folder, or that nobody waits for: nothing of them is left.

That no thread of theirs is left either is seen to after every test, in `conftest.no_thread_of_a_save_is_left`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from orbax.checkpoint._src.futures import future as orbax_futures
from orbax.checkpoint._src.path import atomicity

import flashpoint_jax
from flashpoint.errors import FlashpointError, SaveError
from tests.jax import trees
from tests.jax.conftest import SETTLE_S, threads_of_saves
from tests.jax.test_processes import expect, manager, state
from tests.jax.workers import Workers

Args = ocp.args


@contextlib.contextmanager
def folders_made(how: Callable[[Any], Any], name: str = "mkdir") -> Iterator[None]:
    """Have ``await how(real)`` done before Orbax makes (or removes) a temporary folder."""
    real = getattr(atomicity.async_path, name)

    async def patched(*args: Any, **kwargs: Any) -> Any:
        await how(args[0])
        return await real(*args, **kwargs)

    setattr(atomicity.async_path, name, patched)
    try:
        yield
    finally:
        setattr(atomicity.async_path, name, real)


async def slowly(_: Any) -> None:
    await asyncio.sleep(0.3)


async def never(path: Any) -> None:
    raise OSError(f"no room for {path}")


def release_orbax() -> None:
    """End the threads that Orbax itself leaves waiting when it cannot make a folder."""
    for thread in threads_of_saves():
        if type(thread).__name__ == "_SignalingThread":
            thread.cancel()  # type: ignore[attr-defined]
            orbax_futures.set_signals(
                thread._receive_signals,  # type: ignore[attr-defined]
                operation_id=thread._operation_id,  # type: ignore[attr-defined]
            )


def deleted() -> jax.Array:
    array = jnp.zeros(8)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("leaf", "save"),
    [
        (lambda: jnp.zeros((0, 3)), Args.StandardSave),
        (lambda: jnp.zeros((0, 3)), Args.PyTreeSave),
        (object, Args.StandardSave),
        (deleted, Args.PyTreeSave),
        (deleted, flashpoint_jax.FlashpointSave),
    ],
    ids=["zero-size", "zero-size-pytree", "object", "deleted", "deleted-flashpoint"],
)
def test_a_refused_save_leaves_no_thread_when_the_manager_is_closed(
    job_root: str, leaf: Any, save: Any
) -> None:
    with folders_made(slowly), pytest.raises((ValueError, FlashpointError)), manager(job_root) as m:
        m.save(1, args=save({"w": leaf()}))


def pool_links(root: str) -> list[int]:
    return [os.stat(f"{root}/.pool/{name}").st_nlink for name in os.listdir(f"{root}/.pool")]


def test_a_folder_that_cannot_be_made_fails_the_save_and_gives_its_memory_back(job_root: str) -> None:
    with manager(job_root, settings={"commit_timeout_s": 1}) as m:
        m.save(1, args=Args.StandardSave(state(1)))
        m.wait_until_finished()
        with folders_made(never):
            m.save(2, args=Args.StandardSave(state(2)))
            with pytest.raises(OSError, match="no room"):
                m.wait_until_finished()
        deadline = time.monotonic() + SETTLE_S
        while any(thread.name == "flashpoint_commit" for thread in threads_of_saves()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        release_orbax()
        assert not [name for name in os.listdir(job_root) if name.endswith("unfinished")]
        assert pool_links(job_root).count(2) == 1
        m.reload()
        m.save(3, args=Args.StandardSave(state(3)))
        m.wait_until_finished()
        assert m.all_steps() == [1, 3]
        expect(m.restore(3, args=Args.StandardRestore(trees.abstract(state()))), state(3))


def test_a_cancelled_save_is_given_up_before_it_begins(job_root: str) -> None:
    options = ocp.options.MultiprocessingOptions()
    handler = flashpoint_jax.FlashpointStandardHandler(multiprocessing_options=options)

    async def begin() -> Any:
        (future,) = await handler.async_save(epath.Path(f"{job_root}/1"), args=Args.StandardSave(state(1)))
        return future

    future = asyncio.run(begin())  # nobody makes the folder
    with pytest.raises(TimeoutError, match="step 1"):
        future.result(timeout=0.05)
    future.cancel()
    with pytest.raises(CancelledError):
        future.result(timeout=SETTLE_S)
    assert not [name for name in os.listdir(job_root) if name.endswith("unfinished")]


# ---- two processes ----------------------------------------------------------------------------------


def as_after_a_manager_with_folders_of_its_own() -> None:
    contract = orbax_futures.AwaitableSignalsContract
    contract.awaitable_signals_contract_prefix += f"_{jax.process_index()}"


def save_over_debris(root: str) -> None:
    """A crash left the temporary folders; Orbax is slow to remove them, and does not signal to process 1."""
    as_after_a_manager_with_folders_of_its_own()
    with manager(root) as m, folders_made(slowly, "rmtree"):
        m.save(1, args=Args.StandardSave(state(1)))
        m.wait_until_finished()
        expect(m.restore(1, args=Args.StandardRestore(trees.abstract(state()))), state(1))


def test_a_folder_that_a_crash_left_is_not_taken_for_the_new_one(workers: Workers, job_root: str) -> None:
    os.makedirs(f"{job_root}/1.orbax-checkpoint-tmp/default.orbax-checkpoint-tmp")
    workers.run(save_over_debris, job_root)
    assert len([name for name in os.listdir(f"{job_root}/1/default") if name.startswith("rank")]) == 2


def without_a_folder(root: str) -> tuple[str, int]:
    with manager(root, settings={"commit_timeout_s": 3}) as m:
        with folders_made(never):
            m.save(1, args=Args.StandardSave(state(1)))
            error = ""
            try:
                m.wait_until_finished()
            except (OSError, FlashpointError) as failure:
                error = f"{type(failure).__name__}: {failure}"
        deadline = time.monotonic() + SETTLE_S
        while any(thread.name == "flashpoint_commit" for thread in threads_of_saves()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        release_orbax()
        left = len([name for name in os.listdir(root) if name.endswith("unfinished")])
    return error, left


def test_the_other_process_hears_that_there_is_no_folder(workers: Workers, job_root: str) -> None:
    first, second = workers.run(without_a_folder, job_root)
    assert "no room" in first[0]
    assert second[0].startswith(SaveError.__name__), second
    assert "did not make" in second[0] or "did not tell" in second[0]
    assert (first[1], second[1]) == (0, 0)


def refused(root: str) -> bool:
    with contextlib.suppress(ValueError), manager(root) as m, folders_made(slowly):
        m.save(1, args=Args.StandardSave({"w": np.zeros(0), "z": jnp.ones(3)}))
    deadline = time.monotonic() + SETTLE_S
    while threads_of_saves() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not threads_of_saves()


def test_a_refused_save_leaves_no_thread_on_any_process(workers: Workers, job_root: str) -> None:
    assert workers.run(refused, job_root) == [True, True]
