"""The second index over a version's objects: zarr arrays in an OCDBT database whose chunks are byte ranges.

`index_files` gives two files for the version's folder. With them stock TensorStore and stock Orbax read the
arrays where they lie, with nothing of Flashpoint installed:

- ``manifest.ocdbt``, small, of its own in every version;
- ``nodes-<32 hex digits>.ocdbt``, named by what it was made from, so equal for versions with equal layouts.

Keys: https://zarr-specs.readthedocs.io (v2: ``a.b/.zarray``, chunks ``a.b/0.1``, of a scalar ``a.b/0``; v3:
``a.b/zarr.json``, ``a.b/c/0/1``, of a scalar ``a.b/c``). Both formats can lie over the same bytes.

A chunk is a range of a stored shard (`flashpoint_jax.chunk_grid`): an even sharding over any dimensions has one
chunk for each shard; where rows are dealt unevenly, a chunk is a few rows; where columns are, a part of one row.
A last chunk that the array's end cuts short takes the bytes behind it for its missing part (nobody looks at them),
if the file has that many. What would be cut into too many chunks is refused by name, and no key of it is there:
stock readers take zeros for a chunk that is missing.

Pure: layouts in, bytes out.
"""

from __future__ import annotations

import functools
import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import google_crc32c
import xxhash

from flashpoint.boxes import Box
from flashpoint.checksums import Bytes
from flashpoint.dtypes import dtype_of
from flashpoint.gc_pause import gc_paused
from flashpoint.layout import Entry, ObjectLayout
from flashpoint.manifest import Manifest
from flashpoint_jax import ocdbt
from flashpoint_jax.chunk_grid import Grid, GridError, grids
from flashpoint_jax.errors import NotIndexableError
from flashpoint_jax.ocdbt import MANIFEST_NAME, Nodes, Reference, Value

ZarrFormat = Literal[2, 3]

CRC_BYTES: Final = 4  # of zarr v3's codec crc32c, behind its chunk
_CRC_STEP_BYTES: Final = 1 << 20
_RULES: Final = "flashpoint zarr index 1"  # goes up with any change of the bytes that the same layouts give
_PLANS_CACHED_MAX: Final = 4

# What TensorStore has no data type for; as another type their bytes would be other values.
_UNKNOWN_TO_TENSORSTORE: Final = frozenset(("float8_e4m3", "uint4", "uint2", "complex32", "float4_e2m1fn_x2"))


class Source(NamedTuple):
    """One object: its file's path below the version's folder, and its layout."""

    file: str
    layout: ObjectLayout


class Index(NamedTuple):
    """The index of some layouts: its nodes, and the arrays that are not in it (name -> why)."""

    nodes: Nodes
    refused: dict[str, str]


class _Shard(NamedTuple):
    """One stored shard: where it begins, and how many bytes its file has from there on."""

    file: str
    begin: int
    room: int
    gap: int  # bytes behind it that belong to no entry; 0 unless they are asked for
    entry: Entry


def sources_of(manifest: Manifest) -> list[Source]:
    """The objects of a version, by rank: of equal shards, the lowest rank's is the one that is indexed."""
    records = sorted(manifest.objects, key=lambda record: (manifest.rank(record), record.id.index))
    return [Source(record.name, manifest.layout(record)) for record in records]


def uuid_of(manifest: Manifest) -> bytes:
    """The id of a version's database: no other version has this manifest's digest."""
    return bytes.fromhex(manifest.digest)


