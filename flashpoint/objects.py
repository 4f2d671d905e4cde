"""The objects of a job root on this node: containers, their blobs and manifests, and the buffers behind.

All file-system work of a checkpoint passes through `CheckpointObjectManager`; nothing here decides.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from flashpoint import manifest as manifests
from flashpoint.buffers import AGENT, POOL_NAME, BufferObject, BufferPool
from flashpoint.checksums import Bytes
from flashpoint.config import FlashpointConfig
from flashpoint.confined import NO_FILE, open_file, read_file
from flashpoint.errors import (
    CheckpointNotFoundError,
    CorruptObjectError,
    FlashpointError,
    ManifestError,
    ManifestVersionError,
)
from flashpoint.ids import CheckpointContainerId, CheckpointObjectId, parse_container_name, validate_job_root
from flashpoint.locks import keep_from_children, try_lock
from flashpoint.manifest import MANIFEST_NAME, CommitRecord, Manifest, ObjectRecord
from flashpoint.markers import is_live, parse_marker_name
from flashpoint.memory import default_memory_limit, file_system
from flashpoint.retention import Version, newest_first
from flashpoint.telemetry import logger, warn_once

EPOCH_NAME: Final = ".epoch"
FETCHED_NAME: Final = ".fetched"
WRITER_LETS_GO_S: Final = 2.0
_INDEX: Final = re.compile(r"(manifest\.ocdbt|nodes-[0-9a-f]{32}\.ocdbt)(\.[0-9a-f]+\.tmp)?", re.ASCII)
CORRUPT_SUFFIX: Final = ".corrupt"  # of an object of which no good copy is left
_REPAIRED_SUFFIX: Final = ".repaired"  # of one that is about to take a corrupt one's place
_EPOCH_BYTES_MAX: Final = 32


class ManifestSummary(NamedTuple):
    """A manifest's commit record, its digest (which names all of its contents), and its size in bytes."""

    record: CommitRecord
    digest: str
    nbytes: int


@dataclass(frozen=True)
class MappedObject:
    """An object mapped for reading.

    Attributes:
        data: its bytes, read-only. As long as this array or a view of it lives, a shared lock is held.
        buffer: the pool buffer whose mapping ``data`` shares, for a warm one.
    """

    record: ObjectRecord
    path: str
    data: Bytes
    buffer: BufferObject | None = None


