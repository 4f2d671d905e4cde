"""Reads a job root, or a storage, as docs/format.md tells it, and says which invariants its files break.

Written from that page alone: nothing of Flashpoint is imported here, so a bug that its writer and its loader share
does not hide from it. Every test that dies somewhere, and wants to know what is left, may use it.

What was saved is known beforehand: `known` makes the state of a step, rank and attempt, and no entry of it is
equal to one of any other.
"""

from __future__ import annotations

import base64
import json
import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash

_CONTAINER = re.compile(r"step-(0|[1-9][0-9]*)_ckpt", re.ASCII)
_MARKER = re.compile(r"step-(0|[1-9][0-9]*)_ckpt__(0|[1-9][0-9]{0,9})__unfinished", re.ASCII)
_OBJECT = re.compile(r"rank([0-9]{5,10})-(0|[1-9][0-9]{0,5})\.safetensors", re.ASCII)
_POOL_FILE = re.compile(r"(rank([0-9]{5,10})|agent)-[0-9a-f]{16}\.buf", re.ASCII)
_MANIFEST_BYTES_MAX = 2 << 30
_DTYPES = {"float64": "F64", "int64": "I64", "int32": "I32", "float32": "F32", "uint8": "U8"}

Version = tuple[int, int]
"""(epoch, step)"""


# ---- what is saved --------------------------------------------------------------------------------------------


