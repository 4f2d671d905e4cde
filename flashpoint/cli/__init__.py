"""The command line: ``python -m flashpoint ls | inspect | verify | ...``, also installed as ``flashpoint``.

A command is one module of this package, with four names: `NAME` and `HELP`, ``configure(parser)`` for
its arguments, and ``run(args)``, which returns the exit code; its docstring is its ``--help`` page. To
add one, write the module and list it in `COMMANDS`. What is only needed to run (rich, above all) is
imported inside functions, so that ``--help`` and errors are quick.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Final

import flashpoint
from flashpoint.cli import (
    agent,
    bench,
    diff,
    doctor,
    drain,
    export,
    inspect,
    ls,
    mount,
    plan,
    rm,
    simulate,
    status,
    verify,
)
from flashpoint.cli.exit_codes import BAD, BUG, FINE, INTERRUPTED, NOT_FOUND, REFUSED, RefusedError, table
from flashpoint.cli.output import printable
from flashpoint.errors import CorruptObjectError, FlashpointError, ManifestError

COMMANDS: Final = (
    ls,
    status,
    inspect,
    verify,
    diff,
    export,
    drain,
    rm,
    doctor,
    mount,
    plan,
    bench,
    agent,
    simulate,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what could stand here
        from flashpoint.cli.completion import complete

        complete(_parser(argparse.ArgumentParser))
    args = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a name is no error
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (head, less) has seen enough. What is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
    except KeyboardInterrupt:
        return INTERRUPTED
    except (FlashpointError, OSError) as error:
        if args.debug:
            traceback.print_exc()
        print(f"flashpoint {args.command}: {printable(_one_line(error))}", file=sys.stderr)
        if isinstance(error, RefusedError):
            return REFUSED
        return BAD if isinstance(error, ManifestError | CorruptObjectError) else NOT_FOUND
    except Exception:
        traceback.print_exc()
        return BUG


class _CommandParser(argparse.ArgumentParser):
    """Takes options between positional arguments too: ``inspect CONTAINER --json NAME``."""

    _nested = False

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        if self._nested:
            return super().parse_known_args(args, namespace)
        self._nested = True  # parse_known_intermixed_args calls back
        try:
            return super().parse_known_intermixed_args(args, namespace)
        finally:
            self._nested = False


def _parser(
    parser_class: type[argparse.ArgumentParser] | None = None,
) -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="flashpoint",
        description="Look at memory-first checkpoints, care for them, and run the agent that copies them.",
        epilog=table(),
        formatter_class=formatter,
    )
    parser.add_argument("--version", action="version", version=f"flashpoint {flashpoint.__version__}")
    commands = parser.add_subparsers(
        title="commands",
        dest="command",
        metavar="COMMAND",
        required=True,
        parser_class=parser_class or _CommandParser,
    )
    for module in COMMANDS:
        command = commands.add_parser(
            module.NAME,
            help=module.HELP,
            description=module.__doc__,
            epilog=table(),
            formatter_class=formatter,
        )
        module.configure(command)
        command.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(run=module.run)
    return parser


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        return f"{where}{error.strerror}"
    return str(error) or type(error).__name__
