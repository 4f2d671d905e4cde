"""The checks of `flashpoint doctor`: what each reading means, why it matters, and the command that mends it. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from flashpoint.cli.doctor_readings import UNLIMITED, Readings
from flashpoint.cli.output import first_few, plural
from flashpoint.memory import human_bytes

Level = Literal["ok", "warn", "bad"]

_GIB: Final = 1 << 30
_SMALL_BYTES: Final = 1 << 30  # a /dev/shm of 64 MiB is what containers get by default
_MEMORY_SHARE_MAX: Final = 0.9  # of the memory, that a tmpfs may take
_FREE_SHARE_MIN: Final = 0.05
_FILES_MIN: Final = 1024
_FILES_ENOUGH: Final = 8192
_FILES_WANTED: Final = 65_536
_PORTS_MIN: Final = 2000
_POPULATE_KERNEL: Final = (5, 14)
_PYTHON: Final = (3, 11)
_MEMCPY_MIN: Final = 2 * _GIB
_RECYCLED_SHARE_MIN: Final = 0.4  # of a memcpy
_LOOPBACK_MIN: Final = _GIB // 2
_LEFT_FOR_S: Final = 3600.0
_IN_MEMORY: Final = ("tmpfs", "ramfs", "hugetlbfs")


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        value: what was read or measured, for people.
        why: one sentence: why it matters.
        fix: the command that mends it; empty where all is well.
    """

    check: str
    level: Level
    value: str
    why: str
    fix: str = ""


Check = Callable[[Readings], Iterable[Finding]]


def examine(readings: Readings) -> list[Finding]:
    """Everything that all checks find, in the order of `CHECKS`."""
    return [finding for check in CHECKS for finding in check(readings)]


# ---- the memory file system -----------------------------------------------------------------------


def file_system(r: Readings) -> Iterator[Finding]:
    kind = _kind(r)
    where = f"{kind} {r.mount.mount_point if r.mount else r.place}"
    why = "a checkpoint is saved at the speed of the file system that it lies on, and memory is the fastest"
    if kind not in _IN_MEMORY:
        yield Finding("file system", "bad", where, why, _mount(r))
    elif r.mount and "ro" in r.mount.options:
        fix = f"sudo mount -o remount,rw {r.mount.mount_point}"
        yield Finding("file system", "bad", f"{where}, read-only", "nothing can be saved there", fix)
    else:
        noexec = ", noexec (does no harm)" if r.mount and "noexec" in r.mount.options else ""
        yield Finding("file system", "ok", where + noexec, why)


def size(r: Readings) -> Iterator[Finding]:
    if _kind(r) not in _IN_MEMORY:
        return
    value = human_bytes(r.total_bytes)
    why = "two versions must fit: the one that stands and the one that is being written"
    if r.version_bytes and r.total_bytes < 2 * r.version_bytes:
        need = f"{value}, and a version takes {human_bytes(r.version_bytes)}"
        yield Finding("size", "bad", need, why, _resize(r, 3 * r.version_bytes))
    elif r.total_bytes < _SMALL_BYTES:
        yield Finding("size", "bad", value, why, _resize(r, _half_of_memory(r)))
    elif r.memory_total and r.total_bytes > _MEMORY_SHARE_MAX * r.memory_total:
        value = f"{value} of {human_bytes(r.memory_total)} memory"
        why = "a tmpfs that may take nearly all memory ends in the kernel killing the trainer, not in a skipped save"
        yield Finding("size", "warn", value, why, _resize(r, _half_of_memory(r)))
    else:
        yield Finding("size", "ok", value, why)


