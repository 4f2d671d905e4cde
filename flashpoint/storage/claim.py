"""Whose storage it is: looked at when a job starts, and by the agents before they write.

Each start of a job writes its name, its key's id and its epoch. Whoever finds another's there later has been taken
over, and writes no more: so two jobs with one name do not mix what they drain, and an agent that a partition left
behind does not either.
"""

from __future__ import annotations

import hashlib
import os
from typing import Final

from flashpoint.config import FlashpointConfig
from flashpoint.errors import CheckpointNotFoundError, StorageError
from flashpoint.storage.records import OWNER_NAME, Owner, decode, encode
from flashpoint.storage.store import Store, bounded, open_store
from flashpoint.telemetry import logger

_CREDENTIALS: Final = ("AWS_", "GOOGLE_", "GCS_")


def check(config: FlashpointConfig, job_root: str) -> Owner | None:
    """Who owns the storage now; None where nobody does yet. Asks it for the first time, within its timeout.

    Raises:
        ConfigError: it cannot be opened.
        StorageError: it cannot be read, or belongs to a job of another name.
        DeadlineError: it does not answer.
    """
    store = open_store(config)

    def ask() -> Owner | None:
        store.folders()  # a bucket or folder that is missing shows here
        return read_owner(store)

    try:
        owner = bounded(ask, _patience_s(config), f"storage={config.storage!r}")
    except StorageError as error:
        raise StorageError(
            f"storage={config.storage!r} cannot be used: {error}; see that it is there, and that this host's "
            "credentials may list, read, write and delete there"
        ) from error
    name = job_name(job_root)
    if owner is not None and owner.name != name:
        raise StorageError(
            f"storage={config.storage!r} holds the checkpoints of another job, {owner.name!r}, and this one is "
            f"{name!r}: give it a prefix of its own, or delete {OWNER_NAME} there if that job is over"
        )
    return owner


def claim(config: FlashpointConfig, job_root: str, job: str, epoch: int, found: Owner | None) -> None:
    """Make the storage this start's; by one rank. Writing shows that it may be written, too.

    Args:
        found: what `check` returned.

    Raises:
        StorageError, DeadlineError: it cannot be written.
    """
    if found is not None and found.job != job:
        logger.warning(
            "storage=%r was last written by another start of %r that shares no memory with this one: "
            "this job takes it over; if that one still runs, it stops draining",
            config.storage,
            found.name,
        )
    store = open_store(config)
    data = encode(Owner(name=job_name(job_root), job=job, epoch=epoch))
    try:
        bounded(lambda: store.write(OWNER_NAME, data), _patience_s(config), f"storage={config.storage!r}")
    except StorageError as error:
        raise StorageError(f"storage={config.storage!r} cannot be written: {error}") from error


def require(store: Store, job: str, epoch: int) -> None:
    """Raise `StorageError` unless the storage is still this start's of this job."""
    owner = read_owner(store)
    if owner is None:
        raise StorageError(
            f"{store.url} is not the storage that the job was started with: {OWNER_NAME} is gone"
        )
    if (owner.job, owner.epoch) != (job, epoch):
        raise StorageError(
            f"{store.url} was taken over by another start of {owner.name!r} (epoch {owner.epoch}, this is {epoch}): "
            "two jobs with one name must not share a prefix"
        )


def read_owner(store: Store) -> Owner | None:
    try:
        return decode(store.read(OWNER_NAME, 0, None), Owner, OWNER_NAME)
    except CheckpointNotFoundError:
        return None


def job_name(job_root: str) -> str:
    return os.path.basename(job_root)


def fingerprint(config: FlashpointConfig) -> str:
    """Of what an agent drains with, its credentials included: one with others is of no use. Empty without storage."""
    if not config.storage:
        return ""
    settings = {
        name: value for name, value in config.to_env().items() if name.startswith("FLASHPOINT_STORAGE")
    }
    settings |= {name: value for name, value in os.environ.items() if name.startswith(_CREDENTIALS)}
    return hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()


def _patience_s(config: FlashpointConfig) -> float:
    return 2 * config.storage_timeout_s  # one request may be repeated
