"""One bit flipped, anywhere: in every region of a container that lies in memory, and of every frame on its way.

Each flip is detected, and repaired from the copy that there is. The items of Orbax, with their indexes, have theirs in
tests/jax/test_corruption.py and test_ocdbt.py.
"""

import os
import random
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

import flashpoint
from flashpoint.errors import FlashpointError, ProtocolError
from flashpoint.loader import MLFlashpointCheckpointLoader
from flashpoint.manifest import MANIFEST_NAME
from flashpoint.replication import limits
from flashpoint.replication.messages import Data
from flashpoint.replication.node import NodeReplication
from flashpoint.replication.sealing import Opener, Sealer
from flashpoint.replication.session import Session
from tests.chaos import Chaos
from tests.core.replication.nodes import HOST, KIB, Nodes, _bytes, hurry, name_of_rank
from tests.core.world import Rank

CHUNK_BYTES = 4096
STEP = 1

Record = Callable[[str, object], None]


def regions(path: Path) -> list[tuple[str, int, int]]:
    """Named byte ranges of a file: all of it, so that every byte may be hit."""
    data = path.read_bytes()
    if path.name == MANIFEST_NAME:
        record, trailer = data.index(b"\n") + 1, len(data) - 33
        return [
            ("manifest: record", 0, record),
            ("manifest: sections", record, trailer),
            ("manifest: trailer", trailer, len(data)),
        ]
    header = 8 + int.from_bytes(data[:8], "little")
    text = len(data[8:header].rstrip(b" ")) + 8
    middle = (header + len(data)) // 2
    found = [
        ("object: header's length", 0, 8),
        ("object: header", 8, text),
        ("object: header's padding", text, header),
        ("object: first half of the data", header, middle),
        ("object: second half of the data", middle, len(data)),
        ("object: last page", len(data) - 4096, len(data)),
    ]
    return [(name, begin, end) for name, begin, end in found if begin < end]


def flip(path: Path, offset: int, bit: int) -> None:
    """In place: the pool's file, and every mapping of it, changes with it."""
    with open(path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), offset)


# ---- at rest -----------------------------------------------------------------------------------------