def room(r: Readings) -> Iterator[Finding]:
    value = f"{human_bytes(r.free_bytes)} free"
    if r.reusable_bytes:
        value += f", and {human_bytes(r.reusable_bytes)} in buffers to be written again"
    why = "a save that finds no room is skipped"
    fix = "flashpoint ls; flashpoint rm JOB_ROOT STEP..."
    others = r.total_bytes - r.free_bytes - r.checkpoint_bytes
    if others > 0.1 * r.total_bytes:
        value += f"; {human_bytes(others)} are no checkpoints of this user"
        place = r.mount.mount_point if r.mount else r.place
        fix = f"du -ah {place} | sort -h | tail  # then delete what need not be there; or {fix}"
    if r.free_bytes + r.reusable_bytes < r.version_bytes:
        yield Finding("room", "bad", f"{value}; a version takes {human_bytes(r.version_bytes)}", why, fix)
    elif r.free_bytes + r.reusable_bytes < _FREE_SHARE_MIN * r.total_bytes:
        yield Finding("room", "bad" if r.free_bytes == 0 else "warn", value, why, fix)
    else:
        yield Finding("room", "ok", value, why)


def owner(r: Readings) -> Iterator[Finding]:
    if r.mode is None:
        return
    why = "whoever can write there can change what the job goes on from, and who can read there has the model"
    if r.owner != r.user:
        value = f"{r.place} belongs to user {r.owner}, this is user {r.user}"
        yield Finding("owner", "bad", value, why, f"sudo chown -R {r.user} {r.place}")
    elif r.mode & 0o077:
        yield Finding("owner", "warn", f"mode {r.mode:04o}", why, f"chmod 700 {r.place}")
    else:
        yield Finding("owner", "ok", f"user {r.owner}, mode {r.mode:04o}", why)


def huge_pages(r: Readings) -> Iterator[Finding]:
    if not r.mount or _kind(r) != "tmpfs":
        return
    chosen = r.mount.option("huge") or "never"
    why = "with pages of 2 MiB a first save, and a first read after a restart, take a fraction of the time"
    if not r.shmem_huge:
        yield Finding("huge pages", "ok", "this kernel has none for tmpfs", why)
    elif r.shmem_huge == "deny" or chosen in ("never", "advise"):
        fix = f"sudo mount -o remount,huge=within_size {r.mount.mount_point}"
        if r.shmem_huge == "deny":
            fix = f"echo never | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled; {fix}"
        yield Finding("huge pages", "warn", f"huge={chosen}, /sys says {r.shmem_huge}", why, fix)
    else:
        yield Finding("huge pages", "ok", f"huge={chosen}", why)


# ---- memory ---------------------------------------------------------------------------------------


def memory(r: Readings) -> Iterator[Finding]:
    if _kind(r) not in _IN_MEMORY or r.memory_available is None or r.memory_total is None:
        return
    value = f"{human_bytes(r.memory_available)} of {human_bytes(r.memory_total)} available"
    why = "where the tmpfs promises more than there is, the kernel kills a process instead of a save being skipped"
    # What is free in the tmpfs must come out of the available memory.
    if r.memory_available < 0.5 * r.free_bytes:
        value += f", the tmpfs would give {human_bytes(r.free_bytes)}"
        yield Finding(
            "memory", "warn", value, why, f"export FLASHPOINT_MEMORY_LIMIT_BYTES={_memory_limit(r)}"
        )
    else:
        yield Finding("memory", "ok", value, why)


def cgroup(r: Readings) -> Iterator[Finding]:
    why = "a checkpoint in tmpfs counts as memory of the container, beside the trainer's own"
    if r.cgroup_limit is None:
        yield Finding("cgroup", "ok", "no memory limit", why)
        return
    used = r.cgroup_used or 0
    value = f"{human_bytes(used)} of {human_bytes(r.cgroup_limit)} used"
    fix = "raise resources.limits.memory of the pod, or docker run --memory"
    if r.cgroup_limit - used < r.version_bytes:
        value += f", a version takes {human_bytes(r.version_bytes)}"
        yield Finding("cgroup", "bad", value, why, fix)
    elif r.cgroup_limit < r.total_bytes:
        value += f", the tmpfs would give {human_bytes(r.total_bytes)}"
        limit = f"export FLASHPOINT_MEMORY_LIMIT_BYTES={_gib(r.cgroup_limit // 2)}"
        yield Finding("cgroup", "warn", value, why, f"{limit}  # or {fix}")
    else:
        yield Finding("cgroup", "ok", value, why)


