"""Orbax's handlers with another way to save, and to read: the rest of each is Orbax's own.

    FlashpointStandardHandler    for StandardSave and StandardRestore
    FlashpointPyTreeHandler      for PyTreeSave and PyTreeRestore
    FlashpointCheckpointHandler  for FlashpointSave and FlashpointRestore

Saving is ours: one copy into a recycled buffer while training waits; header, checksums, links and the vote of all
processes in a future that Orbax waits for before it renames the folder. Metadata, transforms, trees and arguments of a
restore are inherited; what reads the leaves in the end is ours again (`flashpoint_jax.leaves`). Leaves that no
blob holds, such as strings, go the stock way beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.handlers import base_pytree_checkpoint_handler as stock
from orbax.checkpoint._src.metadata import tree as tree_metadata
from orbax.checkpoint._src.multihost import multihost
from orbax.checkpoint._src.serialization import type_handler_registry as type_registries

from flashpoint.buffers import BufferObject
from flashpoint.config import FlashpointConfig
from flashpoint.errors import CheckpointNotFoundError, FlashpointError, ManifestError, MismatchError
from flashpoint.gc_pause import gc_paused
from flashpoint.located import ItemFolder
from flashpoint.telemetry import count, warn_once
from flashpoint.view import CheckpointView
from flashpoint_jax.commit import SaveFuture, settle
from flashpoint_jax.diagnosis import explained, is_ours, missing_objects, require_objects
from flashpoint_jax.direct import DirectRestore
from flashpoint_jax.folder import holds_blobs, is_local
from flashpoint_jax.leaves import BlobRegistry, OpenFolders, can_store
from flashpoint_jax.plan import PlanCache, StatePlan, Writers
from flashpoint_jax.session import folder_at, orbax_config, session_of
from flashpoint_jax.sidecars import Sidecars, add_strings
from flashpoint_jax.staging import stage_into, start_copies
from flashpoint_jax.zarr_index import CRC_BYTES


class PyTreeImpl(stock.BasePyTreeCheckpointHandler):
    """What both handlers stand on, as the stock ones stand on the stock one.

    Attributes:
        folders: those that are being read now.
        ts_checksums: whether stock TensorStore is to find a checksum behind every chunk.
    """

    def __init__(
        self,
        *,
        config: FlashpointConfig,
        multiprocessing_options: Any,
        ts_checksums: bool = False,
        **kwargs: Any,
    ) -> None:
        self.folders = OpenFolders()
        self.config = config
        self.ts_checksums = ts_checksums
        self.registry = BlobRegistry(
            kwargs.pop("type_handler_registry", type_registries.GLOBAL_TYPE_HANDLER_REGISTRY),
            self.folders,
            threads=config.load_threads,
        )
        super().__init__(
            use_ocdbt=True,
            use_zarr3=False,
            multiprocessing_options=multiprocessing_options,
            type_handler_registry=self.registry,
            **kwargs,
        )
        self._primary_host: int | None = multiprocessing_options.primary_host
        self._per_host = self._primary_host is None
        self._plans: dict[str, PlanCache] = {}
        self._direct = DirectRestore(self.registry)

    # ---- saving ---------------------------------------------------------------------------------

    async def async_save(self, directory: Any, args: Any) -> list[Any] | None:
        item = args.item
        if not jax.tree.leaves(item) and not item:
            raise ValueError("Found empty item.")
        container = folder_at(directory)
        if not is_local(container.folder) or args.partial_save_mode:
            return await super().async_save(directory, args=args)  # type: ignore[no-any-return]
        save_args, casts = None, tuple[Any, ...]()
        if args.save_args is not None:
            save_args = stock._fill_missing_save_or_restore_args(item, args.save_args, mode="save")
            casts = tuple(arg.dtype for arg in _leaves_of(save_args, item))
            casts = casts if any(cast is not None for cast in casts) else ()
        rank = multihost.process_index()
        trailer_bytes = CRC_BYTES if self.ts_checksums else 0
        cache = self._plans.setdefault(container.item, PlanCache(trailer_bytes=trailer_bytes))
        plan, leaves = cache.plan(item, casts, Writers(rank, self._per_host))
        if "is_stock" not in plan.remembered:
            self._describe(plan, item, leaves, save_args)
        if plan.remembered["is_stock"]:
            if self.config.copies:
                warn_once(
                    f"stock:{container.job_root}/{container.item}",
                    f"item {container.item!r} has leaves that no blob holds: Orbax writes it, and it gets no copies",
                )
            return await super().async_save(directory, args=args)  # type: ignore[no-any-return]
        futures = [self._start(container, plan, leaves, args.custom_metadata)]
        if plan.remembered["others"]:
            futures += await self._save_others(directory, item, save_args, plan)
        return futures

    @gc_paused()
    def _describe(self, plan: StatePlan, item: Any, leaves: Sequence[Any], save_args: Any) -> None:
        """Work out, once for each plan, what `_METADATA` says and which leaves are not ours."""
        others = [leaf for leaf, kind in zip(leaves, plan.kinds, strict=True) if not kind]
        if not all(self.registry.has(type(leaf)) for leaf in others):
            plan.remembered["is_stock"] = True
            return  # Orbax says which leaf it is that nobody writes
        handlers = [self.registry.get(type(leaf)) for leaf in others]
        # A string has a file of its own. Anything else would be written to a database of Orbax's own, of which
        # a folder has one: then all of the item is written there.
        ours = [self.registry.get(type(x)) for x, kind in zip(leaves, plan.kinds, strict=True) if kind]
        plan.remembered["is_stock"] = not plan.sources_anywhere or not (
            all(map(can_store, ours))
            and all(isinstance(handler, type_handlers.StringHandler) for handler in handlers)
        )
        plan.remembered["others"] = bool(others)
        shard_shapes = {info.name: info.shard_shape for info in plan.arrays}
        infos = jax.tree.map(
            lambda info: info.replace(write_shape=shard_shapes.get(info.name)),
            self._get_param_infos(item, stock.epath.Path("/"), use_ocdbt=True, use_zarr3=self.ts_checksums),
        )
        if save_args is None:
            save_args = stock._fill_missing_save_or_restore_args(item, None, mode="save")
        plan.remembered["tree"] = tree_metadata.InternalTreeMetadata.build(
            infos,
            save_args=save_args,
            use_ocdbt=True,
            use_zarr3=self.ts_checksums,
            pytree_metadata_options=self._pytree_metadata_options,
        ).to_json()

    def _start(
        self, container: ItemFolder, plan: StatePlan, leaves: Sequence[Any], custom_metadata: Any
    ) -> Any:
        """Stage the leaves, and start what follows in the background; its future.

        What fails here on one process fails on all, by name and in the background: in the caller's thread the
        others would go on to a barrier that this one never comes to.
        """
        session = session_of(container.job_root, self.config, per_host=self._per_host)
        saver = session.saver(container)
        pending = saver.begin(container, tag="item/")
        error: Exception | None = None
        try:
            on_way = start_copies(plan, leaves)
            try:
                pending.marker = session.markers.create(container, saver.coordinator.local_rank)
            except BlockingIOError:
                raise FlashpointError(
                    f"step {container.step} is being saved by another process as local rank "
                    f"{saver.coordinator.local_rank} in {container.job_root}: use one root for each job"
                ) from None

            def fill(buffer: BufferObject) -> None:
                stage_into(buffer, plan.layout, on_way, threads=self.config.load_threads)

            pending.staged += session.stage(saver, plan, fill)
            count("bytes_staged", sum(part.layout.nbytes for part in pending.staged))
        except Exception as failure:
            error = failure
        saver.sidecars[pending.topic] = Sidecars(
            tree=plan.remembered["tree"],
            arrays=plan.arrays,
            custom_metadata=custom_metadata,
            container=container,
            rank=saver.coordinator.rank,
            per_host=self._per_host,
            ts_checksums=self.ts_checksums,
            remembered=plan.remembered,
        )
        return SaveFuture(session, saver, pending, error, primary=self._primary_host)

    async def _save_others(self, directory: Any, item: Any, save_args: Any, plan: StatePlan) -> list[Any]:
        """Have the stock handlers save the leaves that are not ours."""
        infos = self._get_param_infos(item, directory, use_ocdbt=True, use_zarr3=self.ts_checksums)
        if save_args is None:
            save_args = stock._fill_missing_save_or_restore_args(item, None, mode="save")
        requests = stock.batched_serialization_requests(item, infos, save_args, self.registry)
        theirs = [request for request in requests if not can_store(request.handler)]
        futures = await self._async_io_engine.execute_save(theirs)
        return list(jax.tree.leaves(futures))

    async def _finalize_async(self, directory: Any) -> None:
        # Nothing is left to do for a folder with a manifest: all processes have agreed that it is whole.
        if holds_blobs(directory):
            add_strings(str(directory))
        else:
            await super()._finalize_async(directory)

    # ---- reading --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def opened(self, directory: Any) -> Iterator[CheckpointView]:
        """Open a folder for a restore, verified on all processes."""
        container = folder_at(directory)
        session = session_of(container.job_root, self.config, per_host=self._per_host)
        opener = functools.partial(self._explaining, session.open_view, container)
        with self.folders.open(str(directory), opener) as view:
            try:
                yield view
            except CheckpointNotFoundError as error:
                elsewhere = missing_objects(container.folder, view.manifest) if self._per_host else []
                if not elsewhere:
                    raise
                raise MismatchError(
                    f"{directory} is the part of one host of step {view.manifest.step}, and something that is "
                    f"asked for lies in {', '.join(elsewhere[:5])} of others: ask for the shardings of the save"
                ) from error

    def _explaining(
        self, opener: Callable[[ItemFolder], CheckpointView], folder: ItemFolder
    ) -> CheckpointView:
        try:
            return opener(folder)
        except (CheckpointNotFoundError, ManifestError) as error:
            rank = multihost.process_index() if self._per_host else None
            raise explained(error, folder.folder, rank) from error

    def restore(self, directory: Any, args: Any = None) -> Any:
        if not is_ours(directory):
            return super().restore(directory, args)
        with gc_paused(), self.opened(directory) as view:
            if (
                args is not None
                and args.item is not None
                and not (args.partial_restore or self._pytree_metadata_options.support_rich_types)
            ):
                found = self._direct.restore(view, directory, args.item, args.restore_args)
                if found is not None:
                    return found[0]
            return super().restore(directory, args)

    def metadata(self, directory: Any) -> Any:
        if not holds_blobs(directory):
            return super().metadata(directory)
        container = folder_at(directory)
        session = session_of(container.job_root, self.config, per_host=self._per_host)

        with self.folders.open(str(directory), lambda: self._explaining(session.look_at, container)) as view:
            rank = multihost.process_index() if self._per_host else None
            # Not as a file that is not found: of that Orbax would say that it knows no handler, and go on.
            try:
                require_objects(container.folder, view.manifest, rank)
            except ManifestError as error:
                raise ManifestError(f"{error}; restore another step") from None
            return super().metadata(directory)


def _leaves_of(save_args: Any, item: Any) -> list[Any]:
    """The save arguments of the item's leaves, in their order; Orbax has some of empty containers too."""
    found: list[Any] = []

    def visit(leaf: Any, arg: Any) -> None:
        if jax.tree.leaves(leaf):
            found.append(arg)

    jax.tree.map(visit, item, save_args, is_leaf=stock.utils.is_empty_or_leaf)
    return found


