import itertools
import random
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flashpoint.errors import ReplicationError
from flashpoint.replication import limits
from flashpoint.replication.chunks import ChunkState, Want
from flashpoint.replication.transfer import Credit, Transfer

KIB, MIB = 1 << 10, 1 << 20
TIMEOUT_S = 60.0


def want_of(name: str = "a", mib: float = 4, sources=(1, 2), *, chunk_mib: float = 1, chunks=None) -> Want:
    nbytes, chunk_bytes = int(mib * MIB), int(chunk_mib * MIB)
    return Want(name, nbytes, chunk_bytes, chunks or tuple(range(-(-nbytes // chunk_bytes))), tuple(sources))


def transfer_of(*wants: Want, credit: Credit | None = None, timeout_s: float = TIMEOUT_S) -> Transfer:
    return Transfer(
        wants, credit=credit or Credit(), numbers=itertools.count(1), timeout_s=timeout_s, version="step 7"
    )


def places(asks):
    return [(ask.want, ask.begin, ask.end) for ask in asks]


def deliver(transfer, ask):
    """The chunk that is to be verified after this answer, or None."""
    landing = transfer.arrived(ask.request, ask.begin, ask.end)
    assert landing == (ask.want, ask.begin, ask.end)
    return transfer.landed(ask.request)


def take(transfer, ask, *, ok: bool = True):
    chunk = deliver(transfer, ask)
    if chunk is not None:
        transfer.verified(*chunk, ok=ok)


def run(transfer, now_s: float = 0.0, *, bad_sources=(), turns: int = 1000) -> list:
    """Answer everything, until nothing more is asked for. Returns all that was asked for."""
    asked = []
    for _ in range(turns):
        asks = transfer.requests(now_s)
        if not asks:
            return asked
        asked += asks
        for ask in asks:
            if ask.request in transfer:
                take(transfer, ask, ok=ask.source not in bad_sources)
    raise AssertionError("it does not end")


# ---- asking ---------------------------------------------------------------------------------------


def test_all_chunks_are_asked_for_in_order_and_objects_are_not_waited_for():
    transfer = transfer_of(want_of("a", 2), want_of("b", 1.5))
    asks = transfer.requests(0)
    assert places(asks) == [(0, 0, MIB), (0, MIB, 2 * MIB), (1, 0, MIB), (1, MIB, MIB + MIB // 2)]
    assert {ask.source for ask in asks} == {1}
    assert transfer.requests(0) == []
    for ask in reversed(asks):
        take(transfer, ask)
    assert transfer.finished() == [1, 0]
    assert transfer.finished() == []
    assert transfer.done
    assert transfer.nbytes_received == 3.5 * MIB


def test_a_large_chunk_comes_in_frames_and_a_small_one_in_one():
    transfer = transfer_of(want_of(mib=5.25, chunk_mib=4), want_of(mib=1 / 64, chunk_mib=1 / 256))
    asks = transfer.requests(0)
    assert [ask.end - ask.begin for ask in asks] == [MIB] * 5 + [MIB // 4] + [4 * KIB] * 4
    assert [deliver(transfer, ask) for ask in asks[:6]] == [None] * 3 + [(0, 0), None, (0, 1)]


def test_only_the_chunks_that_are_wanted_are_asked_for():
    transfer = transfer_of(want_of(mib=9.5, chunks=(9, 2)))
    assert places(run(transfer)) == [(0, 9 * MIB, 9 * MIB + MIB // 2), (0, 2 * MIB, 3 * MIB)]
    assert transfer.done


def test_nothing_wanted_is_done_at_once():
    transfer = transfer_of(Want("a", 0, 4096, (), ()))
    assert transfer.finished() == [0]
    assert transfer.done
    assert transfer.requests(0) == []


def test_the_credit_bounds_what_is_asked_for_over_all_transfers():
    credit = Credit(nbytes=4 * MIB)
    one, other = (transfer_of(want_of(mib=8, sources=(1,)), credit=credit) for _ in range(2))
    first = one.requests(0)
    assert len(first) == 4
    assert other.requests(0) == []
    deliver(one, first[0])
    assert len(other.requests(0)) == 1
    assert credit.in_flight(1) == 4 * MIB
    one.close()
    other.close()
    assert credit.in_flight(1) == 0


def test_no_more_small_frames_are_asked_for_than_the_peer_queues():
    transfer = transfer_of(want_of(mib=1, chunk_mib=1 / 256))
    asks = transfer.requests(0)
    assert [ask.source for ask in asks].count(1) == limits.FRAMES_QUEUED_MAX


def test_it_is_time_to_ask_for_more_when_a_quarter_of_bytes_and_frames_has_come_back():
    credit = Credit(nbytes=8 * MIB, frames=8)
    assert credit.is_low(1)
    for nbytes, count in ((MIB, 8), (1024, 8)):
        for _ in range(count):
            credit.take(1, nbytes)
        assert not credit.is_low(1) and credit.is_low(2)
        credit.give_back(1, nbytes)
        assert not credit.is_low(1)
        credit.give_back(1, nbytes)
        assert credit.is_low(1)
        for _ in range(count - 2):
            credit.give_back(1, nbytes)


def test_each_object_comes_from_its_best_source():
    transfer = transfer_of(want_of("a", 3, (1, 2)), want_of("b", 3, (2, 1)))
    assert [(ask.source, ask.want) for ask in transfer.requests(0)] == [(1, 0)] * 3 + [(2, 1)] * 3


def test_a_source_with_nothing_left_helps_out_where_another_has_no_credit_left():
    wants = want_of("a", 20, (1, 2)), want_of("b", 2, (2, 1))
    transfer = transfer_of(*wants, credit=Credit(8 * MIB))
    asks = transfer.requests(0)
    assert [(ask.source, ask.want) for ask in asks] == [(1, 0)] * 8 + [(2, 1)] * 2 + [(2, 0)] * 6
    assert len(set(places(asks))) == len(asks)
    slow, quick = asks[0], [ask for ask in asks if ask.source == 2]
    for ask in quick:
        take(transfer, ask)
    assert {ask.source for ask in transfer.requests(0)} == {2}
    take(transfer, slow)


# ---- answers that are not as they should be -------------------------------------------------------


def test_what_was_not_asked_for_comes_twice_or_has_another_size_is_dropped():
    transfer = transfer_of(want_of(mib=1))
    [ask] = transfer.requests(0)
    assert transfer.arrived(999, 0, MIB) is None
    assert transfer.arrived(ask.request, 0, MIB - 1) is None
    assert transfer.landed(ask.request) is None
    assert deliver(transfer, ask) == (0, 0)
    assert transfer.arrived(ask.request, 0, MIB) is None
    assert transfer.landed(ask.request) is None
    transfer.refused(ask.request, "busy")
    assert transfer.requests(5) == []
    transfer.verified(0, 0, ok=True)
    transfer.verified(0, 0, ok=False)
    assert transfer.done
    assert transfer.finished() == [0]


def test_only_what_has_landed_can_be_verified():
    transfer = transfer_of(want_of(mib=2, chunk_mib=2))
    transfer.verified(0, 0, ok=True)
    asks = transfer.requests(0)
    transfer.verified(0, 0, ok=True)
    deliver(transfer, asks[0])
    transfer.verified(0, 0, ok=True)
    assert not transfer.done


def test_a_bad_chunk_is_asked_of_the_next_source_whole():
    transfer = transfer_of(want_of(mib=4, chunk_mib=4))
    for ask in transfer.requests(0):
        take(transfer, ask, ok=False)
    again = transfer.requests(0)
    assert [(ask.source, ask.begin) for ask in again] == [(2, i * MIB) for i in range(4)]
    for ask in again:
        take(transfer, ask)
    assert transfer.done
    assert transfer.bad_chunks == {1: 1}


def test_a_chunk_that_no_source_has_right_fails_by_name_after_all_attempts():
    credit = Credit()
    transfer = transfer_of(want_of("rank00003-0.safetensors", 6), credit=credit)
    asked = []
    while transfer.failed is None:
        for ask in transfer.requests(0):
            asked.append(ask)
            if ask.request in transfer:
                take(transfer, ask, ok=ask.begin != 5 * MIB)
    assert [ask.source for ask in asked if ask.begin == 5 * MIB] == [1, 2] * limits.ATTEMPTS_MAX
    assert isinstance(transfer.failed, ReplicationError)
    assert str(transfer.failed) == (
        "step 7: rank00003-0.safetensors, chunk 5 (node 1: 5 failed attempts, last: wrong checksum; "
        "node 2: 5 failed attempts, last: wrong checksum)"
    )
    assert transfer.is_lost
    assert transfer.requests(0) == []
    assert credit.in_flight(1) == credit.in_flight(2) == 0


@pytest.mark.parametrize(
    ("of_the_first", "is_lost"),
    [("wrong", True), ("no-object", True), ("no-version", True), ("unknown-node", False), ("silent", False)],
)
def test_an_object_is_lost_only_if_every_source_says_so(of_the_first, is_lost):
    transfer = transfer_of(want_of(mib=1))
    now_s = 0.0
    while transfer.failed is None:
        for ask in transfer.requests(now_s):
            if ask.source == 2 or of_the_first == "wrong":
                take(transfer, ask, ok=False)
            elif of_the_first != "silent":
                transfer.refused(ask.request, of_the_first)
        now_s += limits.REQUEST_TIMEOUT_S / 2
        transfer.expire(now_s)
    assert transfer.is_lost == is_lost


def test_an_object_without_a_source_is_lost():
    transfer = transfer_of(want_of(mib=1, sources=()))
    assert transfer.failed is not None and transfer.is_lost


def test_an_object_that_nobody_holds_fails_at_once():
    transfer = transfer_of(want_of(), want_of("b", sources=()))
    assert "b, chunk 0: no node" in str(transfer.failed)
    assert transfer.requests(0) == []


@pytest.mark.parametrize(
    "changes",
    [{"chunk_bytes": 0}, {"chunk_bytes": 2048}, {"chunk_bytes": 12288}, {"chunks": (4,)}, {"chunks": (1, 1)}],
)
def test_a_want_that_no_object_can_have_is_an_error(changes):
    with pytest.raises(ReplicationError, match="a"):
        transfer_of(want_of()._replace(**changes))


# ---- refusals, silence, lost sources --------------------------------------------------------------


def test_who_is_busy_is_asked_again_a_little_later():
    transfer = transfer_of(want_of(mib=1, sources=(1,)))
    for now_s in range(20):  # however often: only the deadline ends this
        [ask] = transfer.requests(now_s * limits.REPEAT_S)
        transfer.refused(ask.request, "busy")
        assert transfer.requests((now_s + 0.9) * limits.REPEAT_S) == []
    assert len(run(transfer, 100)) == 1
    assert transfer.done


def test_while_one_is_busy_another_is_asked():
    transfer = transfer_of(want_of(mib=20))
    for ask in transfer.requests(0):
        if ask.source == 1:
            transfer.refused(ask.request, "busy")
        else:
            take(transfer, ask)
    assert {ask.source for ask in run(transfer, 0.5)} == {2}
    assert transfer.done


def test_who_does_not_have_an_object_is_not_asked_for_it_again():
    transfer = transfer_of(want_of("a", 12), want_of("b", 2))
    asks = transfer.requests(0)
    transfer.refused(asks[0].request, "no-object")  # source 2 has all of its credit in use
    assert all(ask.request not in transfer for ask in asks if ask.source == 1 and ask.want == 0)
    for ask in asks:
        if ask.request in transfer:
            take(transfer, ask)
    assert (1, 0) not in {(ask.source, ask.want) for ask in run(transfer)}
    assert transfer.done


def test_when_all_sources_refuse_an_object_the_error_says_what_each_said():
    transfer = transfer_of(want_of(mib=1))
    for code in ("no-object", "corrupt"):
        [ask] = transfer.requests(0)
        transfer.refused(ask.request, code)
    assert "a, chunk 0 (node 1: no-object; node 2: corrupt)" in str(transfer.failed)


def test_an_answer_that_cannot_be_opened_is_asked_for_again():
    transfer = transfer_of(want_of(mib=1, sources=(1,)))
    for _ in range(limits.ATTEMPTS_MAX):
        assert transfer.failed is None
        [ask] = transfer.requests(0)
        assert transfer.arrived(ask.request, ask.begin, ask.end)
        transfer.refused(ask.request, "malformed")
    assert "5 failed attempts, last: malformed" in str(transfer.failed)


def test_what_is_not_answered_in_time_is_asked_of_another_and_counts_once():
    transfer = transfer_of(want_of(mib=4, chunk_mib=4))
    first = transfer.requests(0)
    transfer.expire(limits.REQUEST_TIMEOUT_S - 0.1)
    assert transfer.requests(limits.REQUEST_TIMEOUT_S - 0.1) == []
    transfer.expire(limits.REQUEST_TIMEOUT_S)
    second = transfer.requests(limits.REQUEST_TIMEOUT_S)
    assert [ask.source for ask in second] == [2] * 4
    assert transfer.arrived(first[0].request, first[0].begin, first[0].end) is None
    for ask in second:
        take(transfer, ask)
    assert transfer.done


def test_over_a_slow_line_what_still_comes_is_not_asked_for_twice():
    transfer = transfer_of(want_of(mib=8, chunk_mib=8, sources=(1,)))
    asks = transfer.requests(0)
    assert len(asks) == 8
    for n, ask in enumerate(asks):  # the last comes three times as late as it may be silent
        now_s = (n + 1) * limits.REQUEST_TIMEOUT_S * 0.4
        transfer.expire(now_s)
        assert transfer.requests(now_s) == []
        take(transfer, ask)
    assert transfer.done


def test_what_a_source_has_passed_over_is_asked_for_again_though_it_answers():
    transfer = transfer_of(want_of(mib=8, chunk_mib=8, sources=(1,)))
    lost, *others = transfer.requests(0)
    transfer.expire(limits.REQUEST_TIMEOUT_S / 2)
    for ask in others[:3]:
        deliver(transfer, ask)
    transfer.expire(limits.REQUEST_TIMEOUT_S)
    [again] = transfer.requests(limits.REQUEST_TIMEOUT_S)
    assert again[1:] == lost[1:]


def test_with_one_source_only_the_frames_that_did_not_come_are_asked_for_again():
    transfer = transfer_of(want_of(mib=4, chunk_mib=4, sources=(1,)))
    asks = transfer.requests(0)
    for ask in asks[:3]:
        deliver(transfer, ask)
    transfer.expire(10)
    [again] = transfer.requests(10)
    assert again[1:] == asks[3][1:]
    take(transfer, again)
    assert transfer.done


def test_what_was_asked_of_a_lost_source_is_asked_of_another_but_nothing_that_is_verified():
    credit = Credit()
    transfer = transfer_of(want_of(mib=12), credit=credit)
    asks = [ask for ask in transfer.requests(0) if ask.source == 1]
    take(transfer, asks[0])
    transfer.lost(1)
    assert credit.in_flight(1) == 0
    asked = run(transfer)
    assert {ask.source for ask in asked} == {2}
    assert asks[0].begin not in {ask.begin for ask in asked}


def test_a_transfer_goes_on_from_its_last_chunk_when_its_only_source_is_back():
    transfer = transfer_of(want_of(mib=20, sources=(1,)))
    asks = transfer.requests(0)
    for ask in asks[:5]:
        take(transfer, ask)
    transfer.lost(1)
    transfer.lost(1)
    assert transfer.requests(1) == []
    transfer.back(1)
    transfer.back(1)
    assert {ask.begin // MIB for ask in run(transfer, 2)} == set(range(5, 20))
    assert transfer.done


def test_bytes_that_are_written_while_their_source_is_lost_do_not_mix_with_another_sources():
    transfer = transfer_of(want_of(mib=2, chunk_mib=2))
    one, _ = transfer.requests(0)
    assert transfer.arrived(one.request, one.begin, one.end)
    transfer.lost(1)
    assert transfer.requests(0) == []  # a thread may be writing still
    assert transfer.landed(one.request) is None
    assert [(ask.source, ask.begin) for ask in transfer.requests(0)] == [(2, 0), (2, MIB)]


def test_without_any_progress_the_transfer_fails_at_its_deadline_by_name():
    credit = Credit()
    transfer = transfer_of(want_of(mib=2), want_of("b"), credit=credit, timeout_s=5)
    take(transfer, transfer.requests(100)[0])
    transfer.expire(104.9)
    transfer.lost(1)
    transfer.requests(104.9)
    transfer.expire(105)
    assert str(transfer.failed) == (
        "step 7: nothing came for 5 s, 2 of 2 objects are not whole, "
        "the first is a, chunk 1 (node 1: not connected; node 2: no answer yet)"
    )
    assert credit.in_flight(1) == credit.in_flight(2) == 0


def test_a_closed_transfer_asks_for_nothing_and_takes_nothing():
    transfer = transfer_of(want_of())
    ask, *_ = transfer.requests(0)
    transfer.close()
    assert transfer.arrived(ask.request, ask.begin, ask.end) is None
    assert transfer.requests(0) == []
    transfer.expire(1000)
    assert transfer.failed is None


# ---- speed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wants",
    [
        [want_of(str(i), 0.5, (1 + i % 2, 2 - i % 2), chunk_mib=4) for i in range(16_000)],
        [want_of(mib=16_384, chunk_mib=4)],
    ],
    ids=["small", "large"],
)
def test_the_time_per_frame_does_not_grow_with_the_transfer(wants):
    start = time.perf_counter()
    transfer = transfer_of(*wants)
    frames, waiting = 0, []
    while not transfer.done:
        waiting += transfer.requests(0)
        take(transfer, waiting.pop())
        frames += 1
    assert frames == 16_000 if len(wants) > 1 else 16_384
    assert (time.perf_counter() - start) / frames < 0.5e-3  # some 20 us: room for a machine that is busy


# ---- against a model of the network ---------------------------------------------------------------


class TransferMachine(RuleBasedStateMachine):
    """A network that drops, repeats, reorders, garbles and refuses; sources come and go; threads write."""

    @initialize(
        seed=st.integers(0, 2**32),
        objects=st.lists(
            st.tuples(
                st.sampled_from([1 / 256, 1 / 4, 1, 2, 4]),  # chunk, MiB
                st.floats(0.001, 9),  # chunks
                st.permutations([1, 2, 3]),
                st.integers(1, 3),
            ),
            min_size=1,
            max_size=5,
        ),
    )
    def begin(self, seed, objects):
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.credit = Credit(nbytes=4 * MIB, frames=16)
        self.wants = [
            want_of(str(i), mib * chunks, sources[:count], chunk_mib=mib)
            for i, (mib, chunks, sources, count) in enumerate(objects)
        ]
        self.transfer = transfer_of(*self.wants, credit=self.credit, timeout_s=30)
        self.sent: dict[
            int, tuple
        ] = {}  # request: the ask and whether its bytes are right, as the peer sends it
        self.writing: dict[int, tuple] = {}
        self.bytes: dict[tuple[int, int], tuple[int, int, bool]] = {}  # (want, begin): end, source, right
        self.to_verify: list[tuple[int, int]] = []
        self.good: set[tuple[int, int]] = set()
        self.down: set[int] = set()
        self.gone: set[tuple[int, int]] = set()  # (want, source) that was refused for good
        self.finished: list[int] = []

    def pick(self, things):
        return self.random.choice(sorted(things)) if things else None

    def chunk_of(self, want, begin):
        return want, begin // self.wants[want].chunk_bytes

    @rule()
    def ask(self):
        busy = {self.chunk_of(ask.want, ask.begin) for ask, _ in self.writing.values()}
        for ask in self.transfer.requests(self.now_s):
            want, chunk = self.wants[ask.want], self.chunk_of(ask.want, ask.begin)
            assert ask.request not in self.sent
            assert ask.source in want.sources
            assert ask.source not in self.down
            assert 0 < ask.end - ask.begin <= limits.FRAME_BYTES
            assert ask.end <= min((chunk[1] + 1) * want.chunk_bytes, want.nbytes)
            assert chunk not in self.good
            assert chunk not in self.to_verify
            if chunk in busy:  # then from the same source
                writers = {
                    a.source for a, _ in self.writing.values() if self.chunk_of(a.want, a.begin) == chunk
                }
                assert writers == {ask.source}
            self.sent[ask.request] = (ask, True)

    @rule(garbled=st.booleans(), again=st.booleans())
    def answer(self, garbled, again):
        number = self.pick(self.sent)
        if number is None:
            return
        ask, right = self.sent[number] if again else self.sent.pop(number)
        if self.transfer.arrived(number, ask.begin, ask.end) is not None:
            self.writing[number] = (ask, right and not garbled)

    @rule()
    def answer_of_another_size(self):
        number = self.pick(self.sent)
        if number is not None:
            assert self.transfer.arrived(number, self.sent[number][0].begin, 1 << 40) is None

    @rule()
    def write(self):
        number = self.pick(self.writing)
        if number is None:
            return
        ask, right = self.writing.pop(number)
        chunk = self.chunk_of(ask.want, ask.begin)
        assert chunk not in self.good  # or else a verified chunk would change
        assert chunk not in self.to_verify
        self.bytes[ask.want, ask.begin] = (ask.end, ask.source, right)
        complete = self.transfer.landed(number)
        if complete is not None:
            assert complete == chunk
            self.to_verify.append(chunk)

    @rule()
    def cannot_open(self):
        number = self.pick(self.writing)
        if number is not None:
            del self.writing[number]
            self.transfer.refused(number, "malformed")

    @rule()
    def verify(self):
        if not self.to_verify:
            return
        chunk = self.to_verify.pop(self.random.randrange(len(self.to_verify)))
        want = self.wants[chunk[0]]
        begin, end = chunk[1] * want.chunk_bytes, min((chunk[1] + 1) * want.chunk_bytes, want.nbytes)
        ok, sources = True, set()
        while begin < end:  # every byte of it is here, and of one source
            begin, source, right = self.bytes[chunk[0], begin]
            sources.add(source)
            ok &= right
        assert len(sources) == 1
        self.transfer.verified(*chunk, ok=ok)
        if ok:
            self.good.add(chunk)

    @rule()
    def drop(self):
        self.sent.pop(self.pick(self.sent), None)

    @rule(code=st.sampled_from(["busy", "no-session", "no-object"]))
    def refuse(self, code):
        number = self.pick(self.sent.keys() - self.writing.keys())
        if number is not None:
            self.transfer.refused(number, code)
            ask, _ = self.sent.pop(number)
            if code == "no-object":
                self.gone.add((ask.want, ask.source))

    @rule(source=st.integers(1, 3))
    def lose(self, source):
        self.down.add(source)
        self.transfer.lost(source)

    @rule(source=st.integers(1, 3))
    def come_back(self, source):
        self.down.discard(source)
        self.transfer.back(source)

    @rule(seconds=st.sampled_from([0.1, 1.0, limits.REQUEST_TIMEOUT_S]))
    def wait(self, seconds):
        self.now_s += seconds
        self.transfer.expire(self.now_s)

    @invariant()
    def what_is_finished_was_verified(self):
        for want in self.transfer.finished():
            assert want not in self.finished
            assert {(want, chunk) for chunk in self.wants[want].chunks} <= self.good
            self.finished.append(want)
        assert self.transfer.done == (len(self.finished) == len(self.wants))

    @invariant()
    def the_credit_is_what_is_asked_for(self):
        for source in (1, 2, 3):
            assert 0 <= self.credit.in_flight(source) <= self.credit.nbytes
        assert sum(map(self.credit.in_flight, (1, 2, 3))) == sum(
            request.end - request.begin for request in self.transfer._requests.values()
        )

    @invariant()
    def states_are_as_they_look_from_outside(self):
        live = {(obj.number, i): chunk for obj in self.transfer._objects for i, chunk in obj.live.items()}
        assert not self.good & live.keys()
        landed = {place for place, chunk in live.items() if chunk.state is ChunkState.LANDED}
        assert landed == set(self.to_verify)

    def teardown(self):
        if not hasattr(self, "transfer"):
            return
        # From now on one source of each object works, or none at all.
        some_good = self.random.random() < 0.8
        if some_good:
            for source in (1, 2, 3):
                self.come_back(source)
        self.sent.clear()
        used_up = bool(self.gone) or any(
            chunk.failures.get(s, 0) >= limits.ATTEMPTS_MAX - 2
            for obj in self.transfer._objects
            for chunk in obj.live.values()
            for s in obj.want.sources
        )
        was_failed = self.transfer.failed is not None
        progress_s = self.transfer._progress_s
        waited_s = 0.0 if progress_s is None else self.now_s - progress_s
        progress_s, count = self.now_s, len(self.good)
        while not self.transfer.done and self.transfer.failed is None:
            for _ in list(self.writing):
                self.write()
            for _ in list(self.to_verify):
                self.verify()
            self.ask()
            for number, (ask, _) in sorted(self.sent.items()):
                if some_good and self.transfer.arrived(number, ask.begin, ask.end):
                    self.writing[number] = (ask, True)
            self.sent.clear()
            if len(self.good) > count:
                progress_s, count = self.now_s, len(self.good)
            if not self.writing:
                self.wait(0.5)
            self.what_is_finished_was_verified()
            self.the_credit_is_what_is_asked_for()
            assert self.now_s - progress_s <= 31
        if self.transfer.failed is not None:
            assert "step 7: " in str(self.transfer.failed)
            assert "chunk" in str(self.transfer.failed)
            assert "node" in str(self.transfer.failed)
        # What was dropped before takes a while to be missed: the deadline may be nearer.
        if some_good and not used_up and not was_failed and waited_s < 15:
            assert self.transfer.done, self.transfer.failed
        assert [self.credit.in_flight(source) for source in (1, 2, 3)] == [0, 0, 0]


TestTransfer = TransferMachine.TestCase
TestTransfer.settings = settings(max_examples=60, stateful_step_count=60)
