"""`recover`: the newest version that is whole over all nodes, as arrays, and Orbax's root made to agree with it.

open the mirrors -> publish what Orbax's roots have -> candidates -> fetch and verify -> put the step's folder on every
node -> restore through Orbax's own handler -> take away newer steps -> settle
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import jax
import msgspec
import orbax.checkpoint as ocp
from etils import epath

from flashpoint.config import FlashpointConfig
from flashpoint.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptObjectError,
    FlashpointError,
    RecoveryError,
    reason_of,
)
from flashpoint.ids import validate_job_root
from flashpoint.loader import Verdict
from flashpoint.peers import Needs
from flashpoint.recovery import plan_reads
from flashpoint.retention import Version
from flashpoint.retrieval import Need, needs_of_reads
from flashpoint.telemetry import Timings, count, logger
from flashpoint.view import CheckpointView
from flashpoint_jax.coordinator import default_coordinator
from flashpoint_jax.folder import ItemFolder, holds_blobs, step_of, write_files
from flashpoint_jax.handlers import FlashpointStandardHandler
from flashpoint_jax.leaves import target_of
from flashpoint_jax.mirror import Mirror, mirror_of, open_mirror
from flashpoint_jax.orbax_root import (
    STEP_FILE,
    digest_of,
    final_items,
    final_steps,
    mend_item,
    put_item,
    remove_folder,
    shared_files,
)
from flashpoint_jax.plan import path_of
from flashpoint_jax.restore import wanted_entries
from flashpoint_jax.session import Session, orbax_config, session_of
from flashpoint_jax.sidecars import TREE_FILE, check_sidecars, files_again, index_of, step_name_of

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
    store: _Mirrored | _Local
    if config.copies:
        store = _Mirrored(root, list(states), config)
    else:
        store = _Local(root, list(states), config, multiprocessing_options)
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


# ---- where versions are ---------------------------------------------------------------------------


class _Mirrored:
    """Versions of a job with copies: what any node holds, by the mirrors of its items."""

    def __init__(self, root: str, items: Sequence[str], config: FlashpointConfig) -> None:
        self.root = root
        self.fetched_nbytes = 0
        self.mirrors = {item: mirror_of(root, item, config) for item in items}
        self._one = next(iter(self.mirrors.values()))
        self._names: dict[int, str] = {}
        for mirror in self.mirrors.values():
            mirror.drain(config.commit_timeout_s)
            mirror.reconcile(everything=True)
        self.unloadable: list[int] = []
        self._lost: set[int] = set()  # steps of which no node holds all any more

    @property
    def per_host(self) -> bool:
        return self._one.node_count > 1

    def candidates(self) -> list[int]:
        """Steps to try, newest first."""
        found = [mirror.loader.candidates() for mirror in self.mirrors.values()]
        common = set.intersection(*({version.step for version in versions} for versions in found))
        return [version.step for version in found[0] if version.step in common]

    def open(self, item: str, step: int, needs: Needs) -> CheckpointView | None:
        mirror = self.mirrors[item]
        view, verdict = mirror.loader.try_open(mirror.objects.container(step), needs=needs)
        if verdict is Verdict.GONE:
            self._lost.add(step)
        elif verdict is Verdict.FAILED:
            self.unloadable.append(step)
        self.fetched_nbytes += mirror.loader.fetched_nbytes
        return view

    def needs(self, item: str, abstract_state: Any) -> Needs:
        """What this process reads of a version, and what its node must hold of it again."""
        mirror = self.mirrors[item]

        def needs(view: CheckpointView) -> Sequence[Need]:
            manifest, rank = view.manifest, mirror.coordinator.rank
            whole = [Need(record, 0, record.nbytes) for record in manifest.objects]
            if abstract_state is None:
                return whole
            is_ours = manifest.record.world_size == mirror.coordinator.world_size
            own = [need for need in whole if is_ours and manifest.rank(need.record) == rank]
            with contextlib.suppress(Exception):  # of a state that does not fit Orbax tells, and better
                leaves = jax.tree_util.tree_flatten_with_path(abstract_state)[0]
                targets = [target_of(".".join(path_of(keys)), leaf) for keys, leaf in leaves]
                return own + needs_of_reads(
                    manifest, plan_reads(manifest, wanted_entries(view, targets), rank)
                )
            return own

        return needs

    def folders(self, step: int) -> dict[str, ItemFolder]:
        around = f"{self.root}/{self._names[step]}"
        return {item: ItemFolder(self.root, step, f"{around}/{item}", item) for item in self.mirrors}

    def put(self, step: int, views: Mapping[str, CheckpointView]) -> None:
        """Have a final folder of the step on every node, with this node's objects."""
        mirror, error = self._one, None
        name = final_steps(self.root).get(step)
        told = [
            msgspec.msgpack.decode(answer, type=dict[str, bytes])
            for answer in mirror.exchange("shared", msgspec.msgpack.encode(self._told(step, name)))
        ]
        shared = {key: value for one in reversed(told) for key, value in one.items()}
        of_manifest = step_name_of(next(iter(views.values())).manifest)
        named = os.path.basename(name) if name else shared.get("name", b"").decode()
        self._names[step] = named or of_manifest or str(step)
        if mirror.is_first:
            try:
                for item, target in self.folders(step).items():
                    self._put_item(self.mirrors[item], target, views[item], shared)
            except (FlashpointError, OSError) as failure:
                error = failure
        mirror.agree("put", error)

    def _told(self, step: int, path: str | None) -> dict[str, bytes]:
        if path is None or not self._one.is_first:
            return {}
        return {"name": os.path.basename(path).encode(), **shared_files(self.root, step)}

    def _put_item(
        self, mirror: Mirror, target: ItemFolder, view: CheckpointView, shared: Mapping[str, bytes]
    ) -> None:
        manifest, container = view.manifest, mirror.objects.container(target.step)
        wanted = mirror.objects.held_objects(container, manifest.objects)
        if manifest.record.world_size == mirror.coordinator.world_size:
            wanted &= {one.name for one in manifest.objects if manifest.rank(one) in mirror.node_ranks}

        def files(folder: str) -> dict[str, bytes]:
            again = files_again(manifest, mirror.node_ranks)
            ts_checksums = bool(json.loads(again[TREE_FILE]).get("use_zarr3"))
            index = index_of(manifest, folder, per_host=self.per_host, ts_checksums=ts_checksums)
            return {**again, **index}

        if digest_of(target.folder) == manifest.digest:
            # What was corrupt there was replaced here; and this node may have had other ranks then.
            is_whole = all(os.path.lexists(f"{target.folder}/{name}") for name in wanted)
            try:
                check_sidecars(target.folder, manifest)
            except CorruptObjectError as error:
                logger.warning("step %d: %s; it is written again", target.step, error)
                is_whole = False
            mend_item(target.folder, container.path, wanted)
            if not is_whole:
                write_files(target.folder, files(target.folder))
            return
        put_item(
            target,
            {name: f"{container.path}/{name}" for name in sorted(wanted)},
            mirror.objects.manifest_bytes(container),
            files,
            shared,
        )

    def give_up(self) -> None:
        """Nothing was found: take away steps of which objects are lost for good, so that the job can begin anew."""
        why = "more nodes were lost than there were copies"
        if self._one.is_first:
            _remove_steps(self.root, list(self.mirrors), self._lost.__contains__, why)
        self._one.agree("given up")

    def finish(self, step: int, views: Mapping[str, CheckpointView], *, removes_newer: bool) -> None:
        if self._one.is_first and removes_newer:
            why = f"the job goes on from step {step}"
            _remove_steps(self.root, list(self.mirrors), lambda one: one > step, why)
            for mirror in self.mirrors.values():
                mirror.drop_newer(step)
        self._one.agree("finished")
        for item, mirror in self.mirrors.items():
            mirror.settle(Version(views[item].manifest.record.epoch, step))

    def agree(self, topic: str, error: Exception | None) -> None:
        self._one.agree(topic, error)

    def exchange(self, topic: str, value: bytes) -> list[bytes]:
        return self._one.exchange(topic, value)


