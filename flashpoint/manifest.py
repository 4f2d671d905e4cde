"""The manifest: the file ``.metadata`` of a container, its commit record, and all that recovery trusts.

Three parts, each of whole lines of UTF-8, so ``head -1 .metadata | python -m json.tool`` shows it:

1. the *commit record*, one line of JSON: step, epoch, world, every object with its size and checksums;
2. the *sections* that the record lists by digest and size, one line each: object layouts and plain values;
3. the *trailer*: xxh3-128 of everything before it, in hex.

Sections are content-addressed: an unchanged layout is the same bytes in every version, and ranks with
equal values share one section. Pure: bytes in, typed data out. Nothing is believed before the trailer
matched, and nothing is allocated that the file's own size does not bound.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Final

import msgspec
import xxhash

from flashpoint import values as plain
from flashpoint.checksums import DIGEST_BYTES
from flashpoint.errors import LayoutError, ManifestError, ManifestVersionError
from flashpoint.gc_pause import gc_paused
from flashpoint.ids import RANK_MAX, CheckpointObjectId
from flashpoint.layout import Entry, ObjectLayout, Path, decode_layout

MANIFEST_NAME: Final = ".metadata"
FORMAT: Final = "flashpoint-manifest"
VERSION: Final = 1
MANIFEST_BYTES_MAX: Final = 2 << 30
OBJECTS_MAX: Final = 1_000_000
_LAYOUTS_CACHED_MAX: Final = 64
_TRAILER_BYTES: Final = 33  # 32 hex digits and a newline


class ObjectRecord(msgspec.Struct, frozen=True):
    """One object: its name, exact size, layout (by digest) and chunk digests (8 bytes each)."""

    name: str
    nbytes: int
    layout: str
    chunk_bytes: int
    chunks: bytes

    @property
    def id(self) -> CheckpointObjectId:
        return CheckpointObjectId.parse(self.name)


class Section(msgspec.Struct, frozen=True):
    """Where part 2 holds a line: ``digest`` is xxh3-128 of its bytes, ``nbytes`` excludes the newline."""

    digest: str
    nbytes: int


class Value(msgspec.Struct, frozen=True, omit_defaults=True):
    """One plain value of a rank's state; ``value`` as `flashpoint.values` writes it."""

    name: str
    value: Any = None
    path: Path = ()

    @property
    def tree_path(self) -> Path:
        return self.path or (self.name,)


class CommitRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Part 1 of the manifest.

    Attributes:
        step, epoch: of the version; a record of an older epoch never overrules a newer one.
        world_size: ranks that wrote it.
        writer: program and version, for people.
        created_unix_s: wall clock of the leader, for people: nothing is ever ordered by it.
        objects: every object of every rank.
        values: for each rank, the digest of the section with its plain values, or empty.
        sections: what part 2 holds, in order.
    """

    format: str
    version: int
    step: int
    epoch: int
    world_size: int
    writer: str = ""
    created_unix_s: float = 0.0
    objects: tuple[ObjectRecord, ...] = ()
    values: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()


class Manifest(msgspec.Struct, frozen=True, dict=True):
    """A decoded manifest: its commit record and its sections' lines by digest."""

    record: CommitRecord
    sections: Mapping[str, bytes]
    digest: str

    @property
    def step(self) -> int:
        return self.record.step

    @property
    def objects(self) -> tuple[ObjectRecord, ...]:
        return self.record.objects

    @property
    def nbytes(self) -> int:
        """Size of all objects together, in bytes."""
        return sum(record.nbytes for record in self.record.objects)

    def layout(self, record: ObjectRecord) -> ObjectLayout:
        layout = self._layouts.get(record.layout)
        if layout is None:
            layout = self._layouts[record.layout] = _layout_of(record.layout, self.sections[record.layout])
        return layout

    def rank(self, record: ObjectRecord) -> int:
        """The rank that wrote an object."""
        return self._ranks[record.name]

    @cached_property
    def _layouts(self) -> dict[str, ObjectLayout]:
        return {}

    @cached_property
    def _values(self) -> dict[str, dict[str, Value]]:
        return {}

    @cached_property
    def _ranks(self) -> dict[str, int]:
        return {record.name: record.id.rank for record in self.record.objects}

    @cached_property
    def by_name(self) -> dict[str, list[tuple[ObjectRecord, int]]]:
        """Entry name -> every (object, index of the entry in its layout) that holds a part of it."""
        found: dict[str, list[tuple[ObjectRecord, int]]] = {}
        for record in self.record.objects:
            for i, entry in enumerate(self.layout(record).entries):
                if entry.name in found:
                    found[entry.name].append((record, i))
                else:
                    found[entry.name] = [(record, i)]
        return found

    def entry(self, record: ObjectRecord, index: int) -> Entry:
        return self.layout(record).entries[index]

    def values_of(self, rank: int) -> dict[str, Value]:
        """The plain values that ``rank`` saved, by name."""
        digest = self.record.values[rank] if rank < len(self.record.values) else ""
        if not digest:
            return {}
        if digest not in self._values:
            self._values[digest] = {value.name: value for value in decode_values(self.sections[digest])}
        return self._values[digest]


