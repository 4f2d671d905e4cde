"""Every error Flashpoint raises on purpose, one class for each way out.

A message names the step, rank, object and entry it is about where there is one, and ends with what
to do next. All derive from `FlashpointError`, so one ``except`` catches whatever is ours.
"""

from __future__ import annotations

from collections.abc import Mapping


class FlashpointError(Exception):
    """Base of every error raised on purpose by Flashpoint."""


def reason_of(error: Exception) -> str:
    """What to tell other ranks of an error: its message, with its type where that is not one of ours."""
    return str(error) if isinstance(error, FlashpointError) else f"{type(error).__name__}: {error}"


class InvalidIdError(FlashpointError, ValueError):
    """A job root, container or object name that breaks the naming rules of `flashpoint.ids`."""


class ConfigError(FlashpointError, ValueError):
    """A setting with a wrong type, unit or range; the message names the setting and its source."""


class LayoutError(FlashpointError, ValueError):
    """Entries that cannot be laid out in one object: duplicate names, unknown dtypes, bad shapes."""


class CheckpointExistsError(FlashpointError, FileExistsError):
    """The step is already complete and ``overwrite=True`` was not given."""


class CheckpointNotFoundError(FlashpointError, FileNotFoundError):
    """There is no complete checkpoint where one was asked for."""


class RecoveryError(FlashpointError):
    """Versions are there, but none can be loaded now: mend what was named, or remove them to start from scratch."""


class NoSpaceError(FlashpointError):
    """The version does not fit into the memory budget or into the tmpfs. Nothing was changed."""


class ManifestError(FlashpointError):
    """A manifest that is torn, garbled, too large, or of a version this release cannot read."""


class ManifestVersionError(ManifestError):
    """A manifest in a format of another release."""


class CorruptObjectError(FlashpointError):
    """Bytes that do not match the digest the manifest gives for them."""


class MismatchError(FlashpointError):
    """The state to load into differs from the checkpoint in names, shapes or dtypes."""


class DeadlineError(FlashpointError, TimeoutError):
    """A bounded wait ran out; the message names what was awaited, from whom, and for how long."""


class ProtocolError(FlashpointError):
    """What a peer sent is refused, or a peer refused what it was sent.

    Attributes:
        code: why, in one word (`flashpoint.replication.messages.CODES`).
    """

    def __init__(self, code: str, reason: str) -> None:
        self.code = code
        self.reason = reason
        super().__init__(f"{code}: {reason}")

    def __reduce__(self) -> tuple[type[ProtocolError], tuple[str, str]]:
        return type(self), (self.code, self.reason)


class ReplicationError(FlashpointError):
    """A version that peers do not hold as it should be, or could not give back.

    Attributes:
        code: why, in one word, where there is one (`flashpoint.replication.messages.CODES`).
    """

    def __init__(self, message: str, code: str = "") -> None:
        self.code = code
        super().__init__(message)

    def __reduce__(self) -> tuple[type[ReplicationError], tuple[str, str]]:
        return type(self), (str(self), self.code)


class StorageError(FlashpointError):
    """Long-term storage that refuses, fails, or belongs to another job. Memory and training are not touched."""


class SaveError(FlashpointError):
    """A save that did not become complete, on any rank.

    Attributes:
        step: the step that was being saved.
        failures: rank -> what went wrong there, as that rank reported it.
    """

    def __init__(self, step: int, failures: Mapping[int, str]) -> None:
        self.step = step
        self.failures = dict(failures)
        causes = "; ".join(f"rank {rank}: {cause}" for rank, cause in sorted(self.failures.items()))
        super().__init__(f"step {step} was not saved: {causes}")

    def __reduce__(self) -> tuple[type[SaveError], tuple[int, dict[int, str]]]:
        # Exceptions cross process boundaries (torch's process executor pickles them); the default
        # reduction would call __init__ with the message alone.
        return type(self), (self.step, self.failures)
