"""Bytes that changed at rest are never loaded, whatever changed; the version before serves instead.

Every trial damages one file of the newer of two versions, through its name in the container, which is the
pool's file too, and then asks for it in every way there is.
"""

import ctypes
import gc
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

import flashpoint
import flashpoint_torch as fpt
from flashpoint.errors import CheckpointNotFoundError, CorruptObjectError, FlashpointError
from tests.torch.faults import Launcher, blank_state, check, look, report, same, state_of, train

SETTINGS = {"keep": 2, "chunk_bytes": 4096, "recovery_timeout_s": 20.0, "commit_timeout_s": 20.0}
KIB = 64
PAGE = 4096
SLACK_BYTES = 64 << 10
OLDER, NEWER = 1, 2
MANIFEST = ".metadata"

Damage = Callable[[random.Random, Path, Path], str]  # of the newer container, beside the older; says where


# ---- damages ----------------------------------------------------------------------------------------


def flip_a_bit(rng: random.Random, newer: Path, older: Path) -> str:
    path = rng.choice(_objects(newer))
    data = path.read_bytes()
    return _flip(rng, path, rng.choice(_object_regions(data)))


def flip_a_bit_of_the_manifest(rng: random.Random, newer: Path, older: Path) -> str:
    path = newer / MANIFEST
    data = path.read_bytes()
    first, trailer = data.index(b"\n") + 1, len(data) - 33
    regions = [("record", 0, first), ("sections", first, trailer), ("trailer", trailer, len(data))]
    return _flip(rng, path, rng.choice(regions))


