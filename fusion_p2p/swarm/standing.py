"""What the coordinator has for each peer to do, in words for its volunteer: which spare it is, and why it is one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusion_p2p.ids import JobId, PeerId
from fusion_p2p.swarm.coordinator import Jobs, Seat, kept_for

COVERED = "all slices are covered"
MOST_LISTED = 12
MAX_LETTERS = 160

Copies = Mapping[PeerId, tuple[int, ...]]
"""The slices of one job of which a peer keeps copies."""


def standings(
    state: Jobs, seats: Sequence[Seat], copies: Mapping[JobId, Copies], idle: Mapping[PeerId, str], now: float
) -> dict[PeerId, str]:
    """One sentence for each peer, empty for one that works undisturbed.

    idle: why the newest plans left peers out.
    """
    spares = [
        seat for seat in seats if seat.unusable is None and seat.holds is None and kept_for(state, seat.peer, now) is None
    ]
    spares.sort(key=lambda seat: (-seat.flops_per_s, seat.peer))
    places = {seat.peer: f"spare {number} of {len(spares)}" for number, seat in enumerate(spares, 1)}
    return {seat.peer: _standing(state, seat, places.get(seat.peer), copies, idle, now)[:MAX_LETTERS] for seat in seats}


def _standing(
    state: Jobs,
    seat: Seat,
    place: str | None,
    copies: Mapping[JobId, Copies],
    idle: Mapping[PeerId, str],
    now: float,
) -> str:
    if seat.holds is not None:
        entry = state.jobs.get(seat.holds)
        return f"waiting: {entry.reason}" if entry is not None and entry.phase == "waiting" else ""
    if seat.unusable is not None:
        return f"gets no slice: it {seat.unusable}"
    if place is None:
        keeper = kept_for(state, seat.peer, now)
        return f"kept for job {keeper[:8]}" if keeper is not None else ""
    held = [f"{_slices(kept[seat.peer])} of job {job[:8]}" for job, kept in copies.items() if kept.get(seat.peer)]
    if held:
        return f"{place}: holds copies of {', '.join(held)}"
    waiting = next((f"job {job[:8]}: {entry.reason}" for job, entry in state.jobs.items() if entry.phase == "waiting"), None)
    if waiting is not None:
        return f"{place}, waiting: {waiting}"
    return f"{place}: {idle.get(seat.peer, COVERED) if state.jobs else 'no job is registered'}"


def _slices(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers[:MOST_LISTED])) + (", ..." if len(numbers) > MOST_LISTED else "")
    return f"slice {listed}" if len(numbers) == 1 else f"slices {listed}"
