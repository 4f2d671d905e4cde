"""What of a pytree one process stores, and the test that tells that nothing about this has changed.

Planning is local to a process. A `StatePlan` is made once and reused as long as it `matches`: same tree, same types,
shapes, dtypes and shardings. The test runs over whole lists at C speed, since thousands of arrays must not
cost a Python statement each.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter, methodcaller
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from flashpoint.boxes import Box
from flashpoint.dtypes import DTYPES
from flashpoint.errors import FlashpointError
from flashpoint.gc_pause import gc_paused
from flashpoint.layout import Entry, ObjectLayout, plan_layout

JAX: Final = "jax.Array"
NUMPY: Final = "np.ndarray"
SCALAR: Final = "scalar"
NUMPY_CODEC: Final = "numpy"  # an array that was a numpy array

_shapes = attrgetter("shape")
_dtypes = attrgetter("dtype")
_shardings = attrgetter("sharding")
_is_deleted = methodcaller("is_deleted")


@dataclass(frozen=True)
class Writers:
    """Who writes what.

    Attributes:
        rank: of this process.
        per_host: whether each process has a folder of its own. It then stores one replica of all that it
            has; else one replica is stored among all processes.
    """

    rank: int = 0
    per_host: bool = False


class Source(NamedTuple):
    """Where an entry's bytes come from.

    Attributes:
        leaf: its number.
        shard: of a `jax.Array`, which of its addressable shards; else None.
        is_direct: whether the shard's own bytes are stored (no cast, no random key), and lie in the host's memory.
    """

    leaf: int
    shard: int | None
    is_direct: bool = False


@dataclass(frozen=True)
class ArrayInfo:
    """What Orbax's own files say of a `jax.Array`, as it is stored: a random key by its numbers.

    Attributes:
        shard_shape: of what one device holds.
        key_impl: of a typed random key, else empty.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    shard_shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    key_impl: str = ""


@dataclass
class StatePlan:
    """The plan of one pytree on one process.

    Attributes:
        layout: of the object that this process writes; without entries where others write all.
        sources: of the layout's entries, in their order.
        kinds: of each leaf: `JAX`, `NUMPY`, `SCALAR`, or empty for what goes the stock way.
        names: of each leaf, as Orbax names it.
        casts: dtype that each leaf is stored as, None for its own; empty where all have their own.
        arrays: every `jax.Array`, whoever stores it.
    """

    treedef: Any
    kinds: list[str]
    names: list[str]
    casts: Sequence[Any]
    layout: ObjectLayout
    sources: list[Source]
    arrays: list[ArrayInfo]
    remembered: dict[str, Any] = field(default_factory=dict)
    _traits: tuple[Any, ...] = ()

    @property
    def sources_anywhere(self) -> bool:
        """Whether any process stores anything in a blob."""
        return any(self.kinds)

    def match(self, leaves: Sequence[Any], treedef: Any, casts: Sequence[Any]) -> bool:
        """Whether this is the plan of these leaves too."""
        return (
            treedef == self.treedef
            and list(casts) == list(self.casts)
            and _traits_of(leaves, self.kinds) == self._traits
        )


