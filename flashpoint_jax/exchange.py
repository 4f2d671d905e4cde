"""`load`: a pytree filled from any container, above all from one that a PyTorch job wrote."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from flashpoint.boxes import untransposed
from flashpoint.config import FlashpointConfig
from flashpoint.dtypes import DTYPES, dtype_of
from flashpoint.errors import MismatchError
from flashpoint.gc_pause import gc_paused
from flashpoint.ids import CheckpointContainerId
from flashpoint.layout import Entry
from flashpoint.matching import (
    LeafName,
    Rename,
    Transpose,
    array_problem,
    axes_of,
    cast_problem,
    does_not_fit,
    lost_integers,
    lowest_rank_here,
    match_names,
)
from flashpoint.recovery import preferred_entries
from flashpoint.view import CheckpointView, open_container
from flashpoint_jax.restore import Target, places_of, restore_arrays
from flashpoint_jax.sidecars import read_key_impls

_KEY_IMPLS: Final = ("threefry2x32", "rbg", "unsafe_rbg")
_NUMBERS: Final = (bool, int, float, complex)


class _Leaf(NamedTuple):
    """A leaf that is an array, as it is stored: a random key by its numbers.

    Attributes:
        sharding: of the `jax.Array` to make; None for a numpy array.
        key_impl: of a typed random key, else empty.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: jax.sharding.Sharding | None
    key_impl: str = ""


def load(
    container: CheckpointContainerId | str | os.PathLike[str],
    abstract_state: Any,
    *,
    rename: Rename | None = None,
    transpose: Transpose | None = None,
    cast: bool = True,
    verify: bool = True,
) -> Any:
    """Fill a pytree from the entries of a container, whichever framework wrote it.

    Leaves are found by their names: the way through the tree, ``params/dense/kernel``, where a slash stands for the
    dots of a state dict, ``params.dense.kernel``. What the container holds beyond that is left alone. In a job of
    several processes each loads what its shardings need, by itself: the objects must lie on its node.

    Args:
        container: ``<job root>/step-<n>_ckpt``, or an Orbax item or step that Flashpoint wrote.
        abstract_state: a pytree of `jax.ShapeDtypeStruct` or arrays. Where a leaf has a sharding, the array gets it,
            however it was stored; else it is put on the default device. A numpy array stands for one, and a number
            for a number.
        rename: from a leaf's name to its entry's, a mapping or a function: ``{"params/w": "model.weight"}``.
        transpose: from a leaf's name to the axes by which its stored array is transposed, likewise:
            ``{"dense/kernel": (1, 0)}`` for a weight of `torch.nn.Linear`.
        cast: convert to the dtype that a leaf asks for; if not, another dtype is an error.
        verify: check every byte that is read against its digest.

    Returns:
        The tree, of memory of its own.

    Raises:
        MismatchError: leaves that are not there, or of another shape or kind; the message lists the first ten.
        CheckpointNotFoundError, ManifestError, CorruptObjectError: as `flashpoint.open`.
    """
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(abstract_state)
    leaves = [leaf for _, leaf in with_paths]
    names = [LeafName(_joined(path, "/"), _joined(path, ".")) for path, _ in with_paths]
    with gc_paused(), open_container(container, verify=verify) as view:
        view.rank = lowest_rank_here(view)  # not this process's: all shards of an array are one rank's copy
        return jax.tree.unflatten(treedef, _Loading(view, names, leaves, rename, transpose, cast).values())