def encode_values(values: Iterable[Value]) -> bytes:
    """The section that holds a rank's plain values.

    Raises:
        ManifestError: a name or value is not of JSON's own types: it could not be read back.
    """
    try:
        section = msgspec.json.encode(list(values))
    except (TypeError, ValueError) as error:
        raise ManifestError(f"a plain value cannot be written: {error}") from None
    decode_values(section)
    return section


def decode_values(data: bytes) -> list[Value]:
    try:
        return msgspec.json.decode(data, type=list[Value])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"a section of plain values is garbled: {error}") from None


def plain_value(value: Value) -> Any:
    """The Python value that was saved."""
    try:
        return plain.from_json(value.value)
    except (ValueError, TypeError) as error:
        raise ManifestError(f"the plain value {value.name[:200]!r} is garbled: {error}") from None


def section_digest(line: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(line)


def encode(record: CommitRecord, lines: Mapping[str, bytes]) -> bytes:
    """The manifest file of ``record``, whose ``sections`` are filled in here from ``lines``.

    ``lines`` holds every section the record's objects and values name, by digest.
    """
    wanted = dict.fromkeys(obj.layout for obj in record.objects)
    wanted.update(dict.fromkeys(digest for digest in record.values if digest))
    sections = tuple(Section(digest, len(lines[digest])) for digest in wanted)
    head = msgspec.json.encode(msgspec.structs.replace(record, sections=sections))
    body = b"".join((head, b"\n", *(part for digest in wanted for part in (lines[digest], b"\n"))))
    return body + xxhash.xxh3_128_hexdigest(body).encode() + b"\n"


@gc_paused()
def decode(data: bytes) -> Manifest:
    """Decode a manifest file, checking every byte of it.

    Raises:
        ManifestError: torn, garbled, inconsistent, or written by a release with a newer format.
    """
    body, digest = _checked(data)
    head, newline, rest = body.partition(b"\n")
    if not newline:
        raise ManifestError("the manifest has no commit record")
    record = decode_record(head)
    sections: dict[str, bytes] = {}
    position = 0
    for section in record.sections:
        end = position + section.nbytes
        if section.nbytes < 0 or rest[end : end + 1] != b"\n":
            raise ManifestError("the manifest's sections do not fit its commit record")
        line = rest[position:end]
        if section_digest(line) != section.digest:
            raise ManifestError("a section of the manifest is not the one its commit record names")
        sections[section.digest] = line
        position = end + 1
    if position != len(rest):
        raise ManifestError("the manifest holds bytes that its commit record does not name")
    manifest = Manifest(record, sections, digest)
    _check_references(manifest)
    return manifest


def decode_summary(data: bytes) -> tuple[CommitRecord, str]:
    """The commit record of a manifest file whose bytes are all checked, and its digest; errors as `decode`."""
    body, digest = _checked(data)
    return decode_record(body.partition(b"\n")[0]), digest


def _checked(data: bytes) -> tuple[bytes, str]:
    """(all before the trailer, the digest that the trailer states), if that is true."""
    if len(data) > MANIFEST_BYTES_MAX:
        raise ManifestError(f"a manifest of {len(data)} bytes is over the limit of {MANIFEST_BYTES_MAX}")
    body, trailer = data[:-_TRAILER_BYTES], data[-_TRAILER_BYTES:]
    digest = xxhash.xxh3_128_hexdigest(body)
    if trailer != digest.encode() + b"\n":
        raise ManifestError("the manifest's checksum does not match its contents: it is torn or corrupt")
    return body, digest


def decode_record(head: bytes) -> CommitRecord:
    """The commit record, from a manifest's first line alone; its objects are not yet checked."""
    _check_version(head)
    try:
        return msgspec.json.decode(head, type=CommitRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"the manifest's commit record is garbled: {error}") from None


class _Version(msgspec.Struct):
    format: str
    version: int


def _check_version(head: bytes) -> None:
    try:
        found = msgspec.json.decode(head, type=_Version)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise ManifestError("this is not a Flashpoint manifest") from None
    if found.format != FORMAT:
        raise ManifestError(f"this is not a Flashpoint manifest but {found.format[:100]!r}")
    if found.version != VERSION:
        raise ManifestVersionError(
            f"the manifest has format version {found.version}, this release reads version {VERSION}: "
            "load it with the release of Flashpoint that wrote it, or a newer one"
        )


def _check_references(manifest: Manifest) -> None:
    record = manifest.record
    if record.step < 0 or record.epoch < 0 or len(record.objects) > OBJECTS_MAX:
        raise ManifestError("the manifest's commit record has numbers out of range")
    if not 1 <= record.world_size <= RANK_MAX + 1 or len(record.values) not in (0, record.world_size):
        raise ManifestError(f"the manifest's world of {record.world_size} ranks contradicts itself")
    names = set()
    for obj in record.objects:
        try:
            rank = obj.id.rank
        except ValueError as error:
            raise ManifestError(f"the manifest names an object that cannot be: {error}") from None
        chunks = -(-obj.nbytes // obj.chunk_bytes) if obj.chunk_bytes > 0 else -1
        if obj.name in names or rank >= record.world_size or len(obj.chunks) != chunks * DIGEST_BYTES:
            raise ManifestError(f"the manifest's record of {obj.name} contradicts itself")
        names.add(obj.name)
        if obj.layout not in manifest.sections:
            raise ManifestError(f"the manifest has no layout for {obj.name}")
        try:
            layout = manifest.layout(obj)
        except LayoutError as error:
            raise ManifestError(f"the manifest's layout of {obj.name} is garbled: {error}") from None
        if layout.nbytes != obj.nbytes:
            raise ManifestError(
                f"the manifest gives {obj.name} {obj.nbytes} bytes but its layout {layout.nbytes}"
            )
    if any(digest and digest not in manifest.sections for digest in record.values):
        raise ManifestError("the manifest has no section for a rank's plain values")


_layouts: OrderedDict[str, ObjectLayout] = OrderedDict()
_layouts_lock = threading.Lock()


def _layout_of(digest: str, line: bytes) -> ObjectLayout:
    """A section's layout. Cached by digest, which names its content: the versions of a run share theirs."""
    with _layouts_lock:
        if digest in _layouts:
            _layouts.move_to_end(digest)
            return _layouts[digest]
    layout = decode_layout(line)
    keep_layout(digest, layout)
    return layout


def keep_layout(digest: str, layout: ObjectLayout) -> None:
    """Spare manifests that name this layout its decoding: it was planned or checked in this process."""
    with _layouts_lock:
        _layouts[digest] = layout
        _layouts.move_to_end(digest)
        while len(_layouts) > _LAYOUTS_CACHED_MAX:
            _layouts.popitem(last=False)
