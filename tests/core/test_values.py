import collections
import contextlib
import enum
import json
import math
import struct

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint.values import (
    ARRAY_BYTES_MAX,
    DEPTH_MAX,
    NotPlainDataError,
    decode,
    encode,
    from_json,
    to_json,
)
from tests.core.strategies import mutated

TEXT = st.text(st.characters(codec="utf-8"), max_size=6) | st.sampled_from(
    ["$tuple", "$dict", "$", "$int", ""]
)
HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(2**70), 2**70) | st.floats() | TEXT
    | st.binary(max_size=5) | st.complex_numbers(),
    lambda inner: st.tuples(inner) | st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
VALUES = st.recursive(
    HASHABLE | st.sets(HASHABLE, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.dictionaries(TEXT, inner, max_size=3)
    ),
    max_leaves=12,
)


def exactly(value):
    """A form of a value that is equal only for values of exactly the same types and bits."""
    kind = type(value)
    if kind is float:
        return kind, "nan" if math.isnan(value) else struct.pack("<d", value)
    if kind is complex:
        return kind, exactly(value.real), exactly(value.imag)
    if kind is dict:
        return kind, [(exactly(key), exactly(item)) for key, item in value.items()]  # the order counts
    if kind in (list, tuple):
        return kind, [exactly(item) for item in value]
    if kind in (set, frozenset):
        return kind, sorted(map(repr, map(exactly, value)))
    if kind is np.ndarray or isinstance(value, np.generic):
        return kind, value.dtype, value.shape, value.tobytes()
    return kind, value


@given(VALUES)
@settings(max_examples=100)
def test_what_comes_back_is_exactly_what_went_in(value):
    assert exactly(decode(encode(value))) == exactly(value)


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**100,
        0.0, -0.0, 1.0, 1e22, 0.1, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan,
        complex(-0.0, math.nan), 1e300j, b"", b"\0\xff", "", "\0", "🙂", [], (), {}, set(), frozenset(),
        [()], ({},), {(): []}, {1: 1, "1": 1, None: 1},
        {"$tuple": [1]}, {"$tuple": 1, "b": 2}, {"a": {"$x": {"$y": 1}}}, {1: {2: {3: (4, [5, {6}])}}},
        {(1, 2): "t", b"k": "b", 1.5: "f", frozenset({1}): "s"}, {"b": 1, "a": 2}, [True, 1, 1.0],
    ],
    ids=repr,
)  # fmt: skip
def test_the_corners_come_back_too(value):
    data = encode(value)
    json.loads(data)  # plain JSON for any reader
    assert exactly(decode(data)) == exactly(value)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float64", "complex128"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3)])
def test_small_numpy_values_come_back_with_dtype_and_shape(dtype, shape):
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    back = decode(encode(array))
    assert exactly(back) == exactly(array)
    assert back.flags.writeable
    scalar = np.dtype(dtype).type(1)
    assert exactly(decode(encode(scalar))) == exactly(scalar)


def test_a_random_generators_state_is_plain_data():
    generator = np.random.default_rng(3)
    legacy = np.random.RandomState(3)
    state, legacy_state = decode(encode((generator.bit_generator.state, legacy.get_state())))
    other, other_legacy = np.random.default_rng(), np.random.RandomState()
    other.bit_generator.state = state
    other_legacy.set_state(legacy_state)
    assert other.random() == generator.random()
    assert other_legacy.rand() == legacy.rand()


def test_an_array_in_foreign_layout_keeps_its_values():
    array = np.arange(6, dtype="<i4").reshape(2, 3).T
    np.testing.assert_array_equal(decode(encode(array)), array)


def test_equal_sets_have_equal_bytes():
    assert encode({"x", "y", "z", 1, (2, 3)}) == encode({(2, 3), 1, "z", "y", "x"})


# ---- what is refused ------------------------------------------------------------------------------


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    pass


class Whole(int):
    pass


class Record(collections.namedtuple("Record", "x")):
    pass


