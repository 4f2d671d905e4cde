"""`gc_paused`: no garbage collection while thousands of objects are made that will stay.

Plans, layouts and metadata are large and hold no cycles. Python's collector sees only that much is
allocated and walks the whole heap, which in a trainer takes 100 ms and more, right where training waits.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0  # that have begun and not ended, in all threads
_was_enabled = False


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause automatic collection, here or as a decorator; pauses may nest and overlap in any threads.

    The last to end restores what the first one found: where the program has switched collection off, it
    stays off. Memory is freed by reference counts all the time; only cycles wait.
    """
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses = max(_pauses - 1, 0)
            if _pauses == 0 and _was_enabled:
                gc.enable()


def _after_fork_in_child() -> None:
    """End the pauses of threads that the child does not have."""
    global _lock, _pauses
    _lock = threading.Lock()
    if _pauses and _was_enabled:
        gc.enable()
    _pauses = 0


os.register_at_fork(after_in_child=_after_fork_in_child)