@gc_paused()
def plan_state(item: Any, casts: Sequence[Any], writers: Writers, *, trailer_bytes: int = 0) -> StatePlan:
    """Plan a pytree.

    Args:
        casts: the dtype to store each leaf as, None for its own; may be empty.
        trailer_bytes: room behind every shard (see `plan_layout`).

    Raises:
        ValueError: an array that no checkpoint can hold, in Orbax's own words.
        LayoutError: two leaves have one name.
    """
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(item)
    paths = [path_of(keys) for keys, _ in with_paths]
    leaves = [leaf for _, leaf in with_paths]
    names = [".".join(path) for path in paths]
    kinds = [kind_of(leaf) for leaf in leaves]
    entries: list[Entry] = []
    sources: list[Source] = []
    arrays: list[ArrayInfo] = []
    for i, (name, path, leaf, kind) in enumerate(zip(names, paths, leaves, kinds, strict=True)):
        cast = casts[i] if casts else None
        tree_path = path if path != (name,) else ()
        if kind == JAX:
            info = _array_info(name, leaf, cast)
            arrays.append(info)
            is_direct = _is_direct(info, leaf)
            for box, shard in stored_shards(info, writers):
                entries.append(_entry(info, box, tree_path))
                sources.append(Source(i, shard, is_direct))
        elif kind and (writers.rank == 0 or writers.per_host):
            # Every process has its own, and they ought to be equal; Orbax takes the first one's, and so do we.
            host = host_array(leaf, cast)
            codec = NUMPY_CODEC if kind == NUMPY else ""
            entries.append(Entry(name, host.dtype.name, host.shape, path=tree_path, codec=codec))
            sources.append(Source(i, None))
    return StatePlan(
        treedef=treedef,
        kinds=kinds,
        names=names,
        casts=casts,
        layout=plan_layout(entries, trailer_bytes=trailer_bytes),
        sources=sources,
        arrays=arrays,
        _traits=_traits_of(leaves, kinds),
    )


def kind_of(leaf: Any) -> str:
    """`JAX`, `NUMPY` or `SCALAR`; empty for what is stored the stock way, or refused there."""
    if isinstance(leaf, jax.Array):
        return JAX
    if isinstance(leaf, np.ndarray):
        known = leaf.dtype.name in DTYPES and leaf.dtype.isnative and leaf.size
        return NUMPY if known else ""
    if isinstance(leaf, (bool, int, float, np.number)):
        known = np.asarray(leaf).dtype.name in DTYPES
        return SCALAR if known else ""
    return ""


def host_array(leaf: Any, cast: Any) -> np.ndarray[Any, Any]:
    """A numpy array or scalar as it is stored."""
    host = np.asarray(leaf)
    return host if cast is None else host.astype(cast)


def stored_array(leaf: jax.Array, cast: Any) -> jax.Array:
    """A `jax.Array` as it is stored: a random key as its numbers, cast where that is asked for."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf if cast is None or leaf.dtype == cast else leaf.astype(cast)


def stored_shards(info: ArrayInfo, writers: Writers) -> list[tuple[Box, int]]:
    """The shards of an array that this process stores: the box of each, and its number among the addressable.

    All processes agree without talking: which of a shard's replicas is stored is told by the array's name, so
    that the work is spread.
    """
    addressable = {device: n for n, device in enumerate(_addressable(info.sharding))}
    digits = zlib.crc32(info.name.encode(errors="surrogatepass"))
    found = []
    for number, (box, devices) in enumerate(replicas(info.sharding, info.shape).items()):
        if writers.per_host:
            devices = [device for device in devices if device in addressable]
            if not devices:
                continue
        chosen = devices[(digits + number) % len(devices)]
        if chosen in addressable:
            found.append((box, addressable[chosen]))
    return found


def replicas(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> dict[Box, list[jax.Device]]:
    """The boxes that a sharding cuts an array into, each with the devices that hold it, alike everywhere."""
    found: dict[Box, list[jax.Device]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        found.setdefault(box_of(index, shape), []).append(device)
    return found


def box_of(index: Sequence[slice], shape: tuple[int, ...]) -> Box:
    """The box of a tuple of slices."""
    spans = [cut.indices(n) for cut, n in zip(index, shape, strict=True)]
    return Box(tuple(span[0] for span in spans), tuple(span[1] - span[0] for span in spans))


def _addressable(sharding: jax.sharding.Sharding) -> list[jax.Device]:
    """This process's devices in the order of ``Array.addressable_data``."""
    return list(sharding._addressable_device_assignment)


