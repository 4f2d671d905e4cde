"""Verify versions: manifest, sizes, every chunk of every object, and the safetensors headers.

Give containers, or job roots, of which every complete version is verified. A version of a job of
several nodes has objects that never were on this node: --this-node tells that they are no error.

JSON:
  status               ok, corrupt, or unfinished (nothing corrupt, but something was not there to verify)
  bytes, seconds, bytes_per_s     of reading and checking objects
  versions[]           path, step, status (as above, or gone: given up meanwhile), problems[], bytes,
                       objects[]
    objects[]          name, rank, bytes, status (ok, corrupt, missing, elsewhere), problems[], seconds,
                       chunks, broken_chunks[] (their numbers), broken_entries[] (names that lie in them)
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from flashpoint.cli.output import Cell, Page, first_few, plural, print_json
from flashpoint.cli.progress import progress_bar
from flashpoint.cli.verification import verify_version
from flashpoint.cli.versions import (
    COMPLETE,
    CORRUPT,
    StoredVersion,
    container_of,
    is_container_name,
    manager,
    version_of,
    versions_in,
)
from flashpoint.errors import CheckpointNotFoundError
from flashpoint.memory import human_bytes
from flashpoint.objects import is_job_root

NAME: Final = "verify"
HELP: Final = "check every byte of versions against their checksums"

_ROWS_MAX: Final = 30
_STYLES: Final = {"ok": "green", "elsewhere": "dim", "unfinished": "yellow", "gone": "yellow"}
_EXIT_CODES: Final = {"ok": 0, "corrupt": 1, "unfinished": 2}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", metavar="CONTAINER|JOB_ROOT", nargs="+", help="versions, or job roots")
    parser.add_argument(
        "--this-node",
        action="store_true",
        help="do not count objects as missing whose rank has none at all on this node",
    )
    parser.add_argument("--all", action="store_true", help=f"list good objects too if over {_ROWS_MAX}")


def run(args: argparse.Namespace) -> int:
    reports = []
    for version, asked_for in [found for path in args.paths for found in _versions(path)]:
        report = verify_version(version, this_node=args.this_node, progress=progress_bar)
        reports.append((report, asked_for))
        if not args.json:
            _show(report, every_row=args.all)
    summary = _summary(reports)
    if args.json:
        print_json(summary)
    else:
        _show_summary(summary)
    return _EXIT_CODES[summary["status"]]


def _versions(path: str) -> Iterator[tuple[StoredVersion, bool]]:
    """The versions that the path names, and of each whether it names just this one."""
    path = os.path.abspath(path)
    if is_container_name(path) or not is_job_root(path):
        yield version_of(container_of(path)), True
        return
    versions = versions_in(manager(path))
    if not any(version.state in (COMPLETE, CORRUPT) for version in versions):
        raise CheckpointNotFoundError(f"{path} has no complete version to verify")
    yield from ((version, False) for version in versions)


def _summary(reports: list[tuple[dict[str, Any], bool]]) -> dict[str, Any]:
    statuses = {report["status"] for report, _ in reports}
    # Below a job root that is in use, versions come and go: only one asked for by name must be there.
    unmet = any(report["status"] != "ok" for report, asked_for in reports if asked_for)
    if "corrupt" in statuses:
        status = "corrupt"
    else:
        status = "unfinished" if unmet or "ok" not in statuses else "ok"
    nbytes = sum(report["bytes"] for report, _ in reports)
    seconds = sum(obj["seconds"] for report, _ in reports for obj in report["objects"])
    return {
        "status": status,
        "bytes": nbytes,
        "seconds": seconds,
        "bytes_per_s": nbytes / seconds if seconds else 0.0,
        "versions": [report for report, _ in reports],
    }


def _show(report: dict[str, Any], *, every_row: bool) -> None:
    page = Page()
    page.line((report["status"], _style(report["status"])), "  ", (report["path"], "bold"))
    for problem in report["problems"]:
        page.line("  ", (problem, _style(report["status"])))
    objects = report["objects"]
    fold = len(objects) > _ROWS_MAX and not every_row
    shown = [obj for obj in objects if not (fold and obj["status"] in ("ok", "elsewhere"))]
    if shown:
        page.table(("status", ">size", ">chunks", "name", ""), [_row(obj) for obj in shown])
    if fold and len(objects) > len(shown):
        page.line(f"  {plural(len(objects) - len(shown), 'more object')}: nothing wrong (--all lists them)")
    missing = sorted({obj["rank"] for obj in objects if obj["status"] == "missing"})
    if missing:
        page.line(
            f"  hint: if other nodes hold the objects of ranks {first_few([str(rank) for rank in missing])}, "
            "add --this-node"
        )
    page.show()


def _row(obj: dict[str, Any]) -> list[Cell]:
    return [
        (obj["status"], _style(obj["status"])),
        human_bytes(obj["bytes"]),
        f"{obj['chunks']:,}",
        obj["name"],
        "; ".join(obj["problems"]),
    ]


def _show_summary(summary: dict[str, Any]) -> None:
    counts = Counter(report["status"] for report in summary["versions"])
    page = Page()
    page.line(
        ", ".join(f"{plural(count, 'version')} {status}" for status, count in counts.items()),
        f"; {human_bytes(summary['bytes'])} in {summary['seconds']:.2f} s, "
        f"{summary['bytes_per_s'] / (1 << 30):.2f} GiB/s",
    )
    page.show()


def _style(status: str) -> str:
    return _STYLES.get(status, "bold red")
