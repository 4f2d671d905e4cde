"""Every bound of replication in one place: sizes in bytes, times in seconds."""

from __future__ import annotations

from typing import Final

PROTOCOL_VERSION: Final = 1

# ---- messages ------------------------------------------------------------------------------------
MESSAGE_BYTES_MAX: Final = 4 << 20  # of one control message; a larger one is dropped unread
OBJECTS_MAX: Final = 65_536  # named by one message
VERSIONS_MAX: Final = 1_024  # that a node keeps account of
WAITERS_MAX: Final = 4_096  # orders whose answers are still to come
NODES_MAX: Final = 16_384
CHUNKS_MAX: Final = 1 << 20  # of one object that are fetched, where it is not fetched whole
RANKS_MAX: Final = 131_072
REASON_CHARS_MAX: Final = 2_000
HOST_CHARS_MAX: Final = 253  # RFC 1035, section 2.3.4, without the trailing dot
DOMAIN_CHARS_MAX: Final = 128
NODE_CHARS_MAX: Final = 128
SECRET_BYTES: Final = 32
SESSION_BYTES: Final = 16

# ---- bulk ----------------------------------------------------------------------------------------
FRAME_BYTES: Final = 1 << 20  # asked for, sealed and sent at once: the fastest that was measured
CREDIT_BYTES: Final = 16 << 20  # asked of one peer and not yet there, over all transfers
SESSIONS_MAX: Final = 4_096  # that a node keeps; the one unused for longest goes
FRAMES_QUEUED_MAX: Final = (
    64  # for one peer that does not read; what comes after is dropped and asked for again
)
ATTEMPTS_MAX: Final = 5  # to get one chunk from one source, before it counts as failed there

# ---- times ---------------------------------------------------------------------------------------
HEARTBEAT_S: Final = 2.0
SILENCE_S: Final = 10.0  # without a heartbeat, after which a connection is closed and made again
RECONNECT_FIRST_S: Final = 0.05
RECONNECT_LAST_S: Final = 2.0
REQUEST_TIMEOUT_S: Final = 10.0  # for one frame or one answer, after which it is asked for again
REPEAT_S: Final = 1.0  # between two tellings of what the peer has not confirmed yet
REPEAT_LAST_S: Final = 30.0
