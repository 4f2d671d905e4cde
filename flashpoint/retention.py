"""Which versions are newer than others, and which a node may give up. Pure."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple


class Version(NamedTuple):
    """A complete version, ordered as recovery prefers it: by epoch, then by step.

    The epoch counts restarts of the job: what a restarted job saved overrules what it left behind,
    even at a lower step. No clock takes part.
    """

    epoch: int
    step: int


NOTHING: Final = Version(-1, -1)
"""Older than every version."""


class Standing(enum.IntEnum):
    """How far a version is known to have come."""

    UNPROVEN = 0
    """Of an older epoch, and not yet shown to be whole in this one."""
    COMPLETE = 1
    """Every node has its own objects and the manifest: it serves after a crash of processes."""
    REPLICATED = 2
    """All copies lie where they should: it serves after the loss of nodes too."""


def newest_first(versions: Iterable[Version]) -> list[Version]:
    return sorted(set(versions), reverse=True)


def superseded(complete: Iterable[Version], *, keep: int) -> list[Version]:
    """The versions to give up, oldest first, when the newest ``keep`` that met their goal are to stay.

    Dirty versions are not among ``complete``: an older version is given up only for newer ones that
    have met their goal (I3). ``keep=0`` keeps all.
    """
    if keep == 0:
        return []
    return sorted(newest_first(complete)[keep:])


def left_over(agreed: Iterable[Version], complete: Iterable[Version], *, keep: int) -> list[Version]:
    """What a crash kept `superseded` versions from being given up: oldest first, as it would have been.

    Args:
        agreed: complete on every node when the job started.
        complete: on this node now. A version that proved bad since then supersedes nothing.
    """
    agreed = set(agreed)
    stay = newest_first(agreed.intersection(complete))[:keep]
    return sorted(version for version in agreed if version < stay[-1]) if stay and len(stay) == keep else []


def given_up(
    standings: Mapping[Version, Standing], *, keep: int, busy: Collection[Version] = ()
) -> list[Version]:
    """The versions to give up, oldest first, in a job with copies: those with ``keep`` newer ones as high.

    The frontier of each kind of failure never goes back. After a crash of processes the newest complete version serves,
    after the loss of a node the newest replicated one; so one that is only complete may go when a newer
    one is complete, and a replicated one when a newer one is replicated. ``keep=0`` keeps all.

    An unproven version may have been replicated, so only replicated ones supersede it; and it may be one that
    no node can complete any more, so it supersedes nothing.

    Args:
        busy: versions that are being copied right now; they stay.
    """
    if keep == 0:
        return []
    newer = {Standing.COMPLETE: 0, Standing.REPLICATED: 0}  # than the one looked at, and at least so high
    old = []
    for version in newest_first(standings):
        standing = standings[version]
        needed = Standing.REPLICATED if standing is Standing.UNPROVEN else standing
        if newer[needed] >= keep and version not in busy:
            old.append(version)
        for height in newer:
            newer[height] += standing >= height
    return old[::-1]
