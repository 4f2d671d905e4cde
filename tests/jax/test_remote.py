"""Versions on other nodes: what the server gives, what it refuses, and many nodes as one store."""

import http.client
import os
import shutil
import socket
import threading
import time
from urllib.parse import urlsplit

import numpy as np
import pytest
import tensorstore as ts

from flashpoint.errors import CheckpointNotFoundError, ConfigError
from flashpoint.manifest import MANIFEST_NAME
from flashpoint.markers import Marker
from flashpoint_jax import kvstore, remote
from flashpoint_jax.remote import ObjectServer, cluster_spec, http_spec, new_token
from flashpoint_jax.zarr_index import index_files, sources_of, uuid_of
from tests.core.world import Job, contents, shard
from tests.jax.databases import write

TOKEN = "a-token-of-the-tests-0123456789"
ROWS = np.arange(4000, dtype=np.float32).reshape(80, 50)
OBJECT = "/step-1_ckpt/rank00000-0.safetensors"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def save(job: Job, step: int) -> str:
    """A version of sharded rows and of each rank's own arrays, with its index."""

    def one(rank) -> None:
        part, entry = shard(ROWS, rank.rank, len(job.ranks))
        rank.save(step, {"sharded": part}, None, [entry])

    job.each(one)
    objects = job.ranks[0].objects
    container = objects.container(step)
    manifest = objects.read_manifest(container)
    write(container.path, index_files(sources_of(manifest), uuid_of(manifest)))
    return container.path


@pytest.fixture
def job(job_root):
    opened = Job(job_root, 4)
    yield opened
    opened.close()


@pytest.fixture
def path(job):
    return save(job, 1)


@pytest.fixture
def server(job_root, path):
    with ObjectServer(job_root, TOKEN) as running:
        yield running


def request(server: ObjectServer, path: str, method: str = "GET", token: str | None = TOKEN, **headers: str):
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=10)
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    try:
        connection.request(
            method, path, headers={name.replace("_", "-"): text for name, text in headers.items()}
        )
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


# ---- what it gives ------------------------------------------------------------------------------


def test_objects_the_manifest_and_the_index_are_given_whole(server, path):
    for name in os.listdir(path):
        status, body, _ = request(server, f"/step-1_ckpt/{name}")
        assert status == 200
        with open(f"{path}/{name}", "rb") as file:
            assert body == file.read()


@pytest.mark.parametrize(
    ("header", "begin", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=5-99", 5, 100),
        ("bytes=4090-", 4090, None),
        ("bytes=-7", -7, None),
        ("bytes=10-99999999999", 10, None),
    ],
)
def test_a_range_is_given_exactly(server, path, header, begin, end):
    whole = request(server, OBJECT)[1]
    status, body, headers = request(server, OBJECT, Range=header)
    assert (status, body) == (206, whole[begin:end])
    first = begin % len(whole)
    assert headers["Content-Range"] == f"bytes {first}-{first + len(body) - 1}/{len(whole)}"


@pytest.mark.parametrize("header", ["bytes=99999999-", "bytes=-0"])
def test_a_range_beyond_the_end_is_unsatisfiable(server, header):
    assert request(server, OBJECT, Range=header)[0] == 416


@pytest.mark.parametrize("header", ["bytes=5-2", "bytes=0-1,4-5", "lines=1-2", "bytes=-", "bytes=a-b"])
def test_a_range_of_another_form_is_ignored(server, header):
    status, body, _ = request(server, OBJECT, Range=header)
    assert status == 200
    assert len(body) == int(request(server, OBJECT, "HEAD")[2]["Content-Length"])


def test_who_has_it_already_is_told_so(server):
    status, _, headers = request(server, OBJECT)
    assert status == 200
    assert request(server, OBJECT, If_None_Match=headers["ETag"])[:2] == (304, b"")
    assert request(server, OBJECT, If_None_Match='"other"')[0] == 200


def test_a_head_has_no_body(server):
    status, body, headers = request(server, OBJECT, "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 4096


# ---- what it refuses ----------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "x", "ä"])
def test_without_the_token_nothing_is_told(server, token):
    for path in (OBJECT, "/step-9_ckpt/none", "/"):
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=10)
        headers = {} if token is None else {"Authorization": f"Bearer {token}".encode("latin-1")}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (401, b"Unauthorized")
        connection.close()


