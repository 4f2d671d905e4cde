"""How fast saves and restores through Orbax are, beside a memcpy and beside stock Orbax: one table.

    python -m benchmarks.orbax [--quick] [--mib N] [--only WORKLOAD]... [--json FILE]

Every job below runs in a fresh process; `NOTES`, printed under the table, says how each figure is made.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import measure, states
from benchmarks.measure import Figure, FreePoolFile, Meter, Result, TmpfsFile
from benchmarks.states import State, Workload

FULL_MIB: Final = 1024
QUICK_MIB: Final = 64
JOB_TIMEOUT_S: Final = 900.0  # stock Orbax takes seconds for each save of thousands of arrays
SETTLE_TIMEOUT_S: Final = 60.0
TABLE_WIDTH: Final = 140  # where the output is no terminal
STEP: Final = 1000  # of the first save: step numbers keep their width
INDEX_KEYS: Final = 50_000
STOCK: Final = {
    "stock": "stock Orbax",
    "fastest": "stock Orbax, its fastest settings",
}

NOTES: Final = """\
How each number is made. Medians; every job in a fresh process, one process, JAX's CPU backend; all on the tmpfs
named above, all through a stock ocp.CheckpointManager with max_to_keep=1 and asynchronous saves.
workloads: float32 arrays of one size, on one device.
memcpy: np.copyto of one contiguous source (the very memory of the state's arrays) into a warm tmpfs mapping of
  the same size, one thread, just before and just after every timed call; "÷ memcpy" is the median of call over
  memcpy beside it. The mapping is our own, over the pool file that is free at the moment (beside stock Orbax:
  a file of its own).
saves: manager.save(step, StandardSave(state)). Blocking: until the call returns; total: until
  wait_until_finished returns: checksummed, indexed, renamed by Orbax, the version before deleted. Ours copies
  the state while training waits, so blocking has one memcpy in it; "beyond the copy" is the median of blocking
  minus memcpy beside it. First: with nothing prepared. The next save begins when our session has made its spare
  buffer, as between training steps; "at once" is a second save that does not wait for it.
restores: manager.restore(step, StandardRestore(abstract)), abstract with shapes, dtypes and shardings, until all
  arrays are ready, in the process that saved; what the restore before gave is dropped first. Not verified:
  registry(verify=False), after one restore that is not counted, since its mapping is new. By a new process: its
  first restore, Orbax and JAX imported and the manager made before.
10th: saves and restores 8 to 14 of a process, 8 to 10 of stock Orbax (with --quick the 3rd and later).
stock Orbax: its StandardCheckpointHandler as it comes. Fastest settings: PyTreeCheckpointHandler with
  use_compression=False, TensorStore's file driver with mapped reads and without fsync (source references are
  Orbax's own default). Faster than stock: its "÷ memcpy" over ours.
index: the OCDBT database of 25,000 arrays in one object, two keys each, as a save makes it in its future; new,
  and when the layout is the one before."""


# ---- jobs: each in a process of its own ---------------------------------------------------------


class _Stock:
    """Stock Orbax.

    Args:
        fastest: with the settings that make it so.
    """

    def __init__(self, root: str, state: State, *, fastest: bool) -> None:
        import jax
        import orbax.checkpoint as ocp

        self.abstract = _abstract(state)
        options = ocp.CheckpointManagerOptions(max_to_keep=1)
        if not fastest:
            self.manager = ocp.CheckpointManager(root, options=options)
            self._save, self._restore = ocp.args.StandardSave, ocp.args.StandardRestore(self.abstract)
            return
        from orbax.checkpoint._src.serialization import tensorstore_utils

        # Orbax has no option for TensorStore's context. These are the dicts that it copies each time.
        for context in (tensorstore_utils._BASE_TS_CONTEXT, tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT):
            context.update({"file_io_mode": {"mode": "memmap"}, "file_io_sync": False})
        handler = ocp.PyTreeCheckpointHandler(use_compression=False)
        self.manager = ocp.CheckpointManager(root, options=options, item_handlers=handler)
        arguments = ocp.checkpoint_utils.construct_restore_args(self.abstract)
        assert all(argument.sharding is not None for argument in jax.tree.leaves(arguments))
        self._save = ocp.args.PyTreeSave
        self._restore = ocp.args.PyTreeRestore(self.abstract, restore_args=arguments)

    def save(self, step: int, tree: Any) -> None:
        self.manager.save(step, args=self._save(tree))

    def restore(self) -> Any:
        return self.manager.restore(self.manager.latest_step(), args=self._restore)

    def settle(self) -> None:
        pass


class _Ours:
    """The same manager with our registry."""

    def __init__(self, root: str, state: State, **settings: Any) -> None:
        import orbax.checkpoint as ocp

        import flashpoint_jax
        from flashpoint_jax.session import orbax_config, session_of

        self.abstract = _abstract(state)
        self.manager = ocp.CheckpointManager(
            root,
            options=ocp.CheckpointManagerOptions(max_to_keep=1),
            handler_registry=flashpoint_jax.registry(**settings),
        )
        self._save, self._restore = ocp.args.StandardSave, ocp.args.StandardRestore(self.abstract)
        self._session = session_of(root, orbax_config(**settings), per_host=False)

    def save(self, step: int, tree: Any) -> None:
        self.manager.save(step, args=self._save(tree))

    def restore(self) -> Any:
        return self.manager.restore(self.manager.latest_step(), args=self._restore)

    def settle(self) -> None:
        """Wait until the next save has its buffer."""
        if not self._session.wait(SETTLE_TIMEOUT_S):
            raise TimeoutError(f"no spare buffer within {SETTLE_TIMEOUT_S:g} s")


def ours_job(
    workload: Mapping[str, Any], root: str, *, saves: int, restores: int, steady: int, hurried: bool
) -> Meter:
    """Saves and restores with our registry; ``hurried``: the second save does not wait for its buffer."""
    state = states.make_arrays(Workload(**workload))
    pool, meter = FreePoolFile(root, 0), Meter()
    meter.memcpy = lambda: _copy_into(pool.find(len(state.source)), state.source)
    ours = _Ours(root, state)
    if hurried:
        meter.memcpy = None  # a file of the pool is what the second save waits for
    _saves(meter, ours, state, saves, steady, settled=not hurried)
    ours.settle()
    _restores(meter, ours, state, restores, steady, "restore")
    ours.manager.close()
    if restores:
        unverified = _Ours(root, state, verify=False)
        unverified.restore()
        meter.forget_reference()
        _restores(meter, unverified, state, restores, steady, "unverified restore")
        unverified.manager.close()
    return meter


def new_process_job(workload: Mapping[str, Any], root: str) -> Meter:
    """The first restore of a process that did not save."""
    state = states.make_arrays(Workload(**workload))
    pool, meter = FreePoolFile(root, 0), Meter()
    meter.memcpy = lambda: _copy_into(pool.find(len(state.source)), state.source)
    ours = _Ours(root, state)
    _restores(meter, ours, state, 1, 8, "new process, restore")
    ours.manager.close()
    return meter


def stock_job(
    workload: Mapping[str, Any], root: str, *, fastest: bool, saves: int, restores: int, steady: int
) -> Meter:
    """The same with stock Orbax."""
    state = states.make_arrays(Workload(**workload))
    stock = _Stock(root, state, fastest=fastest)
    target = TmpfsFile(f"{root}-memcpy", len(state.source)).data
    meter = Meter(memcpy=lambda: _copy_into(target, state.source))
    _saves(meter, stock, state, saves, steady, settled=True)
    _restores(meter, stock, state, restores, steady, "restore")
    stock.manager.close()
    return meter


def index_job(keys: int, count: int) -> Meter:
    """The index over a layout of many arrays, new and again."""
    import flashpoint_jax.zarr_index as zarr_index
    from flashpoint.layout import Entry, plan_layout

    layout = plan_layout(
        Entry(f"block_{i // 10}.part_{i % 10}", "float32", (64,), path=(f"block_{i // 10}", f"part_{i % 10}"))
        for i in range(keys // 2)
    )
    assert layout.digest  # which the manifest needs anyway
    meter = Meter()
    for number in range(count):
        # Another file name makes another index; what the process remembers of the last one is of no use.
        sources = [zarr_index.Source(f"rank00000-{number}.safetensors", layout)]
        for name, uuid in (("index, new", b"1" * 16), ("index, unchanged", b"2" * 16)):
            meter.call(name, partial(zarr_index.index_files, sources, uuid))
    return meter


def _copy_into(target: measure.Bytes | None, source: measure.Bytes) -> Callable[[], None] | None:
    return None if target is None else lambda: np.copyto(target, source)


def _abstract(state: State) -> Any:
    import jax

    def of(array: jax.Array) -> Any:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)

    return jax.tree.map(of, state.tree)


def _nth(number: int, steady: int) -> str:
    return "10th" if number >= steady else str(number)


def _saves(
    meter: Meter, side: _Stock | _Ours, state: State, count: int, steady: int, *, settled: bool
) -> None:
    for number in range(1, count + 1):
        step, name = STEP + number, f"save {_nth(number, steady)}"

        def save(step: int = step, name: str = name) -> dict[str, float]:
            blocking_s = meter.time(lambda: side.save(step, state.tree))
            start_s = time.perf_counter()
            side.manager.wait_until_finished()
            total_s = blocking_s + time.perf_counter() - start_s
            return {f"{name}, blocking": blocking_s, f"{name}, total": total_s}

        meter.take(save)
        if settled:
            side.settle()


def _restores(meter: Meter, side: _Stock | _Ours, state: State, count: int, steady: int, name: str) -> None:
    import jax

    for number in range(1, count + 1):
        found: list[Any] = []
        meter.call(
            f"{name} {_nth(number, steady)}",
            lambda found=found: found.append(jax.block_until_ready(side.restore())),
        )
        if number == 1:
            _check(found[0], state)


def _check(found: Any, state: State) -> None:
    """A restore that is fast and wrong is no restore."""
    import jax

    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(state.tree), strict=True):
        assert np.array_equal(one, other), "restore gave other numbers"


# ---- the plan: which jobs, how often ------------------------------------------------------------


@dataclass(frozen=True)
class Effort:
    """How often each job runs, and how much it does.

    Attributes:
        steady: the first save or restore of a process that "10th" is the median of.
    """

    runs: int = 2
    saves: int = 14
    restores: int = 14
    stock_saves: int = 10
    stock_restores: int = 10
    steady: int = 8
    indexes: int = 5


QUICK: Final = Effort(runs=1, saves=4, restores=4, stock_saves=3, stock_restores=3, steady=3, indexes=3)

Results = dict[str, list[Result]]


def run_workload(work: Workload, effort: Effort, say: Callable[[str], None]) -> Results:
    """All jobs of one workload, by name; ours before and after stock Orbax, so that both see the same machine."""
    found: Results = {}

    def run(name: str, job: str, root: str, **arguments: Any) -> None:
        say(f"{work.key}: {name}")
        arguments = {"workload": asdict(work), "root": root, **arguments}
        found.setdefault(name, []).append(
            measure.run_job(f"{__spec__.name}:{job}", arguments, timeout_s=JOB_TIMEOUT_S)
        )

    def run_ours() -> None:
        with measure.job_root() as root:
            counts = {"saves": effort.saves, "restores": effort.restores, "steady": effort.steady}
            run("ours", "ours_job", root, **counts, hurried=False)
            run("new process", "new_process_job", root)

    run_ours()
    for name in STOCK:
        with measure.job_root() as root:
            counts = {"saves": effort.stock_saves, "restores": effort.stock_restores, "steady": effort.steady}
            run(name, "stock_job", root, fastest=name == "fastest", **counts)
        with measure.job_root() as root:
            run("at once", "ours_job", root, saves=2, restores=0, steady=effort.steady, hurried=True)
    for _ in range(effort.runs - 1):
        run_ours()
    return found


# ---- the table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """A bound on a figure; `at_least` turns it round."""

    bound: float
    unit: str = ""
    at_least: bool = False

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bound:g}{self.unit}"

    def verdict(self, value: float) -> str:
        """``ok``, or by how much it is missed."""
        if value >= self.bound if self.at_least else value <= self.bound:
            return "ok"
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


@dataclass(frozen=True)
class Goals:
    """Of the 10th save and restore; in multiples of a memcpy, where there is no unit."""

    total: Goal
    beyond_copy: Goal
    restore: Goal
    unverified: Goal
    stock: Goal = Goal(8, "x", at_least=True)


GOALS: Final = {
    "large": Goals(Goal(1.5), Goal(10, " ms"), Goal(2.5), Goal(2)),
    "small": Goals(Goal(4), Goal(60, " ms"), Goal(4.5), Goal(4)),
}


def workloads(mib: int) -> dict[str, Workload]:
    size = f"{mib} MiB" if mib % 1024 else f"{mib // 1024} GiB"
    found = (
        Workload("large", f"{size}, 64 arrays", 64, mib << 20),
        Workload("small", f"{size}, 3,000 arrays", 3000, mib << 20),
    )
    return {work.key: work for work in found}


def rows_of(work: Workload, found: Results) -> Iterator[Row]:
    """The table's lines for one workload."""
    goals = GOALS[work.key]

    def of(job: str, name: str) -> Figure | None:
        return measure.figure(found[job], name)

    def row(label: str, job: str, name: str, goal: Goal | None = None) -> Iterator[Row]:
        figures = of(job, name)
        if figures is not None:
            yield Row(work.key, label, f"{figures.seconds * 1e3:,.1f} ms", figures.ratio, goal, figures.ratio)

    everything = [result for results in found.values() for result in results]
    memcpy = measure.figure(everything, "memcpy")
    if memcpy is not None:
        yield Row(work.key, "memcpy, np.copyto, 1 thread", f"{memcpy.seconds * 1e3:,.1f} ms", memcpy.ratio)

    for label, number in (("first save", "1"), ("2nd save", "2"), ("10th save", "10th")):
        steady = number == "10th"
        yield from row(f"{label}: blocking", "ours", f"save {number}, blocking")
        if steady and (beyond_ms := _beyond_copy_ms(found["ours"], "save 10th, blocking")) is not None:
            measured = f"{beyond_ms:,.1f} ms"
            yield Row(
                work.key, f"{label}: blocking beyond the copy", measured, None, goals.beyond_copy, beyond_ms
            )
        yield from row(f"{label}: total", "ours", f"save {number}, total", goals.total if steady else None)
        if number == "2":
            yield from row("2nd save at once: blocking", "at once", "save 2, blocking")
            yield from row("2nd save at once: total", "at once", "save 2, total")
    for label, name, goal in (
        ("verified", "restore", goals.restore),
        ("not verified", "unverified restore", goals.unverified),
    ):
        yield from row(f"first restore, {label}", "ours", f"{name} 1")
        yield from row(f"2nd restore, {label}", "ours", f"{name} 2")
        yield from row(f"10th restore, {label}", "ours", f"{name} 10th", goal)
    yield from row("restore by a new process, verified", "new process", "new process, restore 1")

    for job, title in STOCK.items():
        for number in ("1", "2", "10th"):
            label = {"1": "first", "2": "2nd"}.get(number, number)
            yield from row(f"{title}: {label} save, blocking", job, f"save {number}, blocking")
            yield from row(f"{title}: {label} save, total", job, f"save {number}, total")
        for number in ("1", "2", "10th"):
            label = {"1": "first", "2": "2nd"}.get(number, number)
            yield from row(f"{title}: {label} restore", job, f"restore {number}")
    for job, title in STOCK.items():
        for what, theirs, ours in (
            ("save, total", "save 10th, total", "save 10th, total"),
            ("restore, not verified", "restore 10th", "unverified restore 10th"),
            ("restore, verified", "restore 10th", "restore 10th"),
        ):
            stock, own = of(job, theirs), of("ours", ours)
            if stock is not None and own is not None and stock.ratio and own.ratio:
                times = stock.ratio / own.ratio
                bound = goals.stock if job == "stock" and what != "restore, not verified" else None
                yield Row(work.key, f"faster than {title}: {what}", f"{times:.1f}x", None, bound, times)


def index_rows(results: Sequence[Result]) -> Iterator[Row]:
    for name, bound_ms in (("new", 300), ("unchanged", 20)):
        figures = measure.figure(results, f"index, {name}")
        assert figures is not None
        value = figures.seconds * 1e3
        yield Row("index", f"OCDBT index, {name}", f"{value:,.2f} ms", None, Goal(bound_ms, " ms"), value)


def _beyond_copy_ms(results: Sequence[Result], name: str) -> float | None:
    samples = [sample for result in results for sample in result.samples if sample.name == name]
    beyond = [(sample.seconds - sample.memcpy_s) * 1e3 for sample in samples if sample.memcpy_s]
    return statistics.median(beyond) if beyond else None


def table_of(titles: Mapping[str, str], rows: Sequence[Row]) -> Table:
    table = Table(
        title="Orbax: saves and restores (÷ memcpy: 1.0 is a warm memcpy of the same bytes)",
        title_justify="left",
    )
    for heading, justify in (("", "left"), ("measured", "right"), ("÷ memcpy", "right"), ("goal", "right")):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("result", no_wrap=True)
    for key, title in titles.items():
        table.add_section()
        table.add_row(title, style="bold")
        for row in rows:
            if row.workload == key:
                ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
                style = "green" if row.verdict == "ok" else "red"
                goal = "" if row.goal is None else str(row.goal)
                verdict = f"[{style}]{row.verdict}[/]" if row.verdict else ""
                table.add_row(f"  {row.measure}", row.measured, ratio, goal, verdict)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.orbax", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_MIB} MiB and few repeats: a smoke run")
    parser.add_argument("--mib", type=int, help=f"size of the states ({FULL_MIB})")
    parser.add_argument(
        "--only", action="append", choices=list(GOALS), metavar="WORKLOAD", help=f"of {', '.join(GOALS)}"
    )
    parser.add_argument("--json", metavar="FILE", help="write every sample there")
    options = parser.parse_args(arguments)
    effort = QUICK if options.quick else Effort()
    known = workloads(options.mib or (QUICK_MIB if options.quick else FULL_MIB))
    works = [known[key] for key in options.only or known]
    console, progress = Console(), Console(stderr=True)
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH)
    machine = measure.machine()
    machine |= {name: measure.version_of(name) for name in ("jax", "orbax-checkpoint", "tensorstore")}
    start_s, others_s = time.perf_counter(), measure.cpu_seconds_of_others()
    found: dict[str, Results] = {}
    rows: list[Row] = []
    with progress.status("") as status:
        for work in works:
            found[work.key] = run_workload(work, effort, status.update)
            rows += rows_of(work, found[work.key])
        status.update("index")
        arguments_of_index = {"keys": INDEX_KEYS, "count": effort.indexes}
        found["index"] = {"index": [measure.run_job(f"{__spec__.name}:index_job", arguments_of_index)]}
        rows += index_rows(found["index"]["index"])
    seconds = time.perf_counter() - start_s
    others_s = measure.cpu_seconds_of_others() - others_s
    machine["others"] = (
        f"used {others_s / seconds / len(os.sched_getaffinity(0)):.0%} of the CPUs during the run"
    )
    for name, text in machine.items():
        console.print(f"{name:>16}: {text}", highlight=False)
    console.print()
    titles = {work.key: work.title for work in works} | {"index": f"{INDEX_KEYS:,} keys"}
    console.print(table_of(titles, rows))
    goals = [row for row in rows if row.verdict]
    met = sum(row.verdict == "ok" for row in goals)
    console.print(f"{met} of {len(goals)} goals met; {seconds:.0f} s\n", highlight=False)
    console.print(NOTES, highlight=False)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            raw = {key: {n: [asdict(r) for r in rs] for n, rs in jobs.items()} for key, jobs in found.items()}
            lines = [asdict(row) | {"verdict": row.verdict} for row in rows]
            json.dump({"machine": machine, "seconds": seconds, "table": lines, "jobs": raw}, file)


if __name__ == "__main__":
    main()
