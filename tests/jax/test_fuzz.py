"""Every parser of the JAX adapter that reads bytes from outside, against anything (`tests.fuzz`)."""

import base64
import json
import socket
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import google_crc32c
import numpy as np
import pytest
import zstandard

from flashpoint.errors import CorruptObjectError, ManifestError
from flashpoint.manifest import FORMAT, VERSION, CommitRecord, Manifest, Value, encode_values, section_digest
from flashpoint_jax import direct, ocdbt, sidecars
from flashpoint_jax.errors import OcdbtError
from flashpoint_jax.folder import step_of
from flashpoint_jax.ocdbt import Reader
from flashpoint_jax.ocdbt_nodes import VersionsReference, decode_manifest, decode_node, decode_version_node
from flashpoint_jax.ocdbt_wire import File
from flashpoint_jax.remote import ObjectServer
from flashpoint_jax.zarr_index import index_files, sources_of, uuid_of
from tests import fuzz
from tests.core.world import Job, shard
from tests.jax.databases import database
from tests.jax.test_ocdbt import many
from tests.jax.test_remote import TOKEN

PAIRS = {**many(24), b"inline": b"x" * 40, b"k" * 300: b""}
SMALL = database(PAIRS, node_bytes=700)  # with interior nodes
VERSIONS = VersionsReference(File("", "versions"), 0, 0, 1 << 40, 1, 1)


def nodes_of(files: dict[str, bytes]) -> list[bytes]:
    """Every node of a database: they lie one after the other, each with its length at its beginning."""
    data, found = files["nodes.ocdbt"], []
    while data:
        nbytes = int.from_bytes(data[4:12], "little")
        found.append(data[:nbytes])
        data = data[nbytes:]
    return found


NODES = nodes_of(SMALL)


def sealed_again(data: bytes) -> bytes:
    """With a length and a checksum that fit, so that what is inside is looked at."""
    if len(data) < 18:
        return data
    head = data[:4] + len(data).to_bytes(8, "little") + data[12:-4]
    return head + google_crc32c.value(head).to_bytes(4, "little")


def read_all(manifest: bytes) -> None:
    """A whole database whose manifest is this one: every version, every key."""
    reader = Reader(
        lambda path, offset, length: manifest if path == ocdbt.MANIFEST_NAME else _of(path, offset, length)
    )
    for version in reader.versions():
        for key, value in reader.items(version=version):
            if isinstance(value, bytes):
                reader.get(key, version=version)


def _of(path: str, offset: int, length: int | None) -> bytes:
    if path != "nodes.ocdbt":
        raise OcdbtError(f"there is no {path}")
    return SMALL[path][offset:][:length]


def read_tree_with(node: bytes) -> None:
    """A database in which this is the root, wherever that says its children are."""
    manifest = decode_manifest(SMALL[ocdbt.MANIFEST_NAME])
    root = manifest.versions[-1].root
    assert root is not None

    def fetch(path: str, offset: int, length: int | None) -> bytes:
        if path == ocdbt.MANIFEST_NAME:
            return SMALL[path]
        return node[:length].ljust(length or 0, b"\0") if offset == root.offset else _of(path, offset, length)

    for _ in Reader(fetch).items():
        pass


TREE = json.dumps(
    {
        "tree_metadata": {
            "('a', 'b')": {
                "key_metadata": [{"key": "a", "key_type": 2}, {"key": "b", "key_type": 2}],
                "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
            }
        },
        "use_zarr3": False,
    }
).encode()


def packed_values(text: str) -> Manifest:
    section = encode_values(
        [Value(".orbax/files", text), Value(".orbax/custom_metadata", "null"), Value(".orbax/step", "100")]
    )
    record = CommitRecord(
        format=FORMAT, version=VERSION, step=100, epoch=1, world_size=1, values=(section_digest(section),)
    )
    return Manifest(record, {section_digest(section): section}, "0" * 32)


