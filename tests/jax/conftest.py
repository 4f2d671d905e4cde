"""Fixtures for tests with JAX; without JAX, Orbax, Flax or Optax all of this folder is skipped."""

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

# Before JAX looks at them: four devices, so that a single process can shard.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

if TYPE_CHECKING:
    from tests.jax.workers import Workers

try:
    import flax  # noqa: F401
    import google_crc32c  # noqa: F401
    import jax  # noqa: F401
    import optax  # noqa: F401
    import orbax.checkpoint  # noqa: F401
except ImportError as error:
    collect_ignore_glob = ["test_*.py"]
    _MISSING = str(error)
else:
    _MISSING = ""


def pytest_report_header() -> str | None:
    return f"tests/jax is skipped: {_MISSING}" if _MISSING else None


SETTLE_S = 30.0


@pytest.fixture
def stock_failures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests that make stock Orbax fail: it leaves coroutines behind, which complain when they are collected."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    yield
    gc.collect()


def threads_of_saves() -> list[threading.Thread]:
    """The threads of saves that keep this process alive, Orbax's and ours."""
    return [
        thread
        for thread in threading.enumerate()
        if type(thread).__name__ == "_SignalingThread" or thread.name == "flashpoint_commit"
    ]


@pytest.fixture(autouse=True)
def no_thread_of_a_save_is_left() -> Iterator[None]:
    """Whatever became of a test's saves: no thread goes on to wait for them, and keeps the process alive."""
    yield
    deadline = time.monotonic() + SETTLE_S
    while threads_of_saves() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads_of_saves()


@pytest.fixture(scope="session")
def workers() -> "Iterator[Workers]":
    """Two JAX processes that stay up: see `Workers.run`."""
    from tests.jax.workers import Workers

    pool = Workers()
    try:
        yield pool
    finally:
        pool.close()
