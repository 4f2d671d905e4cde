"""Work out how often to save, the memory that takes, and what part of the time training gets on.

A table of policies: storage only, and versions in memory with 0, 1 and 2 copies on other nodes, drained to storage
every --storage-every. Times, rates and sizes carry a unit: 500ms, 2s, 30min, 5000h, 3d, never; 10GiB/s. What is not
given is assumed or, of copies and checksums, measured on this machine; the output names every such number. Nothing here
is measured on the job that is planned.

  interval    work between two saves: the best of whole steps, or --every
  usable      from the begin of a save until it survives what the policy is for (a node's loss, with copies)
  memory      of a node, at most: its own versions, and the copies that it holds for others
  lost        work lost in a failure, on average
  recovery    from a failure until training goes on, on average
  storage     failures in 30 days that must go back to storage
  goodput     part of the time that training gets on

Young 1974 and Daly 2006 give the interval from the blocking time and the time between failures; flashpoint.planning has
the formulas and what they assume: failures are independent, and none is noticed late.

JSON:
  job         state_bytes, nodes, ranks, step_s, node_mtbf_s, process_mtbf_s, restart_s, replace_s, mtbf_s (of the job)
  rates       copy, seal, network, storage: bytes per second of one node
  assumed[]   names of what was assumed;   measured[]   of what was measured here
  policies[]  name, copies, keep, steps, interval_s, young_s, daly_s, blocking_s, usable_s, memory_bytes, own_bytes,
              copy_bytes, lost_s, recovery_s, falls_back_per_month, goodput
  Times that are infinite are null.
"""

from __future__ import annotations

import argparse
import math
from typing import Any, Final

from flashpoint.cli.arguments import duration, human_seconds, rate
from flashpoint.cli.exit_codes import FINE
from flashpoint.cli.measuring import copy_and_seal_rates
from flashpoint.cli.output import Page, plural, print_json
from flashpoint.errors import FlashpointError
from flashpoint.memory import human_bytes
from flashpoint.planning import Job, Plan, Policy, Rates, mtbf_of, plan

NAME: Final = "plan"
HELP: Final = "plan a job: interval, memory, goodput for copies or storage"
_PLACE: Final = "/dev/shm"
_COPIES: Final = (0, 1, 2)

# What is assumed where it is not given: option -> value. The storage's rate is the limit that the agent has by default.
_ASSUMED: Final[dict[str, Any]] = {
    "--bytes-per-param": 16.0,
    "--mtbf-node": duration("5000h"),
    "--mtbf-process": duration("7d"),
    "--restart": duration("60s"),
    "--replace-node": duration("5min"),
    "--network-rate": rate("2GiB"),
    "--storage-rate": rate("256MiB"),
    "--storage-total": rate("25GiB"),
    "--storage-every": duration("30min"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    def assumed(option: str, kind: Any, metavar: str, text: str, shown: str) -> None:
        parser.add_argument(option, type=kind, metavar=metavar, help=f"{text} (assumed: {shown})")

    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--params", type=float, metavar="N", help="parameters of the model, such as 7e9")
    size.add_argument(
        "--state-bytes", type=rate, metavar="SIZE", help="size of one version instead, all ranks together"
    )
    assumed("--bytes-per-param", float, "N", "of the state, with optimizer", "16")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="of the job; said again, and checked (default: --nodes)"
    )
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="of the job")
    parser.add_argument("--step", type=duration, required=True, metavar="TIME", help="of one training step")
    assumed("--mtbf-node", duration, "TIME", "between failures of one node that take its memory", "5000h")
    assumed("--mtbf-process", duration, "TIME", "between failures of the job that leave memory alone", "7d")
    assumed("--restart", duration, "TIME", "until new processes can load", "60s")
    assumed("--replace-node", duration, "TIME", "more than that for a lost node", "5min")
    parser.add_argument(
        "--copy-rate", type=rate, metavar="RATE", help="of a node into its tmpfs (else measured: memcpy)"
    )
    parser.add_argument(
        "--seal-rate", type=rate, metavar="RATE", help="of a node's checksums (else measured)"
    )
    assumed("--network-rate", rate, "RATE", "of a node, for copies", "2GiB/s")
    assumed("--storage-rate", rate, "RATE", "of a node to storage", "256MiB/s, the agent's limit")
    assumed("--storage-total", rate, "RATE", "to storage, of all nodes together, at most", "25GiB/s")
    assumed("--storage-every", duration, "TIME", "from one drained version to the next", "30min")
    parser.add_argument(
        "--keep", type=int, default=1, metavar="N", help="versions kept in memory (default: 1)"
    )
    parser.add_argument(
        "--every", type=int, default=0, metavar="STEPS", help="steps between saves (default: the best)"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="draw goodput over the interval (needs matplotlib): .png, .svg, .pdf"
    )


