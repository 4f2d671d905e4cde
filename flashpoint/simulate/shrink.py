"""The few faults of a failing schedule without which it does not fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flashpoint.simulate.faults import Fault


def shrunk(faults: Sequence[Fault], fails: Callable[[Sequence[Fault]], bool]) -> list[Fault]:
    """Leave out halves, then quarters, then single faults, as long as what is left still fails."""
    kept, size = list(faults), max(len(faults) // 2, 1)
    while kept:
        begin, shorter = 0, False
        while begin < len(kept):
            without = kept[:begin] + kept[begin + size :]
            if fails(without):
                kept, shorter = without, True
            else:
                begin += size
        if size == 1 and not shorter:
            break
        size = max(size // 2, 1)
    return kept
