"""Which entry lies at which byte of an object: computed from the plan, before a byte is written.

Pure. The same entries always give the same layout, so a layout's digest is its identity: a save
whose entries are those of the last one reuses its buffers and views, and a load that finds its own
digest in the manifest needs no further planning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Final

import msgspec
import xxhash

from flashpoint import safetensors_blob as blob
from flashpoint.dtypes import dtype_of
from flashpoint.errors import LayoutError

ENTRY_ALIGN_BYTES: Final = 64  # JAX and SIMD loads map 64-byte-aligned memory without a copy
PAGE_BYTES: Final = 4096
LARGE_ENTRY_BYTES: Final = 1 << 20  # from here on an entry begins on a page of its own
FILE_BYTES_MAX: Final = 2**63 - 1  # off_t
ENTRIES_MAX: Final = 4_000_000
NDIM_MAX: Final = 64
ARRAY_CODECS: Final = (
    "",
    "numpy",
)  # the second for an array that was numpy's, and no tensor of the framework

Path = tuple[str | int | tuple[int], ...]
"""The way to a value in a state's tree: a str is a mapping's key, an int a list's index, and an int in a
tuple of its own a mapping's key that is an int."""


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tensor shard, or one byte string, of an object.

    Attributes:
        name: the tensor's name in the state; the shards of one tensor share it.
        dtype: a name of `flashpoint.dtypes`.
        shape: of this shard, in elements.
        offsets: of this shard's first element in the global array; empty for the origin.
        global_shape: of the whole tensor; empty where this shard is the whole.
        path: the way to the value in the state's tree (`Path`); empty for ``(name,)``.
        codec: empty for an array, ``numpy`` for one that was numpy's; otherwise how the bytes encode a value (``torch``
            for torch.save).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...] = ()
    global_shape: tuple[int, ...] = ()
    path: Path = ()
    codec: str = ""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the global array that this entry is a part of."""
        return self.global_shape or self.shape

    @property
    def origin(self) -> tuple[int, ...]:
        """Index of this entry's first element in the global array."""
        return self.offsets or (0,) * len(self.shape)

    @property
    def tree_path(self) -> Path:
        return self.path or (self.name,)

    @property
    def is_array(self) -> bool:
        """Whether the bytes are an array's, and not those of a pickled object."""
        return self.codec in ARRAY_CODECS

    @property
    def is_whole(self) -> bool:
        return self.whole_shape == self.shape


