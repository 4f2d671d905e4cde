"""The formulas of `flashpoint.planning`: against numbers worked out by hand, their limits, and simulated failures."""

import math
import random

import pytest

from flashpoint.planning import (
    Job,
    Level,
    Plan,
    Policy,
    Rates,
    best_interval,
    best_steps,
    daly_interval,
    fatal_rate,
    goodput,
    goodput_of,
    memory_of,
    mtbf_of,
    plan,
    young_interval,
)

DAY_S = 86_400.0
RATES = Rates(copy=10e9, seal=20e9, network=2e9, storage=0.5e9)
JOB = Job(state_bytes=80e9, nodes=8, step_s=2.0, node_mtbf_s=800 * DAY_S, process_mtbf_s=DAY_S)
STORAGE_EVERY_S = 1800.0


# ---- one kind of failure ------------------------------------------------------------------------


def test_young_and_daly_as_worked_out_by_hand() -> None:
    # sqrt(2 * 60 * 86400) = sqrt(10368000)
    assert young_interval(60, DAY_S) == pytest.approx(3219.937888, abs=1e-6)
    # 60 / (2 * 86400) = 1 / 2880: times 1 + sqrt(1 / 2880) / 3 + 1 / 2880 / 9, minus 60
    assert daly_interval(60, DAY_S) == pytest.approx(
        3219.937888 * (1 + 0.00621130 + 0.00003858) - 60, abs=1e-4
    )
    assert daly_interval(2 * DAY_S, DAY_S) == daly_interval(9 * DAY_S, DAY_S) == DAY_S


@pytest.mark.parametrize("cost_s", [1e-6, 0.1, 60.0, 3600.0, DAY_S, 3 * DAY_S])
def test_the_best_interval_is_where_goodput_is_highest(cost_s: float) -> None:
    best_s = best_interval(cost_s, DAY_S)
    there = goodput(best_s, cost_s, DAY_S, restart_s=100, latency_s=10)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert goodput(factor * best_s, cost_s, DAY_S, restart_s=100, latency_s=10) <= there * (1 + 1e-15)


def test_young_and_daly_near_the_best_interval_where_a_save_is_cheap() -> None:
    assert daly_interval(60, DAY_S) == pytest.approx(best_interval(60, DAY_S), rel=1e-6)
    assert young_interval(0.1, DAY_S) == pytest.approx(best_interval(0.1, DAY_S), rel=1e-2)
    assert best_interval(0, DAY_S) == 0


def test_without_failures_only_the_saves_cost_anything() -> None:
    assert (
        young_interval(60, math.inf) == daly_interval(60, math.inf) == best_interval(60, math.inf) == math.inf
    )
    for mtbf_s in (1e15, math.inf):
        assert goodput(900, 100, mtbf_s, restart_s=1000, latency_s=500) == pytest.approx(0.9, rel=1e-9)
    assert goodput(900, 0, math.inf) == 1


def test_where_everything_fails_all_the_time_nothing_is_left() -> None:
    assert goodput(3600, 60, 1.0, restart_s=60) == 0
    assert goodput(0, 60, DAY_S) == 0
    assert goodput(60, 60, DAY_S, restart_s=1e9) == 0


def test_what_is_usable_late_costs_as_much_as_a_longer_restart() -> None:
    assert goodput(600, 6, DAY_S, latency_s=90) == pytest.approx(goodput(600, 6, DAY_S, restart_s=90))


# ---- simulated failures -------------------------------------------------------------------------


def simulated(levels: list[Level], interval_s: float, cost_s: float, *, failures: int, seed: int) -> float:
    """Goodput of a run with so many failures, version by version.

    Training is at ``position``, in seconds of work and of saves. Of level i, versions are taken at multiples of its
    ``every_s``; those it may go back to are no older than what the deeper levels went back to.
    """
    rng = random.Random(seed)
    rates = [level.failures_per_s for level in levels]
    position = clock = 0.0
    newest = [0.0] * len(levels)  # position of the newest version of each level
    for _ in range(failures):
        alive_s = rng.expovariate(sum(rates))
        kind = rng.choices(range(len(levels)), rates)[0]
        position, clock = position + alive_s, clock + alive_s
        for i, level in enumerate(levels):
            version = math.floor((position - level.latency_s) / level.every_s) * level.every_s
            newest[i] = max(newest[i], version)
        position = newest[kind]
        newest[:kind] = [position] * kind  # what a deeper level lost, the others lost too
        while (down_s := rng.expovariate(sum(rates))) < levels[kind].restart_s:
            clock += down_s
        clock += levels[kind].restart_s
    return position / clock * interval_s / (interval_s + cost_s)


