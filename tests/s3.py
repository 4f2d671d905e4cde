"""A real S3 server for tests: moto's, in a process of its own, on loopback."""

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

START_S = 60
# By this the server tells which of Amazon's services is meant.
_FOR_S3 = (
    "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
)


class S3Server:
    """Answers on ``endpoint``; what it holds goes with it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.endpoint = f"http://127.0.0.1:{port}"

    def environment(self, **others: str) -> dict[str, str]:
        """What a process needs in its environment to use it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        } | others

    def make_bucket(self, name: str) -> str:
        """Its URL."""
        assert self.request("PUT", f"/{name}") == 200
        return f"s3://{name}"

    def check_credentials(self, check: bool) -> None:
        """Whether requests need credentials that it knows: it knows none."""
        assert self.request("POST", "/moto-api/reset-auth", "0" if check else "1000000000") == 200

    def request(self, method: str, path: str, body: str = "") -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, body, {"Authorization": _FOR_S3})
            return connection.getresponse().status
        finally:
            connection.close()


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server that is gone at the end of the block."""
    pytest.importorskip("moto.server", reason="needs moto's server: pip install '.[dev]'")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
    )
    try:
        server = S3Server(port)
        deadline = time.monotonic() + START_S
        while True:
            try:
                server.request("GET", "/moto-api/data.json")
                break
            except OSError:
                assert process.poll() is None, "the server ended"
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.1)
        yield server
    finally:
        process.kill()
        process.wait()
