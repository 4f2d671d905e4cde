"""Drains: whole or not at all, gone on with after anything, and nobody waits for them."""

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from flashpoint.buffers import BufferObject
from flashpoint.errors import StorageError
from flashpoint.retention import Version
from flashpoint.storage import claim
from flashpoint.storage import drainer as drainer_module
from flashpoint.storage.local import LocalStore
from flashpoint.storage.store import open_store
from flashpoint.telemetry import counters
from tests.core.storage.nodes import JOB, Node, check, drained, holds, save, steps_in, until
from tests.core.world import Job

MIB = 1 << 20
LARGE = 3 * MIB  # integers of 8 bytes: an object of several parts


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "storage").mkdir()
    return str(tmp_path / "storage")


@pytest.fixture
def start(job_root: str, folder: str) -> Iterator[Callable[..., Node]]:
    """A node whose drainer runs, with these settings."""
    nodes: list[Node] = []

    def make(root: str = job_root, url: str = f"file://{folder}", epoch: int = 1, **settings) -> Node:
        where = {name: settings.pop(name) for name in ("ranks", "index") if name in settings}
        nodes.append(Node(root, url, **where))
        nodes[-1].start(epoch, **settings)
        return nodes[-1]

    yield make
    for node in nodes:
        node.stop()


@pytest.fixture
def job(job_root: str) -> Iterator[Job]:
    opened = Job(job_root, 1, epoch=1)
    yield opened
    opened.close()


def test_a_drained_version_is_what_readers_open(job: Job, folder: str, start: Callable[..., Node]) -> None:
    node = start()
    save(job, 7)
    drained(7, node)
    assert check(folder) == [7]
    assert holds(folder, 7)
    with safe_open(f"{folder}/step-7_ckpt/rank00000-0.safetensors", "np") as opened:
        assert int(opened.get_tensor("of_rank_0")[0]) == 7000
    assert sorted(os.listdir(f"{folder}/step-7_ckpt")) == [".metadata", "rank00000-0.safetensors"]


def test_a_version_lives_on_while_it_is_drained(job: Job, folder: str, start: Callable[..., Node]) -> None:
    node = start(storage_bytes_per_s=16 * MIB)
    save(job, 1, LARGE)
    until(lambda: os.path.exists(f"{folder}/step-1_ckpt"), node)
    for step in (2, 3, 4):  # each gives the one before it up, and would take its buffer
        save(job, step, LARGE)
    assert job.ranks[0].objects.complete_steps() == [4]
    drained(1, node)
    drained(4, node)
    assert check(folder) == [1, 4]
    assert holds(folder, 1) and holds(folder, 4)


def test_a_save_finds_room_also_where_memory_is_short(
    job_root: str, folder: str, start: Callable[..., Node]
) -> None:
    job = Job(job_root, 1, epoch=1, memory_limit_bytes=60 * MIB)  # two versions and a half
    node = start(storage_bytes_per_s=4 * MIB, memory_limit_bytes=60 * MIB)
    for step in range(1, 6):
        save(job, step, LARGE)
        node.offer()
    until(lambda: counters().get("drains_failed", 0) or steps_in(folder), node)
    save(job, 6, LARGE)
    assert job.ranks[0].objects.complete_steps() == [6]
    job.close()


