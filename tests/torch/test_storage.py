"""Long-term storage in a training job: every node lost, another world, wrong credentials, and storage that is ill."""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import flashpoint
import flashpoint_torch as fpt
from flashpoint.errors import CheckpointNotFoundError, CorruptObjectError, FlashpointError, StorageError
from flashpoint.replication.agent import stop_agent
from flashpoint.storage.local import LocalStore
from tests.s3 import Gate, S3Server, s3_server
from tests.torch.states import same
from tests.torch.workers import Workers

WAIT_S = 60
MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "storage").mkdir()
    return str(tmp_path / "storage")


@pytest.fixture(autouse=True)
def no_agents(job_root: str) -> Iterator[None]:
    yield
    if os.path.isdir(job_root):
        stop_agent(job_root)


def state_of(step: int, elements: int = 1000) -> dict[str, Any]:
    return {
        "w": torch.full((elements,), float(step)),
        "b": torch.full((3,), step, dtype=torch.bfloat16),
        "lr": step / 10,
    }


def await_drained(fp: fpt.Flashpoint, step: int) -> None:
    await_true(lambda: fp.storage_status().step == step, fp)


def await_true(condition: Callable[[], Any], fp: fpt.Flashpoint) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, fp.storage_status()
        time.sleep(0.05)


def lose(job_root: str) -> None:
    """What is left of a node that is replaced: nothing."""
    stop_agent(job_root)
    shutil.rmtree(job_root)


def fill(job_root: str, folder: str, *steps: int) -> None:
    """Drain these steps, and lose the memory."""
    with fpt.init(job_root, storage=f"file://{folder}", storage_keep_last=0) as fp:
        for step in steps:
            fp.save(state_of(step), step)
            await_drained(fp, step)
    lose(job_root)


def spoil(folder: str, step: int, at: int = 5000) -> None:
    with open(f"{folder}/step-{step}_ckpt/rank00000-0.safetensors", "r+b") as file:
        file.seek(at)
        file.write(b"\x55\xaa")


# ---- memory is gone -------------------------------------------------------------------------------


def test_a_lost_job_goes_on_from_storage(job_root: str, folder: str) -> None:
    fill(job_root, folder, 1, 2)
    with fpt.init(job_root, storage=f"file://{folder}") as fp:
        assert fp.epoch == 2  # what is saved from now on is newer than what storage holds
        state = state_of(0)
        result = fp.recover(state)
        assert result is not None
        assert (result.step, result.tier) == (2, "storage")
        assert result.nbytes == 4006
        assert same(state, state_of(2))
        assert fp.save(state_of(2), 2).error is None  # a step that only storage holds can be saved again
        await_drained(fp, 2)


def test_memory_comes_before_storage(job_root: str, folder: str) -> None:
    settings = {"storage": f"file://{folder}", "storage_every_n": 100}
    with fpt.init(job_root, **settings) as fp:
        fp.save(state_of(1), 1)
        await_drained(fp, 1)
        fp.save(state_of(2), 2)
    with fpt.init(job_root, **settings) as fp:
        state = state_of(0)
        result = fp.recover(state)
        assert result is not None
        assert (result.step, result.tier) == (2, "local")
        assert fp.recover(state, step=1).tier == "storage"
        assert same(state, state_of(1))
        with pytest.raises(CheckpointNotFoundError, match="step 3, neither in .* nor in file://"):
            fp.recover(state, step=3)


