"""One version's objects on all nodes: who holds what, and getting here what this rank is going to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from flashpoint.coordinator import Coordinator
from flashpoint.errors import CheckpointNotFoundError, CorruptObjectError, FlashpointError
from flashpoint.ids import CheckpointContainerId
from flashpoint.manifest import ObjectRecord
from flashpoint.objects import CheckpointObjectManager, ManifestSummary
from flashpoint.replication.messages import Key
from flashpoint.replication.orders import Wanted
from flashpoint.retrieval import Need, missing_objects, plan_fetches
from flashpoint.telemetry import count, logger
from flashpoint.trace import traced
from flashpoint.view import CheckpointView

if TYPE_CHECKING:
    from flashpoint.replication.node import NodeReplication

Needs = Callable[[CheckpointView], Sequence[Need]]
"""What a rank is going to read of a version, of which only the manifest may be here yet."""

_REPAIRS_MAX: Final = 3  # of one object, before the version is given up


class Peers:
    """The holders of one version, as all nodes have told, and this rank's part in fetching from them.

    Args:
        replication: this node's line to its agent.
    """

    def __init__(
        self,
        objects: CheckpointObjectManager,
        coordinator: Coordinator,
        replication: NodeReplication,
        container: CheckpointContainerId,
    ) -> None:
        self._objects = objects
        self._rank = coordinator.rank
        self._replication = replication
        self._container = container
        self._timeout_s = objects.config.recovery_timeout_s
        self._summary: ManifestSummary | None = None
        self._key: Key | None = None
        self._manifest_nbytes = 0
        self._bits: dict[int, bytes] = {}
        self._keeps: set[str] = set()

    # ---- who holds what ---------------------------------------------------------------------------

    @traced("exchange holdings")
    def exchange_holdings(self, all_gather: Callable[[Any], list[Any]]) -> None:
        """Tell all ranks what this node holds of the version, and hear it of all others.

        One bit for each object, in the manifest's order, from the first rank of each node: for 8,000
        objects on 1,000 nodes that is a megabyte for each rank.
        """
        membership = self._replication.membership
        assert membership is not None
        mine: tuple[Any, ...] = ()
        try:
            self._summary = self._objects.read_summary(self._container)
        except (FlashpointError, OSError):
            self._summary = None
        if self._summary is not None and self._rank == membership.members[self._replication.index].ranks[0]:
            record, digest, nbytes = self._summary
            held = self._objects.held_objects(self._container, record.objects)
            bits = _pack([obj.name in held for obj in record.objects])
            mine = (record.epoch, digest, nbytes, bits)
        answers = all_gather(mine)
        told = {index: answers[member.ranks[0]] for index, member in enumerate(membership.members)}
        told = {index: answer for index, answer in told.items() if answer}
        if told:
            # Of two saves of one step the newer epoch's; nodes that differ are found out by the digests.
            epoch, digest, self._manifest_nbytes, _ = max(told.values(), key=lambda answer: answer[:2])
            self._key = Key(epoch, self._container.step, digest)
            self._bits = {index: answer[3] for index, answer in told.items() if answer[1] == digest}

    @traced("fetch manifest")
    def fetch_manifest(self) -> None:
        """Get the manifest, if this node lacks it, or has one that is garbled or of another save.

        Raises:
            CheckpointNotFoundError: no node has it.
            ReplicationError: it could not be had.
        """
        if self._key is None:
            raise CheckpointNotFoundError(f"no node holds a manifest of step {self._container.step}")
        if self._summary is None or self._summary.digest != self._key.digest:
            sources = tuple(index for index in self._bits if index != self._replication.index)
            self._replication.retrieve_manifest(self._key, self._manifest_nbytes, sources, self._timeout_s)

    # ---- getting it -------------------------------------------------------------------------------

    @traced("fetch objects")
    def fetch_objects(self, view: CheckpointView, needs: Needs | None) -> int:
        """Get what this rank needs and this node lacks, and verify all that it needs; how many bytes came.

        A copy here that is corrupt is replaced by a good one from another node.

        Raises:
            CheckpointNotFoundError: there are objects that no node holds.
            CorruptObjectError: no node holds a good copy.
            ReplicationError: no holder could give what is needed.
        """
        records = view.manifest.objects
        holders = {
            index: {obj.name for obj, bit in zip(records, _unpack(bits, len(records)), strict=True) if bit}
            for index, bits in self._bits.items()
        }
        if missing := missing_objects(view.manifest, holders):
            raise CheckpointNotFoundError(
                f"step {view.manifest.step} is not whole any more: no node of this job holds "
                f"{', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''} ({len(missing)} of {len(records)} "
                "objects): more nodes were lost than there were copies"
            )
        membership, here = self._replication.membership, self._replication.index
        assert membership is not None
        self._keeps = membership.keeps(here, records, view.manifest.record.world_size)
        wanted = [Need(obj, 0, obj.nbytes) for obj in records] if needs is None else list(needs(view))
        fetched = self._fetch(wanted, holders)
        for attempt in range(_REPAIRS_MAX):
            bad = view.corrupt_of((need.record, need.begin, need.end) for need in wanted)
            if not bad:
                return fetched
            fetched += self._repair(view, bad, wanted, holders, is_last=attempt == _REPAIRS_MAX - 1)
        return fetched

    def _fetch(self, wanted: Sequence[Need], holders: dict[int, set[str]]) -> int:
        membership = self._replication.membership
        assert membership is not None and self._key is not None
        domains = {member.index: member.domain for member in membership.members}
        fetches = plan_fetches(
            wanted, holders, node=self._replication.index, domains=domains, keeps=self._keeps
        )
        if not fetches:
            return 0
        orders = [
            Wanted(fetch.record.name, () if fetch.is_whole else fetch.chunks, fetch.sources)
            for fetch in fetches
        ]
        return self._replication.retrieve(self._key, orders, self._timeout_s, rank=self._rank)

    def _repair(
        self,
        view: CheckpointView,
        bad: Sequence[ObjectRecord],
        wanted: Sequence[Need],
        holders: dict[int, set[str]],
        *,
        is_last: bool,
    ) -> int:
        """Replace corrupt objects of this node by other nodes' copies; how many bytes came."""
        here = self._replication.index
        names = {record.name for record in bad}
        for record in bad:
            others = [index for index, held in holders.items() if index != here and record.name in held]
            if is_last or not others:
                raise CorruptObjectError(
                    f"step {view.manifest.step}: object {record.name} is corrupt on this node, and "
                    + ("so was what other nodes gave" if others else "no other node holds a copy of it")
                )
            logger.warning(
                "step %d: object %s is corrupt on node %d: getting a copy from node %s",
                view.manifest.step, record.name, here, " or ".join(map(str, others)),
            )  # fmt: skip
            count("objects_repaired")
        view.forget(names)
        self._objects.remove_named(self._container, names)
        holders[here] = holders.get(here, set()) - names
        return self._fetch([need for need in wanted if need.record.name in names], holders)


def _pack(bits: Sequence[bool]) -> bytes:
    return np.packbits(np.array(bits, dtype=bool)).tobytes()


def _unpack(data: bytes, count: int) -> list[bool]:
    bits: list[bool] = np.unpackbits(np.frombuffer(data, dtype=np.uint8), count=count).astype(bool).tolist()
    return bits
