from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint.retention import Standing, Version, given_up, left_over, newest_first, superseded

VERSIONS = st.lists(st.builds(Version, st.integers(0, 3), st.integers(0, 20)), max_size=12)


def test_what_a_restarted_job_saved_is_newer_even_at_a_lower_step():
    assert newest_first([Version(0, 100), Version(1, 60), Version(0, 9), Version(0, 10)]) == [
        Version(1, 60),
        Version(0, 100),
        Version(0, 10),
        Version(0, 9),
    ]


@given(VERSIONS, st.integers(1, 5))
def test_the_newest_ones_stay_and_the_others_go_oldest_first(versions, keep):
    gone = superseded(versions, keep=keep)
    stay = set(versions) - set(gone)
    assert len(stay) == min(keep, len(set(versions)))
    assert gone == sorted(gone)
    assert all(old < new for old in gone for new in stay)


@given(VERSIONS)
def test_keeping_none_back_means_keeping_all(versions):
    assert superseded(versions, keep=0) == []


def test_what_a_crash_kept_from_being_given_up_goes_once_enough_newer_ones_are_whole():
    versions = [Version(0, step) for step in (1, 2, 3)]
    assert left_over(versions, versions, keep=1) == versions[:2]
    assert left_over(versions, versions, keep=2) == versions[:1]
    assert left_over(versions, versions, keep=3) == []
    assert left_over(versions, versions, keep=0) == []
    assert left_over([], versions, keep=1) == []


def test_a_version_that_proved_bad_supersedes_nothing():
    versions = [Version(0, step) for step in (1, 2, 3)]
    assert left_over(versions, versions[:2], keep=1) == versions[:1]
    assert left_over(versions, [], keep=1) == []


@given(VERSIONS, VERSIONS, st.integers(1, 4))
def test_nothing_goes_but_for_newer_ones_that_every_node_held(agreed, complete, keep):
    gone = left_over(agreed, complete, keep=keep)
    stay = set(agreed) & set(complete) - set(gone)
    assert set(gone) <= set(agreed)
    assert all(sum(newer > old for newer in stay) >= keep for old in gone)


# ---- with copies on other nodes -------------------------------------------------------------------

UNPROVEN, COMPLETE, REPLICATED = Standing.UNPROVEN, Standing.COMPLETE, Standing.REPLICATED


def steps_given_up(*standings: Standing, keep: int = 1, busy: tuple[int, ...] = ()) -> list[int]:
    """Of versions at steps 0, 1, 2, ..., of these standings."""
    versions = {Version(0, step): standing for step, standing in enumerate(standings)}
    found = given_up(versions, keep=keep, busy=[Version(0, step) for step in busy])
    assert set(found) <= versions.keys()
    return [version.step for version in found]


def test_a_replicated_version_stays_until_a_newer_one_is_replicated_too():
    assert steps_given_up(REPLICATED, COMPLETE) == []
    assert steps_given_up(REPLICATED, COMPLETE, REPLICATED) == [0, 1]


def test_a_version_that_was_never_replicated_goes_for_a_newer_complete_one():
    assert steps_given_up(REPLICATED, COMPLETE, COMPLETE, COMPLETE) == [1, 2]
    assert steps_given_up(REPLICATED, COMPLETE, COMPLETE, COMPLETE, keep=2) == [1]


def test_a_version_that_is_being_copied_stays():
    assert steps_given_up(REPLICATED, COMPLETE, COMPLETE, COMPLETE, busy=(1,)) == [2]
    assert steps_given_up(REPLICATED, REPLICATED, busy=(0,)) == []


def test_an_unproven_version_supersedes_nothing_and_goes_only_for_replicated_ones():
    assert steps_given_up(REPLICATED, COMPLETE, UNPROVEN) == []
    assert steps_given_up(UNPROVEN, UNPROVEN, COMPLETE) == []
    assert steps_given_up(UNPROVEN, UNPROVEN, REPLICATED) == [0, 1]
    assert steps_given_up(UNPROVEN, COMPLETE, REPLICATED, UNPROVEN, keep=2) == []


@given(VERSIONS, st.integers(0, 5), st.sampled_from([COMPLETE, REPLICATED]))
def test_where_all_stand_alike_it_is_what_superseded_says(versions, keep, standing):
    assert given_up(dict.fromkeys(versions, standing), keep=keep) == superseded(versions, keep=keep)


HAPPENINGS = st.lists(
    st.tuples(
        st.sampled_from(["save", "save", "replicate", "replicate", "restart", "prove", "copy"]),
        st.integers(0, 30),
    ),
    max_size=40,
)


@given(HAPPENINGS, st.integers(1, 3))
@settings(max_examples=200)
def test_neither_frontier_ever_goes_back_and_what_is_held_is_bounded(happenings, keep):
    """A node through saves and replications in any order, and restarts after which it knows less than is."""
    truth: dict[Version, Standing] = {}
    known: dict[Version, Standing] = {}
    busy: set[Version] = set()
    epoch = 0
    for what, number in happenings:
        chosen = sorted(truth)[number % len(truth)] if truth else None
        if what == "save":
            version = Version(epoch, number)
            truth[version] = truth.get(version, COMPLETE)
            known[version] = known.get(version, COMPLETE)
        elif what == "restart":
            epoch += 1
            known = dict.fromkeys(known, UNPROVEN)
            busy.clear()
        elif chosen is None:
            continue
        elif what == "replicate":
            truth[chosen] = known[chosen] = REPLICATED
            busy.discard(chosen)
        elif what == "prove":
            known[chosen] = truth[chosen]
        else:
            busy ^= {chosen}
        before = frontiers(truth)

        gone = given_up(known, keep=keep, busy=busy)

        assert gone == sorted(gone)
        assert busy.isdisjoint(gone)
        for version in gone:
            del truth[version], known[version]
        assert frontiers(truth) == before
        unproven = [version for version in known if known[version] is UNPROVEN]
        assert len(known) <= 2 * keep + len(busy.union(unproven))
        assert given_up(known, keep=keep, busy=busy) == []


def frontiers(versions: dict[Version, Standing]) -> list[Version | None]:
    """The newest version that serves after a crash of processes, and after the loss of a node."""
    return [
        max((version for version in versions if versions[version] >= standing), default=None)
        for standing in (COMPLETE, REPLICATED)
    ]