def known(step: int, rank: int = 0, attempt: int = 0, size: int = 2000) -> dict[str, np.ndarray]:
    """The arrays that ``rank`` saves for a step; an attempt is one of several saves of the same step."""
    noise = np.random.default_rng((step, rank, attempt))
    return {
        "weights": noise.standard_normal(size),
        "moments": noise.integers(-(1 << 40), 1 << 40, (size // 2, 2)),
        "who": np.array([step, rank, attempt], np.int32),
    }


def known_values(step: int, rank: int = 0, attempt: int = 0) -> dict[str, Any]:
    return {"step": step, "rank": rank, "attempt": attempt, "rate": 1.0 / (step + 1)}


# ---- reading --------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """A version in one folder, without a marker and with something called a manifest.

    Attributes:
        refused: why a reader must not use any of it; empty if its manifest is sound.
        names: the objects that the manifest names.
        good: those that lie here, each byte as the manifest's digests say: name -> entries.
        bad: those that lie here and are not: name -> why.
        values: of each rank.
    """

    step: int
    epoch: int = -1
    world_size: int = 0
    refused: str = ""
    digest: str = ""
    names: tuple[str, ...] = ()
    good: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    bad: dict[str, str] = field(default_factory=dict)
    values: list[dict[str, Any]] = field(default_factory=list)

    @property
    def version(self) -> Version:
        return self.epoch, self.step


@dataclass
class Node:
    """What lies in one job root.

    Attributes:
        markers: names of the markers, and the steps they make dirty.
        unfinished: steps whose container has no manifest.
        strange: names that nothing explains, with the folder they are in.
    """

    root: str
    versions: dict[int, Found] = field(default_factory=dict)
    dirty: set[int] = field(default_factory=set)
    markers: set[str] = field(default_factory=set)
    unfinished: set[int] = field(default_factory=set)
    strange: list[str] = field(default_factory=list)
    pool: dict[str, os.stat_result] = field(default_factory=dict)
    linked: set[int] = field(default_factory=set)
    epoch: str | None = None

    @property
    def complete(self) -> dict[Version, Found]:
        return {f.version: f for f in self.versions.values() if f.step not in self.dirty and not f.refused}


class Refused(Exception):
    """A reader must not use this."""


def read(root: str) -> Node:
    """All that is in a job root; nothing is changed, no lock is taken."""
    node = Node(root)
    for name in sorted(os.listdir(root)):
        path = f"{root}/{name}"
        if marker := _MARKER.fullmatch(name):
            node.markers.add(name)
            node.dirty.add(int(marker[1]))
        elif (container := _CONTAINER.fullmatch(name)) and stat.S_ISDIR(os.lstat(path).st_mode):
            _read_container(node, int(container[1]), path)
        elif name == ".epoch":
            with open(path, encoding="ascii", errors="replace") as file:
                node.epoch = file.read()
        elif name == ".pool":
            for entry in sorted(os.listdir(path)):
                if _POOL_FILE.fullmatch(entry):
                    node.pool[entry] = os.lstat(f"{path}/{entry}")
                else:
                    node.strange.append(f"{name}/{entry}")
        elif name == ".agent":
            node.strange += [f"{name}/{entry}" for entry in os.listdir(path) if entry.endswith(".tmp")]
        else:
            node.strange.append(name)
    return node


def _read_container(node: Node, step: int, path: str) -> None:
    names = os.listdir(path)
    node.linked |= {os.lstat(f"{path}/{name}").st_ino for name in names if _OBJECT.fullmatch(name)}
    if ".metadata" in names:
        node.versions[step] = read_version(path, step)
    else:
        node.unfinished.add(step)
    allowed = {".metadata", *(node.versions[step].names if step in node.versions else ())}
    node.strange += [f"step-{step}_ckpt/{name}" for name in names if name not in allowed]


def read_version(path: str, step: int) -> Found:
    """A container with a manifest, read and judged as a reader must (the page's "What a reader must check")."""
    found = Found(step)
    try:
        record, sections, found.digest = _read_manifest(f"{path}/.metadata", step)
        objects = _read_objects(record, sections)
        found.epoch, found.world_size = record["epoch"], record["world_size"]
        found.names = tuple(obj["name"] for obj, _ in objects)
        for digest in record.get("values", []):
            if digest and digest not in sections:
                raise Refused(f"there is no section {digest}")
            section = json.loads(sections[digest]) if digest else []
            found.values.append({one["name"]: one.get("value") for one in section})
    except (Refused, ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        found.refused = f"{type(error).__name__}: {error}"
        return found
    for obj, layout in objects:
        try:
            found.good[obj["name"]] = _read_object(f"{path}/{obj['name']}", obj, layout)
        except FileNotFoundError:
            continue
        except (Refused, OSError) as error:
            found.bad[obj["name"]] = str(error)
    return found


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise Refused(why)


def _regular(path: str, nbytes_max: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        _require(stat.S_ISREG(status.st_mode), "it is no regular file")
        _require(status.st_size <= nbytes_max, f"it has {status.st_size} bytes")
        return file.read()


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _require(len(pairs) == len(dict(pairs)), "a member is repeated")
    return dict(pairs)


def _read_manifest(path: str, step: int) -> tuple[dict[str, Any], dict[str, bytes], str]:
    data = _regular(path, _MANIFEST_BYTES_MAX)
    _require(len(data) > 34 and data.endswith(b"\n"), "the manifest is cut off")
    body, digest = data[:-33], data[-33:-1]
    _require(xxhash.xxh3_128_hexdigest(body).encode() == digest, "the manifest does not match its trailer")
    line, _, rest = body.partition(b"\n")
    record = json.loads(line, object_pairs_hook=_no_repeats)
    _require(record["format"] == "flashpoint-manifest" and record["version"] == 1, "another format")
    _require(
        record["step"] == step, f"it is the manifest of step {record['step']}, in the folder of step {step}"
    )
    _require(record["epoch"] >= 0 and record["world_size"] >= 1, "a number is out of range")
    sections = {}
    for one in record.get("sections", []):
        section, rest = rest[: one["nbytes"]], rest[one["nbytes"] :]
        _require(rest[:1] == b"\n" and len(section) == one["nbytes"], "a section is cut off")
        rest = rest[1:]
        _require(xxhash.xxh3_128_hexdigest(section) == one["digest"], "a section does not match its digest")
        sections[one["digest"]] = section
    _require(not rest, "there is more than the sections")
    return record, sections, digest.decode()


def _read_objects(
    record: dict[str, Any], sections: Mapping[str, bytes]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    found = []
    for obj in record.get("objects", []):
        match = _OBJECT.fullmatch(obj["name"])
        _require(match is not None and int(match[1]) < record["world_size"], f"{obj['name']} is no rank's")
        _require(obj["chunk_bytes"] >= 1, "chunks of no bytes")
        chunks = base64.b64decode(obj["chunks"], validate=True)
        _require(len(chunks) == 8 * -(-obj["nbytes"] // obj["chunk_bytes"]), "too few or too many digests")
        _require(obj["layout"] in sections, f"there is no section {obj['layout']}")
        layout = json.loads(sections[obj["layout"]], object_pairs_hook=_no_repeats)
        _require(layout["nbytes"] == obj["nbytes"], "the layout has another size")
        columns = [layout["entries"], layout["begins"], layout["keys"]]
        _require(len(set(map(len, columns))) == 1, "columns of different lengths")
        _require(len(set(layout["keys"])) == len(layout["keys"]), "a key is repeated")
        end = layout["header_bytes"]
        _require(end >= 8, "there is no header")
        for begin, entry in sorted(
            zip(layout["begins"], layout["entries"], strict=True), key=lambda one: one[0]
        ):
            _require(begin >= end, "entries overlap")
            end = begin + _nbytes(entry)
        _require(end <= obj["nbytes"], "an entry goes beyond the end")
        found.append((obj, layout))
    names = [obj["name"] for obj, _ in found]
    _require(len(set(names)) == len(names), "an object is named twice")
    return found


def _nbytes(entry: Mapping[str, Any]) -> int:
    _require(entry["dtype"] in _DTYPES, f"dtype {entry['dtype']} is none of those that these tests save")
    _require(all(n >= 0 for n in entry["shape"]), "a negative size")
    return int(np.prod(entry["shape"], dtype=object)) * np.dtype(entry["dtype"]).itemsize


def _read_object(path: str, obj: Mapping[str, Any], layout: Mapping[str, Any]) -> dict[str, np.ndarray]:
    data = _regular(path, obj["nbytes"])
    _require(len(data) == obj["nbytes"], f"it has {len(data)} bytes, not {obj['nbytes']}")
    size, digests = obj["chunk_bytes"], base64.b64decode(obj["chunks"])
    for i, begin in enumerate(range(0, len(data), size)):
        digest = xxhash.xxh3_64_digest(data[begin : begin + size])
        _require(digest == digests[8 * i : 8 * i + 8], f"chunk {i} does not match its digest")
    nbytes = int.from_bytes(data[:8], "little")
    _require(8 + nbytes == layout["header_bytes"], "the blob's header has another size than the layout says")
    header = json.loads(data[8 : 8 + nbytes], object_pairs_hook=_no_repeats)
    entries = {}
    for entry, begin, key in zip(layout["entries"], layout["begins"], layout["keys"], strict=True):
        end = begin + _nbytes(entry)
        told = header[key]
        # Two indexes lie over the same bytes; they must agree.
        _require(
            told["dtype"] == _DTYPES[entry["dtype"]] and told["shape"] == entry["shape"], f"{key}: differs"
        )
        _require([8 + nbytes + n for n in told["data_offsets"]] == [begin, end], f"{key}: lies elsewhere")
        array = np.frombuffer(data[begin:end], np.dtype(entry["dtype"])).reshape(entry["shape"])
        entries[entry["name"]] = array
    return entries


# ---- judging --------------------------------------------------------------------------------------------------


class Expected(NamedTuple):
    """What may be there.

    Attributes:
        attempts: step -> the attempts of which a version of it may be; a step that is missing may not be complete.
        floor: the newest version that must still be loadable, or a newer one.
        ranks: for each node, the ranks that write there.
        copies: whether nodes hold objects for each other.
        saving: steps that were being saved: without a manifest they must have a marker.
        refused: steps that are known to be unusable.
    """

    attempts: Mapping[int, Collection[int]]
    floor: Version
    ranks: Sequence[Collection[int]] = ((0,),)
    copies: bool = False
    saving: Collection[int] = ()
    refused: Collection[int] = ()


def loadable(nodes: Sequence[Node], expected: Expected, *, lost: Collection[int] = ()) -> list[Version]:
    """The versions that a job on these nodes may load, newest first; ``lost`` nodes have lost their memory."""
    here = [node for index, node in enumerate(nodes) if index not in lost]
    ranks = [ranks for index, ranks in enumerate(expected.ranks) if index not in lost]
    dirty = set().union(*(node.dirty for node in here))
    holding = [node.complete for node in here if node.complete]
    if not holding:
        return []
    combine = set.union if expected.copies else set.intersection
    found = []
    for version in combine(*(set(complete) for complete in holding)):
        if version[1] in dirty:
            continue
        versions = [complete[version] for complete in holding if version in complete]
        if len({one.digest for one in versions}) > 1:
            continue  # two saves of one step
        if expected.copies:
            whole = set(versions[0].names) <= set().union(*(one.good for one in versions))
        else:
            whole = all(
                name in node.complete[version].good
                for node, mine in zip(here, ranks, strict=True)
                for name in versions[0].names
                if version in node.complete and int(name[4:].partition("-")[0]) in mine
            )
        if whole:
            found.append(version)
    return sorted(found, reverse=True)


def violations(nodes: Sequence[Node], expected: Expected) -> list[str]:
    """What is wrong, each with its invariant; empty if nothing is."""
    wrong: list[str] = []
    for index, node in enumerate(nodes):
        for found in node.versions.values():
            if found.step in node.dirty or found.step in expected.refused:
                continue
            where = f"node {index}, step {found.step}"
            if found.refused:
                wrong.append(
                    f"I1: {where} has no marker, and a manifest that must be refused: {found.refused}"
                )
                continue
            wrong += [f"I1: {where} is complete, but {name}: {why}" for name, why in found.bad.items()]
            if found.step not in expected.attempts:
                wrong.append(f"I2: {where} is complete, and was never saved")
                continue
            wrong += [f"{text} ({where})" for text in _content(found, expected.attempts[found.step])]
        wrong += [
            f"I2: node {index} has begun step {step} without a marker"
            for step in node.unfinished & set(expected.saving)
            if step not in node.dirty
        ]
        if node.epoch is not None and not node.epoch.isdigit():
            wrong.append(f"I3: node {index} does not know its epoch any more: {node.epoch!r}")
    newest = next(iter(loadable(nodes, expected)), (-1, -1))
    if newest < expected.floor:
        wrong.append(f"I3: the newest that can be loaded is {newest}, before it was {expected.floor}")
    return wrong


def _content(found: Found, attempts: Collection[int]) -> Iterable[str]:
    """Whether the objects and values of a version are all of one attempt to save this very step."""
    marks = {(name, *map(int, entries["who"])) for name, entries in found.good.items()}
    of = {attempt for *_, attempt in marks} | {values["attempt"] for values in found.values}
    if len(of) > 1 or not of <= set(attempts):
        yield f"I2: attempts {sorted(of)} are mixed, of {sorted(attempts)}"
        return
    for name, entries in found.good.items():
        yield from wrong_bytes(entries, found.step, int(name[4:].partition("-")[0]), next(iter(of)), name)
    for rank, values in enumerate(found.values):
        if values != known_values(found.step, rank, next(iter(of))):
            yield f"I1: rank {rank} has values {values}"


def wrong_bytes(
    entries: Mapping[str, np.ndarray], step: int, rank: int, attempt: int, where: str
) -> Iterable[str]:
    """How entries differ from what was saved."""
    truth = known(step, rank, attempt)
    if entries.keys() != truth.keys():
        yield f"I1: {where} holds {sorted(entries)}"
        return
    for name, array in truth.items():
        got = entries[name]
        if (got.dtype, got.shape, got.tobytes()) != (array.dtype, array.shape, array.tobytes()):
            yield f"I1: {where}: {name} is not what rank {rank} saved at step {step}"


def wrong_load(loaded: Mapping[str, Any], step: int, rank: int, attempts: Collection[int]) -> list[str]:
    """How what a loader gave (entries, values) differs from what was saved as that step."""
    attempt = loaded["values"].get("attempt")
    if attempt not in attempts or loaded["values"] != known_values(step, rank, attempt):
        return [f"I1: loaded as step {step}, rank {rank}: values {loaded['values']}"]
    return list(wrong_bytes(loaded["entries"], step, rank, attempt, f"loaded as step {step}"))


def leaks(node: Node, *, buffers_max: int, steps: Collection[int] | None = None) -> list[str]:
    """What lies about when nobody is saving and the job has been started again: I6.

    Args:
        buffers_max: pool files that the configuration predicts at most.
        steps: exactly those that are to be there; None for any that are complete.
    """
    wrong = [f"I6: {name} is left over" for name in [*node.strange, *sorted(node.markers)]]
    wrong += [f"I6: an unfinished step {step} is left over" for step in node.unfinished]
    there = set(node.versions) | node.unfinished
    if steps is not None and there != set(steps):
        wrong.append(f"I6: there are steps {sorted(there)}, not {sorted(steps)}")
    if len(node.pool) > buffers_max:
        wrong.append(f"I6: there are {len(node.pool)} buffers, more than {buffers_max}")
    for name, status in node.pool.items():
        if status.st_blocks * 512 < status.st_size or not status.st_size:
            wrong.append(f"I6: {name} was cut off in its making")
        if status.st_nlink > 2 or (status.st_nlink == 2) != (status.st_ino in node.linked):
            wrong.append(f"I6: {name} has {status.st_nlink} links, and no container for them")
    if len(node.linked) > len(node.pool):
        wrong.append("I6: objects lie outside the pool")
    return wrong


# ---- storage --------------------------------------------------------------------------------------------------


def storage_violations(
    folder: str, expected: Expected, *, at_rest: Collection[int] | None = None
) -> list[str]:
    """What is wrong with drained versions: one with a manifest has every object, whole (docs/storage.md).

    Args:
        at_rest: nothing is being drained; exactly these steps are to be there, and nothing else.
    """
    wrong, newest, names = [], (-1, -1), sorted(os.listdir(folder))
    for name in names:
        match = _CONTAINER.fullmatch(name)
        if match is None or not os.path.exists(f"{folder}/{name}/.metadata"):
            continue
        found = read_version(f"{folder}/{name}", int(match[1]))
        if found.refused or found.bad or set(found.good) != set(found.names):
            missing = sorted(set(found.names) - set(found.good))
            wrong.append(
                f"I1: step {found.step} in storage is not whole: {found.refused or found.bad or missing}"
            )
            continue
        wrong += [
            f"{text} (step {found.step} in storage)"
            for text in _content(found, expected.attempts[found.step])
        ]
        newest = max(newest, found.version)
        strays = set(os.listdir(f"{folder}/{name}")) - {".metadata", *found.names}
        if at_rest is not None:
            wrong += [f"I6: {name}/{stray} is left over in storage" for stray in strays]
    if newest < expected.floor:
        wrong.append(f"I3: the newest in storage is {newest}, before it was {expected.floor}")
    if at_rest is not None:
        allowed = {".flashpoint", ".drains", *(f"step-{step}_ckpt" for step in at_rest)}
        wrong += [f"I6: {name} is left over in storage" for name in names if name not in allowed]
        if os.path.isdir(f"{folder}/.drains") and os.listdir(f"{folder}/.drains"):
            wrong.append("I6: records of drains are left over in storage")
    return wrong


def lost_by_power(events: Iterable[tuple[str, Sequence[str]]], folder: str) -> list[str]:
    """Where a loss of power could leave, below a folder, a name without its bytes, or a manifest without its objects.

    Args:
        events: system calls, each with its paths, in the order they were made.
    """
    wrong = []
    unsynced: set[str] = set()  # files written since their last fsync
    unnamed: set[str] = set()  # folders changed since theirs
    for name, paths in events:
        if not any(path.startswith(f"{folder}/") or path == folder for path in paths):
            continue
        if name in ("write", "pwrite64", "writev"):
            unsynced.add(paths[0])
        elif name in ("fsync", "fdatasync"):
            unsynced.discard(paths[0])
            unnamed.discard(paths[0])
        elif name.startswith("rename"):
            source, target = paths
            if source in unsynced:
                wrong.append(f"I1: {target} has its name before its bytes are on the disk")
            if target.endswith("/.metadata") and unnamed:
                wrong.append(f"I1: {target} has its name before those of {sorted(unnamed)} are on the disk")
            unnamed.add(os.path.dirname(target))
        elif name.startswith("mkdir"):
            unnamed.add(os.path.dirname(paths[0]))
    return wrong