class _Loading:
    """One load: first all that can be wrong, then the arrays, in one go."""

    def __init__(
        self,
        view: CheckpointView,
        names: Sequence[LeafName],
        leaves: Sequence[Any],
        rename: Rename | None,
        transpose: Transpose | None,
        cast: bool,
    ) -> None:
        self._view = view
        self._cast = cast
        self._found: list[Any] = [None] * len(leaves)
        self._targets: dict[int, Target] = {}  # by leaf
        self._impls: dict[int, str] = {}
        self._scalars: dict[int, type] = {}
        match = match_names(names, set(view), rename)
        axes, problems = axes_of(names, transpose)
        self._problems = [*match.problems, *problems]
        self._key_impls = read_key_impls(view.container.path)
        if not problems:
            for i, (name, leaf, stored) in enumerate(zip(names, leaves, match.names, strict=True)):
                if stored is not None and (problem := self._add(i, name.shown, leaf, stored, axes[i])):
                    self._problems.append(problem)
        if not self._problems:
            self._problems += lost_integers(view, self._casts(names))
        if self._problems:
            raise does_not_fit(f"step {view.manifest.step} ({view.container.path})", self._problems)

    def values(self) -> list[Any]:
        """The leaves, filled."""
        threads = FlashpointConfig.from_env().load_threads
        arrays = restore_arrays(self._view, list(self._targets.values()), threads=threads)
        for i, array in zip(self._targets, arrays, strict=True):
            if i in self._impls:
                array = jax.random.wrap_key_data(array, impl=self._impls[i])
            elif i in self._scalars:
                array = self._scalars[i](array[()])
            self._found[i] = array
        return self._found

    def _add(self, i: int, name: str, leaf: Any, stored: str, axes: tuple[int, ...]) -> str:
        """Take a leaf in; what is wrong with it, if anything."""
        entries = preferred_entries(self._view.manifest, stored, self._view.rank)
        if not entries:
            return self._add_value(i, name, leaf, self._view[stored])
        entry = self._view.entry(*entries[0])
        if isinstance(leaf, (*_NUMBERS, np.generic)):
            number = np.asarray(leaf).dtype
            dtype = entry.dtype if isinstance(leaf, _NUMBERS) else number.name
            problem = array_problem(name, entry, (), dtype, cast=self._cast) or cast_problem(
                name, entry.dtype, number.name
            )
            if not problem:
                self._scalars[i] = type(leaf)
                self._targets[i] = Target(stored, dtype=None if isinstance(leaf, _NUMBERS) else number)
            return problem
        if not _is_array(leaf):
            return f"{name[:200]!r}: an array there, {type(leaf).__name__} here"
        try:
            want = _as_stored(leaf)
        except MismatchError as error:
            return f"{name[:200]!r}: {error}"
        impl = self._key_impls.get(stored, want.key_impl) if want.key_impl else ""
        if impl != want.key_impl:
            return f"{name[:200]!r}: a random key of {impl} there, of {want.key_impl} here"
        if dtype_of(entry.dtype).numpy is None:
            return f"{name[:200]!r}: JAX has no dtype {entry.dtype}"
        cast = self._cast and not impl
        problem = array_problem(name, entry, want.shape, want.dtype.name, axes=axes, cast=cast)
        if not problem:
            self._targets[i] = Target(stored, want.sharding, None, want.shape, want.dtype, axes=axes)
            if impl:
                self._impls[i] = impl
        return problem

    def _add_value(self, i: int, name: str, leaf: Any, value: Any) -> str:
        """Take in a leaf whose entry is a plain value, which PyTorch's states have for numbers."""
        wrong = f"{name[:200]!r}: {type(value).__name__} there, {type(leaf).__name__} here"
        if not isinstance(value, (*_NUMBERS, np.generic, np.ndarray)):
            if type(value) is not type(leaf):
                return wrong
            self._found[i] = value
            return ""
        stored = np.asarray(value)
        if isinstance(leaf, (*_NUMBERS, np.generic)):
            if stored.ndim or cast_problem(name, stored.dtype.name, np.asarray(leaf).dtype.name):
                return wrong
            number = stored.item()
            self._found[i] = type(leaf)(number)
            return "" if self._found[i] == number or number != number else wrong
        if not _is_array(leaf):
            return wrong
        try:
            want = _as_stored(leaf)
        except MismatchError as error:
            return f"{name[:200]!r}: {error}"
        entry = Entry(name, stored.dtype.name, stored.shape)
        # A number of Python's has no dtype to keep.
        cast = self._cast or isinstance(value, _NUMBERS)
        problem = array_problem(name, entry, want.shape, want.dtype.name, cast=cast)
        if problem or want.key_impl:
            return problem or wrong
        host = stored.astype(want.dtype)
        if stored.dtype.kind in "iu" and want.dtype.kind in "iu" and not np.array_equal(host, stored):
            return f"{name[:200]!r}: holds values that {want.dtype} does not"
        # Where a process has no shard of it, the dtype would be unknown.
        self._found[i] = (
            host
            if want.sharding is None
            else jax.make_array_from_callback(
                want.shape, want.sharding, lambda index: host[index], dtype=want.dtype
            )
        )
        return ""

    def _casts(self, names: Sequence[LeafName]) -> list[tuple[str, Entry, str]]:
        """What this process reads of every array that another dtype is asked of."""
        found = []
        for i, target in self._targets.items():
            entry = self._view.entry(*preferred_entries(self._view.manifest, target.name, self._view.rank)[0])
            if target.dtype is None or target.dtype.name == entry.dtype:
                continue
            assert target.shape is not None or entry.whole_shape == ()
            for box in dict.fromkeys(places_of(target.sharding, target.shape or ()).boxes):
                there = untransposed(box, target.axes) if target.axes else box
                wanted = Entry(target.name, entry.dtype, there.shape, there.start, entry.whole_shape)
                found.append((names[i].shown, wanted, target.dtype.name))
        return found


def _joined(path: Any, separator: str) -> str:
    return str(jax.tree_util.keystr(path, simple=True, separator=separator))


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _as_stored(leaf: Any) -> _Leaf:
    """What an array leaf asks for.

    Raises:
        MismatchError: no array could be made so.
    """
    if isinstance(leaf, np.ndarray):
        return _Leaf(leaf.shape, _known(leaf.dtype), None)
    shape, sharding = tuple(leaf.shape), getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(_default_device())
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        raise MismatchError(f"a sharding over devices is needed, not {sharding}")
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _key_numbers(leaf, shape, sharding)
    try:
        sharding.shard_shape(shape)
    except ValueError as error:  # of a size that the mesh does not divide
        raise MismatchError(str(error)) from None
    dtype = _known(np.dtype(leaf.dtype))
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise MismatchError(f"{dtype} arrays need jax_enable_x64; without it, ask for a narrower dtype")
    return _Leaf(shape, dtype, sharding)


def _known(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.name not in DTYPES:
        raise MismatchError(f"dtype {dtype} is none that can be stored")
    return dtype


def _default_device() -> jax.Device:
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(device, jax.Device):
        return device
    return jax.local_devices(backend=device)[0]


def _key_numbers(leaf: Any, shape: tuple[int, ...], sharding: Any) -> _Leaf:
    """A random key is stored as numbers, with more dimensions than it has."""
    impl = next((one for one in _KEY_IMPLS if jax.random.key(0, impl=one).dtype == leaf.dtype), "")
    if not impl:
        raise MismatchError(f"random keys of {leaf.dtype} are not known")
    numbers = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, leaf.dtype))
    if isinstance(sharding, jax.sharding.NamedSharding):
        axes = [*sharding.spec, *[None] * (len(numbers.shape) - len(sharding.spec))]
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*axes))
    return _Leaf(numbers.shape, np.dtype(numbers.dtype), sharding, impl)