def swap(r: Readings) -> Iterator[Finding]:
    if r.swap_total is None:
        return
    why = "what the kernel swaps out of a tmpfs is saved and loaded at the speed of a disk"
    if r.swap_total == 0 or (r.mount and "noswap" in r.mount.options):
        yield Finding("swap", "ok", "none" if r.swap_total == 0 else "not for this tmpfs (noswap)", why)
        return
    used = r.swap_total - (r.swap_free or 0)
    fix = "sudo swapoff -a"
    if r.kernel and r.kernel >= (6, 4):
        fix += f"  # or a tmpfs of its own with noswap: {_mount(r)}"
    value = f"{human_bytes(used)} of {human_bytes(r.swap_total)} used"
    yield Finding("swap", "warn", value, why, fix)


# ---- limits ---------------------------------------------------------------------------------------


def locked_memory(r: Readings) -> Iterator[Finding]:
    soft, hard = r.memlock
    value = "unlimited" if soft == UNLIMITED else human_bytes(soft)
    why = "buffers are page-locked so that a GPU can copy into them while training goes on"
    if not r.has_gpu:
        yield Finding("locked memory", "ok", f"{value}, and no GPU is here", why)
    elif soft == UNLIMITED or soft >= r.total_bytes:
        yield Finding("locked memory", "ok", value, why)
    else:
        fix = (
            "ulimit -l unlimited"
            if hard == UNLIMITED
            else "docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity"
        )
        yield Finding("locked memory", "warn", value, why, fix)


def open_files(r: Readings) -> Iterator[Finding]:
    soft, hard = r.nofile
    most = hard if hard != UNLIMITED else 1 << 30
    value = f"{_limit(soft)}, at most {_limit(hard)}"
    why = "the agent raises its own limit to the most, and takes two for each buffer and one for each peer"
    fix = f"docker run --ulimit nofile={_FILES_WANTED}, or LimitNOFILE={_FILES_WANTED}, or ulimit -Hn {_FILES_WANTED}"
    if most < _FILES_ENOUGH:
        yield Finding("open files", "bad" if most < _FILES_MIN else "warn", value, why, fix)
    else:
        yield Finding("open files", "ok", value, why)


def kernel(r: Readings) -> Iterator[Finding]:
    if r.kernel is None:
        return
    value = f"Linux {r.kernel[0]}.{r.kernel[1]}"
    why = "from 5.14 on, new buffers are touched ahead of the save that uses them without holding it up"
    level: Level = "ok" if r.kernel >= _POPULATE_KERNEL else "warn"
    yield Finding("kernel", level, value, why, "" if level == "ok" else "upgrade the kernel to 5.14 or later")


# ---- network and time -----------------------------------------------------------------------------


def ports(r: Readings) -> Iterator[Finding]:
    why = "agents of other nodes connect to this node's agent"
    if r.listen_error:
        fix = "allow this process to listen: network namespace, seccomp profile or security policy"
        yield Finding("ports", "bad", f"none can be listened on: {r.listen_error}", why, fix)
        return
    taken = [str(port) for port in r.taken_ports]
    if taken:
        value = f"{', '.join(taken)} taken"
        fix = f"ss -ltnp 'sport = :{taken[0]}'  # a running agent of this job is fine"
        yield Finding("ports", "warn", value, why, fix)
    if r.port_range is None:
        return
    first, last = r.port_range
    value = f"{first} to {last} are given out by the kernel"
    inside = [str(p) for p in r.wanted_ports if first <= p <= last and not _is_reserved(p, r.reserved_ports)]
    if inside:
        fix = f"sudo sysctl -w net.ipv4.ip_local_reserved_ports={','.join(inside)}"
        why = "any outgoing connection may take the agent's port before it"
        yield Finding("ports", "warn", f"{value}, and {', '.join(inside)} is among them", why, fix)
    elif last - first + 1 < _PORTS_MIN:
        fix = 'sudo sysctl -w net.ipv4.ip_local_port_range="32768 60999"'
        yield Finding("ports", "warn", value, "the agent, and every connection, takes one", fix)
    elif not taken:
        wanted = ", ".join(map(str, r.wanted_ports))
        yield Finding("ports", "ok", f"{wanted} free" if wanted else value, why)


