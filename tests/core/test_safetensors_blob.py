import contextlib
import json
import struct

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load as load_numpy

from flashpoint.dtypes import DTYPES, dtype_of
from flashpoint.errors import CorruptObjectError
from flashpoint.layout import Entry, ObjectLayout, plan_layout
from flashpoint.safetensors_blob import (
    HEADER_BYTES_MAX,
    LENGTH_BYTES,
    PAD_PREFIX,
    SHARDING_KEY,
    encode_header,
    header_length,
    parse_header,
)
from tests.core.strategies import entries, mutated


def parse(blob: bytes):
    """The whole of a file through our parser: tensors and metadata."""
    length = header_length(blob[:LENGTH_BYTES], len(blob))
    return parse_header(blob[LENGTH_BYTES : LENGTH_BYTES + length], len(blob) - LENGTH_BYTES - length)


def file_of(layout: ObjectLayout, seed: int = 0) -> bytes:
    data = np.random.default_rng(seed).integers(0, 2, layout.nbytes - layout.header_bytes, dtype=np.uint8)
    return layout.header + data.tobytes()


EVERY_DTYPE = plan_layout(
    [Entry(name, name, (3, 5)) for name in DTYPES]
    + [
        Entry("scalar", "float64", ()),
        Entry("empty", "float32", (0, 4)),
        Entry("large", "uint8", ((1 << 20) + 3,)),
    ]
    + [Entry("s", "float32", (2, 2), (2 * i, 0), (6, 2)) for i in range(3)]
)

# ---- the stock reader -----------------------------------------------------------------------------


def test_the_stock_reader_opens_every_dtype(tmp_path):
    blob = file_of(EVERY_DTYPE)
    path = tmp_path / "x.safetensors"
    path.write_bytes(blob)
    rows = zip(EVERY_DTYPE.entries, EVERY_DTYPE.begins, EVERY_DTYPE.ends, EVERY_DTYPE.keys, strict=True)
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        for entry, begin, end, key in rows:
            tensor = file.get_tensor(key)
            shape = entry.shape
            if dtype_of(entry.dtype).code is None:
                shape = (*shape, dtype_of(entry.dtype).itemsize)
            assert tuple(tensor.shape) == shape
            raw = tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
            assert bytes(raw.tolist()) == blob[begin:end], entry.name
        assert file.get_tensor("bfloat16").dtype == torch.bfloat16
        assert file.get_tensor("float8_e4m3fn").dtype == torch.float8_e4m3fn


def test_the_stock_numpy_reader_gives_the_same_arrays(tmp_path):
    names = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
    names += ["float16", "float32", "float64", "complex64"]
    layout = plan_layout([Entry(name, name, (2, 3)) for name in names])
    blob = file_of(layout)
    found = load_numpy(blob)
    path = tmp_path / "x.safetensors"
    path.write_bytes(blob)
    with safe_open(path, framework="numpy") as file:
        for name, begin, end in zip(names, layout.begins, layout.ends, strict=True):
            expected = np.frombuffer(blob[begin:end], dtype=name).reshape(2, 3)
            for array in (found[name], file.get_tensor(name)):
                assert array.dtype == expected.dtype
                np.testing.assert_array_equal(array, expected)


@given(entries(st.text(st.characters(codec="utf-8"), max_size=8)))
@settings(max_examples=50)
def test_the_stock_parser_takes_any_layout(given_entries):
    found = load_numpy(_numpy_only(plan_layout(given_entries)))
    assert len(found) >= len(given_entries)


def _numpy_only(layout: ObjectLayout) -> bytes:
    """The layout's file, with codes that numpy has no dtype for spelt as equally wide ones that it has."""
    header = json.loads(layout.header[LENGTH_BYTES:])
    for key, item in header.items():
        if key != "__metadata__":
            item["dtype"] = {"BF16": "I16", "F8_E4M3": "U8", "F8_E5M2": "U8"}.get(
                item["dtype"], item["dtype"]
            )
    text = json.dumps(header, ensure_ascii=False).encode()
    return struct.pack("<Q", len(text)) + text + bytes(layout.nbytes - layout.header_bytes)


# ---- our parser -----------------------------------------------------------------------------------


@given(entries())
def test_our_parser_gives_back_what_the_layout_says(given_entries):
    layout = plan_layout(given_entries)
    tensors, metadata = parse(file_of(layout))
    by_key = {tensor.key: tensor for tensor in tensors}
    assert len(by_key) == len(tensors)
    for entry, begin, end, key in zip(layout.entries, layout.begins, layout.ends, layout.keys, strict=True):
        tensor = by_key.pop(key)
        assert (tensor.begin + layout.header_bytes, tensor.end + layout.header_bytes) == (begin, end)
        assert tensor.saved_offsets[: len(entry.shape)] == entry.origin
        assert tensor.shape[: len(entry.shape)] == entry.shape
    assert all(key.startswith(PAD_PREFIX) for key in by_key)
    assert metadata["format"] == "pt"
    assert set(json.loads(metadata[SHARDING_KEY])) == {tensor.key for tensor in tensors}


