"""A node's agent: the process that copies complete versions to peers, serves them, and outlives the trainer.

There is one for each job root; whoever holds ``.agent/lock`` is it. `start_agent` makes it a process of its
own, `EmbeddedAgent` a thread of the trainer (which does not outlive it), and ``python -m flashpoint agent``
runs it in the foreground, as a side-car. What it does is in `flashpoint.replication.manager`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

import flashpoint
from flashpoint import trace
from flashpoint.config import FlashpointConfig
from flashpoint.errors import DeadlineError, ReplicationError
from flashpoint.replication.agent_folder import AGENT_NAME, AgentFolder, HeldLock, wait_until_free
from flashpoint.replication.client import AgentClient
from flashpoint.replication.orders import Identity
from flashpoint.telemetry import logger

FINE: Final = 0
ALREADY_RUNS: Final = 3  # exit code: the job root has another agent

START_S: Final = 30.0
STOP_S: Final = 10.0  # from the wish to the end of the process, whatever it is at
_WATCH_S: Final = 0.5
_STARTS_MAX: Final = 3
_NICE: Final = 10
_COMMAND: tuple[str, ...] = ("-P", "-m", "flashpoint", "agent")  # -P: nothing is imported from the cwd

# mallopt(3), from glibc's malloc.h
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MMAP_FROM_BYTES: Final = 8 << 20  # well above a frame
_KEEP_FREED_BYTES: Final = 64 << 20  # well above the credit of a node


class Manager(Protocol):
    """What an agent runs: `flashpoint.replication.manager.ReplicationManager`."""

    released: bool

    @property
    def idle_s(self) -> float: ...
    def run(self) -> None: ...
    def stop(self) -> None: ...


class ManagerFactory(Protocol):
    def __call__(
        self, job_root: str, *, config: FlashpointConfig, host: str, port: int, bulk_port: int
    ) -> Manager: ...


class _Tenure:
    """One agent's time in office: it has the lock, and ends when nobody needs it any more.

    Args:
        owns_process: it may end the process, where it does not come to an end by itself.
    """

    def __init__(
        self,
        folder: AgentFolder,
        lock: HeldLock,
        config: FlashpointConfig,
        factory: ManagerFactory | None,
        *,
        owns_process: bool,
    ) -> None:
        self._folder, self._lock, self._config = folder, lock, config
        self._owns_process = owns_process
        self._stopping = False
        self._over = threading.Event()
        # Peers look for a restarted agent where it was. But this host may have another address by now,
        # and that port may be somebody else's.
        last = folder.read_ports()
        host = config.agent_host or (last.host if _can_listen(last.host, 0) else "")
        self._manager = (factory or _replication_manager)(
            folder.job_root,
            config=config,
            host=host,
            port=config.agent_port or (last.port if _can_listen(host, last.port) else 0),
            bulk_port=config.agent_bulk_port or (last.bulk_port if _can_listen(host, last.bulk_port) else 0),
        )

    def run(self) -> None:
        """Work until it is over; the lock is free then."""
        watch = threading.Thread(target=self._watch, name="flashpoint-agent-watch", daemon=True)
        watch.start()
        try:
            self._manager.run()
        finally:
            self._over.set()
            watch.join()
            self._lock.release()
            self._folder.close()

    def stop(self, reason: str) -> None:
        """From any thread, or a signal's handler. Only the first call counts: its deadline stands."""
        if self._stopping or self._over.is_set():
            return
        self._stopping = True
        logger.info("the agent of %s ends: %s", self._folder.job_root, reason)
        if self._owns_process:
            signal.alarm(int(STOP_S))  # the kernel ends the process then, whatever hangs here
        self._manager.stop()

    def _watch(self) -> None:
        while not self._over.wait(_WATCH_S):
            self._folder.trim_log()
            reason = self._reason_to_end()
            if reason:
                self.stop(reason)

    def _reason_to_end(self) -> str:
        if not self._lock.is_current:
            return "the job root was deleted"
        try:
            idle_s = self._manager.idle_s
        except RuntimeError:  # the manager changed what this thread looked at: it is not idle
            return ""
        if idle_s > self._config.agent_idle_s and not self._folder.has_users():
            return f"no trainer lives, and nobody has asked for anything for {idle_s:.0f} s"
        return ""


