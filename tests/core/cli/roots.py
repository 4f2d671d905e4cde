"""Job roots to look at, healthy and otherwise, and commands as a user runs them."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from flashpoint import manifest
from flashpoint.config import FlashpointConfig
from flashpoint.coordinator import SingleProcessCoordinator
from flashpoint.layout import Entry
from flashpoint.objects import CheckpointObjectManager
from flashpoint.saver import MLFlashpointCheckpointSaver

REPOSITORY = Path(__file__).resolve().parents[3]
ARRAYS = {
    "layers.0.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "layers[1].weight": np.ones((2, 2), ml_dtypes.bfloat16),
    "ids": np.arange(100, dtype=np.int64),
}
TEN_FLOATS = (Entry("x", "float32", (10,)),)
VALUES = {"step": 7, "betas": (0.9, 0.95), "name": "a\nb"}


def saver_of(root, **settings):
    return MLFlashpointCheckpointSaver(
        CheckpointObjectManager(root, config=FlashpointConfig(keep=0, **settings))
    )


def saved(root, arrays=ARRAYS, values=VALUES, step=100, **settings):
    """Save one version and return its folder."""
    saver = saver_of(root, **settings)
    saver.save(step, arrays, values)
    saver.objects.close()
    return f"{root}/step-{step}_ckpt"


def begun(root, step, *, entries=TEN_FLOATS, data=b"", with_manifest=False):
    """Begin a save and stop before its end; returns (saver, pending), whose marker is live."""
    saver = saver_of(root)
    pending = saver.begin(step)
    saver.initialize_checkpoint(pending)
    layout = saver.plan(entries)

    def fill(buffer):
        buffer.data[layout.begins[0] : layout.begins[0] + len(data)] = memoryview(data)

    pending.staged.append(saver.stage(layout, fill))
    saver.write(pending)
    if with_manifest:
        saver.write_metadata(pending)
    return saver, pending


def crashed(root, step, **how):
    saver, pending = begun(root, step, **how)
    for part in pending.staged:
        part.release(saver.objects.pool)
    pending.marker.release()  # as the kernel does for the dead
    return pending.container.path


class ThreadCoordinator(SingleProcessCoordinator):
    """A rank in a thread of this process."""

    def __init__(self, rank, shared):
        self.rank, self.local_rank, self.world_size = rank, rank, 2
        self._values, self._changed = shared._values, shared._changed


def saved_by_two_ranks(root, whole, step=100):
    """One tensor in two shards and one that both ranks store whole, saved by two ranks of this node."""
    shared, half = SingleProcessCoordinator(), len(whole) // 2

    def save(rank):
        objects = CheckpointObjectManager(root, rank=rank)
        saver = MLFlashpointCheckpointSaver(objects, ThreadCoordinator(rank, shared))
        pending = saver.begin(step)
        saver.initialize_checkpoint(pending)
        shard = whole[rank * half : (rank + 1) * half]
        origin = (rank * half, *[0] * (whole.ndim - 1))
        entries = [
            Entry("sharded", whole.dtype.name, shard.shape, origin, whole.shape),
            Entry("twice", "int32", (3,)),
        ]
        layout = saver.plan(entries)

        def fill(buffer):
            for array, begin, end in zip(
                [shard, np.int32([1, 2, 3])], layout.begins, layout.ends, strict=True
            ):
                buffer.data[begin:end] = np.frombuffer(array.tobytes(), np.uint8)

        pending.staged.append(saver.stage(layout, fill))
        saver.write(pending)
        saver.write_metadata(pending)
        saver.finalize(pending)

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return f"{root}/step-{step}_ckpt"


def object_of(container, rank=0):
    return Path(container, f"rank{rank:05d}-0.safetensors")


def flip_byte(path, position):
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0xFF]))


def position_of(container, name):
    data = Path(container, ".metadata").read_bytes()
    decoded = manifest.decode(data)
    record, i = decoded.by_name[name][0]
    return decoded.layout(record).begins[i]


def flashpoint(*args, **options):
    """Run a command as a user does, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), **options.pop("env", {})}
    command = [sys.executable, "-m", "flashpoint", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, **options)


def rows(text):
    return [" ".join(line.split()) for line in text.splitlines()]


def until(condition, timeout_s=60):
    """Wait for what an agent or another process is about to do."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.02)
