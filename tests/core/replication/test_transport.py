"""Real transports over loopback. Most tests poll all of them in one thread, so that nothing depends on timing."""

import logging
import os
import resource
import secrets
import socket
import threading
import time

import msgspec
import numpy as np
import pytest
import zmq

from flashpoint.errors import FlashpointError, ProtocolError
from flashpoint.replication import limits, link, orders, sealing, transport
from flashpoint.replication.events import (
    Arrived,
    FetchRequested,
    HelloRefused,
    Lost,
    Moved,
    Opened,
    Ordered,
    Replied,
    Requested,
)
from flashpoint.replication.handshake import session_id, session_keys
from flashpoint.replication.keys import JobKeys
from flashpoint.replication.membership import Member, Membership
from flashpoint.replication.messages import (
    Accepted,
    Data,
    Fetch,
    Held,
    Hello,
    Holdings,
    Key,
    Met,
    Offer,
    Query,
    Refused,
    Span,
    Welcome,
    decode_bulk_reply,
    decode_reply,
    encode,
)
from flashpoint.replication.sealing import Opener, Sealer
from flashpoint.replication.session import NO_SESSION, Session
from flashpoint.replication.transport import Transport

KEY = Key(3, 10, "0" * 32)
HOST = "127.0.0.1"
NAME = "rank00000-0.safetensors"
SOURCE = np.random.default_rng(7).integers(0, 256, 4 << 20, dtype=np.uint8)


def fetch_of(number, begin, end):
    return Fetch(KEY, (Span(number, NAME, begin, end),))


class Node:
    """A transport that serves `SOURCE`, and remembers what happened."""

    def __init__(self, keys, **settings):
        self.transport = Transport(keys, **{"host": HOST, **settings})
        self.events = []

    def turn(self, timeout_s=0.0):
        for event in self.transport.poll(timeout_s):
            self.events.append(event)
            if isinstance(event, FetchRequested):
                for span in event.fetch.spans:
                    data = Data(span.request, span.begin, span.end)
                    self.transport.send_data(event.connection, data, SOURCE[span.begin : span.end].data)
            elif isinstance(event, Requested) and isinstance(event.message, Query):
                self.transport.reply(event.connection, Holdings(event.message.key, (NAME,)))

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


class World:
    """Some nodes of one job."""

    def __init__(self):
        self.keys = JobKeys.generate()
        self.nodes = []

    def add(self, keys=None, **settings):
        node = Node(keys or self.keys, **settings)
        self.nodes.append(node)
        return node

    def remove(self, node):
        self.nodes.remove(node)
        node.transport.close()

    def membership(self, *nodes, epoch=3):
        members = tuple(
            Member(
                index=index,
                node=f"node-{index}",
                ranks=(index,),
                host=node.transport.host,
                port=node.transport.port,
                bulk_port=node.transport.bulk_port,
            )
            for index, node in enumerate(nodes)
        )
        return Membership(job=self.keys.job, epoch=epoch, copies=1, members=members)

    def start(self, count, **settings):
        nodes = [self.add(**settings) for _ in range(count)]
        membership = self.membership(*nodes)
        for index, node in enumerate(nodes):
            node.transport.configure(membership, index)
        return (membership, *nodes)

    def until(self, condition, timeout_s=20.0, also=None):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, [node.events[-10:] for node in self.nodes]
            for node in self.nodes:
                node.turn(0.002)
            if also is not None:
                also()

    def turn_for(self, seconds):
        deadline = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > deadline)


@pytest.fixture
def world():
    made = World()
    yield made
    for node in made.nodes:
        node.transport.close()


