"""One node's agent: the real `Replicator` and `Transfer`, over a simulated memory and network.

What `replication.manager`, `acquisition` and `link` do with files and sockets is modelled here, rule by rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from flashpoint.replication import limits
from flashpoint.replication.chunks import Want
from flashpoint.replication.membership import Membership
from flashpoint.replication.messages import Key, Reply, Request
from flashpoint.replication.replicator import (
    Acquire,
    Announce,
    Answer,
    Delete,
    Effect,
    GiveUp,
    Replicator,
    Say,
)
from flashpoint.replication.scrub_schedule import Held, Piece, ScrubSchedule
from flashpoint.replication.transfer import Credit, Transfer
from flashpoint.retention import Version
from flashpoint.simulate.memory import Content, name_of, rank_of

if TYPE_CHECKING:
    from flashpoint.simulate.world import World

TICK_S: Final = 0.5
LOOK_S: Final = 0.5
TIMEOUT_S: Final = 20.0
_QUEUED_MAX: Final = 64
SCRUB_BYTES_PER_S: Final = 64 << 10
SCRUB_REST_S: Final = 4.0
_MANIFEST: Final = -1  # in place of an object's rank
_CHUNK_BYTES: Final = 4096
_CHUNKS: Final = (0, 1)

Ended = Callable[[str], None]
"""Called with "" when all is there, or with the code of what went wrong."""


class Agent:
    """An agent, from its start to its death.

    Args:
        index: of the node.
        assigned: what the agent before it was told, if there was one.
    """

    def __init__(self, world: World, index: int, assigned: Membership | None) -> None:
        self.world, self.index = world, index
        self.memory = world.memories[index]
        self.replicator: Replicator | None = None
        self.is_alive = True
        self.session = object()  # what peers' connections are to; another one in each epoch
        self._links: dict[int, object] = {}  # to each peer: its session
        self._hellos: dict[int, float] = {}  # to those not connected: when to say it again
        self._silent: dict[int, float] = {}  # of whom nothing is heard: when that is a loss
        self._queued: dict[int, list[Request]] = {}
        self._acquisitions: list[_Acquisition] = []
        self._by_request: dict[int, _Acquisition] = {}
        self._numbers = itertools.count(1)
        self._credit = Credit()
        self._next_look_s = 0.0
        self._scrub = ScrubSchedule(SCRUB_BYTES_PER_S, rest_s=SCRUB_REST_S)
        self._next_scrub_s = 0.0
        if assigned is not None:
            self.configure(assigned)
        world.scheduler.after(world.rng.uniform(0, TICK_S), self._turn)

    # ---- life -----------------------------------------------------------------------------------

    def configure(self, membership: Membership) -> None:
        """Begin an epoch; as `ReplicationManager._configure`."""
        if self.replicator is not None and self.replicator.membership.epoch > membership.epoch:
            return
        if self.replicator is not None and self.replicator.membership == membership:
            return
        for acquisition in list(self._acquisitions):
            acquisition.end("closing")
        self.session = object()
        for state in (self._links, self._hellos, self._silent, self._queued):
            state.clear()
        self.replicator = Replicator(membership, self.index, keep=self.world.settings.keep)
        for peer in sorted(membership.neighbours(self.index)):
            self._greet(peer)
        self._next_look_s = 0.0

    def die(self) -> None:
        self.is_alive = False
        for peer in self.world.agents:
            if peer is not self and peer.is_alive:
                delay_s = limits.SILENCE_S if self.world.network.is_cut(self.index, peer.index) else 0.02
                self.world.scheduler.after(delay_s, peer.lose, self.index, self.session)

    def _turn(self) -> None:
        if not self.is_alive:
            return
        now_s = self.world.scheduler.now_s
        for acquisition in list(self._acquisitions):
            acquisition.tick(now_s)
        for peer in sorted(peer for peer, next_s in self._hellos.items() if now_s >= next_s):
            self._say_hello(peer)
        self._watch_links(now_s)
        if now_s >= self._next_look_s:
            self.look()
        elif self.replicator is not None:
            self._do(self.replicator.tick(now_s))
        if now_s >= self._next_scrub_s and self.replicator is not None:
            self._scrub_next(now_s)
        self.world.scheduler.after(TICK_S / 4 if self._acquisitions else TICK_S, self._turn)

    def look(self) -> None:
        now_s = self.world.scheduler.now_s
        self._next_look_s = now_s + LOOK_S
        if self.replicator is not None:
            membership = self.replicator.membership
            ranks = membership.members[self.index].ranks
            self._do(self.replicator.found(self.memory.local(ranks, membership.world_size), now_s))

    # ---- the trainer's orders ---------------------------------------------------------------------

    def completed(self, version: Version) -> None:
        self.look()
        if self.replicator is not None:
            self._do(self.replicator.completed(version, self.world.scheduler.now_s))

    def settled(self, version: Version) -> None:
        self.look()
        if self.replicator is not None:
            self._do(self.replicator.settled(version, self.world.scheduler.now_s))

    def retrieve(
        self, key: Key, sources: Mapping[int, Sequence[int]], manifest: Sequence[int], ended: Ended
    ) -> None:
        """Get ranks' objects, and the manifest if it is not here, each from its sources."""
        self._acquisitions.append(_Acquisition(self, key, sources, manifest, ended))
        self._acquisitions[-1].prepare()

    # ---- links ------------------------------------------------------------------------------------

    def _watch_links(self, now_s: float) -> None:
        """Heartbeats: what is cut off for long is lost."""
        for peer, session in list(self._links.items()):
            if not self.world.network.is_cut(peer, self.index):
                self._silent.pop(peer, None)
            elif now_s >= self._silent.setdefault(peer, now_s + limits.SILENCE_S):
                del self._silent[peer]
                self.lose(peer, session)

    def _greet(self, peer: int) -> None:
        if peer not in self._links and peer not in self._hellos:
            self._say_hello(peer)

    def _say_hello(self, peer: int) -> None:
        assert self.replicator is not None
        self._hellos[peer] = self.world.scheduler.now_s + limits.REPEAT_S
        there = self.world.agents[peer]
        self.world.network.send(self.index, peer, there._heard_hello, self.index, self.replicator.membership)

    def _heard_hello(self, peer: int, membership: Membership) -> None:
        if not self.is_alive:
            there = self.world.agents[self.index]  # another agent may listen there by now
            if there.is_alive:
                there._heard_hello(peer, membership)
            return
        mine = self.replicator.membership if self.replicator is not None else None
        if mine is not None and mine.epoch == membership.epoch:
            caller = self.world.agents[peer]
            self.world.network.send(self.index, peer, caller._welcomed, self.index, self.session)

    def _welcomed(self, peer: int, session: object) -> None:
        if not self.is_alive or self.replicator is None or peer not in self._hellos:
            return
        del self._hellos[peer]
        self._links[peer] = session
        self.replicator.opened(peer)
        for acquisition in self._acquisitions:
            acquisition.back(peer)
        for message in self._queued.pop(peer, []):
            self._send(peer, message)

    def lose(self, peer: int, session: object) -> None:
        """The connection to a peer is gone."""
        if not self.is_alive or self._links.get(peer) is not session or self.replicator is None:
            return
        del self._links[peer]
        self._hellos[peer] = self.world.scheduler.now_s + limits.RECONNECT_FIRST_S
        for acquisition in self._acquisitions:
            acquisition.lost(peer)
        self._do(self.replicator.lost(peer))

    def say(self, peer: int, message: Request) -> None:
        if peer in self._links:
            self._send(peer, message)
        else:
            queued = self._queued.setdefault(peer, [])
            if len(queued) < _QUEUED_MAX:
                queued.append(message)
            self._greet(peer)

    def _send(self, peer: int, message: Request) -> None:
        there, session = self.world.agents[peer], self._links[peer]
        self.world.network.send(self.index, peer, there._requested, self.index, self, session, message)

    def _requested(self, peer: int, caller: Agent, session: object, message: Request) -> None:
        if not self.is_alive or self.replicator is None:
            return
        if session is not self.session:
            self.world.network.send(self.index, peer, caller.lose, self.index, session)
            return
        self._do(self.replicator.requested(peer, message, self.world.scheduler.now_s))

    def _reply(self, peer: int, message: Reply) -> None:
        there = self.world.agents[peer]
        self.world.network.send(self.index, peer, there._replied, self.index, self.session, message)

    def _replied(self, peer: int, session: object, message: Reply) -> None:
        if self.is_alive and self.replicator is not None and self._links.get(peer) is session:
            self._do(self.replicator.replied(peer, message, self.world.scheduler.now_s))

    # ---- effects ----------------------------------------------------------------------------------

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Say):
                self.say(effect.node, effect.message)
            elif isinstance(effect, Answer):
                self._reply(effect.node, effect.message)
            elif isinstance(effect, Acquire):
                self._acquire(effect)
            elif isinstance(effect, GiveUp):
                self._give_up(effect.key)
            elif isinstance(effect, Announce):
                self.world.checker.announced(self.index, effect.key)
            elif isinstance(effect, Delete):
                found = self.memory.get(effect.key)
                for name in effect.objects if found is not None else ():
                    assert found is not None
                    found.objects.pop(rank_of(name), None)

    def _acquire(self, effect: Acquire) -> None:
        def ended(code: str) -> None:
            self.look()
            if self.is_alive and self.replicator is not None:
                error = (code, "") if code else None
                now_s = self.world.scheduler.now_s
                self._do(self.replicator.acquired(effect.key, effect.source, error, now_s))

        ranks = {rank_of(name): (effect.source,) for name in effect.objects}
        self.retrieve(effect.key, ranks, (effect.source,), ended)

    def _give_up(self, key: Key) -> None:
        found = self.memory.containers.get(key.step)
        if found is not None and found.manifest == key:
            self.world.checker.gives_up(self.index, key)
            del self.memory.containers[key.step]
        self._next_look_s = 0.0

    # ---- scrubbing --------------------------------------------------------------------------------

    def _scrub_next(self, now_s: float) -> None:
        """As `flashpoint.replication.scrub`, of one object after the other."""
        held = Held(2 * _CHUNK_BYTES, _CHUNK_BYTES)
        here = {key: found for key in self.memory.complete() if (found := self.memory.get(key))}
        self._scrub.found({key: {name_of(r): held for r in found.objects} for key, found in here.items()})
        piece = self._scrub.next(now_s, is_busy=bool(self._acquisitions))
        if not isinstance(piece, Piece):
            self._next_scrub_s = now_s + piece
            return
        content = here[piece.key].objects[rank_of(piece.name)]
        if self._is_as_sealed(content, piece.key, rank_of(piece.name)):
            self._scrub.verified(piece, now_s)
        else:
            self._next_scrub_s = float("inf")  # until it is mended, or is not
            self._mend(piece.key, rank_of(piece.name))

    def _is_as_sealed(self, content: Content, key: Key, rank: int) -> bool:
        return content == Content(key.digest, rank)

    def _mend(self, key: Key, rank: int) -> None:
        name = name_of(rank)
        assert self.replicator is not None

        def ended(code: str) -> None:
            now_s = self.world.scheduler.now_s
            self._next_scrub_s = now_s
            if not self.is_alive:
                return
            if not code:
                self._scrub.mended(key, name, now_s)
            else:
                self._scrub.failed(key, name, now_s)
                if code == "lost":
                    self._set_aside(key, rank)
            self.look()

        sources = self.replicator.sources_of(key, name) or ()
        self._acquisitions.append(_Repair(self, key, {rank: sources}, (), ended))
        self._acquisitions[-1].prepare()

    def _set_aside(self, key: Key, rank: int) -> None:
        found = self.memory.get(key)
        if found is not None and rank in found.objects:
            self.world.checker.sets_aside(self.index, key, found.objects[rank])
            del found.objects[rank]
            found.set_aside.add(rank)

    # ---- bulk -------------------------------------------------------------------------------------

    def fetch(self, source: int, number: int, key: Key, rank: int, begin: int, end: int) -> None:
        if source in self._links:
            there, session = self.world.agents[source], self._links[source]
            self.world.network.send(
                self.index, source, there._serve, self.index, self, session, (number, key, rank, begin, end)
            )
        else:
            self._greet(source)

    def _serve(
        self, peer: int, caller: Agent, session: object, asked: tuple[int, Key, int, int, int]
    ) -> None:
        if not self.is_alive:
            return
        if session is not self.session:
            self.world.network.send(self.index, peer, caller.lose, self.index, session)
            return
        number, key, rank, begin, end = asked
        found = self.memory.get(key)
        content = None
        if found is not None:
            content = Content(key.digest, _MANIFEST) if rank == _MANIFEST else found.objects.get(rank)
        self.world.network.send(self.index, peer, caller._arrived, number, begin, end, content)

    def _arrived(self, number: int, begin: int, end: int, content: Content | None) -> None:
        acquisition = self._by_request.pop(number, None) if self.is_alive else None
        if acquisition is not None:
            acquisition.arrived(number, begin, end, content)

    def ended(self, acquisition: _Acquisition) -> None:
        self._acquisitions.remove(acquisition)
        for number in [n for n, owner in self._by_request.items() if owner is acquisition]:
            del self._by_request[number]

    @property
    def is_idle(self) -> bool:
        return not self._acquisitions and (self.replicator is None or not self.replicator.is_busy)