def test_a_drain_is_gone_on_with(job_root: str, folder: str, start: Callable[..., Node]) -> None:
    job = Job(job_root, 3, epoch=1)
    save(job, 1, LARGE)
    node = start(ranks=(0, 1, 2), storage_bytes_per_s=20 * MIB)
    first = Path(folder, "step-1_ckpt", "rank00000-0.safetensors")
    confirmed = [Path(folder, ".drains")]
    until(lambda: first.exists() and any(confirmed[0].rglob("node00000")), node)
    until(lambda: "rank00000-0" in next(confirmed[0].rglob("node00000")).read_text(), node)
    node.stop()
    before = first.stat()
    assert steps_in(folder) == []
    node.start(epoch=2)  # another agent, of another start of the job
    drained(1, node)
    assert (first.stat().st_ino, first.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert check(folder) == [1]
    assert os.listdir(f"{folder}/.drains") == []
    job.close()


def test_what_was_changed_since_it_was_confirmed_is_drained_anew(
    job_root: str, folder: str, start: Callable[..., Node]
) -> None:
    job = Job(job_root, 3, epoch=1)
    save(job, 1, LARGE)
    node = start(ranks=(0, 1, 2), storage_bytes_per_s=20 * MIB)
    until(lambda: any("rank00000-0" in path.read_text() for path in Path(folder).rglob("node00000")), node)
    node.stop()
    with open(f"{folder}/step-1_ckpt/rank00000-0.safetensors", "r+b") as file:
        file.seek(5000)
        file.write(b"spoilt")
    node.start(epoch=2)
    drained(1, node)
    assert check(folder) == [1]
    job.close()


def test_bytes_that_are_wrong_in_memory_are_not_drained(
    job: Job, job_root: str, folder: str, start: Callable[..., Node]
) -> None:
    save(job, 1)
    with open(f"{job_root}/step-1_ckpt/rank00000-0.safetensors", "r+b") as file:
        file.seek(5000)
        file.write(b"\xff\xff")
    node = start()
    until(lambda: "corrupt in memory" in node.drainer.error, node)
    assert steps_in(folder) == []
    save(job, 2)
    drained(2, node)
    assert check(folder) == [2]


def test_only_what_is_to_be_kept_is_kept(job: Job, folder: str, start: Callable[..., Node]) -> None:
    Path(folder, "notes.txt").write_text("of somebody else")
    node = start(storage_keep_last=2, storage_keep_every=4)
    for step in range(1, 8):
        save(job, step)
        drained(step, node)
    until(lambda: steps_in(folder) == [4, 6, 7], node)
    assert check(folder) == [4, 6, 7]
    assert Path(folder, "notes.txt").exists()


def test_every_second_version_is_drained(job: Job, folder: str, start: Callable[..., Node]) -> None:
    node = start(storage_every_n=2)
    for step in range(1, 6):
        save(job, step)
        node.offer()
        if step % 2:
            drained(step, node)
    assert check(folder) == [1, 3, 5]


def test_what_a_job_ends_with_is_drained(job: Job, folder: str, start: Callable[..., Node]) -> None:
    node = start(storage_every_n=100)
    save(job, 1)
    drained(1, node)
    save(job, 2)
    node.offer()
    assert not node.drainer.is_busy
    node.drainer.release()
    assert node.drainer.is_busy
    drained(2, node)
    until(lambda: not node.drainer.is_busy, node)


def test_a_step_that_is_saved_again_takes_the_place_of_the_old_one(
    job: Job, job_root: str, folder: str, start: Callable[..., Node]
) -> None:
    node = start()
    save(job, 5)
    drained(5, node)
    job.close()
    again = Job(job_root, 2, epoch=2)  # the job went back, and has another number of ranks
    again.each(lambda rank: rank.objects.remove_container(rank.objects.container(5)))
    node.ranks = (0, 1)
    node.start(epoch=2)
    save(again, 5)
    drained(5, node, epoch=2)
    assert check(folder) == [5]
    assert holds(folder, 5, rank=1)
    again.close()


def test_debris_of_a_killed_drain_is_swept_up(job: Job, folder: str, start: Callable[..., Node]) -> None:
    lost = Path(folder, "step-3_ckpt")
    lost.mkdir()
    (lost / "rank00000-0.safetensors").write_bytes(b"half")
    (lost / "rank00001-0.safetensors.0badcafe.tmp").write_bytes(b"half")
    drain = Path(folder, ".drains", f"1-3-{'0' * 32}")
    drain.mkdir(parents=True)
    (drain / "node00000").write_text("{}")
    newer = Path(folder, "step-4_ckpt")  # of a release to come
    newer.mkdir()
    (newer / ".metadata").write_text('{"format":"flashpoint-manifest","version":2}\n')
    (newer / "rank00000-0.safetensors").write_bytes(b"good")
    node = start()
    save(job, 7)
    drained(7, node)
    until(lambda: not lost.exists() and not drain.exists(), node)
    assert sorted(os.listdir(newer)) == [".metadata", "rank00000-0.safetensors"]
    assert holds(folder, 7)


# ---- several nodes --------------------------------------------------------------------------------


@pytest.fixture
def two(
    job_root: str, start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Job, Node, Node]]:
    monkeypatch.setattr(drainer_module, "IDLE_POLL_S", 0.5)
    roots = [f"{job_root}/a/job", f"{job_root}/b/job"]
    job = Job(roots[0], 2, roots=roots, epoch=1)
    yield job, start(roots[0], ranks=(0,)), start(roots[1], ranks=(1,), index=1)
    job.close()


def test_each_node_drains_its_own_and_the_leader_commits(two: tuple[Job, Node, Node], folder: str) -> None:
    job, leader, other = two
    save(job, 1)
    until(lambda: os.path.exists(f"{folder}/step-1_ckpt/rank00000-0.safetensors"), leader)
    assert steps_in(folder) == []  # the other node has not been heard of
    drained(1, leader, other)
    drained(1, other, leader)
    assert check(folder) == [1]
    assert holds(folder, 1, 0) and holds(folder, 1, 1)


def test_a_version_that_one_node_has_lost_is_not_drained_but_the_next_is(
    two: tuple[Job, Node, Node], folder: str
) -> None:
    job, leader, other = two
    save(job, 1)
    until(lambda: os.path.exists(f"{folder}/step-1_ckpt/rank00000-0.safetensors"), leader)
    rank = job.ranks[1]
    rank.objects.remove_container(rank.objects.container(1))
    until(lambda: "not in this node's memory" in leader.drainer.error, leader, other)
    save(job, 2)
    drained(2, leader, other)
    assert check(folder) == [2]
    until(lambda: sorted(os.listdir(folder)) == [".drains", ".flashpoint", "step-2_ckpt"], leader, other)


