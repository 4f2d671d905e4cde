"""A process under ptrace: every system call that it makes on certain files and on sockets, and a fault at one of them.

Why ptrace, from Python. A shim around `os.*` misses what C code does by itself (mmap's second descriptor, buffered
writes, all of libzmq's threads); LD_PRELOAD misses calls that do not go through libc, and needs a compiler; strace
sees all, but must be installed, and would start a Python for each of thousands of points. The kernel lends anyone
the same view of a child: so points are counted where the kernel counts them, in a fork of a process that has
imported everything, and nothing is needed but Linux 5.3 on x86-64.

A fault is one of these, at one call:

    killed before    the call is not made; SIGKILL
    killed after     the call is made; SIGKILL before the process hears of it
    EIO, ENOSPC, EINTR    the call is not made and fails so. (`close` is made: Linux closes, whatever it returns.)
    short            half of what was to be written is written

What a process does to memory it has mapped is no call: it lies between two, and is cut off by a kill after the one
before and by a kill before the one after.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import platform
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

_PATH, _FD, _MADE = "path", "fd", "made"
# Number, what tells the file, and in which arguments (arch/x86/entry/syscalls/syscall_64.tbl).
_TABLE: Final[dict[str, tuple[int, str, tuple[int, ...]]]] = {
    "read": (0, _FD, (0,)), "write": (1, _FD, (0,)), "open": (2, _PATH, (0,)), "close": (3, _FD, (0,)),
    "stat": (4, _PATH, (0,)), "fstat": (5, _FD, (0,)), "lstat": (6, _PATH, (0,)), "lseek": (8, _FD, (0,)),
    "mmap": (9, _FD, (4,)), "ioctl": (16, _FD, (0,)), "pread64": (17, _FD, (0,)), "pwrite64": (18, _FD, (0,)),
    "readv": (19, _FD, (0,)), "writev": (20, _FD, (0,)), "access": (21, _PATH, (0,)), "sendfile": (40, _FD, (1,)),
    "socket": (41, _MADE, ()), "connect": (42, _FD, (0,)), "accept": (43, _FD, (0,)), "sendto": (44, _FD, (0,)),
    "recvfrom": (45, _FD, (0,)), "sendmsg": (46, _FD, (0,)), "recvmsg": (47, _FD, (0,)), "shutdown": (48, _FD, (0,)),
    "bind": (49, _FD, (0,)), "listen": (50, _FD, (0,)), "getsockname": (51, _FD, (0,)), "getpeername": (52, _FD, (0,)),
    "setsockopt": (54, _FD, (0,)), "getsockopt": (55, _FD, (0,)), "fcntl": (72, _FD, (0,)), "flock": (73, _FD, (0,)),
    "fsync": (74, _FD, (0,)), "fdatasync": (75, _FD, (0,)), "truncate": (76, _PATH, (0,)), "ftruncate": (77, _FD, (0,)),
    "rename": (82, _PATH, (0, 1)), "mkdir": (83, _PATH, (0,)), "rmdir": (84, _PATH, (0,)), "creat": (85, _PATH, (0,)),
    "link": (86, _PATH, (0, 1)), "unlink": (87, _PATH, (0,)), "symlink": (88, _PATH, (1,)),
    "readlink": (89, _PATH, (0,)), "chmod": (90, _PATH, (0,)), "fchmod": (91, _FD, (0,)),
    "chown": (92, _PATH, (0,)), "statfs": (137, _PATH, (0,)),
    "fstatfs": (138, _FD, (0,)), "getdents64": (217, _FD, (0,)), "openat": (257, _PATH, (1,)),
    "mkdirat": (258, _PATH, (1,)), "newfstatat": (262, _PATH, (1,)), "unlinkat": (263, _PATH, (1,)),
    "renameat": (264, _PATH, (1, 3)), "linkat": (265, _PATH, (1, 3)), "fchmodat": (268, _PATH, (1,)),
    "faccessat": (269, _PATH, (1,)), "utimensat": (280, _PATH, (1,)), "fallocate": (285, _FD, (0,)),
    "accept4": (288, _FD, (0,)), "renameat2": (316, _PATH, (1, 3)), "statx": (332, _PATH, (1,)),
    "openat2": (437, _PATH, (1,)), "faccessat2": (439, _PATH, (1,)),
}  # fmt: skip
_CALLS: Final = {number: (name, kind, where) for name, (number, kind, where) in _TABLE.items()}
_WRITES: Final = {"write": 2, "pwrite64": 2, "sendto": 2}  # which argument counts the bytes

_TRACEME, _GETREGS, _SETREGS, _CONT, _SYSCALL = 0, 12, 13, 7, 24
_SETOPTIONS, _GET_SYSCALL_INFO = 0x4200, 0x420E
_OPTIONS: Final = 0x1 | 0x8 | 0x100000  # TRACESYSGOOD, TRACECLONE, EXITKILL
_WALL: Final = 0x40000000
_SET_PDEATHSIG: Final = 1
DATAGRAM: Final = "datagram socket"
_ENTRY, _EXIT = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


_REGISTERS: Final = (
    "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss fs_base gs_base ds es "
    "fs gs"
)


class _Regs(ctypes.Structure):
    """``struct user_regs_struct`` of x86-64, sys/user.h."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in _REGISTERS.split()]


