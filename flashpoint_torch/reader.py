"""`FlashpointReader`: DCP's StorageReader over a version in memory."""

from __future__ import annotations

import io
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future as TorchFuture

from flashpoint.errors import FlashpointError, MismatchError
from flashpoint.located import container_at
from flashpoint.manifest import plain_value
from flashpoint.recovery import DIFFERENCES_SHOWN_MAX
from flashpoint.view import CheckpointView, open_container
from flashpoint_torch.metadata import Location, locations_of, metadata_of, value_owners
from flashpoint_torch.plan import PICKLE_CODEC
from flashpoint_torch.restore import decode_object, narrow, source_tensors, through_expansions
from flashpoint_torch.staging import copy_tensors, require_memory


class FlashpointReader(StorageReader):
    """Loads a version with ``dcp.load``, from whichever objects of this host hold what is wanted.

    Args:
        path: of the container, or of an Orbax item that Flashpoint wrote; ``checkpoint_id`` of ``dcp.load``
            overrides it.
        verify: check every byte that is read against its digest, before any tensor is touched.
        cast: convert silently where a tensor's dtype differs from the stored one, as stock DCP does.
        allow_pickle: unpickle stored values that are not plain data, with everything that pickle can do.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        verify: bool = True,
        cast: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        self._path = None if path is None else os.fspath(path)
        self._verify = verify
        self._cast = cast
        self._allow_pickle = allow_pickle
        self._view: CheckpointView | None = None
        self._locations: dict[MetadataIndex, Location] = {}
        self._owners: dict[str, int] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)
        self._view = None

    # A parameter of the name `kwargs` would make DCP ask a second time where this failed, and, if it then
    # succeeds, go on without collectives on this rank alone.
    def read_metadata(self, *args: Any, **_: Any) -> Metadata:
        view = self._open()
        return metadata_of(view.manifest, view.rank, checkpoint_id=view.container.path)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        view = self._open()
        view.rank = kwargs.get("rank") or view.rank  # of the group that loads; 0 is also said without one
        self._locations = locations_of(view.manifest, view.rank)
        self._owners = value_owners(view.manifest, view.rank)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        """Verify all that is wanted, then copy all tensors in one call, then hand over the other values."""
        with self._open() as view:
            tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
            objects = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
            streams = [self._stream(view, item) for item in objects]
            sources = self._sources(view, tensors)
            targets = [planner.resolve_tensor(item).detach() for item in tensors]
            self._check(tensors, sources, targets)
            names = [item.dest_index.fqn for item in tensors]
            require_memory(targets, names)
            with torch.no_grad():
                copy_tensors(*through_expansions([*targets], sources, names), None)
            for item, target in zip(tensors, targets, strict=True):
                planner.commit_tensor(item, target)
            for item, stream in zip(objects, streams, strict=True):
                planner.load_bytes(item, stream)
        self._view = None
        done: TorchFuture[None] = TorchFuture()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            container_at(checkpoint_id)
        except FlashpointError:
            return False
        return True

    def _open(self) -> CheckpointView:
        if self._view is None:
            if self._path is None:
                raise FlashpointError("there is no checkpoint_id: give dcp.load the path of a container")
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            self._view = open_container(self._path, rank=rank, verify=self._verify)
        return self._view

    def _sources(self, view: CheckpointView, items: list[ReadItem]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        pieces: dict[str, list[torch.Tensor]] = {}
        for item in items:
            record, i = self._locations[item.storage_index]
            if record.name not in pieces:
                pieces[record.name] = source_tensors(view, record, view.manifest.layout(record))[0]
            found.append(narrow(pieces[record.name][i], item.storage_offsets, item.lengths))
        return found

    def _check(self, items: list[ReadItem], sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        differences = []
        for item, source, target in zip(items, sources, targets, strict=True):
            if source.shape != target.shape:
                differences.append(
                    f"{item.dest_index.fqn!r}: shape {list(source.shape)} there, {list(target.shape)} here"
                )
            elif source.dtype != target.dtype and not self._cast:
                differences.append(
                    f"{item.dest_index.fqn!r}: dtype {source.dtype} there, {target.dtype} here"
                )
        if differences:
            shown = "\n  ".join(differences[:DIFFERENCES_SHOWN_MAX])
            raise MismatchError(
                f"the state does not fit {self._path} in {len(differences)} places:\n  {shown}\n"
                "make tensors of the stored dtypes, or pass FlashpointReader(cast=True) to convert"
            )

    def _stream(self, view: CheckpointView, item: ReadItem) -> io.BytesIO:
        """What DCP's planners expect of a value: the bytes of torch.save."""
        name = item.storage_index.fqn
        owner = self._owners.get(name)
        if owner is not None:
            value = plain_value(view.manifest.values_of(owner)[name])
        else:
            location = self._locations[MetadataIndex(name)]
            if self._allow_pickle and view.entry(*location).codec == PICKLE_CODEC:
                return io.BytesIO(view.entry_bytes(*location).tobytes())
            # Planners unpickle without restriction: they get only what was loaded with it, pickled anew.
            value = decode_object(view, *location, allow_pickle=False)
        stream = io.BytesIO()
        torch.save(value, stream)
        stream.seek(0)
        return stream
