"""Trees without a template: what goes in comes out."""

import random
from collections import OrderedDict

import numpy as np
import pytest
import torch

import flashpoint_torch as fpt
from flashpoint.errors import FlashpointError
from flashpoint_torch.packed import pack, recover_packed
from flashpoint_torch.training_state import rng_state, set_rng_state
from tests.torch.faults import same


def round_trip(job_root: str, tree: object, **settings: object) -> object:
    with fpt.init(job_root, **settings) as fp:
        fp.save(pack(tree), step=1)
    with fpt.init(job_root, **settings) as fp:
        found = recover_packed(fp)
    assert found is not None and found.own and found.result.step == 1
    return found.tree


def test_a_tree_comes_back_as_it_was(job_root: str) -> None:
    tree = {
        "optimizers": [{"state": {}, "param_groups": [{"betas": (0.9, 0.95), "params": [0, 1]}]}],
        "moments": {0: torch.arange(5.0), "0": torch.ones(2, dtype=torch.bfloat16), "a.b": torch.ones(())},
        "a": {"b": (torch.zeros(3), None, [torch.eye(2), "x"])},
        "empty": {},
        "nothing": [],
        "numbers": {1: 2, (3, 4): b"five"},
        "table": np.arange(100_000),
    }
    back = round_trip(job_root, tree)
    assert isinstance(back, dict)
    inner, moved = tree["a"].pop("b"), back["a"].pop("b")  # type: ignore[attr-defined]
    assert isinstance(moved, tuple) and all(map(same, inner, moved))
    assert same(back, tree)


def test_a_modules_state_keeps_its_order_and_its_versions(job_root: str) -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()
    back = round_trip(job_root, {"model": state})["model"]  # type: ignore[index]
    assert isinstance(back, OrderedDict) and list(back) == list(state)
    assert back._metadata == {key: dict(value) for key, value in state._metadata.items()}  # type: ignore[attr-defined]


def test_an_empty_tree_and_an_empty_job(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        assert recover_packed(fp) is None
    assert round_trip(job_root, {}) == {}


def test_an_object_is_loaded_only_with_leave(job_root: str) -> None:
    tree = {"when": random.Random(3), "x": torch.ones(2)}
    with fpt.init(job_root) as fp:
        fp.save(pack(tree), step=1)
        with pytest.raises(FlashpointError, match="objects.when"):
            recover_packed(fp)
    with fpt.init(job_root, allow_pickle=True) as fp:
        found = recover_packed(fp)
    assert found is not None and found.tree["when"].random() == random.Random(3).random()


def test_a_key_that_is_not_plain_is_said(job_root: str) -> None:
    with pytest.raises(FlashpointError, match="'state'.*use plain keys"):
        pack({"state": {torch.float32: 1}})


def test_dice_fall_as_before(job_root: str) -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    random.gauss(0, 1), np.random.standard_normal()
    state = rng_state()

    def throw() -> list[object]:
        return [random.gauss(0, 1), np.random.standard_normal(), np.random.rand(), torch.rand(3).tolist()]

    thrown = throw()
    set_rng_state(round_trip(job_root, state))  # type: ignore[arg-type]
    assert throw() == thrown
