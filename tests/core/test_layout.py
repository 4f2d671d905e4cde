import json

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint.dtypes import DTYPES
from flashpoint.errors import FlashpointError, LayoutError
from flashpoint.layout import (
    ENTRY_ALIGN_BYTES,
    LARGE_ENTRY_BYTES,
    NDIM_MAX,
    PAGE_BYTES,
    Entry,
    decode_layout,
    plan_layout,
)
from flashpoint.safetensors_blob import LENGTH_BYTES
from tests.core.strategies import entries, mutated

SMALL = plan_layout(
    [
        Entry("a", "float32", (3, 5)),
        Entry("b", "bfloat16", (4,), (4,), (16,), ("b", 1)),
        Entry("c", "bool", ()),
    ]
)


# ---- where entries lie --------------------------------------------------------------------------


@given(entries())
def test_entries_are_aligned_disjoint_and_inside_the_file(given_entries):
    layout = plan_layout(given_entries)
    assert layout.nbytes % PAGE_BYTES == 0
    assert layout.header_bytes % PAGE_BYTES == 0
    assert len(layout.header) == layout.header_bytes
    position = layout.header_bytes
    for begin, end in sorted(zip(layout.begins, layout.ends, strict=True)):
        assert begin >= position
        assert begin % ENTRY_ALIGN_BYTES == 0
        position = end
    assert position <= layout.nbytes


@given(entries())
def test_header_entries_and_gaps_make_up_the_file(given_entries):
    layout = plan_layout(given_entries)
    spans = [span for span in zip(layout.begins, layout.ends, strict=True) if span[0] < span[1]]
    spans += [(0, layout.header_bytes), *layout.gaps]
    edges = [edge for span in sorted(spans) for edge in span]
    assert edges[0] == 0
    assert edges[-1] == layout.nbytes
    assert edges[1:-1:2] == edges[2::2]
    assert all(begin < end for begin, end in spans)


@given(entries())
def test_the_same_entries_always_give_the_same_digest(given_entries):
    one, other = plan_layout(given_entries), plan_layout(list(given_entries))
    assert one == other
    assert one.digest == other.digest


@given(entries())
def test_a_layout_decodes_to_what_was_encoded(given_entries):
    layout = plan_layout(given_entries)
    decoded = decode_layout(layout.encoded)
    assert decoded == layout
    assert decoded.digest == layout.digest
    assert decoded.header == layout.header


@given(entries(), st.randoms())
def test_any_difference_between_entries_is_a_difference_of_digests(given_entries, random):
    layout = plan_layout(given_entries)
    changed = list(given_entries)
    if changed:
        i = random.randrange(len(changed))
        changed[i] = msgspec.structs.replace(changed[i], codec=changed[i].codec + "x")
    else:
        changed = [Entry("new", "uint8", ())]
    assert plan_layout(changed).digest != layout.digest


def test_large_entries_begin_on_pages():
    small = [Entry(f"s{i}", "uint8", (i * 7 + 1,)) for i in range(9)]
    large = [Entry(f"l{i}", "uint8", (LARGE_ENTRY_BYTES + i * 13,)) for i in range(5)]
    layout = plan_layout([*small, *large])
    assert all(begin % PAGE_BYTES == 0 for begin in layout.begins[len(small) :])


def test_tensors_of_usual_sizes_leave_few_holes():
    # What a pad costs is a key in the header, so a model of ordinary shapes should need next to none.
    shapes = [(1000, 768), (768, 3072), (3072,), (768,), (), (50257, 768), (12,)] * 20
    layout = plan_layout(Entry(f"p{i}", "bfloat16", shape) for i, shape in enumerate(shapes))
    pads = [key for key in json.loads(layout.header[LENGTH_BYTES:]) if key.startswith("__pad__.")]
    assert len(pads) <= 3 * 20  # the scalars and odd vectors
    used = sum(entry.nbytes for entry in layout.entries)
    large_and_ragged = sum(shape == (50257, 768) for shape in shapes)
    assert layout.nbytes - layout.header_bytes - used < PAGE_BYTES * (large_and_ragged + 3)


def test_an_object_may_be_empty():
    layout = plan_layout([])
    assert layout.nbytes == layout.header_bytes == PAGE_BYTES
    assert decode_layout(layout.encoded) == layout


def test_scalars_and_empty_tensors_have_places_too():
    layout = plan_layout(
        [Entry("scalar", "float64", ()), Entry("empty", "float64", (0, 7)), Entry("x", "int8", (1,))]
    )
    sizes = [end - begin for begin, end in zip(layout.begins, layout.ends, strict=True)]
    assert sizes == [8, 0, 1]


