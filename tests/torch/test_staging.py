"""Copies between a state and a buffer: what they do to torch's threads, and what they refuse to touch."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import flashpoint_torch as fpt
from flashpoint.errors import FlashpointError
from flashpoint_torch.staging import copy_tensors
from flashpoint_torch.writer import FlashpointWriter

SMALL = torch.arange(50_000.0)  # over 32k elements: torch would take all threads for it
LARGE = torch.arange(1_000_000.0)


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(elements, threads of torch) of every tensor that was copied."""
    seen: list[tuple[int, int]] = []
    copy = torch._foreach_copy_

    def spy(targets: list[torch.Tensor], sources: list[torch.Tensor], **kwargs: Any) -> Any:
        seen.extend((source.numel(), torch.get_num_threads()) for source in sources)
        return copy(targets, sources, **kwargs)

    monkeypatch.setattr(torch, "_foreach_copy_", spy)
    return seen


@pytest.mark.usefixtures("three_threads")
def test_small_tensors_are_copied_by_one_thread_and_large_ones_by_all(copies: list[tuple[int, int]]) -> None:
    sources = [SMALL, LARGE, SMALL + 1, torch.empty(0), LARGE + 1]
    targets = [torch.zeros_like(source) for source in sources]
    copy_tensors(targets, sources, None)
    assert all(map(torch.equal, targets, sources))
    assert dict(copies) == {0: 1, len(SMALL): 1, len(LARGE): 3}
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_a_copy_that_fails_gives_torch_its_threads_back() -> None:
    with pytest.raises(RuntimeError):
        copy_tensors([torch.zeros(3)], [SMALL], None)
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_other_threads_keep_theirs_and_copies_at_the_same_time_all_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, int] = {}
    begun = threading.Barrier(2, timeout=30)
    inside, looked = threading.Barrier(3, timeout=30), threading.Barrier(3, timeout=30)
    copy = torch._foreach_copy_

    def slow(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        inside.wait()
        looked.wait()
        copy(targets, sources)

    def copying(name: str) -> None:
        target = torch.zeros_like(SMALL)
        assert torch.get_num_threads() == 3
        begun.wait()  # both have used torch before
        copy_tensors([target], [SMALL], None)
        assert torch.equal(target, SMALL)
        seen[name] = torch.get_num_threads()

    monkeypatch.setattr(torch, "_foreach_copy_", slow)
    threads = [threading.Thread(target=copying, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    inside.wait()
    seen["outside"] = torch.get_num_threads()
    looked.wait()
    for thread in threads:
        thread.join(30)
    later = threading.Thread(target=lambda: seen.update(later=torch.get_num_threads()))
    later.start()
    later.join(30)
    assert seen == {"first": 3, "second": 3, "outside": 3, "later": 3}


# ---- tensors whose memory is gone ---------------------------------------------------------------


def all_of_it_freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def a_view_of_what_was_freed(tensor: torch.Tensor) -> torch.Tensor:
    view = torch.cat([tensor, tensor])[len(tensor) :]
    view.untyped_storage().resize_(0)
    return view


def half_of_it_cut_off(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(tensor.nbytes // 2)
    return tensor


def a_freed_parameter(tensor: torch.Tensor) -> torch.Tensor:
    return all_of_it_freed(torch.nn.Parameter(tensor))


FREED = [all_of_it_freed, a_view_of_what_was_freed, half_of_it_cut_off, a_freed_parameter]


@pytest.mark.parametrize("freed", FREED)
def test_a_tensor_without_memory_is_refused_by_name_before_a_byte_is_copied(
    job_root: str, freed: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    state = {"a": torch.arange(8.0), "w": torch.arange(1000.0), "z": torch.arange(8.0)}
    with fpt.init(job_root) as fp:
        fp.save(state, 1)
        gone = {"a": torch.zeros(8), "w": freed(torch.zeros(1000)), "z": torch.zeros(8)}
        calls = [
            lambda: fp.save(gone, 2),
            lambda: fp.recover(gone),
            lambda: dcp.save(gone, checkpoint_id=fp.path(3), storage_writer=fp.writer()),
            lambda: dcp.load(gone, checkpoint_id=fp.path(1), storage_reader=fp.reader()),
        ]
        for call in calls:
            with pytest.raises((FlashpointError, dcp.CheckpointException), match="'w' has no memory"):
                call()
        assert torch.equal(gone["a"], torch.zeros(8))
        assert "'w' has no memory" in str(FlashpointWriter().stage(gone))
        assert fp.steps() == [1]
        assert fp.save(state, 4).error is None


def test_tensors_that_need_no_memory_or_less_than_their_size_are_saved(job_root: str) -> None:
    emptied = torch.zeros(3)[:0]
    emptied.untyped_storage().resize_(0)
    state = {"expanded": torch.arange(3.0).expand(500, 3), "empty": torch.empty(0, 4), "emptied": emptied}
    with fpt.init(job_root) as fp:
        assert fp.save(state, 1).error is None
        target = {"expanded": torch.zeros(500, 3), "empty": torch.empty(0, 4), "emptied": torch.empty(0)}
        assert fp.recover(target)
        assert torch.equal(target["expanded"], state["expanded"])