def run(args: argparse.Namespace) -> int:
    assumed = [option for option in _ASSUMED if getattr(args, _attribute(option)) is None]
    if args.state_bytes is not None:
        assumed.remove("--bytes-per-param")
    for option in _ASSUMED:
        if getattr(args, _attribute(option)) is None:
            setattr(args, _attribute(option), _ASSUMED[option])
    job = _job(args)
    measured = [
        option for option in ("--copy-rate", "--seal-rate") if getattr(args, _attribute(option)) is None
    ]
    copy, seal = copy_and_seal_rates(_PLACE) if measured else (0.0, 0.0)
    rates = Rates(
        copy=args.copy_rate or copy,
        seal=args.seal_rate or seal,
        network=args.network_rate,
        storage=min(args.storage_rate, args.storage_total / job.nodes),
    )
    plans = [plan(job, rates, policy, steps=args.every) for policy in _policies(args, job)]
    if args.plot:
        from flashpoint.cli.plot import draw_plans  # matplotlib takes long to import, and may not be there

        draw_plans(args.plot, job, rates, plans)
    if args.json:
        print_json(_report(args, job, rates, plans, assumed, measured))
    else:
        _show(args, job, rates, plans, assumed, measured)
    return FINE


def _attribute(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _job(args: argparse.Namespace) -> Job:
    args.ranks = args.ranks or args.nodes
    state_bytes = args.state_bytes or (args.params or 0) * args.bytes_per_param
    for option, value in (
        ("--params", state_bytes), ("--nodes", args.nodes), ("--step", args.step), ("--keep", args.keep),
        ("--mtbf-node", args.mtbf_node), ("--mtbf-process", args.mtbf_process),
    ):  # fmt: skip
        if not value > 0:
            raise FlashpointError(f"{option} must be more than nothing")
    if math.isinf(args.step) or args.every < 0:
        raise FlashpointError("--step must be finite, and --every a number of steps")
    if args.ranks < args.nodes or args.ranks % args.nodes:
        raise FlashpointError(
            f"{plural(args.ranks, 'rank')} cannot be spread evenly over {plural(args.nodes, 'node')}"
        )
    return Job(
        state_bytes=state_bytes,
        nodes=args.nodes,
        step_s=args.step,
        node_mtbf_s=args.mtbf_node,
        process_mtbf_s=args.mtbf_process,
        restart_s=args.restart,
        replace_s=args.replace_node,
    )


def _policies(args: argparse.Namespace, job: Job) -> list[Policy]:
    every_s = args.storage_every
    return [
        Policy(keep=0, blocking_storage=True),
        Policy(keep=0),
        *(
            Policy(copies=copies, keep=args.keep, storage_every_s=every_s)
            for copies in _COPIES
            if copies < job.nodes
        ),
    ]


def _report(
    args: argparse.Namespace,
    job: Job,
    rates: Rates,
    plans: list[Plan],
    assumed: list[str],
    measured: list[str],
) -> dict[str, Any]:
    return {
        "job": {
            "state_bytes": job.state_bytes,
            "nodes": job.nodes,
            "ranks": args.ranks,
            "step_s": job.step_s,
            "node_mtbf_s": _finite(job.node_mtbf_s),
            "process_mtbf_s": _finite(job.process_mtbf_s),
            "restart_s": job.restart_s,
            "replace_s": job.replace_s,
            "mtbf_s": _finite(mtbf_of(job)),
        },
        "rates": {"copy": rates.copy, "seal": rates.seal, "network": rates.network, "storage": rates.storage},
        "assumed": assumed,
        "measured": measured,
        "policies": [
            {
                "name": one.policy.name,
                "copies": one.policy.copies,
                "keep": one.policy.keep,
                "steps": one.steps,
                "interval_s": one.interval_s,
                "young_s": _finite(one.young_s),
                "daly_s": _finite(one.daly_s),
                "blocking_s": one.blocking_s,
                "usable_s": one.usable_s,
                "memory_bytes": one.own_bytes + one.copy_bytes,
                "own_bytes": one.own_bytes,
                "copy_bytes": one.copy_bytes,
                "lost_s": one.lost_s,
                "recovery_s": one.recovery_s,
                "falls_back_per_month": one.falls_back_per_month,
                "goodput": one.goodput,
            }
            for one in plans
        ],
    }


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


def _show(
    args: argparse.Namespace,
    job: Job,
    rates: Rates,
    plans: list[Plan],
    assumed: list[str],
    measured: list[str],
) -> None:
    page = Page()
    share = job.state_bytes / job.nodes
    page.line(
        (f"{human_bytes(job.state_bytes)} a version", "bold"),
        f" on {plural(job.nodes, 'node')} of {plural(args.ranks // job.nodes, 'rank')}: "
        f"{human_bytes(share)} a node, {human_bytes(job.state_bytes / args.ranks)} a rank",
    )
    node_lost_s = job.node_mtbf_s / job.nodes
    page.line(
        f"  a failure every {human_seconds(mtbf_of(job))}: a node lost every {human_seconds(node_lost_s)}, "
        f"others every {human_seconds(job.process_mtbf_s)}; restart {human_seconds(job.restart_s)}, "
        f"with a new node {human_seconds(job.restart_s + job.replace_s)}"
    )
    page.line(
        f"  a node: copies {_gib(rates.copy)}, checksums {_gib(rates.seal)}, network {_gib(rates.network)}, "
        f"storage {_gib(rates.storage)}, every {human_seconds(args.storage_every)}"
    )
    if measured:
        page.line(("  measured on this machine: ", "dim"), (", ".join(measured), "dim"))
    if assumed:
        page.line(("  assumed: ", "dim"), (", ".join(assumed), "dim"))
    page.line()
    columns = (
        ">blocking", ">usable", ">memory", ">steps", ">interval", ">Young", ">Daly", ">lost", ">recovery", ">storage",
        ">goodput", "policy",
    )  # fmt: skip
    best = max(one.goodput for one in plans)
    page.table(
        columns,
        [
            [
                human_seconds(one.blocking_s),
                human_seconds(one.usable_s),
                human_bytes(one.own_bytes + one.copy_bytes),
                f"{one.steps:,}",
                human_seconds(one.interval_s),
                human_seconds(one.young_s),
                human_seconds(one.daly_s),
                human_seconds(one.lost_s),
                human_seconds(one.recovery_s),
                f"{one.falls_back_per_month:,.0f}"
                if one.falls_back_per_month >= 10
                else f"{one.falls_back_per_month:.2g}",
                (f"{one.goodput:.2%}", "bold green" if one.goodput == best else ""),
                one.policy.name,
            ]
            for one in plans
        ],
    )
    page.show()


def _gib(bytes_per_s: float) -> str:
    return f"{human_bytes(bytes_per_s)}/s"
