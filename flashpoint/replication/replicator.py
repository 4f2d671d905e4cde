"""How a node's versions come to meet their goal: every decision of it, and no I/O. Events in, effects out.

    source --offer-->    holder    hold these objects of this version
    source <-accepted--  holder    I am fetching them from you
    source <-held------  holder    I have them, verified
    node   --met------>  leader    my objects are held wherever they should be
    node   <-outcome---  leader    every node has met: the version is replicated
    node   --retract-->  leader    I said met, and would give the version up now
    node   <-retracted-  leader    do: it was not replicated, and will not be

A version of which an object is corrupt here, with no good copy anywhere, is *withdrawn*: this node takes its word
back where it still can, and counts it for nothing.

    node   --farewell--> neighbour my job is done, and I need nothing of you any more
    node   <-heard-----  neighbour

Everything is told again until it is confirmed, and telling anything twice changes nothing, so neither a lost
message, nor a restart of either side, nor an answer that comes late needs a rule of its own. No clock: each
call brings the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from flashpoint.manifest import MANIFEST_NAME
from flashpoint.replication import limits
from flashpoint.replication.membership import Membership
from flashpoint.replication.messages import (
    Accepted,
    Farewell,
    Heard,
    Held,
    Holdings,
    Key,
    Met,
    Offer,
    Outcome,
    Query,
    Refused,
    Reply,
    Request,
    Retract,
    Retracted,
    Withdraw,
    Withdrawn,
)
from flashpoint.retention import Standing, Version, given_up


class Local(NamedTuple):
    """A version as this node's memory has it.

    Attributes:
        manifest_nbytes: size of its manifest.
        objects: all that its manifest names.
        own: those that this node's ranks wrote.
        held: objects of any rank that lie here, whole.
        is_ours: whether the very ranks of this membership wrote it; else placement says nothing of it.
        is_withdrawn: an object was set aside here: nobody has good bytes of it.
    """

    manifest_nbytes: int
    objects: tuple[str, ...]
    own: tuple[str, ...]
    held: frozenset[str]
    is_ours: bool
    is_withdrawn: bool = False


class Stage(Enum):
    """Of one version's copies on one holder."""

    IDLE = "not offered yet, or refused"
    OFFERED = "offered, not answered"
    COPYING = "the holder is fetching"
    HELD = "the holder has everything"


# What moves a stage. Whatever is not here (a late or repeated answer) changes nothing.
TRANSITIONS: Final[Mapping[tuple[Stage, str], Stage]] = {
    (Stage.IDLE, "offer"): Stage.OFFERED,
    (Stage.OFFERED, "accepted"): Stage.COPYING,
    (Stage.OFFERED, "held"): Stage.HELD,
    (Stage.COPYING, "held"): Stage.HELD,
    (Stage.IDLE, "held"): Stage.HELD,
    (Stage.OFFERED, "refused"): Stage.IDLE,
    (Stage.COPYING, "refused"): Stage.IDLE,
    (Stage.OFFERED, "lost"): Stage.IDLE,
    (Stage.COPYING, "lost"): Stage.IDLE,
}


# ---- effects: what the caller is to do -----------------------------------------------------------


class Say(NamedTuple):
    """Send a request to a node."""

    node: int
    message: Request


class Answer(NamedTuple):
    """Send a reply to a node that asked."""

    node: int
    message: Reply


class Acquire(NamedTuple):
    """Get these objects (and the manifest) from a node; then call `Replicator.acquired`."""

    key: Key
    source: int
    manifest_nbytes: int
    objects: tuple[str, ...]


class Delete(NamedTuple):
    """Delete copies of a peer's objects."""

    key: Key
    objects: tuple[str, ...]


class GiveUp(NamedTuple):
    """Remove a version from this node."""

    key: Key


class Announce(NamedTuple):
    """Tell whoever waits for it that a version is replicated."""

    key: Key


class Note(NamedTuple):
    """Something that people should know, once."""

    key: Key
    text: str