def index_files(
    sources: Iterable[Source],
    uuid: bytes,
    *,
    zarr_format: ZarrFormat = 2,
    checksums: bool = False,
    partial: bool = False,
    absent: Collection[str] = (),
    commit_time_ns: int = 0,
) -> dict[str, bytes]:
    """Name -> contents of the files to put beside the objects.

    Write the nodes first and `MANIFEST_NAME` last, each under a temporary name: a reader that finds the
    manifest then finds all.

    Args:
        sources: the version's objects (`sources_of`); of shards that several store, the first is taken.
        uuid: 16 bytes that no other version has (`uuid_of`).
        checksums: chunks have their crc32c behind them (`seal_checksums`); zarr v3 only.
        partial: leave out what cannot be indexed (`plan_index` tells it) instead of raising.
        absent: files of sources that will not be beside the index, on a node that has its own only: another copy
            is named, and chunks without one are errors for every reader, not zeros.
        commit_time_ns: since the Unix epoch, for people.

    Raises:
        NotIndexableError: naming the arrays that stock readers could not read, and why.
    """
    index = plan_index(sources, zarr_format=zarr_format, checksums=checksums, absent=absent)
    if index.refused and not partial:
        raise NotIndexableError(index.refused)
    manifest = ocdbt.manifest_of(index.nodes, uuid, commit_time_ns=commit_time_ns)
    nodes = {index.nodes.name: index.nodes.data} if index.nodes.data else {}
    return {**nodes, MANIFEST_NAME: manifest}


_plans: OrderedDict[str, Index] = OrderedDict()
_plans_lock = threading.Lock()


def plan_index(
    sources: Iterable[Source],
    *,
    zarr_format: ZarrFormat = 2,
    checksums: bool = False,
    absent: Collection[str] = (),
) -> Index:
    """The nodes over these objects. Remembered, since most versions have the layouts of the one before."""
    sources, absent = list(sources), frozenset(absent)
    made_from = [_RULES, str(zarr_format), str(checksums)]
    for file, layout in sources:
        made_from += (file, layout.digest, "absent" if file in absent else "")
    digest = xxhash.xxh3_128_hexdigest("\0".join(made_from).encode())
    with _plans_lock:
        if digest in _plans:
            _plans.move_to_end(digest)
            return _plans[digest]
    pairs, refused = zarr_pairs(sources, zarr_format=zarr_format, checksums=checksums, absent=absent)
    index = Index(ocdbt.encode_nodes(pairs, f"nodes-{digest}.ocdbt"), refused)
    with _plans_lock:
        _plans[digest] = index
        while len(_plans) > _PLANS_CACHED_MAX:
            _plans.popitem(last=False)
    return index


@gc_paused()
def zarr_pairs(
    sources: Iterable[Source],
    *,
    zarr_format: ZarrFormat = 2,
    checksums: bool = False,
    absent: Collection[str] = (),
) -> tuple[dict[bytes, Value], dict[str, str]]:
    """The database's keys with their values, and the arrays that are not among them (name -> why)."""
    if zarr_format not in (2, 3) or (checksums and zarr_format != 3):
        raise ValueError("zarr_format must be 2 or 3, and 3 where chunks have checksums")
    pairs: dict[bytes, Value] = {}
    refused: dict[str, str] = {}
    metadata, key_of = (_metadata_v2, _key_v2) if zarr_format == 2 else (_metadata_v3, _key_v3)
    metadata_key = b"/.zarray" if zarr_format == 2 else b"/zarr.json"
    # Most arrays look like some other: layers do.
    texts: dict[tuple[str, tuple[int, ...], tuple[int, ...]], bytes] = {}
    keys: dict[tuple[int, ...], bytes] = {}
    cut = functools.cache(_Grids)
    # Files that are there come first, so that their copies are the ones that are taken.
    sources = sorted(sources, key=lambda source: source.file in absent) if absent else sources
    for name, shards in _arrays(sources, with_gaps=checksums).items():
        try:
            _check(name, shards)
            dtype, shape = shards[0].entry.dtype, shards[0].entry.whole_shape
            chunk, ranges = _chunks(shape, shards, checksums, cut)
        except _RefusedError as error:
            refused[name] = str(error)
            continue
        look = (dtype, shape, chunk)
        if look not in texts:
            texts[look] = json.dumps(metadata(*look, checksums), separators=(",", ":")).encode()
        prefix = name.encode()
        pairs[prefix + metadata_key] = texts[look]
        for at, value in ranges:
            if at not in keys:
                keys[at] = key_of(at)
            # A chunk without a byte is refused by every reader; one without a key would be zeros to some.
            pairs[prefix + keys[at]] = b"" if value.file in absent else value
    return pairs, refused


