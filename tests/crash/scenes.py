"""The operations that are killed and failed at every call, each with what was before it and what comes after.

A scene's `run` makes a fresh job root (or two), lets one process do the operation under the tracer, and then looks
three times with `tests.checker`: at what the process left; at what a restarted job recovers; at what is there when
that job has gone on for two steps. What it returns is what was wrong.
"""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

import numpy as np

from flashpoint.config import FlashpointConfig
from flashpoint.coordinator import Coordinator
from flashpoint.dtypes import name_of
from flashpoint.errors import DeadlineError, FlashpointError
from flashpoint.job import Job, open_job
from flashpoint.layout import Entry
from flashpoint.loader import MLFlashpointCheckpointLoader
from flashpoint.manifest import Value
from flashpoint.saver import MLFlashpointCheckpointSaver
from flashpoint.values import to_json
from tests import checker
from tests.checker import Expected, Node
from tests.crash import mutants
from tests.crash.tracer import Child, Event, Fault, Tracer, over, roles_below

WAIT_S: Final = 30.0
DEAD_S: Final = 0.3  # the patience of the ranks that outlive another
KEEP: Final = 1
NUMBERS = itertools.count(1)


@dataclass
class Result:
    """How one run went.

    Attributes:
        events: the operation's calls, where nothing was struck.
        struck: whether the fault's call was reached.
        wrong: violations.
    """

    events: list[Event] = field(default_factory=list)
    struck: bool = False
    wrong: list[str] = field(default_factory=list)