def test_a_node_whose_agent_was_killed_goes_on_with_its_part(
    two: tuple[Job, Node, Node], folder: str
) -> None:
    job, leader, other = two
    other.stop()
    save(job, 1)
    until(lambda: os.path.exists(f"{folder}/step-1_ckpt/rank00000-0.safetensors"), leader)
    other.start(epoch=1)
    drained(1, leader, other)
    assert check(folder) == [1]


# ---- storage that is ill --------------------------------------------------------------------------


def test_a_job_that_was_taken_over_drains_no_more(
    job: Job, job_root: str, folder: str, start: Callable[..., Node]
) -> None:
    node = start()
    save(job, 1)
    drained(1, node)
    claim.claim(node.objects.config, job_root, "cd" * 16, 9, None)
    save(job, 2)
    until(lambda: "taken over by another start of 'job'" in node.drainer.error, node)
    with pytest.raises(StorageError, match="two jobs with one name"):
        claim.require(open_store(node.objects.config), JOB, 1)
    assert steps_in(folder) == [1]


@pytest.mark.root
@pytest.mark.fault(17)
def test_a_disk_that_fills_up_loses_nothing_and_is_used_again_when_there_is_room(
    job: Job, tmp_path: Path, start: Callable[..., Node]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    point = tmp_path / "small"
    point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "flashpoint-test", str(point)]
    if subprocess.run(command, check=False).returncode != 0:
        pytest.skip("this root may not mount")
    try:
        node = start(url=f"file://{point}")
        save(job, 1)
        drained(1, node)
        save(job, 2, LARGE)
        until(lambda: "No space left" in node.drainer.error, node)
        assert check(str(point)) == [1]
        assert not list(point.rglob("*.tmp"))
        save(job, 3)
        drained(3, node)
        assert check(str(point)) == [1, 3]
    finally:
        node.stop()
        subprocess.run(["umount", "--lazy", str(point)], check=True)


@pytest.mark.fault(19)
def test_a_server_that_never_answers_holds_nothing_and_nobody_up(
    job: Job, s3, monkeypatch: pytest.MonkeyPatch, start: Callable[..., Node]
) -> None:
    url = s3.make_bucket("bucket-that-hangs")
    accepted = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        # The job started while the server was well.
        node = Node(job.root, url)
        node.start(storage_timeout_s=0.5)
        node.stop()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(claim, "claim", lambda *args: accepted.set())
        node.start(storage_timeout_s=0.5)
        assert accepted.is_set()
        for step in range(1, 4):
            save(job, step)
            node.offer()
        until(lambda: node.drainer.error, node)
        assert counters()["drains_failed"] >= 1
        assert job.ranks[0].objects.complete_steps() == [3]
        until(lambda: job.ranks[0].objects.pool.free_files() >= 1, node)  # step 2's, or 1's: nothing is held
        node.stop()


class HangingStore(LocalStore):
    """A file system whose server is gone: who writes a large file there waits."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.hangs, self.over = threading.Event(), threading.Event()

    def write_parts(self, name: str, parts: Iterable[bytes], part_bytes: int) -> None:
        if part_bytes >= MIB and not self.over.is_set():
            self.hangs.set()
            self.over.wait(60)
        super().write_parts(name, parts, part_bytes)


@pytest.mark.fault(19)
def test_memory_is_given_back_while_a_file_system_hangs(
    job: Job, folder: str, start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HangingStore(folder)
    monkeypatch.setattr(drainer_module, "open_store", lambda config: store)
    node = start(storage_timeout_s=1.0)
    save(job, 1, LARGE)
    until(store.hangs.is_set, node)
    pool = job.ranks[0].objects.pool
    for step in (2, 3, 4):
        save(job, step, LARGE)
        node.offer()
    assert job.ranks[0].objects.complete_steps() == [4]
    buffers = len(list(Path(job.root, ".pool").glob("rank00000-*")))
    nbytes = os.path.getsize(f"{job.root}/step-4_ckpt/rank00000-0.safetensors")
    free: list[BufferObject] = []

    def all_but_the_newest_are_free() -> bool:
        free.extend(pool.take_free(nbytes))
        return len(free) == buffers - 1

    until(all_but_the_newest_are_free, node)
    for buffer in free:
        pool.release(buffer)
    node.drainer.release()
    until(lambda: not node.drainer.is_busy, node)  # the agent may go
    store.over.set()
    drained(4, node)
    assert check(folder) == [4]


def test_s3_holds_what_was_drained(job: Job, s3, start: Callable[..., Node]) -> None:
    url = s3.make_bucket("bucket-of-drains") + "/job"
    node = start(url=url, storage_keep_last=1)
    save(job, 1, LARGE)
    drained(1, node)
    save(job, 2)
    drained(2, node)
    store = open_store(node.objects.config)
    until(lambda: store.folders() == ["step-2_ckpt"], node)
    names = [".metadata", "rank00000-0.safetensors"]
    assert sorted(store.files("step-2_ckpt")) == names
    memory = Path(job.root, "step-2_ckpt")
    for name in names:
        assert store.read(f"step-2_ckpt/{name}") == (memory / name).read_bytes()
    assert node.drainer.last == Version(1, 2)
