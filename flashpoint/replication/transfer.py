"""Which bytes of one version to ask of whom: all decisions of a transfer, and no I/O. Events in, requests out.

Whoever sends keeps no account of it, so all of a transfer is what has been asked for and is not there yet:

    credit       bytes asked of one peer and not yet there, over all transfers
    resume       ask only for chunks that are not verified
    lost         ask again; what comes twice, late or in another order is known by its request's number

A chunk is what is verified and what one source gives as a whole, so that a bad one names its source; a frame
is what is asked for at once: a chunk, or a piece of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from flashpoint.errors import ReplicationError
from flashpoint.replication import limits
from flashpoint.replication.chunks import Chunk, ChunkState, Progress, Request, Source, Want
from flashpoint.replication.messages import AGAIN

_CHUNK_BYTES_MIN: Final = 4096
_WRONG: Final = "wrong checksum"
_LACKS: Final = frozenset({"corrupt", "no-object", "no-version"})  # codes of a source that will never give it


class Ask(NamedTuple):
    """Ask ``source`` for bytes ``begin`` to ``end`` of a want, by its index."""

    request: int
    source: int
    want: int
    begin: int
    end: int


class Landing(NamedTuple):
    """Where the bytes of an answer belong."""

    want: int
    begin: int
    end: int


class Credit:
    """What may be on its way from each peer, in bytes and in frames: one for all transfers of a node.

    Frames count too, since a peer drops what goes beyond `limits.FRAMES_QUEUED_MAX`, however small.
    """

    def __init__(self, nbytes: int = limits.CREDIT_BYTES, frames: int = limits.FRAMES_QUEUED_MAX) -> None:
        self.nbytes = nbytes
        self.frames = frames
        self._in_flight: dict[int, tuple[int, int]] = {}

    def in_flight(self, source: int) -> int:
        """Bytes asked of a peer and not yet there."""
        return self._in_flight.get(source, (0, 0))[0]

    def allows(self, source: int, nbytes: int) -> bool:
        used, frames = self._in_flight.get(source, (0, 0))
        return used + nbytes <= self.nbytes and frames < self.frames

    def is_low(self, source: int) -> bool:
        """Whether a quarter of it has come back: time to ask for more, and for several frames at once."""
        used, frames = self._in_flight.get(source, (0, 0))
        return used <= self.nbytes * 3 // 4 and frames <= self.frames * 3 // 4

    def take(self, source: int, nbytes: int) -> None:
        used, frames = self._in_flight.get(source, (0, 0))
        self._in_flight[source] = (used + nbytes, frames + 1)

    def give_back(self, source: int, nbytes: int) -> None:
        used, frames = self._in_flight[source]
        self._in_flight[source] = (used - nbytes, frames - 1)


class Transfer:
    """The wants of one version, from several sources.

    An object's chunks are asked of its best source, in order: whoever placed the copies has spread the load
    already, and a source serves what lies in a row fastest. Another source of the object helps out where it
    has credit to spare and nothing of its own left to be asked for, while the best one has none, or is lost,
    or asked to be left alone: the last objects of a slow node would otherwise be waited for by idle ones. It
    takes whole chunks, and what is with a source already stays there, so this costs no byte twice.

    The time is that of the last `requests` or `expire`, which are to be called every moment.

    Args:
        wants: what to get.
        credit: shared by all transfers of this node.
        numbers: of requests, unique for the node.
        timeout_s: without a chunk verified, after which the transfer has failed.
        version: what to call it in errors.

    Attributes:
        failed: why there is no hope any more; nothing is asked for after that.
        is_lost: whether it failed because every source said that it lacks a chunk, or gave wrong bytes for it.
        nbytes_received: of answers to requests, also those that turned out bad.
        bad_chunks: how often each source gave a wrong chunk.

    Raises:
        ReplicationError: a want that no object can have.
    """

    def __init__(
        self,
        wants: Sequence[Want],
        *,
        credit: Credit,
        numbers: Iterator[int],
        timeout_s: float,
        version: str = "this version",
    ) -> None:
        self.failed: ReplicationError | None = None
        self.is_lost = False
        self.nbytes_received = 0
        self.bad_chunks: dict[int, int] = {}
        self._credit = credit
        self._numbers = numbers
        self._timeout_s = timeout_s
        self._version = version
        self._now_s = 0.0
        self._progress_s: float | None = None  # when the last chunk was verified
        self._objects = [Progress(number, want) for number, want in enumerate(wants)]
        self._unfinished = 0
        self._finished: list[int] = []
        self._sources: dict[int, Source] = {}
        self._open: dict[Source, None] = {}  # those that may have something to be asked for, and credit
        self._requests: dict[int, Request] = {}
        self._writing: dict[int, Request] = {}
        self._stranded: list[Chunk] = []  # none of their sources is up
        self._closed = False
        for obj in self._objects:
            self._add(obj)

    def _add(self, obj: Progress) -> None:
        want = obj.want
        count = -(-want.nbytes // max(want.chunk_bytes, 1))
        if want.chunk_bytes < _CHUNK_BYTES_MIN or want.chunk_bytes & (want.chunk_bytes - 1):
            raise ReplicationError(f"{want.name}: chunks of {want.chunk_bytes} bytes")
        if len(set(want.chunks)) < len(want.chunks) or not all(0 <= i < count for i in want.chunks):
            raise ReplicationError(f"{want.name} has {count} chunks, others are wanted, or one twice")
        if obj.is_begun:
            self._finished.append(obj.number)
            return
        self._unfinished += 1
        for place, index in enumerate(dict.fromkeys(want.sources)):
            source = self._sources.setdefault(index, Source(index))
            self._open[source] = None
            (source.others if place else source.first).append(obj)
        if not want.sources and self.failed is None:
            self.is_lost = True
            self._fail(f"{want.name}, chunk {want.chunks[0]}: no node is known to hold it")

    # ---- what to ask for --------------------------------------------------------------------------

    def requests(self, now_s: float) -> list[Ask]:
        """What to ask for now: as much as the credit allows."""
        self._tick(now_s)
        asks: list[Ask] = []
        if self.failed is None and not self._closed:
            ready = [s for s in self._open if s.is_up and s.ready_s <= now_s]
            for source in ready:
                if source.todo or source.first:
                    self._ask(source, source.first, asks)
            for source in ready:  # with what credit is left now, it may help those who have none
                if source.others and not source.todo and not source.first:
                    self._ask(source, source.others, asks)
            for source in ready:
                # Asked for all it has, or out of credit. (Credit that others hold comes back unseen.)
                if source.in_flight or not (source.todo or source.first or source.others):
                    del self._open[source]
        return asks

    def _ask(self, source: Source, objects: deque[Progress], asks: list[Ask]) -> None:
        index, credit = source.index, self._credit
        while True:
            while source.todo and (source.todo[0].source is not source or not source.todo[0].left):
                source.todo.popleft()
            if not source.todo:
                while objects and (objects[0].is_begun or index in objects[0].used_up):
                    objects.popleft()
                if not objects or not credit.allows(index, objects[0].next_nbytes):
                    return
                self._give(objects[0].begin_next(), source)
            chunk = source.todo[0]
            begin = chunk.left[0]
            end = min(begin + limits.FRAME_BYTES, chunk.end)
            if not credit.allows(index, end - begin):
                return
            credit.take(index, end - begin)
            source.in_flight += 1
            chunk.left.popleft()
            number = next(self._numbers)
            chunk.pending.add(number)
            self._requests[number] = Request(chunk, source, begin, end, self._now_s)
            source.asked.append((self._now_s, number))
            asks.append(Ask(number, index, chunk.obj.number, begin, end))

    # ---- answers ----------------------------------------------------------------------------------

    def arrived(self, request: int, begin: int, end: int) -> Landing | None:
        """Where to write the bytes of an answer; then call `landed`, or `refused` if they are none.

        None for what was not asked for in this way, came before, or comes too late: it is to be dropped.
        """
        asked = self._requests.get(request)
        if asked is None or (asked.begin, asked.end) != (begin, end):
            return None
        self._settle(request, asked)
        self._hear(request, asked.source)
        self._writing[request] = asked
        asked.chunk.writing += 1
        self.nbytes_received += end - begin
        return Landing(asked.chunk.obj.number, begin, end)

    def landed(self, request: int) -> tuple[int, int] | None:
        """The bytes are at their place. Returns the (want, chunk) to verify, if it is all here now."""
        asked = self._writing.pop(request, None)
        if asked is None:
            return None
        chunk = asked.chunk
        chunk.writing -= 1
        chunk.unlanded -= 1
        if chunk.source is not asked.source:
            self._go_on(chunk)  # it was taken from this source while the bytes were written
        elif not chunk.unlanded and chunk.move("landed"):
            asked.source.chunks.pop(chunk, None)
            return chunk.obj.number, chunk.index
        return None

    def verified(self, want: int, chunk: int, ok: bool) -> None:
        """What the checksum said of a chunk that `landed` named. A bad one is asked of the next source."""
        found = self._objects[want].live.get(chunk)
        if found is None or not found.move("good" if ok else "bad"):
            return
        if ok:
            obj = found.obj
            del obj.live[chunk]
            obj.unverified -= 1
            self._progress_s = self._now_s
            if not obj.unverified:
                self._unfinished -= 1
                self._finished.append(want)
            return
        assert found.source is not None
        index = found.source.index
        self.bad_chunks[index] = self.bad_chunks.get(index, 0) + 1
        self._count_failure(found, index, _WRONG)
        found.source = None
        self._place(found)

    def refused(self, request: int, code: str) -> None:
        """A request was refused by its source; or its answer, once it has `arrived`, by who was to write it.

        Who writes in other threads must drop what a source says of a request after its answer.
        """
        asked = self._writing.pop(request, None)
        if asked is not None:
            asked.chunk.writing -= 1
            if asked.chunk.source is asked.source:
                self._try_again(asked, code)
            else:
                self._go_on(asked.chunk)
            return
        asked = self._requests.get(request)
        if asked is None:
            return
        self._settle(request, asked)
        self._hear(request, asked.source)
        asked.chunk.left.append(asked.begin)
        if code in AGAIN:
            asked.source.ready_s = self._now_s + limits.REPEAT_S
            self._take(asked.chunk)
            return
        asked.chunk.obj.used_up[asked.source.index] = code
        for chunk in [chunk for chunk in asked.source.chunks if chunk.obj is asked.chunk.obj]:
            self._take(chunk)

    # ---- what goes wrong --------------------------------------------------------------------------

    def lost(self, source: int) -> None:
        """The connection to a node is gone, and all that was asked of it: others are asked, until it is `back`."""
        found = self._sources.get(source)
        if found is None:
            return
        found.is_up = False
        found.ready_s = 0.0
        for chunk in list(found.chunks):
            if chunk.pending or chunk.left:
                self._cancel(chunk)
                self._take(chunk)
        self._open.pop(found, None)

    def back(self, source: int) -> None:
        """A node that was lost can be asked again."""
        found = self._sources.get(source)
        if found is None or found.is_up:
            return
        found.is_up = True
        self._open[found] = None
        stranded, self._stranded = self._stranded, []
        for chunk in stranded:
            self._place(chunk)

    def expire(self, now_s: float) -> None:
        """Ask again for what has not been answered in time, and give up where nothing has come for long."""
        self._tick(now_s)
        for source in list(self._sources.values()):
            self._expire_at(source, now_s)
        assert self._progress_s is not None
        is_going_on = self._unfinished and self.failed is None and not self._closed
        if is_going_on and now_s - self._progress_s >= self._timeout_s:
            self._fail_late()

    def _expire_at(self, source: Source, now_s: float) -> None:
        # A source answers in turn. Over a slow line the last of what is asked comes late, but it comes: what
        # has expired is what the source has passed over, or all, if it has been silent for as long.
        is_silent = now_s - source.heard_s >= limits.REQUEST_TIMEOUT_S
        while source.asked and now_s - source.asked[0][0] >= limits.REQUEST_TIMEOUT_S:
            request = source.asked[0][1]
            asked = self._requests.get(request)
            if asked is not None and not is_silent and request > source.heard_of:
                return
            source.asked.popleft()
            if asked is not None:
                self._settle(request, asked)
                self._try_again(asked, "no answer")

    # ---- how it stands ----------------------------------------------------------------------------

    def finished(self) -> list[int]:
        """Wants that are complete, verified, since the last call."""
        finished, self._finished = self._finished, []
        return finished

    @property
    def done(self) -> bool:
        """Whether all wants are complete."""
        return not self._unfinished

    def __contains__(self, request: int) -> bool:
        """Whether an answer to this request is still waited for."""
        return request in self._requests

    def close(self) -> None:
        """Ask for nothing more, and give all credit back. Answers that still come are dropped."""
        self._closed = True
        for request, asked in list(self._requests.items()):
            self._settle(request, asked)

    # ---- chunks -----------------------------------------------------------------------------------

    def _tick(self, now_s: float) -> None:
        self._now_s = now_s
        if self._progress_s is None:
            self._progress_s = now_s

    def _settle(self, request: int, asked: Request) -> None:
        """A request is answered, or will not be waited for."""
        del self._requests[request]
        asked.chunk.pending.discard(request)
        asked.source.in_flight -= 1
        self._open[asked.source] = None
        self._credit.give_back(asked.source.index, asked.end - asked.begin)

    def _hear(self, request: int, source: Source) -> None:
        source.heard_s = self._now_s
        source.heard_of = max(source.heard_of, request)

    def _cancel(self, chunk: Chunk) -> None:
        for request in sorted(chunk.pending):
            asked = self._requests[request]
            self._settle(request, asked)
            chunk.left.append(asked.begin)

    def _try_again(self, asked: Request, reason: str) -> None:
        """A frame did not come, or not whole."""
        chunk = asked.chunk
        chunk.left.append(asked.begin)
        if asked.asked_s >= chunk.failed_s:  # or else it belongs to an attempt that has been counted
            self._count_failure(chunk, asked.source.index, reason)
        self._take(chunk)

    def _count_failure(self, chunk: Chunk, source: int, reason: str) -> None:
        chunk.failures[source] = chunk.failures.get(source, 0) + 1
        chunk.reasons[source] = reason
        chunk.failed_s = self._now_s

    def _take(self, chunk: Chunk) -> None:
        """Take a chunk from its source, and give it to the best one, which may be the same."""
        if chunk.move("taken"):
            self._place(chunk)

    def _place(self, chunk: Chunk) -> None:
        """Give a chunk that is missing to the best source there is now."""
        if self.failed is not None or self._closed:
            return
        sources = self._sources_of(chunk)
        if not sources:
            used_up = chunk.obj.used_up
            self.is_lost = all(
                used_up[i] in _LACKS if i in used_up else chunk.reasons[i] == _WRONG
                for i in chunk.obj.want.sources
            )
            self._fail(self._told_of(chunk))
            return
        up = [source for source in sources if source.is_up]
        if not up:
            self._stranded.append(chunk)
            return
        best = min(
            up,
            key=lambda s: (s.ready_s > self._now_s, chunk.failures.get(s.index, 0), s is not chunk.source),
        )
        if best is not chunk.source:
            self._cancel(chunk)
            if chunk.source is not None:
                chunk.source.chunks.pop(chunk, None)
                chunk.source = None
            if chunk.writing:
                return  # or else what is written now could overwrite what the new source gives
            chunk.begin_anew()
        self._give(chunk, best)

    def _go_on(self, chunk: Chunk) -> None:
        """Go on with a chunk that changes its source, when the last bytes of the old one are written."""
        if chunk.source is None and not chunk.writing and chunk.state is ChunkState.MISSING:
            self._place(chunk)

    def _give(self, chunk: Chunk, source: Source) -> None:
        chunk.move("given")
        chunk.source = source
        source.chunks[chunk] = None
        source.todo.append(chunk)
        self._open[source] = None

    def _sources_of(self, chunk: Chunk) -> list[Source]:
        """Who may still be asked for a chunk, best first."""
        return [
            self._sources[index]
            for index in dict.fromkeys(chunk.obj.want.sources)
            if index not in chunk.obj.used_up and chunk.failures.get(index, 0) < limits.ATTEMPTS_MAX
        ]

    # ---- giving up --------------------------------------------------------------------------------

    def _fail(self, reason: str) -> None:
        self.failed = ReplicationError(f"{self._version}: {reason}")
        self.close()

    def _fail_late(self) -> None:
        obj = next(obj for obj in self._objects if obj.unverified)
        chunk = next(iter(obj.live.values()), None) or Chunk(obj, obj.want.chunks[obj.begun])
        self._fail(
            f"nothing came for {self._timeout_s:g} s, {self._unfinished} of {len(self._objects)} objects are "
            f"not whole, the first is {self._told_of(chunk)}"
        )

    def _told_of(self, chunk: Chunk) -> str:
        """Object, chunk, and what became of each source."""
        told = []
        for index in dict.fromkeys(chunk.obj.want.sources):
            failures = chunk.failures.get(index, 0)
            if index in chunk.obj.used_up:
                what = chunk.obj.used_up[index]
            elif failures:
                what = f"{failures} failed attempts, last: {chunk.reasons[index]}"
            elif not self._sources[index].is_up:
                what = "not connected"
            elif self._sources[index].ready_s > self._now_s:
                what = "busy"
            else:
                what = "no answer yet"
            told.append(f"node {index}: {what}")
        return f"{chunk.obj.want.name}, chunk {chunk.index} ({'; '.join(told)})"
