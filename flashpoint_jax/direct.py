"""The short way to restore an item: what Orbax does for each leaf, done for all leaves at once.

Orbax's own restore builds and compares several trees of objects for each leaf: of thousands of arrays it takes
longer than their bytes. Where nothing but leaves is asked for, and the target has the structure that was saved, all
of this comes to one question: which leaf goes to which type handler. Whatever is out of the ordinary (placeholders,
partial restores, another structure, a handler that is not ours) goes Orbax's way, with its errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import jax
import msgspec
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.handlers import base_pytree_checkpoint_handler as stock
from orbax.checkpoint._src.metadata import empty_values
from orbax.checkpoint._src.tree import utils as tree_utils

from flashpoint.view import CheckpointView
from flashpoint_jax.leaves import BlobRegistry, can_store
from flashpoint_jax.sidecars import TREE_FILE


class _Key(msgspec.Struct, frozen=True):
    key: str
    key_type: int


class _Value(msgspec.Struct, frozen=True):
    value_type: str
    skip_deserialize: bool = False


class _Leaf(msgspec.Struct, frozen=True):
    key_metadata: tuple[_Key, ...]
    value_metadata: _Value


class _Tree(msgspec.Struct, frozen=True):
    """What `TREE_FILE` says, as far as a restore needs it."""

    tree_metadata: dict[str, _Leaf]


class _Info(NamedTuple):
    """Of an Orbax ParamInfo, what our type handlers look at."""

    name: str
    parent_dir: Any


# How Orbax writes a step of the way through a tree: as a text, and whether it is an index (1) or a name (2).
_KEYS: Final = {
    jax.tree_util.SequenceKey: (attrgetter("idx"), 1),
    jax.tree_util.FlattenedIndexKey: (attrgetter("key"), 1),
    jax.tree_util.DictKey: (attrgetter("key"), 2),
    jax.tree_util.GetAttrKey: (attrgetter("name"), 2),
}


class DirectRestore:
    """Restores of the items of one handler. Remembers which leaf has which name, while structures stay."""

    def __init__(self, registry: BlobRegistry) -> None:
        self._registry = registry
        self._matched: tuple[bytes, Any, list[tuple[str, str]] | None] = (b"", None, None)

    def restore(
        self, view: CheckpointView, directory: Any, item: Any, restore_args: Any
    ) -> tuple[Any] | None:
        """The item, as the one of a tuple; None where Orbax's way has to be gone.

        Args:
            view: of ``directory``, opened.
            item: the target: its structure, and what its leaves are to become.
            restore_args: Orbax's, for each leaf.
        """
        treedef: Any
        leaves, treedef = jax.tree_util.tree_flatten(item)
        args, treedef_of_args = jax.tree_util.tree_flatten(restore_args)
        if not leaves or treedef != treedef_of_args:
            return None
        saved = self._match(directory, item, treedef)
        if saved is None or not all(isinstance(arg, type_handlers.RestoreArgs) for arg in args):
            return None
        if any(leaf is stock.PLACEHOLDER for leaf in leaves):
            return None
        groups: dict[Any, list[int]] = {}
        for i, (arg, (_, kind)) in enumerate(zip(args, saved, strict=True)):
            groups.setdefault(arg.restore_type or kind, []).append(i)
        try:
            handlers = {kind: self._registry.get(kind) for kind in groups}
        except ValueError:  # of a type that nobody handles
            return None
        if not all(map(can_store, handlers.values())):
            return None
        restored: list[Any] = [None] * len(leaves)
        for kind, members in groups.items():
            infos = [_Info(saved[i][0], directory) for i in members]
            filled = [_filled(args[i], leaves[i]) for i in members]
            for i, value in zip(members, handlers[kind].read(view, infos, filled), strict=True):
                restored[i] = value
        return (jax.tree_util.tree_unflatten(treedef, restored),)

    def _match(self, directory: Any, item: Any, treedef: Any) -> list[tuple[str, str]] | None:
        """The name and stored type of each leaf, in order; None where the structure is not the saved one."""
        try:
            with open(f"{directory}/{TREE_FILE}", "rb") as file:
                data = file.read()
        except OSError:
            return None
        of_data, of_treedef, names = self._matched
        if data != of_data or of_treedef != treedef:
            names = _match(data, item)
            self._matched = data, treedef, names
        return names


def _match(data: bytes, item: Any) -> list[tuple[str, str]] | None:
    try:
        tree = msgspec.json.decode(data, type=_Tree)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    saved = {
        tuple([(key.key, key.key_type) for key in leaf.key_metadata]): leaf.value_metadata
        for leaf in tree.tree_metadata.values()
    }
    # Orbax's leaves, empty containers among them: JAX does not count these.
    found = jax.tree_util.tree_leaves_with_path(item, is_leaf=tree_utils.is_empty_or_leaf)
    if len(found) != len(saved):
        return None
    names = []
    for path, leaf in found:
        keys = _keys_of(path)
        value = None if keys is None else saved.get(keys)
        if keys is None or value is None:
            return None
        is_empty = tree_utils.is_empty_node(leaf)
        if is_empty != empty_values.is_empty_typestr(value.value_type):
            return None
        if value.skip_deserialize and not is_empty:
            return None
        if not is_empty:
            names.append((".".join([key for key, _ in keys]), value.value_type))
    return names


def _keys_of(path: Sequence[Any]) -> tuple[tuple[str, int], ...] | None:
    """A way through a tree as Orbax writes it; None for one that it does not know."""
    keys = []
    for step in path:
        if type(step) not in _KEYS:
            return None
        name_of, kind = _KEYS[type(step)]
        keys.append((str(name_of(step)), kind))
    return tuple(keys)


def _filled(arg: Any, leaf: Any) -> Any:
    """Restore arguments with what the target says where they say nothing."""
    if isinstance(arg, type_handlers.ArrayRestoreArgs) and (arg.global_shape is None or arg.dtype is None):
        return stock._update_array_restore_args(leaf, arg)
    return arg
