"""Print, or with --do make, the recommended tmpfs mount for checkpoints, and the lines that make it last.

Options: size, mode=0700 and the user, nodev, nosuid, noexec, huge= where the kernel has huge pages for tmpfs, and
noswap where it knows it (Linux 6.4). Without --do nothing is changed. Give the trainer the memory that it needs first:
what a tmpfs holds is missing there.

JSON:
  path, bytes, options[], warnings[], done (whether it was mounted now)
  commands[]     to mount it now, as root
  fstab, systemd, kubernetes, docker    lines that make it last
"""

from __future__ import annotations

import argparse
import os
import platform
import pwd
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flashpoint.cli.exit_codes import FINE, RefusedError
from flashpoint.cli.output import Page, print_json
from flashpoint.config import parse_bytes
from flashpoint.errors import FlashpointError
from flashpoint.memory import file_system, human_bytes, mounts

NAME: Final = "mount"
HELP: Final = "print or make the recommended tmpfs mount"

HUGE: Final = ("within_size", "always", "advise", "never")
_NOSWAP_KERNEL: Final = (6, 4)
_MEMORY_SHARE_MAX: Final = 0.9
_MOUNT_S: Final = 30.0
_SHORT_UNIT: Final = re.compile(r"([0-9.]+)\s*([KMGT])", re.IGNORECASE)


@dataclass(frozen=True)
class Host:
    """What the recommendation depends on.

    Attributes:
        kernel: its version; (0, 0) where it cannot be told.
        has_huge_pages: whether it has huge pages for tmpfs.
    """

    kernel: tuple[int, int]
    has_huge_pages: bool
    memory_bytes: int


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="the mount point, such as /mnt/flashpoint")
    parser.add_argument("--size", required=True, help="such as 64G, 512MiB")
    parser.add_argument("--user", help="whose it is, name or number (default: you, or who called sudo)")
    parser.add_argument(
        "--huge", choices=HUGE, help="pages of 2 MiB (default: within_size, if there are any)"
    )
    parser.add_argument("--do", action="store_true", help="mount it now; needs root")


def run(args: argparse.Namespace) -> int:
    path = os.path.abspath(args.path)
    if not re.fullmatch(r"/[A-Za-z0-9._/-]+", path):
        raise FlashpointError(
            f"{path!r}: letters, digits and . _ - / only: fstab and systemd have rules for others"
        )
    nbytes = size_of(args.size)
    user = _user_of(args.user)
    host = _this_host()
    options = recommended(host, nbytes, user, args.huge)
    mounted = next((one for one in reversed(mounts()) if one.mount_point == path), None)
    warnings = _warnings(host, nbytes, args.huge)
    if mounted is not None and not args.do:
        warnings.append(
            f"{path} is a {mounted.kind} mount already: `mount -o remount,size=...` changes its size"
        )
    done = False
    if args.do:
        if mounted is not None:
            raise RefusedError(
                f"{path} is a mount point already: unmount it first, or remount it with another size"
            )
        _mount(path, options)
        done = True
    report = {
        "path": path,
        "bytes": nbytes,
        "options": options,
        "warnings": warnings,
        "done": done,
        "commands": [
            f"sudo mkdir -p {path}",
            f"sudo mount -t tmpfs -o {','.join(options)} flashpoint {path}",
        ],
        "fstab": f"flashpoint {path} tmpfs {','.join(options)} 0 0",
        "systemd": systemd_unit(path, options),
        "kubernetes": kubernetes_volume(path, nbytes),
        "docker": docker_option(path, options),
    }
    if args.json:
        print_json(report)
    else:
        _show(report)
    return FINE


def size_of(text: str) -> int:
    """``64G`` and ``64GiB`` in bytes, whole pages.

    Raises:
        FlashpointError: it is no size, or less than a MiB.
    """
    short = _SHORT_UNIT.fullmatch(text.strip())
    try:
        nbytes = parse_bytes(f"{short[1]}{short[2]}iB" if short else text)
    except ValueError as error:
        raise FlashpointError(f"--size: {error}") from None
    if nbytes < 1 << 20:
        raise FlashpointError(f"--size {text} is {nbytes} bytes: write it like 64G or 512MiB")
    return nbytes & -4096


def recommended(host: Host, nbytes: int, user: tuple[int, int], huge: str | None) -> list[str]:
    """The mount's options. Of ``user``: its id and its group's."""
    options = [f"size={_size(nbytes)}", "mode=0700", f"uid={user[0]}", f"gid={user[1]}"]
    options += ["nodev", "nosuid", "noexec"]
    if host.has_huge_pages:
        options.append(f"huge={huge or 'within_size'}")
    if host.kernel >= _NOSWAP_KERNEL:
        options.append("noswap")
    return options


