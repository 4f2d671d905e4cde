"""The commit of a version: what ranks vote, and what the leader makes of it. Pure.

    every rank   --vote-->     leader     its objects with checksums, or why it failed
    leader       --decision->  every rank the commit record, or the abort with every rank's reason
    node leader  --written-->  leader     the manifest lies on this node
    leader       --finish-->   every rank markers may go
    every rank   --cleared-->  leader     my marker is gone
    leader       --retire-->   every rank the version is complete everywhere: older ones may go

A version is committed only if every rank came, agreed on the step, and their entries cover every global
array. Nobody gives anything up before ``retire``, so a crash between any two lines leaves either this
version or the one before it whole on every node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from flashpoint.boxes import Box, covers
from flashpoint.layout import Entry, ObjectLayout
from flashpoint.manifest import FORMAT, VERSION, CommitRecord, ObjectRecord, section_digest


class Vote(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What one rank says of its part of a version.

    Attributes:
        step: the step this rank is saving.
        node: identity of the memory it writes to.
        error: why its part failed; empty if it did not.
        objects: its objects, sealed and checksummed.
        values: the section with its plain values (`manifest.encode_values`), or empty.
    """

    step: int
    node: str
    error: str = ""
    objects: tuple[ObjectRecord, ...] = ()
    values: bytes = b""


class Decision(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What the leader answers: a commit record, or failures by rank.

    Attributes:
        values: the sections of plain values that the record names, each once.
        writers: ranks that write the manifest, one for each node.
    """

    record: CommitRecord | None = None
    failures: dict[int, str] = {}
    values: tuple[bytes, ...] = ()
    writers: tuple[int, ...] = ()


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether a rank did its part of a later line of the protocol; ``error`` is empty if so."""

    error: str = ""


def failures_of(votes: Mapping[int, Vote], *, step: int, world_size: int, timeout_s: float) -> dict[int, str]:
    """Why this version cannot be, by rank; empty if every rank voted for it."""
    failures = {
        rank: f"did not report within {timeout_s:g} s: it died, hangs, or did not save this step"
        for rank in range(world_size)
        if rank not in votes
    }
    for rank, vote in votes.items():
        if vote.error:
            failures[rank] = vote.error
        elif vote.step != step:
            failures[rank] = f"is saving step {vote.step} while rank 0 saves step {step}"
        elif foreign := [obj.name for obj in vote.objects if obj.id.rank != rank]:
            failures[rank] = f"wrote {foreign[0]}, under another rank's name: give each process its own rank"
    return failures


def decide(
    votes: Mapping[int, Vote],
    *,
    step: int,
    epoch: int,
    writer: str,
    created_unix_s: float,
    uncovered: Sequence[str],
) -> Decision:
    """The decision over a full, unanimous set of votes.

    Args:
        uncovered: names of global arrays whose parts do not cover them (`uncovered_arrays`).
    """
    if uncovered:
        names = ", ".join(repr(name[:200]) for name in uncovered[:10])
        return Decision(
            failures={0: f"{len(uncovered)} arrays are not covered by all ranks' shards: {names}"}
        )
    values: dict[str, bytes] = {}
    by_rank = []
    for rank in range(len(votes)):
        section = votes[rank].values
        digest = section_digest(section) if section else ""
        if section:
            values[digest] = section
        by_rank.append(digest)
    record = CommitRecord(
        format=FORMAT,
        version=VERSION,
        step=step,
        epoch=epoch,
        world_size=len(votes),
        writer=writer,
        created_unix_s=created_unix_s,
        objects=tuple(obj for rank in range(len(votes)) for obj in votes[rank].objects),
        values=tuple(by_rank) if values else (),
    )
    return Decision(record=record, values=tuple(values.values()), writers=node_leaders(votes))


def node_leaders(votes: Mapping[int, Vote]) -> tuple[int, ...]:
    """The lowest rank of every node, ascending."""
    leaders: dict[str, int] = {}
    for rank in sorted(votes):
        leaders.setdefault(votes[rank].node, rank)
    return tuple(sorted(leaders.values()))


def uncovered_arrays(layouts: Iterable[ObjectLayout]) -> list[str]:
    """Names of sharded arrays whose parts leave a hole, or do not agree on the array's shape and dtype."""
    parts: dict[str, list[Entry]] = {}
    sharded: set[str] = set()
    for layout in layouts:
        for entry in layout.entries:
            name = entry.name
            if name in parts:
                parts[name].append(entry)
            else:
                parts[name] = [entry]
            if entry.global_shape and entry.global_shape != entry.shape:
                sharded.add(name)
    judged: dict[tuple[Any, ...], bool] = {}  # the layers of a model are cut alike
    return [
        name for name, entries in parts.items() if name in sharded and not _make_one_array(entries, judged)
    ]


def _make_one_array(entries: Sequence[Entry], judged: dict[tuple[Any, ...], bool]) -> bool:
    shape, dtype = entries[0].whole_shape, entries[0].dtype
    for entry in entries:
        if entry.dtype != dtype or (entry.global_shape or entry.shape) != shape:
            return False
    cuts = (shape, *[(entry.offsets, entry.shape) for entry in entries])
    if cuts not in judged:
        judged[cuts] = covers(Box.whole(shape), {Box(entry.origin, entry.shape) for entry in entries})
    return judged[cuts]
