"""What the agents are measured beside: the same bytes between two processes, by raw TCP and by bare ZeroMQ.

Each end is a process of its own at the agents' priority. It has all files mapped, and every page of them touched.
"""

from __future__ import annotations

import mmap
import multiprocessing as mp
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import xxhash
import zmq
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from benchmarks.measure import TmpfsFile
from flashpoint.checksums import Bytes
from flashpoint.replication import limits
from flashpoint.replication.agent import keep_freed_memory

HOST: Final = "127.0.0.1"
PIECE_BYTES: Final = 1 << 20  # of raw TCP: what a frame of ours carries
CHUNK_BYTES: Final = 4 << 20  # of one checksum, as saves make them
NICE: Final = 10  # as `run_agent` has it
TIMEOUT_S: Final = 120.0


class Helper:
    """A fresh process that serves one end of a pipe until it is closed."""

    def __init__(self, serve: Callable[..., None], *args: Any) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()
        self.first = self._answer()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def ask(self, *question: Any) -> Any:
        self._pipe.send(question)
        return self._answer()

    def _answer(self) -> Any:
        if not self._pipe.poll(TIMEOUT_S):
            raise RuntimeError(f"{self.process.name} did not answer within {TIMEOUT_S:g} s")
        try:
            return self._pipe.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"{self.process.name} ended with {self.process.exitcode}") from None

    def cpu_s(self) -> float:
        """CPU seconds so far, of all threads (proc(5))."""
        with open(f"/proc/{self.pid}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self._pipe.close()
        self.process.terminate()
        self.process.join(15)
        self.process.kill()
        self.process.join()


def questions(pipe: Connection) -> Iterator[tuple[Any, ...]]:
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


def _give_way() -> None:
    """As agents do: where others want the CPU too, raw TCP is to have no advantage."""
    os.nice(NICE)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


# ---- raw TCP ------------------------------------------------------------------------------------


def serve_raw_sender(pipe: Connection, paths: Sequence[str]) -> None:
    """Sends all of the files for each byte that it gets."""
    _give_way()
    views = [_mapped_to_read(path) for path in paths]
    with socket.create_server((HOST, 0)) as server:
        pipe.send(server.getsockname()[1])
        peer, _ = server.accept()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while peer.recv(1):
            for view in views:
                for begin in range(0, len(view), PIECE_BYTES):
                    peer.sendall(view[begin : begin + PIECE_BYTES])


def serve_raw_receiver(pipe: Connection, port: int, folder: str, sizes: Sequence[int]) -> None:
    _give_way()
    os.makedirs(folder)
    warm = [TmpfsFile(f"{folder}/warm-{i}", n).data.data for i, n in enumerate(sizes)]
    peer = socket.create_connection((HOST, port))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive(targets: Sequence[memoryview]) -> float:
        start_s = time.perf_counter()
        peer.sendall(b"1")
        for target in targets:
            begin = 0
            while begin < len(target):
                begin += peer.recv_into(target[begin:])
        return time.perf_counter() - start_s

    pipe.send("ready")
    for (kind,) in questions(pipe):
        if kind == "warm":
            pipe.send({"warm": receive(warm)})
            continue
        start_s = time.perf_counter()
        fresh = [_fresh_mapping(f"{folder}/fresh-{i}", n) for i, n in enumerate(sizes)]
        alone_s = receive(fresh)
        seconds = time.perf_counter() - start_s
        fresh.clear()
        for i in range(len(sizes)):
            os.unlink(f"{folder}/fresh-{i}")
        pipe.send({"fresh": seconds, "fresh, alone": alone_s})


def _fresh_mapping(path: str, nbytes: int) -> memoryview:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        return memoryview(mmap.mmap(fd, nbytes))
    finally:
        os.close(fd)


class Raw:
    """Raw TCP of a version's bytes, between two processes."""

    def __init__(self, stack: ExitStack, folder: str, paths: Sequence[str]) -> None:
        self.sender = Helper(serve_raw_sender, paths)
        stack.callback(self.sender.close)
        sizes = [os.path.getsize(path) for path in paths]
        self.receiver = Helper(serve_raw_receiver, self.sender.first, folder, sizes)
        stack.callback(self.receiver.close)
        self.cpu_s: list[float] = []
        for _ in range(2):
            self.receiver.ask("warm")

    def transfer(self, kind: str) -> dict[str, float]:
        before_s = self.sender.cpu_s() + self.receiver.cpu_s()
        found: dict[str, float] = self.receiver.ask(kind)
        if kind == "warm":
            self.cpu_s.append(self.sender.cpu_s() + self.receiver.cpu_s() - before_s)
        return found


# ---- bare ZeroMQ --------------------------------------------------------------------------------


class Bare:
    """What is left of the agents' transfers if they are nothing but ZeroMQ, one copy and the checksums.

    As there: frames of `limits.FRAME_BYTES`, sent without a copy, asked for whenever a quarter of
    `limits.CREDIT_BYTES` has come back, hashed as they come; and sealed, if so.

    Args:
        folder: where `Raw` has its warm files: these bytes go there, too.
    """

    def __init__(self, stack: ExitStack, folder: str, paths: Sequence[str]) -> None:
        self._ends = [Helper(serve_bare_sender, paths)]
        stack.callback(self._ends[0].close)
        sizes = [os.path.getsize(path) for path in paths]
        self._ends.append(Helper(serve_bare_receiver, self._ends[0].first, folder, sizes))
        stack.callback(self._ends[1].close)
        for encrypt in (False, True):
            self.transfer(encrypt)

    def transfer(self, encrypt: bool) -> None:
        self._ends[1].ask(encrypt)

    def cpu_s(self) -> float:
        return sum(end.cpu_s() for end in self._ends)


def serve_bare_sender(pipe: Connection, paths: Sequence[str]) -> None:
    """Sends each (object, begin, end, sealed) that it is asked for."""
    _give_way()
    keep_freed_memory()
    views = [_mapped_to_read(path) for path in paths]
    cipher, sealed = AESGCM(bytes(32)), 0
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.set(zmq.SNDHWM, 2 * limits.FRAMES_QUEUED_MAX)
        pipe.send(router.bind_to_random_port(f"tcp://{HOST}"))
        while True:
            identity, question = router.recv_multipart()
            for row in np.frombuffer(question, dtype=np.int64).reshape(-1, 4):
                number, begin, end, seal = row.tolist()
                header, body = row.tobytes(), views[number][begin:end]
                if seal:
                    nonce = sealed.to_bytes(12, "big")
                    sealed += 1
                    target = np.empty(len(body) + 16, dtype=np.uint8).data
                    cipher.encrypt_into(nonce, body, header, target)
                    header, body = header + nonce, target
                router.send(identity, zmq.SNDMORE)
                router.send(header, zmq.SNDMORE)
                router.send(body, copy=False)


def serve_bare_receiver(pipe: Connection, port: int, folder: str, sizes: Sequence[int]) -> None:
    _give_way()
    keep_freed_memory()
    targets = [_mapped_to_write(f"{folder}/warm-{i}") for i in range(len(sizes))]
    frames = [
        (i, begin, min(begin + limits.FRAME_BYTES, size))
        for i, size in enumerate(sizes)
        for begin in range(0, size, limits.FRAME_BYTES)
    ]
    cipher = AESGCM(bytes(32))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.set(zmq.RCVHWM, limits.FRAMES_QUEUED_MAX)
        dealer.connect(f"tcp://{HOST}:{port}")
        pipe.send("ready")
        for (encrypt,) in questions(pipe):
            asked, left, on_the_way = 0, len(frames), 0
            digest = xxhash.xxh3_64()
            while left:
                question = []
                if on_the_way <= limits.CREDIT_BYTES * 3 // 4:
                    while asked < len(frames) and on_the_way < limits.CREDIT_BYTES:
                        i, begin, end = frames[asked]
                        question.append((i, begin, end, int(encrypt)))
                        on_the_way += end - begin
                        asked += 1
                if question:
                    dealer.send(np.array(question, dtype=np.int64).tobytes())
                header, frame = dealer.recv(), dealer.recv(copy=False)
                i, begin, end, _ = np.frombuffer(header[:32], dtype=np.int64).tolist()
                target = targets[i][begin:end]
                if encrypt:
                    cipher.decrypt_into(header[32:], frame.buffer, header[:32], target.data)
                else:
                    np.copyto(target, np.frombuffer(frame.buffer, dtype=np.uint8))
                on_the_way -= end - begin
                left -= 1
                if begin % CHUNK_BYTES == 0:
                    digest.reset()
                digest.update(target.data)
                if end % CHUNK_BYTES == 0 or end == sizes[i]:
                    digest.digest()
            pipe.send("done")


def _mapped_to_read(path: str) -> memoryview:
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    np.frombuffer(mapping, dtype=np.uint8)[:: mmap.PAGESIZE].sum()  # touches every page
    return memoryview(mapping)


def _mapped_to_write(path: str) -> Bytes:
    with open(path, "r+b") as file:
        data = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)
    data[:: mmap.PAGESIZE] = 0
    return data
