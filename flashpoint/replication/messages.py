"""What nodes say to each other: typed messages, every field bounded. Pure; the wire is `docs/protocol.md`.

Requests go from the node that connected to the one that was connected to, replies the other way. All but
`Fetch` and `Data` travel over CURVE, one msgpack array each: ``[tag, field, ...]``.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from flashpoint.errors import ProtocolError
from flashpoint.ids import STEP_MAX
from flashpoint.replication import limits

Count = Annotated[int, Meta(ge=0, le=STEP_MAX)]
Index = Annotated[int, Meta(ge=0, lt=limits.NODES_MAX)]
Port = Annotated[int, Meta(ge=0, le=65_535)]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
Job = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
Node = Annotated[str, Meta(min_length=1, max_length=limits.NODE_CHARS_MAX)]
Host = Annotated[str, Meta(max_length=limits.HOST_CHARS_MAX)]
Reason = Annotated[str, Meta(max_length=limits.REASON_CHARS_MAX)]
Secret = Annotated[bytes, Meta(min_length=limits.SECRET_BYTES, max_length=limits.SECRET_BYTES)]
SessionId = Annotated[bytes, Meta(min_length=limits.SESSION_BYTES, max_length=limits.SESSION_BYTES)]
# Names are parsed by `flashpoint.ids` before they touch a path; the pattern keeps all else out already here.
ObjectName = Annotated[
    str, Meta(pattern=r"^(rank[0-9]{5,10}-[0-9]{1,6}\.safetensors|\.metadata)$", max_length=64)
]
ObjectNames = Annotated[tuple[ObjectName, ...], Meta(max_length=limits.OBJECTS_MAX)]

# Why a request was refused. Those in AGAIN may pass when they are made again; the others will not.
AGAIN: Final = frozenset({"behind", "busy", "closing", "no-session", "no-space", "no-source"})
CODES: Final = AGAIN | {
    "bad-range",
    "corrupt",
    "malformed",
    "no-object",
    "no-version",
    "not-writable",
    "protocol-version",
    "stale-epoch",
    "unknown-node",
    "wrong-job",
}


class Key(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A version's content: ``digest`` is its manifest's, which names every object with its checksums."""

    epoch: Count
    step: Count
    digest: Digest

    def __str__(self) -> str:
        return f"step {self.step} (epoch {self.epoch}, {self.digest[:8]})"


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages."""


# ---- requests ------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """First on every connection: who I am, where I listen, and my half of the session's key."""

    protocol: Count
    job: Job
    epoch: Count
    index: Index
    node: Node
    host: Host
    port: Port
    bulk_port: Port
    secret: Secret


class Offer(Message, frozen=True, tag="offer"):
    """Hold ``objects`` of this version, as placement says; get them, and the manifest, from me."""

    key: Key
    manifest_nbytes: Count
    objects: ObjectNames


class Query(Message, frozen=True, tag="query"):
    """Which objects of this version do you hold?"""

    key: Key


class Withdraw(Message, frozen=True, tag="withdraw"):
    """My ``objects`` of this version are not to be used any more: delete your copies of them."""

    key: Key
    objects: ObjectNames


class Met(Message, frozen=True, tag="met"):
    """To the leader: all my objects of this version are held where placement says."""

    key: Key


class Retract(Message, frozen=True, tag="retract"):
    """To the leader: I want to give this version up, so count on my `Met` no more."""

    key: Key


class Farewell(Message, frozen=True, tag="farewell"):
    """My job is done and so am I: I need nothing of you any more, and go when you have said the same."""


class Span(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Bytes ``begin`` to ``end`` of an object, at most a frame's; ``request`` is the number of the answer."""

    request: Count
    name: ObjectName
    begin: Count
    end: Count


class Fetch(Message, frozen=True, tag="fetch"):
    """Spans of a version's objects, over the bulk connection. Each is answered, or refused, for itself."""

    key: Key
    spans: Annotated[tuple[Span, ...], Meta(min_length=1, max_length=limits.FRAMES_QUEUED_MAX)]


# ---- replies -------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, tag="welcome"):
    """The answer to `Hello`: the session's name, and my half of its key."""

    protocol: Count
    epoch: Count
    index: Index
    node: Node
    session: SessionId
    secret: Secret


class Accepted(Message, frozen=True, tag="accepted"):
    """I am getting what you offered."""

    key: Key


class Held(Message, frozen=True, tag="held"):
    """I hold everything you offered, verified against this digest."""

    key: Key


class Holdings(Message, frozen=True, tag="holdings"):
    """The answer to `Query`."""

    key: Key
    objects: ObjectNames


class Withdrawn(Message, frozen=True, tag="withdrawn"):
    """They are deleted."""

    key: Key


class Outcome(Message, frozen=True, tag="outcome"):
    """From the leader: whether all nodes have met this version's goal."""

    key: Key
    replicated: bool


class Retracted(Message, frozen=True, tag="retracted"):
    """From the leader: this version was not replicated, and never will be."""

    key: Key


class Heard(Message, frozen=True, tag="heard"):
    """The answer to `Farewell`."""


class Data(Message, frozen=True, tag="data"):
    """What a `Span` gets: this header, then the bytes in a frame of their own."""

    request: Count
    begin: Count
    end: Count


class Refused(Message, frozen=True, tag="refused"):
    """The answer to any request that is not carried out.

    Attributes:
        about: tag of the request.
        code: one of `CODES`.
        key: the version it was about, or None.
        request: of a `Span`.
    """

    about: Annotated[str, Meta(max_length=16)]
    code: Annotated[str, Meta(max_length=32)]
    reason: Reason
    key: Key | None = None
    request: Count = 0


Request = Hello | Offer | Query | Withdraw | Met | Retract | Farewell
Reply = Welcome | Accepted | Held | Holdings | Withdrawn | Outcome | Retracted | Heard | Refused
BulkReply = Data | Refused

_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_requests: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)
_replies: Final[msgspec.msgpack.Decoder[Reply]] = msgspec.msgpack.Decoder(Reply)
_fetches: Final[msgspec.msgpack.Decoder[Fetch]] = msgspec.msgpack.Decoder(Fetch)
_bulk_replies: Final[msgspec.msgpack.Decoder[BulkReply]] = msgspec.msgpack.Decoder(BulkReply)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_request(data: bytes | memoryview) -> Request:
    """Raises `ProtocolError` for anything that is not a request."""
    return _decode(_requests, data)


def decode_reply(data: bytes | memoryview) -> Reply:
    """Raises `ProtocolError` for anything that is not a reply."""
    return _decode(_replies, data)


def decode_fetch(data: bytes | memoryview) -> Fetch:
    """Raises `ProtocolError` for anything that is not a `Fetch`."""
    return _decode(_fetches, data)


def decode_bulk_reply(data: bytes | memoryview) -> BulkReply:
    """Raises `ProtocolError` for anything that is neither `Data` nor `Refused`."""
    return _decode(_bulk_replies, data)


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes | memoryview) -> _T:
    if len(data) > limits.MESSAGE_BYTES_MAX:
        raise ProtocolError("malformed", f"a message of {len(data)} bytes is over {limits.MESSAGE_BYTES_MAX}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError("malformed", str(error)) from None
