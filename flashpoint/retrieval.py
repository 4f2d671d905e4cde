"""What a node fetches from whom to load a version. Pure: a manifest and its holders in, a plan out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple
from zlib import crc32

from flashpoint.boxes import Box
from flashpoint.dtypes import dtype_of
from flashpoint.manifest import Manifest, ObjectRecord
from flashpoint.recovery import Read


class Need(NamedTuple):
    """The bytes from ``begin`` to ``end`` of an object, which a rank is going to read."""

    record: ObjectRecord
    begin: int
    end: int


class Fetch(NamedTuple):
    """An object to get, whole or in part.

    Attributes:
        chunks: indexes of its checksum chunks, ascending: what can be verified is what can be fetched.
        sources: all nodes that hold it, best first; none where no node does.
    """

    record: ObjectRecord
    chunks: tuple[int, ...]
    sources: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return len(self.chunks) == _chunk_count(self.record)


def needs_of_reads(manifest: Manifest, reads: Iterable[Read]) -> list[Need]:
    """The bytes that ``reads`` touch, by object and position; ranges that meet are one.

    A box of an entry counts from its first byte to its last: whole rows between them are no hole worth a
    request, and a box of columns lies in nearly every chunk anyway.
    """
    found = []
    for read in reads:
        layout = manifest.layout(read.record)
        entry = layout.entries[read.entry]
        first, end = _span(Box(read.source_start, read.lengths), entry.shape)
        itemsize = dtype_of(entry.dtype).itemsize
        origin = layout.begins[read.entry]
        found.append(Need(read.record, origin + first * itemsize, origin + end * itemsize))
    return _merged(found)


def plan_fetches(
    needs: Iterable[Need],
    holders: Mapping[int, Collection[str]],
    *,
    node: int,
    domains: Mapping[int, str],
    keeps: Collection[str] = (),
) -> list[Fetch]:
    """What ``node`` has to get from other nodes before it can read what it needs: no more than the chunks it reads.

    What it ``keeps`` is fetched whole, however little is needed now: only a whole object gets its name in the
    container, serves other nodes too, and counts as a copy.

    Nodes of the same failure domain are asked first: they are near. Among equals the order turns with the
    object's name and the node, so those that all need one object do not all ask its first holder.

    Args:
        holders: node -> names of the objects it holds, for this node too.
        node: that fetches.
        domains: node -> failure domain; empty, or not given, for a domain of its own.
        keeps: names of the objects that placement gives to ``node`` in any case.
    """
    held = holders.get(node, ())
    needed: dict[str, list[Need]] = {}
    for need in _merged(need for need in needs if need.record.name not in held):
        needed.setdefault(need.record.name, []).append(need)
    having: dict[str, list[int]] = {name: [] for name in needed}
    for index in sorted(holders):
        for name in having.keys() & holders[index]:
            having[name].append(index)
    return [
        Fetch(
            ranges[0].record,
            _chunks(ranges, is_kept=name in keeps),
            _best_first(having[name], name, node, domains),
        )
        for name, ranges in needed.items()
    ]


def missing_objects(manifest: Manifest, holders: Mapping[int, Collection[str]]) -> list[str]:
    """Objects that no node holds: the version cannot be loaded whole."""
    held = set().union(*holders.values())
    return [record.name for record in manifest.objects if record.name not in held]


def _chunks(ranges: Sequence[Need], *, is_kept: bool) -> tuple[int, ...]:
    """What to fetch of an object for these ranges of it, which are in order."""
    record = ranges[0].record
    if is_kept:
        return tuple(range(_chunk_count(record)))
    size = record.chunk_bytes
    spans = (range(need.begin // size, (need.end - 1) // size + 1) for need in ranges)
    return tuple(sorted(set(chain.from_iterable(spans))))  # two ranges may lie in one chunk


def _best_first(having: Sequence[int], name: str, node: int, domains: Mapping[int, str]) -> tuple[int, ...]:
    here = domains.get(node, "")
    near = [index for index in having if here and domains.get(index, "") == here]
    far = [index for index in having if index not in near]
    turn = crc32(name.encode()) + node  # not hash(): it differs from process to process
    return (*_turned(near, turn), *_turned(far, turn))


def _turned(nodes: list[int], turn: int) -> list[int]:
    cut = turn % len(nodes) if nodes else 0
    return nodes[cut:] + nodes[:cut]


def _span(box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """From the first element of a box to behind its last, in an array of ``shape`` in C order."""
    if box.size == 0:
        return 0, 0
    first = last = 0
    for start, length, size in zip(box.start, box.shape, shape, strict=True):
        first = first * size + start
        last = last * size + start + length - 1
    return first, last + 1


def _merged(needs: Iterable[Need]) -> list[Need]:
    """Without empty ones, by object and position; ranges that overlap or touch are one."""
    found: list[Need] = []
    ordered = sorted((need for need in needs if need.begin < need.end), key=_position)
    for need in ordered:
        if found and found[-1].record.name == need.record.name and need.begin <= found[-1].end:
            found[-1] = found[-1]._replace(end=max(found[-1].end, need.end))
        else:
            found.append(need)
    return found


_position = attrgetter("record.name", "begin")


def _chunk_count(record: ObjectRecord) -> int:
    return -(-record.nbytes // record.chunk_bytes)
