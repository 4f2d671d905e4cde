"""States on a CUDA device. Written without one at hand: see docs/design.md, section 10."""

import time
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import flashpoint_torch as fpt
from flashpoint_torch import staging
from tests.torch.states import DTYPES, differences, same, tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

LONG_S = 1.0
WAIT_S = 60


def state() -> dict[str, Any]:
    """Tensors of every dtype and of many shapes on the device, beside some on the CPU, and values."""
    complex_numbers = torch.complex(torch.randn(3, 4), torch.randn(3, 4)).cuda()
    return {
        "large": tensor(1000, 1000, seed=1).cuda(),
        "many": [tensor(n, seed=n).cuda() for n in range(1, 50)],
        "dtypes": {str(dtype): tensor(3, 5, dtype=dtype, seed=3).cuda() for dtype in DTYPES},
        "strided": tensor(6, 8, seed=4).cuda().t()[::2, 1::3],
        "channels_last": torch.randn(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last),
        "conj": complex_numbers.conj(),
        "neg": complex_numbers.conj().imag,
        "scalar": torch.tensor(1.5, device="cuda"),
        "empty": torch.empty(0, 3, device="cuda"),
        "parameter": torch.nn.Parameter(torch.randn(4, 4, device="cuda")),
        "on the CPU": tensor(100, seed=5),
        "step": 7,
    }


def blank(value: Any) -> Any:
    """The same shapes on the same devices, with zeros."""
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [blank(item) for item in value]
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(torch.zeros_like(value))
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    return None


def cycles(seconds: float) -> int:
    """What to pass to ``torch.cuda._sleep``, measured, since it counts the device's clock."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(10_000_000)
    end.record()
    end.synchronize()
    return int(10_000_000 * seconds * 1000 / start.elapsed_time(end))


def test_a_state_comes_back_to_where_it_was_bit_for_bit(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        saved = state()
        for step in (1, 2, 3):
            assert fp.save(saved, step).error is None
            target = blank(saved)
            pointers = [t.data_ptr() for t in target["many"]]
            assert fp.recover(target)
            assert differences(target, saved) == []
            assert target["large"].is_cuda
            assert not target["on the CPU"].is_cuda
            assert [t.data_ptr() for t in target["many"]] == pointers


def test_it_moves_between_devices(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        weights = tensor(1000, seed=1)
        fp.save({"w": weights.cuda()}, 1)
        target = {"w": torch.zeros(1000)}
        fp.recover(target)
        assert same(target["w"], weights)
        fp.save({"w": weights}, 2)
        target = {"w": torch.zeros(1000, device="cuda")}
        fp.recover(target)
        assert target["w"].is_cuda
        assert same(target["w"].cpu(), weights)


def test_buffers_are_page_locked_and_let_go(job_root: str) -> None:
    for _ in range(3):  # the same address may well be locked again by the next session
        with fpt.init(job_root, keep=1) as fp:
            saved = {"w": torch.randn(1_000_000, device="cuda")}
            fp.warmup(saved)
            for step in range(fp.epoch * 10, fp.epoch * 10 + 3):
                assert fp.save(saved, step).error is None
            fp.wait()
            buffers = list(fp.objects.pool._mapped.values())
            assert len(buffers) == 2
            for buffer in buffers:
                assert buffer.views[staging._PINNED] is True
                assert torch.from_numpy(buffer.data).is_pinned()


def test_a_buffer_that_cannot_be_locked_is_used_all_the_same(
    job_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_HOST_REGISTER_PORTABLE", 0xFFFF)  # no such flag: CUDA refuses
    with fpt.init(job_root) as fp:
        saved = {"w": torch.randn(1000, device="cuda")}
        assert fp.save(saved, 1).error is None
        torch.ones(10, device="cuda").add_(1)  # the refusal does not come up again, in somebody else's kernel
        target = blank(saved)
        fp.recover(target)
        assert differences(target, saved) == []


def test_changes_after_async_save_are_not_saved(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        weights = torch.ones(10_000_000, device="cuda")
        for step in range(1, 6):
            weights.fill_(step)
            handle = fp.async_save({"w": weights}, step)
            weights.fill_(-1)
            assert handle.wait(timeout_s=WAIT_S)
            target = {"w": torch.zeros(10_000_000)}
            fp.recover(target)
            assert torch.equal(target["w"], torch.full((10_000_000,), float(step)))


@pytest.mark.parametrize("own_stream", [False, True])
def test_what_the_training_stream_has_queued_is_waited_for(job_root: str, own_stream: bool) -> None:
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    pause = cycles(LONG_S)
    with fpt.init(job_root) as fp, torch.cuda.stream(stream):
        weights = torch.zeros(1_000_000, device="cuda")
        fp.save({"w": weights}, 1)
        torch.cuda._sleep(pause)
        weights.fill_(2)
        assert fp.save({"w": weights}, 2).error is None
        target = {"w": torch.zeros(1_000_000)}
        fp.recover(target)
        assert torch.equal(target["w"], torch.full((1_000_000,), 2.0))


def test_other_streams_are_not_waited_for(job_root: str) -> None:
    pause = cycles(4 * LONG_S)
    with fpt.init(job_root) as fp:
        weights = torch.ones(1_000_000, device="cuda")
        fp.warmup({"w": weights})
        for step in (1, 2):
            assert fp.save({"w": weights}, step).error is None  # buffers are locked, kernels loaded
        torch.cuda.synchronize()
        other, busy = torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.stream(other):
            torch.cuda._sleep(pause)
            busy.record()
        begin = time.monotonic()
        handle = fp.async_save({"w": weights}, 3)
        assert handle.done("staged")
        assert time.monotonic() - begin < 2 * LONG_S
        assert not busy.query()
        assert handle.wait(timeout_s=WAIT_S)
        busy.synchronize()


def test_the_training_stream_goes_on_beside_the_copy(job_root: str) -> None:
    # What is queued after async_save returned runs at once: nothing of ours lies before it in its stream.
    with fpt.init(job_root) as fp:
        weights = torch.ones(1_000_000, device="cuda")
        handle = fp.async_save({"w": weights}, 1)
        done = torch.cuda.Event()
        weights.add_(1)
        done.record()
        done.synchronize()
        assert handle.wait(timeout_s=WAIT_S)


def test_through_dcp(job_root: str) -> None:
    with fpt.init(job_root, keep=0) as fp:
        saved = state()
        for step, writer in enumerate((fp.writer(), fpt.FlashpointWriter())):
            dcp.save(saved, checkpoint_id=fp.path(10 + step), storage_writer=writer)
            dcp.async_save(saved, checkpoint_id=fp.path(20 + step), storage_writer=writer).result(WAIT_S)
            for saved_step in (10 + step, 20 + step):
                target = blank(saved)
                dcp.load(target, checkpoint_id=fp.path(saved_step), storage_reader=fp.reader())
                assert differences(target, saved) == []


def test_the_staged_state_of_dcp_lies_on_the_host(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        weights = torch.ones(1000, device="cuda")
        staged = fp.writer().stage({"w": weights, "sparse": torch.eye(3, device="cuda").to_sparse()})
        weights.zero_()
        assert not staged["w"].is_cuda
        assert torch.equal(staged["w"], torch.ones(1000))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one CUDA device")
def test_a_state_on_two_devices(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        saved = {f"w{n}": torch.full((1000,), float(n), device=f"cuda:{n % 2}") for n in range(6)}
        assert fp.save(saved, 1).error is None
        target = {name: torch.zeros_like(value) for name, value in saved.items()}
        fp.recover(target)
        assert differences(target, saved) == []
        assert target["w1"].device == torch.device("cuda:1")
