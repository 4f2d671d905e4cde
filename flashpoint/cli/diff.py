"""Show what differs between two versions: which tensors and values, and by how much.

  flashpoint diff .../step-100_ckpt .../step-200_ckpt   two versions, of one job or of two
  flashpoint diff .../step-100_ckpt 200                 another step of the same job
  flashpoint diff JOB_ROOT                              the two newest complete versions

A version is a container, in memory or drained to a folder, or a step or item of Orbax's that Flashpoint wrote. Ranks
and shardings may differ. Equal checksums are taken for equal bytes, which are not read; what is read is verified, a few
MiB at a time. NaN equals NaN here, and -0 equals 0: what differs only so is told, and counts as different.

Exit codes: 0 equal, 1 different (or something is corrupt), 2 not all of it is on this node, so that nobody knows.

JSON:
  before, after   path, step, epoch, world_size, created_unix_s
  equal           true, false, or null: not known
  counts          of the tensors and values, by status
  tensors[]       name, name_after (if it is another), status (changed, added, removed, dtype, shape, not here;
                  equal with --all), dtype_before, dtype_after, shape_before, shape_after (null if not there),
                  difference
    difference    null, or elements, differing (in their bytes), changed (in their values), max_abs, norm (of the
                  change), relative_norm (over that of the values before), nan_before, nan_after, inf_before,
                  inf_after; the sizes are over what is finite before and after, and null where there are none
  values[]        name, status, before, after (as flashpoint.values encodes them)
  bytes_read, seconds
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from typing import Any, Final

from flashpoint.cli.comparison import (
    ADDED,
    CHANGED,
    EQUAL,
    NOT_HERE,
    OTHER_DTYPE,
    OTHER_SHAPE,
    REMOVED,
    bytes_of,
    compare,
)
from flashpoint.cli.exit_codes import BAD, FINE, NOT_FOUND
from flashpoint.cli.output import Cell, Page, age, plural, print_json, shortened
from flashpoint.cli.progress import progress_bar
from flashpoint.cli.versions import manager
from flashpoint.errors import CheckpointNotFoundError, FlashpointError
from flashpoint.memory import human_bytes
from flashpoint.objects import is_job_root
from flashpoint.view import CheckpointView, open_container

NAME: Final = "diff"
HELP: Final = "show what differs between two versions, and by how much"

_ROWS_MAX: Final = 30
_VALUE_LENGTH_MAX: Final = 40
_ORDER: Final = (REMOVED, ADDED, OTHER_SHAPE, OTHER_DTYPE, NOT_HERE, CHANGED, EQUAL)
_STYLES: Final = {EQUAL: "green", CHANGED: "yellow", ADDED: "cyan", REMOVED: "magenta"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="BEFORE", help="a version's folder, or a job root")
    parser.add_argument("after", metavar="AFTER", nargs="?", help="another, or a step of the same job root")
    parser.add_argument("--name", metavar="GLOB", help="only tensors and values whose names match")
    parser.add_argument(
        "--rank", type=int, default=0, help="whose copy, where every rank saved its own (default: 0)"
    )
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument(
        "--limit",
        type=int,
        default=_ROWS_MAX,
        metavar="ROWS",
        help=f"rows of each table (default: {_ROWS_MAX})",
    )
    rows.add_argument("--all", action="store_true", help="every row, and what is equal too")


def run(args: argparse.Namespace) -> int:
    start_s = time.perf_counter()
    paths = _paths(args.before, args.after)
    with (
        open_container(paths[0], rank=args.rank) as before,
        open_container(paths[1], rank=args.rank) as after,
    ):
        with progress_bar("comparing", bytes_of(before)) as advance:
            found = compare(before, after, args.name, advance)
        sides = {"before": _side(before), "after": _side(after)}
    if args.name is not None and not (found["tensors"] or found["values"]):
        raise CheckpointNotFoundError(f"neither version has anything that matches {args.name!r}")
    counts = Counter(one["status"] for one in (*found["tensors"], *found["values"]))
    differ = counts.total() - counts[EQUAL] - counts[NOT_HERE]
    equal = False if differ else None if counts[NOT_HERE] else True
    if not args.all:
        for kind in ("tensors", "values"):
            found[kind] = [one for one in found[kind] if one["status"] != EQUAL]
    report = {
        **sides,
        "equal": equal,
        "counts": dict(counts),
        **found,
        "seconds": time.perf_counter() - start_s,
    }
    if args.json:
        print_json(report)
    else:
        _show(report, None if args.all else max(args.limit, 0))
    return {True: FINE, False: BAD, None: NOT_FOUND}[equal]


def _paths(before: str, after: str | None) -> tuple[str, str]:
    before = os.path.abspath(before)
    if after is not None:
        if after.isdecimal() and not os.path.lexists(after):
            root = before if is_job_root(before) else os.path.dirname(before)
            return before, manager(root).container(int(after)).path
        return before, os.path.abspath(after)
    if not is_job_root(before):
        raise FlashpointError(f"{before} is one version: give another one to compare it with")
    objects = manager(before)
    steps = objects.complete_steps()[:2]
    if len(steps) < 2:
        raise CheckpointNotFoundError(
            f"{before} has {plural(len(steps), 'complete version')}: there is nothing to compare"
        )
    return objects.container(steps[1]).path, objects.container(steps[0]).path


def _side(view: CheckpointView) -> dict[str, Any]:
    record = view.manifest.record
    return {
        "path": view.container.path,
        "step": record.step,
        "epoch": record.epoch,
        "world_size": record.world_size,
        "created_unix_s": record.created_unix_s,
    }


def _show(report: dict[str, Any], limit: int | None) -> None:
    page = Page()
    for sign, side in (("-", report["before"]), ("+", report["after"])):
        page.line(
            f"{sign} ",
            (side["path"], "bold"),
            f"  step {side['step']}, epoch {side['epoch']}, {plural(side['world_size'], 'rank')}, "
            f"{age(side['created_unix_s'])} old",
        )
    for kind, show in (("tensors", _tensor_rows), ("values", _value_rows)):
        rows = sorted(report[kind], key=_by_size)
        if rows:
            page.line()
            page.line((kind, "bold"), f"  {len(rows):,}")
            page.table(*show(rows[:limit]))
            if limit is not None and len(rows) > limit:
                page.line((f"  ... and {len(rows) - limit:,} more: --all shows them, --name selects", "dim"))
    page.line()
    counts = ", ".join(
        f"{report['counts'][status]:,} {status}" for status in _ORDER if report["counts"].get(status)
    )
    verdict = {
        True: ("equal", "bold green"),
        False: ("different", "bold yellow"),
        None: ("not known", "bold red"),
    }
    page.line(
        verdict[report["equal"]],
        f"  {counts or 'nothing to compare'}; {human_bytes(report['bytes_read'])} read in {report['seconds']:.2f} s",
    )
    page.show()


def _by_size(one: dict[str, Any]) -> tuple[int, float]:
    """What is not on both sides first, then the largest relative change."""
    difference = one.get("difference") or {}
    relative = difference.get("relative_norm")
    return _ORDER.index(one["status"]), -(float("inf") if relative is None else relative)


def _tensor_rows(tensors: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[list[Cell]]]:
    columns = ("", ">elements", ">changed", ">max change", ">relative", "dtype", "shape", "name", "")
    return columns, [_tensor_row(tensor) for tensor in tensors]


def _tensor_row(tensor: dict[str, Any]) -> list[Cell]:
    found = tensor["difference"]
    numbers: list[Cell] = ["", "", "", ""]
    if found is not None:
        numbers = [
            f"{found['elements']:,}",
            f"{found['changed']:,}",
            _number(found["max_abs"]),
            "-" if found["relative_norm"] is None else f"{found['relative_norm']:.3g}",
        ]
    name = tensor["name"] + (f" -> {tensor['name_after']}" if "name_after" in tensor else "")
    return [
        (tensor["status"], _STYLES.get(tensor["status"], "bold red")),
        *numbers,
        _change(tensor["dtype_before"], tensor["dtype_after"]),
        _change(*(shape and str(list(shape)) for shape in (tensor["shape_before"], tensor["shape_after"]))),
        name,
        (_remark(found), "bold red"),
    ]


def _change(before: str | None, after: str | None) -> str:
    return (
        before or after or ""
        if before is None or after is None or before == after
        else f"{before} -> {after}"
    )


def _remark(found: dict[str, Any] | None) -> str:
    """What is not to be overlooked: NaN, inf, and bytes that changed without the value."""
    if found is None:
        return ""
    remarks = [
        f"{name} {found[f'{key}_before']:,} -> {found[f'{key}_after']:,}"
        for key, name in (("nan", "NaN"), ("inf", "inf"))
        if found[f"{key}_before"] or found[f"{key}_after"]
    ]
    if only_bits := max(found["differing"] - found["changed"], 0):
        remarks.append(f"{only_bits:,} in their bits alone")
    return ", ".join(remarks)


def _value_rows(values: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[list[Cell]]]:
    return ("", "before", "after", "name"), [
        [
            (value["status"], _STYLES.get(value["status"], "")),
            "" if value["status"] == ADDED else shortened(repr(value["before"]), _VALUE_LENGTH_MAX),
            "" if value["status"] == REMOVED else shortened(repr(value["after"]), _VALUE_LENGTH_MAX),
            value["name"],
        ]
        for value in values
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
