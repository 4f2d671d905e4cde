"""What a job root's agent says, asked with a deadline; and who uses a job root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from flashpoint.buffers import POOL_NAME
from flashpoint.cli.versions import SAVING, manager, versions_in
from flashpoint.errors import DeadlineError, ProtocolError, ReplicationError
from flashpoint.replication.agent_folder import AGENT_NAME, AgentFolder, Assignment
from flashpoint.replication.client import AgentClient
from flashpoint.replication.orders import Identity, Report

ANSWER_S: Final = 5.0
_SEEN_MAX: Final = 5  # processes that are named

State = Literal["none", "dead", "alive", "silent", "unreadable"]


@dataclass(frozen=True)
class Heard:
    """What is known of a job root's agent.

    Attributes:
        state: ``none`` (the job root has never had one), ``dead``, ``alive``, ``silent`` (it lives, and does not
            answer), or ``unreadable`` (its folder cannot be used; ``problem`` says why).
        about: what it says of itself in its lock: ``pid``, ``started``, and ``id``.
        assignment: what it works by, or worked by.
        log_tail: the last lines of its log.
    """

    state: State
    problem: str = ""
    about: dict[str, str] | None = None
    assignment: Assignment | None = None
    identity: Identity | None = None
    report: Report | None = None
    has_trainers: bool = False
    log_tail: str = ""

    def to_json(self) -> dict[str, Any]:
        about, identity = self.about or {}, self.identity
        return {
            "state": self.state,
            "problem": self.problem,
            "pid": int(about["pid"]) if about.get("pid", "").isdigit() else None,
            "started": about.get("started"),
            "release": identity.release if identity else None,
            "host": identity.host if identity else None,
            "port": identity.port if identity else None,
            "bulk_port": identity.bulk_port if identity else None,
        }


def ask(job_root: str, timeout_s: float = ANSWER_S) -> Heard:
    """Ask the agent who it is and how the versions stand; never raises, and never waits for longer."""
    if not os.path.lexists(f"{job_root}/{AGENT_NAME}"):
        return Heard("none")
    try:
        folder = AgentFolder(job_root, create=False)
    except ReplicationError as error:
        return Heard("unreadable", str(error))
    try:
        words = folder.agent()
        about = _about(words) if words is not None else None
        has_trainers = folder.has_users()
        assignment, problem = None, ""
        try:
            assignment = folder.read_assignment()
        except ProtocolError as error:
            problem = error.reason
        if about is None:
            return Heard(
                "dead", problem, None, assignment, has_trainers=has_trainers, log_tail=folder.log_tail()
            )
        try:
            with AgentClient(job_root) as client:
                identity, report = client.identify(timeout_s), client.inquire(timeout_s)
        except DeadlineError as error:
            return Heard(
                "silent", str(error), about, assignment,
                has_trainers=has_trainers, log_tail=folder.log_tail(),
            )  # fmt: skip
        except ReplicationError as error:
            return Heard(
                "dead", str(error), None, assignment,
                has_trainers=has_trainers, log_tail=folder.log_tail(),
            )  # fmt: skip
        return Heard("alive", problem, about, assignment, identity, report, has_trainers)
    finally:
        folder.close()


def _about(words: str) -> dict[str, str]:
    pairs = (line.partition(" ") for line in words.splitlines())
    return {name: value for name, _, value in pairs}


def users_of(job_root: str) -> list[str]:
    """Who uses a job root now, for people: its agent, trainers, saves; empty where nobody does.

    Agents, trainers with an agent, and saves show by their locks, wherever they run. A trainer without an agent shows
    between its saves only by what it has mapped, and only where this process may see it.
    """
    found = []
    heard = ask(job_root, 1.0)
    agents_pid = (heard.about or {}).get("pid", "")
    if heard.state in ("alive", "silent"):
        found.append(f"its agent (process {agents_pid}) lives: `flashpoint agent {job_root} --stop` ends it")
    if heard.has_trainers:
        found.append("a trainer lives, which holds the lock .agent/users")
    saving = [str(v.container.step) for v in versions_in(manager(job_root)) if v.state == SAVING]
    if saving:
        found.append(f"step {', '.join(saving)} is being saved")
    mapped = [pid for pid in map(str, _processes_that_map(f"{job_root}/{POOL_NAME}/")) if pid != agents_pid]
    if mapped:
        more = " and others" if len(mapped) > _SEEN_MAX else ""
        found.append(f"its buffers are mapped by process {', '.join(mapped[:_SEEN_MAX])}{more}")
    return found


def _processes_that_map(prefix: str) -> Iterator[int]:
    """Other processes that have files below this folder mapped; those that cannot be looked at are left out."""
    wanted = os.fsencode(os.path.realpath(os.path.dirname(prefix)) + "/")
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/maps", "rb") as maps:
                if any(wanted in line for line in maps):
                    yield int(name)
        except OSError:
            continue  # it has ended, or is another user's
