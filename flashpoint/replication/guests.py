"""`Guests`: the peers that have said Hello to this node. All that its server's side keeps, and it is bounded."""

from __future__ import annotations

from collections import Counter, OrderedDict

from flashpoint.replication import limits
from flashpoint.replication.messages import Hello, Welcome
from flashpoint.replication.session import Session


class Guest:
    """A peer that has said Hello, and how it was welcomed."""

    __slots__ = ("hello", "identity", "place", "session", "welcome")

    def __init__(self, identity: bytes, place: str, hello: Hello, welcome: Welcome, session: Session) -> None:
        self.identity, self.place = identity, place
        self.hello, self.welcome, self.session = hello, welcome, session


class Guests:
    """At most `limits.SESSIONS_MAX` of them; the one unused for longest goes.

    Attributes:
        by_session: by the session's id, unused for longest first.
        by_identity: by the identity of the control connection.
        places: how many there are from each address.
    """

    def __init__(self) -> None:
        self.by_session: OrderedDict[bytes, Guest] = OrderedDict()
        self.by_identity: dict[bytes, Guest] = {}
        self.places: Counter[str] = Counter()

    def add(self, guest: Guest) -> None:
        self.by_session[guest.session.id] = self.by_identity[guest.identity] = guest
        self.places[guest.place] += 1
        while len(self.by_session) > limits.SESSIONS_MAX:
            self.forget(next(iter(self.by_session.values())))

    def used(self, guest: Guest) -> None:
        self.by_session.move_to_end(guest.session.id)

    def forget(self, guest: Guest) -> None:
        del self.by_session[guest.session.id]
        if self.by_identity.get(guest.identity) is guest:
            del self.by_identity[guest.identity]
        self.places[guest.place] -= 1
        if not self.places[guest.place]:
            del self.places[guest.place]

    def clear(self) -> None:
        self.by_session.clear()
        self.by_identity.clear()
        self.places.clear()
