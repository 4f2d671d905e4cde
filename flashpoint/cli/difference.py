"""By how much two arrays differ, a chunk at a time: no copy of them is ever made. Pure."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

CHUNK_ELEMENTS: Final = 1 << 14  # 128 KiB as float64: larger ones, malloc maps and unmaps each time

Array = np.ndarray[Any, Any]


class Difference:
    """Running comparison of the parts of two tensors of one shape.

    An element is *changed* if its value is another one: NaN equals NaN, and -0 equals 0. It *differs* if its bytes do,
    which only arrays of one dtype can. Sizes of changes are over the elements that are finite on both sides.
    """

    def __init__(self) -> None:
        self.elements = self.differing = self.changed = 0
        self.nan_before = self.nan_after = self.inf_before = self.inf_after = 0
        self._max_abs: int | float = 0
        self._squares = self._squares_before = 0.0

    def add(self, before: Array, after: Array) -> None:
        """Take in a part of both, of equal shapes; dtypes real or complex, those of ml_dtypes included."""
        old, new = np.ascontiguousarray(before).reshape(-1), np.ascontiguousarray(after).reshape(-1)
        for begin in range(0, len(old), CHUNK_ELEMENTS):
            self._add(old[begin : begin + CHUNK_ELEMENTS], new[begin : begin + CHUNK_ELEMENTS])

    def _add(self, old: Array, new: Array) -> None:
        self.elements += len(old)
        if old.dtype == new.dtype:
            self.differing += _differing(old, new)
        exact = _as_integers(old), _as_integers(new)
        a, b = _as_real(old), _as_real(new)
        both_finite = np.isfinite(a) & np.isfinite(b)
        if not both_finite.all():
            changed = (a != b) & ~(np.isnan(a) & np.isnan(b))
            self.nan_before += int(np.isnan(a).sum())
            self.nan_after += int(np.isnan(b).sum())
            self.inf_before += int(np.isinf(a).sum())
            self.inf_after += int(np.isinf(b).sum())
            self.changed += int(changed.sum())
            a, b = a[both_finite], b[both_finite]
        elif exact[0] is not None and exact[1] is not None:  # float64 has not digits enough for 64 bits
            self.changed += int((exact[0] != exact[1]).sum())
        else:
            self.changed += int((a != b).sum())
        with np.errstate(over="ignore", invalid="ignore"):
            distances = np.abs(b - a)
            if exact[0] is not None and exact[1] is not None:
                self._max_abs = max(self._max_abs, _largest_distance(exact[0], exact[1]))
            elif len(distances):
                self._max_abs = max(self._max_abs, float(distances.max()))
            distances *= distances  # a dot product would wake the threads of BLAS for every chunk
            self._squares += float(distances.sum())
            sizes = np.abs(a)
            sizes *= sizes
            self._squares_before += float(sizes.sum())

    def result(self) -> dict[str, int | float | None]:
        """The numbers by name; those that do not exist, or overflow float64, are None."""
        norm, before = math.sqrt(self._squares), math.sqrt(self._squares_before)
        relative = norm / before if before > 0 else (0.0 if norm == 0 else math.inf)
        return {
            "elements": self.elements,
            "differing": self.differing,
            "changed": self.changed,
            "max_abs": _finite(self._max_abs),
            "norm": _finite(norm),
            "relative_norm": _finite(relative),
            "nan_before": self.nan_before,
            "nan_after": self.nan_after,
            "inf_before": self.inf_before,
            "inf_after": self.inf_after,
        }


def _finite(value: int | float) -> int | float | None:
    return value if isinstance(value, int) or math.isfinite(value) else None


def _differing(old: Array, new: Array) -> int:
    """Elements whose bytes are not the same."""
    width = old.dtype.itemsize
    same = old.view(np.uint8).reshape(-1, width) == new.view(np.uint8).reshape(-1, width)
    return int(len(same) - same.all(axis=1).sum())


def _as_integers(values: Array) -> Array | None:
    """The values of an integer dtype, as numpy's own integers; int4, uint2 and such are not numpy's own."""
    if values.dtype.kind in "iu":
        return values
    return values.astype(np.int64) if "int" in values.dtype.name or values.dtype == np.bool_ else None


def _as_real(values: Array) -> Array:
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def _largest_distance(old: Array, new: Array) -> int:
    """Exactly: integers of 64 bits can be further apart than any of 64 bits can say, but for unsigned ones."""
    if old.dtype != new.dtype:
        old, new = (one.astype(np.int64 if one.dtype.kind == "i" else np.uint64) for one in (old, new))
        if (
            old.dtype != new.dtype
        ):  # one side may be negative, the other too large: few elements, Python's integers
            return max((abs(int(b) - int(a)) for a, b in zip(old, new, strict=True)), default=0)
    if not len(old):
        return 0
    high, low = np.maximum(old, new).astype(np.uint64), np.minimum(old, new).astype(np.uint64)
    return int((high - low).max())  # negative ones wrap around, and the difference wraps back
