"""Two agents that copy a version to each other; one of them is killed and failed at every call on files and sockets.

All of its threads are followed, libzmq's too. How often an agent looks, and how its messages fall into packets,
differs from run to run: a call that is not reached in a run is counted as such.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from flashpoint.errors import FlashpointError
from flashpoint.objects import CheckpointObjectManager
from flashpoint.replication import limits, manager
from flashpoint.replication.agent import run_agent
from flashpoint.replication.agent_folder import AgentFolder, Assignment
from flashpoint.replication.client import AgentClient
from flashpoint.replication.keys import JobKeys, write_keys
from flashpoint.replication.membership import Member, Membership
from flashpoint.replication.messages import Key
from flashpoint.replication.orders import Wanted
from tests import checker
from tests.checker import Expected
from tests.crash.scenes import NUMBERS, WAIT_S, Result, Scene, Span, save, saver_of
from tests.crash.tracer import Child, Fault, Tracer, roles_below

HOST: Final = "127.0.0.1"
_ = manager  # imported here, once, and not by every forked agent
KEYS: Final = JobKeys.generate()
ASK_S: Final = 0.5


class Replication(Scene):
    """Step 1 is replicated, step 2 is complete; the agents start, copy step 2, and give step 1 up."""

    nodes = world_size = 2
    is_slow = True
    epoch = 1
    done = "replicated"
    _template = ""

    def run(self, fault: Fault | None = None) -> Result:
        if not self._template:
            self._template = f"{self.parent}/template-{next(NUMBERS)}"
            self._make_template()
        return super().run(fault)

    # ---- what was before ----------------------------------------------------------------------------

    def _make_template(self) -> None:
        self.folder = self._template
        for root in self.roots:
            os.makedirs(root, mode=0o700)
        said = self._together("first", lambda rank, meeting, say: self._save(rank, meeting, 1), mutant="")
        said += self._with_agents(1)
        said += self._together("second", lambda rank, meeting, say: self._save(rank, meeting, 2), mutant="")
        assert ("replicated", 1) in said and not [v for what, v in said if what == "error"], said
        for root in self.roots:
            shutil.rmtree(f"{root}/.agent")

    def _save(self, rank: int, meeting: str, step: int) -> None:
        job, _ = self.open(rank, meeting, self.config())
        saver = saver_of(job, gives_up=False)
        saver.epoch = 1
        save(saver, step)
        job.objects.close()

    def _with_agents(self, step: int) -> list[tuple[str, Any]]:
        agents = [
            Child(self._work(lambda say, span, n=n: self._be_agent(n, span), traced=False, mutant=""))
            for n in range(2)
        ]
        driver = Child(self._work(lambda say, span: self._drive(step, say), traced=False, mutant=""))
        driver.wait(WAIT_S * 2)
        for agent in agents:
            agent.kill()
            agent.wait()
        return driver.said()

    def prepare(self, rank: int, meeting: str, say: Callable[[Any], None]) -> None:
        _copy(f"{self._template}/node-{rank}/job", self.roots[rank])

    # ---- processes ----------------------------------------------------------------------------------

    def _be_agent(self, node: int, span: Span) -> None:
        _hurry()
        folder = AgentFolder(self.roots[node])
        write_keys(folder.path, KEYS)
        folder.close()
        span.begin()
        run_agent(self.roots[node], config=self.config(copies=1, prefault=False, peer_timeout_s=WAIT_S))

    def _drive(self, step: int, say: Callable[[Any], None]) -> None:
        """What the trainers of both nodes do."""
        _hurry()
        trainers = Trainers(self.roots, self.epoch, [(1, 1), (1, step)])
        if not trainers.all(lambda client, node: client.await_replicated(1, step, ASK_S)):
            say(("error", f"step {step} is not replicated"))
            return
        say((self.done, step))
        trainers.all(lambda client, node: not os.path.exists(f"{self.roots[node]}/step-{step - 1}_ckpt"))

    # ---- a run --------------------------------------------------------------------------------------

    def _run(self, fault: Fault | None) -> Result:
        agents = {}
        other = 1 - self.victim
        agents[other] = Child(self._work(lambda say, span: self._be_agent(other, span), traced=False))
        driver = Child(self._work(lambda say, span: self._drive(2, say), traced=False))
        victim = Child(self._work(lambda say, span: self._be_agent(self.victim, span), traced=True))
        agents[self.victim] = victim
        try:
            tracer = Tracer(victim, roles_below(self.roles()), fault)
            traced = tracer.run(WAIT_S * 2, until=driver)
            result = Result(traced.events, traced.struck)
            if not driver.ended:  # the agent died
                agents[other].stop()
                self._look(result, "left", self.expected([]))
                agents[other].kill(signal.SIGCONT)
                agents[self.victim] = Child(
                    self._work(lambda say, span: self._be_agent(self.victim, span), traced=False)
                )
                if driver.wait(WAIT_S * 2) is None:
                    result.wrong.append("I4: the trainers do not come to an end")
            said = driver.said()
        finally:
            for agent in agents.values():
                agent.kill()
                agent.wait()
        result.wrong += [f"I4: {value}" for what, value in said if what == "error"]
        expected = self.expected(said)
        self._look(result, "at last", expected)
        for node in self._read():
            wrong = checker.leaks(node, buffers_max=2 * 4, steps=[2] if (self.done, 2) in said else None)
            result.wrong += [f"{text} (at last)" for text in wrong]
        return result

    def _look(self, result: Result, when: str, expected: Expected) -> None:
        super()._look(result, when, expected)
        nodes = self._read()
        for lost in (0, 1):
            newest = next(iter(checker.loadable(nodes, expected, lost={lost})), (-1, -1))
            if newest < expected.floor:
                text = f"I3: without node {lost}, {newest} is the newest, it was {expected.floor} ({when})"
                result.wrong.append(text)

    def expected(self, said: Sequence[tuple[str, Any]]) -> Expected:
        floor = (1, 2) if ("replicated", 2) in said else (1, 1)
        return Expected({1: [0], 2: [0]}, floor, ranks=self._ranks(), copies=True)


class ReplicationLeader(Replication):
    name = "replication, node 0 of 2"
    victim = 0


class ReplicationOther(Replication):
    name = "replication, node 1 of 2"
    victim = 1


class RecoveryFromPeer(Replication):
    """Node 0 has lost its memory; in the next start of the job its agent gets step 2, with all objects, from node 1."""

    name = "recovery from a peer"
    victim = 0
    epoch = 2
    done = "fetched"

    def _make_template(self) -> None:
        self.epoch, self.done = 1, "replicated"
        super()._make_template()
        assert ("replicated", 2) in self._with_agents(2)
        for root in self.roots:
            shutil.rmtree(f"{root}/.agent")
        del self.epoch, self.done

    def prepare(self, rank: int, meeting: str, say: Callable[[Any], None]) -> None:
        if rank == 1:
            super().prepare(rank, meeting, say)

    def _drive(self, step: int, say: Callable[[Any], None]) -> None:
        if self.done == "fetched":
            self._fetch(step, say)
        else:  # to make what was before
            super()._drive(step, say)

    def _fetch(self, step: int, say: Callable[[Any], None]) -> None:
        """What the trainer of node 0 does, as `peers` has it."""
        _hurry()
        held = CheckpointObjectManager(self.roots[1], rank=None, config=self.config(), create=False)
        record, digest, nbytes = held.read_summary(held.container(step))
        held.close()
        key = Key(record.epoch, step, digest)
        wanted = [Wanted(obj.name, (), (1,)) for obj in record.objects]

        def fetched(client: AgentClient, node: int) -> bool:
            client.retrieve_manifest(key, nbytes, (1,), WAIT_S / 4)
            client.retrieve(key, wanted, WAIT_S / 4)
            return True

        if Trainers(self.roots, self.epoch, []).all(fetched, nodes={0}):
            say((self.done, step))
        else:
            say(("error", f"step {step} could not be fetched"))

    def expected(self, said: Sequence[tuple[str, Any]]) -> Expected:
        return super().expected(said)._replace(floor=(1, 2))

    def _look(self, result: Result, when: str, expected: Expected) -> None:
        Scene._look(self, result, when, expected)
        for lost in (0, 1) if when == "at last" else (0,):
            if (1, 2) not in checker.loadable(self._read(), expected, lost={lost}):
                result.wrong.append(f"I3: without node {lost}, step 2 cannot be loaded ({when})")


class Trainers:
    """What the trainers of all nodes tell their agents: who is in the job, and which versions are complete.

    An agent that was started again is told again.
    """

    def __init__(self, roots: Sequence[str], epoch: int, complete: Sequence[tuple[int, int]]) -> None:
        self._roots, self._epoch, self._complete = roots, epoch, complete
        self._clients = [AgentClient(root) for root in roots]
        self._known = [0 for _ in roots]
        self._membership: Membership | None = None
        self._deadline = time.monotonic() + WAIT_S

    def all(self, holds: Callable[[AgentClient, int], bool], nodes: Collection[int] = (0, 1)) -> bool:
        """Whether something comes to hold on these nodes, in time."""
        waits = set(nodes)
        while waits and time.monotonic() < self._deadline:
            with contextlib.suppress(
                FlashpointError, OSError
            ):  # an agent is not there, or is another one now
                clients = [self._told(node) for node in range(len(self._roots))]
                waits -= {node for node in sorted(waits) if holds(clients[node], node)}
            time.sleep(0.01)
        return not waits

    def _told(self, node: int) -> AgentClient:
        if self._membership is None:
            self._membership = self._gather()
        client = self._clients[node]
        identity = client.identify(ASK_S)
        if identity.pid != self._known[node]:
            assignment = Assignment(membership=self._membership, index=node, keep=1, encrypt=True)
            client.configure(assignment, KEYS, ASK_S)
            for version in self._complete:
                client.completed(*version, ASK_S)
            self._known[node] = identity.pid
        return client

    def _gather(self) -> Membership:
        members = []
        for index, (root, client) in enumerate(zip(self._roots, self._clients, strict=True)):
            said, status = client.identify(ASK_S), os.stat(root)
            where = f"{status.st_dev}:{status.st_ino}"
            members.append(
                Member(
                    index=index,
                    node=where,
                    ranks=(index,),
                    host=HOST,
                    port=said.port,
                    bulk_port=said.bulk_port,
                )
            )
        return Membership(job=KEYS.job, epoch=self._epoch, copies=1, members=tuple(members))


def _hurry() -> None:
    """Losses are noticed sooner than in the field."""
    for name, seconds in (
        ("REQUEST_TIMEOUT_S", 1.0),
        ("SILENCE_S", 2.0),
        ("HEARTBEAT_S", 0.5),
        ("REPEAT_S", 0.2),
        ("REPEAT_LAST_S", 0.5),
        ("RECONNECT_LAST_S", 0.1),
    ):
        setattr(limits, name, seconds)


def _copy(source: str, target: str) -> None:
    """Copy a job root: what had two names has two names again."""
    names: dict[int, str] = {}
    for folder, folders, files in os.walk(source):
        here = folder.replace(source, target, 1)
        for name in folders:
            os.mkdir(f"{here}/{name}", 0o700)
        for name in files:
            inode = os.lstat(f"{folder}/{name}").st_ino
            if inode in names:
                os.link(names[inode], f"{here}/{name}")
            else:
                names[inode] = f"{here}/{name}"
                shutil.copyfile(f"{folder}/{name}", names[inode])
