"""`CopyBuffers`: the pool files of copies are there before the next version comes, and are no more than needed."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from flashpoint.buffers import BufferPool

_VERSIONS_MAX: Final = 8  # whose sizes are remembered


class CopyBuffers:
    """Of one agent.

    Args:
        pool: of its copies.
        prefault: whether buffers are allocated and touched ahead, in a thread that nobody waits for.
    """

    def __init__(self, pool: BufferPool, *, prefault: bool) -> None:
        self._pool = pool
        self._prefault = prefault
        self._nbytes: deque[int] = deque(maxlen=_VERSIONS_MAX)  # of each version's copies
        self._stopping = threading.Event()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="flashpoint-agent-prefault")

    def filled(self, sizes: Sequence[int], keep: int) -> None:
        """Copies of these sizes are all that this node has of a version; the next ones will need as many."""
        self._nbytes.append(sum(sizes))
        if self._prefault and keep:
            self._worker.submit(self._reserve, Counter(sizes), keep + 1)

    def _reserve(self, sizes: Counter[int], versions: int) -> None:
        budget = versions * sum(nbytes * n for nbytes, n in sizes.items())
        for nbytes, n in sizes.items():
            self._pool.reserve(nbytes, n * versions, budget_bytes=budget, stop=self._stopping)

    def trim(self, keep: int) -> None:
        """Delete free files that no version has needed lately."""
        if self._nbytes and keep:
            self._pool.trim((keep + 2) * max(self._nbytes))

    def stop(self) -> None:
        """Allocate nothing more; from any thread, or a signal's handler."""
        self._stopping.set()

    def close(self) -> None:
        self.stop()
        self._worker.shutdown(wait=True, cancel_futures=True)
