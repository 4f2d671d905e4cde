import fcntl
import os
import threading
import time

import pytest

from flashpoint.locks import keep_from_children, try_lock


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "file"
    found.touch()
    return str(found)


class Holder:
    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDWR)

    def close(self) -> None:
        os.close(self.fd)


def test_readers_share_and_writers_do_not(path):
    one, other, third = Holder(path), Holder(path), Holder(path)
    assert try_lock(one.fd, fcntl.LOCK_SH)
    assert try_lock(other.fd, fcntl.LOCK_SH)
    assert not try_lock(third.fd, fcntl.LOCK_EX)
    one.close()
    other.close()
    assert try_lock(third.fd, fcntl.LOCK_EX)
    third.close()


def test_a_lock_is_waited_for_no_longer_than_asked(path):
    holder, waiting = Holder(path), Holder(path)
    assert try_lock(holder.fd, fcntl.LOCK_EX)
    start = time.monotonic()
    assert not try_lock(waiting.fd, fcntl.LOCK_SH, 0.1)
    assert 0.1 <= time.monotonic() - start < 5
    threading.Timer(0.1, holder.close).start()
    assert try_lock(waiting.fd, fcntl.LOCK_SH, 30)
    waiting.close()


def test_a_forked_child_has_nothing_of_what_is_kept_from_it(path):
    kept, shared = Holder(path), Holder(path)
    keep_from_children(kept)
    child = os.fork()
    if child == 0:
        try:
            os.fstat(shared.fd)
            os._exit(0 if kept.fd == -1 else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.fstat(kept.fd)  # the parent's is untouched
    kept.close()
    shared.close()


def test_what_was_closed_before_the_fork_is_left_alone(path):
    holder = Holder(path)
    keep_from_children(holder)
    holder.close()
    holder.fd = -1
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
