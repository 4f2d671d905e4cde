"""What to read to fill a state from a version, and how the two differ. Pure: a manifest in, a plan out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

from flashpoint.boxes import Box, covers, overlap
from flashpoint.errors import MismatchError
from flashpoint.layout import Entry
from flashpoint.manifest import Manifest, ObjectRecord

DIFFERENCES_SHOWN_MAX: Final = 10


class Read(NamedTuple):
    """Copy one box of a stored entry into one box of a target; both in elements of their own arrays."""

    target: int
    record: ObjectRecord
    entry: int
    source_start: tuple[int, ...]
    target_start: tuple[int, ...]
    lengths: tuple[int, ...]


def preferred_entries(manifest: Manifest, name: str, rank: int) -> list[tuple[ObjectRecord, int]]:
    """The stored entries that together make up ``name`` for ``rank``, replicas left out.

    A tensor that every rank stored whole is taken from the rank's own object, so that state which
    differs by rank (a random generator's) comes back to where it was; else from the lowest rank.
    """
    found = manifest.by_name.get(name, [])
    if len(found) < 2:
        return found
    ordered = sorted(found, key=lambda location: manifest.rank(location[0]) != rank)  # stable: own first
    for record, i in ordered:
        if manifest.entry(record, i).is_whole:
            return [(record, i)]
    shards: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[ObjectRecord, int]] = {}
    for record, i in ordered:
        entry = manifest.entry(record, i)
        shards.setdefault((entry.origin, entry.shape), (record, i))
    return list(shards.values())


def plan_reads(manifest: Manifest, targets: Sequence[Entry], rank: int) -> list[Read]:
    """The copies that fill ``targets`` (shards as this rank wants them) from the version.

    Raises:
        MismatchError: a target is not in the version, has another shape there, or its stored shards do
            not cover it.
    """
    reads: list[Read] = []
    for number, target in enumerate(targets):
        wanted = Box(target.origin, target.shape)
        stored = preferred_entries(manifest, target.name, rank)
        if not stored:
            raise MismatchError(f"step {manifest.step} holds no tensor {target.name[:200]!r}")
        parts = []
        for record, i in stored:
            entry = manifest.entry(record, i)
            if entry.whole_shape != target.whole_shape:
                raise MismatchError(
                    f"{target.name[:200]!r} has shape {list(entry.whole_shape)} in step {manifest.step}, "
                    f"{list(target.whole_shape)} here"
                )
            shared = overlap(wanted, Box(entry.origin, entry.shape))
            if shared is not None:
                parts.append(shared)
                source_start = tuple(s - b for s, b in zip(shared.start, entry.origin, strict=True))
                target_start = tuple(s - b for s, b in zip(shared.start, target.origin, strict=True))
                reads.append(Read(number, record, i, source_start, target_start, shared.shape))
        if not covers(wanted, parts):
            raise MismatchError(
                f"step {manifest.step} does not hold all of {target.name[:200]!r} that rank {rank} needs: "
                "objects of other ranks are missing from its manifest"
            )
    return reads


def differences(
    manifest: Manifest,
    targets: Sequence[Entry],
    value_names: Collection[str],
    rank: int,
) -> list[str]:
    """How a state differs from what the version holds of it, one sentence for each name; empty if it fits.

    Args:
        targets: the state's tensors, as this rank holds them.
        value_names: names of its plain values.
    """
    saved_values = set(values_source(manifest, rank))
    found = []
    for target in targets:
        saved = preferred_entries(manifest, target.name, rank)
        if not saved:
            what = (
                "a plain value there, a tensor here"
                if target.name in saved_values
                else "not in the checkpoint"
            )
            found.append(f"{target.name[:200]!r}: {what}")
            continue
        entry = manifest.entry(*saved[0])
        if entry.codec:
            found.append(f"{target.name[:200]!r}: a Python object there, a tensor here")
        elif entry.whole_shape != target.whole_shape:
            found.append(
                f"{target.name[:200]!r}: shape {list(entry.whole_shape)} there, "
                f"{list(target.whole_shape)} here"
            )
        elif entry.dtype != target.dtype:
            found.append(f"{target.name[:200]!r}: dtype {entry.dtype} there, {target.dtype} here")
    for name in value_names:
        if name in saved_values:
            continue
        saved = preferred_entries(manifest, name, rank)
        if not (saved and manifest.entry(*saved[0]).codec):
            what = "a tensor there, a plain value here" if saved else "not in the checkpoint"
            found.append(f"{name[:200]!r}: {what}")
    return found


def left_out(manifest: Manifest, names: Collection[str], rank: int) -> list[str]:
    """What the version holds and a state of these names does not, in order."""
    return sorted((manifest.by_name.keys() | values_source(manifest, rank).keys()).difference(names))


def left_out_sentences(names: Iterable[str]) -> list[str]:
    """One sentence for each name, as `differences` has them."""
    return [f"{name[:200]!r}: in the checkpoint, not in the state" for name in names]


def values_source(manifest: Manifest, rank: int) -> dict[str, int]:
    """Name of every plain value -> the rank whose copy ``rank`` restores: its own, else the lowest."""
    source: dict[str, int] = {}
    digests = manifest.record.values
    seen = set()
    for other in _own_first(rank, range(len(digests))):
        if digests[other] not in seen:  # ranks with equal values share one section
            seen.add(digests[other])
            for name in manifest.values_of(other):
                source.setdefault(name, other)
    return source


def mismatch(manifest: Manifest, found: Sequence[str], rank: int) -> MismatchError:
    """The error that lists the first ten differences."""
    shown = "\n  ".join(found[:DIFFERENCES_SHOWN_MAX])
    more = f"\n  and {len(found) - DIFFERENCES_SHOWN_MAX} more" if len(found) > DIFFERENCES_SHOWN_MAX else ""
    return MismatchError(
        f"the state of rank {rank} does not fit step {manifest.step} in {len(found)} places:\n"
        f"  {shown}{more}\nbuild the model and optimizer as they were when the step was saved, "
        "or load what fits with partial=True"
    )


def _own_first(rank: int, ranks: Iterable[int]) -> list[int]:
    return sorted(ranks, key=lambda other: (other != rank, other))
