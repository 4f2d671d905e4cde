"""How fast one node's agent gets objects from another's, beside raw TCP of the same bytes: one table.

    python -m benchmarks.replication [--quick] [--json FILE]

Two nodes on this host: a job root and an agent each, and loopback between them. What is timed is the one way in
which data moves, for copies and for recovery alike: node 1's agent is told to get objects, fetches them from
node 0's, verifies them and links them. `NOTES`, printed under the table, says how each figure is made.

What this cannot show: on two hosts each agent has its own cores, and a trainer has only one of them, the
sender or the receiver, beside it. Here both agents, libzmq's threads, the kernel's side of both ends and the
trainer share the same cores, and no counter tells whose cache or core a step waited for. So the loss of
training below is that of both ends at once, and more than either alone would cost.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import measure
from benchmarks.measure import Meter
from benchmarks.wire import HOST, TIMEOUT_S, Bare, Helper, Raw, questions
from flashpoint.buffers import BufferObject
from flashpoint.config import ENV_PREFIX, FlashpointConfig
from flashpoint.ids import CheckpointContainerId
from flashpoint.layout import Entry
from flashpoint.objects import CheckpointObjectManager
from flashpoint.replication.agent import run_agent
from flashpoint.replication.agent_folder import Assignment
from flashpoint.replication.client import AgentClient
from flashpoint.replication.keys import JobKeys
from flashpoint.replication.membership import Member, Membership
from flashpoint.replication.messages import Key
from flashpoint.replication.orders import Wanted
from flashpoint.saver import MLFlashpointCheckpointSaver

GIB: Final = 1 << 30
STEP: Final = 100
SERVED_ANEW_S: Final = 3.0  # by then the sender has let go of its mappings, as between two versions
TABLE_WIDTH: Final = 140  # where the output is no terminal
PROFILE: Final = "BENCH_PROFILE"  # a folder: each agent's loop is profiled, and written there when it ends

NOTES: Final = """\
How each number is made. Medians, over several pairs of fresh agents with a new, empty node 1 each.
raw TCP: two processes at the agents' priority over one loopback connection: sendall of 1 MiB pieces from
  mappings of node 0's very objects, recv_into mappings of as many tmpfs files of the same sizes; no checksum, no
  name. Warm: all pages of both mappings were touched before. Fresh: files made and mapped for this transfer; timed
  with posix_fallocate and mmap, and without. A warm one before and after every timed order, a fresh one before
  each lost node; "x raw" is the median over orders of (mean of the warm transfers beside it) over (the order).
bare ZeroMQ, verified: a DEALER and a ROUTER in place of the agents, at their priority, from and into raw's warm
  mappings: the same frames, credit, sends without a copy, one copy (or AES-256-GCM), xxh3 of each chunk, and nothing
  else. So much is within reach with ZeroMQ and verification.
again: node 1's objects are unlinked (its pool files are recycled, and warm), then an order to `retrieve` all, from
  giving the order to its answer. Sender's mappings new: the same, some seconds after the last fetch, as a new
  version finds it. Every chunk is verified (xxh3); sealed is AES-256-GCM besides; unsealed is encrypt=False.
lost node: node 1 with a new agent and an empty job root: connect, handshake, `retrieve_manifest`, `retrieve`;
  here the quotient is the time over raw's.