class Stranger:
    """Raw sockets of someone who connects to a node."""

    def __init__(self, node, keys, *, server_key=None, source=""):
        self.node, self.keys, self.source = node, keys, source
        self.context = zmq.Context()
        self.control = self.dealer(node.transport.port)
        self.control.curve_publickey, self.control.curve_secretkey = keys.public, keys.secret
        self.control.curve_serverkey = server_key or keys.public
        self.connect(self.control, node.transport.port)
        self.bulk = None

    def dealer(self, port):
        dealer = self.context.socket(zmq.DEALER)
        dealer.linger = 0
        return dealer

    def connect(self, dealer, port):
        source = f"{self.source}:0;" if self.source else ""
        dealer.connect(f"tcp://{source}{HOST}:{port}")

    def open_bulk(self, **options):
        self.bulk = self.dealer(self.node.transport.bulk_port)
        for name, value in options.items():
            setattr(self.bulk, name, value)
        self.connect(self.bulk, self.node.transport.bulk_port)
        return self.bulk

    def say(self, *frames):
        self.control.send_multipart(frames)

    def hears(self, world, dealer=None, timeout_s=10.0):
        heard = []

        def listen():
            if (dealer or self.control).poll(0):
                heard.append((dealer or self.control).recv_multipart())

        world.until(lambda: heard, timeout_s, also=listen)
        return heard[0]

    def hears_nothing(self, world, dealer=None, seconds=0.5):
        world.turn_for(seconds)
        return not (dealer or self.control).poll(0)

    def hello(self, membership, me=0, **changes):
        hello = Hello(
            limits.PROTOCOL_VERSION,
            membership.job,
            membership.epoch,
            me,
            membership.members[me].node,
            membership.members[me].host,
            membership.members[me].port,
            membership.members[me].bulk_port,
            b"c" * 32,
        )
        return msgspec.structs.replace(hello, **changes)

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def stranger_to():
    made = []

    def make(node, keys, **settings):
        made.append(Stranger(node, keys, **settings))
        return made[-1]

    yield make
    for stranger in made:
        stranger.close()


def fetch_all(world, node, index, target, nbytes=limits.FRAME_BYTES):
    begins = list(range(0, len(target), nbytes))
    seen = len(node.of(Arrived))
    for number, begin in enumerate(begins):
        node.transport.fetch(index, fetch_of(number, begin, min(begin + nbytes, len(target))))
    world.until(lambda: len(node.of(Arrived)) - seen >= len(begins))
    for event in node.of(Arrived)[seen:]:
        event.payload.copy_into(target[event.data.begin : event.data.end])


# ---- the way of things ---------------------------------------------------------------------------


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.parametrize("host", [HOST, "::1"])
def test_nodes_talk_and_fetch(world, encrypt, host):
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    _, one, two = world.start(2, encrypt=encrypt, host=host)
    one.transport.say(1, Query(KEY))
    target = np.zeros(len(SOURCE), dtype=np.uint8)
    fetch_all(world, one, 1, target)
    assert (target == SOURCE).all()
    world.until(lambda: one.of(Replied))
    assert one.of(Opened) == [Opened(1)]
    assert one.of(Replied) == [Replied(1, Holdings(KEY, (NAME,)))]
    assert [(event.index, event.message) for event in two.of(Requested)] == [(0, Query(KEY))]
    assert not one.of(Lost)


@pytest.mark.parametrize("encrypt", [False, True])
def test_both_ways_at_once_among_three(world, encrypt):
    _, *nodes = world.start(3, encrypt=encrypt)
    for index, node in enumerate(nodes):
        for peer in {0, 1, 2} - {index}:
            node.transport.say(peer, Met(KEY))
            node.transport.fetch(peer, fetch_of(peer, 10, 2000))
    world.until(lambda: all(len(n.of(Arrived)) == len(n.of(Requested)) == 2 for n in nodes))
    target = np.zeros(1990, dtype=np.uint8)
    for node in nodes:
        for event in node.of(Arrived):
            event.payload.copy_into(target)
            assert (target == SOURCE[10:2000]).all()


def test_a_refused_fetch_is_told_to_whoever_asked(world):
    _, one, two = world.start(2)
    two.turn = lambda timeout_s=0.0: [
        two.transport.reply(
            event.connection, Refused("fetch", "no-object", "none", KEY, event.fetch.spans[0].request)
        )
        for event in two.transport.poll(timeout_s)
        if isinstance(event, FetchRequested)
    ]
    one.transport.fetch(1, fetch_of(5, 0, 10))
    world.until(lambda: one.of(Replied))
    assert one.of(Replied) == [Replied(1, Refused("fetch", "no-object", "none", KEY, 5))]


def test_a_reply_may_come_much_later(world):
    _, one, two = world.start(2)
    one.transport.say(1, Offer(KEY, 100, (NAME,)))
    world.until(lambda: two.of(Requested))
    connection = two.of(Requested)[0].connection
    assert two.transport.reply(connection, Accepted(KEY))
    world.turn_for(0.2)
    assert two.transport.reply(connection, Held(KEY))
    world.until(lambda: len(one.of(Replied)) == 2)
    assert [event.message for event in one.of(Replied)] == [Accepted(KEY), Held(KEY)]


