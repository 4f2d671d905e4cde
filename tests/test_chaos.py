"""The bad network does what it says, no more, and the same again for the same seed."""

import contextlib
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import CHUNK_BYTES, Chaos, Damage, Faults, Link, Stats

DATA = random.Random(0).randbytes(1 << 20)
WAIT_S = 10.0


@pytest.fixture
def chaos() -> Iterator[Chaos]:
    with Chaos(seed=3) as running:
        yield running


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends everything back."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer(client: socket.socket) -> None:
            with client, contextlib.suppress(OSError):
                while data := client.recv(1 << 16):
                    client.sendall(data)
                client.shutdown(socket.SHUT_WR)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def connect(link: Link) -> socket.socket:
    return socket.create_connection(("127.0.0.1", link.port), WAIT_S)


def there_and_back(link: Link, data: bytes) -> bytes:
    """What comes back of ``data``, until the end or a reset, which may come with the connection already."""
    try:
        client = connect(link)
    except ConnectionResetError:
        return b""
    with client:

        def send() -> None:
            with contextlib.suppress(OSError):
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        back = bytearray()
        with contextlib.suppress(ConnectionResetError):
            while got := client.recv(1 << 16):
                back += got
        sender.join(WAIT_S)
        return bytes(back)


def test_without_faults_every_byte_comes_back(chaos: Chaos, echo: int) -> None:
    link = chaos.link(echo)
    assert there_and_back(link, DATA) == DATA
    assert there_and_back(link, b"") == b""
    stats = link.stats()
    assert (stats.connections, stats.up, stats.down) == (2, len(DATA), len(DATA))


def test_latency_delays_a_byte_but_not_the_rate(chaos: Chaos, echo: int) -> None:
    link = chaos.link(echo)
    latency_s = 0.4
    link.faults(latency_s=latency_s)
    with connect(link) as client:
        start_s = time.monotonic()
        client.sendall(b"x")
        assert client.recv(1) == b"x"
        assert time.monotonic() - start_s >= 2 * latency_s
    start_s = time.monotonic()
    assert there_and_back(link, DATA) == DATA
    assert (
        time.monotonic() - start_s < latency_s * len(DATA) / CHUNK_BYTES
    )  # if each chunk waited for the last


def test_bandwidth_is_shared_by_all_connections(chaos: Chaos, echo: int) -> None:
    link = chaos.link(echo)
    link.faults("up", mbit=50)
    start_s = time.monotonic()
    threads = [
        threading.Thread(target=there_and_back, args=(link, DATA[: 3 * len(DATA) // 2])) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    expected_s = 2 * len(DATA) * 8 / 50e6
    assert 0.9 * expected_s < time.monotonic() - start_s


def test_flipped_bits(chaos: Chaos, echo: int) -> None:
    link = chaos.link(echo)
    link.faults("up", flip_every=10_000)
    back = there_and_back(link, DATA)
    wrong = [a ^ b for a, b in zip(back, DATA, strict=True) if a != b]
    assert len(wrong) == link.stats().flip
    assert 50 < len(wrong) < 200
    assert all(bits.bit_count() == 1 for bits in wrong)
    link.heal()
    assert there_and_back(link, DATA) == DATA


@pytest.mark.parametrize("kind", ["drop", "duplicate", "swap"])
def test_runs_of_bytes(chaos: Chaos, echo: int, kind: str) -> None:
    link = chaos.link(echo)
    link.faults("down", **{f"{kind}_every": 100_000}, run_bytes=50)
    back = there_and_back(link, DATA)
    events = getattr(link.stats(), kind)
    assert 2 < events < 30
    change = len(back) - len(DATA)
    assert back != DATA
    if kind == "drop":
        assert -50 * events <= change < 0
    elif kind == "duplicate":
        assert 0 < change <= 50 * events
    else:
        assert change == 0
        assert sorted(back) == sorted(DATA)


def test_damage_follows_from_the_seed_and_not_from_the_chunks() -> None:
    faults = Faults(flip_every=5_000, drop_every=9_000, cut_every=10**9, run_bytes=1)

    def done(size: int, seed: str) -> bytes:
        damage = Damage(seed, Stats())
        return b"".join(
            damage.done_to(DATA[begin : begin + size], faults)[0] for begin in range(0, len(DATA), size)
        )

    assert done(1 << 16, "a") == done(999, "a") != done(999, "b")


def test_cut_after_so_many_bytes(chaos: Chaos, echo: int) -> None:
    link = chaos.link(echo)
    link.faults("up", cut_after=100_001)
    assert len(there_and_back(link, DATA)) <= 100_001
    assert (link.stats().up, link.stats().cut) == (100_001, 1)
    assert len(there_and_back(link, DATA[:100_000])) == 100_000
    link.faults("up", cut_every=50_000)
    assert len(there_and_back(link, DATA)) < len(DATA)
    assert link.stats().cut == 2


def test_cut_now(chaos: Chaos, echo: int) -> None:
    link = chaos.link(echo)
    with connect(link) as client:
        client.sendall(b"x")
        assert client.recv(1) == b"x"
        assert link.cut() == 1
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    assert link.stats().open == 0
    assert there_and_back(link, b"again") == b"again"


def test_a_stalled_link_closes_nothing_and_goes_on(chaos: Chaos, echo: int) -> None:
    link = chaos.link(echo)
    with connect(link) as client:
        link.faults("down", stall=True)
        client.sendall(b"x")
        client.settimeout(0.15)
        with pytest.raises(TimeoutError):
            client.recv(1)
        assert link.stats().open == 1
        link.heal()
        client.settimeout(WAIT_S)
        assert client.recv(1) == b"x"


def test_a_mute_link_accepts_and_a_refusing_one_does_not(chaos: Chaos, echo: int) -> None:
    link = chaos.link(echo)
    link.faults(mute=True)
    with connect(link) as client:
        client.sendall(b"x")
        client.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.recv(1)
        link.heal()  # what was swallowed stays so
        with pytest.raises(TimeoutError):
            client.recv(1)
        assert link.stats().up == 0
    link.faults(refuse=True)
    assert there_and_back(link, b"x") == b""
    assert link.stats().refused == 1
    link.heal()
    assert there_and_back(link, b"x") == b"x"


def test_a_server_that_does_not_listen(chaos: Chaos) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert there_and_back(chaos.link(port), b"x") == b""


def test_a_closed_link_gives_its_port_up(chaos: Chaos, echo: int) -> None:
    link = chaos.link(echo)
    link.close()
    with pytest.raises(ConnectionRefusedError):
        connect(link)
    assert chaos.link(echo, on=link.port).port == link.port


def test_a_wrong_wish_is_refused(chaos: Chaos, echo: int) -> None:
    link = chaos.link(echo)
    with pytest.raises(TypeError):
        link.faults(flip=3)
    with pytest.raises(RuntimeError, match="Address already in use|in use"):
        chaos.link(echo, on=link.port)
    assert there_and_back(link, b"x") == b"x"


def test_it_ends_with_its_parent() -> None:
    code = "import os; from tests.chaos import Chaos; c = Chaos(); print(c.pid, flush=True); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False, timeout=WAIT_S)
    command, deadline = Path(f"/proc/{int(done.stdout)}/cmdline"), time.monotonic() + WAIT_S
    with contextlib.suppress(OSError):
        while b"chaos" in command.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.01)