def array_name(entry: Entry) -> str:
    """The name that Orbax gives an array: the parts of its way through the tree, joined by dots."""
    if not entry.path:
        return entry.name
    return ".".join(str(part[0] if isinstance(part, tuple) else part) for part in entry.path)


def seal_checksums(data: Bytes, layout: ObjectLayout) -> None:
    """Put the crc32c of every entry behind it, where zarr v3's codec ``crc32c`` looks for it.

    Args:
        data: the object's bytes, writable, complete but for these; seal the object (its digests) after this.
        layout: of `plan_layout(..., trailer_bytes=CRC_BYTES)`.
    """
    gaps = dict(layout.gaps)
    for begin, end in zip(layout.begins, layout.ends, strict=True):
        if end > begin:
            if gaps.get(end, end) < end + CRC_BYTES:
                raise ValueError(f"the layout has no {CRC_BYTES} bytes for a checksum behind every entry")
            crc = 0
            for start in range(begin, end, _CRC_STEP_BYTES):  # it takes bytes only, and lets nobody else run
                crc = google_crc32c.extend(crc, data[start : min(start + _CRC_STEP_BYTES, end)].tobytes())
            data[end : end + CRC_BYTES] = list(crc.to_bytes(CRC_BYTES, "little"))


class _RefusedError(Exception):
    """Why one array cannot be indexed."""


class _NoRoomError(_RefusedError):
    """The bytes behind a shard do not suffice for its last chunk; a finer grid may do."""


def _arrays(sources: Iterable[Source], *, with_gaps: bool) -> dict[str, list[_Shard]]:
    """Every array's shards in the order of the sources; pickled values are not arrays, and left out."""
    arrays: dict[str, list[_Shard]] = {}
    for file, layout in sources:
        gaps = dict(layout.gaps) if with_gaps else {}
        for entry, begin, end in zip(layout.entries, layout.begins, layout.ends, strict=True):
            if entry.codec not in ("", "numpy"):
                continue
            gap = gaps[end] - end if end in gaps else 0
            shard = _Shard(file, begin, layout.nbytes - begin, gap, entry)
            name = array_name(entry)
            if name in arrays:
                arrays[name].append(shard)
            else:
                arrays[name] = [shard]
    return arrays


def _check(name: str, shards: Sequence[_Shard]) -> None:
    first = shards[0].entry
    if first.dtype in _UNKNOWN_TO_TENSORSTORE:
        raise _RefusedError(f"TensorStore has no data type {first.dtype}")
    if not name:
        raise _RefusedError("its name is empty")
    for shard in shards[1:]:
        entry = shard.entry
        if entry.name != first.name or entry.path != first.path:
            raise _RefusedError(f"{first.tree_path} and {entry.tree_path} have the same name for Orbax")
        if entry.dtype != first.dtype or entry.whole_shape != first.whole_shape:
            raise _RefusedError("its shards differ in dtype or global shape")


# ---- chunks -------------------------------------------------------------------------------------

_Range = tuple[tuple[int, ...], Reference]  # a chunk: its index in the grid, its bytes
_Cut = Callable[[tuple[int, ...], tuple[Box, ...]], "_Grids"]


class _Grids:
    """The grids of one sharding, found as far as somebody asks; layers share theirs."""

    def __init__(self, shape: tuple[int, ...], boxes: tuple[Box, ...]) -> None:
        self._rest = grids(shape, boxes)
        self._found: list[Grid] = []
        self._error: GridError | None = None

    def __iter__(self) -> Iterator[Grid]:
        for i in itertools.count():
            if i == len(self._found):
                try:
                    if self._error is None:
                        self._found.append(next(self._rest))
                except StopIteration:
                    return
                except GridError as error:
                    self._error = error
                if self._error is not None:
                    raise self._error
            yield self._found[i]


