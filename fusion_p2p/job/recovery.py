"""To which step a run goes back that lost peers, and who has the states of that step; pure.

A slice can go on from every step whose state somebody has: who executes it has the running one and copies, guards have copies.
The owner itself has all slices as of its checkpoint. The run goes back to the newest step that every slice can go on from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusion_p2p.graph.slices import Cut
from fusion_p2p.ids import PeerId

Stocks = Mapping[PeerId, Mapping[int, frozenset[int]]]
"""For each peer that can be asked, by slice: the steps after which it has the state."""
Holders = Mapping[int, tuple[PeerId, ...]]
"""For each slice who has its state as of the step that was chosen; nobody: only the owner."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The state after `step` is the newest there is of every slice."""

    step: int
    holders: Holders


def choose(stocks: Stocks, checkpoint: int, newest: int, num_slices: int) -> Choice:
    """The newest step that every slice can go on from.

    checkpoint: the step that the owner has itself, 0 when that is the beginning; nothing older is chosen. newest: the last step
    that was decided; who claims to have a later one is not believed.
    """
    possible = [{step for step in _steps_of(stocks, index) if step <= newest} | {checkpoint} for index in range(num_slices)]
    step = max(set[int].intersection(*possible))
    return Choice(step, holders_at(stocks, step, num_slices))


def holders_at(stocks: Stocks, step: int, num_slices: int) -> Holders:
    """Who has the state of each slice after this step."""
    return {
        index: tuple(sorted(peer for peer, stock in stocks.items() if step in stock.get(index, frozenset())))
        for index in range(num_slices)
    }


def _steps_of(stocks: Stocks, index: int) -> set[int]:
    return {step for stock in stocks.values() for step in stock.get(index, frozenset())}


def sources(before: Cut, after: Cut, holders: Holders) -> dict[int, tuple[PeerId, ...]]:
    """For each slice of the new cut, who has any of its tensors, the slices of the old cut in order, each peer once.

    A slice that nobody has anything of is left out.
    """
    found: dict[int, tuple[PeerId, ...]] = {}
    for part in after.slices:
        wanted = frozenset(part.parameters)
        peers = _once(
            peer for old in before.slices if wanted & frozenset(old.parameters) for peer in holders.get(old.index, ())
        )
        if peers:
            found[part.index] = peers
    return found


def _once(peers: Iterable[PeerId]) -> tuple[PeerId, ...]:
    return tuple(dict.fromkeys(peers))


@dataclass(frozen=True, slots=True)
class Move:
    """A slice that is executed by other peers than before."""

    slice: int
    peers: tuple[PeerId, ...]


def moves(before: Sequence[Sequence[PeerId]], after: Sequence[Sequence[PeerId]]) -> tuple[Move, ...]:
    """Which slices get new members, and which those are; both arguments: the members of each slice of one cut."""
    pairs = enumerate(zip(before, after, strict=True))
    new = ((index, tuple(peer for peer in now if peer not in then)) for index, (then, now) in pairs)
    return tuple(Move(index, peers) for index, peers in new if peers)