def parse_sidecars_in_values(data: bytes) -> None:
    """The files that a manifest's values hold: compressed JSON, whose names become those of files."""
    text = base64.b64encode(zlib.compress(data)).decode()
    names = set(sidecars.files_again(packed_values(text), [0]))
    assert names <= {"_METADATA", "_sharding", "array_metadatas/process_0", ".sidecars"}


def parse_compressed(data: bytes) -> None:
    sidecars.files_again(packed_values(base64.b64encode(data).decode()), [0])


def parse_step_name(data: bytes) -> None:
    name = data.decode("utf-8", "replace")
    section = encode_values([Value(".orbax/step", name)])
    digest = section_digest(section)
    record = CommitRecord(format=FORMAT, version=VERSION, step=100, epoch=1, world_size=1, values=(digest,))
    found = sidecars.step_name_of(Manifest(record, {digest: section}, "0" * 32))
    assert found == name and "/" not in name and "\0" not in name and name not in (".", "..")


FILES = json.dumps({"_METADATA": TREE.decode(), "_sharding": "{}", "array_metadatas": "{}"}).encode()


def compressed(data: bytes) -> bytes:
    return zlib.compress(data)


PARSERS: dict[str, tuple[Any, ...]] = {
    "manifest": (decode_manifest, [SMALL[ocdbt.MANIFEST_NAME]], OcdbtError, sealed_again),
    "nodes": (lambda data: decode_node(data, ""), NODES[-12:], OcdbtError, sealed_again),
    "tree below a node": (read_tree_with, NODES[-1:], OcdbtError, sealed_again),
    "whole database": (read_all, [SMALL[ocdbt.MANIFEST_NAME]], OcdbtError, sealed_again),
    "tree of Orbax": (lambda data: direct._match(data, {"a": {"b": 1}}), [TREE], (), None),
    "sidecars in a manifest": (parse_sidecars_in_values, [FILES], ManifestError, None),
    "compressed sidecars": (parse_compressed, [compressed(FILES)], ManifestError, None),
    "a step's name": (parse_step_name, [b"100", b"prefix_100", b"step-7_ckpt"], ManifestError, None),
}  # fmt: skip


@pytest.mark.fault(34)
@pytest.mark.parametrize("magic", [0x0CDB3A2A, 0x0CDB20DE])
def test_a_compressed_node_takes_no_more_memory_than_it_has(magic: int) -> None:
    node = sealed_again(
        magic.to_bytes(4, "big") + bytes(8) + b"\0\1" + zstandard.compress(b"short") + bytes(4)
    )
    tracemalloc.start()
    try:
        with pytest.raises(OcdbtError):
            (decode_manifest if magic == 0x0CDB3A2A else lambda data: decode_node(data, ""))(node)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


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


def fuzz_version_nodes(examples: int) -> None:
    """No writer of ours makes them: what stock TensorStore has written is in `test_ocdbt`; here, anything."""

    def parse(data: bytes) -> None:
        if data:
            decode_version_node(data, VERSIONS)

    corpus = [b"", sealed_again((0x0CDB1234).to_bytes(4, "big") + bytes(30))]
    with pytest.raises(OcdbtError):
        parse(corpus[1])
    fuzz.survives(parse, corpus[:1], OcdbtError, examples=examples, repaired=lambda data: sealed_again(
        (0x0CDB1234).to_bytes(4, "big") + bytes(8) + b"\0\0" + data + bytes(4)
    ))  # fmt: skip


def test_a_node_of_versions_is_survived() -> None:
    fuzz_version_nodes(fuzz.FEW)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_node_of_versions_is_survived_for_long() -> None:
    fuzz_version_nodes(fuzz.SOAK)


def fuzz_sidecars(folder: str, examples: int) -> None:
    files = {"_METADATA": TREE}
    path = f"{folder}/.sidecars"
    with open(f"{folder}/_METADATA", "wb") as file:
        file.write(TREE)
    manifest = packed_values("")
    valid = sidecars.sums_file(files, manifest.digest)

    def parse(data: bytes) -> None:
        with open(path, "wb") as file:
            file.write(data)
        sidecars.check_sidecars(folder, manifest)

    def sealed(data: bytes) -> bytes:
        line = data.partition(b"\n")[0]
        return line + b"\n" + section_digest(line).encode() + b"\n"

    fuzz.survives(parse, [valid], CorruptObjectError, repaired=sealed, examples=examples)


