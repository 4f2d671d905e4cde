"""Spans, the file that they are written to, and OpenTelemetry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashpoint import trace
from flashpoint.telemetry import counters
from flashpoint.trace import Span
from flashpoint.trace_file import TraceFile, read_trace


@pytest.fixture
def spans() -> Iterator[list[Span]]:
    found: list[Span] = []
    stop = trace.listen(found.append)
    yield found
    stop()


def test_a_span_lies_within_the_one_around_it_and_is_there_also_when_it_fails(spans: list[Span]) -> None:
    @trace.traced("inner")
    def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError), trace.span("outer", step=3):
        fail()
    inner, outer = spans
    assert (inner.name, outer.name, outer.facts) == ("inner", "outer", {"step": 3})
    assert outer.begin_s <= inner.begin_s <= inner.end_s <= outer.end_s
    assert outer.thread == threading.get_native_id()


def test_nobody_listens_any_more(spans: list[Span]) -> None:
    trace.listen(lambda one: pytest.fail("it was told"))()
    trace.record("it", 1.0, 2.0)
    assert len(spans) == 1


def test_several_processes_append_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    code = """
import os, sys
from flashpoint import trace
trace.name_process(sys.argv[1])
with trace.span("before"): pass
if os.fork() == 0:
    with trace.span("child"): pass
    sys.exit()
os.wait()
with trace.span("after", step=1): pass
trace.record("whole", 1.5, 2.0)
"""
    started = [
        subprocess.Popen([sys.executable, "-c", code, name], env={**os.environ, trace.VARIABLE: str(path)})
        for name in ("rank 0", "rank 1", "rank 2")
    ]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    events = read_trace(str(path))
    json.loads(
        path.read_text().rstrip().rstrip(",") + "]"
    )  # an array but for the bracket that Chrome does without
    for process, name in zip(started, ("rank 0", "rank 1", "rank 2"), strict=True):
        mine = [event for event in events if event["pid"] == process.pid]
        assert mine[0] == {
            "ph": "M",
            "pid": process.pid,
            "tid": 0,
            "name": "process_name",
            "args": {"name": name},
        }
        assert [event["name"] for event in mine if event["ph"] == "X"] == ["before", "after"]
        begin, end = (event for event in mine if event["ph"] in "be")
        assert (begin["ts"], end["ts"], begin["id"]) == (1.5e6, 2e6, end["id"])
    assert sum(event["name"] == "child" for event in events) == 3


def test_a_file_that_cannot_be_written_ends_tracing_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = TraceFile(str(tmp_path / "absent" / "trace.json"))
    for _ in range(3):
        sink.add(Span("it", 0.0, 1.0, 1, "thread", {}))
        sink.flush()
    assert caplog.text.count("no more spans are written") == 1


def test_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashpoint.trace_file._WAITING_MAX", 10)
    monkeypatch.setattr("flashpoint.trace_file.FLUSH_S", 1000.0)
    sink, before = TraceFile(str(tmp_path / "trace.json")), counters().get("spans_dropped", 0)
    for number in range(15):
        sink.add(Span(str(number), 0.0, 1.0, 1, "thread", {}))
    sink.flush()
    names = [event["name"] for event in read_trace(sink.path) if event["ph"] == "X"]
    assert names == [str(number) for number in range(5, 15)]
    assert counters()["spans_dropped"] == before + 5


def test_opentelemetry_has_every_span_with_its_own_times() -> None:
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from flashpoint import otel

    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    stop = otel.install(provider)
    try:
        trace.record("recover", 10.0, 12.5, step=7, tier="peer")
    finally:
        stop()
    trace.record("recover", 20.0, 21.0)
    (one,) = memory.get_finished_spans()
    assert one.name == "flashpoint.recover"
    assert one.end_time - one.start_time == 2_500_000_000
    assert dict(one.attributes) == {"flashpoint.step": 7, "flashpoint.tier": "peer"}
