"""Every parser of the core that reads bytes from outside, against anything (`tests.fuzz`)."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import xxhash

from flashpoint import manifest as manifests
from flashpoint import safetensors_blob as blob
from flashpoint.errors import (
    CorruptObjectError,
    InvalidIdError,
    LayoutError,
    ManifestError,
    ProtocolError,
    StorageError,
)
from flashpoint.ids import CheckpointContainerId, CheckpointObjectId, parse_container_name, validate_job_root
from flashpoint.layout import Entry, decode_layout, plan_layout
from flashpoint.manifest import FORMAT, VERSION, CommitRecord, ObjectRecord, Value, encode_values
from flashpoint.markers import parse_marker_name
from flashpoint.objects import EPOCH_NAME, CheckpointObjectManager
from flashpoint.replication import messages, orders
from flashpoint.replication.agent_folder import MEMBERSHIP_NAME, PORTS_NAME, AgentFolder, Assignment
from flashpoint.replication.keys import KEYS_NAME, JobKeys, read_keys, write_keys
from flashpoint.storage import records
from flashpoint.values import to_json
from tests import fuzz
from tests.core.replication.test_message_fuzz import MEMBERSHIP, VALID

CHUNK = 4096
ENTRIES = [
    Entry("w", "float32", (4, 4)),
    Entry("b", "bfloat16", (4,), (0,), (8,), path=("model", 3)),
    Entry("s", "uint8", ()),
]
LAYOUT = plan_layout(ENTRIES)
PLAIN = {
    "a": (1, 2.5, None, True),
    "n": {1, 2},
    "big": 1 << 80,
    "bytes": b"\0x",
    "c": 1j,
    "inf": float("inf"),
}
VALUES = encode_values([Value("step", 3), Value("plain", to_json(PLAIN), ("plain",))])
LINES = {LAYOUT.digest: LAYOUT.encoded, manifests.section_digest(VALUES): VALUES}
OBJECT = ObjectRecord(
    "rank00000-0.safetensors", LAYOUT.nbytes, LAYOUT.digest, CHUNK, bytes(8 * (LAYOUT.nbytes // CHUNK))
)
RECORD = CommitRecord(
    format=FORMAT, version=VERSION, step=100, epoch=2, world_size=1, objects=(OBJECT,),
    values=(manifests.section_digest(VALUES),)
)  # fmt: skip
MANIFEST = manifests.encode(RECORD, LINES)
HEADER = LAYOUT.header + bytes(LAYOUT.nbytes - len(LAYOUT.header))
OWNER = records.encode(records.Owner(name="job", job="f" * 32, epoch=3))
CONFIRMED = records.encode(
    records.Confirmation(objects={"rank00000-0.safetensors": (4096, "tag")}, reason="none")
)


def parse_blob(data: bytes) -> None:
    nbytes = blob.header_length(data[: blob.LENGTH_BYTES], len(data))
    begin = blob.LENGTH_BYTES + nbytes
    blob.parse_header(data[blob.LENGTH_BYTES : begin], len(data) - begin)


def with_fitting_trailer(data: bytes) -> bytes:
    body = data[:-33]
    return body + xxhash.xxh3_128_hexdigest(body).encode() + b"\n"


def parse_manifest(data: bytes) -> None:
    manifest = manifests.decode(data)
    for value in manifest.values_of(0).values():
        manifests.plain_value(value)
    _ = manifest.by_name


def parse_values(data: bytes) -> None:
    for value in manifests.decode_values(data):
        manifests.plain_value(value)


def parse_names(data: bytes) -> None:
    """What is taken for a name is one that gives itself back, and leaves no folder."""
    text = data.decode("utf-8", "surrogateescape")
    for parse in (
        parse_container_name,
        parse_marker_name,
        records.parse_drain,
        records.step_of,
        records.is_ours,
    ):
        if parse(text):
            assert "/" not in text and "\0" not in text and ".." not in text.split("/")
    records.epoch_in_head(data, 7)
    validate_job_root(CheckpointContainerId.parse(text).job_root)


def parse_object_name(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    assert CheckpointObjectId.parse(text).name == text


def any_of(*decoders: Callable[[bytes], object]) -> Callable[[bytes], None]:
    """One of them takes it, or each of them refuses it."""

    def parse(data: bytes) -> None:
        refusals = []
        for decode in decoders:
            try:
                decode(data)
            except ProtocolError as error:
                assert error.code == "malformed"
                refusals.append(error)
        if len(refusals) == len(decoders):
            raise refusals[0]

    return parse


MESSAGES = any_of(
    messages.decode_request,
    messages.decode_reply,
    messages.decode_fetch,
    messages.decode_bulk_reply,
    orders.decode_order,
    orders.decode_answer,
)

PARSERS: dict[str, tuple[Any, ...]] = {
    "blob header": (parse_blob, [HEADER], CorruptObjectError, None),
    "manifest": (parse_manifest, [MANIFEST], ManifestError, with_fitting_trailer),
    "manifest, first line": (manifests.decode_record, [MANIFEST.partition(b"\n")[0]], ManifestError, None),
    "plain values": (parse_values, [VALUES], ManifestError, None),
    "layout": (decode_layout, [LAYOUT.encoded], LayoutError, None),
    "storage owner": (lambda d: records.decode(d, records.Owner, "x"), [OWNER], StorageError, None),
    "storage record": (lambda d: records.decode(d, records.Confirmation, "x"), [CONFIRMED], StorageError, None),
    "messages": (MESSAGES, VALID, ProtocolError, None),
    "names": (
        parse_names,
        [b"/dev/shm/job-1/step-100_ckpt", b"/a/b/step-0_ckpt", b"/dev/shm/step-9223372036854775807_ckpt"],
        InvalidIdError,
        None,
    ),
    "object names": (
        parse_object_name,
        [b"rank00003-0.safetensors", b"rank2147483647-999999.safetensors"],
        InvalidIdError,
        None,
    ),
}  # fmt: skip


def fuzz_parser(what: str, examples: int) -> None:
    parse, corpus, errors, repaired = PARSERS[what]
    fuzz.survives(parse, corpus, errors, repaired=repaired, examples=examples)


@pytest.mark.fault(25)
@pytest.mark.fault(34)
@pytest.mark.parametrize("what", PARSERS)
def test_a_parser_survives(what: str) -> None:
    fuzz_parser(what, fuzz.FEW)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("what", PARSERS)
def test_a_parser_survives_for_long(what: str) -> None:
    fuzz_parser(what, fuzz.SOAK)


# ---- what is read from a folder of the job root ------------------------------------------------------


def fuzz_files(job_root: str, examples: int) -> None:
    folder = AgentFolder(job_root)
    keys = JobKeys.generate()
    folder.write_assignment(Assignment(membership=MEMBERSHIP, index=1, keep=2, encrypt=True))
    folder.write_ports("::1", 4000, 4001)
    write_keys(folder.path, keys)
    objects = CheckpointObjectManager(job_root, rank=None)
    objects.write_epoch(12)

    def of(path: str, read: Callable[[], object]) -> tuple[Callable[[bytes], None], list[bytes]]:
        with open(path, "rb") as file:
            valid = file.read()

        def parse(data: bytes) -> None:
            fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
            os.write(fd, data)
            os.close(fd)
            read()

        return parse, [valid]

    try:
        fuzz.survives(
            *of(f"{folder.path}/{MEMBERSHIP_NAME}", folder.read_assignment), ProtocolError, examples=examples
        )
        fuzz.survives(*of(f"{folder.path}/{PORTS_NAME}", folder.read_ports), (), examples=examples)
        fuzz.survives(
            *of(f"{folder.path}/{KEYS_NAME}", lambda: read_keys(folder.path)),
            ProtocolError,
            examples=examples,
        )
        fuzz.survives(*of(f"{job_root}/{EPOCH_NAME}", objects.read_epoch), (), examples=examples)
    finally:
        objects.close()
        folder.close()


def test_files_of_an_agents_folder_are_survived(job_root: str) -> None:
    fuzz_files(job_root, fuzz.FEW)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_files_of_an_agents_folder_are_survived_for_long(job_root: str) -> None:
    fuzz_files(job_root, fuzz.SOAK)
