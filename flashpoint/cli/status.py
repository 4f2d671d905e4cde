"""Show how a job stands: its nodes and agents, who holds what, and what would be lost if a node or a rack were lost.

The node's agent is asked, and answers within --timeout-s or is called silent. Of other nodes it knows what they have
told it, and so what is called safe here is safe. Without an agent, what the folder itself tells is shown.

Exits with 5 where the agent is dead or does not answer, with 1 where a version is corrupt.

JSON (null where it is not known):
  job_root, job, epoch, copies, keep, this_node (its index), trainers (whether any lives that uses the agent)
  agent          state (none, alive, dead, silent, unreadable), problem, pid, started, release, host, port, bulk_port
  nodes[]        index, domain, ranks[], host, port, copies_to[], problem,
                 agent (here, alive, silent, or unknown: this node does not talk to it; dead: this node's own)
  versions[]     path, step, epoch, state (as in `flashpoint ls`), problem, bytes_here, objects_here, objects,
                 created_unix_s, standing (unproven, complete, replicated, withdrawn),
                 holders[] {nodes[], objects}: how many objects these nodes hold, and no others
  lag_steps      replicated, drained: so many steps are these behind the newest complete version
  recovery       after_a_crash, after_a_node, after_a_domain, after_all_nodes: at worst, each as goes_on_from
  storage        drained_epoch, drained_step, error
  scrub          verified_bytes, corrupt, repaired, withdrawn (objects, by the agent of this node), last
  losses[]       kind (node, domain, silent: all nodes that are silent), name, nodes[],
                 goes_on_from {tier (memory, storage), epoch, step, steps_back} or null: from scratch,
                 lost_objects[] {epoch, step, objects}
  file_system    kind, mount_point, total_bytes, free_bytes
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, Final

from flashpoint.cli.exit_codes import BAD, FINE, NO_AGENT
from flashpoint.cli.output import Cell, Page, age, plural, print_json, shortened, show_space
from flashpoint.cli.versions import CORRUPT, STYLES, manager, require_job_root, versions_in
from flashpoint.memory import file_system, human_bytes

NAME: Final = "status"
HELP: Final = "show nodes, agents, copies, and what would be lost with each node"

_ROWS_MAX: Final = 16
_NODE_STYLES: Final = {
    "here": "green",
    "alive": "green",
    "silent": "bold red",
    "dead": "bold red",
    "unknown": "dim",
}
_STANDING_STYLES: Final = {"replicated": "green", "complete": "yellow", "unproven": "yellow"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job_root", metavar="JOB_ROOT", help="the job's folder on this node")
    parser.add_argument(
        "--timeout-s", type=float, default=5.0, help="longest wait for the agent's answer (default: 5)"
    )
    parser.add_argument("--all", action="store_true", help=f"list every node if there are over {_ROWS_MAX}")


def run(args: argparse.Namespace) -> int:
    from flashpoint.cli.agents import ask
    from flashpoint.cli.standing import report_of

    job_root = require_job_root(args.job_root)
    objects = manager(job_root)
    heard = ask(job_root, args.timeout_s)
    report = report_of(job_root, heard, versions_in(objects), objects.read_epoch())
    fs = file_system(job_root)
    report["file_system"] = {
        "kind": fs.kind,
        "mount_point": fs.mount_point,
        "total_bytes": fs.total_bytes,
        "free_bytes": fs.free_bytes,
    }
    if args.json:
        print_json(report)
    else:
        _show(report, heard.log_tail, rows_max=None if args.all else _ROWS_MAX)
    if any(version["state"] == CORRUPT for version in report["versions"]):
        return BAD
    return FINE if report["agent"]["state"] in ("none", "alive") else NO_AGENT


def _show(report: dict[str, Any], log_tail: str, *, rows_max: int | None) -> None:
    page = Page()
    _show_job(page, report)
    _show_agent(page, report, log_tail)
    if report["nodes"]:
        _show_nodes(page, report, rows_max)
    _show_versions(page, report)
    if report["losses"]:
        _show_losses(page, report)
    elif report["nodes"]:
        page.line("  what other nodes hold is for their agents to say: run `flashpoint status` there")
    page.line()
    show_space(page, report["file_system"])
    page.show()


def _show_job(page: Page, report: dict[str, Any]) -> None:
    page.line((report["job_root"], "bold"))
    nodes = report["nodes"]
    if not nodes:
        page.line(f"  epoch {report['epoch']}")
        return
    ranks = sum(len(node["ranks"]) for node in nodes)
    domain = nodes[report["this_node"]]["domain"]
    page.line(
        f"  epoch {report['epoch']}: {plural(ranks, 'rank')} on {plural(len(nodes), 'node')}, "
        f"copies={report['copies']}, keep={report['keep']}; this is node {report['this_node']}"
        + (f" in {domain}" if domain else "")
    )


def _show_agent(page: Page, report: dict[str, Any], log_tail: str) -> None:
    agent, root = report["agent"], report["job_root"]
    state = agent["state"]
    if state == "none":
        page.line("  no agent: this job's versions have no copies on other nodes, nor in storage")
        return
    if state == "alive":
        trainers = "its trainers live" if report["trainers"] else "no trainer lives"
        page.line(
            "  agent ", ("alive", "green"), f": process {agent['pid']}, since {agent['started']}, {trainers}"
        )
        if not report["nodes"]:
            page.line("  no trainer has told it of the job's nodes yet: it copies nothing until one does")
    elif state == "dead":
        page.line("  agent ", ("dead", "bold red"), ": nothing is copied, drained or served to other nodes")
        if report["trainers"]:
            page.line(f"  hint: trainers live. Start it again:  flashpoint agent {root} &")
        else:
            page.line(
                "  hint: no trainer lives, and the job's next start starts it. If peers need what lies here:"
            )
            page.line(f"        flashpoint agent {root} &")
    elif state == "silent":
        page.line("  agent ", ("silent", "bold red"), f": process {agent['pid']}, since {agent['started']}")
        page.line(f"  hint: is it stopped, or starved?  ps -o stat,time,cmd -p {agent['pid']}")
        page.line(
            f"        Where another is to take its place:  kill -9 {agent['pid']}; flashpoint agent {root} &"
        )
    if agent["problem"]:
        page.line("  ", (agent["problem"], "yellow"))
    if log_tail:
        page.line("  its log ends with:")
        for line in log_tail.splitlines()[-3:]:
            page.line("    ", (shortened(line, 200), "dim"))


def _show_nodes(page: Page, report: dict[str, Any], rows_max: int | None) -> None:
    nodes = report["nodes"]
    # Who is silent comes first where not all can be shown; else the order of indexes.
    first = sorted(nodes, key=lambda node: (node["agent"] != "silent", node["index"]))[:rows_max]
    page.line()
    page.table(
        (">node", "agent", "domain", "ranks", "listens on", "copies go to", ""),
        [
            [
                str(node["index"]),
                (node["agent"], _NODE_STYLES[node["agent"]]),
                node["domain"] or "-",
                _ranges(node["ranks"]),
                f"{node['host']}:{node['port']}",
                _ranges(node["copies_to"]) or "-",
                (node["problem"], "dim"),
            ]
            for node in sorted(first, key=lambda node: int(node["index"]))
        ],
    )
    if len(nodes) > len(first):
        page.line((f"  ... and {len(nodes) - len(first):,} more: --all lists them", "dim"))


def _show_versions(page: Page, report: dict[str, Any]) -> None:
    page.line()
    if not report["versions"]:
        page.line("  no versions")
    else:
        columns = (">step", ">epoch", "state", "standing", ">size here", ">objects", ">age", "held by", "")
        page.table(columns, [_version_row(version) for version in report["versions"]])
    lag = report["lag_steps"]
    if lag["replicated"]:
        page.line(f"  copies lag: {plural(lag['replicated'], 'step')} since the newest replicated version")
    storage = report["storage"]
    if storage is not None:
        step, back = storage["drained_step"], lag["drained"]
        behind = f", {plural(back, 'step')} behind" if back else ""
        page.line(
            "  storage: " + ("nothing is drained yet" if step is None else f"step {step} is drained{behind}")
        )
        if storage["error"]:
            page.line("  ", (f"the last drain failed: {storage['error']}", "bold red"))
    scrub = report["scrub"]
    if scrub is not None and scrub["corrupt"]:
        page.line(
            "  ",
            (f"found corrupt in memory: {plural(scrub['corrupt'], 'object')}", "bold red"),
            f", {scrub['repaired']} repaired, {scrub['withdrawn']} withdrawn; {scrub['last']}",
        )


def _version_row(version: dict[str, Any]) -> list[Cell]:
    here, objects = version["objects_here"], version["objects"]
    standing = version["standing"]
    return [
        str(version["step"]),
        "-" if version["epoch"] is None else str(version["epoch"]),
        (version["state"], STYLES[version["state"]]),
        (standing, _STANDING_STYLES[standing]) if standing else "-",
        human_bytes(version["bytes_here"]),
        str(here) if objects in (None, here) else f"{here} of {objects}",
        age(version["created_unix_s"]) if version["created_unix_s"] else "-",
        _holders(version["holders"]) or "-",
        (version["problem"], "dim"),
    ]


def _holders(groups: Sequence[dict[str, Any]]) -> str:
    """``2 nodes each``, ``1 to 2 nodes each: 4 objects on node 3 only``."""
    counts = [len(group["nodes"]) for group in groups]
    if not counts:
        return ""
    low, high = min(counts), max(counts)
    if low == high:
        return (
            f"node {groups[0]['nodes'][0]}" if low == high == 1 and len(groups) == 1 else _each(str(low), low)
        )
    weak = [group for group in groups if len(group["nodes"]) == low]
    objects = plural(sum(group["objects"] for group in weak), "object")
    where = "known on no node" if low == 0 else f"on {_nodes({n for g in weak for n in g['nodes']})} only"
    return _each(f"{low} to {high}", high) + f": {objects} {where if low < 2 else f'on {low}'}"


def _each(count: str, number: int) -> str:
    return f"{count} node{'' if number == 1 else 's'} each"


def _show_losses(page: Page, report: dict[str, Any]) -> None:
    recovery = report["recovery"]
    page.line()
    rows: list[list[Cell]] = [["crash of the trainers", *_outcome(recovery["after_a_crash"]), ""]]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for loss in report["losses"]:
        place = loss["goes_on_from"]
        outcome = (loss["kind"], place and (place["tier"], place["epoch"], place["step"]), _gone(loss))
        groups.setdefault(outcome, []).append(loss)
    for (kind, _, gone), losses in groups.items():
        rows.append([_who(kind, losses), *_outcome(losses[0]["goes_on_from"]), (gone, "dim")])
    rows.append(["all nodes", *_outcome(recovery["after_all_nodes"]), ""])
    page.table(("if lost", "goes on from", ">steps back", "no copy is known of"), rows)


def _who(kind: str, losses: Sequence[dict[str, Any]]) -> str:
    nodes = {node for loss in losses for node in loss["nodes"]}
    if kind == "node":
        return _nodes(nodes) if len(losses) == 1 else f"any one of {_nodes(nodes)}"
    if kind == "silent":
        return f"all that is silent ({_nodes(nodes)})"
    names = [loss["name"] for loss in losses]
    if len(names) == 1:
        return f"{names[0]} ({_nodes(nodes)})"
    return f"any one of {len(names)} domains ({shortened(', '.join(names), 60)})"


def _outcome(place: dict[str, Any] | None) -> list[Cell]:
    if place is None:
        return [("nothing: from scratch", "bold red"), "-"]
    back = place["steps_back"]
    text = f"step {place['step']}, {place['tier']}"
    style = "green" if back == 0 else "yellow"
    return [(text, style), "-" if back is None else str(back)]


def _gone(loss: dict[str, Any]) -> str:
    return ", ".join(
        f"{plural(one['objects'], 'object')} of step {one['step']}"
        for one in loss["lost_objects"]
        if one["objects"]
    )


def _nodes(nodes: Iterable[int]) -> str:
    nodes = sorted(nodes)
    return f"node{'' if len(nodes) == 1 else 's'} {_ranges(nodes)}"


def _ranges(numbers: Iterable[int]) -> str:
    """``0-3, 7``; at most eight of them."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(texts[:8]) + (f" and {len(texts) - 8} more" if len(texts) > 8 else "")