def _size(nbytes: int) -> str:
    for shift, unit in ((30, "g"), (20, "m"), (10, "k")):
        if nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{unit}"
    raise AssertionError("sizes are whole pages")


def systemd_unit(path: str, options: Sequence[str]) -> str:
    """The mount unit; systemd wants its file to be named after the path."""
    name = path.strip("/").replace("-", "\\x2d").replace("/", "-")
    return (
        f"# /etc/systemd/system/{name}.mount; then: systemctl enable --now '{name}.mount'\n"
        "[Unit]\nDescription=Memory for Flashpoint's checkpoints\n\n"
        f"[Mount]\nWhat=flashpoint\nWhere={path}\nType=tmpfs\nOptions={','.join(options)}\n\n"
        "[Install]\nWantedBy=local-fs.target\n"
    )


def kubernetes_volume(path: str, nbytes: int) -> str:
    """The parts of a pod's spec. It counts as memory of the containers that write to it."""
    size = f"{nbytes >> 20}Mi"
    return (
        "# spec of the pod; resources.limits.memory must hold this beside what the trainer needs\n"
        "volumes:\n- name: flashpoint\n  emptyDir:\n    medium: Memory\n"
        f"    sizeLimit: {size}\n"
        "containers:\n- volumeMounts:\n  - name: flashpoint\n"
        f"    mountPath: {path}\n"
    )


def docker_option(path: str, options: Sequence[str]) -> str:
    """Docker's own mount: it knows these options and no others."""
    known = ("size=", "mode=", "uid=", "gid=", "nodev", "nosuid", "noexec")
    return f"docker run --tmpfs {path}:{','.join(option for option in options if option.startswith(known))}"


def _warnings(host: Host, nbytes: int, huge: str | None) -> list[str]:
    found = []
    if host.memory_bytes and nbytes > _MEMORY_SHARE_MAX * host.memory_bytes:
        found.append(
            f"{human_bytes(nbytes)} of {human_bytes(host.memory_bytes)} memory leaves too little for the trainer: "
            "the kernel would kill it"
        )
    if huge and not host.has_huge_pages:
        found.append("this kernel has no huge pages for tmpfs: --huge is left out")
    if host.kernel < _NOSWAP_KERNEL:
        found.append("this kernel has no noswap (Linux 6.4): with swap on, checkpoints may be swapped out")
    return found


def _user_of(text: str | None) -> tuple[int, int]:
    text = text or os.environ.get("SUDO_USER") or str(os.geteuid())
    try:
        found = pwd.getpwuid(int(text)) if text.isdigit() else pwd.getpwnam(text)
    except KeyError:
        if text.isdigit():
            return int(text), int(text)
        raise FlashpointError(f"there is no user {text!r}") from None
    return found.pw_uid, found.pw_gid


def _this_host() -> Host:
    match = re.match(r"([0-9]+)\.([0-9]+)", platform.release())
    return Host(
        (int(match[1]), int(match[2])) if match else (0, 0),
        os.path.exists("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def _mount(path: str, options: Sequence[str]) -> None:
    if os.geteuid() != 0:
        raise FlashpointError(
            "only root may mount: put sudo before it, or leave --do out to see the commands"
        )
    if os.path.islink(path):
        raise FlashpointError(f"{path} is a link: give the folder itself")
    os.makedirs(path, exist_ok=True)
    if os.listdir(path):
        raise RefusedError(f"{path} is not empty: a mount would hide what is in it")
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "flashpoint", path]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MOUNT_S)
    except subprocess.TimeoutExpired:
        raise FlashpointError(f"{shlex.join(command)} did not end within {_MOUNT_S:g} s") from None
    if done.returncode:
        raise FlashpointError(
            f"{shlex.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}"
        )
    fs = file_system(path)
    if fs.kind != "tmpfs":
        raise FlashpointError(f"{path} was mounted, and is {fs.kind}")


def _show(report: dict[str, object]) -> None:
    page = Page()
    for warning in _lines(report["warnings"]):
        page.line(("warning: ", "yellow"), warning)
    path = str(report["path"])
    if report["done"]:
        fs = file_system(path)
        page.line((path, "bold"), f" is a tmpfs of {human_bytes(fs.total_bytes)} now")
    else:
        page.line(("# now, until the next boot (--do does it):", "dim"))
        for command in _lines(report["commands"]):
            page.line(command)
    for name, title in (
        ("fstab", "# for good: a line of /etc/fstab"),
        ("systemd", "# or a unit of systemd"),
        ("kubernetes", "# in Kubernetes"),
        ("docker", "# in Docker"),
    ):
        page.line()
        page.line((title, "dim"))
        for line in str(report[name]).splitlines():
            page.line(line)
    page.show()


def _lines(value: object) -> list[str]:
    assert isinstance(value, list)
    return value
