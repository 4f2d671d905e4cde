"""How often to save, what it costs, and what part of the time is left for training. Pure; times in seconds.

The model: failures come at random and independently of each other (a Poisson process). Training takes ``interval_s`` of
work, then blocks for ``cost_s`` while a version is taken; that version can be used ``latency_s`` later, while training
goes on. A failure costs the work since the newest version that can be used, and ``restart_s`` until training goes on.

- Young (1974), "A first order approximation to the optimum checkpoint interval", CACM 17(9): `young_interval`.
- Daly (2006), "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3):
  `daly_interval`, his equation (37), and `goodput`, the inverse of his equation (20).

Both know one kind of failure and one kind of version. Here a failure may leave the node's memory as it is, take one
node's memory, or take more memories than there are copies; each goes back to another kind of version (`Level`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

_CANDIDATES_MAX: Final = 200  # intervals that `best_steps` compares before it looks closer
MONTH_S: Final = 30 * 86_400.0


# ---- one kind of failure ------------------------------------------------------------------------


def young_interval(cost_s: float, mtbf_s: float) -> float:
    """Young's best work between two saves: ``sqrt(2 cost mtbf)``; infinite without failures."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_interval(cost_s: float, mtbf_s: float) -> float:
    """Daly's best work between two saves; ``mtbf_s`` itself where a save costs twice that or more."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return young_interval(cost_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def best_interval(cost_s: float, mtbf_s: float) -> float:
    """The work between two saves for which `goodput` is highest: what Young and Daly approximate.

    With ``x = interval / mtbf`` and ``d = cost / mtbf`` the derivative is zero where ``(1 - x) exp(x + d) = 1``.
    Neither ``restart_s`` nor ``latency_s`` changes it.
    """
    if math.isinf(mtbf_s) or cost_s == 0:
        return young_interval(cost_s, mtbf_s) if cost_s else 0.0
    d = cost_s / mtbf_s
    low, high = 0.0, 1.0  # the left side falls from exp(d) > 1 to 0
    while high - low > 1e-15 + 1e-12 * high:
        x = (low + high) / 2
        # As a logarithm: near the answer the product would have no digits left.
        low, high = (x, high) if math.log1p(-x) + x + d > 0 else (low, x)
    return (low + high) / 2 * mtbf_s


def goodput(
    interval_s: float, cost_s: float, mtbf_s: float, *, restart_s: float = 0.0, latency_s: float = 0.0
) -> float:
    """The part of the time that training gets on, from 0 to 1: Daly's, exactly, for any interval.

    A restart may fail too, and begins again. That a version can only be used later acts as a longer restart.
    """
    if interval_s <= 0:
        return 0.0
    level = Level(1 / mtbf_s, interval_s + cost_s, latency_s, restart_s)
    return goodput_of([level], interval_s, cost_s)


# ---- several kinds of failure -------------------------------------------------------------------


class Level(NamedTuple):
    """Failures that go back to one kind of version.

    ``every_s`` is the time from one such version to the next; each can be used ``latency_s`` after it was taken.
    """

    failures_per_s: float
    every_s: float
    latency_s: float
    restart_s: float


def goodput_of(levels: Sequence[Level], interval_s: float, cost_s: float) -> float:
    """The part of the time that training gets on, with several kinds of failure.

    Exact for one level. With more, what is lost is added up: a failure loses ``mtbf - kept`` on average, where of the
    time between failures that go back to this level or to a later one only ``kept`` lies before a version.

    Args:
        levels: those whose failures leave most alone come first; a failure also loses the versions of the levels
            before its own.
    """
    lost = down = rate = 0.0
    every_failure = sum(level.failures_per_s for level in levels)
    for level in reversed(levels):
        rate += level.failures_per_s
        if level.failures_per_s == 0:
            continue
        lost += level.failures_per_s / rate * (1 - _kept(level, rate))
        down += level.failures_per_s / every_failure * _expm1(every_failure * level.restart_s)
    return interval_s / (interval_s + cost_s) * max(1 - lost, 0.0) / (1 + down)


def _kept(level: Level, rate: float) -> float:
    """Of the time between failures, the part up to the newest version that can be used.

    Of versions at ``every_s``, ``2 every_s``, ... the n-th is of use if the failure comes ``latency_s`` after it or
    later: the sum of ``every_s exp(-rate (n every_s + latency_s))``, times the rate.
    """
    x = rate * level.every_s
    return (x / _expm1(x) if x > 0 else 1.0) * math.exp(-rate * level.latency_s)


def _expm1(x: float) -> float:
    try:
        return math.expm1(x)
    except OverflowError:
        return math.inf


# ---- a job --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, and how often what fails.

    Attributes:
        state_bytes: of one version, over all nodes: parameters, optimizer, everything.
        step_s: of one training step.
        node_mtbf_s: from one failure to the next that takes a node's memory with it, of one node.
        process_mtbf_s: from one failure of the job to the next that leaves all memory as it is.
        restart_s: from a failure until the new processes can load: noticing it, starting them.
        replace_s: more than that, where a node must be replaced.
    """

    state_bytes: float
    nodes: int
    step_s: float
    node_mtbf_s: float
    process_mtbf_s: float = math.inf
    restart_s: float = 60.0
    replace_s: float = 300.0


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one node does in a second, all of its ranks together, in bytes.

    Attributes:
        copy: from the training state into the tmpfs, and back; training waits for it.
        seal: through the checksums, in the background of a save and in front of a load.
        network: to another node, or from it.
        storage: to long-term storage, or from it.
    """

    copy: float
    seal: float
    network: float
    storage: float


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What is kept where.

    Attributes:
        copies: of every object on other nodes.
        keep: versions that are kept in memory; 0 for storage only, which training does not wait for.
        blocking_storage: with ``keep=0``: training waits for storage.
        storage_every_s: from one version in storage to the next; 0 for as often as it can be written. Without ``keep``
            every version goes there.
    """

    copies: int = 0
    keep: int = 1
    blocking_storage: bool = False
    storage_every_s: float = 0.0

    @property
    def name(self) -> str:
        if self.keep:
            return f"memory, copies={self.copies}"
        return "storage, blocking" if self.blocking_storage else "storage, in the background"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a policy comes to.

    Attributes:
        own_bytes, copy_bytes: of memory on each node, at most: its own versions, and those it holds for others.
        blocking_s: that training waits for one save.
        usable_s: from the begin of a save until it survives what the policy is for.
        young_s, daly_s: best work between two saves after them.
        steps: training steps between two saves.
        interval_s: work between two saves.
        goodput: of the time, what training gets on.
        lost_s: work lost in a failure, on average.
        recovery_s: from a failure until training goes on, on average.
        falls_back_per_month: how often a failure must go back to storage, in 30 days.
    """

    policy: Policy
    own_bytes: float
    copy_bytes: float
    blocking_s: float
    usable_s: float
    young_s: float
    daly_s: float
    steps: int
    interval_s: float
    goodput: float
    lost_s: float
    recovery_s: float
    falls_back_per_month: float


def memory_of(job: Job, policy: Policy) -> tuple[float, float]:
    """Bytes of memory on one node, at most: of its own versions, and of those it holds for other nodes.

    Besides those that are kept there is the version that is being written, and one that is complete but not yet
    replicated or drained: the agent gives up older ones only then. With copies, those that are on their way, too.
    """
    share = job.state_bytes / job.nodes
    if not policy.keep:
        return (0.0 if policy.blocking_storage else share), 0.0
    return (policy.keep + 2) * share, policy.copies * (policy.keep + 1) * share


def mtbf_of(job: Job) -> float:
    """From one failure of the job to the next, of any kind."""
    rate = job.nodes / job.node_mtbf_s + 1 / job.process_mtbf_s
    return 1 / rate if rate else math.inf


def fatal_rate(job: Job, copies: int, window_s: float) -> float:
    """Failures per second that take an object with all of its copies: what memory cannot bring back.

    An object lies on ``copies + 1`` nodes. All of them are lost if the others fail within ``window_s`` of the first,
    before its copies are made again; each node stands in ``copies + 1`` such groups.
    """
    first = job.nodes / job.node_mtbf_s
    if not copies:
        return first
    together = -math.expm1(-window_s / job.node_mtbf_s)
    return first * min((copies + 1) * together**copies, 1.0)


def plan(job: Job, rates: Rates, policy: Policy, *, steps: int = 0) -> Plan:
    """What a policy comes to, for the best interval of whole steps, or for the one that is given.

    Raises:
        ValueError: there are not enough nodes for the copies.
    """
    if policy.copies >= job.nodes:
        raise ValueError(f"copies={policy.copies} needs more than {job.nodes} nodes")
    times = _times(job, rates, policy)
    blocking_s = times.blocking_s

    def value(n: int) -> float:
        interval_s = n * job.step_s
        return goodput_of(_levels(job, policy, times, interval_s + blocking_s), interval_s, blocking_s)

    if not steps:
        mtbf_s = min(mtbf_of(job), MONTH_S)  # no longer interval is ever better
        least = max(math.ceil(times.between_s / job.step_s), 1)
        steps = best_steps(value, least, max(math.ceil(mtbf_s / job.step_s), least))
    levels = _levels(job, policy, times, steps * job.step_s + blocking_s)
    failures = sum(level.failures_per_s for level in levels)
    rate, lost_s, recovery_s = 0.0, 0.0, 0.0
    for level in reversed(levels):
        rate += level.failures_per_s
        if level.failures_per_s:
            lost_s += level.failures_per_s / failures * (1 - _kept(level, rate)) / rate
            recovery_s += level.failures_per_s / failures * level.restart_s
    own_bytes, copy_bytes = memory_of(job, policy)
    mtbf_s = mtbf_of(job)
    return Plan(
        policy=policy,
        own_bytes=own_bytes,
        copy_bytes=copy_bytes,
        blocking_s=blocking_s,
        usable_s=blocking_s + times.usable_s,
        young_s=young_interval(blocking_s, mtbf_s),
        daly_s=daly_interval(blocking_s, mtbf_s),
        steps=steps,
        interval_s=steps * job.step_s,
        goodput=value(steps),
        lost_s=lost_s,
        recovery_s=recovery_s,
        falls_back_per_month=levels[-1].failures_per_s * MONTH_S,
    )


def best_steps(value: Callable[[int], float], least: int, most: int) -> int:
    """The number of steps from ``least`` to ``most`` for which ``value`` is highest; the smallest among equals.

    ``value`` may have small jumps, as where a second step makes a copy late: so it is no search by halves.
    """
    low, high = least, most
    while True:
        growth = (high / low) ** (1 / _CANDIDATES_MAX)
        wanted = sorted({min(round(low * growth**i), high) for i in range(_CANDIDATES_MAX + 1)} | {low, high})
        if high - low <= _CANDIDATES_MAX:
            wanted = list(range(low, high + 1))
        place = max(range(len(wanted)), key=lambda i: (value(wanted[i]), -i))
        if high - low <= _CANDIDATES_MAX:
            return wanted[place]
        low, high = wanted[max(place - 1, 0)], wanted[min(place + 1, len(wanted) - 1)]


class _Times(NamedTuple):
    """What moving one version takes, by a policy: seconds.

    ``between_s`` is the least work between two saves; ``sealed_s``, ``copied_s`` and ``drained_s`` count from the end
    of the blocking; ``usable_s`` is the one of these that the policy is for.
    """

    blocking_s: float
    between_s: float
    sealed_s: float
    copying_s: float
    copied_s: float
    draining_s: float
    drained_s: float
    usable_s: float
    load_s: float  # what lies on the node, verified
    fetch_s: float  # from a peer
    download_s: float  # from storage


def _times(job: Job, rates: Rates, policy: Policy) -> _Times:
    share = job.state_bytes / job.nodes
    copy_s, seal_s, storage_s = share / rates.copy, share / rates.seal, share / rates.storage
    copying_s = policy.copies * share / rates.network
    load_s = copy_s + seal_s
    fetch_s, download_s = load_s + share / rates.network, load_s + storage_s
    if not policy.keep:
        blocking_s, drained_s = (storage_s, 0.0) if policy.blocking_storage else (copy_s, storage_s)
        return _Times(
            blocking_s, drained_s, 0, 0, 0, drained_s, drained_s, drained_s, load_s, fetch_s, download_s
        )
    copied_s = seal_s + copying_s
    drained_s = copied_s + storage_s
    return _Times(
        copy_s,
        seal_s,
        seal_s,
        copying_s,
        copied_s,
        storage_s,
        drained_s,
        copied_s,
        load_s,
        fetch_s,
        download_s,
    )


def _levels(job: Job, policy: Policy, times: _Times, cycle_s: float) -> list[Level]:
    """The kinds of failure, those that leave most alone first."""
    processes, nodes = 1 / job.process_mtbf_s, job.nodes / job.node_mtbf_s

    def every(least_s: float) -> float:
        """A version in so many seconds, if it can only be one that training takes."""
        return max(math.ceil(least_s / cycle_s - 1e-9), 1) * cycle_s

    stored_s = every(max(times.draining_s, policy.storage_every_s))
    replaced_s = job.restart_s + job.replace_s
    if not policy.keep:
        # One kind of version for all of them: one level.
        restart_s = job.restart_s + job.replace_s * (nodes / (nodes + processes) if nodes else 0)
        return [Level(processes + nodes, stored_s, times.drained_s, restart_s + times.download_s)]
    fatal = fatal_rate(job, policy.copies, replaced_s + times.copying_s)
    levels = [Level(processes, cycle_s, times.sealed_s, job.restart_s + times.load_s)]
    if policy.copies:
        replicated_s = every(times.copying_s)
        levels.append(Level(nodes - fatal, replicated_s, times.copied_s, replaced_s + times.fetch_s))
    return [*levels, Level(fatal, stored_s, times.drained_s, replaced_s + times.download_s)]
