"""Names: job roots, containers, objects. Strict both ways, pure, no I/O.

A name is accepted only if writing it back gives the same characters, so nothing is ever matched by
prefix or read generously: ``step-9_ckpt.bak``, ``step-09_ckpt`` and ``/x/job10`` under ``/x/job1``
are refused, not guessed at.
"""

from __future__ import annotations

import operator
import os
import re
from dataclasses import dataclass
from typing import Final

from flashpoint.errors import InvalidIdError

STEP_MAX: Final = 2**63 - 1
RANK_MAX: Final = 2**31 - 1
NAME_BYTES_MAX: Final = 255  # of one path component, Linux NAME_MAX

_CONTAINER = re.compile(r"step-(0|[1-9][0-9]{0,18})_ckpt", re.ASCII)
_OBJECT = re.compile(r"rank([0-9]{5,10})-(0|[1-9][0-9]{0,5})\.safetensors", re.ASCII)


def validate_job_root(path: str | os.PathLike[str]) -> str:
    """Return the job root as a normalised absolute path.

    Raises:
        InvalidIdError: the path is relative, holds ``..`` or NUL, or is the file system's root.
    """
    text = _text(path)
    if "\0" in text:
        raise InvalidIdError(f"job root {text!r} holds a NUL character")
    if not os.path.isabs(text):
        raise InvalidIdError(
            f"job root {text!r} is relative: give an absolute path on a tmpfs, such as "
            f"'/dev/shm/{text or 'job-1'}'"
        )
    if ".." in text.split("/"):
        raise InvalidIdError(f"job root {text!r} holds '..': give the path it stands for")
    root = "/" + os.path.normpath(text).lstrip("/")
    if root == "/":
        raise InvalidIdError(
            "the file system's root cannot be a job root: give a folder such as '/dev/shm/job-1'"
        )
    return root


def _text(path: str | os.PathLike[str]) -> str:
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise InvalidIdError(f"path {path!r} must be str or a path object, not {type(path).__name__}")
    return text


def validate_step(step: int) -> int:
    """Return ``step`` if it is an integer of 0 to 2**63 - 1, else raise `InvalidIdError`."""
    try:
        number = None if isinstance(step, bool) else operator.index(step)  # numpy integers are welcome
    except TypeError:
        number = None
    if number is None:
        raise InvalidIdError(f"step {step!r} must be an integer, not {type(step).__name__}")
    if not 0 <= number <= STEP_MAX:
        raise InvalidIdError(f"step {number} is out of range: steps run from 0 to {STEP_MAX}")
    return number


@dataclass(frozen=True, order=True, slots=True)
class CheckpointContainerId:
    """One checkpoint version: the folder ``<job root>/step-<n>_ckpt``.

    Ordered by job root, then by step as a number (9 before 10).
    """

    job_root: str
    step: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "job_root", validate_job_root(self.job_root))
        object.__setattr__(self, "step", validate_step(self.step))

    @classmethod
    def parse(cls, path: str | os.PathLike[str]) -> CheckpointContainerId:
        """The id behind an absolute path whose last component is exactly ``step-<n>_ckpt``."""
        text = _text(path)
        root, name = os.path.split(validate_job_root(text))
        step = parse_container_name(name)
        if step is None:
            raise InvalidIdError(
                f"{text!r} is not a container: the last part of its path must be exactly 'step-<n>_ckpt', "
                "with <n> a step without leading zeros, such as '/dev/shm/job-1/step-100_ckpt'"
            )
        return cls(root, step)

    @property
    def name(self) -> str:
        return f"step-{self.step}_ckpt"

    @property
    def path(self) -> str:
        return f"{self.job_root}/{self.name}"

    def __str__(self) -> str:
        return self.path

    def __fspath__(self) -> str:
        return self.path


def parse_container_name(name: str) -> int | None:
    """The step of a folder name, or None where it is not exactly a container's name."""
    match = _CONTAINER.fullmatch(name)
    if match is None:
        return None
    step = int(match[1])
    return step if step <= STEP_MAX else None


@dataclass(frozen=True, order=True, slots=True)
class CheckpointObjectId:
    """One blob of a container, written by one rank: ``rank<r>-<index>.safetensors``.

    The source rank is in the name (at least five digits), so who wrote what needs no lookup.
    """

    rank: int
    index: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank <= RANK_MAX:
            raise InvalidIdError(f"rank {self.rank} is out of range: ranks run from 0 to {RANK_MAX}")
        if not 0 <= self.index <= 999_999:
            raise InvalidIdError(f"object index {self.index} is out of range: 0 to 999999")

    @classmethod
    def parse(cls, name: str) -> CheckpointObjectId:
        """The id of an object's file name; raises `InvalidIdError` for any other name."""
        match = _OBJECT.fullmatch(name)
        if match is not None and int(match[1]) <= RANK_MAX:
            found = cls(int(match[1]), int(match[2]))
            if found.name == name:
                return found
        raise InvalidIdError(f"{name!r} is not an object's name: it must be like 'rank00003-0.safetensors'")

    @property
    def name(self) -> str:
        return f"rank{self.rank:05d}-{self.index}.safetensors"

    def __str__(self) -> str:
        return self.name
