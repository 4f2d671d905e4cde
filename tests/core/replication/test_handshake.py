import itertools

import msgspec
import numpy as np
import pytest

from flashpoint.errors import ProtocolError
from flashpoint.replication import limits
from flashpoint.replication.handshake import (
    TRANSITIONS,
    Address,
    ClientHandshake,
    ClientState,
    answer_hello,
    foreign_protocol,
    server_session,
    session_id,
    session_keys,
)
from flashpoint.replication.membership import Member, Membership
from flashpoint.replication.messages import (
    Data,
    Fetch,
    Key,
    Query,
    Refused,
    Span,
    Welcome,
    decode_fetch,
    encode,
)
from flashpoint.replication.session import Session

JOB = "a" * 32
MINE = Address("10.0.0.1", 4000, 4001)
KEY = Key(1, 2, "0" * 32)
REFUSED = Refused("hello", "behind", "not yet")


def members(epoch=3):
    nodes = tuple(Member(index=i, node=f"node-{i}", ranks=(i,)) for i in range(3))
    return Membership(job=JOB, epoch=epoch, copies=1, members=nodes)


def chances():
    numbers = itertools.count(1)
    return lambda nbytes: next(numbers).to_bytes(nbytes, "big")


def client(encrypt=True, epoch=3):
    return ClientHandshake(members(epoch), 0, 1, encrypt=encrypt, chance=chances())


def welcomed(hello, **changes):
    welcome = answer_hello(hello, members(), 1, b"s" * 32)
    assert isinstance(welcome, Welcome)
    return msgspec.structs.replace(welcome, **changes)


def test_a_hello_says_who_where_and_when():
    hello = client().hello(MINE)
    assert (hello.protocol, hello.job, hello.epoch) == (limits.PROTOCOL_VERSION, JOB, 3)
    assert (hello.index, hello.node) == (0, "node-0")
    assert (hello.host, hello.port, hello.bulk_port) == MINE


def test_a_welcome_opens_a_session_that_both_sides_have():
    mine = client()
    hello = mine.hello(MINE)
    welcome = welcomed(hello)
    theirs = server_session(hello, welcome, encrypt=True)
    assert mine.answered(welcome)
    assert mine.state is ClientState.OPEN
    assert mine.session.id == theirs.id == welcome.session
    assert (mine.session.index, theirs.index) == (1, 0)
    talk(mine.session, theirs)


def test_without_encryption_nothing_is_sealed():
    mine = client(encrypt=False)
    hello = mine.hello(MINE)
    welcome = welcomed(hello)
    assert mine.answered(welcome)
    assert not mine.session.is_sealed
    theirs = server_session(hello, welcome, encrypt=False)
    talk(mine.session, theirs)
    payload = memoryview(b"bytes")
    assert theirs.pack_data(Data(1, 0, 5), payload)[1] is payload


def talk(mine: Session, theirs: Session):
    fetch = Fetch(KEY, (Span(7, ".metadata", 0, 100),))
    frame = mine.pack(fetch)
    assert frame[: limits.SESSION_BYTES] == mine.id
    assert decode_fetch(theirs.unpack(memoryview(frame))) == fetch
    source = np.arange(100, dtype=np.uint8)
    header, body = theirs.pack_data(Data(7, 0, 100), source.data)
    data, payload = mine.unpack_data(memoryview(header), memoryview(body))
    target = np.zeros(100, dtype=np.uint8)
    payload.copy_into(target)
    assert data == Data(7, 0, 100) and payload.nbytes == 100
    assert (target == source).all()
    with pytest.raises(ProtocolError, match="malformed"):
        payload.copy_into(target[:-1])


def test_a_header_of_another_frame_does_not_open():
    mine = client()
    hello = mine.hello(MINE)
    welcome = welcomed(hello)
    mine.answered(welcome)
    theirs = server_session(hello, welcome, encrypt=True)
    header, body = theirs.pack_data(Data(7, 0, 100), memoryview(bytes(100)))
    changed = header.replace(encode(Data(7, 0, 100)), encode(Data(7, 1, 101)))
    assert changed != header
    _, payload = mine.session.unpack_data(memoryview(changed), memoryview(body))
    with pytest.raises(ProtocolError, match="corrupt"):
        payload.copy_into(np.zeros(100, dtype=np.uint8))


@pytest.mark.parametrize("encrypt", [False, True])
def test_garbage_in_frames_is_refused(encrypt):
    mine = client(encrypt)
    hello = mine.hello(MINE)
    welcome = welcomed(hello)
    mine.answered(welcome)
    theirs = server_session(hello, welcome, encrypt=encrypt)
    header, body = theirs.pack_data(Data(7, 0, 100), memoryview(bytes(100)))
    for bad_header, bad_body in (
        (header[:-1], body),
        (header[:16], body),
        (b"", body),
        (header, body[:-1]),
        (header, b""),
        (theirs.pack(REFUSED), body),
    ):
        with pytest.raises(ProtocolError):
            mine.session.unpack_data(memoryview(bad_header), memoryview(bad_body))
    for nbytes in range(60):
        with pytest.raises(ProtocolError):
            decode_fetch(theirs.unpack(memoryview(bytes(nbytes))))