# ---- dtypes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_of_the_table_can_be_laid_out(name):
    layout = plan_layout([Entry("x", name, (3, 5))])
    row = DTYPES[name]
    tensor = json.loads(layout.header[LENGTH_BYTES:])["x"]
    assert layout.ends[0] - layout.begins[0] == 15 * row.itemsize
    if row.code is None:  # as bytes, with one more dimension
        assert (tensor["dtype"], tensor["shape"]) == ("U8", [3, 5, row.itemsize])
    else:
        assert (tensor["dtype"], tensor["shape"]) == (row.code, [3, 5])


def test_a_dtype_without_a_code_keeps_its_offsets_in_the_sharding_info():
    layout = plan_layout([Entry("x", "complex128", (2, 3), (4, 0), (6, 3))])
    sharding = json.loads(json.loads(layout.header[LENGTH_BYTES:])["__metadata__"]["DCP_SHARDING_INFO"])
    assert sharding["x"] == {"saved_offsets": [4, 0, 0]}


def test_an_unknown_dtype_is_refused_by_name():
    with pytest.raises(LayoutError, match="float33"):
        plan_layout([Entry("x", "float33", (1,))])


# ---- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "",
        "n" * 4000,
        "a/b/../c",
        "/",
        "line\nbreak",
        '"quoted"\\',
        "権重.ß.é.🙂",
        "__metadata__",
        "__pad__.0",
        "\0",
        "\x7f",
    ],
)
def test_any_text_is_a_name(name):
    layout = plan_layout([Entry(name, "int16", (2,)), Entry("other", "uint8", (1,))])
    assert decode_layout(layout.encoded).entries[0].name == name
    assert len(set(layout.keys)) == 2
    assert "__metadata__" not in layout.keys


@pytest.mark.parametrize("field", ["name", "path", "codec"])
def test_a_lone_surrogate_is_refused_wherever_it_stands(field):
    text = "w\ud800"
    entry = Entry("x", "uint8", (1,))
    entry = msgspec.structs.replace(entry, **{field: (text,) if field == "path" else text})
    with pytest.raises(LayoutError, match="surrogate"):
        plan_layout([entry])


@pytest.mark.parametrize(
    "twice",
    [
        [Entry("a", "uint8", (1,)), Entry("a", "uint8", (1,))],
        [Entry("a", "uint8", ()), Entry("a", "int8", ())],
        [Entry("a", "uint8", (4,)), Entry("a", "uint8", (8,))],
        [
            Entry("a", "uint8", (4,), (4,), (16,)),
            Entry("b", "uint8", ()),
            Entry("a", "uint8", (4,), (4,), (16,)),
        ],
    ],
)
def test_the_same_shard_twice_is_refused_by_name(twice):
    with pytest.raises(LayoutError, match="'a'"):
        plan_layout(twice)


def test_shards_of_one_name_get_keys_of_their_own_whatever_other_names_there_are():
    shards = [Entry("a", "uint8", (4,), (4 * i,), (16,)) for i in range(4)]
    names = [Entry(name, "uint8", (1,)) for name in ("a@4", "a@4@0", "a@8", "a@", "a@0")]
    for order in ([*shards, *names], [*names, *shards], [*reversed(names), *reversed(shards)]):
        layout = plan_layout(order)
        assert len(set(layout.keys)) == len(order)


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    [
        Entry("x", "uint8", (-1,)),
        Entry("x", "uint8", (4,), (1,), (4,)),  # leaves the global array
        Entry("x", "uint8", (4,), (-1,), (8,)),
        Entry("x", "uint8", (4,), (0, 0), (8, 8)),
        Entry("x", "uint8", (4, 4), (), (16,)),
        Entry("x", "uint8", (4,), (5,)),  # an offset, but no global shape to be at
        Entry("x", "uint8", (1,) * (NDIM_MAX + 1)),
        Entry("x", "uint8", (2**63,)),
        Entry("x", "float64", (2**61,)),
        Entry("x", "uint8", (2**62, 0, 2**62)),  # empty, but no array library can say so
        Entry("x", "uint8", (True,)),
        Entry("x", "uint8", (np.int64(3),)),
        Entry("x", "uint8", (3.0,)),
        Entry("x", "uint8", (3,), (np.int64(0),), (3,)),
        Entry("x", "uint8", (3,), path=(1.5,)),
        Entry("x", "uint8", (3,), path=(True,)),
        Entry("x", "uint8", (3,), path=(None,)),
        Entry(3, "uint8", (3,)),
        Entry(np.str_("x"), "uint8", (3,)),
    ],
)
def test_entries_that_make_no_sense_are_refused(entry):
    with pytest.raises(LayoutError):
        plan_layout([entry])


def test_a_header_over_the_formats_limit_is_refused():
    with pytest.raises(LayoutError, match="header"):
        plan_layout([Entry("n" * 9000, "uint8", (1,))], header_bytes_max=2 * PAGE_BYTES)


