"""A real S3 server for tests: moto's, in a process of its own, on loopback."""

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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


class Gate:
    """Stands before a server, and hangs when it is told to: connections are taken, and nothing comes of them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._is_open = threading.Event()
        self._is_open.set()
        self._over = threading.Event()
        self.passed_nbytes = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def hang(self) -> None:
        self._is_open.clear()

    def go_on(self) -> None:
        self._is_open.set()

    def close(self) -> None:
        self._over.set()
        self._is_open.set()
        self._listener.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                continue
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with source, target:
            try:
                while data := source.recv(65_536):
                    self._is_open.wait()
                    target.sendall(data)
                    self.passed_nbytes += len(data)
            except OSError:
                pass
            for end in (source, target):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


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
