"""Collection pauses while plans are made, and is afterwards as the program had it."""

import gc
import threading
from collections.abc import Iterator

import pytest

from flashpoint.gc_pause import gc_paused


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    gc.enable()


def test_a_pause_ends_with_its_block_also_by_an_error():
    with gc_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), gc_paused():
        raise KeyError
    assert gc.isenabled()


def test_pauses_nest():
    with gc_paused():
        with gc_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_the_program_switched_off_stays_off():
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()


def test_a_decorated_function_pauses_at_each_call():
    enabled = gc_paused()(gc.isenabled)
    assert not enabled()
    assert not enabled()
    assert gc.isenabled()


def test_pauses_of_threads_that_overlap_end_with_the_last():
    began, end = threading.Event(), threading.Event()

    def other() -> None:
        with gc_paused():
            began.set()
            end.wait(30)

    thread = threading.Thread(target=other)
    with gc_paused():
        thread.start()
        assert began.wait(30)
    assert not gc.isenabled()
    end.set()
    thread.join(30)
    assert gc.isenabled()
