"""How benchmarks measure: fresh processes, a memcpy beside every figure, medians. Imports no torch itself.

A *job* is a function named ``module:function`` that runs on one or two ranks, each a new process; it
returns plain data: samples (name, seconds, seconds of the memcpy beside it) and other facts.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import numpy as np

SHARED_MEMORY: Final = "/dev/shm"
JOB_TIMEOUT_S: Final = 300.0
SETTLE_S: Final = 0.01  # before a timed call: idle OpenMP threads spin for a few ms

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


# ---- processes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One timed call; ``memcpy_s`` is what copying the same bytes took just before and after it."""

    name: str
    seconds: float
    memcpy_s: float | None


@dataclass
class Result:
    """What a job measured. With several ranks a sample is the slowest rank's, and so is its memcpy.

    Attributes:
        facts: one dict for each rank.
        started_s: `time.perf_counter` when its processes were started.
        took_s: until they had all ended.
    """

    samples: list[Sample]
    facts: list[dict[str, Any]]
    started_s: float
    took_s: float


@contextlib.contextmanager
def job_root() -> Iterator[str]:
    """A folder on tmpfs that is gone afterwards, also where the benchmark fails or is terminated."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parent = tempfile.mkdtemp(prefix="flashpoint-bench-", dir=SHARED_MEMORY)
    try:
        yield f"{parent}/job"
    finally:
        shutil.rmtree(parent, ignore_errors=True)
        signal.signal(signal.SIGTERM, previous)


def run_job(
    target: str, arguments: Mapping[str, Any], *, ranks: int = 1, timeout_s: float = JOB_TIMEOUT_S
) -> Result:
    """Run a job in fresh processes and merge what its ranks measured.

    Raises:
        RuntimeError: a rank failed, or all took too long; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="flashpoint-bench-") as folder:
        port = _free_port()
        processes = []
        started_s = time.perf_counter()
        try:
            for rank in range(ranks):
                command = [sys.executable, "-m", "benchmarks.measure", target, json.dumps(arguments)]
                with open(f"{folder}/{rank}.log", "wb") as log:
                    processes.append(
                        subprocess.Popen(
                            [*command, f"{folder}/{rank}.json"],
                            env=_environment(rank, ranks, port),
                            stdout=log,
                            stderr=log,
                        )
                    )
            _wait_for_all(processes, started_s + timeout_s)
            took_s = time.perf_counter() - started_s
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for rank, process in enumerate(processes):
            if process.returncode != 0:
                with open(f"{folder}/{rank}.log", encoding="utf-8", errors="replace") as log:
                    tail = log.read()[-4000:]
                raise RuntimeError(f"{target} failed on rank {rank} ({process.returncode}):\n{tail}")
        answers = []
        for rank in range(ranks):
            with open(f"{folder}/{rank}.json", encoding="utf-8") as file:
                answers.append(json.load(file))
    columns = zip(*(answer["samples"] for answer in answers), strict=True)
    return Result(
        [_slowest(column) for column in columns],
        [answer["facts"] for answer in answers],
        started_s,
        took_s,
    )


def _wait_for_all(processes: Sequence[subprocess.Popen[bytes]], deadline_s: float) -> None:
    """Wait until all have ended well, one has failed, or it has been too long."""
    while time.perf_counter() < deadline_s:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            return
        time.sleep(0.01)


def _slowest(column: Sequence[Any]) -> Sample:
    name = column[0][0]
    assert all(sample[0] == name for sample in column), "ranks measured different things"
    memcpys = [sample[2] for sample in column if sample[2] is not None]
    return Sample(name, max(sample[1] for sample in column), max(memcpys, default=None))


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """As torchrun sets it: one OpenMP thread a rank where there are several."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("FLASHPOINT_")}
    found |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if ranks > 1:
        found["OMP_NUM_THREADS"] = "1"
    return found


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main(target: str, arguments: str, answer: str) -> None:
    """Run one rank of a job in this process."""
    module, _, function = target.partition(":")
    meter = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    with open(answer, "w", encoding="utf-8") as file:
        json.dump({"samples": meter.finished(), "facts": meter.facts}, file)


@contextlib.contextmanager
def busy_processes() -> Iterator[None]:
    """As many other processes as there are cores, each computing all the time."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


# ---- samples ------------------------------------------------------------------------------------


def no_barrier() -> None:
    """For a job of one rank."""


@dataclass
class Meter:
    """Collects the samples of one rank.

    Attributes:
        memcpy: gives the copy of the workload's bytes that is timed beside each call, or None while
            there is no warm mapping to copy to.
        barrier: brings all ranks to the same point, before every call that is timed.
        facts: what else is worth knowing.
    """

    memcpy: Callable[[], Callable[[], None] | None] | None = None
    barrier: Callable[[], None] = no_barrier
    facts: dict[str, Any] = field(default_factory=dict)
    _samples: list[tuple[str, float, float | None]] = field(default_factory=list)
    _before: float | None = None

    def time(self, operation: Callable[[], Any]) -> float:
        """Seconds of one call that all ranks begin together."""
        time.sleep(SETTLE_S)
        self.barrier()
        start_s = time.perf_counter()
        operation()
        return time.perf_counter() - start_s

    def call(self, name: str, operation: Callable[[], Any]) -> None:
        """Time one call, with a memcpy before and after."""
        self.take(lambda: {name: self.time(operation)})

    def take(self, measure: Callable[[], Mapping[str, float]]) -> None:
        """Take the samples that ``measure`` returns, with a memcpy before and after."""
        before = self._before if self._before is not None else self._reference()
        found = measure()
        self._before = after = self._reference()
        beside = after if before is None or after is None else (before + after) / 2
        self._samples += ((name, seconds, beside) for name, seconds in found.items())

    def forget_reference(self) -> None:
        """The last memcpy was long ago: take a new one before the next call."""
        self._before = None

    def _reference(self) -> float | None:
        copy = self.memcpy() if self.memcpy is not None else None
        if copy is None:
            return None
        seconds = self.time(copy)
        self._samples.append(("memcpy", seconds, seconds))
        return seconds

    def finished(self) -> list[tuple[str, float, float | None]]:
        """All samples; those taken before there was a memcpy get the median of the later ones."""
        memcpys = [seconds for name, seconds, _ in self._samples if name == "memcpy"]
        median = statistics.median(memcpys) if memcpys else None
        return [(name, seconds, beside or median) for name, seconds, beside in self._samples]


