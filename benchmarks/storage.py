"""What drains to long-term storage, and exports for Hugging Face, cost the training beside them: one table.

    python -m benchmarks.storage [--quick] [--only folder|s3|export]... [--folder FOLDER] [--json FILE]

`NOTES`, printed under the table, says how each figure is made. S3 is moto's server on this host, in the lowest class
of priority: what it takes of the CPUs and of the memory's bandwidth is no cost of ours; on a real job it is elsewhere.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import psutil
import torch
import xxhash
from rich.console import Console
from rich.table import Table

import flashpoint_torch as fpt
from benchmarks import measure, states, steps
from benchmarks.measure import Meter, Result
from benchmarks.replication import Goal, Helper
from flashpoint.config import ENV_PREFIX
from flashpoint.replication.client import AgentClient
from tests.s3 import S3Server, s3_server

GIB: Final = 1 << 30
MIB: Final = 1 << 20
WAIT_S: Final = 600.0
TABLE_WIDTH: Final = 140  # where the output is no terminal
TARGETS: Final = ("folder", "s3", "export")
SLOWER_MAX: Final = Goal(0.03, form="{:.0%}")
EXTRA_MAX: Final = Goal(300 * MIB, form="300 MiB")

NOTES: Final = """\
How each number is made. Medians over turns; every job in fresh processes; job roots on the tmpfs named above.
drain: a version of 64 float32 tensors is saved and replicated (copies=0); the agent drains it, at storage_bytes_per_s
  (256 MiB, the default). Training is another process that has saved nothing: steps of about 5 ms, some seconds while
  the agent drains and as long while it does nothing, in turns, now the one first and now the other; slower by: the
  median over turns of (mean step beside) / (mean step alone) - 1. One thread leaves a core to the agent; with as many
  as cores, training and agent share them. A turn whose drain came to its end before its steps did is not counted.