class _Info(ctypes.Structure):
    """``struct ptrace_syscall_info``, linux/ptrace.h."""

    _fields_ = [
        ("op", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("ip", ctypes.c_uint64),
        ("sp", ctypes.c_uint64),
        ("nr", ctypes.c_uint64),  # or what an exit returns
        ("args", ctypes.c_uint64 * 6),
    ]


class Call(NamedTuple):
    """One system call of an operation, the same one in every run: the ``number``-th of its name on such a file."""

    name: str
    role: str
    number: int

    def __str__(self) -> str:
        return f"{self.name}/{self.role}/{self.number}".replace(" ", "-")


class Kind(Enum):
    KILL_BEFORE = "killed-before"
    KILL_AFTER = "killed-after"
    EIO = "EIO"
    ENOSPC = "ENOSPC"
    EINTR = "EINTR"
    SHORT = "short"

    @property
    def kills(self) -> bool:
        return self in (Kind.KILL_BEFORE, Kind.KILL_AFTER)

    def applies(self, call: Call) -> bool:
        # A datagram is sent whole or not at all.
        return self is not Kind.SHORT or (call.name in _WRITES and call.role != DATAGRAM)


class Fault(NamedTuple):
    """What happens at which call."""

    kind: Kind
    call: Call

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.call}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        kind, _, call = text.partition(":")
        name, role, number = call.split("/")
        return cls(Kind(kind), Call(name, role.replace("-", " "), int(number)))


class Event(NamedTuple):
    """A call with the paths it was made on."""

    call: Call
    paths: tuple[str, ...]


@dataclass
class Traced:
    """How a run ended.

    Attributes:
        events: the calls that it made, until it was struck.
        struck: whether the fault's call was reached.
        status: exit code, or the negative number of the signal that ended it; None if it had to be ended here.
        said: what the process said.
    """

    events: list[Event] = field(default_factory=list)
    struck: bool = False
    status: int | None = None
    said: list[Any] = field(default_factory=list)


