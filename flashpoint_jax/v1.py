"""Orbax v1 (`orbax.checkpoint.experimental.v1`): a handler of its kind over the same blobs.

import orbax.checkpoint.experimental.v1 as ocp
context = ocp.Context()
context.checkpointables.registry = flashpoint_jax.v1.registry()
with context, ocp.training.Checkpointer("/dev/shm/job-1") as checkpointer:
    checkpointer.save_async(step, state)
    state = checkpointer.load(step, abstract_state)

Saving is `PyTreeHandler`'s own, with our v0 handler below it; so is loading, but for what it says to that handler.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable
from typing import Any, ClassVar, Final

import jax
import numpy as np
import orbax.checkpoint as v0
import orbax.checkpoint.experimental.v1 as ocp
from orbax.checkpoint.experimental.v1._src.context.context import get_context
from orbax.checkpoint.experimental.v1._src.handlers import pytree_handler as stock
from orbax.checkpoint.experimental.v1._src.handlers.types import typestr

from flashpoint.config import FlashpointConfig
from flashpoint_jax.commit import settle
from flashpoint_jax.diagnosis import is_ours
from flashpoint_jax.handlers import PyTreeImpl
from flashpoint_jax.session import orbax_config

# Orbax makes a handler for each save; plans and what is being read live longer.
_impls: Final[dict[Any, PyTreeImpl]] = {}


class FlashpointHandler(ocp.handlers.CheckpointableHandler[Any, Any]):
    """Orbax v1's `PyTreeHandler`, from memory; of the context that is active when it is made."""

    config: ClassVar[FlashpointConfig | None] = None

    def __init__(self) -> None:
        self._context = get_context()
        self._stock = ocp.handlers.PyTreeHandler(context=self._context)
        self._ours = ocp.handlers.PyTreeHandler(context=self._context)
        self._impl = self._ours._handler_impl = _impl_of(self.config or orbax_config(), self._context)

    async def save(self, directory: Any, checkpointable: Any) -> Awaitable[None]:
        # One who wants no OCDBT wants Orbax's other format. (That it is zarr v3 is a default, and wanted by nobody.)
        handler = self._ours if self._context.array_options.saving.use_ocdbt else self._stock
        try:
            return await handler.save(directory, checkpointable)  # type: ignore[no-any-return]
        except Exception:
            await asyncio.to_thread(settle)
            raise

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        if not is_ours(directory):
            return await self._stock.load(directory, abstract_checkpointable)  # type: ignore[no-any-return]
        self._stock.validate_abstract_leaves_handleable(abstract_checkpointable)
        return self._load(directory, abstract_checkpointable)

    async def _load(self, directory: Any, abstract: Any) -> Any:
        args = stock.create_v0_restore_args(self._context, abstract)
        if args.restore_args is not None:
            strict = not self._context.array_options.loading.enable_padding_and_truncation
            args = dataclasses.replace(
                args, restore_args=jax.tree.map(lambda one: _as_v0(one, strict), args.restore_args)
            )
        return self._impl.restore(directory, args=args)

    async def metadata(self, directory: Any) -> Any:
        return await self._stock.metadata(directory)

    def is_handleable(self, checkpointable: Any) -> bool:
        return bool(self._stock.is_handleable(checkpointable))

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        return bool(self._stock.is_abstract_handleable(abstract_checkpointable))


def _impl_of(config: FlashpointConfig, context: Any) -> PyTreeImpl:
    processes, options = (
        context.multiprocessing_options,
        context.pytree_options.saving.pytree_metadata_options,
    )
    key = (config, processes.primary_host, processes.barrier_sync_key_prefix, repr(options))
    if key not in _impls:
        _impls[key] = PyTreeImpl(
            config=config,
            multiprocessing_options=v0.options.MultiprocessingOptions(
                primary_host=processes.primary_host,
                active_processes=processes.active_processes,
                barrier_sync_key_prefix=processes.barrier_sync_key_prefix,
            ),
            pytree_metadata_options=options,
        )
    return _impls[key]


def _as_v0(arg: Any, strict: bool) -> Any:
    """The restore arguments of v0 that say what v1's say of a leaf."""
    leaf, kind = arg.abstract_leaf, arg.restore_type
    if kind is jax.Array and not isinstance(leaf, type):
        return v0.ArrayRestoreArgs(
            restore_type=jax.Array,
            dtype=leaf.dtype,
            sharding=leaf.sharding,
            global_shape=leaf.shape,
            strict=strict,
        )
    if kind is np.ndarray:
        dtype = None if isinstance(leaf, type) else leaf.dtype
        return v0.RestoreArgs(restore_type=np.ndarray, dtype=dtype)
    return v0.RestoreArgs(restore_type=kind if isinstance(kind, type) else None)


def registry(**settings: Any) -> Any:
    """Orbax's handlers, with ours in place of `PyTreeHandler`: for ``context.checkpointables.registry``.

    Args:
        settings: fields of `flashpoint.FlashpointConfig`.

    Raises:
        ConfigError: a setting is wrong, or Orbax's to decide.
    """
    ours = type(
        FlashpointHandler.__name__,
        (FlashpointHandler,),
        {"config": orbax_config(**settings), "__module__": FlashpointHandler.__module__},
    )
    known, found = ocp.handlers.global_registry(), ocp.handlers.local_registry(include_global_registry=False)
    for handler, name in known.get_all_entries():
        others = list(known.get_secondary_typestrs(handler))
        if handler is ocp.handlers.PyTreeHandler:
            handler, others = ours, [*others, typestr(handler)]
        found.add(handler, checkpointable_name=name, secondary_typestrs=others)
    return found