drain takes: from the version's being replicated until the agent says that it is drained. Agent: CPU seconds of its
  process from before the save until then (the copy's checksums are part of it), and by how much its own memory
  (RssAnon) was at most above what it was before the first save; the version's mapping is not its own.
export: a Llama of float32 made from a configuration, saved as by RecoverHandler, exported by Saver in the background
  of the training process itself. export() blocks: the call, right after async_save. Steps: as above, in that process.
  Extra memory: growth of RssAnon, and of the tmpfs bytes below the job root, from before the export until it is there,
  looked at every 2 ms. With saves meanwhile: two more versions are saved while it runs, which need a buffer of their
  own, since the export holds the one that it reads. Differ: AutoModelForCausalLM.from_pretrained in a process of its
  own, every tensor's dtype, shape and xxh3-128 of its bytes against the model that was saved, no name more or less."""


# ---- drains ---------------------------------------------------------------------------------------


def serve_trainer(pipe: Connection, threads: int) -> None:
    """Trains for as many seconds as it is told to, and tells the mean seconds of a step."""
    torch.set_num_threads(threads)
    step = steps.matmul_step()
    pipe.send("ready")
    while True:
        try:
            (seconds,) = pipe.recv()
        except EOFError:
            return
        pipe.send(statistics.mean(steps.train(step, seconds)["steps"]))


def drain_job(root: str, url: str, *, nbytes: int, bytes_per_s: int, seconds: float, turns: int) -> Meter:
    """Drains beside a training process, and nothing beside it, in turns."""
    state = states.make(states.Workload("drain", "", 64, nbytes))
    meter = Meter(facts={"turns": [], "drain_s": [], "agent_cpu_s": [], "agent_nbytes": []})
    settings = {"storage": url, "storage_keep_last": 1, "storage_bytes_per_s": bytes_per_s, "keep": 1}
    settings |= {"storage_timeout_s": WAIT_S}  # of a server that gets only what CPU nobody else wants
    numbers = itertools.count(1)
    with ExitStack() as stack:
        fp = stack.enter_context(fpt.init(root, **settings))
        agent = psutil.Process(AgentClient(root).identify().pid)
        own = _own_nbytes(agent.pid)
        fp.warmup(state.tree)

        def drain(during: Callable[[], float] | None) -> tuple[float, bool]:
            """Seconds that a drain took; what was done while it did, and whether it was still on its way then."""
            step, cpu = next(numbers), agent.cpu_times()
            assert fp.save(state.tree, step).wait("replicated", WAIT_S)
            start_s = time.perf_counter()
            found = during() if during is not None else 0.0
            was_on = fp.storage_status().step < step
            peak = _own_nbytes(agent.pid)
            while fp.storage_status().step < step:
                assert time.perf_counter() - start_s < WAIT_S, fp.storage_status()
                peak = max(peak, _own_nbytes(agent.pid))
                time.sleep(0.02)
            if during is None:
                now = agent.cpu_times()
                meter.facts["drain_s"].append(time.perf_counter() - start_s)
                meter.facts["agent_cpu_s"].append(now.user + now.system - cpu.user - cpu.system)
                meter.facts["agent_nbytes"].append(peak - own)
            return found, was_on

        for _ in range(2):
            drain(None)
        cores = len(os.sched_getaffinity(0))
        for threads in sorted({1, cores}):
            trainer = Helper(serve_trainer, threads)
            stack.callback(trainer.close)
            trainer.ask(seconds)
            for turn in range(turns):
                alone = trainer.ask(seconds) if turn % 2 == 0 else 0.0
                beside, was_on = drain(lambda trainer=trainer: trainer.ask(seconds))  # type: ignore[misc]
                time.sleep(1.0)  # the kernel may still write
                alone = alone or trainer.ask(seconds)
                meter.facts["turns"].append((threads, alone, beside, was_on))
            trainer.close()
    return meter


def _own_nbytes(pid: int) -> int:
    """Anonymous memory of a process (proc(5)): not what it maps of files and of the tmpfs."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon"))


# ---- exports --------------------------------------------------------------------------------------


def llama(nbytes: int) -> Any:
    """A model of about so many bytes of float32, with layers as a small real one has them."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    hidden = 1024 if nbytes >= 256 * MIB else 512
    vocabulary, intermediate = 8 * hidden, 4 * hidden
    layer = 4 * hidden * (4 * hidden + 3 * intermediate)
    layers = max(round((nbytes - 8 * hidden * vocabulary) / layer), 1)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def digests_of(model: Any) -> dict[str, list[Any]]:
    return {
        name: [str(value.dtype), list(value.shape), xxhash.xxh3_128_hexdigest(value.numpy().data)]
        for name, value in model.state_dict().items()
    }


def export_job(root: str, folder: str, *, nbytes: int, seconds: float, turns: int) -> Meter:
    """Exports beside steps of the process that makes them, and saves without exports, in turns."""
    model = llama(nbytes)
    state = {"engine": {"model": model.state_dict()}}
    meter = Meter(
        facts={
            "nbytes": sum(value.nbytes for value in model.state_dict().values()),
            "call_s": [], "save_s": [], "save_and_call_s": [], "export_s": [], "turns": [], "extra": [],
        }
    )  # fmt: skip
    facts, numbers = meter.facts, itertools.count(1)
    with fpt.init(root, keep=1) as fp:
        saver = fpt.Saver(fp, folder, fpt.SaverConfig(max_shard_bytes="256MiB"), model=model)
        fp.warmup(state)

        def save(*, exports: bool) -> fpt.Export | None:
            step = fpt.StepInfo(0, number := next(numbers), number, 1 << 30)
            handle: list[fpt.SaveHandle] = []
            save_s = meter.time(lambda: handle.append(fp.async_save(state, number)))
            export, start_s = None, time.perf_counter()
            if exports:
                export = saver.export(step, handle[0])
                facts["call_s"].append(time.perf_counter() - start_s)
            facts["save_and_call_s" if exports else "save_s"].append(time.perf_counter() - start_s + save_s)
            assert handle[0].wait("complete", WAIT_S)
            fp.wait()
            return export

        def ended(export: fpt.Export | None) -> None:
            assert export is not None and export.wait(WAIT_S), export and export.error
            facts["export_s"].append(export.seconds)
            shutil.rmtree(export.path)

        for _ in range(2):
            save(exports=False)
        facts["save_s"].clear()
        for name, step in (("matmul", steps.matmul_step()), ("Python", steps.python_step())):
            for turn in range(turns):
                means: dict[bool, float] = {}
                for exports in (turn % 2 == 0, turn % 2 == 1):
                    export = save(exports=exports)
                    means[exports] = statistics.mean(steps.train(step, seconds)["steps"])
                    was_on = export is not None and not export.done()
                    if export is not None:
                        facts["turns"].append((name, was_on))
                        ended(export)
                facts["turns"][-1] = (*facts["turns"][-1], means[False], means[True])
        for meanwhile in (False, True):
            export = None
            with _watched(root) as grown:
                export = save(exports=True)
                for _ in range(2 if meanwhile else 0):
                    save(exports=False)
                assert export is not None and export.wait(WAIT_S), export and export.error
            facts["extra"].append((meanwhile, *grown))
            if not meanwhile:
                ended(export)
        facts["path"] = export.path if export is not None else ""
        facts["digests"] = digests_of(model)
    return meter


@contextmanager
def _watched(root: str) -> Iterator[list[int]]:
    """How much anonymous memory and how many bytes of tmpfs there are at most beyond those at the beginning."""
    grown = [0, 0]
    over = threading.Event()
    before = (_own_nbytes(os.getpid()), measure.tmpfs_bytes_below(root))

    def watch() -> None:
        while not over.wait(0.002):
            now = (_own_nbytes(os.getpid()), _tmpfs_bytes(root))
            grown[:] = (max(most, n - b) for most, n, b in zip(grown, now, before, strict=True))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield grown
    finally:
        over.set()
        thread.join()


def _tmpfs_bytes(root: str) -> int:
    try:
        return measure.tmpfs_bytes_below(root)
    except FileNotFoundError:  # a file that was given up while it was counted
        return 0


def check_job(path: str, digests: dict[str, list[Any]]) -> Meter:
    """Load an export as its users do, and compare it."""
    from transformers import AutoModelForCausalLM

    found = digests_of(AutoModelForCausalLM.from_pretrained(path))
    wrong = [name for name in found.keys() | digests.keys() if found.get(name) != digests.get(name)]
    return Meter(facts={"tensors": len(found), "wrong": sorted(wrong)[:10]})


# ---- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    nbytes: int = GIB
    bytes_per_s: int = 256 * MIB
    seconds: float = 3.0
    turns: int = 6


QUICK: Final = Effort(nbytes=64 * MIB, bytes_per_s=32 * MIB, seconds=0.5, turns=2)


def run_target(target: str, effort: Effort, folder: str, say: Callable[[str], None]) -> dict[str, Any]:
    """The facts of one target's job."""
    say(target)
    arguments = {"nbytes": effort.nbytes, "seconds": effort.seconds, "turns": effort.turns}
    with (
        measure.job_root() as root,
        tempfile.TemporaryDirectory(prefix="flashpoint-bench-", dir=folder) as there,
    ):
        if target == "export":
            facts = _facts(_run("export_job", {"root": root, "folder": there, **arguments}))
            shutil.rmtree(os.path.dirname(root))  # memory for the next process
            checked = _run("check_job", {"path": facts.pop("path"), "digests": facts.pop("digests")})
            return facts | _facts(checked)
        with ExitStack() as stack:
            url = f"file://{there}"
            if target == "s3":
                server = stack.enter_context(_quiet_s3(there))
                os.environ |= server.environment()
                url = server.make_bucket("bench") + "/job"
            arguments |= {"root": root, "url": url, "bytes_per_s": effort.bytes_per_s}
            return _facts(_run("drain_job", arguments))


@contextmanager
def _quiet_s3(folder: str) -> Iterator[S3Server]:
    """A server that takes what nobody else wants of the CPUs, and keeps what it is given in files."""
    os.environ |= {"TMPDIR": folder, "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": "65536"}
    with s3_server() as server:
        for process in psutil.Process().children():
            if "moto.server" in process.cmdline():
                for thread in process.threads():
                    os.sched_setscheduler(thread.id, os.SCHED_IDLE, os.sched_param(0))
        yield server


def _run(job: str, arguments: dict[str, Any]) -> Result:
    return measure.run_job(f"{__spec__.name}:{job}", arguments, timeout_s=1800.0)


def _facts(result: Result) -> dict[str, Any]:
    return result.facts[0]


# ---- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One line of the table; ``value`` is what the goal bounds."""

    target: str
    measure: str
    measured: str
    goal: Goal | None = None
    value: float | None = None

    @property
    def verdict(self) -> str:
        return "" if self.goal is None or self.value is None else self.goal.verdict(self.value)


def rows_of(target: str, facts: dict[str, Any], nbytes: int) -> Iterator[Row]:
    if target == "export":
        yield from _export_rows(target, facts)
        return
    seconds = statistics.median(facts["drain_s"])
    gib = nbytes / GIB
    yield Row(target, "drain takes", f"{seconds:.1f} s  {nbytes / MIB / seconds:,.0f} MiB/s")
    yield Row(target, "agent: CPU", f"{statistics.median(facts['agent_cpu_s']) / gib:.2f} s/GiB")
    yield Row(target, "agent: own memory, at most", f"{max(facts['agent_nbytes']) / MIB:,.0f} MiB")
    cores = max(threads for threads, *_ in facts["turns"])
    for threads in sorted({threads for threads, *_ in facts["turns"]}):
        turns = [turn for turn in facts["turns"] if turn[0] == threads and turn[3]]
        label = f"step of {threads} thread{'s' * (threads > 1)} slower by ({len(turns)} turns)"
        if turns:
            slower = statistics.median(beside / alone - 1 for _, alone, beside, _ in turns)
            goal = SLOWER_MAX if threads < cores or cores == 1 else None
            yield Row(target, label, f"{slower:+.1%}", goal, slower)


def _export_rows(target: str, facts: dict[str, Any]) -> Iterator[Row]:
    def milliseconds(name: str) -> str:
        return f"{statistics.median(facts[name]) * 1e3:,.2f} ms"

    nbytes, seconds = facts["nbytes"], statistics.median(facts["export_s"])
    yield Row(target, "model", f"{nbytes / GIB:.2f} GiB")
    yield Row(target, "export takes", f"{seconds:.1f} s  {nbytes / MIB / seconds:,.0f} MiB/s")
    call_s = statistics.median(facts["call_s"])
    yield Row(target, "export() blocks", milliseconds("call_s"), Goal(1e-3, form="1 ms"), call_s)
    yield Row(target, "async_save blocks", milliseconds("save_s"))
    yield Row(target, "async_save and export() block", milliseconds("save_and_call_s"))
    for name in ("matmul", "Python"):
        turns = [turn for turn in facts["turns"] if turn[0] == name and turn[1]]
        if turns:
            slower = statistics.median(beside / alone - 1 for _, _, alone, beside in turns)
            yield Row(target, f"{name} step slower by ({len(turns)} turns)", f"{slower:+.1%}")
    for meanwhile, own, tmpfs in facts["extra"]:
        label = "extra memory, with saves meanwhile" if meanwhile else "extra memory"
        text = f"{own / MIB:,.0f} MiB own, {tmpfs / MIB:,.0f} MiB tmpfs"
        yield Row(target, label, text, None if meanwhile else EXTRA_MAX, own + tmpfs)
    wrong = len(facts["wrong"])
    yield Row(target, f"from_pretrained, {facts['tensors']} tensors: differ", str(wrong), Goal(0), wrong)


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(title="Storage and exports beside training", title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("goal", justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    titles = {"folder": "drain to a folder", "s3": "drain to S3 (moto)", "export": "export for Hugging Face"}
    for target, title in titles.items():
        found = [row for row in rows if row.target == target]
        if found:
            table.add_section()
            table.add_row(title, style="bold")
        for row in found:
            style = "green" if row.verdict == "ok" else "red"
            goal = "" if row.goal is None else str(row.goal)
            verdict = f"[{style}]{row.verdict}[/]" if row.verdict else ""
            table.add_row(f"  {row.measure}", row.measured, goal, verdict)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.storage", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="64 MiB instead of 1 GiB, few turns: a smoke run"
    )
    parser.add_argument("--only", action="append", choices=TARGETS, help="of folder, s3, export")
    parser.add_argument("--folder", metavar="FOLDER", help="on the disk to drain and export to")
    parser.add_argument("--json", metavar="FILE", help="write every sample there")
    options = parser.parse_args(arguments)
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        del os.environ[name]
    effort = QUICK if options.quick else Effort()
    folder = options.folder or tempfile.gettempdir()
    console, progress = Console(), Console(stderr=True)
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH)
    machine = measure.machine() | {"folder": f"{folder}, {_file_system(folder)}"}
    start_s, others_s = time.perf_counter(), measure.cpu_seconds_of_others()
    found: dict[str, dict[str, Any]] = {}
    rows: list[Row] = []
    with progress.status("") as status:
        for target in options.only or TARGETS:
            found[target] = run_target(target, effort, folder, status.update)
            rows += rows_of(target, found[target], effort.nbytes)
    seconds = time.perf_counter() - start_s
    others_s = measure.cpu_seconds_of_others() - others_s
    machine["others"] = (
        f"used {others_s / seconds / len(os.sched_getaffinity(0)):.0%} of the CPUs, agents included"
    )
    for name, text in machine.items():
        console.print(f"{name:>10}: {text}", highlight=False)
    console.print()
    console.print(table_of(rows))
    goals = [row for row in rows if row.verdict]
    met = sum(row.verdict == "ok" for row in goals)
    console.print(f"{met} of {len(goals)} goals met; {seconds:.0f} s\n", highlight=False)
    console.print(NOTES, highlight=False)
    if options.json:
        lines = [asdict(row) | {"verdict": row.verdict} for row in rows]
        Path(options.json).write_text(
            json.dumps({"machine": machine, "seconds": seconds, "table": lines, "found": found})
        )


def _file_system(folder: str) -> str:
    kind = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=False)
    return kind.stdout.strip() or "unknown"


if __name__ == "__main__":
    main(sys.argv[1:])
