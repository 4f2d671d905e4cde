"""What a job tells: a trace of its saves whose parts add up, and metrics from its agent."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

import flashpoint_torch as fpt
from flashpoint.trace_file import read_trace

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0

SAVES = """
import sys, torch
import flashpoint_torch as fpt
state = {f"w{i}": torch.randn(1 << 18) for i in range(64)}
with fpt.init(sys.argv[1], keep=1, copies=0) as fp:
    for step in range(1, 6):
        assert fp.async_save(state, step).wait("complete", timeout_s=60)
    fp.recover(state)
"""


def test_the_spans_of_a_save_add_up_to_its_time(job_root: str, tmp_path: Path) -> None:
    path = str(tmp_path / "trace.json")
    subprocess.run(
        [sys.executable, "-c", SAVES, job_root],
        env={**os.environ, "FLASHPOINT_TRACE": path},
        cwd=ROOT,
        check=True,
        timeout=120,
    )
    events = read_trace(path)
    names = {event["name"] for event in events}
    assert {"plan", "acquire buffer", "copy", "seal", "gather votes", "write manifest", "finalize"} <= names
    assert {"agree on candidates", "open and verify", "find", "fill", "recover"} <= names
    begun, ended = (_of(events, "wait for the background", kind) for kind in "be")
    waits = [(one["ts"], other["ts"]) for one, other in zip(begun, ended, strict=True)]
    shares = []
    for begin, end in zip(_of(events, "save", "b"), _of(events, "save", "e"), strict=True):
        inside = [e for e in events if e["ph"] == "X" and begin["ts"] <= e["ts"] <= end["ts"]]
        parts = [
            (e["ts"], _end(e)) for e in inside if e["name"] in ("save: training waits", "write", "commit")
        ]
        assert len(parts) == 3
        # Training may go on a moment after the background began: what two parts cover counts once.
        shares.append(_covered([*parts, *waits], begin["ts"], end["ts"]) / (end["ts"] - begin["ts"]))
        stage = next(e for e in inside if e["name"] == "stage")
        within = [e["dur"] for e in inside if e["name"] in ("plan", "acquire buffer", "copy")]
        assert sum(within) <= stage["dur"]
    assert len(shares) == 5
    assert max(shares) > 0.95  # on a busy machine a thread may lose its core between two of them


def _of(events: list[dict[str, Any]], name: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["name"] == name and event["ph"] == kind]


def _covered(spans: list[tuple[float, float]], begin: float, end: float) -> float:
    """How much of the time from ``begin`` to ``end`` lies in one of the spans."""
    covered, reached = 0.0, begin
    for one, other in sorted(spans):
        one, other = max(one, reached), min(other, end)
        covered += max(other - one, 0.0)
        reached = max(reached, other)
    return covered


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


# ---- metrics ------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scrape(port: int) -> dict[str, float]:
    """Sample (name and labels) -> value, as an OpenMetrics reader has them."""
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics",
        headers={"Accept": "application/openmetrics-text; version=1.0.0"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            sample.name
            + "".join(f" {label}={text}" for label, text in sorted(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }


def scrape_until(port: int, wanted: dict[str, float]) -> dict[str, float]:
    deadline = time.monotonic() + WAIT_S
    while True:
        found = scrape(port)
        if wanted.items() <= found.items() or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


@pytest.fixture
def port() -> int:
    pytest.importorskip("prometheus_client")
    return free_port()


def test_an_agent_shows_how_saves_and_recoveries_go(job_root: str, port: int) -> None:
    state = {"w": torch.arange(1000.0), "step": 0}
    limit = 64 << 10  # in bytes: no room for the large version
    with fpt.init(job_root, keep=1, agent="embedded", metrics_port=port, memory_limit_bytes=limit) as fp:
        for step in (10, 20):
            assert fp.async_save(state, step).wait("replicated", timeout_s=WAIT_S)
        assert fp.async_save({"w": torch.zeros(limit)}, 30).error is not None
        fp.recover(state)
        wanted = {
            "flashpoint_saves_total outcome=complete": 2.0,
            "flashpoint_saves_total outcome=replicated": 2.0,
            "flashpoint_saves_total outcome=failed": 1.0,
            "flashpoint_recoveries_total tier=local": 1.0,
            "flashpoint_recoveries_total tier=storage": 0.0,
            "flashpoint_newest_step state=complete": 20.0,
            "flashpoint_newest_step state=replicated": 20.0,
            "flashpoint_newest_step state=drained": -1.0,
            "flashpoint_replication_lag_steps": 0.0,
            "flashpoint_versions state=replicated": 1.0,
            "flashpoint_save_seconds_count part=blocking": 2.0,
            "flashpoint_save_seconds_count part=replicated": 2.0,
        }
        found = scrape_until(port, wanted)
        assert wanted.items() <= found.items()
        assert found["flashpoint_saved_bytes_total"] >= 2 * 4000
        assert found["flashpoint_events_total event=versions_replicated"] >= 2.0
        assert 0 < found["flashpoint_tmpfs_bytes kind=free"] <= found["flashpoint_tmpfs_bytes kind=total"]


def test_a_port_that_is_taken_costs_the_metrics_and_nothing_else(
    job_root: str, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen(1)
        with fpt.init(job_root, agent="embedded", metrics_port=port) as fp:
            assert fp.async_save({"w": torch.ones(3)}, 1).wait("replicated", timeout_s=WAIT_S)
    assert "no metrics are served" in caplog.text


def test_every_panel_of_the_dashboard_asks_for_a_metric_that_there_is(job_root: str, port: int) -> None:
    with fpt.init(job_root, agent="embedded", metrics_port=port) as fp:
        assert fp.async_save({"w": torch.ones(3)}, 1).wait("replicated", timeout_s=WAIT_S)
        found = scrape_until(port, {"flashpoint_save_seconds_count part=replicated": 1.0})
    known = {sample.split(" ")[0] for sample in found}
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for expr in asked for name in re.findall(r"\bflashpoint_\w+", expr)}
    assert names and names <= known, names - known
    shown = {name.removesuffix("_total") for name in names}
    everything = {re.sub(r"_(total|created|bucket|count|sum)$", "", name) for name in known}
    assert everything <= {re.sub(r"_(bucket|count|sum)$", "", name) for name in shown}, "no panel shows it"