class Memory:
    """A version on two nodes, each of which has a copy of what the other has."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        nodes.save(STEP)
        nodes.replicated(STEP)
        self.container = Path(nodes[0].path(STEP))
        self.files = [self.container / name_of_rank(0), self.container / MANIFEST_NAME]
        self.good = {path: path.read_bytes() for path in self.files}
        self.lines = []
        self._starts = 0
        membership = nodes.membership()
        for node in nodes:
            line = NodeReplication(node.job_root, nodes.config, nodes.keys, is_first=False, host=HOST)
            line.membership, line.index = membership, node.index
            self.lines.append(line)

    def is_detected(self) -> bool:
        """By whoever opens the version on its own."""
        try:
            with flashpoint.open(str(self.container)) as view:
                view.verify()
        except FlashpointError:
            return True
        return False

    def recover(self) -> list[int]:
        """What all ranks load, as a job that was started again."""

        def load(rank: Rank) -> int:
            loader = MLFlashpointCheckpointLoader(
                rank.objects, rank.coordinator, replication=self.lines[rank.rank]
            )
            loader._agreements = self._starts * 1000  # a new start has keys of its own
            with loader.load() as view:
                assert (view["a"] == _bytes(STEP, rank.rank, self.nodes.nbytes)).all()
                return view.manifest.step

        self._starts += 1
        return self.nodes.job.each(load)

    def close(self) -> None:
        for line in self.lines:
            line.close()


@pytest.fixture
def memory() -> Iterator[Memory]:
    with Nodes(2, nbytes=32 * KIB, chunk_bytes=CHUNK_BYTES).start() as nodes:
        made = Memory(nodes)
        try:
            yield made
        finally:
            made.close()


def flip_detect_and_repair(memory: Memory, *, flips: int, seed: int) -> None:
    rng = random.Random(seed)
    tally: Counter[str] = Counter()
    places = [(path, region) for path in memory.files for region in regions(path)]
    for number in range(flips):
        path, (region, begin, end) = places[number % len(places)]
        offset, bit = rng.randrange(begin, end), rng.randrange(8)
        where = f"{region}, bit {bit} of byte {offset}"
        flip(path, offset, bit)
        assert memory.is_detected(), where
        assert memory.recover() == [STEP, STEP], where
        assert path.read_bytes() == memory.good[path], f"not repaired: {where}"
        tally[region] += 1
    print(f"{tally.total()} flips detected and repaired:", dict(tally))


@pytest.mark.fault(20)
@pytest.mark.parametrize(
    "flips", [90, pytest.param(4000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_20_a_flip_in_memory_is_detected_and_repaired_from_the_other_nodes_copy(
    memory: Memory, flips: int, caplog: pytest.LogCaptureFixture, record_property: Record
) -> None:
    record_property("trials", flips)
    caplog.set_level("CRITICAL", logger="flashpoint")
    flip_detect_and_repair(memory, flips=flips, seed=flips)


# ---- on their way ------------------------------------------------------------------------------------


def pair(sealed: bool) -> tuple[Session, Session]:
    """Who gives and who receives."""
    session, key, other = (
        secrets.token_bytes(limits.SESSION_BYTES),
        secrets.token_bytes(32),
        secrets.token_bytes(32),
    )
    if not sealed:
        return Session(session, 1, None, None), Session(session, 0, None, None)
    return Session(session, 1, Sealer(key), Opener(other)), Session(session, 0, Sealer(other), Opener(key))


def received(session: Session, frames: list[bytes], asked: Data, digest: bytes) -> str:
    """What becomes of a frame of data, as in a transfer: why it is refused, or "taken"."""
    header, body = frames
    if header[: limits.SESSION_BYTES] != session.id:
        return "another session"
    try:
        data, payload = session.unpack_data(memoryview(header), memoryview(body))
    except ProtocolError as error:
        return error.code
    if data != asked:
        return "not asked for"
    target = np.zeros(payload.nbytes, np.uint8)
    try:
        payload.copy_into(target)
    except ProtocolError as error:
        return f"seal: {error.code}"
    return "taken" if xxhash.xxh3_64_digest(target.tobytes()) == digest else "checksum"


@pytest.mark.fault(20, 31)
@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "plain"])
@pytest.mark.parametrize("flips", [400, pytest.param(3000, marks=pytest.mark.soak)])
def test_31_a_flip_in_a_frame_is_detected_and_the_frame_taken_when_it_is_sent_again(
    sealed: bool, flips: int, record_property: Record
) -> None:
    record_property("trials", flips)
    rng = random.Random(flips)
    giver, taker = pair(sealed)
    tally: Counter[str] = Counter()
    for number in range(flips):
        chunk = rng.randbytes(CHUNK_BYTES)
        digest, asked = xxhash.xxh3_64_digest(chunk), Data(number, 7 * CHUNK_BYTES, 8 * CHUNK_BYTES)
        frames = [bytes(frame) for frame in giver.pack_data(asked, memoryview(chunk))]
        # Every second flip hits the first frame: session, nonce and header.
        which = number % 2
        place = rng.randrange(8 * len(frames[which]))
        broken = bytearray(frames[which])
        broken[place // 8] ^= 1 << place % 8
        damaged = [bytes(broken) if n == which else frame for n, frame in enumerate(frames)]
        outcome = received(taker, damaged, asked, digest)
        assert outcome != "taken", f"bit {place} of frame {which}"
        tally[outcome] += 1
        again = [bytes(frame) for frame in giver.pack_data(asked, memoryview(chunk))]
        assert received(taker, again, asked, digest) == "taken"
    print(f"{flips} flips in {'sealed' if sealed else 'plain'} frames:", dict(tally))


@pytest.mark.fault(20, 31)
@pytest.mark.parametrize("encrypt", [True, False], ids=["sealed", "plain"])
@pytest.mark.parametrize("flips", [40, pytest.param(500, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_31_flips_on_a_real_line_are_never_committed(
    encrypt: bool,
    flips: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    record_property: Record,
) -> None:
    caplog.set_level("CRITICAL", logger="flashpoint")
    hurry(monkeypatch)
    with (
        Chaos(seed=flips) as chaos,
        Nodes(2, chaos=chaos, nbytes=1024 * KIB, encrypt=encrypt).start() as nodes,
    ):
        bulks = [node.bulk for node in nodes if node.bulk is not None]
        step = flipped = 0
        while flipped < flips:
            step += 1
            for link in bulks:
                link.faults(flip_every=300 * KIB)
            nodes.save(step)
            nodes.replicated(step, 120)  # every byte is compared there
            flipped = sum(link.stats().flip for link in bulks)
        for link in bulks:
            link.heal()
        nodes.save(step + 1)
        nodes.replicated(step + 1)
    record_property("trials", flipped)
    print(f"{flipped} bits flipped on the way of {step} versions")
