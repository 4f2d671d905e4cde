"""Jobs of several nodes on one host: each node has a job root, ranks and an agent of its own, and can be lost.

A node's identity is the inode of its job root, so one whose folder was deleted comes back as another. The
ranks are real processes in a gloo group over a store that the test holds, as torchrun's agent does. What
they do is a function ``work(rank, job_root, *args, **settings)``; `train` and `recover` are such functions,
as are those of `tests.torch.faults`.
"""

from __future__ import annotations

import functools
import itertools
import logging
import multiprocessing as mp
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest.mock import patch

import torch
import torch._dynamo  # here, so that no forked rank spends seconds on it when it makes its first DTensor
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import flashpoint_torch as fpt
from flashpoint.telemetry import logger
from tests.conftest import SHARED_MEMORY
from tests.torch import states
from tests.torch.faults import JOIN_S, REPOSITORY, Log, Worker, _bytes, _run, log_lines, state_of

GONE_S: Final = 10.0  # for a killed process to be gone
KIB: Final = 64  # of a rank's state, about
SETTINGS: Final = {
    "agent": "process",
    "agent_idle_s": 60.0,  # should the test be killed, and clean nothing up
    "chunk_bytes": 64 << 10,
    "commit_timeout_s": 20.0,
    "recovery_timeout_s": 30.0,
}


# ---- states ---------------------------------------------------------------------------------------


