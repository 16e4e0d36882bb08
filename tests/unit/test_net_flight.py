"""How much may be on its way: enough to fill any line, and little enough that whatever is said next is not late."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.net.flight import LEAST_BYTES, LEAST_PIECE_BYTES, QUEUE_S, ROUND_TRIP_LIFE_S, Piece, Window


@dataclass
class Line:
    """A line that queues without end, and somebody who always has more to send."""

    bytes_per_s: float
    round_trip_s: float
    window: Window = field(default_factory=Window)
    now: float = 0.0
    free_at: float = 0.0
    carried: int = 0
    longest_queue_s: float = 0.0
    on_its_way: list[tuple[float, int, Piece]] = field(default_factory=list)
    number: int = 0

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.fill()
            if not self.on_its_way:
                self.now = until
                break
            self.now, _, piece = heapq.heappop(self.on_its_way)
            self.window.arrived(piece.num_bytes, self.now)
            self.window.completed(piece, self.now)
            self.carried += piece.num_bytes

    def fill(self) -> None:
        held_back = False
        while self.window.has_room(size := self.window.piece_bytes(self.now), self.now):
            self.send(size, held_back=True)
            held_back = True
        assert held_back or self.window.in_flight

    def send(self, size: int, *, held_back: bool) -> None:
        piece = self.window.sent(size, self.now, held_back=held_back)
        self.longest_queue_s = max(self.longest_queue_s, self.free_at - self.now)
        self.free_at = max(self.free_at, self.now) + size / self.bytes_per_s
        self.number += 1
        heapq.heappush(self.on_its_way, (self.free_at + self.round_trip_s, self.number, piece))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rate=st.floats(2e5, 5e7), round_trip_s=st.floats(0.001, 0.3))
def test_a_line_is_kept_full_and_its_queue_short(rate: float, round_trip_s: float) -> None:
    line = Line(rate, round_trip_s)
    line.run(3.0)
    line.longest_queue_s, before, began = 0.0, line.carried, line.now
    line.run(5.0)
    assert (line.carried - before) / (line.now - began) >= 0.93 * rate or line.window.size(line.now) == LEAST_BYTES
    assert line.longest_queue_s <= max(QUEUE_S + 2 * LEAST_PIECE_BYTES / rate + 0.05, LEAST_BYTES / rate)


@pytest.mark.parametrize(("first", "then"), [(1e7, 1e6), (1e6, 1e7), (5e7, 5e5)])
def test_a_line_that_changes_is_followed(first: float, then: float) -> None:
    line = Line(first, 0.04)
    line.run(5.0)
    line.bytes_per_s = then
    line.run(12.0)
    line.longest_queue_s, before, began = 0.0, line.carried, line.now
    line.run(5.0)
    assert (line.carried - before) / (line.now - began) >= 0.93 * then
    assert line.longest_queue_s <= QUEUE_S + 0.15


def test_a_way_that_becomes_longer_is_noticed() -> None:
    line = Line(1e7, 0.01)
    line.run(5.0)
    line.round_trip_s = 0.5
    line.run(2 * ROUND_TRIP_LIFE_S)
    before, began = line.carried, line.now
    line.run(10.0)
    assert (line.carried - before) / (line.now - began) >= 0.9 * 1e7


def test_what_a_broken_stream_carried_is_not_waited_for() -> None:
    window = Window()
    piece = window.sent(LEAST_BYTES, 0.0, held_back=False)
    window.arrived(1000, 0.1)
    window.lost(piece.num_bytes - 1000)
    assert window.in_flight == 0
    assert window.has_room(1 << 30, 0.2)


def test_a_reader_that_stood_still_does_not_make_the_line_look_fast() -> None:
    """After a pause everything arrives at once, also what was sent just before its end."""
    line = Line(1e6, 0.02)
    line.run(3.0)
    pieces = [line.window.sent(LEAST_PIECE_BYTES, line.now + 0.9, held_back=True)]
    stood = line.now + 1.0
    for _, _, piece in sorted(line.on_its_way):
        line.window.arrived(piece.num_bytes, stood)
        line.window.completed(piece, stood)
    for piece in pieces:
        line.window.arrived(piece.num_bytes, stood)
        line.window.completed(piece, stood)
    assert line.window.bytes_per_s < 1.5e6
