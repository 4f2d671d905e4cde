"""What follows a save in the background: the wait for Orbax's folder, then header, links, checksums, vote and manifest.

The thread is our own. Orbax's would wait five minutes for the signals of a save that failed elsewhere, keep the
program alive as long, and then run nothing, not even what gives the buffer back and tells the other processes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
import time
from typing import Any, Final

import jax
from orbax.checkpoint._src.futures import future as orbax_futures
from orbax.checkpoint._src.futures import synchronization

from flashpoint.errors import DeadlineError, FlashpointError, SaveError, reason_of
from flashpoint.saver import PendingCheckpoint
from flashpoint.telemetry import count, logger
from flashpoint_jax.session import ItemSaver, Session

_POLL_S: Final = 0.002
_TURN_S: Final = 1  # a wait is broken off this often, to see whether anyone still wants the save
_ORPHANED_S: Final = 5.0  # for a save that is under way when the program's main thread ends
_SETTLE_S: Final = 30.0


class SaveFuture:
    """The commit of one item, as the future that Orbax waits for.

    Args:
        error: what failed already; then all that is left is to tell the other processes.
        primary: the rank that makes the folder; None where each process makes its own.
    """

    def __init__(
        self,
        session: Session,
        saver: ItemSaver,
        pending: PendingCheckpoint,
        error: Exception | None,
        *,
        primary: int | None,
    ) -> None:
        self.name = "flashpoint_commit"
        self._session = session
        self._saver = saver
        self._pending = pending
        self._error: BaseException | None = error
        self._primary = primary
        self._signals = _Signals()
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self.name)
        self._thread.start()

    def result(self, timeout: float | None = None) -> None:
        """Wait for the commit.

        Raises:
            TimeoutError: it is not through yet.
            CancelledError: it was cancelled before it had begun.
            FlashpointError: the version was not saved.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"step {self._pending.step} is not committed after {timeout} s")
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Give the save up, if its folder is not there yet; once it is, the commit is a matter of moments."""
        self._cancelled.set()

    def _run(self) -> None:
        try:
            self._commit()
        except BaseException as failure:
            self._error = self._as_told(failure)
        else:
            self._error = None

    def _as_told(self, failure: BaseException) -> BaseException:
        if isinstance(failure, _NotWantedError) and self._cancelled.is_set():
            return concurrent.futures.CancelledError()
        if isinstance(failure, TimeoutError):
            # Orbax takes any for the end of its own patience, and tells that instead.
            told = SaveError(self._pending.step, {self._saver.coordinator.rank: str(failure)})
            told.__cause__ = failure
            return told
        return failure

    def _commit(self) -> None:
        saver, pending = self._saver, self._pending
        try:
            try:
                self._agree_on_folder()
                saver.write(pending)
            except Exception as failure:
                saver.withdraw(pending, failure)
                raise
            try:
                saver.write_metadata(pending)
                saver.finalize(pending)
            except Exception:
                saver.abandon(pending)  # where its outcome is known already, this changes nothing
                raise
            if self._makes_folder_for_others:
                saver.coordinator.remove(self._topic)  # all have voted, so all have read it
            self._session.committed(pending.container.item, pending.staged)  # type: ignore[attr-defined]
            count("saves_complete")
            logger.info("step %d is complete in %s", pending.step, pending.container)
        finally:
            saver.sidecars.pop(pending.topic, None)

    # ---- the folder -----------------------------------------------------------------------------

    @property
    def _topic(self) -> str:
        return f"{self._pending.topic}/folder"

    @property
    def _makes_folder_for_others(self) -> bool:
        coordinator = self._saver.coordinator
        return coordinator.world_size > 1 and self._primary == coordinator.rank

    def _agree_on_folder(self) -> None:
        """Wait until the item's folder is there, as the process knows that makes it; it tells the others.

        A folder that others merely see may be one that a crash left, which Orbax is about to remove and make
        anew. And Orbax's own signals do not reach them, once a manager of the program had
        ``enable_per_process_directory_creation``: that gives signals a name of each process's own, for good.
        """
        coordinator = self._saver.coordinator
        failure: Exception | None = self._error if isinstance(self._error, Exception) else None
        if self._primary not in (None, coordinator.rank):
            if failure is None:
                self._hear_of_folder()
        else:
            try:
                if failure is None:
                    self._wait_for_folder()
            except Exception as error:
                failure = error
            if self._makes_folder_for_others:
                coordinator.publish(self._topic, b"" if failure is None else reason_of(failure).encode())
        if failure is not None:
            raise failure

    def _wait_for_folder(self) -> None:
        path = self._pending.container.path
        deadline = self._deadline(f"Orbax did not make {path}")
        while not self._signals.have_come(_TURN_S):
            deadline.check()
        while not os.path.isdir(path):
            deadline.check()
            time.sleep(_POLL_S)

    def _hear_of_folder(self) -> None:
        path, primary = self._pending.container.path, self._primary
        deadline = self._deadline(f"rank {primary} did not tell that Orbax has made {path}")
        while True:
            with contextlib.suppress(DeadlineError):
                told = self._saver.coordinator.fetch(self._topic, _TURN_S)
                break
            deadline.check()
        if told:
            assert primary is not None
            raise SaveError(self._pending.step, {primary: told.decode()})

    def _deadline(self, what: str) -> _Deadline:
        return _Deadline(
            f"step {self._pending.step}: {what}", self._saver.config.commit_timeout_s, self._cancelled
        )


class _NotWantedError(FlashpointError):
    """Nobody waits for the save any more."""


class _Deadline:
    """The end of a wait: by time, by cancellation, or with the program."""

    def __init__(self, what: str, timeout_s: float, cancelled: threading.Event) -> None:
        self._what = what
        self._timeout_s = timeout_s
        self._begin = time.monotonic()
        self._orphaned: float | None = None
        self._cancelled = cancelled

    def check(self) -> None:
        """Raise if there is nothing left to wait for."""
        now = time.monotonic()
        if self._cancelled.is_set():
            raise _NotWantedError(f"{self._what}, and the save was cancelled")
        if now - self._begin > self._timeout_s:
            raise DeadlineError(f"{self._what} within {self._timeout_s:g} s")
        if not threading.main_thread().is_alive():
            self._orphaned = self._orphaned or now
            if now - self._orphaned > _ORPHANED_S:
                raise _NotWantedError(f"{self._what}, and the program has ended")


class _Signals:
    """What Orbax has promised to tell of the save that this thread is beginning: that its folders are made."""

    def __init__(self) -> None:
        self._operation = synchronization.OperationIdGenerator.get_current_operation_id()
        contract = orbax_futures.AwaitableSignalsContract
        self._awaited: list[Any] = list(contract.get_awaitable_signals_from_contract(self._operation))

    def have_come(self, timeout_s: int) -> bool:
        """Whether all have come, after at most about ``timeout_s`` for the next."""
        while self._awaited:
            try:
                orbax_futures.wait_for_signals(
                    self._awaited[:1], timeout_secs=timeout_s, operation_id=self._operation
                )
            except TimeoutError:
                return False
            except jax.errors.JaxRuntimeError as error:
                if not str(error).startswith("DEADLINE_EXCEEDED"):
                    raise FlashpointError(f"JAX's coordination service is gone: {error}") from error
                return False
            del self._awaited[0]
        return True


def settle() -> None:
    """Let Orbax make the folders of the save that this thread has begun; for a save that is about to be refused.

    Orbax makes them in the background, and does not wait for that when a handler raises. A manager that is closed
    then makes that thread fail, and others, which nothing stops, wait five minutes for it.
    """
    signals = _Signals()
    deadline = time.monotonic() + _SETTLE_S
    with contextlib.suppress(FlashpointError):
        while not signals.have_come(_TURN_S) and time.monotonic() < deadline:
            pass