def clock(r: Readings) -> Iterator[Finding]:
    why = "versions are ordered without clocks; only the ages that you read, and storage_every_s, go by them"
    source = f" (clock source {r.clock_source})" if r.clock_source else ""
    if r.is_clock_synchronised is None:
        yield Finding("clock", "ok", f"cannot be told{source}", why)
    elif r.is_clock_synchronised:
        yield Finding("clock", "ok", f"synchronised{source}", why)
    else:
        yield Finding("clock", "warn", f"not synchronised{source}", why, "sudo timedatectl set-ntp true")


# ---- software -------------------------------------------------------------------------------------


def python(r: Readings) -> Iterator[Finding]:
    value = ".".join(map(str, r.python))
    why = "this is what Flashpoint is written for and tested with"
    if r.python[:2] < _PYTHON:
        yield Finding("python", "bad", value, why, f"install Python {_PYTHON[0]}.{_PYTHON[1]} or later")
    else:
        yield Finding("python", "ok", value, why)


def libraries(r: Readings) -> Iterator[Finding]:
    why = "older ones lack what Flashpoint calls, and other releases were not tested"
    wrong = [
        p
        for p in r.packages
        if (p.installed and _older(p.installed, p.at_least)) or not (p.installed or p.is_optional)
    ]
    if wrong:
        needs = {p.name: f" (needs {p.at_least})" if p.at_least else "" for p in wrong}
        value = first_few([f"{p.name} {p.installed or 'is missing'}{needs[p.name]}" for p in wrong])
        names = " ".join(f"'{p.name}>={p.at_least}'" if p.at_least else p.name for p in wrong)
        required = any(not p.is_optional for p in wrong)
        yield Finding("libraries", "bad" if required else "warn", value, why, f"pip install {names}")
    else:
        installed = {p.name: p.installed for p in r.packages if p.installed}
        known = [f"{name} {installed[name]}" for name in _SHOWN if name in installed]
        value = ", ".join(known) or "versions cannot be told: no package metadata"
        yield Finding("libraries", "ok", value, why)


def settings(r: Readings) -> Iterator[Finding]:
    if r.settings_error:
        why = "a job that is started with these does not start"
        yield Finding("settings", "bad", r.settings_error, why, "unset the variable, or correct it")


# ---- measured -------------------------------------------------------------------------------------


def memory_rates(r: Readings) -> Iterator[Finding]:
    why = "a save takes the time of one copy into pages that were written before"
    if r.rates is None:
        if r.measure_error:
            value = f"not measured: {r.measure_error}"
            yield Finding("copy rate", "warn", value, why, "free some memory and run it again")
        return
    memcpy, new, recycled = r.rates.memcpy, r.rates.new_pages, r.rates.recycled_pages
    slow = memcpy < _MEMCPY_MIN
    busy = "run it again on a quiet machine; see `numactl --hardware` for memory that is far away"
    yield Finding("memcpy", "warn" if slow else "ok", _rate(memcpy), why, busy if slow else "")
    slow = recycled < _RECYCLED_SHARE_MIN * memcpy
    value = f"{_rate(recycled)} into recycled pages, {_rate(new)} into new ones"
    yield Finding("tmpfs rate", "warn" if slow else "ok", value, why, busy if slow else "")


