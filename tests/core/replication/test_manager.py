"""Agents of several nodes, over real sockets: that versions get replicated, and what that costs."""

import contextlib
import logging
import os
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from flashpoint.replication import orders
from flashpoint.replication.messages import Fetch
from tests.chaos import Chaos
from tests.core.replication.nodes import (
    HOST,
    KIB,
    MIB,
    Nodes,
    free_ports,
    hurry,
    name_of_rank,
)

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch, request_timeout_s=5.0)


@pytest.fixture
def chaos() -> Iterator[Chaos]:
    with Chaos(seed=1) as made:
        yield made


def warnings(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and text in r.getMessage()]


@contextlib.contextmanager
def mounted(*command: str, on: str) -> Iterator[None]:
    made = subprocess.run(["mount", *command, on], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"it cannot be mounted here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", on], check=True)


# ---- replication ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "copies", "encrypt"), [(2, 1, True), (2, 1, False), (3, 2, True), (4, 1, True)]
)
def test_a_version_is_replicated_without_anybody_asking_for_it(
    count: int, copies: int, encrypt: bool
) -> None:
    with Nodes(count, copies=copies, encrypt=encrypt).start() as nodes:
        for step in (1, 2):
            nodes.save(step, tell=False)  # agents look for themselves
            nodes.replicated(step)
        for node in nodes:
            assert len(node.objects(2)) == 1 + copies
            assert node.standing(2) == "replicated"
        nodes.until(lambda: all(node.steps() == {2} for node in nodes), "step 1 is given up")


def test_64_transfers_at_once_in_both_directions_finish() -> None:
    with Nodes(2, copies=0, keep=0, nbytes=128 * KIB).start() as nodes:
        for step in range(32):
            nodes.save(step, tell=False)
        keys = [nodes[0].key(step) for step in range(32)]
        for node in nodes:
            node.client.inquire()  # they look now
        together = threading.Barrier(64)

        def get(receiver: int, step: int) -> int:
            together.wait()
            wanted = orders.Wanted(name_of_rank(1 - receiver), (), (1 - receiver,))
            return nodes[receiver].client.retrieve(keys[step], [wanted], 30.0)

        with ThreadPoolExecutor(64) as pool:
            calls = [pool.submit(get, receiver, step) for step in range(32) for receiver in (0, 1)]
            assert all(call.result() > 128 * KIB for call in calls)
        assert nodes.check() == 32 * 2 * 3  # two objects and a manifest on each node
        assert not any(node.manager._acquisitions for node in nodes)
        assert all(node.manager._credit.in_flight(peer) == 0 for node in nodes for peer in (0, 1))


def test_one_message_asks_for_many_frames() -> None:
    with Nodes(2, nbytes=48 * 64 * KIB).start() as nodes:  # 48 chunks, and so frames, of each node's object
        fetches: list[int] = []
        for node in nodes:
            transport = node.manager._transport

            def fetch(index: int, fetch: Fetch, say: Any = transport.fetch) -> None:
                fetches.append(len(fetch.spans))
                say(index, fetch)

            transport.fetch = fetch  # type: ignore[method-assign]
        nodes.save(1)
        nodes.replicated(1)
        nodes.check()
    assert sum(fetches) >= 2 * 48 and len(fetches) <= 12, fetches


def test_a_restarted_agent_is_used_again_and_needs_no_trainer_for_it() -> None:
    with Nodes(3).start() as nodes:
        nodes.save(1)
        nodes.replicated(1)
        where = nodes[1].client.identify().port
        nodes[1].stop()
        nodes.save(2, tell=False)
        nodes[1].start()  # nobody configures it: it reads .agent/membership
        identity = nodes[1].client.identify()
        assert (identity.port, identity.epoch) == (where, nodes.epoch)
        nodes.replicated(2)


def test_a_peer_that_comes_back_on_another_port_is_used_again() -> None:
    with Nodes(3).start() as nodes:
        nodes.save(1)
        nodes.replicated(1)
        before = nodes[1].client.identify()
        nodes[1].stop()
        with socket.create_server((HOST, before.port)), socket.create_server((HOST, before.bulk_port)):
            nodes.save(2, tell=False)
            nodes[1].start()
            assert nodes[1].client.identify().port != before.port
            nodes.replicated(2)
        port, bulk_port = free_ports(2)
        nodes[1].stop()
        nodes.save(3, tell=False)
        nodes[1].start(agent_port=port, agent_bulk_port=bulk_port)
        nodes.replicated(3)


@pytest.mark.parametrize("told", ["before it has found out by itself", "afterwards"])
def test_a_restarted_leader_knows_what_is_replicated(told: str) -> None:
    """Its trainer configures it again, which must not make it forget what the others will not say twice."""
    with Nodes(3) as nodes:
        nodes.start()
        nodes.save(1)
        nodes.replicated(1)
        nodes[0].stop()
        nodes[0].start()
        if told == "afterwards":
            nodes.replicated(1)
        nodes.configure(only=[0])
        nodes.replicated(1)
        nodes.save(2)
        nodes.replicated(2)


