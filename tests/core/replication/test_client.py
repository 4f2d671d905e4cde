import os
import shutil
import signal
import threading
import time

import pytest

from flashpoint.errors import DeadlineError, InvalidIdError, ReplicationError
from flashpoint.replication import orders
from flashpoint.replication.agent import EmbeddedAgent
from flashpoint.replication.agent_folder import AgentFolder
from flashpoint.replication.client import AgentClient
from flashpoint.replication.messages import Key
from tests.core.processes import process
from tests.core.replication.fake_agent import (
    BURST,
    DIE,
    FAIL,
    GARBLED,
    LATE,
    LATE_S,
    NEVER,
    WRONG_NUMBER,
    FakeManager,
)

KEY = Key(1, 2, "0" * 32)


@pytest.fixture
def agent(job_root):
    embedded = EmbeddedAgent(job_root, manager_factory=FakeManager)
    assert embedded.start()
    yield embedded
    embedded.stop()


@pytest.fixture
def client(job_root):
    with AgentClient(job_root) as client:
        yield client


def be_agent(say, job_root):
    embedded = EmbeddedAgent(job_root, manager_factory=FakeManager)
    assert embedded.start()
    say("ready")
    say("not reached")


def seconds_of(call):
    start = time.monotonic()
    call()
    return time.monotonic() - start


def test_every_order_has_its_answer(agent, client):
    assert client.is_alive()
    identity = client.identify()
    assert (identity.pid, identity.port) == (os.getpid(), 7001)
    client.completed(1, 2)
    client.settled(1, 2)
    client.retrieve_manifest(KEY, 10, [1], 10)
    wanted = [orders.Wanted("rank00000-0.safetensors", (), (1,))] * 3
    assert client.retrieve(KEY, wanted, 10) == 3
    assert client.inquire().peers == {1: "open"}
    assert client.await_replicated(1, BURST, 10) is True
    assert client.await_replicated(1, NEVER, 0.1) is False


def test_a_failure_is_raised_with_its_reason(agent, client):
    with pytest.raises(ReplicationError, match="^given up for a newer one$") as caught:
        client.await_replicated(1, FAIL, 10)
    assert caught.value.code == "superseded"
    assert client.identify()


def test_an_order_waits_no_longer_than_asked(agent, client):
    with pytest.raises(DeadlineError, match="did not answer Await within 0.3 s"):
        client.order(orders.Await(0, 1, NEVER), 0.3)
    seconds = seconds_of(lambda: client.await_replicated(1, NEVER, 0.3))
    assert 0.3 <= seconds < 10


def test_a_late_answer_goes_to_nobody(agent, client):
    assert client.await_replicated(1, LATE, LATE_S / 4) is False
    time.sleep(LATE_S)
    assert client.inquire().peers == {1: "open"}


def test_an_answer_of_another_number_is_none(agent, client):
    assert client.await_replicated(1, WRONG_NUMBER, 10) is True


def test_a_garbled_answer_is_an_error(agent, client):
    with pytest.raises(ReplicationError, match="garbled"):
        client.await_replicated(1, GARBLED, 10)
    assert client.identify()