def test_what_is_said_before_there_is_a_peer_is_said_when_there_is_one(world):
    one, two = world.add(), world.add()
    membership = world.membership(one, two)
    one.transport.configure(membership, 0)
    one.transport.say(1, Query(KEY))
    one.transport.fetch(1, fetch_of(1, 0, 10))
    world.until(lambda: one.of(HelloRefused))
    assert one.of(HelloRefused)[0].refused.code == "behind"
    two.transport.configure(membership, 1)
    world.until(lambda: one.of(Replied) and one.of(Arrived))


def test_what_waits_is_bounded(world, monkeypatch):
    monkeypatch.setattr(link, "WAITING_MAX", 10)
    one, two = world.add(), world.add()
    membership = world.membership(one, two)
    one.transport.configure(membership, 0)
    for number in range(100):
        one.transport.say(1, Query(Key(0, number, "0" * 32)))
        one.transport.fetch(1, fetch_of(number, 0, 10))
    two.transport.configure(membership, 1)
    world.until(lambda: len(one.of(Replied)) >= 10 and len(one.of(Arrived)) >= 10)
    world.turn_for(0.2)
    assert [event.message.key.step for event in one.of(Replied)] == list(range(10))
    assert len(one.of(Arrived)) == 10


def test_who_is_not_there_is_not_spoken_to(world):
    membership, one, two = world.start(2)
    one.transport.say(0, Query(KEY))
    one.transport.say(2, Query(KEY))
    one.transport.fetch(-1, fetch_of(1, 0, 10))
    nowhere = msgspec.structs.replace(membership.members[1], host="", port=0)
    one.transport.configure(msgspec.structs.replace(membership, members=(membership.members[0], nowhere)), 0)
    one.transport.say(1, Query(KEY))
    world.turn_for(0.2)
    assert not one.events and not two.events


def test_poll_waits_and_wakes():
    one = Transport(JobKeys.generate(), host=HOST)
    try:
        start = time.monotonic()
        assert one.poll(0.1) == []
        assert time.monotonic() - start > 0.09
        one.wake()
        assert one.poll(60) == []  # a wake before the wait counts too
        threading.Timer(0.1, one.wake).start()
        assert one.poll(60) == []
        assert time.monotonic() - start < 30
    finally:
        one.close()
        one.close()
        one.wake()


def test_whoever_wakes_one_that_is_being_closed_touches_nothing_else(monkeypatch):
    one = Transport(JobKeys.generate(), host=HOST)
    write, inside, go_on = os.eventfd_write, threading.Event(), threading.Event()

    def slow_write(fd, value):
        inside.set()
        go_on.wait(10)
        write(fd, value)  # to a descriptor that may be somebody else's by now

    monkeypatch.setattr(os, "eventfd_write", slow_write)
    errors = []

    def wake():
        try:
            one.wake()
        except OSError as error:
            errors.append(error)

    waker, closer = threading.Thread(target=wake), threading.Thread(target=one.close)
    waker.start()
    assert inside.wait(10)
    closer.start()
    closer.join(0.2)  # long enough to close what nobody holds
    go_on.set()
    waker.join()
    closer.join()
    assert not errors


def test_threads_of_their_own(world):
    _, one, two = world.start(2)
    over = threading.Event()

    def serve():
        while not over.is_set():
            two.turn(1.0)

    thread = threading.Thread(target=serve)
    thread.start()
    world.nodes = [one]
    try:
        target = np.zeros(len(SOURCE), dtype=np.uint8)
        fetch_all(world, one, 1, target, 100_000)
        assert (target == SOURCE).all()
    finally:
        over.set()
        two.transport.wake()
        thread.join()
        world.nodes = [one, two]


# ---- orders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 20])
def test_orders_come_over_a_unix_socket_of_any_path(world, job_root, depth):
    folder = "/".join([job_root, *["a-folder-with-a-long-name"] * depth])
    os.makedirs(folder, exist_ok=True)
    path = f"{folder}/orders.sock"
    for _ in range(2):  # the second finds the first one's socket gone, or takes its place
        node = world.add(local_path=path)
        assert os.stat(path).st_mode & 0o777 == 0o600
        fd = os.open(folder, os.O_RDONLY)
        context = zmq.Context()
        trainer = context.socket(zmq.DEALER)
        try:
            trainer.connect(f"ipc:///proc/self/fd/{fd}/orders.sock")
            trainer.send(orders.encode(orders.Identify(7)))
            world.until(lambda node=node: node.of(Ordered))
            (order,) = node.of(Ordered)
            assert orders.decode_order(order.data) == orders.Identify(7)
            assert node.transport.answer(order.connection, orders.encode(orders.Done(7)))
            assert orders.decode_answer(trainer.recv()) == orders.Done(7)
            trainer.send_multipart([b"two", b"frames"])
            world.turn_for(0.05)
            assert len(node.of(Ordered)) == 1
        finally:
            context.destroy(linger=0)
            os.close(fd)
        node.transport.answer(order.connection, b"to nobody")
        world.remove(node)
        assert not os.path.exists(path)


