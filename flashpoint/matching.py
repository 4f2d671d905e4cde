"""Which entries of a version fill which leaves of a state, whoever wrote it. Pure but for `lost_integers`.

A leaf's name is its way through the state's tree, in parts. The ``/`` of a pytree's path and the ``.`` of a state dict
mean the same: ``model/layers/0/weight`` is ``model.layers.0.weight``. Where a version has names that differ in
nothing else, the leaf's own with dots comes first, as that is how both frameworks' adapters store it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import ml_dtypes
import numpy as np

from flashpoint.dtypes import dtype_of
from flashpoint.errors import MismatchError
from flashpoint.layout import Entry
from flashpoint.recovery import DIFFERENCES_SHOWN_MAX, plan_reads
from flashpoint.view import CheckpointView

Rename = Mapping[str, str] | Callable[[str], str]
"""From a leaf's name to the name it is stored under; leaves that a mapping leaves out keep theirs."""

Transpose = Mapping[str, Sequence[int]] | Callable[[str], Sequence[int] | None]
"""From a leaf's name to the axes by which the stored array is transposed, as of `numpy.transpose`; None: as it is."""

_NEAR_MAX: Final = 3
_COMPARED_MAX: Final = 10_000  # names, to find near ones: that is slow
_PACKED: Final = "float4_e2m1fn_x2"
_T = TypeVar("_T")


class LeafName(NamedTuple):
    """``shown`` is joined as the framework's users do, ``dotted`` with dots."""

    shown: str
    dotted: str


class Match(NamedTuple):
    """Of each leaf the entry's name, or None; and what does not match, one sentence for each."""

    names: list[str | None]
    problems: list[str]


def match_names(leaves: Sequence[LeafName], stored: Collection[str], rename: Rename | None) -> Match:
    """Find the entry of every leaf among the ``stored`` names."""
    asked, problems = _asked("rename", leaves, rename)
    by_dots: dict[str, list[str]] = {}
    for entry in stored:
        by_dots.setdefault(_dots(entry), []).append(entry)
    found: list[str | None] = []
    for leaf, given in zip(leaves, asked, strict=True):
        exact = (leaf.dotted, leaf.shown) if given is None else (given,)
        name: str | None = next((one for one in exact if one in stored), None)
        if name is None:
            wanted = exact[0]
            candidates = by_dots.get(_dots(wanted), [])
            if len(candidates) == 1:
                name = candidates[0]
            elif len(problems) <= DIFFERENCES_SHOWN_MAX:
                why = (
                    _ambiguous(candidates) if candidates else f"not in the checkpoint{_near(wanted, by_dots)}"
                )
                renamed = "" if given is None else f" (renamed {given[:200]!r})"
                problems.append(f"{leaf.shown[:200]!r}{renamed}: {why}")
            else:
                problems.append(f"{leaf.shown[:200]!r}: not in the checkpoint")
        found.append(name)
    return Match(found, problems)


def axes_of(
    leaves: Sequence[LeafName], transpose: Transpose | None
) -> tuple[list[tuple[int, ...]], list[str]]:
    """Of each leaf the axes that its stored array is transposed by, () for none; and what is wrong with them."""
    asked, problems = _asked("transpose", leaves, transpose)
    return [() if axes is None else tuple(axes) for axes in asked], problems


def array_problem(
    name: str, entry: Entry, shape: Sequence[int], dtype: str, *, axes: Sequence[int] = (), cast: bool = True
) -> str:
    """Why a stored array cannot fill a leaf of this shape and dtype; empty if it can."""
    there, here = entry.whole_shape, tuple(shape)
    if not entry.is_array:
        return f"{name[:200]!r}: a Python object there, an array here"
    if axes and sorted(axes) != list(range(len(there))):
        return (
            f"{name[:200]!r}: transpose={tuple(axes)} does not order the {len(there)} axes of {list(there)}"
        )
    turned = tuple(there[axis] for axis in axes) if axes else there
    if turned != here:
        how = f" (transposed {list(turned)})" if axes else ""
        hint = ": transpose= turns it" if not axes and len(here) == 2 and here == there[::-1] else ""
        return f"{name[:200]!r}: shape {list(there)}{how} there, {list(here)} here{hint}"
    return cast_problem(name, entry.dtype, dtype, cast=cast)


