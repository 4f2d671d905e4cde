"""Agents on a bad network, killed and stopped agents, and peers that mean no good."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashpoint.errors import ReplicationError
from flashpoint.manifest import MANIFEST_NAME
from flashpoint.replication import limits, orders
from flashpoint.replication.events import Arrived, Lost, Replied
from flashpoint.replication.keys import JobKeys
from flashpoint.replication.messages import Fetch, Key, Offer, Query, Refused, Span, Withdraw, encode
from tests.chaos import Chaos
from tests.core.replication.nodes import (
    HOST,
    KIB,
    MIB,
    Impostor,
    Nodes,
    Recorder,
    Stranger,
    hello,
    hurry,
    name_of_rank,
    stop_for,
)

EVERY = 150 * KIB  # bytes from one damage to the next
CHAOS_S = 1.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@pytest.fixture
def chaos() -> Iterator[Chaos]:
    with Chaos(seed=int(os.environ.get("CHAOS_SEED", "2"))) as made:
        yield made


def logged(caplog: pytest.LogCaptureFixture, *texts: str) -> list[str]:
    """Warnings that have all of these in them."""
    messages = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return [message for message in messages if all(text in message for text in texts)]


# ---- a bad network --------------------------------------------------------------------------------


@pytest.mark.parametrize("encrypt", [True, False], ids=["sealed", "plain"])
@pytest.mark.parametrize(
    "faults",
    [
        {"flip_every": EVERY},
        {"drop_every": EVERY},
        {"duplicate_every": EVERY},
        {"swap_every": EVERY},
        {"flip_every": 4 * EVERY, "drop_every": 4 * EVERY, "swap_every": 4 * EVERY, "cut_every": 8 * EVERY},
    ],
    ids=["flipped", "dropped", "duplicated", "reordered", "all"],
)
@pytest.mark.fault(31)
def test_damaged_bytes_are_never_committed_and_the_copy_goes_on_afterwards(
    chaos: Chaos, faults: dict[str, int], encrypt: bool
) -> None:
    size = 3 * MIB
    with Nodes(2, chaos=chaos, nbytes=size, encrypt=encrypt).start() as nodes:
        links = [link for node in nodes for link in node.links]
        for link in links:
            link.faults(**faults)
        nodes.save(1)
        until = time.monotonic() + CHAOS_S

        def is_damaged() -> bool:
            told = [link.stats() for link in links]
            return sum(t.flip + t.drop + t.duplicate + t.swap + t.cut for t in told) > 4

        nodes.until(lambda: time.monotonic() > until and is_damaged(), "bytes are damaged")
        before = [(node.manager.nbytes_received, node.manager.nbytes_missing) for node in nodes]
        for link in links:
            link.heal()
        nodes.replicated(1)
        for node, (received, missing) in zip(nodes, before, strict=True):
            # What was verified is not asked for again, as long as the copy is not begun anew.
            if missing is not None and len(node.manager.acquired) == 1:
                assert node.manager.nbytes_received - received <= missing + 8 * 64 * KIB
            assert node.manager.nbytes_received < 10 * size


@pytest.mark.fault(27)
def test_a_link_that_is_cut_every_200_kib_brings_a_version_all_the_same(chaos: Chaos) -> None:
    size = 1 * MIB
    with Nodes(2, chaos=chaos, behind=[0], nbytes=size).start() as nodes:
        for link in nodes[0].links:
            link.faults("down", cut_after=200 * KIB)
        nodes.save(1)
        nodes.replicated(1)
        cuts = sum(link.stats().cut for link in nodes[0].links)
        assert cuts >= 4
        (one,) = nodes[1].manager.acquired  # the same acquisition, all the time
        # Chunks that are verified are not asked for again: of each line, less than one chunk was for nothing.
        assert size < nodes[1].manager.nbytes_received <= size + (cuts + 1) * 64 * KIB
        assert one.ended


@pytest.mark.fault(27)
def test_after_a_stall_only_what_is_missing_is_asked_for(chaos: Chaos) -> None:
    size = 4 * MIB
    with Nodes(2, chaos=chaos, behind=[0], nbytes=size).start() as nodes:
        for link in nodes[0].links:
            link.faults(mbit=40)
        nodes.save(1)
        nodes.until(lambda: nodes[1].manager.nbytes_received > MIB, "a quarter is there")
        for link in nodes[0].links:
            link.faults(stall=True)
        until = time.monotonic() + 3.0  # more than the silence that is borne
        nodes.until(lambda: time.monotonic() > until)
        assert name_of_rank(0) not in nodes[1].objects(1)
        for link in nodes[0].links:
            link.cut()
            link.heal()
        nodes.replicated(1)
        assert nodes[1].manager.nbytes_received <= size + 16 * 64 * KIB


# ---- agents that die, or sleep ----------------------------------------------------------------------


def copying(nodes: Nodes, chaos_of: int) -> None:
    """A version whose way from one node is slow, so that it is on its way now."""
    for link in nodes[chaos_of].links:
        link.faults(mbit=40)
    nodes.save(1)
    bulk = nodes[chaos_of].bulk
    assert bulk is not None
    nodes.until(lambda: bulk.stats().down > 500 * KIB, "the copy is on its way")


@pytest.mark.fault(4)
def test_a_holder_killed_while_it_copies_goes_on_when_it_is_back(chaos: Chaos) -> None:
    with Nodes(2, processes=[1], chaos=chaos, nbytes=2 * MIB).start() as nodes:
        copying(nodes, 0)
        nodes[1].kill()
        assert name_of_rank(0) not in nodes[1].objects(1)
        for link in nodes[0].links:
            link.heal()
        nodes[1].start()
        nodes.replicated(1)


@pytest.mark.fault(4)
def test_a_source_killed_while_it_gives_goes_on_when_it_is_back(chaos: Chaos) -> None:
    with Nodes(2, processes=[0], chaos=chaos, nbytes=2 * MIB).start() as nodes:
        copying(nodes, 0)
        nodes[0].kill()
        for link in nodes[0].links:
            link.heal()
        time.sleep(0.5)
        assert name_of_rank(0) not in nodes[1].objects(1)
        nodes[0].start()
        nodes.replicated(1)


def test_when_a_source_is_killed_the_other_one_gives_the_rest(chaos: Chaos) -> None:
    size = 4 * MIB
    with Nodes(3, copies=2, processes=[0], chaos=chaos, behind=[0], nbytes=size).start() as nodes:
        nodes.save(1)
        nodes.replicated(1)
        key = nodes[0].key(1)
        os.unlink(nodes[2].path(1, name_of_rank(0)))
        for link in nodes[0].links:
            link.faults(mbit=20)
        began = nodes[2].manager.nbytes_received
        wanted = orders.Wanted(name_of_rank(0), (), (0,))
        both = orders.Wanted(name_of_rank(0), (), (0, 1))
        with pytest.raises(ReplicationError, match="no-version|no object|not"):
            nodes[2].client.retrieve(Key(1, 1, "0" * 32), [wanted], 10.0)
        got: list[int] = []
        getting = threading.Thread(target=lambda: got.append(nodes[2].client.retrieve(key, [both], 30.0)))
        getting.start()
        nodes.until(lambda: nodes[2].manager.nbytes_received - began > 200 * KIB, "it is on its way")
        nodes[0].kill()
        getting.join()
        assert got and size <= got[0] <= size + 2 * MIB
        assert nodes.check() >= 1 and name_of_rank(0) in nodes[2].objects(1)


@pytest.mark.fault(11)
def test_a_holder_that_sleeps_for_some_seconds_goes_on(chaos: Chaos) -> None:
    with Nodes(2, processes=[1], chaos=chaos, behind=[0], nbytes=2 * MIB).start() as nodes:
        copying(nodes, 0)
        stop_for(nodes[1], 3.0)  # longer than the silence that node 0 bears here
        for link in nodes[0].links:
            link.heal()
        nodes.replicated(1)
        nodes.save(2)
        nodes.replicated(2)


# ---- strangers and impostors ------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[Nodes]:
    """Two nodes; a version is on both, replicated. Node 1's agent is stopped: somebody else may be it."""
    with Nodes(2).start() as nodes:
        nodes.save(1)
        nodes.replicated(1)
        yield nodes


