"""Bring one version from memory to long-term storage by hand, whether or not an agent lives.

The newest complete version, or --step. Every byte is compared with its checksums on its way out, and read back.
Objects come first and the manifest last: with it, the version is drained. In a job of several nodes each brings what
it holds; while something is missing, the exit code is 2, and the ranks whose nodes are to do the same are named. Called
again, it goes on where it was cut off. Recovery finds it there if the job is started with storage= this URL.

An agent deletes old drained versions of the storage that it drains to (storage_keep_last): what is to be kept for
longer should go to a URL of its own.

JSON:
  job_root, url, epoch, step
  status             drained, already (it was there), or unfinished
  bytes              of the version that this node holds
  uploaded_bytes     written by this call
  seconds, bytes_per_s, read_back
  missing_objects    number of objects that no node has brought yet
  missing_ranks[]    whose they are
"""

from __future__ import annotations

import argparse
from typing import Any, Final

from flashpoint.cli.exit_codes import FINE, NOT_FOUND, RefusedError
from flashpoint.cli.output import Page, first_few, plural, print_json
from flashpoint.cli.progress import progress_bar
from flashpoint.cli.versions import require_job_root
from flashpoint.config import FlashpointConfig
from flashpoint.ids import CheckpointObjectId
from flashpoint.memory import human_bytes
from flashpoint.objects import CheckpointObjectManager

NAME: Final = "drain"
HELP: Final = "bring a version from memory to long-term storage now"

_STATUSES: Final = {"drained": "green", "already": "green", "unfinished": "yellow"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job_root", metavar="JOB_ROOT", help="the job's folder on this node")
    parser.add_argument(
        "--to",
        metavar="URL",
        required=True,
        help="file:///folder (or /folder), s3://bucket/prefix, gs://bucket/prefix",
    )
    parser.add_argument(
        "--step", metavar="STEP", type=int, help="which version (default: the newest complete one)"
    )
    parser.add_argument(
        "--bytes-per-s", metavar="SIZE", help="most that is written in a second, such as 256MiB; 0: no limit"
    )
    parser.add_argument(
        "--timeout-s", metavar="SECONDS", help="longest wait for one request (FLASHPOINT_STORAGE_TIMEOUT_S)"
    )
    parser.add_argument("--no-read-back", action="store_true", help="do not read back what was written")
    parser.add_argument(
        "--force", action="store_true", help="give up another version's drain that was begun there"
    )


def run(args: argparse.Namespace) -> int:
    from flashpoint.storage import by_hand

    job_root = require_job_root(args.job_root)
    url = f"file://{args.to}" if args.to.startswith("/") else args.to
    config = FlashpointConfig.from_env(
        storage=url, storage_bytes_per_s=args.bytes_per_s or "0", storage_timeout_s=args.timeout_s
    )
    objects = CheckpointObjectManager(job_root, rank=None, config=config, create=False)
    item = by_hand.choose(objects, args.step)
    others = by_hand.others_under_way(config, item.key)
    if others and not args.force:
        raise RefusedError(
            f"{url}: a drain of step {others[0].step} was begun there, and would be given up: "
            "if the job's agents are at it, wait; if it was cut off, --force"
        )
    read_back = not args.no_read_back
    nbytes = sum(item.records[name].nbytes for name in item.held)
    with progress_bar(f"step {item.key.step}", nbytes * (2 if read_back else 1)) as advance:
        done = by_hand.drain(objects, config, item, read_back=read_back, advance=advance)
    objects.close()

    status = "already" if done.was_there else "unfinished" if done.missing else "drained"
    ranks = sorted({CheckpointObjectId.parse(name).rank for name in done.missing})
    report = {
        "job_root": job_root,
        "url": url,
        "epoch": done.key.epoch,
        "step": done.key.step,
        "status": status,
        "bytes": done.nbytes,
        "uploaded_bytes": done.uploaded_nbytes,
        "seconds": done.seconds,
        "bytes_per_s": done.uploaded_nbytes / done.seconds,
        "read_back": read_back and not done.was_there,
        "missing_objects": len(done.missing),
        "missing_ranks": ranks,
    }
    if args.json:
        print_json(report)
    else:
        _show(report)
    return NOT_FOUND if done.missing else FINE


def _show(report: dict[str, Any]) -> None:
    page = Page()
    status, step, url = report["status"], report["step"], report["url"]
    words = {
        "drained": f"step {step} is drained to {url}",
        "already": f"step {step} is there already: {url}",
        "unfinished": f"step {step} is not whole there yet: {url}",
    }
    page.line((words[status], _STATUSES[status]))
    if status == "already":
        page.show()
        return
    nbytes, uploaded = report["bytes"], report["uploaded_bytes"]
    before = f", {human_bytes(nbytes - uploaded)} were there" if uploaded < nbytes else ""
    page.line(
        f"  {human_bytes(uploaded)} written{before}, in {report['seconds']:.1f} s "
        f"({human_bytes(report['bytes_per_s'])}/s)" + (", and read back" if report["read_back"] else "")
    )
    if report["missing_objects"]:
        ranks = first_few([str(rank) for rank in report["missing_ranks"]])
        page.line(
            f"  still missing: {plural(report['missing_objects'], 'object')} of rank {ranks}. On their nodes:  "
            f"flashpoint drain {report['job_root']} --to {url} --step {step}"
        )
    page.show()
