"""AES-256-GCM over one direction of one session: frames that nobody else can read, change or make. Pure.

A key serves one direction of one session only, so a counter is a nonce that is never used twice (NIST SP
800-38D, section 8.2.1). Replays open again: what is sealed here must be harmless when it comes twice.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from flashpoint.errors import ProtocolError

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
# GCM keeps its promises for some 2^32 messages of one key (section 8.3); at 1 MiB each that is 4 PiB.
MESSAGES_MAX: Final = 1 << 32

Buffer = bytes | memoryview


class Sealer:
    """Seals what one side of a session sends.

    Args:
        key: of this direction, used by no other `Sealer`, ever.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._sealed = 0

    def seal(self, header: bytes, payload: Buffer) -> tuple[bytes, memoryview]:
        """The payload, sealed together with a header that stays readable; (nonce, sealed).

        Raises:
            ProtocolError: the key is used up; a new session brings another.
        """
        if self._sealed >= MESSAGES_MAX:
            raise ProtocolError("no-session", f"a key seals no more than {MESSAGES_MAX} messages")
        nonce = self._sealed.to_bytes(NONCE_BYTES, "big")
        self._sealed += 1  # before it is used: whatever fails now, the nonce is gone
        # Not a bytearray, which is filled with zeros first.
        sealed = np.empty(len(payload) + TAG_BYTES, dtype=np.uint8).data
        self._cipher.encrypt_into(nonce, payload, header, sealed)
        return nonce, sealed


class Opener:
    """Opens what the other side of a session has sealed."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def open(self, nonce: Buffer, header: bytes, sealed: Buffer) -> bytes:
        """A small payload.

        Raises:
            ProtocolError: it was not sealed so in this session.
        """
        try:
            return self._cipher.decrypt(nonce, sealed, header)
        except (InvalidTag, ValueError):
            raise _corrupt() from None

    def open_into(
        self, nonce: Buffer, header: bytes, sealed: Buffer, target: memoryview | npt.NDArray[np.uint8]
    ) -> None:
        """A payload, straight into ``target``, which holds nothing of meaning if this fails.

        Raises:
            ProtocolError: it was not sealed so in this session, or is not as long as ``target``.
        """
        if len(sealed) != len(target) + TAG_BYTES:
            raise ProtocolError("malformed", f"{len(sealed)} sealed bytes are not for {len(target)}")
        into = target.data if isinstance(target, np.ndarray) else target
        try:
            self._cipher.decrypt_into(nonce, sealed, header, into)
        except (InvalidTag, ValueError):
            raise _corrupt() from None


def _corrupt() -> ProtocolError:
    return ProtocolError("corrupt", "a frame was changed on its way, or sealed in another session")
