import threading
import time

import pytest

from flashpoint.errors import DeadlineError, SaveError
from flashpoint.handle import SaveHandle


def test_the_moments_are_reached_in_turn_and_timed():
    handle = SaveHandle(7, strict=False)
    assert (handle.done("staged"), handle.done()) == (False, False)
    assert "started" in repr(handle)
    handle.reach("staged")
    assert handle.wait("staged", 0)
    assert not handle.wait("complete", 0.01)
    assert handle.error is None
    handle.reach("complete")
    assert handle.wait()
    assert handle.done()
    assert 0 <= handle.timings["staged"] <= handle.timings["complete"]
    assert repr(handle) == "<SaveHandle of step 7: complete>"


def test_a_failed_save_says_so_at_once_and_keeps_what_was_reached():
    handle = SaveHandle(7, strict=False)
    handle.reach("staged")
    error = SaveError(7, {1: "died"})
    threading.Timer(0.05, handle.fail, (error,)).start()
    start = time.monotonic()
    assert not handle.wait("complete", 30)
    assert time.monotonic() - start < 10
    assert handle.error is error
    assert handle.wait("staged", 0)
    assert "failed" in repr(handle)


def test_a_strict_one_raises():
    handle = SaveHandle(7, strict=True)
    with pytest.raises(DeadlineError, match=r"step 7 was not complete within 0\.01 s"):
        handle.wait("complete", 0.01)
    error = SaveError(7, {1: "died"})
    handle.fail(error)
    with pytest.raises(SaveError) as found:
        handle.wait("complete", 0.01)
    assert found.value is error


def test_an_unknown_moment_is_refused_with_the_known_ones():
    for ask in (SaveHandle(7, strict=False).wait, SaveHandle(7, strict=False).done):
        with pytest.raises(ValueError, match=r"'finished'.*staged, complete"):
            ask("finished")


def test_many_threads_may_wait():
    handle = SaveHandle(7, strict=False)
    found = []
    threads = [threading.Thread(target=lambda: found.append(handle.wait("complete", 30))) for _ in range(5)]
    for thread in threads:
        thread.start()
    handle.reach("complete")
    for thread in threads:
        thread.join(30)
    assert found == [True] * 5
