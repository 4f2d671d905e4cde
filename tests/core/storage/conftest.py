from collections.abc import Iterator

import pytest

from tests.s3 import S3Server, s3_server


@pytest.fixture(scope="session")
def started_s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(started_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, and the environment to use it."""
    for name, value in started_s3.environment().items():
        monkeypatch.setenv(name, value)
    return started_s3