@pytest.mark.fault(35)
@pytest.mark.parametrize(
    "path",
    [
        "/",
        "*",
        "//",
        "/step-1_ckpt",
        "/step-1_ckpt/",
        "/step-1_ckpt/secret",
        "/step-1_ckpt/../secret",
        "/step-1_ckpt/%2e%2e/secret",
        "/step-1_ckpt/..%2fsecret",
        "/step-1_ckpt/.metadata.0123abcd.tmp",
        "/step-1_ckpt/rank00009-0.safetensors",
        "/step-1_ckpt/rank00000-0.safetensors/",
        "/step-1_ckpt/rank00000-0.safetensors%00",
        "/step-01_ckpt/rank00000-0.safetensors",
        "/step-2_ckpt/rank00000-0.safetensors",
        "/../secret",
        "/.pool/",
        "/.epoch",
        "http://elsewhere/step-2_ckpt/.metadata",
        "/step-1_ckpt/\udcff",
    ],
)
@pytest.mark.fault(35)
def test_only_the_exact_names_of_what_a_version_holds_are_served(server, job_root, path):
    write(job_root, {"secret": b"s", "step-1_ckpt/secret": b"s"})
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=10)
    connection.putrequest("GET", "/", skip_host=True)
    connection._buffer = [b"GET " + path.encode("utf-8", "surrogateescape") + b" HTTP/1.1"]
    connection.putheader("Host", "x")
    connection.putheader("Authorization", f"Bearer {TOKEN}")
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status in (400, 404)
    assert answer.read() != b"s"
    connection.close()


def test_an_object_that_the_manifest_does_not_name_is_not_served(server, path):
    shutil.copy(f"{path}/rank00000-0.safetensors", f"{path}/rank00000-7.safetensors")
    assert request(server, "/step-1_ckpt/rank00000-7.safetensors")[0] == 404


@pytest.mark.fault(36)
def test_links_and_pipes_are_not_followed(server, path, tmp_path):
    (tmp_path / "outside").write_bytes(b"secret")
    for make in (lambda name: os.symlink(tmp_path / "outside", name), os.mkfifo):
        for name in ("rank00000-0.safetensors", "manifest.ocdbt"):
            os.unlink(f"{path}/{name}")
            make(f"{path}/{name}")
            assert request(server, f"/step-1_ckpt/{name}")[0] == 404


@pytest.mark.fault(36)
def test_a_container_that_is_a_link_is_not_served(server, path, job_root):
    os.rename(path, f"{job_root}/elsewhere")
    os.symlink("elsewhere", path)
    assert request(server, OBJECT)[0] == 404


def test_a_version_is_served_only_while_it_is_complete(server, job, path):
    container = job.ranks[0].objects.container(1)
    assert request(server, OBJECT)[0] == 200
    marker = Marker.create(container, 5)
    assert request(server, OBJECT)[0] == 404
    marker.remove()
    assert request(server, OBJECT)[0] == 200
    os.unlink(f"{path}/{MANIFEST_NAME}")
    assert request(server, OBJECT)[0] == 404


