"""List the versions in job roots on this node, newest first.

states:
  complete  every rank has written it, and its manifest is there
  saving    a living process is writing it
  dirty     a crash left it unfinished; the job's next start removes it
  corrupt   its manifest cannot be read (exit code 1)

Only manifests' first lines are read; `flashpoint verify` checks every byte.

JSON:
  job_roots[]     path, epoch, versions[], pool, file_system
    versions[]    path, step, state, problem, epoch, world_size, bytes, objects, bytes_here,
                  objects_here, markers[] {local_rank, live}, created_unix_s
                  (epoch, world_size, bytes and objects, of all nodes together, are null where no
                  manifest says them)
    pool          files, bytes, free_files, free_bytes  (free: no version names them)
    file_system   kind, mount_point, total_bytes, free_bytes
"""

from __future__ import annotations

import argparse
import os
from typing import Any, Final

from flashpoint.buffers import POOL_NAME
from flashpoint.cli.output import Cell, Page, age, plural, print_json
from flashpoint.cli.versions import CORRUPT, STYLES, StoredVersion, is_container_name, manager, versions_in
from flashpoint.errors import FlashpointError
from flashpoint.memory import file_system, human_bytes
from flashpoint.objects import is_job_root

NAME: Final = "ls"
HELP: Final = "list the versions in job roots"
DEFAULT_PLACE: Final = "/dev/shm"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job_roots",
        metavar="JOB_ROOT",
        nargs="*",
        default=[DEFAULT_PLACE],
        help=f"a job root, or a folder that holds some (default: {DEFAULT_PLACE})",
    )


def run(args: argparse.Namespace) -> int:
    places = [os.path.abspath(path) for path in args.job_roots]
    roots = list(dict.fromkeys(root for place in places for root in _job_roots(place)))
    reports = [report for root in roots if (report := _report(root)) is not None]
    if args.json:
        print_json({"job_roots": reports})
    elif reports:
        _show(reports)
    else:
        page = Page()
        page.line(f"no checkpoints in {', '.join(places)}, nor in the folders directly below")
        page.show()
    return int(any(version["state"] == CORRUPT for report in reports for version in report["versions"]))


def _job_roots(place: str) -> list[str]:
    """The place itself if it is a job root, else those one level below it."""
    names = sorted(os.listdir(place))
    if is_container_name(place):
        raise FlashpointError(f"{place} is one version: `flashpoint inspect` shows it")
    if is_job_root(place):
        return [place]
    return [path for path in (os.path.join(place, name) for name in names) if is_job_root(path)]


def _report(root: str) -> dict[str, Any] | None:
    objects = manager(root)
    try:
        fs = file_system(root)
        versions = versions_in(objects)
    except FileNotFoundError:
        return None  # deleted since it was found
    return {
        "path": root,
        "epoch": objects.read_epoch(),
        "versions": [_version(version) for version in versions],
        "pool": _pool(f"{root}/{POOL_NAME}"),
        "file_system": {
            "kind": fs.kind,
            "mount_point": fs.mount_point,
            "total_bytes": fs.total_bytes,
            "free_bytes": fs.free_bytes,
        },
    }


def _version(version: StoredVersion) -> dict[str, Any]:
    record = version.record
    return {
        "path": version.container.path,
        "step": version.container.step,
        "state": version.state,
        "problem": version.problem,
        "epoch": record.epoch if record else None,
        "world_size": record.world_size if record else None,
        "bytes": sum(obj.nbytes for obj in record.objects) if record else None,
        "objects": len(record.objects) if record else None,
        "bytes_here": version.nbytes,
        "objects_here": len(version.objects),
        "markers": [{"local_rank": rank, "live": live} for rank, live in version.markers],
        "created_unix_s": version.created_unix_s,
    }


def _pool(path: str) -> dict[str, int]:
    # No lock is tried here: even for a moment it would make a save believe that the file is in use.
    sums = {"files": 0, "bytes": 0, "free_files": 0, "free_bytes": 0}
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return sums
    for name in names:
        try:
            status = os.stat(f"{path}/{name}", follow_symlinks=False)
        except FileNotFoundError:
            continue
        nbytes = status.st_blocks * 512
        sums["files"] += 1
        sums["bytes"] += nbytes
        if status.st_nlink == 1:
            sums["free_files"] += 1
            sums["free_bytes"] += nbytes
    return sums


def _show(reports: list[dict[str, Any]]) -> None:
    page = Page()
    for number, report in enumerate(reports):
        if number:
            page.line()
        page.line((report["path"], "bold"))
        if report["versions"]:
            columns = (">step", ">epoch", "state", ">size", ">objects", ">ranks", ">age", "")
            page.table(columns, [_row(version) for version in report["versions"]])
        else:
            page.line("  no versions")
        pool, fs = report["pool"], report["file_system"]
        page.line(
            f"  pool: {plural(pool['files'], 'file')}, {human_bytes(pool['bytes'])}; "
            f"free: {pool['free_files']:,}, {human_bytes(pool['free_bytes'])}"
        )
        page.line(
            f"  {fs['kind']} {fs['mount_point']}: "
            f"{human_bytes(fs['free_bytes'])} of {human_bytes(fs['total_bytes'])} free"
        )
    page.show()


def _row(version: dict[str, Any]) -> list[Cell]:
    here, everywhere = version["objects_here"], version["objects"]
    created = version["created_unix_s"]
    return [
        str(version["step"]),
        _or_dash(version["epoch"]),
        (version["state"], STYLES[version["state"]]),
        human_bytes(version["bytes_here"]),
        str(here) if everywhere in (None, here) else f"{here} of {everywhere}",
        _or_dash(version["world_size"]),
        age(created) if created else "-",
        (version["problem"], "dim"),
    ]


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)
