"""Bugs, by name, that are put into the processes that save, recover, replicate or drain: each must be found.

Each is a child's own matter: it is put in after the fork, and nothing takes it out again. `MUTANTS` says at which
operation a bug shows, and one fault at which it was found to; the whole search is the soak test's.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from flashpoint import loader, manifest, objects, view
from flashpoint.buffers import BufferObject, BufferPool
from flashpoint.markers import Marker
from flashpoint.objects import CheckpointObjectManager
from flashpoint.replication import replicator as decisions
from flashpoint.replication.acquisition import Acquisition
from flashpoint.replication.replicator import Replicator
from flashpoint.retention import Standing, Version, given_up
from flashpoint.saver import MLFlashpointCheckpointSaver
from flashpoint.storage.drain import Drain
from flashpoint.storage.records import manifest_name


class Mutant(NamedTuple):
    """A bug.

    Attributes:
        scene: the operation that shows it.
        fault: at which it shows; "none" where it shows without any.
        put_in: puts it into this process.
    """

    scene: str
    fault: str
    put_in: Callable[[], None]


def skip_the_marker() -> None:
    def create(container: Any, local_rank: int) -> Marker:
        return Marker(f"{container.job_root}/none", os.memfd_create("marker"))

    Marker.create = create  # type: ignore[method-assign, assignment]


def commit_before_write() -> None:
    write, finalize = MLFlashpointCheckpointSaver.write, MLFlashpointCheckpointSaver.finalize

    def empty(self: Any, pending: Any) -> None:
        write(self, pending)
        for part in pending.staged:
            part.bytes = part.buffer.data.copy()
            part.buffer.data[:] = 0

    def late(self: Any, pending: Any) -> None:
        finalize(self, pending)
        for part in pending.staged:
            part.buffer.data[:] = part.bytes

    MLFlashpointCheckpointSaver.write = empty  # type: ignore[method-assign]
    MLFlashpointCheckpointSaver.finalize = late  # type: ignore[method-assign]


def delete_before_complete() -> None:
    finalize = MLFlashpointCheckpointSaver.finalize

    def hasty(self: Any, pending: Any) -> None:
        for version in self.objects.complete_versions():
            self.objects.remove_container(self.objects.container(version.step))
        finalize(self, pending)

    MLFlashpointCheckpointSaver.finalize = hasty  # type: ignore[method-assign]


def a_leader_that_waits_for_nobody() -> None:
    collect = MLFlashpointCheckpointSaver._collect

    def careless(self: Any, pending: Any, name: str, report: Any, ranks: Any) -> Any:
        if name == "cleared" and self.coordinator.is_leader:
            return {}
        return collect(self, pending, name, report, ranks)

    MLFlashpointCheckpointSaver._collect = careless  # type: ignore[method-assign]


def accept_a_stale_epoch() -> None:
    loader.newest_first = lambda versions: sorted(set(versions), key=lambda v: v.step, reverse=True)  # type: ignore[attr-defined]


def skip_verification() -> None:
    view.mismatches = lambda *args, **options: []  # type: ignore[attr-defined]


def load_without_checking_identity() -> None:
    def version_of(self: Any, step: int) -> Version | None:
        try:
            return Version(self._record_of(step).epoch, step)
        except (OSError, objects.ManifestError):
            return None

    CheckpointObjectManager._version_of = version_of  # type: ignore[method-assign]
    CheckpointObjectManager.read_manifest = lambda self, container: manifest.decode(  # type: ignore[method-assign]
        self.manifest_bytes(container)
    )


def reuse_a_file_that_a_version_needs() -> None:
    BufferObject.link_count = property(lambda self: 1)  # type: ignore[assignment]


def truncate_instead_of_recreate() -> None:
    def write_epoch(self: Any, epoch: int) -> None:
        with open(f"{self.job_root}/{objects.EPOCH_NAME}", "w", encoding="ascii") as file:
            file.write(str(epoch))

    CheckpointObjectManager.write_epoch = write_epoch  # type: ignore[method-assign]


def swallow_enospc_as_success() -> None:
    write_manifest = CheckpointObjectManager.write_manifest

    def careless(self: Any, container: Any, data: bytes) -> None:
        with contextlib.suppress(OSError):
            write_manifest(self, container, data)

    CheckpointObjectManager.write_manifest = careless  # type: ignore[method-assign]


def what_was_cut_off_stays() -> None:
    BufferPool.drop_unfinished = lambda self: 0  # type: ignore[method-assign]


def a_marker_is_left_by_who_takes_back() -> None:
    objects._unlink = lambda path: None if path.endswith("__unfinished") else os.unlink(path)  # type: ignore[assignment]


def a_descriptor_is_forgotten() -> None:
    def open_file(root: str, path: str) -> int:
        fd = os.open(f"{root}/{path}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError("it is not a regular file")
        return fd

    objects.open_file = open_file  # type: ignore[assignment]


def publish_manifest_before_blobs() -> None:
    begin = Drain.begin

    def hasty(self: Any) -> None:
        begin(self)
        self._store.write(manifest_name(self._source.key.step), self._source.manifest)

    Drain.begin = hasty  # type: ignore[method-assign]


def forget_fsync() -> None:
    os.fsync = lambda fd: None  # type: ignore[assignment]


def delete_before_replicated() -> None:
    def careless(standings: Any, *, keep: int, busy: Any = ()) -> Any:
        return given_up(dict.fromkeys(standings, Standing.REPLICATED), keep=keep, busy=busy)

    decisions.given_up = careless  # type: ignore[attr-defined]
    Replicator._is_free = lambda self, key: True  # type: ignore[method-assign, assignment]


def held_though_it_did_not_come() -> None:
    acquired = Replicator.acquired
    Replicator.acquired = lambda self, key, source, _, now_s: acquired(self, key, source, None, now_s)  # type: ignore[method-assign]


def linked_before_it_came() -> None:
    take_buffers, link = Acquisition._take_buffers, Acquisition._link

    def hasty(self: Any, manifest: Any) -> Any:
        transfer = take_buffers(self, manifest)
        for part in self._parts:
            os.link(part.buffer.path, part.path)
        return transfer

    Acquisition._take_buffers = hasty  # type: ignore[method-assign]
    Acquisition._link = link  # type: ignore[method-assign]


MUTANTS: Final[dict[str, Mutant]] = {
    put_in.__name__: Mutant(scene, fault, put_in)
    for put_in, scene, fault in (
        (skip_the_marker, "save", "killed-after:mkdir/container/1"),
        (commit_before_write, "finalize", "killed-after:unlink/marker/1"),
        (delete_before_complete, "finalize", "killed-before:unlink/marker/1"),
        (a_leader_that_waits_for_nobody, "commit, rank 1 of 2", "killed-before:unlink/marker/1"),
        (accept_a_stale_epoch, "recovery", "killed-before:mkdir/root/1"),
        (skip_verification, "recovery", "killed-before:mkdir/root/1"),
        (load_without_checking_identity, "recovery", "killed-before:mkdir/root/1"),
        (reuse_a_file_that_a_version_needs, "save", "killed-before:link/object/1"),
        (truncate_instead_of_recreate, "recovery", "killed-before:write/epoch/1"),
        (swallow_enospc_as_success, "save", "ENOSPC:write/new-manifest/1"),
        (what_was_cut_off_stays, "recovery", "killed-before:mkdir/root/1"),
        (a_marker_is_left_by_who_takes_back, "recovery", "killed-before:mkdir/root/1"),
        (a_descriptor_is_forgotten, "save", "EIO:newfstatat/manifest/1"),
        (publish_manifest_before_blobs, "drain", "killed-before:openat/storage-new-object/1"),
        (forget_fsync, "drain", "none"),
        (delete_before_replicated, "replication, node 1 of 2", "killed-before:link/object/1"),
        (held_though_it_did_not_come, "replication, node 1 of 2", "ENOSPC:link/object/1"),
        (linked_before_it_came, "replication, node 1 of 2", "killed-after:link/object/1"),
    )
}


def put_in(name: str) -> None:
    """Put a bug into this process; none for an empty name."""
    if name:
        MUTANTS[name].put_in()