class _Acquisition:
    """Objects of one version on their way into a node's memory; as `flashpoint.replication.acquisition`."""

    def __init__(
        self,
        agent: Agent,
        key: Key,
        sources: Mapping[int, Sequence[int]],
        manifest_sources: Sequence[int],
        ended: Ended,
    ) -> None:
        self._agent, self._key, self._sources = agent, key, dict(sources)
        self._manifest_sources, self._ended = tuple(manifest_sources), ended
        self._transfer: Transfer | None = None
        self._ranks: list[int] = []
        self._landed: dict[tuple[int, int], Content] = {}
        self._is_over = False

    def prepare(self) -> None:
        memory, key = self._agent.memory, self._key
        found = memory.containers.get(key.step)
        if memory.is_full:
            self.end("no-space")
        elif found is not None and found.markers:
            self.end("busy")
        elif found is not None and found.manifest == key:
            self._begin([rank for rank in self._sources if rank not in found.objects])
        elif found is not None and found.manifest is not None and found.manifest.epoch >= key.epoch:
            self.end("stale-epoch")
        elif not self._manifest_sources:
            self.end("no-version")
        else:
            if found is not None and found.manifest is not None:
                self._agent.world.checker.replaces(self._agent.index, found.manifest, key)
                del memory.containers[key.step]
            self._begin([_MANIFEST])

    def _begin(self, ranks: Sequence[int]) -> None:
        agent = self._agent
        if not ranks:
            self.end("")
            return
        self._ranks, self._landed = list(ranks), {}
        sources = {
            rank: self._manifest_sources if rank == _MANIFEST else self._sources[rank] for rank in ranks
        }
        self._transfer = Transfer(
            [
                Want(name_of(max(r, 0)), 2 * _CHUNK_BYTES, _CHUNK_BYTES, _CHUNKS, tuple(sources[r]))
                for r in ranks
            ],
            credit=agent._credit,
            numbers=agent._numbers,
            timeout_s=TIMEOUT_S,
        )
        for source in sorted({source for of in sources.values() for source in of}):
            if source not in agent._links:
                self._transfer.lost(source)
                agent._greet(source)
        self._ask()

    def _ask(self) -> None:
        if self._transfer is None or self._is_over:
            return
        for ask in self._transfer.requests(self._agent.world.scheduler.now_s):
            self._agent._by_request[ask.request] = self
            rank = self._ranks[ask.want]
            self._agent.fetch(ask.source, ask.request, self._key, rank, ask.begin, ask.end)

    def arrived(self, number: int, begin: int, end: int, content: Content | None) -> None:
        transfer = self._transfer
        if transfer is None or self._is_over:
            return
        if content is None:
            transfer.refused(number, "no-version")
        elif (landing := transfer.arrived(number, begin, end)) is not None:
            if self._agent.world.network.spoils():
                content = content._replace(good=False)
            self._landed[landing.want, landing.begin // _CHUNK_BYTES] = content
            chunk = transfer.landed(number)
            if chunk is not None:
                transfer.verified(*chunk, ok=self._is_good(*chunk))
        self._progress()

    def _is_good(self, want: int, chunk: int) -> bool:
        return self._landed[want, chunk] == Content(self._key.digest, self._ranks[want])

    def _progress(self) -> None:
        transfer, memory = self._transfer, self._agent.memory
        if transfer is None:
            return
        if transfer.failed is not None:
            self.end("lost" if transfer.is_lost else "no-source")
            return
        found = memory.containers.get(self._key.step)
        for want in transfer.finished():
            content = Content(
                self._key.digest, self._ranks[want], all(self._landed[want, c].good for c in _CHUNKS)
            )
            if self._ranks[want] == _MANIFEST:
                if found is not None and found.markers:
                    self.end("busy")
                    return
                memory.container(self._key.step).manifest = self._key
            elif found is None:
                self.end("no-version")  # its folder was removed meanwhile
                return
            else:
                self._agent.world.checker.keeps(self._agent.index, self._key, content)
                found.objects[self._ranks[want]] = content
                found.set_aside.discard(self._ranks[want])
        if transfer.done:
            if self._ranks == [_MANIFEST]:
                self._transfer = None
                self.prepare()
            else:
                self.end("")
            return
        self._ask()

    def tick(self, now_s: float) -> None:
        if self._transfer is not None:
            self._transfer.expire(now_s)
            self._progress()

    def lost(self, peer: int) -> None:
        if self._transfer is not None:
            self._transfer.lost(peer)

    def back(self, peer: int) -> None:
        if self._transfer is not None:
            self._transfer.back(peer)
            self._ask()

    def end(self, code: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._transfer is not None:
            self._transfer.close()
        self._agent.ended(self)
        self._ended(code)


class _Repair(_Acquisition):
    """Of an object that lies here, and is corrupt; as `flashpoint.replication.repair`."""

    def prepare(self) -> None:
        found = self._agent.memory.get(self._key)
        if self._agent.memory.is_full:
            self.end("no-space")
        elif found is None:
            self.end("no-version")
        else:
            self._begin(list(self._sources))

    def _progress(self) -> None:
        if self._agent.memory.get(self._key) is None:
            self.end("no-version")  # given up, or being saved again
        else:
            super()._progress()
