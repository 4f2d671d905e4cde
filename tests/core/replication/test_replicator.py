"""The decisions of replication, of several nodes that are driven by hand: no file, no socket, no clock."""

import random
from collections.abc import Iterable

import pytest

from flashpoint.replication import limits
from flashpoint.replication.membership import Member, Membership
from flashpoint.replication.messages import (
    Accepted,
    Farewell,
    Held,
    Key,
    Met,
    Offer,
    Outcome,
    Query,
    Refused,
    Retract,
    Retracted,
    Withdraw,
)
from flashpoint.replication.replicator import (
    Acquire,
    Announce,
    Answer,
    Delete,
    GiveUp,
    Local,
    Note,
    Replicator,
    Say,
)
from flashpoint.retention import Standing, Version

JOB = "0" * 32


def membership(nodes: int, *, copies: int = 1, epoch: int = 1) -> Membership:
    members = [Member(index=i, node=f"node-{i}", ranks=(i,)) for i in range(nodes)]
    return Membership(job=JOB, epoch=epoch, copies=copies, members=tuple(members))


def key(step: int, *, epoch: int = 1, digest: str = "a") -> Key:
    return Key(epoch, step, digest * 32)


def name(rank: int) -> str:
    return f"rank{rank:05d}-0.safetensors"


class World:
    """Nodes, and a network between them that a test may spoil.

    Args:
        loss: share of messages that are lost, and of those that come twice.
    """

    def __init__(
        self, nodes: int, *, copies: int = 1, keep: int = 1, loss: float = 0.0, seed: int = 0
    ) -> None:
        self.members = membership(nodes, copies=copies)
        self.keep = keep
        self.replicators = [Replicator(self.members, i, keep=keep) for i in range(nodes)]
        self.memory: list[dict[Key, set[str]]] = [{} for _ in range(nodes)]
        self.announced: list[list[Key]] = [[] for _ in range(nodes)]
        self.given_up: list[list[Key]] = [[] for _ in range(nodes)]
        self.down: set[int] = set()
        self.now_s = 0.0
        self.loss = loss
        self.rng = random.Random(seed)
        self.mail: list[tuple[int, int, object]] = []

    def save(self, version: Key, *, told: bool = True) -> None:
        """Every node has written its own object; the trainers may not have lived to tell."""
        for index, memory in enumerate(self.memory):
            memory[version] = {name(index)}
        for index in range(len(self.memory)):
            self.look(index)
            if told:
                self.do(
                    index, self.replicators[index].completed(Version(version.epoch, version.step), self.now_s)
                )

    def look(self, index: int) -> None:
        objects = tuple(name(rank) for rank in range(len(self.memory)))
        local = {
            version: Local(100, objects, (name(index),), frozenset(held), True)
            for version, held in self.memory[index].items()
        }
        self.do(index, self.replicators[index].found(local, self.now_s))

    def do(self, index: int, effects: Iterable[object]) -> None:
        for effect in effects:
            if isinstance(effect, Say | Answer):
                for _ in range(self.rng.choice([0, 2]) if self.rng.random() < self.loss else 1):
                    self.mail.append((index, effect.node, effect))
            elif isinstance(effect, Acquire):
                self.mail.append((effect.source, index, effect))
            elif isinstance(effect, GiveUp):
                assert effect.key in self.memory[index]
                del self.memory[index][effect.key]
                self.given_up[index].append(effect.key)
            elif isinstance(effect, Announce):
                self.announced[index].append(effect.key)

    def deliver(self) -> None:
        while self.mail:
            sender, receiver, effect = self.mail.pop(self.rng.randrange(len(self.mail)) if self.loss else 0)
            if sender in self.down or receiver in self.down:
                continue
            node = self.replicators[receiver]
            if isinstance(effect, Say):
                self.do(receiver, node.requested(sender, effect.message, self.now_s))
            elif isinstance(effect, Answer):
                self.do(receiver, node.replied(sender, effect.message, self.now_s))
            elif isinstance(effect, Acquire):
                there = self.memory[sender].get(effect.key, set())
                error = None if there.issuperset(effect.objects) else ("no-version", "it was given up")
                if error is None:
                    self.memory[receiver].setdefault(effect.key, set()).update(effect.objects)
                self.look(receiver)
                self.do(receiver, node.acquired(effect.key, sender, error, self.now_s))

    def run(self, seconds: float) -> None:
        self.deliver()
        for _ in range(int(seconds * 4)):
            self.now_s += 0.25
            for index, node in enumerate(self.replicators):
                if index not in self.down:
                    self.do(index, node.tick(self.now_s))
            self.deliver()


