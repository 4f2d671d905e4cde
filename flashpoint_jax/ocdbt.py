"""OCDBT, TensorStore's key-value database in files: a writer whose values lie in files of others, and a reader.

A database is ``manifest.ocdbt`` and the files that it names. Flashpoint writes one more, with all nodes; the
values are byte ranges of a version's objects. Names are relative to the folder, so nodes change with the
layout only, not from version to version.

Pure: the writer returns bytes, the reader asks a function of yours for them.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np

from flashpoint_jax import ocdbt_wire as wire
from flashpoint_jax.errors import OcdbtError
from flashpoint_jax.ocdbt_nodes import (
    INLINE_BYTES_MAX,
    InteriorNode,
    LeafNode,
    Manifest,
    NodeReference,
    Reference,
    Statistics,
    Value,
    Version,
    VersionsReference,
    decode_manifest,
    decode_node,
    decode_version_node,
    encode_interior,
    encode_leaf,
    encode_manifest,
)
from flashpoint_jax.ocdbt_wire import BODY_BYTES_MAX, NAME_BYTES_MAX, File

__all__ = ["MANIFEST_NAME", "Nodes", "Reader", "Reference", "Value", "encode_nodes", "manifest_of"]

MANIFEST_NAME: Final = "manifest.ocdbt"
# A stock reader without a cache decodes a whole leaf for each key: 0.2 ms with this size, 5 ms with Orbax's.
NODE_BYTES: Final = 128 << 10
KEYS_MAX: Final = 64_000_000  # that one walk through a tree gives: nodes that share children have no end
_ROW_BYTES_MAX: Final = 24  # of a leaf for one key, beside its suffix and inline value
_CHILD_BYTES_MAX: Final = 64

Fetch = Callable[[str, int, int | None], bytes]
"""``fetch(path, offset, length)``: bytes of a file below the database's folder; all of it for None."""


class Nodes(NamedTuple):
    """A B+tree: ``data`` is the contents of the file ``name``; ``root`` is None for an empty tree."""

    name: str
    data: bytes
    root: NodeReference | None
    height: int


def encode_nodes(
    pairs: Mapping[bytes, Value] | Iterable[tuple[bytes, Value]], name: str, *, node_bytes: int = NODE_BYTES
) -> Nodes:
    """The tree over ``pairs``, as one file ``name`` beside the manifest.

    The same pairs in any order give the same bytes.

    Args:
        node_bytes: of a node, about; a single longer row has a node of its own.

    Raises:
        OcdbtError: a key is given twice or longer than 65,535 bytes, an inline value longer than 1 MiB, or
            a file is not below the folder.
    """
    rows = (
        sorted(dict(pairs).items()) if isinstance(pairs, Mapping) else sorted(pairs, key=lambda row: row[0])
    )
    keys = [key for key, _ in rows]
    values = [value for _, value in rows]
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    shared = wire.shared_prefixes(keys)
    if int(lengths.max(initial=0)) > NAME_BYTES_MAX:
        raise OcdbtError(f"a key has more than {NAME_BYTES_MAX} bytes: {max(keys, key=len)[:200]!r}")
    for i in np.flatnonzero(shared[1:] == lengths[1:]).tolist():
        if keys[i] == keys[i + 1]:
            raise OcdbtError(f"the key {keys[i][:200]!r} is given twice")
    inline = np.fromiter((len(v) if isinstance(v, bytes) else 0 for v in values), np.int64, len(values))
    file = File("", name)
    parts: list[bytes] = []
    position = 0

    def place(node: bytes, statistics: Statistics) -> NodeReference:
        nonlocal position
        parts.append(node)
        position += len(node)
        return NodeReference(file, position - len(node), len(node), statistics)

    level: list[tuple[bytes, NodeReference]] = []
    for begin, end in _cuts(lengths - shared.astype(np.int64) + inline + _ROW_BYTES_MAX, lengths, node_bytes):
        node, indirect = encode_leaf(keys[begin:end], shared[begin:end], values[begin:end])
        statistics = Statistics(end - begin, len(node), indirect)
        level.append((keys[begin], place(node, statistics)))
    height = 0
    while len(level) > 1:
        height += 1
        below, level = level, []
        firsts = np.fromiter((len(key) for key, _ in below), np.int64, len(below))
        for begin, end in _cuts(firsts + _CHILD_BYTES_MAX, firsts, node_bytes):
            children = [reference for _, reference in below[begin:end]]
            node = encode_interior(height, [key for key, _ in below[begin:end]], children)
            sums = map(sum, zip(*(child.statistics for child in children), strict=True))
            keys_below, tree_bytes, indirect = sums
            statistics = Statistics(keys_below, tree_bytes + len(node), indirect)
            level.append((below[begin][0], place(node, statistics)))
    return Nodes(name, b"".join(parts), level[0][1] if level else None, height)


def _cuts(
    sizes: np.ndarray[tuple[int], np.dtype[np.int64]],
    firsts: np.ndarray[tuple[int], np.dtype[np.int64]],
    node_bytes: int,
) -> Iterator[tuple[int, int]]:
    """(begin, end) of the rows of each node. ``firsts`` is a row's size more where it is its node's first."""
    ends = np.cumsum(sizes)
    begin, n = 0, len(sizes)
    while begin < n:
        before = int(ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends, before + node_bytes - int(firsts[begin]), "right"))
        end = min(max(end, begin + 2), n)  # two at least, or the levels above would not get fewer
        yield begin, end
        begin = end


