"""Agents that verify again what they hold: what rots is found, repaired from a good copy, and told."""

import logging
import mmap
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flashpoint.errors import CheckpointNotFoundError
from flashpoint.loader import MLFlashpointCheckpointLoader
from flashpoint.manifest import MANIFEST_NAME
from flashpoint.objects import CheckpointObjectManager
from flashpoint.replication import scrub_schedule
from flashpoint.replication.orders import ScrubReport
from flashpoint.telemetry import counters
from tests.chaos import Chaos
from tests.core.replication.nodes import KIB, MIB, Node, Nodes, digest_of, hurry, name_of_rank

MINE, OTHER = name_of_rank(0), name_of_rank(1)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    monkeypatch.setattr(scrub_schedule, "REST_S", 0.2)
    monkeypatch.setattr(scrub_schedule, "AGAIN_S", 0.5)


@pytest.fixture
def chaos() -> Iterator[Chaos]:
    with Chaos(seed=3) as made:
        yield made


def flip(node: Node, step: int, name: str, place: int | None = None) -> int:
    """Change one bit of a file in a node's memory, in place; which byte."""
    path = node.path(step, name)
    size = os.path.getsize(path)
    place = random.Random(f"{name}{size}").randrange(size) if place is None else place
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))
    return place


def is_right(nodes: Nodes, node: Node, step: int, name: str) -> bool:
    return digest_of(node.path(step, name)) == nodes.truth[step, name]


def report(node: Node) -> ScrubReport:
    found = node.client.inquire().scrub
    assert found is not None
    return found


