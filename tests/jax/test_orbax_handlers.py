"""Orbax's own tests of its handlers, from a wheel that still ships them, with our handlers in place of its own.

Wheels up to orbax-checkpoint 0.11.31 have those of the standard handler; newer ones have none. Fetch one, and name it:

    pip download --no-deps --only-binary :all: orbax-checkpoint==0.11.31 -d WHEELS
    ORBAX_TESTS_WHEEL=WHEELS/orbax_checkpoint-0.11.31-py3-none-any.whl pytest tests/jax/test_orbax_handlers.py

Nothing of it is installed: its tests run over the Orbax that is.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import types
import unittest
import zipfile
from typing import Any

import jax
import pytest
from absl import flags
from absl.testing import absltest  # noqa: F401  (it defines the flag that says where tests write)
from orbax.checkpoint import test_utils
from orbax.checkpoint._src.multihost import multihost

import flashpoint_jax
from flashpoint.telemetry import counters
from tests.conftest import SHARED_MEMORY
from tests.jax.workers import Workers

WHEEL = os.environ.get("ORBAX_TESTS_WHEEL", "")
SUITE = "orbax/checkpoint/_src/handlers/standard_checkpoint_handler_test_utils.py"

NOT_OURS = {
    # It calls a function of Orbax's that takes other arguments by now, and no handler.
    "test_construct_restore_args_with_fallback_sharding",
}
OF_EIGHT_DEVICES = {"test_custom_layout"}  # which two processes have here
SAVE_NOTHING = {"test_empty_error", "test_save_unsupported_type"}


class Handler(flashpoint_jax.FlashpointStandardHandler):
    """Ours, finalized as the suite's own handlers are."""

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        super().save(directory, *args, **kwargs)
        test_utils.sync_global_processes("saved")
        if multihost.process_index() == 0:
            self.finalize(directory)
        test_utils.sync_global_processes("finalized")


class OnTmpfs:
    """With our handler, and in a step's folder, as a manager has it: beside it there would be the pool."""

    @property
    def handler(self) -> Handler:
        return Handler()

    def setUp(self) -> None:
        super().setUp()  # type: ignore[misc]
        self.directory = self.directory / "1" / "ckpt"  # type: ignore[has-type]
        self.directory.mkdir(parents=True, exist_ok=True)
        test_utils.sync_global_processes("folder made")


def cases_of(wheel: str) -> dict[str, type[unittest.TestCase]]:
    """The suite's classes, over our handler."""
    module: Any = types.ModuleType("orbax_handler_tests")
    sys.modules[module.__name__] = module  # where dataclasses look for their module
    with zipfile.ZipFile(wheel) as archive:
        exec(compile(archive.read(SUITE), f"{wheel}/{SUITE}", "exec"), module.__dict__)
    base = module.StandardCheckpointHandlerTestBase
    return {name: type(name, (OnTmpfs, getattr(base, name)), {}) for name in ("Test", "TestJaxRandomKeys")}


def every_test(wheel: str) -> list[tuple[str, str]]:
    return [
        (name, test)
        for name, case in cases_of(wheel).items()
        for test in unittest.TestLoader().getTestCaseNames(case)
        if test not in NOT_OURS
    ]


def run(wheel: str, name: str, test: str, folder: str) -> str:
    """Run one of Orbax's tests; what went wrong, or nothing."""
    flags.FLAGS.mark_as_parsed()
    flags.FLAGS.test_tmpdir = folder
    result = unittest.TestResult()
    before = counters().get("saves_complete", 0)
    cases_of(wheel)[name](test).run(result)
    if counters().get("saves_complete", 0) == before and test not in SAVE_NOTHING:
        return "nothing was saved by our handler: " + str(result.failures + result.errors + result.skipped)
    return "\n".join(text for _, text in [*result.failures, *result.errors])


@pytest.fixture
def folder() -> Any:
    path = tempfile.mkdtemp(prefix="flashpoint-test-", dir=SHARED_MEMORY)
    yield path
    shutil.rmtree(path, ignore_errors=True)


if WHEEL:

    @pytest.mark.parametrize(("name", "test"), every_test(WHEEL))
    def test_in_one_process(folder: str, name: str, test: str) -> None:
        if test in OF_EIGHT_DEVICES and jax.device_count() != 8:
            pytest.skip("it needs eight devices")
        assert run(WHEEL, name, test, folder) == ""

    @pytest.mark.parametrize(("name", "test"), every_test(WHEEL))
    def test_in_two_processes(workers: Workers, folder: str, name: str, test: str) -> None:
        os.chmod(folder, 0o777)
        assert workers.run(run, WHEEL, name, test, folder) == ["", ""]

else:

    @pytest.mark.skip(reason="ORBAX_TESTS_WHEEL names no wheel with Orbax's tests of its handlers")
    def test_orbaxs_tests_of_its_handlers() -> None:
        raise AssertionError
