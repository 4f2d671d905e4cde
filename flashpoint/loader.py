"""`MLFlashpointCheckpointLoader`: the steps of a load, one method each, on one rank.

    candidates -> latest_complete (fetch from peers, verify) -> plan -> read

All ranks call the same methods in the same order; whatever one of them cannot use, none uses.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from flashpoint.coordinator import Coordinator, SingleProcessCoordinator
from flashpoint.errors import (
    CheckpointNotFoundError,
    CorruptObjectError,
    FlashpointError,
    ManifestError,
    MismatchError,
)
from flashpoint.ids import CheckpointContainerId
from flashpoint.layout import Entry
from flashpoint.objects import CheckpointObjectManager
from flashpoint.peers import Needs, Peers
from flashpoint.recovery import Read, plan_reads
from flashpoint.retention import Version, newest_first
from flashpoint.telemetry import count, logger
from flashpoint.trace import traced
from flashpoint.view import CheckpointView

if TYPE_CHECKING:  # ZeroMQ is loaded only for jobs with copies
    from flashpoint.replication.node import NodeReplication


_TRIES_MAX: Final = 3  # of one version, if what it failed for may pass
_AGAIN_S: Final = 1.0


class Verdict(enum.IntEnum):
    """What a rank finds of a version; of several ranks' the highest counts."""

    GOOD = 0
    GONE = 1
    """It is not whole any more, or the nodes hold different saves of it."""
    FAILED = 2
    """It could not be had this time: space, a peer or an agent was missing."""
    CORRUPT = 3


def _verdict_of(failure: Exception) -> Verdict:
    if isinstance(failure, CorruptObjectError | ManifestError):
        return Verdict.CORRUPT
    return Verdict.GONE if isinstance(failure, CheckpointNotFoundError) else Verdict.FAILED


