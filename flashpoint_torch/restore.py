"""Filling a state from an opened version: in place, verified before the first value is touched."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from flashpoint.buffers import BufferObject
from flashpoint.errors import FlashpointError, MismatchError
from flashpoint.gc_pause import gc_paused
from flashpoint.layout import ObjectLayout, Path
from flashpoint.manifest import ObjectRecord, plain_value
from flashpoint.recovery import (
    Read,
    differences,
    left_out,
    left_out_sentences,
    mismatch,
    plan_reads,
    preferred_entries,
    values_source,
)
from flashpoint.retrieval import Need, needs_of_reads
from flashpoint.view import CheckpointView
from flashpoint_torch.dtypes import TORCH_DTYPES
from flashpoint_torch.metadata import value_owners
from flashpoint_torch.plan import NUMPY_CODEC, PICKLE_CODEC, PlanCache, StatePlan
from flashpoint_torch.staging import copy_tensors, require_memory, tensors_over, views_of
from flashpoint_torch.tree import Skeleton, put, resolve_stateful


class Restore:
    """One state and one version: first `check` that they fit, then `fill`.

    Attributes:
        left_out: names that the version holds and the state does not, from `check` on.

    Args:
        state: as it was given to a save.
        view: the version, opened by this rank.
        plans: the session's plan cache: a state that is filled now is likely to be saved next.
        allow_pickle: whether stored Python objects may be unpickled without restriction.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        view: CheckpointView,
        *,
        plans: PlanCache,
        allow_pickle: bool = False,
    ) -> None:
        self._state = state
        self._resolved = resolve_stateful(state)
        self._stateful = [key for key, value in state.items() if self._resolved[key] is not value]
        self._plans = plans
        self._view = view
        self._allow_pickle = allow_pickle
        self._completed: list[dict[Any, Any]] = []
        self._planned = False
        self.left_out: list[str] = []

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self._plan.entries)

    def check(self) -> None:
        """Prepare all that can fail before anything is touched.

        Raises:
            MismatchError: the state does not fit the version; the first ten differences.
            FlashpointError: a stored value is a pickle that is not to be loaded.
        """
        try:
            self._make_plan()
            with gc_paused():
                self._check_differences()
            self._values = self._load_values()
            with gc_paused():
                self._prepare_copies()
        except BaseException:
            self.undo()
            raise

    def needs(self) -> list[Need]:
        """What `check` and `fill` will read of the version; its manifest is enough to tell.

        Of a state that cannot be filled, nothing: `check` says why, to all ranks.
        """
        try:
            self._make_plan()
            manifest, rank = self._view.manifest, self._view.rank
            own = self._own_object()
            if own is not None:
                needs = [Need(own[0], 0, own[0].nbytes)]
            else:
                needs = needs_of_reads(manifest, plan_reads(manifest, self._plan.entries, rank))
            plain = value_owners(manifest, rank)
            for name in (self._plan.names[i] for i in self._plan.value_leaves):
                if name not in plain:
                    record, index = preferred_entries(manifest, name, rank)[0]
                    layout = manifest.layout(record)
                    needs.append(Need(record, layout.begins[index], layout.ends[index]))
            return needs
        except Exception:  # whatever a user's state may raise
            return []

    def _make_plan(self) -> None:
        """Plan the state, with what is empty in it filled in, once."""
        if self._planned:
            return
        with gc_paused():
            self._completed = complete_from(self._view, self._resolved, self._parameters())
            self._plan, self._leaves = self._plans.plan(self._resolved)
            if not self._plan.stores_all:
                self._plan = StatePlan(self._resolved, for_loading=True)
        self._planned = True

    def _parameters(self) -> dict[Path, torch.Tensor]:
        """Where an optimizer's state has a parameter's -> the parameter."""
        found: dict[Path, torch.Tensor] = {}
        for key in self._stateful:
            optimizer = self._state[key]
            if isinstance(optimizer, torch.optim.Optimizer):
                params = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
                found |= {(key, "state", (number,)): param for number, param in enumerate(params)}
        return found

    def undo(self) -> None:
        """Empty again what was empty: the state will not be filled."""
        for mapping in self._completed:
            mapping.clear()

    def _check_differences(self) -> None:
        plan, manifest, rank = self._plan, self._view.manifest, self._view.rank
        # An object of this rank with the very layout that the state has fits without a look at each entry.
        entries = [] if self._own_object() is not None else plan.entries
        value_names = [plan.names[i] for i in plan.value_leaves]
        found = differences(manifest, entries, value_names, rank)
        self.left_out = left_out(manifest, set(plan.names), rank)
        if found:
            raise mismatch(manifest, found + left_out_sentences(self.left_out), rank)

    def fill(self) -> None:
        """Copy every tensor and set every value; call ``load_state_dict`` of what is Stateful."""
        with torch.no_grad():
            copy_tensors(*self._copies)
        for (container, key), value in self._values:
            container[key] = value
        for key in self._stateful:
            self._state[key].load_state_dict(self._resolved[key])
        if isinstance(self._state, MutableMapping):  # what `complete_from` has put at the top
            self._state.update((k, v) for k, v in self._resolved.items() if k not in self._state)

    def _prepare_copies(self) -> None:
        targets = [tensor.detach() for tensor in self._plan.sources(self._leaves)]
        names = [entry.name for entry in self._plan.entries]
        require_memory(targets, names)
        buffer, own = None, self._own_object()
        if own is not None:
            sources, buffer = source_tensors(self._view, *own)
        else:
            reads = plan_reads(self._view.manifest, self._plan.entries, self._view.rank)
            names = [names[read.target] for read in reads]
            targets = [narrow(targets[read.target], read.target_start, read.lengths) for read in reads]
            sources = sources_of(self._view, reads)
        self._copies = (*through_expansions(targets, sources, names), buffer)

    def _own_object(self) -> tuple[ObjectRecord, ObjectLayout] | None:
        """This rank's object, where it holds exactly what the state wants: one copy, no planning."""
        for record in self._view.manifest.objects:
            if record.layout == self._plan.layout.digest and record.id.rank == self._view.rank:
                return record, self._plan.layout
        return None

    def _load_values(self) -> list[tuple[tuple[Any, Any], Any]]:
        places = list(self._plan.skeleton.parents(self._resolved))
        manifest, rank = self._view.manifest, self._view.rank
        source = value_owners(manifest, rank)
        tables = {owner: manifest.values_of(owner) for owner in set(source.values())}
        loaded = []
        for i in self._plan.value_leaves:
            name = self._plan.names[i]
            if name in source:
                value = plain_value(tables[source[name]][name])
            else:
                record, index = preferred_entries(manifest, name, rank)[0]
                value = decode_object(self._view, record, index, allow_pickle=self._allow_pickle)
            container, key = places[i]
            if container is self._resolved:
                container = self._state
            if not isinstance(container, (MutableMapping, list)):
                raise FlashpointError(
                    f"{name[:200]!r} is a plain value in a {type(container).__name__}, which cannot be changed: "
                    "give a dict"
                )
            loaded.append(((container, key), value))
        return loaded


