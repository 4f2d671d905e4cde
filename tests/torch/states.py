"""States for tests, and the comparison that lets no bit and no type pass."""

from __future__ import annotations

import math
import random
import struct
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

LONG_NAME = "layer." * 666 + "end!"  # 4,000 characters


def tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random bits in the shape and dtype given, NaNs and all; booleans are 0 or 1."""
    count = math.prod(shape) * dtype.itemsize
    data = np.random.default_rng([seed, count]).integers(0, 256, count, np.uint8)
    if dtype is torch.bool:
        data &= 1
    return torch.from_numpy(data.copy()).view(dtype).reshape(shape)


def tensors() -> dict[str, Any]:
    """One tensor of every kind that can be stored as its bytes, under every kind of name."""
    base = tensor(6, 8, seed=1)
    shared = tensor(100, seed=2)
    complex_numbers = torch.complex(torch.randn(3, 4), torch.randn(3, 4))
    return {
        "scalar": torch.tensor(1.5),
        "scalar of ints": torch.tensor(-7),
        "empty": torch.empty(0, 3),
        "strided": base.t()[::2, 1::3],
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.randn(1, 4).expand(3, 4),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "frozen": torch.nn.Parameter(torch.randn(2), requires_grad=False),
        "needs a gradient": torch.randn(3, requires_grad=True) * 2,
        "conj": complex_numbers.conj(),
        "neg": complex_numbers.conj().imag,
        "nan": torch.tensor([math.nan, -math.nan, math.inf, -0.0]),
        "shared": {"left": shared[:60], "right": shared[40:], "all": shared},
        "dtypes": {str(dtype): tensor(3, 5, dtype=dtype, seed=3) for dtype in DTYPES},
        LONG_NAME: torch.randn(2),
        "a/b/../c": torch.randn(1),
        "new\nline\t\0\x7f": torch.randn(2),
        "größe 大きさ 🙂": torch.randn(2),
        '"quotes" \\ and {braces}': torch.randn(1),
        "__metadata__": torch.randn(1),
        "__pad__.0": torch.randn(1),
        "": {"": torch.randn(3)},
        "list": [torch.randn(2), {"deep": [torch.randn(1), 3]}, 5],
        7: {8: torch.randn(2)},
    }


DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)  # fmt: skip


def values() -> dict[str, Any]:
    """Plain values of every kind."""
    return {
        "none": None,
        "truth": True,
        "int": -3,
        "big": 2**100,
        "most negative": -(2**63),
        "float": 0.1,
        "nan": math.nan,
        "minus zero": -0.0,
        "infinite": -math.inf,
        "complex": complex(math.nan, -0.0),
        "text": "größe \0 \n 🙂",
        "bytes": bytes(range(256)),
        "tuple": (1, (2.0, [3, "x"], None), ()),
        "list": [1, [2, {3}], []],
        "set": {1, 2, "x"},
        "frozen": frozenset({(1, 2)}),
        "numbers by int": {"inner": {1: "int", "2": "str", (3, 4): "tuple"}},
        "dollar": {"inside": ({"$int": 5}, {"$tuple": [1]})},
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "array without elements": np.zeros((0, 4), np.float64),
        "array of no dimension": np.array(2.5),
        "numpy float": np.float64("nan"),
        "numpy bool": np.bool_(True),
        "numpy int": np.uint8(200),
        "large array": np.random.default_rng(0).standard_normal((100, 100)),
        "large columns": np.asfortranarray(np.random.default_rng(0).standard_normal((100, 100))),
        "random states": (random.Random(1).getstate(), np.random.default_rng(1).bit_generator.state),
    }


def pickled() -> dict[str, Any]:
    """Values that are stored as torch.save writes them, and that load without trusting the checkpoint."""
    return {
        "sparse": torch.eye(4).to_sparse(),
        "sparse rows": torch.eye(4).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 10, torch.quint8),
        "tuple with a tensor": (torch.randn(2), [1, "x"]),
        "size": (torch.Size([1, 2]), torch.float16, torch.device("cpu")),
    }


def blank(state: Any) -> Any:
    """A state of the same shape, with zeros for tensors and None for values."""
    if isinstance(state, dict):
        return type(state)((key, blank(value)) for key, value in state.items())
    if isinstance(state, list) and any(isinstance(item, (torch.Tensor, dict, list)) for item in state):
        return [blank(item) for item in state]
    if isinstance(state, torch.nn.Parameter):
        return torch.nn.Parameter(torch.zeros_like(state), state.requires_grad)
    if isinstance(state, torch.Tensor) and state.layout is torch.strided and not state.is_quantized:
        return torch.zeros(state.shape, dtype=state.dtype)
    return None


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal in type, dtype, shape, nesting, and every bit."""
    return not differences(a, b)


def differences(a: Any, b: Any, path: str = "state") -> list[str]:
    """Where two values differ; empty if nowhere."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if _same_tensor(a, b) else [f"{path}: {a!r} != {b!r}"]
    if type(a) is not type(b):
        return [f"{path}: {type(a)} != {type(b)}"]
    if isinstance(a, dict):
        if list(a) != list(b) or list(map(type, a)) != list(map(type, b)):
            return [f"{path}: keys {list(a)!r} != {list(b)!r}"]
        return [found for key in a for found in differences(a[key], b[key], f"{path}[{str(key)[:40]!r}]")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{path}: {len(a)} items != {len(b)}"]
        pairs = enumerate(zip(a, b, strict=True))
        return [found for i, (x, y) in pairs for found in differences(x, y, f"{path}[{i}]")]
    return [] if _same_plain(a, b) else [f"{path}: {a!r} != {b!r}"]


def _same_plain(a: Any, b: Any) -> bool:
    if isinstance(a, (np.ndarray, np.generic)):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, complex):
        return _same_plain(a.real, b.real) and _same_plain(a.imag, b.imag)
    return bool(a == b)


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if isinstance(a, DTensor) or isinstance(b, DTensor):
        assert isinstance(a, DTensor)
        assert isinstance(b, DTensor)
        return (a.placements, a.shape) == (b.placements, b.shape) and _same_tensor(a.to_local(), b.to_local())
    if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout) or type(a) is not type(b):
        return False
    if a.is_quantized:
        return bool((a.q_scale(), a.q_zero_point()) == (b.q_scale(), b.q_zero_point())) and torch.equal(
            a.int_repr(), b.int_repr()
        )
    if a.layout is not torch.strided:
        return torch.equal(a.to_dense(), b.to_dense())
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)
