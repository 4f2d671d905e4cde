"""Getting objects of one version from peers: manifest, buffers, bytes, checksums, links. Run by the manager.

    manifest -> prepare (in the worker thread) -> fetch -> link each object when its last chunk is verified

What is linked into the container is whole and verified, so the link is the commit of a copy, and after a
crash the files themselves say what is left to do.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import xxhash

from flashpoint import manifest as manifests
from flashpoint.buffers import BufferObject
from flashpoint.checksums import DIGEST_BYTES, Bytes, mismatches
from flashpoint.errors import (
    FlashpointError,
    ManifestError,
    NoSpaceError,
    ProtocolError,
    ReplicationError,
    reason_of,
)
from flashpoint.ids import CheckpointObjectId
from flashpoint.manifest import MANIFEST_NAME, CommitRecord, ObjectRecord
from flashpoint.objects import CheckpointObjectManager
from flashpoint.replication.chunks import Want
from flashpoint.replication.messages import Data, Key
from flashpoint.replication.orders import Wanted
from flashpoint.replication.session import Payload
from flashpoint.replication.transfer import Ask, Credit, Landing, Transfer

_MANIFEST_CHUNK_BYTES: Final = 1 << 20
_FULL: Final = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
_DENIED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass
class _Part:
    """An object on its way: where its bytes go, and where it is linked when it is whole.

    Attributes:
        digests: of chunks whose frames have come one after another, from the first, to this byte.
    """

    record: ObjectRecord
    buffer: BufferObject
    path: str
    digests: dict[int, tuple[xxhash.xxh3_64, int]] = field(default_factory=dict)


class Acquisition:
    """The objects of one version, from peers into this node's memory.

    Args:
        wanted: the objects; with none, the manifest alone.
        reader: rank for which parts of objects are wanted.
        manifest_nbytes, manifest_sources: of the manifest, should it not be here.
        on_end: called once, in the manager's thread: with None, or with (code, reason).
    """

    def __init__(
        self,
        objects: CheckpointObjectManager,
        key: Key,
        wanted: Sequence[Wanted],
        *,
        reader: int,
        manifest_nbytes: int,
        manifest_sources: tuple[int, ...],
        credit: Credit,
        numbers: Iterator[int],
        timeout_s: float,
        on_end: Callable[[tuple[str, str] | None], None],
    ) -> None:
        self.key = key
        self.nbytes = 0  # fetched so far
        self.ended = False
        self.is_new = False  # whether `transfer` is one whose sources nobody has looked after yet
        self.transfer: Transfer | None = None
        self._objects = objects
        self._wanted = list(wanted)
        self._reader = reader
        self._manifest_nbytes = manifest_nbytes
        self._manifest_sources = manifest_sources
        self._manifest_bytes: Bytes | None = None
        self._credit = credit
        self._numbers = numbers
        self._timeout_s = timeout_s
        self._on_end = on_end
        self.sources: frozenset[int] = frozenset()
        self._parts: list[_Part] = []
        self._container = objects.container(key.step)

    # ---- steps ------------------------------------------------------------------------------------

    def prepare(self) -> Callable[[], None]:
        """The slow part before fetching, for the worker thread; returns what the loop is to do next."""
        try:
            record = self._manifest_here()
            if record is None:
                return self._fetch_manifest
            transfer = self._take_buffers(record) if self._wanted else None
            return lambda: self._fetch_objects(transfer)
        except Exception as failure:
            error = _refusal(failure)
            return lambda: self._end(error)

    def _manifest_here(self) -> CommitRecord | None:
        """What this node's own copy of the manifest says, if it is the very one that is wanted."""
        if self.key.step in self._objects.dirty_steps():
            raise ProtocolError("busy", f"step {self.key.step} is being saved on this node")
        _refuse_link(self._container.path)
        try:
            summary = self._objects.read_summary(self._container)
        except FlashpointError:
            return None
        if summary.digest == self.key.digest:
            return summary.record
        if summary.record.epoch >= self.key.epoch:
            raise ProtocolError("stale-epoch", f"this node holds another save of step {self.key.step}")
        self._objects.remove_container(self._container)  # of a run that the job has left behind
        return None

    def _take_buffers(self, version: CommitRecord) -> Transfer | None:
        records = {record.name: record for record in version.objects}
        for one in self._wanted:
            if one.name not in records:
                raise ProtocolError("no-object", f"step {self.key.step} has no object {one.name}")
        held = self._objects.held_objects(self._container, [records[one.name] for one in self._wanted])
        wanted = [one for one in self._wanted if one.name not in held]
        buffers = self._objects.pool.acquire_many([records[one.name].nbytes for one in wanted])
        container, fetched = (
            self._container.path,
            self._objects.fetched_folder(self._container, self._reader),
        )
        wants = []
        for one, buffer in zip(wanted, buffers, strict=True):
            record = records[one.name]
            count = -(-record.nbytes // record.chunk_bytes)
            chunks = tuple(sorted(set(one.chunks))) if one.chunks else tuple(range(count))
            folder = container if len(chunks) == count else fetched
            name = CheckpointObjectId.parse(one.name).name
            self._parts.append(_Part(record, buffer, f"{folder}/{name}"))
            wants.append(Want(one.name, record.nbytes, record.chunk_bytes, chunks, one.sources))
        for folder in {os.path.dirname(part.path) for part in self._parts}:
            _refuse_link(os.path.dirname(folder))
            _refuse_link(folder)
            os.makedirs(folder, mode=0o700, exist_ok=True)
        return self._transfer(wants)

    def _fetch_objects(self, transfer: Transfer | None) -> None:
        # Only now does the loop see the transfer: had it begun while the worker was still at it, all could be
        # verified by now and nothing linked, and that would look like a transfer with nothing to do.
        self.transfer = transfer
        if self.ended:  # cancelled while the buffers were taken
            self._let_go()
        elif transfer is None or transfer.done:
            self._end(None)

    def _fetch_manifest(self) -> None:
        if self.ended:
            return
        nbytes = self._manifest_nbytes
        if not 0 < nbytes <= manifests.MANIFEST_BYTES_MAX or not self._manifest_sources:
            self._end(("no-version", f"step {self.key.step} has no manifest on this node"))
            return
        self._manifest_bytes = np.empty(nbytes, dtype=np.uint8)
        chunks = tuple(range(-(-nbytes // _MANIFEST_CHUNK_BYTES)))
        want = Want(MANIFEST_NAME, nbytes, _MANIFEST_CHUNK_BYTES, chunks, self._manifest_sources)
        self.transfer = self._transfer([want])

    def _keep_manifest(self, data: bytes) -> Callable[[], None]:
        """Check and write the manifest that was fetched, in the worker thread; then as `prepare`."""
        try:
            manifest = manifests.decode(data)
            if (manifest.record.epoch, manifest.step, manifest.digest) != (
                self.key.epoch,
                self.key.step,
                self.key.digest,
            ):
                raise ManifestError(f"a peer sent the manifest of another version than {self.key}")
            if self.key.step in self._objects.dirty_steps():
                raise ProtocolError("busy", f"step {self.key.step} is being saved on this node")
            _refuse_link(self._container.path)
            self._objects.create_container(self._container)
            self._objects.write_manifest(self._container, data)
        except Exception as failure:
            error = _refusal(failure)
            return lambda: self._end(error)
        return self.prepare()

    # ---- bytes ------------------------------------------------------------------------------------

    @property
    def wants_manifest(self) -> bool:
        return self._manifest_bytes is not None

    def name_of(self, want: int) -> str:
        return MANIFEST_NAME if self.wants_manifest else self._parts[want].record.name

    def asks(self, now_s: float) -> list[Ask]:
        return self.transfer.requests(now_s) if self.transfer is not None and not self.ended else []

    def arrived(self, data: Data, payload: Payload) -> bool:
        """Take a frame that belongs to this acquisition; False if it does not, or comes too late."""
        transfer = self.transfer
        landing = transfer.arrived(data.request, data.begin, data.end) if transfer is not None else None
        if transfer is None or landing is None:
            return False
        try:
            self._put(landing, payload)
        except ProtocolError as error:  # sealed under another key, or changed on its way
            transfer.refused(data.request, error.code)
            return True
        except OSError as failure:
            self._end(_refusal(failure))
            return True
        self.nbytes += landing.end - landing.begin
        chunk = transfer.landed(data.request)
        if chunk is not None:
            transfer.verified(*chunk, ok=self._is_good(*chunk))
        return True

    def progressed(self) -> Callable[[], Callable[[], None]] | None:
        """After frames came: link what is whole. Returns work for the worker thread, if there is some."""
        if self.transfer is None or self.ended:
            return None
        try:
            if self.transfer.failed is not None:
                raise self.transfer.failed
            if self._manifest_bytes is not None:
                if not self.transfer.done:
                    return None
                data, self._manifest_bytes, self.transfer = self._manifest_bytes.tobytes(), None, None
                return lambda: self._keep_manifest(data)
            for want in self.transfer.finished():
                self._link(self._parts[want])
            if self.transfer.done:
                self._end(None)
        except (FlashpointError, OSError) as failure:
            self._end(_refusal(failure))
        return None

    def _is_good(self, want: int, chunk: int) -> bool:
        if self.wants_manifest:
            return True  # it has a checksum of its own, over all of it
        part = self._parts[want]
        record = part.record
        digest, end = part.digests.pop(chunk, (None, 0))
        if digest is None or end != min((chunk + 1) * record.chunk_bytes, record.nbytes):
            return not mismatches(part.buffer.data, record.chunk_bytes, record.chunks, [chunk])
        return digest.digest() == record.chunks[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]

    def _put(self, landing: Landing, payload: Payload) -> None:
        """Bytes to their place; and their part of the checksum, while the CPU's cache has them."""
        begin, end = landing.begin, landing.end
        if self._manifest_bytes is not None:
            payload.copy_into(self._manifest_bytes[begin:end])
            return
        part = self._parts[landing.want]
        chunk = begin // part.record.chunk_bytes
        digest, upto = part.digests.pop(chunk, (None, 0))
        if part.buffer.recycled:
            target = part.buffer.data[begin:end]
            payload.copy_into(target)
            data = target.data
        else:
            # Nobody has touched the pages of a new buffer: through its mapping each would cost a fault, and
            # together twice what it costs to write them.
            data = payload.opened()
            _write(part.buffer.fd, data, begin)
        if begin == chunk * part.record.chunk_bytes:
            part.digests[chunk] = xxhash.xxh3_64(data), end
        elif digest is not None and upto == begin:
            digest.update(data)
            part.digests[chunk] = digest, end
        # Else frames came in another order: the chunk is read again when it is whole.

    def _link(self, part: _Part) -> None:
        try:
            os.link(part.buffer.path, part.path)
        except FileExistsError:  # of another size, or else it would count as held
            os.unlink(part.path)
            os.link(part.buffer.path, part.path)
        self._objects.pool.release(part.buffer)

    # ---- end --------------------------------------------------------------------------------------

    def cancel(self, code: str, reason: str) -> None:
        self._end((code, reason))

    def _end(self, error: tuple[str, str] | None) -> None:
        if self.ended:
            return
        self.ended = True
        self._let_go()
        self._on_end(error)

    def _let_go(self) -> None:
        if self.transfer is not None:
            self.transfer.close()
        for part in self._parts:
            self._objects.pool.release(part.buffer)  # those that are linked were released before
        self._manifest_bytes = None

    def _transfer(self, wants: Sequence[Want]) -> Transfer:
        self.sources = frozenset(index for want in wants for index in want.sources)
        self.is_new = True
        return Transfer(
            wants,
            credit=self._credit,
            numbers=self._numbers,
            timeout_s=self._timeout_s,
            version=str(self.key),
        )


def _write(fd: int, data: memoryview, begin: int) -> None:
    """All of ``data`` to its place in a file."""
    while data:
        written = os.pwrite(fd, data, begin)
        data, begin = data[written:], begin + written


def _refuse_link(folder: str) -> None:
    """What peers send stays below the job root: a folder that leads elsewhere is neither read, written nor emptied."""
    if os.path.islink(folder):
        raise ProtocolError("not-writable", f"{folder} is a symbolic link: delete it")


def _refusal(failure: Exception) -> tuple[str, str]:
    """(code, reason) for a peer that waits for this."""
    if isinstance(failure, ProtocolError):
        return failure.code, failure.reason
    if isinstance(failure, NoSpaceError) or (isinstance(failure, OSError) and failure.errno in _FULL):
        return "no-space", reason_of(failure)
    if isinstance(failure, OSError) and failure.errno in _DENIED:
        return "not-writable", reason_of(failure)
    if isinstance(failure, FileNotFoundError):
        return "no-version", f"the version was given up on this node meanwhile ({failure})"
    if isinstance(failure, ReplicationError):
        return "no-source", reason_of(failure)
    return "corrupt", reason_of(failure)
