"""`ReplicationManager`: one node's part in replication, in one thread. It carries out what others decide.

`Replicator` says what to offer, get and give up; `Transfer` says which bytes to ask of whom; `Transport`
carries them. Here they meet the files, the clock and the trainer's orders. What takes long (allocating
buffers, reading manifests) goes to one worker thread, so that the loop always answers.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import flashpoint
from flashpoint import trace
from flashpoint.config import FlashpointConfig
from flashpoint.errors import FlashpointError, ProtocolError, reason_of
from flashpoint.manifest import MANIFEST_NAME
from flashpoint.objects import CheckpointObjectManager
from flashpoint.replication import limits, orders
from flashpoint.replication.acquisition import Acquisition
from flashpoint.replication.agent_folder import AgentFolder, Assignment
from flashpoint.replication.copy_buffers import CopyBuffers
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
from flashpoint.replication.inventory import Inventory, Item, local_of
from flashpoint.replication.keys import JobKeys, read_keys, write_keys
from flashpoint.replication.messages import Data, Fetch, Key, Refused, Span
from flashpoint.replication.metrics import Standings, start_metrics
from flashpoint.replication.repair import Repair
from flashpoint.replication.replicator import (
    Acquire,
    Announce,
    Answer,
    Delete,
    Effect,
    GiveUp,
    Note,
    Replicator,
    Say,
)
from flashpoint.replication.scrub import Mending, Scrubber
from flashpoint.replication.serving import Served
from flashpoint.replication.transfer import Credit
from flashpoint.replication.transport import Transport
from flashpoint.retention import Standing, Version
from flashpoint.storage import claim
from flashpoint.storage.drainer import Drainer
from flashpoint.telemetry import count, logger

LOOK_S: Final = 0.5  # between two looks at the job root, when nobody tells of a new version
TICK_S: Final = 0.1
TICK_BUSY_S: Final = 0.02
_REPAIR_S: Final = 3600.0
_LOGGED_MAX: Final = 1_024  # things that were said once and are not said again


class ReplicationManager:
    """Replicates the complete versions of one job root, serves its objects to peers, gets those it needs.

    Args:
        job_root: of this node.
        config: of the job; ``keep`` and ``encrypt`` come with the order to configure.
        host, port, bulk_port: where to listen; 0 for any port.
    """

    def __init__(
        self, job_root: str, *, config: FlashpointConfig, host: str = "", port: int = 0, bulk_port: int = 0
    ) -> None:
        self.config = config
        self.released = False
        self.objects = CheckpointObjectManager(job_root, rank=None, config=config)
        self.job_root = self.objects.job_root
        self.folder = AgentFolder(self.job_root)
        self._host = host or "127.0.0.1"
        self._inventory = Inventory(self.objects)
        self._items: dict[Key, Item] = {}
        self._replicator: Replicator | None = None
        self._assignment: Assignment | None = None  # that the replicator works by
        self._drainer: Drainer | None = None  # in a job with long-term storage
        self._metrics = (
            start_metrics(self.job_root, host=config.metrics_host, port=config.metrics_port)
            if config.metrics_port
            else None
        )
        self._scrubber: Scrubber | None = None
        self._acquisitions: list[Acquisition] = []
        self._by_request: dict[int, Acquisition] = {}
        self._numbers = itertools.count(1)
        self._credit = Credit()
        self._served = Served(self.objects, self._inventory, self._look)
        self._waiters: dict[Version, list[tuple[Any, int]]] = {}
        self._buffers = CopyBuffers(self.objects.pool, prefault=config.prefault)
        self._peers: dict[int, str] = {}
        self._logged: OrderedDict[tuple[Any, ...], None] = OrderedDict()
        self._connections: dict[int, Any] = {}  # on which each node last asked for something
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="flashpoint-agent")
        self._results: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._closed = False
        self._is_busy = True
        self._linger_until_s = 0.0
        self._ends_now = False
        self._last_asked_s = time.monotonic()
        self._next_look_s = 0.0
        self._clean_up()
        self._keys = read_keys(self.folder.path) or self._new_keys()
        self._transport = self._open(self._keys, encrypt=config.encrypt, port=port, bulk_port=bulk_port)
        assignment = self.folder.read_assignment()
        if assignment is not None and assignment.membership.job == self._keys.job:
            self._configure(assignment)

    def _clean_up(self) -> None:
        """Take back what an agent that was killed had in hand. The trainers go on meanwhile, and clean up only when
        the job starts."""
        try:
            self.folder.drop_unfinished()
            self.objects.pool.drop_unfinished()
            self.objects.finish_unfinished()
        except OSError as error:
            logger.warning("what an agent has left in %s cannot be removed: %s", self.job_root, error)

    def _new_keys(self) -> JobKeys:
        keys = JobKeys.generate()
        write_keys(self.folder.path, keys)
        return keys

    def _open(self, keys: JobKeys, *, encrypt: bool, port: int, bulk_port: int) -> Transport:
        transport = Transport(
            keys,
            host=self._host,
            port=port,
            bulk_port=bulk_port,
            encrypt=encrypt,
            local_path=self.folder.orders_path,
        )
        self.folder.write_ports(transport.host, transport.port, transport.bulk_port)
        return transport

    # ---- life -------------------------------------------------------------------------------------

    @property
    def idle_s(self) -> float:
        """Seconds since anyone asked for anything; 0 while copies are being made. From any thread."""
        return 0.0 if self._is_busy else time.monotonic() - self._last_asked_s

    def run(self) -> None:
        """Work until `stop`, or until the job was released and nothing is left to do."""
        try:
            while not self._stopping and not self._is_finished():
                try:
                    self.turn()
                except Exception as error:  # whatever it was: the agent lives on, and looks again
                    self._log_error(error)
                    time.sleep(TICK_BUSY_S)
        finally:
            self.close()

    def turn(self) -> None:
        """One turn of the loop: wait for events, but not for long; then do what they and the time ask for."""
        busy = bool(self._acquisitions)
        for event in self._transport.poll(TICK_BUSY_S if busy else TICK_S):
            try:
                self._on_event(event)
            except Exception as error:  # one bad event does not keep the others from being heard
                self._log_error(error)
        while not self._results.empty():
            self._results.get()()
        self._advance_acquisitions()
        self._served.forget_idle()
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._look()
        elif self._replicator is not None:
            self._carry_out(self._replicator.tick(now_s))
        self._is_busy = bool(self._acquisitions) or (
            self._replicator is not None and self._replicator.is_busy
        )
        self._is_busy = self._is_busy or (self._drainer is not None and self._drainer.is_busy)

    def _log_error(self, error: Exception) -> None:
        count("agent_errors")
        logger.warning("the agent of %s met an error: %s", self.job_root, reason_of(error), exc_info=error)

    def _log_once(self, what: tuple[Any, ...], text: str) -> None:
        if what in self._logged:
            return
        self._logged[what] = None
        while len(self._logged) > _LOGGED_MAX:
            self._logged.popitem(last=False)
        logger.warning("%s", text)

    def _name_of(self, index: int) -> str:
        """A node and where it listens, for people."""
        address = self._transport.address_of(index)
        return f"node {index} ({address.host}:{address.port})" if address else f"node {index}"

    def stop(self) -> None:
        """End `run`; from any thread, or a signal's handler."""
        self._stopping = True
        self._buffers.stop()
        self._transport.wake()

    def close(self) -> None:
        self._closed = True
        self._buffers.stop()
        for acquisition in list(self._acquisitions):
            acquisition.cancel("closing", "the agent of this node ends")
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._buffers.close()
        if self._drainer is not None:
            self._drainer.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._scrubber is not None:
            self._scrubber.close()
        self._served.clear()
        self._transport.close()
        self.objects.close()

    def _is_finished(self) -> bool:
        if not self.released or self._ends_now:
            return self._ends_now
        may_go = not self._acquisitions and (self._replicator is None or self._replicator.may_go)
        if not may_go and time.monotonic() < self._linger_until_s:
            return False
        if self._drainer is not None and self._drainer.is_busy:
            return False  # for as long as it makes progress
        return not self.folder.has_users()  # or else the job has been started again meanwhile

    # ---- events -----------------------------------------------------------------------------------

    def _on_event(self, event: Any) -> None:
        now_s = time.monotonic()
        if isinstance(event, Arrived):
            self._on_arrived(event)
        elif isinstance(event, FetchRequested):
            self._last_asked_s = now_s
            self._serve(event)
        elif isinstance(event, Ordered):
            self._last_asked_s = now_s
            self._on_order(event.connection, event.data)
        elif isinstance(event, Opened):
            self._peers[event.index] = orders.OPEN
            for acquisition in self._acquisitions:
                if acquisition.transfer is not None:
                    acquisition.transfer.back(event.index)
            if self._replicator is not None:
                self._replicator.opened(event.index)
        elif isinstance(event, HelloRefused):
            self._peers[event.index] = f"{event.refused.code}: {event.refused.reason}"
        elif isinstance(event, Moved):
            logger.info("the agent of node %d moved to %s:%d", event.index, event.host, event.port)
        elif self._replicator is None:
            return
        elif isinstance(event, Requested):
            self._last_asked_s = now_s
            self._connections[event.index] = event.connection
            self._carry_out(self._replicator.requested(event.index, event.message, now_s))
        elif isinstance(event, Replied):
            if isinstance(event.message, Refused) and event.message.request:
                self._on_fetch_refused(event.message)
            else:
                self._carry_out(self._replicator.replied(event.index, event.message, now_s))
        elif isinstance(event, Lost):
            self._peers[event.index] = event.reason
            for acquisition in self._acquisitions:
                if acquisition.transfer is not None:
                    acquisition.transfer.lost(event.index)
            self._carry_out(self._replicator.lost(event.index))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Say):
                self._transport.say(effect.node, effect.message)
            elif isinstance(effect, Answer):
                connection = self._connections.get(effect.node)
                if connection is not None:
                    self._transport.reply(connection, effect.message)
            elif isinstance(effect, Acquire):
                self._acquire_copies(effect)
            elif isinstance(effect, GiveUp):
                self._give_up(effect.key)
            elif isinstance(effect, Announce):
                logger.info("%s is replicated", effect.key)
                count("versions_replicated")
                self._offer_to_storage()  # before the next effect gives it up
                self._answer_waiters(Version(effect.key.epoch, effect.key.step), None)
            elif isinstance(effect, Delete):
                self._delete(effect)
            elif isinstance(effect, Note):
                logger.warning("%s: %s", effect.key, effect.text)

    # ---- the job root -----------------------------------------------------------------------------

    def _look(self) -> None:
        now_s = time.monotonic()
        self._next_look_s = now_s + LOOK_S
        self._items = self._inventory.look()
        self._served.forget(lambda key: key not in self._items)
        if self._replicator is not None:
            me = self._replicator.membership.members[self._replicator.index]
            world_size = self._replicator.membership.world_size
            local = {key: local_of(item, me.ranks, world_size) for key, item in self._items.items()}
            self._carry_out(self._replicator.found(local, now_s))
        self._offer_to_storage()
        if self._scrubber is not None:
            self._scrubber.offer(self._items)
        self._forget_waiters()
        if self._metrics is not None:
            self._metrics.show(self._standings())

    def _standings(self) -> Standings:
        replicator, drainer = self._replicator, self._drainer
        steps: dict[str, list[int]] = {}
        for key in self._items:
            state = replicator.standing(key).name.lower() if replicator is not None else "unproven"
            steps.setdefault(state, []).append(key.step)
        replicated = steps.get("replicated", [])
        complete = [*steps.get("complete", []), *replicated]
        drained = drainer.last if drainer is not None else None
        return Standings(
            versions={state: len(found) for state, found in steps.items()},
            complete_step=max(complete, default=-1),
            replicated_step=max(replicated, default=-1),
            drained_step=drained.step if drained is not None else -1,
            peers=Counter(state == orders.OPEN for state in self._peers.values()),
        )

    def _offer_to_storage(self) -> None:
        if self._drainer is not None and self._replicator is not None:
            standing = self._replicator.standing
            items = self._items.items()
            self._drainer.offer([item for key, item in items if standing(key) is Standing.REPLICATED])

    def _give_up(self, key: Key) -> None:
        """Remove a version here: newer ones have met their goal on every node."""
        item = self._items.pop(key, None)
        if item is None:
            return
        self._served.forget(lambda served: served == key)
        try:
            container = self.objects.container(key.step)
            if self.objects.read_summary(container).digest == key.digest:
                self.objects.remove_container(container)
            assert self._replicator is not None
            ranks = self._replicator.membership.members[self._replicator.index].ranks
            self.objects.pool.drop_ranks_other_than(ranks)
            self._buffers.trim(self._replicator.keep)
        except (OSError, FlashpointError) as error:
            logger.warning("%s could not be given up: %s", key, error)
        self._next_look_s = 0.0

    def _delete(self, effect: Delete) -> None:
        container = self.objects.container(effect.key.step)
        self.objects.remove_named(container, effect.objects)
        self._next_look_s = 0.0

    # ---- getting ----------------------------------------------------------------------------------

    def _acquire_copies(self, effect: Acquire) -> None:
        def ended(error: tuple[str, str] | None) -> None:
            self._look()
            if error is not None:
                # The source offers again, for as long as it takes: it is no news every time.
                text = f"copies of {effect.key} from {self._name_of(effect.source)}: {error[0]}: {error[1]}"
                self._log_once((effect.key, effect.source, error[0]), text)
            if self._replicator is not None:
                now_s = time.monotonic()
                self._carry_out(self._replicator.acquired(effect.key, effect.source, error, now_s))

        wanted = [orders.Wanted(name, (), (effect.source,)) for name in effect.objects]
        self._acquire(effect.key, wanted, effect.manifest_nbytes, (effect.source,), ended)

    def _acquire(
        self,
        key: Key,
        wanted: Sequence[orders.Wanted],
        manifest_nbytes: int,
        manifest_sources: tuple[int, ...],
        ended: Callable[[tuple[str, str] | None], None],
        *,
        reader: int = 0,
    ) -> Acquisition:
        begin_s = time.perf_counter()

        def end(error: tuple[str, str] | None) -> None:
            facts = {"step": key.step, "bytes": acquisition.nbytes, "error": error[0] if error else ""}
            trace.record("get objects", begin_s, time.perf_counter(), **facts)
            self._forget(acquisition)
            ended(error)
            if wanted and error is None:
                keep = self._replicator.keep if self._replicator is not None else 0
                self._buffers.filled(self._copied_sizes(key), keep)

        acquisition = Acquisition(
            self.objects,
            key,
            wanted,
            reader=reader,
            manifest_nbytes=manifest_nbytes,
            manifest_sources=manifest_sources,
            credit=self._credit,
            numbers=self._numbers,
            timeout_s=self.config.peer_timeout_s,
            on_end=end,
        )
        self._acquisitions.append(acquisition)
        self._work(acquisition.prepare)
        return acquisition

    def _forget(self, acquisition: Acquisition) -> None:
        self._acquisitions.remove(acquisition)
        for number in [n for n, owner in self._by_request.items() if owner is acquisition]:
            del self._by_request[number]

    def _mend(self, key: Key, name: str) -> tuple[Mending, str]:
        """Have an object repaired by the loop. In the scrub's thread."""
        outcome: Future[tuple[Mending, str]] = Future()

        def begin() -> None:
            try:
                self._repair(key, name, outcome)
            except Exception as error:
                outcome.set_exception(error)

        self._results.put(begin)
        self._transport.wake()
        until_s = time.monotonic() + _REPAIR_S
        try:
            while time.monotonic() < until_s and not self._closed:
                with contextlib.suppress(TimeoutError):
                    return outcome.result(TICK_S)
        except Exception as error:
            return Mending.FAILED, reason_of(error)
        return Mending.FAILED, "the agent ends, or has too much to do"

    def _repair(self, key: Key, name: str, outcome: Future[tuple[Mending, str]]) -> None:
        item = self._items.get(key)
        sources = self._replicator.sources_of(key, name) if self._replicator is not None else None
        if item is None or sources is None:
            outcome.set_result((Mending.FAILED, "no node is known to hold it in this start of the job"))
            return

        def ended(error: tuple[str, str] | None) -> None:
            self._served.forget_one(key, name)
            self._look()
            if error is None:
                outcome.set_result((Mending.REPAIRED, f"with {acquisition.nbytes} bytes of other nodes"))
            elif isinstance(acquisition, Repair) and acquisition.is_lost:
                outcome.set_result((Mending.LOST, error[1]))
            else:
                outcome.set_result((Mending.FAILED, f"{error[0]}: {error[1]}"))

        if name == MANIFEST_NAME:
            acquisition = self._acquire(key, [], item.summary.nbytes, sources, ended)
            return

        def end(error: tuple[str, str] | None) -> None:
            self._forget(acquisition)
            ended(error)

        acquisition = Repair(
            self.objects,
            key,
            name,
            sources,
            credit=self._credit,
            numbers=self._numbers,
            timeout_s=self.config.peer_timeout_s,
            on_end=end,
        )
        self._acquisitions.append(acquisition)
        self._work(acquisition.prepare)

    def _copied_sizes(self, key: Key) -> list[int]:
        """Of those objects of a version that lie in this node's pool of copies."""
        item, replicator = self._inventory.get(key), self._replicator
        if item is None or replicator is None:
            return []
        own = frozenset(item.own(replicator.membership.members[replicator.index].ranks))
        return [r.nbytes for name, r in item.records.items() if name in item.held and name not in own]

    def _work(self, work: Callable[[], Callable[[], None]]) -> None:
        """Run in the worker thread; what it returns is called in the loop."""

        def run() -> None:
            try:
                then = work()
            except Exception as error:
                self._log_error(error)
                return
            self._results.put(then)
            self._transport.wake()

        self._worker.submit(run)

    def _advance_acquisitions(self) -> None:
        now_s = time.monotonic()
        for acquisition in list(self._acquisitions):
            if acquisition.transfer is not None:
                acquisition.transfer.expire(now_s)
            work = acquisition.progressed()
            if work is not None:
                self._work(work)
        for acquisition in self._acquisitions:
            if acquisition.transfer is not None and acquisition.is_new:
                acquisition.is_new = False
                self._begin(acquisition)
            self._ask(acquisition, now_s)

    def _begin(self, acquisition: Acquisition) -> None:
        """Connect to those sources of a new transfer that are not connected yet. Others are asked meanwhile."""
        assert acquisition.transfer is not None
        for index in acquisition.sources - {i for i, state in self._peers.items() if state == orders.OPEN}:
            acquisition.transfer.lost(index)
            self._transport.greet(index)

    def _ask(self, acquisition: Acquisition, now_s: float) -> None:
        spans: dict[int, list[Span]] = {}
        for request, source, want, begin, end in acquisition.asks(now_s):
            self._by_request[request] = acquisition
            spans.setdefault(source, []).append(Span(request, acquisition.name_of(want), begin, end))
        for source, asked in spans.items():
            for first in range(0, len(asked), limits.FRAMES_QUEUED_MAX):
                some = tuple(asked[first : first + limits.FRAMES_QUEUED_MAX])
                self._transport.fetch(source, Fetch(acquisition.key, some))

    def _on_arrived(self, event: Arrived) -> None:
        acquisition = self._by_request.pop(event.data.request, None)
        if acquisition is not None and not acquisition.ended:
            acquisition.arrived(event.data, event.payload)
            # Soon, since the credit is what keeps the link busy; but one message asks for many frames.
            if self._credit.is_low(event.index):
                self._ask(acquisition, time.monotonic())

    def _on_fetch_refused(self, refused: Refused) -> None:
        acquisition = self._by_request.pop(refused.request, None)
        if acquisition is not None and acquisition.transfer is not None and not acquisition.ended:
            acquisition.transfer.refused(refused.request, refused.code)

    # ---- serving ----------------------------------------------------------------------------------

    def _serve(self, event: FetchRequested) -> None:
        key = event.fetch.key
        for span in event.fetch.spans:
            request, name, begin, end = span.request, span.name, span.begin, span.end
            try:
                data = self._served.bytes_of(key, name)
                if not 0 <= begin < end <= len(data) or end - begin > limits.FRAME_BYTES:
                    raise ProtocolError("bad-range", f"{name} has {len(data)} bytes")
            except (FlashpointError, OSError) as error:
                code = error.code if isinstance(error, ProtocolError) else "no-object"
                if code == "bad-range":  # all else may be asked for by an honest node that comes too late
                    text = f"refused a fetch by {self._name_of(event.index)}: {code}: {reason_of(error)}"
                    self._log_once(("fetch", event.index, code), text)
                reason = reason_of(error)[: limits.REASON_CHARS_MAX]
                self._transport.reply(event.connection, Refused("fetch", code, reason, key, request))
                continue
            self._transport.send_data(event.connection, Data(request, begin, end), data[begin:end].data)

    # ---- orders -----------------------------------------------------------------------------------

    def _on_order(self, connection: Any, data: bytes) -> None:
        number = 0
        try:
            order = orders.decode_order(data)
            number = order.number
            answer = self._obey(connection, order)
        except (FlashpointError, OSError) as error:
            answer = orders.Failed(number, reason_of(error), getattr(error, "code", ""))
        if answer is not None:
            self._transport.answer(connection, orders.encode(answer))

    def _obey(self, connection: Any, order: orders.Orders) -> orders.Answers | None:
        """Carry an order out; its answer, or None when that comes later."""
        now_s = time.monotonic()
        number = order.number
        if isinstance(order, orders.Identify):
            return self._identity(number)
        if isinstance(order, orders.Configure):
            self.released = self._ends_now = False
            self._configure(
                Assignment(
                    membership=order.membership, index=order.index, keep=order.keep, encrypt=order.encrypt
                ),
                order.keys,
            )
            return self._identity(number)
        if isinstance(order, orders.Completed):
            self._look()
            if self._replicator is not None:
                self._carry_out(self._replicator.completed(Version(order.epoch, order.step), now_s))
            return orders.Done(number)
        if isinstance(order, orders.Settled):
            self.objects.drop_fetched()
            self._look()
            if self._replicator is not None:
                self._carry_out(self._replicator.settled(Version(order.epoch, order.step), now_s))
            return orders.Done(number)
        if isinstance(order, orders.Await):
            return self._await(connection, order)
        if isinstance(order, orders.Inquire):
            return self._report(number)
        if isinstance(order, orders.Observed):
            if self._metrics is not None:
                self._metrics.observe(order)
            return orders.Done(number)
        if isinstance(order, orders.Release):
            self.released = True
            self._linger_until_s = now_s + order.linger_s
            self._ends_now = order.linger_s == 0  # also where ranks have come already that want another agent
            if self._replicator is not None:
                self._carry_out(self._replicator.released(now_s))
            if self._drainer is not None:
                self._drainer.release()
            return orders.Done(number)
        return self._retrieve(connection, order)

    def _identity(self, number: int) -> orders.Identity:
        membership = self._replicator.membership if self._replicator is not None else None
        transport = self._transport
        return orders.Identity(
            number,
            os.getpid(),
            flashpoint.__version__,
            membership.job if membership is not None else "",
            membership.epoch if membership is not None else 0,
            transport.host,
            transport.port,
            transport.bulk_port,
            claim.fingerprint(self.config),
        )

    def _configure(self, assignment: Assignment, keys: JobKeys | None = None) -> None:
        membership = assignment.membership
        current = self._replicator
        if current is not None and membership.epoch < current.membership.epoch:
            raise ProtocolError(
                "stale-epoch", f"this agent works in epoch {current.membership.epoch} already"
            )
        if assignment.index >= len(membership.members):
            raise ProtocolError("unknown-node", f"there is no node {assignment.index} in the membership")
        if keys is not None and keys.job != membership.job:
            raise ProtocolError("wrong-job", "the keys are of another job than the membership")
        if assignment == self._assignment and keys in (None, self._keys):
            return  # a restarted agent has gone on by itself from what its folder says
        if keys is not None and (keys != self._keys or assignment.encrypt != self._transport.encrypt):
            write_keys(self.folder.path, keys)
            self._keys = keys
            self._transport.configure_keys(keys, encrypt=assignment.encrypt)
        self.folder.write_assignment(assignment)
        for acquisition in list(self._acquisitions):
            acquisition.cancel("closing", "a new epoch has begun")
        self._connections.clear()
        self._peers.clear()
        self._logged.clear()
        self._by_request.clear()
        self._assignment = assignment
        self._replicator = Replicator(membership, assignment.index, keep=assignment.keep)
        self._transport.configure(membership, assignment.index)
        if self._drainer is not None:
            self._drainer.close()
            self._drainer = None
        if self.config.storage:
            self._drainer = Drainer(
                self.objects,
                self.config,
                job=membership.job,
                epoch=membership.epoch,
                index=assignment.index,
                leader=membership.leader,
                ranks=membership.members[assignment.index].ranks,
            )
        if self._scrubber is None and self.config.scrub_bytes_per_s:
            self._scrubber = Scrubber(
                self.objects,
                self.config.scrub_bytes_per_s,
                is_busy=lambda: bool(self._acquisitions),
                mend=self._mend,
            )
        for index in membership.neighbours(assignment.index):
            self._transport.greet(index)  # they learn where this agent listens, and it whether they live
        self._next_look_s = 0.0

    def _await(self, connection: Any, order: orders.Await) -> orders.Answers | None:
        version = Version(order.epoch, order.step)
        replicator = self._replicator
        if replicator is not None and any(
            (key.epoch, key.step) == version and replicator.standing(key) is Standing.REPLICATED
            for key in self._items
        ):
            return orders.Done(order.number)
        if sum(map(len, self._waiters.values())) >= limits.WAITERS_MAX:
            return orders.Failed(order.number, "too many orders wait already", "busy")
        self._waiters.setdefault(version, []).append((connection, order.number))
        return None

    def _answer_waiters(self, version: Version, failure: str | None) -> None:
        for connection, number in self._waiters.pop(version, []):
            answer = orders.Done(number) if failure is None else orders.Failed(number, failure, "superseded")
            self._transport.answer(connection, orders.encode(answer))

    def _forget_waiters(self) -> None:
        """Tell those who wait for a version that is gone: it was given up for a newer one."""
        here = {Version(key.epoch, key.step) for key in self._items}
        newest = max(here, default=None)
        for key, item in self._items.items():
            if item.set_aside:
                text = f"step {key.step} was withdrawn: no good copy is left of {min(item.set_aside)}"
                self._answer_waiters(Version(key.epoch, key.step), text)
        for version in [v for v in self._waiters if v not in here and newest is not None and v < newest]:
            self._answer_waiters(
                version, f"step {version.step} was given up for a newer one before it was replicated"
            )

    def _retrieve(
        self, connection: Any, order: orders.RetrieveManifest | orders.Retrieve
    ) -> orders.Answers | None:
        if self._replicator is None:
            return orders.Failed(order.number, "this agent was not told of any peers yet", "behind")

        def ended(error: tuple[str, str] | None) -> None:
            self._look()
            answer: orders.Answers = orders.Done(order.number, acquisition.nbytes)
            if error is not None:
                answer = orders.Failed(order.number, error[1], error[0])
            self._transport.answer(connection, orders.encode(answer))

        if isinstance(order, orders.RetrieveManifest):
            acquisition = self._acquire(order.key, [], order.nbytes, order.sources, ended)
        else:
            acquisition = self._acquire(order.key, order.objects, 0, (), ended, reader=order.rank)
        return None

    def _report(self, number: int) -> orders.Report:
        replicator = self._replicator
        if replicator is None:
            return orders.Report(number, (), {})
        self._look()
        versions = tuple(
            orders.VersionReport(
                key,
                "withdrawn" if replicator.is_withdrawn(key) else replicator.standing(key).name.lower(),
                replicator.known_holders(key),
            )
            for key in sorted(self._items, reverse=True)
        )
        storage = None
        if self._drainer is not None:
            last = self._drainer.last or Version(-1, -1)
            storage = orders.StorageReport(last.epoch, last.step, self._drainer.error)
        scrub = self._scrubber.report if self._scrubber is not None else None
        return orders.Report(number, versions, dict(self._peers), storage, scrub)
