"""Fixtures that every test may use."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from flashpoint.config import ENV_PREFIX

# Two shared cores: a slow example is no failure, and a found one is printed so that it can be replayed.
settings.register_profile("flashpoint", deadline=None, max_examples=40, print_blob=True)
settings.load_profile("flashpoint")

SHARED_MEMORY = "/dev/shm"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What `scripts.fault_table` reads from the results: a test's name, and the rows that it belongs to."""
    for item in items:
        if rows := [str(row) for mark in item.iter_markers("fault") for row in mark.args]:
            item.user_properties += [("fault", " ".join(rows)), ("test", item.nodeid)]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the FLASHPOINT_* settings of whoever runs it."""
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)


@pytest.fixture
def job_root() -> Iterator[str]:
    """An empty job root on a real tmpfs, gone again afterwards, whatever happened."""
    parent = tempfile.mkdtemp(prefix="flashpoint-test-", dir=SHARED_MEMORY)
    root = Path(parent, "job")
    root.mkdir(mode=0o700)
    try:
        yield str(root)
    finally:
        shutil.rmtree(parent, ignore_errors=True)