@given(st.data())
@settings(max_examples=200)
def test_a_mutated_header_is_sound_or_a_corrupt_object(data):
    layout = plan_layout(
        [Entry("a", "float32", (3, 5)), Entry("b", "bfloat16", (4,), (4,), (16,)), Entry("c", "bool", ())]
    )
    text = layout.header[LENGTH_BYTES:].rstrip(b" ")
    data_bytes = layout.nbytes - layout.header_bytes
    try:
        tensors, _ = parse_header(data.draw(mutated(text)), data_bytes)
    except CorruptObjectError:
        return
    position = 0
    for tensor in tensors:
        assert tensor.begin == position <= tensor.end
        position = tensor.end
    assert position == data_bytes


@given(st.binary(max_size=64), st.integers(0, 2**70))
def test_random_bytes_are_no_header(prefix, size):
    with contextlib.suppress(CorruptObjectError):
        assert 0 <= header_length(prefix, size) <= min(size, HEADER_BYTES_MAX)


def _header(**tensors) -> bytes:
    return json.dumps(tensors).encode()


def _tensor(begin, end, shape=None, dtype="U8"):
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"\xff\xfe{}",
        b'{"a":' * 50_000,
        _header(a=_tensor(0, 4)),  # a tail that no tensor names
        _header(a=_tensor(0, 12)),  # beyond the data
        _header(a=_tensor(0, 4), b=_tensor(6, 10)),  # a hole
        _header(a=_tensor(0, 6), b=_tensor(4, 10)),  # an overlap
        _header(a=_tensor(1, 10)),
        _header(a=_tensor(-1, 10)),
        _header(a=_tensor(0, 10, [11])),
        _header(a=_tensor(0, 10, [-2, -5])),
        _header(a=_tensor(0, 10, [10**40, 10**40])),
        _header(a=_tensor(0, 10, [5], "F64")),
        _header(a=_tensor(0, 10, [10], "U9")),
        _header(a=_tensor(0, 10, [10.0])),
        _header(a={"dtype": "U8", "shape": [10]}),
        _header(a={"dtype": "U8", "shape": [10], "data_offsets": [0, 10, 20]}),
        _header(a=_tensor(0, 10), __metadata__={"n": 1}),
        _header(a=_tensor(0, 10), __metadata__=[]),
        _header(a=_tensor(0, 10), __metadata__={SHARDING_KEY: "nonsense"}),
        _header(a=_tensor(0, 10), __metadata__={SHARDING_KEY: '{"a": {"saved_offsets": ["0"]}}'}),
    ],
)
def test_a_header_that_breaks_a_rule_is_a_corrupt_object(text):
    with pytest.raises(CorruptObjectError):
        parse_header(text, 10)


def test_headers_of_other_writers_are_read_too():
    tensors, metadata = parse_header(_header(b=_tensor(4, 10), a=_tensor(0, 4)), 10)
    assert [tensor.key for tensor in tensors] == ["a", "b"]
    assert metadata == {}
    assert tensors[0].saved_offsets == (0,)


@pytest.mark.parametrize("length", [-1, 93, 2**63, HEADER_BYTES_MAX + 1])
def test_a_header_longer_than_its_file_is_refused_before_it_is_read(length):
    with pytest.raises(CorruptObjectError, match="claims"):
        header_length(struct.pack("<q" if length < 0 else "<Q", length), 100)
    with pytest.raises(CorruptObjectError, match="7 bytes long"):
        header_length(b"1234567", 7)


def test_a_header_that_does_not_fit_is_never_cut():
    with pytest.raises(ValueError, match="does not fit"):
        encode_header([], 16)


def test_a_blob_is_read_back_bit_for_bit(tmp_path):
    array = np.arange(12, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(3, 4)
    layout = plan_layout([Entry("x", "bfloat16", array.shape)])
    blob = bytearray(file_of(layout))
    blob[layout.begins[0] : layout.ends[0]] = array.tobytes()
    path = tmp_path / "x.safetensors"
    path.write_bytes(blob)
    with safe_open(path, framework="pt") as file:
        tensor = file.get_tensor("x")
    assert tensor.dtype == torch.bfloat16
    assert tensor.view(torch.int16).numpy().tobytes() == array.tobytes()