@pytest.mark.parametrize(("nodes", "copies"), [(1, 1), (2, 1), (3, 1), (3, 2), (5, 2), (8, 1)])
def test_a_version_is_replicated_when_every_holder_has_confirmed(nodes: int, copies: int) -> None:
    world = World(nodes, copies=copies)
    world.save(key(1))
    world.run(1)
    for index in range(nodes):
        assert world.announced[index] == [key(1)]
        assert world.replicators[index].standing(key(1)) is Standing.REPLICATED
    for index in range(nodes):
        for holder in world.members.holders(index):
            assert name(index) in world.memory[holder][key(1)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.fault(26)
def test_lost_repeated_and_reordered_messages_delay_it_only(seed: int) -> None:
    world = World(4, copies=2, loss=0.5, seed=seed)
    for step in range(1, 4):
        world.save(key(step))
        world.run(150)
        assert [announced[-1] for announced in world.announced] == [key(step)] * 4


def test_the_older_version_goes_on_no_node_before_the_newer_is_replicated_on_all() -> None:
    world = World(3)
    world.save(key(1))
    world.run(1)
    world.down = {2}
    world.save(key(2))
    world.run(30)
    assert not any(world.given_up)
    world.down = set()
    world.run(60)
    assert world.given_up == [[key(1)]] * 3


def test_an_older_version_that_met_nothing_goes_when_a_newer_one_is_complete() -> None:
    world = World(2)
    world.save(key(1))
    world.run(1)
    world.down = {1}
    world.save(key(2))
    world.run(1)
    world.save(key(3))
    world.run(1)
    assert world.given_up[0] == [key(2)]  # 1 is what a lost node needs, 3 what a crash needs
    assert set(world.memory[0]) == {key(1), key(3)}


def test_a_version_that_no_trainer_called_complete_supersedes_nothing_until_it_is_replicated() -> None:
    world = World(2)
    world.save(key(1))
    world.run(1)
    world.down = {1}
    world.save(key(2))
    world.save(key(3), told=False)
    world.run(1)
    assert not world.given_up[0]
    world.down = set()
    world.run(60)
    assert set(world.memory[0]) == {key(3)}


def test_what_the_holder_is_fetching_is_finished_before_newer_versions() -> None:
    source = Replicator(membership(2), 0, keep=1)
    [first] = source.found({key(1): Local(1, (name(0),), (name(0),), frozenset({name(0)}), True)}, 0.0)
    assert first == Say(1, Offer(key(1), 1, (name(0),)))
    source.replied(1, Accepted(key(1)), 0.0)
    local = {key(step): Local(1, (name(0),), (name(0),), frozenset({name(0)}), True) for step in (1, 2, 3)}
    assert source.found(local, 0.1) == []
    effects = source.replied(1, Held(key(1)), 0.2)
    assert Say(1, Offer(key(3), 1, (name(0),))) in effects  # the newest, not the next


def test_a_refused_offer_is_made_again_and_told_to_people_once() -> None:
    source = Replicator(membership(2), 0, keep=1)
    source.found({key(1): Local(1, (name(0),), (name(0),), frozenset({name(0)}), True)}, 0.0)
    refused = Refused("offer", "no-space", "the tmpfs is full", key(1))
    [note] = source.replied(1, refused, 0.1)
    assert isinstance(note, Note)
    assert "no-space" in note.text
    assert source.tick(0.2) == []
    again = source.tick(limits.REPEAT_S + 0.1)
    assert again == [Say(1, Offer(key(1), 1, (name(0),)))]
    assert source.replied(1, refused, 3.0) == []


def test_an_older_epochs_version_is_offered_only_when_the_job_has_settled_on_it() -> None:
    source = Replicator(membership(2, epoch=5), 0, keep=1)
    held = Local(1, (name(0),), (name(0),), frozenset({name(0)}), True)
    good, bad = key(9, epoch=4), key(10, epoch=4)
    assert source.found({good: held, bad: held}, 0.0) == []
    assert source.settled(Version(4, 9), 1.0) == [Say(1, Offer(good, 1, (name(0),)))]


def test_a_node_whose_own_objects_are_missing_offers_nothing() -> None:
    source = Replicator(membership(2), 0, keep=1)
    assert source.found({key(1): Local(1, (name(0),), (name(0),), frozenset(), True)}, 0.0) == []


def test_another_worlds_version_is_not_offered() -> None:
    source = Replicator(membership(2), 0, keep=1)
    assert source.found({key(1): Local(1, (name(0),), (name(0),), frozenset({name(0)}), False)}, 0.0) == []


def test_an_offer_is_refused_where_a_newer_save_of_the_step_lies() -> None:
    holder = Replicator(membership(2, epoch=2), 1, keep=1)
    held = Local(1, (name(0),), (name(1),), frozenset({name(1)}), True)
    holder.found({key(1, epoch=2): held}, 0.0)
    [answer] = holder.requested(0, Offer(key(1, epoch=1, digest="b"), 1, (name(0),)), 0.0)
    assert isinstance(answer, Answer)
    assert isinstance(answer.message, Refused)
    assert answer.message.code == "stale-epoch"
    [answer] = holder.requested(0, Offer(key(1, epoch=2, digest="b"), 1, (name(0),)), 0.0)
    assert answer.message.code == "busy"


def test_the_same_offer_twice_is_one_acquisition() -> None:
    holder = Replicator(membership(2), 1, keep=1)
    offer = Offer(key(1), 1, (name(0),))
    assert Acquire(key(1), 0, 1, (name(0),)) in holder.requested(0, offer, 0.0)
    assert holder.requested(0, offer, 0.1) == [Answer(0, Accepted(key(1)))]


def test_only_a_nodes_own_objects_are_withdrawn_on_its_word() -> None:
    holder = Replicator(membership(3), 1, keep=1)
    names = tuple(map(name, range(3)))
    holder.found({key(1): Local(1, names, (name(1),), frozenset(names), True)}, 0.0)
    [refused] = holder.requested(0, Withdraw(key(1), (name(2),)), 0.0)
    assert refused.message.code == "no-object"
    effects = holder.requested(0, Withdraw(key(1), (name(0),)), 0.0)
    assert effects[0] == Delete(key(1), (name(0),))


def test_what_is_held_is_told_by_digest() -> None:
    holder = Replicator(membership(2), 1, keep=1)
    names = (name(0), name(1))
    holder.found({key(1): Local(1, names, (name(1),), frozenset(names), True)}, 0.0)
    [answer] = holder.requested(0, Query(key(1)), 0.0)
    assert answer.message.objects == names
    [answer] = holder.requested(0, Query(key(1, digest="b")), 0.0)
    assert answer.message.objects == ()


def test_only_the_leader_says_what_is_replicated() -> None:
    leader, other = (Replicator(membership(3), index, keep=1) for index in (0, 1))
    assert leader.requested(1, Met(key(1)), 0.0) == [Answer(1, Outcome(key(1), replicated=False))]
    [answer] = other.requested(2, Met(key(1)), 0.0)
    assert answer.message.code == "unknown-node"


@pytest.mark.parametrize("restarted", [0, 1, 2])
def test_an_agent_that_is_started_again_learns_what_was_replicated(restarted: int) -> None:
    world = World(3, keep=0)
    world.save(key(1))
    world.save(key(2))
    world.run(5)
    world.replicators[restarted] = Replicator(world.members, restarted, keep=0)
    for index, node in enumerate(world.replicators):
        if index != restarted:
            world.do(index, node.lost(restarted))
            node.opened(restarted)
    world.look(restarted)
    world.run(10)
    for version in (key(1), key(2)):
        assert world.replicators[restarted].standing(version) is Standing.REPLICATED
    world.run(60)
    assert not world.mail
    assert all(node.tick(world.now_s) == [] for node in world.replicators), "something is told for ever"


def holding(*steps: int) -> dict[Key, Local]:
    """Versions of two nodes as node 1 has them, whole."""
    names = (name(0), name(1))
    return {key(step): Local(1, names, (name(1),), frozenset(names), True) for step in steps}


def said(effects: Iterable[object]) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, Say)]