def test_a_socket_that_a_killed_agent_left_is_replaced(world, job_root):
    path = f"{job_root}/orders.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    world.add(local_path=path)


def test_a_folder_that_is_missing_is_named(job_root):
    with pytest.raises(FlashpointError, match="missing"):
        Transport(JobKeys.generate(), host=HOST, local_path=f"{job_root}/missing/orders.sock")


# ---- where it listens ----------------------------------------------------------------------------


def test_a_port_in_use_is_named_with_its_setting(world):
    node = world.add()
    with pytest.raises(FlashpointError, match=f"port {node.transport.port} .*agent_port"):
        Transport(world.keys, host=HOST, port=node.transport.port)
    with pytest.raises(FlashpointError, match=f"port {node.transport.bulk_port} .*agent_bulk_port"):
        Transport(world.keys, host=HOST, bulk_port=node.transport.bulk_port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_that_is_not_this_one_is_named_with_its_setting(host):
    with pytest.raises(FlashpointError, match=f"{host}.*agent_host"):
        Transport(JobKeys.generate(), host=host)


def test_a_name_and_all_addresses_can_be_listened_on(world):
    node = world.add(host="localhost")
    assert node.transport.host == "localhost"
    assert node.transport.port != node.transport.bulk_port
    anywhere = world.add(host="0.0.0.0")
    with socket.create_connection((HOST, anywhere.transport.port), 5):
        pass


# ---- coming and going ----------------------------------------------------------------------------


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_peer_that_comes_back_on_its_ports_is_used_again(world, encrypt):
    membership, one, two = world.start(2, encrypt=encrypt)
    target = np.zeros(1000, dtype=np.uint8)
    fetch_all(world, one, 1, target)
    port, bulk_port = two.transport.port, two.transport.bulk_port
    world.remove(two)
    world.until(lambda: one.of(Lost))
    one.transport.say(1, Query(KEY))  # waits
    back = world.add(port=port, bulk_port=bulk_port, encrypt=encrypt)
    back.transport.configure(membership, 1)
    world.until(lambda: one.of(Replied))
    target[:] = 0
    fetch_all(world, one, 1, target)
    assert (target == SOURCE[:1000]).all()
    assert len(one.of(Opened)) == 2
    assert len(one.of(Lost)) == 1


def test_a_peer_that_comes_back_on_another_port_says_so(world):
    membership, one, two = world.start(2)
    one.transport.say(1, Query(KEY))
    world.until(lambda: one.of(Replied))
    world.remove(two)
    back = world.add()
    back.transport.configure(membership, 1)
    back.transport.greet(0)
    world.until(lambda: one.of(Moved))
    moved = back.transport
    assert one.of(Moved) == [Moved(1, HOST, moved.port, moved.bulk_port)]
    target = np.zeros(1000, dtype=np.uint8)
    fetch_all(world, one, 1, target)
    assert (target == SOURCE[:1000]).all()
    assert len(one.of(Lost)) == 1
    # And back again, to where the membership says it is.
    port, bulk_port = membership.members[1].port, membership.members[1].bulk_port
    world.remove(back)
    again = world.add(port=port, bulk_port=bulk_port)
    again.transport.configure(membership, 1)
    again.transport.greet(0)
    world.until(lambda: len(one.of(Moved)) == 2)
    fetch_all(world, one, 1, target)


def test_a_peer_that_never_was_there_is_told_of(world, monkeypatch):
    monkeypatch.setattr(limits, "SILENCE_S", 0.3)
    membership, one, two = world.start(2)
    world.remove(two)
    one.transport.say(1, Query(KEY))
    world.until(lambda: len(one.of(Lost)) >= 2)
    assert "no answer from port" in one.of(Lost)[0].reason
    back = world.add(port=membership.members[1].port, bulk_port=membership.members[1].bulk_port)
    back.transport.configure(membership, 1)
    world.until(lambda: one.of(Replied))


def test_a_port_that_was_another_programs_for_a_while_is_used_again(world, monkeypatch):
    """libzmq gives a connection up for good when garbage comes; the link does not."""
    monkeypatch.setattr(limits, "SILENCE_S", 0.5)
    membership, one, two = world.start(2)
    world.remove(two)
    port, bulk_port = membership.members[1].port, membership.members[1].bulk_port
    with socket.create_server((HOST, port)) as other:
        other.settimeout(10)
        one.transport.say(1, Query(KEY))
        accepted = []

        def answer():
            one.turn(0.01)
            other.settimeout(0.01)
            try:
                connection, _ = other.accept()
            except TimeoutError:
                return
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
            accepted.append(connection)

        world.until(lambda: len(accepted) >= 2, also=answer)
        for connection in accepted:
            connection.close()
    back = world.add(port=port, bulk_port=bulk_port)
    back.transport.configure(membership, 1)
    world.until(lambda: one.of(Replied))


def test_a_new_epoch_begins_new_sessions(world):
    membership, one, two = world.start(2)
    fetch_all(world, one, 1, np.zeros(10, dtype=np.uint8))
    newer = msgspec.structs.replace(membership, epoch=4)
    one.transport.configure(newer, 0)
    world.until(lambda: one.of(HelloRefused))
    assert one.of(HelloRefused)[0].refused.code == "behind"
    two.transport.configure(newer, 1)
    fetch_all(world, one, 1, np.zeros(10, dtype=np.uint8))
    assert len(one.of(Opened)) == 2


def test_links_follow_the_membership(world):
    membership, one, _ = world.start(2)
    fetch_all(world, one, 1, np.zeros(10, dtype=np.uint8))
    three = world.add()
    replaced = world.membership(one, three, epoch=4)  # another node took index 1 over
    for index, node in enumerate((one, three)):
        node.transport.configure(replaced, index)
    fetch_all(world, one, 1, np.zeros(10, dtype=np.uint8))
    assert three.of(FetchRequested)
    alone = msgspec.structs.replace(membership, epoch=5, members=membership.members[:1])
    one.transport.configure(alone, 0)
    assert not one.transport._links and not one.transport._owners


def test_new_keys_are_used_on_the_same_ports(world):
    _, one, two = world.start(2)
    fetch_all(world, one, 1, np.zeros(10, dtype=np.uint8))
    ports = [(node.transport.port, node.transport.bulk_port) for node in (one, two)]
    world.keys = JobKeys.generate()
    for node in (one, two):
        node.transport.configure_keys(world.keys, encrypt=False)
    assert ports == [(node.transport.port, node.transport.bulk_port) for node in (one, two)]
    assert not one.transport.encrypt
    membership = world.membership(one, two)
    for index, node in enumerate((one, two)):
        node.transport.configure(membership, index)
    target = np.zeros(1000, dtype=np.uint8)
    fetch_all(world, one, 1, target)
    assert (target == SOURCE[:1000]).all()


def test_nothing_is_left_open(world):
    def fds():
        return len(os.listdir("/proc/self/fd"))

    def once():
        _, one, _ = world.start(2)
        fetch_all(world, one, 1, np.zeros(10, dtype=np.uint8))
        for node in list(world.nodes):
            world.remove(node)

    once()
    before, threads = fds(), threading.active_count()
    for _ in range(3):
        once()
    assert fds() <= before
    assert threading.active_count() <= threads


def test_sessions_are_bounded_and_the_one_unused_for_longest_goes(world, monkeypatch, stranger_to):
    monkeypatch.setattr(limits, "SESSIONS_MAX", 4)
    membership, one, two = world.start(2)
    fetch_all(world, one, 1, np.zeros(10, dtype=np.uint8))
    strangers = [stranger_to(two, world.keys) for _ in range(4)]
    for stranger in strangers:
        stranger.say(encode(stranger.hello(membership)))
        assert isinstance(decode_reply(stranger.hears(world)[0]), Welcome)
    assert len(two.transport._guests.by_session) == len(two.transport._guests.by_identity) == 4
    assert sum(two.transport._guests.places.values()) == 4  # or strangers from there were let in for ever
    one.transport.fetch(1, fetch_of(1, 0, 10))
    world.until(lambda: one.of(Lost))
    assert "no-session" in one.of(Lost)[0].reason
    fetch_all(world, one, 1, np.zeros(10, dtype=np.uint8))  # it has said Hello again


def test_when_a_key_is_used_up_there_is_another_session(world, monkeypatch):
    _, one, _ = world.start(2)
    fetch_all(world, one, 1, np.zeros(10, dtype=np.uint8))
    monkeypatch.setattr(sealing, "MESSAGES_MAX", 5)
    target = np.zeros(10, dtype=np.uint8)
    for number in range(20):
        one.transport.fetch(1, fetch_of(number, 0, 10))
    world.until(lambda: len(one.of(Opened)) >= 2)
    monkeypatch.setattr(sealing, "MESSAGES_MAX", 100)
    fetch_all(world, one, 1, target)
    assert (target == SOURCE[:10]).all()
    assert "seals no more" in one.of(Lost)[0].reason


# ---- who is refused ------------------------------------------------------------------------------


def warnings(caplog, level=logging.WARNING):
    return [record.getMessage() for record in caplog.records if record.levelno == level]


@pytest.mark.fault(37)
def test_a_stranger_who_knows_the_public_key_gets_nothing_and_is_logged_once(world, stranger_to, caplog):
    membership, one, _ = world.start(2)
    for _ in range(3):
        stranger = stranger_to(one, JobKeys.generate(), server_key=world.keys.public)
        stranger.say(encode(stranger.hello(membership, 1)))
        assert stranger.hears_nothing(world, seconds=0.3)
    assert not one.events
    (text,) = [text for text in warnings(caplog) if "does not have the keys" in text]
    assert HOST in text
    assert world.keys.public.decode() not in caplog.text
    assert world.keys.secret.decode() not in caplog.text


@pytest.mark.fault(37)
def test_a_stranger_with_other_keys_gets_nothing_and_is_logged_once(world, stranger_to, caplog):
    membership, one, _ = world.start(2)
    for _ in range(3):
        stranger = stranger_to(one, JobKeys.generate())
        stranger.say(encode(stranger.hello(membership, 1)))
        assert stranger.hears_nothing(world, seconds=0.3)
    assert not one.events
    assert len([text for text in warnings(caplog) if "does not speak CURVE" in text]) == 1


@pytest.mark.fault(37)
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"job": "b" * 32}, "wrong-job"),
        ({"epoch": 2}, "stale-epoch"),
        ({"epoch": 4}, "behind"),
        ({"protocol": 2}, "protocol-version"),
        ({"index": 9}, "unknown-node"),
        ({"node": "another"}, "unknown-node"),
    ],
)
def test_a_hello_that_does_not_fit_is_refused_by_name_and_logged_once(
    world, stranger_to, caplog, changes, code
):
    caplog.set_level(logging.INFO, logger="flashpoint")
    membership, one, _ = world.start(2)
    stranger = stranger_to(one, world.keys)
    for _ in range(3):
        stranger.say(encode(stranger.hello(membership, 1, **changes)))
        refused = decode_reply(stranger.hears(world)[0])
        assert (refused.about, refused.code) == ("hello", code)
    stranger.say(encode(Query(KEY)))
    assert decode_reply(stranger.hears(world)[0]).code == "no-session"
    assert not one.events
    level = logging.INFO if code == "behind" else logging.WARNING  # that passes by itself
    assert len([text for text in warnings(caplog, level) if code in text]) == 1


