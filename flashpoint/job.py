"""Opening a job's checkpoints on every rank: who shares a node, which epoch it is, and who copies for whom."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from flashpoint import trace
from flashpoint.config import FlashpointConfig
from flashpoint.coordinator import Coordinator
from flashpoint.errors import FlashpointError, reason_of
from flashpoint.objects import CheckpointObjectManager
from flashpoint.replication.keys import JobKeys
from flashpoint.replication.membership import Member, Membership
from flashpoint.replication.node import NodeReplication, address_towards
from flashpoint.retention import Version, newest_first
from flashpoint.storage import claim
from flashpoint.storage.records import Owner
from flashpoint.telemetry import logger, warn_once


class _Arrival(msgspec.Struct, array_like=True):
    """What each rank says first.

    Attributes:
        node: identity of the memory it uses.
        epoch: the job's restart count as that memory knows it.
        keys: of the job, where that memory has some.
        is_new: whether they were made just now, and serve only if nobody has older ones.
    """

    node: str = ""
    epoch: int = 0
    keys: JobKeys | None = None
    is_new: bool = False
    error: str = ""


class _Ready(msgspec.Struct, array_like=True):
    """What each rank says when its node is in order.

    Attributes:
        versions: complete on its node.
        agent: host, port and bulk port of its node's agent; from the node's first rank.
    """

    versions: list[tuple[int, int]] = []
    domain: str = ""
    agent: tuple[str, int, int] | None = None
    error: str = ""


_Said = TypeVar("_Said", _Arrival, _Ready)


@dataclass(frozen=True)
class Job:
    """A job's checkpoints, opened on one rank.

    Attributes:
        epoch: how often the job was started, this time included.
        node_ranks: the ranks that share this node's memory.
        replication: this node's line to its agent, or None for a job without copies and storage.
    """

    objects: CheckpointObjectManager
    coordinator: Coordinator
    epoch: int
    node_ranks: tuple[int, ...]
    replication: NodeReplication | None = None


def open_job(
    job_root: str | os.PathLike[str],
    config: FlashpointConfig,
    coordinator: Coordinator,
    *,
    leader_host: str = "127.0.0.1",
) -> Job:
    """Open a job's checkpoints; on every rank. Cleans up what a crash of the job left unfinished.

    Args:
        leader_host: where rank 0 runs, as this host reaches it.

    Raises:
        FlashpointError: a rank cannot use the job root; the message names it.
    """
    rank, copies = coordinator.rank, config.copies
    trace.name_process(f"rank {rank}")
    owner: Owner | None = None
    objects: CheckpointObjectManager | None = None
    error: Exception | None = None
    arrival = _Arrival()
    try:
        objects = CheckpointObjectManager(job_root, rank=rank, config=config)
        is_new = False
        keys = NodeReplication.known_keys(objects.job_root) if config.has_agent else None
        if config.has_agent and keys is None and rank == 0:
            keys, is_new = JobKeys.generate(), True
        known_epoch = objects.read_epoch()
        if config.storage and coordinator.local_rank == 0:
            owner = claim.check(config, objects.job_root)  # now, and not at the first drain
            known_epoch = max(known_epoch, owner.epoch if owner is not None else 0)
        arrival = _Arrival(objects.node, known_epoch, keys, is_new)
    except (FlashpointError, OSError) as failure:
        error = failure
        arrival = _Arrival(error=reason_of(failure))
    arrivals = _all_gather(coordinator, "init", arrival, config)
    raise_any(error, {rank: one.error for rank, one in enumerate(arrivals) if one.error})
    assert objects is not None
    epoch = max(one.epoch for one in arrivals) + 1
    nodes = list(dict.fromkeys(one.node for one in arrivals))
    ranks_of = {node: tuple(r for r, one in enumerate(arrivals) if one.node == node) for node in nodes}
    ranks_here = ranks_of[objects.node]
    is_first = rank == ranks_here[0]
    keys = _job_keys(arrivals) if config.has_agent else None
    replication: NodeReplication | None = None
    ready = _Ready()
    try:
        if is_first:
            objects.collect_garbage()
            objects.drop_fetched()
            objects.pool.drop_ranks_other_than(ranks_here)
            objects.write_epoch(epoch)
        if config.storage and keys is not None and rank == 0:
            claim.claim(config, objects.job_root, keys.job, epoch, owner)
        if keys is not None:
            host = config.agent_host or address_towards(leader_host)
            replication = NodeReplication(objects.job_root, config, keys, is_first=is_first, host=host)
            ready.agent = _start(replication) if is_first else None
        ready.domain = config.failure_domain
        ready.versions = [(version.epoch, version.step) for version in objects.complete_versions()]
    except (FlashpointError, OSError) as failure:
        error = failure
        ready = _Ready(error=reason_of(failure))
    # Nobody saves while garbage is collected.
    answers = _all_gather(coordinator, "ready", ready, config)
    raise_any(error, {rank: one.error for rank, one in enumerate(answers) if one.error})
    objects.agreed = newest_first(set.intersection(*({Version(*v) for v in a.versions} for a in answers)))
    if replication is not None and keys is not None:
        members = []
        for index, node in enumerate(nodes):
            first = answers[ranks_of[node][0]]
            host, port, bulk_port = first.agent or ("", 0, 0)
            members.append(
                Member(
                    index=index,
                    node=node,
                    domain=first.domain,
                    ranks=ranks_of[node],
                    host=host,
                    port=port,
                    bulk_port=bulk_port,
                )
            )
        if len(nodes) <= copies and is_first:
            warn_once(
                f"copies:{objects.job_root}",
                f"copies={copies} wants {copies + 1} nodes, the job has {len(nodes)}: each object gets "
                f"{len(nodes) - 1} copies",
            )
        membership = Membership(job=keys.job, epoch=epoch, copies=copies, members=tuple(members))
        replication.join(membership, nodes.index(objects.node))
    return Job(objects, coordinator, epoch, ranks_here, replication)


def raise_any(error: Exception | None, reasons: Mapping[int, str]) -> None:
    """Raise this rank's own error, or, if there is none, what other ranks said of theirs."""
    if error is not None:
        raise error
    if reasons:
        raise FlashpointError("; ".join(f"rank {rank}: {text}" for rank, text in reasons.items()))


def _start(replication: NodeReplication) -> tuple[str, int, int] | None:
    """Where this node's agent listens; None if it cannot be had: the node then neither copies nor serves."""
    try:
        return replication.start()
    except (FlashpointError, OSError) as failure:
        logger.warning(
            "this node has no agent, so its objects get no copies, here or in storage: %s", failure
        )
        return None


def _job_keys(arrivals: list[_Arrival]) -> JobKeys:
    """The keys of the node that has been in the job for longest; of the lowest rank among equals."""
    found = [one for one in arrivals if one.keys is not None]
    keys = max(found, key=lambda one: (not one.is_new, one.epoch)).keys
    assert keys is not None
    return keys


def _all_gather(coordinator: Coordinator, topic: str, value: _Said, config: FlashpointConfig) -> list[_Said]:
    answers = coordinator.all_gather(topic, msgspec.msgpack.encode(value), config.recovery_timeout_s)
    return [msgspec.msgpack.decode(answer, type=type(value)) for answer in answers]
