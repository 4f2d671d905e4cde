"""`load`: a state filled from any container, above all from one that a JAX job wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from flashpoint.boxes import Box, inverse, untransposed
from flashpoint.dtypes import dtype_of
from flashpoint.errors import FlashpointError
from flashpoint.gc_pause import gc_paused
from flashpoint.ids import CheckpointContainerId
from flashpoint.layout import Entry
from flashpoint.manifest import plain_value
from flashpoint.matching import (
    LeafName,
    Rename,
    Transpose,
    array_problem,
    axes_of,
    cast_problem,
    does_not_fit,
    lost_integers,
    match_names,
)
from flashpoint.recovery import plan_reads, preferred_entries
from flashpoint.view import CheckpointView, open_container
from flashpoint_torch.dtypes import TORCH_DTYPES
from flashpoint_torch.metadata import value_owners
from flashpoint_torch.plan import StatePlan
from flashpoint_torch.restore import decode_object, narrow, sources_of, through_expansions
from flashpoint_torch.staging import copy_tensors, require_memory
from flashpoint_torch.tree import resolve_stateful

_NUMBERS: Final = (bool, int, float, complex)


def load(
    container: CheckpointContainerId | str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    rename: Rename | None = None,
    transpose: Transpose | None = None,
    cast: bool = True,
    verify: bool = True,
    allow_pickle: bool = False,
) -> None:
    """Fill ``state`` in place from the entries of a container, whichever framework wrote it.

    Leaves are found by their names, as DCP makes them: ``model.dense.weight``, where a dot stands for the slashes
    of a pytree's path, too. What the container holds beyond that is left alone. Each rank loads what its DTensors
    need, by itself: the objects must lie on its node.

    Args:
        container: ``<job root>/step-<n>_ckpt``, or an Orbax item or step that Flashpoint wrote.
        state: as it is given to a save; its tensors are overwritten, its values replaced, its Stateful objects get
            ``load_state_dict``.
        rename: from a leaf's name to its entry's, a mapping or a function: ``{"model.weight": "params.w"}``.
        transpose: from a leaf's name to the axes by which its stored array is transposed, likewise:
            ``{"dense.weight": (1, 0)}`` for the kernel of a Flax ``Dense``.
        cast: convert to the dtype that a tensor has; if not, another dtype is an error.
        verify: check every byte that is read against its digest, before any tensor is touched.
        allow_pickle: unpickle stored values that are not plain data, with everything that pickle can do.

    Raises:
        MismatchError: leaves that are not there, or of another shape or kind; the message lists the first ten.
        CheckpointNotFoundError, ManifestError, CorruptObjectError: as `flashpoint.open`.
    """
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    with open_container(container, rank=rank, verify=verify) as view:
        _Loading(view, state, rename, transpose, cast, allow_pickle).fill()


class _Loading:
    """One load: first all that can be wrong, then the tensors, in one go."""

    def __init__(
        self,
        view: CheckpointView,
        state: Mapping[str, Any],
        rename: Rename | None,
        transpose: Transpose | None,
        cast: bool,
        allow_pickle: bool,
    ) -> None:
        self._view = view
        self._state = state
        self._cast = cast
        self._allow_pickle = allow_pickle
        self._resolved = resolve_stateful(state)
        self._stateful = [key for key, value in state.items() if self._resolved[key] is not value]
        with gc_paused():
            plan = self._plan = StatePlan(self._resolved, for_loading=True)
            leaves = plan.skeleton.leaves_of(self._resolved)
            assert leaves is not None
            self._leaves = leaves
            names = [LeafName(name, name) for name in plan.names]
            match = match_names(names, set(view), rename)
            axes, problems = axes_of(names, transpose)
            self._stored = dict(zip(plan.names, match.names, strict=True))
            self._axes = dict(zip(plan.names, axes, strict=True))
            self._owners = value_owners(view.manifest, view.rank)
            self._problems = [*match.problems, *problems]
            wanted = self._wanted()
            values = self._values()
            if not self._problems:
                self._problems += lost_integers(view, wanted)
            if self._problems:
                raise does_not_fit(f"step {view.manifest.step} ({view.container.path})", self._problems)
            self._places = self._places_of(values)
            self._prepare([box for _, box, _ in wanted])

    def fill(self) -> None:
        """Copy every tensor and set every value."""
        with torch.no_grad():
            copy_tensors(*self._copies, None)
        for (container, key), value in self._places:
            container[key] = value
        for key in self._stateful:
            self._state[key].load_state_dict(self._resolved[key])

    def _wanted(self) -> list[tuple[str, Entry, str]]:
        """Of every tensor, or shard of one, its name, the box of the stored array that fills it, and its dtype."""
        found = []
        wrong: set[str] = set()
        for entry in self._plan.entries:
            name, stored, axes = entry.name, self._stored[entry.name], self._axes[entry.name]
            if stored is None or name in wrong:
                continue
            there = self._entry(stored)
            if there is None:
                problem = f"{name[:200]!r}: a plain value there, a tensor here"
            elif there.dtype not in TORCH_DTYPES:
                problem = f"{name[:200]!r}: torch has no tensors of dtype {there.dtype}"
            else:
                problem = array_problem(
                    name, there, entry.whole_shape, entry.dtype, axes=axes, cast=self._cast
                )
            if problem or there is None:
                wrong.add(name)
                self._problems.append(problem)
                continue
            box = Box(entry.origin, entry.shape)
            box = untransposed(box, axes) if axes else box
            found.append(
                (name, Entry(stored, there.dtype, box.shape, box.start, there.whole_shape), entry.dtype)
            )
        return found

    def _values(self) -> dict[int, Any]:
        """By leaf, the value of all that is no tensor."""
        found = {}
        for i in self._plan.value_leaves:
            name, leaf = self._plan.names[i], self._leaves[i]
            stored = self._stored[name]
            if stored is None:
                continue
            if stored in self._owners:
                table = self._view.manifest.values_of(self._owners[stored])
                found[i] = plain_value(table[stored])
                continue
            record, index = preferred_entries(self._view.manifest, stored, self._view.rank)[0]
            entry = self._view.entry(record, index)
            if entry.codec:
                found[i] = decode_object(self._view, record, index, allow_pickle=self._allow_pickle)
            elif not _is_number(entry) or not (leaf is None or isinstance(leaf, (*_NUMBERS, np.generic))):
                self._problems.append(f"{name[:200]!r}: a tensor there, {type(leaf).__name__} here")
            else:  # what a JAX program saved as a number is an array without dimensions
                number = self._view.array(record, index)[()].item()
                if leaf is not None:
                    here = np.asarray(leaf).dtype.name
                    if problem := cast_problem(name, entry.dtype, here):
                        self._problems.append(problem)
                        continue
                found[i] = number if leaf is None else type(leaf)(number)
        return found

    def _places_of(self, values: Mapping[int, Any]) -> list[tuple[tuple[Any, Any], Any]]:
        places = list(self._plan.skeleton.parents(self._resolved))
        found = []
        for i, value in values.items():
            container, key = places[i]
            if container is self._resolved:
                container = self._state
            if not isinstance(container, (MutableMapping, list)):
                raise FlashpointError(
                    f"{self._plan.names[i][:200]!r} is a plain value in a {type(container).__name__}, which cannot "
                    "be changed: give a dict"
                )
            found.append(((container, key), value))
        return found

    def _prepare(self, wanted: Sequence[Entry]) -> None:
        """Verify all that is wanted, and have ready what is copied where."""
        targets = [tensor.detach() for tensor in self._plan.sources(self._leaves)]
        names = [entry.name for entry in self._plan.entries]
        require_memory(targets, names)
        for n, name in enumerate(names):
            if axes := self._axes[name]:
                targets[n] = targets[n].permute(inverse(axes))
        reads = plan_reads(self._view.manifest, wanted, self._view.rank)
        targets = [narrow(targets[read.target], read.target_start, read.lengths) for read in reads]
        sources = sources_of(self._view, reads)
        self._copies = through_expansions(targets, sources, [names[read.target] for read in reads])

    def _entry(self, stored: str) -> Entry | None:
        found = preferred_entries(self._view.manifest, stored, self._view.rank)
        return self._view.entry(*found[0]) if found else None


def _is_number(entry: Entry) -> bool:
    return entry.whole_shape == () and dtype_of(entry.dtype).numpy is not None
