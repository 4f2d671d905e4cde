"""How two nodes come to have a session: every decision of it, and no socket, no clock. Bytes of chance are given.

    client --hello-->    server    who I am, in which job and epoch, where I listen; my half of the key
    client <-welcome--   server    who I am; my half, and the session's name
    client <-refused--   server    or why not

Both travel over CURVE, which lets in only who has the job's keys and brings its own protection against
replays. What the halves make is known to these two nodes alone and is never used again: a new `Hello` after
any loss brings a new half. The session's name is made of both halves too, so a `Welcome` proves that it
answers this `Hello` and no earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Final, NamedTuple

import msgspec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from flashpoint.replication import limits
from flashpoint.replication.membership import Membership
from flashpoint.replication.messages import Count, Hello, Refused, Welcome
from flashpoint.replication.sealing import KEY_BYTES, Opener, Sealer
from flashpoint.replication.session import Session

_LABEL: Final = f"flashpoint {limits.PROTOCOL_VERSION} "


class Address(NamedTuple):
    """Where a node's agent listens."""

    host: str
    port: int
    bulk_port: int


# ---- the server's side ---------------------------------------------------------------------------


def answer_hello(hello: Hello, membership: Membership | None, me: int, secret: bytes) -> Welcome | Refused:
    """What to answer.

    Args:
        membership: the nodes, this one is ``me``; None as long as it was not told of any.
        secret: this node's half of the key, new.
    """
    if hello.protocol != limits.PROTOCOL_VERSION:
        return refuse_protocol(hello.protocol)
    if membership is None:
        return _refused("behind", "this node has not been told of the job's nodes yet")
    if hello.job != membership.job:
        return _refused("wrong-job", f"this node works for job {membership.job}, not for {hello.job}")
    if hello.epoch < membership.epoch:
        return _refused(
            "stale-epoch", f"epoch {hello.epoch} is over: this node is in epoch {membership.epoch}"
        )
    if hello.epoch > membership.epoch:
        return _refused("behind", f"this node is in epoch {membership.epoch}, not in {hello.epoch} yet")
    if hello.index >= len(membership.members):
        return _refused("unknown-node", f"there is no node {hello.index} among {len(membership.members)}")
    known = membership.members[hello.index]
    if hello.node != known.node:
        return _refused("unknown-node", f"node {hello.index} is {known.node}, not {hello.node}")
    return Welcome(
        protocol=limits.PROTOCOL_VERSION,
        epoch=membership.epoch,
        index=me,
        node=membership.members[me].node,
        session=session_id(hello.secret, secret),
        secret=secret,
    )


def refuse_protocol(version: int) -> Refused:
    return _refused(
        "protocol-version",
        f"this node speaks version {limits.PROTOCOL_VERSION}, not {version}: install one release on all nodes",
    )


def _refused(code: str, reason: str) -> Refused:
    return Refused("hello", code, reason)


class _AnyHello(msgspec.Struct, array_like=True, tag="hello"):
    """What a `Hello` of any version begins with."""

    protocol: Count


_any_hellos: Final = msgspec.msgpack.Decoder(_AnyHello)


def foreign_protocol(data: bytes | memoryview) -> int | None:
    """The version of a `Hello` that another release sent, which may have other fields; None for all else."""
    try:
        version = _any_hellos.decode(data).protocol
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return version if version != limits.PROTOCOL_VERSION else None


def server_session(hello: Hello, welcome: Welcome, *, encrypt: bool) -> Session:
    """The session as the node has it that was connected to."""
    if not encrypt:
        return Session(welcome.session, hello.index, None, None)
    from_client, from_server = session_keys(hello.secret, welcome.secret, welcome.session)
    return Session(welcome.session, hello.index, Sealer(from_server), Opener(from_client))


# ---- keys ----------------------------------------------------------------------------------------


def session_id(client_secret: bytes, server_secret: bytes) -> bytes:
    """The session's name; it tells nothing of the secrets."""
    return _derive(client_secret + server_secret, None, "session", limits.SESSION_BYTES)


def session_keys(client_secret: bytes, server_secret: bytes, session: bytes) -> tuple[bytes, bytes]:
    """(key for what the client sends, key for what the server sends); RFC 5869."""
    both = client_secret + server_secret
    return (
        _derive(both, session, "client to server", KEY_BYTES),
        _derive(both, session, "server to client", KEY_BYTES),
    )


