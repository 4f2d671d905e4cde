"""Names from outside lead nowhere else, and to nothing that waits."""

import errno
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashpoint import confined
from flashpoint.confined import has_openat2, open_file, read_file
from flashpoint.errors import (
    CheckpointNotFoundError,
    CorruptObjectError,
    FlashpointError,
    ManifestError,
    ProtocolError,
)
from flashpoint.ids import CheckpointContainerId
from flashpoint.markers import is_live
from flashpoint.objects import EPOCH_NAME, CheckpointObjectManager
from flashpoint.replication.keys import JobKeys, read_keys, write_keys
from flashpoint.storage.local import LocalStore
from flashpoint.view import open_container
from tests.core.world import Job

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
SECRET = b"not for you"


@pytest.fixture(autouse=True)
def hangs_are_failures() -> Iterator[None]:
    signal.alarm(120)  # an open that blocks is not interrupted by pytest's own timeout thread
    yield
    signal.alarm(0)


@pytest.fixture(params=["openat2", "walk"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to open, each with the same answers."""
    if request.param == "openat2" and not has_openat2():
        pytest.skip("this kernel, or a filter, has no openat2")
    monkeypatch.setattr(confined, "has_openat2", lambda: request.param == "openat2")
    return str(request.param)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    path = tmp_path / "outside"
    path.mkdir()
    (path / "file").write_bytes(SECRET)
    return path


@pytest.fixture
def root(job_root: str) -> Path:
    path = Path(job_root)
    (path / "sub").mkdir()
    (path / "file").write_bytes(b"mine")
    (path / "sub" / "file").write_bytes(b"mine too")
    return path


def test_plain_files_are_opened(root: Path, way: str) -> None:
    assert read_file(str(root), "file", 100) == b"mine"
    assert read_file(str(root), "sub/file", 100) == b"mine too"
    fd = open_file(str(root), "file")
    assert not os.get_inheritable(fd)
    os.close(fd)
    with pytest.raises(OSError) as caught:
        read_file(str(root), "file", 3)
    assert caught.value.errno == errno.EFBIG


@pytest.mark.fault(35)
@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../outside/file", "sub/../../outside/file", "..", ".", "", "sub//file", "sub/./file", "file\0",
     "/", "sub/", "\0", "//etc/passwd"],
)  # fmt: skip
def test_names_that_are_no_plain_path_are_refused(root: Path, way: str, name: str) -> None:
    with pytest.raises(OSError) as caught:
        open_file(str(root), name)
    assert caught.value.errno == errno.EINVAL


@pytest.mark.fault(36)
@pytest.mark.parametrize("target", ["absolute", "relative", "inside", "dangling", "proc"])
def test_symbolic_links_are_not_followed(root: Path, outside: Path, way: str, target: str) -> None:
    targets = {
        "absolute": str(outside / "file"),
        "relative": os.path.relpath(outside / "file", root),
        "inside": "sub/file",
        "dangling": "nowhere",
        "proc": "/proc/self/environ",
    }
    os.symlink(targets[target], root / "link")
    with pytest.raises(OSError) as caught:
        open_file(str(root), "link")
    assert caught.value.errno == errno.ELOOP


@pytest.mark.fault(36)
def test_symbolic_links_on_the_way_are_not_followed(root: Path, outside: Path, way: str) -> None:
    os.symlink(outside, root / "folder")
    os.symlink("sub", root / "inside")
    for name in ("folder/file", "inside/file"):
        with pytest.raises(OSError) as caught:
            open_file(str(root), name)
        assert caught.value.errno in (errno.ELOOP, errno.ENOTDIR)
    os.symlink(root, outside / "root")  # the root itself is the user's word
    assert read_file(str(outside / "root"), "file", 9) == b"mine"


@pytest.mark.fault(36)
def test_what_is_no_regular_file_is_refused_and_not_waited_for(root: Path, way: str) -> None:
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        server.bind(f"/proc/self/fd/{here}/socket")
        os.close(here)
        for name in ("pipe", "socket", "sub"):
            with pytest.raises(OSError) as caught:
                open_file(str(root), name)
            assert caught.value.errno in confined.NO_FILE


@AS_ROOT
@pytest.mark.fault(36)
def test_device_nodes_are_refused(root: Path, way: str) -> None:
    try:
        os.mknod(root / "zero", stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("this container may make no device nodes")
    with pytest.raises(OSError) as caught:
        open_file(str(root), "zero")
    assert caught.value.errno in (errno.EINVAL, errno.EACCES)  # the latter on a mount without devices


@AS_ROOT
@pytest.mark.fault(36)
def test_hard_links_to_files_of_another_user_are_refused(root: Path, way: str) -> None:
    theirs = root.parent / "theirs"
    theirs.write_bytes(SECRET)
    os.chown(theirs, 12345, 12345)
    os.link(theirs, root / "link")
    with pytest.raises(OSError) as caught:
        open_file(str(root), "link")
    assert caught.value.errno == errno.EPERM
    os.close(open_file(str(root), "link", of_any_owner=True))


def test_no_descriptor_is_left(root: Path, way: str) -> None:
    os.symlink("file", root / "link")
    os.mkfifo(root / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for name in ("file", "link", "pipe", "sub", "nothing", "sub/nothing", "..", "link/x"):
        try:
            os.close(open_file(str(root), name))
        except OSError:
            continue
    assert len(os.listdir("/proc/self/fd")) == before


# ---- those who open ---------------------------------------------------------------------------------


def plant_link(path: str, outside: Path) -> None:
    os.symlink(outside / "file", path)


def plant_pipe(path: str, outside: Path) -> None:
    os.mkfifo(path)


def plant_folder(path: str, outside: Path) -> None:
    os.mkdir(path)


PLANTS = [plant_link, plant_pipe, plant_folder]


@pytest.fixture
def saved(job_root: str) -> Iterator[CheckpointContainerId]:
    import numpy as np

    job = Job(job_root, 1)
    job.each(lambda rank: rank.save(1, {"a": np.ones(100)}, {"step": 1}))
    yield job.ranks[0].objects.container(1)
    job.close()


@pytest.mark.fault(36)
@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", [".metadata", "rank00000-0.safetensors"])
def test_a_container_with_something_planted_is_refused(
    saved: CheckpointContainerId, outside: Path, name: str, plant: Callable[[str, Path], None]
) -> None:
    os.unlink(f"{saved.path}/{name}")
    plant(f"{saved.path}/{name}", outside)
    with pytest.raises((ManifestError, CorruptObjectError)):
        with open_container(saved, verify=True) as view:
            view.verify(view.manifest.objects)


@pytest.mark.fault(36)
def test_a_container_behind_a_link_is_refused(saved: CheckpointContainerId, job_root: str) -> None:
    os.rename(saved.path, f"{job_root}/elsewhere")
    os.symlink("elsewhere", saved.path)
    with pytest.raises((CheckpointNotFoundError, ManifestError)):
        open_container(saved, verify=True)


@pytest.mark.fault(36)
@pytest.mark.parametrize("plant", PLANTS)
def test_an_epoch_that_is_no_file_is_none(
    job_root: str, outside: Path, plant: Callable[[str, Path], None]
) -> None:
    objects = CheckpointObjectManager(job_root)
    plant(f"{job_root}/{EPOCH_NAME}", outside)
    assert objects.read_epoch() == 0
    objects.close()


@pytest.mark.fault(36)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_marker_that_is_no_file_is_nobodys(
    job_root: str, outside: Path, plant: Callable[[str, Path], None]
) -> None:
    path = f"{job_root}/step-1_ckpt__0__unfinished"
    plant(path, outside)
    assert not is_live(path)
    objects = CheckpointObjectManager(job_root)
    objects.collect_garbage()
    assert (outside / "file").read_bytes() == SECRET
    objects.close()


@pytest.mark.fault(36)
@pytest.mark.parametrize("plant", PLANTS)
def test_keys_that_are_no_file_are_refused(
    job_root: str, outside: Path, plant: Callable[[str, Path], None]
) -> None:
    plant(f"{job_root}/keys", outside)
    with pytest.raises(ProtocolError, match="delete it"):
        read_keys(job_root)


@pytest.mark.fault(35)
def test_a_storage_gives_nothing_beside_it(tmp_path: Path, outside: Path) -> None:
    folder = tmp_path / "storage"
    folder.mkdir()
    (folder / "file").write_bytes(b"mine")
    os.symlink(outside / "file", folder / "link")
    store = LocalStore(str(folder))
    assert store.read("file") == b"mine"
    for name in ("../outside/file", "link", f"{outside}/file", "file\0"):
        with pytest.raises(FlashpointError):
            store.read(name)


# ---- keys, and the job root -------------------------------------------------------------------------


@pytest.mark.fault(37)
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666])
def test_keys_that_others_may_read_are_refused(job_root: str, mode: int) -> None:
    write_keys(job_root, JobKeys.generate())
    assert stat.S_IMODE(os.stat(f"{job_root}/keys").st_mode) == 0o600
    os.chmod(f"{job_root}/keys", mode)
    with pytest.raises(ProtocolError, match="can be read by others than its owner: delete it"):
        read_keys(job_root)


@AS_ROOT
@pytest.mark.fault(37)
def test_keys_of_another_user_are_refused(job_root: str) -> None:
    write_keys(job_root, JobKeys.generate())
    os.chown(f"{job_root}/keys", 12345, 12345)
    with pytest.raises(ProtocolError):
        read_keys(job_root)


@pytest.mark.fault(37)
def test_a_new_job_root_has_new_keys(job_root: str) -> None:
    first, second = f"{job_root}/first", f"{job_root}/second"
    found = []
    for folder in (first, second):
        os.mkdir(folder, 0o700)
        assert read_keys(folder) is None
        write_keys(folder, JobKeys.generate())
        found.append(read_keys(folder))
    assert found[0] is not None and found[1] is not None
    assert found[0].secret != found[1].secret and found[0].job != found[1].job
    assert found[0].secret.decode() not in repr(found[0])


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o720, 0o777, 0o1777])
def test_a_job_root_that_others_may_write_is_refused(job_root: str, mode: int) -> None:
    os.chmod(job_root, mode)
    with pytest.raises(FlashpointError, match=f"mode {mode:04o}.*chmod 700"):
        CheckpointObjectManager(job_root)


@AS_ROOT
def test_a_job_root_of_another_user_is_refused(job_root: str) -> None:
    os.chown(job_root, 12345, 12345)
    with pytest.raises(FlashpointError, match="belongs to user 12345"):
        CheckpointObjectManager(job_root)


def test_a_job_root_that_is_made_is_its_owners_alone(job_root: str) -> None:
    before = os.umask(0)
    try:
        CheckpointObjectManager(f"{job_root}/new").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(f"{job_root}/new").st_mode) == 0o700
