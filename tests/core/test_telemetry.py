import logging
import threading
import time

from flashpoint import telemetry
from flashpoint.telemetry import Timings, count, counters, warn_once


def test_counters_add_up_over_threads():
    before = counters().get("test_counter", 0)
    threads = [threading.Thread(target=lambda: [count("test_counter") for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    count("test_counter", 10)
    assert counters()["test_counter"] == before + 2010
    counters()["test_counter"] = 0  # a copy
    assert counters()["test_counter"] == before + 2010


def test_a_lasting_condition_is_warned_about_once_for_each_key(caplog, monkeypatch):
    monkeypatch.setattr(telemetry, "_warned", set())
    with caplog.at_level(logging.WARNING):
        for key in ("a", "b", "a", "a"):
            warn_once(key, f"about {key}")
    assert [record.message for record in caplog.records] == ["about a", "about b"]


def test_spans_add_up_also_when_they_fail():
    timings = Timings()
    for _ in range(2):
        try:
            with timings.span("part"):
                time.sleep(0.01)
                raise KeyError
        except KeyError:
            pass
    assert timings["part"] >= 0.02
