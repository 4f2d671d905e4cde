"""``<job root>/.agent``: what a node's agent keeps, and how trainers and agents see that the others live.

    lock         locked by the living agent, one for each job root; says who it is, for people
    users        locked, shared, by every trainer rank as long as it lives
    orders.sock  where the agent takes orders
    keys         the job's keys (`flashpoint.replication.keys`)
    membership   what the agent was last configured with, so that a restarted one goes on without a trainer
    ports        where it listened, so that a restarted one listens there again
    log          what a detached agent has to say

Locks are the kernel's (`flock`): they go with their process, whatever ends it, and hold across containers
that share the job root, where process ids mean nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypeVar

import msgspec

from flashpoint.errors import ProtocolError, ReplicationError
from flashpoint.ids import validate_job_root
from flashpoint.locks import keep_from_children, try_lock
from flashpoint.replication.membership import Membership
from flashpoint.replication.messages import Count, Host, Index, Port
from flashpoint.replication.orders import ORDER_BYTES_MAX

AGENT_NAME: Final = ".agent"
LOCK_NAME: Final = "lock"
USERS_NAME: Final = "users"
ORDERS_NAME: Final = "orders.sock"
MEMBERSHIP_NAME: Final = "membership"
PORTS_NAME: Final = "ports"
LOG_NAME: Final = "log"

_UNFINISHED: Final = re.compile(rf"({MEMBERSHIP_NAME}|{PORTS_NAME})\.[0-9a-f]{{8}}\.tmp", re.ASCII)
LOG_BYTES_MAX: Final = 1 << 20
_PORTS_BYTES_MAX: Final = 4096
_TAIL_BYTES: Final = 8192
# Whoever only asks whether a lock is held takes it for an instant. That is waited for.
_PROBE_S: Final = 0.5


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent was configured with, but for the keys.

    Attributes:
        membership: the nodes of the job.
        index: of this node among them.
        keep: versions to keep; 0 keeps all.
        encrypt: whether bulk data between nodes is sealed.
    """

    membership: Membership
    index: Index
    keep: Count
    encrypt: bool

    def __post_init__(self) -> None:
        if self.index >= len(self.membership.members):
            raise ValueError(f"there is no node {self.index} among {len(self.membership.members)}")


class Ports(msgspec.Struct, frozen=True):
    """Where an agent listens, for messages and for bulk data."""

    host: Host = ""
    port: Port = 0
    bulk_port: Port = 0


_T = TypeVar("_T", Assignment, Ports)


@dataclass(eq=False)
class HeldLock:
    """A lock on a file of the folder, held until `release`, or until the process dies. Children do not have it."""

    path: str
    fd: int

    def __post_init__(self) -> None:
        keep_from_children(self)

    @property
    def is_current(self) -> bool:
        """Whether the locked file still has its name; it has not when the job root was deleted."""
        return self.fd >= 0 and _is_named(self.fd, self.path)

    def release(self) -> None:
        if self.fd >= 0:
            # Closing would do, but for a child that is being forked this moment and has the descriptor too.
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            os.close(self.fd)
            self.fd = -1


