"""Bugs, by name, that are put into a process that saves, recovers, replicates or drains."""

from __future__ import annotations

def put_in(name: str) -> None:
    pass
