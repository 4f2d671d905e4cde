"""Through the stock `CheckpointManager`, with two real processes of four devices each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import flashpoint_jax
from flashpoint.buffers import BufferPool
from flashpoint.errors import FlashpointError, NoSpaceError, SaveError
from flashpoint.telemetry import counters
from flashpoint_jax.folder import holds_blobs
from tests.jax import trees
from tests.jax.workers import Workers

Args = ocp.args
VALUE = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
KINDS: dict[str, Any] = {
    "rows": ("x", None),
    "columns": (None, "y"),
    "both": ("x", "y"),
    "together": (("x", "y"),),
    "replicated": (),
}


def options(per_host: bool) -> Any:
    return ocp.options.MultiprocessingOptions(primary_host=None if per_host else 0)


def manager(root: str, *, per_host: bool = False, settings: dict[str, Any] | None = None, **more: Any) -> Any:
    processes = options(per_host)
    registry = flashpoint_jax.registry(
        multiprocessing_options=processes, **{"commit_timeout_s": 10, **(settings or {})}
    )
    # With a folder on each host, Orbax has to be told that each writes its own.
    json = ocp.JsonCheckpointHandler(multiprocessing_options=processes)
    registry.add("config", Args.JsonSave, json)
    registry.add("config", Args.JsonRestore, json)
    return ocp.CheckpointManager(
        root,
        options=ocp.CheckpointManagerOptions(
            multiprocessing_options=processes, enable_per_process_directory_creation=per_host, **more
        ),
        handler_registry=registry,
    )


def mesh() -> Any:
    return trees.mesh(*((4, 2) if jax.process_count() == 2 else (2, 2)))


def state(step: int = 0) -> dict[str, Any]:
    arrays = {name: trees.sharded(VALUE + step, mesh(), *spec) for name, spec in KINDS.items()}
    return {**arrays, "n": np.arange(3) + step, "step": step}


def root_of(root: str, per_host: bool) -> str:
    return f"{root}/{jax.process_index()}" if per_host else root


def expect(found: Any, expected: Any) -> None:
    trees.assert_equal(found, expected)


# ---- what the processes do --------------------------------------------------------------------------


def save_and_restore(root: str, per_host: bool, is_async: bool) -> Any:
    root = root_of(root, per_host)
    with manager(root, per_host=per_host, max_to_keep=2, enable_async_checkpointing=is_async) as m:
        for step in range(5):
            m.save(step, args=Args.StandardSave(state(step)))
        m.wait_until_finished()
        steps = m.all_steps()
        expect(m.restore(4, args=Args.StandardRestore(trees.abstract(state()))), state(4))
        found = m.restore(3)
        assert np.array_equal(found["rows"].addressable_data(0), state(3)["rows"].addressable_data(0))
        metadata = m.item_metadata(4)
        assert metadata.tree["rows"].shape == VALUE.shape
    left = [name for name in os.listdir(root) if name.endswith("unfinished")]
    return steps, left, sorted(n for n in os.listdir(f"{root}/4/default") if n.startswith("rank"))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_global_folder(workers: Workers, job_root: str, is_async: bool) -> None:
    for answer in workers.run(save_and_restore, job_root, False, is_async):
        assert answer == ([3, 4], [], ["rank00000-0.safetensors", "rank00001-0.safetensors"])


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_folder_on_each_host(workers: Workers, job_root: str, is_async: bool) -> None:
    for rank, answer in enumerate(workers.run(save_and_restore, job_root, True, is_async)):
        assert answer == ([3, 4], [], [f"rank{rank:05d}-0.safetensors"])


def bytes_staged(root: str) -> int:
    before = counters().get("bytes_staged", 0)
    with manager(root) as m:
        big = {f"w{i}": trees.sharded(np.ones((256, 1024), np.float32), mesh()) for i in range(16)}
        m.save(0, args=Args.StandardSave(big))
    return counters()["bytes_staged"] - before


def test_one_replica_is_written_and_the_work_is_spread(workers: Workers, job_root: str) -> None:
    one, other = workers.run(bytes_staged, job_root)
    assert one + other == pytest.approx(16 << 20, rel=0.05)
    assert min(one, other) > 2 << 20


def save(root: str) -> None:
    with manager(root) as m:
        m.save(1, args=Args.StandardSave(state(1)))


def restore_elsewhere(root: str) -> None:
    """On any number of processes and devices."""
    with manager(root) as m:
        expect(m.restore(1, args=Args.StandardRestore(trees.abstract(state()))), state(1))
        over = trees.mesh(len(jax.devices()), names=("z",))
        wanted = jax.ShapeDtypeStruct(
            VALUE.shape, jnp.bfloat16, sharding=NamedSharding(over, PartitionSpec(None, "z"))
        )
        tree = {name: wanted if name in KINDS else leaf for name, leaf in state().items()}
        found = m.restore(1, args=Args.StandardRestore(tree))
        for name in KINDS:
            expected = trees.sharded((VALUE + 1).astype(jnp.bfloat16), over, None, "z")
            assert trees.bits(found[name]) == trees.bits(expected), name


def test_two_processes_restore_what_one_saved(workers: Workers, job_root: str) -> None:
    save(job_root)
    workers.run(restore_elsewhere, job_root)


def test_one_process_restores_what_two_saved(workers: Workers, job_root: str) -> None:
    workers.run(save, job_root)
    restore_elsewhere(job_root)
    with ocp.CheckpointManager(job_root) as m:  # stock Orbax, of the index over both objects
        wanted = {**trees.abstract(state()), "n": np.zeros(3, np.int64), "step": 0}
        expect(m.restore(1, args=Args.StandardRestore(wanted)), state(1))


def restore_with_stock_orbax(root: str) -> None:
    with ocp.CheckpointManager(root) as m:
        expect(m.restore(1, args=Args.StandardRestore(trees.abstract(state()))), state(1))


def test_stock_orbax_reads_it_on_two_processes(workers: Workers, job_root: str) -> None:
    workers.run(save, job_root)
    workers.run(restore_with_stock_orbax, job_root)


# ---- failures ---------------------------------------------------------------------------------------


def no_space_on(rank: int, root: str) -> tuple[str, float, list[int]]:
    with manager(root) as m:
        m.save(1, args=Args.StandardSave(state(1)))
        m.wait_until_finished()
        acquire = BufferPool.acquire

        def full(*args: Any) -> Any:
            raise NoSpaceError("the tmpfs is full")

        if jax.process_index() == rank:
            BufferPool.acquire = full  # type: ignore[method-assign]
        start = time.monotonic()
        error = ""
        try:
            m.save(2, args=Args.StandardSave(state(2)))
            m.wait_until_finished()
        except FlashpointError as failure:
            error = f"{type(failure).__name__}: {failure}"
        finally:
            BufferPool.acquire = acquire  # type: ignore[method-assign]
        seconds = time.monotonic() - start
        m.reload()
        m.save(3, args=Args.StandardSave(state(3)))
        m.wait_until_finished()
        expect(m.restore(3, args=Args.StandardRestore(trees.abstract(state()))), state(3))
        return error, seconds, list(m.all_steps())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_on_one_process_is_one_on_all_and_soon(workers: Workers, job_root: str, rank: int) -> None:
    answers = workers.run(no_space_on, rank, job_root)
    for number, (error, seconds, steps) in enumerate(answers):
        kind = NoSpaceError if number == rank else SaveError
        assert error.startswith(kind.__name__), error
        assert "the tmpfs is full" in error
        if number != rank:
            assert f"rank {rank}" in error
        assert seconds < 20
        assert steps == [1, 3]


def restore_corrupt(root: str) -> str:
    with manager(root) as m:
        try:
            m.restore(1, args=Args.StandardRestore(trees.abstract(state())))
        except FlashpointError as error:
            return type(error).__name__
    return "restored"


def test_a_wrong_byte_of_one_object_is_an_error_on_all(workers: Workers, job_root: str) -> None:
    workers.run(save, job_root)
    with open(f"{job_root}/1/default/rank00001-0.safetensors", "r+b") as file:
        file.seek(-4096, os.SEEK_END)
        byte = file.read(1)
        file.seek(-4096, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    assert workers.run(restore_corrupt, job_root) == ["CheckpointNotFoundError"] * 2


def save_local(root: str) -> str:
    try:
        with manager(root) as m:
            m.save(1, args=Args.StandardSave({"w": jnp.ones(3)}))
    except ValueError as error:
        return str(error)
    return "saved"


def test_an_array_of_one_host_is_refused_as_by_stock_orbax(workers: Workers, job_root: str) -> None:
    for answer in workers.run(save_local, job_root):
        assert "host local" in answer
        assert "'w'" in answer


def composite(root: str) -> None:
    with manager(root) as m:
        for step in range(3):
            m.save(
                step,
                args=Args.Composite(
                    state=Args.StandardSave(state(step)),
                    average=Args.PyTreeSave({"w": state(step)["rows"]}),
                    config=Args.JsonSave({"step": step}),
                ),
            )
        m.wait_until_finished()
        assert holds_blobs(f"{root}/2/state")
        assert holds_blobs(f"{root}/2/average")
        found = m.restore(
            2,
            args=Args.Composite(
                state=Args.StandardRestore(trees.abstract(state())),
                average=Args.PyTreeRestore(),
                config=Args.JsonRestore(),
            ),
        )
        expect(found.state, state(2))
        assert trees.bits(found.average["w"]) == trees.bits(state(2)["rows"])
        assert found.config == {"step": 2}


def random_keys(root: str) -> None:
    over = mesh()
    replicated = NamedSharding(over, PartitionSpec())
    by_row = NamedSharding(over, PartitionSpec("x"))
    key = jax.jit(lambda: jax.random.key(3), out_shardings=replicated)()
    keys = jax.jit(lambda: jax.random.split(jax.random.key(4), 8), out_shardings=by_row)()
    with manager(root) as m:
        m.save(1, args=Args.StandardSave({"key": key, "keys": keys}))
        m.wait_until_finished()
        found = m.restore(1, args=Args.StandardRestore(trees.abstract({"key": key, "keys": keys})))
        expect(found, {"key": key, "keys": keys})


@pytest.mark.parametrize("work", [composite, random_keys], ids=lambda work: work.__name__)
def test_on_two_processes(workers: Workers, job_root: str, work: Callable[[str], None]) -> None:
    workers.run(work, job_root)
