"""What a trainer asks of its own node's agent, and what the agent answers. Pure.

They travel over a Unix socket in the job root, which only its owner can enter: whoever could write an order
could as well write the checkpoints themselves. One msgpack array each, as between nodes.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from flashpoint.errors import ProtocolError
from flashpoint.ids import RANK_MAX
from flashpoint.replication import limits
from flashpoint.replication.keys import JobKeys
from flashpoint.replication.membership import Membership
from flashpoint.replication.messages import Count, Index, Key, ObjectName

OPEN: Final = "open"  # of a peer: there is a connection
ORDER_BYTES_MAX: Final = 64 << 20  # a membership of the largest job is some MiB

Chunks = Annotated[tuple[Count, ...], Meta(max_length=limits.CHUNKS_MAX)]
Sources = Annotated[tuple[Index, ...], Meta(max_length=limits.NODES_MAX)]


class Order(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all orders and answers; ``number`` is the order's, and its answer's."""

    number: Count


# ---- orders --------------------------------------------------------------------------------------


class Identify(Order, frozen=True, tag="identify"):
    """Who are you, and where do you listen?"""


class Configure(Order, frozen=True, tag="configure"):
    """A new epoch has begun, with these nodes; you are ``index`` among them."""

    membership: Membership
    index: Index
    keys: JobKeys
    keep: Count
    encrypt: bool


class Completed(Order, frozen=True, tag="completed"):
    """This version is complete on every node: look at the job root now, not at the next turn."""

    epoch: Count
    step: Count


class Settled(Order, frozen=True, tag="settled"):
    """The job goes on from this version, of an earlier epoch: it and what is older may be replicated anew."""

    epoch: Count
    step: Count


class Await(Order, frozen=True, tag="await"):
    """Tell me when this version is replicated, or will not be. Answered then."""

    epoch: Count
    step: Count


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """One object to get.

    Attributes:
        chunks: indexes of its checksum chunks; none of them means all.
        sources: node indexes, best first.
    """

    name: ObjectName
    chunks: Chunks
    sources: Sources


class RetrieveManifest(Order, frozen=True, tag="retrieve-manifest"):
    """Get a version's manifest, which this node does not have. Answered when it is here."""

    key: Key
    nbytes: Count
    sources: Sources


class Retrieve(Order, frozen=True, tag="retrieve"):
    """Get objects, or chunks of them, of a version whose manifest is here. Answered when they are.

    Whole objects go into the container; parts of objects into a folder of their own, for the rank that
    is to read them.
    """

    key: Key
    objects: Annotated[tuple[Wanted, ...], Meta(max_length=limits.OBJECTS_MAX)]
    rank: Annotated[int, Meta(ge=0, le=RANK_MAX)] = 0


class Inquire(Order, frozen=True, tag="inquire"):
    """How do the versions stand?"""


class Observed(Order, frozen=True, tag="observed"):
    """How a save or a recovery of this node's first rank went, for the metrics.

    Attributes:
        what: ``save`` or ``recovery``.
        outcome: of a save ``complete``, ``failed``, ``replicated`` or ``unreplicated``; of a recovery its tier.
        seconds: by part, as a handle's timings.
    """

    what: Annotated[str, Meta(max_length=32)]
    outcome: Annotated[str, Meta(max_length=32)]
    nbytes: Count
    seconds: Annotated[dict[str, float], Meta(max_length=32)]


class Release(Order, frozen=True, tag="release"):
    """The job is done: end when what is complete is replicated, or after ``linger_s``."""

    linger_s: Annotated[float, Meta(ge=0, le=86_400)]


# ---- answers -------------------------------------------------------------------------------------


class Identity(Order, frozen=True, tag="identity"):
    """Of the agent. ``job`` is empty and ``epoch`` 0 as long as it was not configured.

    ``storage`` is a digest of the settings and credentials that it drains with.
    """

    pid: Count
    release: str
    job: str
    epoch: Count
    host: str
    port: Count
    bulk_port: Count
    storage: str = ""


class StorageReport(msgspec.Struct, frozen=True, array_like=True):
    """How draining to storage goes, on this node.

    Attributes:
        epoch, step: of the newest drained version that it knows; -1 for none.
        error: why the last drain did not come to its end; empty if it did.
    """

    epoch: int = -1
    step: int = -1
    error: str = ""


class ScrubReport(msgspec.Struct, frozen=True, array_like=True):
    """What verifying again what lies in memory has found on this node, since its agent was started.

    Attributes:
        verified_bytes: again and again.
        corrupt, repaired, withdrawn: objects; what is neither repaired nor withdrawn is tried again.
        last: of the last object found corrupt, in words; empty if there was none.
    """

    verified_bytes: int = 0
    corrupt: int = 0
    repaired: int = 0
    withdrawn: int = 0
    last: str = ""


class Done(Order, frozen=True, tag="done"):
    """The order was carried out. ``nbytes`` that came from peers, where some did."""

    nbytes: Count = 0


class Failed(Order, frozen=True, tag="failed"):
    """It was not, and why."""

    reason: str
    code: str = ""


class VersionReport(msgspec.Struct, frozen=True, array_like=True):
    """How a version stands, as this node knows it.

    Attributes:
        state: ``unproven``, ``complete``, ``replicated``; or ``withdrawn``: it is corrupt, with no good copy left.
        holders: object name -> indexes of the nodes that hold it, its own among them.
    """

    key: Key
    state: str
    holders: dict[str, tuple[int, ...]]


class Report(Order, frozen=True, tag="report"):
    """The answer to `Inquire`.

    Attributes:
        peers: node index -> `OPEN`, or why it cannot be reached.
    """

    versions: tuple[VersionReport, ...]
    peers: dict[int, str]
    storage: StorageReport | None = None
    scrub: ScrubReport | None = None


Orders = (
    Identify
    | Configure
    | Completed
    | Settled
    | Await
    | RetrieveManifest
    | Retrieve
    | Inquire
    | Observed
    | Release
)
Answers = Identity | Done | Failed | Report

_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_orders: Final[msgspec.msgpack.Decoder[Orders]] = msgspec.msgpack.Decoder(Orders)
_answers: Final[msgspec.msgpack.Decoder[Answers]] = msgspec.msgpack.Decoder(Answers)


def encode(order: Order) -> bytes:
    return _encoder.encode(order)


def decode_order(data: bytes) -> Orders:
    """Raises `ProtocolError` for anything that is no order."""
    return _decode(_orders, data)


def decode_answer(data: bytes) -> Answers:
    """Raises `ProtocolError` for anything that is no answer."""
    return _decode(_answers, data)


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    if len(data) > ORDER_BYTES_MAX:
        raise ProtocolError("malformed", f"an order of {len(data)} bytes is over {ORDER_BYTES_MAX}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError("malformed", str(error)) from None
