"""Fixtures for tests with torch."""

from collections.abc import Iterator

import pytest

from tests.torch.workers import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Four gloo ranks that stay up: see `Workers.run`."""
    pool = Workers()
    try:
        yield pool
    finally:
        pool.close()
