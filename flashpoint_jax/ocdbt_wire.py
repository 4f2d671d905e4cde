"""The smallest parts of OCDBT: the envelope around every stored piece, columns of varints, tables of files.

Format: https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format. An envelope is the magic
(u32, big-endian), the length of the whole (u64, little-endian), version 0 and the compression (varints: 0
none, 1 zstd), the body, and the crc32c (u32, little-endian) of all before it.

Pure: bytes in, bytes out. A reader allocates nothing that the bytes it was given, or a limit here, do not bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import google_crc32c
import numpy as np

from flashpoint_jax.errors import OcdbtError

ENVELOPE_BYTES: Final = 18  # around an uncompressed body
NAME_BYTES_MAX: Final = 65_535  # of a key, and of a file's path
BODY_BYTES_MAX: Final = 1 << 30  # of a decompressed body; Orbax asks for nodes of 100 MB
NAMES_BYTES_MAX: Final = (
    1 << 28
)  # of one column's names written out: each may repeat all of the one before it
U64_MAX: Final = 2**64 - 1

_ZSTD_STEP_BYTES: Final = 1 << 20
_MAGIC_AND_LENGTH: Final = 12
_CRC_BYTES: Final = 4
_VARINT_BYTES_MAX: Final = 10

U64s = np.ndarray[Any, np.dtype[np.uint64]]


class File(NamedTuple):
    """A data file, relative to the database's folder: ``base + relative``.

    ``base`` goes before the path of every file that a node in this file names.
    """

    base: str
    relative: str

    @property
    def path(self) -> str:
        return self.base + self.relative


# ---- envelope -----------------------------------------------------------------------------------


def seal(magic: int, body: bytes) -> bytes:
    """The envelope around ``body``, uncompressed."""
    head = magic.to_bytes(4, "big") + (len(body) + ENVELOPE_BYTES).to_bytes(8, "little") + b"\0\0"
    crc = google_crc32c.extend(google_crc32c.value(head), body)
    return b"".join((head, body, crc.to_bytes(_CRC_BYTES, "little")))


def unseal(magic: int, data: bytes, what: str) -> Cursor:
    """The body inside an envelope, its checksum compared before a byte is believed.

    Raises:
        OcdbtError: torn, garbled, of another kind or version, or compressed in a way that cannot be read.
    """
    if len(data) < ENVELOPE_BYTES:
        raise OcdbtError(f"{what} is torn: {len(data)} bytes")
    if data[:4] != magic.to_bytes(4, "big"):
        raise OcdbtError(f"{what} does not begin with {magic:#010x} but with {data[:4].hex()}")
    length = int.from_bytes(data[4:_MAGIC_AND_LENGTH], "little")
    if length != len(data):
        raise OcdbtError(f"{what} says that it has {length} bytes, but it has {len(data)}")
    crc = int.from_bytes(data[-_CRC_BYTES:], "little")
    if google_crc32c.value(data[:-_CRC_BYTES]) != crc:
        raise OcdbtError(f"{what} is corrupt: its crc32c does not match")
    cursor = Cursor(data[:-_CRC_BYTES], _MAGIC_AND_LENGTH, what)
    version, compression = cursor.varint(), cursor.varint()
    if version != 0:
        raise OcdbtError(f"{what} has version {version}, this release reads version 0")
    if compression == 0:
        return cursor
    if compression != 1:
        raise OcdbtError(f"{what} is compressed in an unknown way ({compression})")
    return Cursor(_zstd(cursor.take(cursor.left), what), 0, what)


def _zstd(data: bytes, what: str) -> bytes:
    try:
        import zstandard  # Flashpoint compresses nothing: only databases of others need it
    except ImportError:
        raise OcdbtError(
            f"{what} is compressed with zstd: install the package zstandard to read it"
        ) from None
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(data) as reader:
            body = bytearray()
            while part := reader.read(
                _ZSTD_STEP_BYTES
            ):  # in steps: what is asked for at once is allocated at once
                body += part
                if len(body) > BODY_BYTES_MAX:
                    raise OcdbtError(f"{what} has more than {BODY_BYTES_MAX} bytes when decompressed")
    except zstandard.ZstdError as error:
        raise OcdbtError(f"{what} is not what zstd wrote: {error}") from None
    return bytes(body)


# ---- reading ------------------------------------------------------------------------------------


class Cursor:
    """A position in bytes that were not written by us; every step forward is checked."""

    def __init__(self, data: bytes, position: int, what: str) -> None:
        self.what = what
        self._data = data
        self._position = position

    @property
    def left(self) -> int:
        """Bytes not yet read."""
        return len(self._data) - self._position

    def take(self, nbytes: int) -> bytes:
        if nbytes > self.left:
            raise self.wrong(f"it ends {nbytes - self.left} bytes too early")
        begin = self._position
        self._position += nbytes
        return self._data[begin : self._position]

    def byte(self) -> int:
        return self.take(1)[0]

    def u64(self) -> int:
        """A fixed 8 bytes, little-endian."""
        return int.from_bytes(self.take(8), "little")

    def varint(self) -> int:
        return int(self.varints(1)[0])

    def count(self, limit: int) -> int:
        """How many rows follow, each of which has at least one byte: no more than there are bytes."""
        n = self.varint()
        if n > limit or n > self.left:
            raise self.wrong(f"it has {n} rows in {self.left} bytes, at most {limit} are allowed")
        return n

    def varints(self, n: int, limit: int = U64_MAX) -> U64s:
        """A column of ``n`` varints, none above ``limit``."""
        if n > self.left:
            raise self.wrong(f"a column of {n} numbers does not fit into {self.left} bytes")
        window = np.frombuffer(
            self._data, np.uint8, min(self.left, n * _VARINT_BYTES_MAX), offset=self._position
        )
        ends = np.flatnonzero(window < 0x80)[:n] + 1
        if len(ends) < n:
            raise self.wrong("a column of numbers is cut off, or has one of more than 64 bits")
        if n == 0:
            return np.zeros(0, np.uint64)
        begins = np.concatenate(([0], ends[:-1]))
        widths = ends - begins
        widest = int(widths.max())
        last = window[begins[widths == _VARINT_BYTES_MAX] + _VARINT_BYTES_MAX - 1]
        if widest > _VARINT_BYTES_MAX or (last > 1).any():
            raise self.wrong("a number has more than 64 bits")
        values = (window[begins] & 0x7F).astype(np.uint64)
        for k in range(1, widest):
            longer = widths > k
            values[longer] |= (window[begins[longer] + k] & 0x7F).astype(np.uint64) << np.uint64(7 * k)
        if limit < U64_MAX and int(values.max()) > limit:
            raise self.wrong(f"the number {int(values.max())} is above {limit}")
        self._position += int(ends[-1])
        return values

    def names(self, prefixes: U64s, suffixes: U64s, check: Callable[[bytes, bytes], None]) -> list[bytes]:
        """Names that each share a prefix with the one before: the lengths in columns, the suffixes here.

        ``check`` is called with each name and the one before it.
        """
        lengths = prefixes + suffixes  # both are at most NAME_BYTES_MAX
        if int(lengths.sum()) > NAMES_BYTES_MAX or int(lengths.max(initial=0)) > NAME_BYTES_MAX:
            raise self.wrong("its names are too long")
        found, before = [], b""
        for prefix, suffix in zip(prefixes.tolist(), suffixes.tolist(), strict=True):
            if prefix > len(before):
                raise self.wrong("a name shares more with the one before it than that has")
            name = before[:prefix] + self.take(suffix)
            check(name, before)
            found.append(name)
            before = name
        return found

    def end(self) -> None:
        """Raise if anything is left: no byte is without a meaning."""
        if self.left:
            raise self.wrong(f"{self.left} bytes are left over")

    def wrong(self, why: str) -> OcdbtError:
        return OcdbtError(f"{self.what} is garbled: {why}")


# ---- columns ------------------------------------------------------------------------------------


def varints(values: Sequence[int] | U64s) -> bytes:
    """A column of varints: 7 bits a byte, the lowest first, the high bit set where more follow."""
    column = np.asarray(values, np.uint64)
    largest = int(column.max(initial=0))
    if largest < 0x80:
        return column.astype(np.uint8).tobytes()
    width = -(-largest.bit_length() // 7)
    digits = np.empty((len(column), width), np.uint8)
    longer = np.ones((len(column), width), np.bool_)
    for k in range(width):
        rest = column >> np.uint64(7 * k)
        digits[:, k] = rest & np.uint64(0x7F)
        if k:
            longer[:, k] = rest > 0
    digits[:, :-1][longer[:, 1:]] |= 0x80
    return digits[longer].tobytes()


def shared_prefixes(names: Sequence[bytes]) -> U64s:
    """For each name the length of the prefix that it shares with the one before it; 0 for the first."""
    found = np.zeros(len(names), np.uint64)
    # Whole blocks at numpy's speed, unless a long name would make a block's rectangle a large one.
    block = 4096
    for first in range(1, len(names), block):
        rows = names[first - 1 : first + block]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        width = int(lengths.max())
        if width * len(rows) > 16 << 20:
            found[first : first + len(rows) - 1] = [_shared(a, b) for a, b in itertools.pairwise(rows)]
            continue
        text = np.zeros((len(rows), width + 1), np.uint8)
        text[:, :width] = np.array(rows, f"S{max(width, 1)}").view(np.uint8).reshape(len(rows), -1)[:, :width]
        differ = text[1:] != text[:-1]
        differ[:, width] = True  # equal as far as they go; a NUL at an end is not told from the padding
        shortest = np.minimum(lengths[1:], lengths[:-1])
        found[first : first + len(rows) - 1] = np.minimum(differ.argmax(axis=1), shortest)
    return found


def _shared(a: bytes, b: bytes) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# ---- tables of files ----------------------------------------------------------------------------


def encode_files(paths: Sequence[str]) -> bytes:
    """The table of data files that a node names by their index; no file has a base path of its own.

    Raises:
        OcdbtError: a path is empty, too long, absolute, or leaves the folder.
    """
    names = []
    for path in paths:
        check_path(path, "the database")
        names.append(path.encode())
    if not names:
        return b"\0"
    prefixes = shared_prefixes(names)
    lengths = np.fromiter(map(len, names), np.uint64, len(names))
    suffixes = b"".join(name[p:] for name, p in zip(names, prefixes.tolist(), strict=True))
    columns = (varints([len(names)]), varints(prefixes[1:]), varints(lengths - prefixes), bytes(len(names)))
    return b"".join((*columns, suffixes))


def decode_files(cursor: Cursor, base: str) -> list[File]:
    """A table of data files; ``base`` is that of the file in which it stands."""
    n = cursor.count(U64_MAX)
    prefixes = np.concatenate((np.zeros(min(n, 1), np.uint64), cursor.varints(max(n - 1, 0), NAME_BYTES_MAX)))
    suffixes = cursor.varints(n, NAME_BYTES_MAX)
    base_lengths = cursor.varints(n, NAME_BYTES_MAX).tolist()
    before = 0
    for prefix, length in zip(prefixes.tolist(), base_lengths, strict=True):
        if prefix > min(before, length) and before != length:
            raise cursor.wrong("a shared prefix reaches beyond the base path of one file only")
        before = length
    found = []
    names = cursor.names(prefixes, suffixes, lambda name, before: None)
    for name, length in zip(names, base_lengths, strict=True):
        if length > len(name) or len(base) + len(name) > NAME_BYTES_MAX:
            raise cursor.wrong("a base path is longer than its path, or a path too long")
        try:
            file = File(base + name[:length].decode(), name[length:].decode())
        except UnicodeDecodeError:
            raise cursor.wrong(f"the path {name[:200]!r} is not UTF-8") from None
        if file.path:  # what has no place of its own, an empty tree's root, names the file ""
            check_path(file.path, cursor.what)
        found.append(file)
    return found


def check_path(path: str, what: str) -> None:
    """Refuse a data file that is not simply below the database's folder."""
    parts = path.split("/")
    if "\0" in path or not {"", ".", ".."}.isdisjoint(parts) or len(path.encode()) > NAME_BYTES_MAX:
        raise OcdbtError(
            f"{what} names the data file {path[:200]!r}: it must be a plain path below its folder"
        )