class _WarmBytes:
    """What all arrays over a warm mapping go back to: it holds their lock until the last of them is gone."""

    def __init__(self, data: Bytes, fd: int) -> None:
        self.fd = fd
        self._data = data
        # numpy makes an array of whatever has this attribute; True stands for read-only.
        self.__array_interface__ = {**data.__array_interface__, "data": (data.ctypes.data, True)}
        keep_from_children(self)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class CheckpointObjectManager:
    """Containers, objects and buffers of one job root, for one rank of this node, or for its agent.

    Args:
        job_root: absolute path, best on a tmpfs; made with mode 0700 if it is not there.
        rank: global rank of this process; None for the node's agent, whose buffers are its own.
        config: settings; those of memory and recycling are used here.
        create: False to open an existing job root for reading only.

    Attributes:
        agreed: versions that were complete on every node when the job started, until its first save.

    Raises:
        InvalidIdError: the path is no job root.
        FlashpointError: it cannot be made, written, or belongs to somebody else.
    """

    def __init__(
        self,
        job_root: str | os.PathLike[str],
        *,
        rank: int | None = 0,
        config: FlashpointConfig | None = None,
        create: bool = True,
    ) -> None:
        self.job_root = validate_job_root(job_root)
        self.rank = -1 if rank is None else rank  # -1 has no objects
        self.config = config or FlashpointConfig.from_env()
        self.agreed: list[Version] = []
        if create:
            self._prepare_root()
        self.pool = BufferPool(
            self.job_root,
            AGENT if rank is None else rank,
            memory_limit_bytes=self.config.memory_limit_bytes or self._default_limit(),
            recycle_grace_s=self.config.recycle_grace_s,
        )

    def _prepare_root(self) -> None:
        root = self.job_root
        try:
            os.makedirs(root, mode=0o700, exist_ok=True)
            status = os.stat(root)
        except OSError as error:
            raise FlashpointError(
                f"the job root {root!r} cannot be made: {error.strerror}; give a folder on a writable tmpfs"
            ) from error
        if status.st_uid not in (os.geteuid(), 0):
            raise FlashpointError(
                f"the job root {root!r} belongs to user {status.st_uid}, not to {os.geteuid()}: whoever owns it can "
                "change every checkpoint in it; give a folder of your own"
            )
        if status.st_mode & 0o022:
            raise FlashpointError(
                f"the job root {root!r} (mode {stat.S_IMODE(status.st_mode):04o}) can be written by others than its "
                f"owner, and with it every checkpoint: chmod 700 {root}, or give a folder that is not there yet"
            )
        if not os.access(root, os.W_OK | os.X_OK):
            raise FlashpointError(f"the job root {root!r} is not writable for user {os.geteuid()}")
        fs = file_system(root)
        if not fs.is_tmpfs:
            warn_once(
                f"not-tmpfs:{root}",
                f"the job root {root} lies on {fs.kind}, not on a tmpfs: checkpoints work there, at the "
                "speed of that file system, and its page cache is what survives a crash; "
                "use a folder below /dev/shm",
            )

    def _default_limit(self) -> int:
        try:
            return default_memory_limit(self.job_root)
        except (
            FileNotFoundError,
            NotADirectoryError,
        ):  # all else is an error: with 0, nothing would ever fit
            return 0

    @property
    def node(self) -> str:
        """Identity of the memory that the job root lies in: ranks that share it share a node."""
        status = os.stat(self.job_root)
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}:{status.st_dev}:{status.st_ino}"

    def container(self, step: int) -> CheckpointContainerId:
        return CheckpointContainerId(self.job_root, step)

    def fetched_folder(self, container: CheckpointContainerId, rank: int) -> str:
        """Where parts of objects lie that a rank's recovery into another world got from peers.

        Each rank has its own: two of one node may need different parts of one object.
        """
        return f"{self.job_root}/{FETCHED_NAME}/{container.name}/rank{rank:05d}"

    def drop_fetched(self) -> None:
        """Delete all parts of objects: nobody reads them any more."""
        path = f"{self.job_root}/{FETCHED_NAME}"
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if _is_folder(path):
                shutil.rmtree(path, ignore_errors=True)

    # ---- reading what is there ------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps that have a container, complete or not, ascending."""
        return self._steps_among(self._names())

    def complete_versions(self) -> list[Version]:
        """Versions without markers whose manifest names this step, newest first.

        Only the manifests' first lines are read: whether a version is whole is for the loader to say.
        """
        dirty = self.dirty_steps()
        found = (self._version_of(step) for step in self.steps() if step not in dirty)
        return newest_first(version for version in found if version is not None)

    def complete_steps(self) -> list[int]:
        """Steps of `complete_versions`, newest first."""
        return [version.step for version in self.complete_versions()]

    def dirty_steps(self) -> set[int]:
        """Steps that a marker declares unfinished."""
        parsed = (parse_marker_name(name) for name in self._names())
        return {found[0] for found in parsed if found is not None}

    def garbled_steps(self) -> list[int]:
        """Steps without markers whose manifest tells nothing, not even that a newer release wrote it."""
        dirty = self.dirty_steps()
        return [step for step in self.steps() if step not in dirty and self._is_garbled(step)]

    def is_complete(self, container: CheckpointContainerId) -> bool:
        return container.step not in self.dirty_steps() and self._version_of(container.step) is not None

    def read_manifest(self, container: CheckpointContainerId) -> Manifest:
        """The container's manifest, every byte of it checked.

        Raises:
            CheckpointNotFoundError: there is none.
            ManifestError: it is torn, garbled, of another version, or of another step.
        """
        path = f"{container.path}/{MANIFEST_NAME}"
        data = self.manifest_bytes(container)
        try:
            manifest = manifests.decode(data)
        except ManifestError as error:
            raise ManifestError(f"{path}: {error}") from error
        if manifest.step != container.step:
            raise ManifestError(f"{path} is the manifest of step {manifest.step}: it was moved here")
        return manifest

    def manifest_bytes(self, container: CheckpointContainerId) -> bytes:
        """The manifest's file as it is, unchecked; errors as `read_manifest`."""
        path = f"{container.path}/{MANIFEST_NAME}"
        try:
            fd = self._open(container, MANIFEST_NAME)
        except FileNotFoundError:
            raise CheckpointNotFoundError(
                f"step {container.step} has no manifest ({path}): the save did not become complete, "
                "or it was deleted"
            ) from None
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
            raise ManifestError(f"{path} cannot be opened: {error.strerror}") from None
        with open(fd, "rb") as file:
            nbytes = os.fstat(fd).st_size
            if nbytes > manifests.MANIFEST_BYTES_MAX:
                raise ManifestError(
                    f"{path}: {nbytes} bytes are over the limit of {manifests.MANIFEST_BYTES_MAX}"
                )
            return file.read(nbytes + 1)

    def open_object(self, container: CheckpointContainerId, name: str) -> int:
        """Open an object for reading, without any lock, whatever is in it; its descriptor.

        Raises:
            OSError: it is not there, or is no file of ours.
        """
        return self._open(container, CheckpointObjectId.parse(name).name)

    def _open(self, container: CheckpointContainerId, name: str) -> int:
        return open_file(container.job_root, _below(container.job_root, f"{container.path}/{name}"))

    def read_summary(self, container: CheckpointContainerId) -> ManifestSummary:
        """What the container's manifest says of itself: every byte is checked, only the first line decoded.

        Raises:
            CheckpointNotFoundError: there is none.
            ManifestError: it is torn, garbled, of another version, or of another step.
        """
        data = self.manifest_bytes(container)
        record, digest = manifests.decode_summary(data)
        if record.step != container.step:
            raise ManifestError(
                f"{container.path} holds the manifest of step {record.step}: it was moved here"
            )
        return ManifestSummary(record, digest, len(data))

    def held_objects(self, container: CheckpointContainerId, records: Iterable[ObjectRecord]) -> set[str]:
        """Names of those objects that lie in this node's container with the size they should have."""
        held = set()
        for record in records:
            try:
                status = os.lstat(f"{container.path}/{record.name}")
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode) and status.st_size == record.nbytes:
                held.add(record.name)
        return held

    def map_object(
        self, container: CheckpointContainerId, record: ObjectRecord, *, warm: bool = False
    ) -> MappedObject:
        """Map one object for reading, under a shared lock, so that its buffer is not recycled meanwhile.

        Args:
            warm: use this process's own pool mapping where it has one. Its pages are touched already.

        Raises:
            CorruptObjectError: it is missing, of another size, or being given up this very moment.
        """
        name = CheckpointObjectId.parse(record.name).name
        path = f"{container.path}/{name}"
        part = f"{self.fetched_folder(container, self.rank)}/{name}"
        if not os.path.lexists(path) and os.path.lexists(part):
            path = part
        try:
            fd = open_file(container.job_root, _below(container.job_root, path))
        except OSError as error:
            if error.errno not in NO_FILE:
                raise  # too many open files, say: that tells nothing about the object
            self._raise_if_given_up(container)
            raise CorruptObjectError(
                f"step {container.step}: object {name} cannot be opened: {error.strerror}"
            ) from None
        keep_fd = False
        try:
            if not _lock_shared(fd):
                raise CorruptObjectError(f"step {container.step}: object {name} is still being written")
            status = os.fstat(fd)
            try:
                named = os.stat(path, follow_symlinks=False)
            except FileNotFoundError:
                named = None
            if named is None or (named.st_dev, named.st_ino) != (status.st_dev, status.st_ino):
                self._raise_if_given_up(container)
                raise CorruptObjectError(f"step {container.step}: object {name} changed while it was opened")
            if status.st_size != record.nbytes:
                raise CorruptObjectError(
                    f"step {container.step}: object {name} has {status.st_size} bytes, its manifest says "
                    f"{record.nbytes}"
                )
            if status.st_blocks * 512 < record.nbytes and file_system(container.path).is_tmpfs:
                # To read it would need new pages, and a full tmpfs has none: a SIGBUS.
                raise CorruptObjectError(f"step {container.step}: object {name} has holes in it")
            buffer = self.pool.buffer_of((status.st_dev, status.st_ino)) if warm else None
            if buffer is not None:
                held = _WarmBytes(buffer.data, fd)
                keep_fd = True
                return MappedObject(record, path, np.asarray(held), buffer)
            # mmap duplicates the descriptor, and with it the lock: it goes with the last view.
            mapping = mmap.mmap(fd, record.nbytes, prot=mmap.PROT_READ)
            return MappedObject(record, path, np.frombuffer(mapping, dtype=np.uint8))
        finally:
            if not keep_fd:
                os.close(fd)

    def _raise_if_given_up(self, container: CheckpointContainerId) -> None:
        if self._version_of(container.step) is None:
            raise CheckpointNotFoundError(
                f"step {container.step} was given up while it was opened: open a newer one"
            )

    # ---- writing --------------------------------------------------------------------------------

    def create_container(self, container: CheckpointContainerId) -> None:
        """Make the container's folder. The marker must be there first."""
        if os.path.islink(container.path):
            _unlink(container.path)  # what it leads to is not ours
        os.makedirs(container.path, mode=0o700, exist_ok=True)

    def link_object(
        self, container: CheckpointContainerId, obj: CheckpointObjectId, buffer: BufferObject
    ) -> None:
        """Give the buffer its second name, in the container, in place of what a crash may have left there."""
        path = f"{container.path}/{obj.name}"
        try:
            os.link(buffer.path, path)
        except FileExistsError:
            os.unlink(path)
            os.link(buffer.path, path)

    def write_manifest(self, container: CheckpointContainerId, data: bytes) -> None:
        """Write the manifest whole or not at all: under a temporary name, then renamed."""
        path = f"{container.path}/{MANIFEST_NAME}"
        temporary = f"{path}.{secrets.token_hex(4)}.tmp"
        fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with open(fd, "wb") as file:
                fcntl.flock(
                    fd, fcntl.LOCK_EX | fcntl.LOCK_NB
                )  # for `finish_unfinished`: who writes this lives
                file.write(data)
                if not file_system(container.path).is_tmpfs:
                    file.flush()
                    os.fsync(fd)  # on a disk a rename may outlive the data it names
            os.rename(temporary, path)
        except BaseException:
            _unlink(temporary)
            raise

    def drop_strays(self, container: CheckpointContainerId, manifest_names: set[str]) -> None:
        """Delete objects that the manifest does not name: a crashed attempt of another world left them."""
        for name in os.listdir(container.path):
            if name not in manifest_names and (_is_object(name) or _is_leftover(name)):
                _unlink(f"{container.path}/{name}")

    # ---- repair ---------------------------------------------------------------------------------

    def object_names(self, container: CheckpointContainerId) -> set[str]:
        """Names of the objects that lie in this node's container, in whatever state."""
        return {name for name in self._names(container.path) if _is_object(name)}

    def replace_object(self, container: CheckpointContainerId, name: str, buffer: BufferObject) -> None:
        """Let a buffer take an object's name from a corrupt one, at once: who has that one mapped keeps it."""
        path = f"{container.path}/{CheckpointObjectId.parse(name).name}"
        _unlink(path + _REPAIRED_SUFFIX)  # of an agent that was killed between the next two
        os.link(buffer.path, path + _REPAIRED_SUFFIX)
        os.rename(path + _REPAIRED_SUFFIX, path)
        _unlink(path + CORRUPT_SUFFIX)

    def set_aside(self, container: CheckpointContainerId, name: str) -> None:
        """Take an object's name from corrupt bytes of which nobody has good ones: the version is not whole any more.

        Nothing is deleted before the version is given up: who would rather have wrong bytes than none can get them.
        """
        path = f"{container.path}/{CheckpointObjectId.parse(name).name}"
        os.rename(path, path + CORRUPT_SUFFIX)

    def objects_set_aside(self, container: CheckpointContainerId) -> set[str]:
        """Names of the objects that were set aside, and that did not come back since."""
        names = set(self._names(container.path))
        aside = {name.removesuffix(CORRUPT_SUFFIX) for name in names if name.endswith(CORRUPT_SUFFIX)}
        return {name for name in aside - names if _is_object(name)}

    # ---- giving up ------------------------------------------------------------------------------

    def remove_objects_of(
        self, container: CheckpointContainerId, rank: int, *, keep_folder: bool = False
    ) -> None:
        """Take back what one rank put into a version that will not be: its objects and the manifest."""
        _unlink(f"{container.path}/{MANIFEST_NAME}")  # first: nothing may look complete any more
        for name in self._names(container.path):
            if _is_object(name) and CheckpointObjectId.parse(name).rank == rank:
                _unlink(f"{container.path}/{name}")
        if not keep_folder:
            _rmdir_if_empty(container.path)

    def remove_named(self, container: CheckpointContainerId, names: Iterable[str]) -> None:
        """Delete objects of a version that stays: they are not to be used any more."""
        for name in names:
            _unlink(f"{container.path}/{CheckpointObjectId.parse(name).name}")

    def remove_container(self, container: CheckpointContainerId) -> None:
        """Give a version up: manifest first, so that a crash in between leaves nothing that looks complete.

        Only what Flashpoint made is deleted, the index for stock readers with it, and the folder only if nothing
        else is in it. Of a link, the link.
        """
        path = container.path
        if os.path.islink(path):
            return _unlink(path)
        _unlink(f"{path}/{MANIFEST_NAME}")
        for name in self._names(path):
            if (
                _is_object(name)
                or _is_leftover(name)
                or _is_index(name)
                or (name.startswith(MANIFEST_NAME) and name.endswith(".tmp"))
            ):
                _unlink(f"{path}/{name}")
        _rmdir_if_empty(path)

    def collect_garbage(self) -> list[int]:
        """Remove what crashes left: dirty versions no living process works on. Returns their steps.

        Called by one rank of a node while no rank of the job is saving.
        """
        removed = []
        names = self._names()  # once: a save that begins now is not seen at all, not by halves
        markers = [(name, parsed) for name in names if (parsed := parse_marker_name(name))]
        live = {parsed[0] for name, parsed in markers if is_live(f"{self.job_root}/{name}")}
        dirty = {parsed[0] for _, parsed in markers}
        for step in sorted(dirty.union(self._steps_among(names))):
            container = self.container(step)
            if step in live or (step not in dirty and _is_there(f"{container.path}/{MANIFEST_NAME}")):
                continue
            self.remove_container(container)
            for name, parsed in markers:
                if parsed[0] == step:
                    _unlink(f"{self.job_root}/{name}")
            if step in dirty or not _is_there(container.path):
                removed.append(step)  # or else a folder of others, such as Orbax's of this name
        for name in self._names():
            if name.startswith(f"{EPOCH_NAME}.") and name.endswith(".tmp"):
                _unlink(f"{self.job_root}/{name}")
        self.pool.drop_unfinished()
        if removed:
            logger.info("removed the unfinished steps %s below %s", removed, self.job_root)
        return removed

    def finish_unfinished(self) -> list[int]:
        """Remove what a killed process had in hand, while the job goes on. Returns the steps that are gone.

        For an agent that starts beside living trainers. A container that has neither manifest nor marker was being
        given up: what is saved has a marker first. Only those of steps before the newest complete one's: a later
        one may be saved this very moment, and that save cleans it up itself.
        """
        names = self._names()  # once: a save that begins now is not seen at all, not by halves
        complete = self.complete_versions()
        newest = complete[0].step if complete else -1
        dirty = {parsed[0] for name in names if (parsed := parse_marker_name(name)) is not None}
        removed = []
        for step in self._steps_among(names):
            container = self.container(step)
            if step in dirty:
                continue
            self._drop_unfinished_manifests(container)
            if step < newest and not _is_there(f"{container.path}/{MANIFEST_NAME}"):
                self.remove_container(container)
                if not _is_there(container.path):
                    removed.append(step)  # or else a folder of others
        if removed:
            logger.info("removed what was left of the steps %s below %s", removed, self.job_root)
        return removed

    def _drop_unfinished_manifests(self, container: CheckpointContainerId) -> None:
        for name in self._names(container.path):
            if not (name.startswith(f"{MANIFEST_NAME}.") and name.endswith(".tmp")):
                continue
            with contextlib.suppress(OSError):  # gone, or no file
                fd = self._open(container, name)
                try:
                    if try_lock(fd, fcntl.LOCK_EX):  # nobody writes it any more
                        _unlink(f"{container.path}/{name}")
                finally:
                    os.close(fd)

    # ---- epoch ----------------------------------------------------------------------------------

    def read_epoch(self) -> int:
        """The job's restart count as this node knows it; 0 for a job never restarted.

        What its newest version says counts too: should the file be lost, older versions still do not
        overrule what is saved from now on.
        """
        newest = max((version.epoch for version in self.complete_versions()), default=0)
        try:
            return max(int(read_file(self.job_root, EPOCH_NAME, _EPOCH_BYTES_MAX)), newest)
        except ValueError:
            return newest
        except OSError as error:
            if error.errno not in (*NO_FILE, errno.EFBIG):
                raise
            return newest

    def write_epoch(self, epoch: int) -> None:
        """Remember the epoch. A full tmpfs keeps no job from starting: `read_epoch` asks the versions too."""
        path = f"{self.job_root}/{EPOCH_NAME}"
        temporary = f"{path}.{secrets.token_hex(4)}.tmp"
        try:
            fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            with open(fd, "w", encoding="ascii") as file:
                file.write(str(epoch))
            os.rename(temporary, path)
        except OSError as error:
            logger.warning("the epoch %d could not be written to %s: %s", epoch, path, error)
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def close(self) -> None:
        self.pool.close()

    def _names(self, path: str = "") -> list[str]:
        try:
            return os.listdir(path or self.job_root)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _steps_among(self, names: list[str]) -> list[int]:
        found = ((parse_container_name(name), f"{self.job_root}/{name}") for name in names)
        return sorted(step for step, path in found if step is not None and _is_folder(path))

    def version_of(self, container: CheckpointContainerId) -> Version | None:
        """What the container's manifest calls it; None where there is none that can be read."""
        return self._version_of(container.step)

    def _version_of(self, step: int) -> Version | None:
        try:
            record = self._record_of(step)
        except (OSError, ManifestError):
            return None
        return Version(record.epoch, step) if record.step == step else None

    def _is_garbled(self, step: int) -> bool:
        try:
            return self._record_of(step).step != step
        except ManifestError as error:
            return not isinstance(error, ManifestVersionError)
        except OSError:
            return False

    def _record_of(self, step: int) -> CommitRecord:
        with open(self._open(self.container(step), MANIFEST_NAME), "rb") as file:
            return manifests.decode_record(file.readline(manifests.MANIFEST_BYTES_MAX))


