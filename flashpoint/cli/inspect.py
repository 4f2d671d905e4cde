"""Show one version: its record, objects, tensors and plain values.

NAME is an entry's or value's exact name, or else a glob ('*.weight') that selects some. For one tensor
given by its exact name, its bytes are verified and statistics are computed, in little memory. An entry that
was pickled is never unpickled.

An unfinished version is shown as far as it goes, and called unfinished.

JSON:
  path, step, state (as in `flashpoint ls`), problem, epoch, world_size, writer, created_unix_s,
  manifest_digest               null where there is no manifest
  markers[]                     local_rank, live
  objects[]                     name, rank, bytes, chunk_bytes, chunks, links (null if not on this node), holders
                                (indexes of the nodes that hold it; null where the job's agent does not say)
  entries[]                     name, dtype, shape, global_shape, offsets, object, begin, bytes,
                                codec (how the bytes encode a Python object; empty or numpy for a tensor)
  values[]                      name, rank, value (as flashpoint.values encodes it)
  totals[]                      dtype, codec, entries, elements, bytes: of the entries shown
  statistics                    null, or elements, min, max, mean, std, nan, inf, zeros (numbers that do
                                not exist are null), histogram (null, or edges[] counts[]), or note: why
                                there are none
  NAME selects among entries and values; no limit applies.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Collection
from typing import Any, Final

from flashpoint.cli.agents import ask
from flashpoint.cli.contents import report_of, statistics_of
from flashpoint.cli.output import Cell, Page, age, local_time, plural, print_json, shortened
from flashpoint.cli.standing import holders_of
from flashpoint.cli.versions import (
    COMPLETE,
    DIRTY,
    SAVING,
    STYLES,
    StoredVersion,
    container_of,
    manager,
    version_of,
)
from flashpoint.errors import CheckpointNotFoundError, ManifestError
from flashpoint.layout import ARRAY_CODECS
from flashpoint.manifest import Value, plain_value
from flashpoint.memory import human_bytes

NAME: Final = "inspect"
HELP: Final = "show one version: its objects, tensors, values and statistics"

_AGENT_S: Final = 1.0  # that it is waited for
_BAR_LENGTH: Final = 40
_ROWS_MAX: Final = 30
_VALUE_LENGTH_MAX: Final = 80


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("container", metavar="CONTAINER", help="a version's folder, .../step-<n>_ckpt")
    parser.add_argument("name", metavar="NAME", nargs="?", help="a name, or a glob over names")
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument(
        "--limit",
        type=int,
        default=_ROWS_MAX,
        metavar="ROWS",
        help=f"rows of each table (default: {_ROWS_MAX})",
    )
    rows.add_argument("--all", action="store_true", help="show every row")
    parser.add_argument(
        "--rank", type=int, default=0, help="whose copy, where every rank saved its own (default: 0)"
    )


def run(args: argparse.Namespace) -> int:
    container = container_of(args.container)
    version = version_of(container)
    objects = manager(container.job_root)
    try:
        manifest = objects.read_manifest(container)
    except (CheckpointNotFoundError, ManifestError):
        if version.state not in (SAVING, DIRTY):
            raise
        manifest = None
    report = report_of(version, manifest, args.name, args.rank, _holders(version))

    def statistics() -> dict[str, Any] | None:
        if manifest is None or args.name is None:
            return None
        return statistics_of(objects, version, manifest, args.name, args.rank)

    if args.json:
        print_json({**report, "statistics": statistics()})
    else:
        _show(report, args.name, None if args.all else max(args.limit, 0), statistics)
    return 0


def _holders(version: StoredVersion) -> dict[str, Collection[int]]:
    """Object -> the nodes that hold it, if the job has an agent that says so at once."""
    container = version.container
    if version.record is None:
        return {}
    heard = ask(container.job_root, _AGENT_S)
    membership = heard.assignment.membership if heard.assignment is not None else None
    for told in heard.report.versions if heard.report is not None else ():
        if (told.key.epoch, told.key.step) == (version.record.epoch, container.step):
            return holders_of(told, membership)
    return {}


def _show(
    report: dict[str, Any],
    name: str | None,
    limit: int | None,
    statistics: Callable[[], dict[str, Any] | None],
) -> None:
    page = Page()
    _show_record(page, report)
    if name is None:
        _show_objects(page, report["objects"], limit)
    if report["entries"] or (name is None and report["manifest_digest"]):
        _show_entries(page, report["entries"], limit)
    exact = name is not None and [value["name"] for value in report["values"]] == [name]
    _show_values(page, report["values"], limit, None if exact else _VALUE_LENGTH_MAX)
    if len(report["entries"]) > 1:
        _show_totals(page, report["totals"])
    page.show()  # before the statistics, which may take a while, or find a corrupt chunk
    found = statistics()
    if found is not None:
        _show_statistics(page, found)
        page.show()


def _show_record(page: Page, report: dict[str, Any]) -> None:
    state = report["state"]
    page.line((report["path"], "bold"), "  ", (state, STYLES[state]))
    if state != COMPLETE:
        alive = {True: "saving", False: "dead"}
        markers = ", ".join(f"local rank {m['local_rank']} {alive[m['live']]}" for m in report["markers"])
        page.line((f"  unfinished: {report['problem']}{f' ({markers})' if markers else ''}", "yellow"))
    created = report["created_unix_s"]
    if report["manifest_digest"] is not None:
        page.line(
            f"  step {report['step']}, epoch {report['epoch']}, {plural(report['world_size'], 'rank')}, "
            f"written by {report['writer'] or 'unknown'}, {local_time(created)} ({age(created)} ago)"
        )
    elif created:
        page.line(f"  no manifest to read; last changed {age(created)} ago")


def _show_objects(page: Page, objects: list[dict[str, Any]], limit: int | None) -> None:
    _heading(page, "objects", objects, sum(obj["bytes"] for obj in objects))
    known = any(obj["holders"] is not None for obj in objects)
    rows: list[list[Cell]] = [
        [
            str(obj["rank"]),
            human_bytes(obj["bytes"]),
            "-" if obj["chunks"] is None else f"{obj['chunks']:,} x {human_bytes(obj['chunk_bytes'])}",
            ("not here", "yellow") if obj["links"] is None else str(obj["links"]),
            *([", ".join(map(str, obj["holders"] or ["?"]))] if known else []),
            obj["name"],
        ]
        for obj in objects[:limit]
    ]
    if rows:
        page.table((">rank", ">size", ">chunks", ">links", *(["nodes"] if known else []), "name"), rows)
    _more(page, len(objects), len(rows))


def _show_entries(page: Page, entries: list[dict[str, Any]], limit: int | None) -> None:
    _heading(page, "entries", entries, sum(entry["bytes"] for entry in entries))
    shown = entries[:limit]
    if shown:
        sharded = any(entry["shape"] != entry["global_shape"] for entry in shown)
        several = len({entry["object"] for entry in entries}) > 1
        columns = (">size", "dtype", "shape", "part of the whole", "object", "name")
        wanted = [True, True, True, sharded, several, True]
        rows = [[cell for cell, w in zip(_entry_row(entry), wanted, strict=True) if w] for entry in shown]
        page.table([column for column, w in zip(columns, wanted, strict=True) if w], rows)
    _more(page, len(entries), len(shown))


def _entry_row(entry: dict[str, Any]) -> list[Cell]:
    shape, whole = entry["shape"], entry["global_shape"]
    part = ", ".join(f"{start}:{start + n}" for start, n in zip(entry["offsets"], shape, strict=True))
    return [
        human_bytes(entry["bytes"]),
        (pickled, "magenta") if (pickled := _pickled(entry["codec"])) else (entry["dtype"], "cyan"),
        str(list(shape)),
        "" if shape == whole else f"[{part}] of {list(whole)}",
        os.path.splitext(entry["object"])[0],
        entry["name"],
    ]


def _pickled(codec: str) -> str:
    return "" if codec in ARRAY_CODECS else f"pickled ({codec})"


def _show_values(page: Page, values: list[dict[str, Any]], limit: int | None, length_max: int | None) -> None:
    if not values:
        return
    _heading(page, "values", values, None)
    rows = []
    for value in values[:limit]:
        text = re.sub(
            r"\n\s*", " ", repr(plain_value(Value(value["name"], value["value"])))
        )  # an array's lines
        rows.append([value["name"], text if length_max is None else shortened(text, length_max)])
    if rows:
        page.table(("name", "value"), rows)
    _more(page, len(values), len(rows))


def _show_totals(page: Page, totals: list[dict[str, Any]]) -> None:
    page.line()
    page.line(("totals", "bold"))
    rows = [
        [
            human_bytes(total["bytes"]),
            f"{total['entries']:,}",
            f"{total['elements']:,}",
            _pickled(total["codec"]) or total["dtype"],
        ]
        for total in totals
    ]
    page.table((">size", ">entries", ">elements", "dtype"), rows)


def _show_statistics(page: Page, found: dict[str, Any]) -> None:
    page.line()
    page.line(("statistics", "bold"))
    if "note" in found:
        page.line(f"  {found['note']}")
        return
    page.line("  ", "   ".join(f"{key} {_number(found[key])}" for key in ("min", "max", "mean", "std")))
    elements, zeros = found["elements"], found["zeros"]
    page.line(
        "  ",
        (f"NaN {found['nan']:,}   inf {found['inf']:,}", "bold red" if found["nan"] or found["inf"] else ""),
        f"   zeros {zeros:,} ({zeros / max(elements, 1):.1%}) of {plural(elements, 'element')}",
    )
    if found["histogram"] is not None:
        _show_histogram(page, found["histogram"])


def _show_histogram(page: Page, histogram: dict[str, list[float]]) -> None:
    """A bar for each bin, as long as its share of the largest; what is there at all has one mark at least."""
    edges, counts = histogram["edges"], histogram["counts"]
    most = max(*counts, 1)
    page.table(
        (">from", ">elements", ""),
        [
            [f"{edge:.4g}", f"{count:,}", ("#" * math.ceil(count * _BAR_LENGTH / most), "cyan")]
            for edge, count in zip(edges, counts, strict=False)
        ],
    )


def _number(value: float | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.6g}"


def _heading(page: Page, what: str, rows: list[dict[str, Any]], nbytes: int | None) -> None:
    page.line()
    size = "" if nbytes is None else f", {human_bytes(nbytes)}"
    page.line((what, "bold"), f"  {len(rows):,}{size}")


def _more(page: Page, total: int, shown: int) -> None:
    if total > shown:
        page.line((f"  ... and {total - shown:,} more: --all shows them, a NAME selects", "dim"))