def test_the_hello_of_another_release_is_refused_by_name(world, stranger_to):
    _, one, _ = world.start(2)
    stranger = stranger_to(one, world.keys)
    stranger.say(msgspec.msgpack.encode(["hello", 2, "all", "else", "is", "new"]))
    refused = decode_reply(stranger.hears(world)[0])
    assert (refused.about, refused.code) == ("hello", "protocol-version")


def test_nodes_of_different_epochs_tell_each_other(world, caplog):
    membership, one, two = world.start(2)
    two.transport.configure(msgspec.structs.replace(membership, epoch=4), 1)
    one.transport.say(1, Query(KEY))
    world.until(lambda: one.of(HelloRefused))
    assert one.of(HelloRefused)[0].refused.code == "stale-epoch"
    assert any("node 1 refuses this one: stale-epoch" in text for text in warnings(caplog))


def test_another_node_at_the_address_is_not_taken_for_the_peer(world):
    _, one, two = world.start(2)
    members = world.membership(one, two, two).members
    wrong = Membership(job=world.keys.job, epoch=3, copies=1, members=members)
    one.transport.configure(wrong, 0)
    one.transport.say(2, Query(KEY))
    world.until(lambda: one.of(HelloRefused))
    assert one.of(HelloRefused)[0].refused.code == "unknown-node"


