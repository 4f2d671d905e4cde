"""What a `Transport` tells of: what peers ask, what they answer, and how the links to them stand."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashpoint.replication.messages import Data, Fetch, Refused, Reply, Request
from flashpoint.replication.session import Payload

# ---- of peers that have connected to this node, and of its own trainers --------------------------


@dataclass(frozen=True, slots=True)
class Connection:
    """Where an answer goes: on which socket, to whom, and, for bulk data, in which session."""

    socket: str
    identity: bytes
    session: bytes = field(default=b"", repr=False)  # of use to a stranger, where nothing is sealed


@dataclass(frozen=True, slots=True)
class Requested:
    """A peer that has said Hello asks for something."""

    connection: Connection
    index: int
    message: Request


@dataclass(frozen=True, slots=True)
class FetchRequested:
    """A peer asks for bytes."""

    connection: Connection
    index: int
    fetch: Fetch


@dataclass(frozen=True, slots=True)
class Ordered:
    """A trainer of this node wants something."""

    connection: Connection
    data: bytes


@dataclass(frozen=True, slots=True)
class Moved:
    """A peer listens elsewhere than was known; the link to it is made anew."""

    index: int
    host: str
    port: int
    bulk_port: int


# ---- of links to peers ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replied:
    """A peer answers a request; a refused `Fetch` too."""

    index: int
    message: Reply


@dataclass(frozen=True, slots=True)
class Arrived:
    """Bytes that were asked for. They are judged when they are copied: `Payload.copy_into`."""

    index: int
    data: Data
    payload: Payload


@dataclass(frozen=True, slots=True)
class Opened:
    """There is a session with a peer now."""

    index: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A peer is out of reach, or its session is gone: what is not answered yet never will be."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class HelloRefused:
    """A peer wants no session, for now; it is asked again."""

    index: int
    refused: Refused


LinkEvent = Replied | Arrived | Opened | Lost | HelloRefused

Event = Requested | FetchRequested | Ordered | Moved | LinkEvent
