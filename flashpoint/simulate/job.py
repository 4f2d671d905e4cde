"""The job beside the agents: ranks that save, crash, start again and recover; one rank on each node.

The commit is that of `flashpoint.commit`, line by line, with every rank's part at a time of its own; recovery is
that of `loader` and `peers`, with the real `retrieval` and `retention`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from flashpoint.manifest import ObjectRecord
from flashpoint.replication.membership import Member, Membership
from flashpoint.replication.messages import Key
from flashpoint.retention import NOTHING, Standing, Version, newest_first
from flashpoint.retrieval import Need, missing_objects, plan_fetches
from flashpoint.simulate.memory import Content, name_of, rank_of
from flashpoint.simulate.scheduler import Gate, Process

if TYPE_CHECKING:
    from flashpoint.simulate.world import World

JOB: Final = "0" * 32
RECOVERY_S: Final = 60.0
_REVIVAL_S: Final = 1.0
_NBYTES: Final = 8192
_REPAIRS_MAX: Final = 3


class Job:
    """One start of the job, from its first process to its crash."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_alive = True
        self.is_done = False  # it has saved for the last time
        self._settled = NOTHING
        self._completed: Version | None = None
        nodes = world.settings.nodes
        for memory in world.memories:
            memory.collect_garbage()
        self.epoch = 1 + max(
            max([memory.epoch, *(key.epoch for key in memory.complete())]) for memory in world.memories
        )
        for memory in world.memories:
            memory.epoch = self.epoch
        members = tuple(Member(index=i, node=world.memories[i].identity, ranks=(i,)) for i in range(nodes))
        self.membership = Membership(job=JOB, epoch=self.epoch, copies=world.settings.copies, members=members)
        world.scheduler.spawn(self._life(), self._lives)

    def crash(self) -> None:
        self.is_alive = False

    def _lives(self) -> bool:
        return self.is_alive

    def _pause(self, most_s: float = 0.02) -> float:
        return self.world.rng.uniform(0, most_s)

    # ---- its life ---------------------------------------------------------------------------------

    def _life(self) -> Process:
        world = self.world
        for index in range(world.settings.nodes):
            yield self._pause()
            world.start_agent(index)
            world.agents[index].configure(self.membership)
        world.scheduler.spawn(self._revive(), self._lives)
        yield from self._recover()
        step = max(self._settled.step, 0)
        last_saves = world.settings.keep
        while last_saves:
            yield self._pause(world.settings.interval_s)
            step += 1
            last_saves -= world.is_quiet
            yield from self._save(step)
            while world.waits and not (self._is_replicated(step) or self._is_withdrawn(step)):
                yield 0.1
        self.is_done = True

    def _is_replicated(self, step: int) -> bool:
        """Whether every agent says so, as `SaveHandle.wait("replicated")` has it on every rank."""
        return all(
            agent.is_alive
            and agent.replicator is not None
            and any(
                agent.replicator.standing(key) is Standing.REPLICATED
                for key in agent.memory.complete()
                if (key.epoch, key.step) == (self.epoch, step)
            )
            for agent in self.world.agents
        )

    def _is_withdrawn(self, step: int) -> bool:
        """Whether an agent has told its rank that the wait for this version is in vain."""
        return any(
            (found := memory.containers.get(step)) is not None and found.set_aside
            for memory in self.world.memories
        )

    def _revive(self) -> Process:
        """As `NodeReplication.revive`, on every node."""
        while True:
            yield self._pause(2 * _REVIVAL_S)
            for index, agent in enumerate(self.world.agents):
                if agent.is_alive:
                    continue
                self.world.start_agent(index)
                yield self._pause(0.2)
                agent = self.world.agents[index]
                if agent.is_alive:
                    agent.configure(self.membership)
                    if self._settled != NOTHING:
                        agent.settled(self._settled)
                    if self._completed is not None:
                        agent.completed(self._completed)

    # ---- saving -----------------------------------------------------------------------------------

    def _save(self, step: int) -> Process:
        world, nodes = self.world, self.world.settings.nodes
        key = Key(self.epoch, step, f"{next(world.digests):032x}")
        votes, written, cleared, retired = (Gate(nodes) for _ in range(4))

        def part(rank: int) -> Process:
            memory = world.memories[rank]
            yield self._pause()
            memory.container(step).markers.add(rank)
            container = memory.container(step)
            container.manifest = None
            container.objects.pop(rank, None)
            yield self._pause()
            container.objects[rank] = Content(key.digest, rank)
            yield self._pause()
            if votes.left == 1:
                world.checker.commits(key)  # the leader has heard all votes
            yield votes.come()
            yield self._pause()
            container.objects = {rank: container.objects[rank]}  # no strays
            container.set_aside.clear()
            container.manifest = key
            yield self._pause()
            yield written.come()
            yield self._pause()
            container.markers.discard(rank)
            yield cleared.come()
            yield self._pause()
            if retired.left == nodes:
                world.checker.retires(key)
            retired.come()
            self._completed = Version(key.epoch, key.step)
            if world.agents[rank].is_alive:
                world.agents[rank].completed(self._completed)

        for rank in range(nodes):
            world.scheduler.spawn(part(rank), self._lives)
        yield retired

    # ---- recovering -------------------------------------------------------------------------------

    def _recover(self) -> Process:
        """Again, as long as what kept a version from being loaded may pass."""
        while True:
            failures: set[str] = set()
            yield from self._try_to_recover(failures)
            if not failures:
                return
            yield 1.0

    def _try_to_recover(self, passing: set[str]) -> Process:
        """Newest to oldest, the first version that every rank can load."""
        world = self.world
        newest = world.checker.newest_whole()
        candidates: set[Version] = set()
        for memory in world.memories:
            candidates |= memory.versions()
        corrupt: list[int] = []
        for version in newest_first(candidates):
            loaded: dict[int, Content] = {}
            failures: list[str] = []
            done = Gate(world.settings.nodes)
            key, holders = self._holdings(version.step)
            for rank in range(world.settings.nodes):
                work = self._load(rank, key, holders, loaded, failures, done)
                world.scheduler.spawn(work, self._lives)
            yield done
            if not failures and key is not None:
                for step in corrupt:
                    for memory in world.memories:
                        memory.containers.pop(step, None)
                # What was stepped over for a reason that may pass was told; else nothing newer may be there.
                world.checker.loads(Version(key.epoch, key.step), loaded, None if passing else newest)
                passing.clear()
                self._settled = Version(key.epoch, key.step)
                for agent in world.agents:
                    if agent.is_alive:
                        agent.settled(self._settled)
                return
            if "corrupt" in failures:
                corrupt.append(version.step)
            passing.update(set(failures) - {"corrupt", "missing"})
        if passing:
            return
        world.checker.loads(None, {}, newest)

    def _holdings(self, step: int) -> tuple[Key | None, dict[int, set[str]]]:
        """As `Peers.exchange_holdings`."""
        told = {
            index: found
            for index, memory in enumerate(self.world.memories)
            if (found := memory.containers.get(step)) is not None and found.is_complete
        }
        if not told:
            return None, {}
        key = max(found.manifest for found in told.values() if found.manifest is not None)
        return key, {
            index: set(map(name_of, found.objects)) for index, found in told.items() if found.manifest == key
        }

    def _load(
        self,
        rank: int,
        key: Key | None,
        holders: dict[int, set[str]],
        loaded: dict[int, Content],
        failures: list[str],
        done: Gate,
    ) -> Process:
        """One rank's part: get what is not here, verify, repair; as `Peers.fetch_objects`."""
        world, nodes = self.world, self.world.settings.nodes
        memory = world.memories[rank]
        records = [ObjectRecord(name_of(r), _NBYTES, "", 4096, b"") for r in range(nodes)]
        manifest: Any = SimpleNamespace(objects=records)
        if key is None or missing_objects(manifest, holders):
            failures.append("missing")
            done.come()
            return
        holders = {index: set(held) for index, held in holders.items()}
        for _ in range(_REPAIRS_MAX + 1):
            need = Need(records[rank], 0, _NBYTES)
            fetches = plan_fetches([need], holders, node=rank, domains={})
            if fetches or memory.get(key) is None:
                ends: list[str] = []
                sources = {rank_of(fetch.record.name): fetch.sources for fetch in fetches}
                manifests = [index for index in holders if index != rank]
                deadline_s = world.scheduler.now_s + RECOVERY_S
                while True:
                    if world.agents[rank].is_alive:
                        ends.clear()
                        world.agents[rank].retrieve(key, sources, manifests, ends.append)
                        asked = world.agents[rank]
                        while not ends and asked.is_alive and world.scheduler.now_s < deadline_s:
                            yield 0.05
                    if ends or world.scheduler.now_s >= deadline_s:
                        break
                    yield 0.05  # an agent that died is started again
                if ends != [""]:
                    failures.append(ends[0] if ends else "deadline")
                    done.come()
                    return
            found = memory.get(key)
            content = found.objects.get(rank) if found is not None else None
            if content is not None and _is_right(content, key, rank):
                loaded[rank] = content
                done.come()
                return
            others = [i for i, held in holders.items() if i != rank and name_of(rank) in held]
            if not others:
                break
            if found is not None:
                found.objects.pop(rank, None)
            holders.setdefault(rank, set()).discard(name_of(rank))
        failures.append("corrupt")
        done.come()


def _is_right(content: Content, key: Key, rank: int) -> bool:
    """What a checksum says."""
    return content == Content(key.digest, rank)