def manifest_of(nodes: Nodes, uuid: bytes, *, generation: int = 1, commit_time_ns: int = 0) -> bytes:
    """The contents of `MANIFEST_NAME` for a database with these nodes.

    Args:
        uuid: 16 bytes that no other database has.
        generation: number of this state, from 1 on.
        commit_time_ns: since the Unix epoch, for people.
    """
    version = Version(generation, nodes.root, nodes.height, commit_time_ns)
    # A stock writer that changes the database takes these two as its own settings.
    return encode_manifest(
        uuid, version, max_inline_value_bytes=min(1024, INLINE_BYTES_MAX), max_decoded_node_bytes=NODE_BYTES
    )


class Reader:
    """A database that may come from anywhere, read through ``fetch``.

    Every method raises `OcdbtError` where a piece is garbled, and whatever ``fetch`` does. Values in files are
    not fetched, and OCDBT has no checksums for them.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self.manifest: Manifest = decode_manifest(fetch(MANIFEST_NAME, 0, None))

    @property
    def newest(self) -> Version:
        return self.manifest.versions[-1]

    def versions(self) -> Iterator[Version]:
        """Every version, the newest first."""
        yield from reversed(self.manifest.versions)
        waiting = list(self.manifest.older)  # the newest last
        before = self.manifest.versions[0].generation
        while waiting:
            reference = waiting.pop()
            if reference.generation >= before:  # what no tree of generations has; a loop would come by here
                raise OcdbtError("the index's generations do not decrease towards the older ones")
            rows = decode_version_node(self._bytes(reference), reference)
            for row in reversed(rows):
                if isinstance(row, Version):
                    before = row.generation
                    yield row
            waiting.extend(row for row in rows if not isinstance(row, Version))

    def items(self, prefix: bytes = b"", *, version: Version | None = None) -> Iterator[tuple[bytes, Value]]:
        """The keys that begin with ``prefix``, in order, with their values.

        Raises:
            OcdbtError: also if there are more than `KEYS_MAX`.
        """
        version = version or self.newest
        if version.root is None:
            return
        for n, row in enumerate(self._walk(version.root, version.height, b"", b"", None, prefix)):
            if n >= KEYS_MAX:
                raise OcdbtError(f"the index has more than {KEYS_MAX} keys")
            yield row

    def get(self, key: bytes, *, version: Version | None = None) -> Value | None:
        """The value of ``key``, or None; reads one node of each level."""
        version = version or self.newest
        found, height, implied, first = version.root, version.height, b"", b""
        while found is not None:
            node = self._load(found, height, implied, first, None)
            if isinstance(node, LeafNode):
                full = [implied + own for own in node.keys]
                i = bisect.bisect_left(full, key)
                return node.values[i] if i < len(full) and full[i] == key else None
            full = [implied + own for own in node.keys]
            i = bisect.bisect_right(full, key) - 1
            if i < 0:
                return None
            found, height, first = node.children[i], height - 1, full[i]
            implied = full[i][: len(implied) + node.prefixes[i]]
        return None

    def _walk(
        self,
        reference: NodeReference,
        height: int,
        implied: bytes,
        first: bytes,
        end: bytes | None,
        prefix: bytes,
    ) -> Iterator[tuple[bytes, Value]]:
        node = self._load(reference, height, implied, first, end)
        full = [implied + own for own in node.keys]
        if isinstance(node, LeafNode):
            for key, value in zip(full, node.values, strict=True):
                if key.startswith(prefix):
                    yield key, value
            return
        ends: list[bytes | None] = [*full[1:], end]
        for i, (child, before) in enumerate(zip(node.children, ends, strict=True)):
            # Nothing that begins with the prefix lies before it, or at or after what is above all of them.
            if (before is not None and before <= prefix) or (
                full[i] > prefix and not full[i].startswith(prefix)
            ):
                continue
            below = full[i][: len(implied) + node.prefixes[i]]
            yield from self._walk(child, height - 1, below, full[i], before, prefix)

    def _load(
        self, reference: NodeReference, height: int, implied: bytes, first: bytes, end: bytes | None
    ) -> LeafNode | InteriorNode:
        """A node, its keys within what the nodes above say: ``[first, end)``."""
        node = decode_node(self._bytes(reference), reference.file.base)
        own = node.height if isinstance(node, InteriorNode) else 0
        if own != height:
            raise OcdbtError(f"a node of the index has height {own}, its parent says {height}")
        if len(implied) + max(map(len, node.keys)) > NAME_BYTES_MAX:
            raise OcdbtError(f"a node of the index has a key of more than {NAME_BYTES_MAX} bytes")
        if implied + node.keys[0] < first or (end is not None and implied + node.keys[-1] >= end):
            raise OcdbtError("a node of the index has keys that its parent does not put there")
        return node

    def _bytes(self, reference: NodeReference | VersionsReference) -> bytes:
        path, offset, length = reference.file.path, reference.offset, reference.length
        if length > BODY_BYTES_MAX:
            raise OcdbtError(f"a node of the index would have {length} bytes")
        data = self._fetch(path, offset, length)
        if len(data) != length:
            raise OcdbtError(
                f"{path[:200]} has {len(data)} of the {length} bytes at {offset} that the index names"
            )
        return data
