"""What lies in a storage beside the versions: its owner, and what nodes tell each other of a drain. Pure.

    .flashpoint                                   whose it is (`Owner`)
    step-7_ckpt/rank00000-0.safetensors           objects, as in memory
    step-7_ckpt/.metadata                         the manifest, written last: with it the version is drained
    .drains/2-7-<digest>/node00000                what a node has uploaded of a version (`Confirmation`)

The leader makes the last folder when it begins a drain, and deletes it when the manifest is written.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from flashpoint.errors import StorageError
from flashpoint.ids import CheckpointObjectId, parse_container_name
from flashpoint.manifest import MANIFEST_NAME
from flashpoint.replication.messages import Key

OWNER_NAME: Final = ".flashpoint"
DRAINS_NAME: Final = ".drains"
FORMAT: Final = "flashpoint-storage"
RECORD_BYTES_MAX: Final = 64 << 20
_DRAIN = re.compile(r"([0-9]{1,19})-([0-9]{1,19})-([0-9a-f]{32})", re.ASCII)
_NODE = re.compile(r"node[0-9]{5,}", re.ASCII)
_HEAD = re.compile(
    rb'\{"format":"flashpoint-manifest","version":1,"step":([0-9]{1,19}),"epoch":([0-9]{1,19}),'
)
HEAD_BYTES: Final = 256

Count = Annotated[int, Meta(ge=0)]


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The job that writes here.

    Attributes:
        name: the job root's, which a job keeps for life.
        job: of the job's keys, which are lost with all of its nodes.
        epoch: the start of the job that writes.
    """

    format: str = FORMAT
    version: int = 1
    name: str
    job: str
    epoch: Count


class Confirmation(msgspec.Struct, frozen=True, kw_only=True):
    """What one node has uploaded of a version, each object read back by size and tag.

    Attributes:
        objects: name -> (bytes, the storage's tag of what was written).
        reason: why this node cannot upload the rest; empty if it can.
    """

    objects: dict[str, tuple[Count, str]] = {}
    reason: str = ""


_T = TypeVar("_T", Owner, Confirmation)


def encode(record: Owner | Confirmation) -> bytes:
    return msgspec.json.encode(record)


def decode(data: bytes, kind: type[_T], name: str) -> _T:
    """Raises `StorageError` for anything else."""
    try:
        record = msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StorageError(f"{name} in the storage is garbled: {error}") from None
    if isinstance(record, Owner) and (record.format != FORMAT or record.version != 1):
        raise StorageError(
            f"{name} in the storage is of another release: {record.format!r}, {record.version}"
        )
    return record


def manifest_name(step: int) -> str:
    return f"step-{step}_ckpt/{MANIFEST_NAME}"


def drain_name(key: Key) -> str:
    return f"{key.epoch}-{key.step}-{key.digest}"


def parse_drain(name: str) -> Key | None:
    """The version whose drain has this name, or None for any other name."""
    match = _DRAIN.fullmatch(name)
    key = Key(int(match[1]), int(match[2]), match[3]) if match else None
    return key if key is not None and drain_name(key) == name else None


def node_name(index: int) -> str:
    return f"node{index:05d}"


def is_node(name: str) -> bool:
    """Whether a file of a drain is a node's word: a node that died may have left others, half written."""
    return _NODE.fullmatch(name) is not None


def step_of(folder: str) -> int | None:
    """The step of a version's folder, or None for any other name."""
    return parse_container_name(folder)


def is_ours(name: str) -> bool:
    """Whether a file of a version's folder is one that a drain has written."""
    if name == MANIFEST_NAME:
        return True
    try:
        CheckpointObjectId.parse(name)
    except ValueError:
        return False
    return True


def epoch_in_head(head: bytes, step: int) -> int | None:
    """The epoch that a manifest's first bytes state; None where they are not of our writing, or of another step."""
    match = _HEAD.match(head)
    return int(match[2]) if match and int(match[1]) == step else None