def promised_and_superseded() -> Replicator:
    """Node 1 has told the leader that step 1 is met; then step 2 is complete, and met nowhere."""
    node = Replicator(membership(2), 1, keep=1)
    node.found({}, 0.0)
    node.found(holding(1), 0.0)
    node.completed(Version(1, 1), 0.0)
    assert Met(key(1)) in said(node.replied(0, Held(key(1)), 0.1))
    node.found(holding(1, 2), 0.2)
    assert said(node.completed(Version(1, 2), 0.3)) == [Retract(key(1))]
    return node


def test_what_was_told_to_be_met_is_asked_back_before_it_is_given_up() -> None:
    node = promised_and_superseded()
    assert GiveUp(key(1)) not in node.tick(1.0)
    assert node.replied(0, Retracted(key(1)), 1.1) == [GiveUp(key(1))]


def test_what_turns_out_to_be_replicated_is_not_given_up() -> None:
    node = promised_and_superseded()
    assert node.replied(0, Outcome(key(1), replicated=True), 1.1) == [Announce(key(1))]
    assert GiveUp(key(1)) not in node.tick(1.2)


def test_the_leader_counts_on_nobody_who_has_retracted() -> None:
    leader = Replicator(membership(3), 0, keep=1)
    leader.found({}, 0.0)
    assert leader.requested(1, Retract(key(1)), 0.0) == [Answer(1, Retracted(key(1)))]
    for index in (1, 2):  # the first comes late
        [answer] = leader.requested(index, Met(key(1)), 0.0)
        assert answer.message == Outcome(key(1), replicated=False)
    assert leader._met_by[key(1)] == {2}


