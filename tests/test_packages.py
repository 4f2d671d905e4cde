"""The wheel and the sdist: they build, and what they hold works where neither torch nor jax is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 240

# A process in which nothing of torch's or jax's can be imported, nor anything of the source tree.
USE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "jax", "orbax", "tensorstore"):
            raise ModuleNotFoundError(f"there is no {name} here", name=name)
sys.meta_path.insert(0, Refuse())
import numpy as np, flashpoint
from flashpoint.cli import main
assert flashpoint.__file__.startswith(sys.argv[1]), flashpoint.__file__
objects = flashpoint.CheckpointObjectManager(sys.argv[2], rank=0)
flashpoint.MLFlashpointCheckpointSaver(objects).save(7, {"w": np.arange(5.0)})
with flashpoint.open(f"{sys.argv[2]}/step-7_ckpt") as checkpoint:
    assert checkpoint["w"].tolist() == [0, 1, 2, 3, 4]
for package in ("flashpoint_torch", "flashpoint_jax"):
    try:
        __import__(package)
    except ImportError as error:
        assert f"flashpoint[{package.removeprefix('flashpoint_')}]" in str(error), error
    else:
        raise AssertionError(f"{package} has found what is not there")
sys.exit(main(["verify", f"{sys.argv[2]}/step-7_ckpt"]))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, made in the environment of the tests: nothing is fetched."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S, cwd=ROOT)
    return folder


def test_the_wheel_works_without_torch_and_jax(built: Path, job_root: str, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path)
    assert {name.split("/")[0].split("-")[0] for name in names} == {
        "flashpoint",
        "flashpoint_torch",
        "flashpoint_jax",
    }
    for package in ("flashpoint", "flashpoint_torch", "flashpoint_jax"):
        assert f"{package}/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    done = subprocess.run(
        [sys.executable, "-c", USE, str(tmp_path), job_root],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_sdist_holds_what_is_needed_to_build_and_test(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "constraints.txt", "Makefile", "LICENSE", "README.md", "CHANGELOG.md"} <= names
    assert {"tests/conftest.py", "docs/format.md", "flashpoint/__init__.py"} <= names
    assert not any(name.startswith((".venv", "build")) for name in names)