def complete_from(
    view: CheckpointView, state: dict[str, Any], parameters: Mapping[Path, torch.Tensor]
) -> list[dict[Any, Any]]:
    """Give every empty mapping in the state what the version holds there; returns those that got something.

    A fresh optimizer's ``state_dict()`` has no state yet: it must not keep the saved one from coming back.
    Tensors are made here and filled with the rest. What belongs to a sharded parameter is sharded as that is, or the
    optimizer could not use it; else it is on the CPU and whole, and ``load_state_dict`` moves it.

    Args:
        parameters: of the state's optimizers, by the path of their state.
    """
    empty = list(Skeleton(state).empty_mappings(state))
    if not empty:
        return []
    manifest, completed = view.manifest, []
    source = values_source(manifest, view.rank)
    tables = {owner: manifest.values_of(owner) for owner in set(source.values())}
    paths: dict[str, Path] = {
        name: manifest.entry(*found[0]).tree_path for name, found in manifest.by_name.items()
    }
    paths |= {name: tables[owner][name].tree_path for name, owner in source.items()}
    for prefix, mapping in empty:
        depth = len(prefix)
        for name, path in paths.items():
            if len(path) > depth and path[:depth] == prefix:
                put(mapping, path[depth:], _blank(view, name, parameters.get(path[:-1])))
        if mapping:
            completed.append(mapping)
    return completed


