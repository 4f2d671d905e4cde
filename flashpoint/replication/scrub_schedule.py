"""What a scrub verifies next, and how long it waits: every decision of it, and no I/O.

No clock: each call brings the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from flashpoint.replication.messages import Key

PIECE_BYTES: Final = 4 << 20  # verified at once, or one chunk where that is larger
REST_S: Final = (
    60.0  # between two verifications of one object: a node that holds little need not do it all the time
)
IDLE_S: Final = 1.0
GIVE_WAY_S: Final = 300.0  # to replication; one that never ends must not keep what rots from being found
AGAIN_S: Final = 5.0
AGAIN_LAST_S: Final = 600.0


class Held(NamedTuple):
    """An object that lies here, as far as a schedule is concerned."""

    nbytes: int
    chunk_bytes: int


class Piece(NamedTuple):
    """Chunks ``first`` to ``end`` of an object, ``nbytes`` in all; the last piece of it or not."""

    key: Key
    name: str
    first: int
    end: int
    nbytes: int
    is_last: bool


@dataclass
class _Object:
    held: Held
    number: int  # the lower, the longer it is known
    verified_s: float = float("-inf")
    not_before_s: float = float("-inf")
    wait_s: float = AGAIN_S
    next_chunk: int = 0


class ScrubSchedule:
    """The order in which the objects of a node are verified again: the one verified longest ago first.

    Args:
        bytes_per_s: at most, over any time, but for one piece.
        rest_s: an object is not begun again sooner than this after it was verified.
    """

    def __init__(self, bytes_per_s: int, *, rest_s: float | None = None) -> None:
        self._bytes_per_s = bytes_per_s
        self._rest_s = REST_S if rest_s is None else rest_s
        self._objects: dict[tuple[Key, str], _Object] = {}
        self._numbers = 0
        self._current: tuple[Key, str] | None = None
        self._free_s = float("-inf")  # when what was verified has been paid for
        self._gives_way_s: float | None = None  # since when it does

    def found(self, held: Mapping[Key, Mapping[str, Held]]) -> None:
        """What lies here now. What is new has never been verified."""
        now = {(key, name): one for key, names in held.items() for name, one in names.items()}
        for place in self._objects.keys() - now.keys():
            del self._objects[place]
        for place, one in now.items():
            if place not in self._objects or self._objects[place].held != one:
                self._objects[place] = _Object(one, self._numbers)
                self._numbers += 1
        if self._current not in self._objects:
            self._current = None

    def next(self, now_s: float, *, is_busy: bool) -> Piece | float:
        """What to verify now; or for how many seconds not to ask again.

        Args:
            is_busy: whether copies are being made. They have precedence, but not for ever.
        """
        if not is_busy:
            self._gives_way_s = None
        elif self._gives_way_s is None:
            self._gives_way_s = now_s
        if self._gives_way_s is not None and now_s - self._gives_way_s < GIVE_WAY_S:
            return IDLE_S
        if now_s < self._free_s:
            return self._free_s - now_s
        if self._current is None:
            due = min(self._objects, key=lambda place: self._due(self._objects[place]), default=None)
            if due is None:
                return IDLE_S
            wait_s = self._due(self._objects[due])[0] - now_s
            if wait_s > 0:
                return min(wait_s, IDLE_S)
            self._current = due
        piece = self._piece(*self._current)
        self._free_s = now_s + piece.nbytes / self._bytes_per_s
        return piece

    def _due(self, one: _Object) -> tuple[float, float, int]:
        """When it is its turn; of those whose turn it is, the one verified longest ago is the first."""
        return max(one.verified_s + self._rest_s, one.not_before_s), one.verified_s, one.number

    def _piece(self, key: Key, name: str) -> Piece:
        one = self._objects[key, name]
        size, nbytes = one.held.chunk_bytes, one.held.nbytes
        count = -(-nbytes // size)
        first = one.next_chunk
        end = min(first + max(PIECE_BYTES // size, 1), count)
        return Piece(key, name, first, end, min(end * size, nbytes) - first * size, end == count)

    # ---- what came of it --------------------------------------------------------------------------

    def verified(self, piece: Piece, now_s: float) -> None:
        """A piece is as it should be."""
        one = self._objects.get((piece.key, piece.name))
        if one is None or (piece.key, piece.name) != self._current:
            return
        one.next_chunk = piece.end
        if piece.is_last:
            self.mended(piece.key, piece.name, now_s)

    def mended(self, key: Key, name: str, now_s: float) -> None:
        """All of an object is as it should be."""
        self._leave(key, name)
        if (one := self._objects.get((key, name))) is not None:
            one.verified_s = now_s
            one.wait_s = AGAIN_S

    def failed(self, key: Key, name: str, now_s: float) -> None:
        """An object could not be read, or not be mended: again later, and less and less often."""
        self._leave(key, name)
        if (one := self._objects.get((key, name))) is not None:
            one.not_before_s = now_s + one.wait_s
            one.wait_s = min(2 * one.wait_s, AGAIN_LAST_S)

    def _leave(self, key: Key, name: str) -> None:
        if self._current == (key, name):
            self._current = None
        if (one := self._objects.get((key, name))) is not None:
            one.next_chunk = 0