CPU: seconds of both processes, all threads, user and system, from /proc/<pid>/stat, for each GiB.
training: torch matmuls of one thread, steps of about 5 ms, some seconds alone, then as long while node 1 gets
  the objects again and again, in turns; both agents at nice +10 and SCHED_BATCH on the trainer's cores. Steps lost:
  the median of 1 - beside/alone. At two hosts only one of the two agents is beside a trainer."""


# ---- the version, made in a process of its own --------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """``objects`` objects of ``nbytes`` each, header and all, in one version."""

    key: str
    title: str
    objects: int
    nbytes: int

    @property
    def total(self) -> int:
        return self.objects * self.nbytes


def workloads(nbytes: int) -> list[Workload]:
    small = 512 << 10
    count = 2000 * nbytes // GIB
    return [
        Workload("large", f"1 object of {nbytes >> 20} MiB", 1, nbytes),
        Workload("small", f"{count:,} objects of 512 KiB", count, small),
    ]


def save_job(job_root: str, objects: int, nbytes: int) -> Meter:
    """Save a version with these objects of rank 0, by the saver's own steps."""
    manager = CheckpointObjectManager(job_root, rank=0, config=FlashpointConfig())
    saver = MLFlashpointCheckpointSaver(manager, epoch=0)
    pending = saver.begin(STEP)
    saver.initialize_checkpoint(pending)
    random = np.random.default_rng(1)
    for number in range(objects):
        header_bytes = saver.plan([Entry(f"w{number:05d}", "uint8", (nbytes - 4096,))]).header_bytes
        layout = saver.plan([Entry(f"w{number:05d}", "uint8", (nbytes - header_bytes,))])
        assert layout.nbytes == nbytes

        def fill(buffer: BufferObject) -> None:
            piece = random.integers(0, 1 << 63, (1 << 20) // 8, dtype=np.int64).view(np.uint8)
            for begin in range(0, nbytes, len(piece)):
                target = buffer.data[begin : begin + len(piece)]
                np.copyto(target, piece[: len(target)])
                target[0] = begin >> 20 & 255  # no two pieces alike, or a wrong place would go unseen

        pending.staged.append(saver.stage(layout, fill))
    saver.write(pending)
    saver.write_metadata(pending)
    saver.finalize(pending)
    summary = manager.read_summary(pending.container)
    names = [record.name for record in summary.record.objects]
    manager.close()
    facts = {"epoch": 0, "digest": summary.digest, "manifest_nbytes": summary.nbytes, "names": names}
    return Meter(facts=facts)


# ---- processes that answer ----------------------------------------------------------------------


def serve_agent(pipe: Connection, job_root: str) -> None:
    profile = cProfile.Profile() if os.environ.get(PROFILE) else None
    if profile is not None:
        profile.enable()
    # Not prefault: an order would wait for the buffers of a next version, and tmpfs hold one version more.
    config = FlashpointConfig(agent_host=HOST, agent_idle_s=600, prefault=False)
    code = run_agent(job_root, config=config, on_ready=lambda: pipe.send("ready"))
    if profile is not None:
        profile.disable()
        profile.dump_stats(f"{os.environ[PROFILE]}/{os.path.basename(job_root)}-{os.getpid()}.pstats")
    raise SystemExit(code)


def serve_trainer(pipe: Connection) -> None:
    """Trains for as many seconds as it is told to, and tells its steps per second."""
    import torch

    torch.set_num_threads(1)
    matrix = torch.rand(384, 384)

    def work(repeats: int) -> float:
        start_s = time.perf_counter()
        for _ in range(repeats):
            matrix @ matrix
        return time.perf_counter() - start_s

    repeats = max(round(0.005 / statistics.median(work(10) / 10 for _ in range(50))), 1)
    pipe.send("ready")
    for (seconds,) in questions(pipe):
        start_s, steps = time.perf_counter(), 0
        while time.perf_counter() - start_s < seconds:
            work(repeats)
            steps += 1
        pipe.send(steps / (time.perf_counter() - start_s))


# ---- two nodes ----------------------------------------------------------------------------------


class Nodes:
    """Two nodes with fresh agents; the first one holds the version."""

    def __init__(
        self, stack: ExitStack, roots: Sequence[str], facts: Mapping[str, Any], encrypt: bool
    ) -> None:
        self.key = Key(facts["epoch"], STEP, facts["digest"])
        self.container = CheckpointContainerId(roots[1], STEP)
        self.names = list(facts["names"])
        self._manifest_nbytes = facts["manifest_nbytes"]
        identities = [CheckpointObjectManager(root, config=FlashpointConfig()).node for root in roots]
        self.agents: list[Helper] = []
        for root in roots:
            self.agents.append(Helper(serve_agent, root))
            stack.callback(self.agents[-1].close)
        clients = [stack.enter_context(AgentClient(root)) for root in roots]
        keys = JobKeys.generate()
        members = []
        for index, client in enumerate(clients):
            found = client.identify()
            members.append(
                Member(
                    index=index,
                    node=identities[index],
                    ranks=(index,),
                    host=found.host,
                    port=found.port,
                    bulk_port=found.bulk_port,
                )
            )
        # Without copies the agents do nothing by themselves: node 1 gets what it is told to, when it is told.
        membership = Membership(job=keys.job, epoch=1, copies=0, members=tuple(members))
        for index, client in enumerate(clients):
            client.configure(Assignment(membership=membership, index=index, keep=1, encrypt=encrypt), keys)
        self._client = clients[1]

    def retrieve_manifest(self) -> None:
        self._client.retrieve_manifest(self.key, self._manifest_nbytes, (0,), TIMEOUT_S)

    def retrieve(self) -> int:
        return self._client.retrieve(self.key, [Wanted(name, (), (0,)) for name in self.names], TIMEOUT_S)

    def delete(self) -> None:
        """Delete node 1's objects: its pool files are free then."""
        for name in self.names:
            os.unlink(f"{self.container.path}/{name}")

    def cpu_s(self) -> float:
        return sum(agent.cpu_s() for agent in self.agents)


def _same(one: str, other: str) -> bool:
    """Whether two files hold the same bytes."""
    with open(one, "rb") as left, open(other, "rb") as right:
        while piece := left.read(16 << 20):
            if piece != right.read(len(piece)):
                return False
        return not right.read(1)


# ---- measuring ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effort:
    """How often each thing is measured."""

    pairs: int = 3  # of fresh agents, for each mode
    again: int = 5
    anew: int = 2
    training_s: float = 3.0
    training_turns: int = 4


QUICK: Final = Effort(pairs=1, again=3, anew=1, training_s=0.5, training_turns=1)
MODES: Final = {"unsealed": False, "sealed": True}


@dataclass(frozen=True)
class Sample:
    """One order: its seconds, and those of the raw transfers beside it, by their kind."""

    name: str
    seconds: float
    cpu_s: float
    raw: dict[str, float]


@dataclass
class Found:
    """What was measured of one workload.

    Attributes:
        training: name of the mode -> (steps per second alone, beside, GiB per second beside) of each turn.
    """

    samples: list[Sample] = field(default_factory=list)
    raw: list[dict[str, float]] = field(default_factory=list)
    raw_cpu_s: list[float] = field(default_factory=list)
    training: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)


