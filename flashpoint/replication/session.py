"""A session between two nodes, and how its frames on the bulk connection look. Pure.

    fetch, refusal   session id | [nonce] | message                one frame; the message is sealed
    data             session id | [nonce] | header,  payload       two frames; the payload is sealed

Without encryption there is no nonce and nothing is sealed: whoever knows the session's id may use it then.
A refusal under the id of all zeros belongs to no session, and is no more than a hint.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from flashpoint.errors import ProtocolError
from flashpoint.replication import limits
from flashpoint.replication.messages import Data, Message, decode_bulk_reply, encode
from flashpoint.replication.sealing import NONCE_BYTES, TAG_BYTES, Opener, Sealer

NO_SESSION: Final = bytes(limits.SESSION_BYTES)
_BODY: Final = limits.SESSION_BYTES + NONCE_BYTES  # where a sealed frame's body begins


class Payload:
    """The bytes of a `Data`, as they lie in the frame that was received."""

    __slots__ = ("_frame", "_header", "_nonce", "_opener", "nbytes")

    def __init__(
        self,
        frame: memoryview,
        nbytes: int,
        opener: Opener | None = None,
        nonce: bytes = b"",
        header: bytes = b"",
    ) -> None:
        self.nbytes = nbytes
        self._frame, self._opener, self._nonce, self._header = frame, opener, nonce, header

    def copy_into(self, target: npt.NDArray[np.uint8]) -> None:
        """Put them where they belong: one pass, which also opens them if they are sealed.

        Raises:
            ProtocolError: they were changed on their way (``target`` holds nothing of meaning then), or are
                not as many as ``target`` takes.
        """
        if self._opener is not None:
            self._opener.open_into(self._nonce, self._header, self._frame, target)
        elif len(target) != self.nbytes:
            raise ProtocolError("malformed", f"{self.nbytes} bytes are not for {len(target)}")
        else:
            np.copyto(target, np.frombuffer(self._frame, dtype=np.uint8))

    def opened(self) -> memoryview:
        """These bytes, wherever they lie.

        Raises:
            ProtocolError: they were changed on their way.
        """
        if self._opener is None:
            return self._frame
        target = np.empty(self.nbytes, dtype=np.uint8)
        self._opener.open_into(self._nonce, self._header, self._frame, target)
        return target.data


class Session:
    """One side of a session.

    Attributes:
        id: of chance; both sides know it by this.
        index: of the node on the other side.
        is_sealed: whether its frames are.
    """

    __slots__ = ("_opener", "_sealer", "id", "index")

    def __init__(self, id: bytes, index: int, sealer: Sealer | None, opener: Opener | None) -> None:
        self.id = id
        self.index = index
        self._sealer, self._opener = sealer, opener

    @property
    def is_sealed(self) -> bool:
        return self._opener is not None

    def pack(self, message: Message) -> bytes:
        """The one frame of a message without payload."""
        body = encode(message)
        if self._sealer is None:
            return self.id + body
        nonce, sealed = self._sealer.seal(self.id, body)
        return b"".join((self.id, nonce, sealed))

    def unpack(self, frame: memoryview) -> bytes | memoryview:
        """The encoded message in such a frame.

        Raises:
            ProtocolError: it was not sealed so in this session.
        """
        if self._opener is None:
            return frame[limits.SESSION_BYTES :]
        return self._opener.open(frame[limits.SESSION_BYTES : _BODY], self.id, frame[_BODY:])

    def pack_data(self, data: Data, payload: memoryview) -> tuple[bytes, memoryview]:
        """Both frames of a `Data`. The second is the payload itself where nothing is sealed: no copy."""
        header = encode(data)
        if self._sealer is None:
            return self.id + header, payload
        nonce, sealed = self._sealer.seal(self.id + header, payload)
        return b"".join((self.id, nonce, header)), sealed

    def unpack_data(self, header: memoryview, payload: memoryview) -> tuple[Data, Payload]:
        """The `Data` in two frames. What is sealed is judged by `Payload.copy_into` only.

        Raises:
            ProtocolError: these are no such frames.
        """
        begin = limits.SESSION_BYTES if self._opener is None else _BODY
        body = bytes(header[begin:])
        data = decode_bulk_reply(body)
        nbytes = len(payload) - (0 if self._opener is None else TAG_BYTES)
        if not isinstance(data, Data) or data.end - data.begin != nbytes:
            raise ProtocolError("malformed", "a frame of data does not have the bytes its header tells of")
        if self._opener is None:
            return data, Payload(payload, nbytes)
        nonce = bytes(header[limits.SESSION_BYTES : _BODY])
        return data, Payload(payload, nbytes, self._opener, nonce, self.id + body)