# ---- decoding what may come from anywhere -------------------------------------------------------


@given(st.data())
@settings(max_examples=200)
def test_a_mutated_line_is_a_sound_layout_or_a_layout_error(data):
    line = data.draw(mutated(SMALL.encoded))
    try:
        layout = decode_layout(line)
    except LayoutError:
        return
    position = layout.header_bytes
    for begin, end in sorted(zip(layout.begins, layout.ends, strict=True)):
        assert position <= begin <= end <= layout.nbytes
        position = end


@given(st.binary(max_size=200))
def test_random_bytes_are_a_layout_error(line):
    with pytest.raises(LayoutError):
        decode_layout(line)


def _broken(**fields) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(SMALL, **fields))


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"{}",
        b"[" * 100_000,
        b'{"entries":[],"begins":[],"keys":[],"header_bytes":0,"nbytes":0}',
        b'{"entries":[],"begins":[],"keys":[],"header_bytes":-8,"nbytes":-1}',
        b'{"entries":[],"begins":[],"keys":[],"header_bytes":4096,"nbytes":100}',
        _broken(begins=SMALL.begins[:-1]),
        _broken(keys=SMALL.keys[:-1]),
        _broken(keys=("k",) * 3),
        _broken(begins=(SMALL.begins[0],) * 3),
        _broken(begins=(0, *SMALL.begins[1:])),  # in the header
        _broken(begins=(-64, *SMALL.begins[1:])),
        _broken(nbytes=max(SMALL.ends) - 1),
        _broken(nbytes=2**70, begins=(2**64, *SMALL.begins[1:])),
        _broken(entries=(Entry("a", "uint8", (10**18,) * 60), *SMALL.entries[1:])),
    ],
)
def test_layouts_that_contradict_themselves_are_refused(line):
    with pytest.raises(LayoutError):
        decode_layout(line)


@pytest.mark.parametrize(
    "entry",
    [
        Entry("x", "uint8", (-1,)),
        Entry("x", "uint8", (1, -1), (0, 0), (4, 4)),
        Entry("x", "uint8", (4,), (1,), (4,)),
        Entry("x", "uint8", (4,), (-1,), (8,)),
        Entry("x", "uint8", (4,), (0, 0), (8, 8)),
        Entry("x", "uint8", (4, 4), (), (16,)),
        Entry("x", "uint8", (4,), (5,)),
        Entry("x", "uint8", (4,), (), (3,)),
        Entry("x", "uint8", (1,) * (NDIM_MAX + 1)),
        Entry("x", "float64", (2**61,)),
        Entry("x", "uint8", (2**62, 0, 2**62)),
        Entry("x", "float33", (1,)),
        Entry("x", "uint8", (True,)),
        Entry("x", "uint8", (3.0,)),
        Entry("x", "uint8", (3,), path=(None,)),
        Entry(3, "uint8", (3,)),
    ],
)
def test_an_entry_that_makes_no_sense_is_refused_however_it_is_written(entry):
    with pytest.raises(LayoutError):
        decode_layout(_broken(entries=(entry, *SMALL.entries[1:])))


@pytest.mark.parametrize("text", [rb"\ud800", rb"\udc00", b"\xed\xa0\x80", b"\xff"])
def test_a_written_name_without_a_utf_8_form_is_refused(text):
    line = SMALL.encoded.replace(b'"name":"a"', b'"name":"' + text + b'"')
    assert line != SMALL.encoded
    with pytest.raises(LayoutError):
        decode_layout(line)


def test_a_layout_error_is_ours_and_a_value_error():
    assert issubclass(LayoutError, FlashpointError)
    assert issubclass(LayoutError, ValueError)


def test_an_entry_knows_its_whole_and_its_origin():
    shard = Entry("x", "float32", (2, 3), (4, 0), (6, 3), ("opt", 0, "x"))
    assert (shard.nbytes, shard.is_whole, shard.whole_shape, shard.origin) == (24, False, (6, 3), (4, 0))
    assert shard.tree_path == ("opt", 0, "x")
    whole = Entry("x", "float32", (2, 3))
    assert (whole.is_whole, whole.whole_shape, whole.origin, whole.tree_path) == (
        True,
        (2, 3),
        (0, 0),
        ("x",),
    )
    assert Entry("x", "float32", ()).is_whole


def test_an_object_may_have_many_entries():
    count = 20_000
    layout = plan_layout(Entry(f"layers.{i}.weight", "float32", (i % 50 + 1,)) for i in range(count))
    assert sum(entry.nbytes for entry in layout.entries) == sum(4 * (i % 50 + 1) for i in range(count))
    assert len(set(layout.begins)) == count
