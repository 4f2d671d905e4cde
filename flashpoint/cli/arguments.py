"""Sizes, rates and durations as people write them: ``256MiB``, ``10GiB/s``, ``5000h``. For argparse's ``type=``."""

from __future__ import annotations

import argparse
import math
import re
from typing import Final

from flashpoint.config import parse_bytes

_SECONDS: Final = {
    "ms": 1e-3,
    "": 1.0,
    "s": 1.0,
    "min": 60.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86_400.0,
    "y": 365.25 * 86_400,
}


def size(text: str) -> int:
    """``"256MiB"`` in bytes; at least 1."""
    try:
        found = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: at least 1 byte")
    return found


def rate(text: str) -> float:
    """``"10GiB/s"`` in bytes per second."""
    return float(size(text.strip().removesuffix("/s")))


def duration(text: str) -> float:
    """``"90s"``, ``"30min"``, ``"5000h"``, ``"3d"`` or ``"never"`` in seconds; a bare number counts seconds."""
    if text.strip().lower() in ("never", "inf"):
        return math.inf
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([a-z]*)", text.strip(), re.ASCII)
    if match is None or match[2] not in _SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time: write it like 500ms, 90s, 30min, 5000h, 3d or never"
        )
    return float(match[1]) * _SECONDS[match[2]]


def human_seconds(seconds: float) -> str:
    """``0.0123`` -> ``12 ms``, ``5400`` -> ``1.5 h``."""
    if math.isinf(seconds):
        return "never"
    for unit, name, end in (
        (1e-3, "ms", 1.0),
        (1.0, "s", 120.0),
        (60.0, "min", 7200.0),
        (3600.0, "h", 172_800.0),
    ):
        if seconds < end:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86_400:.3g} d"
