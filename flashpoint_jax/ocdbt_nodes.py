"""The pieces of an OCDBT database as typed data: its manifest, B+tree nodes and version-tree nodes.

Format: https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format; the manifest also has one
byte after the uuid for its kind (0: this one file holds it), which that page leaves out.

Pure: bytes in, typed data out, and back. Everything is checked that `flashpoint_jax.ocdbt` relies on.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from flashpoint_jax import ocdbt_wire as wire
from flashpoint_jax.errors import OcdbtError
from flashpoint_jax.ocdbt_wire import NAME_BYTES_MAX, U64_MAX, Cursor, File, U64s

MANIFEST_MAGIC: Final = 0x0CDB3A2A
NODE_MAGIC: Final = 0x0CDB20DE
VERSION_NODE_MAGIC: Final = 0x0CDB1234
ARITY_MAX: Final = 1 << 20
INLINE_BYTES_MAX: Final = 1 << 20
VERSION_ARITY_LOG2: Final = 4  # the default of stock writers; their longest is 16
VERSION_ARITY_LOG2_MAX: Final = 16
UUID_BYTES: Final = 16


class Reference(NamedTuple):
    """A value that lies in a file: its path below the database's folder, where it begins, its size in bytes."""

    file: str
    offset: int
    length: int


Value = bytes | Reference
"""A key's value: its bytes, or where they lie."""


class Statistics(NamedTuple):
    """Of all that is below a node: keys, bytes of its nodes and its own, bytes of the values in files."""

    keys: int
    tree_bytes: int
    indirect_bytes: int


class NodeReference(NamedTuple):
    """Where a node lies. An empty tree's root is ``None`` instead."""

    file: File
    offset: int
    length: int
    statistics: Statistics


class LeafNode(NamedTuple):
    """``keys`` strictly increase; they lack the prefix that the nodes above imply."""

    keys: list[bytes]
    values: list[Value]


class InteriorNode(NamedTuple):
    """``keys[i]`` is the first below ``children[i]``, where its first ``prefixes[i]`` bytes are left out."""

    height: int
    keys: list[bytes]
    prefixes: list[int]
    children: list[NodeReference]


class Version(NamedTuple):
    """One state of the database.

    Attributes:
        generation: its number; the largest is the newest.
        root: of its tree, None if that is empty.
        height: of its root; a leaf has 0.
        commit_time_ns: since the Unix epoch, for people.
    """

    generation: int
    root: NodeReference | None
    height: int
    commit_time_ns: int


class VersionsReference(NamedTuple):
    """Where a version-tree node of ``height`` lies: its last version, how many there are."""

    file: File
    offset: int
    length: int
    generation: int
    generations: int
    height: int


class Manifest(NamedTuple):
    """A database's first file: its newest versions, the last being the newest, and where the older ones are."""

    uuid: bytes
    max_inline_value_bytes: int
    max_decoded_node_bytes: int
    version_arity_log2: int
    versions: list[Version]
    older: list[VersionsReference]


# ---- writing ------------------------------------------------------------------------------------


def encode_leaf(keys: Sequence[bytes], shared: U64s, values: Sequence[Value]) -> tuple[bytes, int]:
    """A leaf, and how many bytes its values have in files.

    Args:
        shared: `wire.shared_prefixes` of the keys; the first is not looked at.
    """
    kinds = bytes([isinstance(value, Reference) for value in values])
    references = [value for value in values if isinstance(value, Reference)]
    inline = [value for value in values if isinstance(value, bytes)]
    if any(len(value) > INLINE_BYTES_MAX for value in inline):
        raise OcdbtError(f"a value in the index has more than {INLINE_BYTES_MAX} bytes")
    files = sorted({reference.file for reference in references})
    index = {file: i for i, file in enumerate(files)}
    lengths = [value.length if isinstance(value, Reference) else len(value) for value in values]
    body = b"".join(
        (
            _node_head(0, files, keys, shared),
            _suffixes(keys, shared),
            wire.varints(lengths),
            kinds,
            wire.varints([index[reference.file] for reference in references]),
            wire.varints([reference.offset for reference in references]),
            *inline,
        )
    )
    return wire.seal(NODE_MAGIC, body), sum(reference.length for reference in references)


def encode_interior(height: int, keys: Sequence[bytes], children: Sequence[NodeReference]) -> bytes:
    """A node above others. Children's keys are written in full: the columns compress them as well."""
    shared = wire.shared_prefixes(keys)
    files = sorted({child.file.path for child in children})
    index = {file: i for i, file in enumerate(files)}
    body = b"".join(
        (
            _node_head(height, files, keys, shared),
            bytes(len(keys)),
            _suffixes(keys, shared),
            wire.varints([index[child.file.path] for child in children]),
            wire.varints([child.offset for child in children]),
            wire.varints([child.length for child in children]),
            *(wire.varints(column) for column in zip(*(child.statistics for child in children), strict=True)),
        )
    )
    return wire.seal(NODE_MAGIC, body)