class FileCoordinator(Coordinator):
    """Ranks that are processes: a key is a file of a folder outside the job root, so its calls are not the job's."""

    def __init__(self, folder: str, rank: int, world_size: int, local_rank: int) -> None:
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self._folder = folder
        os.makedirs(folder, exist_ok=True)

    def _path(self, key: str) -> str:
        return f"{self._folder}/{quote(key, safe='')}"

    def publish(self, key: str, value: bytes) -> None:
        path = self._path(key)
        with open(f"{path}.new", "wb") as file:
            file.write(value)
        os.rename(f"{path}.new", path)

    def fetch(self, key: str, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                with open(self._path(key), "rb") as file:
                    return file.read()
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise DeadlineError(f"{key!r} was not published within {timeout_s:g} s") from None
                time.sleep(0.001)

    def remove(self, key: str) -> None:
        if os.path.exists(self._path(key)):
            os.unlink(self._path(key))


class Span:
    """The part of a child's life that is traced; none of it in a child that is not."""

    def __init__(self, be_traced: Callable[[], None] | None) -> None:
        self._be_traced = be_traced
        self._begun = False

    def begin(self) -> None:
        if self._be_traced is not None:
            self._begun = True
            self._be_traced()

    def end(self) -> None:
        if self._begun:
            over()


class Scene:
    """One operation, at one rank of a job.

    Args:
        folder: where its job roots are made.
        mutant: name of the bug that is put into the processes that act and recover; empty for none.
    """

    name = ""
    world_size = 1
    nodes = 1
    victim = 0
    is_slow = False

    def __init__(self, folder: str, *, mutant: str = "") -> None:
        self.parent, self.mutant = folder, mutant
        self.folder = ""

    # ---- where and with what ------------------------------------------------------------------------

    @property
    def roots(self) -> list[str]:
        return [f"{self.folder}/node-{index}/job" for index in range(self.nodes)]

    def _node_of(self, rank: int) -> int:
        return rank * self.nodes // self.world_size

    def _ranks(self) -> list[list[int]]:
        return [[r for r in range(self.world_size) if self._node_of(r) == node] for node in range(self.nodes)]

    def config(self, **settings: Any) -> FlashpointConfig:
        usual = {"chunk_bytes": 4096, "keep": KEEP, "recovery_timeout_s": WAIT_S, "commit_timeout_s": WAIT_S}
        return FlashpointConfig.from_env({}, **(usual | {"seal_threads": 1, "load_threads": 1} | settings))

    def open(
        self, rank: int, meeting: str, config: FlashpointConfig
    ) -> tuple[Job, MLFlashpointCheckpointSaver]:
        """Start the job anew, as one of its ranks."""
        node = self._node_of(rank)
        local_rank = self._ranks()[node].index(rank)
        coordinator = FileCoordinator(f"{self.folder}/{meeting}", rank, self.world_size, local_rank)
        job = open_job(self.roots[node], config, coordinator)
        return job, saver_of(job)

    def roles(self) -> dict[str, str]:
        return dict.fromkeys(self.roots, "")

    # ---- a run --------------------------------------------------------------------------------------

    def run(self, fault: Fault | None = None) -> Result:
        self.folder = f"{self.parent}/run-{next(NUMBERS)}"
        for root in self.roots:
            os.makedirs(root, mode=0o700)
        try:
            self._together("prepare", self.prepare, mutant="")
            return self._run(fault)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, fault: Fault | None) -> Result:
        goes_on = fault is None or not fault.kind.kills
        others = [
            Child(self._work(lambda say, span, rank=rank: self.act(rank, say, span, goes_on), traced=False))
            for rank in range(self.world_size)
            if rank != self.victim
        ]
        victim = Child(self._work(lambda say, span: self.act(self.victim, say, span, goes_on), traced=True))
        tracer = Tracer(victim, roles_below(self.roles()), fault)
        traced = tracer.run(WAIT_S * 2)
        result = Result(traced.events, traced.struck)
        said = victim.said()
        for other in others:
            if other.wait(WAIT_S) is None:
                result.wrong.append("I4: another rank does not come to an end")
            said += other.said()
        if traced.status is None:
            result.wrong.append("I4: it does not come to an end")
        result.wrong += [f"I5: {value}" for what, value in said if what == "error"]
        result.wrong += [
            f"I6: descriptors are left open: {value}" for what, value in said if what == "open" and value
        ]
        expected = self.expected(said)
        self._look(result, "left", expected)
        if not result.wrong:
            self._afterwards(result, expected)
        return result

    def _afterwards(self, result: Result, expected: Expected) -> None:
        """A restarted job recovers, and goes on."""
        loads = self._together("recover", self.recover)
        result.wrong += [f"I4, I5: the restarted job: {value}" for what, value in loads if what == "error"]
        newest = checker.loadable(self._read(), expected)
        for what, (version, rank, loaded) in [one for one in loads if one[0] == "loaded"]:
            if version < expected.floor:
                result.wrong.append(f"I3: {what} {version}, before the crash {expected.floor} was safe")
            elif version not in newest:
                result.wrong.append(f"I1: {what} {version}, which must be refused")
            else:
                result.wrong += checker.wrong_load(loaded, version[1], rank, expected.attempts[version[1]])
        if len({version for what, (version, *_) in loads if what == "loaded"}) != 1:
            result.wrong.append(f"I3: the ranks do not recover one version: {[what for what, _ in loads]}")
        self._look(result, "recovered", expected._replace(refused=(), saving=expected.attempts))
        for node in self._read():
            result.wrong += [f"{text} (recovered)" for text in checker.leaks(node, buffers_max=20)]
        if result.wrong:
            return
        went_on = self._together("go on", self.go_on)
        result.wrong += [
            f"I5: the restarted job goes on: {value}" for what, value in went_on if what == "error"
        ]
        for node, ranks in zip(self._read(), self._ranks(), strict=True):
            buffers = len(ranks) * (KEEP + 2)
            result.wrong += [
                f"{text} (at last)" for text in checker.leaks(node, buffers_max=buffers, steps=[9])
            ]
        epoch = max((version[0] for node in self._read() for version in node.complete), default=-1)
        self._look(result, "at last", Expected({9: [0]}, floor=(epoch, 9), ranks=self._ranks()))

    def _look(self, result: Result, when: str, expected: Expected) -> None:
        result.wrong += [f"{text} ({when})" for text in checker.violations(self._read(), expected)]

    def _read(self) -> list[Node]:
        return [checker.read(root) for root in self.roots]

    def _work(
        self, work: Callable[..., None], *, traced: bool, mutant: str | None = None
    ) -> Callable[[Callable[[Any], None], Callable[[], None]], None]:
        def run(say: Callable[[Any], None], be_traced: Callable[[], None]) -> None:
            hush()
            mutants.put_in(self.mutant if mutant is None else mutant)
            work(say, Span(be_traced if traced else None))

        return run

    def _together(
        self, meeting: str, work: Callable[..., None], *, mutant: str | None = None
    ) -> list[tuple[str, Any]]:
        """Every rank does ``work(rank, meeting, say)``; what they said."""
        children = [
            Child(
                self._work(lambda say, span, rank=rank: work(rank, meeting, say), traced=False, mutant=mutant)
            )
            for rank in range(self.world_size)
        ]
        said: list[tuple[str, Any]] = []
        for rank, child in enumerate(children):
            if child.wait(WAIT_S * 2) is None:
                said.append(("error", f"rank {rank} does not come to an end in {meeting!r}"))
            said += child.said()
        if meeting == "prepare":
            assert not [value for what, value in said if what == "error"], said
        return said

    # ---- the parts ----------------------------------------------------------------------------------

    def prepare(self, rank: int, meeting: str, say: Callable[[Any], None]) -> None:
        """What was before."""
        job, saver = self.open(rank, meeting, self.config())
        save(saver, 1)
        job.objects.close()

    def act(self, rank: int, say: Callable[[Any], None], span: Span, goes_on: bool) -> None:
        """The operation."""
        raise NotImplementedError

    def expected(self, said: Sequence[tuple[str, Any]]) -> Expected:
        """What may be there, after ranks have said ("saved", step)."""
        saved = [value for what, value in said if what == "saved"]
        floor = max([(1, 1), *((2, step) for step in saved)])
        attempts = {step: [0] for step in (1, 2, 3, 8, 9)}
        return Expected(attempts, floor, ranks=self._ranks(), saving=(2, 3))

    def recover(self, rank: int, meeting: str, say: Callable[[Any], None]) -> None:
        job, _ = self.open(rank, meeting, self.config())
        load(job, rank, say)
        job.objects.close()

    def go_on(self, rank: int, meeting: str, say: Callable[[Any], None]) -> None:
        job, saver = self.open(rank, meeting, self.config())
        for step in (8, 9):
            save(saver, step)
        job.objects.close()


