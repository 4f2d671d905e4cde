"""Orbax's type handlers over our blobs: what reads a leaf, once Orbax has worked out which and as what.

Orbax's restore matches trees, fills in arguments, applies transforms, and at its end asks a type handler for all leaves
of one type. Ours answer from the blobs; for an item that a stock handler wrote they are the stock ones.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.metadata import sharding as sharding_metadata
from orbax.checkpoint._src.metadata import value as value_metadata
from orbax.checkpoint._src.serialization import types as orbax_types

from flashpoint.view import CheckpointView
from flashpoint_jax.restore import Stored, Target, restore_arrays, stored
from flashpoint_jax.sidecars import read_key_impls, read_shardings


class OpenFolders:
    """The folders that a handler is reading now, each with its version opened."""

    def __init__(self) -> None:
        self._views: dict[str, tuple[CheckpointView, int]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def open(self, folder: str, opener: Callable[[], CheckpointView]) -> Iterator[CheckpointView]:
        """Have a folder open. One that is open already, by a caller further up, is not opened twice."""
        with self._lock:
            view, uses = self._views.get(folder, (None, 0))
        if view is None:
            view = opener()
        with self._lock:
            self._views[folder] = view, uses + 1
        try:
            yield view
        finally:
            with self._lock:
                self._views[folder] = view, uses
                if not uses:
                    del self._views[folder]
            if not uses:
                view.close()

    def view_of(self, info: Any) -> CheckpointView | None:
        with self._lock:
            return self._views.get(str(info.parent_dir), (None, 0))[0]


class BlobRegistry:
    """A registry of type handlers in which the stock ones for arrays and scalars read blobs too.

    Whatever else is registered, by Orbax or the user, is given out as it is.
    """

    def __init__(self, stock: Any, folders: OpenFolders, *, threads: int) -> None:
        self.stock = stock
        self._folders = folders
        self._threads = threads
        self._ours: dict[int, Any] = {}

    def get(self, ty: Any) -> Any:
        handler = self.stock.get(ty)
        ours = _OURS.get(type(handler))
        if ours is None:
            return handler
        if id(handler) not in self._ours:
            self._ours[id(handler)] = ours(handler, self._folders, self._threads)
        return self._ours[id(handler)]

    def has(self, ty: Any) -> bool:
        return bool(self.stock.has(ty))

    def add(self, *args: Any, **kwargs: Any) -> None:
        self.stock.add(*args, **kwargs)


class _Blobs:
    """What our handlers share: they are the stock one in all but reading, and look like it too."""

    def __init__(self, stock: Any, folders: OpenFolders, threads: int) -> None:
        self.__dict__.update(stock.__dict__)
        self._stock = stock
        self._folders = folders
        self._threads = threads

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Any]:
        view = self._folders.view_of(infos[0])
        if view is None:
            return await self._stock.deserialize(infos, args)  # type: ignore[no-any-return]
        return self.read(view, infos, args)

    def read(self, view: CheckpointView, infos: Sequence[Any], args: Sequence[Any] | None) -> Sequence[Any]:
        """What `deserialize` gives, from an opened version; of ``infos`` name and parent_dir are looked at."""
        raise NotImplementedError


class BlobArrays(_Blobs, type_handlers.ArrayHandler):
    """`jax.Array`, random keys among them."""

    def read(self, view: CheckpointView, infos: Sequence[Any], args: Sequence[Any] | None) -> Sequence[Any]:
        if args is None:
            raise ValueError("Must provide ArrayRestoreArgs to restore as jax.Array.")
        orbax_types.check_input_arguments(infos, args)
        folder = str(infos[0].parent_dir)
        impls = read_key_impls(folder)
        shardings: dict[str, str] | None = None
        targets = []
        for info, arg in zip(infos, args, strict=True):
            sharding = _sharding_of(arg)
            if sharding is None:
                if shardings is None:
                    shardings = read_shardings(folder)
                if info.name not in shardings:
                    raise ValueError(
                        "Sharding of jax.Array cannot be None. Provide `mesh` and `mesh_axes` OR `sharding` "
                        f"({info.name})"
                    )
                sharding = _saved_sharding(shardings[info.name])
            targets.append(_target(info.name, arg, sharding))
        found = restore_arrays(view, targets, threads=self._threads)
        return [
            jax.random.wrap_key_data(array, impl=impls[info.name]) if info.name in impls else array
            for info, array in zip(infos, found, strict=True)
        ]

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        view = self._folders.view_of(infos[0])
        if view is None:
            return await self._stock.metadata(infos)  # type: ignore[no-any-return]
        texts = read_shardings(str(infos[0].parent_dir))
        parsed: dict[str, Any] = {}
        found = []
        for info in infos:
            text = texts.get(info.name)
            if text is not None and text not in parsed:
                parsed[text] = sharding_metadata.from_serialized_string(text)
            found.append(_array_metadata(view, info, None if text is None else parsed[text]))
        return found


class BlobNumpy(_Blobs, type_handlers.NumpyHandler):
    """numpy arrays."""

    def read(self, view: CheckpointView, infos: Sequence[Any], args: Sequence[Any] | None) -> Sequence[Any]:
        return _numpy(view, infos, args, self._threads)

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        view = self._folders.view_of(infos[0])
        if view is None:
            return await self._stock.metadata(infos)  # type: ignore[no-any-return]
        return [_array_metadata(view, info, None) for info in infos]


class BlobScalars(_Blobs, type_handlers.ScalarHandler):
    """Python's numbers, and numpy's."""

    def read(self, view: CheckpointView, infos: Sequence[Any], args: Sequence[Any] | None) -> Sequence[Any]:
        found = []
        for n, array in enumerate(_numpy(view, infos, args, 1)):
            if array.ndim:
                raise ValueError("Restored result is not a scalar.")
            kind = args[n].restore_type if args else None
            found.append(kind(array.item()) if kind else array.item())
        return found

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        view = self._folders.view_of(infos[0])
        if view is None:
            return await self._stock.metadata(infos)  # type: ignore[no-any-return]
        return [
            value_metadata.ScalarMetadata(
                name=info.name, directory=info.parent_dir, dtype=_jax_dtype(stored(view, info.name).dtype)
            )
            for info in infos
        ]


_OURS: dict[type, type[Any]] = {
    type_handlers.ArrayHandler: BlobArrays,
    type_handlers.NumpyHandler: BlobNumpy,
    type_handlers.ScalarHandler: BlobScalars,
}


def can_store(handler: Any) -> bool:
    """Whether a handler's leaves can be stored in blobs."""
    return isinstance(handler, _Blobs)


