"""`Link`: this node's way to one peer. It connects, says Hello, and says it again after every loss.

A control connection (CURVE) stands as long as the link. A bulk connection (no encryption of its own) is made
for each session: the peer takes none from addresses of which no node has said Hello.
"""

from __future__ import annotations

import random
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import zmq

from flashpoint.errors import ProtocolError
from flashpoint.replication import limits
from flashpoint.replication.events import Arrived, HelloRefused, LinkEvent, Lost, Opened, Replied
from flashpoint.replication.handshake import Address, ClientHandshake, ClientState
from flashpoint.replication.keys import JobKeys
from flashpoint.replication.membership import Membership
from flashpoint.replication.messages import (
    AGAIN,
    Fetch,
    Message,
    Refused,
    Welcome,
    decode_bulk_reply,
    decode_reply,
    encode,
)
from flashpoint.replication.session import NO_SESSION
from flashpoint.telemetry import count

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

WAITING_MAX: Final = 4_096  # messages, and as many fetches, that wait for a link to open
_BATCH: Final = 64  # messages taken from one connection at a time
_FRAMES_BATCH: Final = 16
_HEADROOM_BYTES: Final = 16 << 10  # what a bulk frame is longer than its payload, or a refusal
_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_DISCONNECTED
)


def receive(socket: Socket, frames_max: int) -> list[zmq.Frame] | None:
    """The frames of one message, none of them copied, one more than ``frames_max`` at most; None if none came."""
    try:
        frame = socket.recv(zmq.DONTWAIT, copy=False)
    except zmq.Again:
        return None
    frames = [frame]
    while frame.more:
        frame = socket.recv(zmq.DONTWAIT, copy=False)
        if len(frames) <= frames_max:
            frames.append(frame)
    return frames


def monitored(context: Context, socket: Socket, events: int) -> Socket:
    """A socket that tells what happens to the connections of another."""
    endpoint = f"inproc://monitor-{secrets.token_hex(8)}"
    socket.monitor(endpoint, events)
    monitor = context.socket(zmq.PAIR)
    monitor.rcvhwm = 0  # or libzmq's own thread would wait for us to read
    monitor.connect(endpoint)
    return monitor


def next_event(monitor: Socket) -> int:
    """What happened, one of ``zmq.EVENT_*``; 0 for nothing more."""
    try:
        return int.from_bytes(monitor.recv_multipart(zmq.DONTWAIT)[0][:2], sys.byteorder)
    except zmq.Again:
        return 0


def set_keep_alive(socket: Socket) -> None:
    """Options that every connection between nodes has."""
    socket.linger = 0
    socket.set(zmq.HEARTBEAT_IVL, int(limits.HEARTBEAT_S * 1000))
    socket.set(zmq.HEARTBEAT_TIMEOUT, int(limits.SILENCE_S * 1000))
    socket.set(zmq.HEARTBEAT_TTL, int(limits.SILENCE_S * 1000))
    socket.set(zmq.HANDSHAKE_IVL, int(limits.SILENCE_S * 1000))


