"""Nested states that come back without a template: what a trainer dumps as one dict, saved and found again whole.

`Flashpoint.recover` fills a state of the shape that was saved. A trainer's dict has no shape before training has
begun: it is packed into one that has.

    {"tensors": {name: tensor}, "objects": {name: what is neither a tensor nor plain}, "frame": (rank, world, node)}

A node says what to build: ``("v", plain value)``, ``("t", name)`` a tensor, ``("x", name)`` an object, and of
nodes ``("d", ((key, node), ..))`` a dict, ``("o", .., metadata)`` an OrderedDict as modules return, ``("l", ..)`` a
list, ``("u", ..)`` a tuple. Only objects are ever pickled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from flashpoint.errors import FlashpointError
from flashpoint.telemetry import logger
from flashpoint.values import NotPlainDataError, to_json
from flashpoint_torch.plan import is_storable
from flashpoint_torch.session import Flashpoint, RecoverResult

Node = tuple[Any, ...]


def pack(tree: Any) -> dict[str, Any]:
    """A state for `Flashpoint.async_save` that holds ``tree``, dicts, lists and tuples of anything.

    Tensors are not copied. Each rank packs its own tree, and gets its own back.
    """
    packer = _Packer()
    node = packer.node(tree, ())
    return {"tensors": packer.tensors, "objects": packer.objects, "frame": (*_place(), node)}


@dataclass(frozen=True)
class Unpacked:
    """A tree that was recovered.

    Attributes:
        tree: as it was packed, its tensors on the CPU.
        result: of the recovery.
        own: whether it was packed by this very rank of a world of this size. Otherwise what only holds for
            one rank, such as generators, is another's.
    """

    tree: Any
    result: RecoverResult
    own: bool


def recover_packed(
    fp: Flashpoint, *, step: int | None = None, fallback: Callable[[], tuple[Any, int | None]] | None = None
) -> Unpacked | None:
    """The tree of the newest complete version, or of ``step``; collective, as `Flashpoint.recover` is.

    Args:
        fallback: where memory has nothing, gives a tree from long-term storage, and its step.

    Returns:
        None where there is nothing.
    """
    stored: list[Any] = []

    def fall_back(_: Mapping[str, Any]) -> int:
        assert fallback is not None
        tree, of_step = fallback()
        stored.append(tree)
        return -1 if of_step is None else of_step

    state: dict[str, Any] = {"tensors": {}, "objects": {}, "frame": None}
    result = fp.recover(state, step=step, fallback=None if fallback is None else fall_back)
    if result is None:
        return None
    if stored:
        return Unpacked(stored[0], result, own=False)
    rank, world_size, node = state["frame"]
    own = (rank, world_size) == _place()
    if not own:
        logger.warning(
            "step %s was saved by %d ranks and is recovered by %d: each rank's own generators stay as they are",
            result.step, world_size, _place()[1],
        )  # fmt: skip
    return Unpacked(_build(node, state), result, own)


def unpack(state: Mapping[str, Any]) -> Any:
    """The tree of a packed state that was filled."""
    return _build(state["frame"][2], state)


def _place() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


class _Packer:
    """Takes a tree apart."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self.objects: dict[str, Any] = {}

    def node(self, value: Any, path: tuple[Any, ...]) -> Node:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            if value.is_meta or is_storable(value) or isinstance(value, (DTensor, ShardedTensor)):
                return "t", self._put(self.tensors, path, value.detach())
            return "x", self._put(self.objects, path, value.detach())
        if kind is dict or kind is OrderedDict:
            for key in value:
                _check_key(key, path)
            items = [(key, self.node(item, (*path, key))) for key, item in value.items()]
            if kind is OrderedDict:
                metadata = self.node(_plain_metadata(value), (*path, "_metadata"))
                return "o", tuple(items), metadata
            if all(item[0] == "v" for _, item in items):
                return "v", value
            return "d", tuple(items)
        if kind is list or kind is tuple:
            nodes = [self.node(item, (*path, i)) for i, item in enumerate(value)]
            if all(item[0] == "v" for item in nodes):
                return "v", value
            return ("l" if kind is list else "u"), tuple(nodes)
        try:
            to_json(value)
        except NotPlainDataError:
            return "x", self._put(self.objects, path, value)
        return "v", value

    def _put(self, table: dict[str, Any], path: tuple[Any, ...], value: Any) -> str:
        name = base = ".".join(map(str, path)) or "value"
        number = 1
        while name in table:  # the 0 and the "0" of one mapping, or a key with a dot
            number += 1
            name = f"{base}~{number}"
        table[name] = value
        return name


def _check_key(key: Any, path: tuple[Any, ...]) -> None:
    try:
        to_json(key)
    except NotPlainDataError as error:
        where = ".".join(map(str, path))
        raise FlashpointError(f"a key of {where[:200]!r} cannot be saved: {error}; use plain keys") from None


def _plain_metadata(value: Any) -> Any:
    """What ``Module.state_dict`` says of its modules' versions, beside the tensors."""
    metadata = getattr(value, "_metadata", None)
    return None if metadata is None else {key: dict(item) for key, item in metadata.items()}


def _build(node: Node, state: Mapping[str, Any]) -> Any:
    kind, body = node[0], node[1]
    if kind == "v":
        return body
    if kind == "t":
        return state["tensors"][body]
    if kind == "x":
        return state["objects"][body]
    if kind == "d":
        return {key: _build(item, state) for key, item in body}
    if kind == "o":
        ordered = OrderedDict((key, _build(item, state)) for key, item in body)
        metadata = _build(node[2], state)
        if metadata is not None:
            ordered._metadata = OrderedDict(metadata)  # type: ignore[attr-defined]
        return ordered
    items = [_build(item, state) for item in body]
    return items if kind == "l" else tuple(items)
