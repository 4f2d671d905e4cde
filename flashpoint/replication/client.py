"""`AgentClient`: a trainer gives its node's agent orders, and waits for the answers, never without a deadline."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

import msgspec
import zmq

from flashpoint.errors import DeadlineError, ProtocolError, ReplicationError
from flashpoint.ids import validate_job_root
from flashpoint.replication import orders
from flashpoint.replication.agent_folder import AgentFolder, Assignment
from flashpoint.replication.keys import JobKeys
from flashpoint.replication.messages import Key
from flashpoint.replication.orders import Answers, Done, Failed, Identity, Order, Report

ANSWER_S: Final = 10.0  # for what an agent answers at once
_LOOK_S: Final = 0.1  # between two looks whether the agent still lives
_LAST_WORD_S: Final = 0.05  # an agent may answer and end: what it said is still on its way
_CONNECT_FIRST_MS: Final = 10
_CONNECT_LAST_MS: Final = 200

_A = TypeVar("_A", Identity, Done, Report)


# What a forked child has of its parent: never closed there, nor collected, which would close it.
_inherited: list[object] = []


class _Line(NamedTuple):
    """A socket to one agent, and the open folder that its path goes through."""

    socket: zmq.Socket[bytes]
    folder: AgentFolder
    agent: str


@dataclass
class _Lines:
    """All lines of a client, from its first order until it is closed."""

    context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context)
    at_rest: list[_Line] = field(default_factory=list)
    under_way: int = 0
    closed: bool = False


class AgentClient:
    """Blocking orders to the agent of a job root, from any number of threads.

    Every order under way has a socket of its own, taken from those at rest. A socket whose order was not
    answered is closed, so that a late answer goes nowhere. In a forked child the client makes its own
    sockets and leaves its parent's alone.

    Args:
        job_root: of this node. Neither it nor an agent needs to be there yet.
    """

    def __init__(self, job_root: str | os.PathLike[str]) -> None:
        self.job_root = validate_job_root(job_root)
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._folder: AgentFolder | None = None
        self._lines: _Lines | None = None

    def _begin_anew_after_fork(self) -> None:
        if self._pid != os.getpid():
            _inherited.append(self._lines)
            self._begin()

    def close(self) -> None:
        """Let go of everything. Orders under way in other threads fail soon; later ones begin anew."""
        self._begin_anew_after_fork()
        with self._lock:
            lines, self._lines, self._folder = self._lines, None, None
            if lines is not None:
                lines.closed = True
                _end_lines(lines)

    def __enter__(self) -> AgentClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_alive(self) -> bool:
        """Whether the job root has a living agent."""
        self._begin_anew_after_fork()
        try:
            return self._open_folder().agent() is not None
        except ReplicationError:
            return False

    # ---- orders -----------------------------------------------------------------------------------

    def identify(self, timeout_s: float = ANSWER_S) -> Identity:
        return _expect(self.order(orders.Identify(0), timeout_s), Identity)

    def configure(self, assignment: Assignment, keys: JobKeys, timeout_s: float = ANSWER_S) -> Identity:
        """Begin a new epoch."""
        order = orders.Configure(
            0, assignment.membership, assignment.index, keys, assignment.keep, assignment.encrypt
        )
        return _expect(self.order(order, timeout_s), Identity)

    def completed(self, epoch: int, step: int, timeout_s: float = ANSWER_S) -> None:
        """Tell that a version is complete on every node."""
        self.order(orders.Completed(0, epoch, step), timeout_s)

    def observed(
        self, what: str, outcome: str, nbytes: int, seconds: Mapping[str, float], timeout_s: float = ANSWER_S
    ) -> None:
        """Tell how a save or a recovery went."""
        self.order(orders.Observed(0, what, outcome, nbytes, dict(seconds)), timeout_s)

    def settled(self, epoch: int, step: int, timeout_s: float = ANSWER_S) -> None:
        """Tell that the job goes on from this version, of an earlier epoch."""
        self.order(orders.Settled(0, epoch, step), timeout_s)

    def await_replicated(self, epoch: int, step: int, timeout_s: float) -> bool:
        """Whether the version is replicated before the time is over.

        Raises:
            ReplicationError: it never will be, and why; or there is no agent.
        """
        try:
            self.order(orders.Await(0, epoch, step), timeout_s)
        except DeadlineError:
            return False
        return True

    def retrieve_manifest(self, key: Key, nbytes: int, sources: Sequence[int], timeout_s: float) -> None:
        """Get a version's manifest from the nodes of these indexes, best first."""
        self.order(orders.RetrieveManifest(0, key, nbytes, tuple(sources)), timeout_s)

    def retrieve(self, key: Key, objects: Sequence[orders.Wanted], timeout_s: float, *, rank: int = 0) -> int:
        """Get objects, or for a rank chunks of them; returns the bytes that came from peers."""
        return _expect(self.order(orders.Retrieve(0, key, tuple(objects), rank), timeout_s), Done).nbytes

    def inquire(self, timeout_s: float = ANSWER_S) -> Report:
        """How the versions stand."""
        return _expect(self.order(orders.Inquire(0), timeout_s), Report)

    def release(self, linger_s: float, timeout_s: float = ANSWER_S) -> None:
        """Tell the agent to end when what is complete is replicated, or after ``linger_s``."""
        self.order(orders.Release(0, linger_s), timeout_s)

    def order(self, order: Order, timeout_s: float) -> Answers:
        """Give an order, under a number of its own, and wait for its answer.

        Raises:
            ReplicationError: it failed, and why; or there is no agent, or it ended before it answered.
            DeadlineError: the answer did not come in time.
        """
        deadline = time.monotonic() + timeout_s
        self._begin_anew_after_fork()
        number = next(self._numbers)
        data = orders.encode(msgspec.structs.replace(order, number=number))
        if len(data) > orders.ORDER_BYTES_MAX:
            raise ReplicationError(f"an order of {len(data)} bytes is over {orders.ORDER_BYTES_MAX}")
        lines, line = self._take_line()
        answer: Answers | None = None
        try:
            line.socket.send(data)
            answer = self._wait(lines, line, order, number, deadline)
        finally:
            if answer is None:
                line.socket.close(linger=0)
            with self._lock:
                lines.under_way -= 1
                if answer is not None:
                    lines.at_rest.append(line)
                if lines.closed:
                    _end_lines(lines)
        if answer is None:
            raise DeadlineError(
                f"the agent of {self.job_root} did not answer {_name(order)} within {timeout_s:g} s"
            )
        if isinstance(answer, Failed):
            raise ReplicationError(answer.reason, answer.code)
        return answer

    def _wait(self, lines: _Lines, line: _Line, order: Order, number: int, deadline: float) -> Answers | None:
        """The answer of this number; None where the time was over before it came."""
        ended = False
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            # Rounded up: to wait for what is less than a millisecond away would be to spin.
            if line.socket.poll(int(min(left_s, _LAST_WORD_S if ended else _LOOK_S) * 1000) + 1):
                answer = _decoded(line.socket.recv())
                if answer.number == number:
                    return answer
            elif ended:
                raise ReplicationError(
                    f"the agent of {self.job_root} ended before it answered {_name(order)}"
                )
            elif lines.closed:
                raise ReplicationError(f"the line to the agent of {self.job_root} was closed")
            elif time.monotonic() >= deadline:
                return None
            else:  # another agent knows nothing of an order that was given to the one before it
                ended = line.folder.agent() != line.agent

    def _take_line(self) -> tuple[_Lines, _Line]:
        """A line to the agent that lives now."""
        folder = self._open_folder()
        agent = folder.agent()
        if agent is None:
            raise ReplicationError(f"{self.job_root} has no agent (`python -m flashpoint agent` starts one)")
        with self._lock:
            lines = self._lines = self._lines or _Lines()
            line = None
            while lines.at_rest and line is None:
                line = lines.at_rest.pop()
                if line.folder is not folder or line.agent != agent:
                    line.socket.close(linger=0)
                    line = None
            line = line or _connect(lines.context, folder, agent)
            lines.under_way += 1
            return lines, line

    def _open_folder(self) -> AgentFolder:
        """The agent's folder; after a job root was deleted and made anew, another one."""
        with self._lock:
            if self._folder is None or not self._folder.is_current:
                # The one before it closes itself when no line goes through it any more.
                self._folder = AgentFolder(self.job_root, create=False)
            return self._folder


def _connect(context: zmq.Context[zmq.Socket[bytes]], folder: AgentFolder, agent: str) -> _Line:
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.set(zmq.RECONNECT_IVL, _CONNECT_FIRST_MS)
    socket.set(zmq.RECONNECT_IVL_MAX, _CONNECT_LAST_MS)
    socket.set(zmq.MAXMSGSIZE, orders.ORDER_BYTES_MAX)
    socket.connect(f"ipc://{folder.orders_path}")
    return _Line(socket, folder, agent)


def _end_lines(lines: _Lines) -> None:
    """Close what is at rest; whoever ends the last order under way ends the rest."""
    while lines.at_rest:
        lines.at_rest.pop().socket.close(linger=0)
    if not lines.under_way:
        lines.context.term()


def _decoded(data: bytes) -> Answers:
    try:
        return orders.decode_answer(data)
    except ProtocolError as error:
        raise ReplicationError(f"the agent's answer is garbled: {error}") from error


def _expect(answer: Answers, kind: type[_A]) -> _A:
    if not isinstance(answer, kind):
        raise ReplicationError(f"the agent answered with {_name(answer)}, not with {kind.__name__}")
    return answer


def _name(order: Order) -> str:
    return type(order).__name__
