"""The tensors of a version that are to be exported, out of its mapped objects."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from flashpoint.boxes import slabs
from flashpoint.dtypes import dtype_of
from flashpoint.errors import CheckpointNotFoundError, FlashpointError
from flashpoint.export.safetensors_files import Item
from flashpoint.layout import Path
from flashpoint.manifest import ObjectRecord
from flashpoint.recovery import preferred_entries, values_source
from flashpoint.view import CheckpointView

SLAB_BYTES: Final = 16 << 20  # held besides the mapped version, at most

Array = np.ndarray[Any, Any]


class Selection:
    """Tensors of a version, held against being recycled as long as this lives.

    Args:
        prefix: of the names to export; it is left out of the names in the export.
        pattern: a glob over names, or None.
        dtype: to which floating-point tensors are cast; None leaves each as it is.

    Attributes:
        items: what is exported; sharded tensors whole.
        left_out: names of pickled objects and plain values below the prefix: they are no tensors.

    Raises:
        CheckpointNotFoundError: there is no such tensor.
        FlashpointError: objects that hold them are not on this node.
    """

    def __init__(
        self, view: CheckpointView, *, prefix: str = "", pattern: str | None = None, dtype: str | None = None
    ) -> None:
        self.view = view
        self.prefix = prefix
        self.items: list[Item] = []
        self.left_out: list[str] = []
        wanted = re.compile(fnmatch.translate(pattern)).match if pattern is not None else None
        needed: dict[str, ObjectRecord] = {}
        manifest = view.manifest
        names = [
            *manifest.by_name,
            *(n for n in values_source(manifest, view.rank) if n not in manifest.by_name),
        ]
        for source in names:
            if not source.startswith(prefix) or (wanted is not None and not wanted(source)):
                continue
            found = preferred_entries(manifest, source, view.rank)
            if not found or not manifest.entry(*found[0]).is_array:
                self.left_out.append(source)
                continue
            entry = manifest.entry(*found[0])
            out = dtype if dtype is not None and _is_floating(entry.dtype) else entry.dtype
            self.items.append(Item(source.removeprefix(prefix), source, out, entry.whole_shape))
            needed |= {record.name: record for record, _ in found}
        if not self.items:
            where = f" whose name begins with {prefix!r}" if prefix else ""
            raise CheckpointNotFoundError(
                f"step {manifest.step} has no tensor{where}"
                + (f" that matches {pattern!r}" if pattern else "")
            )
        absent = [name for name, record in needed.items() if not view.is_here(record)]
        if absent:
            raise FlashpointError(
                f"{len(absent)} of {len(needed)} objects of step {manifest.step} are not on this node, such as "
                f"{absent[0]}: export on a node that has all of them, or from long-term storage"
            )
        for record in needed.values():
            view.mapped(record, 0, 0)

    @property
    def nbytes(self) -> int:
        """Of the export's tensors."""
        return sum(item.nbytes for item in self.items)

    def path(self, item: Item) -> Path:
        """The way to a tensor in the state's tree."""
        return self.view.manifest.entry(
            *preferred_entries(self.view.manifest, item.source, self.view.rank)[0]
        ).tree_path

    def parts(self, item: Item) -> Iterator[Array]:
        """The tensor in order, in its dtype of the export, a slab at a time; verified."""
        dtype = dtype_of(item.dtype).numpy
        for box in slabs(item.shape, SLAB_BYTES // dtype_of(item.dtype).itemsize):
            part = self.view.part(item.source, box)
            yield part if dtype is None else part.astype(dtype, copy=False)

    def slabs(self, item: Item) -> Iterator[memoryview]:
        """`parts`, as bytes."""
        for part in self.parts(item):
            yield np.ascontiguousarray(part).reshape(-1).view(np.uint8).data


def _is_floating(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat")) and dtype_of(dtype).numpy is not None
