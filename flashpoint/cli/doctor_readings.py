"""What `flashpoint doctor` reads of this host, so that its checks need to read nothing."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import resource
import socket
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from flashpoint.buffers import POOL_NAME
from flashpoint.cli.discovery import job_roots_of_this_user
from flashpoint.cli.doctor_measurements import MEMORY_BYTES, Rates, measure
from flashpoint.cli.versions import COMPLETE, DIRTY, manager, versions_in
from flashpoint.config import FlashpointConfig
from flashpoint.errors import ConfigError
from flashpoint.memory import Mount, cgroup_memory_limit, cgroup_memory_used, file_system, mount_of

UNLIMITED: Final = -1
_TIME_ERROR: Final = 5  # adjtimex(2): the clock is not synchronised
_TIMEX_BYTES: Final = 512  # more than any struct timex has
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?\s*(?:>=\s*([0-9][0-9.]*))?\s*(;.*)?$")


@dataclass(frozen=True)
class Package:
    """A library that Flashpoint uses.

    Attributes:
        installed: its version; empty where it is not installed.
        at_least: the version that is needed; empty for any.
        is_optional: whether only an extra needs it.
    """

    name: str
    installed: str
    at_least: str
    is_optional: bool


@dataclass(frozen=True)
class Leftover:
    """A job root of this user that nobody uses: no agent, no trainer and no save that could be seen."""

    path: str
    nbytes: int
    versions: int
    dirty: int
    age_s: float


@dataclass(frozen=True, kw_only=True)
class Readings:
    """All that the checks go by. Sizes are in bytes; -1 is no limit, and None what could not be read.

    Attributes:
        place: the folder that was looked at: the job root, or where job roots usually are.
        mode: of the job root; None where none was given, or it is not there yet.
        version_bytes: of the newest complete version of the job root on this node.
        reusable_bytes: of its buffers that no version names.
        checkpoint_bytes: of all buffers of this user's job roots on this file system.
        shmem_huge: what /sys says of huge pages for shared memory, such as ``never``; empty without such pages.
        memlock, nofile: soft and hard limit.
        taken_ports: of ``wanted_ports``, those that something listens on.
        listen_error: why no port can be listened on; empty if one can.
        settings_error: why FLASHPOINT_* variables cannot be used; empty if they can.
        measure_error: why ``rates`` is None, though it was asked for.
    """

    place: str
    job_root: str | None = None
    mode: int | None = None
    owner: int | None = None
    user: int = field(default_factory=os.geteuid)
    mount: Mount | None = None
    total_bytes: int = 0
    free_bytes: int = 0
    version_bytes: int = 0
    reusable_bytes: int = 0
    checkpoint_bytes: int = 0
    memory_total: int | None = None
    memory_available: int | None = None
    swap_total: int | None = None
    swap_free: int | None = None
    shmem_huge: str = ""
    kernel: tuple[int, int] | None = None
    memlock: tuple[int, int] = (UNLIMITED, UNLIMITED)
    nofile: tuple[int, int] = (UNLIMITED, UNLIMITED)
    cgroup_limit: int | None = None
    cgroup_used: int | None = None
    in_container: bool = False
    has_gpu: bool = False
    port_range: tuple[int, int] | None = None
    reserved_ports: str = ""
    wanted_ports: tuple[int, ...] = ()
    taken_ports: tuple[int, ...] = ()
    listen_error: str = ""
    is_clock_synchronised: bool | None = None
    clock_source: str = ""
    python: tuple[int, int, int] = (0, 0, 0)
    packages: tuple[Package, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    settings_error: str = ""
    rates: Rates | None = None
    measure_error: str = ""


def read(job_root: str | None, place: str, *, is_quick: bool = False) -> Readings:
    """Read everything; nothing of it raises but a ``place`` that is not there.

    Args:
        place: an existing folder on the file system to look at.
        is_quick: measure no rates.
    """
    fs, mount = file_system(place), mount_of(place)
    status = os.stat(place)
    memory = _meminfo()
    wanted, settings_error = _wanted_ports()
    rates, measure_error = (
        (None, "") if is_quick else _rates(place, fs.free_bytes, memory.get("MemAvailable"))
    )
    is_root = job_root is not None and place == job_root
    return Readings(
        place=place,
        job_root=job_root,
        mode=stat.S_IMODE(status.st_mode) if is_root else None,
        owner=status.st_uid if is_root else None,
        mount=mount,
        total_bytes=fs.total_bytes,
        free_bytes=fs.free_bytes,
        version_bytes=_version_bytes(place) if is_root else 0,
        reusable_bytes=_reusable_bytes(place) if is_root else 0,
        checkpoint_bytes=sum(
            _sum_of_pool(root, lambda status: True) for root in job_roots_of_this_user([fs.mount_point])
        ),
        memory_total=memory.get("MemTotal"),
        memory_available=memory.get("MemAvailable"),
        swap_total=memory.get("SwapTotal"),
        swap_free=memory.get("SwapFree"),
        shmem_huge=_chosen(_text("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        kernel=_kernel(platform.release()),
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK),
        nofile=resource.getrlimit(resource.RLIMIT_NOFILE),
        cgroup_limit=cgroup_memory_limit(),
        cgroup_used=cgroup_memory_used(),
        in_container=_in_container(),
        has_gpu=os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd"),
        port_range=_pair(_text("/proc/sys/net/ipv4/ip_local_port_range")),
        reserved_ports=_text("/proc/sys/net/ipv4/ip_local_reserved_ports"),
        wanted_ports=wanted,
        taken_ports=tuple(port for port in wanted if _listen_error(port)),
        listen_error=_listen_error(0),
        is_clock_synchronised=_is_clock_synchronised(),
        clock_source=_text("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        python=sys.version_info[:3],
        packages=tuple(_packages()),
        leftovers=tuple(_leftovers(job_root, fs.mount_point)),
        settings_error=settings_error,
        rates=rates,
        measure_error=measure_error,
    )


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(4096).strip()
    except OSError:
        return ""


def _chosen(text: str) -> str:
    """``never`` of ``always within_size advise [never] deny force``."""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else ""


def _pair(text: str) -> tuple[int, int] | None:
    numbers = text.split()
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 else None


def _kernel(release: str) -> tuple[int, int] | None:
    match = re.match(r"([0-9]+)\.([0-9]+)", release)
    return (int(match[1]), int(match[2])) if match else None


def _meminfo() -> dict[str, int]:
    found = {}
    for line in _text("/proc/meminfo").splitlines():
        match = re.fullmatch(r"(\w+):\s+([0-9]+) kB", line)
        if match:
            found[match[1]] = int(match[2]) << 10
    return found


def _in_container() -> bool:
    return (
        any(os.path.exists(path) for path in ("/.dockerenv", "/run/.containerenv"))
        or "KUBERNETES_SERVICE_HOST" in os.environ
    )


def _wanted_ports() -> tuple[tuple[int, ...], str]:
    try:
        config = FlashpointConfig.from_env()
    except ConfigError as error:
        return (), str(error)
    return tuple(port for port in (config.agent_port, config.agent_bulk_port) if port), ""


def _listen_error(port: int) -> str:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _is_clock_synchronised() -> bool | None:
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR


def _packages() -> list[Package]:
    try:
        requirements = importlib.metadata.requires("flashpoint") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found: dict[str, Package] = {}
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if (
            match is None
            or "extra == 'dev'" in (match[3] or "").replace('"', "'")
            or match[1] == "flashpoint"
        ):
            continue
        try:
            installed = importlib.metadata.version(match[1])
        except importlib.metadata.PackageNotFoundError:
            installed = ""
        package = Package(match[1], installed, match[2] or "", bool(match[3]))
        if match[1] not in found or not package.is_optional:
            found[match[1]] = package
    return list(found.values())


def _version_bytes(job_root: str) -> int:
    complete = (version.nbytes for version in versions_in(manager(job_root)) if version.state == COMPLETE)
    return next(complete, 0)


def _reusable_bytes(job_root: str) -> int:
    return _sum_of_pool(job_root, lambda status: status.st_nlink == 1)


def _sum_of_pool(job_root: str, counts: Callable[[os.stat_result], bool]) -> int:
    total = 0
    try:
        names = os.listdir(f"{job_root}/{POOL_NAME}")
    except OSError:
        return 0
    for name in names:
        try:
            status = os.stat(f"{job_root}/{POOL_NAME}/{name}", follow_symlinks=False)
        except OSError:
            continue
        total += status.st_blocks * 512 if counts(status) else 0
    return total


def _leftovers(job_root: str | None, mount_point: str) -> list[Leftover]:
    from flashpoint.cli.agents import users_of

    found = []
    for root in job_roots_of_this_user([mount_point]):
        try:
            if root == job_root or users_of(root):
                continue
            versions = versions_in(manager(root))
            newest_s = max((v.created_unix_s for v in versions), default=os.stat(root).st_mtime)
        except OSError:
            continue  # deleted since it was found
        dirty = sum(version.state == DIRTY for version in versions)
        nbytes = _sum_of_pool(root, lambda status: True)
        found.append(Leftover(root, nbytes, len(versions), dirty, max(time.time() - newest_s, 0.0)))
    return found


def _rates(place: str, free_bytes: int, available_bytes: int | None) -> tuple[Rates | None, str]:
    room = min(free_bytes, (available_bytes or free_bytes) // 2)
    if room < 2 * MEMORY_BYTES:
        return None, "too little memory is free"
    try:
        return measure(place), ""
    except OSError as error:
        return None, error.strerror or str(error)