@pytest.mark.fault(20, 25)
def test_a_corrupt_object_in_storage_makes_way_for_an_older_version(
    job_root: str, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    fill(job_root, folder, 1, 2, 3)
    spoil(folder, 3)
    os.truncate(f"{folder}/step-2_ckpt/.metadata", 100)
    with fpt.init(job_root, storage=f"file://{folder}") as fp, caplog.at_level(logging.WARNING):
        state = state_of(0)
        result = fp.recover(state)
        assert result is not None
        assert result.step == 1
        assert same(state, state_of(1))
    assert "step 3 in storage cannot be loaded: rank 0: step 3: object rank00000-0.safetensors" in caplog.text


def test_storage_that_holds_only_what_is_corrupt_is_an_error(job_root: str, folder: str) -> None:
    fill(job_root, folder, 1)
    spoil(folder, 1)
    with fpt.init(job_root, storage=f"file://{folder}") as fp:
        state = state_of(0)
        with pytest.raises(CorruptObjectError, match="rank00000-0.safetensors is corrupt"):
            fp.recover(state)
        assert same(state, state_of(0))


def test_an_empty_storage_is_a_start_from_scratch(job_root: str, folder: str) -> None:
    with fpt.init(job_root, storage=f"file://{folder}") as fp:
        assert fp.recover(state_of(0)) is None


# ---- another world --------------------------------------------------------------------------------

ROWS, COLUMNS = 1030, 256  # uneven; a megabyte in chunks of 64 KiB


def whole() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)


def sharded(value: torch.Tensor) -> DTensor:
    return distribute_tensor(value, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def root_of(folder: str) -> str:
    """Each rank is on a node of its own."""
    return f"{folder}/node{dist.get_rank()}/job"


def save_sharded(nodes: str, storage: str) -> None:
    with fpt.init(root_of(nodes), storage=storage, chunk_bytes=65_536) as fp:
        state = {"weight": sharded(whole()), "own": torch.full((3,), float(dist.get_rank())), "step": 5}
        assert fp.save(state, 5).wait("replicated", timeout_s=WAIT_S)
        await_drained(fp, 5)
    dist.barrier()
    lose(root_of(nodes))


def load_sharded(nodes: str, storage: str) -> tuple[str, bool, float]:
    read_nbytes = []
    read = LocalStore.read

    def counted(self: LocalStore, name: str, begin: int = 0, end: int | None = None) -> bytes:
        data = read(self, name, begin, end)
        if name.endswith(".safetensors"):
            read_nbytes.append(len(data))
        return data

    LocalStore.read = counted  # type: ignore[method-assign]
    try:
        with fpt.init(root_of(nodes), storage=storage, chunk_bytes=65_536) as fp:
            state = {"weight": sharded(torch.zeros(ROWS, COLUMNS)), "own": torch.zeros(3), "step": 0}
            result = fp.recover(state)
            assert result is not None
            exact = (
                torch.equal(state["weight"].to_local(), sharded(whole()).to_local()) and state["step"] == 5
            )
            wanted = state["weight"].to_local().nbytes
        dist.barrier()
        lose(root_of(nodes))
        return result.tier, exact, (sum(read_nbytes) - 4 * 65_536) / wanted
    finally:
        LocalStore.read = read  # type: ignore[method-assign]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_all_nodes_lost_and_another_number_of_ranks(
    workers: Workers, job_root: str, folder: str, before: int, after: int
) -> None:
    workers.run(before, save_sharded, f"{job_root}/before", f"file://{folder}")
    assert sorted(os.listdir(f"{folder}/step-5_ckpt")) == [
        ".metadata", *(f"rank{rank:05d}-0.safetensors" for rank in range(before))
    ]  # fmt: skip
    for tier, exact, share in workers.run(after, load_sharded, f"{job_root}/after", f"file://{folder}"):
        assert (tier, exact) == ("storage", True)
        assert share <= 1.1  # of what this rank needs, but for the chunks at both ends


# ---- stock readers --------------------------------------------------------------------------------


def test_stock_readers_open_a_drained_version(job_root: str, folder: str) -> None:
    fill(job_root, folder, 7)
    path = f"{folder}/step-7_ckpt"
    with safe_open(f"{path}/rank00000-0.safetensors", "pt") as opened:
        assert torch.equal(opened.get_tensor("w"), state_of(7)["w"])
    with flashpoint.open(path) as view:
        view.verify()
        assert view["lr"] == 0.7
    target: dict[str, Any] = {"w": torch.zeros(1000), "b": torch.zeros(3, dtype=torch.bfloat16)}
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(path))
    assert same(target, {name: state_of(7)[name] for name in target})
    target = {"w": torch.zeros(1000), "b": torch.zeros(3, dtype=torch.bfloat16), "lr": 0.0}
    dcp.load(target, checkpoint_id=path, storage_reader=fpt.FlashpointReader())
    assert same(target, state_of(7))


