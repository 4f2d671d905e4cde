import inspect
import pickle

import pytest

from flashpoint import errors
from flashpoint.errors import DeadlineError, FlashpointError, ProtocolError, SaveError

ARGUMENTS = {SaveError: (7, {0: "no space", 3: "died"}), ProtocolError: ("wrong-job", "another job's")}
ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, FlashpointError)]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_crosses_a_process_boundary(kind):
    error = kind(*ARGUMENTS.get(kind, ("step 7: what happened",)))
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert str(back) == str(error)
    assert isinstance(back, FlashpointError)


def test_a_save_error_names_the_step_and_every_rank_that_failed():
    error = SaveError(7, {3: "died", 0: "no space"})
    assert str(error) == "step 7 was not saved: rank 0: no space; rank 3: died"
    back = pickle.loads(pickle.dumps(error))
    assert (back.step, back.failures) == (7, {0: "no space", 3: "died"})


def test_a_save_error_keeps_its_own_copy_of_the_failures():
    failures = {0: "x"}
    error = SaveError(1, failures)
    failures[1] = "y"
    assert error.failures == {0: "x"}


def test_python_code_may_catch_the_builtin_kind():
    assert issubclass(DeadlineError, TimeoutError)
    assert issubclass(errors.CheckpointExistsError, FileExistsError)
    assert issubclass(errors.CheckpointNotFoundError, FileNotFoundError)
    assert issubclass(errors.ConfigError, ValueError)
