"""Where `recover` finds versions, with copies and without: candidates, opening them, and Orbax's root made to agree."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import msgspec

from flashpoint.config import FlashpointConfig
from flashpoint.errors import CorruptObjectError, FlashpointError, reason_of
from flashpoint.loader import Verdict
from flashpoint.located import ItemFolder
from flashpoint.peers import Needs
from flashpoint.recovery import plan_reads
from flashpoint.retention import Version
from flashpoint.retrieval import Need, needs_of_reads
from flashpoint.telemetry import logger
from flashpoint.view import CheckpointView
from flashpoint_jax.coordinator import default_coordinator
from flashpoint_jax.folder import holds_blobs, write_files
from flashpoint_jax.leaves import target_of
from flashpoint_jax.mirror import Mirror, mirror_of
from flashpoint_jax.orbax_root import (
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
from flashpoint_jax.session import Session, session_of
from flashpoint_jax.sidecars import TREE_FILE, check_sidecars, files_again, index_of, step_name_of


class MirroredVersions:
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
        return {item: ItemFolder(self.root, step, f"{around}/{item}") for item in self.mirrors}

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


class LocalVersions:
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
        return {item: ItemFolder(self.root, step, f"{around}/{item}") for item in self._items}

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


Store = MirroredVersions | LocalVersions


def _remove_steps(root: str, items: Sequence[str], unwanted: Callable[[int], bool], why: str) -> None:
    """Take finished steps of ours away that would stand in a later save's way."""
    for step, path in final_steps(root).items():
        if unwanted(step) and any(holds_blobs(f"{path}/{item}") for item in items):
            logger.warning("step %d is removed from %s: it cannot be used any more, %s", step, root, why)
            remove_folder(path)
