"""The job's own coordinator, or a rank, does not answer: saves fail in time and by name, and go on afterwards."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from flashpoint_torch import coordinator
from tests.chaos import Chaos
from tests.core.processes import Process
from tests.torch.nodes import Cluster, last_of, lines_of, recover, train, wait_for

COMMIT_S = 2.0
WAIT_S = 60.0
SETTINGS = {"commit_timeout_s": COMMIT_S}


def _hold_the_store(say: Callable[[Any], None]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    say(store.port)
    say("the end")


class Ports:
    """Where the ranks find their store: each at a port of its own."""

    def __init__(self, *ports: int) -> None:
        self._ports = list(ports)

    @property
    def port(self) -> int:
        return self._ports.pop(0)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def count(log: str, cluster: Cluster, word: str, rank: int) -> int:
    return sum(line[0] == word for line in lines_of(log, cluster)[rank])


def until(condition: Callable[[], bool], cluster: Cluster, log: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, [lines[-3:] for lines in lines_of(log, cluster)]
        time.sleep(0.02)


def train_impatiently(*args: Any, **settings: Any) -> list[int]:
    """As `train`, with less patience for the store."""
    coordinator.ANSWER_S = COMMIT_S
    return train(*args, **settings)


def saves_fail_and_then_go_on(
    cluster: Cluster, log: str, fault: Callable[[], Any], *, awake: list[int], names: str
) -> None:
    """While the fault lasts, saves of the ranks ``awake`` fail within their deadlines, and nothing is committed."""
    cluster.start(train_impatiently, log, waits_for="complete", kib=8)
    wait_for(log, cluster, "complete", times=3)
    with fault():
        time.sleep(0.5)  # what was on its way may arrive
        before = [last_of(lines, "complete") for lines in lines_of(log, cluster)]
        failed = {rank: count(log, cluster, "failed", rank) for rank in awake}
        start_s = time.monotonic()
        until(lambda: all(count(log, cluster, "failed", r) >= failed[r] + 2 for r in awake), cluster, log)
        print(f"two failed saves in {time.monotonic() - start_s:.1f} s")
        after = [last_of(lines, "complete") for lines in lines_of(log, cluster)]
        assert max(after) <= max(before) + 1  # the one that was being committed
        said = [
            " ".join(line) for rank in awake for line in lines_of(log, cluster)[rank] if line[0] == "failed"
        ]
        assert any(names in text for text in said), said
    newest = max(last_of(lines, "complete") for lines in lines_of(log, cluster))
    until(
        lambda: all(last_of(lines, "complete") > newest + 2 for lines in lines_of(log, cluster)), cluster, log
    )
    cluster.kill_ranks()
    newest = min(last_of(lines, "complete") for lines in lines_of(log, cluster))
    answers = cluster.run(recover, kib=8)
    assert len({answer["step"] for answer in answers}) == 1
    assert all(answer["exact"] and answer["step"] >= newest for answer in answers), answers


@pytest.mark.fault(12, "H")
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_12_while_a_rank_is_stopped_the_others_saves_fail_by_its_name(tmp_path: Path, rank: int) -> None:
    """Rank 0 leads the commit."""
    log = str(tmp_path / "log")
    with Cluster(1, ranks_per_node=2, copies=0, **SETTINGS) as cluster:

        def fault() -> Any:
            return stopped(cluster.workers[rank].process.pid)

        saves_fail_and_then_go_on(cluster, log, fault, awake=[1 - rank], names=f"rank {rank}")


@pytest.mark.soak
@pytest.mark.fault(12)
def test_12_while_the_jobs_store_is_stopped_saves_fail_in_time(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    with Cluster(1, ranks_per_node=2, copies=0, **SETTINGS) as cluster:
        store = Process(_hold_the_store)
        try:
            port = store.hear()
            cluster._store = Ports(*[port] * 4)  # type: ignore[assignment]
            saves_fail_and_then_go_on(cluster, log, lambda: stopped(store.pid), awake=[0, 1], names="within")
        finally:
            store.end()


@pytest.mark.fault(29)
@pytest.mark.parametrize("direction", ["up", pytest.param("down", marks=pytest.mark.soak)])
def test_29_a_rank_that_is_cut_off_in_one_direction_commits_nothing(tmp_path: Path, direction: str) -> None:
    """Neither it, nor the others without it: a version needs every rank's vote."""
    log = str(tmp_path / "log")
    with Cluster(3, **SETTINGS) as cluster, Chaos(seed=1) as chaos:
        port = cluster._store.port
        link = chaos.link(port)
        store, cluster._store = cluster._store, Ports(port, port, link.port, *[port] * 3)  # type: ignore[assignment]

        @contextmanager
        def fault() -> Iterator[None]:
            link.faults(direction, stall=True)
            try:
                yield
            finally:
                link.heal()

        saves_fail_and_then_go_on(cluster, log, fault, awake=[0, 1], names="rank 2")
        del store