def unchanged(nodes: Nodes, index: int = 0) -> Callable[[], None]:
    """Call it later: nothing in that node's memory has changed since."""
    time.sleep(0.15)
    before = nodes[index].tree()

    def compare() -> None:
        time.sleep(0.15)
        assert nodes[index].tree() == before

    return compare


@pytest.mark.fault(37)
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"job": "f" * 32}, "wrong-job"),
        ({"epoch": 0}, "stale-epoch"),
        ({"epoch": 9}, "behind"),
        ({"node": "another"}, "unknown-node"),
        ({"index": 7}, "unknown-node"),
        ({"protocol": 2}, "protocol-version"),
    ],
)
@pytest.mark.fault(37)
def test_a_hello_that_is_not_of_this_job_and_epoch_is_refused(
    pair: Nodes, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], code: str
) -> None:
    same = unchanged(pair)
    membership = pair.membership()
    with Stranger(pair[0].client.identify().port, pair.keys) as stranger:
        for _ in range(5):
            assert stranger.refused(hello(membership, 1, **changes)) == code
        assert stranger.refused(Query(pair[0].key(1))) == "no-session"
    same()
    # Who has begun the next epoch a moment sooner is told, and is no cause for alarm.
    assert len(logged(caplog, "127.0.0.1", code)) == (code != "behind"), logged(caplog)
    pair.save(2)
    pair.replicated(2)


