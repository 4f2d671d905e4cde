"""Reading versions that lie on other nodes with stock TensorStore: a small HTTP server, and the specs for it.

On a node that holds objects:

    with remote.ObjectServer("/dev/shm/job-1", token, host="10.0.0.7") as server: ...

On one that has the version's index (and may have some of its objects):

    spec = remote.cluster_spec("/dev/shm/job-1/step-100_ckpt", {"rank00003-0.safetensors": server.url}, token=token)
    kernel = ts.open(kvstore.array_spec_of(spec, "params.dense.kernel", "zarr")).result()

The server gives out byte ranges of complete versions, by their exact names, and nothing else; it follows no link,
lists nothing and changes nothing. Bytes of objects are compared with the manifest's digests before they are sent
for the first time. **HTTP has no secrecy:** token and contents are readable on the way, so this is for a network
that the job trusts (or a tunnel). Replication between agents has its own, encrypted, transport.

TensorStore uses the environment's HTTP proxy, if there is one: name the nodes in ``no_proxy``. A peer that
takes a connection and never answers is given up only if ``TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS`` and
``TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES`` were set before TensorStore was imported.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import os
import re
import secrets
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, BinaryIO, Final, NamedTuple, cast
from urllib.parse import unquote, urlsplit

import xxhash

from flashpoint.checksums import DIGEST_BYTES
from flashpoint.errors import CheckpointNotFoundError, ConfigError, InvalidIdError, ManifestError
from flashpoint.ids import CheckpointContainerId, CheckpointObjectId, parse_container_name
from flashpoint.manifest import MANIFEST_NAME, ObjectRecord
from flashpoint.objects import CheckpointObjectManager
from flashpoint.telemetry import logger
from flashpoint_jax import kvstore
from flashpoint_jax.kvstore import Json

CONNECTIONS_MAX: Final = 64
IDLE_S: Final = 30.0  # without a byte of a request, or one taken of an answer
TOKEN_CHARS_MIN: Final = 16
_MANIFESTS_MAX: Final = 4
# A dead peer is an error after about a second. TensorStore's own default is 32 attempts over many minutes.
_RETRIES: Final[Json] = {"max_retries": 4, "initial_delay": "20ms", "max_delay": "100ms"}

_INDEX_FILE: Final = re.compile(r"manifest\.ocdbt|nodes-[0-9a-f]{32}\.ocdbt", re.ASCII)
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]+", re.ASCII)  # of a bearer token, RFC 6750
_RANGE: Final = re.compile(r"bytes=([0-9]{0,19})-([0-9]{0,19})", re.ASCII)


def new_token() -> str:
    """A token that nobody guesses."""
    return secrets.token_urlsafe(32)


# ---- specs --------------------------------------------------------------------------------------


def http_spec(url: str, path: str, *, token: str) -> Json:
    """The spec of a folder that an `ObjectServer` serves."""
    return {
        "driver": "http",
        "base_url": url,
        "path": path,
        "headers": [f"Authorization: Bearer {_checked(token)}"],
        "context": {"http_request_retries": _RETRIES},
    }


def cluster_spec(
    container: CheckpointContainerId | str | os.PathLike[str], holders: Mapping[str, str], *, token: str
) -> Json:
    """The spec of a version whose objects lie on several nodes, as one store.

    Args:
        container: here; its manifest and an index over *all* objects must lie in it.
        holders: object's name -> `ObjectServer.url` of a node that has it, for those that are read from there.
        token: that all of the servers have.

    Raises:
        CheckpointNotFoundError: the version is not complete, has no index, or an object lies neither here nor
            on one of the holders.
    """
    if not isinstance(container, CheckpointContainerId):
        container = CheckpointContainerId.parse(container)
    local = kvstore.spec(container)
    objects = CheckpointObjectManager(container.job_root, create=False)
    names = sorted(record.name for record in objects.read_manifest(container).objects)
    nowhere = [n for n in names if n not in holders and not os.path.lexists(f"{container.path}/{n}")]
    if nowhere:
        raise CheckpointNotFoundError(
            f"{container}: {len(nowhere)} objects lie neither here nor on a holder, the first is {nowhere[0]}"
        )
    # One layer for neighbours on the same holder; the last layer that a key lies in is the one that is asked.
    layers: list[Json] = [{"base": local["base"]}]
    before = None
    for name in names:
        url = holders.get(name)
        if url is not None and url == before:
            layers[-1]["exclusive_max"] = f"{name}~"
        elif url is not None:
            base = http_spec(url, f"{container.name}/", token=token)
            layers.append(
                {"base": base, "inclusive_min": name, "exclusive_max": f"{name}~", "strip_prefix": 0}
            )
        before = url
    return {**local, "base": {"driver": "kvstack", "layers": layers}}


def _checked(token: str) -> str:
    if len(token) < TOKEN_CHARS_MIN or not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"a token has at least {TOKEN_CHARS_MIN} characters, letters, digits and ._~+/=-: use new_token()"
        )
    return token


# ---- server -------------------------------------------------------------------------------------


class _HttpError(Exception):
    def __init__(self, status: HTTPStatus, why: str = "", **headers: str) -> None:
        self.status = status
        self.why = why or status.phrase
        self.headers = headers
        super().__init__(self.why)


class _Version(NamedTuple):
    """A manifest as far as it is needed here.

    ``verified``: (object, inode of its file) -> the chunks that were found sound; another file is another matter.
    """

    identity: tuple[int, ...]
    digest: str
    records: dict[str, ObjectRecord]
    verified: dict[tuple[str, int], set[int]]


class _Opened(NamedTuple):
    file: BinaryIO
    nbytes: int
    inode: int
    etag: str
    record: ObjectRecord | None
    version: _Version


class ObjectServer:
    """Serves the complete versions of one job root, read-only, to whoever has the token.

    Args:
        job_root: what is above or beside it is never served.
        token: at least 16 characters (`new_token`).
        host: IPv4 address or name to listen on; by default only this machine's own.
        port: 0 for a free one.
        verify: compare chunks with the manifest's digests before they are first sent.

    Attributes:
        url: base of all addresses: ``<url>/step-100_ckpt/rank00000-0.safetensors``.
    """

    def __init__(
        self,
        job_root: str | os.PathLike[str],
        token: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        verify: bool = True,
    ) -> None:
        self._objects = CheckpointObjectManager(job_root, create=False)
        self._authorization = f"Bearer {_checked(token)}".encode()
        self._verify = verify
        self._versions: OrderedDict[int, _Version] = OrderedDict()
        self._lock = threading.Lock()
        self._server = _Server((host, port), self)
        address, bound = self._server.server_address[:2]
        self.url = f"http://{address!s}:{bound}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="flashpoint-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening; answers that are under way end by themselves."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> ObjectServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- what a request may see -----------------------------------------------------------------

    def may(self, authorization: str | None) -> bool:
        return hmac.compare_digest((authorization or "").encode("latin-1", "replace"), self._authorization)

    @contextmanager
    def opened(self, path: str) -> Iterator[_Opened]:
        """The file behind a request's path; an object is locked, shared, so that its buffer stays as it is."""
        container, name = self._parse(path)
        version = self._version(container)
        record = version.records.get(name)
        if record is None and name != MANIFEST_NAME and not _INDEX_FILE.fullmatch(name):
            raise _HttpError(HTTPStatus.NOT_FOUND)
        try:
            folder = os.open(container.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                file = cast(BinaryIO, os.fdopen(os.open(name, flags, dir_fd=folder), "rb", buffering=0))
                with file:
                    status = os.fstat(file.fileno())
                    if not stat.S_ISREG(status.st_mode):
                        raise _HttpError(HTTPStatus.NOT_FOUND)
                    if record is not None:
                        self._hold(file.fileno(), folder, record, status)
                        # A save of the same step may have begun before the lock was had.
                        if self._version(container).digest != version.digest:
                            raise _HttpError(HTTPStatus.NOT_FOUND)
                    etag = f'"{version.digest}-{status.st_size}"'
                    yield _Opened(file, status.st_size, status.st_ino, etag, record, version)
            finally:
                os.close(folder)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
                raise _HttpError(HTTPStatus.NOT_FOUND) from None
            raise

    def check(self, opened: _Opened, begin: int, end: int) -> None:
        """Compare the chunks of an object that hold these bytes with their digests.

        Raises:
            _HttpError: they do not match; the answer is an error, and not one wrong byte.
        """
        record = opened.record
        if record is None or not self._verify or end <= begin:
            return
        verified = opened.version.verified.setdefault((record.name, opened.inode), set())
        nbytes = record.chunk_bytes
        for i in range(begin // nbytes, -(-end // nbytes)):
            if i in verified:
                continue
            data = os.pread(opened.file.fileno(), nbytes, i * nbytes)
            if xxhash.xxh3_64_digest(data) != record.chunks[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES]:
                logger.error("object %s is corrupt at chunk %d: it is not served", record.name, i)
                raise _HttpError(HTTPStatus.INTERNAL_SERVER_ERROR, f"{record.name} is corrupt at chunk {i}")
            verified.add(i)

    def _parse(self, path: str) -> tuple[CheckpointContainerId, str]:
        try:
            parts = unquote(urlsplit(path).path, errors="replace").split("/")
        except ValueError:  # of a host that cannot be
            raise _HttpError(HTTPStatus.BAD_REQUEST) from None
        step = parse_container_name(parts[1]) if len(parts) == 3 and not parts[0] else None
        name = parts[-1]
        if step is None or "\0" in name:
            raise _HttpError(HTTPStatus.NOT_FOUND)
        if name != MANIFEST_NAME and not _INDEX_FILE.fullmatch(name):
            try:
                CheckpointObjectId.parse(name)
            except InvalidIdError:
                raise _HttpError(HTTPStatus.NOT_FOUND) from None
        return self._objects.container(step), name

    def _version(self, container: CheckpointContainerId) -> _Version:
        """The complete version, its manifest decoded once."""
        step = container.step
        if step in self._objects.dirty_steps():
            raise _HttpError(HTTPStatus.NOT_FOUND)
        try:
            status = os.stat(f"{container.path}/{MANIFEST_NAME}", follow_symlinks=False)
            identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            with self._lock:
                known = self._versions.get(step)
            if known is not None and known.identity == identity:
                return known
            manifest = self._objects.read_manifest(container)
        except (OSError, ManifestError):
            raise _HttpError(HTTPStatus.NOT_FOUND) from None
        records = {record.name: record for record in manifest.objects}
        version = _Version(identity, manifest.digest, records, {})
        with self._lock:
            self._versions[step] = version
            while len(self._versions) > _MANIFESTS_MAX:
                self._versions.popitem(last=False)
        return version

    def _hold(self, fd: int, folder: int, record: ObjectRecord, status: os.stat_result) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _HttpError(HTTPStatus.SERVICE_UNAVAILABLE, "it is being written") from None
        named = os.stat(record.name, dir_fd=folder, follow_symlinks=False)
        if (named.st_dev, named.st_ino) != (status.st_dev, status.st_ino):
            raise _HttpError(HTTPStatus.SERVICE_UNAVAILABLE, "it has just been replaced")
        if status.st_size != record.nbytes:
            raise _HttpError(
                HTTPStatus.INTERNAL_SERVER_ERROR, f"{record.name} has another size than it should"
            )


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = CONNECTIONS_MAX  # a burst is refused at once, not after TCP's own seconds

    def __init__(self, address: tuple[str, int], owner: ObjectServer) -> None:
        self.owner = owner
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        super().__init__(address, _Request)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request of %s ended early", client_address, exc_info=True)


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "flashpoint"
    sys_version = ""
    timeout = IDLE_S
    server: _Server

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        owner = self.server.owner
        try:
            if not owner.may(self.headers.get("Authorization")):
                raise _HttpError(HTTPStatus.UNAUTHORIZED, **{"WWW-Authenticate": "Bearer"})
            with owner.opened(self.path) as opened:
                if self.headers.get("If-None-Match") == opened.etag:
                    raise _HttpError(HTTPStatus.NOT_MODIFIED, ETag=opened.etag)
                begin, end, partial = _range_of(self.headers.get("Range"), opened.nbytes)
                if with_body:
                    owner.check(opened, begin, end)
                self.send_response(HTTPStatus.PARTIAL_CONTENT if partial else HTTPStatus.OK)
                self.send_header("Content-Type", "application/octet-stream")
                self.send_header("Content-Length", str(end - begin))
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("ETag", opened.etag)
                if partial:
                    self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{opened.nbytes}")
                self.end_headers()
                if with_body and end > begin:
                    # Straight from the page cache, with the GIL released.
                    self.connection.sendfile(opened.file, begin, end - begin)
        except _HttpError as error:
            self._refuse(error)

    def _refuse(self, error: _HttpError) -> None:
        body = b"" if error.status is HTTPStatus.NOT_MODIFIED else error.why.encode()
        self.send_response(error.status)
        for name, value in error.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("%s: " + format, self.address_string(), *args)


def _range_of(header: str | None, nbytes: int) -> tuple[int, int, bool]:
    """(begin, end, whether it is a part) of what a ``Range`` header asks of a file (RFC 9110, 14.2)."""
    match = _RANGE.fullmatch(header or "")
    if match is None or match[1] == match[2] == "":
        return 0, nbytes, False  # none, or of a form that may be ignored
    if match[1]:
        begin, end = int(match[1]), min(int(match[2]) + 1, nbytes) if match[2] else nbytes
        if match[2] and int(match[2]) < begin:
            return 0, nbytes, False
    else:
        begin, end = max(nbytes - int(match[2]), 0), nbytes
    if begin >= nbytes or begin >= end:
        unsatisfied = {"Content-Range": f"bytes */{nbytes}"}
        raise _HttpError(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, **unsatisfied)
    return begin, end, True
