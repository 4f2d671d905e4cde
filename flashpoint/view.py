"""`flashpoint.open`: a container as a read-only mapping of names to numpy views, verified on first use."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from flashpoint.boxes import Box
from flashpoint.checksums import Bytes, mismatches
from flashpoint.config import FlashpointConfig
from flashpoint.dtypes import dtype_of
from flashpoint.errors import CheckpointNotFoundError, CorruptObjectError
from flashpoint.ids import CheckpointContainerId
from flashpoint.layout import Entry
from flashpoint.located import container_at
from flashpoint.manifest import Manifest, ObjectRecord, plain_value
from flashpoint.objects import CheckpointObjectManager, MappedObject
from flashpoint.recovery import plan_reads, preferred_entries, values_source
from flashpoint.retrieval import needs_of_reads
from flashpoint.trace import traced

Array = np.ndarray[Any, Any]


class ObjectSource(Protocol):
    """Where a view's manifest and objects come from: `CheckpointObjectManager`, or long-term storage."""

    config: FlashpointConfig

    def read_manifest(self, container: CheckpointContainerId) -> Manifest: ...

    def held_objects(self, container: CheckpointContainerId, records: Iterable[ObjectRecord]) -> set[str]: ...

    def map_object(
        self, container: CheckpointContainerId, record: ObjectRecord, *, warm: bool = False
    ) -> MappedObject: ...


