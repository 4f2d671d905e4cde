"""Ranks for tests: gloo worker processes that stay up for the whole session.

Importing torch costs seconds, a new process group milliseconds. So four processes are forked from a
server that has imported everything; each test sends a function to the first n of them, which form a
process group of their own for as long as it runs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
from torch.distributed.checkpoint import _async_process_executor

import flashpoint_torch  # noqa: F401

WORLD_MAX: Final = 4
RUN_S: Final = 90.0  # a run that takes longer has failed
_REPOSITORY: Final = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class Died:
    """In place of a result: the worker did not live to give one."""

    exitcode: int


class Workers:
    """The pool. A worker that died, or that had to be killed because a run hung, is started anew."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[_Worker] = []
        self._runs = 0

    def run(
        self,
        world_size: int,
        work: Callable[..., Any],
        *args: Any,
        timeout_s: float = RUN_S,
        dies: bool = False,
    ) -> list[Any]:
        """``work(*args)`` on every rank of a new process group; the results in the order of ranks.

        Args:
            work: a function at the top of a module; its results must not be tensors.
            dies: a rank may die in it: its result is then a `Died`.
        """
        assert world_size <= WORLD_MAX
        while len(self._workers) < world_size:
            self._workers.append(_Worker())
        self._workers = [worker if worker.is_alive() else worker.replace() for worker in self._workers]
        self._runs += 1
        group = self._workers[:world_size]
        for rank, worker in enumerate(group):
            worker.pipe.send((rank, world_size, self._store.port, self._runs, timeout_s, work, args))
        deadline = time.monotonic() + timeout_s
        answers = [worker.answer(deadline) for worker in group]
        if any(kind == "hangs" for kind, _ in answers):
            for worker in group:
                worker.kill()
        failures = [
            f"rank {rank} {kind}: {value}"
            for rank, (kind, value) in enumerate(answers)
            if kind in ("failed", "hangs") or (kind == "died" and not dies)
        ]
        assert not failures, "\n".join(failures)
        return [value for _, value in answers]

    def close(self) -> None:
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.process.join(5)
            worker.kill()


class _Worker:
    def __init__(self) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        # Not a daemon: DCP's process executor starts a process of its own in it.
        self.process = _fork_context().Process(target=_serve, args=(theirs,))
        self.process.start()
        theirs.close()

    def is_alive(self) -> bool:
        return self.process.exitcode is None

    def answer(self, deadline: float) -> tuple[str, Any]:
        if not self.pipe.poll(max(deadline - time.monotonic(), 0.0)):
            return "hangs", "no answer in time; its threads are in the captured stderr"
        try:
            return self.pipe.recv()  # type: ignore[no-any-return]
        except (EOFError, ConnectionResetError):
            self.process.join(10)
            return "died", Died(self.process.exitcode or 0)

    def replace(self) -> _Worker:
        self.pipe.close()
        return _Worker()

    def kill(self) -> None:
        if self.is_alive():
            os.kill(self.process.pid or 0, signal.SIGKILL)
            self.process.join(10)
        self.pipe.close()


_stores: dict[int, dist.TCPStore] = {}
_world_of_dcp_process = 0


def use_dcp_process() -> None:
    """To be called by work that uses DCP's process executor.

    Its process takes seconds to start and then serves every later run of the same number of ranks; one that
    was started for another number is ended.
    """
    global _world_of_dcp_process
    if _world_of_dcp_process != dist.get_world_size():
        _async_process_executor._CHECKPOINT_PROCESS = None
        gc.collect()
        _world_of_dcp_process = dist.get_world_size()


def _fork_context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_REPOSITORY, before]))
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # DCP's process executor would ask for this host's name
    while True:
        try:
            rank, world_size, port, run, timeout_s, work, args = pipe.recv()
        except (EOFError, OSError):
            return  # the session is over
        faulthandler.dump_traceback_later(max(timeout_s - 2, 1), file=sys.__stderr__)
        try:
            answer = ("done", _as_rank(rank, world_size, port, run, work, args))
        except BaseException:
            answer = ("failed", traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        gc.collect()
        try:
            pipe.send(answer)
        except Exception as error:
            pipe.send(("failed", f"the result cannot be sent: {error}"))


def _as_rank(rank: int, world_size: int, port: int, run: int, work: Callable[..., Any], args: Any) -> Any:
    if port not in _stores:  # to connect takes seconds where names are not resolved
        _stores[port] = dist.TCPStore("127.0.0.1", port, is_master=False)
    store = dist.PrefixStore(f"run-{run}", _stores[port])
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=RUN_S)
    )
    try:
        dist.barrier()  # a quick rank must not leave while others still connect to it
        return work(*args)
    finally:
        with contextlib.suppress(Exception):  # a rank that died takes the group with it
            dist.destroy_process_group()
