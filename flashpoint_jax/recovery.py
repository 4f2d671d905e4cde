"""`recover`: the newest version that is whole over all nodes, as arrays, and Orbax's root made to agree with it.

open the mirrors -> publish what Orbax's roots have -> candidates -> fetch and verify -> put the step's folder on every
node -> restore through Orbax's own handler -> take away newer steps -> settle
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from flashpoint.config import FlashpointConfig
from flashpoint.errors import CheckpointNotFoundError, ConfigError, FlashpointError, RecoveryError
from flashpoint.ids import validate_job_root
from flashpoint.located import ItemFolder
from flashpoint.telemetry import Timings, count, logger
from flashpoint.view import CheckpointView
from flashpoint_jax.fallback import load_manager, load_path
from flashpoint_jax.handlers import FlashpointStandardHandler
from flashpoint_jax.mirror import open_mirror
from flashpoint_jax.session import orbax_config
from flashpoint_jax.stores import LocalVersions, MirroredVersions, Store

Fallback = Any
"""A stock `ocp.CheckpointManager`, a path, or ``callable(abstract_state) -> (step, state) | None``."""


@dataclass(frozen=True)
class RecoverResult:
    """What `recover` loaded.

    Attributes:
        step: of the version; None where a fallback does not tell it.
        tier: where it was: ``local`` memory; memory of a ``peer``, for some node at least; or long-term
            ``storage``, by the fallback.
        state: arrays as the abstract state asked for them; by item, where several were asked for.
        seconds: from the call to its return.
        timings: seconds by part: ``find`` (agree, fetch and verify), ``put`` (Orbax's folders), ``fill``.
    """

    step: int | None
    tier: str
    state: Any
    seconds: float
    timings: Mapping[str, float] = field(default_factory=dict)


def recover(
    manager_or_root: Any,
    abstract_state: Any,
    *,
    item: str | Sequence[str] = "default",
    step: int | None = None,
    fallback: Fallback | None = None,
    multiprocessing_options: Any = None,
    **settings: Any,
) -> RecoverResult | None:
    """The newest state that is whole in the memory of all nodes. On every process, before the first save.

    What this node's memory lacks, because it was replaced or the job has changed, comes from peers. Afterwards
    every node's Orbax root has that step as its latest, so that a manager restores it and saves on.

    Args:
        manager_or_root: the `ocp.CheckpointManager`, or its directory if there is none yet.
        abstract_state: as for ``StandardRestore``: shapes, dtypes and shardings.
        item: name of the item; or several, then ``abstract_state`` is a mapping from each, and only steps that have
            them all are considered.
        step: this step, instead of the newest.
        fallback: where memory has nothing: a stock manager over long-term storage (its latest step), the path of a
            manager's root, of a step or of an item there, or what to call with the abstract state; it
            returns the step and the state, or None.
        multiprocessing_options, settings: as given to `flashpoint_jax.registry`; a manager is asked for its own.

    Returns:
        What was loaded, or None where there is nothing.

    Raises:
        CheckpointNotFoundError: the ``step`` asked for cannot be loaded.
        RecoveryError: there are versions, but none could be loaded, for a reason that may pass, and there is no
            fallback.
        FlashpointError: the state does not fit, here or on another process, or a process did not come.
    """
    start_s = time.perf_counter()
    timings = Timings()
    is_manager = not isinstance(manager_or_root, (str, os.PathLike))
    if is_manager:
        manager_or_root.wait_until_finished()
    root = root_of(manager_or_root)
    config = _config_of(manager_or_root if is_manager else None, settings)
    if multiprocessing_options is None and is_manager:
        multiprocessing_options = manager_or_root._multiprocessing_options
    states = {item: abstract_state} if isinstance(item, str) else {one: abstract_state[one] for one in item}
    store: Store
    if config.copies:
        store = MirroredVersions(root, list(states), config)
    else:
        store = LocalVersions(root, list(states), config, multiprocessing_options)
    with ExitStack() as stack:
        with timings.span("find"):
            found = _find(store, states, step, stack)
        if found is None:
            store.give_up()
            if is_manager:
                manager_or_root.reload()
            if step is not None:
                raise CheckpointNotFoundError(f"there is no usable step {step} in {root}")
            return _fall_back(store, abstract_state, item, fallback, start_s)
        chosen, views = found
        with timings.span("put"):
            store.put(chosen, views)
        with timings.span("fill"):
            loaded = _fill(store, config, multiprocessing_options, states, views, store.folders(chosen))
    # Who asks for an older step may only want to look at it: then the newer ones stay.
    store.finish(chosen, views, removes_newer=step is None)
    if is_manager:
        manager_or_root.reload()
    count("recoveries")
    seconds = time.perf_counter() - start_s
    tier = "peer" if store.fetched_nbytes else "local"
    logger.info("step %d was recovered from %s memory in %.3f s", chosen, tier, seconds)
    return RecoverResult(chosen, tier, loaded[item] if isinstance(item, str) else loaded, seconds, timings)


def wait_until_replicated(
    manager_or_root: Any, step: int, *, item: str = "default", timeout_s: float = 60.0
) -> bool:
    """Wait until every copy of a saved step lies where it should.

    Returns:
        True when it does; False when it does not within ``timeout_s``, or the step was given up for a newer one.

    Raises:
        ConfigError: no copies are made of that item, or none of it was saved or recovered by this process yet.
    """
    mirror = open_mirror(root_of(manager_or_root), item)
    if mirror is None:
        raise ConfigError(
            f"no copies are made of item {item!r} in {root_of(manager_or_root)}: set copies, and save first"
        )
    return mirror.await_replicated(step, timeout_s)


def root_of(manager_or_root: Any) -> str:
    """Orbax's root as Flashpoint names it."""
    directory = manager_or_root
    if not isinstance(manager_or_root, (str, os.PathLike)):
        directory = manager_or_root.directory
    return validate_job_root(os.fspath(directory))


def _config_of(manager: Any, settings: Mapping[str, Any]) -> FlashpointConfig:
    """The settings given, or those of the manager's own handlers."""
    if settings or manager is None:
        return orbax_config(**settings)
    registry = getattr(manager._checkpointer._handler, "_handler_registry", None)
    for handler in getattr(registry, "_registry", {}).values():
        inner = getattr(handler, "_impl", handler)
        config = getattr(getattr(inner, "_handler_impl", None), "config", None)
        if isinstance(config, FlashpointConfig):
            return config
    return orbax_config()


def _find(
    store: Store, states: Mapping[str, Any], step: int | None, stack: ExitStack
) -> tuple[int, dict[str, CheckpointView]] | None:
    """The newest step all of whose items can be opened, on all processes alike."""
    steps = [one for one in store.candidates() if step in (None, one)]
    for candidate in steps:
        views: dict[str, CheckpointView] = {}
        store.fetched_nbytes = 0
        for item, state in states.items():
            view = store.open(item, candidate, store.needs(item, state))
            if view is None:
                break
            views[item] = view
        if len(views) == len(states):
            for view in views.values():
                stack.callback(view.close)
            return candidate, views
        for view in views.values():
            view.close()
    return None


def _fill(
    store: Store,
    config: FlashpointConfig,
    options: Any,
    states: Mapping[str, Any],
    views: Mapping[str, CheckpointView],
    folders: Mapping[str, ItemFolder],
) -> dict[str, Any]:
    """The states, through the handler by which a manager restores, from the views that are open."""
    options = options or ocp.options.MultiprocessingOptions(primary_host=None if store.per_host else 0)
    handler = FlashpointStandardHandler(multiprocessing_options=options, config=config)
    loaded: dict[str, Any] = {}
    error: Exception | None = None
    try:
        for item, abstract in states.items():
            path = epath.Path(folders[item].folder)
            with handler._impl._handler_impl.folders.open(str(path), lambda item=item: views[item]):
                loaded[item] = handler.restore(path, args=ocp.args.StandardRestore(abstract))
    except Exception as failure:  # whatever Orbax says of a state that does not fit
        error = failure
    # No process trains on, and gives up this version, while another still reads it.
    store.agree("filled", error)
    return loaded


# ---- long-term storage ----------------------------------------------------------------------------


def _fall_back(
    store: Store,
    abstract_state: Any,
    item: str | Sequence[str],
    fallback: Any,
    start_s: float,
) -> RecoverResult | None:
    """Load from long-term storage, since no node's memory has a version that every process can use."""
    if fallback is None:
        if store.unloadable:
            raise RecoveryError(
                f"steps {store.unloadable} are below {store.root} or on its peers, but none could be loaded; the "
                "warnings before this say why. Mend that and start again, pass a fallback, or remove the steps to "
                "start from scratch"
            )
        return None
    logger.warning("memory holds no usable checkpoint below %s: falling back to storage", store.root)
    found: tuple[int | None, Any] | None = None
    error: Exception | None = None
    try:
        if isinstance(fallback, (str, os.PathLike)):
            found = load_path(os.fspath(fallback), abstract_state, item)
        elif callable(fallback):
            found = fallback(abstract_state)
        else:
            found = load_manager(fallback, abstract_state, item)
    except Exception as failure:
        error = failure
    store.agree("fallback", error)
    said = [text.decode() for text in store.exchange("step", str(found and found[0]).encode())]
    if len(set(said)) > 1:
        steps = ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(said))
        raise FlashpointError(f"the fallback gave the processes different steps ({steps})")
    if found is None:
        return None
    count("recoveries")
    return RecoverResult(found[0], "storage", found[1], time.perf_counter() - start_s)
