"""Nodes of a job on one host, for tests of agents: a job root, an agent and one rank each; no torch.

An agent runs in a thread, or in a process that can be killed and stopped. What is saved is of chance, and
remembered: `Nodes.check` compares every byte of every object that any node has linked since with it.

With a `Chaos`, nodes are behind proxies: they listen on ports of their own, and say in their Hello that they
listen on the proxies', so that their peers never find the way around.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
import numpy as np
import xxhash
import zmq

from flashpoint.config import FlashpointConfig
from flashpoint.manifest import MANIFEST_NAME
from flashpoint.objects import CheckpointObjectManager
from flashpoint.replication import limits
from flashpoint.replication.acquisition import Acquisition
from flashpoint.replication.agent import EmbeddedAgent, run_agent
from flashpoint.replication.agent_folder import AgentFolder, Assignment
from flashpoint.replication.client import AgentClient
from flashpoint.replication.events import FetchRequested
from flashpoint.replication.keys import JobKeys, write_keys
from flashpoint.replication.manager import ReplicationManager
from flashpoint.replication.membership import Member, Membership
from flashpoint.replication.messages import Data, Hello, Key, Message, Refused, Reply, decode_reply, encode
from flashpoint.replication.transport import Transport
from flashpoint.saver import MLFlashpointCheckpointSaver
from tests.chaos import Chaos, Link
from tests.conftest import SHARED_MEMORY
from tests.core.processes import Process
from tests.core.world import Job

HOST: Final = "127.0.0.1"
WAIT_S: Final = 30.0
LOOK_S: Final = 0.1
KIB: Final = 1 << 10
MIB: Final = 1 << 20
SETTINGS: Final = {"copies": 1, "keep": 1, "chunk_bytes": 64 * KIB, "peer_timeout_s": 20.0}


# ---- agents ---------------------------------------------------------------------------------------


class TestedManager(ReplicationManager):
    """The real one; it remembers its acquisitions, and may say that it listens elsewhere.

    Args:
        says: control and bulk port that peers are told of; its own by default.
    """

    __test__ = False

    def __init__(self, job_root: str, *, says: tuple[int, int] | None = None, **settings: Any) -> None:
        self.says = says
        self.remembers = True
        self.acquired: list[Acquisition] = []
        super().__init__(job_root, **settings)

    def _open(self, *args: Any, **settings: Any) -> Transport:
        transport = super()._open(*args, **settings)
        if self.says is not None:
            transport.port, transport.bulk_port = self.says
        return transport

    def _begin(self, acquisition: Acquisition) -> None:
        super()._begin(acquisition)
        assert acquisition.transfer is not None
        acquisition.transfers = [*getattr(acquisition, "transfers", ()), acquisition.transfer]  # type: ignore[attr-defined]
        if self.remembers and acquisition not in self.acquired:
            self.acquired.append(acquisition)

    @property
    def nbytes_received(self) -> int:
        """Of all transfers so far, manifests included, and what turned out bad."""
        return sum(t.nbytes_received for one in self.acquired for t in one.transfers)  # type: ignore[attr-defined]

    @property
    def nbytes_missing(self) -> int | None:
        """Of the chunks that the one acquisition under way has not verified; None where there is none."""
        transfers = [one.transfer for one in self._acquisitions if one.transfer and not one.wants_manifest]
        if not transfers:
            return None
        return sum(o.unverified * o.want.chunk_bytes for t in transfers for o in t._objects)


def _be_agent(say: Callable[[Any], None], job_root: str, config: FlashpointConfig, says: Any) -> None:
    def factory(job_root: str, **settings: Any) -> TestedManager:
        manager = TestedManager(job_root, says=says, **settings)
        manager.remembers = False  # nobody can ask for it, and it would look like a leak
        return manager

    run_agent(job_root, config=config, manager_factory=factory, on_ready=lambda: say("ready"))


class Node:
    """One node: its memory, and its agent."""

    def __init__(
        self, nodes: Nodes, index: int, folder: str, *, as_process: bool, behind: Chaos | None
    ) -> None:
        self.nodes, self.index, self.as_process = nodes, index, as_process
        self.job_root = f"{folder}/node-{index}"
        os.makedirs(self.job_root, mode=0o700, exist_ok=True)
        self.config = nodes.config
        self.client = AgentClient(self.job_root)
        self.control: Link | None = None
        self.bulk: Link | None = None
        if behind is not None:
            port, bulk_port = free_ports(2)
            self.config = dataclasses.replace(self.config, agent_port=port, agent_bulk_port=bulk_port)
            self.control, self.bulk = behind.link(port), behind.link(bulk_port)
        self._thread: EmbeddedAgent | None = None
        self._process: Process | None = None

    @property
    def says(self) -> tuple[int, int] | None:
        return (self.control.port, self.bulk.port) if self.control and self.bulk else None

    @property
    def links(self) -> list[Link]:
        return [link for link in (self.control, self.bulk) if link is not None]

    @property
    def manager(self) -> TestedManager:
        """Of an agent in a thread."""
        assert self._thread is not None and self._thread._tenure is not None
        manager = self._thread._tenure._manager
        assert isinstance(manager, TestedManager)
        return manager

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, **settings: Any) -> None:
        self.config = dataclasses.replace(self.config, **settings)
        if self.as_process:
            self._process = Process(_be_agent, self.job_root, self.config, self.says)
            assert self._process.hear() == "ready"
            self._process.go_on()
            return

        def factory(job_root: str, **found: Any) -> TestedManager:
            return TestedManager(job_root, says=self.says, **found)

        self._thread = EmbeddedAgent(self.job_root, config=self.config, manager_factory=factory)
        assert self._thread.start()

    def stop(self) -> None:
        """End the agent, in an orderly way if it is a thread."""
        if self._thread is not None:
            self._thread.stop()
        if self._process is not None:
            self._process.end()
        self._thread = self._process = None

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self.stop()

    # ---- what lies there ------------------------------------------------------------------------

    def path(self, step: int, name: str = "") -> str:
        return f"{self.job_root}/step-{step}_ckpt/{name}"

    def objects(self, step: int) -> set[str]:
        try:
            return {name for name in os.listdir(self.path(step)) if name.startswith("rank")}
        except FileNotFoundError:
            return set()

    def steps(self) -> set[int]:
        while True:
            names = [name for name in os.listdir(self.job_root) if name.startswith("step-")]
            found = [name for name in names if os.path.exists(f"{self.job_root}/{name}/{MANIFEST_NAME}")]
            # What went while the last were looked at may have gone for one that came after the list was made.
            if {*names} <= {*os.listdir(self.job_root)}:
                return {int(name[5:-5]) for name in found}

    def used_bytes(self) -> int:
        """Of tmpfs; a file counts once, however many names it has."""
        seen = {}
        for folder, _, names in os.walk(self.job_root):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(f"{folder}/{name}")
                    seen[status.st_ino] = status.st_blocks * 512
        return sum(seen.values())

    def tree(self) -> dict[str, tuple[Any, ...]]:
        """Every name below the job root, and what is behind it."""
        found: dict[str, tuple[Any, ...]] = {}
        for folder, folders, names in os.walk(self.job_root):
            for name in (*folders, *names):
                path = f"{folder}/{name}"
                status = os.lstat(path)
                what: Any = ""
                if stat.S_ISREG(status.st_mode):
                    with open(path, "rb") as file:
                        what = xxhash.xxh3_128_hexdigest(file.read())
                elif stat.S_ISLNK(status.st_mode):
                    what = os.readlink(path)
                found[path] = (status.st_mode, status.st_ino, status.st_nlink, status.st_mtime_ns, what)
        return found

    # ---- what it says ---------------------------------------------------------------------------

    def standing(self, step: int) -> str:
        """How a version stands, as this node's agent reports it."""
        return next((v.state for v in self.client.inquire().versions if v.key.step == step), "gone")

    def key(self, step: int) -> Key:
        objects = CheckpointObjectManager(self.job_root, rank=None, config=self.config, create=False)
        summary = objects.read_summary(objects.container(step))
        objects.close()
        return Key(summary.record.epoch, step, summary.digest)

    def manifest(self, step: int) -> bytes:
        with open(self.path(step, MANIFEST_NAME), "rb") as file:
            return file.read()


