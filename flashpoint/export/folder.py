"""Writing an export into a folder that gets its name when it is whole."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from flashpoint.errors import FlashpointError
from flashpoint.export.safetensors_files import INDEX_NAME, File, Item, index_of

_TEMPORARY: Final = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


def write_folder(
    path: str,
    files: Sequence[File],
    slabs: Callable[[Item], Iterable[memoryview]],
    extras: Mapping[str, bytes],
    *,
    stop: Callable[[], bool] = lambda: False,
    replace: bool = False,
) -> None:
    """Write an export under a temporary name, and rename it when all of it lies on the disk.

    Args:
        slabs: gives the bytes of an item, in order.
        extras: whole files besides, by name.
        stop: asked between slabs; when it says so, the export is given up.
        replace: an export that lies there makes room.

    Raises:
        FileExistsError: something lies there, and ``replace`` is False.
    """
    root, name = os.path.split(path)
    if not replace and os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, "it is there already", path)
    os.makedirs(root, exist_ok=True)
    folder = f"{root}/.{name}.{secrets.token_hex(4)}.tmp"
    os.mkdir(folder)
    try:
        with _locked(folder):
            for file in files:
                with open(f"{folder}/{file.name}", "xb", buffering=0) as out:
                    _write(out.fileno(), file.header)
                    for item in file.items:
                        for slab in slabs(item):
                            if stop():
                                raise FlashpointError(f"the export to {path} was given up: it was closed")
                            _write(out.fileno(), slab)
                    os.fsync(out.fileno())
            if len(files) > 1:
                extras = {**extras, INDEX_NAME: index_of(files)}
            for extra, data in extras.items():
                with open(f"{folder}/{extra}", "xb") as out:
                    out.write(data)
                    out.flush()
                    os.fsync(out.fileno())
            _sync_folder(folder)
            _put_in_place(folder, path, replace=replace)
            _sync_folder(root)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def drop_unfinished(root: str) -> None:
    """Delete what exports that were killed have left; those that run hold a lock."""
    names: Collection[str] = os.listdir(root) if os.path.isdir(root) else ()
    for name in filter(_TEMPORARY.fullmatch, names):
        with contextlib.suppress(OSError), _locked(f"{root}/{name}"):
            shutil.rmtree(f"{root}/{name}", ignore_errors=True)


def _put_in_place(folder: str, path: str, *, replace: bool) -> None:
    if not replace:
        if os.path.lexists(path):  # since it was looked for: an empty folder would give way to a rename
            raise FileExistsError(errno.EEXIST, "it has come to be there meanwhile", path)
        os.rename(folder, path)
        return
    root, name = os.path.split(path)
    old = f"{root}/.{name}.{secrets.token_hex(4)}.tmp"
    try:
        os.rename(path, old)
    except FileNotFoundError:
        os.rename(folder, path)
        return
    os.rename(folder, path)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _write(fd: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
