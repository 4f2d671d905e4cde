"""PyTorch's dtypes by the names that `flashpoint.dtypes` knows."""

from __future__ import annotations

from typing import Final

import torch

from flashpoint.dtypes import DTYPES

# torch has names for int4 and its like, but no tensor can hold or copy them.
_NAMES_ALONE: Final = ("int4", "uint4", "int2", "uint2")

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    name: dtype
    for name in DTYPES
    if isinstance(dtype := getattr(torch, name, None), torch.dtype) and name not in _NAMES_ALONE
}
NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