def test_a_corrupt_object_is_an_error_and_not_one_wrong_byte(server, path):
    with open(f"{path}/rank00001-0.safetensors", "r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 1]))
    assert request(server, "/step-1_ckpt/rank00001-0.safetensors", Range="bytes=0-1")[0] == 500
    assert request(server, OBJECT, Range="bytes=0-1")[0] == 206
    spec = http_spec(server.url, "step-1_ckpt/", token=TOKEN)
    with pytest.raises(ValueError):
        ts.KvStore.open(spec).result().read("rank00001-0.safetensors").result()


def test_nothing_can_be_written_or_listed(server):
    for method in ("PUT", "POST", "DELETE", "PROPFIND"):
        assert request(server, OBJECT, method)[0] == 501


@pytest.mark.parametrize(
    "token", ["short", "x" * 15, "has a space in it....", "line\r\nbreak: x........", ""]
)
def test_a_token_is_long_and_fits_into_a_header(job_root, token):
    with pytest.raises(ConfigError, match="token"):
        ObjectServer(job_root, token)
    with pytest.raises(ConfigError, match="token"):
        http_spec("http://x", "", token=token)
    assert len(new_token()) >= 32


# ---- life ---------------------------------------------------------------------------------------


@pytest.mark.fault(32)
def test_too_many_connections_are_closed_and_the_others_served(server, monkeypatch):
    address = server._server.server_address
    held = [socket.create_connection(address) for _ in range(remote.CONNECTIONS_MAX)]
    time.sleep(0.5)
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        request(server, OBJECT)
    for connection in held:
        connection.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            assert request(server, OBJECT)[0] == 200
            break
        except (http.client.RemoteDisconnected, ConnectionError):
            time.sleep(0.05)
    else:
        raise AssertionError("no connection was given back")


def test_a_client_that_goes_away_leaves_nothing_behind(server, path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        connection = socket.create_connection(server._server.server_address)
        connection.sendall(f"GET {OBJECT} HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        connection.close()
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/fd")) > before + 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert request(server, OBJECT)[0] == 200


def test_a_version_may_be_given_up_while_it_is_served(server, job, path):
    for step in range(2, 5):
        save(job, step)
    assert request(server, OBJECT)[0] == 404
    assert request(server, f"/step-4_ckpt/{MANIFEST_NAME}")[0] == 200


def test_it_ends_when_it_is_closed(job_root, path):
    threads = threading.active_count()
    server = ObjectServer(job_root, TOKEN)
    server.close()
    with pytest.raises(ConnectionError):
        request(server, OBJECT)
    assert threading.active_count() == threads


# ---- many nodes as one store --------------------------------------------------------------------


def split(job_root: str, path: str, nodes: int) -> list[str]:
    """The version as several nodes have it: job roots of which each has the objects of one rank."""
    roots = []
    for node in range(nodes):
        root = f"{job_root}-node-{node}"
        container = f"{root}/step-1_ckpt"
        shutil.copytree(path, container)
        for name in os.listdir(container):
            if name.startswith("rank") and not name.startswith(f"rank{node:05d}-"):
                os.unlink(f"{container}/{name}")
        roots.append(root)
    return roots


@pytest.mark.parametrize("nodes", [2, 4])
def test_the_nodes_of_a_job_are_one_store(job_root, path, nodes):
    roots = split(job_root, path, 4)
    servers = [ObjectServer(root, TOKEN) for root in roots]
    try:
        holders = {f"rank{rank:05d}-0.safetensors": servers[rank].url for rank in range(1, 4)}
        if nodes == 2:  # the second has the objects of all others
            for rank in (2, 3):
                name = f"rank{rank:05d}-0.safetensors"
                shutil.copy(f"{roots[rank]}/step-1_ckpt/{name}", f"{roots[1]}/step-1_ckpt/{name}")
                holders[name] = servers[1].url
        spec = cluster_spec(f"{roots[0]}/step-1_ckpt", holders, token=TOKEN)
        assert len(spec["base"]["layers"]) == nodes
        array = ts.open(kvstore.array_spec_of(spec, "sharded", "zarr")).result()
        assert (array.read().result() == ROWS).all()
        assert (array[35:45, 7].read().result() == ROWS[35:45, 7]).all()
    finally:
        for server in servers:
            server.close()


def test_a_dead_holder_is_an_error_soon(job_root, path):
    roots = split(job_root, path, 4)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{unused.getsockname()[1]}"
    holders = {f"rank{rank:05d}-0.safetensors": dead for rank in range(1, 4)}
    spec = cluster_spec(f"{roots[0]}/step-1_ckpt", holders, token=TOKEN)
    array = ts.open(kvstore.array_spec_of(spec, "sharded", "zarr")).result()
    assert (array[:20].read().result() == ROWS[:20]).all()
    began = time.monotonic()
    with pytest.raises(Exception, match="UNAVAILABLE|connect"):
        array.read().result(timeout=30)
    assert time.monotonic() - began < 10


def test_an_object_that_nobody_holds_is_named_before_anything_is_read(job_root, path):
    roots = split(job_root, path, 2)
    with pytest.raises(CheckpointNotFoundError, match="3 objects lie neither here.* rank00001-0"):
        cluster_spec(f"{roots[0]}/step-1_ckpt", {}, token=TOKEN)


def test_contents_of_each_rank_come_from_its_own_node(job_root):
    job = Job(job_root, 2)
    try:
        job.save(1)
        objects = job.ranks[0].objects
        container = objects.container(1)
        manifest = objects.read_manifest(container)
        write(container.path, index_files(sources_of(manifest), uuid_of(manifest)))
        roots = split(job_root, container.path, 2)
        with ObjectServer(roots[1], TOKEN) as server:
            spec = cluster_spec(
                f"{roots[0]}/step-1_ckpt", {"rank00001-0.safetensors": server.url}, token=TOKEN
            )
            array = ts.open(kvstore.array_spec_of(spec, "of_rank_1", "zarr")).result().read().result()
            assert (array == contents(1, 1)["of_rank_1"]).all()
    finally:
        job.close()
