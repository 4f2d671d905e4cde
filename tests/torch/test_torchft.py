"""torchft with our transport: its own suite for transports, and a killed replica that heals from one that lives."""

import http.client
import threading
import time
import unittest
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from flashpoint.errors import CorruptObjectError, FlashpointError, MismatchError
from tests.torch.faults import Log, start
from tests.torch.states import same

pytest.importorskip("torchft", reason="needs torchft: pip install 'flashpoint[torchft]'")

from torchft.checkpointing import transport_test
from torchft.coordination import LighthouseServer

from flashpoint_torch.torchft import FlashpointTransport

LIMIT = timedelta(seconds=30)
STEPS = 40


def state_of(step: int) -> dict[str, Any]:
    torch.manual_seed(step)
    model = nn.Linear(64, 64)
    user = {
        "model": model.state_dict(),
        "optim": {"state": {0: {"m": torch.rand(3)}}, "lr": 0.5, "betas": (0.9, 0.99)},
    }
    return {"user": {"default": user}, "torchft": {"step": step, "batches_committed": 2 * step}}


@pytest.fixture
def pair(job_root: str) -> Iterator[tuple[FlashpointTransport[Any], FlashpointTransport[Any]]]:
    """One that sends, and one that receives without a template."""
    ends = tuple(
        FlashpointTransport[Any](f"{job_root}-{name}", host="127.0.0.1") for name in ("sends", "receives")
    )
    yield ends[0], ends[1]
    for end in ends:
        end.shutdown()


# ---- torchft's own suite ----------------------------------------------------------------------------


def own_suite(job_root: str) -> None:
    lock = threading.Lock()

    def make_state_dict(device: torch.device) -> dict[str, object]:
        """As the suite's own, whose DTensor lies on a mesh that this rank is no part of: here it is one."""
        with lock:
            mesh = DeviceMesh("cpu", [0])
        return {
            "rank": torch.tensor([1, 2, 3], device=device),
            "str": "str",
            "int": 1234,
            "dtensor": distribute_tensor(torch.tensor([5, 6, 7]), mesh, [Shard(0)]),
        }

    transport_test.make_state_dict = make_state_dict

    def init_transport(rank: int, world_size: int) -> FlashpointTransport[dict[str, object]]:
        return FlashpointTransport(
            f"{job_root}-{rank}",
            host="127.0.0.1",
            state_dict=lambda: make_state_dict(torch.device("cpu")),
        )

    transport_test.run_multi_recovery_test(unittest.TestCase(), init_transport, torch.device("cpu"))


def test_the_suite_that_torchft_has_for_transports(job_root: str) -> None:
    start(own_suite, job_root).answer()  # in a process of its own: it makes a process group
    assert not list(Path(job_root).parent.glob("job-*"))  # shutdown gives the memory back


# ---- a replica dies and comes back ------------------------------------------------------------------


def train(replica: int, lighthouse: str, job_root: str, log_path: str) -> list[bytes]:
    """Data-parallel training over two replica groups of one process each, until both have committed so many steps."""
    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo
    from torchft.optim import OptimizerWrapper

    log = Log(log_path)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    transport: FlashpointTransport[Any] = FlashpointTransport(job_root, host="127.0.0.1")
    receive = transport.recv_checkpoint

    def receive_and_tell(*args: Any, **kwargs: Any) -> Any:
        found = receive(*args, **kwargs)
        log.write("healed", found["torchft"]["step"])
        return found

    transport.recv_checkpoint = receive_and_tell  # type: ignore[method-assign]

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)), load_state_dict=load_state_dict, state_dict=state_dict,
        min_replica_size=2, replica_id=f"replica_{replica}", store_addr="127.0.0.1", store_port=store.port, rank=0,
        world_size=1, lighthouse_addr=lighthouse, hostname="127.0.0.1", timeout=timedelta(seconds=20),
        checkpoint_transport=transport, use_async_quorum=False,
    )  # fmt: skip
    torch.manual_seed(replica)  # unlike weights, unless healing makes them alike
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = OptimizerWrapper(manager, torch.optim.Adam(model.parameters(), lr=0.01))
    while manager.current_step() < STEPS:
        step = manager.current_step()
        inputs = torch.rand(4, 8, generator=torch.Generator().manual_seed(100 * step + replica))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        for parameter in model.parameters():  # torchft's DDP fails an assertion when a replica is killed
            assert parameter.grad is not None
            manager.allreduce(parameter.grad).wait()
        optimizer.step()
        log.write("committed", manager.current_step())
    state = [value.numpy().tobytes() for value in model.state_dict().values()]
    moments = [
        v.numpy().tobytes() for entry in optimizer.state_dict()["state"].values() for v in entry.values()
    ]
    manager.shutdown(wait=False)
    return state + moments