def _chunks(
    shape: tuple[int, ...], shards: Sequence[_Shard], checksums: bool, cut: _Cut
) -> tuple[tuple[int, ...], list[_Range]]:
    """The shape of a chunk, and where each lies by its index in the grid."""
    if 0 in shape:
        return tuple(max(n, 1) for n in shape), []
    whole = next((shard for shard in shards if shard.entry.is_whole), None)
    if whole is not None:
        nbytes = whole.entry.nbytes
        return shape, [((0,) * len(shape), _range(whole, 0, nbytes, nbytes, checksums))]
    itemsize = dtype_of(shards[0].entry.dtype).itemsize
    boxes: dict[Box, _Shard] = {}
    for shard in shards:
        if 0 not in shard.entry.shape:
            boxes.setdefault(Box(shard.entry.origin, shard.entry.shape), shard)
    stored = list(boxes.values())
    reason: Exception | None = None
    try:
        for grid in cut(shape, tuple(boxes)):
            size = grid.size * itemsize
            try:
                return grid.shape, [
                    (at, _range(stored[box], begin * itemsize, size, count * itemsize, checksums))
                    for at, box, begin, count in grid.chunks
                ]
            except _NoRoomError as error:
                reason = reason or error
    except GridError as error:
        reason = reason or error
    raise _RefusedError(str(reason))  # of the coarsest


def _range(shard: _Shard, begin: int, nbytes: int, stored: int, checksums: bool) -> Reference:
    """A chunk of ``nbytes`` that begins ``begin`` bytes into a shard, which has ``stored`` of them."""
    if begin + nbytes > shard.room:
        raise _NoRoomError(
            f"its last chunk needs {begin + nbytes - shard.room} bytes more behind it than the file has: plan "
            "the layout with as many tail_bytes"
        )
    if checksums:
        if nbytes != shard.entry.nbytes or stored != nbytes or shard.gap < CRC_BYTES:
            raise _NoRoomError(
                f"a checksum needs {CRC_BYTES} bytes behind each chunk, and each chunk to be a whole shard: plan "
                f"the layout with trailer_bytes={CRC_BYTES}, and shard evenly"
            )
        nbytes += CRC_BYTES
    return Reference(shard.file, shard.begin + begin, nbytes)


# ---- keys and metadata --------------------------------------------------------------------------


def _key_v2(at: tuple[int, ...]) -> bytes:
    """What follows an array's name in the key of the chunk ``at`` an index of the grid."""
    return b"/" + (".".join(map(str, at)) or "0").encode()


def _key_v3(at: tuple[int, ...]) -> bytes:
    return "/".join(("", "c", *map(str, at))).encode()


def _metadata_v2(dtype: str, shape: Sequence[int], chunk: Sequence[int], checksums: bool) -> dict[str, Any]:
    known = dtype_of(dtype).numpy
    assert known is not None
    return {
        "chunks": chunk,
        "compressor": None,
        "dimension_separator": ".",
        # numpy's own code for its own types; TensorStore takes those of ml_dtypes by name.
        "dtype": known.str if known.isbuiltin == 1 else dtype,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": shape,
        "zarr_format": 2,
    }


def _metadata_v3(dtype: str, shape: Sequence[int], chunk: Sequence[int], checksums: bool) -> dict[str, Any]:
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if checksums:
        codecs.append({"name": "crc32c"})
    # Required, and never seen: no chunk is missing.
    fill: Any = False if dtype == "bool" else [0.0, 0.0] if dtype.startswith("complex") else 0
    return {
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": codecs,
        "data_type": dtype,
        "fill_value": fill,
        "node_type": "array",
        "shape": shape,
        "zarr_format": 3,
    }
