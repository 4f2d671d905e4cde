"""`LocalStore`: a folder of a file system that all nodes share, or of a single node's disk."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from flashpoint.confined import open_file
from flashpoint.errors import CheckpointNotFoundError, StorageError
from flashpoint.storage.store import Stored

_TEMPORARY: Final = ".tmp"


class LocalStore:
    """Files are written under a temporary name, synchronised with the disk, and renamed.

    Args:
        path: absolute, of the folder. It must be there: one that is made in a mount point whose file system is not
            mounted would fill the wrong disk.
    """

    def __init__(self, path: str) -> None:
        self.path = "/" + os.path.normpath(path).strip("/")

    @property
    def url(self) -> str:
        return f"file://{self.path}"

    def folders(self, under: str = "") -> list[str]:
        return sorted(name for name, status in self._scan(under) if stat.S_ISDIR(status.st_mode))

    def files(self, under: str) -> dict[str, Stored]:
        return {name: _stored(status) for name, status in self._scan(under) if stat.S_ISREG(status.st_mode)}

    def _scan(self, under: str) -> list[tuple[str, os.stat_result]]:
        found = []
        with self._errors("listing", under):
            try:
                names = os.listdir(self._at(under))
            except (FileNotFoundError, NotADirectoryError):
                if under:
                    return []
                raise
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    found.append((name, os.stat(self._at(f"{under}/{name}"), follow_symlinks=False)))
        return found

    def head(self, name: str) -> Stored | None:
        with self._errors("looking at", name):
            try:
                status = os.stat(self._at(name), follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return _stored(status) if stat.S_ISREG(status.st_mode) else None

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        with self._errors("reading", name):
            try:
                with open(open_file(self.path, name, of_any_owner=True), "rb") as file:
                    file.seek(begin)
                    return file.read(-1 if end is None else max(end - begin, 0))
            except (FileNotFoundError, NotADirectoryError):
                raise CheckpointNotFoundError(f"there is no {name} in {self.url}") from None

    def write(self, name: str, data: bytes) -> None:
        self.write_parts(name, [data], len(data))

    def write_parts(self, name: str, parts: Iterable[bytes], part_bytes: int) -> None:
        path = self._at(name)
        folder = os.path.dirname(path)
        temporary = f"{path}.{secrets.token_hex(4)}{_TEMPORARY}"
        with self._errors("writing", name):
            self._make_folder(folder)
            try:
                with open(temporary, "xb", buffering=0) as file:
                    for part in parts:
                        view = memoryview(part)
                        while view:
                            view = view[file.write(view) :]
                    os.fsync(file.fileno())  # or else the name might outlive the bytes
                os.rename(temporary, path)
                _sync(folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise

    def _make_folder(self, folder: str) -> None:
        missing = []
        while folder != self.path and not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
            _sync(os.path.dirname(path))

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            path = self._at(name)
            with self._errors("deleting", name):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(path)
                with contextlib.suppress(OSError):  # it is not empty yet, or holds what others have put there
                    os.rmdir(os.path.dirname(path))

    def _at(self, name: str) -> str:
        return f"{self.path}/{name}".rstrip("/")

    @contextmanager
    def _errors(self, doing: str, name: str) -> Iterator[None]:
        try:
            yield
        except CheckpointNotFoundError:
            raise
        except OSError as error:
            raise StorageError(f"{doing} {self.url}/{name} failed: {error.strerror or error}") from error


def is_temporary(name: str) -> bool:
    """Whether a file is what a killed drain left in the middle of writing it."""
    return name.endswith(_TEMPORARY)


def _stored(status: os.stat_result) -> Stored:
    return Stored(status.st_size, f"{status.st_ino}-{status.st_mtime_ns}")


def _sync(folder: str) -> None:
    """Make what was renamed or made in a folder outlive a loss of power."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