def _array_info(name: str, leaf: jax.Array, cast: Any) -> ArrayInfo:
    if leaf.is_deleted():
        raise FlashpointError(f"{name[:200]!r} was deleted or donated: save it before it is given away")
    if leaf.size == 0:
        raise ValueError(f"Cannot save arrays with zero size: {name}")
    if jax.process_count() > 1 and leaf.is_fully_addressable:
        raise ValueError(
            f"Cannot serialize host local jax.Array {name!r} (shape={leaf.shape}, dtype={leaf.dtype}, "
            f"sharding={leaf.sharding}) in multi-host setting: make it a global array, as with "
            "jax.experimental.multihost_utils.host_local_array_to_global_array"
        )
    impl = ""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        impl = str(jax.random.key_impl(leaf))
        leaf = jax.random.key_data(leaf)
        cast = None
    dtype = np.dtype(leaf.dtype if cast is None else cast).name
    if dtype not in DTYPES:
        raise ValueError(f"{name!r} has dtype {dtype}, which cannot be stored")
    sharding = leaf.sharding
    return ArrayInfo(name, leaf.shape, dtype, sharding.shard_shape(leaf.shape), sharding, impl)


def _is_direct(info: ArrayInfo, leaf: jax.Array) -> bool:
    """Whether an array is stored as it is, from the memory of the host."""
    if info.key_impl or info.dtype != leaf.dtype.name:
        return False
    return all(device.platform == "cpu" for device in _addressable(info.sharding))


def _entry(info: ArrayInfo, box: Box, path: tuple[str, ...]) -> Entry:
    if box.shape == info.shape:
        return Entry(info.name, info.dtype, box.shape, path=path)
    return Entry(info.name, info.dtype, box.shape, box.start, info.shape, path)


def path_of(keys: Sequence[Any]) -> tuple[str, ...]:
    """The way through a tree, as Orbax names its steps; joined by dots, the name of the leaf."""
    return tuple(str(_key_name(key)) for key in keys)


def _key_name(key: Any) -> Any:
    """What Orbax calls a step of the way through a tree."""
    for attribute in ("key", "idx", "name"):  # DictKey and FlattenedIndexKey, SequenceKey, GetAttrKey
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key


def _traits_of(leaves: Sequence[Any], kinds: Sequence[str]) -> tuple[Any, ...]:
    arrays = _of_kind(JAX, leaves, kinds)
    hosts = _of_kind(NUMPY, leaves, kinds)
    scalars = [np.asarray(leaf).dtype for leaf in _of_kind(SCALAR, leaves, kinds)]
    try:
        return (
            list(map(type, leaves)),
            list(map(_shapes, arrays)),
            list(map(_dtypes, arrays)),
            list(map(_shardings, arrays)),
            list(map(_shapes, hosts)),
            list(map(_dtypes, hosts)),
            scalars,
        )
    except AttributeError:  # a leaf has become another kind of thing
        return ()


def _of_kind(wanted: str, leaves: Sequence[Any], kinds: Sequence[str]) -> list[Any]:
    return [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind == wanted]


class PlanCache:
    """The last plan of a state, remade when anything about the state changes.

    Args:
        trailer_bytes: room behind every shard.
    """

    def __init__(self, *, trailer_bytes: int = 0) -> None:
        self._last: StatePlan | None = None
        self._trailer_bytes = trailer_bytes

    def plan(self, item: Any, casts: Sequence[Any], writers: Writers) -> tuple[StatePlan, list[Any]]:
        """The plan of ``item`` and its leaves."""
        leaves, treedef = jax.tree_util.tree_flatten(item)
        if self._last is None or not (
            len(leaves) == len(self._last.kinds) and self._last.match(leaves, treedef, casts)
        ):
            self._last = plan_state(item, casts, writers, trailer_bytes=self._trailer_bytes)
        elif any(map(_is_deleted, _of_kind(JAX, leaves, self._last.kinds))):
            plan_state(item, casts, writers)  # says which
        return self._last, leaves