def _node_head(height: int, files: Sequence[str], keys: Sequence[bytes], shared: U64s) -> bytes:
    suffixes = np.fromiter(map(len, keys), np.uint64, len(keys))
    suffixes[1:] -= shared[1:]
    return b"".join(
        (
            bytes([height]),
            wire.encode_files(files),
            wire.varints([len(keys)]),
            wire.varints(shared[1:]),
            wire.varints(suffixes),
        )
    )


def _suffixes(keys: Sequence[bytes], shared: U64s) -> bytes:
    rest = zip(keys[1:], shared[1:].tolist(), strict=True)
    return keys[0] + b"".join([key[prefix:] for key, prefix in rest])


def encode_manifest(
    uuid: bytes, version: Version, *, max_inline_value_bytes: int, max_decoded_node_bytes: int
) -> bytes:
    """The manifest of a database that has one version."""
    if len(uuid) != UUID_BYTES or not 1 <= version.generation <= U64_MAX:
        raise ValueError("a database has a uuid of 16 bytes and a first generation of at least 1")
    config = (uuid, b"\0", wire.varints([max_inline_value_bytes, max_decoded_node_bytes]))
    if version.root is None:
        files, places, statistics = b"\1\0\0", (0, U64_MAX, U64_MAX), Statistics(0, 0, 0)
    else:
        files = wire.encode_files([version.root.file.path])
        places, statistics = (0, version.root.offset, version.root.length), version.root.statistics
    row = (
        wire.varints([1]),
        wire.varints([version.generation]),
        bytes([version.height]),
        *(wire.varints([number]) for number in (*places, *statistics)),
        version.commit_time_ns.to_bytes(8, "little"),
    )
    compression, older = b"\0", b"\0"  # none, none
    body = b"".join((*config, bytes([VERSION_ARITY_LOG2]), compression, files, *row, older))
    return wire.seal(MANIFEST_MAGIC, body)


# ---- reading ------------------------------------------------------------------------------------


