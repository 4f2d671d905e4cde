"""`NodeReplication`: what one rank has to do with its node's agent. It starts it, tells it, asks it, waits for it."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import flashpoint
from flashpoint import trace
from flashpoint.config import FlashpointConfig
from flashpoint.errors import DeadlineError, FlashpointError, ReplicationError
from flashpoint.handle import SaveHandle
from flashpoint.replication import orders
from flashpoint.replication.agent import EmbeddedAgent, start_agent, stop_agent
from flashpoint.replication.agent_folder import AgentFolder, Assignment
from flashpoint.replication.client import AgentClient
from flashpoint.replication.keys import JobKeys, read_keys, write_keys
from flashpoint.replication.membership import Membership
from flashpoint.replication.messages import Key
from flashpoint.retention import Version
from flashpoint.storage import claim
from flashpoint.telemetry import count, logger

FOLLOWED_MAX: Final = 8  # versions whose replication is awaited at a time
REPLICATED_TIMEOUT_S: Final = 3600.0
START_TIMEOUT_S: Final = 20.0
ORDER_TIMEOUT_S: Final = 10.0
STOP_TIMEOUT_S: Final = 5.0
LINGER_S: Final = 30.0  # after the job was released, for what is not replicated yet
AGAIN_S: Final = 0.5
REVIVAL_S: Final = 5.0  # between two tries to start an agent: what cannot start must not hold up every save


class NodeReplication:
    """This rank's line to the agent of its node.

    Args:
        job_root: of this node.
        keys: of the job.
        is_first: whether this is the node's first rank, which starts the agent and keeps it alive.
        host: address on which an agent that is started now is to listen.
    """

    def __init__(
        self, job_root: str, config: FlashpointConfig, keys: JobKeys, *, is_first: bool, host: str
    ) -> None:
        self.config = dataclasses.replace(config, agent_host=host)
        self.membership: Membership | None = None
        self.index = 0
        self._job_root = job_root
        self._keys = keys
        self._is_first = is_first
        self._folder = AgentFolder(job_root)
        self._users = self._folder.join_users()
        self._client = AgentClient(job_root)
        self._embedded: EmbeddedAgent | None = None
        self._settled: Version | None = None
        self._completed: Version | None = None
        self._restarting = threading.Lock()
        self._next_revival_s = 0.0
        self._closed = threading.Event()
        self._followed = threading.BoundedSemaphore(FOLLOWED_MAX)
        self._followers = ThreadPoolExecutor(FOLLOWED_MAX, thread_name_prefix="flashpoint-replication")

    @staticmethod
    def known_keys(job_root: str) -> JobKeys | None:
        """The job's keys, as far as this node has them."""
        return read_keys(AgentFolder(job_root).path)

    # ---- the agent's life -------------------------------------------------------------------------

    def start(self) -> tuple[str, int, int]:
        """Make sure that an agent of this job runs (first rank only); where it listens."""
        if self._client.is_alive():
            with contextlib.suppress(FlashpointError):  # it ended this very moment
                identity = self._client.identify(ORDER_TIMEOUT_S)
                mine = (flashpoint.__version__, claim.fingerprint(self.config))
                if (identity.release, identity.storage) != mine:
                    stop_agent(self._job_root)  # left from an earlier start of the job
        if not self._client.is_alive():
            write_keys(self._folder.path, self._keys)
            if self.config.agent == "embedded":
                self._embedded = EmbeddedAgent(self._job_root, config=self.config)
                self._embedded.start()
        # Whoever it is that answers: this rank is among its users, so it stays.
        identity = start_agent(self._job_root, self.config, timeout_s=START_TIMEOUT_S)
        return identity.host, identity.port, identity.bulk_port

    def join(self, membership: Membership, index: int) -> None:
        """Tell the agent who is in the job now (first rank only)."""
        self.membership, self.index = membership, index
        if self._is_first:
            try:
                self._configure()
            except (FlashpointError, OSError) as error:
                logger.warning("the agent of node %d did not take the new epoch: %s", index, error)

    def _configure(self) -> None:
        assert self.membership is not None
        assignment = Assignment(
            membership=self.membership,
            index=self.index,
            keep=self.config.keep,
            encrypt=self.config.encrypt,
        )
        self._client.configure(assignment, self._keys, ORDER_TIMEOUT_S)

    def revive(self) -> None:
        """Start the agent again if it died (first rank only), and tell it what it must know."""
        if not self._is_first or self._closed.is_set():
            return
        with self._restarting:
            if self._client.is_alive() or time.monotonic() < self._next_revival_s:
                return
            self._next_revival_s = time.monotonic() + REVIVAL_S
            count("agents_revived")
            logger.warning("the agent of node %d is gone: starting it again", self.index)
            self.start()
            self._configure()
            for tell, version in (
                (self._client.settled, self._settled),
                (self._client.completed, self._completed),
            ):
                if version is not None:
                    tell(version.epoch, version.step, timeout_s=ORDER_TIMEOUT_S)

    # ---- telling ----------------------------------------------------------------------------------

    def completed(self, version: Version) -> None:
        """A version is complete on every node. Never raises: the agent finds it by itself, somewhat later."""
        self._completed = version
        self._tell(lambda: self._client.completed(version.epoch, version.step, timeout_s=ORDER_TIMEOUT_S))

    def settled(self, version: Version) -> None:
        """The job goes on from this version. Never raises, and does not wait: training begins now."""
        self._settled = version
        self._followers.submit(
            self._tell, lambda: self._client.settled(version.epoch, version.step, timeout_s=ORDER_TIMEOUT_S)
        )

    def _tell(self, tell: Callable[[], object]) -> None:
        if not self._is_first:
            return
        try:
            self.revive()
            tell()
        except (FlashpointError, OSError) as error:
            count("agent_errors")
            logger.warning("the agent of node %d cannot be told of anything: %s", self.index, error)

    def observed(self, what: str, outcome: str, seconds: Mapping[str, float], nbytes: int = 0) -> None:
        """Tell how a save or a recovery went, if the agent shows metrics. Never raises, and does not wait."""

        def run() -> None:
            try:
                self._observed(what, outcome, seconds, nbytes)
            finally:
                self._followed.release()

        if self._shows_metrics and self._followed.acquire(blocking=False):
            self._followers.submit(run)

    def _observed(self, what: str, outcome: str, seconds: Mapping[str, float], nbytes: int = 0) -> None:
        if self._shows_metrics:
            # Without an agent there is a number less: whoever saves next finds out that it is gone.
            with contextlib.suppress(FlashpointError, OSError):
                self._client.observed(what, outcome, nbytes, seconds, timeout_s=ORDER_TIMEOUT_S)

    @property
    def _shows_metrics(self) -> bool:
        return self._is_first and bool(self.config.metrics_port) and not self._closed.is_set()

    def follow(self, handle: SaveHandle, version: Version) -> None:
        """Have the agent told of a complete version, and the handle of when it is replicated. Returns at once.

        Not by the thread that completes saves: an agent that hangs must not hold up the next one.
        """

        def run() -> None:
            try:
                self.completed(version)
                self._observed("save", "complete", handle.timings, handle.nbytes)
                if self.await_replicated(version, REPLICATED_TIMEOUT_S):
                    handle.reach("replicated")
                    trace.record(
                        "replicate",
                        handle.begin_s + handle.timings["complete"],
                        time.perf_counter(),
                        step=version.step,
                    )
                    self._observed("save", "replicated", {"replicated": handle.timings["replicated"]})
                    logger.info(
                        "step %d is replicated after %.3f s", version.step, handle.timings["replicated"]
                    )
                    return
                error: Exception = DeadlineError(
                    f"step {version.step} was not replicated within {REPLICATED_TIMEOUT_S:g} s, or before the "
                    "session ended"
                )
            except Exception as failure:
                error = failure
            finally:
                self._followed.release()
            handle.fail_replication(error)
            self._observed("save", "unreplicated", {})

        if self._followed.acquire(blocking=False):
            self._followers.submit(run)
        else:
            handle.fail_replication(
                ReplicationError(
                    f"{FOLLOWED_MAX} versions wait to be replicated already: is the agent alive?"
                )
            )

    # ---- asking -----------------------------------------------------------------------------------

    def await_replicated(self, version: Version, timeout_s: float) -> bool:
        """Wait until a version is replicated; False when the time is over, or this line was closed.

        Raises:
            ReplicationError: it was given up for a newer one.
        """
        deadline = time.monotonic() + timeout_s
        while not self._closed.is_set() and (left_s := deadline - time.monotonic()) > 0:
            try:
                if self._client.await_replicated(version.epoch, version.step, min(left_s, ORDER_TIMEOUT_S)):
                    return True
            except ReplicationError as error:
                if error.code == "superseded":
                    raise
                try:
                    self.revive()
                except (FlashpointError, OSError) as failure:
                    logger.warning("the agent of node %d cannot be started: %s", self.index, failure)
                self._closed.wait(AGAIN_S)
        return False

    def retrieve_manifest(self, key: Key, nbytes: int, sources: tuple[int, ...], timeout_s: float) -> None:
        """Get a version's manifest from peers.

        Raises:
            ReplicationError: no source could give it.
        """
        self._client.retrieve_manifest(key, nbytes, sources, timeout_s=timeout_s)

    def retrieve(self, key: Key, wanted: Sequence[orders.Wanted], timeout_s: float, *, rank: int) -> int:
        """Get objects, or chunks of them for a rank, from peers; how many bytes came.

        Raises:
            ReplicationError: no source could give one of them.
        """
        return self._client.retrieve(key, tuple(wanted), timeout_s, rank=rank)

    def report(self) -> orders.Report:
        """How the versions stand, as this node knows it."""
        return self._client.inquire(ORDER_TIMEOUT_S)

    def close(self) -> None:
        """Release the agent: it ends when what is complete is replicated."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._is_first:
            try:
                self._client.release(LINGER_S, timeout_s=ORDER_TIMEOUT_S)
            except (FlashpointError, OSError) as error:
                logger.info("the agent of node %d could not be released: %s", self.index, error)
        self._client.close()
        self._followers.shutdown(wait=False, cancel_futures=True)
        self._users.release()
        if self._embedded is not None:
            with contextlib.suppress(DeadlineError):
                self._embedded.wait(LINGER_S)
                self._embedded.stop(STOP_TIMEOUT_S)


def address_towards(host: str) -> str:
    """The address of this machine by which ``host`` reaches it. Nothing is sent."""
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host or "127.0.0.1", 9, type=socket.SOCK_DGRAM
    ):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return "127.0.0.1"