@pytest.mark.parametrize(
    "value",
    [
        object(), Colour.RED, Text("x"), Whole(1), Record(1), collections.OrderedDict(a=1),
        collections.defaultdict(int), collections.Counter("aa"), bytearray(b"x"), memoryview(b"x"),
        range(3), print, int, iter([]), Exception("x"), np.datetime64("2020-01-01"), np.str_("x"),
        np.array([object()]), np.array(["x"]), np.zeros(2, "i4,i4"),
        np.zeros(ARRAY_BYTES_MAX + 1, np.uint8), np.ma.array([1]), ml_dtypes.bfloat16(1),
        np.zeros(2, ml_dtypes.float8_e4m3fn), np.zeros(2, ">f8"), np.longdouble(1),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
@pytest.mark.parametrize(
    "wrap", [lambda v: v, lambda v: [{"a": (v,)}], lambda v: {1: v}], ids=["bare", "nested", "dict"]
)
def test_what_means_more_than_its_contents_is_refused(value, wrap):
    with pytest.raises(NotPlainDataError):
        encode(wrap(value))


@pytest.mark.parametrize("key", [Colour.RED, Text("x"), np.str_("x")], ids=repr)
def test_keys_are_as_strict_as_values(key):
    with pytest.raises(NotPlainDataError):
        encode({key: 1})


@pytest.mark.parametrize("value", ["\ud800", {"\ud800": 1}, ["a", ("\udfff",)]])
def test_text_that_utf8_cannot_say_is_refused(value):
    with pytest.raises(NotPlainDataError, match="surrogate"):
        encode(value)


def test_a_cycle_is_refused_and_not_followed_for_ever():
    cycle: list = []
    cycle.append(cycle)
    with pytest.raises(NotPlainDataError, match="nested"):
        encode(cycle)
    tangle: dict = {}
    tangle["a"] = tangle["b"] = (tangle,)
    with pytest.raises(NotPlainDataError, match="nested"):
        encode(tangle)


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {1: v}, lambda v: {"a": v}])
def test_nesting_has_a_bound_and_works_up_to_it(wrap):
    value: object = "leaf"
    for _ in range(DEPTH_MAX):
        value = wrap(value)
    assert exactly(decode(encode(value))) == exactly(value)
    with pytest.raises(NotPlainDataError, match="nested"):
        encode(wrap(value))


# ---- decoding what may come from anywhere ---------------------------------------------------------

SAMPLE = encode(
    {
        "t": (1, [2.5, math.nan]),
        "d": {1: b"x"},
        "s": {1, 2},
        "a": np.arange(3),
        "i": 2**80,
        "c": 1j,
        "f": frozenset("a"),
    }
)


@given(st.data())
@settings(max_examples=200)
def test_mutated_json_is_a_value_or_a_value_error(data):
    with contextlib.suppress(ValueError):
        decode(data.draw(mutated(SAMPLE)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nope",
        b"[" * 100_000,
        b'{"$set":[[1]]}',  # unhashable
        b'{"$set":[{"$set":[1]}]}',
        b'{"$frozenset":[{}]}',
        b'{"$dict":[1]}',
        b'{"$dict":[[1,2,3]]}',
        b'{"$dict":[[[],2]]}',
        b'{"$int":"x"}',
        b'{"$int":3}',
        b'{"$float":"x"}',
        b'{"$complex":["1"]}',
        b'{"$complex":[null,{}]}',
        b'{"$complex":["1","2","3"]}',
        b'{"$bytes":"#"}',
        b'{"$bytes":"YQ"}',
        b'{"$tuple":{}}',
        b'{"$unknown":1}',
        b'{"$":1}',
        b'{"$ndarray":["float64",[2],""]}',
        b'{"$ndarray":["float64",[2]]}',
        b'{"$ndarray":["object",[1],"AAAAAAAAAAA="]}',
        b'{"$ndarray":["V8",[1],"AAAAAAAAAAA="]}',
        b'{"$ndarray":["f8,f8",[1],"AAAAAAAAAAA="]}',
        b'{"$ndarray":["(2,)f4",[1],"AAAAAAAAAAA="]}',
        b'{"$ndarray":[null,[1],"AAAAAAAAAAA="]}',
        b'{"$ndarray":["float64",[-1],"AAAAAAAAAAA="]}',
        b'{"$ndarray":["float64",1,"AAAAAAAAAAA="]}',
        b'{"$ndarray":["float64",["1"],"AAAAAAAAAAA="]}',
        b'{"$ndarray":["float64",[1000000000000000000000000],"AAAAAAAAAAA="]}',
        b'{"$scalar":["float64",[1],"AAAAAAAAAAA="]}',
    ],
)
def test_what_encode_never_writes_is_a_value_error(data):
    with pytest.raises(ValueError):
        decode(data)


def test_deep_json_is_a_value_error_and_no_crash():
    value: object = 1
    for _ in range(5000):
        value = [value]
    with pytest.raises(ValueError):
        from_json(value)


def test_json_of_a_value_passes_through_message_pack_too():
    value = {"t": (1, 2.5), "n": np.float32(0.1), "i": 2**80}
    carried = msgspec.msgpack.decode(msgspec.msgpack.encode(to_json(value)))
    assert exactly(from_json(carried)) == exactly(value)
