"""Checking one version against its manifest, object by object, as plain data for `flashpoint verify`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from flashpoint import safetensors_blob as blob
from flashpoint.checksums import Bytes, mismatches
from flashpoint.cli.output import first_few, plural
from flashpoint.cli.progress import Advance
from flashpoint.cli.versions import COMPLETE, CORRUPT, StoredVersion, manager
from flashpoint.errors import CheckpointNotFoundError, CorruptObjectError, FlashpointError, ManifestError
from flashpoint.ids import CheckpointContainerId
from flashpoint.layout import ObjectLayout
from flashpoint.manifest import Manifest, ObjectRecord, plain_value
from flashpoint.memory import prefault_read
from flashpoint.objects import CheckpointObjectManager

_BATCH_BYTES: Final = 256 << 20  # between two steps of the progress bar

Progress = Callable[[str, int], AbstractContextManager[Advance]]  # of a name and its bytes


def verify_version(version: StoredVersion, *, this_node: bool, progress: Progress) -> dict[str, Any]:
    """Check one version; ``this_node``: a rank none of whose objects is here has them on another node."""
    container = version.container
    report: dict[str, Any] = {"path": container.path, "step": container.step, "status": "ok"}
    report |= {"problems": [], "bytes": 0, "objects": []}
    if version.state not in (COMPLETE, CORRUPT):
        return {**report, "status": "unfinished", "problems": [f"unfinished: {version.problem}"]}
    objects = manager(container.job_root)
    try:
        manifest = objects.read_manifest(container)
        report["problems"] += _value_problems(manifest)
        report["objects"] = _verify_objects(objects, version, manifest, this_node, progress)
    except ManifestError as error:
        manifest = None
        report["problems"].append(str(error))
    except CheckpointNotFoundError:
        return {**report, "status": "gone", "problems": ["given up before it was verified"]}
    verified = [obj for obj in report["objects"] if obj["status"] in ("ok", "corrupt")]
    report["bytes"] = sum(obj["bytes"] for obj in verified)
    if manifest and not verified:
        report["problems"].append("none of its objects is on this node")
    if report["problems"] or any(obj["status"] in ("corrupt", "missing") for obj in report["objects"]):
        report["status"] = "corrupt"
        if _was_given_up(objects, container, manifest):
            report["status"] = "gone"
            report["problems"] = ["given up, or saved anew, while it was being verified"]
    return report


def _verify_objects(
    objects: CheckpointObjectManager,
    version: StoredVersion,
    manifest: Manifest,
    this_node: bool,
    progress: Progress,
) -> list[dict[str, Any]]:
    container = version.container
    ranks_here = {obj.rank for obj in version.objects.values()}
    reports = []
    with progress(container.name, manifest.nbytes) as advance:
        for record in manifest.objects:
            rank = record.id.rank
            report: dict[str, Any] = {"name": record.name, "rank": rank, "bytes": record.nbytes}
            report |= {"status": "ok", "problems": [], "seconds": 0.0}
            report |= {
                "chunks": -(-record.nbytes // record.chunk_bytes),
                "broken_chunks": [],
                "broken_entries": [],
            }
            reports.append(report)
            if not os.path.lexists(f"{container.path}/{record.name}"):
                elsewhere = this_node and rank not in ranks_here
                report["status"] = "elsewhere" if elsewhere else "missing"
                report["problems"] = ["not on this node"] if elsewhere else ["it is not there"]
                advance(record.nbytes)
                continue
            _verify_object(objects, container, record, manifest.layout(record), report, advance)
            if report["problems"]:
                report["status"] = "corrupt"
    return reports


def _verify_object(
    objects: CheckpointObjectManager,
    container: CheckpointContainerId,
    record: ObjectRecord,
    layout: ObjectLayout,
    report: dict[str, Any],
    advance: Advance,
) -> None:
    try:
        # Mapped here and not through a view: the lock goes when this object is done, not at the very end.
        data = objects.map_object(container, record).data
    except CorruptObjectError as error:
        report["problems"].append(str(error))
        advance(record.nbytes)
        return
    start_s = time.perf_counter()
    broken: list[int] = []
    per_batch = max(_BATCH_BYTES // record.chunk_bytes, 1)
    threads = objects.config.load_threads
    for first in range(0, report["chunks"], per_batch):
        chunks = range(first, min(first + per_batch, report["chunks"]))
        begin, end = first * record.chunk_bytes, min(chunks.stop * record.chunk_bytes, record.nbytes)
        prefault_read(data, begin, end)
        broken += mismatches(data, record.chunk_bytes, record.chunks, chunks, threads=threads)
        advance(end - begin)
    report["seconds"] = time.perf_counter() - start_s
    if broken:
        entries = _entries_in(layout, record.chunk_bytes, set(broken))
        report["broken_chunks"], report["broken_entries"] = broken, entries
        report["problems"].append(
            f"{len(broken)} of {plural(report['chunks'], 'chunk')} do not match their checksums"
            + (f", in {first_few([repr(name) for name in entries])}" if entries else "")
        )
    problem = _header_problem(data, layout)
    if problem:
        report["problems"].append(problem)


def _header_problem(data: Bytes, layout: ObjectLayout) -> str:
    """How the object's own header fails to say what the manifest's layout says; empty if it agrees."""
    try:
        header = data[: layout.header_bytes].tobytes()
        length = blob.header_length(header, len(data))
        if blob.LENGTH_BYTES + length != layout.header_bytes:
            return f"its safetensors header has {length} bytes, not those of the manifest's layout"
        data_bytes = layout.nbytes - layout.header_bytes
        found, _ = blob.parse_header(header[blob.LENGTH_BYTES :], data_bytes)
        if header == layout.header:
            return ""
        expected, _ = blob.parse_header(layout.header[blob.LENGTH_BYTES :], data_bytes)
    except CorruptObjectError as error:
        return str(error)
    differing = [mine.key for mine, theirs in zip(found, expected, strict=False) if mine != theirs]
    if differing or len(found) != len(expected):
        where = f" about {first_few([repr(key) for key in differing])}" if differing else ""
        return f"its safetensors header and the manifest's layout disagree{where}"
    return ""


def _value_problems(manifest: Manifest) -> list[str]:
    ranks = {digest: rank for rank, digest in enumerate(manifest.record.values)}  # equal values, one check
    problems = []
    for rank in ranks.values():
        try:
            for value in manifest.values_of(rank).values():
                plain_value(value)
        except ManifestError as error:
            problems.append(f"rank {rank}: {error}")
    return problems


def _entries_in(layout: ObjectLayout, chunk_bytes: int, broken: set[int]) -> list[str]:
    """Names of the entries that have bytes in the broken chunks."""
    return [
        entry.name
        for entry, begin, end in zip(layout.entries, layout.begins, layout.ends, strict=True)
        if end > begin and not broken.isdisjoint(range(begin // chunk_bytes, -(-end // chunk_bytes)))
    ]


def _was_given_up(
    objects: CheckpointObjectManager, container: CheckpointContainerId, manifest: Manifest | None
) -> bool:
    try:
        return manifest is not None and objects.read_manifest(container).digest != manifest.digest
    except CheckpointNotFoundError:
        return True
    except (FlashpointError, OSError):
        return False