# ---- S3 -------------------------------------------------------------------------------------------


def test_s3_from_drain_to_recovery(job_root: str, s3: S3Server) -> None:
    storage = s3.make_bucket("bucket-of-a-job") + "/runs/1"
    elements = 5 * MIB  # 20 MiB: several parts, several ranges
    with fpt.init(job_root, storage=storage) as fp:
        fp.save(state_of(1, elements), 1)
        await_drained(fp, 1)
    lose(job_root)
    with fpt.init(job_root, storage=storage) as fp:
        state = state_of(0, elements)
        result = fp.recover(state)
        assert result is not None
        assert (result.step, result.tier) == (1, "storage")
        assert same(state, state_of(1, elements))


def test_wrong_credentials_are_an_error_of_init(job_root: str, s3: S3Server) -> None:
    storage = s3.make_bucket("bucket-with-a-lock")
    s3.check_credentials(True)
    try:
        with pytest.raises(StorageError, match="rank 0|403.*InvalidAccessKeyId"):
            fpt.init(job_root, storage=storage)
    finally:
        s3.check_credentials(False)


def init_fails(nodes: str, storage: str) -> str:
    with pytest.raises(FlashpointError) as caught:
        fpt.init(root_of(nodes), storage=storage)
    return str(caught.value)


def test_every_rank_learns_that_the_folder_is_missing(workers: Workers, job_root: str, folder: str) -> None:
    for message in workers.run(2, init_fails, job_root, f"file://{folder}/nowhere"):
        assert "nowhere" in message and "see that it is there" in message


def test_two_jobs_with_one_prefix(job_root: str, folder: str) -> None:
    fill(job_root, folder, 1)
    with pytest.raises(StorageError, match="another job, 'job', and this one is 'other'"):
        fpt.init(f"{os.path.dirname(job_root)}/other", storage=f"file://{folder}")


def test_an_agent_with_other_settings_makes_way(job_root: str, folder: str) -> None:
    with fpt.init(job_root, storage=f"file://{folder}") as fp:
        fp.save(state_of(1), 1)
        await_drained(fp, 1)
        fp._replication._client.close()  # type: ignore[union-attr]  # the trainer dies, the agent does not
        other = f"{folder}-2"
        os.mkdir(other)
        with fpt.init(job_root, storage=f"file://{other}") as again:
            assert again.recover(state_of(0)) is not None
            assert again.save(state_of(2), 2).wait("replicated", WAIT_S)
            await_drained(again, 2)
        assert os.path.exists(f"{other}/step-2_ckpt/.metadata")
        assert not os.path.exists(f"{folder}/step-2_ckpt")


@pytest.mark.fault(19)
def test_storage_that_hangs_delays_no_save_and_is_used_again_when_it_answers(
    job_root: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = s3.make_bucket("bucket-behind-a-gate")
    gate = Gate(s3.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", gate.endpoint)
    elements = 5 * MIB
    try:
        with fpt.init(
            job_root, storage=storage, storage_timeout_s=1.0, storage_bytes_per_s=10 * MIB, strict=True
        ) as fp:
            fp.save(state_of(1, elements), 1)
            await_true(lambda: gate.passed_nbytes > 5 * MIB, fp)  # in the middle of the object
            gate.hang()
            for step in range(2, 8):
                assert fp.save(state_of(step, elements), step).done()
            await_true(lambda: fp.storage_status().error, fp)
            for step in range(8, 12):
                assert fp.save(state_of(step, elements), step).wait("replicated", WAIT_S)
            assert fp.storage_status().step == -1
            # Three for versions as ever, and no more than one that the drain held on to.
            assert fp.objects.pool.used_bytes() <= 4 * 21 * MIB
            gate.go_on()
            await_drained(fp, 11)
    finally:
        gate.close()
