"""Where drained versions go: a `Store` of named files, which appear whole or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from flashpoint.config import FlashpointConfig
from flashpoint.errors import DeadlineError

_T = TypeVar("_T")


class Stored(NamedTuple):
    """A file in the storage.

    Attributes:
        tag: another one whenever the file is written again.
    """

    nbytes: int
    tag: str


class Readable(Protocol):
    """Named files that are read in ranges, wherever they are."""

    @property
    def url(self) -> str: ...

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """A file's bytes from ``begin`` to ``end``.

        Raises:
            CheckpointNotFoundError: there is no such file.
            StorageError: it cannot be read.
        """


class Store(Readable, Protocol):
    """Files below one URL. Names are relative, their parts joined by ``/``.

    Every method raises `StorageError` when the storage refuses or fails.
    """

    def folders(self, under: str = "") -> list[str]:
        """Names of the folders right below a folder; none where that is not there."""

    def files(self, under: str) -> dict[str, Stored]:
        """The files right below a folder, by their last name; none where that is not there."""

    def head(self, name: str) -> Stored | None:
        """How a file stands; None where there is none."""

    def write(self, name: str, data: bytes) -> None:
        """Write a small file whole, in place of another."""

    def write_parts(self, name: str, parts: Iterable[bytes], part_bytes: int) -> None:
        """Write a large file from its parts as they come, each of ``part_bytes`` but the last.

        An error that ``parts`` raises ends it, and leaves nothing under the name.
        """

    def delete(self, names: Sequence[str]) -> None:
        """Delete files, in this order; those that are not there are no error."""


def open_store(config: FlashpointConfig) -> Store:
    """The storage that ``config.storage`` names. Nothing is asked of it yet.

    Raises:
        ConfigError: the URL is none, or needs a package that is not installed.
    """
    scheme, _, path = config.storage.partition("://")
    if scheme == "file":
        from flashpoint.storage.local import LocalStore

        return LocalStore(path)
    from flashpoint.storage.cloud import CloudStore

    return CloudStore(config.storage, timeout_s=config.storage_timeout_s)


def bounded(call: Callable[[], _T], timeout_s: float, what: str) -> _T:
    """``call()``, but for so long at most: a file system that hangs holds up a thread that nobody waits for.

    Raises:
        DeadlineError: it has not returned in time.
    """
    answer: list[_T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            answer.append(call())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="flashpoint-storage", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failure:
        raise failure[0]
    if not answer:
        raise DeadlineError(f"{what} did not answer within {timeout_s:g} s")
    return answer[0]