class CheckpointView(Mapping[str, Any]):
    """One complete version, opened for reading.

    ``view[name]`` is a read-only numpy array over the mapped object (no copy) for a tensor stored whole;
    an array put together from its shards for a sharded one; the Python value for a plain value; the
    raw bytes for a value that was pickled, which is never unpickled here.

    Arrays stay valid after `close`: each holds its object's mapping, and with it the lock that keeps
    the buffer from being recycled, for as long as the array lives. (A ``warm`` view borrows the mappings
    of this process's own buffers, which are not there in a forked child.)
    """

    def __init__(
        self,
        objects: ObjectSource,
        container: CheckpointContainerId,
        *,
        rank: int = 0,
        verify: bool = True,
        warm: bool = False,
    ) -> None:
        self.container = container
        self.manifest: Manifest = objects.read_manifest(container)
        self.rank = rank
        self._objects = objects
        self._verify = verify
        self._warm = warm
        self._mapped: dict[str, MappedObject] = {}
        self._verified: dict[str, set[int]] = {}
        self._lock = threading.Lock()

    # ---- the mapping ----------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        shards = preferred_entries(self.manifest, name, self.rank)
        if not shards:
            return self._value(name)
        first = self.manifest.entry(*shards[0])
        if first.is_whole:
            return self.array(*shards[0])
        return self.part(name, Box.whole(first.whole_shape))

    def part(self, name: str, box: Box) -> Array:
        """A part of the tensor ``name``, put together from its shards; a view where one shard holds all of it.

        Only the bytes that it takes are read and verified.

        Raises:
            KeyError: there is no such tensor.
            MismatchError: its shards leave a hole there.
            CorruptObjectError: bytes that do not match their digests.
        """
        shards = preferred_entries(self.manifest, name, self.rank)
        if not shards:
            raise KeyError(name)
        first = self.manifest.entry(*shards[0])
        # Planned like any load: a hole between the shards is an error, not uninitialised memory.
        target = Entry(name, first.dtype, box.shape, box.start, first.whole_shape)
        reads = plan_reads(self.manifest, [target], self.rank)
        for need in needs_of_reads(self.manifest, reads):
            self.mapped(need.record, need.begin, need.end)
        pieces: list[Array] = [
            self._shard(read.record, read.entry)[_box(read.source_start, read.lengths)] for read in reads
        ]
        if len(pieces) == 1:
            return pieces[0]
        dtype = dtype_of(first.dtype)
        as_bytes = () if dtype.numpy is not None else (dtype.itemsize,)
        found: Array = np.empty((*box.shape, *as_bytes), dtype=dtype.numpy or np.uint8)
        for read, piece in zip(reads, pieces, strict=True):
            found[_box(read.target_start, read.lengths)] = piece
        found.flags.writeable = False
        return found

    def __iter__(self) -> Iterator[str]:
        yield from self.manifest.by_name
        yield from (name for name in self._values_source if name not in self.manifest.by_name)

    def __len__(self) -> int:
        return len(self.manifest.by_name.keys() | self._values_source)

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.by_name or name in self._values_source

    @cached_property
    def _values_source(self) -> dict[str, int]:
        return values_source(self.manifest, self.rank)

    def _value(self, name: str) -> Any:
        if name not in self._values_source:
            raise KeyError(name)
        return plain_value(self.manifest.values_of(self._values_source[name])[name])

    # ---- entries --------------------------------------------------------------------------------

    def entry(self, record: ObjectRecord, index: int) -> Entry:
        return self.manifest.entry(record, index)

    def array(self, record: ObjectRecord, index: int) -> Array:
        """One stored shard as a read-only view; a dtype numpy has no name for comes as bytes."""
        self.entry_bytes(record, index)
        return self._shard(record, index)

    def _shard(self, record: ObjectRecord, index: int) -> Array:
        """`array`, unverified."""
        entry, layout = self.manifest.entry(record, index), self.manifest.layout(record)
        dtype = dtype_of(entry.dtype)
        data = self.mapped(record, 0, 0).data[layout.begins[index] : layout.ends[index]]
        if dtype.numpy is None:
            return data.reshape(*entry.shape, dtype.itemsize)
        return data.view(dtype.numpy).reshape(entry.shape)

    def is_here(self, record: ObjectRecord) -> bool:
        """Whether an object lies in this node's container, with the size that it should have."""
        return bool(self._objects.held_objects(self.container, [record]))

    def entry_bytes(self, record: ObjectRecord, index: int) -> Bytes:
        """The verified bytes of one stored shard."""
        layout = self.manifest.layout(record)
        begin, end = layout.begins[index], layout.ends[index]
        return self.object_bytes(record, begin, end)[begin:end]

    def object_bytes(self, record: ObjectRecord, begin: int = 0, end: int | None = None) -> Bytes:
        """All bytes of an object, those from ``begin`` to ``end`` verified.

        Raises:
            CorruptObjectError: they do not match the manifest's digests.
        """
        return self.mapped(record, begin, record.nbytes if end is None else end).data

    def mapped(self, record: ObjectRecord, begin: int, end: int) -> MappedObject:
        """As `object_bytes`, with the mapping behind it."""
        with self._lock:
            mapped = self._mapped.get(record.name)
            if mapped is None:
                mapped = self._objects.map_object(self.container, record, warm=self._warm)
                self._mapped[record.name] = mapped
            if self._verify and end > begin:
                self._check(mapped, range(begin // record.chunk_bytes, -(-end // record.chunk_bytes)))
        return mapped

    @traced("verify")
    def verify(self, records: Iterable[ObjectRecord] | None = None) -> None:
        """Verify whole objects now, by default all.

        Raises:
            CorruptObjectError: naming the first object and chunk that does not match.
        """
        for record in self.manifest.objects if records is None else records:
            data = self.object_bytes(record, 0, 0)
            with self._lock:
                self._check(self._mapped[record.name], range(-(-len(data) // record.chunk_bytes)))

    def corrupt_of(self, ranges: Iterable[tuple[ObjectRecord, int, int]]) -> list[ObjectRecord]:
        """Verify byte ranges of objects; those objects that are missing or do not match their digests."""
        bad: dict[str, ObjectRecord] = {}
        for record, begin, end in ranges:
            try:
                self.mapped(record, begin, end)
            except CorruptObjectError:
                bad[record.name] = record
        return list(bad.values())

    def forget(self, names: Iterable[str]) -> None:
        """Let go of objects whose files are about to be replaced."""
        with self._lock:
            for name in names:
                self._mapped.pop(name, None)
                self._verified.pop(name, None)

    def _check(self, mapped: MappedObject, chunks: range) -> None:
        record = mapped.record
        verified = self._verified.setdefault(record.name, set())
        todo = [i for i in chunks if i not in verified]
        threads = self._objects.config.load_threads
        broken = mismatches(mapped.data, record.chunk_bytes, record.chunks, todo, threads=threads)
        verified.update(set(todo).difference(broken))
        if broken:
            begin = broken[0] * record.chunk_bytes
            raise CorruptObjectError(
                f"step {self.container.step}: object {record.name} is corrupt: {len(broken)} of {len(todo)} "
                f"chunks do not match their checksums, the first at bytes {begin} to "
                f"{min(begin + record.chunk_bytes, record.nbytes)}; an older step or another copy must serve"
            )

    # ---- life -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Forget the objects; what was handed out stays valid."""
        with self._lock:
            self._mapped.clear()
            self._verified.clear()  # what is mapped later may be another file

    def __enter__(self) -> CheckpointView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<CheckpointView of {self.container.path}: {len(self)} entries>"


def _box(start: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[Any, ...]:
    return (*(slice(s, s + n) for s, n in zip(start, lengths, strict=True)), ...)


def open_container(
    container: CheckpointContainerId | str | os.PathLike[str], *, rank: int = 0, verify: bool = True
) -> CheckpointView:
    """Open a complete version for reading.

    Args:
        container: its id, or its path ``<job root>/step-<n>_ckpt``, or that of an Orbax item or step of ours.
        rank: whose copy to read where every rank stored its own.
        verify: check each chunk against its digest when it is first read.

    Raises:
        CheckpointNotFoundError: it is not there, or not complete.
        ManifestError: its manifest cannot be trusted.
    """
    if not isinstance(container, CheckpointContainerId):
        container = container_at(container)
    objects = CheckpointObjectManager(container.job_root, create=False, config=FlashpointConfig.from_env())
    if container.step in objects.dirty_steps():
        raise CheckpointNotFoundError(
            f"step {container.step} in {container.job_root} is unfinished: its marker is still there"
        )
    return CheckpointView(objects, container, rank=rank, verify=verify)
