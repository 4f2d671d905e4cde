"""A job's keys: one CURVE key pair that all its nodes share, made on first use, kept with mode 0600."""

from __future__ import annotations

import os
import secrets
from typing import Annotated, Final

import msgspec
import zmq
from msgspec import Meta

from flashpoint.confined import open_file
from flashpoint.errors import ProtocolError
from flashpoint.replication.messages import Job

KEYS_NAME: Final = "keys"
_KEYS_BYTES_MAX: Final = 4096

CurveKey = Annotated[bytes, Meta(min_length=40, max_length=40)]  # Z85, rfc.zeromq.org/spec/32


class JobKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a job and the key pair that proves to belong to it.

    Attributes:
        job: 32 hex digits.
        public, secret: a CURVE key pair, in Z85.
    """

    job: Job
    public: CurveKey
    secret: CurveKey

    def __repr__(self) -> str:
        return f"<JobKeys of {self.job}>"  # a secret reaches no log

    @classmethod
    def generate(cls) -> JobKeys:
        public, secret = zmq.curve_keypair()
        return cls(job=secrets.token_hex(16), public=public, secret=secret)


def read_keys(folder: str) -> JobKeys | None:
    """The keys kept in a folder; None where there are none.

    Raises:
        ProtocolError: the file is not one of keys, or others than its owner may read it.
    """
    path = f"{folder}/{KEYS_NAME}"
    try:
        fd = open_file(folder, KEYS_NAME)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ProtocolError("keys", f"{path} is not one of ours: {error.strerror}; delete it") from None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if status.st_mode & 0o077 or status.st_uid not in (os.geteuid(), 0):
            raise ProtocolError("keys", f"{path} can be read by others than its owner: delete it")
        data = file.read(_KEYS_BYTES_MAX)
    try:
        return msgspec.json.decode(data, type=JobKeys)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError("keys", f"{path} holds no keys: {error}") from None


def write_keys(folder: str, keys: JobKeys) -> None:
    """Keep the keys, in place of any others."""
    path = f"{folder}/{KEYS_NAME}"
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(msgspec.json.encode(keys))
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
