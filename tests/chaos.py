"""A bad network in user space: TCP proxies that delay, throttle, damage, cut and swallow what passes.

    with Chaos(seed=7) as chaos:
        link = chaos.link(server_port)           # clients connect to link.port instead
        link.faults(latency_s=0.05, mbit=50)     # from now on, also for connections that stand
        link.faults("up", flip_every=100_000)    # one bit every 100,000 bytes, from client to server only
        link.heal()
        link.cut()

All links of a `Chaos` run in one process of its own, which needs nothing but the standard library and ends
with its parent, however that ends. Where bytes are damaged follows from the seed, the number of the link and
of its connection, and the direction, not from how the bytes were chunked on their way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from typing import Any

ANSWER_S = 10.0
CHUNK_BYTES = 64 << 10
FLIGHT_BYTES = 4 << 20  # read but not yet passed on, for each connection and direction
SOCKET_BYTES = 256 << 10  # or the kernel alone would hide a slow link for megabytes
TICK_S = 0.005
DIRECTIONS = ("up", "down")  # client to server, server to client


@dataclass(frozen=True)
class Faults:
    """What one direction of a link does to the bytes that pass. The default passes them on as they are.

    Every ``..._every`` is the mean number of bytes between two events, 0 for never; where they fall is
    random.

    Attributes:
        latency_s: later, each byte, at the same order and rate.
        mbit: bandwidth in Mbit/s of all connections together; 0 for no limit.
        flip_every: one bit is turned over.
        drop_every, duplicate_every: a run of bytes is left out, or comes twice.
        swap_every: two neighbouring runs change places.
        run_bytes: of the longest run.
        cut_every, cut_after: the connection is reset, at random or after exactly so many bytes.
        stall: nothing is passed on any more, and nothing is closed; it goes on when this is taken back.
        mute: a new connection is accepted and never answered; the server does not hear of it ("up" only).
        refuse: a new connection is reset at once ("up" only).
    """

    latency_s: float = 0.0
    mbit: float = 0.0
    flip_every: int = 0
    drop_every: int = 0
    duplicate_every: int = 0
    swap_every: int = 0
    run_bytes: int = 1000
    cut_every: int = 0
    cut_after: int = 0
    stall: bool = False
    mute: bool = False
    refuse: bool = False


@dataclass
class Stats:
    """What a link has done so far; bytes and events of both directions, but for ``up`` and ``down``."""

    connections: int = 0
    open: int = 0
    refused: int = 0
    up: int = 0  # bytes passed on, damage included
    down: int = 0
    flip: int = 0
    drop: int = 0
    duplicate: int = 0
    swap: int = 0
    cut: int = 0


# ---- for tests ------------------------------------------------------------------------------------


class Link:
    """One port that stands for another."""

    def __init__(self, chaos: Chaos, number: int, port: int) -> None:
        self.port = port
        self._chaos = chaos
        self._number = number

    def faults(self, direction: str = "both", **faults: Any) -> None:
        """Set the `Faults` of one direction, or of both; those not named here end."""
        for one in DIRECTIONS if direction == "both" else (direction,):
            self._call("faults", direction=one, faults=asdict(Faults(**faults)))

    def heal(self) -> None:
        """No faults any more. What was damaged stays damaged."""
        self.faults()

    def cut(self) -> int:
        """Reset all connections; how many that were. New ones may be made at once."""
        return int(self._call("cut"))

    def stats(self) -> Stats:
        return Stats(**self._call("stats"))

    def close(self) -> None:
        """Reset all connections and give up the port."""
        self._call("close")

    def _call(self, do: str, **arguments: Any) -> Any:
        return self._chaos.call(do, number=self._number, **arguments)


class Chaos:
    """The process in which links run."""

    def __init__(self, *, seed: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, str(seed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    def link(self, port: int, *, host: str = "127.0.0.1", listen: str = "127.0.0.1", on: int = 0) -> Link:
        """A new link to a server, which need not listen yet.

        Args:
            host, port: of the server.
            listen, on: where clients are to connect; by default on any free port.
        """
        number, chosen = self.call("link", host=host, port=port, listen=listen, on=on)
        return Link(self, number, chosen)

    def call(self, do: str, **arguments: Any) -> Any:
        """Have the process do something, and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock, selectors.DefaultSelector() as selector:
            self._process.stdin.write(json.dumps({"do": do} | arguments).encode() + b"\n")
            self._process.stdin.flush()
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(ANSWER_S):
                raise TimeoutError(f"the proxy did not answer {do!r} within {ANSWER_S:g} s")
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the proxy ended with {self._process.wait(ANSWER_S)}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the proxy could not {do}: {answer['error']}")
        return answer["value"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait(ANSWER_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def __enter__(self) -> Chaos:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- damage ---------------------------------------------------------------------------------------


class Damage:
    """What happens to the bytes of one direction of one connection."""

    def __init__(self, seed: str, stats: Stats) -> None:
        self._dice = random.Random(seed)
        self._stats = stats
        self._passed = 0
        self._next: dict[str, tuple[int, int]] = {}  # kind: (mean distance, where the next event falls)

    def done_to(self, data: bytes, faults: Faults) -> tuple[bytes, bool]:
        """What is passed on in place of ``data``, and whether the connection ends after it."""
        out, at = bytearray(), 0
        self._draw(faults)
        while self._next:
            kind, (every, place) = min(self._next.items(), key=lambda item: item[1][1])
            event = place - self._passed
            if event >= len(data):
                break
            event = max(event, at)  # within the run of the event before: right after it
            out += data[at:event]
            run = data[event : event + self._dice.randint(1, faults.run_bytes)]
            at = event
            if kind in ("cut", "after"):
                self._stats.cut += 1
                return bytes(out), True
            if kind == "flip":
                out.append(data[at] ^ (1 << self._dice.randrange(8)) if run else 0)
                at += 1
            elif kind == "swap":
                other = data[at + len(run) : at + len(run) + self._dice.randint(1, faults.run_bytes)]
                out += other + run
                at += len(run) + len(other)
            else:
                out += run * (2 if kind == "duplicate" else 0)
                at += len(run)
            setattr(self._stats, kind, getattr(self._stats, kind) + 1)
            self._next[kind] = (every, self._passed + at + self._distance(every))
        out += data[at:]
        self._passed += len(data)
        return bytes(out), False

    def _draw(self, faults: Faults) -> None:
        wanted = {
            kind: getattr(faults, f"{kind}_every") for kind in ("flip", "drop", "duplicate", "swap", "cut")
        }
        for kind, every in wanted.items():
            if not every:
                self._next.pop(kind, None)
            elif self._next.get(kind, (0, 0))[0] != every:
                self._next[kind] = (every, self._passed + self._distance(every))
        if faults.cut_after:
            self._next["after"] = (0, faults.cut_after)
        else:
            self._next.pop("after", None)

    def _distance(self, every: int) -> int:
        return int(self._dice.expovariate(1 / every))


# ---- the proxy itself -----------------------------------------------------------------------------


@dataclass
class _Direction:
    """One direction of a link, over all its connections."""

    faults: Faults = field(default_factory=Faults)
    free_s: float = 0.0  # when the line has sent what it was given


class _Connection:
    """A client, the server, and two pumps between them."""

    def __init__(self, link: _Server, number: int, client: socket.socket) -> None:
        self.link = link
        self.number = number
        self.sockets = [client]
        self.pumps: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Pass bytes on until both sides have ended, or one was reset."""
        link, loop = self.link, asyncio.get_running_loop()
        client = self.sockets[0]
        try:
            if link.directions["up"].faults.mute:
                while await loop.sock_recv(client, CHUNK_BYTES):
                    pass
                return
            server = _socket()
            self.sockets.append(server)
            await loop.sock_connect(server, link.target)
            for name, source, target in (("up", client, server), ("down", server, client)):
                seed = f"{link.seed}/{self.number}/{name}"
                pump = _Pump(link, name, Damage(seed, link.stats), source, target)
                self.pumps += [loop.create_task(pump.read()), loop.create_task(pump.write())]
            await asyncio.gather(*self.pumps)
        except (OSError, _Cut):
            for one in self.sockets:  # reset, so that no side takes it for an orderly end
                with contextlib.suppress(OSError):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        finally:
            for task in self.pumps:
                task.cancel()
            await asyncio.gather(*self.pumps, return_exceptions=True)
            for one in self.sockets:
                one.close()


class _Cut(Exception):
    """The connection is to be reset."""


class _Pump:
    """One direction of one connection: `read` decides what is sent and when, `write` sends it."""

    def __init__(
        self, link: _Server, name: str, damage: Damage, source: socket.socket, target: socket.socket
    ) -> None:
        self.direction = link.directions[name]
        self.damage = damage
        self.source, self.target = source, target
        self.link, self.name = link, name
        self.flight: deque[tuple[float, bytes | None, bool]] = deque()
        self.flight_nbytes = 0
        self.changed = asyncio.Event()

    async def read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            faults = self.direction.faults
            if faults.stall or self.flight_nbytes > FLIGHT_BYTES:
                await asyncio.sleep(TICK_S)
                continue
            rate = faults.mbit * 1e6 / 8
            # A slow line takes small bites, or it would come in bursts.
            size = min(CHUNK_BYTES, max(1400, int(rate * TICK_S))) if rate else CHUNK_BYTES
            data = await loop.sock_recv(self.source, size)
            while self.direction.faults.stall:
                await asyncio.sleep(TICK_S)
            faults = self.direction.faults
            now = time.monotonic()
            if data:
                data, cut = self.damage.done_to(data, faults)
                sent = max(now, self.direction.free_s) + (len(data) / rate if rate else 0.0)
                if rate:
                    self.direction.free_s = sent
                self._put(sent + faults.latency_s, data, cut)
                if cut:
                    return
                if sent - now > TICK_S:
                    await asyncio.sleep(sent - now)
            else:
                self._put(now + faults.latency_s, None, False)
                return

    def _put(self, due_s: float, data: bytes | None, cut: bool) -> None:
        self.flight.append((due_s, data, cut))
        self.flight_nbytes += len(data or b"")
        self.changed.set()

    async def write(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self.flight:
                self.changed.clear()
                await self.changed.wait()
            due_s, data, cut = self.flight[0]
            if (wait_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            while self.direction.faults.stall:
                await asyncio.sleep(TICK_S)
            self.flight.popleft()
            if data is None:
                with contextlib.suppress(OSError):
                    self.target.shutdown(socket.SHUT_WR)
                return
            self.flight_nbytes -= len(data)
            await loop.sock_sendall(self.target, data)
            setattr(self.link.stats, self.name, getattr(self.link.stats, self.name) + len(data))
            if cut:
                raise _Cut


class _Server:
    """A link, where it runs."""

    def __init__(self, seed: str, target: tuple[str, int], at: tuple[str, int]) -> None:
        self.seed = seed
        self.target = target
        self.stats = Stats()
        self.directions = {name: _Direction() for name in DIRECTIONS}
        self.listener = _socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind(at)
        self.listener.listen(128)
        self.running: dict[asyncio.Task[None], _Connection] = {}
        self.accepting = asyncio.get_running_loop().create_task(self._accept())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(self.listener)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.directions["up"].faults.refuse:
                self.stats.refused += 1
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
                continue
            connection = _Connection(self, self.stats.connections, client)
            self.stats.connections += 1
            task = loop.create_task(connection.run())
            self.running[task] = connection
            task.add_done_callback(self.running.pop)

    async def cut(self) -> int:
        running = dict(self.running)
        for task, connection in running.items():
            for one in connection.sockets:
                with contextlib.suppress(OSError):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            task.cancel()
        if running:
            await asyncio.wait(running)
        self.stats.cut += len(running)
        return len(running)

    async def close(self) -> None:
        self.accepting.cancel()
        await asyncio.wait([self.accepting])
        self.listener.close()
        await self.cut()


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_INET)
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for side in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        made.setsockopt(socket.SOL_SOCKET, side, SOCKET_BYTES)
    return made


class _Process:
    """What the process does with the lines that it reads."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self.links: list[_Server] = []

    async def do(self, do: str, number: int = 0, **arguments: Any) -> Any:
        if do == "link":
            target, at = (arguments["host"], arguments["port"]), (arguments["listen"], arguments["on"])
            self.links.append(_Server(f"{self.seed}/{len(self.links)}", target, at))
            return len(self.links) - 1, self.links[-1].listener.getsockname()[1]
        link = self.links[number]
        if do == "faults":
            link.directions[arguments["direction"]].faults = Faults(**arguments["faults"])
            return None
        if do == "stats":
            return asdict(replace(link.stats, open=len(link.running)))
        return await {"cut": link.cut, "close": link.close}[do]()


async def _serve(seed: str) -> None:
    process, lines = _Process(seed), asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin.buffer
    )
    while line := await lines.readline():  # none: the test is over, or was killed
        try:
            answer = {"value": await process.do(**json.loads(line))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(sys.argv[1]))