@pytest.mark.parametrize(
    ("cost_s", "interval_s", "restart_s", "latency_s"),
    [(60, 3000, 300, 0), (5, 600, 120, 30), (600, 5000, 2000, 900), (0.1, 20_000, 60, 5)],
)
def test_goodput_is_that_of_simulated_failures(
    cost_s: float, interval_s: float, restart_s: float, latency_s: float
) -> None:
    mtbf_s = 20_000.0
    level = Level(1 / mtbf_s, interval_s + cost_s, latency_s, restart_s)
    found = simulated([level], interval_s, cost_s, failures=100_000, seed=1)
    expected = goodput(interval_s, cost_s, mtbf_s, restart_s=restart_s, latency_s=latency_s)
    assert expected == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize(
    "levels",
    [
        [
            Level(1 / 10_000, 300.0, 4.0, 60.0),
            Level(1 / 30_000, 600.0, 20.0, 300.0),
            Level(1 / 200_000, 3600.0, 200.0, 900.0),
        ],
        # Rare, but each costs days: versions are further apart than failures.
        [Level(1 / 10_000, 300.0, 4.0, 60.0), Level(1 / 1_000_000, 100_000.0, 2000.0, 900.0)],
    ],
)
def test_goodput_of_several_kinds_of_failure_is_that_of_simulated_ones(levels: list[Level]) -> None:
    cost_s, interval_s = 2.0, 298.0
    found = simulated(levels, interval_s, cost_s, failures=100_000, seed=2)
    assert goodput_of(levels, interval_s, cost_s) == pytest.approx(found, rel=0.01)
    assert goodput_of(levels[:1], interval_s, cost_s) > found * 1.03  # so that the others do count


def test_objects_lost_with_all_their_copies_are_as_many_as_simulated() -> None:
    """Nodes in a ring, an object's copies on the next ones; a node is back after a while."""
    nodes, mtbf_s, window_s, rng = 16, 10_000.0, 300.0, random.Random(3)
    back_s = [0.0] * nodes
    clock, lost = 0.0, 0
    for _ in range(200_000):
        clock += rng.expovariate(nodes / mtbf_s)
        node = rng.randrange(nodes)
        if clock < back_s[node]:
            continue
        back_s[node] = clock + window_s
        down = [back > clock for back in back_s]
        lost += any(down[node - 1 + k] and down[(node + k) % nodes] for k in (0, 1))
    job = Job(state_bytes=1, nodes=nodes, step_s=1, node_mtbf_s=mtbf_s)
    assert fatal_rate(job, 1, window_s) == pytest.approx(lost / clock, rel=0.07)
    assert fatal_rate(job, 0, window_s) == nodes / mtbf_s
    assert fatal_rate(job, 2, window_s) < fatal_rate(job, 1, window_s) / 10


# ---- a job --------------------------------------------------------------------------------------


def planned(policy: Policy, job: Job = JOB, **how: int) -> Plan:
    return plan(job, RATES, policy, **how)


def test_a_jobs_failures_are_those_of_its_nodes_and_of_its_processes() -> None:
    assert mtbf_of(JOB) == pytest.approx(DAY_S / (1 + 8 / 800))
    assert mtbf_of(Job(state_bytes=1, nodes=8, step_s=1, node_mtbf_s=math.inf)) == math.inf


def test_memory_of_a_node_as_counted_by_hand() -> None:
    share = 10e9
    assert memory_of(JOB, Policy(keep=0, blocking_storage=True)) == (0, 0)
    assert memory_of(JOB, Policy(keep=0)) == (share, 0)
    assert memory_of(JOB, Policy()) == (3 * share, 0)  # one stands, one is to stand higher, one is written
    assert memory_of(JOB, Policy(keep=3)) == (5 * share, 0)
    assert memory_of(JOB, Policy(copies=2)) == (3 * share, 4 * share)