def truncate(rng: random.Random, newer: Path, older: Path) -> str:
    path = rng.choice([*_objects(newer), newer / MANIFEST])
    size = path.stat().st_size
    pages = [n for n in (0, PAGE, size - PAGE, size // 2 // PAGE * PAGE) if 0 <= n < size]
    os.truncate(path, rng.choice([rng.randrange(size), size - 1, *pages]))
    return _what(path)


def append(rng: random.Random, newer: Path, older: Path) -> str:
    path = rng.choice([*_objects(newer), newer / MANIFEST])
    with open(path, "ab") as file:
        file.write(rng.choice([b"\0", b"\n", bytes(PAGE), path.read_bytes()]))
    return _what(path)


def zero_a_page(rng: random.Random, newer: Path, older: Path) -> str:
    path, begin = _page_with_data(rng, newer)
    _write(path, begin, bytes(PAGE))
    return _what(path)


def punch_a_hole(rng: random.Random, newer: Path, older: Path) -> str:
    path, begin = _page_with_data(rng, newer)
    fd = os.open(path, os.O_RDWR)
    keep_size, punch = 1, 2  # linux/falloc.h
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.fallocate64(fd, keep_size | punch, ctypes.c_long(begin), ctypes.c_long(PAGE)) == 0
    os.close(fd)
    return _what(path)


def garble(rng: random.Random, newer: Path, older: Path) -> str:
    path = rng.choice([*_objects(newer), newer / MANIFEST])
    size = path.stat().st_size
    begin = rng.randrange(size)
    length = rng.randint(1, min(size - begin, 3 * PAGE))
    _write(path, begin, bytes(b ^ rng.randint(1, 255) for b in _read(path, begin, length)))
    return _what(path)


def stale_page(rng: random.Random, newer: Path, older: Path) -> str:
    """A page as the older version has it: what a write that never reached memory leaves."""
    path, begin = _page_with_data(rng, newer)
    stale = _read(older / path.name, begin, PAGE)
    if stale == _read(path, begin, PAGE):  # of the header, which they share
        return zero_a_page(rng, newer, older)
    _write(path, begin, stale)
    return _what(path)


def swap_with_the_older_version(rng: random.Random, newer: Path, older: Path) -> str:
    path = rng.choice(_objects(newer))
    if rng.random() < 0.5:
        _write(path, 0, (older / path.name).read_bytes())
        return "copied"
    path.unlink()
    os.link(older / path.name, path)
    return "linked"


def swap_objects(rng: random.Random, newer: Path, older: Path) -> str:
    swap_files(*_objects(newer)[:2])
    return "renamed"


def manifest_of_the_older_version(rng: random.Random, newer: Path, older: Path) -> str:
    if rng.random() < 0.5:
        (newer / MANIFEST).unlink()
        os.link(older / MANIFEST, newer / MANIFEST)
        return "linked"
    (newer / MANIFEST).write_bytes((older / MANIFEST).read_bytes())
    return "copied"


def torn_manifest(rng: random.Random, newer: Path, older: Path) -> str:
    new, old = (newer / MANIFEST).read_bytes(), (older / MANIFEST).read_bytes()
    cut = rng.randrange(1, len(new))
    whole, kind = rng.choice([(old, "old tail"), (bytes(len(new)), "zero tail"), (b"", "no tail")])
    torn = new[:cut] + whole[cut:]
    if torn == new:
        torn, kind = old[:cut] + new[cut:], "old head"
    if torn in (new, old):
        torn, kind = b"", "empty"
    (newer / MANIFEST).write_bytes(torn)
    return kind


def missing(rng: random.Random, newer: Path, older: Path) -> str:
    path = rng.choice([*_objects(newer), newer / MANIFEST])
    path.unlink()
    return _what(path)


def not_a_file(rng: random.Random, newer: Path, older: Path) -> str:
    path = rng.choice([*_objects(newer), newer / MANIFEST])
    path.unlink()
    kind = rng.choice(["symlink", "pipe"])
    if kind == "symlink":
        path.symlink_to(older / path.name)
    else:
        os.mkfifo(path)
    return f"{_what(path)}: {kind}"


# How often of 2,000, beside flips, which are the rest.
DAMAGES: dict[Damage, int] = {
    flip_a_bit_of_the_manifest: 400,
    truncate: 150,
    append: 50,
    zero_a_page: 100,
    punch_a_hole: 100,
    garble: 100,
    stale_page: 100,
    swap_with_the_older_version: 100,
    swap_objects: 20,
    manifest_of_the_older_version: 20,
    torn_manifest: 100,
    missing: 20,
    not_a_file: 30,
}


def swap_files(a: Path, b: Path) -> None:
    spare = a.with_name("spare")
    a.rename(spare)
    b.rename(a)
    spare.rename(b)


def _objects(container: Path) -> list[Path]:
    return sorted(container.glob("*.safetensors"))


def _what(path: Path) -> str:
    return "manifest" if path.name == MANIFEST else "object"


def _object_regions(data: bytes) -> list[tuple[str, int, int]]:
    """Named byte ranges of a safetensors file: all of it, so that every byte is hit by some flip."""
    header = 8 + int.from_bytes(data[:8], "little")
    text = len(data[8:header].rstrip(b" ")) + 8
    third = (len(data) - header) // 3
    return [
        ("header length", 0, 8),
        ("header", 8, text),
        ("header padding", text, header),
        ("data", header, header + third),
        ("data", header + third, header + 2 * third),
        ("data", header + 2 * third, len(data)),
        ("last page", len(data) - PAGE, len(data)),
    ]


def _flip(rng: random.Random, path: Path, region: tuple[str, int, int]) -> str:
    name, begin, end = region
    offset = rng.randrange(begin, end)
    _write(path, offset, bytes([_read(path, offset, 1)[0] ^ 1 << rng.randrange(8)]))
    return name


def _page_with_data(rng: random.Random, container: Path) -> tuple[Path, int]:
    """A page of an object that does not hold zeros only."""
    while True:
        path = rng.choice(_objects(container))
        begin = rng.randrange(path.stat().st_size // PAGE) * PAGE
        if _read(path, begin, PAGE).strip(b"\0"):
            return path, begin


def _read(path: Path, begin: int, length: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(begin)
        return file.read(length)


def _write(path: Path, begin: int, data: bytes) -> None:
    with open(path, "r+b") as file:  # in place: the pool's file, and every mapping of it, changes with it
        file.seek(begin)
        file.write(data)


# ---- what must hold ---------------------------------------------------------------------------------


def refuses_the_step(fp: fpt.Flashpoint) -> None:
    target = blank_state(kib=KIB)
    with pytest.raises(CheckpointNotFoundError):
        fp.recover(target, step=NEWER)
    assert same(target, blank_state(kib=KIB))


def dcp_refuses(fp: fpt.Flashpoint, expected: dict[str, object]) -> bool:
    """A load that fails leaves its target alone; one that succeeds never met a damaged chunk."""
    target = blank_state(kib=KIB)
    try:
        dcp.load(target, checkpoint_id=fp.path(NEWER), storage_reader=fpt.FlashpointReader(), no_dist=True)
    except (FlashpointError, dcp.CheckpointException):
        assert same(target, blank_state(kib=KIB))
        return True
    assert same(target, expected)
    return False


def view_refuses(fp: fpt.Flashpoint, expected: dict[str, object]) -> None:
    """What a view gives is right, or an error: it verifies what is asked for, and everything when told to."""
    try:
        view = flashpoint.open(fp.path(NEWER))
    except FlashpointError:
        return
    with view:
        for name, value in expected.items():
            try:
                got = view[name]
            except CorruptObjectError:
                continue
            assert same(got, value), name
        with pytest.raises(CorruptObjectError):
            view.verify()


def steps_back(fp: fpt.Flashpoint) -> None:
    target = blank_state(kib=KIB)
    found = fp.recover(target)
    assert found is not None and found.step == OLDER
    assert same(target, state_of(OLDER, kib=KIB))


def flat(state: dict[str, object]) -> dict[str, object]:
    """The tensors of a state as a view gives them: flat names, numpy arrays."""
    model, moments = state["model"], state["moments"]
    return {
        "model.weight": model["weight"].numpy(),
        "model.scale": model["scale"].numpy(),
        "moments.0": moments[0].numpy(),
        "moments.1": moments[1].numpy(),
        "table": state["table"],
        "step": state["step"],
        "random": state["random"],
    }


# ---- tests ------------------------------------------------------------------------------------------


def damage_and_detect(job_root: str, *, seed: int, times: int = 1) -> None:
    """2,000 damages, or so many times that."""
    rng = random.Random(seed)
    kinds = [kind for kind, share in DAMAGES.items() for _ in range(share * times)]
    kinds += [flip_a_bit] * (2000 * times - len(kinds))
    rng.shuffle(kinds)
    states = {step: state_of(step, kib=KIB) for step in (OLDER, NEWER)}
    expected = flat(states[NEWER])
    newer, older = Path(job_root, f"step-{NEWER}_ckpt"), Path(job_root, f"step-{OLDER}_ckpt")
    tally: Counter[str] = Counter()
    last = ""
    with fpt.init(job_root, **SETTINGS) as fp:
        for trial, damage in enumerate(kinds):
            for step, state in states.items():
                if step not in fp.steps():
                    handle = fp.save(state, step)
                    assert handle.done(), f"trial {trial}, after {last}: {handle.error!r}"
            where = damage(rng, newer, older)
            last = f"{damage.__name__}: {where}"
            tally[last] += 1
            try:
                if trial % 4 == 0:
                    tally["dcp.load: refused" if dcp_refuses(fp, states[NEWER]) else "dcp.load: not met"] += 1
                if trial % 4 == 1:
                    view_refuses(fp, expected)
                if trial % 4 != 2:
                    refuses_the_step(fp)
                steps_back(fp)
            except (AssertionError, pytest.fail.Exception) as error:
                raise AssertionError(f"trial {trial}, {last}") from error
        gc.collect()  # views that errors have kept alive hold locks
        for step in (NEWER + 1, NEWER + 2, NEWER + 3):
            assert fp.save(state_of(step, kib=KIB), step).done()
    found = look(job_root)
    assert found.nbytes - found.manifest_bytes <= 3 * found.version_bytes + SLACK_BYTES, found
    report(f"{len(kinds)} damages detected:", **dict(sorted(tally.items())))
    assert tally["dcp.load: refused"] >= 400 * times


@pytest.mark.fault(20)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.fault(20, 22, 23, 24, 25)
def test_2000_damages_are_all_detected(job_root: str) -> None:
    damage_and_detect(job_root, seed=0)


@pytest.mark.fault(20)
@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_40000_damages_are_all_detected(job_root: str) -> None:
    damage_and_detect(job_root, seed=1, times=20)


@pytest.mark.fault(21)
def test_versions_that_are_all_damaged_leave_the_state_alone(job_root: str) -> None:
    with fpt.init(job_root, **SETTINGS) as fp:
        for step in (OLDER, NEWER):
            fp.save(state_of(step, kib=KIB), step)
            flip_a_bit(random.Random(step), Path(fp.path(step)), Path(fp.path(step)))
        target = blank_state(kib=KIB)
        assert fp.recover(target) is None
        assert same(target, blank_state(kib=KIB))
        assert fp.steps() == [NEWER, OLDER]  # nothing better is there, and another copy may repair them


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("byte", [0, 1, 40])
def test_a_garbled_manifest_takes_no_memory_for_ever(job_root: str, keep: int, byte: int) -> None:
    """Not even one whose commit record cannot be parsed, so that nobody knows what version it is of."""
    settings = {**SETTINGS, "keep": keep}
    with fpt.init(job_root, **settings) as fp:
        for step in range(1, 4):
            fp.save(state_of(step, kib=KIB), step)
            if step == 2:
                _write(Path(fp.path(2), MANIFEST), byte, b"\xff")
    with fpt.init(job_root, **settings) as fp:
        target = blank_state(kib=KIB)
        assert fp.recover(target).step == 3
        for step in range(4, 8):
            fp.save(state_of(step, kib=KIB), step)
        assert fp.steps() == list(range(7, 7 - keep, -1))
    found = look(job_root)
    assert found.containers == found.manifests == set(found.complete)
    assert found.nbytes - found.manifest_bytes <= (keep + 1) * found.version_bytes + SLACK_BYTES, found


@pytest.mark.parametrize("epoch", [None, b"", b"0", b"x"], ids=repr)
def test_a_lost_epoch_does_not_let_old_versions_overrule_new_ones(job_root: str, epoch: bytes | None) -> None:
    for _ in range(3):
        with fpt.init(job_root, **SETTINGS) as fp:
            fp.save(state_of(100 + fp.epoch, kib=KIB), 100 + fp.epoch)
    path = Path(job_root, ".epoch")
    path.unlink()
    if epoch is not None:
        path.write_bytes(epoch)
    with fpt.init(job_root, **SETTINGS) as fp:
        assert fp.epoch == 4
        fp.recover(blank_state(kib=KIB), step=102)  # back to before step 103
        fp.save(state_of(50, kib=KIB), 50)
        target = blank_state(kib=KIB)
        assert fp.recover(target).step == 50
        assert same(target, state_of(50, kib=KIB))


def cut_and_save_on(rank: int, job_root: str) -> list[bool]:
    with fpt.init(job_root, **SETTINGS) as fp:
        for step in (OLDER, NEWER):
            fp.save(state_of(step, kib=KIB), step)
        for path in _objects(Path(fp.path(OLDER))):
            os.truncate(path, PAGE)
        punch_a_hole(random.Random(0), Path(fp.path(NEWER)), Path(fp.path(OLDER)))
        return [fp.save(state_of(step, kib=KIB), step).done() for step in range(3, 9)]


@pytest.mark.fault(22)
def test_a_buffer_that_was_cut_is_never_written_again(job_root: str) -> None:
    """To write where no page is any more is a SIGBUS, which kills the trainer."""
    assert Launcher(1).run(cut_and_save_on, job_root) == [[True] * 6]
    [answer] = Launcher(1).run(check, job_root, kib=KIB, **SETTINGS)
    assert answer["step"] == 8 and answer["exact"]
    found = look(job_root)
    assert found.nbytes - found.manifest_bytes <= 3 * found.version_bytes + SLACK_BYTES, found


# ---- several ranks ----------------------------------------------------------------------------------


def swap_ranks(rng: random.Random, newer: Path, older: Path) -> str:
    """What one rank saved under the name of another: of the same size, and whole in itself."""
    index = rng.randrange(2)
    a, b = (newer / f"rank{rank:05d}-{index}.safetensors" for rank in (0, 1))
    if rng.random() < 0.5:
        swap_files(a, b)
        return "exchanged"
    _write(b, 0, a.read_bytes())
    return "copied"


RANK_DAMAGES: list[Damage] = [
    *[swap_ranks] * 8, flip_a_bit, flip_a_bit_of_the_manifest, truncate, zero_a_page,
    swap_with_the_older_version, missing, torn_manifest, garble,
]  # fmt: skip


@pytest.mark.parametrize(("world_size", "trials"), [(2, 32), (1, 160)])
@pytest.mark.fault(20, 22, 24, "E")
def test_damages_to_what_two_ranks_saved(job_root: str, tmp_path: Path, world_size: int, trials: int) -> None:
    """Whether two ranks recover or one, no rank takes a value before every object has proved right."""
    whole = f"{job_root}/whole"
    Launcher(2).run(train, whole, str(tmp_path / "log"), saves=NEWER, kib=KIB, **SETTINGS)
    launcher = Launcher(world_size)
    rng = random.Random(world_size)
    tally: Counter[str] = Counter()
    for trial in range(trials):
        root = f"{job_root}/{trial}"
        shutil.copytree(whole, root, ignore=shutil.ignore_patterns(".pool"))
        damage = RANK_DAMAGES[trial % len(RANK_DAMAGES)]
        where = damage(rng, Path(root, f"step-{NEWER}_ckpt"), Path(root, f"step-{OLDER}_ckpt"))
        tally[f"{damage.__name__}: {where}"] += 1
        if world_size == 1:
            with fpt.init(root, **SETTINGS) as fp:
                refuses_the_step(fp)
                steps_back(fp)
        else:
            for answer in launcher.run(check, root, kib=KIB, **SETTINGS):
                assert answer["step"] == OLDER and answer["exact"], (
                    f"{trial}, {damage.__name__}: {where}, {answer}"
                )
        shutil.rmtree(root)
    report(f"{trials} damages to two ranks' objects detected by {world_size}:", **tally)
