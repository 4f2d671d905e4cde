"""Ranks and nodes that are lost, come back in another order, or with other clocks; and who loads what then."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import flashpoint_torch as fpt
from flashpoint.replication.placement import Slot, place
from tests.faults.machine import shift_monotonic_clock
from tests.torch.faults import JOIN_S, Launcher
from tests.torch.nodes import (
    Cluster,
    allocated,
    last_of,
    lines_of,
    recover,
    train,
    wait_for,
)

MIB = 1 << 20
DAY_S = 86_400
SAVES = 3


def save_and_idle(cluster: Cluster, log: Path, work: Any = train, **kwargs: Any) -> None:
    cluster.start(work, str(log), lingers=True, **{"saves": SAVES, "kib": 8, **kwargs})
    wait_for(str(log), cluster, "idle")


def all_have(cluster: Cluster, step: int, tier: str, **kwargs: Any) -> None:
    answers = cluster.run(recover, **{"kib": 8, **kwargs})
    told = [(answer["step"], answer["tier"], answer["exact"]) for answer in answers]
    assert told == [(step, tier, True)] * cluster.world_size, (told, cluster.agent_logs())


# ---- losses ------------------------------------------------------------------------------------------


@pytest.mark.fault(5)
def test_5_all_ranks_of_all_nodes_are_killed_and_go_on_from_their_own_memory(tmp_path: Path) -> None:
    with Cluster(2, ranks_per_node=2) as cluster:
        save_and_idle(cluster, tmp_path / "log")
        agents = cluster.agents()
        cluster.kill_ranks()
        all_have(cluster, SAVES, "local")
        assert len(agents) == 2


@pytest.mark.soak
@pytest.mark.fault(8)
def test_8_two_nodes_that_hold_nothing_of_each_other_are_lost_with_one_copy(tmp_path: Path) -> None:
    with Cluster(4, copies=1) as cluster:
        save_and_idle(cluster, tmp_path / "log")
        holders = place([Slot(node.index) for node in cluster.nodes], 1)
        pairs = [(a, b) for a in range(4) for b in range(a) if a not in holders[b] and b not in holders[a]]
        cluster.lose(*pairs[0])
        all_have(cluster, SAVES, "peer")


def train_in_racks(rank: int, job_root: str, log: str, **settings: Any) -> list[int]:
    """Two nodes in each rack."""
    return train(rank, job_root, log, failure_domain=f"rack-{rank // 2}", **settings)


@pytest.mark.fault(8)
def test_8_a_whole_rack_is_lost_with_one_copy(tmp_path: Path) -> None:
    with Cluster(4, copies=1) as cluster:
        save_and_idle(cluster, tmp_path / "log", work=train_in_racks)
        cluster.lose(0, 1)
        all_have(cluster, SAVES, "peer")


@pytest.mark.fault(40)
def test_40_ranks_that_come_back_on_other_nodes_have_their_own_state(tmp_path: Path) -> None:
    with Cluster(3, ranks_per_node=(2, 1, 2)) as cluster:
        save_and_idle(cluster, tmp_path / "log")
        cluster.kill_ranks()
        first, second, third = cluster.nodes
        first.ranks, second.ranks, third.ranks = (3, 4), (2,), (0, 1)
        cluster.nodes.sort(key=lambda node: node.ranks)
        answers = cluster.run(recover, kib=8)
        assert [(answer["step"], answer["exact"]) for answer in answers] == [(SAVES, True)] * 5
        save_and_idle(cluster, tmp_path / "again")  # and the job goes on so


@pytest.mark.soak
@pytest.mark.fault("E", 9)
def test_all_ranks_go_to_storage_if_one_nodes_memory_is_gone(tmp_path: Path) -> None:
    """Node 0 has a newer version still; it is of no use to a job that has lost the rest of it."""
    (tmp_path / "storage").mkdir()
    settings = {"storage": f"file://{tmp_path}/storage", "storage_every_n": 100}
    with Cluster(2, copies=0, **settings) as cluster:
        save_and_idle(cluster, tmp_path / "log", saves=1)
        deadline = time.monotonic() + JOIN_S
        while not (tmp_path / "storage/step-1_ckpt/.metadata").exists():
            assert time.monotonic() < deadline, cluster.agent_logs()
            time.sleep(0.02)
        cluster.kill_ranks()
        save_and_idle(cluster, tmp_path / "more")
        cluster.lose(1)
        assert SAVES + 1 in cluster.containers()[0]
        answers = cluster.run(recover, kib=8)
        assert [(answer["step"], answer["tier"], answer["exact"]) for answer in answers] == [
            (1, "storage", True)
        ] * 2


# ---- clocks ------------------------------------------------------------------------------------------


@contextmanager
def wall_clock(days: float) -> Iterator[None]:
    """This process's wall clock is so far off."""
    now, now_ns = time.time, time.time_ns
    with (
        patch("time.time", lambda: now() + days * DAY_S),
        patch("time.time_ns", lambda: now_ns() + int(days * DAY_S * 1e9)),
    ):
        yield


