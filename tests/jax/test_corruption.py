"""Bytes that changed at rest are never restored through Orbax, in whichever file of an item they lie.

Every trial damages one file of the newer of two steps in place, asks for that step in one of the ways there are, and
puts the file's bytes back.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import flashpoint_jax
from flashpoint.errors import CheckpointNotFoundError, CorruptObjectError, FlashpointError
from tests.jax import trees
from tests.jax.workers import Workers

Args = ocp.args
PAGE = 4096
OLDER, NEWER = 1, 2
MANIFEST = ".metadata"
BLOB = "rank00000-0.safetensors"
# Beside blob and manifest: what a restore takes something from, and what it does not look at.
READ = ("_METADATA", "_sharding", "_strings.json", "array_metadatas/process_0", ".sidecars")
NOT_READ = ("manifest.ocdbt", "nodes-.*\\.ocdbt", "commit_success.txt")


def state(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    over = trees.mesh()
    return {
        "rows": trees.sharded(rng.normal(size=(64, 64)).astype(np.float32), over, "x", None),
        "both": trees.sharded(rng.integers(0, 99, (64, 32), np.int32), over, "x", "y"),
        "bf16": jnp.asarray(rng.normal(size=300), jnp.bfloat16),
        "key": jax.random.key(step),
        "rbg": jax.random.key(step, impl="rbg"),
        "host": rng.integers(0, 256, 5000, np.uint8),
        "step": step,
        "name": f"run {step}",
    }


def manager(root: str, **settings: Any) -> Any:
    return ocp.CheckpointManager(root, handler_registry=flashpoint_jax.registry(chunk_bytes=PAGE, **settings))


def saved(root: str) -> Any:
    """A manager with both steps; what it restores is verified, whatever it has seen before."""
    m = manager(root)
    for step in (OLDER, NEWER):
        m.save(step, args=Args.PyTreeSave(state(step), custom_metadata={"tokens": step * 1000}))
    m.wait_until_finished()
    return m


def with_target(m: Any, step: int) -> None:
    wanted = trees.abstract(state(step))
    args = Args.PyTreeRestore(wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted))
    trees.assert_equal(m.restore(step, args=args), state(step))


def without_arguments(m: Any, step: int) -> None:
    found, expected = m.restore(step), state(step)
    trees.assert_equal(found, expected)
    for name in ("rows", "both"):
        assert found[name].sharding == expected[name].sharding


def of_metadata(m: Any, step: int) -> None:
    """No values; names, shapes and the user's own numbers."""
    found = m.item_metadata(step)
    assert found.custom_metadata == {"tokens": step * 1000}
    assert found.tree.keys() == state(step).keys()
    for name in ("rows", "both", "bf16", "host"):
        assert found.tree[name].shape == state(step)[name].shape
    assert found.tree["rows"].sharding.to_jax_sharding() == state(step)["rows"].sharding


WAYS = (with_target, without_arguments)


def refused(m: Any, way: Callable[[Any, int], None], step: int = NEWER) -> bool:
    """Whether a restore is an error of ours; what it gives otherwise is right."""
    try:
        way(m, step)
    except FlashpointError:
        return True
    return False


# ---- damages ----------------------------------------------------------------------------------------


@contextmanager
def put_back(path: Path) -> Iterator[bytes]:
    """The bytes of a file, which has them again afterwards, under the name and in the file that it had."""
    data = path.read_bytes()
    spare = path.with_name("spare")
    os.link(path, spare)
    try:
        yield data
    finally:
        os.replace(spare, path)
        with open(path, "r+b") as file:  # in place: the pool's file, and every mapping of it
            file.truncate(len(data))
            file.write(data)
        spare.unlink(missing_ok=True)  # a rename onto another name of the same file does nothing


