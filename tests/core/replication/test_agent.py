import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from flashpoint.config import FlashpointConfig
from flashpoint.errors import DeadlineError, ProtocolError, ReplicationError
from flashpoint.replication import agent, orders
from flashpoint.replication.agent import EmbeddedAgent, start_agent, stop_agent
from flashpoint.replication.agent_folder import LOG_BYTES_MAX, AgentFolder, Assignment, Ports, wait_until_free
from flashpoint.replication.client import AgentClient
from flashpoint.replication.keys import JobKeys, write_keys
from flashpoint.replication.membership import Member, Membership
from tests.core.processes import process
from tests.core.replication import fake_agent
from tests.core.replication.fake_agent import HANG, FakeManager

REPOSITORY = Path(__file__).resolve().parents[3]
JOB = "0" * 32


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(agent, "_COMMAND", fake_agent.COMMAND)


@pytest.fixture
def agents(job_root):
    """A job root whose agent is gone at the end, whatever happened."""
    yield job_root
    with contextlib.suppress(ReplicationError, ValueError, IndexError):
        folder = AgentFolder(job_root, create=False)
        if about := folder.agent():
            os.kill(int(about.split()[1]), signal.SIGKILL)


def pid_of(job_root):
    about = AgentFolder(job_root).agent()
    return None if about is None else int(about.split()[1])