def endpoint_of(host: str, port: int | str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class Line:
    """One connection to a peer: a DEALER, and what libzmq tells of it.

    Args:
        keys: for CURVE; without them it is plain.
    """

    def __init__(
        self,
        context: Context,
        poller: zmq.Poller,
        host: str,
        port: int,
        keys: JobKeys | None,
        nbytes_max: int,
    ) -> None:
        self.is_up = False
        self.queue: deque[bytes] = deque()
        self._poller = poller
        self._asks_to_send = False
        socket = self.socket = context.socket(zmq.DEALER)
        set_keep_alive(socket)
        socket.set(zmq.MAXMSGSIZE, nbytes_max)
        socket.set(zmq.RCVHWM, limits.FRAMES_QUEUED_MAX)
        socket.set(zmq.IMMEDIATE, 1)  # nothing waits in a connection that is not there, for a later one
        # Not every node at once, when one comes back.
        first_ms, last_ms = limits.RECONNECT_FIRST_S * 1000, limits.RECONNECT_LAST_S * 1000
        socket.set(zmq.RECONNECT_IVL, int(first_ms * random.uniform(1.0, 2.0)))
        socket.set(zmq.RECONNECT_IVL_MAX, int(last_ms * random.uniform(0.75, 1.25)))
        socket.set(zmq.ROUTING_ID, b"\1" + secrets.token_bytes(16))  # what begins with 0 is libzmq's own
        socket.set(zmq.IPV6, int(":" in host))
        if keys is not None:
            socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
            socket.curve_serverkey = keys.public
        self.monitor = monitored(context, socket, _EVENTS)
        poller.register(socket, zmq.POLLIN)
        poller.register(self.monitor, zmq.POLLIN)
        socket.connect(endpoint_of(host, port))

    def send(self, frame: bytes) -> None:
        """Send, now or when the connection takes it."""
        if not self.queue and self.try_send(frame):
            return
        if len(self.queue) >= WAITING_MAX:
            count("messages_dropped")
            return
        self.queue.append(frame)
        self.ask_to_send(True)

    def try_send(self, frame: bytes) -> bool:
        try:
            self.socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def flush(self) -> None:
        """Send what waits."""
        while self.queue and self.try_send(self.queue[0]):
            self.queue.popleft()
        self.ask_to_send(bool(self.queue))

    def ask_to_send(self, asks: bool) -> None:
        """Whether the poller is to tell when something can be sent."""
        if asks is not self._asks_to_send:
            self._asks_to_send = asks
            self._poller.modify(self.socket, zmq.POLLIN | zmq.POLLOUT if asks else zmq.POLLIN)

    def close(self) -> None:
        self._poller.unregister(self.socket)
        self._poller.unregister(self.monitor)
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


class Link:
    """To one peer.

    Args:
        peer: its index in the membership; this node is ``me``.
        address: where it listens.
        mine: where this node listens, for it to know.
        owners: gets every socket of this link that the poller watches.
        emit: is told what happens.
    """

    def __init__(
        self,
        context: Context,
        poller: zmq.Poller,
        keys: JobKeys,
        membership: Membership,
        me: int,
        peer: int,
        *,
        address: Address,
        mine: Address,
        encrypt: bool,
        owners: dict[Socket, Link],
        emit: Callable[[LinkEvent], None],
        now_s: float,
    ) -> None:
        self.index = peer
        self.address = address
        self._context, self._poller, self._owners = context, poller, owners
        self._keys, self._emit = keys, emit
        self._mine, self._me, self._encrypt = mine, me, encrypt
        self._messages: deque[bytes] = deque()
        self._fetches: deque[Fetch] = deque()
        self._bulk: Line | None = None
        self._control = self._new_control()
        self.begin(membership, me, now_s)

    def begin(self, membership: Membership, me: int, now_s: float) -> None:
        """Begin anew, in a new epoch."""
        self._me = me
        self._close_bulk()
        self._messages.clear()
        self._control.queue.clear()
        self._handshake = ClientHandshake(
            membership, me, self.index, encrypt=self._encrypt, chance=secrets.token_bytes
        )
        self._hello_s = now_s  # when to say it
        self._again_s = limits.RECONNECT_FIRST_S  # the wait after the next loss or refusal
        self._unanswered_s = limits.REPEAT_S
        self._opened_s = 0.0
        self._patience_until_s = now_s + limits.SILENCE_S  # what is not up by then is made again
        self._control.ask_to_send(True)

    @property
    def is_open(self) -> bool:
        return self._handshake.state is ClientState.OPEN

    @property
    def due_s(self) -> float:
        """When `tick` has something to do."""
        if self.is_open:
            bulk_is_up = self._bulk is not None and self._bulk.is_up
            return float("inf") if bulk_is_up else self._patience_until_s
        return self._hello_s if self._control.is_up else self._patience_until_s

    # ---- sending ----------------------------------------------------------------------------------

    def say(self, message: Message) -> None:
        if self.is_open:
            self._control.send(encode(message))
        elif len(self._messages) < WAITING_MAX:
            self._messages.append(encode(message))
        else:
            count("messages_dropped")

    def fetch(self, fetch: Fetch) -> None:
        session = self._handshake.session
        if session is not None and self._bulk is not None:
            try:
                self._bulk.send(session.pack(fetch))
            except ProtocolError as used_up:
                self.lose(used_up.reason, time.monotonic())
        elif len(self._fetches) < WAITING_MAX:
            self._fetches.append(fetch)
        else:
            count("messages_dropped")

    def _say_hello(self, now_s: float) -> None:
        hello = encode(self._handshake.hello(self._mine))
        self._control.ask_to_send(False)  # `tick` says it again
        if self._control.try_send(hello):
            self._hello_s = now_s + self._unanswered_s
            self._unanswered_s = min(2 * self._unanswered_s, limits.REPEAT_LAST_S)
        else:
            self._hello_s = now_s + limits.RECONNECT_FIRST_S

    # ---- what comes -------------------------------------------------------------------------------

    def on_ready(self, socket: Socket, flags: int, now_s: float) -> None:
        """One of this link's sockets has something."""
        if socket is self._control.socket:
            if flags & zmq.POLLIN:
                self._read_control(now_s)
            if flags & zmq.POLLOUT:
                if self.is_open:
                    self._control.flush()
                elif now_s >= self._hello_s:
                    self._say_hello(now_s)
                else:
                    self._control.ask_to_send(False)
        elif socket is self._control.monitor:
            self._on_control_events(now_s)
        elif self._bulk is not None and socket is self._bulk.socket:
            if flags & zmq.POLLOUT:
                self._bulk.flush()
            if flags & zmq.POLLIN:
                self._read_bulk(now_s)
        elif self._bulk is not None and socket is self._bulk.monitor:
            self._on_bulk_events(now_s)

    def tick(self, now_s: float) -> None:
        """What is due."""
        if self.is_open:
            if self._bulk is not None and not self._bulk.is_up and now_s >= self._patience_until_s:
                self.lose(f"port {self.address.bulk_port} of {self.address.host} cannot be reached", now_s)
        elif self._control.is_up:
            if now_s >= self._hello_s:
                self._say_hello(now_s)
        elif now_s >= self._patience_until_s:
            # libzmq gives a connection up that has brought garbage once: not every such end is told of.
            self._remake_control(now_s)
            self._fetches.clear()
            reason = f"there is no answer from port {self.address.port} of {self.address.host}"
            self._emit(Lost(self.index, reason))

    def _read_control(self, now_s: float) -> None:
        control = self._control
        for _ in range(_BATCH):
            frames = receive(control.socket, 1)
            if frames is None or control is not self._control:
                return
            try:
                if len(frames) != 1:
                    raise ProtocolError("malformed", f"a reply of {len(frames)} frames")
                reply = decode_reply(frames[0].buffer)
            except ProtocolError:
                count("messages_malformed")
                continue
            if isinstance(reply, Welcome) or (isinstance(reply, Refused) and reply.about == "hello"):
                self._on_hello_answered(reply, now_s)
            elif isinstance(reply, Refused) and reply.code == "no-session":
                self.lose("the peer does not know this session any more", now_s)
            elif self.is_open:
                self._emit(Replied(self.index, reply))

    def _on_hello_answered(self, answer: Welcome | Refused, now_s: float) -> None:
        if not self._handshake.answered(answer):
            return
        self._unanswered_s = limits.REPEAT_S
        refused = self._handshake.refused
        if refused is not None:
            last_s = limits.RECONNECT_LAST_S if refused.code in AGAIN else limits.REPEAT_LAST_S
            first_s = limits.RECONNECT_FIRST_S if refused.code in AGAIN else limits.REPEAT_S
            self._again_s = max(self._again_s, first_s)
            self._hello_s = now_s + self._again_s
            self._again_s = min(2 * self._again_s, last_s)
            self._emit(HelloRefused(self.index, refused))
            return
        self._opened_s = now_s
        self._again_s = min(self._again_s, limits.RECONNECT_LAST_S)
        self._patience_until_s = now_s + limits.SILENCE_S
        self._bulk = self._new_line(self.address.bulk_port, None, limits.FRAME_BYTES + _HEADROOM_BYTES)
        self._emit(Opened(self.index))
        while self._messages:
            self._control.send(self._messages.popleft())
        while self._fetches:
            self.fetch(self._fetches.popleft())

    def _read_bulk(self, now_s: float) -> None:
        bulk, session = self._bulk, self._handshake.session
        for _ in range(_FRAMES_BATCH):
            if bulk is None or bulk is not self._bulk or session is None:
                return
            frames = receive(bulk.socket, 2)
            if frames is None:
                return
            header = frames[0].buffer
            name = bytes(header[: limits.SESSION_BYTES])
            try:
                if name == NO_SESSION:
                    hint = decode_bulk_reply(header[limits.SESSION_BYTES :])
                    if isinstance(hint, Refused):
                        self.lose(f"the peer refuses to serve: {hint.code}: {hint.reason}", now_s)
                elif name != session.id or len(frames) > 2:
                    raise ProtocolError("malformed", "a frame of no session")
                elif len(frames) == 2:
                    self._emit(Arrived(self.index, *session.unpack_data(header, frames[1].buffer)))
                else:
                    refused = decode_bulk_reply(session.unpack(header))
                    if isinstance(refused, Refused):
                        self._emit(Replied(self.index, refused))
            except ProtocolError:
                count("messages_malformed")

    # ---- loss -------------------------------------------------------------------------------------

    def lose(self, reason: str, now_s: float) -> None:
        """The session is gone. Say Hello again, soon."""
        was_open = self.is_open
        if not self._handshake.lost():
            return
        self._close_bulk()
        self._control.queue.clear()
        if now_s - self._opened_s > limits.REPEAT_S:
            self._again_s = limits.RECONNECT_FIRST_S
        self._hello_s = now_s + self._again_s
        self._again_s = min(2 * self._again_s, limits.RECONNECT_LAST_S)
        self._unanswered_s = limits.REPEAT_S
        self._patience_until_s = now_s + limits.SILENCE_S
        if was_open:
            self._emit(Lost(self.index, reason))

    def _on_control_events(self, now_s: float) -> None:
        while event := next_event(self._control.monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._control.is_up = True
                self._control.ask_to_send(True)
            elif event == zmq.EVENT_DISCONNECTED:
                self._control.is_up = False
                self._patience_until_s = now_s + limits.SILENCE_S
                self.lose(
                    f"{self.address.host}:{self.address.port} closed the connection, or is silent", now_s
                )
            else:
                # libzmq does not try again by itself. A port may be another program's for a while.
                self._patience_until_s = min(self._patience_until_s, now_s + limits.RECONNECT_LAST_S)

    def _on_bulk_events(self, now_s: float) -> None:
        bulk = self._bulk
        while bulk is not None and bulk is self._bulk and (event := next_event(bulk.monitor)):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                bulk.is_up = True
            else:
                port = self.address.bulk_port
                self.lose(f"{self.address.host}:{port} closed the bulk connection, or is silent", now_s)

    def _new_control(self) -> Line:
        return self._new_line(self.address.port, self._keys, limits.MESSAGE_BYTES_MAX)

    def _new_line(self, port: int, keys: JobKeys | None, nbytes_max: int) -> Line:
        line = Line(self._context, self._poller, self.address.host, port, keys, nbytes_max)
        self._owners[line.socket] = self._owners[line.monitor] = self
        return line

    def _close_line(self, line: Line) -> None:
        del self._owners[line.socket], self._owners[line.monitor]
        line.close()

    def _remake_control(self, now_s: float) -> None:
        self._close_line(self._control)
        self._control = self._new_control()
        self._patience_until_s = now_s + limits.SILENCE_S
        self._control.ask_to_send(True)

    def _close_bulk(self) -> None:
        self._fetches.clear()
        if self._bulk is not None:
            self._close_line(self._bulk)
            self._bulk = None

    def close(self) -> None:
        self._close_bulk()
        self._close_line(self._control)
