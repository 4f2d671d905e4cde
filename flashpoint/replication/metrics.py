"""What an agent tells Prometheus (OpenMetrics, over HTTP): how saves, copies, drains and recoveries of its node go.

The server is prometheus_client's, in threads of its own; the agent's loop only sets numbers. What training waits for is
measured by the trainer, whose first rank on each node tells the agent (`flashpoint.replication.orders.Observed`).
docs/grafana.json is a dashboard over these names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from flashpoint.memory import file_system
from flashpoint.replication.orders import Observed
from flashpoint.telemetry import counters, logger

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

PARTS: Final = (
    "blocking",
    "stage",
    "write",
    "commit",
    "complete",
    "replicated",
)  # of a save, as its handle has them
OUTCOMES: Final = ("complete", "failed", "replicated", "unreplicated")
TIERS: Final = ("local", "peer", "storage", "none")
_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Standings(NamedTuple):
    """How the versions of a node stand; steps are -1 for none.

    Attributes:
        versions: how many lie here, by state (``unproven``, ``complete``, ``replicated``).
        complete_step, replicated_step, drained_step: the newest that got so far.
        peers: how many nodes this one has spoken with, by whether they can be reached.
    """

    versions: Mapping[str, int]
    complete_step: int
    replicated_step: int
    drained_step: int
    peers: Mapping[bool, int]


class AgentMetrics:
    """The numbers of one agent, and the server that shows them.

    Args:
        job_root: whose tmpfs is watched.
        host, port: where to listen; port 0 takes any.

    Raises:
        ImportError: prometheus_client is not installed (``pip install flashpoint[metrics]``).
        OSError: nobody can listen there.
    """

    def __init__(self, job_root: str, *, host: str, port: int) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

        self._job_root = job_root
        registry = CollectorRegistry()
        registry.register(_Events())
        self._save_s = Histogram(
            "flashpoint_save_seconds",
            "Of a save, from the call to the moment, or of one of its parts, on this node's first rank.",
            ["part"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._saves = Counter(
            "flashpoint_saves", "Saves of this node's first rank.", ["outcome"], registry=registry
        )
        self._saved_bytes = Counter(
            "flashpoint_saved_bytes", "Staged by this node's first rank.", registry=registry
        )
        self._recoveries = Counter(
            "flashpoint_recoveries",
            "Recoveries, by where the version came from.",
            ["tier"],
            registry=registry,
        )
        self._recovery_s = Histogram(
            "flashpoint_recovery_seconds", "Of a recovery, whole.", buckets=_SECONDS, registry=registry
        )
        self._steps = Gauge(
            "flashpoint_newest_step",
            "Newest version that got so far; -1 for none.",
            ["state"],
            registry=registry,
        )
        self._lag = Gauge(
            "flashpoint_replication_lag_steps",
            "Steps that would be lost with this node: newest complete minus newest replicated.",
            registry=registry,
        )
        self._versions = Gauge("flashpoint_versions", "In this node's memory.", ["state"], registry=registry)
        self._memory = Gauge(
            "flashpoint_tmpfs_bytes", "Of the tmpfs that holds the job root.", ["kind"], registry=registry
        )
        self._peers = Gauge(
            "flashpoint_peers", "Nodes that this one has spoken with.", ["state"], registry=registry
        )
        for outcome in OUTCOMES:  # a rate needs the zero that was before the first
            self._saves.labels(outcome)
        for tier in TIERS:
            self._recoveries.labels(tier)
        self._server, self._thread = start_http_server(port, host, registry)
        self.port: int = self._server.server_port

    def observe(self, order: Observed) -> None:
        """Count what the trainer tells. What it has no name for here is left out."""
        if order.what == "save" and order.outcome in OUTCOMES:
            self._saves.labels(order.outcome).inc()
            if order.outcome == "complete":
                self._saved_bytes.inc(order.nbytes)
            for part, seconds in order.seconds.items():
                if part in PARTS:
                    self._save_s.labels(part).observe(seconds)
        elif order.what == "recovery" and order.outcome in TIERS:
            self._recoveries.labels(order.outcome).inc()
            self._recovery_s.observe(order.seconds.get("recovery", 0.0))

    def show(self, now: Standings) -> None:
        """Set what is so now."""
        for state in ("unproven", "complete", "replicated"):
            self._versions.labels(state).set(now.versions.get(state, 0))
        self._steps.labels("complete").set(now.complete_step)
        self._steps.labels("replicated").set(now.replicated_step)
        self._steps.labels("drained").set(now.drained_step)
        self._lag.set(max(now.complete_step - now.replicated_step, 0))
        for is_open, state in ((True, "open"), (False, "lost")):
            self._peers.labels(state).set(now.peers.get(is_open, 0))
        space = file_system(self._job_root)
        self._memory.labels("total").set(space.total_bytes)
        self._memory.labels("free").set(space.free_bytes)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1.0)


class _Events:
    """The process's own counters (`flashpoint.telemetry`), errors among them, as they are when they are asked for."""

    def collect(self) -> Iterable[Metric]:
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(
            "flashpoint_events", "What this node's agent counted: errors, retries, repairs.", labels=["event"]
        )
        for name, value in sorted(counters().items()):
            family.add_metric([name], value)
        yield family


def start_metrics(job_root: str, *, host: str, port: int) -> AgentMetrics | None:
    """The metrics of an agent; None, with a warning, where they cannot be had: copies are made all the same."""
    try:
        return AgentMetrics(job_root, host=host, port=port)
    except (ImportError, OSError, OverflowError) as error:
        logger.warning("no metrics are served at %s:%d: %s", host, port, error)
        return None