def living(job_root):
    """Processes that were started for this job root."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if job_root in (p.info["cmdline"] or ())]


def until(condition, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.01)


def assignment(epoch=1, index=0):
    members = tuple(Member(index=i, node=f"node-{i}", ranks=(i,)) for i in range(2))
    membership = Membership(job=JOB, epoch=epoch, copies=1, members=members)
    return Assignment(membership=membership, index=index, keep=2, encrypt=True)


def keys():
    return JobKeys(job=JOB, public=b"p" * 40, secret=b"s" * 40)


def foreground(job_root, *options, env=None):
    command = [sys.executable, *fake_agent.COMMAND, job_root, *options]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), **(env or {})}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


# ---- one agent ----------------------------------------------------------------------------------


def start_when_told(say, job_root):
    agent._COMMAND = fake_agent.COMMAND
    say("ready")
    say(start_agent(job_root).pid)


def test_among_eight_racing_starters_one_agent_comes_to_live(agents):
    with contextlib.ExitStack() as stack:
        starters = [stack.enter_context(process(start_when_told, agents)) for _ in range(8)]
        for starter in starters:
            assert starter.hear() == "ready"
        for starter in starters:
            starter.go_on()
        pids = {starter.hear() for starter in starters}
    assert pids == {pid_of(agents)}
    assert living(agents) == [pid_of(agents)]


def test_one_that_lives_is_left_alone(agents):
    assert start_agent(agents).pid == start_agent(agents).pid == pid_of(agents)


@pytest.mark.fault(4, "F")
def test_a_killed_agent_is_noticed_and_started_again_where_it_was(agents):
    first = start_agent(agents)
    os.kill(first.pid, signal.SIGKILL)
    folder = AgentFolder(agents)
    assert wait_until_free(folder, 10)
    assert folder.read_ports() == Ports("127.0.0.1", 7001, 7002)
    folder.write_ports("127.0.0.1", 45_671, 45_672)
    second = start_agent(agents)
    assert second.pid != first.pid
    assert (second.host, second.port, second.bulk_port) == ("127.0.0.1", 45_671, 45_672)


def test_settings_are_stronger_than_where_the_last_one_was(agents):
    AgentFolder(agents).write_ports("127.0.0.1", 45_671, 45_672)
    config = FlashpointConfig(agent_host="localhost", agent_port=45_673)
    identity = start_agent(agents, config)
    assert (identity.host, identity.port, identity.bulk_port) == ("localhost", 45_673, 45_672)


def test_where_the_last_one_was_is_given_up_where_it_cannot_be_had(agents):
    folder = AgentFolder(agents)
    with socket.create_server(("127.0.0.1", 0)) as other:
        folder.write_ports("127.0.0.1", other.getsockname()[1], 45_672)
        identity = start_agent(agents)
        assert (identity.host, identity.port, identity.bulk_port) == ("127.0.0.1", 7001, 45_672)
    stop_agent(agents)
    folder.write_ports("192.0.2.1", 45_671, 45_672)  # RFC 5737: nobody's address
    identity = start_agent(agents)
    assert (identity.host, identity.port, identity.bulk_port) == ("127.0.0.1", 45_671, 45_672)


@pytest.mark.fault(4, "F")
def test_a_restarted_agent_goes_on_without_a_trainer(agents):
    first = start_agent(agents)
    assert (first.job, first.epoch) == ("", 0)
    with AgentClient(agents) as client:
        assert client.configure(assignment(epoch=7), keys()).epoch == 7
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: not client.is_alive())
        identity = start_agent(agents)
        assert (identity.job, identity.epoch) == (JOB, 7)


def start_and_say(say, job_root):
    agent._COMMAND = fake_agent.COMMAND
    say(start_agent(job_root).pid)
    say([child.pid for child in psutil.Process().children(recursive=True)])


def test_it_outlives_its_starter_and_is_nobodys_child(agents):
    with process(start_and_say, agents) as starter:
        pid = starter.hear()
        starter.go_on()
        descendants = starter.hear()  # multiprocessing's own helper may be one
        assert pid not in descendants
        assert os.getsid(pid) not in (os.getsid(0), os.getsid(starter.pid))
        starter.kill()
    with AgentClient(agents) as client:
        assert client.identify().pid == pid
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull
    assert os.readlink(f"/proc/{pid}/fd/2") == f"{agents}/.agent/log"


def test_a_second_agent_says_so_and_exits_with_3(agents):
    pid = start_agent(agents).pid
    second = foreground(agents, "--json")
    out, err = second.communicate(timeout=60)
    assert second.returncode == agent.ALREADY_RUNS == 3
    assert f"{agents} has an agent already: pid {pid} started" in err
    assert out == f'{{"job_root": "{agents}", "agent": "taken"}}\n'


def test_it_gives_way_to_the_trainer(agents):
    pid = start_agent(agents).pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == 10
    assert os.sched_getscheduler(pid) == os.SCHED_BATCH


def test_settings_come_by_the_environment_and_keys_by_neither_way(agents, monkeypatch):
    monkeypatch.setenv("FLASHPOINT_KEEP", "9")
    write_keys(AgentFolder(agents).path, keys())
    pid = start_agent(agents, FlashpointConfig(keep=4, failure_domain="rack 7")).pid
    environ = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"FLASHPOINT_KEEP=4\0" in environ and b"FLASHPOINT_FAILURE_DOMAIN=rack 7\0" in environ
    assert keys().secret not in environ + Path(f"/proc/{pid}/cmdline").read_bytes()


def test_neither_torch_nor_jax_is_imported(agents):
    code = (
        "import sys, flashpoint.cli.agent, flashpoint.replication.agent as a; print('torch' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    assert subprocess.check_output([sys.executable, "-c", code], text=True, env=env) == "False\n"
    maps = Path(f"/proc/{start_agent(agents).pid}/maps").read_text()
    assert "torch" not in maps and "jaxlib" not in maps


def test_one_that_cannot_start_says_why(agents):
    folder = AgentFolder(agents)
    Path(folder.path, "keys").write_text("not keys")
    os.chmod(f"{folder.path}/keys", 0o600)
    with pytest.raises(ReplicationError, match=r"(?s)exit code 2.*log ends with.*keys holds no keys"):
        start_agent(agents)
    assert folder.agent() is None


def test_one_that_takes_too_long_to_start_is_ended(agents, monkeypatch):
    monkeypatch.setattr(agent, "_COMMAND", ("-c", "import time; time.sleep(1000)"))
    with pytest.raises(ReplicationError, match="in time"):
        start_agent(agents, timeout_s=0.5)
    assert living(agents) == []


def test_one_that_does_not_answer_is_no_agent(agents):
    folder = AgentFolder(agents)
    lock = folder.take_lock()
    start = time.monotonic()
    with pytest.raises(ReplicationError, match="did not start: it does not answer within 0.5 s"):
        start_agent(agents, timeout_s=0.5)
    assert time.monotonic() - start < 20
    lock.release()


# ---- its end ------------------------------------------------------------------------------------


def test_it_leaves_when_it_is_released(agents):
    start_agent(agents)
    with AgentClient(agents) as client:
        client.release(60.0)
        until(lambda: not client.is_alive())


def test_it_leaves_when_no_trainer_lives_and_nobody_asks(agents):
    user = AgentFolder(agents).join_users()
    start_agent(agents, FlashpointConfig(agent_idle_s=0.2))
    time.sleep(1.5)
    folder = AgentFolder(agents)
    assert folder.agent() is not None
    user.release()
    assert wait_until_free(folder, 10)
    assert "nobody has asked" in folder.log_tail()


def test_it_leaves_when_the_job_root_is_deleted(agents):
    pid = start_agent(agents).pid
    shutil.rmtree(agents)
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert not os.path.exists(agents)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_side_car_ends_well_on_a_signal(agents, number):
    running = foreground(agents)
    until(lambda: AgentFolder(agents).agent() is not None)
    with AgentClient(agents) as client:
        client.identify()
    running.send_signal(number)
    assert running.communicate(timeout=20) == ("", "")
    assert running.returncode == 0


def hanging(job_root):
    running = foreground(job_root, env={"FAKE_STOP_S": "1"})
    until(lambda: AgentFolder(job_root).agent() is not None)
    with AgentClient(job_root) as client, pytest.raises(DeadlineError):
        client.order(orders.Await(0, 0, HANG), 0.2)
    return running


def test_one_that_hangs_ends_within_the_deadline(agents):
    running = hanging(agents)
    running.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    running.send_signal(signal.SIGTERM)  # impatience does not put it off
    running.communicate(timeout=20)
    assert running.returncode == -signal.SIGALRM
    assert AgentFolder(agents).agent() is None


def test_one_that_hangs_does_not_outlive_its_job_root(agents):
    running = hanging(agents)
    shutil.rmtree(agents)
    running.communicate(timeout=20)
    assert running.returncode == -signal.SIGALRM


def test_it_can_be_stopped_from_outside(agents):
    assert stop_agent(agents) is False
    start_agent(agents)
    stop = foreground(agents, "--stop")
    assert stop.communicate(timeout=60) == (f"{agents}: its agent has ended\n", "")
    assert AgentFolder(agents).agent() is None
    assert foreground(agents, "--stop").communicate(timeout=60)[0] == f"{agents}: it has no agent\n"
    nowhere = foreground(f"{agents}-nowhere", "--stop")
    assert "No such file" in nowhere.communicate(timeout=60)[1]
    assert nowhere.returncode == 2


# ---- the folder ---------------------------------------------------------------------------------


def test_the_folder_is_its_owners_alone(job_root):
    folder = AgentFolder(job_root)
    folder.take_lock().release()
    folder.join_users().release()
    folder.write_assignment(assignment())
    folder.write_ports("h", 1, 2)
    os.close(folder.open_log())
    assert os.stat(folder.path).st_mode & 0o7777 == 0o700
    files = os.listdir(folder.path)
    assert sorted(files) == ["lock", "log", "membership", "ports", "users"]
    assert {os.stat(f"{folder.path}/{name}").st_mode & 0o7777 for name in files} == {0o600}


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o707])
def test_a_folder_that_others_may_enter_is_refused(job_root, mode):
    os.mkdir(f"{job_root}/.agent")
    os.chmod(f"{job_root}/.agent", mode)
    with pytest.raises(ReplicationError, match="delete it"):
        AgentFolder(job_root)


def test_what_is_no_folder_is_refused(job_root, tmp_path):
    os.symlink(tmp_path, f"{job_root}/.agent")
    with pytest.raises(ReplicationError, match="cannot be opened"):
        AgentFolder(job_root)
    os.unlink(f"{job_root}/.agent")
    Path(job_root, ".agent").touch()
    with pytest.raises(ReplicationError, match="cannot be opened"):
        AgentFolder(job_root)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_folder_of_another_user_is_refused(job_root):
    os.mkdir(f"{job_root}/.agent", 0o700)
    os.chown(f"{job_root}/.agent", 12_345, 12_345)
    with pytest.raises(ReplicationError, match="12345"):
        AgentFolder(job_root)


def test_a_job_root_is_made_for_a_side_car_that_comes_first(job_root):
    os.rmdir(job_root)
    with pytest.raises(ReplicationError):
        AgentFolder(job_root, create=False)
    AgentFolder(job_root)
    assert os.stat(job_root).st_mode & 0o7777 == 0o700


def test_a_lock_on_a_deleted_job_root_is_no_lock(job_root):
    folder = AgentFolder(job_root)
    lock = folder.take_lock()
    assert lock.is_current and folder.is_current
    shutil.rmtree(job_root)
    assert not lock.is_current and not folder.is_current
    assert AgentFolder(job_root).take_lock() is not None
    lock.release()
    lock.release()


def test_every_agent_says_something_else_of_itself(job_root):
    folder = AgentFolder(job_root)
    words = set()
    for _ in range(3):
        lock = folder.take_lock()
        words.add(folder.agent())
        assert folder.take_lock() is None
        lock.release()
        assert folder.agent() is None
    assert len(words) == 3
    assert all(word.startswith(f"pid {os.getpid()}\nstarted ") for word in words)


def test_whoever_asks_disturbs_nobody(job_root):
    folder, over = AgentFolder(job_root), threading.Event()

    def ask():
        while not over.is_set():
            folder.agent()
            folder.has_users()

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for asker in askers:
        asker.start()
    try:
        for _ in range(200):
            lock = folder.take_lock()
            assert lock is not None
            folder.join_users().release()
            lock.release()
    finally:
        over.set()
        for asker in askers:
            asker.join()


def test_users_are_counted_as_long_as_they_live(job_root):
    folder = AgentFolder(job_root)
    assert not folder.has_users()
    one, other = folder.join_users(), folder.join_users()
    one.release()
    assert folder.has_users()
    other.release()
    assert not folder.has_users()


def test_the_assignment_is_given_back_whole(job_root):
    folder = AgentFolder(job_root)
    assert folder.read_assignment() is None
    folder.write_assignment(assignment(epoch=1))
    folder.write_assignment(assignment(epoch=2, index=1))
    assert folder.read_assignment() == assignment(epoch=2, index=1)
    with pytest.raises(ValueError, match="no node 2"):
        assignment(index=2)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff", b"[" * 100_000, b'{"index": 0}'])
def test_a_garbled_assignment_is_refused_and_garbled_ports_are_forgotten(job_root, data):
    folder = AgentFolder(job_root)
    for name in ("membership", "ports"):
        Path(folder.path, name).write_bytes(data)
        os.chmod(f"{folder.path}/{name}", 0o600)
    with pytest.raises(ProtocolError, match="membership"):
        folder.read_assignment()
    assert folder.read_ports() == Ports()


def test_what_others_could_have_written_is_refused(job_root, tmp_path):
    folder = AgentFolder(job_root)
    path = Path(folder.path, "membership")
    folder.write_assignment(assignment())
    os.chmod(path, 0o666)
    with pytest.raises(ProtocolError, match="delete it"):
        folder.read_assignment()
    path.unlink()
    os.symlink(tmp_path / "elsewhere", path)
    with pytest.raises(ProtocolError, match="cannot be opened"):
        folder.read_assignment()
    path.unlink()
    os.mkfifo(path, 0o600)  # to read it would be to wait for a writer
    with pytest.raises(ProtocolError):
        folder.read_assignment()


def test_a_log_that_is_too_long_begins_anew_while_it_is_written(job_root):
    folder = AgentFolder(job_root)
    log = folder.open_log()
    os.write(log, b"x" * LOG_BYTES_MAX)
    folder.trim_log()
    assert os.stat(f"{folder.path}/log").st_size == LOG_BYTES_MAX
    os.write(log, b"y")
    folder.trim_log()
    os.write(log, b"z\n")
    os.close(log)
    assert folder.log_tail() == "z"
    os.close(folder.open_log())
    assert folder.log_tail() == "z"


def test_the_log_of_a_running_agent_is_kept_short(agents):
    start_agent(agents)
    folder = AgentFolder(agents)
    log = folder.open_log()
    os.write(log, b"x" * (LOG_BYTES_MAX + 1))
    os.close(log)
    until(lambda: os.stat(f"{folder.path}/log").st_size == 0)


def test_the_tail_of_a_log_is_its_last_lines(job_root):
    folder = AgentFolder(job_root)
    assert folder.log_tail() == ""
    log = folder.open_log()
    os.write(log, b"\xff" * 10_000 + b"".join(b"\nline %d" % i for i in range(20)))
    os.close(log)
    assert folder.log_tail(2) == "line 18\nline 19"


# ---- embedded -----------------------------------------------------------------------------------


def test_an_embedded_agent_leaves_nothing_behind(agents):
    def once():
        embedded = EmbeddedAgent(agents, manager_factory=FakeManager)
        assert embedded.start() and embedded.start() and embedded.is_running
        with AgentClient(agents) as client:
            assert client.identify().pid == os.getpid()
        embedded.stop()
        embedded.stop()
        assert not embedded.is_running

    once()
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        once()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == fds
    assert AgentFolder(agents).agent() is None


def test_an_embedded_agent_and_a_process_exclude_each_other(agents):
    one = EmbeddedAgent(agents, manager_factory=FakeManager)
    other = EmbeddedAgent(agents, manager_factory=FakeManager)
    assert one.start() and not other.start()
    assert start_agent(agents).pid == os.getpid()
    one.stop()
    assert start_agent(agents).pid != os.getpid()
    assert not one.start()


def test_an_embedded_agent_that_cannot_begin_leaves_the_lock(agents):
    def fail(*args, **kwargs):
        raise ReplicationError("no")

    with pytest.raises(ReplicationError, match="no"):
        EmbeddedAgent(agents, manager_factory=fail).start()
    assert AgentFolder(agents).agent() is None


def test_an_embedded_agent_gives_no_priority_away(agents):
    embedded = EmbeddedAgent(agents, manager_factory=FakeManager)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    embedded.start()
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    embedded.stop()


def test_a_process_that_forgets_to_stop_its_embedded_agent_ends_all_the_same(agents):
    code = (
        "import sys; from flashpoint.replication.agent import EmbeddedAgent as A; "
        "from tests.core.replication.fake_agent import FakeManager as M; "
        "a = A(sys.argv[1], manager_factory=M); print(a.start())"
    )
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", code, agents]
    result = subprocess.run(command, env=env, timeout=60, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "True\n", "")
    assert AgentFolder(agents).agent() is None


def test_a_forked_child_does_not_hold_an_embedded_agents_lock(agents):
    embedded = EmbeddedAgent(agents, manager_factory=FakeManager)
    embedded.start()
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        embedded.stop()
        assert AgentFolder(agents).agent() is None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
