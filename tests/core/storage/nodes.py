"""Nodes that drain, without an agent around them: a job root, its versions, and a real `Drainer`."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import flashpoint
from flashpoint import manifest as manifests
from flashpoint.checksums import mismatches
from flashpoint.config import FlashpointConfig
from flashpoint.errors import CheckpointNotFoundError
from flashpoint.objects import CheckpointObjectManager
from flashpoint.replication.inventory import Inventory
from flashpoint.retention import Version
from flashpoint.storage import claim
from flashpoint.storage.drainer import Drainer
from flashpoint.storage.records import manifest_name, step_of
from flashpoint.storage.store import open_store
from tests.core.world import Job, contents

WAIT_S = 60
JOB = "ab" * 16


class Node:
    """One node of a job whose storage is ``url``."""

    def __init__(self, root: str, url: str, *, ranks: Sequence[int] = (0,), index: int = 0) -> None:
        self.root, self.url, self.ranks, self.index = root, url, ranks, index
        self.drainer: Drainer | None = None
        self.objects: CheckpointObjectManager | None = None

    def start(self, epoch: int = 1, **settings: Any) -> Drainer:
        """An agent's drainer, as after a start of the job."""
        self.stop()
        config = FlashpointConfig.from_env({}, storage=self.url, **({"storage_timeout_s": 20} | settings))
        if self.index == 0:
            claim.claim(config, self.root, JOB, epoch, None)
        self.objects = CheckpointObjectManager(self.root, rank=None, config=config)
        self.inventory = Inventory(self.objects)
        self.drainer = Drainer(
            self.objects, config, job=JOB, epoch=epoch, index=self.index, leader=0, ranks=self.ranks
        )
        return self.drainer

    def offer(self) -> None:
        assert self.drainer is not None
        self.drainer.offer(list(self.inventory.look().values()))

    def stop(self) -> None:
        if self.drainer is not None:
            self.drainer.close()
        if self.objects is not None:
            self.objects.close()
        self.drainer = self.objects = None


def until(condition: Callable[[], Any], *nodes: Node) -> None:
    """Turn the loops of these nodes' agents until something holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, [node.drainer and node.drainer.error for node in nodes]
        for node in nodes:
            node.offer()
        time.sleep(0.02)


def drained(step: int, *nodes: Node, epoch: int = 1) -> None:
    until(lambda: nodes[0].drainer.last == Version(epoch, step), *nodes)


def steps_in(folder: str) -> list[int]:
    """Steps of a folder that look drained."""
    names = [name for name in os.listdir(folder) if name.startswith("step-")]
    found = [int(name[5:-5]) for name in names if os.path.exists(f"{folder}/{name}/.metadata")]
    return sorted(found)


def check(folder: str) -> list[int]:
    """Steps that look drained, all of whose bytes are right; one that is being deleted just now is left out."""
    sound = []
    for step in steps_in(folder):
        try:
            with flashpoint.open(f"{folder}/step-{step}_ckpt") as view:
                view.verify()
                assert view["step"] == step
        except CheckpointNotFoundError:
            continue
        sound.append(step)
    return sound


def check_stored(url: str) -> list[int]:
    """As `check`, by what the storage itself gives to who asks it for whole objects."""
    store = open_store(FlashpointConfig.from_env({}, storage=url))
    sound = []
    for name in store.folders():
        step = step_of(name)
        if step is None or store.head(manifest_name(step)) is None:
            continue
        try:
            manifest = manifests.decode(store.read(manifest_name(step)))
            assert manifest.step == step
            for record in manifest.objects:
                data = np.frombuffer(store.read(f"{name}/{record.name}"), dtype=np.uint8)
                assert data.nbytes == record.nbytes, (step, record.name)
                chunks = range(-(-record.nbytes // record.chunk_bytes))
                assert not mismatches(data, record.chunk_bytes, record.chunks, chunks), (step, record.name)
        except CheckpointNotFoundError:
            continue  # deleted just now, the manifest first
        sound.append(step)
    return sound


def save(job: Job, step: int, size: int = 1000) -> None:
    """Save arrays of ``size`` integers on every rank, which tell the step and the rank."""
    job.each(lambda rank: rank.save(step, contents(step, rank.rank, size), {"step": step}))


def holds(folder: str, step: int, rank: int = 0) -> bool:
    with flashpoint.open(f"{folder}/step-{step}_ckpt") as view:
        return bool(np.all(view[f"of_rank_{rank}"] == step * 1000 + rank))