def train_with_clocks(rank: int, job_root: str, log: str, *, days: list[float], **settings: Any) -> list[int]:
    """Each rank's wall clock is off by so many days; the agent of rank 1's node has a monotonic clock of its own."""
    if rank == 1:
        shift_monotonic_clock(DAY_S)  # of what is started from here: the agent
    with wall_clock(days[rank]):
        return train(rank, job_root, log, **settings)


@pytest.mark.root
@pytest.mark.fault(39)
def test_39_clocks_that_are_a_day_off_change_no_order(tmp_path: Path) -> None:
    with Cluster(3) as cluster:
        step = 0
        for number, days in enumerate(([0.0, 1.0, -1.0], [-1.0, 0.0, 1.0], [0.0, 0.0, 0.0])):
            log = tmp_path / f"log-{number}"
            try:
                save_and_idle(cluster, log, work=train_with_clocks, days=days)
            except AssertionError as error:
                if "time namespace" in str(error):
                    pytest.skip(str(error).splitlines()[-1])
                raise
            found = [last_of(lines, "recovered") for lines in lines_of(str(log), cluster)]
            assert found == [step] * 3
            step += SAVES
            cluster.lose(number)  # so that peers with other clocks give everything back
        all_have(cluster, step, "peer")


# ---- memory of the first save ------------------------------------------------------------------------


def peaks_of_saves(rank: int, job_root: str, mib: int, saves: int) -> list[int]:
    """For each save, the most MiB that process and tmpfs took at a time beyond what they had before it."""
    samples: list[int] = []
    over = threading.Event()

    def taken() -> int:
        (line,) = [
            text for text in Path("/proc/self/status").read_text().splitlines() if text[:8] == "RssAnon:"
        ]
        return int(line.split()[1]) * 1024 + allocated(job_root)

    def sample() -> None:
        while not over.is_set():
            samples.append(taken())
            time.sleep(0.001)

    peaks = []
    with fpt.init(job_root, prefault=False) as fp:
        state = {f"layer.{n}": torch.full((mib // 16, MIB), n, dtype=torch.uint8) for n in range(16)}
        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            for step in range(1, saves + 1):
                before = taken()
                samples.clear()
                assert fp.save(state, step).done()
                peaks.append((max([*samples, taken()]) - before) // MIB)
        finally:
            over.set()
            sampler.join()
    return peaks


@pytest.mark.fault("C")
def test_the_first_save_takes_the_memory_of_one_version_and_later_ones_none_beyond_the_second(
    job_root: str,
) -> None:
    mib = 48
    [peaks] = Launcher(1).run(peaks_of_saves, job_root, mib, saves=4)
    print(f"MiB taken by the saves of {mib} MiB: {peaks}")
    assert mib <= peaks[0] <= mib + 16
    assert peaks[1] <= mib + 16
    assert max(peaks[2:]) <= 16
