import threading
import time

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from flashpoint import checksums
from flashpoint.checksums import CHUNKS_MAX, DIGEST_BYTES, chunk_digests, chunk_size, mismatches

CHUNK = 4096


def random_bytes(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 17])
def test_each_chunk_has_the_digest_that_any_xxh3_gives(nbytes):
    data = random_bytes(nbytes)
    chunks = [data[begin : begin + CHUNK].tobytes() for begin in range(0, nbytes, CHUNK)]
    assert chunk_digests(data, CHUNK) == b"".join(xxhash.xxh3_64_digest(chunk) for chunk in chunks)


@pytest.mark.parametrize("threads", [2, 3, 16])
def test_threads_change_nothing(monkeypatch, threads):
    monkeypatch.setattr(checksums, "_THREAD_BYTES_MIN", 0)
    data = random_bytes(37 * CHUNK + 5)
    digests = chunk_digests(data, CHUNK)
    assert chunk_digests(data, CHUNK, threads=threads) == digests
    broken = data.copy()
    for chunk in (0, 11, 37):
        broken[chunk * CHUNK] ^= 1
    assert mismatches(broken, CHUNK, digests, range(38), threads=threads) == [0, 11, 37]


@given(st.integers(0, 5 * CHUNK - 1), st.integers(0, 7))
def test_any_flipped_bit_names_its_chunk(position, bit):
    data = random_bytes(5 * CHUNK)
    digests = chunk_digests(data, CHUNK)
    assert mismatches(data, CHUNK, digests, range(5)) == []
    data[position] ^= 1 << bit
    assert mismatches(data, CHUNK, digests, range(5)) == [position // CHUNK]
    others = [i for i in range(5) if i != position // CHUNK]
    assert mismatches(data, CHUNK, digests, others) == []


def test_bytes_out_of_order_are_noticed():
    data = random_bytes(2 * CHUNK)
    digests = chunk_digests(data, CHUNK)
    assert mismatches(np.roll(data, CHUNK), CHUNK, digests, range(2)) == [0, 1]


def test_a_digest_that_is_not_there_matches_nothing():
    data = random_bytes(2 * CHUNK)
    assert mismatches(data, CHUNK, chunk_digests(data, CHUNK)[:DIGEST_BYTES], [0, 1]) == [1]


@pytest.mark.parametrize(
    ("nbytes", "chunk_bytes"),
    [
        (0, CHUNK),
        (1, CHUNK),
        (CHUNK * CHUNKS_MAX, CHUNK),
        (CHUNK * CHUNKS_MAX + 1, 2 * CHUNK),
        (1 << 50, 1 << 38),
    ],
)
def test_large_objects_get_larger_chunks_so_the_list_of_digests_stays_short(nbytes, chunk_bytes):
    assert chunk_size(nbytes, CHUNK) == chunk_bytes
    assert -(-nbytes // chunk_size(nbytes, CHUNK)) <= CHUNKS_MAX


def test_nothing_is_copied_and_the_gil_is_free_meanwhile():
    data = np.zeros(256 << 20, np.uint8)
    ticks = 0
    done = threading.Event()

    def digest() -> None:
        chunk_digests(data, 1 << 28)
        done.set()

    thread = threading.Thread(target=digest)
    start = time.perf_counter()
    thread.start()
    while not done.is_set():
        time.sleep(0)
        ticks += 1
    thread.join()
    # Holding the GIL, one chunk would let this loop turn a handful of times.
    assert ticks > 50, f"{ticks} turns in {time.perf_counter() - start:.3f} s"


def test_read_only_bytes_can_be_verified():
    data = random_bytes(CHUNK)
    digests = chunk_digests(data, CHUNK)
    data.flags.writeable = False
    assert mismatches(data, CHUNK, digests, [0]) == []
