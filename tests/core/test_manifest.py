import contextlib
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint import manifest as manifests
from flashpoint.errors import ManifestError
from flashpoint.layout import Entry, plan_layout
from flashpoint.manifest import (
    FORMAT,
    MANIFEST_BYTES_MAX,
    VERSION,
    CommitRecord,
    ObjectRecord,
    Section,
    Value,
    decode,
    encode,
    encode_values,
    plain_value,
    section_digest,
)
from flashpoint.recovery import values_source
from flashpoint.values import to_json
from tests.core.strategies import mutated

CHUNK = 4096
LAYOUT = plan_layout([Entry("w", "float32", (4, 4)), Entry("b", "bfloat16", (4,))])
VALUES = encode_values([Value("step", 3), Value("names", to_json({"a": (1, 2)}), ("names",))])
LINES = {LAYOUT.digest: LAYOUT.encoded, section_digest(VALUES): VALUES}


def record_of(name="rank00000-0.safetensors", of=LAYOUT, **changes) -> ObjectRecord:
    chunks = bytes(range(256))[: 8 * (of.nbytes // CHUNK)]
    return msgspec.structs.replace(ObjectRecord(name, of.nbytes, of.digest, CHUNK, chunks), **changes)


def commit(*objects: ObjectRecord, **changes) -> CommitRecord:
    given_fields = {"step": 100, "epoch": 2, "world_size": max(len(objects), 1), **changes}
    return CommitRecord(format=FORMAT, version=VERSION, objects=objects, **given_fields)


SMALL = encode(commit(record_of(), values=(section_digest(VALUES),)), LINES)


def sealed(head: bytes, *lines: bytes) -> bytes:
    """A manifest file of any first line and sections, with a trailer that fits."""
    body = b"".join(line + b"\n" for line in (head, *lines))
    return body + section_digest(body).encode() + b"\n"


def with_sections(record: CommitRecord, *lines: bytes) -> bytes:
    """A manifest whose record names exactly these sections, whether it refers to them or not."""
    sections = tuple(Section(section_digest(line), len(line)) for line in lines)
    return sealed(msgspec.json.encode(msgspec.structs.replace(record, sections=sections)), *lines)


# ---- round trip -----------------------------------------------------------------------------------


def test_a_manifest_decodes_to_what_was_encoded():
    second = plan_layout([Entry("w", "float32", (4, 4)), Entry("c", "int8", (7,))])
    record = commit(
        record_of(),
        record_of("rank00001-0.safetensors", second),
        values=(section_digest(VALUES), ""),
        writer="tests",
        created_unix_s=1.5,
    )
    data = encode(record, {**LINES, second.digest: second.encoded})
    manifest = decode(data)
    sections = manifest.record.sections
    assert msgspec.structs.replace(manifest.record, sections=()) == record
    assert [section.nbytes for section in sections] == [len(manifest.sections[s.digest]) for s in sections]
    assert (manifest.step, manifest.objects) == (100, record.objects)
    assert manifest.nbytes == LAYOUT.nbytes + second.nbytes
    assert manifest.layout(record.objects[1]) == second
    assert {name: len(found) for name, found in manifest.by_name.items()} == {"w": 2, "b": 1, "c": 1}
    assert manifest.values_of(0)["step"].value == 3
    assert plain_value(manifest.values_of(0)["names"]) == {"a": (1, 2)}
    assert manifest.values_of(1) == manifest.values_of(7) == {}
    assert encode(manifest.record, manifest.sections) == data


def test_a_manifest_is_lines_of_text_that_any_tool_reads():
    head, *sections, trailer, end = SMALL.split(b"\n")
    assert json.loads(head)["step"] == 100
    assert [json.loads(section) for section in sections]
    assert (len(trailer), end) == (32, b"")


def test_ranks_with_equal_values_and_layouts_share_one_section():
    names = [f"rank{rank:05d}-0.safetensors" for rank in range(64)]
    shared = tuple(section_digest(VALUES) for _ in names)
    data = encode(commit(*(record_of(name) for name in names), values=shared), LINES)
    assert data.count(LAYOUT.encoded) == data.count(VALUES) == 1
    manifest = decode(data)
    assert all(manifest.values_of(rank)["step"].value == 3 for rank in range(64))


def test_values_shared_by_ranks_are_decoded_once_however_often_they_are_asked_for(monkeypatch):
    names = [f"rank{rank:05d}-0.safetensors" for rank in range(64)]
    shared = tuple(section_digest(VALUES) for _ in names)
    manifest = decode(encode(commit(*(record_of(name) for name in names), values=shared), LINES))
    calls = []
    real = manifests.decode_values
    monkeypatch.setattr(manifests, "decode_values", lambda data: calls.append(1) or real(data))
    for rank in range(64):
        assert values_source(manifest, rank) == {"step": rank, "names": rank}
    assert len(calls) == 1


def test_a_version_may_have_no_objects_at_all():
    assert decode(encode(commit(), {})).objects == ()


# ---- damage ---------------------------------------------------------------------------------------


def test_every_single_flipped_bit_is_noticed():
    for position in range(len(SMALL)):
        for bit in range(8):
            broken = bytearray(SMALL)
            broken[position] ^= 1 << bit
            with pytest.raises(ManifestError):
                decode(bytes(broken))


def test_every_truncation_is_noticed():
    for length in range(len(SMALL)):
        with pytest.raises(ManifestError):
            decode(SMALL[:length])
        with pytest.raises(ManifestError):
            decode(SMALL[length + 1 :])


def test_anything_appended_is_noticed():
    for tail in (b"\0", b"\n", SMALL, b"x" * 33):
        with pytest.raises(ManifestError):
            decode(SMALL + tail)


@given(st.data())
@settings(max_examples=200)
def test_a_mutated_body_under_a_fitting_checksum_is_sound_or_a_manifest_error(data):
    body = data.draw(mutated(SMALL[:-33]))
    try:
        manifest = decode(body + section_digest(body).encode() + b"\n")
    except ManifestError:
        return
    for record in manifest.objects:
        assert manifest.layout(record).nbytes == record.nbytes
    for rank in range(min(manifest.record.world_size, 4)):
        with contextlib.suppress(ManifestError):
            manifest.values_of(rank)


def test_a_size_over_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(manifests, "MANIFEST_BYTES_MAX", len(SMALL) - 1)
    with pytest.raises(ManifestError, match="over the limit"):
        decode(SMALL)
    assert MANIFEST_BYTES_MAX >= 1 << 30


# ---- versions and other files ---------------------------------------------------------------------


def test_a_newer_format_says_which_release_is_wanted():
    head = json.loads(SMALL.split(b"\n")[0]) | {"version": VERSION + 1, "objects": "of a shape not known yet"}
    with pytest.raises(ManifestError, match=rf"version {VERSION + 1}.*reads version {VERSION}.*newer"):
        decode(sealed(json.dumps(head).encode()))


@pytest.mark.parametrize(
    "head", [b"{}", b"[]", b"", b"\x80\x04pickle", b'{"format":"other","version":1}', b"[" * 9999]
)
def test_other_files_are_called_what_they_are_not(head):
    with pytest.raises(ManifestError, match="not a Flashpoint manifest"):
        decode(sealed(head))


# ---- contradictions -------------------------------------------------------------------------------

OTHER = plan_layout([Entry("x", "uint8", (5000,))])


@pytest.mark.parametrize(
    "record",
    [
        commit(record_of(), record_of()),  # the same name twice
        commit(record_of("rank00001-0.safetensors")),  # a rank outside the world
        commit(record_of("../../etc/passwd")),
        commit(record_of("rank00000-0.safetensors/..")),
        commit(record_of(".metadata")),
        commit(record_of(nbytes=LAYOUT.nbytes + CHUNK)),
        commit(record_of(nbytes=LAYOUT.nbytes + CHUNK, chunks=bytes(8 * (LAYOUT.nbytes // CHUNK + 1)))),
        commit(record_of(nbytes=-1, chunks=b"")),
        commit(record_of(nbytes=0, chunks=b"")),
        commit(record_of(chunks=b"")),
        commit(record_of(chunks=record_of().chunks[:-1])),
        commit(record_of(chunk_bytes=0)),
        commit(record_of(chunk_bytes=-CHUNK)),
        commit(record_of(layout=OTHER.digest)),  # a layout that is there, of another object
        commit(record_of(layout=section_digest(VALUES))),  # a section that is no layout
        commit(record_of(layout="0" * 32)),
        commit(record_of(), step=-1),
        commit(record_of(), epoch=-1),
        commit(record_of(), world_size=0),
        commit(record_of(), world_size=2**40),
        commit(record_of(), values=("0" * 32,)),
        commit(record_of(), values=(section_digest(VALUES),) * 2),  # for two ranks in a world of one
    ],
)
def test_a_record_that_contradicts_itself_is_refused(record):
    with pytest.raises(ManifestError):
        decode(with_sections(record, LAYOUT.encoded, VALUES, OTHER.encoded))


def test_sections_must_fit_what_the_record_says_of_them():
    record = commit(record_of())
    good = with_sections(record, LAYOUT.encoded)
    assert decode(good).objects
    head, *lines = good[:-33].rstrip(b"\n").split(b"\n")
    for broken in ([head], [head, *lines, b"extra"], [head, lines[0] + b"x"], [head, lines[0][:-1]]):
        with pytest.raises(ManifestError):
            decode(sealed(*broken))
    for nbytes in (-1, 0, len(LAYOUT.encoded) - 1, 2**62, 2**80):
        changed = msgspec.structs.replace(record, sections=(Section(LAYOUT.digest, nbytes),))
        with pytest.raises(ManifestError):
            decode(sealed(msgspec.json.encode(changed), LAYOUT.encoded))


def test_a_section_under_a_false_digest_is_refused():
    other = plan_layout([Entry("w", "float32", (4, 5)), Entry("b", "bfloat16", (4,))])
    assert other.nbytes == LAYOUT.nbytes
    never_seen = "ab" * 16
    sections = (Section(never_seen, len(other.encoded)),)
    record = msgspec.structs.replace(commit(record_of(layout=never_seen)), sections=sections)
    with pytest.raises(ManifestError, match="not the one its commit record names"):
        decode(sealed(msgspec.json.encode(record), other.encoded))


def test_garbled_plain_values_are_a_manifest_error_when_they_are_wanted():
    line = b'[{"name":1}]'
    manifest = decode(
        with_sections(commit(record_of(), values=(section_digest(line),)), LAYOUT.encoded, line)
    )
    with pytest.raises(ManifestError, match="plain values"):
        manifest.values_of(0)
    deep: object = 1
    for _ in range(900):
        deep = [deep]
    for garbage in ({"$set": [[1]]}, {"$unknown": 1}, {"$bytes": "#"}, deep):
        with pytest.raises(ManifestError, match="'v'"):
            plain_value(Value("v", garbage))