def is_job_root(path: str) -> bool:
    """Whether ``path`` looks like a job root: it holds a pool or at least one container."""
    try:
        names = os.listdir(path)
    except OSError:
        return False
    return POOL_NAME in names or any(parse_container_name(name) is not None for name in names)


def _is_object(name: str) -> bool:
    try:
        CheckpointObjectId.parse(name)
    except ValueError:
        return False
    return True


def _is_index(name: str) -> bool:
    """Whether a file is one of the OCDBT index that an adapter may put beside the objects."""
    return _INDEX.fullmatch(name) is not None


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _is_there(path: str) -> bool:
    """Whether anything has this name. What cannot be looked at may be there: `os.path.lexists` would deny it."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _is_leftover(name: str) -> bool:
    """Whether a file is an object that was set aside, or one that did not come to take its place."""
    stem, dot, suffix = name.rpartition(".")
    return dot + suffix in (CORRUPT_SUFFIX, _REPAIRED_SUFFIX) and _is_object(stem)


def _below(root: str, path: str) -> str:
    """A path relative to the root that it begins with."""
    assert path.startswith(f"{root}/"), (root, path)
    return path[len(root) + 1 :]


def _lock_shared(fd: int) -> bool:
    """Take a shared lock. A writer in another process may let go a moment after the version is complete."""
    deadline = time.monotonic() + WRITER_LETS_GO_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)


def _unlink(path: str) -> None:
    # What is no file, or does not lie in a folder, is not ours.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
        os.unlink(path)


def _rmdir_if_empty(path: str) -> None:
    with contextlib.suppress(OSError):  # not ours alone, or gone already
        os.rmdir(path)