# ---- what ranks do --------------------------------------------------------------------------------------------


def saver_of(job: Job, **settings: Any) -> MLFlashpointCheckpointSaver:
    return MLFlashpointCheckpointSaver(
        job.objects, job.coordinator, epoch=job.epoch, writer="tests", node_ranks=job.node_ranks, **settings
    )


def save(
    saver: MLFlashpointCheckpointSaver,
    step: int,
    *,
    attempt: int = 0,
    overwrite: bool = False,
    before_all: Callable[[], None] = lambda: None,
    before_finalize: Callable[[], None] = lambda: None,
) -> None:
    """As `saver.save`, of the state that is known, and with places to stop at."""
    rank = saver.coordinator.rank
    arrays = checker.known(step, rank, attempt)
    pending = saver.begin(step)
    before_all()
    try:
        saver.initialize_checkpoint(pending, overwrite=overwrite)
        values = checker.known_values(step, rank, attempt)
        pending.values = [Value(name, to_json(value)) for name, value in values.items()]
        layout = saver.plan(Entry(name, name_of(array.dtype), array.shape) for name, array in arrays.items())

        def fill(buffer: Any) -> None:
            for array, begin, end in zip(arrays.values(), layout.begins, layout.ends, strict=True):
                np.copyto(buffer.data[begin:end].view(array.dtype).reshape(array.shape), array)

        pending.staged.append(saver.stage(layout, fill))
        saver.write(pending)
    except Exception as error:
        saver.withdraw(pending, error)
        raise
    try:
        saver.write_metadata(pending)
        before_finalize()
        saver.finalize(pending)
    except BaseException:
        saver.abandon(pending)
        raise


def load(job: Job, rank: int, say: Callable[[Any], None]) -> None:
    """Load the newest version, and say what came."""
    loader = MLFlashpointCheckpointLoader(job.objects, job.coordinator)
    view = loader.latest_complete()
    if view is None:
        say(("error", "there is nothing to load"))
        return
    version = (view.manifest.record.epoch, view.container.step)
    entries = {
        view.entry(record, i).name: np.array(view.array(record, i))
        for record in view.manifest.objects
        if record.id.rank == rank
        for i in range(len(view.manifest.layout(record).entries))
    }
    values = {name: view[name] for name in checker.known_values(0)}
    say(("loaded", (version, rank, {"entries": entries, "values": values})))
    view.close()


def hush() -> None:
    """What a fault makes the log say is of no interest in thousands of runs."""
    import logging

    if "CRASH_LOG" not in os.environ:
        logging.disable(logging.CRITICAL)


def open_below(roots: Sequence[str]) -> list[str]:
    """Files of these folders that this process has open, mappings included."""
    gc.collect()
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if any(path.startswith(f"{root}/") for root in roots):
            found.append(path)
    return found


# ---- scenes of saving and loading -------------------------------------------------------------------------------


class Save(Scene):
    """Declare, stage, seal, and publish a version: up to its manifest."""

    name = "save"
    attempt = 0
    phase = "write"

    def act(self, rank: int, say: Callable[[Any], None], span: Span, goes_on: bool) -> None:
        timeout_s = WAIT_S if goes_on else DEAD_S
        job, saver = self.open(rank, "act", self.config(commit_timeout_s=timeout_s))
        begin, end = span.begin, span.end
        hooks = {
            "write": {"before_all": begin, "before_finalize": end},
            "finalize": {"before_finalize": begin},
            "all": {"before_all": begin},
        }[self.phase]
        try:
            save(saver, 2, attempt=self.attempt, overwrite=bool(self.attempt), **hooks)
            say(("saved", 2))
        except (FlashpointError, OSError) as error:
            say(("failed", f"{type(error).__name__}: {error}"))
        end()
        if goes_on:
            save(saver, 3)
            say(("saved", 3))
        job.objects.close()
        pools = [job.objects, saver, job]
        del job, saver, pools
        say(("open", open_below(self.roots)))