def lines(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def test_a_killed_replica_heals_from_one_that_lives(job_root: str, tmp_path: Path) -> None:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=100)
    try:
        address = f"http://127.0.0.1:{urlsplit(lighthouse.address()).port}"
        workers = [
            start(train, replica, address, f"{job_root}-{replica}", str(tmp_path / f"{replica}"))
            for replica in (0, 1)
        ]
        deadline = time.monotonic() + 60
        while len(lines(tmp_path / "1")) < STEPS // 3:
            assert time.monotonic() < deadline, (lines(tmp_path / "0")[-3:], lines(tmp_path / "1")[-3:])
            time.sleep(0.01)
        workers[1].kill()
        workers[1].join()
        workers[1] = start(train, 1, address, f"{job_root}-1", str(tmp_path / "again"))
        one, other = (worker.answer() for worker in workers)
    finally:
        lighthouse.shutdown()
    assert len(one) == 16 and one == other  # four tensors, and of each two moments and a step
    healed = [int(words[-1]) for words in lines(tmp_path / "again") if "healed" in words]
    assert healed and healed[0] >= STEPS // 3 - 1


# ---- what is sent, and to whom ----------------------------------------------------------------------


def test_what_is_received_is_the_state_as_it_was_when_it_was_sent(
    pair: tuple[FlashpointTransport[Any], FlashpointTransport[Any]],
) -> None:
    sender, receiver = pair
    for step in (3, 7):
        state = state_of(step)
        sender.send_checkpoint([1], step, state, LIMIT)
        for tensor in state["user"]["default"]["model"].values():
            tensor.zero_()
        assert same(receiver.recv_checkpoint(0, sender.metadata(), step, LIMIT), state_of(step))
    with pytest.raises(FlashpointError, match="step 3 is not sent any more: it is step 7 now"):
        receiver.recv_checkpoint(0, sender.metadata(), 3, LIMIT)


def test_a_byte_that_changed_is_an_error_and_touches_nothing(job_root: str) -> None:
    target = state_of(9)
    sender: FlashpointTransport[Any] = FlashpointTransport(f"{job_root}-a", host="127.0.0.1")
    receiver: FlashpointTransport[Any] = FlashpointTransport(
        f"{job_root}-b", host="127.0.0.1", state_dict=lambda: target
    )
    try:
        sender.send_checkpoint([1], 1, state_of(1), LIMIT)
        assert sender._handle is not None and sender._handle.wait("complete")
        (path,) = Path(f"{job_root}-a").glob("step-1_ckpt/rank00000-0.safetensors")
        data = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(len(data) - 100)
            file.write(bytes(255 - byte for byte in data[-100:-90]))
        with pytest.raises(CorruptObjectError):
            receiver.recv_checkpoint(0, sender.metadata(), 1, LIMIT)
        assert same(target, state_of(9))
        sender.send_checkpoint([1], 2, {"user": {}, "torchft": {"step": 2}}, LIMIT)
        with pytest.raises(MismatchError, match="not in the checkpoint"):
            receiver.recv_checkpoint(0, sender.metadata(), 2, LIMIT)
        assert same(target, state_of(9))
        sender.send_checkpoint([1], 3, state_of(3), LIMIT)
        found = receiver.recv_checkpoint(0, sender.metadata(), 3, LIMIT)
        assert same(found, state_of(3))
        weights = found["user"]["default"]["model"]["weight"]
        assert (
            weights.data_ptr() == target["user"]["default"]["model"]["weight"].data_ptr()
        )  # filled in place
    finally:
        sender.shutdown()
        receiver.shutdown()


def test_no_room_for_a_state_is_an_error_of_the_one_that_sends(job_root: str) -> None:
    sender: FlashpointTransport[Any] = FlashpointTransport(
        job_root, host="127.0.0.1", memory_limit_bytes="64KiB"
    )
    try:
        for step in (1, 2):
            with pytest.raises(FlashpointError, match="memory_limit_bytes"):
                sender.send_checkpoint([1], step, {"user": {"w": torch.rand(1 << 16)}}, LIMIT)
        sender.send_checkpoint([1], 3, {"user": {"w": torch.rand(16)}}, LIMIT)
    finally:
        sender.shutdown()


def test_only_who_has_the_address_gets_anything(
    pair: tuple[FlashpointTransport[Any], FlashpointTransport[Any]],
) -> None:
    sender, receiver = pair
    sender.send_checkpoint([1], 1, state_of(1), LIMIT)
    url = urlsplit(sender.metadata())
    assert url.hostname is not None

    def status(path: str, **headers: str) -> int:
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=30)
        connection.request("GET", path, headers=headers)
        found = connection.getresponse().status
        connection.close()
        return found

    assert status(f"{url.path}/step-1_ckpt/.metadata") == 200
    assert status(f"/{'x' * 43}/step-1_ckpt/.metadata") == 404
    assert status(f"{url.path}/step-1_ckpt/../.agent") == 404
    assert status(f"{url.path}/step-1_ckpt/.metadata", Range="bytes=5-100000000") == 416
    with pytest.raises(FlashpointError, match="no address of a FlashpointTransport"):
        receiver.recv_checkpoint(0, "ftp://nobody", 1, LIMIT)
