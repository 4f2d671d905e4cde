"""Orbax's own tests of checkpointers, as its wheel ships them, with our handlers in place of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
import unittest
from typing import Any

import orbax.checkpoint as ocp
import pytest
from absl import flags
from orbax.checkpoint._src.handlers import composite_checkpoint_handler as composite

import flashpoint_jax
from flashpoint.telemetry import counters
from tests.conftest import SHARED_MEMORY
from tests.jax.workers import Workers

suite = pytest.importorskip("orbax.checkpoint._src.checkpointers.checkpointer_test_utils")

NOT_OURS = {
    # Of how stock handlers write: their limits on bytes under way, their files.
    "test_memory_limiting0",
    "test_memory_limiting1",
    "test_save_with_failing_array_metadata_store_in_finalize",
}
SAVE_NOTHING = {
    "test_restore_missing_path",
    "test_legacy_api",
    "test_save_restore_named_tuple_default",  # a tree without leaves
}


def ours(handler: Any) -> Any:
    """The handler that a test asks for, from memory where it is a stock one."""
    if type(handler) is ocp.PyTreeCheckpointHandler:
        stock = handler._handler_impl
        return flashpoint_jax.FlashpointPyTreeHandler(
            stock={"pytree_metadata_options": stock._pytree_metadata_options}
        )
    if type(handler) is composite.CompositeCheckpointHandler:
        return composite.CompositeCheckpointHandler(handler_registry=flashpoint_jax.registry())
    return handler


class OnTmpfs(suite.CheckpointerTestBase.Test):  # type: ignore[misc]
    __test__ = False

    def setUp(self) -> None:
        flags.FLAGS.mark_as_parsed()
        super().setUp()
        # In a step's folder, as a manager has it: beside a checkpoint that lies alone there would be the pool.
        self.directory = self.directory.parent / "1" / "ckpt"


class SynchronousTest(OnTmpfs):
    def checkpointer(self, handler: Any, **kwargs: Any) -> Any:
        return ocp.Checkpointer(ours(handler), **kwargs)


class AsynchronousTest(OnTmpfs):
    def checkpointer(self, handler: Any, **kwargs: Any) -> Any:
        return ocp.AsyncCheckpointer(ours(handler), **kwargs)


CASES = {"synchronous": SynchronousTest, "asynchronous": AsynchronousTest}


def names_of(case: type[unittest.TestCase]) -> list[str]:
    return [name for name in unittest.TestLoader().getTestCaseNames(case) if name not in NOT_OURS]


def run(case: str, name: str, folder: str) -> str:
    """Run one of Orbax's tests; what went wrong, or nothing."""
    flags.FLAGS.mark_as_parsed()
    flags.FLAGS.test_tmpdir = folder
    result = unittest.TestResult()
    before = counters().get("saves_complete", 0)
    CASES[case](name).run(result)
    if counters().get("saves_complete", 0) == before and name not in SAVE_NOTHING:
        return "nothing was saved by our handler"
    return "\n".join(text for _, text in [*result.failures, *result.errors])


@pytest.fixture
def folder() -> Any:
    path = tempfile.mkdtemp(prefix="flashpoint-test-", dir=SHARED_MEMORY)
    yield path
    shutil.rmtree(path, ignore_errors=True)


EVERY = [(case, name) for case, kind in CASES.items() for name in names_of(kind)]


@pytest.mark.parametrize(("case", "name"), EVERY)
def test_in_one_process(folder: str, case: str, name: str) -> None:
    assert run(case, name, folder) == ""


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, name, marks=[pytest.mark.soak] if case == "synchronous" else [])
        for case, name in EVERY
    ],
)
def test_in_two_processes(workers: Workers, folder: str, case: str, name: str) -> None:
    os.chmod(folder, 0o777)
    assert workers.run(run, case, name, folder) == ["", ""]