def run_workload(work: Workload, effort: Effort, say: Callable[[str], None]) -> Found:
    found = Found()
    with measure.job_root() as root, ExitStack() as stack:
        roots = [f"{root}-0", f"{root}-1"]
        say(f"{work.key}: save")
        arguments = {"job_root": roots[0], "objects": work.objects, "nbytes": work.nbytes}
        facts = measure.run_job(f"{__spec__.name}:save_job", arguments).facts[0]
        container = CheckpointContainerId(roots[0], STEP)
        paths = [f"{container.path}/{name}" for name in facts["names"]]
        raw = Raw(stack, f"{root}-raw", paths)
        bare = Bare(stack, f"{root}-raw", paths)
        for number in range(effort.pairs):
            for mode, encrypt in MODES.items():
                say(f"{work.key}: {mode}, {number + 1} of {effort.pairs}")
                with _nodes(roots, facts, encrypt) as nodes:
                    found.samples += _measure(nodes, raw, bare, effort, mode, found.raw)
                    assert all(
                        _same(f"{container.path}/{name}", f"{nodes.container.path}/{name}")
                        for name in facts["names"]
                    ), "node 1 does not have the bytes of node 0"
        found.raw_cpu_s = raw.cpu_s
        if work.objects == 1:
            trainer = Helper(serve_trainer)
            stack.callback(trainer.close)
            for mode, encrypt in MODES.items():
                say(f"{work.key}: training, {mode}")
                with _nodes(roots, facts, encrypt) as nodes:
                    found.training[mode] = _train(nodes, trainer, effort, work.total)
    return found


