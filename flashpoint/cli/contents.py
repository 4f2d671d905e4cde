"""What a version holds, as plain data: the report that `flashpoint inspect` prints or shows."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from flashpoint.cli.output import first_few, plural
from flashpoint.cli.statistics import Histogram, Statistics
from flashpoint.cli.versions import SAVING, StoredVersion
from flashpoint.dtypes import dtype_of
from flashpoint.errors import CheckpointNotFoundError
from flashpoint.layout import Entry
from flashpoint.manifest import Manifest, ObjectRecord, Value
from flashpoint.objects import CheckpointObjectManager
from flashpoint.recovery import preferred_entries, values_source
from flashpoint.view import CheckpointView


def report_of(
    version: StoredVersion,
    manifest: Manifest | None,
    name: str | None,
    rank: int,
    holders: Mapping[str, Collection[int]],
) -> dict[str, Any]:
    """Everything but statistics, of the entries and values that ``name`` selects, as ``rank`` has them.

    ``manifest`` is None for an unfinished version that has none: its files are all there is to tell. ``holders`` is
    object -> nodes, as far as that is known.

    Raises:
        CheckpointNotFoundError: there is no such rank, or nothing of that name.
    """
    record = manifest.record if manifest else None
    entries: list[dict[str, Any]] = []
    values: list[dict[str, Any]] = []
    if manifest is not None:
        if not 0 <= rank < manifest.record.world_size:
            ranks = plural(manifest.record.world_size, "rank")
            raise CheckpointNotFoundError(f"step {manifest.step} has {ranks}: there is no rank {rank}")
        stored_values = _values(manifest, rank)
        matches = _matcher(manifest, stored_values, name)
        entries = [
            _entry(obj, entry, begin)
            for obj in manifest.objects
            for layout in [manifest.layout(obj)]
            for entry, begin in zip(layout.entries, layout.begins, strict=True)
            if matches(entry.name)
        ]
        values = [
            {"name": value.name, "rank": source, "value": value.value}
            for source, value in stored_values
            if matches(value.name)
        ]
    return {
        "path": version.container.path,
        "step": version.container.step,
        "state": version.state,
        "problem": version.problem,
        "epoch": record.epoch if record else None,
        "world_size": record.world_size if record else None,
        "writer": record.writer if record else None,
        "created_unix_s": version.created_unix_s,
        "manifest_digest": manifest.digest if manifest else None,
        "markers": [{"local_rank": local_rank, "live": live} for local_rank, live in version.markers],
        "objects": [{**obj, "holders": _holders(obj, holders)} for obj in _objects(version, manifest)],
        "entries": entries,
        "values": values,
        "totals": _totals(entries),
    }


def _holders(obj: dict[str, Any], holders: Mapping[str, Collection[int]]) -> list[int] | None:
    return sorted(holders[obj["name"]]) if obj["name"] in holders else None


def _objects(version: StoredVersion, manifest: Manifest | None) -> list[dict[str, Any]]:
    here = version.objects
    if manifest is None:
        return [
            {"name": obj.name, "rank": obj.rank, "bytes": obj.nbytes, "chunk_bytes": None, "chunks": None,
             "links": obj.links}
            for obj in here.values()
        ]  # fmt: skip
    return [
        {
            "name": obj.name,
            "rank": obj.id.rank,
            "bytes": obj.nbytes,
            "chunk_bytes": obj.chunk_bytes,
            "chunks": -(-obj.nbytes // obj.chunk_bytes),
            "links": here[obj.name].links if obj.name in here else None,
        }
        for obj in manifest.objects
    ]


def _entry(obj: ObjectRecord, entry: Entry, begin: int) -> dict[str, Any]:
    return {
        "name": entry.name,
        "dtype": entry.dtype,
        "shape": entry.shape,
        "global_shape": entry.whole_shape,
        "offsets": entry.origin,
        "object": obj.name,
        "begin": begin,
        "bytes": entry.nbytes,
        "codec": entry.codec,
    }


def _values(manifest: Manifest, rank: int) -> list[tuple[int, Value]]:
    """(whose copy, value) of every plain value, as ``rank`` would restore them."""
    by_rank: dict[int, dict[str, Value]] = {}
    found = []
    for name, source in values_source(manifest, rank).items():
        if source not in by_rank:
            by_rank[source] = manifest.values_of(source)
        found.append((source, by_rank[source][name]))
    return found


def _totals(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sums: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in entries:
        key = (entry["dtype"], entry["codec"])
        total = sums.setdefault(
            key, {"dtype": key[0], "codec": key[1], "entries": 0, "elements": 0, "bytes": 0}
        )
        total["entries"] += 1
        total["elements"] += math.prod(entry["shape"])
        total["bytes"] += entry["bytes"]
    return sorted(sums.values(), key=lambda total: -int(total["bytes"]))


def _matcher(
    manifest: Manifest, values: list[tuple[int, Value]], pattern: str | None
) -> Callable[[str], object]:
    """Tells which names ``pattern`` selects; an exact name wins over what it means as a glob."""
    if pattern is None:
        return lambda name: True
    names = {*manifest.by_name, *(value.name for _, value in values)}
    if pattern in names:
        return lambda name: name == pattern
    matches = re.compile(fnmatch.translate(pattern)).match
    if not any(map(matches, names)):
        inside = sum(pattern in name for name in names)
        hint = f"; {plural(inside, 'name')} with it inside: try '*{pattern}*'" if inside else ""
        raise CheckpointNotFoundError(f"step {manifest.step} has nothing that matches {pattern!r}{hint}")
    return matches


def statistics_of(
    objects: CheckpointObjectManager, version: StoredVersion, manifest: Manifest, name: str, rank: int
) -> dict[str, Any] | None:
    """Statistics of the tensor of exactly this name, replicas left out; None if there is no such tensor.

    Raises:
        CorruptObjectError: its bytes do not match their checksums.
    """
    shards = preferred_entries(manifest, name, rank)
    if not shards:
        return None
    first = manifest.entry(*shards[0])
    dtype = dtype_of(first.dtype).numpy
    if not first.is_array:
        return {"note": f"a Python object, pickled ({first.codec}): it is not unpickled here"}
    if dtype is None or dtype.kind == "c":
        return {"note": f"there are no statistics for {first.dtype}"}
    if version.state == SAVING:
        return {"note": "it is being saved"}
    absent = sorted({record.name for record, _ in shards} - version.objects.keys())
    if absent:
        return {"note": f"a part of it is not on this node: {first_few(absent)}"}
    statistics = Statistics()
    with CheckpointView(objects, version.container, rank=rank) as view:
        for record, i in shards:
            statistics.add(view.array(record, i))
        found = statistics.result()
        histogram = Histogram(found["min"], found["max"])
        for record, i in shards:
            histogram.add(view.array(record, i))
    return {**found, "histogram": histogram.result()}