def decode_manifest(data: bytes) -> Manifest:
    """The manifest of a database.

    Raises:
        OcdbtError: it is garbled, or one that only names other manifests (kind 1).
    """
    cursor = wire.unseal(MANIFEST_MAGIC, data, "the index's manifest")
    uuid, kind = cursor.take(UUID_BYTES), cursor.byte()
    if kind != 0:
        raise OcdbtError(f"the index's manifest is of kind {kind}: only single ones can be read")
    inline_bytes, node_bytes = cursor.varint(), cursor.varint()
    arity_log2 = _version_arity(cursor)
    compression = cursor.varint()  # of what would be written; each node says how it was
    if compression > 1:
        raise cursor.wrong(f"compression {compression} is unknown")
    cursor.take(4 * compression)  # zstd's level
    files = wire.decode_files(cursor, "")
    versions = _versions(cursor, files, arity_log2)
    older = _version_references(cursor, files, 64 // arity_log2)
    if any(reference.height == 0 for reference in older):
        raise cursor.wrong("a node of older versions has no height")
    for a, b in itertools.pairwise([*(reference.generation for reference in older), versions[0].generation]):
        if a >= b:
            raise cursor.wrong("its generations do not increase")
    cursor.end()
    return Manifest(uuid, inline_bytes, node_bytes, arity_log2, versions, older)


def decode_version_node(data: bytes, reference: VersionsReference) -> list[Version] | list[VersionsReference]:
    """A node of the version tree: versions if it is a leaf, else further nodes."""
    cursor = wire.unseal(VERSION_NODE_MAGIC, data, "a node of the index's version tree")
    arity_log2, height = _version_arity(cursor), cursor.byte()
    if height != reference.height:
        raise cursor.wrong(f"it has height {height}, its parent says {reference.height}")
    files = wire.decode_files(cursor, reference.file.base)
    found: list[Version] | list[VersionsReference]
    if height == 0:
        found = _versions(cursor, files, arity_log2)
    else:
        found = _version_references(cursor, files, 1 << arity_log2, height - 1)
    if not found or found[-1].generation != reference.generation:
        raise cursor.wrong("it does not end with the generation that its parent says")
    cursor.end()
    return found


def decode_node(data: bytes, base: str = "") -> LeafNode | InteriorNode:
    """A node of the B+tree; ``base`` is that of the file in which it lies."""
    cursor = wire.unseal(NODE_MAGIC, data, "a node of the index")
    height = cursor.byte()
    files = wire.decode_files(cursor, base)
    n = cursor.count(ARITY_MAX)
    if n == 0:
        raise cursor.wrong("it has no keys")
    shared = np.concatenate((np.zeros(1, np.uint64), cursor.varints(n - 1, NAME_BYTES_MAX)))
    suffixes = cursor.varints(n, NAME_BYTES_MAX)
    prefixes = cursor.varints(n, NAME_BYTES_MAX).tolist() if height else []
    first = True

    def check(key: bytes, before: bytes) -> None:
        nonlocal first
        if key <= before and not first:
            raise cursor.wrong("its keys do not increase")
        first = False

    keys = cursor.names(shared, suffixes, check)
    if height == 0:
        values = _values(cursor, files, n)
        cursor.end()
        return LeafNode(keys, values)
    if any(prefix > len(key) for prefix, key in zip(prefixes, keys, strict=True)):
        raise cursor.wrong("the prefix of a child is longer than its first key")
    children = _references(cursor, files, n)
    cursor.end()
    if any(child is None for child in children):
        raise cursor.wrong("a child lies nowhere")
    return InteriorNode(height, keys, prefixes, [child for child in children if child is not None])


def _values(cursor: Cursor, files: list[File], n: int) -> list[Value]:
    lengths = cursor.varints(n).tolist()
    kinds = cursor.take(n)
    if max(kinds) > 1:
        raise cursor.wrong("a value is neither inline nor in a file")
    indirect = sum(kinds)
    file_ids = cursor.varints(indirect).tolist()
    offsets = cursor.varints(indirect).tolist()
    places = zip(file_ids, offsets, strict=True)
    values: list[Value] = []
    for kind, length in zip(kinds, lengths, strict=True):
        if kind:
            file, offset = next(places)
            values.append(Reference(*_place(cursor, files, file, offset, length)))
        elif length > INLINE_BYTES_MAX:
            raise cursor.wrong(f"an inline value has {length} bytes")
        else:
            values.append(cursor.take(length))
    return values


def _place(cursor: Cursor, files: list[File], file: int, offset: int, length: int) -> tuple[str, int, int]:
    if file >= len(files) or not files[file].path:
        raise cursor.wrong(f"it names file {file} of {len(files)}")
    if offset + length > U64_MAX:
        raise cursor.wrong(f"{length} bytes at {offset} lie beyond the end of any file")
    return files[file].path, offset, length


def _references(
    cursor: Cursor, files: list[File], n: int, *, may_be_empty: bool = False
) -> list[NodeReference | None]:
    columns = [cursor.varints(n).tolist() for _ in range(6)]
    found: list[NodeReference | None] = []
    for file, offset, length, *statistics in zip(*columns, strict=True):
        if may_be_empty and offset == length == U64_MAX:
            if any(statistics):
                raise cursor.wrong("an empty tree has contents")
            found.append(None)
            continue
        _place(cursor, files, file, offset, length)
        found.append(NodeReference(files[file], offset, length, Statistics(*statistics)))
    return found


def _version_arity(cursor: Cursor) -> int:
    arity_log2 = cursor.byte()
    if not 1 <= arity_log2 <= VERSION_ARITY_LOG2_MAX:
        raise cursor.wrong(f"its version tree has arity 2**{arity_log2}")
    return arity_log2


def _generations(cursor: Cursor, limit: int) -> list[int]:
    n = cursor.count(limit)
    generations: list[int] = cursor.varints(n).tolist()
    if any(a >= b for a, b in itertools.pairwise([0, *generations])):
        raise cursor.wrong("its generations do not increase")
    return generations


def _versions(cursor: Cursor, files: list[File], arity_log2: int) -> list[Version]:
    generations = _generations(cursor, 1 << arity_log2)
    if not generations:
        raise cursor.wrong("it has no version")
    heights = cursor.take(len(generations))
    roots = _references(cursor, files, len(generations), may_be_empty=True)
    if any(root is None and height for root, height in zip(roots, heights, strict=True)):
        raise cursor.wrong("an empty tree has a height")
    return [
        Version(generation, root, height, cursor.u64())
        for generation, root, height in zip(generations, roots, heights, strict=True)
    ]


def _version_references(
    cursor: Cursor, files: list[File], limit: int, height: int | None = None
) -> list[VersionsReference]:
    """References to version-tree nodes, all of ``height``; in the manifest each says its own."""
    generations = _generations(cursor, limit)
    n = len(generations)
    columns = [cursor.varints(n).tolist() for _ in range(4)]
    for _ in range(n):
        cursor.u64()  # the earliest commit below
    heights = [height] * n if height is not None else list(cursor.take(n))
    found = []
    for generation, own, file, offset, length, count in zip(generations, heights, *columns, strict=True):
        _place(cursor, files, file, offset, length)
        found.append(VersionsReference(files[file], offset, length, generation, count, own))
    return found