class Nodes:
    """A job on several nodes. Leave its block, and every agent and file of it is gone.

    Args:
        processes: indexes of nodes whose agents are processes.
        chaos: proxies in front of the nodes ``behind``, by default of all.
        nbytes: of a rank's part of a version, unless `save` is told otherwise.
        settings: of Flashpoint, over `SETTINGS`.
    """

    def __init__(
        self,
        count: int,
        *,
        processes: Sequence[int] = (),
        chaos: Chaos | None = None,
        behind: Sequence[int] | None = None,
        nbytes: int = 256 * KIB,
        **settings: Any,
    ) -> None:
        self.config = FlashpointConfig.from_env(
            {}, **({**SETTINGS, "commit_timeout_s": 30, "recovery_timeout_s": 30} | settings)
        )
        self.nbytes = nbytes
        self.keys = JobKeys.generate()
        self.epoch = 1
        self.truth: dict[tuple[int, str], str] = {}
        self._checked: dict[str, tuple[int, int]] = {}
        self.folder = tempfile.mkdtemp(prefix="flashpoint-test-", dir=SHARED_MEMORY)
        self.nodes: list[Node] = []
        for index in range(count):
            one = chaos if behind is None or index in behind else None
            node = Node(self, index, self.folder, as_process=index in processes, behind=one)
            self.nodes.append(node)
            folder = AgentFolder(node.job_root)
            write_keys(folder.path, self.keys)
            folder.close()
        self._job: Job | None = None

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with ThreadPoolExecutor(len(self.nodes)) as pool:
                for ended in [pool.submit(node.stop) for node in self.nodes]:
                    ended.result()
        finally:
            for node in self.nodes:
                node.client.close()
            if self._job is not None:
                self._job.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def __getitem__(self, index: int) -> Node:
        return self.nodes[index]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    # ---- life -----------------------------------------------------------------------------------

    def start(self, *, configure: bool = True) -> Nodes:
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            for begun in [pool.submit(node.start) for node in self.nodes]:
                begun.result()
        if configure:
            self.configure()
        return self

    def membership(self, **changes: Any) -> Membership:
        members = []
        for node in self.nodes:
            identity = node.client.identify(WAIT_S)
            port, bulk_port = node.says or (identity.port, identity.bulk_port)
            status = os.stat(node.job_root)
            members.append(
                Member(
                    index=node.index,
                    node=f"{status.st_dev}:{status.st_ino}",
                    ranks=(node.index,),
                    host=HOST,
                    port=port,
                    bulk_port=bulk_port,
                )
            )
        made = Membership(
            job=self.keys.job, epoch=self.epoch, copies=self.config.copies, members=tuple(members)
        )
        return msgspec.structs.replace(made, **changes)

    def configure(self, membership: Membership | None = None, only: Sequence[int] | None = None) -> None:
        membership = membership or self.membership()
        for node in self.nodes:
            if only is None or node.index in only:
                self.assign(node, membership)

    def assign(self, node: Node, membership: Membership) -> None:
        assignment = Assignment(
            membership=membership, index=node.index, keep=self.config.keep, encrypt=self.config.encrypt
        )
        node.client.configure(assignment, self.keys, WAIT_S)

    # ---- versions -------------------------------------------------------------------------------

    @property
    def job(self) -> Job:
        if self._job is None:
            self._job = Job(
                self.nodes[0].job_root,
                len(self.nodes),
                epoch=self.epoch,
                roots=[node.job_root for node in self.nodes],
                keep=self.config.keep,
                chunk_bytes=self.config.chunk_bytes,
                prefault=False,
            )
            for rank in self._job.ranks:
                rank.saver = MLFlashpointCheckpointSaver(
                    rank.objects,
                    rank.coordinator,
                    epoch=self.epoch,
                    writer="tests",
                    node_ranks=(rank.rank,),
                    gives_up=False,
                )
        return self._job

    def save(self, step: int, nbytes: int | None = None, *, tell: bool = True) -> None:
        """A version of chance on every node; then the agents that live are told."""
        size = self.nbytes if nbytes is None else nbytes
        self.job.each(lambda rank: rank.save(step, {"a": _bytes(step, rank.rank, size)}, {"step": step}))
        for node in self.nodes:
            for name in node.objects(step):
                if int(name[4:9]) == node.index:
                    self.truth[step, name] = digest_of(node.path(step, name))
        self.truth[step, MANIFEST_NAME] = digest_of(self.nodes[0].path(step, MANIFEST_NAME))
        if tell:
            self.tell(step)

    def tell(self, step: int) -> None:
        """The trainers' word to the agents that live."""
        for node in self.nodes:
            if node.client.is_alive():
                node.client.completed(self.epoch, step)

    def replicated(self, step: int, timeout_s: float = WAIT_S, *, only: Sequence[int] | None = None) -> None:
        """Wait until every agent knows the version to be replicated; then check all that it is."""
        for node in self.nodes:
            if only is None or node.index in only:
                assert node.client.await_replicated(self.epoch, step, timeout_s), self.told()
        self.check()
        for node in self.nodes:
            expected = {_name(node.index), *map(_name, self.sources(node.index))}
            assert node.objects(step) >= expected, (node.index, node.objects(step))

    def sources(self, index: int) -> tuple[int, ...]:
        members = tuple(Member(index=i, node=str(i), ranks=(i,)) for i in range(len(self.nodes)))
        made = Membership(job=self.keys.job, epoch=1, copies=self.config.copies, members=members)
        return made.sources(index)

    def check(self) -> int:
        """No byte that any node has committed is wrong. How many objects were looked at for the first time."""
        looked = 0
        for node in self.nodes:
            for folder in [name for name in os.listdir(node.job_root) if name.startswith("step-")]:
                step = int(folder[5:-5])
                with contextlib.suppress(FileNotFoundError):
                    for name in os.listdir(f"{node.job_root}/{folder}"):
                        if (step, name) in self.truth:
                            looked += self._check(f"{node.job_root}/{folder}/{name}", self.truth[step, name])
        return looked

    def _check(self, path: str, expected: str) -> int:
        with contextlib.suppress(FileNotFoundError):
            linked = _linked(path)
            if self._checked.get(path) == linked:
                return 0
            found = digest_of(path)
            # What was given up in between may be written again: it is committed nowhere then.
            assert found == expected or _linked(path) != linked, f"{path} has wrong bytes"
            self._checked[path] = linked
            return 1
        return 0

    def until(self, condition: Callable[[], Any], what: str = "", timeout_s: float = WAIT_S) -> None:
        """Wait, and look all the time that no wrong byte is committed."""
        deadline, look = time.monotonic() + timeout_s, 0.0
        while not condition():
            assert time.monotonic() < deadline, f"never: {what}\n{self.told()}"
            if time.monotonic() > look:
                self.check()
                look = time.monotonic() + LOOK_S
            time.sleep(0.005)

    def told(self) -> str:
        lines = []
        for node in self.nodes:
            with contextlib.suppress(Exception):
                report = node.client.inquire(5.0)
                versions = [(v.key.step, v.state, v.holders) for v in report.versions]
                lines.append(f"node {node.index}: {report.peers} {versions}")
        return "\n".join(lines)