def why_not() -> str:
    """Why nothing can be traced here; empty if it can."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return "the tracer knows the registers of Linux on x86-64 only"
    pid = os.fork()
    if pid == 0:
        os._exit(0 if _libc.ptrace(_TRACEME, 0, None, None) == 0 else 1)
    return "ptrace is not permitted here" if os.waitpid(pid, 0)[1] else ""


# ---- children -------------------------------------------------------------------------------------------------


class Child:
    """A forked process that does ``work(say, begin)``; what it says is collected.

    It is traced from when it calls ``begin``; untraced if it never does, or if ``begin`` is not asked for.
    """

    def __init__(self, work: Callable[[Callable[[Any], None], Callable[[], None]], None]) -> None:
        self._readable, writable = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid:
            os.close(writable)
            _living[self.pid] = None
            return
        os.close(self._readable)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a harness that is killed leaves nothing behind

        def say(value: Any) -> None:
            data = pickle.dumps(value)
            data = len(data).to_bytes(4, "big") + data
            while data:
                data = data[os.write(writable, data) :]

        code = 1
        try:
            work(say, _be_traced)
            code = 0
        except BaseException as error:
            with suppress(Exception):
                say(("error", f"{type(error).__name__}: {error}"))
        finally:
            os._exit(code)

    def kill(self, number: int = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def stop(self) -> None:
        """SIGSTOP; returns when every thread of it stands still."""
        self.kill(signal.SIGSTOP)
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline and not self.ended:
            with suppress(OSError), open(f"/proc/{self.pid}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] in (b"T", b"t", b"Z"):
                    return
            _reap(os.WNOHANG)

    @property
    def ended(self) -> bool:
        return _living[self.pid] is not None

    def wait(self, timeout_s: float = 60.0) -> int | None:
        """Exit code, or the negative number of a signal; None if it did not end in time, and was killed."""
        deadline = time.monotonic() + timeout_s
        while _living[self.pid] is None:
            if time.monotonic() > deadline:
                self.kill()
                _reap(0)
                return None
            if not _reap(os.WNOHANG):
                time.sleep(0.001)
        return _living[self.pid]

    def said(self) -> list[Any]:
        """What it has said; waits until it, and what it forked, are gone."""
        with open(self._readable, "rb") as pipe:
            data = pipe.read()
        found = []
        while len(data) >= 4:
            nbytes = int.from_bytes(data[:4], "big")
            if len(data) < 4 + nbytes:
                break  # it died in the middle of a word
            found.append(pickle.loads(data[4 : 4 + nbytes]))
            data = data[4 + nbytes :]
        return found


_living: dict[int, int | None] = {}


def _reap(options: int) -> bool:
    try:
        pid, status = os.waitpid(-1, options | _WALL)
    except ChildProcessError:
        return False
    return _note(pid, status)


def _note(pid: int, status: int) -> bool:
    if pid in _living and (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
        _living[pid] = os.waitstatus_to_exitcode(status)
    return pid != 0


def _be_traced() -> None:
    if _libc.ptrace(_TRACEME, 0, None, None) != 0:
        raise OSError(ctypes.get_errno(), "ptrace(PTRACE_TRACEME)")
    os.kill(os.getpid(), signal.SIGSTOP)


class _Late(Exception):
    pass


@contextmanager
def _alarm(timeout_s: float) -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---- the tracer -----------------------------------------------------------------------------------------------


class Tracer:
    """Follows one child and strikes it.

    Args:
        child: which calls ``begin``.
        role_of: what a path is to the operation; empty for files that are none of its own.
        fault: where to strike; None to record only.
    """

    def __init__(self, child: Child, role_of: Callable[[str], str], fault: Fault | None = None) -> None:
        self.child = child
        self.result = Traced()
        self._role_of, self._fault = role_of, fault
        self._counts: Counter[tuple[str, str]] = Counter()
        self._at_exit: dict[int, Callable[[int], None]] = {}
        self._known: set[int] = set()
        self._info, self._regs = _Info(), _Regs()
        self._memory: int = -1
        self._request = _SYSCALL

    def run(self, timeout_s: float, until: Child | None = None) -> Traced:
        """Until the child is gone; or another one, whereupon the child is killed."""
        result = self.result
        try:
            with _alarm(timeout_s):
                while _living[self.child.pid] is None and (until is None or _living[until.pid] is None):
                    self._turn()
        except _Late:
            result.status = None
        else:
            result.status = _living[self.child.pid]
        if _living[self.child.pid] is None:
            self.child.kill()
            while _living[self.child.pid] is None:
                _reap(0)
        if self._memory >= 0:
            os.close(self._memory)
        return result

    def _turn(self) -> None:
        tid, status = os.waitpid(-1, _WALL)
        if not os.WIFSTOPPED(status):
            _note(tid, status)
            return
        number, event = os.WSTOPSIG(status), status >> 16
        deliver = 0
        if tid not in self._known:
            self._known.add(tid)
            if tid == self.child.pid:  # its own SIGSTOP
                _libc.ptrace(_SETOPTIONS, tid, None, _OPTIONS)
                self._memory = os.open(f"/proc/{tid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        elif number == signal.SIGTRAP | 0x80:
            self._on_call(tid)
        elif event or number == signal.SIGTRAP:
            pass
        elif number == signal.SIGSTOP and tid == self.child.pid:
            self._request = _CONT  # it says that the operation is over
        else:
            deliver = number
        if self.result.struck and not self._at_exit and self._fault is not None:
            self._request = _CONT
        _libc.ptrace(self._request, tid, None, deliver)

    def _on_call(self, tid: int) -> None:
        if _libc.ptrace(_GET_SYSCALL_INFO, tid, ctypes.sizeof(self._info), ctypes.addressof(self._info)) < 0:
            return  # killed meanwhile
        if self._info.op == _ENTRY:
            found = _CALLS.get(self._info.nr)
            if found is not None and not (self.result.struck and self._fault is not None):
                self._on_entry(tid, *found)
        elif self._info.op == _EXIT and tid in self._at_exit:
            self._at_exit.pop(tid)(tid)

    def _on_entry(self, tid: int, name: str, kind: str, where: tuple[int, ...]) -> None:
        fault = self._fault
        if fault is not None and name != fault.call.name:
            return
        args = list(self._info.args)
        paths = tuple(path for index in where if (path := self._path(tid, kind, args[index])))
        if name in ("newfstatat", "statx") and not paths:
            paths = (self._path(tid, _FD, args[0]),)
        role = "socket" if kind == _MADE else next(filter(None, map(self._role_of, reversed(paths))), "")
        if name == "sendto" and args[4]:
            role = DATAGRAM
        if not role:
            return
        self._counts[name, role] += 1
        call = Call(name, role, self._counts[name, role])
        if fault is None:
            self.result.events.append(Event(call, paths))
        elif fault.call == call:
            self.result.struck = True
            self._strike(tid, fault)

    def _path(self, tid: int, kind: str, arg: int) -> str:
        if kind == _PATH:
            path = self._string(arg)
            if not path.startswith("/proc/self/fd/"):
                return path
            number, slash, rest = path.removeprefix("/proc/self/fd/").partition("/")
            return self._path(tid, _FD, int(number)) + slash + rest
        fd = ctypes.c_int(arg & 0xFFFFFFFF).value
        if fd < 0:
            return ""
        try:
            return os.readlink(f"/proc/{tid}/fd/{fd}").removesuffix(" (deleted)")
        except OSError:
            return ""

    def _string(self, address: int) -> str:
        data = b""
        while b"\0" not in data and len(data) < 8192:
            try:
                more = os.pread(self._memory, 4096 - address % 4096, address)
            except OSError:
                return ""
            if not more:
                return ""
            data += more
            address += len(more)
        return os.fsdecode(data.partition(b"\0")[0])

    def _strike(self, tid: int, fault: Fault) -> None:
        kind = fault.kind
        if kind is Kind.KILL_BEFORE:
            self._change(tid, orig_rax=-1)
            self.child.kill()
        elif kind is Kind.KILL_AFTER:
            self._at_exit[tid] = lambda tid: self.child.kill()
        elif kind is Kind.SHORT:
            self._get(tid)
            count = self._regs.rdx
            self._change(tid, rdx=max(count // 2, 1))
            # Callers rely on it that the kernel leaves this register alone.
            self._at_exit[tid] = lambda tid: self._change(tid, rdx=count)
        else:
            if fault.call.name != "close":
                self._change(tid, orig_rax=-1)
            code = getattr(errno, kind.name)
            self._at_exit[tid] = lambda tid: self._change(tid, rax=-code)

    def _get(self, tid: int) -> None:
        _libc.ptrace(_GETREGS, tid, None, ctypes.addressof(self._regs))

    def _change(self, tid: int, **registers: int) -> None:
        self._get(tid)
        for name, value in registers.items():
            setattr(self._regs, name, value & (1 << 64) - 1)
        _libc.ptrace(_SETREGS, tid, None, ctypes.addressof(self._regs))


def over() -> None:
    """In a traced child: the operation is over, what follows is not counted."""
    os.kill(os.getpid(), signal.SIGSTOP)


ROLES: Final = [
    (re.compile(pattern), role)
    for pattern, role in (
        (r"\.epoch", "epoch"),
        (r"\.epoch\.[0-9a-f]{8}\.tmp", "new epoch"),
        (r"step-\d+_ckpt__\d+__unfinished", "marker"),
        (r"step-\d+_ckpt", "container"),
        (r"step-\d+_ckpt/\.metadata", "manifest"),
        (r"step-\d+_ckpt/\.metadata\.[0-9a-f]{8}\.tmp", "new manifest"),
        (r"step-\d+_ckpt/rank\d+-\d+\.safetensors", "object"),
        (r"step-\d+_ckpt/.*\.tmp", "new object"),
        (r"step-\d+_ckpt/.*", "other in container"),
        (r"\.pool", "pool"),
        (r"\.pool/.*", "pool file"),
        (r"\.agent", "agent folder"),
        (r"\.agent/.*\.[0-9a-f]{8}\.tmp", "new agent file"),
        (r"\.agent/.*", "agent file"),
        (r"\.fetched(/.*)?", "fetched"),
        (r"\.drains(/.*)?", "drain record"),
        (r"\.flashpoint.*", "owner"),
        (r"", "root"),
    )
]


def roles_below(roots: dict[str, str]) -> Callable[[str], str]:
    """A function from a path to its role: of the first of ``roots`` (folder -> word before the role) it lies in."""

    def role_of(path: str) -> str:
        if path.startswith("socket:"):
            return "socket"
        for root, prefix in roots.items():
            if path == root or path.startswith(f"{root}/"):
                name = path[len(root) + 1 :]
                role = next((role for pattern, role in ROLES if pattern.fullmatch(name)), "other")
                return f"{prefix} {role}".strip()
        return ""

    return role_of
