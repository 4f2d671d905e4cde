"""Writing an export: tensor by tensor out of a mapped version, into a folder that gets its name when it is whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final

import torch

from flashpoint.errors import FlashpointError
from flashpoint.layout import Entry
from flashpoint.manifest import ObjectRecord
from flashpoint.recovery import plan_reads, preferred_entries
from flashpoint.retrieval import needs_of_reads
from flashpoint.view import CheckpointView
from flashpoint_torch.dtypes import NAMES, TORCH_DTYPES
from flashpoint_torch.hf_layout import INDEX_NAME, File, Item, index_of, slabs
from flashpoint_torch.restore import narrow
from flashpoint_torch.staging import tensors_over

SLAB_BYTES: Final = 16 << 20  # held besides the mapped version, at most, or one row of a tensor
_TEMPORARY: Final = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


class Source:
    """The tensors of a version below a prefix, held against being recycled until `close`.

    Raises:
        FlashpointError: objects that hold them are not on this node; the message names them.
    """

    def __init__(
        self,
        view: CheckpointView,
        prefix: str,
        *,
        rename: Callable[[str], str | None],
        dtype: torch.dtype | None,
    ) -> None:
        self._view = view
        manifest = view.manifest
        self.items: list[Item] = []
        needed: dict[str, ObjectRecord] = {}
        for source in manifest.by_name:
            name = rename(source.removeprefix(prefix)) if source.startswith(prefix) else None
            if name is None:
                continue
            found = preferred_entries(manifest, source, view.rank)
            entry = manifest.entry(*found[0])
            if entry.codec:
                raise FlashpointError(
                    f"{source[:200]!r} of step {manifest.step} is no tensor: rename it to None"
                )
            stored = TORCH_DTYPES[entry.dtype]
            out = NAMES[dtype] if dtype is not None and stored.is_floating_point else entry.dtype
            self.items.append(Item(name, source, out, entry.whole_shape))
            needed |= {record.name: record for record, _ in found}
        if not self.items:
            raise FlashpointError(f"step {manifest.step} holds no tensor whose name begins with {prefix!r}")
        # All are mapped now: a newer version may take their names away, but not what is mapped.
        self._pieces = {
            name: tensors_over(view.mapped(record, 0, 0).data, manifest.layout(record))
            for name, record in needed.items()
        }

    def slabs(self, item: Item) -> Iterator[torch.Tensor]:
        """The tensor's elements in order, as flat bytes, verified."""
        manifest = self._view.manifest
        stored = manifest.entry(*preferred_entries(manifest, item.source, self._view.rank)[0]).dtype
        dtype = TORCH_DTYPES[item.dtype]
        for start, lengths in slabs(item, SLAB_BYTES):
            target = Entry(item.source, stored, lengths, start, item.shape if lengths != item.shape else ())
            reads = plan_reads(manifest, [target], self._view.rank)
            for need in needs_of_reads(manifest, reads):
                self._view.mapped(need.record, need.begin, need.end)  # verifies it
            boxes = [
                narrow(self._pieces[read.record.name][read.entry], read.source_start, read.lengths)
                for read in reads
            ]
            if len(boxes) == 1 and boxes[0].dtype is dtype and boxes[0].is_contiguous():
                slab = boxes[0]
            else:
                slab = torch.empty(lengths, dtype=dtype)
                for read, box in zip(reads, boxes, strict=True):
                    narrow(slab, read.target_start, read.lengths).copy_(box)
            yield slab.reshape(-1).view(torch.uint8)

    def close(self) -> None:
        self._pieces.clear()
        self._view.close()


def write_folder(
    path: str, files: Sequence[File], source: Source, extras: Mapping[str, bytes], *, stop: Callable[[], bool]
) -> None:
    """Write an export under a temporary name, and rename it when all of it lies on the disk.

    Args:
        extras: whole files besides, by name.
        stop: asked between slabs; when it says so, the export is given up.
    """
    root, name = os.path.split(path)
    os.makedirs(root, exist_ok=True)
    folder = f"{root}/.{name}.{secrets.token_hex(4)}.tmp"
    os.mkdir(folder)
    try:
        with _locked(folder):
            for file in files:
                with open(f"{folder}/{file.name}", "xb", buffering=0) as out:
                    _write(out.fileno(), file.header)
                    for item in file.items:
                        for slab in source.slabs(item):
                            if stop():
                                raise FlashpointError(
                                    f"the export to {path} was given up: the saver was closed"
                                )
                            _write(out.fileno(), slab.numpy().data)
                    os.fsync(out.fileno())
            if len(files) > 1:
                extras = {**extras, INDEX_NAME: index_of(files)}
            for extra, data in extras.items():
                with open(f"{folder}/{extra}", "xb") as out:
                    out.write(data)
                    out.flush()
                    os.fsync(out.fileno())
            _sync_folder(folder)
            _put_in_place(folder, path)
            _sync_folder(root)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def drop_unfinished(root: str) -> None:
    """Delete what exports that were killed have left; those that run hold a lock."""
    names: Collection[str] = os.listdir(root) if os.path.isdir(root) else ()
    for name in filter(_TEMPORARY.fullmatch, names):
        with contextlib.suppress(OSError), _locked(f"{root}/{name}"):
            shutil.rmtree(f"{root}/{name}", ignore_errors=True)


def _put_in_place(folder: str, path: str) -> None:
    """Rename; an export of the same step, by an earlier attempt of the run, makes room."""
    root, name = os.path.split(path)
    old = f"{root}/.{name}.{secrets.token_hex(4)}.tmp"
    try:
        os.rename(path, old)
    except FileNotFoundError:
        os.rename(folder, path)
        return
    os.rename(folder, path)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _write(fd: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
