"""What differs between two versions, as plain data: the report that `flashpoint diff` prints or shows.

Where both versions have an object of the same layout, equal chunk checksums mean equal bytes, which are not read. What
is left is read a slab at a time, verified.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from flashpoint.boxes import slabs
from flashpoint.checksums import DIGEST_BYTES
from flashpoint.cli.difference import Array, Difference
from flashpoint.dtypes import dtype_of
from flashpoint.layout import Entry
from flashpoint.manifest import Manifest, ObjectRecord
from flashpoint.recovery import preferred_entries, values_source
from flashpoint.view import CheckpointView

SLAB_BYTES: Final = 4 << 20  # of a tensor, on each side, besides the mapped versions

EQUAL: Final = "equal"
CHANGED: Final = "changed"
ADDED: Final = "added"
REMOVED: Final = "removed"
OTHER_DTYPE: Final = "dtype"
OTHER_SHAPE: Final = "shape"
NOT_HERE: Final = "not here"


class Pair(NamedTuple):
    """A tensor or value that both versions have, by its name in each."""

    before: str
    after: str


class Matched(NamedTuple):
    pairs: list[Pair]
    removed: list[str]
    added: list[str]


def match(before: Iterable[str], after: Iterable[str]) -> Matched:
    """Match names: equal ones, then those that differ in nothing but ``/`` for ``.``, as two frameworks write them."""
    left, right = dict.fromkeys(before), dict.fromkeys(after)
    pairs = [Pair(name, name) for name in left if name in right]
    removed = [name for name in left if name not in right]
    added = [name for name in right if name not in left]
    dotted: dict[str, list[str]] = {}
    for name in added:
        dotted.setdefault(name.replace("/", "."), []).append(name)
    for name in list(removed):
        candidates = dotted.get(name.replace("/", "."), [])
        if len(candidates) == 1:
            pairs.append(Pair(name, candidates.pop()))
            removed.remove(name)
            added.remove(pairs[-1].after)
    return Matched(pairs, removed, added)


def compare(
    before: CheckpointView, after: CheckpointView, pattern: str | None, advance: Callable[[int], None]
) -> dict[str, Any]:
    """The tensors and values that differ, of those that ``pattern``, a glob over names, selects.

    Args:
        advance: told the bytes of each tensor of ``before`` that is done with.

    Raises:
        CorruptObjectError: bytes that do not match their checksums.
    """
    wanted = re.compile(fnmatch.translate(pattern)).match if pattern is not None else lambda name: True
    names = [[name for name in view.manifest.by_name if wanted(name)] for view in (before, after)]
    matched = match(*names)
    comparison = _Comparison(before, after)
    found = []
    for pair in matched.pairs:
        found.append(comparison.tensor(pair))
        advance(_nbytes(before.manifest, pair.before, before.rank))
    found += [_described(REMOVED, before, None, name) for name in matched.removed]
    found += [_described(ADDED, None, after, name) for name in matched.added]
    return {
        "tensors": found,
        "values": _values(before, after, wanted),
        "bytes_read": comparison.bytes_read,
    }


def bytes_of(view: CheckpointView) -> int:
    """Of all its tensors as its rank has them, replicas left out."""
    return sum(_nbytes(view.manifest, name, view.rank) for name in view.manifest.by_name)


class _Comparison:
    def __init__(self, before: CheckpointView, after: CheckpointView) -> None:
        self.before = before
        self.after = after
        self.bytes_read = 0
        self._twins = {record.name: record for record in after.manifest.objects}
        self._here: dict[tuple[str, str], bool] = {}

    def tensor(self, pair: Pair) -> dict[str, Any]:
        old, new = _first(self.before, pair.before), _first(self.after, pair.after)
        report = _described(EQUAL, self.before, self.after, pair.before, pair.after)
        if old.is_array != new.is_array:
            return {**report, "status": OTHER_DTYPE}
        if old.whole_shape != new.whole_shape:
            return {**report, "status": OTHER_SHAPE if old.is_array else CHANGED}
        if old.dtype == new.dtype and self._has_equal_checksums(pair):
            return report
        if not self._all_here(pair):
            return {**report, "status": NOT_HERE}
        if old.dtype == new.dtype and self._has_equal_bytes(pair, old):
            return report
        report["status"] = CHANGED if old.dtype == new.dtype else OTHER_DTYPE
        if old.is_array and None not in (dtype_of(old.dtype).numpy, dtype_of(new.dtype).numpy):
            difference = Difference()
            for a, b in self._slabs(pair, old):
                difference.add(a, b)
            report["difference"] = difference.result()
        return report

    def _has_equal_checksums(self, pair: Pair) -> bool:
        """Whether checksums alone say so: both versions have its shards in objects of the same layout."""
        if pair.before != pair.after:
            return False
        for record, i in preferred_entries(self.before.manifest, pair.before, self.before.rank):
            twin = self._twins.get(record.name)
            if twin is None or (twin.layout, twin.chunk_bytes) != (record.layout, record.chunk_bytes):
                return False
            layout = self.before.manifest.layout(record)
            first, end = layout.begins[i] // record.chunk_bytes, -(-layout.ends[i] // record.chunk_bytes)
            digests = slice(first * DIGEST_BYTES, end * DIGEST_BYTES)
            if record.chunks[digests] != twin.chunks[digests]:
                return False
        return True

    def _all_here(self, pair: Pair) -> bool:
        return all(
            self._is_here(view, record)
            for view, name in zip((self.before, self.after), pair, strict=True)
            for record, _ in preferred_entries(view.manifest, name, view.rank)
        )

    def _is_here(self, view: CheckpointView, record: ObjectRecord) -> bool:
        key = (view.container.path, record.name)
        if key not in self._here:
            self._here[key] = view.is_here(record)
        return self._here[key]

    def _has_equal_bytes(self, pair: Pair, entry: Entry) -> bool:
        return all(np.array_equal(_as_bytes(a), _as_bytes(b)) for a, b in self._slabs(pair, entry))

    def _slabs(self, pair: Pair, entry: Entry) -> Iterator[tuple[Array, Array]]:
        itemsize = dtype_of(entry.dtype).itemsize
        for box in slabs(entry.whole_shape, SLAB_BYTES // itemsize):
            a, b = self.before.part(pair.before, box), self.after.part(pair.after, box)
            self.bytes_read += a.nbytes + b.nbytes
            yield a, b


def _values(
    before: CheckpointView, after: CheckpointView, wanted: Callable[[str], object]
) -> list[dict[str, Any]]:
    """The plain values, as each version's rank restores them."""
    sides = []
    for view in (before, after):
        manifest = view.manifest
        sides.append(
            {
                name: manifest.values_of(rank)[name].value
                for name, rank in values_source(manifest, view.rank).items()
                if name not in manifest.by_name and wanted(name)
            }
        )
    left, right = sides
    matched = match(left, right)
    found = [
        {
            "name": old,
            "status": EQUAL if left[old] == right[new] else CHANGED,
            "before": left[old],
            "after": right[new],
        }
        for old, new in matched.pairs
    ]
    found += [
        {"name": name, "status": REMOVED, "before": left[name], "after": None} for name in matched.removed
    ]
    found += [{"name": name, "status": ADDED, "before": None, "after": right[name]} for name in matched.added]
    return found


def _described(
    status: str, before: CheckpointView | None, after: CheckpointView | None, name: str, after_name: str = ""
) -> dict[str, Any]:
    report: dict[str, Any] = {"name": name, "status": status}
    if after_name and after_name != name:
        report["name_after"] = after_name
    for side, view, own in (("before", before, name), ("after", after, after_name or name)):
        entry = _first(view, own) if view is not None else None
        pickled = "" if entry is None or entry.is_array else f"pickled ({entry.codec})"
        report[f"dtype_{side}"] = None if entry is None else pickled or entry.dtype
        report[f"shape_{side}"] = None if entry is None else entry.whole_shape
    report["difference"] = None
    return report


def _first(view: CheckpointView, name: str) -> Entry:
    return view.manifest.entry(*preferred_entries(view.manifest, name, view.rank)[0])


def _nbytes(manifest: Manifest, name: str, rank: int) -> int:
    return sum(manifest.entry(record, i).nbytes for record, i in preferred_entries(manifest, name, rank))


def _as_bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