class Replace(Save):
    """Save a step again that is complete already."""

    name = "save over a step"
    attempt = 1

    def prepare(self, rank: int, meeting: str, say: Callable[[Any], None]) -> None:
        job, saver = self.open(rank, meeting, self.config(keep=2))
        save(saver, 1)
        save(saver, 2)
        job.objects.close()

    def expected(self, said: Sequence[tuple[str, Any]]) -> Expected:
        expected = super().expected(said)
        return expected._replace(attempts={**expected.attempts, 2: [0, 1]})


class Finalize(Save):
    """Take the marker away, and give the older version up."""

    name = "finalize"
    phase = "finalize"


class Retention(Save):
    """The first save after a start that finds three versions where one is to be kept: all of them go, and buffers."""

    name = "retention"
    phase = "all"

    def prepare(self, rank: int, meeting: str, say: Callable[[Any], None]) -> None:
        job, saver = self.open(rank, meeting, self.config(keep=0))
        for step in (11, 12, 1):
            save(saver, step)
        job.objects.close()

    def expected(self, said: Sequence[tuple[str, Any]]) -> Expected:
        expected = super().expected(said)
        attempts = {**expected.attempts, 11: [0], 12: [0]}
        return expected._replace(attempts=attempts, floor=max(expected.floor, (1, 12)))


class Commit(Save):
    """A save of two ranks, each on a node of its own, from the marker to the end of older versions."""

    world_size = nodes = 2
    phase = "all"
    is_slow = True


class CommitOfLeader(Commit):
    name = "commit, rank 0 of 2"
    victim = 0


class CommitOfOther(Commit):
    name = "commit, rank 1 of 2"
    victim = 1


class CommitOnOneNode(Save):
    name = "commit on one node, rank 1 of 2"
    world_size = 2
    is_slow = True
    victim = 1
    phase = "all"


class Recovery(Scene):
    """A start of the job after a crash that left of everything something, and the load of the newest version.

    Steps 1 and 7 are of the first start; step 2 is of the second, and the newest that is whole. Step 3 has rotten
    bytes, step 4 is a copy of step 2 under another name, step 5 was being saved; and there is debris.
    """

    name = "recovery"

    def prepare(self, rank: int, meeting: str, say: Callable[[Any], None]) -> None:
        for number, steps in enumerate(((1, 7), (2, 3, 4, 5))):
            job, saver = self.open(rank, f"{meeting} {number}", self.config(keep=0))
            for step in steps:
                save(saver, step)
            job.objects.close()
        root = self.roots[0]
        with open(f"{root}/step-3_ckpt/rank00000-0.safetensors", "r+b") as file:
            file.seek(10_000)
            file.write(bytes(64))
        shutil.rmtree(f"{root}/step-4_ckpt")
        shutil.copytree(f"{root}/step-2_ckpt", f"{root}/step-4_ckpt")
        for path in (
            f"{root}/step-5_ckpt__0__unfinished",
            f"{root}/step-5_ckpt/.metadata.01234567.tmp",
            f"{root}/.epoch.01234567.tmp",
        ):
            with open(path, "wb"):
                pass
        with open(f"{root}/.pool/rank00000-0123456789abcdef.buf", "wb") as file:
            file.truncate(1 << 16)
        os.makedirs(f"{root}/.fetched/step-2_ckpt/rank00000")
        with open(f"{root}/.fetched/step-2_ckpt/rank00000/rank00001-0.safetensors", "wb") as file:
            file.write(bytes(4096))

    def act(self, rank: int, say: Callable[[Any], None], span: Span, goes_on: bool) -> None:
        span.begin()
        try:
            job, _ = self.open(rank, "act", self.config())
            load(job, rank, say)
        except (FlashpointError, OSError) as error:
            say(("failed", f"{type(error).__name__}: {error}"))
        span.end()

    def expected(self, said: Sequence[tuple[str, Any]]) -> Expected:
        attempts = {step: [0] for step in (1, 7, 2, 8, 9)}
        return Expected(attempts, floor=(2, 2), ranks=self._ranks(), refused=(3, 4, 5))
