"""The tensors of an export, out of a mapped version, slab by slab."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch

from flashpoint.boxes import slabs
from flashpoint.dtypes import dtype_of
from flashpoint.errors import FlashpointError
from flashpoint.export.safetensors_files import Item
from flashpoint.layout import Entry
from flashpoint.manifest import ObjectRecord
from flashpoint.recovery import plan_reads, preferred_entries
from flashpoint.retrieval import needs_of_reads
from flashpoint.view import CheckpointView
from flashpoint_torch.dtypes import NAMES, TORCH_DTYPES
from flashpoint_torch.restore import narrow
from flashpoint_torch.staging import tensors_over

SLAB_BYTES: Final = 16 << 20  # held besides the mapped version, at most


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

    def slabs(self, item: Item) -> Iterator[memoryview]:
        """The tensor's bytes in order, verified."""
        manifest = self._view.manifest
        stored = manifest.entry(*preferred_entries(manifest, item.source, self._view.rank)[0]).dtype
        dtype = TORCH_DTYPES[item.dtype]
        for start, lengths in slabs(item.shape, SLAB_BYTES // dtype_of(item.dtype).itemsize):
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
            yield slab.reshape(-1).view(torch.uint8).numpy().data

    def close(self) -> None:
        self._pieces.clear()
        self._view.close()
