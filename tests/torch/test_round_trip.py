"""Every kind of tensor and value comes back with its type and every bit, on every way through."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import flashpoint
import flashpoint_torch as fpt
from tests.torch.states import blank, differences, pickled, tensors, values

KINDS = (tensors, values, pickled)


def for_dcp(state: Any) -> Any:
    """The state without what DCP's own planners cannot tell from something else: keys that are no strings."""
    if isinstance(state, dict):
        return {key: for_dcp(value) for key, value in state.items() if isinstance(key, str)}
    return state


@pytest.mark.parametrize("kind", KINDS)
def test_through_save_and_recover(job_root: str, kind: Callable[[], dict[Any, Any]]) -> None:
    state, target = kind(), blank(kind())
    with fpt.init(job_root) as fp:
        assert fp.save(state, 1).error is None
        assert fp.recover(target)
    assert differences(target, state) == []
    with fpt.init(job_root) as fp:  # and again by another session, through mappings of its own
        target = blank(state)
        assert fp.recover(target)
    assert differences(target, state) == []


@pytest.mark.parametrize("kind", KINDS)
def test_into_an_empty_state(job_root: str, kind: Callable[[], dict[Any, Any]]) -> None:
    with fpt.init(job_root) as fp:
        state = for_dcp(kind())
        state.pop("", None)
        fp.save(state, 1)
        target: dict[Any, Any] = {}
        assert fp.recover(target)
    for name in ("parameter", "frozen"):  # there was nothing to tell that they are parameters
        if isinstance(target.get(name), torch.Tensor):
            target[name] = torch.nn.Parameter(target[name], state[name].requires_grad)
    assert sorted(target) == sorted(state)
    assert differences({key: target[key] for key in state}, state) == []


@pytest.mark.parametrize("kind", KINDS)
def test_through_dcp_save_and_load(job_root: str, kind: Callable[[], dict[Any, Any]]) -> None:
    state = for_dcp(kind())
    target, path = blank(state), f"{job_root}/step-1_ckpt"
    dcp.save(state, checkpoint_id=path, storage_writer=fpt.FlashpointWriter())
    dcp.load(target, checkpoint_id=path, storage_reader=fpt.FlashpointReader())
    assert differences(target, state) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["session", "path", "neither"])
def test_through_dcp_async_save(job_root: str, kind: Callable[[], dict[Any, Any]], how: str) -> None:
    state = for_dcp(kind())
    target, path = blank(state), f"{job_root}/step-1_ckpt"
    with fpt.init(job_root) as fp:
        writers = {
            "session": fp.writer,
            "path": lambda: fpt.FlashpointWriter(path),
            "neither": fpt.FlashpointWriter,
        }
        dcp.async_save(state, checkpoint_id=path, storage_writer=writers[how]()).result(60)
        dcp.load(target, checkpoint_id=path, storage_reader=fp.reader())
        assert differences(target, state) == []
        target = blank(state)
        assert fp.recover(target)  # what DCP's planners stored fits our own plan, too
        assert differences(target, state) == []


def test_a_state_that_was_loaded_saves_as_the_same_bytes(job_root: str) -> None:
    with fpt.init(job_root, keep=0) as fp:
        state, target = tensors(), blank(tensors())
        fp.save(state, 1)
        fp.recover(target)
        fp.save(target, 2)
        digests = []
        for step in (1, 2):
            with flashpoint.open(fp.path(step)) as view:
                digests.append([record.chunks for record in view.manifest.objects])
        assert digests[0] == digests[1]


def test_tensors_that_share_memory_share_it_still(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        tied = torch.arange(4.0)
        fp.save({"embedding": tied, "head": tied, "part": tied[1:3]}, 1)
        weight = torch.zeros(4)
        target = {"embedding": weight, "head": weight, "part": weight[1:3]}
        fp.recover(target)
        assert torch.equal(weight, tied)
        assert target["embedding"] is target["head"] is weight


def test_tensors_are_filled_where_they_are(job_root: str) -> None:
    state = {"a": torch.randn(3, 4), "b": {"c": [torch.randn(2), 1]}, "column": torch.randn(4, 3).t()}
    with fpt.init(job_root) as fp:
        fp.save(state, 1)
        target = {
            "a": torch.zeros(3, 4),
            "b": {"c": [torch.zeros(2), 0]},
            "column": torch.zeros(5, 9)[::2, 1:9:2],
        }
        held = [target["a"], target["b"]["c"][0], target["column"]]
        pointers = [tensor.data_ptr() for tensor in held]
        fp.recover(target)
        assert [tensor.data_ptr() for tensor in held] == pointers
        assert target["a"] is held[0]
        assert target["b"]["c"][0] is held[1]
        assert differences(target, state) == []


def test_an_expanded_tensor_is_filled_through_its_one_element(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        row = torch.arange(4.0)
        fp.save({"ids": row.expand(3, 4), "one": torch.ones(1).expand(2)}, 1)
        target = {"ids": torch.zeros(4).expand(3, 4), "one": torch.zeros(1).expand(2)}
        fp.recover(target)
        assert torch.equal(target["ids"], row.expand(3, 4))
        assert target["ids"].stride() == (0, 1)
        assert torch.equal(target["one"], torch.ones(2))


def test_an_expanded_tensor_that_cannot_hold_what_was_saved_is_an_error(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        fp.save({"a": torch.ones(2), "ids": torch.arange(12.0).view(3, 4)}, 1)
        target = {"a": torch.zeros(2), "ids": torch.zeros(4).expand(3, 4)}
        with pytest.raises(flashpoint.FlashpointError, match="'ids'.*memory"):
            fp.recover(target)
        assert torch.equal(target["a"], torch.zeros(2))


def test_parameters_that_need_gradients_are_filled(job_root: str) -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    with fpt.init(job_root) as fp:
        fp.save(dict(model.named_parameters()), 1)
        other(torch.ones(3)).sum().backward()
        fp.recover(dict(other.named_parameters()))
    assert torch.equal(other.weight, model.weight)
    assert other.weight.requires_grad
    assert other.weight.grad is not None
    other(torch.ones(3)).sum().backward()


def test_a_mapping_that_is_no_dict_is_filled(job_root: str) -> None:
    from collections import UserDict

    with fpt.init(job_root) as fp:
        fp.save({"w": torch.ones(2), "step": 3}, 1)
        target = UserDict({"w": torch.zeros(2), "step": 0})
        fp.recover(target)
        assert torch.equal(target["w"], torch.ones(2))
        assert target["step"] == 3


def test_a_mapping_that_cannot_be_filled_is_an_error(job_root: str) -> None:
    from types import MappingProxyType

    with fpt.init(job_root) as fp:
        fp.save({"w": torch.ones(2), "step": 3}, 1)
        tensor = torch.zeros(2)
        with pytest.raises(flashpoint.FlashpointError, match="'step'"):
            fp.recover(MappingProxyType({"w": tensor, "step": 0}))
        assert torch.equal(tensor, torch.zeros(2))


def test_the_zoo_itself_is_not_changed_by_saving(job_root: str) -> None:
    state = values()
    before = pickle.loads(pickle.dumps(state))
    with fpt.init(job_root) as fp:
        fp.save(state, 1)
    assert differences(state, before) == []
