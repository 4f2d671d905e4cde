"""Statistics of a tensor and a histogram of it, a chunk at a time: no copy of it is ever made. Pure."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

BINS: Final = 12
CHUNK_ELEMENTS: Final = 1 << 14  # 128 KiB as float64: larger ones, malloc maps and unmaps each time


class Statistics:
    """Running statistics over the parts of one tensor.

    Minimum, maximum, mean and standard deviation (of the population) are over the finite elements.
    """

    def __init__(self) -> None:
        self.elements = self.nan = self.inf = self.zeros = 0
        self._least: float | None = None
        self._most: float | None = None
        self._finite = 0
        self._mean = self._squares = 0.0  # squares: the sum of squared distances from the mean

    def add(self, array: np.ndarray[Any, Any]) -> None:
        """Take in an array of a real dtype, those of ml_dtypes included; it must be contiguous."""
        flat = array.reshape(-1)
        for begin in range(0, len(flat), CHUNK_ELEMENTS):
            self._add(flat[begin : begin + CHUNK_ELEMENTS])

    def _add(self, chunk: np.ndarray[Any, Any]) -> None:
        self.elements += len(chunk)
        if "int" in chunk.dtype.name or chunk.dtype == np.bool_:  # int4, uint2 and such are not numpy's own
            exact = chunk if chunk.dtype.kind in "iu" else chunk.astype(np.int64)
            self._widen(int(exact.min()), int(exact.max()))
            values = exact.astype(np.float64)
        else:
            values = chunk.astype(np.float64)
            finite = np.isfinite(values)
            if not finite.all():
                nan = int(np.isnan(values).sum())
                self.nan += nan
                self.inf += len(values) - int(finite.sum()) - nan
                values = values[finite]
                if not len(values):
                    return
            self._widen(float(values.min()), float(values.max()))
        self.zeros += int(np.count_nonzero(values == 0))
        self._merge(values)

    def _widen(self, least: float, most: float) -> None:
        self._least = least if self._least is None else min(self._least, least)
        self._most = most if self._most is None else max(self._most, most)

    def _merge(self, values: np.ndarray[Any, Any]) -> None:
        # Chan, Golub, LeVeque 1983: no sum of squares that could cancel.
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(values.mean())
            distances = values - mean
            distances *= distances  # a dot product would wake the threads of BLAS for every chunk
            squares = float(distances.sum())
        total = self._finite + len(values)
        delta = mean - self._mean
        self._mean += delta * len(values) / total
        self._squares += squares + delta * delta * self._finite * len(values) / total
        self._finite = total

    def result(self) -> dict[str, int | float | None]:
        """The numbers by name; those that do not exist, or overflow float64, are None."""
        mean = self._mean if self._finite else math.nan
        std = math.sqrt(self._squares / self._finite) if self._finite else math.nan
        return {
            "elements": self.elements,
            "min": self._least,
            "max": self._most,
            "mean": mean if math.isfinite(mean) else None,
            "std": std if math.isfinite(std) else None,
            "nan": self.nan,
            "inf": self.inf,
            "zeros": self.zeros,
        }


class Histogram:
    """Counts of the finite elements between the least and the largest of them, in bins of equal width.

    Args:
        least, most: of the elements, as `Statistics` has found them; None where none is finite.
    """

    def __init__(self, least: float | None, most: float | None) -> None:
        self._edges: np.ndarray[Any, Any] | None = None
        if least is not None and most is not None and math.isfinite(float(most) - float(least)):
            # Few integers have a bin each.
            whole = isinstance(least, int) and isinstance(most, int) and most - least < BINS
            self._edges = (
                np.arange(least, most + 2)
                if whole
                else np.linspace(least, most, 2 if least == most else BINS + 1)
            )
            self._counts = np.zeros(len(self._edges) - 1, np.int64)

    def add(self, array: np.ndarray[Any, Any]) -> None:
        """Take in a part of the tensor, as `Statistics.add` does."""
        flat = array.reshape(-1)
        for begin in range(0, len(flat), CHUNK_ELEMENTS):
            if self._edges is not None:
                values = flat[begin : begin + CHUNK_ELEMENTS].astype(np.float64)
                values = values[np.isfinite(values)]
                bins = np.searchsorted(self._edges, values, side="right") - 1
                self._counts += np.bincount(
                    np.minimum(bins, len(self._counts) - 1), minlength=len(self._counts)
                )

    def result(self) -> dict[str, list[float]] | None:
        """``edges``, one more than there are ``counts``; None where there is nothing to count."""
        if self._edges is None:
            return None
        return {"edges": [float(edge) for edge in self._edges], "counts": [int(n) for n in self._counts]}
