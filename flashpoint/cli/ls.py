"""List the versions in job roots on this node, newest first. Without an argument, all job roots of this user in memory.

states:
  complete    every rank has written it, and its manifest is there
  saving      a living process is writing it
  dirty       a crash left it unfinished; the job's next start removes it
  corrupt     its manifest cannot be read (exit code 1)
  unreadable  it is another user's

tiers, where a complete version is known to be: memory (this node's), peer (replicated: other nodes hold copies of all
that they should), storage (drained). What is beyond memory is the agent's word, who is asked for --timeout-s at most.

Only manifests' first lines are read; `flashpoint verify` checks every byte.

JSON:
  job_roots[]     path, epoch, versions[], pool, file_system, agent (none, alive, dead, silent, unreadable)
    versions[]    path, step, state, problem, epoch, world_size, bytes, objects, bytes_here,
                  objects_here, markers[] {local_rank, live}, created_unix_s, tiers[]
                  (epoch, world_size, bytes and objects, of all nodes together, are null where no
                  manifest says them)
    pool          files, bytes, free_files, free_bytes  (free: no version names them)
    file_system   kind, mount_point, total_bytes, free_bytes
    storage       null, or drained_epoch, drained_step (null for none), error
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection
from typing import Any, Final

from flashpoint.buffers import POOL_NAME
from flashpoint.cli.discovery import job_roots_of_this_user, memory_places
from flashpoint.cli.output import Cell, Page, age, plural, print_json, show_space
from flashpoint.cli.versions import (
    COMPLETE,
    CORRUPT,
    STYLES,
    StoredVersion,
    is_container_name,
    manager,
    versions_in,
)
from flashpoint.errors import FlashpointError
from flashpoint.memory import file_system, human_bytes
from flashpoint.objects import is_job_root

NAME: Final = "ls"
HELP: Final = "list the versions in job roots"

_AGENTS: Final = {
    "none": "",
    "alive": "  agent alive",
    "dead": "  agent dead: `flashpoint status` tells more",
    "silent": "  agent silent: `flashpoint status` tells more",
    "unreadable": "  agent folder unreadable: `flashpoint status` tells more",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job_roots",
        metavar="JOB_ROOT",
        nargs="*",
        help="a job root, or a folder that holds some (default: this user's in /dev/shm and other tmpfs)",
    )
    parser.add_argument(
        "--timeout-s", type=float, default=2.0, help="longest wait for each agent's answer (default: 2)"
    )


def run(args: argparse.Namespace) -> int:
    places = [os.path.abspath(path) for path in args.job_roots]
    roots = [root for place in places for root in _job_roots(place)] if places else job_roots_of_this_user()
    reports = [
        report for root in dict.fromkeys(roots) if (report := _report(root, args.timeout_s)) is not None
    ]
    if args.json:
        print_json({"job_roots": reports})
    elif reports:
        _show(reports)
    else:
        page = Page()
        if places:
            page.line(f"no checkpoints in {', '.join(places)}, nor in the folders directly below")
        else:
            where = ", ".join(memory_places()) or "memory: no tmpfs is mounted"
            page.line(f"no checkpoints of user {os.geteuid()} in {where}")
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


def _report(root: str, timeout_s: float) -> dict[str, Any] | None:
    from flashpoint.cli.agents import ask  # with ZeroMQ: not for --help, nor where nothing is found

    objects = manager(root)
    try:
        fs = file_system(root)
        versions = versions_in(objects)
    except FileNotFoundError:
        return None  # deleted since it was found
    heard = ask(root, timeout_s)
    told = heard.report.versions if heard.report is not None else ()
    replicated = {
        (one.key.epoch, one.key.step)
        for one in told
        if one.state == "replicated" and all(len(nodes) > 1 for nodes in one.holders.values())
    }
    storage = heard.report.storage if heard.report is not None else None
    drained = (storage.epoch, storage.step) if storage is not None and storage.step >= 0 else None
    return {
        "path": root,
        "epoch": objects.read_epoch(),
        "agent": heard.state,
        "versions": [_version(version, replicated, drained) for version in versions],
        "pool": _pool(f"{root}/{POOL_NAME}"),
        "file_system": {
            "kind": fs.kind,
            "mount_point": fs.mount_point,
            "total_bytes": fs.total_bytes,
            "free_bytes": fs.free_bytes,
        },
        "storage": None
        if storage is None
        else {
            "drained_epoch": drained[0] if drained else None,
            "drained_step": drained[1] if drained else None,
            "error": storage.error,
        },
    }


def _version(
    version: StoredVersion, replicated: Collection[tuple[int, int]], drained: tuple[int, int] | None
) -> dict[str, Any]:
    record = version.record
    key = (record.epoch, record.step) if record else None
    tiers = [("memory", True), ("peer", key in replicated), ("storage", key == drained)]
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
        "tiers": [name for name, is_there in tiers if is_there] if version.state == COMPLETE else [],
    }


def _pool(path: str) -> dict[str, int]:
    # No lock is tried here: even for a moment it would make a save believe that the file is in use.
    sums = {"files": 0, "bytes": 0, "free_files": 0, "free_bytes": 0}
    try:
        names = os.listdir(path)
    except (FileNotFoundError, PermissionError):
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
        agent = report["agent"]
        page.line((report["path"], "bold"), (_AGENTS[agent], "dim" if agent == "alive" else "bold red"))
        if report["versions"]:
            columns = (">step", ">epoch", "state", ">size", ">objects", ">ranks", ">age", "tiers", "")
            page.table(columns, [_row(version) for version in report["versions"]])
        else:
            page.line("  no versions")
        storage = report["storage"]
        if storage is not None and storage["drained_step"] is not None:
            page.line(
                f"  storage: step {storage['drained_step']} of epoch {storage['drained_epoch']} is drained"
            )
        if storage is not None and storage["error"]:
            page.line("  ", (f"storage: {storage['error']}", "bold red"))
        pool, fs = report["pool"], report["file_system"]
        page.line(
            f"  pool: {plural(pool['files'], 'file')}, {human_bytes(pool['bytes'])}; "
            f"free: {pool['free_files']:,}, {human_bytes(pool['free_bytes'])}"
        )
        show_space(page, fs)
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
        " ".join(version["tiers"]) or "-",
        (version["problem"], "dim"),
    ]


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)