@contextmanager
def _nodes(roots: Sequence[str], facts: Mapping[str, Any], encrypt: bool) -> Iterator[Nodes]:
    """Fresh agents, and a node 1 that has nothing."""
    os.makedirs(roots[1], mode=0o700)
    try:
        with ExitStack() as stack:
            yield Nodes(stack, roots, facts, encrypt)
    finally:
        shutil.rmtree(roots[1])


def _measure(
    nodes: Nodes, raw: Raw, bare: Bare, effort: Effort, mode: str, references: list[dict[str, float]]
) -> list[Sample]:
    samples = []

    def timed(
        name: str, *orders: Callable[[], Any], before: dict[str, float], of: Nodes | Bare = nodes
    ) -> dict[str, float]:
        cpu_s, start_s = of.cpu_s(), time.perf_counter()
        for order in orders:
            order()
        seconds, cpu_s = time.perf_counter() - start_s, of.cpu_s() - cpu_s
        after = raw.transfer("warm")
        references.append(after)
        beside = {**before, "warm": (before["warm"] + after["warm"]) / 2}
        samples.append(Sample(f"{mode}, {name}", seconds, cpu_s, beside))
        return after

    # Before the first order, while node 1 has nothing: so that tmpfs never holds more than three versions.
    fresh = raw.transfer("fresh")
    references.append(fresh)
    warm = raw.transfer("warm")
    warm = timed("lost node", nodes.retrieve_manifest, nodes.retrieve, before={**fresh, **warm})
    for _ in range(effort.again):
        nodes.delete()
        warm = timed("again", nodes.retrieve, before=warm)
        warm = timed("bare", lambda: bare.transfer(MODES[mode]), before=warm, of=bare)
    for _ in range(effort.anew):
        nodes.delete()
        time.sleep(SERVED_ANEW_S)
        timed("mapped anew", nodes.retrieve, before=raw.transfer("warm"))
    return samples


def _train(nodes: Nodes, trainer: Helper, effort: Effort, nbytes: int) -> list[tuple[float, float, float]]:
    nodes.retrieve_manifest()
    nodes.retrieve()
    turns = []
    for _ in range(effort.training_turns):
        alone = trainer.ask(effort.training_s)
        over = threading.Event()
        orders: list[float] = []

        def work(over: threading.Event = over, orders: list[float] = orders) -> None:
            while not over.is_set():
                nodes.delete()
                start_s = time.perf_counter()
                nodes.retrieve()
                orders.append(time.perf_counter() - start_s)

        thread = threading.Thread(target=work)
        thread.start()
        beside = trainer.ask(effort.training_s)
        over.set()
        thread.join()
        turns.append((alone, beside, nbytes / GIB / statistics.median(orders)))
    return turns


# ---- the table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """A bound on a figure; `at_least` turns it round."""

    bound: float
    at_least: bool = False
    form: str = "{:g}"

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.form.format(self.bound)}"

    def verdict(self, value: float) -> str:
        """``ok``, or by how much it is missed."""
        if value >= self.bound if self.at_least else value <= self.bound:
            return "ok"
        return f"MISSED by {abs(value / self.bound - 1):.0%}"


@dataclass(frozen=True)
class Row:
    """One line of the table; ``value`` is what the goal bounds."""

    workload: str
    measure: str
    measured: str
    value: float | None = None
    shown: str = ""
    goal: Goal | None = None
    cpu_s_per_gib: float | None = None

    @property
    def verdict(self) -> str:
        return "" if self.goal is None or self.value is None else self.goal.verdict(self.value)


