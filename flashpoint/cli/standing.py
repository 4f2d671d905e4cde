"""How a job stands, as plain data: the report that `flashpoint status` prints or shows. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from flashpoint.cli.agents import Heard
from flashpoint.cli.versions import COMPLETE, StoredVersion
from flashpoint.ids import CheckpointObjectId
from flashpoint.replication.membership import Membership
from flashpoint.replication.orders import OPEN, VersionReport
from flashpoint.replication.placement import Slot
from flashpoint.replication.what_if import Aftermath, losses, what_if
from flashpoint.retention import Version

HERE: Final = "here"
ALIVE: Final = "alive"
SILENT: Final = "silent"
UNKNOWN: Final = "unknown"  # this node has nothing to say to it, or has not heard of it yet


def report_of(job_root: str, heard: Heard, versions: Sequence[StoredVersion], epoch: int) -> dict[str, Any]:
    """Everything that `flashpoint status` tells, but the file system."""
    assignment, report = heard.assignment, heard.report
    membership = assignment.membership if assignment is not None else None
    here = assignment.index if assignment is not None else None
    peers = report.peers if report is not None else {}
    nodes = _nodes(membership, here, peers, heard.state) if membership and here is not None else []
    told = {Version(v.key.epoch, v.key.step): v for v in report.versions} if report is not None else {}
    drained = None
    if report is not None and report.storage is not None and report.storage.step >= 0:
        drained = Version(report.storage.epoch, report.storage.step)
    holders = {version: holders_of(one, membership) for version, one in told.items()}
    aftermaths: list[Aftermath] = []
    if membership is not None and report is not None:
        silent = [node["index"] for node in nodes if node["agent"] == SILENT]
        slots = [Slot(member.index, member.domain) for member in membership.members]
        aftermaths = what_if(holders, losses(slots, silent), drained)
    complete = [found for v in versions if (found := _version_of(v)) is not None]
    newest = max(complete, default=None)
    return {
        "job_root": job_root,
        "job": membership.job if membership else None,
        "epoch": membership.epoch if membership else epoch,
        "copies": membership.copies if membership else None,
        "keep": assignment.keep if assignment else None,
        "this_node": here,
        "agent": heard.to_json(),
        "trainers": heard.has_trainers,
        "nodes": nodes,
        "versions": [_version(v, told, holders) for v in versions],
        "lag_steps": _lag(newest, told, drained),
        "recovery": _recovery(newest, aftermaths, drained),
        "storage": _storage(heard),
        "scrub": _scrub(heard),
        "losses": [_loss(one, newest) for one in aftermaths],
    }


def _nodes(membership: Membership, here: int, peers: Mapping[int, str], state: str) -> list[dict[str, Any]]:
    found = []
    for member in membership.members:
        reason = peers.get(member.index)
        agent = UNKNOWN if reason is None else ALIVE if reason == OPEN else SILENT
        if member.index == here:
            agent = HERE if state == "alive" else state
        found.append(
            {
                "index": member.index,
                "domain": member.domain,
                "ranks": list(member.ranks),
                "host": member.host,
                "port": member.port,
                "agent": agent,
                "problem": reason if agent == SILENT and reason else "",
                "copies_to": list(membership.holders(member.index)),
            }
        )
    return found


def holders_of(told: VersionReport, membership: Membership | None) -> dict[str, Collection[int]]:
    """Object -> the nodes that hold it, as far as this node knows."""
    found: dict[str, Collection[int]] = dict(told.holders)
    if membership is None or told.state not in ("complete", "replicated"):
        return found
    # Complete on all nodes: each has what its own ranks wrote.
    homes = {name: membership.node_of_rank(CheckpointObjectId.parse(name).rank) for name in found}
    return {
        name: nodes if (home := homes[name]) is None else sorted({*nodes, home})
        for name, nodes in found.items()
    }


def _version(
    version: StoredVersion,
    told: Mapping[Version, VersionReport],
    holders: Mapping[Version, Mapping[str, Collection[int]]],
) -> dict[str, Any]:
    record, key = version.record, _version_of(version)
    found = told.get(key) if key is not None else None
    known = holders.get(key, {}) if key is not None else {}
    groups = Counter(tuple(nodes) for nodes in known.values())
    return {
        "path": version.container.path,
        "step": version.container.step,
        "epoch": record.epoch if record else None,
        "state": version.state,
        "problem": version.problem,
        "standing": found.state if found is not None else None,
        "bytes_here": version.nbytes,
        "objects_here": len(version.objects),
        "objects": len(record.objects) if record else None,
        "created_unix_s": version.created_unix_s,
        "holders": [{"nodes": list(nodes), "objects": count} for nodes, count in sorted(groups.items())],
    }


def _version_of(version: StoredVersion) -> Version | None:
    if version.state != COMPLETE or version.record is None:
        return None
    return Version(version.record.epoch, version.container.step)


def _lag(
    newest: Version | None, told: Mapping[Version, VersionReport], drained: Version | None
) -> dict[str, int | None]:
    """How many steps the newest replicated and the newest drained version are behind the newest complete one."""
    replicated = max((v for v, one in told.items() if one.state == "replicated"), default=None)
    return {"replicated": _steps_back(replicated, newest), "drained": _steps_back(drained, newest)}


def _steps_back(version: Version | None, newest: Version | None) -> int | None:
    """None also where they are of different starts of the job, whose steps are not on one scale."""
    if version is None or newest is None or newest.epoch != version.epoch:
        return None
    return max(newest.step - version.step, 0)


def _recovery(
    newest: Version | None, aftermaths: Iterable[Aftermath], drained: Version | None
) -> dict[str, Any]:
    """From where the job would go on after each kind of failure, at worst, and how many steps back that is."""
    nodes = [one for one in aftermaths if one.loss.kind == "node"]
    domains = [one for one in aftermaths if one.loss.kind == "domain"]
    return {
        "after_a_crash": _place(newest, "memory", newest),
        "after_a_node": _worst(nodes, newest) if nodes else None,
        "after_a_domain": _worst(domains, newest) if domains else None,
        "after_all_nodes": _place(drained, "storage", newest),
    }


def _worst(aftermaths: Sequence[Aftermath], newest: Version | None) -> dict[str, Any] | None:
    def height(one: Aftermath) -> tuple[bool, Version]:
        return one.memory is not None, one.goes_on_from or Version(-1, -1)

    return _goes_on(min(aftermaths, key=height), newest)


def _goes_on(one: Aftermath, newest: Version | None) -> dict[str, Any] | None:
    return _place(one.goes_on_from, "storage" if one.memory is None else "memory", newest)


def _place(version: Version | None, tier: str, newest: Version | None) -> dict[str, Any] | None:
    if version is None:
        return None
    back = _steps_back(version, newest)
    return {"tier": tier, "epoch": version.epoch, "step": version.step, "steps_back": back}


def _storage(heard: Heard) -> dict[str, Any] | None:
    report = heard.report
    if report is None or report.storage is None:
        return None
    found = report.storage
    has = found.step >= 0
    return {
        "drained_epoch": found.epoch if has else None,
        "drained_step": found.step if has else None,
        "error": found.error,
    }


def _scrub(heard: Heard) -> dict[str, Any] | None:
    report = heard.report
    return None if report is None or report.scrub is None else msgspec.structs.asdict(report.scrub)


def _loss(one: Aftermath, newest: Version | None) -> dict[str, Any]:
    return {
        "kind": one.loss.kind,
        "name": one.loss.name,
        "nodes": sorted(one.loss.nodes),
        "goes_on_from": _goes_on(one, newest),
        "lost_objects": [
            {"epoch": version.epoch, "step": version.step, "objects": count}
            for version, count in sorted(one.lost_objects.items(), reverse=True)
        ],
    }
