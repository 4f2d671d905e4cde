"""The generators that a training loop throws its dice with, as tensors and plain values."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """The global generators of Python, NumPy and torch, on the CPU and on this process's CUDA device."""
    version, words, gauss = random.getstate()
    algorithm, keys, *rest = np.random.get_state()  # of MT19937, whatever seeds it
    state: dict[str, Any] = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_rest": (version, gauss),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy_rest": (str(algorithm), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put back what `rng_state` gave."""
    version, gauss = state["python_rest"]
    random.setstate((version, tuple(state["python"].tolist()), gauss))
    algorithm, *rest = state["numpy_rest"]
    np.random.set_state((algorithm, state["numpy"].numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu())