class MLFlashpointCheckpointLoader:
    """Loads versions from below one job root, for one rank.

    Args:
        objects: the job root's containers and buffers.
        coordinator: of the ranks that load together; a job of one process by default.
        replication: this node's line to its peers, who have what this node lacks; None without copies.
    """

    def __init__(
        self,
        objects: CheckpointObjectManager,
        coordinator: Coordinator | None = None,
        *,
        replication: NodeReplication | None = None,
    ) -> None:
        self.objects = objects
        self.coordinator = coordinator or SingleProcessCoordinator()
        self.config = objects.config
        self.replication = replication
        self.fetched_nbytes = 0  # from peers, by all ranks, for the version that was opened last
        self.unloadable: list[
            int
        ] = []  # steps that the last `latest_complete` could not load, but might later
        self._agreements = 0

    # ---- 1. candidates --------------------------------------------------------------------------

    @traced("agree on candidates")
    def candidates(self) -> list[Version]:
        """Versions to try, newest first: those that every node holds complete, or any, if nodes hold copies.

        A node's marker vetoes a version. A node that holds none at all has lost its memory and vetoes
        nothing; with copies, whether a version is still whole is seen when it is tried.
        """
        dirty = sorted(self.objects.dirty_steps())
        answers = self._all_gather((self.objects.complete_versions(), dirty))
        nodes = [({Version(*pair) for pair in versions}, set(steps)) for versions, steps in answers]
        holding = [versions for versions, _ in nodes if versions]
        vetoed = {step for _, steps in nodes for step in steps}
        combine = set.intersection if self.replication is None else set.union
        found = combine(*holding) if holding else set()
        return newest_first(version for version in found if version.step not in vetoed)

    # ---- 2. choose ------------------------------------------------------------------------------

    def latest_complete(self, *, warm: bool = False, needs: Needs | None = None) -> CheckpointView | None:
        """The newest version whose every object verifies on every rank, opened; None if there is none.

        Versions that do not are reported and stepped over; those found corrupt, and those whose manifest
        tells nothing, are removed once an older one has proved good: their steps can be saved again. What
        failed for another reason (no space for what a node lacks, an agent that died) is tried again before,
        and named in `unloadable`: who begins from scratch should know what there was.

        Args:
            warm: read through this process's own buffers where it has them (see `CheckpointView`).
            needs: what this rank is going to read of a version, so that no more is fetched from peers; by
                default, everything.
        """
        corrupt: list[CheckpointContainerId] = []
        self.unloadable = []
        for version in self.candidates():
            container = self.objects.container(version.step)
            view, verdict = self.try_open(container, warm=warm, needs=needs)
            if view is not None:
                for bad in [*corrupt, *map(self.objects.container, self.objects.garbled_steps())]:
                    self.objects.remove_container(bad)
                return view
            if verdict is Verdict.CORRUPT:
                corrupt.append(container)
            elif verdict is Verdict.FAILED:
                self.unloadable.append(version.step)
        return None

    def try_open(
        self, container: CheckpointContainerId, *, warm: bool = False, needs: Needs | None = None
    ) -> tuple[CheckpointView | None, Verdict]:
        """As `open_verified`, with what the ranks found; tried again where that may pass."""
        for attempt in range(_TRIES_MAX):
            view, verdict = self._open_together(container, warm, needs)
            if verdict is not Verdict.FAILED or self.replication is None or attempt + 1 == _TRIES_MAX:
                break
            time.sleep(_AGAIN_S)
            with contextlib.suppress(FlashpointError, OSError):
                self.replication.revive()
        return view, verdict

    def open_verified(
        self, container: CheckpointContainerId, *, warm: bool = False, needs: Needs | None = None
    ) -> CheckpointView | None:
        """Open one version on every rank and verify this rank's share of it; None unless all succeed."""
        return self._open_together(container, warm, needs)[0]

    @traced("open and verify")
    def _open_together(
        self, container: CheckpointContainerId, warm: bool, needs: Needs | None
    ) -> tuple[CheckpointView | None, Verdict]:
        """The opened version, or None and the worst that a rank found."""
        view, error, verdict = None, "", Verdict.GOOD
        fetched = 0
        peers = (
            Peers(self.objects, self.coordinator, self.replication, container) if self.replication else None
        )
        if peers is not None:
            peers.exchange_holdings(self._all_gather)
        try:
            if container.step in self.objects.dirty_steps():
                raise CheckpointNotFoundError(
                    f"step {container.step} is unfinished: its marker is still there"
                )
            if peers is not None:
                peers.fetch_manifest()
            view = CheckpointView(
                self.objects, container, rank=self.coordinator.rank, verify=self.config.verify, warm=warm
            )
            if peers is not None:
                fetched = peers.fetch_objects(view, needs)
            elif self.config.verify:
                self._verify_share(view)
        except (FlashpointError, OSError) as failure:
            error = str(failure) or repr(failure)
            verdict = _verdict_of(failure)
        answers = self._all_gather(
            (error, verdict, view.manifest.digest if view is not None else "", fetched)
        )
        self.fetched_nbytes = sum(nbytes for _, _, _, nbytes in answers)
        agreed = len({digest for _, _, digest, _ in answers}) == 1
        if view is not None and agreed and not any(answer[0] for answer in answers):
            return view, Verdict.GOOD
        if view is not None:
            view.close()
        for rank, (message, *_) in enumerate(answers):
            if message:
                count("versions_rejected")
                logger.warning("step %d cannot be loaded, rank %d found: %s", container.step, rank, message)
        if not agreed and not any(answer[0] for answer in answers):
            count("versions_rejected")
            logger.warning("step %d cannot be loaded: the nodes hold different saves of it", container.step)
        return None, max([Verdict.GONE, *(Verdict(found) for _, found, _, _ in answers)])

    def _verify_share(self, view: CheckpointView) -> None:
        # Every object is verified by someone before any rank takes a value from any of them; a rank
        # begins with its own, which it is about to read.
        rank, world_size = self.coordinator.rank, self.coordinator.world_size
        records = view.manifest.objects
        view.verify(record for record in records if record.id.rank % world_size == rank)

    # ---- 3. plan --------------------------------------------------------------------------------

    def plan(self, view: CheckpointView, targets: Sequence[Entry]) -> list[Read]:
        """The copies that fill this rank's ``targets``. Pure."""
        return plan_reads(view.manifest, targets, self.coordinator.rank)

    # ---- 4. read --------------------------------------------------------------------------------

    def read(self, view: CheckpointView, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Fill numpy arrays in place, each whole, by name.

        Raises:
            MismatchError: a name, shape or dtype differs.
            CorruptObjectError: bytes that do not match their digests; no array was touched.
        """
        targets = [Entry(name, array.dtype.name, array.shape) for name, array in arrays.items()]
        copies = []
        for read in self.plan(view, targets):
            array = arrays[targets[read.target].name]
            source = view.array(read.record, read.entry)
            entry = view.entry(read.record, read.entry)
            if entry.dtype != array.dtype.name or entry.whole_shape != array.shape:
                raise MismatchError(
                    f"{entry.name!r} has dtype {entry.dtype} and shape {entry.whole_shape} in step "
                    f"{view.manifest.step}, {array.dtype} and {array.shape} here"
                )
            copies.append(
                (array[_box(read.target_start, read.lengths)], source[_box(read.source_start, read.lengths)])
            )
        for target, source in copies:
            np.copyto(target, source)

    def load(
        self, step: int | None = None, *, warm: bool = False, needs: Needs | None = None
    ) -> CheckpointView:
        """The step given, or the newest complete one, opened; ``warm`` and ``needs`` as in `latest_complete`.

        Raises:
            CheckpointNotFoundError: there is no such version that every rank can use.
        """
        if step is None:
            view = self.latest_complete(warm=warm, needs=needs)
        else:
            view = self.open_verified(self.objects.container(step), warm=warm, needs=needs)
        if view is None:
            what = "complete checkpoint" if step is None else f"usable step {step}"
            raise CheckpointNotFoundError(f"there is no {what} in {self.objects.job_root}")
        return view

    def _all_gather(self, value: Any) -> list[Any]:
        self._agreements += 1
        topic = f"load/{self._agreements}"
        answers = self.coordinator.all_gather(
            topic, msgspec.msgpack.encode(value), self.config.recovery_timeout_s
        )
        return [msgspec.msgpack.decode(answer) for answer in answers]


def _box(start: Sequence[int], lengths: Sequence[int]) -> tuple[Any, ...]:
    return (*(slice(s, s + n) for s, n in zip(start, lengths, strict=True)), ...)
