"""A version as TensorStore sees it: JSON specs, and the store behind them.

from flashpoint_jax import kvstore
kernel = ts.open(kvstore.array_spec(container, "params/dense/kernel")).result()

Works on any folder that holds the files of `flashpoint_jax.zarr_index`. Specs are plain JSON: another process, or
another program, may open them with nothing of Flashpoint installed.

TensorStore verifies nothing here and locks nothing: a version that is given up while it is read may have its
buffers used again, and what was mapped without a copy (`jax.device_put` on CPU can do that) changes with them.
Under `reading` the version is verified and held.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from flashpoint.confined import open_file
from flashpoint.errors import CheckpointNotFoundError, InvalidIdError
from flashpoint.ids import CheckpointContainerId, parse_container_name
from flashpoint.objects import CheckpointObjectManager
from flashpoint.view import open_container
from flashpoint_jax.errors import OcdbtError
from flashpoint_jax.folder import parse_folder
from flashpoint_jax.ocdbt import MANIFEST_NAME, Reader

if TYPE_CHECKING:
    import tensorstore as ts

Container = CheckpointContainerId | str | os.PathLike[str]
Json = dict[str, Any]

INDEX_MANIFEST_BYTES_MAX: Final = 64 << 20
_METADATA_KEYS: Final = {"/.zarray": "zarr", "/zarr.json": "zarr3"}
# A mapped read of a raw chunk is the page itself: 2.5 memcpys into the caller's array where a plain read has 7.7.
_FILE_CONTEXT: Final[Json] = {"file_io_mode": {"mode": "memmap"}}
# Leaves of the index, decoded. Apart from the caller's pool, which then holds chunks only if he wants that.
_NODE_CACHE_BYTES: Final = 16 << 20


def spec(container: Container) -> Json:
    """TensorStore's spec of the version, as it lies there now, as a key-value store.

    Raises:
        CheckpointNotFoundError: the folder has no index, or the version is unfinished.
    """
    return _file_spec(container, _reader(container))


def ocdbt_spec(base: Json, uuid: bytes) -> Json:
    """The spec of the database ``uuid`` in the folder that ``base`` is the spec of.

    TensorStore refuses to open another than that one: a step that was saved again is not the same version.
    """
    return {
        "driver": "ocdbt",
        "base": base,
        "config": {"uuid": uuid.hex()},
        "cache_pool": "cache_pool#flashpoint_nodes",
        "context": {"cache_pool#flashpoint_nodes": {"total_bytes_limit": _NODE_CACHE_BYTES}},
    }


def array_spec(container: Container, name: str) -> Json:
    """TensorStore's spec of one array.

    Args:
        name: as in the index, ``params.dense.kernel``, or with slashes for the dots.

    Raises:
        CheckpointNotFoundError: the folder has no index, or the version is unfinished.
        KeyError: the index has no such array.
    """
    reader = _reader(container)
    for candidate in (name, name.replace("/", ".")):
        for key, driver in _METADATA_KEYS.items():
            if reader.get(f"{candidate}{key}".encode()) is not None:
                return array_spec_of(_file_spec(container, reader), candidate, driver)
    raise KeyError(name)


def array_spec_of(store: Json, name: str, driver: str) -> Json:
    """The spec of the array ``name`` in the store with this spec; ``driver`` is ``zarr`` (v2) or ``zarr3``."""
    return {
        "driver": driver,
        "kvstore": {**store, "path": f"{name}/"},
        "open": True,
        "fill_missing_data_reads": False,  # a chunk that is missing is an error, not zeros
        "recheck_cached_data": False,  # what lies in a version never changes
        "recheck_cached_metadata": False,
    }


def open(container: Container) -> ts.KvStore:
    """The version as a `tensorstore.KvStore`: it lists all keys and reads them; nobody should write to it.

    Raises:
        CheckpointNotFoundError: the folder has no index, or the version is unfinished.
    """
    import tensorstore as ts

    _reader(
        container
    )  # an error of ours, and early: TensorStore takes a folder with nothing for an empty store
    return ts.KvStore.open(spec(container)).result()


def keys(container: Container) -> list[str]:
    """Every key of the index, in order; needs no TensorStore."""
    return [key.decode() for key, _ in _reader(container).items()]


def array_names(container: Container) -> list[str]:
    """The arrays of the index, in order."""
    found = dict.fromkeys(
        key.removesuffix(end) for key in keys(container) for end in _METADATA_KEYS if key.endswith(end)
    )
    return list(found)


@contextmanager
def reading(container: Container, *, verify: bool = True) -> Iterator[Json]:
    """The `spec` of a complete version whose buffers are not used again before the block ends.

    Copy what shall stay: arrays that TensorStore gave without a copy do not hold the version by themselves.
    Of a version on many nodes, the objects that lie here are held.

    Args:
        verify: compare their bytes with the manifest's digests first; TensorStore has none to compare with.

    Raises:
        CheckpointNotFoundError, ManifestError, CorruptObjectError: as `flashpoint.open`.
    """
    if not isinstance(container, CheckpointContainerId):
        try:
            container = CheckpointContainerId.parse(container)
        except InvalidIdError:
            container = parse_folder(_folder(container))
    with open_container(container, verify=verify) as view:
        # Mapped objects are locked, shared, which their next writer heeds.
        for record in view.manifest.objects:
            if os.path.lexists(f"{container.path}/{record.name}"):
                view.object_bytes(record, 0, record.nbytes if verify else 0)
        yield spec(container)


def _folder(container: Container) -> str:
    path = os.fspath(container)
    if not os.path.isabs(path):
        raise InvalidIdError(f"the folder {path!r} must be an absolute path")
    return os.path.normpath(path)


def _file_spec(container: Container, reader: Reader) -> Json:
    base = {"driver": "file", "path": f"{_folder(container)}/", "context": _FILE_CONTEXT}
    return ocdbt_spec(base, reader.manifest.uuid)


def _reader(container: Container) -> Reader:
    folder = _folder(container)
    job_root, name = os.path.split(folder)
    step = parse_container_name(name)
    if step is not None and step in CheckpointObjectManager(job_root, create=False).dirty_steps():
        raise CheckpointNotFoundError(f"step {step} in {job_root} is unfinished: its marker is still there")
    return Reader(lambda path, offset, length: _fetch(folder, path, offset, length))


def _fetch(folder: str, path: str, offset: int, length: int | None) -> bytes:
    """Bytes of a file of the index; no link is followed to it, and no pipe waited for."""
    try:
        fd = open_file(folder, path)
    except OSError as error:
        if path == MANIFEST_NAME and error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise CheckpointNotFoundError(
                f"{folder} has no index for TensorStore ({MANIFEST_NAME})"
            ) from None
        raise OcdbtError(f"{folder}/{path} of the index cannot be read: {error}") from None
    with os.fdopen(fd, "rb", buffering=0):
        status = os.fstat(fd)
        if length is None:
            length = status.st_size
            if length > INDEX_MANIFEST_BYTES_MAX:
                raise OcdbtError(f"{folder}/{path} has {length} bytes, over {INDEX_MANIFEST_BYTES_MAX}")
        if offset + length > status.st_size:
            raise OcdbtError(f"{folder}/{path} is torn: it has {status.st_size} bytes of {offset + length}")
        return os.pread(fd, length, offset)
