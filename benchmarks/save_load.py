"""How fast saves and loads are, beside a memcpy of the same bytes and beside stock DCP: one table.

    python -m benchmarks.save_load [--quick] [--only WORKLOAD]... [--json FILE]

Every job below runs in fresh processes; `NOTES`, printed under the table, says how each figure is made.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flashpoint_torch as fpt
from benchmarks import measure, states, steps
from benchmarks.measure import Figure, FreePoolFile, Meter, Result, TmpfsFile
from benchmarks.states import State, Workload

FULL_BYTES: Final = 1 << 30
QUICK_BYTES: Final = 64 << 20
TENTH: Final = range(8, 15)  # the saves that "10th save" is the median of
TABLE_WIDTH: Final = 140  # where the output is no terminal
STEP: Final = 1000  # of the first save: step numbers keep their width, and manifests their size

NOTES: Final = """\
How each number is made. Medians; every job in fresh processes; job roots on the tmpfs named above.
workloads: 64 float32 tensors of one size; or 5,000 of float32, bfloat16, float16 and int64 with 1 to 3
  dimensions, sizes log-normal, the median about 130 KiB for 1 GiB. 2 ranks: gloo, half of the bytes on
  each, every tensor a DTensor with Shard(0) over both.
memcpy: np.copyto of one contiguous source (the very memory of the state's tensors) into a warm tmpfs
  mapping of the same size, one thread, just before and just after every timed call; "÷ memcpy" is the
  median of call over memcpy beside it. The mapping is our own, over the pool file that is free at the
  moment (beside stock DCP: a file of its own). 2 ranks: all start at a barrier and the slowest counts, for
  calls and memcpys alike. By torch: torch.Tensor.copy_ of the same two arrays, with torch's threads.
saves: fp.async_save(state, step), keep=1. Blocking: until the call returns. Complete: from the call until
  the version is complete (checksummed, committed on all ranks, markers gone). The next save begins when
  the last one's background work is done, as between steps. First: the process's first save, with nothing
  prepared, or after fp.warmup(state). 10th: saves 8 to 14 of a process. Beside busy processes: one for
  each core computes something else, as data loaders do. tmpfs: growth from before the 2nd to after the
  last save of new pool files, of bytes below the job root (each save writes a manifest and gives the last
  one up), and of the whole tmpfs (statvfs: others who use it count too).
load into existing tensors: fp.recover(state) in the process that saved: from a mapping that it has
  written. First: the first one after its saves. Not verified: fp.init(verify=False), after one recover
  that is not counted, since its mapping is new. By a new process: RecoverResult.seconds of its first
  recover; with its start: from starting the interpreter to the return of recover, imports, process group
  and init included, making the state's tensors left out.
flashpoint.open: to the return of open() in a process without torch; no tensor is read.
stock DCP: dcp.save / dcp.load with FileSystemWriter / FileSystemReader as they come, synchronous, into a
  new folder of the same tmpfs each time; the one before is deleted first, untimed. Ours through DCP: the
  same calls with storage_writer=fp.writer(), storage_reader=fp.reader(). Faster than stock: its "÷ memcpy"
  over ours (milliseconds, where there is none), our saves until complete and our loads verified.
training: steps of about 5 ms, either torch matmuls or pure Python, for some seconds with async saves back
  to back and without, in turns; mean time of a step, the time in async_save itself left out.
1 rank has torch's default number of threads, 2 ranks OMP_NUM_THREADS=1, as torchrun sets it. Python's
garbage collector is on."""


# ---- jobs: each runs on every rank, in a process of its own -------------------------------------


@dataclass(frozen=True)
class Rank:
    """This process among those of its job; of the default process group, where there are several."""

    rank: int
    mesh: DeviceMesh | None

    @classmethod
    def join(cls) -> Rank:
        world_size = int(os.environ["WORLD_SIZE"])
        if world_size == 1:
            return cls(0, None)
        dist.init_process_group("gloo")
        return cls(dist.get_rank(), init_device_mesh("cpu", (world_size,)))

    def meter(self) -> Meter:
        return Meter(barrier=measure.no_barrier if self.mesh is None else dist.barrier)


def saves_job(
    workload: Mapping[str, Any], root: str, *, warmup: bool, saves: int, loads: int, check: bool
) -> Meter:
    """Saves, and then loads, with a `Flashpoint`."""
    rank, work = Rank.join(), Workload(**workload)
    state = states.make(work, rank.mesh)
    meter = rank.meter()
    pool = FreePoolFile(root, rank.rank)
    if not work.is_tiny:
        meter.memcpy = lambda: _copy_into(pool.find(len(state.source)), state.source)
    with fpt.init(root, keep=1) as fp:
        if warmup:
            meter.take(lambda: {"warm-up": meter.time(lambda: fp.warmup(state.tree))})
        before: dict[str, int] = {}
        for number in range(1, saves + 1):
            if number == 2:
                before = _tmpfs_use(fp, root)
            meter.take(lambda number=number: _save(fp, state, meter, number))
        meter.facts["growth"] = {name: n - before[name] for name, n in _tmpfs_use(fp, root).items()}
        meter.facts["threads"] = torch.get_num_threads()
        for number in range(loads):
            meter.call("load, first" if number == 0 else "load", lambda: fp.recover(state.tree))
        if check:
            _check_load(fp, state)
        if loads and not work.is_tiny:
            _measure_references(meter, pool, state, loads)
    if loads:
        with fpt.init(root, keep=1, verify=False) as fp:
            fp.recover(state.tree)
            meter.forget_reference()
            for _ in range(loads):
                meter.call("load, unverified", lambda: fp.recover(state.tree))
    return meter


def cold_load_job(workload: Mapping[str, Any], root: str) -> Meter:
    """The first recover of a new process."""
    rank, work = Rank.join(), Workload(**workload)
    start_s = time.perf_counter()
    state = states.make(work, rank.mesh)
    state.source[:] = 0
    making_s = time.perf_counter() - start_s
    meter = rank.meter()
    pool = FreePoolFile(root, rank.rank)
    if not work.is_tiny:
        meter.memcpy = lambda: _copy_into(pool.find(len(state.source)), state.source)
    with fpt.init(root, keep=1) as fp:
        meter.barrier()
        result = fp.recover(state.tree)
        end_s = time.perf_counter()
        assert result is not None and state.source.any()
        meter.facts |= {"end_s": end_s, "making_s": making_s, "find_s": result.timings["find"]}
        meter.take(lambda: {"cold load": result.seconds})
    return meter


def dcp_job(workload: Mapping[str, Any], root: str, *, stock: bool, saves: int, loads: int) -> Meter:
    """Saves and loads with dcp.save and dcp.load: through stock storage, or through ours."""
    rank, work = Rank.join(), Workload(**workload)
    state = states.make(work, rank.mesh)
    meter = rank.meter()
    if stock:
        os.makedirs(root, exist_ok=True)
        if not work.is_tiny:
            target = TmpfsFile(f"{root}/memcpy-{rank.rank}", len(state.source)).data
            meter.memcpy = lambda: _copy_into(target, state.source)
        _measure_dcp(meter, state, _StockStorage(root), rank, saves, loads)
        return meter
    pool = FreePoolFile(root, rank.rank)
    if not work.is_tiny:
        meter.memcpy = lambda: _copy_into(pool.find(len(state.source)), state.source)
    with fpt.init(root, keep=1) as fp:
        _measure_dcp(meter, state, _OurStorage(fp), rank, saves, loads)
    return meter


def training_job(workload: Mapping[str, Any], root: str, *, seconds: float, turns: int) -> Meter:
    """Steps of a training loop beside saves that run back to back, and without."""
    Rank.join()
    state = states.make(Workload(**workload))
    meter = Meter()
    with fpt.init(root, keep=1) as fp:
        fp.warmup(state.tree)
        fp.save(state.tree, step=STEP)
        numbers = itertools.count(STEP + 1)
        handles: list[fpt.SaveHandle] = []

        def next_save() -> bool:
            """Begin another save, unless the last one is still running."""
            idle = fp.wait(timeout_s=0)
            if idle:
                handles.append(fp.async_save(state.tree, step=next(numbers)))
            return idle

        for name, step in (("matmul", steps.matmul_step()), ("Python", steps.python_step())):
            meter.facts[name] = []
            for _ in range(turns):
                alone, beside = steps.train(step, seconds), steps.train(step, seconds, next_save)
                fp.wait()
                meter.facts[name].append({"alone": alone, "beside": beside})
        assert all(handle.done() for handle in handles)
    return meter


def busy_job(workload: Mapping[str, Any], root: str, *, saves: int) -> Meter:
    """Saves on a machine whose every core has another process to run, such as data loaders."""
    rank = Rank.join()
    state = states.make(Workload(**workload), rank.mesh)
    meter, pool = rank.meter(), FreePoolFile(root, rank.rank)
    meter.memcpy = lambda: _copy_into(pool.find(len(state.source)), state.source)
    with fpt.init(root, keep=1) as fp, measure.busy_processes():
        fp.warmup(state.tree)
        for number in range(TENTH[0], TENTH[0] + saves):
            meter.take(lambda number=number: _save(fp, state, meter, number))
    return meter


def _copy_into(target: measure.Bytes | None, source: measure.Bytes) -> Callable[[], None] | None:
    return None if target is None else lambda: np.copyto(target, source)


def _save(fp: fpt.Flashpoint, state: State, meter: Meter, number: int) -> dict[str, float]:
    handles: list[fpt.SaveHandle] = []
    blocking_s = meter.time(lambda: handles.append(fp.async_save(state.tree, step=STEP + number)))
    if not handles[0].wait("complete"):
        raise RuntimeError(f"save {number} failed") from handles[0].error
    fp.wait()
    name = "10th save" if number in TENTH else f"save {number}"
    timings = handles[0].timings
    return {
        f"{name}, blocking": blocking_s,
        f"{name}, complete": timings["complete"],
        f"{name}, part write": timings["write"],
        f"{name}, part commit": timings["commit"],
    }


def _tmpfs_use(fp: fpt.Flashpoint, root: str) -> dict[str, int]:
    return {
        "files": fp.objects.pool.allocations,
        "bytes": measure.tmpfs_bytes_below(root),
        "statvfs": measure.tmpfs_bytes_used(root),
    }


def _check_load(fp: fpt.Flashpoint, state: State) -> None:
    """A load that is fast and wrong is no load."""
    digest = xxhash.xxh3_64_digest(state.source.data)
    state.source[::1024] ^= 255
    assert xxhash.xxh3_64_digest(state.source.data) != digest
    fp.recover(state.tree)
    assert xxhash.xxh3_64_digest(state.source.data) == digest, "recover did not bring the bytes back"


def _measure_references(meter: Meter, pool: FreePoolFile, state: State, count: int) -> None:
    target = pool.find(len(state.source))
    assert target is not None
    ours, theirs = torch.from_numpy(target), torch.from_numpy(state.source)
    np.copyto(target, state.source)
    for _ in range(count):
        meter.call("memcpy by torch", lambda: ours.copy_(theirs))
        meter.call("memcpy out", lambda: np.copyto(state.source, target))


class _StockStorage:
    """DCP's own file system storage; keeps one checkpoint."""

    names: Final = {1: "dcp.save, first"}

    def __init__(self, root: str) -> None:
        self._root = root
        self._path = ""

    def save(self, state: dict[str, Any], number: int) -> None:
        self._path = f"{self._root}/stock-{number}"
        dcp.save(state, storage_writer=dcp.FileSystemWriter(self._path))

    def load(self, state: dict[str, Any]) -> None:
        dcp.load(state, storage_reader=dcp.FileSystemReader(self._path))

    def make_room(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


class _OurStorage:
    """Ours behind the same calls; its session keeps one version."""

    names: Final = {1: "dcp.save, first", 2: "dcp.save, second"}  # two buffers are made, then recycled

    def __init__(self, fp: fpt.Flashpoint) -> None:
        self._fp = fp
        self._path = ""

    def save(self, state: dict[str, Any], number: int) -> None:
        self._path = self._fp.path(STEP + number)
        dcp.save(state, checkpoint_id=self._path, storage_writer=self._fp.writer())

    def load(self, state: dict[str, Any]) -> None:
        dcp.load(state, checkpoint_id=self._path, storage_reader=self._fp.reader())

    def make_room(self) -> None:
        pass


def _measure_dcp(
    meter: Meter, state: State, storage: _StockStorage | _OurStorage, rank: Rank, saves: int, loads: int
) -> None:
    for number in range(1, saves + 1):
        meter.barrier()
        if rank.rank == 0:
            storage.make_room()
        meter.call(storage.names.get(number, "dcp.save"), partial(storage.save, state.tree, number))
    for number in range(loads):
        meter.call("dcp.load, first" if number == 0 else "dcp.load", partial(storage.load, state.tree))


# ---- the plan: which jobs, how often ------------------------------------------------------------


@dataclass(frozen=True)
class Effort:
    """How often each job runs, and how much it does."""

    cold_runs: int = 2
    warm_runs: int = 3
    long_runs: int = 1  # of the warm ones: those with the 10th save and with loads
    loads: int = 6
    stock_saves: int = 4
    stock_loads: int = 3
    our_dcp_saves: int = 6
    our_dcp_loads: int = 4
    busy_saves: int = 3
    training_s: float = 1.0
    training_turns: int = 2


QUICK: Final = Effort(
    cold_runs=1,
    warm_runs=1,
    long_runs=1,
    loads=3,
    stock_saves=3,
    stock_loads=2,
    our_dcp_saves=4,
    our_dcp_loads=2,
    busy_saves=1,
    training_s=0.3,
    training_turns=1,
)

Results = dict[str, list[Result]]


def run_workload(work: Workload, effort: Effort, say: Callable[[str], None]) -> Results:
    """All jobs of one workload, by name."""
    found: Results = {}

    def run(name: str, job: str, root: str, **arguments: Any) -> None:
        say(f"{work.key}: {name}")
        arguments = {"workload": asdict(work), "root": root, **arguments}
        found.setdefault(name, []).append(
            measure.run_job(f"{__spec__.name}:{job}", arguments, ranks=work.ranks)
        )

    for number in range(effort.cold_runs):
        with measure.job_root() as root:
            run("cold", "saves_job", root, warmup=False, saves=2, loads=0, check=False)
            run("cold load", "cold_load_job", root)
            if number == 0 and work.ranks == 1:
                say(f"{work.key}: open")
                for _ in range(max(effort.cold_runs, 2)):
                    arguments = {"path": f"{root}/step-{STEP + 2}_ckpt", "count": 4}
                    found.setdefault("open", []).append(
                        measure.run_job("benchmarks.measure:open_job", arguments)
                    )
    for number in range(effort.warm_runs):
        with measure.job_root() as root:
            saves, loads = (TENTH[-1], effort.loads) if number < effort.long_runs else (2, 0)
            run("warm", "saves_job", root, warmup=True, saves=saves, loads=loads, check=number == 0)
    with measure.job_root() as root:
        run("ours", "dcp_job", root, stock=False, saves=effort.our_dcp_saves, loads=effort.our_dcp_loads)
    with measure.job_root() as root:
        run("stock", "dcp_job", root, stock=True, saves=effort.stock_saves, loads=effort.stock_loads)
    if work.ranks == 1 and work.mixed:
        with measure.job_root() as root:
            run("busy", "busy_job", root, saves=effort.busy_saves)
    if work.ranks == 1 and not work.is_tiny:
        with measure.job_root() as root:
            run("training", "training_job", root, seconds=effort.training_s, turns=effort.training_turns)
    return found


# ---- the table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """A bound on a figure; `at_least` turns it round."""

    bound: float
    unit: str = ""
    at_least: bool = False

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤" if self.bound else "="
        return f"{sign} {self.bound:g}{self.unit}"

    def verdict(self, value: float) -> str:
        """``ok``, or by how much it is missed."""
        if value >= self.bound if self.at_least else value <= self.bound:
            return "ok"
        if not self.bound:
            return f"MISSED by {value:,.0f}{self.unit}"
        return f"MISSED by {abs(value / self.bound - 1):.0%}"


@dataclass(frozen=True)
class Row:
    """One line of the table: ``value`` is what the goal bounds."""

    workload: str
    measure: str
    measured: str
    ratio: float | None = None
    goal: Goal | None = None
    value: float | None = None

    @property
    def verdict(self) -> str:
        return "" if self.goal is None or self.value is None else self.goal.verdict(self.value)


def rows_of(work: Workload, found: Results) -> Iterator[Row]:
    """The table's lines for one workload."""

    def time_row(label: str, figures: Figure | None, goal: Goal | None = None) -> Iterator[Row]:
        if figures is not None:
            in_ms = goal is not None and goal.unit == " ms"
            value = figures.seconds * 1e3 if in_ms else figures.ratio
            yield Row(work.key, label, f"{figures.seconds * 1e3:,.2f} ms", figures.ratio, goal, value)

    def of(job: str, name: str) -> Figure | None:
        return measure.figure(found[job], name)

    many = work.tensors > 1000
    everything = [result for results in found.values() for result in results]
    threads = found["warm"][0].facts[0]["threads"]
    yield from time_row("memcpy, np.copyto, 1 thread", measure.figure(everything, "memcpy"))
    yield from time_row(f"memcpy by torch, up to {threads} threads", of("warm", "memcpy by torch"))
    yield from time_row("memcpy out of the mapping, np.copyto", of("warm", "memcpy out"))

    for label, job, name, blocking, complete in (
        ("first save, cold", "cold", "save 1", None, None),
        ("first save after warm-up", "warm", "save 1", Goal(1.5), None),
        ("2nd save", "warm", "save 2", None, None),
        ("10th save", "warm", "10th save", *_goals_of_saves(work)),
    ):
        if work.is_tiny and blocking is not None and name != "10th save":
            blocking = None  # a bound on the ratio to a memcpy
        yield from time_row(f"{label}: blocking", of(job, f"{name}, blocking"), blocking)
        yield from time_row(f"{label}: complete", of(job, f"{name}, complete"), complete)
    if "busy" in found:
        yield from time_row("10th save beside busy processes: blocking", of("busy", "10th save, blocking"))
        yield from time_row("10th save beside busy processes: complete", of("busy", "10th save, complete"))
    yield from time_row("fp.warmup(state) itself", of("warm", "warm-up"))
    yield from _tmpfs_rows(work, found["warm"])

    ratio_goals = (None, None) if work.is_tiny else (Goal(1.8), Goal(1.3))
    yield from time_row("load into existing tensors, verified", of("warm", "load"), ratio_goals[0])
    yield from time_row(
        "load into existing tensors, not verified", of("warm", "load, unverified"), ratio_goals[1]
    )
    yield from time_row("load, first after the saves, verified", of("warm", "load, first"))
    yield from time_row("load by a new process, verified", of("cold load", "cold load"))
    with_start_s = statistics.median(map(_with_start, found["cold load"]))
    yield Row(work.key, "load by a new process, with its start", f"{with_start_s * 1e3:,.2f} ms")
    if "open" in found:
        goal = None if work.is_tiny else Goal(5, " ms")
        yield from time_row("flashpoint.open, first in a process", of("open", "open, first"), goal)
        yield from time_row("flashpoint.open, again", of("open", "open, again"))

    for label, job in (("dcp.save with fp.writer()", "ours"), ("dcp.save, stock FileSystemWriter", "stock")):
        yield from time_row(f"{label}: first", of(job, "dcp.save, first"))
        yield from time_row(f"{label}: steady", of(job, "dcp.save"))
    for label, job in (("dcp.load with fp.reader()", "ours"), ("dcp.load, stock FileSystemReader", "stock")):
        yield from time_row(label, of(job, "dcp.load"))
    goal = None if work.is_tiny else Goal(15 if many else 8, "x", at_least=True)
    stock_save, stock_load = of("stock", "dcp.save"), of("stock", "dcp.load")
    for label, stock, ours, bound in (
        ("faster than stock: save, until complete", stock_save, of("warm", "10th save, complete"), goal),
        ("faster than stock: save, blocking", stock_save, of("warm", "10th save, blocking"), None),
        ("faster than stock: dcp.save with ours", stock_save, of("ours", "dcp.save"), None),
        (
            "faster than stock: load, verified",
            stock_load,
            of("warm", "load"),
            goal and Goal(4, "x", at_least=True),
        ),
        ("faster than stock: dcp.load with ours", stock_load, of("ours", "dcp.load"), None),
    ):
        if stock is not None and ours is not None:
            times = stock.ratio / ours.ratio if stock.ratio and ours.ratio else stock.seconds / ours.seconds
            yield Row(work.key, label, f"{times:.1f}x", None, bound, times)
    yield from _training_rows(work, found.get("training", []))


def _goals_of_saves(work: Workload) -> tuple[Goal, Goal]:
    """For the 10th save: blocking, complete."""
    if work.is_tiny:
        return Goal(8, " ms"), Goal(8, " ms")
    if work.ranks > 1:
        return Goal(1.2), Goal(2.0)
    return (Goal(1.3), Goal(2.0)) if work.mixed else (Goal(1.1), Goal(1.6))


def _tmpfs_rows(work: Workload, results: Sequence[Result]) -> Iterator[Row]:
    growth = [facts["growth"] for result in results for facts in result.facts]
    for label, name, unit, goal in (
        ("tmpfs from the 2nd save on: new pool files", "files", "", Goal(0)),
        ("tmpfs from the 2nd save on: bytes of the job", "bytes", " bytes", Goal(0, " bytes")),
        ("tmpfs from the 2nd save on: statvfs, all users", "statvfs", " bytes", None),
    ):
        most = max(item[name] for item in growth)
        yield Row(work.key, label, f"{most:,}{unit}", None, goal, most)


def _with_start(result: Result) -> float:
    """Seconds from starting the interpreter to a recovered state, without making the state's tensors."""
    return max(facts["end_s"] - facts["making_s"] for facts in result.facts) - result.started_s


def _training_rows(work: Workload, results: Sequence[Result]) -> Iterator[Row]:
    for name in ("matmul", "Python"):
        turns = [turn for result in results for turn in result.facts[0][name]]
        if not turns:
            continue
        means = [{side: statistics.mean(turn[side]["steps"]) for side in turn} for turn in turns]
        slower = statistics.median(mean["beside"] / mean["alone"] - 1 for mean in means)
        worst = {side: max(max(turn[side]["steps"]) for turn in turns) * 1e3 for side in ("alone", "beside")}
        saves = sum(len(turn["beside"]["saves"]) for turn in turns)
        yield Row(work.key, f"{name} step beside {saves} saves: slower by", f"{slower:.1%}")
        yield Row(
            work.key,
            f"{name} step: longest (without saves)",
            f"{worst['beside']:.0f} ms ({worst['alone']:.0f})",
        )


def table_of(works: Sequence[Workload], rows: Sequence[Row]) -> Table:
    table = Table(
        title="Saves and loads (÷ memcpy: 1.0 is a warm memcpy of the same bytes)", title_justify="left"
    )
    for heading, justify in (("", "left"), ("measured", "right"), ("÷ memcpy", "right"), ("goal", "right")):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("result", no_wrap=True)
    for work in works:
        table.add_section()
        table.add_row(work.title, style="bold")
        for row in rows:
            if row.workload == work.key:
                ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
                style = "green" if row.verdict == "ok" else "red"
                goal = "" if row.goal is None else str(row.goal)
                verdict = f"[{style}]{row.verdict}[/]" if row.verdict else ""
                table.add_row(f"  {row.measure}", row.measured, ratio, goal, verdict)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    keys = list(states.workloads(FULL_BYTES))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.save_load", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="64 MiB instead of 1 GiB, few repeats: a smoke run"
    )
    parser.add_argument(
        "--only", action="append", choices=keys, metavar="WORKLOAD", help=f"of {', '.join(keys)}"
    )
    parser.add_argument("--json", metavar="FILE", help="write every sample there")
    options = parser.parse_args(arguments)
    console, progress = Console(), Console(stderr=True)
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH)
    machine = measure.machine()
    start_s, others_s = time.perf_counter(), measure.cpu_seconds_of_others()
    known = states.workloads(QUICK_BYTES if options.quick else FULL_BYTES)
    works = [known[key] for key in options.only or keys]
    found, rows = {}, []
    with progress.status("") as status:
        for work in works:
            found[work.key] = run_workload(work, QUICK if options.quick else Effort(), status.update)
            rows += rows_of(work, found[work.key])
    seconds = time.perf_counter() - start_s
    others_s = measure.cpu_seconds_of_others() - others_s
    machine["others"] = (
        f"used {others_s / seconds / len(os.sched_getaffinity(0)):.0%} of the CPUs during the run"
    )
    for name, text in machine.items():
        console.print(f"{name:>10}: {text}", highlight=False)
    console.print()
    console.print(table_of(works, rows))
    missed = [row for row in rows if row.verdict.startswith("MISSED")]
    goals = sum(row.goal is not None and row.value is not None for row in rows)
    console.print(f"{goals - len(missed)} of {goals} goals met; {seconds:.0f} s\n", highlight=False)
    console.print(NOTES, highlight=False)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            raw = {key: {n: [asdict(r) for r in rs] for n, rs in jobs.items()} for key, jobs in found.items()}
            lines = [asdict(row) | {"verdict": row.verdict} for row in rows]
            json.dump({"machine": machine, "seconds": seconds, "table": lines, "jobs": raw}, file)


if __name__ == "__main__":
    main()
