"""What `flashpoint doctor` measures itself: copying memory, writing tmpfs, and TCP on loopback; one thread each."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from flashpoint.checksums import Bytes

MEMORY_BYTES: Final = 128 << 20  # of one array, and of the file; twice that is taken
LOOPBACK_BYTES: Final = 256 << 20
_FRAME_BYTES: Final = 1 << 20
_REPEATS: Final = 5
_LOOPBACK_S: Final = 10.0


@dataclass(frozen=True)
class Rates:
    """Bytes per second; ``loopback`` is 0 where it could not be measured.

    Attributes:
        memcpy: between two arrays that were touched before; the best of some.
        new_pages: into a new file of the tmpfs, as the first save does.
        recycled_pages: into the same file again, as every later save does; the best of some.
    """

    memcpy: float
    new_pages: float
    recycled_pages: float
    loopback: float


def measure(place: str) -> Rates:
    """Measure in a folder; what is written there has no name, and is gone whatever happens.

    Raises:
        OSError: there is no room, or nothing may be written.
    """
    source = np.ones(MEMORY_BYTES, np.uint8)
    memcpy = _best(np.zeros_like(source), source)
    with _file(place, MEMORY_BYTES) as data:
        new = _seconds(data, source)
        recycled = _best(data, source)
    return Rates(MEMORY_BYTES / memcpy, MEMORY_BYTES / new, MEMORY_BYTES / recycled, _loopback())


@contextlib.contextmanager
def _file(place: str, nbytes: int) -> Iterator[Bytes]:
    """A new file of a folder, mapped and nameless; no page of it is there yet."""
    path = f"{place}/.flashpoint-doctor-{secrets.token_hex(8)}"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.unlink(path)
        os.ftruncate(fd, nbytes)
        yield np.frombuffer(mmap.mmap(fd, nbytes), dtype=np.uint8)
    finally:
        os.close(fd)


def _seconds(target: Bytes, source: Bytes) -> float:
    begin_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - begin_s


def _best(target: Bytes, source: Bytes) -> float:
    return min(_seconds(target, source) for _ in range(_REPEATS))


def _loopback() -> float:
    """One TCP connection to ourselves, with a thread at each end."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_LOOPBACK_S)
            sending = threading.Thread(target=_send, args=(server.getsockname(),), daemon=True)
            sending.start()
            connection, _ = server.accept()
            with connection:
                connection.settimeout(_LOOPBACK_S)
                buffer, received = bytearray(_FRAME_BYTES), 0
                begin_s = time.perf_counter()
                while received < LOOPBACK_BYTES and (nbytes := connection.recv_into(buffer)):
                    received += nbytes
                seconds = time.perf_counter() - begin_s
            sending.join(_LOOPBACK_S)
    except OSError:
        return 0.0
    return received / seconds


def _send(address: tuple[str, int]) -> None:
    with contextlib.suppress(OSError), socket.create_connection(address, _LOOPBACK_S) as connection:
        frame = bytes(_FRAME_BYTES)
        for _ in range(LOOPBACK_BYTES // _FRAME_BYTES):
            connection.sendall(frame)