def flip(path: Path, offset: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def regions(name: str, data: bytes) -> list[tuple[str, int, int]]:
    """Named byte ranges of a file: all of it, so that every byte is hit by some flip."""
    if name == BLOB:
        header = 8 + int.from_bytes(data[:8], "little")
        text = len(data[8:header].rstrip(b" ")) + 8
        middle = (header + len(data)) // 2
        return [
            ("header length", 0, 8),
            ("header", 8, text),
            ("header padding", text, header),
            ("first half of the data", header, middle),
            ("second half of the data", middle, len(data)),
        ]
    if name == MANIFEST:
        first, trailer = data.index(b"\n") + 1, len(data) - 33
        return [("record", 0, first), ("sections", first, trailer), ("trailer", trailer, len(data))]
    return [(name, 0, len(data))]


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def is_read(name: str) -> bool:
    return name in (BLOB, MANIFEST, *READ)


def test_a_folder_holds_no_file_that_these_tests_do_not_know(job_root: str) -> None:
    with saved(job_root):
        pass
    for name in files_of(Path(job_root, str(NEWER), "default")):
        assert is_read(name) or any(re.fullmatch(one, name) for one in NOT_READ), name


# ---- one process ------------------------------------------------------------------------------------


def flip_and_restore(job_root: str, *, seed: int, flips: int) -> int:
    """So many flips in every region of every file; how many that were."""
    rng = random.Random(seed)
    folder = Path(job_root, str(NEWER), "default")
    tally: Counter[str] = Counter()
    with saved(job_root) as m:
        for name in files_of(folder):
            path = folder / name
            for region, begin, end in regions(name, path.read_bytes()):
                for n in range(flips):
                    with put_back(path):
                        offset, bit = rng.randrange(begin, end), rng.randrange(8)
                        flip(path, offset, bit)
                        way = WAYS[n % len(WAYS)]
                        where = f"{region}, bit {bit} of byte {offset}, {way.__name__}"
                        assert refused(m, way) == is_read(name), where
                        if name != BLOB and n % 2:
                            assert refused(m, of_metadata) == is_read(name), where
                    tally[region] += 1
            with_target(m, OLDER)  # the step before serves
        for way in (*WAYS, of_metadata):
            way(m, NEWER)  # nothing of all this is remembered
    print(f"{tally.total()} flips:", dict(tally))
    return tally.total()


@pytest.mark.fault(20)
def test_a_flipped_bit_is_never_restored(job_root: str, record_property: Callable[[str, int], None]) -> None:
    record_property("trials", flip_and_restore(job_root, seed=0, flips=24))


@pytest.mark.fault(20)
@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_thousands_of_flipped_bits_are_never_restored(
    job_root: str, record_property: Callable[[str, int], None]
) -> None:
    record_property("trials", flip_and_restore(job_root, seed=1, flips=400))


@pytest.mark.fault(22)
def test_a_file_of_another_length_is_never_restored(job_root: str) -> None:
    rng = random.Random(0)
    folder = Path(job_root, str(NEWER), "default")
    with saved(job_root) as m:
        for name in files_of(folder):
            path = folder / name
            size = path.stat().st_size
            pages = range(0, size, PAGE)
            lengths = {0, 1, size - 1, size - 33, *rng.sample(pages, min(4, len(pages)))}
            lengths |= {rng.randrange(size) for _ in range(6)} | {size + 1, size + PAGE}
            for n, length in enumerate(sorted(lengths)):
                with put_back(path):
                    os.truncate(path, max(length, 0))
                    way = WAYS[n % len(WAYS)]
                    assert refused(m, way) == is_read(name), f"{name}: {length} of {size} bytes"
        for way in WAYS:
            way(m, NEWER)


@pytest.mark.parametrize("damage", ["missing", "older", "empty folder"])
@pytest.mark.fault(24)
def test_a_file_that_is_gone_or_another_steps_is_never_restored(job_root: str, damage: str) -> None:
    folder, older = Path(job_root, str(NEWER), "default"), Path(job_root, str(OLDER), "default")
    with saved(job_root) as m:
        for name in files_of(folder):
            path = folder / name
            if damage == "older" and not (older / name).exists():
                continue  # the commit's own
            with put_back(path) as data:
                changed = True
                if damage == "older":
                    path.write_bytes((older / name).read_bytes())
                    changed = path.read_bytes() != data  # `_METADATA` is one for all steps of a plan
                else:
                    path.unlink()
                    if damage == "empty folder":
                        path.mkdir()
                for way in WAYS:
                    assert refused(m, way) == (changed and is_read(name)), f"{name}, {way.__name__}"
                if damage == "empty folder":
                    path.rmdir()


def test_without_its_manifest_a_folder_is_not_taken_for_one_of_orbaxs_own(job_root: str) -> None:
    """Stock readers check no sums: a flipped byte would be restored through the index."""
    folder = Path(job_root, str(NEWER), "default")
    with saved(job_root) as m:
        (folder / MANIFEST).unlink()
        flip(folder / BLOB, (folder / BLOB).stat().st_size - PAGE, 0)
        with pytest.raises(CheckpointNotFoundError):
            m.restore(NEWER)


@pytest.mark.usefixtures("stock_failures")
def test_what_a_cut_off_deletion_leaves_is_never_restored_as_something_else(job_root: str) -> None:
    """`rmtree` takes the files in any order; the index that is left may name blobs that are not."""
    rng = random.Random(0)
    folder, copy = Path(job_root, str(NEWER), "default"), Path(job_root, "copy")
    with saved(job_root) as m:
        shutil.copytree(folder, copy)
        names = files_of(folder)
        for _ in range(12):
            order = rng.sample(names, len(names))
            for n, name in enumerate(order):
                (folder / name).unlink()
                try:
                    without_arguments(m, NEWER)
                except AssertionError as error:
                    raise AssertionError(f"without {order[: n + 1]}") from error
                except Exception:
                    assert set(order[: n + 1]) - set(NOT_READ), order  # Orbax's own, or ours
            for name in names:
                shutil.copy(copy / name, folder / name)
        without_arguments(m, NEWER)


def test_what_a_damaged_file_is_called_is_told(job_root: str) -> None:
    with saved(job_root) as m:
        for name in READ:
            path = Path(job_root, str(NEWER), "default", name)
            with put_back(path):
                flip(path, 5, 2)
                with pytest.raises(
                    CorruptObjectError, match=f"the file {re.escape(name)} of .*/{NEWER}/default"
                ):
                    m.restore(NEWER)


def test_who_does_not_verify_is_told_nothing(job_root: str) -> None:
    with saved(job_root):
        pass
    path = Path(job_root, str(NEWER), "default", ".sidecars")
    flip(path, 5, 2)
    with manager(job_root, verify=False) as m:
        with_target(m, NEWER)


def test_a_steps_own_metadata_are_orbaxs_and_change_no_value(job_root: str) -> None:
    """They name the handler and hold metrics; nothing is taken from them where arguments are given."""
    with saved(job_root):
        pass
    rng = random.Random(0)
    path = Path(job_root, str(NEWER), "_CHECKPOINT_METADATA")
    size = path.stat().st_size
    for n in range(24):
        with put_back(path):
            if n % 4 == 0:
                os.truncate(path, rng.randrange(size))
            else:
                flip(path, rng.randrange(size), rng.randrange(8))
            with manager(job_root) as m:
                with_target(m, NEWER)
                assert m.all_steps() == [OLDER, NEWER]


# ---- two processes ----------------------------------------------------------------------------------


def options(per_host: bool) -> Any:
    return ocp.options.MultiprocessingOptions(primary_host=None if per_host else 0)


def manager_of_two(root: str, per_host: bool) -> Any:
    return ocp.CheckpointManager(
        f"{root}/{jax.process_index()}" if per_host else root,
        options=ocp.CheckpointManagerOptions(
            multiprocessing_options=options(per_host), enable_per_process_directory_creation=per_host
        ),
        handler_registry=flashpoint_jax.registry(
            multiprocessing_options=options(per_host), commit_timeout_s=20, recovery_timeout_s=20
        ),
    )


def state_of_two(step: int) -> dict[str, Any]:
    over = trees.mesh(4, 2)
    value = np.random.default_rng(step).normal(size=(64, 64)).astype(np.float32)
    return {"w": trees.sharded(value, over, "x", "y"), "r": trees.sharded(value[0], over), "step": step}


def save_both(root: str, per_host: bool) -> None:
    with manager_of_two(root, per_host) as m:
        for step in (OLDER, NEWER):
            m.save(step, args=Args.StandardSave(state_of_two(step)))


def restore_newer_then_older(root: str, per_host: bool) -> bool:
    """Whether the newer step was refused."""
    found = False
    with manager_of_two(root, per_host) as m:
        wanted = trees.abstract(state_of_two(0))
        try:
            trees.assert_equal(m.restore(NEWER, args=Args.StandardRestore(wanted)), state_of_two(NEWER))
        except FlashpointError:
            found = True
        trees.assert_equal(m.restore(OLDER, args=Args.StandardRestore(wanted)), state_of_two(OLDER))
    return found


@pytest.mark.parametrize("per_host", [False, True], ids=["global", "per-host"])
@pytest.mark.fault(20, "E")
def test_damage_that_one_process_finds_is_an_error_on_both(
    workers: Workers, job_root: str, per_host: bool
) -> None:
    workers.run(save_both, job_root, per_host)
    folder = Path(job_root, "1" if per_host else "", str(NEWER), "default")
    rng = random.Random(0)
    for name in files_of(folder):
        if name == "commit_success.txt":
            continue
        path = folder / name
        with put_back(path) as data:
            flip(path, rng.randrange(len(data)), rng.randrange(8))
            answers = workers.run(restore_newer_then_older, job_root, per_host)
        assert answers == [not name.endswith(".ocdbt")] * 2, name
    assert workers.run(restore_newer_then_older, job_root, per_host) == [False, False]