def _name(rank: int) -> str:
    return f"rank{rank:05}-0.safetensors"


name_of_rank = _name


def _bytes(step: int, rank: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng((step, rank)).integers(0, 256, nbytes, dtype=np.uint8)


def digest_of(path: str) -> str:
    with open(path, "rb") as file:
        return xxhash.xxh3_128_hexdigest(file.read())


def _linked(path: str) -> tuple[int, int]:
    """Which file has this name, and since when: a recycled buffer is another one."""
    status = os.lstat(path)
    return status.st_ino, status.st_ctime_ns


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in made]


def hurry(monkeypatch: Any, *, request_timeout_s: float = 1.0) -> None:
    """Have agents that are threads of this process notice losses sooner than they do in the field."""
    monkeypatch.setattr(limits, "REQUEST_TIMEOUT_S", request_timeout_s)
    monkeypatch.setattr(limits, "SILENCE_S", 2.0)
    monkeypatch.setattr(limits, "HEARTBEAT_S", 0.5)
    monkeypatch.setattr(limits, "REPEAT_LAST_S", 2.0)
    monkeypatch.setattr(limits, "RECONNECT_LAST_S", 0.5)


# ---- who means no good ----------------------------------------------------------------------------


class Stranger:
    """Someone who has a job's keys, or others, and says what it likes to an agent."""

    def __init__(self, port: int, keys: JobKeys, *, server_key: bytes | None = None) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.curve_publickey, self.socket.curve_secretkey = keys.public, keys.secret
        self.socket.curve_serverkey = server_key or keys.public
        self.socket.connect(f"tcp://{HOST}:{port}")

    def ask(self, message: Message | bytes, timeout_s: float = 5.0) -> Reply | None:
        """The answer, or None where none came."""
        self.socket.send(message if isinstance(message, bytes) else encode(message))
        return self.hear(timeout_s)

    def hear(self, timeout_s: float = 5.0) -> Reply | None:
        if not self.socket.poll(int(timeout_s * 1000)):
            return None
        return decode_reply(self.socket.recv())

    def refused(self, message: Message | bytes) -> str:
        answer = self.ask(message)
        assert isinstance(answer, Refused), answer
        return answer.code

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def hello(membership: Membership, me: int, **changes: Any) -> Hello:
    member = membership.members[me]
    said = {
        "protocol": limits.PROTOCOL_VERSION,
        "job": membership.job,
        "epoch": membership.epoch,
        "index": me,
        "node": member.node,
        "host": member.host,
        "port": member.port,
        "bulk_port": member.bulk_port,
        "secret": b"c" * 32,
    }
    return Hello(**(said | changes))