def rows_of(work: Workload, found: Found) -> Iterator[Row]:
    gib = work.total / GIB

    def time_of(seconds: float) -> str:
        return f"{seconds * 1e3:,.0f} ms  {gib / seconds:.2f} GiB/s"

    raw = {
        kind: statistics.median(transfer[kind] for transfer in found.raw if kind in transfer)
        for kind in ("warm", "fresh", "fresh, alone")
    }
    raw_cpu_s = statistics.mean(found.raw_cpu_s) / gib
    yield Row(work.key, "raw TCP, into warm mappings", time_of(raw["warm"]), 1.0, "1.00", None, raw_cpu_s)
    for kind in ("fresh, alone", "fresh"):
        label = "into fresh ones" if kind == "fresh, alone" else "into fresh ones, making them too"
        ratio = raw["warm"] / raw[kind]
        yield Row(work.key, f"raw TCP, {label}", time_of(raw[kind]), ratio, f"{ratio:.2f} x raw")
    for mode, least in (("unsealed", 0.9), ("sealed", 0.6)):
        for name, label, goal in (
            ("bare", "bare ZeroMQ, verified", None),
            ("again", "again", Goal(least, at_least=True)),
            ("mapped anew", "again, sender's mappings new", Goal(least, at_least=True)),
        ):
            samples = [sample for sample in found.samples if sample.name == f"{mode}, {name}"]
            ratio = statistics.median(sample.raw["warm"] / sample.seconds for sample in samples)
            yield Row(
                work.key,
                f"{mode}: {label}",
                time_of(statistics.median(sample.seconds for sample in samples)),
                ratio,
                f"{ratio:.2f} x raw",
                goal,
                statistics.mean(sample.cpu_s for sample in samples) / gib,
            )
        samples = [sample for sample in found.samples if sample.name == f"{mode}, lost node"]
        seconds = statistics.median(sample.seconds for sample in samples)
        cpu_s = statistics.mean(sample.cpu_s for sample in samples) / gib
        for kind, label in (("warm", "raw into warm"), ("fresh", "raw into fresh, made")):
            ratio = statistics.median(sample.seconds / sample.raw[kind] for sample in samples)
            yield Row(
                work.key,
                f"{mode}: lost node, ÷ {label}",
                time_of(seconds),
                ratio,
                f"{ratio:.2f} ÷ raw",
                Goal(1.5),
                cpu_s,
            )
    for mode, turns in found.training.items():
        loss = statistics.median(1 - beside / alone for alone, beside, _ in turns)
        rate = statistics.median(rate for _, _, rate in turns)
        yield Row(
            work.key,
            f"training beside both agents, {mode}: steps lost",
            f"at {rate:.2f} GiB/s",
            loss,
            f"{loss:.1%}",
            Goal(0.03, form="{:.0%}"),
        )


def table_of(works: Sequence[Workload], rows: Sequence[Row]) -> Table:
    table = Table(
        title="Objects from one agent to another (1.0 is raw TCP of the same bytes)", title_justify="left"
    )
    table.add_column("", no_wrap=True)
    for heading in ("measured", "beside raw", "CPU s/GiB", "goal"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    for work in works:
        table.add_section()
        table.add_row(work.title, style="bold")
        for row in rows:
            if row.workload == work.key:
                style = "green" if row.verdict == "ok" else "red"
                table.add_row(
                    f"  {row.measure}",
                    row.measured,
                    row.shown,
                    "" if row.cpu_s_per_gib is None else f"{row.cpu_s_per_gib:.2f}",
                    "" if row.goal is None else str(row.goal),
                    f"[{style}]{row.verdict}[/]" if row.verdict else "",
                )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replication", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="64 MiB instead of 1 GiB, few repeats: a smoke run"
    )
    parser.add_argument("--only", choices=("large", "small"), help="one workload")
    parser.add_argument("--json", metavar="FILE", help="write every sample there")
    options = parser.parse_args(arguments)
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        del os.environ[name]
    # As `start_agent` does: numpy has nothing to compute here.
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    console, progress = Console(), Console(stderr=True)
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH)
    machine = measure.machine()
    start_s, others_s = time.perf_counter(), measure.cpu_seconds_of_others()
    works = [
        work for work in workloads(GIB // 16 if options.quick else GIB) if options.only in (None, work.key)
    ]
    found: dict[str, Found] = {}
    rows: list[Row] = []
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
    goals = [row for row in rows if row.verdict]
    met = sum(row.verdict == "ok" for row in goals)
    console.print(f"{met} of {len(goals)} goals met; {seconds:.0f} s\n", highlight=False)
    console.print(NOTES, highlight=False)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            lines = [asdict(row) | {"verdict": row.verdict} for row in rows]
            raw = {key: asdict(one) for key, one in found.items()}
            json.dump({"machine": machine, "seconds": seconds, "table": lines, "found": raw}, file)


if __name__ == "__main__":
    main()
