"""Tab completion: what may stand for the arguments of a command, found as the commands find it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any, Final

from flashpoint.cli.discovery import job_roots_of_this_user
from flashpoint.cli.versions import manager, require_job_root
from flashpoint.errors import FlashpointError


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell that asks, and end the process; return at once where none does."""
    import argcomplete

    for command in _commands(parser):
        for action in command._actions:
            completer = _COMPLETERS.get(str(action.metavar))
            if completer is not None:
                action.completer = completer  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, always_complete_options=False)


def _commands(parser: argparse.ArgumentParser) -> Iterable[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


def _job_roots(prefix: str, **_: Any) -> list[str]:
    """This user's job roots, and the folders that begin so."""
    return [*job_roots_of_this_user(), *_folders(prefix)]


def _containers(prefix: str, **_: Any) -> list[str]:
    """The versions of this user's job roots, newest first, and the folders that begin so."""
    found = []
    for root in job_roots_of_this_user():
        found += [f"{root}/step-{step}_ckpt" for step in reversed(manager(root).steps())]
    return [*found, *_folders(prefix)]


def _either(prefix: str, **_: Any) -> list[str]:
    return [*_containers(prefix), *job_roots_of_this_user()]


def _steps(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """The steps of the job root that was typed before."""
    given = getattr(parsed_args, "job_root", None) or getattr(parsed_args, "path", None)
    try:
        return [str(step) for step in manager(require_job_root(given)).steps()] if given else []
    except (FlashpointError, OSError):
        return []


def _folders(prefix: str) -> list[str]:
    from argcomplete.completers import DirectoriesCompleter

    return list(DirectoriesCompleter()(prefix)) if prefix else []


def _nothing(prefix: str, **_: Any) -> list[str]:
    return []


_COMPLETERS: Final[dict[str, Callable[..., list[str]]]] = {
    "JOB_ROOT": _job_roots,
    "CONTAINER": _containers,
    "JOB_ROOT|CONTAINER": _either,
    "CONTAINER|JOB_ROOT": _either,
    "STEP": _steps,
    "URL": _nothing,
}