class _Local:
    """Versions of a job without copies: those that every process finds in its Orbax root."""

    def __init__(self, root: str, items: Sequence[str], config: FlashpointConfig, options: Any) -> None:
        self.root = root
        self.fetched_nbytes = 0
        self.unloadable: list[int] = []
        self.per_host = options is not None and options.primary_host is None
        self._items = items
        self._config = config
        self._coordinator = default_coordinator("recover")
        self._session: Session = session_of(root, config, per_host=self.per_host)
        self._agreements = 0

    def candidates(self) -> list[int]:
        here = [
            {folder.step for folder in final_items(self.root, item) if digest_of(folder.folder)}
            for item in self._items
        ]
        answers = self.exchange("candidates", msgspec.msgpack.encode(sorted(set.intersection(*here))))
        common = set.intersection(
            *(set(msgspec.msgpack.decode(answer, type=list[int])) for answer in answers)
        )
        return sorted(common, reverse=True)

    def needs(self, item: str, abstract_state: Any) -> Needs:
        return lambda view: ()

    def open(self, item: str, step: int, needs: Needs) -> CheckpointView | None:
        view, error = None, ""
        try:
            view = self._session.open_view(self.folders(step)[item])
        except (FlashpointError, OSError) as failure:
            error = reason_of(failure)
            logger.warning("step %d cannot be loaded: %s", step, error)
        if any(self.exchange("opened", error.encode(errors="replace"))):
            if view is not None:
                view.close()
            return None
        return view

    def folders(self, step: int) -> dict[str, ItemFolder]:
        around = final_steps(self.root)[step]
        return {item: ItemFolder(self.root, step, f"{around}/{item}", item) for item in self._items}

    def put(self, step: int, views: Mapping[str, CheckpointView]) -> None:
        """It is there already."""

    def give_up(self) -> None:
        """What cannot be loaded now may be mended: it stays."""

    def finish(self, step: int, views: Mapping[str, CheckpointView], *, removes_newer: bool) -> None:
        if removes_newer and (self.per_host or self._coordinator.is_leader):
            _remove_steps(self.root, self._items, lambda one: one > step, f"the job goes on from step {step}")
        self.agree("finished", None)

    def agree(self, topic: str, error: Exception | None) -> None:
        answers = self.exchange(topic, b"" if error is None else reason_of(error).encode(errors="replace"))
        if error is not None:
            raise error
        if failures := [f"rank {rank}: {text.decode()}" for rank, text in enumerate(answers) if text]:
            raise FlashpointError("; ".join(failures))

    def exchange(self, topic: str, value: bytes) -> list[bytes]:
        self._agreements += 1
        return self._coordinator.all_gather(
            f"{topic}/{self._agreements}", value, self._config.recovery_timeout_s
        )