@pytest.mark.fault(26)
def test_a_hello_said_again_gets_the_same_welcome(world, stranger_to):
    membership, one, _ = world.start(2)
    stranger = stranger_to(one, world.keys)
    hello = stranger.hello(membership, 1)
    heard = []
    for _ in range(2):
        stranger.say(encode(hello))
        heard.append(stranger.hears(world)[0])
    assert heard[0] == heard[1]
    stranger.say(encode(msgspec.structs.replace(hello, secret=b"d" * 32)))
    assert stranger.hears(world)[0] != heard[0]
    assert len(one.transport._guests.by_session) == len(one.transport._guests.by_identity) == 1


@pytest.mark.fault(37)
@pytest.mark.parametrize("encrypt", [False, True])
def test_forged_sessions_get_nothing(world, stranger_to, caplog, encrypt):
    _, one, two = world.start(2, encrypt=encrypt)
    fetch_all(world, one, 1, np.zeros(10, dtype=np.uint8))
    seen = len(two.events)
    stranger = stranger_to(two, JobKeys.generate())
    bulk = stranger.open_bulk()
    fetch = fetch_of(1, 0, 10)
    known = one.transport._links[1]._handshake.session.id
    forgeries = [secrets.token_bytes(16) + encode(fetch), NO_SESSION + encode(fetch), known[:-1]]
    if encrypt:
        forged = Session(known, 0, Sealer(bytes(32)), Opener(bytes(32)))
        forgeries += [known + encode(fetch), forged.pack(fetch)]
    for frame in forgeries:
        bulk.send(frame)
        (reply,) = stranger.hears(world, bulk)
        assert reply[:16] == NO_SESSION
        refused = decode_bulk_reply(reply[16:])
        assert refused.code in ("no-session", "corrupt")
    assert len(two.events) == seen
    assert len([text for text in warnings(caplog) if "no-session" in text]) == 1