def node_state(step: int, rank: int, *, kib: int = KIB) -> dict[str, Any]:
    """`state_of`, and for several ranks tensors of all of them: in uneven shards, and the same on each."""
    state = state_of(step, rank, kib=kib)
    if dist.is_initialized():
        world, mesh = dist.get_world_size(), _mesh()
        whole = (
            torch.from_numpy(_bytes(step, 0, (5 * world + 1) * 64, "whole")).view(torch.float32).view(-1, 16)
        )
        parts = [*whole.chunk(world), *[whole[:0]] * world]  # chunk may give fewer
        state["sharded"] = DTensor.from_local(
            parts[rank].clone(), mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        state["replicated"] = DTensor.from_local(whole.clone(), mesh, [Replicate()], run_check=False)
    return state


def blank_state(*, kib: int = KIB) -> dict[str, Any]:
    """A state of the same shape as any step's, holding nothing that was ever saved."""
    return node_state(2**30, 999 if not dist.is_initialized() else dist.get_rank(), kib=kib)


@functools.cache
def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


# ---- nodes ----------------------------------------------------------------------------------------


@dataclass
class Node:
    """One host's memory, its ranks and its agent."""

    index: int
    folder: str
    ranks: tuple[int, ...]

    @property
    def job_root(self) -> str:
        return f"{self.folder}/job"

    @property
    def address(self) -> str:
        """A loopback address of its own."""
        return f"127.0.0.{self.index + 1}"

    def agents(self) -> list[int]:
        """Process ids of agents of this job root, be it deleted since; more than one is an error of theirs."""
        return [pid for pid, words in _command_lines() if "agent" in words and self.job_root in words]

    def kill_agent(self) -> int:
        """SIGKILL; how many agents there were."""
        pids = self.agents()
        _kill(pids)
        return len(pids)

    def wipe(self) -> None:
        """What a replaced host has in its memory: nothing."""
        shutil.rmtree(self.job_root, ignore_errors=True)
        # What makes the new folder another one is its inode, which must not be given out again.
        with tempfile.TemporaryDirectory(dir=self.folder):
            os.makedirs(self.job_root, mode=0o700)

    def nbytes(self) -> int:
        """Allocated in its memory; a file counts once, however many names it has."""
        return allocated(self.folder)


class Cluster:
    """A job on several nodes. Leave its block, and every process and file of it is gone.

    Args:
        nodes: how many.
        ranks_per_node: a number for all, or one for each.
        copies: of each object, on other nodes.
        folder: where nodes keep their folders; by default a new one in shared memory.
        settings: of Flashpoint, over `SETTINGS`.
    """

    def __init__(
        self,
        nodes: int,
        *,
        ranks_per_node: int | Iterable[int] = 1,
        copies: int = 1,
        folder: str | None = None,
        **settings: Any,
    ) -> None:
        self.folder = folder or tempfile.mkdtemp(prefix="flashpoint-test-", dir=SHARED_MEMORY)
        counts = [ranks_per_node] * nodes if isinstance(ranks_per_node, int) else list(ranks_per_node)
        ranks = iter(range(sum(counts)))
        self.nodes = [
            Node(index, f"{self.folder}/node-{index}", tuple(itertools.islice(ranks, count)))
            for index, count in enumerate(counts)
        ]
        for node in self.nodes:
            os.makedirs(node.job_root, mode=0o700, exist_ok=folder is not None)
        self.world_size = sum(counts)
        self.settings = {**SETTINGS, "copies": copies, **settings}
        self.workers: list[Worker] = []  # of the attempt that was started last
        self._attempts = itertools.count()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    # ---- running ----------------------------------------------------------------------------------

    def start(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Worker]:
        """Start ``work(rank, job_root, *args, **settings)`` on every rank; ``kwargs`` go over the settings."""
        attempt = next(self._attempts)
        self.workers = []
        for node in self.nodes:
            settings = {"agent_host": node.address, **self.settings, **kwargs}
            for rank in node.ranks:
                place = _Place(rank, self.world_size, rank - node.ranks[0], len(node.ranks), node.index)
                self.workers.append(
                    _start(_as_rank, place, self._store.port, attempt, work, node.job_root, args, settings)
                )
        return self.workers

    def run(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """As `start`, and wait for every rank's answer."""
        return [worker.answer() for worker in self.start(work, *args, **kwargs)]

    # ---- losing -----------------------------------------------------------------------------------

    def kill_ranks(self, *nodes: int) -> None:
        """SIGKILL the ranks of these nodes, or of all; agents live on."""
        ranks = [rank for index in nodes or range(len(self.nodes)) for rank in self.nodes[index].ranks]
        running = [worker for rank, worker in enumerate(self.workers) if rank in ranks]
        for worker in running:  # all before any is waited for: they die at one moment
            if worker.process.exitcode is None:
                worker.kill()
        for worker in running:
            worker.process.join(JOIN_S)
            worker.answers.close()

    def lose(self, *nodes: int) -> None:
        """These nodes die: ranks, agents and memory. A job does not outlive one of its ranks, so all ranks die.

        What the agents of other nodes had not fetched by then, they will not get.
        """
        pids = [pid for index in nodes for pid in self.nodes[index].agents()]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.kill_ranks()
        for index in nodes:
            self.nodes[index].wipe()
        _kill(pids)
        self._kill_new_agents(nodes)

    def _kill_new_agents(self, nodes: Iterable[int]) -> None:
        """Also those that a rank forked in its last moment, and that are not yet to be known as agents."""
        for pause_s in (0.02, 0.0):
            for index in nodes:
                self.nodes[index].kill_agent()
            time.sleep(pause_s)

    def agents(self) -> list[int]:
        """Process ids of all agents."""
        return [pid for node in self.nodes for pid in node.agents()]

    def await_no_agents(self, timeout_s: float = 60.0) -> None:
        """Wait until every agent has ended by itself, as they do when a job has released them."""
        deadline = time.monotonic() + timeout_s
        while pids := self.agents():
            assert time.monotonic() < deadline, f"agents {pids} live on:\n{self.agent_logs()}"
            time.sleep(0.02)

    def agent_logs(self) -> str:
        """What the agents have to say, for messages of failed tests."""
        logs = ((node.index, Path(node.job_root, ".agent/log")) for node in self.nodes)
        return "\n".join(
            f"node {index}: {line}"
            for index, path in logs
            if path.exists()
            for line in path.read_text(errors="replace").splitlines()[-20:]
        )

    # ---- looking ----------------------------------------------------------------------------------

    def nbytes(self) -> int:
        """Allocated in the memory of all nodes."""
        return sum(node.nbytes() for node in self.nodes)

    def objects(self, step: int) -> list[set[str]]:
        """For each node, the names of the objects of a version that lie there."""
        return [
            {path.name for path in Path(node.job_root, f"step-{step}_ckpt").glob("*.safetensors")}
            for node in self.nodes
        ]

    def containers(self) -> list[set[int]]:
        """For each node, the steps that have a folder there."""
        return [
            {int(path.name[5:-5]) for path in Path(node.job_root).glob("step-*_ckpt")} for node in self.nodes
        ]

    # ---- life -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Kill and delete everything."""
        with ExitStack() as stack:  # each of these, whatever becomes of the others
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            stack.callback(self._kill_new_agents, range(len(self.nodes)))
            stack.callback(self.kill_ranks)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Place:
    """What torchrun tells a rank."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int


def _as_rank(
    place: _Place, port: int, attempt: int, work: Callable[..., Any], job_root: str, args: Any, settings: Any
) -> Any:
    words = {
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_world_size,
        "GROUP_RANK": place.node,
    }
    os.environ.update({name: str(word) for name, word in words.items()})
    if place.world_size == 1:
        return work(0, job_root, *args, **settings)
    store = dist.PrefixStore(f"attempt-{attempt}", dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size)
    answer = work(place.rank, job_root, *args, **settings)
    dist.destroy_process_group()
    return answer


def _start(target: Callable[..., Any], *args: Any) -> Worker:
    """As `faults.start`, from a fork server that has imported this module, too."""
    ours, theirs = mp.Pipe(duplex=False)
    process = mp.get_context("forkserver").Process(target=_run, args=(theirs, target, args, {}))
    with (
        patch.object(mp.forkserver, "connect_to_new_process", _fork_server().connect_to_new_process),
        patch.dict(sys.modules, {"__main__": ModuleType("__main__")}),  # or the child would import pytest
    ):
        process.start()
    theirs.close()
    return Worker(process, ours)


@functools.cache
def _fork_server() -> ForkServer:
    """A server of our own: the process has one for all, and whoever came first chose what that imports."""
    server = ForkServer()
    server.set_forkserver_preload([__name__])
    path = os.pathsep.join(filter(None, [REPOSITORY, os.environ.get("PYTHONPATH")]))
    with patch.dict(os.environ, {"PYTHONPATH": path}):
        server.ensure_running()
    return server


def allocated(folder: str) -> int:
    """Bytes of memory that the files below a folder occupy, each counted once."""
    sizes = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                status = os.lstat(os.path.join(parent, name))
                sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def _command_lines() -> list[tuple[int, list[str]]]:
    """(process id, words) of every living process; one that is dead and not yet reaped has no words."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                data = Path(entry.path, "cmdline").read_bytes()
                found.append((int(entry.name), data.decode(errors="replace").split("\0")))
    return found


def _kill(pids: Iterable[int]) -> None:
    """SIGKILL, and wait until they are gone."""
    left = set(pids)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + GONE_S
    while left & {pid for pid, words in _command_lines() if words != [""]}:
        assert time.monotonic() < deadline, f"processes {left} outlive SIGKILL"
        time.sleep(0.005)


# ---- what ranks do --------------------------------------------------------------------------------


def train(
    rank: int,
    job_root: str,
    log_path: str,
    *,
    saves: int = 10**9,
    waits_for: str = "replicated",
    patience_s: float = JOIN_S,
    interval_s: float = 0.0,
    lingers: bool = False,
    kib: int = KIB,
    **settings: Any,
) -> list[int]:
    """Recover, then save one step after the other, as fast as can be, or at an interval.

    The log (`lines_of`) has one line for each moment: ``ready EPOCH``, ``recovered STEP TIER``, ``saving STEP``,
    ``complete STEP``, ``replicated STEP``, ``failed STEP REASON``, ``idle``.

    Args:
        saves: how many.
        waits_for: the moment of each save to wait for, before the next begins.
        patience_s: with it; what is not reached by then is logged as failed.
        lingers: live on after the last save, idle, until killed.

    Returns:
        The steps that reached the moment in time.
    """
    log, reached = Log(f"{log_path}.{rank}"), []
    with fpt.init(job_root, **settings) as fp:
        log.write("ready", fp.epoch)
        state = blank_state(kib=kib)
        found = fp.recover(state)
        last = found.step or 0 if found else 0
        assert found is None or states.same(state, node_state(last, rank, kib=kib)), f"step {last} is another"
        log.write("recovered", last, found.tier if found else "")
        for step in range(last + 1, last + 1 + saves):
            log.write("saving", step)
            next_s = time.monotonic() + interval_s
            handle = fp.async_save(node_state(step, rank, kib=kib), step)
            for moment in ("complete", "replicated"):
                if not handle.wait(moment, timeout_s=patience_s):
                    log.write("failed", step, handle.error or handle.replication_error or f"never {moment}")
                    break
                log.write(moment, step)
                if moment == waits_for:
                    reached.append(step)
                    break
            time.sleep(max(next_s - time.monotonic(), 0.0))
        if lingers:
            log.write("idle")
            time.sleep(10 * JOIN_S)
    return reached


def recover(
    rank: int,
    job_root: str,
    *,
    fallback: Any = None,
    replicates: bool = False,
    kib: int = KIB,
    **settings: Any,
) -> dict[str, Any]:
    """What a fresh process recovers, and whether it is what was saved under that step.

    Args:
        fallback: as of `Flashpoint.recover`; a number stands for a callable that fills in that step's state.
        replicates: then save the next step, and wait until it is replicated.

    Returns:
        ``step``, ``tier``, ``exact``, ``warnings`` (what was logged), ``saved`` (the step, or None).
    """
    with _heard() as warnings, fpt.init(job_root, **settings) as fp:
        state, saved = blank_state(kib=kib), None
        if isinstance(fallback, int):
            fallback = functools.partial(_fill, step=fallback, rank=rank, kib=kib)
        found = fp.recover(state, **({"fallback": fallback} if fallback is not None else {}))
        step = found.step or 0 if found else 0
        expected = node_state(step, rank, kib=kib) if found else blank_state(kib=kib)
        exact = states.same(state, expected)
        if replicates:
            handle = fp.async_save(node_state(step + 1, rank, kib=kib), step + 1)
            assert handle.wait("replicated", timeout_s=JOIN_S), handle.error or handle.replication_error
            saved = handle.step
        return {
            "step": step,
            "tier": found.tier if found else None,
            "exact": exact,
            "warnings": warnings,
            "saved": saved,
        }


def _fill(state: Any, *, step: int, rank: int, kib: int) -> int:
    """A fallback: long-term storage that holds one step."""
    for key, value in node_state(step, rank, kib=kib).items():
        state[key] = value
    return step


@contextmanager
def _heard() -> Any:
    """The warnings of Flashpoint in this process, as texts."""
    texts: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logger.addHandler(listener)
    try:
        yield texts
    finally:
        logger.removeHandler(listener)


def lines_of(log_path: str, cluster: Cluster) -> list[list[list[str]]]:
    """For each rank, the words of each line of its log."""
    return [log_lines(log_path, rank) for rank in range(cluster.world_size)]


def last_of(lines: Iterable[list[str]], word: str) -> int:
    """The last step of which a log says this; 0 if none."""
    return max((int(line[1]) for line in lines if line[0] == word), default=0)


def wait_for(
    log_path: str, cluster: Cluster, word: str, *, times: int = 1, timeout_s: float = JOIN_S
) -> None:
    """Wait until every rank's log has said this so often."""
    deadline = time.monotonic() + timeout_s
    while any(sum(line[0] == word for line in lines) < times for lines in lines_of(log_path, cluster)):
        for worker in cluster.workers:
            if worker.process.exitcode is not None:
                answer = worker.answer()  # says why, if it failed
                raise AssertionError(
                    f"process {worker.process.pid} ended before it said {word!r}: {answer!r}"
                )
        told = [lines[-2:] for lines in lines_of(log_path, cluster)]
        assert time.monotonic() < deadline, f"some rank never said {word!r}: {told}\n{cluster.agent_logs()}"
        time.sleep(0.001)
