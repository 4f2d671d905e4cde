"""What one process keeps of a root from save to save: its buffers, its savers, its epoch.

Handlers come and go with their managers; warm buffers and the job's epoch outlive them. So there is one `Session`
for each root, rank and settings in this process, made at the first save, or with less in it at the first restore.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Iterable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import jax
import orbax.checkpoint as ocp

from flashpoint.config import FlashpointConfig
from flashpoint.coordinator import Coordinator
from flashpoint.errors import CheckpointNotFoundError, ConfigError, FlashpointError, InvalidIdError
from flashpoint.ids import CheckpointContainerId, CheckpointObjectId
from flashpoint.job import open_job
from flashpoint.loader import MLFlashpointCheckpointLoader
from flashpoint.located import ItemFolder
from flashpoint.manifest import MANIFEST_NAME, CommitRecord, decode_record
from flashpoint.markers import is_live, marker_name
from flashpoint.objects import CheckpointObjectManager
from flashpoint.saver import MLFlashpointCheckpointSaver, PendingCheckpoint, StagedObject
from flashpoint.telemetry import warn_once
from flashpoint.view import CheckpointView
from flashpoint_jax.coordinator import default_coordinator
from flashpoint_jax.diagnosis import require_objects
from flashpoint_jax.folder import StepMarkers, parse_folder, unfinished_items, write_files
from flashpoint_jax.mirror import Mirror, close_mirrors, mirror_of, open_mirror
from flashpoint_jax.orbax_root import final_of, is_of_step
from flashpoint_jax.plan import StatePlan
from flashpoint_jax.sidecars import Sidecars, check_sidecars
from flashpoint_jax.zarr_index import seal_checksums

WRITER_NAME: Final = f"flashpoint_jax, jax {jax.__version__}, orbax-checkpoint {ocp.__version__}"
"""What a manifest says wrote it."""

_DIGESTS_MAX: Final = 16
_REMOVAL_S: Final = 5.0
_RENAMED_S: Final = 60.0  # Orbax renames a step some milliseconds after its last item is complete
_SPARE_VERSIONS: Final = 2  # free buffers kept: one for the next save, one for Orbax to be late in deleting


class ItemSaver(MLFlashpointCheckpointSaver):
    """The saver of one item: beside the manifest it writes the files that stock Orbax reads.

    With copies, it hands what it has committed to the item's `Mirror`.
    """

    def __init__(self, *args: Any, job_config: FlashpointConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sidecars: dict[str, Sidecars] = {}  # by topic, of saves under way
        self._job_config = job_config
        self._mirror: Mirror | None = None
        self._digests: dict[str, str] = {}  # by topic, of manifests that this process wrote
        self._packed: dict[str, Any] = {}

    def begin(self, container: CheckpointContainerId | int, *, tag: str = "") -> PendingCheckpoint:
        assert isinstance(container, ItemFolder)
        if self._job_config.copies and self._mirror is None:
            if is_of_step(container):
                self._mirror = mirror_of(container.job_root, container.item, self._job_config)
                self.epoch = self._mirror.epoch
            else:
                warn_once(
                    f"alone:{container.job_root}", "copies are made of a CheckpointManager's steps only"
                )
        return super().begin(container, tag=tag)

    def write(self, pending: PendingCheckpoint) -> None:
        if self._mirror is not None and self.coordinator.is_leader:
            step = os.path.basename(os.path.dirname(final_of(_folder(pending)).folder))
            pending.values += self.sidecars[pending.topic].values(step, self._packed)
        super().write(pending)

    def finalize(self, pending: PendingCheckpoint) -> None:
        digest = self._digests.pop(pending.topic, "")
        super().finalize(pending)
        if self._mirror is not None:
            self._mirror.follow(_folder(pending), digest, pending.topic, self.coordinator)

    def _fill_gaps(self, pending: PendingCheckpoint, part: StagedObject) -> None:
        super()._fill_gaps(pending, part)
        if self.sidecars[pending.topic].ts_checksums:
            seal_checksums(part.buffer.data, part.layout)

    def _put_manifest(
        self, pending: PendingCheckpoint, record: CommitRecord, values: Iterable[bytes]
    ) -> None:
        # A failure here is voted on like one of the manifest itself.
        super()._put_manifest(pending, record, values)
        manifest = self.objects.read_manifest(pending.container)
        sidecars = self.sidecars[pending.topic]
        require_objects(pending.container.path, manifest, sidecars.rank if sidecars.per_host else None)
        self._digests[pending.topic] = manifest.digest
        while len(self._digests) > _DIGESTS_MAX:  # of saves that failed after this
            del self._digests[next(iter(self._digests))]
        write_files(pending.container.path, sidecars.files(manifest))


class ItemLoader(MLFlashpointCheckpointLoader):
    """The loader of items: all processes agree that the files beside the objects are sound too."""

    def _verify_share(self, view: CheckpointView) -> None:
        super()._verify_share(view)
        check_sidecars(view.container.path, view.manifest)


class Session:
    """One root's memory, for this process.

    Args:
        root: Orbax's root, where the pool lies and markers are set.
    """

    def __init__(self, root: str, config: FlashpointConfig, *, per_host: bool) -> None:
        self.root = root
        self.config = config
        self.markers = StepMarkers()
        self._per_host = per_host
        self._coordinator: Coordinator | None = None
        self._objects: CheckpointObjectManager | None = None
        self._epoch = 0
        self._savers: dict[str, ItemSaver] = {}
        self._loader: ItemLoader | None = None
        self._reading: CheckpointObjectManager | None = None
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()
        self._background = ThreadPoolExecutor(1, thread_name_prefix="flashpoint")
        self._making: list[futures.Future[int]] = []  # buffers, in the background

    # ---- saving ---------------------------------------------------------------------------------

    def saver(self, container: ItemFolder) -> ItemSaver:
        """The saver of an item, to begin with this version. All processes ask for them in the same order."""
        item = container.item
        with self._lock:
            if item not in self._savers:
                objects = self._open(container)
                self._savers[item] = ItemSaver(
                    objects,
                    default_coordinator(f"save/{item}"),
                    job_config=self.config,
                    epoch=self._epoch,
                    writer=WRITER_NAME,
                    gives_up=False,  # Orbax deletes versions
                )
            return self._savers[item]

    def _open(self, first: ItemFolder) -> CheckpointObjectManager:
        """Open the job for saving: agree on its epoch, clean up what a crash left. Once, on all processes."""
        if self._objects is None or self._coordinator is None:
            self._coordinator = default_coordinator("session")
            rank = self._coordinator.rank
            self._drop_debris(rank, self._coordinator.world_size, first)
            # Copies are made by each item's mirror: nothing in this folder is for an agent to find.
            config = dataclasses.replace(self.config, copies=0)
            job = open_job(self.root, config, self._coordinator)
            self._objects, self._epoch = job.objects, job.epoch
        return self._objects

    def _drop_debris(self, rank: int, world_size: int, first: ItemFolder) -> None:
        """Take this process's objects out of items that a crash left unfinished: Orbax may keep the folders.

        Those of ranks that are no more are the first rank's to take. A folder of the step that is about to be
        saved Orbax is removing right now, and would stumble over files that vanish; its memory is waited for.
        """
        objects = CheckpointObjectManager(self.root, rank=rank, config=self.config, create=False)
        for container in unfinished_items(self.root):
            marker = f"{self.root}/{marker_name(container, rank)}"
            if is_live(marker) or (not os.path.lexists(marker) and _is_about_to_be_renamed(container)):
                continue
            names = [name for name in _names_in(container.path) if _is_left_to(rank, world_size, name)]
            if container.step == first.step:
                _await_removal([f"{container.path}/{name}" for name in names])
                continue
            for owner in {CheckpointObjectId.parse(name).rank for name in names}:
                objects.remove_objects_of(container, owner, keep_folder=True)

    def stage(self, saver: ItemSaver, plan: StatePlan, fill: Any) -> list[StagedObject]:
        """The objects of this process's part: one, or none where it stores nothing."""
        # A buffer that is being made will be there sooner than one that is begun now.
        self.wait(self.config.overlap_wait_s)
        return [saver.stage(plan.layout, fill)] if plan.layout.entries else []

    def committed(self, item: str, staged: Iterable[StagedObject]) -> None:
        """After a version: see to it that the next save finds a buffer, and that no more than some are free."""
        sizes = [part.layout.nbytes for part in staged]
        is_new = self._sizes.get(item) != sum(sizes)
        self._sizes[item] = sum(sizes)
        assert self._objects is not None
        pool = self._objects.pool
        used = sum(status.st_size for _, status in pool._own_files() if status.st_nlink > 1)
        pool.trim(used + _SPARE_VERSIONS * sum(self._sizes.values()))
        if is_new and self.config.prefault:
            for nbytes in sizes:
                self._making.append(self._background.submit(pool.reserve, nbytes, 2))

    def wait(self, timeout_s: float) -> bool:
        """Wait until the buffers for the next save are made; False where that takes longer."""
        self._making = list(futures.wait(self._making, timeout_s).not_done)
        return not self._making

    def close(self) -> None:
        """Let go of the buffers; what was restored stays valid."""
        self._background.shutdown(wait=False, cancel_futures=True)
        close_mirrors(self.root)
        for objects in (self._objects, self._reading):
            if objects is not None:
                objects.close()

    # ---- restoring ------------------------------------------------------------------------------

    def open_view(self, container: ItemFolder) -> CheckpointView:
        """Open and verify a version, on all processes together.

        Raises:
            FlashpointError: it cannot be used, here or on another process.
        """
        with self._lock:
            if self._loader is None:
                self._loader = ItemLoader(self._reader(), default_coordinator("load"))
            loader = self._loader
            loader.objects = self._reader()
        try:
            container = self._as_saved(container)
        except (FlashpointError, OSError):
            if loader.coordinator.world_size == 1:
                raise  # else the others are to hear of it
        if (mirror := self._mirror_for(container)) is not None:
            found = mirror.loader.open_verified(mirror.objects.container(container.step))
            if found is None:
                raise CheckpointNotFoundError(
                    f"{container.folder} was saved by another number of processes, and is not whole among them"
                )
            check_sidecars(container.folder, found.manifest)
            return found
        if loader.coordinator.world_size > 1:
            found = loader.open_verified(container, warm=True)
            if found is None:
                raise CheckpointNotFoundError(
                    f"{container.folder} cannot be used by all processes; each has logged what it found"
                )
            return found
        view = CheckpointView(loader.objects, container, verify=self.config.verify, warm=True)
        try:
            if self.config.verify:
                view.verify()
                check_sidecars(container.path, view.manifest)
        except BaseException:
            view.close()
            raise
        return view

    def _mirror_for(self, container: ItemFolder) -> Mirror | None:
        """The mirror to read a version through: where other processes than now wrote it, on several nodes.

        What it lacks here it gets from peers, all of it: nobody knows yet what is wanted.
        """
        mirror = open_mirror(self.root, container.item)
        if mirror is None or mirror.node_count == 1 or not is_of_step(container):
            return None
        record = self._reader().read_summary(container).record
        return mirror if record.world_size != mirror.coordinator.world_size else None

    def look_at(self, container: ItemFolder) -> CheckpointView:
        """Open a version for what its manifest says; on this process alone."""
        with self._lock:
            objects = self._reader()
        view = CheckpointView(objects, self._as_saved(container), verify=False)
        if self.config.verify:
            check_sidecars(container.path, view.manifest)
        return view

    def _reader(self) -> CheckpointObjectManager:
        if self._objects is not None:
            return self._objects  # its buffers are warm
        if self._reading is None:
            rank = jax.process_index()
            self._reading = CheckpointObjectManager(self.root, rank=rank, config=self.config, create=False)
        return self._reading

    def _as_saved(self, container: ItemFolder) -> ItemFolder:
        """The container under the step that its manifest names: its folder may have been copied elsewhere."""
        with self._lock:
            data = self._reader().manifest_bytes(container)
        return dataclasses.replace(container, step=decode_record(data.partition(b"\n")[0]).step)