class Impostor:
    """A node of the job whose agent says and serves what the test wants: a real transport in a thread.

    Args:
        serve: what to answer a fetch of (name, begin, end) with.
    """

    def __init__(
        self, keys: JobKeys, *, serve: Callable[[str, int, int], bytes] | None = None, encrypt: bool = True
    ) -> None:
        self.transport = Transport(keys, host=HOST, encrypt=encrypt)
        self.serve = serve
        self.events: list[Any] = []
        self._calls: list[Callable[[], None]] = []
        self._over = False
        self._thread = threading.Thread(target=self._run)

    def join(self, membership: Membership, index: int) -> None:
        self.transport.configure(membership, index)
        self._thread.start()

    def say(self, index: int, message: Any) -> None:
        self._calls.append(lambda: self.transport.say(index, message))
        self.transport.wake()

    def say_raw(self, index: int, data: bytes) -> None:
        def say() -> None:
            link = self.transport._link(index)
            assert link is not None
            link._control.send(data)

        self._calls.append(say)
        self.transport.wake()

    def fetch(self, index: int, fetch: Any) -> None:
        self._calls.append(lambda: self.transport.fetch(index, fetch))
        self.transport.wake()

    def _run(self) -> None:
        while not self._over:
            for event in self.transport.poll(0.1):
                self.events.append(event)
                if isinstance(event, FetchRequested) and self.serve is not None:
                    for span in event.fetch.spans:
                        data = self.serve(span.name, span.begin, span.end)
                        header = Data(span.request, span.begin, span.begin + len(data))
                        self.transport.send_data(event.connection, header, memoryview(data))
            while self._calls:
                self._calls.pop(0)()

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def close(self) -> None:
        self._over = True
        if self._thread.is_alive():
            self.transport.wake()
            self._thread.join()
        self.transport.close()

    def __enter__(self) -> Impostor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Recorder:
    """Passes one port on to another and remembers what the client of each connection has sent."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.sent: list[bytearray] = []
        self._server = socket.create_server((HOST, 0))
        self.port: int = self._server.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._server.accept()[0]
                server = socket.create_connection((HOST, self._target))
                self._open += [client, server]
                sent = bytearray()
                self.sent.append(sent)
                for one, other, record in ((client, server, sent), (server, client, None)):
                    threading.Thread(target=_pass_on, args=(one, other, record), daemon=True).start()

    def close(self) -> None:
        for one in (self._server, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def _pass_on(one: socket.socket, other: socket.socket, record: bytearray | None) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(64 * KIB):
            if record is not None:
                record += data
            other.sendall(data)
    with contextlib.suppress(OSError):
        other.shutdown(socket.SHUT_WR)


def stop_for(node: Node, seconds: float) -> None:
    """SIGSTOP an agent for a while."""
    node.signal(signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        node.signal(signal.SIGCONT)
