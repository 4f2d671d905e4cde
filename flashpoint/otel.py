"""Spans for OpenTelemetry: `install` hands every span of this process to a tracer, with the times it really had.

Needs ``opentelemetry-api`` (``pip install flashpoint[opentelemetry]``) and, to send anything anywhere, an SDK and an
exporter that the program sets up as for its own spans.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import flashpoint
from flashpoint.trace import Span, listen

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


def install(tracer_provider: TracerProvider | None = None) -> Callable[[], None]:
    """Have all spans from now on go to OpenTelemetry; returns what ends that.

    Each becomes a root span named ``flashpoint.<name>``, with its facts as attributes: what runs in the background has
    no span of the training loop as its parent. Spans end up where the provider's processors send them; use a batching
    one, since they are handed over in the thread that made them.

    Args:
        tracer_provider: of the program; the global one by default.
    """
    from opentelemetry import trace
    from opentelemetry.context import Context

    tracer = trace.get_tracer("flashpoint", flashpoint.__version__, tracer_provider)
    unix_ns = time.time_ns() - time.perf_counter_ns()  # what to add to a moment of perf_counter

    def export(one: Span) -> None:
        begin_ns = unix_ns + int(one.begin_s * 1e9)
        facts = {f"flashpoint.{name}": _plain(value) for name, value in one.facts.items()}
        if one.thread:
            facts |= {"thread.id": one.thread, "thread.name": one.thread_name}
        ended = tracer.start_span(
            f"flashpoint.{one.name}", context=Context(), start_time=begin_ns, attributes=facts
        )
        ended.end(unix_ns + int(one.end_s * 1e9))

    return listen(export)


def _plain(value: object) -> str | int | float | bool:
    return value if isinstance(value, str | int | float | bool) else str(value)
