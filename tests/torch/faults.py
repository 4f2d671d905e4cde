"""Programs that tests start in processes of their own, kill, and look at from outside.

A state is a function of its step and rank, so whatever is recovered can be checked to the last bit. What
happened is read from a log outside the job root, one line written before and after each thing that counts,
and from the files themselves: the look from outside uses nothing of Flashpoint's own code.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import multiprocessing as mp
import os
import pkgutil
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # here, so that no forked worker spends a second on it

import flashpoint_torch as fpt
from flashpoint.telemetry import counters

REPOSITORY: Final = str(Path(__file__).parents[2])
JOIN_S: Final = 60.0

_CONTAINER: Final = re.compile(r"step-(\d+)_ckpt")
_MARKER: Final = re.compile(r"step-(\d+)_ckpt__\d+__unfinished")


# ---- states ---------------------------------------------------------------------------------------


def state_of(step: int, rank: int = 0, *, kib: int = 512) -> dict[str, Any]:
    """The state of ``rank`` after ``step``: tensors of about ``kib`` KiB, plain values, a large numpy array.

    No page of it is equal to one of another step or rank.
    """
    sizes = {"weight": kib // 2 << 10, "moment": kib // 4 << 10, "bias": 2002, "scale": 8, "table": 80 << 10}
    data = {name: _bytes(step, rank, nbytes, name) for name, nbytes in sizes.items()}
    return {
        "model": {
            "weight": torch.from_numpy(data["weight"]).view(torch.float32).view(-1, 64),
            "bias": torch.from_numpy(data["bias"]).view(torch.bfloat16),
            "mask": torch.from_numpy(data["weight"][:77] & 1).view(torch.bool),
            "scale": torch.from_numpy(data["scale"]).view(torch.float64).view(()),
            "empty": torch.empty(0, 3),
        },
        "moments": [
            torch.from_numpy(data["moment"]).view(torch.float32),
            torch.from_numpy(data["moment"][::-1].copy()).view(torch.int16),
        ],
        "step": step,
        "rank": rank,
        "random": data["weight"][:64].tobytes(),
        "table": data["table"].view(np.int64),
    }


def blank_state(*, kib: int = 512) -> dict[str, Any]:
    """A state of the same shape as any step's, holding nothing that was ever saved."""
    return state_of(2**30, 999, kib=kib)


@functools.cache
def _noise(nbytes: int, name: str) -> np.ndarray:
    return np.frombuffer(
        np.random.default_rng(list(name.encode())).bytes(nbytes + 8), np.uint64, nbytes // 8 + 1
    )


def _bytes(step: int, rank: int, nbytes: int, name: str) -> np.ndarray:
    mask = np.uint64(((step << 16) + rank + 1) * 0x9E3779B97F4A7C15 % 2**64)  # a bijection
    return (_noise(nbytes, name) ^ mask).view(np.uint8)[:nbytes]


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal in types, shapes, and every bit of every tensor."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return bool(a == b)


# ---- processes ------------------------------------------------------------------------------------


