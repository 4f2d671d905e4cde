"""Remove versions, or with --job all that a dead job has left in this node's memory.

Refuses (exit code 4) while an agent or a trainer uses the job root, and where no loadable version would be left on
this node, unless --force says so; --force with --job ends the agent. A version that is being saved is never removed.
Asks on a terminal; elsewhere --yes must say that it is meant. Memory that nothing needs any more is given back.

Other nodes keep what they have: run it on each of them.

JSON:
  job_root, job_removed (whether the whole root is gone), freed_bytes
  removed[]      step, state (as in `flashpoint ls`), bytes
  left[]         names in the job root that are not Flashpoint's, and were left
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Sequence
from typing import Final

from flashpoint.cli.exit_codes import FINE, RefusedError
from flashpoint.cli.output import Page, first_few, plural, print_json, printable
from flashpoint.cli.versions import (
    COMPLETE,
    SAVING,
    StoredVersion,
    container_of,
    is_container_name,
    require_job_root,
    versions_in,
)
from flashpoint.config import FlashpointConfig
from flashpoint.errors import CheckpointNotFoundError, FlashpointError
from flashpoint.ids import CheckpointObjectId
from flashpoint.memory import human_bytes
from flashpoint.objects import CheckpointObjectManager

NAME: Final = "rm"
HELP: Final = "remove versions, or all of a dead job"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="JOB_ROOT|CONTAINER", help="a job root, or one version's folder")
    parser.add_argument("steps", metavar="STEP", type=int, nargs="*", help="steps to remove, of a job root")
    parser.add_argument("--job", action="store_true", help="remove everything: the job will not go on")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--force", action="store_true", help="also while it is in use, or if nothing loadable is left"
    )


def run(args: argparse.Namespace) -> int:
    from flashpoint import removal
    from flashpoint.cli.agents import users_of
    from flashpoint.replication.agent import stop_agent

    job_root, steps = _asked_for(args)
    # As the agent: its own buffers, and those of ranks that are no more, are its to give back.
    objects = CheckpointObjectManager(job_root, rank=None, config=FlashpointConfig(), create=False)
    versions = versions_in(objects)
    chosen = versions if args.job else _chosen(versions, steps, job_root)
    saving = [version.container.step for version in chosen if version.state == SAVING]
    if saving:
        raise RefusedError(f"step {saving[0]} of {job_root} is being saved: end the trainer first")
    users = users_of(job_root)
    reasons = [*users, *_loss(objects, versions, chosen)]
    if reasons and not args.force:
        raise RefusedError(f"{job_root}: {'; '.join(reasons)} (--force removes it all the same)")
    if not args.yes and not _is_meant(job_root, chosen, reasons, args):
        raise RefusedError("nothing was removed")

    used = objects.pool.used_bytes()
    left: list[str] = []
    if args.job:
        stop_agent(job_root)
        left = removal.remove_job_root(objects)
    else:
        removal.remove_versions(objects, [version.container.step for version in reversed(chosen)])
        if not users:
            removal.free_buffers(objects)
    freed = used - objects.pool.used_bytes()
    objects.close()
    if args.json:
        print_json(
            {
                "job_root": job_root,
                "job_removed": not os.path.lexists(job_root),
                "freed_bytes": freed,
                "removed": [{"step": v.container.step, "state": v.state, "bytes": v.nbytes} for v in chosen],
                "left": left,
            }
        )
    else:
        _show(job_root, chosen, freed, left, users, whole_job=args.job)
    return FINE


def _asked_for(args: argparse.Namespace) -> tuple[str, list[int]]:
    """The job root, and the steps to remove."""
    if is_container_name(args.path):
        if args.steps or args.job:
            raise FlashpointError(f"{args.path} is one version: give either it, or its job root and more")
        container = container_of(args.path)
        return require_job_root(container.job_root), [container.step]
    job_root = require_job_root(args.path)
    if bool(args.steps) == args.job:
        raise FlashpointError(
            f"say which steps of {job_root} to remove (`flashpoint ls {job_root}` lists them), "
            "or --job for all that is there"
        )
    return job_root, args.steps


def _chosen(versions: Sequence[StoredVersion], steps: Collection[int], job_root: str) -> list[StoredVersion]:
    found = {version.container.step: version for version in versions}
    missing = [str(step) for step in steps if step not in found]
    if missing:
        raise CheckpointNotFoundError(
            f"{job_root} has no step {first_few(missing)}; "
            + (f"it has {first_few([str(step) for step in found])}" if found else "it has no versions")
        )
    return [version for version in versions if version.container.step in steps]


def _loss(
    objects: CheckpointObjectManager, versions: Sequence[StoredVersion], chosen: Sequence[StoredVersion]
) -> list[str]:
    """Why the job could not go on from this node's memory afterwards, if it could not."""
    loadable = [version for version in versions if _is_loadable(objects, version)]
    going = [version for version in loadable if version in chosen]
    if not going or len(going) < len(loadable):
        return []
    steps = first_few([str(version.container.step) for version in going])
    return [f"nothing that could be loaded would be left here: it would be the last, step {steps}"]


def _is_loadable(objects: CheckpointObjectManager, version: StoredVersion) -> bool:
    """Whether it is complete, with all objects of each rank that has some here."""
    if version.state != COMPLETE or version.record is None:
        return False
    records = version.record.objects
    held = objects.held_objects(version.container, records)
    ranks = {CheckpointObjectId.parse(name).rank for name in version.objects}
    return bool(held) and held == {record.name for record in records if record.id.rank in ranks}


def _is_meant(
    job_root: str, chosen: Sequence[StoredVersion], reasons: Sequence[str], args: argparse.Namespace
) -> bool:
    """Ask, on a terminal; anywhere else it was not said."""
    if args.json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise RefusedError(f"{job_root}: --yes must say that it is meant, where nobody can be asked")
    names = [f"step {v.container.step} ({v.state}, {human_bytes(v.nbytes)})" for v in chosen]
    lines = [f"{job_root}: " + ("the whole job" if args.job else first_few(names))]
    if args.job and names:
        lines.append(f"  with {first_few(names)}")
    lines += [f"  although {reason}" for reason in reasons]
    sys.stderr.write("".join(printable(line) + "\n" for line in lines) + "remove it? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _show(
    job_root: str,
    chosen: Sequence[StoredVersion],
    freed: int,
    left: Sequence[str],
    users: Sequence[str],
    *,
    whole_job: bool,
) -> None:
    page = Page()
    if whole_job:
        gone = "is gone" if not os.path.lexists(job_root) else "is empty of checkpoints"
        page.line((job_root, "bold"), f" {gone}, with {plural(len(chosen), 'version')}")
    else:
        steps = ", ".join(str(version.container.step) for version in chosen)
        page.line((job_root, "bold"), f": step {steps} removed")
    page.line(f"  {human_bytes(freed)} of memory given back")
    if users and not whole_job:
        page.line("  its buffers stay with the trainer, to be written again")
    if left:
        page.line(f"  left there, since it is not Flashpoint's: {first_few(list(left))}")
    page.show()