@pytest.mark.fault(37)
def test_a_replayed_fetch_gets_what_only_the_session_can_open(world, stranger_to):
    membership, one, _ = world.start(2)
    friend = stranger_to(one, world.keys)
    hello = friend.hello(membership, 1)
    friend.say(encode(hello))
    welcome = decode_reply(friend.hears(world)[0])
    mine, theirs = session_keys(hello.secret, welcome.secret, welcome.session)
    assert welcome.session == session_id(hello.secret, welcome.secret)
    session = Session(welcome.session, 0, Sealer(mine), Opener(theirs))
    frame = session.pack(fetch_of(1, 0, 100))
    replayed = []
    for _ in range(2):
        bulk = friend.open_bulk()
        bulk.send(frame)
        header, body = friend.hears(world, bulk)
        _, payload = session.unpack_data(memoryview(header), memoryview(body))
        target = np.zeros(100, dtype=np.uint8)
        payload.copy_into(target)
        assert (target == SOURCE[:100]).all()
        replayed.append((header, body))
    assert replayed[0] != replayed[1]  # never the same nonce
    assert SOURCE[:100].tobytes() not in replayed[0][1]
    other = Session(welcome.session, 0, Sealer(mine), Opener(bytes(32)))
    _, payload = other.unpack_data(memoryview(header), memoryview(body))
    with pytest.raises(ProtocolError, match="corrupt"):
        payload.copy_into(target)


def test_bulk_connections_come_from_addresses_of_nodes_only(world, stranger_to, caplog):
    _, one, two = world.start(2)
    fetch_all(world, one, 1, np.zeros(10, dtype=np.uint8))
    stranger = stranger_to(two, JobKeys.generate(), source="127.0.0.9")
    bulk = stranger.open_bulk()
    bulk.send(secrets.token_bytes(100))
    assert stranger.hears_nothing(world, bulk)
    assert any("no node has said Hello from 127.0.0.9" in text for text in warnings(caplog))


# ---- what a server survives ----------------------------------------------------------------------


