"""Chunk checksums: xxh3-64 over each ``chunk_bytes`` of an object, made once from the sealed buffer.

Chunk-wise, so that one entry is verified without reading the whole object, and a broken chunk can be
fetched alone. xxh3 guards against accidents, not against an adversary (see the security page).
xxHash: https://github.com/Cyan4973/xxHash; the canonical, big-endian form of each digest is stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import xxhash

DIGEST_BYTES: Final = 8
CHUNKS_MAX: Final = (
    4096  # of one object: larger objects get larger chunks, so a digest list stays under 32 KiB
)
_THREAD_BYTES_MIN: Final = 32 << 20  # below this a second thread costs more than it saves

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def chunk_size(nbytes: int, chunk_bytes: int) -> int:
    """The chunk size of an object: ``chunk_bytes``, doubled until the object has at most 4096 chunks."""
    while nbytes > chunk_bytes * CHUNKS_MAX:
        chunk_bytes *= 2
    return chunk_bytes


def chunk_digests(data: Bytes, chunk_bytes: int, *, threads: int = 1) -> bytes:
    """Digests of all chunks of ``data`` (uint8, one dimension), concatenated, 8 bytes each.

    Each call into xxh3 releases the GIL for a whole chunk: few large calls, so that a trainer busy in
    Python is not slowed and does not slow this.
    """
    count = -(-len(data) // chunk_bytes)
    return b"".join(_digests(data, chunk_bytes, range(count), threads))


def mismatches(
    data: Bytes, chunk_bytes: int, expected: bytes, chunks: Iterable[int], *, threads: int = 1
) -> list[int]:
    """Those of ``chunks`` (indexes) whose bytes in ``data`` differ from the ``expected`` digests."""
    wanted = list(chunks)
    found = _digests(data, chunk_bytes, wanted, threads)
    return [
        i
        for i, digest in zip(wanted, found, strict=True)
        if digest != expected[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES]
    ]


def _digests(data: Bytes, chunk_bytes: int, chunks: Iterable[int], threads: int) -> list[bytes]:
    chunks = list(chunks)

    view = data.data  # the same bytes, no copy

    def one(i: int) -> bytes:
        return xxhash.xxh3_64_digest(view[i * chunk_bytes : (i + 1) * chunk_bytes])

    if threads <= 1 or len(chunks) * chunk_bytes < _THREAD_BYTES_MIN:
        return [one(i) for i in chunks]
    with ThreadPoolExecutor(threads, thread_name_prefix="flashpoint-checksum") as pool:
        return list(pool.map(one, chunks))
