"""Bytes from two sources into real files, without a network: frames in any order, whole, changed, or twice."""

import itertools
import os
import random

import numpy as np
import pytest

from flashpoint.config import FlashpointConfig
from flashpoint.layout import Entry
from flashpoint.objects import CheckpointObjectManager
from flashpoint.replication import acquisition as acquisitions
from flashpoint.replication.acquisition import Acquisition
from flashpoint.replication.messages import Data, Key
from flashpoint.replication.orders import Wanted
from flashpoint.replication.sealing import Opener, Sealer
from flashpoint.replication.session import Session
from flashpoint.replication.transfer import Credit
from flashpoint.saver import MLFlashpointCheckpointSaver

MIB = 1 << 20
NBYTES = 9 * MIB + 4711  # chunks of four frames, of four, and of two
STEP = 7


class World:
    """A version in the memory of nodes 1 and 2, and node 0, which is to get it."""

    def __init__(self, folder, *, sealed):
        there = CheckpointObjectManager(f"{folder}/there", rank=0, config=FlashpointConfig())
        saver = MLFlashpointCheckpointSaver(there, epoch=0)
        pending = saver.begin(STEP)
        saver.initialize_checkpoint(pending)
        values = np.random.default_rng(3).integers(0, 256, NBYTES, dtype=np.uint8)
        layout = saver.plan([Entry("w", "uint8", (NBYTES,))])
        pending.staged.append(
            saver.stage(layout, lambda b: np.copyto(b.data[layout.nbytes - NBYTES :], values))
        )
        saver.write(pending)
        saver.write_metadata(pending)
        saver.finalize(pending)
        summary = there.read_summary(pending.container)
        (self.record,) = summary.record.objects
        with open(f"{pending.container.path}/{self.record.name}", "rb") as file:
            self.source = np.frombuffer(file.read(), dtype=np.uint8)
        self.key = Key(0, STEP, summary.digest)
        self.here = CheckpointObjectManager(f"{folder}/here", rank=None, config=FlashpointConfig())
        self.container = self.here.container(STEP)
        self.here.create_container(self.container)
        self.here.write_manifest(self.container, there.manifest_bytes(pending.container))
        there.close()
        self.ends = []
        keys = (bytes(32), bytes([1]) * 32) if sealed else None
        self.server = Session(
            b"s" * 16, 0, Sealer(keys[0]) if keys else None, Opener(keys[1]) if keys else None
        )
        self.client = Session(
            b"s" * 16, 1, Sealer(keys[1]) if keys else None, Opener(keys[0]) if keys else None
        )

    def acquisition(self):
        made = Acquisition(
            self.here,
            self.key,
            [Wanted(self.record.name, (), (1, 2))],
            reader=0,
            manifest_nbytes=0,
            manifest_sources=(),
            credit=Credit(),
            numbers=itertools.count(1),
            timeout_s=60.0,
            on_end=self.ends.append,
        )
        made.prepare()()
        return made

    def answer(self, acquisition, ask, *, changed=False):
        """What the source that was asked sends; with one bit of it changed before it seals it."""
        data = self.source[ask.begin : ask.end]
        if changed:
            data = data.copy()
            data[len(data) // 2] ^= 4
        header, body = self.server.pack_data(Data(ask.request, ask.begin, ask.end), data.data)
        assert acquisition.arrived(*self.client.unpack_data(memoryview(header), memoryview(body)))
        acquisition.progressed()

    def get(self, order, is_changed=lambda ask: False):
        """Get the object; ``order`` says which of so many asks is answered next. Returns the transfer."""
        acquisition = self.acquisition()
        transfer, asks = acquisition.transfer, []
        while not acquisition.ended:
            asks += acquisition.asks(0.0)
            ask = asks.pop(order(len(asks)))
            self.answer(acquisition, ask, changed=is_changed(ask))
        assert self.ends.pop() is None
        return transfer

    def is_right(self):
        with open(f"{self.container.path}/{self.record.name}", "rb") as file:
            return file.read() == self.source.tobytes()

    def spoil(self):
        """Give the object up, and leave something else in its buffer, which is free then."""
        os.unlink(f"{self.container.path}/{self.record.name}")
        (buffer,) = self.here.pool.take_free(self.record.nbytes)
        buffer.data[:] = 0
        self.here.pool.release(buffer)


@pytest.fixture(params=["plain", "sealed"])
def world(request, job_root):
    made = World(job_root, sealed=request.param == "sealed")
    yield made
    made.here.close()


ORDERS = {
    "in turn": lambda n: 0,
    "backwards": lambda n: n - 1,
    **{f"by chance, {seed}": random.Random(seed).randrange for seed in range(2)},
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_frames_may_come_in_any_order_into_new_memory_and_into_old(world, order):
    for _ in ("new memory", "old memory"):
        world.get(order)
        assert world.is_right() and world.here.pool.allocations == 1
        world.spoil()


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("place", [0, 3 * MIB, 9 * MIB])
def test_one_changed_bit_is_seen_and_names_its_source(world, order, place):
    for _ in ("new memory", "old memory"):
        transfer = world.get(order, lambda ask: ask.source == 1 and ask.begin == place)
        assert transfer.bad_chunks == {1: 1}
        assert world.is_right()
        world.spoil()


def test_a_chunk_that_begins_anew_at_another_source_is_verified_by_what_that_one_gave(world):
    # The first source is lost after three good frames; the second one's last frame comes first, and fits them.
    acquisition = world.acquisition()
    first = [ask for ask in acquisition.asks(0.0) if ask.end <= 4 * MIB]
    for ask in first[:3]:
        world.answer(acquisition, ask)
    acquisition.transfer.lost(1)
    again = {ask.begin: ask for ask in acquisition.asks(0.0) if ask.end <= 4 * MIB}
    assert {ask.source for ask in again.values()} == {2} and len(again) == 4
    for begin in (3 * MIB, 0, MIB, 2 * MIB):
        world.answer(acquisition, again[begin], changed=begin == 0)
    assert acquisition.transfer.bad_chunks == {2: 1}


def test_checksums_are_made_of_frames_as_they_come_and_nothing_is_read_twice(world, monkeypatch):
    def read_again(*args):
        raise AssertionError("the object was read again")

    monkeypatch.setattr(acquisitions, "mismatches", read_again)
    world.get(ORDERS["in turn"])
    assert world.is_right()
    world.spoil()
    with pytest.raises(AssertionError, match="read again"):
        world.get(ORDERS["backwards"])


def test_what_a_full_file_system_does_not_take_ends_the_acquisition(world, monkeypatch):
    def pwrite(fd, data, begin):
        raise OSError(28, "No space left on device")

    acquisition = world.acquisition()
    monkeypatch.setattr(os, "pwrite", pwrite)
    world.answer(acquisition, acquisition.asks(0.0)[0])
    assert acquisition.ended and world.ends[0][0] == "no-space"
    assert not os.path.exists(f"{world.container.path}/{world.record.name}")