def cast_problem(name: str, there: str, here: str, *, cast: bool = True) -> str:
    """Why values of dtype ``there`` cannot become ``here``; empty if they can.

    Casts go to another width or to a more general kind: bool, integer, real, complex.
    """
    if there == here:
        return ""
    if not cast:
        return f"{name[:200]!r}: dtype {there} there, {here} here, and cast=False"
    if _kind(here) < _kind(there) or _PACKED in (there, here):
        return f"{name[:200]!r}: dtype {there} there cannot be cast to {here}"
    return ""


def lost_integers(view: CheckpointView, casts: Iterable[tuple[str, Entry, str]]) -> list[str]:
    """Integers that the dtype they are cast to cannot hold, one sentence for each array.

    Args:
        casts: a leaf's name, the box of the stored array that it wants, and its dtype.
    """
    found = []
    for name, box, dtype in casts:
        if box.dtype == dtype or not _kind(box.dtype) == _kind(dtype) == 1:
            continue
        low, high = _limits(dtype)
        least, most = _limits(box.dtype)
        if low <= least and most <= high:
            continue
        for read in plan_reads(view.manifest, [box], view.rank):
            cut = tuple(slice(s, s + n) for s, n in zip(read.source_start, read.lengths, strict=True))
            piece = view.array(read.record, read.entry)[cut]
            if piece.size and not (low <= int(piece.min()) and int(piece.max()) <= high):
                found.append(f"{name[:200]!r}: holds {box.dtype} values that {dtype} does not")
                break
    return found


def does_not_fit(where: str, problems: Sequence[str]) -> MismatchError:
    """The error that lists the first ten problems."""
    shown = "\n  ".join(problems[:DIFFERENCES_SHOWN_MAX])
    more = len(problems) - DIFFERENCES_SHOWN_MAX
    return MismatchError(
        f"the state does not fit {where} in {len(problems)} places:\n  {shown}"
        + (f"\n  and {more} more" if more > 0 else "")
        + "\nflashpoint.open lists what is stored; rename= maps a leaf's name to the name of its entry"
    )


def lowest_rank_here(view: CheckpointView) -> int:
    """The lowest rank whose objects lie on this node, or 0: whose copy to take of what every rank stored."""
    records = sorted(view.manifest.objects, key=lambda record: record.id.rank)
    return next((record.id.rank for record in records if view.is_here(record)), 0)


def _asked(
    option: str, leaves: Sequence[LeafName], rule: Mapping[str, _T] | Callable[[str], _T | None] | None
) -> tuple[list[_T | None], list[str]]:
    """What an option says of each leaf, and keys of it that name no leaf."""
    if rule is None:
        return [None] * len(leaves), []
    if not isinstance(rule, Mapping):
        return [rule(leaf.shown) for leaf in leaves], []
    # The very name comes before one that differs in its dots and slashes.
    by_dots = {_dots(key): key for key in rule}
    keys = [next((name for name in leaf if name in rule), by_dots.get(_dots(leaf.dotted))) for leaf in leaves]
    unused = rule.keys() - set(keys)
    wrong = [
        f"{key[:200]!r}: {option}= names it, but the state has no such leaf" for key in rule if key in unused
    ]
    return [None if key is None else rule[key] for key in keys], wrong


def _dots(name: str) -> str:
    return name.replace("/", ".")


def _ambiguous(candidates: Sequence[str]) -> str:
    names = ", ".join(repr(name[:200]) for name in candidates[:_NEAR_MAX])
    return f"may be any of {names}: say which with rename="


def _near(name: str, stored: Mapping[str, Sequence[str]]) -> str:
    """Names much like this one, in words."""
    dotted = _dots(name)
    # What is most often forgotten is a level at the top: state["model"] or its contents.
    found = [other for other in stored if other.endswith(f".{dotted}") or dotted.endswith(f".{other}")]
    if not found and len(stored) <= _COMPARED_MAX:
        found = difflib.get_close_matches(dotted, stored, _NEAR_MAX)
    shown = ", ".join(repr(stored[other][0][:200]) for other in found[:_NEAR_MAX])
    return f"; near: {shown}" if shown else ""


def _kind(dtype: str) -> int:
    if dtype == "bool":
        return 0
    if dtype.startswith(("int", "uint")):
        return 1
    return 3 if dtype.startswith("complex") else 2


def _limits(dtype: str) -> tuple[int, int]:
    known = dtype_of(dtype).numpy
    assert known is not None
    info = np.iinfo(known) if known.kind in "iu" else ml_dtypes.iinfo(known)  # type: ignore[no-untyped-call]
    return int(info.min), int(info.max)