def _blank(view: CheckpointView, name: str, parameter: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor like the stored one, to be filled; None for a value, to be replaced."""
    found = preferred_entries(view.manifest, name, view.rank)
    entry = view.entry(*found[0]) if found else None
    if entry is None or entry.codec:
        return None
    dtype = TORCH_DTYPES[entry.dtype]
    if isinstance(parameter, DTensor) and tuple(parameter.shape) == tuple(entry.whole_shape):
        return torch.empty_like(parameter.detach(), dtype=dtype)
    return torch.empty(entry.whole_shape, dtype=dtype)


def decode_object(view: CheckpointView, record: ObjectRecord, index: int, *, allow_pickle: bool) -> Any:
    """The value behind an entry that is not a tensor.

    Raises:
        FlashpointError: it is a pickle that only the unrestricted unpickler could load.
    """
    entry = view.entry(record, index)
    if entry.codec == NUMPY_CODEC:
        return np.array(view.array(record, index))
    if entry.codec != PICKLE_CODEC:
        raise FlashpointError(
            f"{entry.name[:200]!r} is encoded as {entry.codec!r}: this release of Flashpoint cannot read that"
        )
    data = io.BytesIO(view.entry_bytes(record, index).tobytes())
    try:
        return torch.load(data, map_location="cpu", weights_only=not allow_pickle)
    except Exception as error:
        if allow_pickle:
            raise
        raise FlashpointError(
            f"{entry.name[:200]!r} of step {view.manifest.step} is a pickle that is not loaded unless you trust "
            "it: pass allow_pickle=True, or name its types with torch.serialization.add_safe_globals "
            f"({error})"
        ) from error


def source_tensors(
    view: CheckpointView, record: ObjectRecord, layout: ObjectLayout
) -> tuple[list[torch.Tensor], BufferObject | None]:
    """A tensor over every entry of a whole, verified object, and the pool buffer behind it, if any."""
    mapped = view.mapped(record, 0, record.nbytes)
    if mapped.buffer is not None:
        return views_of(mapped.buffer, layout), mapped.buffer
    return tensors_over(mapped.data, layout), None


def sources_of(view: CheckpointView, reads: Sequence[Read]) -> list[torch.Tensor]:
    """The box that each read is of; what is read is verified, and nothing else need be there."""
    pieces: dict[str, list[torch.Tensor]] = {}
    for need in needs_of_reads(view.manifest, reads):
        view.mapped(need.record, need.begin, need.end)
    for record in {read.record.name: read.record for read in reads}.values():
        mapped, layout = view.mapped(record, 0, 0), view.manifest.layout(record)
        pieces[record.name] = (
            tensors_over(mapped.data, layout) if mapped.buffer is None else views_of(mapped.buffer, layout)
        )
    return [narrow(pieces[read.record.name][read.entry], read.source_start, read.lengths) for read in reads]


def through_expansions(
    targets: list[torch.Tensor], sources: list[torch.Tensor], names: Sequence[str]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The same copies, where an expanded target is filled through those elements that it has memory for.

    Raises:
        MismatchError: it has not got the memory for what was saved.
    """
    for i, target in enumerate(targets):
        if 0 not in target.stride():
            continue
        for dim, (stride, size) in enumerate(zip(target.stride(), target.shape, strict=True)):
            if stride or size < 2:
                continue
            first = sources[i].narrow(dim, 0, 1)
            if not torch.equal(_bytes_of(first.expand_as(sources[i])), _bytes_of(sources[i])):
                raise MismatchError(
                    f"{names[i][:200]!r} is expanded: its elements along dimension {dim} share memory here, but "
                    "differ in the checkpoint; clone it before it is filled"
                )
            targets[i], sources[i] = targets[i].narrow(dim, 0, 1), first
    return targets, sources


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def narrow(tensor: torch.Tensor, start: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """The box of ``tensor`` that begins at ``start``."""
    for dim, (begin, length) in enumerate(zip(start, lengths, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, begin, length)
    return tensor
