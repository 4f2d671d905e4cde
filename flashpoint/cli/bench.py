"""Measure this machine: saves and loads of some numpy arrays, each over a memcpy of the same bytes beside it.

A first look, with one process, that takes seconds. FOLDER must lie on a tmpfs for the figures to mean anything; three
times --bytes are needed there, and once more in other memory. Nothing is left behind.

  save, blocking   until training could go on: the copy into memory (numpy's, by one thread)
  save, complete   until the version is checksummed and committed
  first save       nothing prepared: every page is touched for the first time
  checksums        one pass over the bytes, by the threads that seal a version
  load             into arrays that are there, from the version in memory

JSON:
  folder, file_system, cores, bytes, repeats, memcpy_bytes_per_s, checksum_bytes_per_s
  figures[]        medians: name, seconds, bytes_per_s, ratio (over the memcpy beside it)
"""

from __future__ import annotations

import argparse
import os
from typing import Any, Final

from flashpoint.cli.arguments import size
from flashpoint.cli.exit_codes import FINE
from flashpoint.cli.measuring import Measured, measure
from flashpoint.cli.output import Page, plural, print_json
from flashpoint.memory import file_system, human_bytes

NAME: Final = "bench"
HELP: Final = "measure saving and loading on this machine, over a memcpy"
PLACE: Final = "/dev/shm"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", default=PLACE, help=f"a folder on a tmpfs (default: {PLACE})"
    )
    parser.add_argument(
        "--bytes", type=size, default=256 << 20, metavar="SIZE", help="of one version (default: 256MiB)"
    )
    parser.add_argument("--repeats", type=int, default=7, help="of each measurement (default: 7)")


def run(args: argparse.Namespace) -> int:
    folder = os.path.abspath(args.folder)
    kind = file_system(folder).kind
    report = _report(measure(folder, args.bytes, max(args.repeats, 1)), folder, kind)
    if args.json:
        print_json(report)
    else:
        _show(report)
    return FINE


def _report(measured: Measured, folder: str, kind: str) -> dict[str, Any]:
    return {
        "folder": folder,
        "file_system": kind,
        "cores": len(os.sched_getaffinity(0)),
        "bytes": measured.nbytes,
        "repeats": measured.repeats,
        "memcpy_bytes_per_s": measured.bytes_per_s("memcpy"),
        "checksum_bytes_per_s": measured.bytes_per_s("checksums"),
        "figures": [
            {
                "name": one.name,
                "seconds": one.seconds,
                "ratio": one.ratio,
                "bytes_per_s": measured.nbytes / one.seconds,
            }
            for one in measured.figures
        ],
    }


def _show(report: dict[str, Any]) -> None:
    page = Page()
    page.line(
        (report["folder"], "bold"),
        f"  {report['file_system']}, {plural(report['cores'], 'core')}, {human_bytes(report['bytes'])} a version, "
        f"median of {report['repeats']}",
    )
    if report["file_system"] != "tmpfs":
        page.line(
            (f"  {report['file_system']} is no tmpfs: these figures are those of its page cache", "yellow")
        )
    rows = [
        [
            f"{figure['ratio']:.2f}",
            f"{1e3 * figure['seconds']:.1f} ms",
            f"{figure['bytes_per_s'] / (1 << 30):.2f} GiB/s",
            figure["name"],
        ]
        for figure in report["figures"]
    ]
    page.table((">÷ memcpy", ">time", ">rate", ""), rows)
    page.show()