def _folder(pending: PendingCheckpoint) -> ItemFolder:
    assert isinstance(pending.container, ItemFolder)
    return pending.container


def _is_about_to_be_renamed(container: ItemFolder) -> bool:
    """Whether an item became complete so lately that another program's Orbax may be at its last step, the rename.

    Its marker is gone by then, where a crash before leaves it. What a crash left at this very moment is debris for
    the next start.
    """
    try:
        written_s = os.stat(f"{container.path}/{MANIFEST_NAME}").st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return False
    return time.time() - written_s < _RENAMED_S


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _is_left_to(rank: int, world_size: int, name: str) -> bool:
    """Whether a file is an object that a crash left, for this rank to remove."""
    try:
        owner = CheckpointObjectId.parse(name).rank
    except InvalidIdError:
        return False
    return owner == rank or (rank == 0 and owner >= world_size)


def _await_removal(paths: Iterable[str]) -> None:
    """Wait a little until these files are gone; whoever removes them has begun."""
    deadline = time.monotonic() + _REMOVAL_S
    for path in paths:
        while os.path.lexists(path) and time.monotonic() < deadline:
            time.sleep(0.002)


_sessions: dict[tuple[str, FlashpointConfig, bool], Session] = {}
_sessions_lock = threading.Lock()


def session_of(root: str, config: FlashpointConfig, *, per_host: bool) -> Session:
    """The session of a root in this process."""
    with _sessions_lock:
        if jax.process_count() == 1:  # or else one process might begin anew and another not
            for gone in [key for key in _sessions if not os.path.isdir(key[0])]:
                _sessions.pop(gone).close()  # a deleted root's memory is given back when its mappings go
        key = (root, config, per_host)
        if key not in _sessions:
            _sessions[key] = Session(root, config, per_host=per_host)
        return _sessions[key]


def orbax_config(**settings: Any) -> FlashpointConfig:
    """Settings of a job whose versions Orbax keeps and deletes.

    Raises:
        ConfigError: a setting is wrong, or one that Orbax decides.
    """
    if settings.get("keep") is not None:
        raise ConfigError("keep is Orbax's to decide: set CheckpointManagerOptions(max_to_keep=...)")
    config = FlashpointConfig.from_env(**{**settings, "keep": 0})
    if config.storage:
        raise ConfigError("Orbax's checkpoints are not drained to storage yet: leave storage empty")
    return config


def folder_at(path: Any) -> ItemFolder:
    """The container behind an Orbax path, finished or awaiting its creation."""
    return parse_folder(str(getattr(path, "path", path)))