def test_sidecars_are_survived(job_root: str) -> None:
    fuzz_sidecars(job_root, fuzz.FEW)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_sidecars_are_survived_for_long(job_root: str) -> None:
    fuzz_sidecars(job_root, fuzz.SOAK)


@pytest.mark.fault(35)
@pytest.mark.parametrize(
    "name", ["../escaped", "/etc/escaped", "a/../../escaped", "", "array_metadatas/process_9", "_METADATA\0"]
)
def test_names_in_a_manifests_values_leave_no_folder(name: str) -> None:
    data = json.dumps({"_METADATA": TREE.decode(), name: "x"}).encode()
    with pytest.raises(ManifestError):
        parse_sidecars_in_values(data)


@pytest.mark.fault(35)
@pytest.mark.parametrize("name", ["../100", "/etc/100", "..", "", "100/../..", "latest", "100\0"])
def test_a_steps_name_leaves_no_folder(name: str) -> None:
    assert step_of(name) is None or "/" in name
    with pytest.raises(ManifestError):
        parse_step_name(name.encode())


@pytest.mark.fault(34)
def test_values_that_decompress_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecars, "_SIDECAR_BYTES_MAX", 1 << 20)
    with pytest.raises(ManifestError, match="too long"):
        parse_compressed(compressed(bytes(32 << 20)))


# ---- the HTTP server ----------------------------------------------------------------------------


REQUEST = (
    b"GET /step-1_ckpt/rank00000-0.safetensors HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
    + TOKEN.encode()
    + b"\r\nRange: bytes=0-99\r\n\r\n"
)
REQUESTS = [
    REQUEST,
    REQUEST.replace(b"GET", b"HEAD"),
    REQUEST.replace(b"rank00000-0.safetensors", b".metadata").replace(b"0-99", b"-5"),
    REQUEST.replace(b"rank00000-0.safetensors", b"manifest.ocdbt").replace(b"Range", b"If-None-Match"),
]


def fuzz_server(job_root: str, examples: int, survive: Callable[..., Any]) -> None:
    job = Job(job_root, 1)
    rows = np.arange(4000, dtype=np.float32).reshape(80, 50)
    part, entry = shard(rows, 0, 1)
    job.each(lambda rank: rank.save(1, {"sharded": part}, None, [entry]))
    objects = job.ranks[0].objects
    manifest = objects.read_manifest(objects.container(1))
    for name, data in index_files(sources_of(manifest), uuid_of(manifest)).items():
        with open(f"{objects.container(1).path}/{name}", "wb") as file:
            file.write(data)
    with open(f"{objects.container(1).path}/rank00000-0.safetensors", "rb") as file:
        truth = file.read()
    with ObjectServer(job_root, TOKEN) as server:
        address = urlsplit(server.url)

        def parse(data: bytes) -> None:
            with socket.create_connection((address.hostname, address.port), 30) as client:
                client.settimeout(30)
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                answer = b""
                while part := client.recv(1 << 16):
                    answer += part
            head, _, body = answer.partition(b"\r\n\r\n")
            if head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 206")) and data.startswith(
                b"GET /step-1_ckpt/rank"
            ):
                nbytes = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                assert body[:nbytes] in truth

        survive(parse, REQUESTS, (ConnectionError,), examples=examples, peak_bytes=32 << 20)
        parse(REQUEST)
    job.close()


@pytest.mark.fault(35)
def test_the_server_survives_any_request(job_root: str) -> None:
    fuzz_server(job_root, fuzz.FEW // 2, fuzz.survives)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_the_server_survives_any_request_for_long(job_root: str) -> None:
    fuzz_server(job_root, fuzz.SOAK // 10, fuzz.survives)
