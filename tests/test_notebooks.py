"""Every notebook runs from its first cell to its last, and leaves nothing behind, also when a cell fails.

What a notebook puts on the tmpfs it puts below a name that begins with ``flashpoint-notebook-``, and that name is on
the command line of every process it starts.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from tests.conftest import SHARED_MEMORY

REPOSITORY = Path(__file__).parents[1]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
NOTEBOOK_TIMEOUT_S = 120
PREFIX = "flashpoint-notebook-"
ANOTHER_RUN_S = 30  # what another run of these tests on this machine made is gone by then
FILE_BYTES_MAX = 300_000

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


class ThisPythonKernel(AsyncKernelManager):
    """A kernel of the interpreter that runs the tests, whichever kernels the machine has installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            display_name="the tests' own Python",
            language="python",
        )


@pytest.fixture(autouse=True)
def kernel_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Notebooks import the packages of this checkout, and nothing of the user's Jupyter takes part."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        folder = tmp_path / name.lower()
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Nothing that a notebook made is on the tmpfs, and no process that it started lives, when its kernel has ended."""
    before = _on_tmpfs() | _processes()
    yield
    deadline_s = time.monotonic() + ANOTHER_RUN_S
    while (left := (_on_tmpfs() | _processes()) - before) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    assert left == set()


def _on_tmpfs() -> set[str]:
    return {name for name in os.listdir(SHARED_MEMORY) if name.startswith(PREFIX)}


def _processes() -> set[str]:
    """Processes that have something of a notebook's on their command line, such as a rank or an agent."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            if f"{SHARED_MEMORY}/{PREFIX}" in words:
                found.add(f"{entry.name}: {words}")
    return found


def _read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def _run(notebook: NotebookNode) -> None:
    """Run all cells in a kernel of their own, and wait until it has ended."""
    NotebookClient(
        notebook,
        kernel_manager_class=ThisPythonKernel,
        timeout=NOTEBOOK_TIMEOUT_S,
        resources={"metadata": {"path": str(REPOSITORY / "notebooks")}},
    ).execute()


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@every_notebook
def test_a_notebook_runs(path: Path) -> None:
    _run(_read(path))


@every_notebook
def test_a_notebook_that_fails_midway_leaves_nothing_on_the_tmpfs(path: Path) -> None:
    notebook = _read(path)
    notebook.cells.insert(len(notebook.cells) // 2, nbformat.v4.new_code_cell("raise SystemError('midway')"))
    with pytest.raises(CellExecutionError, match="midway"):
        _run(notebook)


@every_notebook
def test_a_stored_notebook_is_small_valid_and_the_same_on_every_machine(path: Path) -> None:
    assert path.stat().st_size < FILE_BYTES_MAX
    notebook = _read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "not run from its top"
    outputs = [output for cell in code for output in cell.outputs]
    assert all(output.output_type in ("stream", "display_data", "execute_result") for output in outputs)
    timed = [cell.id for cell in notebook.cells if "execution" in cell.metadata]
    assert timed == [], "they differ with each run: store notebooks with NotebookClient(record_timing=False)"
    text = "".join(output.get("text", "") for output in outputs)
    assert re.findall(r"/(?:home|root|tmp|usr|work|Users)/\S*", text) == []
