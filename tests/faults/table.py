"""What is to be survived, one row for each fault; `docs/faults.md` is written from it and from the tests' results.

A test belongs to a row by its mark: ``@pytest.mark.fault(6, "I")``. Rows are numbers; letters are failures that
were seen in other systems.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).parents[1]
PAGE: Final = TESTS.parent / "docs" / "faults.md"

# Fault, and what is expected of it.
ROWS: Final[dict[str, tuple[str, str]]] = {
    "1": ("SIGKILL of a rank while it stages", "the older version loads; the partial one is ignored, then reclaimed"),
    "2": ("SIGKILL between data and commit", "the same"),
    "3": ("SIGKILL between commit and removal of the markers", "the version counts for all ranks or for none"),
    "4": ("SIGKILL of the agent", "it is started again; the next save is replicated"),
    "5": ("SIGKILL of all ranks of a node", "restored from the node's own memory"),
    "6": ("loss of a node (killed, memory wiped)", "what is missing comes from peers, bit for bit"),
    "7": ("loss of a node during replication", "the version before, or a newer one, loads"),
    "8": ("loss of as many nodes as there are copies, or of nodes that hold nothing of each other", "restored"),
    "9": ("loss of one node more than there are copies", "an error that names what is missing; storage"),
    "10": ("a crash at every system call", "the invariants, after each"),
    "11": ("SIGSTOP of a peer for 60 s", "a bounded wait, another source; who resumes is fenced by the epoch"),
    "12": ("SIGSTOP of the coordinator, the leader's rank, the leader's agent", "a clean failure in time; goes on"),
    "13": ("a node is frozen in the middle of a fetch", "another source"),
    "14": ("the tmpfs is full when a buffer is allocated", "the save is skipped, training goes on, no SIGBUS"),
    "15": ("the tmpfs is made smaller", "the same"),
    "16": ("the memory limit of the cgroup is reached", "saves are skipped before the kernel kills"),
    "17": ("storage is full", "memory is not affected; tried again, and told"),
    "18": ("EIO, EINTR, ENOSPC, short writes", "tried again or failed; never committed"),
    "19": ("storage hangs", "the drain lags behind; training goes on"),
    "20": ("one bit flipped, anywhere", "always detected; repaired where there is a copy"),
    "21": ("a bit flipped in every copy", "refused; an older version"),
    "22": ("an object cut short", "detected before it is loaded"),
    "23": ("a hole of zeros, 4 KiB", "detected"),
    "24": ("objects swapped between versions", "detected: a digest says which bytes are meant"),
    "25": ("a manifest that is torn, or garbage", "the version is refused, the next is tried"),
    "26": ("messages twice, or in another order", "idempotent"),
    "27": ("a link goes down in the middle of a transfer", "goes on from the chunks that are verified"),
    "28": ("half-open TCP (blackhole route)", "noticed by missing heartbeats; another source"),
    "29": ("a partition in one direction", "the minority cannot commit"),
    "30": ("200 ms of latency, 50 Mbit/s", "completes, and holds nothing up"),
    "31": ("bytes flipped in flight", "the chunk is refused, and sent again"),
    "32": ("1,000 clients connect at once", "descriptors and memory are bounded"),
    "33": ("a client that sends very slowly", "disconnected at a deadline"),
    "34": ("lengths of 2^62, negative, zero", "refused before anything is allocated"),
    "35": ("names such as ../../etc/passwd, absolute, with NUL", "refused, and logged"),
    "36": ("symbolic and hard links planted in a container", "not followed, and what they lead to is left alone"),
    "37": ("another key, a replayed handshake, another job", "refused; nothing changes"),
    "38": ("a malicious pickle among the data", "never unpickled"),
    "39": ("the wall clock one day off; another monotonic clock", "order is by epoch and step alone"),
    "40": ("a restart with reordered ranks, or fewer", "mapped or resharded, bit for bit"),
}  # fmt: skip

SEEN_ELSEWHERE: Final[dict[str, tuple[str, str]]] = {
    "A": ("a plan that is cached saves the first step's weights again", "each save has its own step's values"),
    "B": ("parameters change while an asynchronous save still reads them", "what is saved is the state at the call"),
    "C": ("the first save needs several times the memory of later ones", "it needs no more"),
    "D": ("`latest` is moved before the data is safe", "a version counts when every rank's bytes and record are there"),
    "E": ("ranks disagree on the tier to load from", "all ranks load one version, or none"),
    "F": ("a helper process never comes back after it was killed", "it is started again"),
    "G": ("a crash loop leaks shared memory until the host is full", "memory is bounded however often it crashes"),
    "H": ("one slow rank holds all others at a barrier without an end", "a deadline, and the rank is named"),
    "I": ("a save upon SIGTERM that never fires", "it is made, on all ranks"),
}  # fmt: skip


def marked_tests() -> dict[str, set[str]]:
    """For each row, ``path::name`` of the test functions that are marked with it, read from the sources."""
    found: dict[str, set[str]] = {row: set() for row in (*ROWS, *SEEN_ELSEWHERE)}
    for path in sorted(TESTS.rglob("test_*.py")):
        source = path.read_text()
        if "mark.fault(" not in source:
            continue
        place = path.relative_to(TESTS.parent).as_posix()
        for function in ast.walk(ast.parse(source)):
            if isinstance(function, ast.FunctionDef):
                for row in _rows_of(function):
                    found[row].add(f"{place}::{function.name}")
    return found


def _rows_of(function: ast.FunctionDef) -> set[str]:
    """Of its mark, or of marks on its parameters."""
    calls = [
        node for decorator in function.decorator_list for node in ast.walk(decorator) if isinstance(node, ast.Call)
    ]  # fmt: skip
    marks = [call for call in calls if ast.unparse(call.func) == "pytest.mark.fault"]
    return {str(ast.literal_eval(argument)) for call in marks for argument in call.args}


def listed_tests(page: str) -> dict[str, set[str]]:
    """For each row, the tests that a page written by `scripts.fault_table` names."""
    found: dict[str, set[str]] = {}
    row = ""
    for line in page.splitlines():
        if match := re.match(r"\*\*([0-9]+|[A-Z])\*\* ", line):
            row = match[1]
            found[row] = set()
        elif match := re.match(r"- `(tests/.+?)`", line):
            found[row].add(match[1])
    return found