def _derive(secret: bytes, salt: bytes | None, what: str, nbytes: int) -> bytes:
    return HKDF(SHA256(), nbytes, salt, (_LABEL + what).encode()).derive(secret)


# ---- the client's side ---------------------------------------------------------------------------


class ClientState(Enum):
    SILENT = "nothing said yet, or not since the connection was lost"
    SAYING_HELLO = "said, not answered"
    OPEN = "there is a session"
    REFUSED = "the peer wants none"


# What moves a handshake. Whatever is not here (a late or repeated answer) changes nothing.
TRANSITIONS: Final[Mapping[tuple[ClientState, str], ClientState]] = {
    (ClientState.SILENT, "hello"): ClientState.SAYING_HELLO,
    (ClientState.SAYING_HELLO, "hello"): ClientState.SAYING_HELLO,
    (ClientState.REFUSED, "hello"): ClientState.SAYING_HELLO,
    (ClientState.SAYING_HELLO, "welcome"): ClientState.OPEN,
    (ClientState.SAYING_HELLO, "refused"): ClientState.REFUSED,
    (ClientState.SAYING_HELLO, "lost"): ClientState.SILENT,
    (ClientState.REFUSED, "lost"): ClientState.SILENT,
    (ClientState.OPEN, "lost"): ClientState.SILENT,
}


class ClientHandshake:
    """With one peer.

    Args:
        membership: the nodes; this one is ``me``, that one is ``peer``.
        encrypt: whether the session seals.
        chance: gives so many random bytes (`secrets.token_bytes`).
    """

    def __init__(
        self, membership: Membership, me: int, peer: int, *, encrypt: bool, chance: Callable[[int], bytes]
    ) -> None:
        self.state = ClientState.SILENT
        self.session: Session | None = None
        self.refused: Refused | None = None
        self._membership, self._me, self._peer = membership, me, peer
        self._encrypt = encrypt
        self._chance = chance
        self._secret = b""

    def hello(self, address: Address) -> Hello:
        """What to say now. Said again before it is answered, it is the same, and any answer will do."""
        if self.state is not ClientState.SAYING_HELLO:
            self._move("hello")
            self.refused = None
            self._secret = self._chance(limits.SECRET_BYTES)
        return Hello(
            protocol=limits.PROTOCOL_VERSION,
            job=self._membership.job,
            epoch=self._membership.epoch,
            index=self._me,
            node=self._membership.members[self._me].node,
            host=address.host,
            port=address.port,
            bulk_port=address.bulk_port,
            secret=self._secret,
        )

    def answered(self, answer: Welcome | Refused) -> bool:
        """Take the answer; whether it changed the state. `session`, or `refused`, tells what came of it."""
        if self.state is not ClientState.SAYING_HELLO:
            return False
        if isinstance(answer, Welcome):
            if answer.session != session_id(self._secret, answer.secret):
                return False  # it answers an earlier Hello
            refused = self._judge(answer)
            if refused is None:
                self.session = self._session(answer)
                return self._move("welcome")
            answer = refused
        self.refused = answer
        return self._move("refused")

    def _judge(self, welcome: Welcome) -> Refused | None:
        """Why this is not the peer that was meant."""
        if welcome.protocol != limits.PROTOCOL_VERSION:
            return refuse_protocol(welcome.protocol)
        if welcome.epoch != self._membership.epoch:
            return _refused("behind", f"the peer is in epoch {welcome.epoch}")
        peer = self._membership.members[self._peer]
        if (welcome.index, welcome.node) != (peer.index, peer.node):
            reason = (
                f"node {welcome.index} ({welcome.node}) answers where node {peer.index} ({peer.node}) was"
            )
            return _refused("unknown-node", reason)
        return None

    def _session(self, welcome: Welcome) -> Session:
        if not self._encrypt:
            return Session(welcome.session, self._peer, None, None)
        from_client, from_server = session_keys(self._secret, welcome.secret, welcome.session)
        return Session(welcome.session, self._peer, Sealer(from_client), Opener(from_server))

    def lost(self) -> bool:
        """The connection, or the session, is gone; whether there was anything to lose."""
        self.session, self.refused = None, None
        return self._move("lost")

    def _move(self, event: str) -> bool:
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            return False
        self.state = after
        return True
