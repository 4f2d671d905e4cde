"""`Transport`: what a node says to others and hears from them, over ZeroMQ. Decides nothing; docs/protocol.md.

    control   ROUTER over TCP, CURVE with the job's keys: messages, each in one frame
    bulk      ROUTER over TCP, no mechanism: frames sealed with the session's keys, or plain
    local     ROUTER over a Unix socket: a trainer's orders

A node asks over its own `Link` to a peer; what it answers goes back over the connection it was asked on. The
server keeps nothing but sessions. What strangers may do: connect (libzmq ends a handshake after a while), and
be refused. A replayed Hello fails in CURVE's own handshake; a replayed Fetch makes this node read once more,
and send bytes that only the session's other side can open. Everything a stranger can cause is logged once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket as sockets
import threading
import time
from typing import Final

import zmq
from zmq.utils import z85

from flashpoint.errors import ProtocolError, ReplicationError
from flashpoint.replication import limits
from flashpoint.replication.events import (
    Connection,
    Event,
    FetchRequested,
    HelloRefused,
    Moved,
    Ordered,
    Requested,
)
from flashpoint.replication.guests import Guest, Guests
from flashpoint.replication.handshake import (
    Address,
    answer_hello,
    foreign_protocol,
    refuse_protocol,
    server_session,
)
from flashpoint.replication.keys import JobKeys
from flashpoint.replication.link import (
    Link,
    Socket,
    endpoint_of,
    monitored,
    next_event,
    receive,
    set_keep_alive,
)
from flashpoint.replication.membership import Membership
from flashpoint.replication.messages import (
    Data,
    Fetch,
    Hello,
    Refused,
    Reply,
    Request,
    decode_fetch,
    decode_request,
    encode,
)
from flashpoint.replication.orders import ORDER_BYTES_MAX
from flashpoint.replication.session import NO_SESSION
from flashpoint.telemetry import count, logger

_BATCH: Final = 64  # messages taken from one socket at a time, so that none starves another
_FETCH_BYTES_MAX: Final = 8 << 10  # a span takes under 100
_BACKLOG: Final = 1_024
_MORE: Final = zmq.DONTWAIT | zmq.SNDMORE
_SOCKETS_MAX: Final = 65_535  # of the context; libzmq's own 1,023 would be 170 links
_LOGGED_MAX: Final = 1_024
_PATH_BYTES_MAX: Final = 107  # of a Unix socket, unix(7)
_REBIND_S: Final = 5.0
_ANYWHERE: Final = frozenset({"", "*", "0.0.0.0", "::"})
_ZAP: Final = "inproc://zeromq.zap.01"  # rfc.zeromq.org/spec/27
_HANDSHAKE_FAILURES: Final = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Transport:
    """All sockets of one node. Used from one thread, but for `wake`.

    Args:
        keys: of the job; whoever has them is let in.
        host: address to listen on.
        port, bulk_port: for messages and for bulk data; 0 for any.
        encrypt: whether bulk data is sealed.
        local_path: Unix socket for orders, of any length.

    Attributes:
        host, port, bulk_port: where it listens.
        encrypt: whether bulk data is sealed.

    Raises:
        ReplicationError: it cannot listen there.
    """

    def __init__(
        self,
        keys: JobKeys,
        *,
        host: str,
        port: int = 0,
        bulk_port: int = 0,
        encrypt: bool = True,
        local_path: str | None = None,
    ) -> None:
        self.host, self.port, self.bulk_port = host, port, bulk_port
        self.encrypt = encrypt
        self._keys = keys
        self._membership: Membership | None = None
        self._me = 0
        self._addresses: dict[int, Address] = {}  # of peers that listen elsewhere than the membership says
        self._links: dict[int, Link] = {}
        self._owners: dict[Socket, Link] = {}
        self._guests = Guests()
        self._events: list[Event] = []
        self._logged: set[tuple[str | int, str]] = set()
        self._local_path = ""
        self._local_folder = -1
        self._closed = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waking = threading.RLock()  # a signal's handler may wake while its thread closes
        self._context: zmq.Context[Socket] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _SOCKETS_MAX)
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        try:
            self._doorman = self._context.socket(zmq.REP)
            self._doorman.linger = 0
            self._doorman.bind(_ZAP)  # before there is a door: without one libzmq lets all in
            self._poller.register(self._doorman, zmq.POLLIN)
            self._local: Socket | None = None
            if local_path is not None:
                self._local = self._listen_locally(local_path)
            self._listen(patience_s=0.0)
        except BaseException:
            self.close()
            raise

    # ---- listening --------------------------------------------------------------------------------

    def _listen(self, patience_s: float) -> None:
        self._control = self._router(limits.MESSAGE_BYTES_MAX, "control")
        self._control.curve_server = True
        self._control.curve_publickey, self._control.curve_secretkey = self._keys.public, self._keys.secret
        self._bulk = self._router(_FETCH_BYTES_MAX, "bulk")
        # Twice: libzmq's own thread reports what it has taken only when half of the queue is. A peer that keeps as
        # many frames in flight as it may would find one dropped now and then, and wait REQUEST_TIMEOUT_S for it.
        self._bulk.set(zmq.SNDHWM, 2 * limits.FRAMES_QUEUED_MAX)
        self._control_monitor = monitored(self._context, self._control, _HANDSHAKE_FAILURES)
        self._poller.register(self._control_monitor, zmq.POLLIN)
        self.port = self._bind(self._control, self.port, "agent_port", patience_s)
        self.bulk_port = self._bind(self._bulk, self.bulk_port, "agent_bulk_port", patience_s)

    def _router(self, nbytes_max: int, domain: str) -> Socket:
        router = self._context.socket(zmq.ROUTER)
        self._poller.register(router, zmq.POLLIN)
        set_keep_alive(router)
        router.set(zmq.MAXMSGSIZE, nbytes_max)
        router.set(zmq.ROUTER_MANDATORY, 1)  # a reply nobody can take is an error, not a silence
        router.set(zmq.ROUTER_HANDOVER, 1)  # a peer that is back before its end was noticed
        router.set(zmq.BACKLOG, _BACKLOG)
        router.set(zmq.IPV6, int(":" in self.host))
        router.set(zmq.ZAP_DOMAIN, domain.encode())
        router.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        return router

    def _bind(self, router: Socket, port: int, setting: str, patience_s: float) -> int:
        deadline = time.monotonic() + patience_s
        where = f"port {port} of {self.host}" if port else self.host
        while True:
            try:
                router.bind(endpoint_of(_numeric(self.host), port or "*"))
            except zmq.ZMQError as error:
                if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                    time.sleep(0.005)  # libzmq's own thread closes the socket that was there
                    continue
                if error.errno == errno.EADDRINUSE:
                    hint = f"another program listens there; set {setting} to another port, or to 0 for any"
                elif error.errno == errno.EACCES:
                    hint = f"this user may not; set {setting} to another port, or to 0 for any"
                else:
                    hint = f"{error.strerror}; set agent_host to an address of this machine"
                raise ReplicationError(f"the agent cannot listen on {where}: {hint}") from None
            except OSError as error:
                raise ReplicationError(
                    f"the agent cannot listen on {where}: {error.strerror}; set agent_host to an address of "
                    "this machine"
                ) from None
            return int(router.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def _listen_locally(self, path: str) -> Socket:
        if len(os.fsencode(path)) > _PATH_BYTES_MAX:
            folder, name = os.path.split(path)
            self._local_folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            path = f"/proc/self/fd/{self._local_folder}/{name}"
        local = self._context.socket(zmq.ROUTER)
        local.linger = 0
        local.set(zmq.MAXMSGSIZE, ORDER_BYTES_MAX)
        local.set(zmq.ROUTER_HANDOVER, 1)
        try:
            local.bind(f"ipc://{path}")
            self._local_path = path
            os.chmod(path, 0o600)  # what is before it is kept from others by the folder's mode
        except (OSError, zmq.ZMQError) as error:
            raise ReplicationError(f"the agent cannot listen on {path}: {error.strerror}") from None
        self._poller.register(local, zmq.POLLIN)
        return local

    def configure_keys(self, keys: JobKeys, *, encrypt: bool) -> None:
        """Be a node of another job from now on, on the same ports. Every session and link is dropped."""
        self._drop_links()
        self._guests.clear()
        self._membership = None
        self._keys, self.encrypt = keys, encrypt
        self._stop_listening()
        self._listen(_REBIND_S)

    def configure(self, membership: Membership, index: int) -> None:
        """Be node ``index`` in a new epoch. Sessions of the last one are dropped; nothing said in it is sent."""
        now_s = time.monotonic()
        self._membership, self._me = membership, index
        self._addresses.clear()
        self._guests.clear()
        self._logged.clear()
        for peer, link in list(self._links.items()):
            if peer < len(membership.members) and link.address == self._address(peer) and peer != index:
                link.begin(membership, index, now_s)
            else:
                self._drop_link(peer)

    # ---- saying -----------------------------------------------------------------------------------

    def greet(self, index: int) -> None:
        """Connect to a peer, so that it learns where this node listens. No more than that."""
        self._link(index)

    def say(self, index: int, message: Request) -> None:
        """Send a request to a peer, when it is within reach. It may get lost: say it again."""
        link = self._link(index)
        if link is not None:
            link.say(message)

    def fetch(self, index: int, fetch: Fetch) -> None:
        """Ask a peer for bytes, when it is within reach. It may get lost: ask again."""
        link = self._link(index)
        if link is not None:
            link.fetch(fetch)

    def reply(self, connection: Connection, message: Reply) -> bool:
        """Answer a request; whether the peer is there to take it."""
        if connection.socket == "control":
            return self._send(self._control, connection.identity, encode(message))
        guest = self._guests.by_session.get(connection.session)
        if guest is None:
            return False
        return self._send(self._bulk, connection.identity, guest.session.pack(message))

    def send_data(self, connection: Connection, data: Data, payload: memoryview) -> bool:
        """Answer a `Fetch`; whether the peer is there to take it. The payload is not copied if it is not sealed:
        it must not change before the peer has all it wants."""
        guest = self._guests.by_session.get(connection.session)
        if guest is None:
            return False
        try:
            header, body = guest.session.pack_data(data, payload)
        except ProtocolError as used_up:
            self._guests.forget(guest)
            refused = NO_SESSION + encode(_refused("fetch", used_up))
            return self._send(self._bulk, connection.identity, refused)
        try:
            self._bulk.send(connection.identity, _MORE)
        except zmq.ZMQError as error:
            return _not_sent(error)
        self._bulk.send(header, _MORE)
        self._bulk.send(body, zmq.DONTWAIT, copy=False)
        return True

    def answer(self, connection: Connection, data: bytes) -> bool:
        """Answer an order."""
        return self._local is not None and self._send(self._local, connection.identity, data)

    def _send(self, router: Socket, identity: bytes, frame: bytes) -> bool:
        try:
            router.send(identity, _MORE)
            router.send(frame, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            return _not_sent(error)
        return True

    # ---- hearing ----------------------------------------------------------------------------------

    def wake(self) -> None:
        """End a `poll` that waits; from any thread, or a signal's handler."""
        with self._waking:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def poll(self, timeout_s: float) -> list[Event]:
        """What happened, waited for no longer than ``timeout_s``. Call it often: time passes only here."""
        now_s = time.monotonic()
        until_s = now_s + timeout_s
        for link in list(self._links.values()):
            if now_s >= link.due_s:
                link.tick(now_s)
            until_s = min(until_s, link.due_s)
        wait_s = 0.0 if self._events else max(until_s - now_s, 0.0)
        for ready, flags in self._poller.poll(int(wait_s * 1000 + 0.999)):
            self._on_ready(ready, flags)
        events = self._events[:]
        self._events.clear()
        for event in events:
            if isinstance(event, HelloRefused):
                refused = event.refused
                text = f"node {event.index} refuses this one: {refused.code}: {refused.reason}"
                self._log_once(event.index, refused.code, text)
        return events

    def _on_ready(self, ready: Socket | int, flags: int) -> None:
        if isinstance(ready, int):
            os.eventfd_read(self._wake_fd)
        elif ready is self._bulk:
            self._read_bulk()
        elif ready is self._control:
            self._read_control()
        elif ready is self._local:
            self._read_local()
        elif ready is self._doorman:
            self._mind_the_door()
        elif ready is self._control_monitor:
            self._see_failures()
        elif (link := self._owners.get(ready)) is not None:  # else it was closed a moment ago
            link.on_ready(ready, flags, time.monotonic())

    def _read_local(self) -> None:
        assert self._local is not None
        for _ in range(_BATCH):
            frames = receive(self._local, 2)
            if frames is None:
                return
            if len(frames) == 2:
                self._events.append(Ordered(Connection("local", frames[0].bytes), frames[1].bytes))

    def _read_control(self) -> None:
        for _ in range(_BATCH):
            frames = receive(self._control, 2)
            if frames is None:
                return
            identity, place = frames[0].bytes, _place(frames[-1])
            try:
                if len(frames) != 2:
                    raise ProtocolError("malformed", "a request is one frame")
                request = decode_request(frames[1].buffer)
            except ProtocolError as error:
                version = foreign_protocol(frames[-1].buffer)
                refused = refuse_protocol(version) if version is not None else _refused("", error)
                self._refuse(identity, place, refused)
                continue
            guest = self._guests.by_identity.get(identity)
            if isinstance(request, Hello):
                self._on_hello(identity, place, request, guest)
            elif guest is None:
                about = str(type(request).__struct_config__.tag)
                refused = Refused(about, "no-session", "say Hello first", getattr(request, "key", None))
                self._refuse(identity, place, refused)
            else:
                self._guests.used(guest)
                connection = Connection("control", identity, guest.session.id)
                self._events.append(Requested(connection, guest.session.index, request))

    def _refuse(self, identity: bytes, place: str, refused: Refused) -> None:
        count("messages_refused")
        self._log_once(
            place, refused.code, f"refused a message from {place}: {refused.code}: {refused.reason}"
        )
        self._send(self._control, identity, encode(refused))

    def _read_bulk(self) -> None:
        for _ in range(_BATCH):
            frames = receive(self._bulk, 2)
            if frames is None:
                return
            frame = frames[-1].buffer
            guest = self._guests.by_session.get(bytes(frame[: limits.SESSION_BYTES]))
            refused: ProtocolError | None = None
            if guest is None:
                refused = ProtocolError("no-session", "there is no such session")
            elif len(frames) != 2:
                refused = ProtocolError("malformed", "a fetch is one frame")
            else:
                session = guest.session
                try:
                    fetch = decode_fetch(session.unpack(frame))
                except ProtocolError as error:
                    refused = error
                else:
                    self._guests.used(guest)
                    connection = Connection("bulk", frames[0].bytes, session.id)
                    self._events.append(FetchRequested(connection, session.index, fetch))
                    continue
            count("messages_refused")
            place = _place(frames[-1])
            self._log_once(place, refused.code, f"refused bulk frames from {place}: {refused}")
            # In the clear, for the other side may not share a session with this one. It is no more than a hint.
            self._send(self._bulk, frames[0].bytes, NO_SESSION + encode(_refused("fetch", refused)))

    # ---- sessions ---------------------------------------------------------------------------------

    def _on_hello(self, identity: bytes, place: str, hello: Hello, guest: Guest | None) -> None:
        if guest is not None and guest.hello == hello:  # said again: the answer was lost, or is under way
            self._send(self._control, identity, encode(guest.welcome))
            return
        answer = answer_hello(hello, self._membership, self._me, secrets.token_bytes(limits.SECRET_BYTES))
        if isinstance(answer, Refused):
            self._refuse(identity, place, answer)
            return
        if guest is not None:
            self._guests.forget(guest)
        session = server_session(hello, answer, encrypt=self.encrypt)
        self._guests.add(Guest(identity, place, hello, answer, session))
        self._send(self._control, identity, encode(answer))
        self._note_address(hello)

    def _note_address(self, hello: Hello) -> None:
        known = self._address(hello.index)
        said = Address(known.host if hello.host in _ANYWHERE else hello.host, hello.port, hello.bulk_port)
        if said == known or not said.port or not said.bulk_port or hello.index == self._me:
            return
        self._addresses[hello.index] = said
        self._events.append(Moved(hello.index, *said))
        link = self._links.get(hello.index)
        if link is not None:
            link.lose(f"it moved to {said.host}:{said.port}", time.monotonic())
            self._drop_link(hello.index)
            self._link(hello.index)

    # ---- links ------------------------------------------------------------------------------------

    def _address(self, index: int) -> Address:
        assert self._membership is not None
        member = self._membership.members[index]
        return self._addresses.get(index) or Address(member.host, member.port, member.bulk_port)

    def address_of(self, index: int) -> Address | None:
        """Where a node listens, as far as is known."""
        membership = self._membership
        known = membership is not None and 0 <= index < len(membership.members)
        return self._address(index) if known else None

    def _link(self, index: int) -> Link | None:
        """The link to a peer, made on first use; None where no address of it is known."""
        link = self._links.get(index)
        if link is not None:
            return link
        membership = self._membership
        if membership is None or index == self._me or not 0 <= index < len(membership.members):
            count("messages_dropped")
            return None
        address = self._address(index)
        if not address.host or not address.port or not address.bulk_port:
            count("messages_dropped")
            return None
        mine = Address("" if self.host in _ANYWHERE else self.host, self.port, self.bulk_port)
        link = self._links[index] = Link(
            self._context,
            self._poller,
            self._keys,
            membership,
            self._me,
            index,
            address=address,
            mine=mine,
            encrypt=self.encrypt,
            owners=self._owners,
            emit=self._events.append,
            now_s=time.monotonic(),
        )
        return link

    def _drop_link(self, index: int) -> None:
        self._links.pop(index).close()

    def _drop_links(self) -> None:
        for index in list(self._links):
            self._drop_link(index)

    # ---- strangers --------------------------------------------------------------------------------

    def _mind_the_door(self) -> None:
        """Answer libzmq's questions whom to let in (rfc.zeromq.org/spec/27)."""
        for _ in range(_BATCH):
            try:
                frames = self._doorman.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            request, domain, place, mechanism = (
                frames[1],
                frames[2],
                frames[3].decode("ascii", "replace"),
                frames[5],
            )
            if mechanism == b"CURVE":
                fine = domain == b"control" and z85.encode(frames[6]) == self._keys.public
                why = f"{place} does not have the keys of job {self._keys.job}"
            else:
                # It is only frames of a session that count there. But a message may have parts without end, and
                # libzmq keeps them all: so nobody gets in of whom no node has said Hello.
                fine = domain == b"bulk" and place in self._guests.places
                why = f"no node has said Hello from {place}"
            if not fine:
                count("connections_refused")
                self._log_once(place, f"{mechanism!r}", f"refused a connection: {why}")
            status, text = (b"200", b"OK") if fine else (b"400", b"refused")
            self._doorman.send_multipart([frames[0], request, status, text, b"", b""])

    def _see_failures(self) -> None:
        while next_event(self._control_monitor):
            # libzmq does not tell whose it was.
            count("handshakes_failed")
            text = f"something that does not speak CURVE with the job's keys connected to port {self.port}"
            self._log_once("", "handshake", text)

    def _log_once(self, who: str | int, code: str, text: str) -> None:
        if (who, code) in self._logged or len(self._logged) >= _LOGGED_MAX:
            return
        self._logged.add((who, code))
        # A peer that has begun the new epoch a moment sooner is no cause for alarm.
        logger.log(logging.INFO if code == "behind" else logging.WARNING, "%s", text)

    # ---- end --------------------------------------------------------------------------------------

    def _stop_listening(self) -> None:
        for router in (self._control, self._bulk, self._control_monitor):
            self._poller.unregister(router)
        self._control.disable_monitor()
        for router in (self._control_monitor, self._control, self._bulk):
            router.close(linger=0)

    def close(self) -> None:
        """Close everything; what was not sent yet never will be."""
        if self._closed:
            return
        self._closed = True
        self._drop_links()
        if hasattr(self, "_control_monitor"):
            self._control.disable_monitor()
        self._context.destroy(linger=0)
        with self._waking:
            wake_fd, self._wake_fd = self._wake_fd, -1
            os.close(wake_fd)
        if self._local_path:
            with contextlib.suppress(OSError):  # the job root was deleted
                os.unlink(self._local_path)  # which libzmq leaves behind
        if self._local_folder >= 0:
            os.close(self._local_folder)


def _numeric(host: str) -> str:
    """The address of a host: libzmq listens on no names."""
    if host in _ANYWHERE - {"::"}:
        return "*"
    return str(sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)[0][4][0])


def _place(frame: zmq.Frame) -> str:
    """Address of the peer that a frame came from."""
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return "an unknown address"


def _refused(about: str, error: ProtocolError) -> Refused:
    return Refused(about, error.code, error.reason[: limits.REASON_CHARS_MAX])


def _not_sent(error: zmq.ZMQError) -> bool:
    """The peer is gone, or does not read: it will ask again, if it still wants to know."""
    if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
        raise error
    count("replies_dropped")
    return False
