"""Repairing a corrupt object: its wrong chunks from peers, all others from what lies here. Run by the manager."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from flashpoint.buffers import BufferObject
from flashpoint.checksums import mismatches
from flashpoint.confined import NO_FILE
from flashpoint.errors import ProtocolError
from flashpoint.manifest import CommitRecord, ObjectRecord
from flashpoint.objects import CheckpointObjectManager
from flashpoint.replication.acquisition import Acquisition, _Part
from flashpoint.replication.chunks import Want
from flashpoint.replication.messages import Key
from flashpoint.replication.orders import Wanted
from flashpoint.replication.transfer import Credit, Transfer


class Repair(Acquisition):
    """An object of a version that lies here, made whole in another buffer, which then takes its name at once.

    The corrupt file itself is not written to: a loader or a trainer may have it mapped. Only wrong chunks are
    fetched, so two nodes whose copies are corrupt in different places repair each other.
    """

    def __init__(
        self,
        objects: CheckpointObjectManager,
        key: Key,
        name: str,
        sources: tuple[int, ...],
        *,
        credit: Credit,
        numbers: Iterator[int],
        timeout_s: float,
        on_end: Callable[[tuple[str, str] | None], None],
    ) -> None:
        super().__init__(
            objects,
            key,
            [Wanted(name, (), sources)],
            reader=0,
            manifest_nbytes=0,
            manifest_sources=(),
            credit=credit,
            numbers=numbers,
            timeout_s=timeout_s,
            on_end=on_end,
        )

    @property
    def is_lost(self) -> bool:
        """Whether it failed because there is no good copy: every source has none, or gave wrong bytes."""
        return self.transfer is not None and self.transfer.is_lost

    def _manifest_here(self) -> CommitRecord:
        if self.key.step in self._objects.dirty_steps():
            raise ProtocolError("busy", f"step {self.key.step} is being saved on this node")
        summary = self._objects.read_summary(self._container)
        if summary.digest != self.key.digest:
            raise ProtocolError("no-version", f"step {self.key.step} was saved again")
        return summary.record

    def _take_buffers(self, version: CommitRecord) -> Transfer | None:
        (one,) = self._wanted
        record = next(record for record in version.objects if record.name == one.name)
        (buffer,) = self._objects.pool.acquire_many([record.nbytes])
        part = _Part(record, buffer, f"{self._container.path}/{one.name}")
        self._parts.append(part)  # whatever happens, it is released at the end
        bad = self._copy_good_chunks(record, buffer)
        if not bad:  # a file with holes, of zeros that should be zeros
            self._link(part)
            return None
        return self._transfer([Want(one.name, record.nbytes, record.chunk_bytes, tuple(bad), one.sources)])

    def _copy_good_chunks(self, record: ObjectRecord, buffer: BufferObject) -> list[int]:
        """Fill the buffer with what lies here; the chunks that are wrong in it."""
        try:
            fd = self._objects.open_object(self._container, record.name)
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
        else:
            with open(fd, "rb", buffering=0):
                position = 0
                while position < record.nbytes:  # a file that is too short ends it
                    count = os.preadv(
                        fd, [buffer.data[position : position + record.chunk_bytes].data], position
                    )
                    if not count:
                        break
                    position += count
        chunks = range(-(-record.nbytes // record.chunk_bytes))
        return mismatches(buffer.data, record.chunk_bytes, record.chunks, chunks)

    def _link(self, part: _Part) -> None:
        self._manifest_here()  # a save of the same step may have begun meanwhile
        self._objects.replace_object(self._container, part.record.name, part.buffer)
        self._objects.pool.release(part.buffer)
