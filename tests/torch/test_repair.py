"""Copies that are damaged while nobody looks: a good one on another node takes their place."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flashpoint_torch as fpt
from flashpoint.manifest import MANIFEST_NAME
from flashpoint.telemetry import counters
from tests.torch.nodes import Cluster, blank_state, node_state
from tests.torch.states import same


def save_steps(rank: int, job_root: str, *, steps: int, **settings: Any) -> None:
    with fpt.init(job_root, **settings) as fp:
        for step in range(1, steps + 1):
            handle = fp.save(node_state(step, rank), step)
            assert handle.wait("replicated", timeout_s=30), handle.replication_error


def load_newest(rank: int, job_root: str, **settings: Any) -> tuple[int | None, str, bool, dict[str, int]]:
    with fpt.init(job_root, **settings) as fp:
        state = blank_state()
        found = fp.recover(state)
        exact = found is not None and same(state, node_state(found.step, rank))
        return (found.step, found.tier, exact, counters()) if found else (None, "", exact, counters())


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(2, ranks_per_node=1, copies=1, keep=2) as cluster:
        cluster.run(save_steps, steps=2)
        yield cluster


def objects_of(cluster: Cluster, step: int, rank: int) -> list[Path]:
    """An object of a rank, on every node that holds it, its own node's first."""
    roots = [Path(node.job_root) for node in cluster.nodes]
    roots.sort(key=lambda root: root != Path(cluster.nodes[rank].job_root))
    return [root / f"step-{step}_ckpt" / f"rank{rank:05}-0.safetensors" for root in roots]


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.fault(20)
def test_a_corrupt_object_is_replaced_by_the_peers_copy(cluster: Cluster) -> None:
    own, copy = objects_of(cluster, 2, rank=0)
    good = copy.read_bytes()
    flip(own, len(good) // 2)
    answers = cluster.run(load_newest)
    assert [(step, tier, exact) for step, tier, exact, _ in answers] == [(2, "peer", True)] * 2
    assert answers[0][3]["objects_repaired"] == 1
    assert own.read_bytes() == good


def test_a_missing_object_is_had_from_the_peer(cluster: Cluster) -> None:
    own, copy = objects_of(cluster, 2, rank=1)
    own.unlink()
    answers = cluster.run(load_newest)
    assert [(step, tier, exact) for step, tier, exact, _ in answers] == [(2, "peer", True)] * 2
    assert own.read_bytes() == copy.read_bytes()


@pytest.mark.fault(21)
def test_where_all_copies_are_corrupt_the_older_version_serves(cluster: Cluster) -> None:
    for path in objects_of(cluster, 2, rank=0):
        flip(path, 5000)
    answers = cluster.run(load_newest)
    assert [(step, tier, exact) for step, tier, exact, _ in answers] == [(1, "local", True)] * 2


def test_a_copy_that_nobody_needs_now_may_be_corrupt(cluster: Cluster) -> None:
    _, copy = objects_of(cluster, 2, rank=0)
    flip(copy, 5000)
    answers = cluster.run(load_newest)
    assert [(step, tier, exact) for step, tier, exact, _ in answers] == [(2, "local", True)] * 2


@pytest.mark.parametrize("offset", [3, -40, -5])
@pytest.mark.fault(20, 25)
def test_a_garbled_manifest_is_replaced_by_the_peers(cluster: Cluster, offset: int) -> None:
    paths = [Path(node.job_root) / "step-2_ckpt" / MANIFEST_NAME for node in cluster.nodes]
    good = paths[1].read_bytes()
    flip(paths[0], offset % len(good))
    answers = cluster.run(load_newest)
    assert [(step, exact) for step, _, exact, _ in answers] == [(2, True)] * 2
    assert paths[0].read_bytes() == good