def test_times_of_a_plan_as_counted_by_hand() -> None:
    # 10 GB a node: copied in 1 s, checksummed in 0.5 s, to one peer in 5 s, to storage in 20 s
    memory = planned(Policy(copies=0, storage_every_s=STORAGE_EVERY_S), steps=30)
    assert (memory.blocking_s, memory.usable_s, memory.interval_s) == pytest.approx((1.0, 1.5, 60.0))
    assert planned(Policy(copies=1), steps=30).usable_s == pytest.approx(6.5)
    assert planned(Policy(keep=0, blocking_storage=True), steps=30).blocking_s == pytest.approx(20.0)
    assert planned(Policy(keep=0), steps=30).usable_s == pytest.approx(21.0)
    # sqrt(2 * 1 s * mtbf)
    assert memory.young_s == pytest.approx(math.sqrt(2 * mtbf_of(JOB)))
    assert memory.falls_back_per_month == pytest.approx(30 * 8 / 800)


def test_a_plan_of_one_kind_of_failure_is_dalys() -> None:
    job = Job(
        state_bytes=80e9, nodes=8, step_s=2.0, node_mtbf_s=math.inf, process_mtbf_s=DAY_S, restart_s=100
    )
    found = planned(Policy(copies=0), job)
    restart_s = 100 + 1.5  # and the load: copied and checksummed
    assert found.goodput == pytest.approx(
        goodput(found.interval_s, 1.0, DAY_S, restart_s=restart_s, latency_s=0.5), rel=1e-12
    )
    assert abs(found.interval_s - best_interval(1.0, DAY_S)) <= job.step_s
    assert found.recovery_s == pytest.approx(restart_s)


def test_the_interval_of_a_plan_is_the_best_of_whole_steps() -> None:
    for policy in (
        Policy(copies=1, storage_every_s=STORAGE_EVERY_S),
        Policy(keep=0),
        Policy(keep=0, blocking_storage=True),
    ):
        found = planned(policy)
        for steps in range(max(found.steps - 30, 11), found.steps + 30):
            assert planned(policy, steps=steps).goodput <= found.goodput


def test_no_save_is_planned_before_the_last_one_is_out_of_the_way() -> None:
    job = Job(state_bytes=80e9, nodes=8, step_s=2.0, node_mtbf_s=600.0, restart_s=1, replace_s=1)
    assert planned(Policy(keep=0), job).steps * job.step_s >= 20  # of storage


def test_each_further_copy_falls_back_to_storage_less_often_and_loses_less() -> None:
    job = Job(state_bytes=80e9, nodes=1024, step_s=2.0, node_mtbf_s=200 * DAY_S)
    policies = [
        Policy(keep=0, blocking_storage=True),
        *(Policy(copies=copies, storage_every_s=STORAGE_EVERY_S) for copies in (0, 1, 2)),
    ]
    blocking, none, one, two = (planned(policy, job) for policy in policies)
    assert none.falls_back_per_month > 100 * one.falls_back_per_month > 10_000 * two.falls_back_per_month > 0
    assert blocking.goodput < one.goodput and none.goodput < one.goodput
    assert none.lost_s > 3 * one.lost_s


def test_without_failures_a_plan_loses_nothing() -> None:
    job = Job(state_bytes=80e9, nodes=8, step_s=2.0, node_mtbf_s=math.inf)
    found = planned(Policy(copies=1), job)
    assert (found.lost_s, found.recovery_s, found.falls_back_per_month) == (0, 0, 0)
    assert found.goodput > 0.999999


def test_copies_need_other_nodes() -> None:
    with pytest.raises(ValueError, match="copies=8 needs more than 8 nodes"):
        planned(Policy(copies=8))


def test_best_steps_finds_the_top_whatever_the_range() -> None:
    for top in (1, 7, 1000, 999_983):
        assert best_steps(lambda n, top=top: -abs(n - top), 1, 1_000_000) == top
    assert best_steps(lambda n: 0.0, 5, 5) == 5
