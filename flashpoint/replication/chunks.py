"""How far each object of a transfer is, chunk by chunk, and what is asked of whom: the state that `Transfer` moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple

from flashpoint.replication import limits


class Want(NamedTuple):
    """An object to get, or some of its chunks.

    Attributes:
        chunk_bytes: size of its chunks, a power of two; the last may be shorter.
        chunks: indexes of those that are wanted.
        sources: nodes that hold it, best first.
    """

    name: str
    nbytes: int
    chunk_bytes: int
    chunks: tuple[int, ...]
    sources: tuple[int, ...]


class ChunkState(Enum):
    """Of one chunk that is wanted."""

    MISSING = "no source is asked for it"
    ASKED = "a source is asked for it, or will be as credit allows"
    LANDED = "all of its bytes are here"
    VERIFIED = "and its checksum is right"


# What moves a chunk. Whatever is not here changes nothing.
TRANSITIONS: Final[Mapping[tuple[ChunkState, str], ChunkState]] = {
    (ChunkState.MISSING, "given"): ChunkState.ASKED,
    (ChunkState.ASKED, "landed"): ChunkState.LANDED,
    (ChunkState.ASKED, "taken"): ChunkState.MISSING,  # unanswered, refused, or the source is lost
    (ChunkState.LANDED, "good"): ChunkState.VERIFIED,
    (ChunkState.LANDED, "bad"): ChunkState.MISSING,
}


class Progress:
    """A want and how far it is."""

    __slots__ = ("begun", "live", "number", "unverified", "used_up", "want")

    def __init__(self, number: int, want: Want) -> None:
        self.number = number
        self.want = want
        self.begun = 0  # of want.chunks; what comes after has not been given to any source yet
        self.live: dict[int, Chunk] = {}  # begun and not verified, by index
        self.unverified = len(want.chunks)
        self.used_up: dict[int, str] = {}  # source: why it cannot give this object

    def span(self, index: int) -> tuple[int, int]:
        begin = index * self.want.chunk_bytes
        return begin, min(begin + self.want.chunk_bytes, self.want.nbytes)

    @property
    def is_begun(self) -> bool:
        return self.begun == len(self.want.chunks)

    @property
    def next_nbytes(self) -> int:
        begin, end = self.span(self.want.chunks[self.begun])
        return min(end - begin, limits.FRAME_BYTES)

    def begin_next(self) -> Chunk:
        index = self.want.chunks[self.begun]
        self.begun += 1
        chunk = self.live[index] = Chunk(self, index)
        return chunk


class Chunk:
    """A chunk that is on its way.

    Attributes:
        source: that gives it; stays when it is taken away, since frames that are here are of use with it alone.
        left: beginnings of the frames that are to be asked for.
        pending: numbers of the requests that are not answered.
        writing: how many answers the caller writes to their place now.
        unlanded: frames that are not here.
        failures: attempts that failed, by source.
        failed_s: when the last one did; frames asked for before belong to the same attempt.
    """

    __slots__ = (
        "begin", "end", "failed_s", "failures", "index", "left", "obj", "pending", "reasons", "source", "state",
        "unlanded", "writing",
    )  # fmt: skip

    def __init__(self, obj: Progress, index: int) -> None:
        self.obj = obj
        self.index = index
        self.begin, self.end = obj.span(index)
        self.state = ChunkState.MISSING
        self.source: Source | None = None
        self.pending: set[int] = set()
        self.writing = 0
        self.failures: dict[int, int] = {}
        self.reasons: dict[int, str] = {}
        self.failed_s = 0.0
        self.begin_anew()

    def begin_anew(self) -> None:
        self.left = deque(range(self.begin, self.end, limits.FRAME_BYTES))
        self.unlanded = len(self.left)

    def move(self, event: str) -> bool:
        """Whether the event moves this chunk."""
        after = TRANSITIONS.get((self.state, event))
        self.state = after or self.state
        return after is not None


class Source:
    """A node that holds objects.

    Attributes:
        ready_s: not to be asked before.
        todo: chunks given to it of which frames are to be asked for; those given to another meanwhile too.
        in_flight: requests of this transfer that are not answered.
        asked: (when, request), oldest first; those answered meanwhile too.
        heard_s: when it last answered anything, and ``heard_of``: the newest request that it answered.
        first: objects of which it is the best source, and ``others``: those it has as well.
        chunks: those given to it and not all here.
    """

    __slots__ = (
        "asked",
        "chunks",
        "first",
        "heard_of",
        "heard_s",
        "in_flight",
        "index",
        "is_up",
        "others",
        "ready_s",
        "todo",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.in_flight = 0
        self.is_up = True
        self.ready_s = 0.0
        self.asked: deque[tuple[float, int]] = deque()
        self.heard_s = 0.0
        self.heard_of = 0
        self.todo: deque[Chunk] = deque()
        self.first: deque[Progress] = deque()
        self.others: deque[Progress] = deque()
        self.chunks: dict[Chunk, None] = {}


class Request(NamedTuple):
    chunk: Chunk
    source: Source
    begin: int
    end: int
    asked_s: float