def loopback(r: Readings) -> Iterator[Finding]:
    if r.rates is None:
        return
    why = "what one TCP connection carries on this host bounds what copies to peers can reach"
    if r.rates.loopback == 0:
        fix = "ip link set lo up; see that no policy forbids connections to 127.0.0.1"
        yield Finding("loopback", "bad", "no connection to 127.0.0.1", why, fix)
    else:
        slow = r.rates.loopback < _LOOPBACK_MIN
        fix = "run it again on a quiet machine" if slow else ""
        yield Finding("loopback", "warn" if slow else "ok", _rate(r.rates.loopback), why, fix)


# ---- what is left of dead jobs --------------------------------------------------------------------


def leftovers(r: Readings) -> Iterator[Finding]:
    why = "memory that a dead job holds is missing for every other"
    old = [one for one in r.leftovers if one.nbytes and one.age_s > _LEFT_FOR_S]
    for one in old:
        dirty = f", {one.dirty} of them dirty" if one.dirty else ""
        value = (
            f"{one.path}: {human_bytes(one.nbytes)}, {plural(one.versions, 'version')}{dirty}, nobody uses it"
        )
        yield Finding("dead jobs", "warn", value, why, f"flashpoint rm --job {one.path}")
    if not old:
        idle = f"; idle for less than an hour: {len(r.leftovers)}" if r.leftovers else ""
        yield Finding("dead jobs", "ok", "none" + idle, why)


CHECKS: Final[tuple[Check, ...]] = (
    file_system,
    size,
    room,
    owner,
    huge_pages,
    memory,
    cgroup,
    swap,
    locked_memory,
    open_files,
    kernel,
    ports,
    clock,
    python,
    libraries,
    settings,
    memory_rates,
    loopback,
    leftovers,
)

_SHOWN: Final = ("numpy", "pyzmq", "torch", "jax", "orbax-checkpoint", "obstore")


# ---- words ----------------------------------------------------------------------------------------


def _kind(r: Readings) -> str:
    return r.mount.kind if r.mount else "unknown"


def _half_of_memory(r: Readings) -> int:
    return max((r.memory_total or 8 * _GIB) // 2, _GIB)


def _memory_limit(r: Readings) -> str:
    return _gib(max(r.total_bytes - r.free_bytes + (r.memory_available or 0) // 2, _GIB))


def _gib(nbytes: int) -> str:
    return f"{max(nbytes // _GIB, 1)}GiB"


def _mount(r: Readings) -> str:
    return f"sudo flashpoint mount /mnt/flashpoint --size {_gib(_half_of_memory(r))} --do"


def _resize(r: Readings, nbytes: int) -> str:
    size = _gib(nbytes + _GIB - 1)
    if r.in_container and (r.mount is None or r.mount.mount_point == "/dev/shm"):
        shown = f"`flashpoint mount {r.place} --size {size}`"
        return f"docker run --shm-size={size[:-2].lower()}, or the volume that {shown} prints"
    point = r.mount.mount_point if r.mount else r.place
    return f"sudo mount -o remount,size={size[:-2]} {point}"


def _limit(limit: int) -> str:
    return "unlimited" if limit == UNLIMITED else f"{limit:,}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / _GIB:.1f} GiB/s"


def _older(version: str, at_least: str) -> bool:
    return bool(at_least) and _numbers(version) < _numbers(at_least)


def _numbers(version: str) -> tuple[int, ...]:
    """``2.13.0rc1+cpu`` -> (2, 13, 0)."""
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(int(number) for number in match[0].split(".")) if match else ()


def _is_reserved(port: int, reserved: str) -> bool:
    """Whether ``3,5-7`` names the port."""
    for part in filter(None, reserved.split(",")):
        first, _, last = part.partition("-")
        if int(first) <= port <= int(last or first):
            return True
    return False