@dataclass(frozen=True)
class Figure:
    """Medians over samples; ``ratio`` is the median of each sample over the memcpy beside it."""

    seconds: float
    ratio: float | None
    count: int


def figure(results: Sequence[Result], name: str) -> Figure | None:
    """The medians of all samples of one name; None where there are none."""
    samples = [sample for result in results for sample in result.samples if sample.name == name]
    if not samples:
        return None
    ratios = [sample.seconds / sample.memcpy_s for sample in samples if sample.memcpy_s]
    return Figure(
        statistics.median(sample.seconds for sample in samples),
        statistics.median(ratios) if ratios else None,
        len(samples),
    )


# ---- memcpy -------------------------------------------------------------------------------------


class TmpfsFile:
    """A tmpfs file, mapped and touched: where a memcpy goes.

    Args:
        path: an existing file, or a new one if ``nbytes`` is given.
    """

    def __init__(self, path: str, nbytes: int = 0) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if nbytes:
                os.posix_fallocate(fd, 0, nbytes)
            self.data: Bytes = np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=np.uint8)
        finally:
            os.close(fd)
        # Writes what is there: every page is mapped for writing, and no byte changes.
        self.data[:: mmap.PAGESIZE] = self.data[:: mmap.PAGESIZE].copy()


class FreePoolFile:
    """The file of a job root's pool that no version needs: a place to copy to that takes no further memory.

    Its pages are those that the saves write; they are reached through a mapping of our own. Use it while
    no save is running.
    """

    def __init__(self, job_root: str, rank: int) -> None:
        self._folder = f"{job_root}/.pool"
        self._prefix = f"rank{rank:05d}-"
        self._mapped: dict[str, TmpfsFile] = {}

    def find(self, nbytes: int) -> Bytes | None:
        """The first ``nbytes`` of it; None while there is no such file."""
        for name in sorted(os.listdir(self._folder)) if os.path.isdir(self._folder) else ():
            path = f"{self._folder}/{name}"
            status = os.stat(path)
            if name.startswith(self._prefix) and status.st_nlink == 1 and status.st_size >= nbytes:
                if name not in self._mapped:
                    self._mapped[name] = TmpfsFile(path)
                return self._mapped[name].data[:nbytes]
        return None


def tmpfs_bytes_below(path: str) -> int:
    """Bytes of tmpfs that all files below a folder hold, each once, whatever its names."""
    blocks = {}
    for folder, _, names in os.walk(path):
        for name in names:
            status = os.stat(f"{folder}/{name}")
            blocks[status.st_ino] = status.st_blocks
    return sum(blocks.values()) * 512


def tmpfs_bytes_used(path: str) -> int:
    """Bytes in use on the file system of ``path``, by everybody."""
    usage = os.statvfs(path)
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize


# ---- jobs ---------------------------------------------------------------------------------------


def open_job(path: str, count: int) -> Meter:
    """Open a container in a process that imports neither torch nor jax."""
    import flashpoint

    meter = Meter()
    for number in range(count):
        name = "open, first" if number == 0 else "open, again"
        meter.take(lambda name=name: {name: meter.time(lambda: flashpoint.open(path).close())})
    assert "torch" not in sys.modules
    return meter


# ---- the machine --------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    """What the figures were measured on, for people."""
    with open("/proc/meminfo", encoding="ascii") as file:
        memory = {line.split(":")[0]: int(line.split()[1]) for line in file}
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "CPU": f"{_cpu()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.2f} at the start",
        "RAM": f"{memory['MemTotal'] / (1 << 20):.1f} GiB, {memory['MemAvailable'] / (1 << 20):.1f} free",
        "kernel": f"{platform.system()} {platform.release()}",
        "tmpfs": f"{SHARED_MEMORY} {_mount_options()}; huge pages: shmem {_huge('shmem_enabled')}, "
        f"anonymous {_huge('enabled')}",
        "Python": platform.python_version(),
        "torch": version_of("torch"),
        "numpy": version_of("numpy"),
        "flashpoint": version_of("flashpoint"),
    }


def cpu_seconds_of_others() -> float:
    """CPU seconds so far of everything but this process and its children that have ended (proc(5))."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    own = os.times()
    every = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return every - own.user - own.system - own.children_user - own.children_system


def version_of(package: str) -> str:
    """The version of an installed package, for people."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _huge(setting: str) -> str:
    try:
        with open(f"/sys/kernel/mm/transparent_hugepage/{setting}", encoding="ascii") as file:
            return file.read().partition("[")[2].partition("]")[0]
    except OSError:
        return "unknown"


def _mount_options() -> str:
    with open("/proc/self/mounts", encoding="utf-8") as file:
        for line in file:
            _, mount_point, kind, options, *_ = line.split(" ")
            if mount_point == SHARED_MEMORY:
                return f"({kind}, {options})"
    return "(not a mount of its own)"


if __name__ == "__main__":
    main(*sys.argv[1:])
