"""Both kinds of storage keep the same promises."""

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from flashpoint.config import FlashpointConfig
from flashpoint.errors import CheckpointNotFoundError, DeadlineError, FlashpointError, StorageError
from flashpoint.storage import claim
from flashpoint.storage.local import LocalStore, is_temporary
from flashpoint.storage.store import Store, bounded, open_store

MIB = 1 << 20


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}"
    return (
        request.getfixturevalue("s3").make_bucket(f"bucket-{tmp_path.name[-40:].replace('_', '-')}") + "/a/b"
    )


@pytest.fixture
def store(url: str) -> Store:
    return open_store(FlashpointConfig(storage=url, storage_timeout_s=20))


def test_what_was_written_is_read(store: Store) -> None:
    store.write("x/y", b"hello")
    assert store.read("x/y") == b"hello"
    assert store.read("x/y", 1, 3) == b"el"
    stored = store.head("x/y")
    assert stored is not None and stored.nbytes == 5
    assert store.files("x") == {"y": stored}
    assert (store.folders(), store.folders("x")) == (["x"], [])


def test_what_is_not_there_is_no_failure_of_the_storage(store: Store) -> None:
    assert store.head("x") is None
    assert (store.folders(), store.folders("x"), store.files("x")) == ([], [], {})
    store.delete(["x", "y/z"])
    with pytest.raises(CheckpointNotFoundError):
        store.read("x")


def test_another_content_has_another_tag(store: Store) -> None:
    store.write("x", b"a")
    first = store.head("x")
    store.write("x", b"b")
    assert store.head("x") != first
    assert store.read("x") == b"b"


def test_a_large_file_is_written_in_parts(store: Store) -> None:
    store.write_parts("x/large", (bytes([i]) * (6 * MIB) for i in range(3)), 6 * MIB)
    assert store.head("x/large").nbytes == 18 * MIB
    assert store.read("x/large", 6 * MIB - 1, 6 * MIB + 1) == b"\0\1"


def test_parts_that_end_early_leave_nothing(store: Store) -> None:
    def parts():
        yield bytes(6 * MIB)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        store.write_parts("x/large", parts(), 6 * MIB)
    assert store.files("x") == {}


def test_deleted_files_take_their_folder_with_them(store: Store) -> None:
    store.write("x/y", b"1")
    store.write("x/z", b"2")
    store.delete(["x/y"])
    assert list(store.files("x")) == ["z"]
    store.delete(["x/z"])
    assert store.folders() == []


def test_a_folder_that_is_not_there_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    store = LocalStore(f"{tmp_path}/nowhere")
    with pytest.raises(StorageError, match="nowhere"):
        store.folders()
    with pytest.raises(StorageError, match="nowhere"):
        store.write("x", b"1")
    assert os.listdir(tmp_path) == []


def test_a_local_file_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    seen: list[list[str]] = []

    def parts():
        for _ in range(2):
            seen.append(os.listdir(tmp_path))
            yield b"x"

    store.write_parts("x", parts(), 1)
    assert all(len(names) == 1 and is_temporary(names[0]) for names in seen)
    assert os.listdir(tmp_path) == ["x"]


# ---- at the start of a job ------------------------------------------------------------------------


def config_of(url: str, timeout_s: float = 5) -> FlashpointConfig:
    return FlashpointConfig(storage=url, storage_timeout_s=timeout_s)


def test_a_job_finds_its_own_storage_again(url: str) -> None:
    config = config_of(url)
    assert claim.check(config, "/dev/shm/job-1") is None
    claim.claim(config, "/dev/shm/job-1", "a" * 32, 4, None)
    owner = claim.check(config, "/dev/shm/job-1")
    assert owner is not None and (owner.name, owner.job, owner.epoch) == ("job-1", "a" * 32, 4)
    claim.require(open_store(config), "a" * 32, 4)


def test_another_job_is_refused_by_name(url: str) -> None:
    config = config_of(url)
    claim.claim(config, "/dev/shm/job-1", "a" * 32, 4, None)
    with pytest.raises(StorageError, match="another job, 'job-1'.*this one is 'job-2'"):
        claim.check(config, "/dev/shm/job-2")


def test_who_was_taken_over_writes_no_more(url: str) -> None:
    config = config_of(url)
    claim.claim(config, "/dev/shm/job-1", "a" * 32, 4, None)
    claim.claim(config, "/dev/shm/job-1", "b" * 32, 5, claim.check(config, "/dev/shm/job-1"))
    with pytest.raises(StorageError, match="taken over by another start of 'job-1'"):
        claim.require(open_store(config), "a" * 32, 4)


def test_a_bucket_that_is_not_there_fails_at_once(s3: object) -> None:
    with pytest.raises(StorageError, match="no-such-bucket.*NoSuchBucket"):
        claim.check(config_of("s3://no-such-bucket/a"), "/dev/shm/job-1")


def test_wrong_credentials_fail_at_once(s3) -> None:
    url = s3.make_bucket("bucket-of-others")
    s3.check_credentials(True)
    try:
        with pytest.raises(StorageError, match="403.*InvalidAccessKeyId.*credentials"):
            claim.check(config_of(url), "/dev/shm/job-1")
    finally:
        s3.check_credentials(False)


def test_a_server_that_never_answers_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        with pytest.raises(FlashpointError, match="s3://bucket/a"):
            claim.check(config_of("s3://bucket/a", timeout_s=0.3), "/dev/shm/job-1")


def test_a_call_that_hangs_is_left_behind() -> None:
    over = threading.Event()
    with pytest.raises(DeadlineError, match="the disk did not answer"):
        bounded(over.wait, 0.05, "the disk")
    over.set()
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 / 0, 10, "the disk")
    assert bounded(time.monotonic, 10, "the disk") > 0
