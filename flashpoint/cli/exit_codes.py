"""What the exit codes of all commands mean: one table, for the code, for ``--help`` and for docs/cli.md."""

from __future__ import annotations

from typing import Final

from flashpoint.errors import FlashpointError

FINE: Final = 0
BAD: Final = 1
NOT_FOUND: Final = 2
TAKEN: Final = 3
REFUSED: Final = 4
NO_AGENT: Final = 5
BUG: Final = 70  # EX_SOFTWARE: never to be mistaken for a corrupt checkpoint
INTERRUPTED: Final = 130

MEANINGS: Final = {
    FINE: "fine",
    BAD: "something is corrupt, or (doctor) bad, or (diff) different, or (simulate) an invariant was broken",
    NOT_FOUND: "wrong usage, not found, not to be had, or (verify, drain) unfinished, or (diff) not known",
    TAKEN: "(agent) the job root has another agent",
    REFUSED: "(rm, mount, drain, export) refused: it would do harm; nothing was changed",
    NO_AGENT: "(status) the job has no living agent, or it does not answer",
    BUG: "a bug in flashpoint: please report the traceback",
    INTERRUPTED: "interrupted (Ctrl-C)",
}


def table() -> str:
    """The table as ``--help`` shows it."""
    return "exit codes:\n" + "".join(f"  {code:<4}{meaning}\n" for code, meaning in MEANINGS.items())


class RefusedError(FlashpointError):
    """What was asked for would do harm: the command ends with `REFUSED`, and has changed nothing."""
