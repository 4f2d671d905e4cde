"""Peers that stop, freeze, vanish behind their network, say things twice, or come by the thousand."""

import contextlib
import dataclasses
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from flashpoint.replication import limits, orders
from flashpoint.replication.membership import Membership
from flashpoint.replication.transport import Transport
from tests.chaos import Chaos
from tests.core.processes import Process
from tests.core.replication.nodes import (
    HOST,
    KIB,
    MIB,
    Node,
    Nodes,
    TestedManager,
    _be_agent,
    hurry,
    name_of_rank,
    stop_for,
)
from tests.faults.machine import Network, cgroup, enter_network

REQUEST_TIMEOUT_S = 1.0


@pytest.fixture
def chaos() -> Iterator[Chaos]:
    with Chaos(seed=11) as made:
        yield made


@pytest.fixture
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch, request_timeout_s=REQUEST_TIMEOUT_S)


# ---- one source of two is not there, and does not say so ----------------------------------------------


def fetch_with_two_sources(nodes: Nodes, chaos_of: int, then: Callable[[], None]) -> float:
    """Node 2 fetches node 0's object of step 1 from nodes 0 and 1; in the middle of it something happens.

    Returns how many seconds the rest took.
    """
    key = nodes[0].key(1)
    Path(nodes[2].path(1, name_of_rank(0))).unlink()
    for link in nodes[chaos_of].links:
        link.faults(mbit=20)
    began = nodes[2].manager.nbytes_received
    wanted = orders.Wanted(name_of_rank(0), (), (0, 1))
    got: list[int] = []
    getting = threading.Thread(target=lambda: got.append(nodes[2].client.retrieve(key, [wanted], 90.0)))
    getting.start()
    nodes.until(lambda: nodes[2].manager.nbytes_received - began > 200 * KIB, "it is on its way")
    then()
    start_s = time.monotonic()
    getting.join()
    assert got, "the fetch failed"
    assert name_of_rank(0) in nodes[2].objects(1)
    assert nodes.check() >= 1
    return time.monotonic() - start_s


@pytest.fixture
def three(chaos: Chaos) -> Iterator[Nodes]:
    """Each node's objects are on all; node 0's agent is a process, behind a network that can be slow."""
    with Nodes(3, copies=2, processes=[0], chaos=chaos, behind=[0], nbytes=4 * MIB).start() as nodes:
        nodes.save(1)
        nodes.replicated(1)
        yield nodes


@pytest.mark.root
@pytest.mark.fault(13)
@pytest.mark.usefixtures("in_a_hurry")
def test_13_what_a_frozen_node_was_asked_for_comes_from_another(three: Nodes) -> None:
    with cgroup("freezer") as frozen:
        frozen.add(three[0].pid)
        try:
            fetch_with_two_sources(three, 0, frozen.freeze)
        finally:
            frozen.thaw()
            for link in three[0].links:
                link.heal()
        three.save(2)  # and the node is used again once it moves
        three.replicated(2)
        three[0].kill()


@pytest.mark.soak  # the same as 13, but for the means
@pytest.mark.fault(11)
@pytest.mark.usefixtures("in_a_hurry")
def test_11_what_a_stopped_peer_was_asked_for_comes_from_another(three: Nodes) -> None:
    three_stops = threading.Thread(target=stop_for, args=(three[0], 8.0))
    fetch_with_two_sources(three, 0, three_stops.start)
    three_stops.join()
    for link in three[0].links:
        link.heal()
    three.save(2)
    three.replicated(2)


def job_goes_on_without(nodes: Nodes, away: Node) -> None:
    """The job is started again: those who answer are told of the next epoch."""
    before = nodes.membership()
    nodes.job.close()
    nodes._job = None
    nodes.epoch += 1
    for node in nodes:
        if node is not away:
            nodes.assign(node, msgspec.structs.replace(before, epoch=nodes.epoch))


