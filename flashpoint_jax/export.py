"""A version as a checkpoint of stock Orbax, of whichever framework it is: written by Orbax itself, tensor by tensor."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from flashpoint.dtypes import dtype_of
from flashpoint.errors import FlashpointError
from flashpoint.export.safetensors_files import Item
from flashpoint.export.selection import Selection
from flashpoint.layout import Path
from flashpoint.located import TEMPORARY
from flashpoint.manifest import plain_value
from flashpoint.recovery import values_source

_NUMBERS: Final = (int, float)  # stock Orbax restores no strings into a target, and no bool


class _Tensor:
    """A leaf that is put together when it is written, and not before."""

    def __init__(self, selection: Selection, item: Item) -> None:
        self.shape = item.shape
        self.dtype = dtype_of(item.dtype).numpy
        self.nbytes = item.nbytes
        self._selection = selection
        self._item = item

    def read(self) -> np.ndarray[Any, Any]:
        """The tensor: a view of the version where it lies there as it is."""
        parts = list(self._selection.parts(self._item)) if 0 not in self.shape else []
        if len(parts) == 1:
            return parts[0].reshape(self.shape)
        whole = np.empty(self.shape, self.dtype)
        position, flat = 0, whole.reshape(-1)
        for part in parts:
            flat[position : position + part.size] = part.reshape(-1)
            position += part.size
        return whole


class _Tensors(type_handlers.NumpyHandler):
    """Orbax's own handler for numpy arrays, which gets one tensor after the other."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self._advance = advance

    async def serialize(self, values: Sequence[_Tensor], infos: Sequence[Any], args: Any = None) -> list[Any]:
        for value, info, arg in zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True):
            await info.await_path_creation()  # or else a failure would leave a folder that is still to come
            _wait(await super().serialize([value.read()], [info], [arg]))
            self._advance(value.nbytes)
        return []


class _Numbers(type_handlers.ScalarHandler):
    """Orbax's own handler for numbers, which writes nothing any more when it has returned."""

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> list[Any]:
        _wait(await super().serialize(values, infos, args))
        return []


def _wait(futures: Sequence[Any]) -> None:
    # Where one handler fails, Orbax waits for no other: what goes on writing would make the folder again.
    for future in futures:
        future.result()


def export_orbax(path: str, selection: Selection, advance: Callable[[int], None]) -> list[str]:
    """Write a checkpoint that `ocp.StandardCheckpointer` reads, with the numbers among the plain values.

    One tensor at a time is held besides the mapped version, and only if it is sharded, cast or large. Orbax gives the
    folder its name when all is there, and does not overwrite.

    Args:
        advance: told the bytes of each tensor that is written.

    Returns:
        Names of what is left out.

    Raises:
        FlashpointError: a dtype that numpy has no name for, or names that make no tree.
    """
    manifest, rank = selection.view.manifest, selection.view.rank
    leaves: dict[Path, Any] = {}
    for item in selection.items:
        if dtype_of(item.dtype).numpy is None:
            raise FlashpointError(f"{item.name[:200]!r} has dtype {item.dtype}, which Orbax does not know")
        leaves[_below(selection.path(item), selection.prefix)] = _Tensor(selection, item)
    left_out = []
    sources = values_source(manifest, rank)
    for name in selection.left_out:
        stored = manifest.values_of(sources[name])[name] if name in sources else None
        value = None if stored is None else plain_value(stored)
        if stored is not None and type(value) in _NUMBERS:
            leaves[_below(stored.tree_path, selection.prefix)] = value
        else:
            left_out.append(name)
    registry = type_handlers.create_type_handler_registry(
        (_Tensor, _Tensors(advance)),
        (jax.Array, type_handlers.ArrayHandler()),  # there is none, but Orbax warns where nobody takes them
        (int, _Numbers()),
        (float, _Numbers()),
    )
    tree = _tree(leaves)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
    except BaseException:
        shutil.rmtree(f"{path}{TEMPORARY}", ignore_errors=True)
        raise
    return left_out


def _below(path: Path, prefix: str) -> Path:
    """The way to a leaf from below the prefix of its name."""
    for count in range(len(path)):
        names = [str(part[0]) if isinstance(part, tuple) else str(part) for part in path[:count]]
        if "".join(f"{name}." for name in names) == prefix.replace("/", "."):
            return path[count:]
    return (".".join(map(str, path)).removeprefix(prefix),)


def _tree(leaves: dict[Path, Any]) -> dict[Any, Any]:
    """Nested mappings; a list's index is a key like others, as in a state dict."""
    tree: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        keys = [str(part[0]) if isinstance(part, tuple) else str(part) for part in path]
        place = tree
        for key in keys[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise FlashpointError(
                    f"{'.'.join(keys)[:200]!r} lies below another leaf: a tree cannot hold both"
                )
        if keys[-1] in place:
            raise FlashpointError(f"{'.'.join(keys)[:200]!r} is the name of two leaves")
        place[keys[-1]] = leaf
    return tree
