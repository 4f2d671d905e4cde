import random
import time
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashpoint.errors import ConfigError
from flashpoint.manifest import ObjectRecord
from flashpoint.replication.membership import Member, Membership
from flashpoint.replication.placement import Slot, place, sources

COPIES = st.integers(0, 5) | st.integers(0, 70)


@st.composite
def jobs(draw) -> list[Slot]:
    """1 to 60 nodes in domains of any sizes, some of them on their own."""
    count = draw(st.integers(1, 60))
    names = st.sampled_from(["", *"abcdefgh"][: draw(st.integers(1, 9))])
    if draw(st.booleans()):  # a few domains that are much larger than others
        names |= st.just("a")
    indexes = draw(st.permutations(range(count)))
    return [Slot(index, draw(names)) for index in indexes]


def of_sizes(*sizes: int) -> list[Slot]:
    """Slots of domains of these sizes."""
    domains = [f"rack-{number}" for number, size in enumerate(sizes) for _ in range(size)]
    return [Slot(index, domain) for index, domain in enumerate(domains)]


def domains_of(slots: list[Slot]) -> dict[int, object]:
    return {slot.index: slot.domain or slot.index for slot in slots}


def loads_of(placement: dict[int, tuple[int, ...]]) -> list[int]:
    """For how many slots each slot holds copies, ascending."""
    return sorted(len(sources(placement, index)) for index in placement)


# ---- the rules ------------------------------------------------------------------------------------


@given(jobs(), COPIES)
@settings(max_examples=200)
def test_each_slot_has_its_copies_on_other_slots(slots, copies):
    placement = place(slots, copies)
    assert list(placement) == sorted(slot.index for slot in slots)
    for index, holders in placement.items():
        assert len(holders) == len(set(holders)) == min(copies, len(slots) - 1)
        assert set(holders) <= placement.keys() - {index}


@given(jobs(), COPIES)
@settings(max_examples=200)
def test_no_domain_is_used_twice_while_another_is_unused(slots, copies):
    domains = domains_of(slots)
    for index, holders in place(slots, copies).items():
        used = [domains[i] for i in (index, *holders)]
        assert len(set(used)) == min(len(used), len(set(domains.values())))


@given(jobs(), COPIES)
@example(of_sizes(1, 1, 1, 6), 2)
@example(of_sizes(5, 1), 2)
@settings(max_examples=300)
def test_no_placement_within_that_rule_is_more_even(slots, copies):
    """The bounds hold for any: a domain has at most, or at least, one copy of each slot of the others."""
    count = len(slots)
    copies = min(copies, count - 1)
    sizes = list(Counter(domains_of(slots).values()).values())
    enough = len(sizes) > copies

    def possible(load: int) -> int:
        """Of all copies, how many there are if each slot holds so many, as far as the rule lets it."""
        return sum((min if enough else max)(count - size, load * size) for size in sizes)

    loads = loads_of(place(slots, copies))
    total = copies * count
    assert sum(loads) == total
    if enough:
        assert loads[-1] == next(load for load in range(count) if possible(load) >= total)
        assert loads[0] == min(copies, *((count - size) // size for size in sizes))
    else:
        assert loads[0] == max(load for load in range(count) if possible(load) <= total)
        assert loads[-1] == max(copies, *(-(-(count - size) // size) for size in sizes))


@given(jobs(), COPIES)
@settings(max_examples=100)
def test_where_every_domain_can_take_its_share_each_slot_holds_as_many_as_it_has(slots, copies):
    sizes = Counter(domains_of(slots).values()).values()
    copies = min(copies, len(slots) - 1)
    parts = copies + 1
    shares = [
        parts * size <= len(slots) if len(sizes) > copies else parts * size >= len(slots) for size in sizes
    ]
    if all(shares):
        assert set(loads_of(place(slots, copies))) == {copies}


@given(jobs(), COPIES, st.randoms(use_true_random=False))
def test_the_order_in_which_slots_are_given_does_not_matter(slots, copies, chance):
    shuffled = slots[:]
    chance.shuffle(shuffled)
    assert place(shuffled, copies) == place(slots, copies)


@given(jobs(), COPIES)
def test_what_a_domain_is_called_does_not_matter(slots, copies):
    names = dict(zip("abcdefgh", ["x/1", "rack 9", "", "-1", "0", "ß", "z" * 99, "y"], strict=True))
    del names["c"]
    renamed = [Slot(index, names.get(domain, domain)) for index, domain in slots]
    assert place(renamed, copies) == place(slots, copies)


@given(jobs(), COPIES)
def test_sources_are_the_slots_that_name_this_one_a_holder(slots, copies):
    placement = place(slots, copies)
    for index in placement:
        for source in placement:
            assert (source in sources(placement, index)) == (index in placement[source])


# ---- examples -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 5, 8, 101])
def test_nodes_without_domains_hold_one_copy_each(count):
    placement = place([Slot(index) for index in range(count)], 1)
    assert loads_of(placement) == [1] * count


def test_a_lone_node_has_nobody_to_hold_copies():
    assert place([Slot(0, "a")], 2) == {0: ()}
    assert place([], 2) == {}


def test_without_copies_nobody_holds_any():
    assert place(of_sizes(2, 2), 0) == {0: (), 1: (), 2: (), 3: ()}


def test_two_racks_hold_each_others_copies():
    placement = place(of_sizes(3, 3), 1)
    assert all((index < 3) != (holder < 3) for index, (holder,) in placement.items())
    assert loads_of(placement) == [1] * 6


def test_a_small_rack_holds_what_it_must_evenly():
    assert loads_of(place(of_sizes(6, 2), 1)) == [0, 0, 0, 0, 1, 1, 3, 3]


def test_indexes_need_not_be_without_gaps():
    placement = place([Slot(7, "a"), Slot(900, "b")], 1)
    assert placement == {7: (900,), 900: (7,)}


@pytest.mark.parametrize("copies", [-1, -70])
def test_a_negative_number_of_copies_is_refused(copies):
    with pytest.raises(ConfigError, match=f"copies is {copies}"):
        place(of_sizes(2), copies)


def test_an_index_that_is_given_twice_is_refused():
    with pytest.raises(ConfigError, match="3 nodes have 2 different indexes"):
        place([Slot(0), Slot(1), Slot(0, "a")], 1)


@pytest.mark.parametrize("copies", [1, 2, 64])
def test_thousands_of_uneven_nodes_are_placed_at_once(copies):
    chance = random.Random(7)
    slots = [Slot(index, f"rack-{int(chance.expovariate(0.1))}") for index in range(4_000)]
    began_s = time.perf_counter()
    place(slots, copies)
    assert time.perf_counter() - began_s < 30


# ---- which objects a node is to hold --------------------------------------------------------------


def test_a_node_keeps_its_own_ranks_objects_and_those_it_holds_copies_of():
    members = tuple(Member(index=n, node=f"n{n}", ranks=(2 * n, 2 * n + 1)) for n in range(4))
    membership = Membership(job="ab" * 16, epoch=1, copies=1, members=members)
    records = [ObjectRecord(f"rank{rank:05d}-0.safetensors", 10, "", 4, b"") for rank in range(8)]
    (source,) = membership.sources(1)
    assert membership.keeps(1, records, 8) == {
        records[rank].name for node in (1, source) for rank in members[node].ranks
    }
    assert membership.keeps(1, records, 6) == set()  # the ranks of another world are not these