# ---- receivers that cannot ------------------------------------------------------------------------


def refused_and_said_once(nodes: Nodes, caplog: pytest.LogCaptureFixture, code: str, since: float) -> None:
    """Node 1 refuses node 0's copies at once, under a name, and neither says so again and again."""
    text = f"node 1 refuses copies: {code}"
    nodes.until(lambda: warnings(caplog, text), text)
    assert time.monotonic() - since < 10
    time.sleep(3.3)  # the offer is made again twice
    assert len(warnings(caplog, text)) == 1, warnings(caplog, "")
    assert len(warnings(caplog, "copies of step")) == 1, warnings(caplog, "")
    assert nodes[1].objects(1) == {name_of_rank(1)}


def test_a_receiver_over_its_memory_limit_says_so_at_once_and_takes_copies_when_it_has_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Nodes(2, nbytes=MIB) as nodes:
        nodes[1].start(memory_limit_bytes=3 * MIB // 2)
        nodes[0].start()
        nodes.configure()
        since = time.monotonic()
        nodes.save(1)
        refused_and_said_once(nodes, caplog, "no-space", since)
        nodes[1].manager.objects.pool.memory_limit_bytes = 4 * MIB
        nodes.replicated(1)


@AS_ROOT
@pytest.mark.root
@pytest.mark.fault(14)
def test_a_receiver_on_a_full_tmpfs_says_so_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with Nodes(2, nbytes=MIB, memory_limit_bytes=1 << 40) as nodes:
        os.rename(nodes[1].job_root, f"{nodes.folder}/before")
        os.mkdir(nodes[1].job_root)
        with mounted("-t", "tmpfs", "-o", "size=1700k,mode=700", "none", on=nodes[1].job_root):
            os.mkdir(f"{nodes[1].job_root}/.agent", 0o700)
            with open(f"{nodes.folder}/before/.agent/keys", "rb") as keys:
                fd = os.open(f"{nodes[1].job_root}/.agent/keys", os.O_CREAT | os.O_WRONLY, 0o600)
                os.write(fd, keys.read())
                os.close(fd)
            nodes.start()
            since = time.monotonic()
            nodes.save(1)
            refused_and_said_once(nodes, caplog, "no-space", since)
            assert nodes[1].manager.objects.pool._in_use == set()
            nodes[1].stop()
            nodes.job.close()


@AS_ROOT
@pytest.mark.root
def test_a_receiver_that_may_not_write_says_so_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with Nodes(2).start() as nodes:
        nodes[0].stop()
        nodes.save(1)
        with mounted("--bind", nodes[1].job_root, on=nodes[1].job_root):
            subprocess.run(["mount", "-o", "remount,ro,bind", nodes[1].job_root], check=True)
            since = time.monotonic()
            nodes[0].start()
            refused_and_said_once(nodes, caplog, "not-writable", since)


# ---- peers that say nothing, or little --------------------------------------------------------------


@pytest.mark.fault(32)
def test_1000_half_open_connections_do_not_stop_a_healthy_peer() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    with Nodes(2).start() as nodes, contextlib.ExitStack() as stack:
        nodes.save(1)
        nodes.replicated(1)
        identity = nodes[1].client.identify()
        for number in range(1000):
            port = identity.port if number % 2 else identity.bulk_port
            stack.enter_context(socket.create_connection((HOST, port)))
        began = time.monotonic()
        nodes.save(2)
        nodes.replicated(2)
        nodes[0].stop()  # and one that must connect anew gets in, too
        nodes[0].start()
        nodes.save(3)
        nodes.replicated(3)
        assert time.monotonic() - began < 10
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.fault(30)
def test_a_slow_peer_holds_up_neither_other_peers_nor_orders(chaos: Chaos) -> None:
    size = 6 * MIB
    with Nodes(3, copies=2, chaos=chaos, behind=[2], nbytes=size).start() as nodes:
        nodes.save(1, KIB)
        nodes.replicated(1)
        for link in nodes[2].links:
            link.faults(mbit=5)  # both others get node 2's object through one line: 20 s
        nodes.save(2)
        fast = {name_of_rank(0), name_of_rank(1)}
        slowest = 0.0

        def are_fast() -> bool:
            nonlocal slowest
            for node in nodes:
                asked = time.monotonic()
                node.client.identify()
                slowest = max(slowest, time.monotonic() - asked)
            return all(node.objects(2) >= fast for node in nodes)

        nodes.until(are_fast, "what does not come from node 2 is there")
        assert name_of_rank(2) not in nodes[0].objects(2) | nodes[1].objects(2)
        for link in nodes[2].links:
            link.heal()
        nodes.replicated(2)
        assert slowest < 5


# ---- retention ------------------------------------------------------------------------------------


def test_older_versions_go_when_the_newer_one_is_replicated_everywhere_and_not_before() -> None:
    with Nodes(3).start() as nodes:
        nodes.save(1)
        nodes.replicated(1)
        nodes[2].stop()
        for step in (2, 3, 4):
            nodes.save(step)
            time.sleep(0.6)  # more than a look
            for node in nodes:  # the last replicated one stays beside the newest
                assert {1, step} <= node.steps(), (node.index, node.steps())
        # A version that was copied to somebody may still be there; nothing else is.
        assert all(len(node.steps()) <= 3 for node in nodes.nodes[:2])
        nodes[2].start()
        nodes.replicated(4)
        nodes.until(lambda: all(node.steps() == {4} for node in nodes), "only step 4 is left")


def test_at_every_moment_each_node_has_a_version_that_was_replicated(chaos: Chaos) -> None:
    replicated = {1}
    seen: list[tuple[int, set[int], set[int]]] = []
    over = threading.Event()
    with Nodes(2).start() as nodes:
        nodes.save(1)
        nodes.replicated(1)

        def watch() -> None:
            while not over.is_set():
                for node in nodes:
                    known = set(replicated)
                    seen.append((node.index, node.steps(), known))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for step in range(2, 15):
                nodes.save(step)
                assert nodes[0].client.await_replicated(nodes.epoch, step, 30)
                assert nodes[1].client.await_replicated(nodes.epoch, step, 30)
                replicated.add(step)
        finally:
            over.set()
            watcher.join()
    assert len(seen) > 20
    # What was known to be replicated before the look is there, or a newer one is.
    assert all(any(step >= max(known) for step in steps) for _, steps, known in seen)


def test_a_version_given_up_while_it_is_fetched_ends_cleanly(
    chaos: Chaos, caplog: pytest.LogCaptureFixture
) -> None:
    with Nodes(2, chaos=chaos, behind=[0], nbytes=20 * MIB).start() as nodes:
        for link in nodes[0].links:
            link.faults(mbit=100)
        nodes.save(1)
        # Some 8 MiB are on their way at any time, and still come.
        nodes.until(lambda: nodes[1].manager.nbytes_received > MIB, "it is being fetched")
        objects = nodes.job.ranks[0].objects
        objects.remove_container(objects.container(1))
        nodes.until(lambda: not nodes[1].manager._acquisitions, "the fetch ends")
        assert name_of_rank(0) not in nodes[1].objects(1)
        assert nodes[1].manager.objects.pool._in_use == set()
        for link in nodes[0].links:
            link.heal()
        nodes.save(2, KIB)
        nodes.replicated(2)
        nodes.until(lambda: nodes[0].steps() == {2}, "node 0 has step 2 only")
        assert not warnings(caplog, "met an error")


def test_buffers_are_recycled_and_memory_is_bounded() -> None:
    size, keep = 512 * KIB, 1
    with Nodes(2, nbytes=size, keep=keep).start() as nodes:
        made, most = [], 0
        for step in range(30):
            nodes.save(step)
            nodes.replicated(step)
            most = max(most, *(node.used_bytes() for node in nodes))
            pools = [node.manager.objects.pool for node in nodes]
            pools += [rank.objects.pool for rank in nodes.job.ranks]
            made.append([pool.allocations for pool in pools])
        assert max(made[-1]) <= keep + 3, made  # of 30
        # Own objects and copies: those kept, the newest complete one, and the one that is being written.
        one = size + 8 * KIB
        assert most < (keep + 3) * 2 * one + 256 * KIB, most


# ---- long runs ------------------------------------------------------------------------------------


def run_cycles(cycles: int, settled: int) -> None:
    """Save and replicate; from the cycle ``settled`` on nothing grows."""
    with Nodes(2, processes=[0, 1], nbytes=64 * KIB).start() as nodes:
        processes = [psutil.Process(node.pid) for node in nodes]

        def look() -> list[list[int]]:
            return [
                [p.num_fds(), p.num_threads(), p.memory_info().rss // KIB, node.used_bytes() // KIB]
                for p, node in zip(processes, nodes, strict=True)
            ]

        def cycle(step: int) -> None:
            nodes.save(step)
            assert all(node.client.await_replicated(nodes.epoch, step, 30) for node in nodes)

        def rest() -> None:
            nodes.until(lambda: all(len(node.steps()) == 1 for node in nodes))

        for step in range(settled):
            cycle(step)
        rest()
        before = look()
        for step in range(settled, cycles):
            cycle(step)
        rest()
        after = look()
        nodes.check()
    for (fds, threads, rss, tmpfs), (fds_, threads_, rss_, tmpfs_) in zip(before, after, strict=True):
        assert fds_ <= fds + 4 and threads_ <= threads, (before, after)
        assert rss_ <= rss + KIB, (before, after)
        # Three buffers for the node's own objects and three for its copies are what keep=1 allows.
        assert tmpfs_ <= max(tmpfs, 2 * 3 * (64 + 4)) + 64, (before, after)


def test_nothing_grows_over_200_versions() -> None:
    run_cycles(200, 60)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_nothing_grows_over_5000_versions() -> None:
    run_cycles(5000, 200)