def wait(nodes: Nodes, condition: Callable[[], Any], what: str) -> None:
    """As `Nodes.until`, which would object to the wrong bytes that these tests write themselves."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, f"never: {what}\n{nodes.told()}\n{[report(node) for node in nodes]}"
        time.sleep(0.02)


def saved(nodes: Nodes, step: int = 1) -> None:
    nodes.save(step)
    nodes.replicated(step)


@pytest.mark.fault(20)
@pytest.mark.parametrize("name", [MINE, OTHER, MANIFEST_NAME], ids=["own", "copy", "manifest"])
def test_a_flipped_bit_is_found_repaired_and_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with Nodes(2).start() as nodes:
        saved(nodes)
        place = flip(nodes[0], 1, name)
        wait(nodes, lambda: report(nodes[0]).repaired, "it is repaired")
        assert is_right(nodes, nodes[0], 1, name)
        found = report(nodes[0])
        assert (found.corrupt, found.repaired, found.withdrawn) == (1, 1, 0)
        assert found.verified_bytes > 0
        assert "step 1" in found.last and name in found.last
        told = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
        assert len(told) == 1
        assert "step 1" in told[0] and name in told[0] and nodes[0].job_root in told[0]
        if name != MANIFEST_NAME:
            assert f"chunk {place // (64 * KIB)}" in told[0]
            # One chunk came from the other node, the rest from here.
            assert f"repaired with {64 * KIB} bytes" in found.last or place // (64 * KIB) >= 4
        assert nodes[0].standing(1) == "replicated"
        assert report(nodes[1]).corrupt == 0
        assert counters()["objects_repaired"] >= 1
        nodes.save(2)
        nodes.replicated(2)


@pytest.mark.fault(22)
@pytest.mark.fault(23)
@pytest.mark.parametrize("how", ["cut", "grown", "hole", "link"])
def test_a_file_that_is_cut_or_has_a_hole_or_is_a_link_is_replaced(how: str) -> None:
    with Nodes(2).start() as nodes:
        saved(nodes)
        path = nodes[0].path(1, OTHER)
        if how == "cut":
            os.truncate(path, 100 * KIB)
        elif how == "grown":
            with open(path, "ab") as file:
                file.write(b"more")
        elif how == "hole":
            with open(path, "r+b") as file:
                file.seek(4096)
                nothing = bytes(4096)
                file.write(nothing)
        else:
            os.unlink(path)
            os.symlink("/dev/zero", path)
        wait(nodes, lambda: report(nodes[0]).repaired, "it is repaired")
        assert is_right(nodes, nodes[0], 1, OTHER)


def test_two_copies_that_rot_in_different_places_repair_each_other() -> None:
    with Nodes(2, scrub_bytes_per_s=0).start() as nodes:
        saved(nodes)
        flip(nodes[0], 1, MINE, 70 * KIB)
        flip(nodes[1], 1, MINE, 200 * KIB)
        for node in nodes:
            node.stop()
            node.start(scrub_bytes_per_s=64 * MIB)
        wait(nodes, lambda: all(report(node).repaired for node in nodes), "both are repaired")
        assert is_right(nodes, nodes[0], 1, MINE)
        assert is_right(nodes, nodes[1], 1, MINE)


def test_who_has_the_corrupt_object_mapped_keeps_what_it_has() -> None:
    with Nodes(2).start() as nodes:
        saved(nodes)
        with open(nodes[0].path(1, MINE), "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        place = flip(nodes[0], 1, MINE)
        before = mapped[:]
        inode = os.stat(nodes[0].path(1, MINE)).st_ino
        wait(nodes, lambda: report(nodes[0]).repaired, "it is repaired")
        assert os.stat(nodes[0].path(1, MINE)).st_ino != inode
        assert mapped[:] == before
        with open(nodes[0].path(1, MINE), "rb") as file:
            good = file.read()
        assert [i for i in range(len(good)) if good[i] != before[i]] == [place]
        mapped.close()
        nodes.save(2)  # and the buffer that was repaired is used again like any other
        nodes.replicated(2)


@pytest.mark.fault(21)
def test_a_version_without_a_good_copy_is_withdrawn_and_an_older_one_is_recovered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Nodes(2, keep=2).start() as nodes:
        saved(nodes, 1)
        saved(nodes, 2)
        for node in nodes:
            flip(node, 2, MINE, 1000)
        wait(nodes, lambda: all(report(node).withdrawn for node in nodes), "it is withdrawn on both")
        wait(nodes, lambda: {node.standing(2) for node in nodes} == {"withdrawn"}, "and told")
        for node in nodes:
            assert MINE not in node.objects(2)
            assert os.path.exists(node.path(2, f"{MINE}.corrupt"))  # nothing is deleted yet
            assert node.standing(1) == "replicated"
            objects = CheckpointObjectManager(node.job_root, rank=None, config=node.config)
            version = objects.container(2)
            assert MINE not in objects.held_objects(version, objects.read_summary(version).record.objects)
            objects.close()
        told = [r.getMessage() for r in caplog.records if "IS WITHDRAWN" in r.getMessage()]
        assert len(told) == 2
        assert "step 2" in told[0] and MINE in told[0]
        # What comes after takes its place, and the set aside bytes go with it.
        saved(nodes, 3)
        saved(nodes, 4)
        wait(nodes, lambda: all(node.steps() == {3, 4} for node in nodes), "older versions are given up")
        assert not any(os.path.exists(node.path(2)) for node in nodes)


@pytest.mark.fault(21)
def test_the_older_version_stays_while_the_newer_one_is_withdrawn() -> None:
    """A version that rots before all have met it is never called replicated, so the one before it serves on."""
    with Nodes(3, copies=1, keep=1).start() as nodes:
        saved(nodes, 1)
        nodes[2].stop()  # so that step 2 is not replicated yet
        nodes.save(2)
        nodes.until(lambda: MINE in nodes[1].objects(2), "node 1 has its copy")
        for node in (nodes[0], nodes[1]):
            flip(node, 2, MINE, 5000)
        alive = [nodes[0], nodes[1]]
        wait(nodes, lambda: all(report(node).withdrawn for node in alive), "it is withdrawn")
        nodes[2].start()
        nodes.tell(2)
        assert not nodes[0].client.is_alive() or nodes[0].standing(1) == "replicated"
        with pytest.raises(Exception, match="step 2 was withdrawn"):
            nodes[0].client.await_replicated(1, 2, 30.0)
        for node in nodes:
            assert 1 in node.steps()
        saved(nodes, 3)
        wait(nodes, lambda: all(node.steps() == {3} for node in nodes), "all else is given up")


def test_nothing_is_set_aside_while_a_node_that_may_have_it_cannot_be_asked() -> None:
    with Nodes(2, peer_timeout_s=2.0).start() as nodes:
        saved(nodes)
        nodes[1].stop()
        flip(nodes[0], 1, MINE)
        wait(nodes, lambda: "not repaired yet" in report(nodes[0]).last, "it is found")
        assert MINE in nodes[0].objects(1)
        assert report(nodes[0]).withdrawn == 0
        nodes[1].start()
        wait(nodes, lambda: report(nodes[0]).repaired, "it is repaired")
        assert is_right(nodes, nodes[0], 1, MINE)


def test_an_agent_killed_while_it_repairs_repairs_when_it_is_back(chaos: Chaos) -> None:
    size = 2 * MIB
    with Nodes(2, processes=[0], chaos=chaos, behind=[1], nbytes=size, scrub_bytes_per_s=0).start() as nodes:
        saved(nodes)
        with open(nodes[0].path(1, MINE), "r+b") as file:
            file.write(b"\xff" * size)  # every chunk: the repair takes a while
        before = os.lstat(nodes[0].path(1, MINE))
        for link in nodes[1].links:
            link.faults(mbit=10)
        assert nodes[1].bulk is not None
        begun = nodes[1].bulk.stats().down
        nodes[0].kill()
        nodes[0].start(scrub_bytes_per_s=256 * MIB)
        wait(nodes, lambda: nodes[1].bulk.stats().down > begun + 400 * KIB, "the repair is under way")
        nodes[0].kill()
        after = os.lstat(nodes[0].path(1, MINE))
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        for link in nodes[1].links:
            link.heal()
        nodes[0].start()
        wait(nodes, lambda: report(nodes[0]).repaired, "it is repaired")
        assert is_right(nodes, nodes[0], 1, MINE)
        assert nodes[0].objects(1) == {MINE, OTHER}
        nodes.save(2)
        nodes.replicated(2)


@pytest.mark.parametrize("place", ["before the link", "after the link"])
def test_what_an_agent_killed_between_link_and_rename_leaves_is_in_nobodys_way(place: str) -> None:
    with Nodes(2).start() as nodes:
        saved(nodes)
        half = nodes[0].path(1, f"{OTHER}.repaired")
        with open(half, "wb") as file:
            file.write(b"half")
        flip(nodes[0], 1, OTHER if place == "after the link" else MINE)
        wait(nodes, lambda: report(nodes[0]).repaired, "it is repaired")
        assert os.path.exists(half) == (place == "before the link")
        saved(nodes, 2)
        wait(nodes, lambda: not os.path.exists(nodes[0].path(1)), "it goes with its version")


def test_off_is_off() -> None:
    with Nodes(2, scrub_bytes_per_s=0).start() as nodes:
        saved(nodes)
        assert nodes[0].client.inquire().scrub is None


def test_a_scrub_holds_no_buffer_up() -> None:
    """Saves go on as fast as they can beside it, and the pools stay as they are."""
    with Nodes(2, scrub_bytes_per_s=1 << 40).start() as nodes:
        for step in range(1, 5):
            saved(nodes, step)
        used = [node.used_bytes() for node in nodes]
        for step in range(5, 25):
            saved(nodes, step)
        assert all(report(node).corrupt == 0 for node in nodes)
        wait(nodes, lambda: all(report(node).verified_bytes for node in nodes), "it is scrubbed")
        wait(nodes, lambda: all(n.used_bytes() <= u + MIB for n, u in zip(nodes, used, strict=True)), "flat")


def test_the_only_copy_of_a_job_without_copies_is_withdrawn_when_it_rots() -> None:
    with Nodes(1, copies=0, keep=2).start() as nodes:
        nodes.save(1)
        nodes.save(2)
        flip(nodes[0], 2, MINE)
        wait(nodes, lambda: report(nodes[0]).withdrawn, "it is withdrawn")
        objects = CheckpointObjectManager(nodes[0].job_root, rank=0, config=nodes[0].config)
        with MLFlashpointCheckpointLoader(objects).load() as view:
            assert view.manifest.step == 1
        with pytest.raises(CheckpointNotFoundError):
            MLFlashpointCheckpointLoader(objects).load(2)
        objects.close()
