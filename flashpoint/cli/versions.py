"""What lies in a job root, as the commands see it: only looked at, never changed or cleaned up."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from flashpoint.config import FlashpointConfig
from flashpoint.errors import CheckpointNotFoundError, FlashpointError, InvalidIdError, ManifestError
from flashpoint.ids import CheckpointContainerId, CheckpointObjectId, parse_container_name
from flashpoint.manifest import MANIFEST_BYTES_MAX, MANIFEST_NAME, CommitRecord, decode_record
from flashpoint.markers import is_live, parse_marker_name
from flashpoint.objects import CheckpointObjectManager, is_job_root

COMPLETE: Final = "complete"
SAVING: Final = "saving"  # a living process holds a marker
DIRTY: Final = "dirty"  # debris of a crash: a marker that nobody holds, or no manifest
CORRUPT: Final = "corrupt"  # no marker, and a manifest that cannot be read
UNREADABLE: Final = "unreadable"  # another user's

STYLES: Final = {
    COMPLETE: "green",
    SAVING: "cyan",
    DIRTY: "yellow",
    CORRUPT: "bold red",
    UNREADABLE: "yellow",
}


@dataclass(frozen=True)
class StoredObject:
    """An object's file as it lies on this node."""

    name: str
    rank: int
    nbytes: int
    links: int  # 2: this container and the pool; 1: the pool file is gone; more: somebody linked it


@dataclass(frozen=True)
class StoredVersion:
    """One version on this node: its state, its commit record where it has one, and its files."""

    container: CheckpointContainerId
    state: str
    problem: str
    record: CommitRecord | None
    markers: tuple[tuple[int, bool], ...]  # (local rank, whether its process lives)
    objects: dict[str, StoredObject]
    created_unix_s: float

    @property
    def nbytes(self) -> int:
        return sum(obj.nbytes for obj in self.objects.values())


def container_of(path: str) -> CheckpointContainerId:
    """The container that a person named, by a path that may be relative.

    Raises:
        CheckpointNotFoundError: nothing is there.
        FlashpointError: it is something else; the message says what to give instead.
    """
    path = os.path.abspath(path)
    try:
        return CheckpointContainerId.parse(path)
    except InvalidIdError:
        pass
    if not os.path.lexists(path):
        raise CheckpointNotFoundError(f"{path}: there is no such folder")
    if is_job_root(path):
        complete = manager(path).complete_steps()
        hint = f"; its newest version is {CheckpointContainerId(path, complete[0])}" if complete else ""
        raise FlashpointError(f"{path} is a job root, not a container{hint}")
    raise FlashpointError(f"{path} is no checkpoint: a container is a folder named step-<n>_ckpt")


def require_job_root(path: str) -> str:
    """The job root that a person named, by a path that may be relative.

    Raises:
        OSError: nothing is there, or no folder.
        FlashpointError: it is something else; the message says what to give instead.
    """
    from flashpoint.replication.agent_folder import AGENT_NAME  # with ZeroMQ, which looking does not need

    path = os.path.abspath(path)
    os.listdir(path)
    if is_container_name(path):
        raise FlashpointError(f"{path} is one version: give its job root, {os.path.dirname(path)}")
    if not is_job_root(path) and not os.path.isdir(f"{path}/{AGENT_NAME}"):
        raise FlashpointError(f"{path} is no job root: `flashpoint ls` lists those of this user")
    return path


def manager(job_root: str) -> CheckpointObjectManager:
    """The job root, for looking only: whatever the FLASHPOINT_* variables say."""
    return CheckpointObjectManager(job_root, config=FlashpointConfig(), create=False)


def versions_in(objects: CheckpointObjectManager) -> list[StoredVersion]:
    """Every version of a job root, newest first: by epoch, then by step, as recovery prefers them."""
    # Folders before markers: a folder is only made once its marker is there, so one without a marker
    # is never a save that has just begun.
    steps = objects.steps()
    markers = _markers(objects.job_root)
    found = (_look(objects.container(step), markers.get(step, ())) for step in {*steps, *markers})
    versions = [version for version in found if version is not None]
    epoch = objects.read_epoch()
    return sorted(
        versions, key=lambda v: (v.record.epoch if v.record else epoch, v.container.step), reverse=True
    )


def version_of(container: CheckpointContainerId) -> StoredVersion:
    """One version; raises `CheckpointNotFoundError` where there is neither its folder nor a marker."""
    os.listdir(container.job_root)  # names what is wrong with the path, if anything is
    version = _look(container, _markers(container.job_root).get(container.step, ()))
    if version is None:
        raise CheckpointNotFoundError(f"{container.path}: there is no such version")
    return version


def _look(container: CheckpointContainerId, markers: tuple[tuple[int, bool], ...]) -> StoredVersion | None:
    """None where there is neither a folder nor a marker: it may have been given up since it was listed."""
    if not markers and not os.path.isdir(container.path):
        return None
    record, problem, state = None, "", COMPLETE
    try:
        with open(f"{container.path}/{MANIFEST_NAME}", "rb", opener=_opener) as file:
            record = decode_record(file.readline(MANIFEST_BYTES_MAX))
        if record.step != container.step:
            raise ManifestError(f"the manifest is that of step {record.step}: it was moved here")
        created = record.created_unix_s
    except FileNotFoundError:
        state, problem = DIRTY, "it has no manifest"
    except ManifestError as error:
        state, problem, record = CORRUPT, str(error), None
    except PermissionError:
        state, problem = UNREADABLE, f"user {os.geteuid()} may not read it"
    except OSError as error:
        state, problem = CORRUPT, f"its manifest cannot be read: {error.strerror}"
    if record is None:
        try:
            created = os.stat(container.path).st_mtime
        except FileNotFoundError:
            created = 0.0
    if markers:
        state = SAVING if any(live for _, live in markers) else DIRTY
        problem = "it is being saved" if state == SAVING else "a crash left its marker"
    return StoredVersion(container, state, problem, record, markers, _files(container), created)


def _opener(path: str, flags: int) -> int:
    # A link or a pipe in a manifest's place is nobody's manifest, and must not make us wait.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _files(container: CheckpointContainerId) -> dict[str, StoredObject]:
    found = {}
    try:
        names = sorted(os.listdir(container.path))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {}
    for name in names:
        try:
            rank = CheckpointObjectId.parse(name).rank
            status = os.stat(f"{container.path}/{name}", follow_symlinks=False)
        except (InvalidIdError, FileNotFoundError, PermissionError):
            continue
        found[name] = StoredObject(name, rank, status.st_size, status.st_nlink)
    return found


def _markers(job_root: str) -> dict[int, tuple[tuple[int, bool], ...]]:
    """Step -> its markers, by local rank."""
    found: dict[int, list[tuple[int, bool]]] = {}
    for name in os.listdir(job_root):
        parsed = parse_marker_name(name)
        if parsed is None:
            continue
        step, local_rank = parsed
        try:
            live = is_live(f"{job_root}/{name}")
        except OSError:
            live = True  # not ours to open: do not call another user's save a crash
        if os.path.lexists(f"{job_root}/{name}"):  # it may have been removed meanwhile: no longer dirty
            found.setdefault(step, []).append((local_rank, live))
    return {step: tuple(sorted(markers)) for step, markers in found.items()}


def is_container_name(path: str) -> bool:
    return parse_container_name(os.path.basename(os.path.abspath(path))) is not None
