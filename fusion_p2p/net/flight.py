"""How much bulk data may be on its way to a peer: as much as fills the link, and so little that a beat behind it is not late.

p2pd has one connection to a peer, and takes megabytes for it before it makes a writer wait; on a line of 8 Mbit/s whatever is
said then is heard seconds later. So the receiver of bulk data tells what has come, and its sender keeps only so much on its way
that the queue in front of the next message lasts QUEUE_S: `Window` finds out how much that is, `Flight` makes senders wait.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

LEAST_BYTES = 64 << 10
"""This much may always be on its way."""
FIRST_BYTES = 256 << 10
"""And this much before anything is known: a quarter of a second at 8 Mbit/s."""
QUEUE_S = 0.2
"""How long a message waits behind bulk data."""
FADE_S = 1.0
"""A link that has become slower is believed after about this long."""
ROUND_TRIP_LIFE_S = 30.0
"""So old a round trip is measured anew, on a link that was emptied for it: the way may have become longer."""
LEAST_PIECE_BYTES = 16 << 10
PIECES = 4
"""A full window has at least so many pieces, so that it moves on steadily."""
MAX_PIECE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes that were sent: when, and how it stood then."""

    num_bytes: int
    sent_at: float
    arrived_before: int
    """Bytes that had arrived by then."""
    since: float
    """When the last of these arrived; or when the link was last idle, if that was later."""
    ahead: int
    """Bytes that were on their way already."""
    held_back: bool
    """It had to wait for the window, so the link was full."""


class Window:
    """Finds out how fast a link is and how long a round trip takes, from what arrives when. Pure: `now` is given."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._arrived = 0
        self._since = 0.0
        self._bytes_per_s = 0.0
        self._rated_at = 0.0
        self._round_trip_s = 0.0
        self._timed_at = 0.0

    @property
    def bytes_per_s(self) -> float:
        """What the link was last seen to carry; 0 when nothing has arrived yet."""
        return self._bytes_per_s

    def size(self, now: float) -> int:
        """How many bytes may be on their way."""
        if not self._bytes_per_s:
            return FIRST_BYTES
        if now - self._timed_at > ROUND_TRIP_LIFE_S:
            return LEAST_BYTES
        return max(LEAST_BYTES, int((self._round_trip_s + QUEUE_S) * self._bytes_per_s))

    def piece_bytes(self, now: float) -> int:
        """How large a piece is sent at once; small ones at first, whose own length hardly counts as a round trip."""
        if not self._bytes_per_s:
            return LEAST_PIECE_BYTES
        return min(MAX_PIECE_BYTES, max(LEAST_PIECE_BYTES, self.size(now) // PIECES))

    def has_room(self, num_bytes: int, now: float) -> bool:
        """Whether so many bytes may be sent now; one piece always may when nothing else is on its way."""
        return self.in_flight == 0 or self.in_flight + num_bytes <= self.size(now)

    def sent(self, num_bytes: int, now: float, *, held_back: bool) -> Piece:
        if self.in_flight == 0:
            self._since = now
        piece = Piece(num_bytes, now, self._arrived, self._since, self.in_flight, held_back)
        self.in_flight += num_bytes
        return piece

    def arrived(self, num_bytes: int, now: float) -> None:
        """The receiver has read so many bytes more."""
        self.in_flight -= num_bytes
        self._arrived += num_bytes
        self._since = now

    def completed(self, piece: Piece, now: float) -> None:
        """The last byte of a piece has arrived."""
        self._time(piece, now - piece.sent_at, now)
        self._rate((self._arrived - piece.arrived_before) / max(now - piece.since, 1e-6), now, full=piece.held_back)

    def lost(self, num_bytes: int) -> None:
        """The stream has ended on which these were: nobody will say that they arrived."""
        self.in_flight -= num_bytes

    def _time(self, piece: Piece, took_s: float, now: float) -> None:
        """Keep the least round trip. An old one is replaced by that of a piece which nearly nothing was ahead of."""
        old = now - self._timed_at > ROUND_TRIP_LIFE_S
        unhindered = piece.ahead < LEAST_BYTES
        if not self._bytes_per_s or took_s <= self._round_trip_s or (old and unhindered):
            self._round_trip_s, self._timed_at = took_s, now
        elif piece.ahead == 0 and took_s < 1.5 * self._round_trip_s:
            self._timed_at = now

    def _rate(self, seen: float, now: float, *, full: bool) -> None:
        """Believe a faster rate at once, and a slower one slowly, if the link was full."""
        if seen >= self._bytes_per_s:
            self._bytes_per_s = seen
        elif full:
            self._bytes_per_s += (seen - self._bytes_per_s) * min(1.0, (now - self._rated_at) / FADE_S)
        self._rated_at = now


class Flight:
    """The bulk data on its way to one peer, of all streams together. Senders wait in the order in which they came."""

    def __init__(self) -> None:
        self.window = Window()
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    def piece_bytes(self) -> int:
        return self.window.piece_bytes(_now())

    def window_bytes(self) -> int:
        return self.window.size(_now())

    async def send(self, num_bytes: int) -> Piece:
        """Wait for room, and take it."""
        held_back = self._turn.locked() or not self.window.has_room(num_bytes, _now())
        async with self._turn:
            while not self.window.has_room(num_bytes, _now()):
                self._changed.clear()
                await self._changed.wait()
            return self.window.sent(num_bytes, _now(), held_back=held_back)

    def arrived(self, num_bytes: int) -> None:
        self.window.arrived(num_bytes, _now())
        self._changed.set()

    def completed(self, piece: Piece) -> None:
        self.window.completed(piece, _now())
        self._changed.set()

    def lost(self, num_bytes: int) -> None:
        self.window.lost(num_bytes)
        self._changed.set()


def _now() -> float:
    return asyncio.get_running_loop().time()