class ObjectLayout(msgspec.Struct, frozen=True, dict=True):
    """The layout of one object, columns over its entries in the order they were given.

    Attributes:
        entries: what is stored.
        begins: byte offset of each entry from the start of the file.
        keys: the safetensors key of each entry: its name, made unique within the file.
        header_bytes: size of the safetensors header with its length prefix and padding.
        nbytes: exact size of the file; a multiple of the page size.
    """

    entries: tuple[Entry, ...]
    begins: tuple[int, ...]
    keys: tuple[str, ...]
    header_bytes: int
    nbytes: int

    @cached_property
    def encoded(self) -> bytes:
        """JSON of this layout: the line that the manifest carries."""
        return msgspec.json.encode(self)

    @cached_property
    def digest(self) -> str:
        """xxh3-128 of `encoded`, in hex: the layout's identity."""
        return xxhash.xxh3_128_hexdigest(self.encoded)

    @cached_property
    def header(self) -> bytes:
        """The safetensors header of the object, exactly `header_bytes` long."""
        return blob.encode_header(_tensors(self), self.header_bytes)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(begin, end) of the bytes after the header that belong to no entry: the pads."""
        found, position = [], self.header_bytes
        for begin, end in sorted(zip(self.begins, self.ends, strict=True)):
            if begin > position:
                found.append((position, begin))
            position = end
        if position < self.nbytes:
            found.append((position, self.nbytes))
        return tuple(found)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        return tuple(begin + entry.nbytes for begin, entry in zip(self.begins, self.entries, strict=True))


def plan_layout(
    entries: Iterable[Entry],
    *,
    header_bytes_max: int = blob.HEADER_BYTES_MAX,
    trailer_bytes: int = 0,
    tail_bytes: int = 0,
) -> ObjectLayout:
    """Lay out one object.

    Every entry begins on a multiple of 64 bytes, one of 1 MiB or more on a page. Entries whose size
    has the most trailing zero bits go first, so that nearly all of them fall on their alignment
    without a pad: a pad is one more key in the header.

    Args:
        trailer_bytes: pad behind every entry, for what another index keeps there (a chunk's checksum).
        tail_bytes: pad behind the last entry, at least: an index's last chunk may be longer than its shard.

    Raises:
        LayoutError: an entry's dtype, shape or offsets are not sound, or two are the same shard.
    """
    entries = tuple(entries)
    if len(entries) > ENTRIES_MAX:
        raise LayoutError(f"{len(entries)} entries are too many for one object (at most {ENTRIES_MAX})")
    for entry in entries:
        _check_types(entry)
    sizes = list(map(_check, entries))
    order = sorted(range(len(entries)), key=lambda i: -_trailing(sizes[i]))
    begins = [0] * len(entries)
    position = 0
    for i in order:
        align = PAGE_BYTES if sizes[i] >= LARGE_ENTRY_BYTES else ENTRY_ALIGN_BYTES
        position = -(-position // align) * align
        begins[i] = position
        position += sizes[i] + trailer_bytes
    data_bytes = -(-(position + tail_bytes) // PAGE_BYTES) * PAGE_BYTES
    keys = _unique_keys(entries)
    relative = ObjectLayout(entries, tuple(begins), keys, 0, data_bytes)
    header_bytes = blob.padded_header_bytes(_tensors(relative), PAGE_BYTES)
    if header_bytes > header_bytes_max:
        raise LayoutError(
            f"the header of {len(entries)} entries needs {header_bytes} bytes, over {header_bytes_max}"
        )
    absolute = tuple(begin + header_bytes for begin in begins)
    return ObjectLayout(entries, absolute, keys, header_bytes, header_bytes + data_bytes)


def decode_layout(data: bytes) -> ObjectLayout:
    """The layout of a manifest's line, every field checked: it may come from anywhere.

    Raises:
        LayoutError: the line is not a layout, or one whose entries overlap or leave the object.
    """
    try:
        layout = msgspec.json.decode(data, type=ObjectLayout)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LayoutError(f"not an object layout: {error}") from None
    n = len(layout.entries)
    if n > ENTRIES_MAX or len(layout.begins) != n or len(set(layout.keys)) != n or len(layout.keys) != n:
        raise LayoutError(
            f"not an object layout: columns of {n}, {len(layout.begins)} and {len(layout.keys)} rows"
        )
    if layout.nbytes > FILE_BYTES_MAX:
        raise LayoutError(f"not an object layout: {layout.nbytes} bytes are larger than any file")
    sizes = map(_check, layout.entries)
    spans = sorted((begin, begin + size) for begin, size in zip(layout.begins, sizes, strict=True))
    position = layout.header_bytes
    for begin, end in spans:
        if begin < position:
            raise LayoutError("not an object layout: entries overlap each other or the header")
        position = end
    if layout.header_bytes < blob.LENGTH_BYTES or position > layout.nbytes:
        raise LayoutError("not an object layout: entries reach beyond the object's end")
    return layout


def _check_types(entry: Entry) -> None:
    """Refuse what would be written as something else, or not be read back; a decoder lets none of it pass."""
    if not _INT.issuperset(map(type, (*entry.shape, *entry.offsets, *entry.global_shape))):
        raise _wrong(entry, f"a size is no plain int in {entry.shape!r}, {entry.offsets!r}")
    keys = [part[0] if type(part) is tuple and len(part) == 1 else part for part in entry.path]
    if not (type(entry.name) is type(entry.codec) is str and _KEY.issuperset(map(type, keys))):
        raise _wrong(entry, f"its name or path {entry.path!r} has a part that is no plain str")
    if keys or entry.codec or not entry.name.isascii():
        try:
            "".join((entry.name, entry.codec, *(key for key in keys if isinstance(key, str)))).encode()
        except UnicodeEncodeError:
            raise _wrong(entry, "a name with a lone surrogate has no UTF-8 form") from None


def _check(entry: Entry) -> int:
    """Size of the entry in bytes, after checking that its numbers make sense.

    Every plan and every first open check thousands: words are only made for what is wrong.
    """
    shape, offsets, whole = entry.shape, entry.offsets, entry.global_shape
    ndim = len(shape)
    if ndim > NDIM_MAX:
        raise _wrong(entry, f"it has {ndim} dimensions, more than {NDIM_MAX}")
    if ndim and min(shape) < 0:
        raise _wrong(entry, f"a size is negative in shape {shape}")
    if offsets or whole:
        for field, value in (("offsets", offsets), ("global_shape", whole)):
            if value and len(value) != ndim:
                raise _wrong(entry, f"it has shape {shape} but {field} {value} of another length")
        for start, size, end in zip(offsets or (0,) * ndim, shape, whole or shape, strict=True):
            if start < 0 or start + size > end:
                raise _wrong(
                    entry,
                    f"the shard at {entry.origin} of shape {shape} leaves the tensor of shape "
                    f"{entry.whole_shape}",
                )
    itemsize = dtype_of(entry.dtype).itemsize
    nbytes = math.prod(shape) * itemsize
    # Not even an empty tensor may have dimensions that no array library can multiply.
    if (nbytes or math.prod(filter(None, shape)) * itemsize) > FILE_BYTES_MAX:
        raise _wrong(entry, f"the shape {shape} is larger than any file")
    return nbytes


_INT: Final = frozenset((int,))
_KEY: Final = frozenset((str, int))


def _wrong(entry: Entry, what: str) -> LayoutError:
    return LayoutError(f"entry {str(entry.name)[:200]!r}: {what}")


def _trailing(nbytes: int) -> int:
    """Largest power of two, at most a page, that divides the size; 0 counts as a page."""
    return min(nbytes & -nbytes, PAGE_BYTES) if nbytes else PAGE_BYTES


def _unique_keys(entries: Sequence[Entry]) -> tuple[str, ...]:
    """A safetensors key for each entry: its name, or the name with its offsets where that is taken."""
    taken = {"__metadata__"}  # reserved by the format
    shards = set()
    keys = []
    for entry in entries:
        shard = (entry.name, entry.origin)
        if shard in shards:
            raise LayoutError(f"entry {entry.name[:200]!r} at {entry.origin} is given twice")
        shards.add(shard)
        key = entry.name
        if key in taken or key.startswith(blob.PAD_PREFIX):
            key = f"{entry.name}@{','.join(map(str, entry.origin))}"
            while key in taken:  # by another entry's name
                key += "@"
        taken.add(key)
        keys.append(key)
    return tuple(keys)


def _tensors(layout: ObjectLayout) -> list[blob.Tensor]:
    """The layout as safetensors sees it: codes and byte ranges within the data section."""
    tensors = []
    rows = zip(layout.entries, layout.begins, layout.keys, strict=True)
    for entry, begin, key in rows:
        dtype = dtype_of(entry.dtype)
        shape, offsets = entry.shape, entry.origin
        if dtype.code is None:
            shape, offsets = (*shape, dtype.itemsize), (*offsets, 0)
        begin -= layout.header_bytes
        tensors.append(blob.Tensor(key, dtype.code or "U8", shape, begin, begin + entry.nbytes, offsets))
    return blob.fill_gaps(tensors, layout.nbytes - layout.header_bytes)
