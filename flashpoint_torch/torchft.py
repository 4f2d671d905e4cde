"""`FlashpointTransport`: torchft's living replicas send their state to one that joins, out of memory and verified.

    transport = FlashpointTransport(f"/dev/shm/heal-{replica}-{rank}", state_dict=lambda: {...})
    manager = torchft.Manager(..., checkpoint_transport=transport)

A living replica copies its state into buffers of its own job root and trains on; whoever joins reads ranges of
those buffers over HTTP, and compares every byte with the manifest's digests before it touches a tensor.
"""

from __future__ import annotations

import hmac
import http.client
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from flashpoint.config import FlashpointConfig
from flashpoint.coordinator import SingleProcessCoordinator
from flashpoint.errors import CheckpointNotFoundError, DeadlineError, FlashpointError, StorageError, reason_of
from flashpoint.handle import SaveHandle
from flashpoint.ids import CheckpointContainerId, validate_job_root
from flashpoint.job import open_job
from flashpoint.manifest import MANIFEST_BYTES_MAX, MANIFEST_NAME
from flashpoint.storage.loading import StorageView
from flashpoint.storage.store import bounded
from flashpoint.telemetry import count, logger
from flashpoint_torch.packed import pack, unpack
from flashpoint_torch.plan import PlanCache
from flashpoint_torch.restore import Restore
from flashpoint_torch.session import Flashpoint

try:
    from torchft.checkpointing import CheckpointTransport
except ImportError as error:
    raise ImportError(f"{error}: install torchft with `pip install flashpoint[torchft]`") from error

T = TypeVar("T")

_SEND_BYTES: Final = 4 << 20  # in one call: so that a reader that stalls is noticed
_POLL_S: Final = 0.05
_TOKEN_BYTES: Final = 32
_PATH: Final = re.compile(r"/([A-Za-z0-9_-]{1,64})/step-([0-9]{1,19})_ckpt/([A-Za-z0-9._-]{1,64})", re.ASCII)
_RANGE: Final = re.compile(r"bytes=([0-9]{1,19})-([0-9]{1,19})", re.ASCII)