_MANIFEST_SOURCES_MAX: Final = 8  # every node has it
_RETRACTS_MAX: Final = 2  # versions to be given up that wait for the leader's word

Effect = Say | Answer | Acquire | Delete | GiveUp | Announce | Note


@dataclass
class _Repeat:
    """When to tell something again: soon at first, then less often."""

    next_s: float = 0.0
    wait_s: float = limits.REPEAT_S

    def is_due(self, now_s: float) -> bool:
        return now_s >= self.next_s

    def told(self, now_s: float) -> None:
        self.next_s = now_s + self.wait_s
        self.wait_s = min(2 * self.wait_s, limits.REPEAT_LAST_S)

    def soon(self, now_s: float) -> None:
        self.wait_s = limits.REPEAT_S
        self.next_s = now_s + self.wait_s


class _Copies:
    """One version's copies on one holder."""

    def __init__(self) -> None:
        self.stage = Stage.IDLE
        self.repeat = _Repeat()
        self.refusal = ""

    def move(self, event: str) -> bool:
        """Whether the event changed the stage."""
        after = TRANSITIONS.get((self.stage, event))
        if after is None:
            return False
        self.stage = after
        return True


class Replicator:
    """The decisions of one node in one epoch.

    Args:
        membership: the nodes; this one is ``index``.
        keep: versions to keep; 0 keeps all.
    """

    def __init__(self, membership: Membership, index: int, *, keep: int) -> None:
        self.membership = membership
        self.index = index
        self.keep = keep
        self.holders = membership.holders(index)
        self._local: dict[Key, Local] = {}
        self._copies: dict[Key, dict[int, _Copies]] = {}
        self._acquiring: dict[tuple[Key, int], tuple[str, ...]] = {}
        self._complete: set[Version] = set()
        self._settled: Version | None = None
        self._met_by: dict[Key, set[int]] = {}
        self._met: dict[Key, _Repeat] = {}
        # What this node has told the leader to be met, or may have told it before it was started again. The
        # leader may call it replicated any moment, and others then rely on it.
        self._promised: set[Key] = set()
        self._inherited: set[Key] | None = None
        self._retracts: dict[Key, _Repeat] = {}
        self._retracted: set[Key] = set()
        self._retracted_by: dict[Key, set[int]] = {}
        self._replicated: set[Key] = set()
        self._confirmed: set[Key] = set()  # and those of which this leader's agent knows
        self._released = False
        self._farewells: dict[int, _Repeat] = {}
        self._said_to: set[int] = set()  # neighbours that have heard this node's farewell
        self._heard_of: set[int] = set()  # and those that have said theirs
        self._gone: set[int] = set()  # and those that are not there

    # ---- events -----------------------------------------------------------------------------------

    def found(self, local: Mapping[Key, Local], now_s: float) -> list[Effect]:
        """What lies in this node's memory now, of versions without markers."""
        self._local = dict(local)
        if self._inherited is None:
            self._inherited = {key for key in local if key.epoch == self.membership.epoch}
        for gone in self._copies.keys() - local.keys():
            del self._copies[gone]
        for gone in self._met.keys() - local.keys():
            del self._met[gone]
        # Others may have met what this node has not looked at yet; what is older than all here is past.
        oldest = min(local, default=None)
        self._met_by = {key: met for key, met in self._met_by.items() if oldest is None or key >= oldest}
        self._retracted_by = {k: by for k, by in self._retracted_by.items() if oldest is None or k >= oldest}
        for told in (self._met_by, self._retracted_by):
            while len(told) > limits.VERSIONS_MAX:
                del told[min(told)]
        for keys in (self._replicated, self._confirmed, self._promised, self._inherited, self._retracted):
            keys &= local.keys()
        self._retracts = {key: repeat for key, repeat in self._retracts.items() if key in local}
        for key in local:
            if local[key].is_withdrawn:
                self._withdraw(key)
        return self.tick(now_s)

    def completed(self, version: Version, now_s: float) -> list[Effect]:
        """A version is complete on every node, as the trainers have agreed."""
        self._complete = {v for v in self._complete if any(_version(key) == v for key in self._local)}
        self._complete.add(version)
        return self.tick(now_s)

    def settled(self, version: Version, now_s: float) -> list[Effect]:
        """The job goes on from this version, of an earlier epoch."""
        self._settled = version
        return self.tick(now_s)

    def requested(self, index: int, message: Request, now_s: float) -> list[Effect]:
        """A node asks for something."""
        if isinstance(message, Offer):
            return self._offered(index, message)
        if isinstance(message, Query):
            local = self._local.get(message.key)
            held = sorted(local.held)[: limits.OBJECTS_MAX] if local is not None else ()
            return [Answer(index, Holdings(message.key, tuple(held)))]
        if isinstance(message, Withdraw):
            return self._asked_to_withdraw(index, message)
        if isinstance(message, Met):
            return self._heard_met(index, message.key)
        if isinstance(message, Retract):
            return self._heard_retract(index, message.key)
        if isinstance(message, Farewell):
            self._heard_of.add(index)
            return [Answer(index, Heard())]
        return []

    def replied(self, index: int, message: Reply, now_s: float) -> list[Effect]:
        """A node answers."""
        if isinstance(message, Heard):
            self._said_to.add(index)
            return []
        if isinstance(message, Outcome):
            return self._heard_outcome(index, message)
        if isinstance(message, Retracted):
            return self._heard_retracted(index, message.key)
        if isinstance(message, Refused) and message.about == "retract" and message.key in self._retracts:
            # It stays until a newer one is replicated; there are no more of these than the leader began with.
            del self._retracts[message.key]
            if self._inherited is not None:
                self._inherited.add(message.key)
            return []
        key: Key | None = getattr(message, "key", None)
        copies = self._copies.get(key, {}).get(index) if key is not None else None
        if key is None or copies is None:
            return []
        if isinstance(message, Accepted):
            copies.move("accepted")
            copies.repeat.soon(now_s)
        elif isinstance(message, Held):
            if copies.move("held"):
                return self.tick(now_s)
        elif isinstance(message, Refused) and message.about == "offer" and copies.move("refused"):
            # Told by its code: a reason may name another chunk or file each time, and is no news for that.
            news = message.code != copies.refusal
            copies.refusal = message.code
            if news:
                return [Note(key, f"node {index} refuses copies: {message.code}: {message.reason}")]
        return []

    def acquired(self, key: Key, source: int, error: tuple[str, str] | None, now_s: float) -> list[Effect]:
        """An `Acquire` has ended: well, or with (code, reason)."""
        self._acquiring.pop((key, source), None)
        if error is None:
            return [Answer(source, Held(key)), *self.tick(now_s)]
        code, reason = error
        return [Answer(source, Refused("offer", code, reason[: limits.REASON_CHARS_MAX], key))]

    def lost(self, index: int) -> list[Effect]:
        """The connection to a node is gone: what was offered there is offered again."""
        self._gone.add(index)
        for by_holder in self._copies.values():
            if index in by_holder and by_holder[index].move("lost"):
                by_holder[index].repeat = _Repeat()
        if index == self.membership.leader:
            # Another agent there knows nothing of what was said to the one before, nor of what that one
            # announced: everything is reported again.
            self._met.clear()
            self._confirmed.clear()
        return []

    def opened(self, index: int) -> None:
        """There is a connection to a node (again)."""
        self._gone.discard(index)

    def released(self, now_s: float) -> list[Effect]:
        """The job is done: go when nothing is left to do, here and for the neighbours."""
        self._released = True
        return self.tick(now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """What is due: offers, reports to the leader, versions to give up, farewells."""
        effects: list[Effect] = []
        for holder in self.holders:
            effects += self._offer_to(holder, now_s)
        met = [key for key in self._wanted() if self._is_met(key)]
        for key in [
            *met,
            *self._unconfirmed(),
        ]:  # what is replicated was met, whoever knows the holders' answers
            effects += self._report_met(key, now_s)
        effects += self._give_up()
        for key, repeat in self._retracts.items():
            if repeat.is_due(now_s):
                repeat.told(now_s)
                effects.append(Say(self.membership.leader, Retract(key)))
        return effects + self._say_farewell(now_s)

    # ---- as a source ------------------------------------------------------------------------------

    def _wanted(self) -> list[Key]:
        """Versions whose copies this node sees to, newest first."""
        return [
            key
            for key in sorted(self._local, reverse=True)
            if key not in self._replicated and self._may_replicate(key)
        ]

    def _may_replicate(self, key: Key) -> bool:
        local = self._local[key]
        if local.is_withdrawn or not local.is_ours or not local.held.issuperset(local.own):
            return False
        # An older epoch's version may be one that no node can complete any more. Copies of it on a node that
        # has dropped it would bring it back from the dead, so its turn comes when the job has settled on it.
        return key.epoch == self.membership.epoch or (
            self._settled is not None and _version(key) <= self._settled
        )

    def _offer_to(self, holder: int, now_s: float) -> list[Effect]:
        wanted = self._wanted()
        # One at a time, and what was begun is finished first: a source faster than its links would
        # otherwise begin every version and complete none.
        stages = {key: self._copies_on(key, holder) for key in wanted}
        begun = [key for key in wanted if stages[key].stage is Stage.COPYING]
        if not begun and any(
            c.stage is Stage.OFFERED and not c.repeat.is_due(now_s) for c in stages.values()
        ):
            return []  # the answer may come any moment
        for key in begun or [key for key in wanted if stages[key].stage is not Stage.HELD]:
            copies = stages[key]
            if copies.repeat.is_due(now_s):
                copies.move("offer")
                copies.repeat.told(now_s)
                local = self._local[key]
                return [Say(holder, Offer(key, local.manifest_nbytes, local.own))]
        return []

    def _copies_on(self, key: Key, holder: int) -> _Copies:
        return self._copies.setdefault(key, {}).setdefault(holder, _Copies())

    def _is_met(self, key: Key) -> bool:
        return all(self._copies_on(key, holder).stage is Stage.HELD for holder in self.holders)

    def _unconfirmed(self) -> list[Key]:
        """Replicated versions that a restarted leader may know nothing of."""
        if self.index == self.membership.leader:
            return []
        return sorted(self._replicated - self._confirmed, reverse=True)

    def _report_met(self, key: Key, now_s: float) -> list[Effect]:
        leader = self.membership.leader
        if self.index == leader:
            return self._heard_met(leader, key)
        if not self._may_promise(key):
            return []
        self._promised.add(key)
        repeat = self._met.setdefault(key, _Repeat())
        if not repeat.is_due(now_s):
            return []
        repeat.told(now_s)
        return [Say(leader, Met(key))]

    def _may_promise(self, key: Key) -> bool:
        if key in self._promised or key in self._replicated:
            return True
        # Each of those is memory that waits for the leader's word, and there may be no leader.
        waiting = sum(not self._local[other].is_withdrawn for other in self._retracts)
        return key not in self._retracted and waiting < _RETRACTS_MAX

    def _withdraw(self, key: Key) -> None:
        """Have the leader not count on this node for a version, should it not be replicated yet."""
        if key in self._replicated or key in self._retracted:
            return
        if self.index == self.membership.leader:
            self._met_by.get(key, set()).discard(self.index)
        elif key in self._promised or (self._inherited is not None and key in self._inherited):
            self._retracts.setdefault(key, _Repeat())
            return
        self._retracted.add(key)

    # ---- as a holder ------------------------------------------------------------------------------

    def _offered(self, index: int, offer: Offer) -> list[Effect]:
        key, local = offer.key, self._local.get(offer.key)
        if local is not None and local.held.issuperset(offer.objects):
            return [Answer(index, Held(key))]
        if (key, index) in self._acquiring:
            return [Answer(index, Accepted(key))]
        for mine in self._local:
            if mine.step == key.step and mine.digest != key.digest and mine.epoch >= key.epoch:
                code = "stale-epoch" if mine.epoch > key.epoch else "busy"  # it is being saved over
                return [Answer(index, Refused("offer", code, f"this node holds {mine}", key))]
        self._acquiring[key, index] = offer.objects
        return [Answer(index, Accepted(key)), Acquire(key, index, offer.manifest_nbytes, offer.objects)]

    def _asked_to_withdraw(self, index: int, message: Withdraw) -> list[Effect]:
        local = self._local.get(message.key)
        ranks = set(self.membership.members[index].ranks)
        if local is None:
            return [Answer(index, Withdrawn(message.key))]
        if foreign := [name for name in message.objects if _rank(name) not in ranks]:
            reason = f"{foreign[0]} is not an object of node {index}"
            return [Answer(index, Refused("withdraw", "no-object", reason, message.key))]
        return [Delete(message.key, message.objects), Answer(index, Withdrawn(message.key))]

    # ---- as the leader ----------------------------------------------------------------------------

    def _heard_met(self, index: int, key: Key) -> list[Effect]:
        if key in self._replicated:
            return [] if index == self.index else [Answer(index, Outcome(key, replicated=True))]
        if self.index != self.membership.leader:
            reason = f"node {self.membership.leader} leads, not node {self.index}"
            return [Answer(index, Refused("met", "unknown-node", reason, key))]
        if index in self._retracted_by.get(key, ()):
            return [Answer(index, Outcome(key, replicated=False))]  # it comes late
        met = self._met_by.setdefault(key, set())
        met.add(index)
        if len(met) < len(self.membership.members) or key not in self._local:
            return [] if index == self.index else [Answer(index, Outcome(key, replicated=False))]
        effects = self._learn_replicated(key)
        return effects + [
            Answer(node, Outcome(key, replicated=True)) for node in sorted(met) if node != self.index
        ]

    def _heard_retract(self, index: int, key: Key) -> list[Effect]:
        if key in self._replicated:
            return [Answer(index, Outcome(key, replicated=True))]
        if self.index != self.membership.leader:
            reason = f"node {self.membership.leader} leads, not node {self.index}"
            return [Answer(index, Refused("retract", "unknown-node", reason, key))]
        if self._inherited is None or key in self._inherited:
            reason = "this leader may have called it replicated before it was started again"
            return [Answer(index, Refused("retract", "behind", reason, key))]
        self._met_by.get(key, set()).discard(index)
        self._retracted_by.setdefault(key, set()).add(index)
        return [Answer(index, Retracted(key))]

    def _heard_retracted(self, index: int, key: Key) -> list[Effect]:
        if index != self.membership.leader or key not in self._retracts:
            return []
        del self._retracts[key]
        self._retracted.add(key)
        self._promised.discard(key)
        if self._inherited is not None:
            self._inherited.discard(key)
        return self._give_up()

    def _heard_outcome(self, index: int, outcome: Outcome) -> list[Effect]:
        key = outcome.key
        if not outcome.replicated or key not in self._local:
            return []
        if index == self.membership.leader:
            self._confirmed.add(key)
            self._met.pop(key, None)
        return self._learn_replicated(key)

    def _learn_replicated(self, key: Key) -> list[Effect]:
        if key in self._replicated or key not in self._local:
            return []
        self._replicated.add(key)
        self._retracts.pop(key, None)
        return [Announce(key), *self._give_up()]

    # ---- leaving ----------------------------------------------------------------------------------

    def _say_farewell(self, now_s: float) -> list[Effect]:
        # An agent that just went when its own versions are replicated would leave others without their
        # holder, or without the leader's last word.
        if not self._released or self.is_busy:
            return []
        effects: list[Effect] = []
        for index in sorted(self.membership.neighbours(self.index) - self._said_to - self._gone):
            repeat = self._farewells.setdefault(index, _Repeat())
            if repeat.is_due(now_s):
                repeat.told(now_s)
                effects.append(Say(index, Farewell()))
        return effects

    @property
    def may_go(self) -> bool:
        """Whether the job is done here and for every neighbour that is there."""
        neighbours = self.membership.neighbours(self.index) - self._gone
        return self._released and not self.is_busy and neighbours <= self._said_to & self._heard_of

    # ---- how versions stand -----------------------------------------------------------------------

    def standing(self, key: Key) -> Standing:
        if self.is_withdrawn(key):
            return Standing.UNPROVEN  # whatever it was, it supersedes nothing
        if key in self._replicated:
            return Standing.REPLICATED
        if _version(key) in self._complete:
            return Standing.COMPLETE
        return Standing.UNPROVEN

    def is_withdrawn(self, key: Key) -> bool:
        local = self._local.get(key)
        return local is not None and local.is_withdrawn

    def sources_of(self, key: Key, name: str) -> tuple[int, ...] | None:
        """The other nodes that should hold an object, or the manifest; None where placement says nothing of it."""
        if name == MANIFEST_NAME:
            return tuple(sorted(self.membership.neighbours(self.index)))[:_MANIFEST_SOURCES_MAX]
        local = self._local.get(key)
        home = self.membership.node_of_rank(_rank(name))
        if local is None or not local.is_ours or home is None:
            return None
        return tuple(index for index in (home, *self.membership.holders(home)) if index != self.index)

    @property
    def is_busy(self) -> bool:
        """Whether copies are being made, here or at a holder."""
        return bool(self._acquiring or self._wanted())

    def known_holders(self, key: Key) -> dict[str, tuple[int, ...]]:
        """Object name -> nodes known to hold it: confirmed ones, and those placement names of a replicated version."""
        local = self._local[key]
        holders: dict[str, set[int]] = {name: set() for name in local.objects}
        for name in local.held:
            holders[name].add(self.index)
        confirmed = [h for h in self.holders if self._copies_on(key, h).stage is Stage.HELD]
        for name in local.own:
            holders[name].update(confirmed)
        if key in self._replicated:
            for name in local.objects:
                home = self.membership.node_of_rank(_rank(name))
                if home is not None:
                    holders[name].update((home, *self.membership.holders(home)))
                    if name not in local.held:
                        holders[name].discard(self.index)
        return {name: tuple(sorted(nodes)) for name, nodes in holders.items()}

    def _give_up(self) -> list[Effect]:
        superseded = self._superseded()
        keys = sorted(key for key in self._local if _version(key) in superseded and self._is_free(key))
        for key in keys:
            del self._local[key]
            self._copies.pop(key, None)
            self._retracts.pop(key, None)
            for known in (self._replicated, self._confirmed, self._promised, self._retracted):
                known.discard(key)
        return [GiveUp(key) for key in keys]

    def _is_free(self, key: Key) -> bool:
        """Whether nobody may come to rely on a superseded version; if so, the leader is asked for it back.

        Were a version only complete given up after it was told to be met, the leader could still call it
        replicated, and older ones that are would go for one that is not.
        """
        if key in self._replicated or sum(other > key for other in self._replicated) >= self.keep:
            return True
        is_inherited = self._inherited is not None and key in self._inherited
        if self.index == self.membership.leader:
            return not is_inherited  # the others will tell, if it was replicated
        if key in self._promised and not is_inherited:
            self._retracts.setdefault(key, _Repeat())
        return not is_inherited and key not in self._promised

    def _superseded(self) -> list[Version]:
        standings = {_version(key): self.standing(key) for key in self._local}
        busy = {_version(key) for key, _ in self._acquiring}
        busy |= {
            _version(key)
            for key, by_holder in self._copies.items()
            if any(copies.stage is Stage.COPYING for copies in by_holder.values())
        }
        return given_up(standings, keep=self.keep, busy=busy)


def _version(key: Key) -> Version:
    return Version(key.epoch, key.step)


def _rank(name: str) -> int:
    return int(name[4:].partition("-")[0]) if name.startswith("rank") else -1