def test_keys_differ_by_direction_session_and_secrets():
    one = session_keys(b"c" * 32, b"s" * 32, b"1" * 16)
    made = {
        *one,
        *session_keys(b"c" * 32, b"s" * 32, b"2" * 16),
        *session_keys(b"d" * 32, b"s" * 32, b"1" * 16),
    }
    made |= {*session_keys(b"c" * 32, b"t" * 32, b"1" * 16)}
    assert len(made) == 8
    assert all(len(key) == 32 for key in made)
    assert one == session_keys(b"c" * 32, b"s" * 32, b"1" * 16)
    assert session_id(b"c" * 32, b"s" * 32) != session_id(b"s" * 32, b"c" * 32)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"protocol": 2}, "protocol-version", "version 1, not 2"),
        ({"protocol": 2, "job": "b" * 32, "epoch": 0}, "protocol-version", "one release"),
        ({"job": "b" * 32}, "wrong-job", JOB),
        ({"job": "b" * 32, "epoch": 0}, "wrong-job", JOB),
        ({"epoch": 2}, "stale-epoch", "epoch 2 is over"),
        ({"epoch": 4}, "behind", "not in 4 yet"),
        ({"index": 3}, "unknown-node", "no node 3"),
        ({"index": 2}, "unknown-node", "node 2 is node-2, not node-0"),
        ({"node": "node-9"}, "unknown-node", "not node-9"),
    ],
)
def test_a_hello_is_refused_by_name(changes, code, words):
    hello = msgspec.structs.replace(client().hello(MINE), **changes)
    refused = answer_hello(hello, members(), 1, b"s" * 32)
    assert isinstance(refused, Refused)
    assert (refused.about, refused.code) == ("hello", code)
    assert words in refused.reason


def test_a_node_without_a_membership_is_behind():
    assert answer_hello(client().hello(MINE), None, 0, b"s" * 32).code == "behind"


def test_the_hello_of_another_release_is_told_by_its_version():
    assert foreign_protocol(msgspec.msgpack.encode(["hello", 2, {"all": "new"}])) == 2
    assert foreign_protocol(msgspec.msgpack.encode(["hello", 2])) == 2
    for other in (["hello", 1, 2], ["query", 2], ["hello"], ["hello", "2"], 5):
        assert foreign_protocol(msgspec.msgpack.encode(other)) is None
    assert foreign_protocol(b"\xc1") is None
    assert foreign_protocol(encode(Query(KEY))) is None


def test_said_again_it_is_the_same_hello_but_after_a_loss_another():
    mine = client()
    first = mine.hello(MINE)
    assert mine.hello(MINE) == first
    mine.lost()
    second = mine.hello(MINE)
    assert second.secret != first.secret
    mine.answered(REFUSED)
    assert mine.hello(MINE).secret not in (first.secret, second.secret)


def test_the_welcome_of_an_earlier_hello_changes_nothing():
    mine = client()
    late = welcomed(mine.hello(MINE))
    mine.lost()
    hello = mine.hello(MINE)
    assert not mine.answered(late)
    assert mine.state is ClientState.SAYING_HELLO
    assert mine.answered(welcomed(hello))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"protocol": 2}, "protocol-version"),
        ({"epoch": 2}, "behind"),
        ({"index": 2}, "unknown-node"),
        ({"node": "node-2"}, "unknown-node"),
    ],
)
def test_a_welcome_of_another_than_the_peer_is_refused(changes, code):
    mine = client()
    assert mine.answered(welcomed(mine.hello(MINE), **changes))
    assert mine.state is ClientState.REFUSED
    assert mine.session is None
    assert mine.refused.code == code


def test_every_state_and_event():
    def told(handshake, event):
        if event == "hello":
            before = handshake.state
            handshake.hello(MINE)
            return handshake.state is not before
        if event == "lost":
            return handshake.lost()
        answer = REFUSED
        if event == "welcome":
            secret = handshake._secret
            answer = Welcome(1, 3, 1, "node-1", session_id(secret, b"s" * 32), b"s" * 32)
        return handshake.answered(answer)

    ways = {
        ClientState.SILENT: [],
        ClientState.SAYING_HELLO: ["hello"],
        ClientState.OPEN: ["hello", "welcome"],
        ClientState.REFUSED: ["hello", "refused"],
    }
    assert set(ways) == set(ClientState)
    for state, way in ways.items():
        for event in ("hello", "welcome", "refused", "lost"):
            if (state, event) == (ClientState.OPEN, "hello"):
                continue  # nobody says Hello in a session
            handshake = client()
            for before in way:
                told(handshake, before)
            assert handshake.state is state
            told(handshake, event)
            assert handshake.state is TRANSITIONS.get((state, event), state), (state, event)
            assert (handshake.session is not None) is (handshake.state is ClientState.OPEN)
            assert (handshake.refused is not None) is (handshake.state is ClientState.REFUSED)