def test_a_hello_of_another_release_is_told_which_one_this_is(
    pair: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    same = unchanged(pair)
    with Stranger(pair[0].client.identify().port, pair.keys) as stranger:
        for _ in range(3):
            assert stranger.refused(msgspec.msgpack.encode(["hello", 9, {"quite": "another"}])) == (
                "protocol-version"
            )
    same()
    assert len(logged(caplog, "127.0.0.1", "version 1, not 9")) == 1


@pytest.mark.fault(37)
@pytest.mark.parametrize("knows_server", [True, False])
@pytest.mark.fault(37)
def test_whoever_has_another_key_is_not_heard(
    pair: Nodes, caplog: pytest.LogCaptureFixture, knows_server: bool
) -> None:
    same = unchanged(pair)
    server_key = pair.keys.public if knows_server else None
    membership = pair.membership()
    for _ in range(3):
        with Stranger(pair[0].client.identify().port, JobKeys.generate(), server_key=server_key) as stranger:
            assert stranger.ask(hello(membership, 1), 0.4) is None
    same()
    text = "127.0.0.1 does not have the keys" if knows_server else "does not speak CURVE"
    assert len(logged(caplog, text)) == 1, logged(caplog)


@pytest.mark.fault(37)
def test_a_recorded_handshake_opens_nothing_when_it_is_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    with Nodes(2).start(configure=False) as nodes:
        identity = nodes[0].client.identify()
        recorders = [Recorder(identity.port), Recorder(identity.bulk_port)]
        try:
            members = list(nodes.membership().members)
            ports = {"port": recorders[0].port, "bulk_port": recorders[1].port}
            members[0] = msgspec.structs.replace(members[0], **ports)
            nodes[0].manager._transport.port, nodes[0].manager._transport.bulk_port = ports.values()
            nodes.configure(nodes.membership(members=tuple(members)))
            nodes.save(1)
            nodes.replicated(1)
            recorded = [
                (port, bytes(sent))
                for port, one in zip((identity.port, identity.bulk_port), recorders, strict=True)
                for sent in one.sent
            ]
            assert {port for port, sent in recorded if len(sent) > 200} == {identity.port, identity.bulk_port}
            sessions = set(nodes[0].manager._transport._guests.by_session)
            same = unchanged(nodes)
            for port, sent in recorded:
                with socket.create_connection((HOST, port)) as again:
                    again.sendall(sent)
                    again.settimeout(1.0)
                    heard = b""
                    try:
                        while data := again.recv(1 << 20):
                            heard += data
                    except OSError:
                        pass
                    # Not one byte of an object goes out in the clear.
                    with open(nodes[0].path(1, name_of_rank(0)), "rb") as file:
                        assert file.read()[100_000:100_064] not in heard
            same()
            assert set(nodes[0].manager._transport._guests.by_session) == sessions
            assert len(logged(caplog, "does not speak CURVE")) == 1, logged(caplog)
            nodes.save(2)
            nodes.replicated(2)
        finally:
            for recorder in recorders:
                recorder.close()


@pytest.fixture
def impostor(pair: Nodes) -> Iterator[Impostor]:
    """Node 1, with its keys and its name, in hands of somebody who means no good."""
    pair[1].stop()
    with Impostor(pair.keys) as made:
        made.join(pair_membership(pair, made), 1)
        made.say(0, Query(pair[0].key(1)))
        pair.until(lambda: made.of(Replied), "node 0 answers")
        made.events.clear()
        yield made


def pair_membership(pair: Nodes, impostor: Impostor) -> Any:
    """What the agent of node 0 knows."""
    folder = Path(pair[0].job_root, ".agent", "membership")
    from flashpoint.replication.agent_folder import AgentFolder

    opened = AgentFolder(pair[0].job_root)
    assignment = opened.read_assignment()
    opened.close()
    assert assignment is not None, folder
    return assignment.membership


def refusals(impostor: Impostor) -> list[str]:
    return [e.message.code for e in impostor.of(Replied) if isinstance(e.message, Refused)]


NAMES = ["/etc/passwd", "../../x", "rank00000-0.safetensors/../x", "rank00000-0.safetensors\0", "x" * 65, ""]


@pytest.mark.fault(35)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.fault(35)
def test_names_that_lead_elsewhere_are_refused(
    pair: Nodes, impostor: Impostor, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    same = unchanged(pair)
    key = pair[0].key(1)
    for message in (Offer(key, 100, (name,)), Withdraw(key, (name,))):
        impostor.events.clear()
        impostor.say(0, message)
        pair.until(lambda: refusals(impostor), "it is refused")
        assert refusals(impostor) == ["malformed"]
    impostor.fetch(0, Fetch(key, (Span(1, name, 0, 100),)))
    pair.until(lambda: impostor.of(Lost), "the session is over")
    same()
    assert not impostor.of(Arrived)
    assert len(logged(caplog, "127.0.0.1", "malformed")) == 1, logged(caplog)


@pytest.mark.fault(34)
@pytest.mark.parametrize("nbytes", [-1, 0, 1 << 62, (2 << 30) + 1, (1 << 64) - 1])
@pytest.mark.fault(34)
def test_a_manifest_of_an_impossible_size_is_refused_before_anything_is_allocated(
    pair: Nodes, impostor: Impostor, caplog: pytest.LogCaptureFixture, nbytes: int
) -> None:
    same = unchanged(pair)
    offer = encode(Offer(Key(1, 5, "a" * 32), 7, (name_of_rank(1),)))
    fields = msgspec.msgpack.decode(offer)
    fields[2] = nbytes
    raw = msgspec.msgpack.encode(fields)
    code = "malformed" if not 0 <= nbytes < 1 << 63 else "no-version"
    for _ in range(3):
        impostor.events.clear()
        impostor.say_raw(0, raw)
        pair.until(lambda: refusals(impostor), "it is refused")
        assert refusals(impostor) == [code]
    same()
    assert len(logged(caplog, "127.0.0.1", code)) == 1, logged(caplog)


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    ("begin", "end"),
    [(0, 0), (5, 4), (0, 1 << 62), (1 << 62, (1 << 62) + 1), (0, limits.FRAME_BYTES + 1)],
)
@pytest.mark.fault(34)
def test_a_fetch_of_an_impossible_range_is_refused(
    pair: Nodes, impostor: Impostor, caplog: pytest.LogCaptureFixture, begin: int, end: int
) -> None:
    same = unchanged(pair)
    for number in range(1, 4):
        impostor.fetch(0, Fetch(pair[0].key(1), (Span(number, name_of_rank(0), begin, end),)))
    pair.until(lambda: len(refusals(impostor)) == 3, "it is refused")
    assert set(refusals(impostor)) == {"bad-range"} and not impostor.of(Arrived)
    same()
    assert len(logged(caplog, "127.0.0.1", "bad-range")) == 1, logged(caplog)


def test_spans_of_one_fetch_are_answered_or_refused_each_for_itself(pair: Nodes, impostor: Impostor) -> None:
    mine, none = name_of_rank(0), "rank00000-7.safetensors"
    spans = (Span(1, mine, 0, 10), Span(2, none, 0, 10), Span(3, mine, 5, 5), Span(4, MANIFEST_NAME, 1, 20))
    impostor.fetch(0, Fetch(pair[0].key(1), spans))
    pair.until(lambda: len(impostor.of(Arrived)) + len(refusals(impostor)) == 4, "each is answered")
    assert [(e.data.request, e.data.begin, e.data.end) for e in impostor.of(Arrived)] == [
        (1, 0, 10),
        (4, 1, 20),
    ]
    refused = [e.message for e in impostor.of(Replied)]
    assert [(m.request, m.code) for m in refused] == [(2, "no-object"), (3, "bad-range")]


@pytest.mark.parametrize("how", ["garbled", "swapped", "other-step", "short", "random"])
def test_a_manifest_that_is_not_the_one_offered_is_not_adopted(
    pair: Nodes, impostor: Impostor, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    good = pair[0].manifest(1)
    true = pair[0].key(1)
    served = {
        "garbled": good[:200] + bytes([good[200] ^ 1]) + good[201:],
        "swapped": good,
        "other-step": good,
        "short": good[: len(good) // 2],
        "random": os.urandom(len(good)),
    }[how]
    digest = true.digest if how != "swapped" else "b" * 32
    key = Key(1, 5 if how != "swapped" else 6, digest)
    impostor.serve = lambda name, begin, end: served[begin:end]
    same = unchanged(pair)
    for _ in range(2):
        impostor.say(0, Offer(key, len(served), (name_of_rank(1),)))
        pair.until(lambda: refusals(impostor), "it is refused", 10)
        assert set(refusals(impostor)) == {"corrupt"}
        impostor.events.clear()
    same()
    assert len(logged(caplog, "127.0.0.1", "corrupt")) == 1, logged(caplog)


def test_an_object_that_the_manifest_does_not_name_is_refused(pair: Nodes, impostor: Impostor) -> None:
    same = unchanged(pair)
    for name in ("rank00077-0.safetensors", MANIFEST_NAME):
        impostor.events.clear()
        impostor.say(0, Offer(pair[0].key(1), 100, (name,)))
        pair.until(lambda: refusals(impostor), "it is refused")
        assert refusals(impostor) == ["no-object"]
    same()


# ---- links in the job root --------------------------------------------------------------------------


@pytest.mark.fault(36)
def test_a_link_under_an_objects_name_is_replaced_and_what_it_leads_to_left_alone(tmp_path: Path) -> None:
    with Nodes(2).start() as nodes:
        nodes[0].stop()
        nodes.save(1)
        target = Path(nodes.folder, "elsewhere")
        target.write_bytes(b"mine" * 1000)
        os.symlink(target, nodes[1].path(1, name_of_rank(0)))
        nodes[0].start()
        nodes.replicated(1)
        assert target.read_bytes() == b"mine" * 1000
        assert not os.path.islink(nodes[1].path(1, name_of_rank(0)))


@pytest.mark.fault(36)
def test_a_link_at_the_source_is_neither_offered_nor_served(caplog: pytest.LogCaptureFixture) -> None:
    with Nodes(2).start(configure=False) as nodes:
        nodes.save(1)
        target = Path(nodes.folder, "elsewhere")
        os.rename(nodes[0].path(1, name_of_rank(0)), target)
        os.symlink(target, nodes[0].path(1, name_of_rank(0)))
        nodes.configure()
        nodes.tell(1)
        wanted = orders.Wanted(name_of_rank(0), (), (0,))
        with pytest.raises(ReplicationError, match="no-object") as caught:
            nodes[1].client.retrieve(nodes[1].key(1), [wanted], 10.0)
        assert caught.value.code == "no-source"
        assert nodes[1].objects(1) == {name_of_rank(1)}


@pytest.mark.fault(36)
@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.fault(36)
def test_a_container_that_is_a_link_is_refused_and_what_it_leads_to_left_alone(
    caplog: pytest.LogCaptureFixture, with_manifest: bool
) -> None:
    with Nodes(2).start() as nodes:
        nodes[0].stop()
        nodes.save(1)
        elsewhere = Path(nodes.folder, "elsewhere")
        os.rename(nodes[1].path(1).rstrip("/"), elsewhere)
        if not with_manifest:
            os.unlink(elsewhere / MANIFEST_NAME)
        os.symlink(elsewhere, nodes[1].path(1).rstrip("/"))
        before = sorted(os.listdir(elsewhere))
        nodes[0].start()
        text = "node 1 refuses copies: not-writable"
        nodes.until(lambda: logged(caplog, text), text)
        time.sleep(1.5)
        assert sorted(os.listdir(elsewhere)) == before
        assert len(logged(caplog, text)) == 1
        assert len(logged(caplog, "127.0.0.1", "not-writable", "symbolic link")) == 1


# ---- bad bytes at a source --------------------------------------------------------------------------


def flip(path: str, at: int = 100_000) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.fault(20)
def test_an_object_that_is_corrupt_at_its_source_is_never_linked(caplog: pytest.LogCaptureFixture) -> None:
    with Nodes(2).start(configure=False) as nodes:
        nodes.save(1)
        flip(nodes[0].path(1, name_of_rank(0)))
        del nodes.truth[1, name_of_rank(0)]
        nodes.configure()
        nodes.tell(1)
        text = "node 1 refuses copies: no-source"
        nodes.until(lambda: logged(caplog, text), text)
        assert "wrong checksum" in logged(caplog, text)[0]
        nodes.until(
            lambda: nodes[0].objects(1) == {name_of_rank(0), name_of_rank(1)}, "the other way it goes"
        )
        assert nodes[1].objects(1) == {name_of_rank(1)}
        assert nodes[0].standing(1) == "complete"
        assert nodes[1].manager.objects.pool._in_use == set()


@pytest.mark.fault(20)
def test_a_second_holder_gives_what_is_corrupt_at_the_first() -> None:
    with Nodes(3, copies=2).start() as nodes:
        nodes.save(1)
        nodes.replicated(1)
        key = nodes[0].key(1)
        flip(nodes[0].path(1, name_of_rank(0)))
        os.unlink(nodes[2].path(1, name_of_rank(0)))
        wanted = orders.Wanted(name_of_rank(0), (), (0, 1))
        assert nodes[2].client.retrieve(key, [wanted], 20.0) > nodes.nbytes
        assert nodes[2].manager.acquired[-1].transfer.bad_chunks.keys() == {0}
        right = Path(nodes[1].path(1, name_of_rank(0))).read_bytes()
        assert Path(nodes[2].path(1, name_of_rank(0))).read_bytes() == right


# ---- surroundings -----------------------------------------------------------------------------------


def test_a_port_that_is_in_use_is_named() -> None:
    with Nodes(1, copies=0) as nodes, socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ReplicationError, match=f"port {port}.*agent_port"):
            nodes[0].start(agent_port=port)
        nodes[0].start(agent_port=0)
        assert nodes[0].client.identify().port != port


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])  # RFC 5737, RFC 6761
def test_a_peer_to_which_there_is_no_route_is_reported_and_used_when_there_is(host: str) -> None:
    with Nodes(2).start(configure=False) as nodes:
        whole = nodes.membership()
        lost = msgspec.structs.replace(whole.members[1], host=host)
        nodes.configure(nodes.membership(members=(whole.members[0], lost)), only=[0])
        nodes.save(1)
        nodes.until(lambda: "no answer" in nodes[0].client.inquire().peers.get(1, ""), "it is reported")
        nodes.configure(whole, only=[1])  # which tells node 0 where it is
        nodes.replicated(1)


@pytest.mark.parametrize("days", [1, -1])
@pytest.mark.fault(39)
def test_nothing_is_ordered_by_a_clock(monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    offset, now, now_ns = 0.0, time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now() + offset)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + int(offset * 1e9))
    with Nodes(2).start() as nodes:
        for step in range(1, 5):
            offset = days * 86_400.0 * (step % 2)
            nodes.save(step)
            nodes.replicated(step)
            nodes.until(lambda step=step: all(n.steps() == {step} for n in nodes), "the older one goes")