def _replication_manager(
    job_root: str, *, config: FlashpointConfig, host: str, port: int, bulk_port: int
) -> Manager:
    from flashpoint.replication.manager import ReplicationManager

    return ReplicationManager(job_root, config=config, host=host, port=port, bulk_port=bulk_port)


# ---- as a process --------------------------------------------------------------------------------


def run_agent(
    job_root: str,
    *,
    config: FlashpointConfig | None = None,
    manager_factory: ManagerFactory | None = None,
    on_ready: Callable[[], None] | None = None,
    log_level: int = logging.WARNING,
) -> int:
    """Be the agent of a job root, in this process; returns its exit code.

    It ends when it is told to (SIGTERM, SIGINT, `Release`), when the job root is deleted, or when no trainer
    lives and nobody has asked for anything for ``config.agent_idle_s``.

    Args:
        on_ready: called when it takes orders.
    """
    logging.basicConfig(format="%(asctime)s %(process)d %(levelname)s %(message)s")
    logger.setLevel(log_level)
    trace.name_process("agent")
    config = config or FlashpointConfig.from_env()
    _give_way()
    keep_freed_memory()
    _open_many_files()
    folder = AgentFolder(job_root)
    lock = folder.take_lock()
    if lock is None:
        words = " ".join((folder.agent() or "").split())
        folder.close()
        logger.error("%s has an agent already: %s", job_root, words)
        return ALREADY_RUNS
    try:
        tenure = _Tenure(folder, lock, config, manager_factory, owns_process=True)
    except BaseException:
        lock.release()
        raise

    def on_signal(number: int, frame: object) -> None:
        tenure.stop(signal.Signals(number).name)

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    logger.info("the agent of %s begins", job_root)
    if on_ready is not None:
        on_ready()
    tenure.run()
    signal.alarm(0)
    return FINE


def detach() -> Callable[[], None]:
    """Go on in a child process that nobody has for a child.

    This process waits until the child calls what is returned, and ends then; or ends with the child's exit
    code, if that comes first. Launchers that end a trainer with all of its descendants do not find the child.
    """
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(readable)

        def ready() -> None:
            with contextlib.suppress(
                BrokenPipeError
            ):  # nobody waits any more; the agent is there all the same
                os.write(writable, b".")
            os.close(writable)

        return ready
    os.close(writable)
    if os.read(readable, 1):
        os._exit(FINE)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def _give_way() -> None:
    """Lower this process's priority: a trainer beside it then keeps 93-100% of its speed when cores are short.

    A thread of the trainer can't do the same. One that gives way while it holds the GIL holds everybody up.
    """
    with contextlib.suppress(OSError):
        os.nice(max(_NICE - os.getpriority(os.PRIO_PROCESS, 0), 0))
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def keep_freed_memory() -> None:
    """Have malloc keep what frames are received into.

    libzmq allocates every frame it receives. By default glibc may map a large one anew and unmap it again, and each
    then costs page faults all over. What was measured as the fastest way to receive had this set.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):  # musl and others have no mallopt, or one that does nothing
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_FROM_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEEP_FREED_BYTES)


def _can_listen(host: str, port: int) -> bool:
    """Whether this process could listen there now; port 0 asks for the host alone."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last agent's connections linger
            probe.bind(address)
            probe.listen(1)
        return True
    except OSError:
        return False