def test_garbage_on_every_socket(world, stranger_to, job_root):
    membership, one, two = world.start(2)
    local = world.add(local_path=f"{job_root}/orders.sock")
    fetch_all(world, one, 1, np.zeros(10, dtype=np.uint8))
    friend = stranger_to(two, world.keys)
    friend.say(encode(friend.hello(membership)))
    friend.hears(world)
    bulk = friend.open_bulk()
    random = np.random.default_rng(3)
    for nbytes in [0, 1, 15, 16, 17, 28, 29, 100, 4000] * 5:
        garbage = random.bytes(nbytes)
        for frames in ([garbage], [garbage, garbage], [garbage] * 50, [b"", garbage]):
            friend.say(*frames)
            bulk.send_multipart(frames)
    bulk.send(random.bytes(limits.FRAME_BYTES))  # over what is read at all
    friend.say(random.bytes(limits.MESSAGE_BYTES_MAX + 1))
    for port in (two.transport.port, two.transport.bulk_port, local.transport.port):
        for data in (
            b"GET / HTTP/1.0\r\n\r\n",
            random.bytes(4096),
            b"\xff\0\0\0\0\0\0\0\1\x7f",
            b"\xff" * 4096,
        ):
            with socket.create_connection((HOST, port), 5) as raw:
                raw.sendall(data)
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(f"{job_root}/orders.sock")
        raw.sendall(random.bytes(4096))
    world.turn_for(0.5)
    one.transport.say(1, Query(KEY))
    target = np.zeros(1000, dtype=np.uint8)
    fetch_all(world, one, 1, target)
    assert (target == SOURCE[:1000]).all()
    world.until(lambda: one.of(Replied))
    assert not one.of(Lost)
    assert len(two.transport._logged) < 20


def test_garbage_from_a_server_does_no_harm(world):
    _, one, two = world.start(2)
    fetch_all(world, one, 1, np.zeros(10, dtype=np.uint8))
    one.transport.say(1, Met(KEY))
    world.until(lambda: two.of(Requested))
    control = two.of(Requested)[0].connection
    bulk = two.of(FetchRequested)[0].connection
    session = two.transport._guests.by_session[bulk.session].session
    random = np.random.default_rng(3)
    for nbytes in [0, 1, 15, 16, 17, 28, 29, 44, 100, 4000] * 5:
        garbage = random.bytes(nbytes)
        for frames in ([garbage], [garbage, garbage], [garbage] * 5, [session.id + garbage] * 2):
            two.transport._control.send_multipart([control.identity, *frames])
            two.transport._bulk.send_multipart([bulk.identity, *frames])
    arrived = len(one.of(Arrived))
    target = np.zeros(1000, dtype=np.uint8)
    fetch_all(world, one, 1, target)
    assert (target == SOURCE[:1000]).all()
    assert len(one.of(Arrived)) == arrived + 1
    assert not one.of(Lost) and not one.of(Replied)


def test_a_peer_that_never_reads_does_not_hold_up_another(world, stranger_to):
    membership, one, two = world.start(2)
    deaf = stranger_to(two, world.keys)
    hello = deaf.hello(membership)
    deaf.say(encode(hello))
    welcome = decode_reply(deaf.hears(world)[0])
    mine, theirs = session_keys(hello.secret, welcome.secret, welcome.session)
    session = Session(welcome.session, 0, Sealer(mine), Opener(theirs))
    bulk = deaf.open_bulk(rcvhwm=1, rcvbuf=64 << 10)
    asked = 3 * limits.FRAMES_QUEUED_MAX
    for number in range(asked):
        bulk.send(session.pack(fetch_of(number, 0, limits.FRAME_BYTES)))
    world.until(lambda: len(two.of(FetchRequested)) == asked)
    assert not two.transport.send_data(
        two.of(FetchRequested)[-1].connection, Data(0, 0, 10), SOURCE[:10].data
    )
    target = np.zeros(len(SOURCE), dtype=np.uint8)
    start = time.monotonic()
    fetch_all(world, one, 1, target)
    assert time.monotonic() - start < 30
    assert (target == SOURCE).all()


@pytest.mark.fault(32)
def test_a_thousand_half_open_connections(world):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 5000:
        pytest.skip("too few descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 5000), hard))
    half_open = []
    try:
        _, one, two = world.start(2)
        for number in range(1000):
            port = two.transport.bulk_port if number % 2 else two.transport.port
            half_open.append(socket.create_connection((HOST, port), 5))
        one.transport.say(1, Query(KEY))
        start = time.monotonic()
        target = np.zeros(1 << 20, dtype=np.uint8)
        fetch_all(world, one, 1, target)
        world.until(lambda: one.of(Replied))
        assert time.monotonic() - start < 30
        assert (target == SOURCE[: 1 << 20]).all()
    finally:
        for connection in half_open:
            connection.close()
        for node in list(world.nodes):
            world.remove(node)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_strangers_cause_is_logged_within_a_bound(world, monkeypatch, caplog):
    monkeypatch.setattr(transport, "_LOGGED_MAX", 5)
    node = world.add().transport
    for number in range(100):
        node._log_once(f"10.0.0.{number}", "code", "text")
    assert len(warnings(caplog)) == 5