def test_a_leader_that_was_started_again_lets_go_of_nothing_that_it_may_have_announced() -> None:
    leader = Replicator(membership(2), 0, keep=1)
    leader.found(holding(1), 0.0)
    [answer] = leader.requested(1, Retract(key(1)), 0.0)
    assert answer.message.code == "behind"
    leader.completed(Version(1, 1), 0.1)
    leader.found(holding(1, 2), 0.2)
    assert GiveUp(key(1)) not in leader.completed(Version(1, 2), 0.3)
    node = promised_and_superseded()
    node.replied(0, answer.message, 1.0)
    assert not {type(effect) for effect in node.tick(50.0)} & {GiveUp, Retract}


def test_what_a_restarted_node_heard_to_be_replicated_it_tells_a_restarted_leader() -> None:
    node = Replicator(membership(2), 1, keep=1)
    node.found(holding(1), 0.0)  # its own copies are not confirmed to it in this life
    node.replied(0, Outcome(key(1), replicated=True), 0.1)
    node.lost(0)
    assert said(node.tick(1.0)) == [Met(key(1))]


def test_a_lost_peer_is_offered_everything_again() -> None:
    source = Replicator(membership(2), 0, keep=1)
    source.found({key(1): Local(1, (name(0),), (name(0),), frozenset({name(0)}), True)}, 0.0)
    source.replied(1, Accepted(key(1)), 0.1)
    source.lost(1)
    assert source.tick(0.2) == [Say(1, Offer(key(1), 1, (name(0),)))]


def test_a_released_node_goes_when_its_neighbours_need_nothing_more_of_it() -> None:
    world = World(2)
    first, second = world.replicators
    world.save(key(1))
    world.do(0, first.released(world.now_s))
    world.run(5)
    assert world.announced == [[key(1)]] * 2
    assert not first.may_go
    world.do(1, second.released(world.now_s))
    world.run(5)
    assert first.may_go
    assert second.may_go


def test_a_released_node_does_not_wait_for_who_is_not_there() -> None:
    node = Replicator(membership(2), 0, keep=1)
    assert [effect.message for effect in node.released(0.0)] == [Farewell()]
    assert not node.may_go
    node.lost(1)
    assert node.may_go
    node.opened(1)
    assert not node.may_go


@pytest.mark.parametrize("seed", range(10))
def test_all_nodes_of_a_job_that_is_done_go_however_messages_fare(seed: int) -> None:
    world = World(4, copies=1, loss=0.5, seed=seed)
    world.save(key(1))
    for index, node in enumerate(world.replicators):
        world.do(index, node.released(world.now_s))
    world.run(300)
    assert all(node.may_go for node in world.replicators)


# ---- versions that are corrupt, with no good copy left ------------------------------------------------


def local(version_names: Iterable[int], own: int, held: Iterable[int], *, withdrawn: bool = False) -> Local:
    names = tuple(map(name, version_names))
    return Local(1, names, (name(own),), frozenset(map(name, held)), True, withdrawn)


