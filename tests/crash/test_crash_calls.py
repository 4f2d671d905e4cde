"""Wherever an operation is killed or fails, nothing is lost, mixed, wrong or left over; and a bug that is put in shows.

Every run is one of `python -m tests.crash`, in a process of its own: it forks, and pytest's process has threads.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import checker
from tests.checker import Expected
from tests.crash.all_scenes import SCENES
from tests.crash.mutants import MUTANTS
from tests.crash.scenes import Save

ROOT = Path(__file__).parents[2]
KILLS = ["killed-before", "killed-after"]
FAILURES = ["EIO", "ENOSPC", "EINTR", "short"]
BOTH = [
    pytest.param(KILLS, id="killed"),
    pytest.param(FAILURES, id="failed"),
]
GROUPS = {
    "save": ["save", "save over a step", "finalize", "retention"],
    "commit": ["commit, rank 0 of 2", "commit, rank 1 of 2", "commit on one node, rank 1 of 2"],
    "recovery": ["recovery"],
    "drain": ["drain"],
    "replication": ["replication, node 0 of 2", "replication, node 1 of 2", "recovery from a peer"],
}
# Violations that were found once, and mended.
FOUND = {
    "save": [
        "EIO:newfstatat/manifest/1",  # a manifest that cannot be looked at: its descriptor stayed open
        "ENOSPC:flock/pool/2",  # the end of a turn in the pool: the folder stayed locked, a buffer in use
        "EINTR:close/pool/3",
    ],
    # Nobody was told of the failure: the others waited until their deadline, and the next save was lost as well.
    "commit, rank 0 of 2": ["EIO:unlink/marker/1", "EIO:getdents64/root/9"],
    "drain": [
        "EINTR:rmdir/storage-drain-record/1",  # empty folders stayed
        "killed-before:rmdir/storage-container/2",
        "killed-before:write/storage-drain-record/2",  # the word of a node, half written, was read by the next
    ],
    # What an agent had in hand when it was killed stayed until the job was started again.
    "replication, node 1 of 2": [
        "killed-before:ftruncate/pool-file/1",
        "killed-before:rename/agent-file/2",
        "killed-before:unlink/object/1",
        "EIO:newfstatat/root/5",  # the job root could not be looked at for once: the agent never had memory again
    ],
    # The newest version, whose manifest could not be looked at for once, was taken for debris and deleted.
    "recovery": ["EIO:newfstatat/manifest/12", "EINTR:newfstatat/manifest/12"],
    "recovery from a peer": ["killed-before:rename/manifest/1"],
}


def crash(folder: str, *options: str, timeout_s: float = 280) -> str:
    """What a run of the harness says; it must end well."""
    command = [sys.executable, "-m", "tests.crash", "--folder", folder, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False)
    if done.returncode == 77:
        pytest.skip(done.stderr)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def options_of(name: str, values: list[str]) -> list[str]:
    return [text for value in values for text in (name, value)]


# ---- the points -----------------------------------------------------------------------------------------------


@pytest.mark.fault(10, 18)
@pytest.mark.parametrize("kinds", BOTH)
@pytest.mark.parametrize("group", GROUPS)
def test_at_a_sample_of_calls_no_invariant_breaks(job_root: str, group: str, kinds: list[str]) -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(SCENES)
    scenes = options_of("--scene", GROUPS[group])
    said = crash(job_root, *scenes, *options_of("--kind", kinds), "--sample", "8", "--seed", "6")
    assert said.count(" 0 violations") == len(GROUPS[group])


@pytest.mark.fault(18)
@pytest.mark.parametrize("scene", FOUND)
def test_what_was_found_once_stays_mended(job_root: str, scene: str) -> None:
    crash(job_root, "--scene", scene, *options_of("--only", FOUND[scene]))


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("kinds", BOTH)
@pytest.mark.parametrize("scene", SCENES)
def test_at_every_call_no_invariant_breaks(job_root: str, scene: str, kinds: list[str]) -> None:
    crash(job_root, "--scene", scene, *options_of("--kind", kinds), timeout_s=4 * 3600)


# ---- bugs that are put in -------------------------------------------------------------------------------------


@pytest.mark.fault(10)
def test_each_bug_that_is_put_in_is_found(job_root: str) -> None:
    said = crash(job_root, "--mutants")
    assert f"{len(MUTANTS)} bugs, 0 not found" in said


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_bug_that_is_put_in_is_found_by_going_through_all_calls(job_root: str, mutant: str) -> None:
    command = [sys.executable, "-m", "tests.crash", "--folder", job_root]
    command += ["--scene", MUTANTS[mutant].scene, "--mutant", mutant]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, cwd=ROOT, check=False)
    if done.returncode == 77:
        pytest.skip(done.stderr)
    print(done.stdout)
    assert " 1 violations" in done.stdout, done.stdout + done.stderr[-3000:]


# ---- the checker ----------------------------------------------------------------------------------------------


def test_the_checker_shares_no_code_with_what_it_checks() -> None:
    tree = ast.parse(Path(checker.__file__).read_text())
    imported = {
        name.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in node.names
    }
    imported |= {node.module.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported - {"__future__", *sys.stdlib_module_names} == {"numpy", "xxhash"}
    code = "import sys, tests.checker; print([name for name in sys.modules if name.startswith('flashpoint')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def overwrite(path: str, begin: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(begin)
        file.write(data)


MANIFEST, OBJECT = "step-1_ckpt/.metadata", "step-1_ckpt/rank00000-0.safetensors"
DAMAGES: dict[str, tuple[Callable[[str], object], str]] = {
    "a byte of an object": (
        lambda root: overwrite(f"{root}/{OBJECT}", 9000, b"\xa5"),
        "does not match its digest",
    ),
    "a pad of its header": (
        lambda root: overwrite(f"{root}/{OBJECT}", 4000, b"x"),
        "does not match its digest",
    ),
    "an object cut off": (lambda root: os.truncate(f"{root}/{OBJECT}", 4096), "has 4096 bytes"),
    "a byte of the manifest": (
        lambda root: overwrite(f"{root}/{MANIFEST}", 99, b"9"),
        "does not match its trailer",
    ),
    "a manifest cut off": (lambda root: os.truncate(f"{root}/{MANIFEST}", 300), "must be refused"),
    "no object": (
        lambda root: os.unlink(f"{root}/{OBJECT}"),
        "I3: the newest that can be loaded is (-1, -1)",
    ),
    "no manifest": (
        lambda root: os.unlink(f"{root}/{MANIFEST}"),
        "I3: the newest that can be loaded is (-1, -1)",
    ),
    "another name": (
        lambda root: os.rename(f"{root}/step-1_ckpt", f"{root}/step-2_ckpt"),
        "it is the manifest of step 1, in the folder of step 2",
    ),
    "a marker": (lambda root: open(f"{root}/step-1_ckpt__0__unfinished", "x").close(), "I3: the newest"),
    "an epoch cut off": (lambda root: os.truncate(f"{root}/.epoch", 0), "does not know its epoch"),
}


@pytest.fixture
def saved(job_root: str) -> str:
    """A job root with step 1, saved by the real thing."""
    scene = Save(".")
    scene.folder = job_root
    os.makedirs(scene.roots[0], mode=0o700)
    scene.prepare(0, "prepare", print)
    return scene.roots[0]


EXPECTED = Expected({1: [0]}, floor=(1, 1))


def test_the_checker_finds_nothing_wrong_with_what_was_saved(saved: str) -> None:
    node = checker.read(saved)
    assert checker.violations([node], EXPECTED) == []
    assert checker.leaks(node, buffers_max=2, steps=[1]) == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_checker_finds_damage(saved: str, damage: str) -> None:
    do, said = DAMAGES[damage]
    do(saved)
    wrong = checker.violations([checker.read(saved)], EXPECTED)
    assert any(said in text for text in wrong), wrong


def test_the_checker_knows_one_attempt_and_one_step_from_another(saved: str) -> None:
    node = checker.read(saved)
    assert "I2" in checker.violations([node], EXPECTED._replace(attempts={1: [1]}))[0]
    assert "never saved" in checker.violations([node], EXPECTED._replace(attempts={}))[0]
    entries = checker.known(1)
    assert list(checker.wrong_bytes(entries, 1, 0, 0, "here")) == []
    for other in (checker.known(2), checker.known(1, 1), checker.known(1, 0, 1)):
        assert len(list(checker.wrong_bytes(other, 1, 0, 0, "here"))) == 3