def test_threads_do_not_mix_their_answers_and_wait_for_nobody(agent, client):
    found, errors = {}, []

    def ask(step):
        try:
            for i in range(20):
                answer = client.order(orders.Await(0, 1, step + i), 30)
                found[step + i] = answer.nbytes
        except Exception as error:
            errors.append(error)

    waiting = threading.Thread(target=client.await_replicated, args=(1, LATE, 30))
    waiting.start()
    assert seconds_of(client.identify) < LATE_S or not waiting.is_alive()
    threads = [threading.Thread(target=ask, args=(BURST + 100 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in [*threads, waiting]:
        thread.join()
    assert not errors
    assert all(step == nbytes for step, nbytes in found.items())
    assert len(found) == 160


def test_sockets_are_used_again(agent, client):
    for _ in range(3):
        client.identify()
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        client.identify()
    assert len(os.listdir("/proc/self/fd")) == fds


def test_sockets_of_orders_that_failed_do_not_pile_up(agent, client):
    def fail():
        assert client.await_replicated(1, NEVER, 0.01) is False
        client.identify()

    for _ in range(3):
        fail()
    time.sleep(0.2)
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        fail()
    time.sleep(0.2)
    assert len(os.listdir("/proc/self/fd")) <= fds + 2


def test_without_an_agent_an_order_fails_at_once(job_root, client):
    def ask():
        with pytest.raises(ReplicationError, match=r"no agent|cannot be opened"):
            client.identify(timeout_s=60)

    assert seconds_of(ask) < 5
    AgentFolder(job_root)
    assert seconds_of(ask) < 5
    assert not client.is_alive()
    with pytest.raises(InvalidIdError):
        AgentClient("relative")


@pytest.mark.parametrize("how", ["kill", "die"])
def test_an_agent_that_dies_while_an_order_waits_is_noticed(job_root, client, how):
    with process(be_agent, job_root) as agent:
        agent.hear()
        killer = threading.Timer(0.5, os.kill, (agent.pid, signal.SIGKILL))
        if how == "kill":
            killer.start()

        def ask():
            with pytest.raises(ReplicationError, match="ended before it answered Await"):
                client.await_replicated(1, NEVER if how == "kill" else DIE, 60)

        assert seconds_of(ask) < 10
    with process(be_agent, job_root) as agent:  # and the next one is spoken to
        agent.hear()
        assert client.identify().pid == agent.pid


def test_an_agent_that_was_replaced_while_an_order_waits_is_noticed(agent, job_root, client):
    def replace():
        agent.stop()
        assert agent.start()

    timer = threading.Timer(0.3, replace)
    timer.start()
    with pytest.raises(ReplicationError, match="ended before"):
        client.await_replicated(1, NEVER, 60)
    timer.join()
    assert client.identify()


def test_the_last_answer_of_an_agent_arrives(job_root, client):
    for _ in range(5):
        embedded = EmbeddedAgent(job_root, manager_factory=FakeManager)
        assert embedded.start()
        client.release(0.0)
        assert embedded.wait(10)
        embedded.stop()


def test_a_job_root_that_was_made_anew_has_another_agent(job_root, client):
    one = EmbeddedAgent(job_root, manager_factory=FakeManager)
    one.start()
    client.identify()
    shutil.rmtree(job_root)
    assert not client.is_alive()
    other = EmbeddedAgent(job_root, manager_factory=FakeManager)
    assert other.start()
    assert client.identify()
    other.stop()
    one.stop()


def test_a_path_of_any_length_will_do(job_root):
    deep = f"{job_root}/{'/'.join(['x' * 200] * 5)}"
    os.makedirs(deep)
    embedded = EmbeddedAgent(deep, manager_factory=FakeManager)
    assert embedded.start()
    with AgentClient(deep) as client:
        assert client.identify()
    embedded.stop()


def test_a_forked_child_asks_for_itself_and_leaves_its_parents_sockets_alone(job_root, client):
    with process(be_agent, job_root) as agent:
        agent.hear()
        client.identify()
        child = os.fork()
        if child == 0:
            try:
                ok = client.is_alive() and client.identify(20).pid == agent.pid
                client.close()
                os._exit(0 if ok else 1)
            except BaseException:
                os._exit(2)
        assert client.identify().pid == agent.pid
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert client.identify().pid == agent.pid


def test_a_client_can_be_closed_twice_and_used_again(agent, client):
    client.identify()
    client.close()
    client.close()
    assert client.identify()


def test_to_close_a_client_ends_the_orders_of_other_threads(agent, client):
    failures = []

    def wait():
        try:
            client.await_replicated(1, NEVER, 60)
        except ReplicationError as error:
            failures.append(str(error))

    client.identify()
    fds = len(os.listdir("/proc/self/fd"))
    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    client.close()
    assert client.identify()  # with sockets of its own
    for thread in threads:
        thread.join(10)
    assert failures == [f"the line to the agent of {client.job_root} was closed"] * 4
    assert len(os.listdir("/proc/self/fd")) <= fds + 1


def test_an_order_names_as_many_chunks_as_the_largest_objects_have() -> None:
    wanted = orders.Wanted("rank00000-0.safetensors", tuple(range(1 << 16)), (1,))  # 256 GiB of 4 MiB each
    order = orders.Retrieve(1, Key(1, 2, "ab" * 16), (wanted,), 3)
    assert orders.decode_order(orders.encode(order)) == order
