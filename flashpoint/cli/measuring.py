"""What this machine's memory does, measured in a scratch folder: for `flashpoint bench` and `flashpoint plan`.

Every figure stands beside a memcpy of the same bytes into a warm tmpfs mapping, taken just before and just after it:
on a shared machine only such ratios repeat.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from flashpoint.buffers import BufferObject
from flashpoint.checksums import Bytes, chunk_digests
from flashpoint.config import FlashpointConfig
from flashpoint.errors import FlashpointError
from flashpoint.layout import Entry, ObjectLayout
from flashpoint.loader import MLFlashpointCheckpointLoader
from flashpoint.memory import file_system, human_bytes, prefault
from flashpoint.objects import CheckpointObjectManager
from flashpoint.saver import MLFlashpointCheckpointSaver

TENSORS: Final = 64
SAVE: Final = ("save, blocking", "save, complete")
CHUNK: Final = FlashpointConfig.chunk_bytes
_UNIT_BYTES: Final = TENSORS * 4096
_TMPFS_TIMES: Final = 3  # the bytes, in the tmpfs: two versions, and the memcpy's own place
_SPARE_BYTES: Final = 16 << 20  # for headers, manifests and what others do


@dataclass(frozen=True)
class Figure:
    """Medians; ``ratio`` is that of each call over the memcpy beside it."""

    name: str
    seconds: float
    ratio: float


@dataclass(frozen=True)
class Measured:
    """``figures`` of moving ``nbytes`` in `TENSORS` float32 arrays, the memcpy first; medians of ``repeats``."""

    nbytes: int
    repeats: int
    figures: list[Figure]

    def bytes_per_s(self, name: str) -> float:
        return self.nbytes / next(one.seconds for one in self.figures if one.name == name)


@contextlib.contextmanager
def scratch(folder: str) -> Iterator[str]:
    """A folder below ``folder`` that is gone afterwards, also if this process is told to end."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parent = tempfile.mkdtemp(prefix="flashpoint-bench-", dir=folder)
    try:
        yield parent
    finally:
        shutil.rmtree(parent, ignore_errors=True)
        signal.signal(signal.SIGTERM, previous)


def measure(folder: str, nbytes: int, repeats: int) -> Measured:
    """Save and load ``nbytes`` again and again, below a folder on a tmpfs.

    Raises:
        FlashpointError: there is no room for it.
    """
    free = file_system(folder).free_bytes
    if (needed := _TMPFS_TIMES * nbytes + _SPARE_BYTES) > free:
        raise FlashpointError(
            f"{folder} has {human_bytes(free)} free, and this takes {human_bytes(needed)}: give fewer --bytes"
        )
    with scratch(folder) as parent:
        return _Bench(parent, nbytes).run(repeats)


def copy_and_seal_rates(folder: str, nbytes: int = 64 << 20, repeats: int = 5) -> tuple[float, float]:
    """Bytes per second of a memcpy into a warm tmpfs mapping by one thread, and of checksums by the seal's threads."""
    with scratch(folder) as parent:
        source = _source(nbytes)
        target = _warm_file(f"{parent}/memcpy", nbytes := len(source))
        threads = FlashpointConfig.from_env().seal_threads
        copy_s = [_seconds(lambda: np.copyto(target, source)) for _ in range(repeats)]
        seal_s = [_seconds(lambda: chunk_digests(target, CHUNK, threads=threads)) for _ in range(repeats)]
        return nbytes / statistics.median(copy_s), nbytes / statistics.median(seal_s)


class _Bench:
    """One measurement in a scratch folder; a sample is (seconds of the call, seconds of the memcpy beside it)."""

    def __init__(self, parent: str, nbytes: int) -> None:
        self._source = _source(nbytes)
        self._target = _warm_file(f"{parent}/memcpy", len(self._source))
        parts = np.split(self._source.view(np.float32), TENSORS)
        self._arrays = {f"tensor.{i}": part for i, part in enumerate(parts)}
        self._config = FlashpointConfig.from_env(keep=1)
        self._objects = CheckpointObjectManager(f"{parent}/job", config=self._config)
        self._saver = MLFlashpointCheckpointSaver(self._objects)
        self._entries = [Entry(name, "float32", part.shape) for name, part in self._arrays.items()]
        self._samples: dict[str, list[tuple[float, float]]] = {"memcpy": []}
        self._saves = 0

    def run(self, repeats: int) -> Measured:
        self._beside(lambda: {f"first {name}": seconds for name, seconds in self._save().items()})
        self._save()  # makes the second buffer
        for _ in range(repeats):
            self._beside(self._save)
        threads = self._config.seal_threads
        for _ in range(repeats):
            self._beside(
                lambda: {"checksums": _seconds(lambda: chunk_digests(self._target, CHUNK, threads=threads))}
            )
        for name, verify in (("load, verified", True), ("load, not verified", False)):
            loader = MLFlashpointCheckpointLoader(self._objects)
            loader.config = dataclasses.replace(self._config, verify=verify)
            for _ in range(repeats):
                self._beside(lambda loader=loader, name=name: {name: _seconds(lambda: self._load(loader))})  # type: ignore[misc]
        self._objects.close()
        return Measured(len(self._source), repeats, [_figure(*item) for item in self._samples.items()])

    def _beside(self, measure: Callable[[], dict[str, float]]) -> None:
        """Take the samples that ``measure`` returns, with a memcpy before and after."""
        before_s = _seconds(lambda: np.copyto(self._target, self._source))
        found = measure()
        after_s = _seconds(lambda: np.copyto(self._target, self._source))
        beside_s = (before_s + after_s) / 2
        for name, seconds in {"memcpy": beside_s, **found}.items():
            self._samples.setdefault(name, []).append((seconds, beside_s))

    def _save(self) -> dict[str, float]:
        """One save: until training could go on, and until the version is complete."""
        saver = self._saver
        self._saves += 1
        begin_s = time.perf_counter()
        pending = saver.begin(self._saves)
        saver.initialize_checkpoint(pending)
        layout = saver.plan(self._entries)
        pending.staged.append(saver.stage(layout, lambda buffer: self._fill(buffer, layout)))
        staged_s = time.perf_counter()
        saver.write(pending)
        saver.write_metadata(pending)
        saver.finalize(pending)
        return dict(zip(SAVE, (staged_s - begin_s, time.perf_counter() - begin_s), strict=True))

    def _fill(self, buffer: BufferObject, layout: ObjectLayout) -> None:
        for array, begin, end in zip(self._arrays.values(), layout.begins, layout.ends, strict=True):
            np.copyto(buffer.data[begin:end].view(np.float32), array)

    def _load(self, loader: MLFlashpointCheckpointLoader) -> None:
        with loader.load(self._saves, warm=True) as view:
            loader.read(view, self._arrays)


def _figure(name: str, samples: Sequence[tuple[float, float]]) -> Figure:
    return Figure(
        name,
        statistics.median(seconds for seconds, _ in samples),
        statistics.median(seconds / memcpy_s for seconds, memcpy_s in samples),
    )


def _seconds(operation: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    operation()
    return time.perf_counter() - begin_s


def _source(nbytes: int) -> Bytes:
    """Bytes of a training state: no pattern that a cache or a copy could make use of."""
    block = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    return np.resize(block, max(nbytes // _UNIT_BYTES, 1) * _UNIT_BYTES)


def _warm_file(path: str, nbytes: int) -> Bytes:
    """A file, mapped, every page of it touched."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        data: Bytes = np.frombuffer(mmap.mmap(fd, nbytes), dtype=np.uint8)
    finally:
        os.close(fd)
    prefault(data, 0, nbytes)
    return data