def fork_context() -> ForkServerContext:
    """Processes forked from a server that has imported torch: they start in milliseconds."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [REPOSITORY, before]))
    try:
        mp.forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


@dataclass
class Worker:
    """A started process and the end of the pipe on which it answers."""

    process: Any
    answers: Any

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)

    def join(self) -> int:
        """Wait for the end; the exit code, negative for a signal."""
        self.process.join(JOIN_S)
        code = self.process.exitcode
        if code is None:
            self.kill()
            raise AssertionError(f"process {self.process.pid} did not end within {JOIN_S:g} s")
        self.answers.close()
        return int(code)

    def answer(self) -> Any:
        """What the process returned; fails if it died or hung instead."""
        if not self.answers.poll(JOIN_S):
            self.kill()
            raise AssertionError(f"process {self.process.pid} did not answer within {JOIN_S:g} s")
        try:
            answer, error = self.answers.recv()
        except EOFError:
            raise AssertionError(
                f"process {self.process.pid} ended with {self.join()} instead of an answer"
            ) from None
        code = self.join()
        assert not error, error
        assert code == 0, f"exit code {code} after {answer!r}"
        return answer


def start(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Worker:
    """Run ``target`` in a process of its own, with one thread for torch."""
    ours, theirs = mp.Pipe(duplex=False)
    process = fork_context().Process(target=_run, args=(theirs, target, args, kwargs))
    with patch.dict(sys.modules, {"__main__": ModuleType("__main__")}):  # or the child would import pytest
        process.start()
    theirs.close()
    return Worker(process, ours)


def _run(answers: Any, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    try:
        answer = (target(*args, **kwargs), "")
    except BaseException:  # pytest.fail is no Exception
        answer = (None, traceback.format_exc())
    with suppress(BrokenPipeError):  # whoever started it may not care
        answers.send(answer)


class Launcher:
    """What starts the ranks of a job: it holds their store, as torchrun's agent does."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._attempts = itertools.count()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True) if world_size > 1 else None

    def start(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Worker]:
        """Start ``target`` on every rank; its first argument is the rank."""
        port = self._store.port if self._store is not None else 0
        attempt = next(self._attempts)
        return [
            start(_as_rank, rank, self.world_size, port, attempt, target, args, kwargs)
            for rank in range(self.world_size)
        ]

    def run(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """As `start`, and wait for every rank's answer."""
        return [worker.answer() for worker in self.start(target, *args, **kwargs)]


def _as_rank(
    rank: int, world_size: int, port: int, attempt: int, target: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    if world_size > 1:
        store = dist.PrefixStore(f"attempt-{attempt}", dist.TCPStore("127.0.0.1", port, is_master=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    answer = target(rank, *args, **kwargs)
    if world_size > 1:
        dist.destroy_process_group()
    return answer


# ---- the trainer and the checker ------------------------------------------------------------------


class Log:
    """Lines outside the job root; each is one write, so what a killed process did before it is there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._fd = os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, *words: Any) -> None:
        os.write(self._fd, (" ".join(map(str, words)) + "\n").encode())

    def close(self) -> None:
        os.close(self._fd)


def train(
    rank: int,
    job_root: str,
    log_path: str,
    *,
    saves: int = 10**9,
    waits: bool = True,
    slow_seed: int | None = None,
    kill_at: int | None = None,
    kill_rank: int | None = None,
    kill_in: tuple[str, int] | None = None,
    forks: bool = False,
    kib: int = 512,
    **settings: Any,
) -> int:
    """Recover, then save one step after the other, as fast as can be.

    Args:
        waits: for each save to be complete, before the next begins.
        slow_seed: make every file-system call take a random moment, so that a kill may come at any.
        kill_at: die before this change to the file system, counted from the start.
        kill_rank: which rank is to die so; by default, any that comes there.
        kill_in: die in the middle of this copy (see `_dying_copies`), and in which one from the start.
        forks: in the middle of each save a child, as a data loader does; it lives until it is killed.

    Returns:
        How often the file system was changed.
    """
    log = Log(f"{log_path}.{rank}")
    changes = [0]
    if kill_rank not in (None, rank):
        kill_at = None
    with _file_system_calls(_each_call(changes, slow_seed, kill_at)), _dying_copies(kill_in):
        log.write("start")
        with fpt.init(job_root, **settings) as fp:
            log.write("ready", fp.epoch)
            state = blank_state(kib=kib)
            found = fp.recover(state)
            last = found.step if found else 0
            assert found is None or same(state, state_of(last, rank, kib=kib)), f"step {last} is another"
            log.write("recovered", last)
            handle = None
            for step in range(last + 1, last + 1 + saves):
                state = state_of(step, rank, kib=kib)
                log.write("saving", step)
                before, handle = handle, fp.async_save(state, step)
                log.write("staged" if handle.error is None else "failed", step, handle.error or "")
                state["model"]["weight"].zero_()  # training goes on
                if forks:
                    log.write("forked", _fork_idle_child())
                if waits:
                    before = handle
                    handle.wait(timeout_s=JOIN_S)
                if before is not None:
                    _log_outcome(log, before)
            if handle is not None:
                handle.wait(timeout_s=JOIN_S)
                _log_outcome(log, handle)
    return changes[0]


def _fork_idle_child() -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(JOIN_S)
        os._exit(0)
    return pid


def _log_outcome(log: Log, handle: fpt.SaveHandle) -> None:
    if handle.done():
        log.write("complete", handle.step)
    elif handle.error is not None:
        log.write("failed", handle.step, handle.error)


def check(rank: int, job_root: str, *, kib: int = 512, **settings: Any) -> dict[str, Any]:
    """What a fresh process recovers, and whether it is what was saved under that step."""
    with fpt.init(job_root, **settings) as fp:
        state = blank_state(kib=kib)
        found = fp.recover(state)
        step = found.step if found else 0
        return {
            "step": step,
            "exact": same(state, state_of(step, rank, kib=kib) if found else blank_state(kib=kib)),
            "rejected": counters().get("versions_rejected", 0),
            "steps": fp.steps(),
        }


# What a save, a retirement, a start and a recovery ask of the file system; the first are what they change.
CHANGING: Final = ("ftruncate", "link", "mkdir", "posix_fallocate", "rename", "rmdir", "unlink")
LOOKING: Final = ("close", "fstat", "listdir", "stat")


@contextmanager
def _file_system_calls(before_each: Callable[[bool], None]) -> Iterator[None]:
    """Call ``before_each`` before these functions of `os`, and tell it whether one changes something."""

    def patched(function: Callable[..., Any], changing: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before_each(changing or (function is os_open and bool(args[1] & os.O_CREAT)))
            return function(*args, **kwargs)

        return call

    os_open = os.open
    with ExitStack() as stack:
        for name in (*CHANGING, *LOOKING, "open"):
            stack.enter_context(patch.object(os, name, patched(getattr(os, name), name in CHANGING)))
        yield


def _each_call(changes: list[int], slow_seed: int | None, kill_at: int | None) -> Callable[[bool], None]:
    numbers = itertools.count(1)
    rng = random.Random(slow_seed)

    def before_each(changing: bool) -> None:
        if changing:
            changes[0] = next(numbers)
            if changes[0] == kill_at:
                _die()
        if slow_seed is not None:
            time.sleep(rng.expovariate(1 / 0.0003))

    return before_each


@contextmanager
def _dying_copies(kill_in: tuple[str, int] | None) -> Iterator[None]:
    """Do one copy by half, then die: of the tensors, of what is being sealed, of the manifest."""

    def half_staged(buffer: Any, layout: Any, sources: Any) -> None:
        half = len(sources) // 2
        for begin, end, source in zip(layout.begins[:half], layout.ends[:half], sources[:half], strict=True):
            buffer.data[begin:end] = source.reshape(-1).view(torch.uint8).numpy()
        _die()

    def half_sealed(data: Any, *args: Any, **kwargs: Any) -> bytes:
        data[len(data) // 2 :] = 0
        _die()
        return b""

    def half_a_manifest(objects: Any, container: Any, data: bytes) -> None:
        Path(container.path, ".metadata.0123abcd.tmp").write_bytes(data[: len(data) // 2])
        _die()

    places = {
        "half staged": ("flashpoint_torch.session.stage_into", half_staged),
        "half sealed": ("flashpoint.saver.chunk_digests", half_sealed),
        "half a manifest": ("flashpoint.objects.CheckpointObjectManager.write_manifest", half_a_manifest),
    }
    if kill_in is None:
        yield
        return
    where, at = kill_in
    name, dying = places[where]
    original = pkgutil.resolve_name(name)
    numbers = itertools.count(1)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (dying if next(numbers) == at else original)(*args, **kwargs)

    with patch(name, call):
        yield


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# ---- the look from outside ------------------------------------------------------------------------


@dataclass
class Look:
    """What lies in a job root.

    Attributes:
        markers: steps with a marker, each as often as it has one.
        objects, manifests: steps whose container has a blob, or a manifest.
        nbytes: allocated by all files, each counted once however many names it has.
        version_bytes: of the blobs of the largest version with a manifest.
        strays: names that have no business to lie here once a job has started cleanly.
    """

    markers: list[int] = field(default_factory=list)
    containers: set[int] = field(default_factory=set)
    objects: set[int] = field(default_factory=set)
    manifests: set[int] = field(default_factory=set)
    nbytes: int = 0
    manifest_bytes: int = 0
    version_bytes: int = 0
    strays: list[str] = field(default_factory=list)

    @property
    def complete(self) -> list[int]:
        """Steps with a manifest and without a marker, ascending."""
        return sorted(self.manifests - set(self.markers))


def look(job_root: str) -> Look:
    """Read a job root with nothing but the file system's own calls."""
    found = Look()
    seen: set[int] = set()
    for folder, folders, names in os.walk(job_root):
        inside = _CONTAINER.fullmatch(os.path.basename(folder))
        nbytes = 0
        for name in folders:
            if match := _CONTAINER.fullmatch(name):
                found.containers.add(int(match[1]))
        for name in names:
            status = os.lstat(os.path.join(folder, name))
            size = status.st_blocks * 512
            if status.st_ino not in seen:
                seen.add(status.st_ino)
                found.nbytes += size
            if inside and name.endswith(".safetensors"):
                found.objects.add(int(inside[1]))
                nbytes += size
            elif inside and name == ".metadata":
                found.manifests.add(int(inside[1]))
                found.manifest_bytes += size
            elif not inside and (match := _MARKER.fullmatch(name)):
                found.markers.append(int(match[1]))
            elif name.endswith(".buf") and size:
                pass
            elif name != ".epoch":
                found.strays.append(os.path.join(folder, name))
        if inside and int(inside[1]) in found.manifests:
            found.version_bytes = max(found.version_bytes, nbytes)
    return found


def digests(job_root: str) -> dict[str, str]:
    """SHA-256 of every blob of every complete version, by path below the job root."""
    found = {}
    for step in look(job_root).complete:
        for path in sorted(Path(job_root, f"step-{step}_ckpt").glob("*.safetensors")):
            found[str(path.relative_to(job_root))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def phase_of(found: Look, lines: list[list[str]], *, keep: int) -> str:
    """In which phase of its life a trainer was killed, by its files and the last lines of its log."""
    words = [line[0] for line in lines]
    if "recovered" not in words:
        return "recover" if "ready" in words else "init"
    dirty = set(found.markers)
    if dirty & found.manifests:
        return "commit"
    if dirty & found.objects:
        return "write"
    if dirty:
        return "stage"
    if len(found.complete) > keep or found.containers - found.manifests:
        return "retire"
    return "between"


def log_lines(log_path: str, rank: int = 0) -> list[list[str]]:
    """The words of every line of a rank's log; none where it never started."""
    try:
        with open(f"{log_path}.{rank}", encoding="utf-8", errors="replace") as file:
            return [line.split() for line in file]
    except FileNotFoundError:
        return []


def report(*words: Any, **numbers: Any) -> None:
    """One line of figures, past pytest's capture where it is shown anyway (-s, or on failure)."""
    print(*words, json.dumps(numbers), file=sys.stdout, flush=True)