def test_a_withdrawn_version_is_neither_offered_nor_met_and_supersedes_nothing() -> None:
    node = Replicator(membership(3), 1, keep=1)
    node.found({key(1): local(range(3), 1, (0, 1))}, 0.0)
    node.replied(2, Held(key(1)), 0.0)
    assert node.replied(0, Outcome(key(1), replicated=True), 0.0)
    both = {key(1): local(range(3), 1, (0, 1)), key(2): local(range(3), 1, (0,), withdrawn=True)}
    effects = node.found(both, 1.0) + node.completed(Version(1, 2), 1.0) + node.tick(100.0)
    assert not [e for e in effects if isinstance(e, GiveUp)]
    assert not [
        e
        for e in effects
        if isinstance(e, Say) and isinstance(e.message, Offer | Met) and e.message.key == key(2)
    ]
    assert node.standing(key(2)) is Standing.UNPROVEN
    assert node.is_withdrawn(key(2)) and not node.is_withdrawn(key(1))
    assert not node.is_busy
    assert 1 not in node.known_holders(key(2))[name(1)]


def test_what_was_promised_is_asked_back_before_it_counts_for_nothing() -> None:
    node = Replicator(membership(3), 1, keep=1)
    node.found({key(2): local(range(3), 1, (0, 1))}, 0.0)
    effects = node.replied(2, Held(key(2)), 0.0)
    assert Say(0, Met(key(2))) in effects
    effects = node.found({key(2): local(range(3), 1, (0,), withdrawn=True)}, 1.0)
    assert Say(0, Retract(key(2))) in effects
    assert Say(0, Retract(key(2))) in node.tick(100.0)  # until it is answered
    node.replied(0, Retracted(key(2)), 101.0)
    # Also when it is whole again: the leader counts on this node's word no more.
    effects = node.found({key(2): local(range(3), 1, (0, 1))}, 200.0) + node.tick(300.0)
    assert not [e for e in effects if isinstance(e, Say) and isinstance(e.message, Met | Retract)]


def test_a_leader_counts_itself_no_more_when_it_withdraws() -> None:
    leader = Replicator(membership(2), 0, keep=1)
    leader.found({key(2): local(range(2), 0, (0, 1))}, 0.0)
    leader.replied(1, Held(key(2)), 0.0)
    leader.found({key(2): local(range(2), 0, (1,), withdrawn=True)}, 1.0)
    assert leader.requested(1, Met(key(2)), 2.0) == [Answer(1, Outcome(key(2), replicated=False))]
    assert leader.standing(key(2)) is Standing.UNPROVEN


def test_a_restarted_node_finds_what_it_had_withdrawn_and_asks_for_its_word() -> None:
    node = Replicator(membership(3), 1, keep=1)
    effects = node.found({key(2): local(range(3), 1, (0,), withdrawn=True)}, 0.0)
    assert Say(0, Retract(key(2))) in effects  # the agent before it may have said met


def test_retracts_of_what_is_withdrawn_keep_no_newer_version_from_being_promised() -> None:
    node = Replicator(membership(3), 1, keep=0)
    lost = {key(step): local(range(3), 1, (0,), withdrawn=True) for step in (1, 2, 3)}
    node.found(lost, 0.0)
    node.found({**lost, key(4): local(range(3), 1, (0, 1))}, 1.0)
    assert Say(0, Met(key(4))) in node.replied(2, Held(key(4)), 2.0)


def test_who_may_have_a_good_copy() -> None:
    node = Replicator(membership(4, copies=2), 1, keep=1)
    node.found({key(1): local(range(4), 1, (0, 1, 3)), key(2): Local(1, (), (), frozenset(), False)}, 0.0)
    home = node.membership.holders(1)
    assert node.sources_of(key(1), name(1)) == home
    assert set(node.sources_of(key(1), name(0)) or ()) == {0, *node.membership.holders(0)} - {1}
    assert node.sources_of(key(2), name(0)) is None  # another number of ranks wrote it
    assert node.sources_of(key(3), name(0)) is None
    assert set(node.sources_of(key(1), ".metadata") or ()) == node.membership.neighbours(1)
    alone = Replicator(membership(1, copies=0), 0, keep=1)
    alone.found({key(1): local(range(1), 0, (0,))}, 0.0)
    assert alone.sources_of(key(1), name(0)) == ()