def _find(
    store: _Mirrored | _Local, states: Mapping[str, Any], step: int | None, stack: ExitStack
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
    store: _Mirrored | _Local,
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


def _remove_steps(root: str, items: Sequence[str], unwanted: Callable[[int], bool], why: str) -> None:
    """Take finished steps of ours away that would stand in a later save's way."""
    for step, path in final_steps(root).items():
        if unwanted(step) and any(holds_blobs(f"{path}/{item}") for item in items):
            logger.warning("step %d is removed from %s: it cannot be used any more, %s", step, root, why)
            remove_folder(path)


# ---- long-term storage ----------------------------------------------------------------------------


def _fall_back(
    store: _Mirrored | _Local, abstract_state: Any, item: str | Sequence[str], fallback: Any, start_s: float
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
            found = _load_path(os.fspath(fallback), abstract_state, item)
        elif callable(fallback):
            found = fallback(abstract_state)
        else:
            found = _load_manager(fallback, abstract_state, item)
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


def _load_manager(manager: Any, abstract_state: Any, item: str | Sequence[str]) -> tuple[int, Any] | None:
    step = manager.latest_step()
    if step is None:
        return None
    if item == "default":
        return step, manager.restore(step, args=ocp.args.StandardRestore(abstract_state))
    states = {item: abstract_state} if isinstance(item, str) else {one: abstract_state[one] for one in item}
    args = {name: ocp.args.StandardRestore(state) for name, state in states.items()}
    found = manager.restore(step, args=ocp.args.Composite(**args))
    return step, found[item] if isinstance(item, str) else {name: found[name] for name in states}


def _load_path(path: str, abstract_state: Any, item: str | Sequence[str]) -> tuple[int | None, Any] | None:
    """What lies at a path: an item's folder, a step's, or a manager's root, whose latest step it is then."""
    if not os.path.exists(f"{path}/{TREE_FILE}") and not os.path.exists(f"{path}/{STEP_FILE}"):
        options = ocp.CheckpointManagerOptions(read_only=True)
        with ocp.CheckpointManager(path, options=options) as manager:
            return _load_manager(manager, abstract_state, item)
    is_item = os.path.exists(f"{path}/{TREE_FILE}")
    if is_item and not isinstance(item, str):
        raise FlashpointError(
            f"{path} holds one item, and {len(item)} are wanted: give the path of their step"
        )
    names = [item] if isinstance(item, str) else list(item)
    loaded = {}
    with ocp.StandardCheckpointer() as checkpointer:
        for name in names:
            wanted = abstract_state if isinstance(item, str) else abstract_state[name]
            loaded[name] = checkpointer.restore(path if is_item else f"{path}/{name}", wanted)
    named = step_of(os.path.basename(os.path.normpath(path)))
    if named is None and is_item:
        named = step_of(os.path.basename(os.path.dirname(os.path.normpath(path))))
    return named, loaded[item] if isinstance(item, str) else loaded
