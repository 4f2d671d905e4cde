"""What a machine offers to root for putting faults in: cgroups, network and time namespaces.

Each skips its test where it is not to be had.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

WAIT_S: Final = 30.0
_V1: Final = Path("/sys/fs/cgroup")
_NEWNET, _NEWTIME = 0x40000000, 0x00000080  # linux/sched.h
_libc = ctypes.CDLL(None, use_errno=True)


class Cgroup:
    """A cgroup of its own, of version 1 or 2, whichever can be written here."""

    def __init__(self, controller: str) -> None:
        name = f"flashpoint-test-{secrets.token_hex(4)}"
        self.is_v1 = (_V1 / controller / "cgroup.procs").exists()
        self.path = (_V1 / controller if self.is_v1 else _own_v2_cgroup()) / name
        try:
            self.path.mkdir()
        except OSError as error:
            pytest.skip(f"no {controller} cgroup can be made here: {error}")
        knob = {
            "memory": ("memory.limit_in_bytes", "memory.max"),
            "freezer": ("freezer.state", "cgroup.freeze"),
        }
        self.knob = self.path / knob[controller][not self.is_v1]
        if not self.knob.exists():
            self.path.rmdir()
            pytest.skip(f"cgroups have no {controller} controller here")

    def limit_memory(self, nbytes: int) -> None:
        self.knob.write_text(str(nbytes))

    def freeze(self) -> None:
        self.knob.write_text("FROZEN" if self.is_v1 else "1")
        until = time.monotonic() + WAIT_S
        events = self.path / "cgroup.events"
        while (
            (self.knob.read_text().strip() != "FROZEN")
            if self.is_v1
            else "frozen 1" not in events.read_text()
        ):
            assert time.monotonic() < until, "the cgroup does not freeze"
            time.sleep(0.005)

    def thaw(self) -> None:
        self.knob.write_text("THAWED" if self.is_v1 else "0")

    def add(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))

    @property
    def kills(self) -> int:
        """Processes that the kernel has killed in it for want of memory."""
        text = (self.path / ("memory.oom_control" if self.is_v1 else "memory.events")).read_text()
        return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)

    def remove(self) -> None:
        until = time.monotonic() + WAIT_S
        while True:
            try:
                return self.path.rmdir()
            except OSError:  # the dead are not gone yet
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)


def _own_v2_cgroup() -> Path:
    line = next(
        (line for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"), ""
    )
    return Path("/sys/fs/cgroup") / line[3:].strip("/")


@contextmanager
def cgroup(controller: str) -> Iterator[Cgroup]:
    """A new cgroup, thawed and removed at the end; its processes must have ended by then."""
    made = Cgroup(controller)
    try:
        yield made
    finally:
        if controller == "freezer":
            made.thaw()
        made.remove()


def _unshare(flag: int, what: str) -> None:
    if _libc.unshare(flag) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"no {what} namespace: {os.strerror(error)}")


# ---- networks --------------------------------------------------------------------------------------


class Network:
    """A network namespace with one line to this one; what runs in it is started by `ip netns exec`'s means: `enter`."""

    def __init__(self) -> None:
        tag = secrets.token_hex(3)
        self.name, self._here, self._there = f"flp-{tag}", f"flp{tag}a", f"flp{tag}b"
        # A /30 of its own, from the range for tests of network devices (RFC 2544).
        number = secrets.randbelow(1 << 14) * 4
        base = f"198.18.{number >> 8 & 255}."
        self.host, self.guest = f"{base}{(number & 255) + 1}", f"{base}{(number & 255) + 2}"
        try:
            for command in (
                f"netns add {self.name}",
                f"link add {self._here} type veth peer name {self._there} netns {self.name}",
                f"addr add {self.host}/30 dev {self._here}",
                f"link set {self._here} up",
                f"-n {self.name} addr add {self.guest}/30 dev {self._there}",
                f"-n {self.name} link set {self._there} up",
                f"-n {self.name} link set lo up",
            ):
                self._ip(command)
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            pytest.skip(f"no network namespace can be made here: {getattr(error, 'stderr', error)}")

    def _ip(self, command: str) -> None:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)

    def throttle(self, mbit: int) -> None:
        """What is sent out of it."""
        command = (
            f"tc -n {self.name} qdisc add dev {self._there} root tbf rate {mbit}mbit burst 64kb latency 400ms"
        )
        done = subprocess.run(command.split(), check=False, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"no line can be throttled here: {done.stderr.strip()}")

    def swallow(self) -> None:
        """From now on nothing that is sent out of it arrives, and nobody is told."""
        self._ip(f"-n {self.name} route add blackhole {self.host}/32")

    def heal(self) -> None:
        self._ip(f"-n {self.name} route del blackhole {self.host}/32")

    def close(self) -> None:
        for command in (f"netns del {self.name}", f"link del {self._here}"):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                self._ip(command)


def enter_network(name: str) -> None:
    """This thread, and all that it starts, is in that network namespace from now on."""
    fd = os.open(f"/var/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(fd, _NEWNET) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
    finally:
        os.close(fd)


# ---- clocks ----------------------------------------------------------------------------------------


def shift_monotonic_clock(seconds: int) -> None:
    """The monotonic clock of the children that this process forks from now on is so far off.

    Raises:
        OSError: no time namespace can be made here.
    """
    _unshare(_NEWTIME, "time")
    Path("/proc/self/timens_offsets").write_text(f"monotonic {seconds} 0\n")
