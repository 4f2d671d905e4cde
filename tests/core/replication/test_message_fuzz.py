"""Decoders of messages and orders against anything: a `ProtocolError` or a message, and little memory."""

import random
import tracemalloc

import msgspec
import pytest

from flashpoint.errors import ProtocolError
from flashpoint.replication import limits, messages, orders
from flashpoint.replication.keys import JobKeys
from flashpoint.replication.membership import Member, Membership
from flashpoint.replication.messages import Key
from flashpoint.replication.session import Session

KEY = Key(3, 10, "0123456789abcdef" * 2)
NAMES = ("rank00000-0.safetensors", "rank12345-7.safetensors", ".metadata")
JOB = "f" * 32
MEMBERSHIP = Membership(
    job=JOB,
    epoch=3,
    copies=1,
    members=tuple(
        Member(
            index=index, node=f"node-{index}", domain="rack", ranks=(index,), host="::1", port=1, bulk_port=2
        )
        for index in range(3)
    ),
)
KEYS = JobKeys(job=JOB, public=b"p" * 40, secret=b"s" * 40)
MESSAGES = (
    messages.Hello(1, JOB, 3, 0, "node-0", "10.0.0.1", 4000, 4001, b"s" * 32),
    messages.Offer(KEY, 1000, NAMES),
    messages.Query(KEY),
    messages.Withdraw(KEY, NAMES),
    messages.Met(KEY),
    messages.Retract(KEY),
    messages.Farewell(),
    messages.Fetch(
        KEY, (messages.Span(7, NAMES[0], 1 << 20, 2 << 20), messages.Span(8, NAMES[0], 2 << 20, 3 << 20))
    ),
    messages.Welcome(1, 3, 0, "node-0", b"i" * 16, b"s" * 32),
    messages.Accepted(KEY),
    messages.Held(KEY),
    messages.Holdings(KEY, NAMES),
    messages.Withdrawn(KEY),
    messages.Outcome(KEY, True),
    messages.Retracted(KEY),
    messages.Heard(),
    messages.Data(7, 0, 1 << 20),
    messages.Refused("fetch", "busy", "because", KEY, 7),
)
ORDERS = (
    orders.Identify(1),
    orders.Configure(2, MEMBERSHIP, 1, KEYS, 2, True),
    orders.Completed(3, 3, 10),
    orders.Settled(4, 3, 10),
    orders.Await(5, 3, 10),
    orders.RetrieveManifest(6, KEY, 1000, (1, 2)),
    orders.Retrieve(7, KEY, (orders.Wanted(NAMES[0], (0, 5), (1,)),)),
    orders.Inquire(8),
    orders.Release(9, 2.5),
    orders.Identity(10, 1234, "0.1", JOB, 3, "host", 1, 2),
    orders.Done(11, 5),
    orders.Failed(12, "because", "busy"),
    orders.Report(13, (orders.VersionReport(KEY, "complete", {NAMES[0]: (0, 1)}),), {1: "open"}),
)
VALID = tuple(map(messages.encode, MESSAGES)) + tuple(map(orders.encode, ORDERS))
_plain = Session(b"i" * 16, 0, None, None)
DECODERS = (
    messages.decode_request,
    messages.decode_reply,
    messages.decode_fetch,
    messages.decode_bulk_reply,
    orders.decode_order,
    orders.decode_answer,
    lambda data: messages.decode_fetch(_plain.unpack(memoryview(data))),
    lambda data: _plain.unpack_data(memoryview(data), memoryview(b"payload")),
)
HUGE = tuple(  # headers of strings, byte strings, arrays and maps without end
    first + length
    for first, lengths in (
        (b"\xd9", (b"\xff",)),
        (b"\xda", (b"\xff\xff",)),
        (b"\xdb", (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff")),
        (b"\xc4", (b"\xff",)),
        (b"\xc5", (b"\xff\xff",)),
        (b"\xc6", (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff")),
        (b"\xdc", (b"\xff\xff",)),
        (b"\xdd", (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff")),
        (b"\xde", (b"\xff\xff",)),
        (b"\xdf", (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff")),
        (b"\xc9", (b"\xff\xff\xff\xff\x01",)),
    )
    for length in lengths
)
PEAK_BYTES = 4 << 20


def mutated(rng: random.Random) -> bytes:
    data = bytearray(rng.choice(VALID))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        place = rng.randrange(len(data) + 1)
        kind = rng.randrange(7)
        if kind == 0 and place < len(data):
            data[place] = rng.randrange(256)
        elif kind == 1 and place < len(data):
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[place:place] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 3:
            del data[place : place + rng.randrange(1, 9)]
        elif kind == 4:
            data[place:place] = rng.choice(HUGE)
        elif kind == 5:
            other = rng.choice(VALID)
            begin = rng.randrange(len(other))
            data[place:] = other[begin:]
        else:
            data[place : place + 1] = b"\x91" * rng.randrange(1, 3000)  # an array in an array in an array
    return bytes(data)


def survive(count: int, seed: int) -> int:
    """How many mutations were messages still."""
    rng = random.Random(seed)
    passed = 0
    for _ in range(count):
        data = mutated(rng)
        for decode in DECODERS:
            try:
                decode(data)
            except ProtocolError as error:
                assert error.code == "malformed"
                assert len(error.reason) <= 1000
            else:
                passed += 1
    return passed


def test_what_is_valid_is_decoded():
    for message in MESSAGES:
        data = messages.encode(message)
        decoded = []
        for decode in DECODERS[:4]:
            try:
                decoded.append(decode(data))
            except ProtocolError:  # it is of another kind
                continue
        assert decoded and all(one == message for one in decoded)
    for order in ORDERS:
        decode = orders.decode_answer if isinstance(order, orders.Answers) else orders.decode_order
        assert decode(orders.encode(order)) == order


def test_a_fetch_asks_for_one_span_at_least_and_for_no_more_than_a_peer_queues():
    span = messages.Span(7, NAMES[0], 0, 1)
    for count in (1, limits.FRAMES_QUEUED_MAX):
        fetch = messages.Fetch(KEY, (span,) * count)
        assert messages.decode_fetch(messages.encode(fetch)) == fetch
    for count in (0, limits.FRAMES_QUEUED_MAX + 1):
        with pytest.raises(ProtocolError, match="malformed"):
            messages.decode_fetch(messages.encode(messages.Fetch(KEY, (span,) * count)))


@pytest.mark.fault(34)
def test_mutated_messages_are_survived():
    tracemalloc.start()
    try:
        passed = survive(50_000 // 10, seed=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < PEAK_BYTES
    assert passed + survive(50_000 - 50_000 // 10, seed=2) > 1000


@pytest.mark.fault(34)
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_million_mutated_messages_are_survived():
    tracemalloc.start()
    try:
        survive(100_000, seed=3)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < PEAK_BYTES
    survive(900_000, seed=4)


@pytest.mark.fault(34)
@pytest.mark.parametrize("bomb", HUGE)
@pytest.mark.fault(34)
def test_length_bombs_take_no_memory(bomb):
    """In every place of every message, alone and with some bytes after it."""
    tracemalloc.start()
    try:
        for data in VALID:
            for place in range(0, len(data), 3):
                for rest in (b"", data[place:], bytes(1000)):
                    for decode in DECODERS[:6]:
                        try:
                            decode(data[:place] + bomb + rest)
                        except ProtocolError:
                            continue
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < PEAK_BYTES


def test_arrays_without_end_are_not_built():
    """As many small elements as a message can have: what they would take is bounded by the message's own size."""
    nbytes = messages.limits.MESSAGE_BYTES_MAX - 1000
    name = msgspec.msgpack.encode(NAMES[2])
    head = b"\x94\xa5offer" + msgspec.msgpack.encode(KEY) + b"\x01"
    for count in (nbytes // len(name), messages.limits.OBJECTS_MAX + 1):
        data = head + b"\xdd" + count.to_bytes(4, "big") + name * count
        with pytest.raises(ProtocolError, match="malformed"):
            messages.decode_request(data)
    with pytest.raises(ProtocolError, match="malformed"):
        messages.decode_request(bytes(messages.limits.MESSAGE_BYTES_MAX + 1))