def _numpy(view: CheckpointView, infos: Sequence[Any], args: Sequence[Any] | None, threads: int) -> list[Any]:
    dtypes = [None] * len(infos) if args is None else [arg.dtype for arg in args]
    targets = [Target(info.name, dtype=dtype) for info, dtype in zip(infos, dtypes, strict=True)]
    return restore_arrays(view, targets, threads=threads)


def _sharding_of(arg: Any) -> Any:
    """The sharding (or format) that restore arguments give, or None."""
    if getattr(arg, "mesh", None) is not None and arg.mesh_axes is not None:
        return jax.sharding.NamedSharding(arg.mesh, arg.mesh_axes)
    sharding = getattr(arg, "sharding", None)
    if isinstance(sharding, sharding_metadata.ShardingMetadata):
        return sharding.to_jax_sharding()
    return sharding


@functools.lru_cache(maxsize=1024)
def _saved_sharding(text: str) -> Any:
    """The sharding that an array was saved with; devices that are no more are an error in Orbax's words."""
    return sharding_metadata.from_serialized_string(text).to_jax_sharding()


def target_of(name: str, leaf: Any) -> Target:
    """What a leaf of an abstract tree is restored as."""
    sharding = _sharding_of(leaf)
    if sharding is None:
        return Target(name)
    return _target(name, SimpleNamespace(global_shape=leaf.shape, dtype=leaf.dtype), sharding)


def _target(name: str, arg: Any, sharding: Any) -> Target:
    layout = None
    if isinstance(sharding, Format):
        sharding, layout = sharding.sharding, sharding.layout
    if not isinstance(sharding, jax.sharding.Sharding):
        raise ValueError(f"{name}: a concrete jax.sharding.Sharding is needed to restore it, not {sharding}")
    shape, dtype = getattr(arg, "global_shape", None), arg.dtype
    if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        # A random key is stored as numbers, with more dimensions than it has.
        numbers = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape or (), dtype))
        if shape is not None and isinstance(sharding, jax.sharding.NamedSharding):
            more = [None] * (len(numbers.shape) - len(shape))
            spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec)), *more]
            sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec))
        shape, dtype = (None if shape is None else numbers.shape), None
    return Target(
        name,
        sharding,
        layout,
        None if shape is None else tuple(shape),
        None if dtype is None else np.dtype(dtype),
        getattr(arg, "strict", True),
    )


def _array_metadata(view: CheckpointView, info: Any, sharding: Any) -> Any:
    known = stored(view, info.name)
    return value_metadata.ArrayMetadata(
        name=info.name,
        directory=info.parent_dir,
        shape=known.shape,
        dtype=_jax_dtype(known.dtype),
        sharding=sharding,
        storage=value_metadata.StorageMetadata(
            chunk_shape=known.chunk_shape,
            write_shape=info.write_shape,
            zarr_metadata=_zarr_metadata(known, is_v3=bool(info.use_zarr3)),
        ),
    )


def _zarr_metadata(known: Stored, *, is_v3: bool) -> Any:
    if is_v3:
        return value_metadata.Zarr3Metadata(
            shape=known.shape,
            dtype=known.dtype.name,
            chunk_shape=known.chunk_shape,
            compression=None,
            inner_chunk_shape=None,
        )
    return value_metadata.Zarr2Metadata(
        shape=known.shape,
        dtype=known.dtype.str if known.dtype.isbuiltin == 1 else known.dtype.name,
        chunk_shape=known.chunk_shape,
        compression=None,
        order="C",
        dimension_separator=".",
    )


def _jax_dtype(dtype: np.dtype[Any]) -> Any:
    return jax.numpy.dtype(dtype)