class _Settling:
    """What a handler refuses in the caller's thread leaves none of Orbax's threads behind."""

    async def async_save(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().async_save(*args, **kwargs)  # type: ignore[misc]
        except Exception:
            await asyncio.to_thread(settle)
            raise


class FlashpointPyTreeHandler(_Settling, ocp.PyTreeCheckpointHandler):
    """`ocp.PyTreeCheckpointHandler`, from memory.

    Args:
        multiprocessing_options: as given to the manager; ``primary_host=None`` for a folder on each host.
        ts_checksums: store zarr v3 with crc32c, which stock TensorStore and Orbax verify as they read; saving
            costs one more pass over the bytes, in the background.
        stock: other arguments of `ocp.PyTreeCheckpointHandler`, such as ``pytree_metadata_options``.
        settings: fields of `flashpoint.FlashpointConfig`.
    """

    def __init__(
        self,
        *,
        multiprocessing_options: Any = None,
        config: FlashpointConfig | None = None,
        ts_checksums: bool = False,
        stock: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        options = multiprocessing_options or ocp.options.MultiprocessingOptions()
        impl = PyTreeImpl(
            config=config or orbax_config(**settings),
            multiprocessing_options=options,
            ts_checksums=ts_checksums,
            **(stock or {}),
        )
        super().__init__(
            multiprocessing_options=options, handler_impl=impl, type_handler_registry=impl.registry
        )
        # What stock Orbax finds in the step's metadata: it reads our folders too, without us. (Of the instance,
        # since a class of that name is registered already.)
        self.typestr = ocp.PyTreeCheckpointHandler.typestr

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(directory):
            return super().restore(directory, *args, **kwargs)
        with self._handler_impl.opened(
            directory
        ):  # for transforms, which do not pass through `PyTreeImpl.restore`
            return super().restore(directory, *args, **kwargs)


class FlashpointStandardHandler(_Settling, ocp.StandardCheckpointHandler):
    """`ocp.StandardCheckpointHandler`, from memory; arguments as `FlashpointPyTreeHandler`."""

    def __init__(
        self,
        *,
        multiprocessing_options: Any = None,
        config: FlashpointConfig | None = None,
        ts_checksums: bool = False,
        **settings: Any,
    ) -> None:
        options = multiprocessing_options or ocp.options.MultiprocessingOptions()
        super().__init__(multiprocessing_options=options)
        self._impl = FlashpointPyTreeHandler(
            multiprocessing_options=options,
            config=config or orbax_config(**settings),
            ts_checksums=ts_checksums,
        )
        self.typestr = ocp.StandardCheckpointHandler.typestr

    def _validate_save_state(self, item: Any, save_args: Any = None) -> Any:
        """The stock check of what is saved, which looks at each leaf's type: at one of each type is enough."""
        leaves, treedef = jax.tree_util.tree_flatten(item)
        samples = list({type(leaf): leaf for leaf in leaves}.values())
        if save_args is None and samples and not jax.tree_util.treedef_is_leaf(treedef):
            with contextlib.suppress(ValueError):
                checked = super()._validate_save_state(samples)
                if all(map(operator.is_, checked, samples)):
                    return item
        return super()._validate_save_state(item, save_args)  # converts leaves, or says which is wrong


class FlashpointCheckpointHandler(FlashpointStandardHandler):
    """The same, for ``item_handlers=`` with `FlashpointSave` and `FlashpointRestore`."""


# Orbax finds a handler's arguments by its exact class, for `restore` without any.


@ocp.args.register_with_handler(FlashpointStandardHandler, for_save=True)
@dataclasses.dataclass
class _StandardSave(ocp.args.StandardSave):
    """`ocp.args.StandardSave`."""


@ocp.args.register_with_handler(FlashpointStandardHandler, for_restore=True)
@dataclasses.dataclass
class _StandardRestore(ocp.args.StandardRestore):
    """`ocp.args.StandardRestore`."""


@ocp.args.register_with_handler(FlashpointPyTreeHandler, for_save=True)
@dataclasses.dataclass
class _PyTreeSave(ocp.args.PyTreeSave):
    """`ocp.args.PyTreeSave`."""


@ocp.args.register_with_handler(FlashpointPyTreeHandler, for_restore=True)
@dataclasses.dataclass
class _PyTreeRestore(ocp.args.PyTreeRestore):
    """`ocp.args.PyTreeRestore`."""


@ocp.args.register_with_handler(FlashpointCheckpointHandler, for_save=True)
@dataclasses.dataclass
class FlashpointSave(ocp.args.StandardSave):
    """What to save: the fields of `ocp.args.StandardSave`."""


@ocp.args.register_with_handler(FlashpointCheckpointHandler, for_restore=True)
@dataclasses.dataclass
class FlashpointRestore(ocp.args.StandardRestore):
    """What to restore: the fields of `ocp.args.StandardRestore`."""


def registry(*, multiprocessing_options: Any = None, ts_checksums: bool = False, **settings: Any) -> Any:
    """Handlers for ``ocp.CheckpointManager(root, handler_registry=...)``: the one line that a program changes.

    Args:
        multiprocessing_options: those of the manager's options, where there are any.
        ts_checksums: store zarr v3 with crc32c (see `FlashpointPyTreeHandler`).
        settings: fields of `flashpoint.FlashpointConfig`, such as ``verify``; what is not given comes from
            ``FLASHPOINT_*`` variables.

    Raises:
        ConfigError: a setting is wrong, or Orbax's to decide.
    """
    config = orbax_config(**settings)
    made: dict[type[Any], Any] = {
        kind: kind(multiprocessing_options=multiprocessing_options, config=config, ts_checksums=ts_checksums)
        for kind in (FlashpointStandardHandler, FlashpointPyTreeHandler, FlashpointCheckpointHandler)
    }
    found = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for args, kind in (
        (ocp.args.StandardSave, FlashpointStandardHandler),
        (ocp.args.StandardRestore, FlashpointStandardHandler),
        (_StandardSave, FlashpointStandardHandler),
        (_StandardRestore, FlashpointStandardHandler),
        (ocp.args.PyTreeSave, FlashpointPyTreeHandler),
        (ocp.args.PyTreeRestore, FlashpointPyTreeHandler),
        (_PyTreeSave, FlashpointPyTreeHandler),
        (_PyTreeRestore, FlashpointPyTreeHandler),
        (FlashpointSave, FlashpointCheckpointHandler),
        (FlashpointRestore, FlashpointCheckpointHandler),
    ):
        found.add(None, args, made[kind])
    return found
