"""The parts of a training state as a version holds them, each Stateful at the top of the saved mapping.

What has tensors is stored as tensors: models, optimizers, generators. What only its own object understands
(a scheduler, a data loader, a logger) is one leaf, a tuple of one: its inside may differ from save to save.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import xxhash
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from flashpoint.errors import FlashpointError, MismatchError


@runtime_checkable
class HasState(Protocol):
    """Anything that can be saved: a data loader, an evaluator, a logger."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass
class Engine:
    """A model and what trains it.

    Attributes:
        model: bare, or wrapped by DDP, FSDP2 or tensor parallelism; names are those of the bare model.
        optimizer, lr_scheduler, scaler: where there is one.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    lr_scheduler: HasState | None = None
    scaler: HasState | None = None

    @property
    def is_sharded(self) -> bool:
        return any(isinstance(parameter, DTensor) for parameter in self.model.parameters())

    @property
    def can_be_saved(self) -> bool:
        """False where to look at the optimizer would change it: DCP steps a sharded one to see its state."""
        return self.optimizer is None or bool(self.optimizer.state) or not self.is_sharded


class EngineState:
    """An `Engine`, as it is saved and as it is filled."""

    def __init__(self, engine: Engine, *, loading: bool = False) -> None:
        self._engine = engine
        self._loading = loading
        self._members: list[list[Any]] = []  # of the optimizer's groups, as its state names them

    def state_dict(self) -> dict[str, Any]:
        engine = self._engine
        state: dict[str, Any] = {"model": get_model_state_dict(engine.model)}
        if engine.optimizer is not None:
            state["groups"] = (_groups(engine.model, engine.optimizer),)
            state["optimizer"] = self._optimizer_state(engine.optimizer)
        for name, part in self._opaque():
            state[name] = _leaf(part, self._loading)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        engine = self._engine
        if engine.optimizer is not None:
            (groups,) = state["groups"]
            _check_groups(groups, _groups(engine.model, engine.optimizer))
        set_model_state_dict(engine.model, state["model"])
        if engine.optimizer is not None:
            optimizer = state["optimizer"]
            for group, members in zip(optimizer["param_groups"], self._members, strict=True):
                group["params"] = members
            if engine.is_sharded:
                set_optimizer_state_dict(engine.model, engine.optimizer, optimizer)
            else:
                _load_optimizer(engine.optimizer, optimizer)
        for name, part in self._opaque():  # the scheduler after the optimizer whose rates it sets
            _load_leaf(part, state[name])

    def _optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if self._engine.is_sharded:
            state: dict[str, Any] = {**get_optimizer_state_dict(self._engine.model, optimizer)}
        else:
            state = optimizer.state_dict()
            if (
                self._loading
            ):  # whatever the version holds there comes back, also after this optimizer's steps
                state["state"] = {}
        # Thousands of names would be in the manifest once for each rank; `groups` tells whether they changed.
        self._members = [group["params"] for group in state["param_groups"]]
        state["param_groups"] = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in state["param_groups"]
        ]
        return state

    def _opaque(self) -> Iterator[tuple[str, HasState]]:
        for name, part in (("lr_scheduler", self._engine.lr_scheduler), ("scaler", self._engine.scaler)):
            if part is not None:
                yield name, part


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[int, str]]:
    """For each group how many parameters it has, and a digest of their names in order."""
    names = {id(parameter): _bare(name) for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        members = [names.get(id(parameter), "") for parameter in group["params"]]
        groups.append((len(members), xxhash.xxh3_64_hexdigest("\n".join(members).encode(errors="replace"))))
    return groups


def _bare(name: str) -> str:
    """A parameter's name without what torch.compile and DDP put before it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _check_groups(saved: list[tuple[int, str]], here: list[tuple[int, str]]) -> None:
    if saved == here:
        return
    if len(saved) != len(here):
        raise MismatchError(
            f"the optimizer has {len(here)} groups, {len(saved)} were saved: build it as it was"
        )
    number = next(i for i, (a, b) in enumerate(zip(saved, here, strict=True)) if a != b)
    raise MismatchError(
        f"group {number} of the optimizer has {here[number][0]} parameters; {saved[number][0]} were saved, others or "
        "in another order: build the optimizer as it was"
    )


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """``load_state_dict``, which casts moments to their parameter's dtype, and then those that it has cast."""
    optimizer.load_state_dict(state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, saved in state["state"].items():
        loaded = optimizer.state[parameters[number]]
        for name, value in saved.items():
            if isinstance(value, torch.Tensor) and loaded[name].dtype != value.dtype:
                loaded[name] = value.to(loaded[name].device, copy=True)


class Part:
    """Any object with a state, whole, as one leaf. Each rank has its own."""

    def __init__(self, part: HasState, *, loading: bool = False) -> None:
        self._part = part
        self._loading = loading

    def state_dict(self) -> dict[str, Any]:
        return {"state": _leaf(self._part, self._loading)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _load_leaf(self._part, state["state"])


class RankState:
    """What each rank has of its own: its place in the data, and its generators.

    Args:
        ignored: what is loaded goes nowhere: it is of a world of another size.
    """

    def __init__(self, dataloader: HasState | None, *, loading: bool = False, ignored: bool = False) -> None:
        self._dataloader = dataloader
        self._loading = loading
        self._ignored = ignored

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"rng": rng_state()}
        if self._dataloader is not None:
            state["dataloader"] = _leaf(self._dataloader, self._loading)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._ignored:
            return
        if self._dataloader is not None:
            _load_leaf(self._dataloader, state["dataloader"])
            # A loader throws dice for its workers when it is asked for an iterator. Asked for its state,
            # torchdata's makes the next iterator now, and so not after the dice were put back.
            self._dataloader.state_dict()
        set_rng_state(state["rng"])


class Values:
    """A dict of plain values that is filled: progress, frequencies."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def rng_state() -> dict[str, Any]:
    """The generators of Python, NumPy and torch, on the CPU and on this process's CUDA device.

    As tensors where they are long: values go into every manifest.
    """
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state()
    if not isinstance(legacy, tuple) or legacy[0] != "MT19937":
        raise FlashpointError(
            "np.random uses another generator than MT19937, the one that is saved: give yours as an auxiliary state"
        )
    state: dict[str, Any] = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_rest": (version, gauss),
        "numpy": torch.from_numpy(legacy[1].astype(np.int64)),
        "numpy_rest": tuple(legacy[2:]),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    version, gauss = state["python_rest"]
    random.setstate((version, tuple(state["python"].tolist()), gauss))
    np.random.set_state(("MT19937", state["numpy"].numpy().astype(np.uint32), *state["numpy_rest"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _leaf(part: HasState, loading: bool) -> tuple[Any]:
    return (None,) if loading else (part.state_dict(),)


def _load_leaf(part: HasState, leaf: tuple[Any]) -> None:
    (state,) = leaf
    part.load_state_dict(state)