class FlashpointTransport(CheckpointTransport[T]):
    """One process's end: it sends to the same rank of other replica groups, and receives from it.

    Args:
        job_root: absolute path of a folder on a tmpfs, of this process alone. It is deleted by `shutdown`.
        state_dict: gives the state that the user's and torchft's state dict would be sent as, ``{"user": ..,
            "torchft": ..}``: what is received is filled into its tensors. Needed for DTensors; without it tensors
            are made on the CPU.
        timeout: longest that a reader waits for a step that is not there, and for each piece of it.
        host: name or address under which other replicas reach this process.
        settings: fields of `flashpoint.FlashpointConfig`, such as ``memory_limit_bytes``, ``allow_pickle``.

    Raises:
        ConfigError, FlashpointError: a setting is wrong, or the job root cannot be used.
    """

    def __init__(
        self,
        job_root: str | os.PathLike[str],
        *,
        state_dict: Callable[[], T] | None = None,
        timeout: timedelta = timedelta(seconds=60),
        host: str = "",
        **settings: Any,
    ) -> None:
        self._job_root = validate_job_root(job_root)
        self._config = FlashpointConfig.from_env(**{"keep": 1, "copies": 0, "storage": "", **settings})
        job = open_job(self._job_root, self._config, SingleProcessCoordinator())
        self._fp = Flashpoint(job)
        self._state_dict = state_dict
        self._timeout_s = timeout.total_seconds()
        self._handle: SaveHandle | None = None
        self._sent = threading.Condition()
        self._server = _Server(self)
        self._url = f"http://{host or socket.gethostname()}:{self._server.server_port}/{self._server.token}"
        threading.Thread(target=self._server.serve_forever, name="flashpoint-torchft", daemon=True).start()

    # ---- sending ----------------------------------------------------------------------------------

    def metadata(self) -> str:
        """Where this process's state is to be had, with the secret that entitles to it."""
        return self._url

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Copy the state; when it returns, the state may change again. Who wants it fetches it in the background.

        Raises:
            DeadlineError: the one before it was still being finished after ``timeout``.
            FlashpointError: the state cannot be saved, or there is no room for it.
        """
        if not self._fp.wait(timeout.total_seconds()):
            raise DeadlineError(f"sending step {step} timed out: the step before it is still being finished")
        handle = self._fp.async_save(pack(state_dict), step, overwrite=True)
        if handle.error is not None:
            raise handle.error
        with self._sent:
            self._handle = handle
            self._sent.notify_all()

    def disallow_checkpoint(self) -> None:
        """Nothing to wait for: what is sent is a copy."""

    def shutdown(self, wait: bool = True) -> None:
        """Serve no more, and give the memory back."""
        self._server.shutdown()
        self._server.server_close()
        self._fp.close()
        shutil.rmtree(self._job_root, ignore_errors=True)

    def bytes_of(self, step: int, name: str) -> memoryview:
        """An object of the step that is sent, or its manifest, for whoever asks within the time limit.

        Raises:
            FlashpointError: this process does not send that step, or has no such object.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._sent:
            while self._handle is None or self._handle.step < step:
                if not self._sent.wait(max(deadline - time.monotonic(), 0.0)):
                    raise DeadlineError(f"step {step} was not sent within {self._timeout_s:g} s: timed out")
            handle = self._handle
        if handle.step != step:
            raise CheckpointNotFoundError(f"step {step} is not sent any more: it is step {handle.step} now")
        if not handle.wait("complete", timeout_s=max(deadline - time.monotonic(), _POLL_S)):
            raise FlashpointError(f"step {step} could not be sent: {handle.error or 'timed out'}")
        objects = self._fp.objects
        container = objects.container(step)
        if name == MANIFEST_NAME:
            return memoryview(objects.manifest_bytes(container))
        for record in objects.read_summary(container).record.objects:
            if record.name == name:
                return objects.map_object(container, record).data.data  # holds its buffer as long as it lives
        raise CheckpointNotFoundError(f"step {step} has no object {name}")

    # ---- receiving --------------------------------------------------------------------------------

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Fetch the state of another process, and verify it.

        Raises:
            DeadlineError: it did not come in time.
            CorruptObjectError, ManifestError: what came is not what was sent.
            MismatchError: it does not fit ``state_dict``; nothing was changed.
            FlashpointError: the other process refuses, or is gone.
        """
        timeout_s = timeout.total_seconds()
        start_s = time.perf_counter()

        def receive() -> tuple[Restore, dict[str, Any], StorageView]:
            template: dict[str, Any] = {"tensors": {}, "objects": {}, "frame": None}
            if self._state_dict is not None:
                template = pack(self._state_dict())
            container = CheckpointContainerId(self._job_root, step)
            view = StorageView(_Sender(metadata, timeout_s), self._config, container, rank=0)
            restore = Restore(template, view, plans=PlanCache(), allow_pickle=self._config.allow_pickle)
            view.fetch(restore.needs())
            restore.check()
            return restore, template, view

        try:
            restore, state, view = bounded(receive, timeout_s, metadata.rpartition("/")[0])
        except DeadlineError as error:
            raise DeadlineError(f"receiving step {step} from rank {src_rank} timed out: {error}") from error
        with view:
            restore.fill()
            count("states_received")
            seconds = time.perf_counter() - start_s
            logger.info("step %d: %d bytes received in %.3f s", step, view.read_nbytes, seconds)
        found: T = unpack(state)
        return found


# ---- the wire -------------------------------------------------------------------------------------


class _Server(ThreadingHTTPServer):
    """Answers ``GET /<token>/step-<n>_ckpt/<name>`` with a range of bytes."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, transport: FlashpointTransport[Any]) -> None:
        self.token = secrets.token_urlsafe(_TOKEN_BYTES)
        self.bytes_of = transport.bytes_of
        self.timeout_s = transport._timeout_s
        super().__init__(("", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.info("a reader of this replica's state went away", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def setup(self) -> None:
        self.request.settimeout(self.server.timeout_s)  # of each read and write
        super().setup()

    def do_GET(self) -> None:
        path, span = _PATH.fullmatch(self.path), self.headers.get("Range")
        wanted = _RANGE.fullmatch(span) if span is not None else None
        if path is None or not hmac.compare_digest(path[1], self.server.token) or (span and wanted is None):
            self.send_error(404)
            return
        try:
            data = self.server.bytes_of(int(path[2]), path[3])
        except (FlashpointError, OSError) as error:
            self._refuse(404 if isinstance(error, CheckpointNotFoundError) else 503, reason_of(error))
            return
        if wanted is not None:
            begin, end = int(wanted[1]), int(wanted[2]) + 1
            if not begin < end <= len(data):
                self.send_error(416)
                return
            data = data[begin:end]
        self.send_response(200 if wanted is None else 206)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        for begin in range(0, len(data), _SEND_BYTES):
            self.wfile.write(data[begin : begin + _SEND_BYTES])

    def _refuse(self, status: int, reason: str) -> None:
        body = reason.encode()[:1000]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: paths hold the token."""


class _Sender:
    """Another process's state, to read from."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise FlashpointError("this is no address of a FlashpointTransport: use it in all replicas")
        self.url = f"http://{parts.hostname}:{parts.port}"  # without the token: it is for messages
        self._host, self._port, self._token = parts.hostname, parts.port, parts.path.strip("/")
        self._timeout_s = timeout_s

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            headers = {} if end is None else {"Range": f"bytes={begin}-{end - 1}"}
            connection.request("GET", f"/{self._token}/{name}", headers=headers)
            response = connection.getresponse()
            length = int(response.headers.get("Content-Length", "-1"))
            if response.status not in (200, 206):
                reason = response.read(1000).decode(errors="replace")
                error = CheckpointNotFoundError if response.status == 404 else StorageError
                raise error(f"{self.url} refused {name}: {response.status} {reason}")
            if not 0 <= length <= (MANIFEST_BYTES_MAX if end is None else end - begin):
                raise StorageError(f"{self.url} answers with {length} bytes of {name}")
            return response.read(length)
        except TimeoutError as error:
            raise DeadlineError(f"{self.url} did not answer within {self._timeout_s:g} s") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise StorageError(f"reading {name} from {self.url} failed: {error!r}") from error
        finally:
            connection.close()
