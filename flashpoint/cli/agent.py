"""Run the node's agent for a job root in the foreground, as a side-car of the trainers; or end it.

A trainer that wants copies on other nodes starts its node's agent by itself. Run it by hand, before the
trainer, where it should have a container or limits of its own, with the same user and the same memory.
It takes its settings from FLASHPOINT_* variables too. It ends on SIGTERM, when the job has released it, when the
job root is deleted, or when no trainer lives and nobody has asked for anything for the idle time.

Exits with 3 if the job root has another agent.

JSON, when it ends:
  job_root, agent   (agent: ended, stopped (by --stop), none (nothing to stop), or taken (exit code 3))
"""

from __future__ import annotations

import argparse
import logging
import os
from typing import Final

from flashpoint.cli.output import Page, print_json
from flashpoint.config import FlashpointConfig

NAME: Final = "agent"
HELP: Final = "run the node's agent, which copies versions to peers"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job_root", metavar="JOB_ROOT", help="the job root, made if it is not there")
    parser.add_argument(
        "--stop", action="store_true", help="end the one that runs, and wait until it has ended"
    )
    parser.add_argument("--host", help="address to listen on (FLASHPOINT_AGENT_HOST)")
    parser.add_argument("--port", help="port for messages (FLASHPOINT_AGENT_PORT; default: any)")
    parser.add_argument("--bulk-port", help="port for bulk data (FLASHPOINT_AGENT_BULK_PORT; default: any)")
    parser.add_argument("--idle-s", help="idle time after which it ends (FLASHPOINT_AGENT_IDLE_S)")
    # Of `start_agent`: be nobody's child, and tell the one that waits when there is an agent.
    parser.add_argument("--detached", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    job_root = os.path.abspath(args.job_root)
    if args.stop:
        os.stat(job_root)  # a misspelt path is an error; a job root without an agent is not
        code, state = _stop(job_root)
    else:
        code, state = _run(job_root, args)
    if args.json:
        print_json({"job_root": job_root, "agent": state})
    elif args.stop:
        page = Page()
        page.line(f"{job_root}: " + ("its agent has ended" if state == "stopped" else "it has no agent"))
        page.show()
    return code


def _stop(job_root: str) -> tuple[int, str]:
    from flashpoint.replication.agent import FINE, stop_agent

    return FINE, "stopped" if stop_agent(job_root) else "none"


def _run(job_root: str, args: argparse.Namespace) -> tuple[int, str]:
    from flashpoint.replication.agent import ALREADY_RUNS, detach, run_agent

    config = FlashpointConfig.from_env(
        agent_host=args.host, agent_port=args.port, agent_bulk_port=args.bulk_port, agent_idle_s=args.idle_s
    )
    code = run_agent(
        job_root,
        config=config,
        on_ready=detach() if args.detached else None,
        log_level=logging.INFO if args.detached else logging.WARNING,
    )
    return code, "taken" if code == ALREADY_RUNS else "ended"