@pytest.mark.fault(11)
@pytest.mark.parametrize(
    "stopped_s",
    [
        4.0,  # twice the silence that is borne here
        pytest.param(60.0, marks=pytest.mark.soak),  # with the field's own times
    ],
)
def test_11_a_peer_that_resumes_in_the_next_epoch_is_fenced(
    stopped_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if stopped_s < 2 * limits.SILENCE_S:
        hurry(monkeypatch)
    with Nodes(3, processes=[2], nbytes=256 * KIB).start() as nodes:
        nodes.save(1)
        nodes.replicated(1)
        stopped = threading.Thread(target=stop_for, args=(nodes[2], stopped_s))
        membership = nodes.membership()  # it answers still
        monkeypatch.setattr(nodes, "membership", lambda: membership)
        stopped.start()
        time.sleep(stopped_s / 2)
        job_goes_on_without(nodes, nodes[2])
        for node in nodes.nodes[:2]:  # nobody waits for the one that is stopped
            node.client.inquire(10.0)
        stopped.join()
        nodes.until(
            lambda: any("stale-epoch" in r.getMessage() for r in caplog.records), "it is refused by its epoch"
        )
        assert nodes[0].steps() == nodes[1].steps() == {1}
        nodes.assign(
            nodes[2], msgspec.structs.replace(membership, epoch=nodes.epoch)
        )  # until its trainer is back
        nodes.save(2)
        nodes.replicated(2)


@pytest.mark.fault(12)
@pytest.mark.usefixtures("in_a_hurry")
def test_12_while_the_leaders_agent_is_stopped_nothing_is_given_up_and_then_it_goes_on() -> None:
    with Nodes(3, processes=[0], nbytes=256 * KIB).start() as nodes:
        nodes.save(1)
        nodes.replicated(1)
        nodes[0].signal(signal.SIGSTOP)
        try:
            nodes.save(2, tell=False)
            for node in nodes.nodes[1:]:
                node.client.completed(nodes.epoch, 2)
            until = time.monotonic() + 4.0  # twice the silence that is borne here
            while time.monotonic() < until:
                assert not nodes[1].client.await_replicated(nodes.epoch, 2, 0.2)
                assert all(node.steps() >= {1, 2} for node in nodes)
        finally:
            nodes[0].signal(signal.SIGCONT)
        nodes[0].client.completed(nodes.epoch, 2)
        nodes.replicated(2)


# ---- a route that swallows everything ---------------------------------------------------------------


def _be_agent_in(say: Callable[[Any], None], network: str, *args: Any) -> None:
    enter_network(network)
    _be_agent(say, *args)


class Apart(Nodes):
    """Nodes of which the first is behind a network of its own: its agent is a process there."""

    def __init__(self, count: int, network: Network, **settings: Any) -> None:
        self.network = network
        super().__init__(count, processes=[0], **settings)

    def start(self, *, configure: bool = True) -> Nodes:
        for node in self.nodes[1:]:
            node.start(agent_host=self.network.host)
        first = self.nodes[0]
        first.config = dataclasses.replace(first.config, agent_host=self.network.guest)
        first._process = Process(_be_agent_in, self.network.name, first.job_root, first.config, None)
        assert first._process.hear() == "ready"
        first._process.go_on()
        self.configure()
        return self

    def membership(self, **changes: Any) -> Membership:
        made = super().membership()
        hosts = [self.network.guest, *[self.network.host] * (len(self.nodes) - 1)]
        members = zip(made.members, hosts, strict=True)
        moved = tuple(msgspec.structs.replace(one, host=host) for one, host in members)
        return msgspec.structs.replace(made, members=moved, **changes)


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    try:
        yield made
    finally:
        made.close()


@pytest.mark.root
@pytest.mark.fault(28)
@pytest.mark.usefixtures("in_a_hurry")
def test_28_a_route_that_becomes_a_black_hole_is_noticed_and_another_source_used(network: Network) -> None:
    with Apart(3, network, copies=2, nbytes=4 * MIB).start() as nodes:
        nodes.save(1)
        nodes.replicated(1)
        network.throttle(mbit=20)
        fetch_with_two_sources(nodes, 0, network.swallow)
        assert nodes[0]._process is not None and nodes[0].client.is_alive()  # it is only not heard
        nodes.until(lambda: nodes[2].client.inquire().peers[0] != "open", "the silence is noticed")
        network.heal()
        nodes.save(2, 256 * KIB)
        nodes.replicated(2)


@pytest.mark.fault(29)
@pytest.mark.usefixtures("in_a_hurry")
def test_29_a_leader_that_is_not_heard_replicates_nothing_and_nothing_is_given_up(chaos: Chaos) -> None:
    """Nobody's words arrive at node 0, though its own do; what needs its consent does not come to be."""
    with Nodes(3, chaos=chaos, behind=[0], nbytes=256 * KIB).start() as nodes:
        nodes.save(1)
        nodes.replicated(1)
        for link in nodes[0].links:
            link.faults("up", stall=True)
        nodes.save(2)
        until = time.monotonic() + 4.0
        while time.monotonic() < until:
            for node in nodes:
                assert not node.client.await_replicated(nodes.epoch, 2, 0.1)
                assert node.steps() >= {1, 2}
        for link in nodes[0].links:
            link.cut()
            link.heal()
        nodes.replicated(2)
        nodes.until(lambda: all(node.steps() == {2} for node in nodes), "step 1 is given up now")


# ---- messages ----------------------------------------------------------------------------------------


class Stammerer(TestedManager):
    """An agent whose messages wait a while, and are then said in any order, up to three times each."""

    __test__ = False

    def _open(self, *args: Any, **settings: Any) -> Transport:
        transport = super()._open(*args, **settings)
        rng, waiting = random.Random(self.job_root), []  # type: ignore[var-annotated]
        poll = transport.poll

        def late(call: Callable[..., Any]) -> Callable[..., bool]:
            def said(*message: Any) -> bool:
                waiting.extend([lambda: call(*message)] * rng.randint(1, 3))
                self.said += 1
                return True

            return said

        def poll_and_say(timeout_s: float) -> list[Any]:
            events = poll(min(timeout_s, 0.05))
            rng.shuffle(waiting)
            for _ in range(rng.randint(0, len(waiting))):
                waiting.pop()()
            return events

        for name in ("say", "reply", "fetch"):
            setattr(transport, name, late(getattr(transport, name)))
        transport.poll = poll_and_say  # type: ignore[method-assign]
        return transport

    said = 0


@pytest.mark.fault(26)
@pytest.mark.usefixtures("in_a_hurry")
def test_26_messages_that_come_twice_and_in_any_order_delay_a_version_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.core.replication.nodes.TestedManager", Stammerer)
    with Nodes(3, copies=2, nbytes=512 * KIB).start() as nodes:
        for step in range(1, 7):
            nodes.save(step)
            nodes.replicated(step)
        nodes.until(lambda: all(node.steps() == {6} for node in nodes), "only step 6 is left")
        assert all(node.manager.said > 20 for node in nodes)
        nodes[1].stop()
        nodes[1].start()
        nodes.save(7)
        nodes.replicated(7)


# ---- a slow line --------------------------------------------------------------------------------------


@pytest.mark.fault(30)
def test_30_over_a_slow_and_distant_line_a_version_is_replicated_and_saves_do_not_wait(chaos: Chaos) -> None:
    """200 ms and 50 Mbit/s each way, with the field's own deadlines."""
    with Nodes(2, chaos=chaos, nbytes=4 * MIB).start() as nodes:
        for node in nodes:
            for link in node.links:
                link.faults(latency_s=0.2, mbit=50)
        nodes.save(1)
        nodes.replicated(1)
        for step in (2, 3, 4):  # faster than they can be copied: what is superseded yields
            nodes.save(step)
        assert all(4 in node.steps() for node in nodes)
        nodes.replicated(4)
        nodes.until(lambda: all(node.steps() == {4} for node in nodes), "only step 4 is left")
        # Nothing was asked for twice for want of patience.
        assert all(node.manager.nbytes_received <= 4.5 * nodes.nbytes for node in nodes)


# ---- clients without end ------------------------------------------------------------------------------

CLIENTS = 1000


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def anonymous_bytes(pid: int) -> int:
    (line,) = [
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line[:8] == "RssAnon:"
    ]
    return int(line.split()[1]) * KIB


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * CLIENTS:
        pytest.skip("too few descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4 * CLIENTS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.fault(32)
@pytest.mark.usefixtures("many_files")
def test_32_a_thousand_clients_at_once_cost_a_descriptor_each_and_little_memory_and_are_let_go() -> None:
    with Nodes(2, processes=[1]).start() as nodes, contextlib.ExitStack() as clients:
        nodes.save(1)
        nodes.replicated(1)
        pid, identity = nodes[1].pid, nodes[1].client.identify()
        before = descriptors(pid), anonymous_bytes(pid)
        context = clients.enter_context(zmq.Context(io_threads=2))
        context.set(zmq.MAX_SOCKETS, 2 * CLIENTS)
        for number in range(CLIENTS):  # half of them know how to talk, but no key
            port = identity.port if number % 4 < 2 else identity.bulk_port
            if number % 2:
                clients.enter_context(socket.create_connection((HOST, port), 10))
            else:
                talker = clients.enter_context(context.socket(zmq.DEALER))
                talker.linger = 0
                talker.connect(f"tcp://{HOST}:{port}")
                talker.send(b"x" * 100)
        nodes.save(2)
        nodes.replicated(2)
        assert descriptors(pid) <= before[0] + 2 * CLIENTS
        assert anonymous_bytes(pid) <= before[1] + 128 * MIB
        clients.close()
        nodes.until(lambda: descriptors(pid) <= before[0] + 40, "they are let go")
        nodes.save(3)
        nodes.replicated(3)


def reads_until_it_ends(client: socket.socket) -> bool:
    """Whether the server has ended the connection."""
    with contextlib.suppress(BlockingIOError, InterruptedError):
        try:
            return client.recv(1 << 16) == b""
        except ConnectionError:
            return True
    return False


@pytest.mark.fault(33)
@pytest.mark.usefixtures("in_a_hurry")
def test_33_a_client_that_sends_a_byte_now_and_then_is_disconnected() -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with Nodes(2).start() as nodes:
        identity = nodes[1].client.identify()
        slow = [socket.create_connection((HOST, port)) for port in (identity.port, identity.bulk_port) * 5]
        ended: set[int] = set()
        sent = 0
        deadline = time.monotonic() + 30
        try:
            for client in slow:
                client.setblocking(False)
            while len(ended) < len(slow):
                assert time.monotonic() < deadline, f"{len(slow) - len(ended)} are still served"
                for client in slow:
                    if client.fileno() not in ended and sent < len(greeting):
                        with contextlib.suppress(OSError):
                            client.send(greeting[sent : sent + 1])
                sent += 1
                time.sleep(0.2)
                ended |= {client.fileno() for client in slow if reads_until_it_ends(client)}
            assert sent < len(greeting)  # they had not come to an end by themselves
        finally:
            for client in slow:
                client.close()
        nodes.save(1)
        nodes.replicated(1)