class AgentFolder:
    """The folder ``.agent`` of a job root, held open. Close it, or let it be collected.

    Args:
        job_root: of this node.
        create: make the folder, and the job root, where they are missing.

    Raises:
        ReplicationError: it is missing, cannot be made, or others than its owner may enter it.
    """

    def __init__(self, job_root: str | os.PathLike[str], *, create: bool = True) -> None:
        self.fd = -1
        self.job_root = validate_job_root(job_root)
        self.path = f"{self.job_root}/{AGENT_NAME}"
        self.fd = _open_folder(self.path, create=create)
        keep_from_children(self)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    @property
    def orders_path(self) -> str:
        """Path of the agent's socket, for this process only, as long as this object is open.

        A Unix socket's path has at most 107 characters, and a job root's may have thousands: through the
        open folder every path is short.
        """
        return f"/proc/self/fd/{self.fd}/{ORDERS_NAME}"

    @property
    def is_current(self) -> bool:
        """Whether this is still the folder of that name; it is not when the job root was deleted."""
        return self.fd >= 0 and _is_named(self.fd, self.path)

    # ---- who lives --------------------------------------------------------------------------------

    def take_lock(self) -> HeldLock | None:
        """The agent's lock, taken; None where another agent holds it."""
        lock = self._take(LOCK_NAME, fcntl.LOCK_EX)
        if lock is not None:
            started = datetime.now().astimezone().isoformat(" ", "seconds")
            # The last line is for clients: it tells one agent from the next.
            text = f"pid {os.getpid()}\nstarted {started}\nid {secrets.token_hex(8)}\n"
            os.pwrite(lock.fd, text.encode(), 0)
            os.ftruncate(lock.fd, len(text))
        return lock

    def agent(self) -> str | None:
        """What the living agent says of itself, another text for every one of them; None where none lives."""
        return self._holder(LOCK_NAME, fcntl.LOCK_SH)

    def join_users(self) -> HeldLock:
        """Be counted among the living trainers, until it is released or the process dies."""
        lock = self._take(USERS_NAME, fcntl.LOCK_SH)
        if lock is None:
            raise ReplicationError(f"{self.path}/{USERS_NAME} is locked by something that is no trainer")
        return lock

    def has_users(self) -> bool:
        """Whether any trainer lives."""
        return self._holder(USERS_NAME, fcntl.LOCK_EX) is not None

    def _take(self, name: str, kind: int) -> HeldLock | None:
        path = f"{self.path}/{name}"
        while True:
            try:
                fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise ReplicationError(f"{path} cannot be opened: {error.strerror}") from error
            try:
                if not try_lock(fd, kind, _PROBE_S):
                    os.close(fd)
                    return None
                if _is_named(fd, path):  # it may have been removed between open and lock
                    return HeldLock(path, fd)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _holder(self, name: str, kind: int) -> str | None:
        """What is written in the file of a lock that others hold in such a way that ``kind`` is not to be had."""
        try:
            fd = os.open(f"{self.path}/{name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that is being forked this moment has the descriptor too
            return None
        except BlockingIOError:
            return os.pread(fd, 4096, 0).decode(errors="replace")
        finally:
            os.close(fd)

    # ---- what a restarted agent goes on from ------------------------------------------------------

    def read_assignment(self) -> Assignment | None:
        """What the agent was last configured with; None where it was not.

        Raises:
            ProtocolError: the file is not one of an assignment, or others than its owner may write it.
        """
        return self._read(MEMBERSHIP_NAME, Assignment, ORDER_BYTES_MAX)

    def write_assignment(self, assignment: Assignment) -> None:
        self._write(MEMBERSHIP_NAME, msgspec.json.encode(assignment))

    def read_ports(self) -> Ports:
        """Where the last agent listened; no host and port 0 where that is not known."""
        try:
            return self._read(PORTS_NAME, Ports, _PORTS_BYTES_MAX) or Ports()
        except ProtocolError:
            return Ports()  # any port will do

    def write_ports(self, host: str, port: int, bulk_port: int) -> None:
        self._write(PORTS_NAME, msgspec.json.encode(Ports(host, port, bulk_port)))

    def drop_unfinished(self) -> None:
        """Delete what an agent that was killed was writing; by the one that has the lock, and so writes alone."""
        for name in os.listdir(self.path):
            if _UNFINISHED.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{self.path}/{name}")

    def _read(self, name: str, kind: type[_T], nbytes_max: int) -> _T | None:
        path = f"{self.path}/{name}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ProtocolError("malformed", f"{path} cannot be opened: {error.strerror}") from None
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or not _is_ours(status) or status.st_mode & 0o022:
                raise ProtocolError("malformed", f"{path} can be written by others than its owner: delete it")
            if status.st_size > nbytes_max:
                raise ProtocolError("malformed", f"{path} has {status.st_size} bytes, over {nbytes_max}")
            data = file.read(status.st_size)  # not nbytes_max: that would be allocated
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError("malformed", f"{path} is garbled: {error}; delete it") from None

    def _write(self, name: str, data: bytes) -> None:
        path = f"{self.path}/{name}"
        temporary = f"{path}.{secrets.token_hex(4)}.tmp"
        fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(data)
            os.rename(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    # ---- the log ----------------------------------------------------------------------------------

    def open_log(self) -> int:
        """The log, open for appending."""
        self.trim_log()
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(f"{self.path}/{LOG_NAME}", flags, 0o600)

    def trim_log(self) -> None:
        """Begin the log anew where it has grown too long. Who writes it appends, and so goes on at its begin."""
        path = f"{self.path}/{LOG_NAME}"
        with contextlib.suppress(OSError):
            if os.stat(path, follow_symlinks=False).st_size > LOG_BYTES_MAX:
                os.truncate(path, 0)

    def log_tail(self, lines: int = 12) -> str:
        """The last lines of the log."""
        try:
            fd = os.open(f"{self.path}/{LOG_NAME}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return ""
        with open(fd, "rb") as file:
            file.seek(max(os.fstat(fd).st_size - _TAIL_BYTES, 0))
            return "\n".join(file.read(_TAIL_BYTES).decode(errors="replace").splitlines()[-lines:])


def wait_until_free(folder: AgentFolder, timeout_s: float) -> bool:
    """Whether the folder's agent ended in time."""
    deadline = time.monotonic() + timeout_s
    while folder.agent() is not None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def _open_folder(path: str, *, create: bool) -> int:
    try:
        if create:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)  # a side-car may come first
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, mode=0o700)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise ReplicationError(f"the agent's folder {path} cannot be opened: {error.strerror}") from error
    status = os.fstat(fd)
    # Whoever can enter it can give orders, and read the keys.
    if not _is_ours(status) or status.st_mode & 0o077:
        os.close(fd)
        raise ReplicationError(
            f"the agent's folder {path} (user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}) is not "
            f"one that only user {os.geteuid()} may enter: delete it"
        )
    return fd


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0)


def _is_named(fd: int, path: str) -> bool:
    try:
        named = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    mine = os.fstat(fd)
    return (mine.st_dev, mine.st_ino) == (named.st_dev, named.st_ino)
