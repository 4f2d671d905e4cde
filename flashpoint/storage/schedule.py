"""Which version is drained to storage next, and which drained ones are deleted. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from flashpoint.retention import Version, newest_first


class Candidate(NamedTuple):
    """A version that may be drained.

    Attributes:
        created_unix_s: what its manifest says, so that all nodes see the same time. It only spaces drains; what is
            newer than what is never decided by it.
    """

    version: Version
    created_unix_s: float


def is_due(
    candidate: Candidate,
    last: Candidate | None,
    since: int,
    *,
    every_n: int,
    every_s: float,
    is_final: bool = False,
) -> bool:
    """Whether a replicated version is to be drained.

    Args:
        last: the newest that was drained, or begun; None where there is none.
        since: versions that were replicated after ``last``, this one included.
        every_n: every n-th version; 0 for no such rule.
        every_s: one in so many seconds; 0 for no such rule. Without any rule, every version is due.
        is_final: whether the job is over: what it ends with is to be kept, whatever the rules say.
    """
    if last is None:
        return True
    if candidate.version <= last.version:
        return False
    if is_final or not (every_n or every_s):
        return True
    apart_s = abs(candidate.created_unix_s - last.created_unix_s)  # a clock that was set back stops nothing
    return bool(every_n and since >= every_n) or bool(every_s and apart_s >= every_s)


def next_to_drain(
    replicated: Iterable[Candidate],
    last: Candidate | None,
    since: int,
    *,
    every_n: int,
    every_s: float,
    is_final: bool = False,
) -> Version | None:
    """The version to drain now: the newest, if it is due. Older ones are never made up for."""
    newest = max(replicated, default=None, key=lambda candidate: candidate.version)
    if newest is None:
        return None
    due = is_due(newest, last, since, every_n=every_n, every_s=every_s, is_final=is_final)
    return newest.version if due else None


def to_delete(drained: Collection[Version], *, keep_last: int, keep_every: int) -> list[Version]:
    """The drained versions to delete, oldest first.

    Args:
        keep_last: so many of the newest stay; 0 keeps all.
        keep_every: versions of steps that this divides stay for ever; 0 for no such rule.
    """
    if keep_last == 0:
        return []
    old = newest_first(drained)[keep_last:]
    return sorted(version for version in old if not (keep_every and version.step % keep_every == 0))


def may_hold(linked_nbytes: int, version_nbytes: int, limit_nbytes: int) -> bool:
    """Whether a version may be kept in memory while it is drained, also when newer ones supersede it.

    Args:
        linked_nbytes: of this node's memory, that versions have now.
        version_nbytes: of one version on this node.
        limit_nbytes: of the node's memory for checkpoints.
    """
    # The next save must find room beside what is held and what stands.
    return linked_nbytes + 2 * version_nbytes <= limit_nbytes
