"""The tree of a state: nested dicts and lists to flat names and back, as DCP names them.

The names are those of ``torch.distributed.checkpoint``'s ``flatten_state_dict`` (keys joined by dots), so
stock planners and our own agree on them: mappings are entered, lists only where a tensor or a mapping is
somewhere inside, everything else is a leaf. A `Skeleton` remembers a tree's shape, so that walking an
unchanged one costs a comparison of its keys, not a Python call for each leaf.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from flashpoint.errors import FlashpointError
from flashpoint.layout import Path


class Skeleton:
    """The shape of one mapping or list: its keys, and which children are branches themselves."""

    __slots__ = ("branches", "keys", "kind")

    def __init__(self, value: Any) -> None:
        self.kind = type(value)
        self.keys: tuple[Any, ...] = tuple(value) if isinstance(value, Mapping) else tuple(range(len(value)))
        children = _children(value)
        self.branches = [(i, Skeleton(child)) for i, child in enumerate(children) if is_branch(child)]

    def leaves_of(self, value: Any) -> list[Any] | None:
        """The leaves of a tree of this very shape, in order; None where its shape differs."""
        found: list[Any] = []
        return found if self._collect(value, found) else None

    def _collect(self, value: Any, found: list[Any]) -> bool:
        if type(value) is not self.kind:
            return False
        if isinstance(value, Mapping):
            if tuple(value) != self.keys:
                return False
        elif len(value) != len(self.keys):
            return False
        children = _children(value)
        done = 0
        for i, branch in self.branches:
            found += children[done:i]
            if not branch._collect(children[i], found):
                return False
            done = i + 1
        found += children[done:]
        return True

    def names(self) -> list[tuple[str, Path]]:
        """Name and path of every leaf, in the order of `leaves_of`. In names, keys become strings; paths tell
        the ``0`` of a mapping from the ``"0"``.

        Raises:
            FlashpointError: two leaves would share a name, as ``{"a.b": x, "a": {"b": y}}`` does.
        """
        paths = list(self._paths(()))
        names = [".".join(map(str, dcp_path(path))) for path in paths]
        if len(set(names)) != len(names):
            seen: set[str] = set()
            twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise FlashpointError(f"two values of the state share the name {twice[:200]!r}: rename a key")
        return list(zip(names, paths, strict=True))

    def _paths(self, prefix: Path) -> Iterator[Path]:
        is_list = issubclass(self.kind, list)
        branches = dict(self.branches)
        for i, key in enumerate(self.keys):
            path = (*prefix, key if is_list else _path_part(key))
            if i in branches:
                yield from branches[i]._paths(path)
            else:
                yield path

    def empty_mappings(self, value: Any, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
        """(path, mapping) of every mapping in the tree that has no keys."""
        is_list = issubclass(self.kind, list)
        if not self.keys and not is_list:
            yield prefix, value
        children = _children(value)
        for i, branch in self.branches:
            key = self.keys[i]
            yield from branch.empty_mappings(children[i], (*prefix, key if is_list else _path_part(key)))

    def rebuild(self, leaves: Iterator[Any]) -> Any:
        """A tree of plain dicts and lists of this shape, with these leaves."""
        branches = dict(self.branches)
        children = [
            branches[i].rebuild(leaves) if i in branches else next(leaves) for i in range(len(self.keys))
        ]
        return children if issubclass(self.kind, list) else dict(zip(self.keys, children, strict=True))

    def parents(self, value: Any) -> Iterator[tuple[Any, Any]]:
        """(container, key) of every leaf, in order: where a loaded value is put."""
        branches = dict(self.branches)
        children = _children(value)
        for i, key in enumerate(self.keys):
            if i in branches:
                yield from branches[i].parents(children[i])
            else:
                yield value, key


def _path_part(key: Any) -> str | tuple[int]:
    """A mapping's key as part of a path; keys that are neither str nor int come back as strings."""
    return (key,) if type(key) is int else str(key)


def dcp_path(path: Path) -> tuple[str | int, ...]:
    """A path as DCP's planners know it: there, all keys of mappings are strings."""
    return tuple(str(part[0]) if isinstance(part, tuple) else part for part in path)


def put(root: Any, path: Path, value: Any) -> None:
    """Set ``value`` at ``path`` below the mapping ``root``, making mappings and lists on the way."""
    container = root
    for part, following in itertools.pairwise(path):
        container = _child(container, part, list if type(following) is int else dict)
    if isinstance(container, list):
        _extend(container, _key(path[-1]))
    container[_key(path[-1])] = value


def _child(container: Any, part: str | int | tuple[int], make: Callable[[], Any]) -> Any:
    key = _key(part)
    if isinstance(container, list):
        _extend(container, key)
        if container[key] is None:
            container[key] = make()
    elif key not in container:
        container[key] = make()
    return container[key]


def _extend(items: list[Any], index: int) -> None:
    items.extend([None] * (index + 1 - len(items)))


def _key(part: str | int | tuple[int]) -> Any:
    return part[0] if isinstance(part, tuple) else part


def is_branch(value: Any) -> bool:
    """Whether the traversal enters ``value`` (rule of ``torch.distributed.checkpoint._traverse``)."""
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and any(
        isinstance(item, torch.Tensor) or is_branch(item) for item in value
    )


def resolve_stateful(state: Mapping[str, Any]) -> dict[str, Any]:
    """A shallow copy of the state with ``state_dict()`` in place of every Stateful at its top level."""
    if not isinstance(state, Mapping):
        raise FlashpointError(f"a state is a dict of names to values, not a {type(state).__name__}")
    # Asking each value costs a microsecond, which thousands of tensors pay; their types are few.
    stateful = {kind for kind in set(map(type, state.values())) if issubclass(kind, Stateful)}
    if not stateful:
        return dict(state)
    return {key: value.state_dict() if type(value) in stateful else value for key, value in state.items()}


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else list(value)