def _open_many_files() -> None:
    """A buffer takes two descriptors, one of them its mapping's; a connection takes one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# ---- for a trainer -------------------------------------------------------------------------------


def start_agent(
    job_root: str, config: FlashpointConfig | None = None, timeout_s: float = START_S
) -> Identity:
    """Have an agent for the job root, started now if none lives; returns who it is, once it answers.

    Any number of processes may call this at once: the lock lets one agent live.

    Raises:
        ReplicationError: it does not start, or not in time; the message ends with the last lines of its log.
    """
    deadline = time.monotonic() + timeout_s
    config = config or FlashpointConfig.from_env()
    folder = AgentFolder(job_root)
    reason = ""
    try:
        with AgentClient(job_root) as client:
            for _ in range(_STARTS_MAX):
                if folder.agent() is None:
                    code = _spawn(folder, config, deadline)
                    if code not in (FINE, ALREADY_RUNS):
                        reason = f"it ended with exit code {code}"
                        break
                try:
                    return client.identify(max(deadline - time.monotonic(), 0.0))
                except DeadlineError:
                    reason = f"it does not answer within {timeout_s:g} s"
                    break
                except ReplicationError as error:
                    reason = str(error)  # it ended this very moment: the next one will live longer
        tail = folder.log_tail()
        raise ReplicationError(
            f"the agent of {job_root} did not start: {reason}"
            + (f"; its log ends with:\n{tail}" if tail else "")
        )
    finally:
        folder.close()


def _spawn(folder: AgentFolder, config: FlashpointConfig, deadline: float) -> int:
    """Start an agent that belongs to nobody; returns 0 when it takes orders, or its exit code."""
    if not sys.executable:
        raise ReplicationError(
            "this Python does not know its own executable: run `flashpoint agent` beside it"
        )
    log = folder.open_log()
    try:
        process = subprocess.Popen(
            [sys.executable, *_COMMAND, folder.job_root, "--detached"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",  # it must not keep a file system from being unmounted
            env=_environment(config),
            start_new_session=True,  # not ended with the trainer's terminal or process group
        )
    finally:
        os.close(log)
    try:
        return process.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        raise ReplicationError(
            f"the agent of {folder.job_root} did not start in time; its log ends with:\n{folder.log_tail()}"
        ) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _environment(config: FlashpointConfig) -> dict[str, str]:
    environ = {**os.environ, **config.to_env()}
    if path := environ.get(trace.VARIABLE):
        environ[trace.VARIABLE] = os.path.abspath(path)  # it has another working folder
    # numpy's linear algebra would start a thread for every core, and has nothing to do here.
    environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    place = os.path.dirname(os.path.dirname(os.path.abspath(flashpoint.__file__)))
    if place not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (environ.get("PYTHONPATH"), place)))
    return environ


def stop_agent(job_root: str, timeout_s: float = STOP_S) -> bool:
    """Have the job root's agent end now, whatever it is copying; False where it has none.

    Raises:
        DeadlineError: it did not end in time.
    """
    try:
        folder = AgentFolder(job_root, create=False)
    except ReplicationError:
        if os.path.lexists(os.path.join(job_root, AGENT_NAME)):
            raise
        return False
    try:
        with AgentClient(job_root) as client:
            about = folder.agent()
            if about is None:
                return False
            with contextlib.suppress(ReplicationError):  # it ended this very moment
                client.release(0.0, timeout_s)
        if not wait_until_free(folder, timeout_s):
            words = " ".join(about.split())
            raise DeadlineError(
                f"the agent of {job_root} ({words}) did not end within {timeout_s:g} s: kill it"
            )
        return True
    finally:
        folder.close()


# ---- as a thread ---------------------------------------------------------------------------------


class EmbeddedAgent:
    """The agent as a thread of this process: no process to look after, but what it copies ends with the trainer.

    Args:
        job_root: of this node.
        config: settings; the environment's by default.
    """

    def __init__(
        self,
        job_root: str,
        *,
        config: FlashpointConfig | None = None,
        manager_factory: ManagerFactory | None = None,
    ) -> None:
        self._job_root = job_root
        self._config = config or FlashpointConfig.from_env()
        self._factory = manager_factory
        self._tenure: _Tenure | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> bool:
        """Be the agent from now on; False where another one lives."""
        if self.is_running:
            return True
        folder = AgentFolder(self._job_root)
        lock = folder.take_lock()
        if lock is None:
            folder.close()
            return False
        try:
            self._tenure = _Tenure(folder, lock, self._config, self._factory, owns_process=False)
        except BaseException:
            lock.release()
            folder.close()
            raise
        self._thread = threading.Thread(
            target=_run_logged, args=(self._tenure, self._job_root), name="flashpoint-agent", daemon=True
        )
        self._thread.start()
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended by itself, having been released; False if it has not in time."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.is_running

    def stop(self, timeout_s: float = STOP_S) -> None:
        """End it.

        Raises:
            DeadlineError: it did not end in time.
        """
        thread, tenure = self._thread, self._tenure
        if thread is None or tenure is None:
            return
        tenure.stop("its trainer ends it")
        thread.join(timeout_s)
        if thread.is_alive():
            raise DeadlineError(f"the agent of {self._job_root} did not end within {timeout_s:g} s")
        self._thread = self._tenure = None


def _run_logged(tenure: _Tenure, job_root: str) -> None:
    try:
        tenure.run()
    except Exception:
        logger.exception("the agent of %s failed", job_root)
