"""Which faults happen when: a pure function of a seed, so that a run that went wrong can be had again.

Every round has each kind once, in an order of its own, and a newcomer for every peer that is taken away; the number of peers
stays within one of what it was at the beginning. Times between faults are exponential.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

FREEZE_S = (1.5, 14.0)
"""A short one is borne, a long one is an eviction; they take turns."""
CUT_S = (2.0, 14.0)
MIN_BETWEEN_S = 0.5


class Kind(StrEnum):
    """What is done, and to whom."""

    KILL = "kill"
    """kill -9 of a peer that holds a slice."""
    COORDINATOR = "kill coordinator"
    """kill -9 of the coordinator."""
    DRAIN = "drain"
    """SIGTERM to a peer that holds a slice."""
    JOIN = "join"
    """A new peer."""
    RESTART = "restart"
    """kill -9 of any peer, which is started again at once with its identity."""
    FREEZE = "freeze"
    """SIGSTOP of a peer that holds a slice, later SIGCONT."""
    CUT = "cut links"
    """Nobody reaches a peer that holds a slice, nor it anybody; later they do."""
    DAEMON = "kill p2pd"
    """kill -9 of the network daemon underneath a peer that holds a slice."""


AWAY = frozenset({Kind.KILL, Kind.COORDINATOR, Kind.DRAIN})
"""What leaves one peer less."""
LASTING = {Kind.FREEZE: FREEZE_S, Kind.CUT: CUT_S}
EVERY_KIND = tuple(Kind)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `pick`, from 0 to below 1, says which of those it may be done to, in the order of their names."""

    at_s: float
    kind: Kind
    pick: float
    lasts_s: float = 0.0


def schedule(seed: int, count: int, mean_s: float, kinds: Iterable[Kind] = EVERY_KIND) -> tuple[Fault, ...]:
    """The first `count` faults of a seed, `mean_s` seconds apart on average."""
    chance = random.Random(seed)
    faults: list[Fault] = []
    at_s = 0.0
    seen: dict[Kind, int] = dict.fromkeys(Kind, 0)
    for kind in _endless(chance, tuple(kinds)):
        if len(faults) == count:
            return tuple(faults)
        at_s += max(MIN_BETWEEN_S, chance.expovariate(1 / mean_s))
        lasting = LASTING.get(kind, (0.0,))
        faults.append(Fault(round(at_s, 3), kind, chance.random(), lasting[seen[kind] % len(lasting)]))
        seen[kind] += 1
    raise AssertionError("rounds do not end")


def one_round(kinds: Iterable[Kind]) -> list[Kind]:
    """Each kind once, and a newcomer for everybody who goes."""
    wanted = [kind for kind in Kind if kind in set(kinds) and kind is not Kind.JOIN]
    return wanted + [Kind.JOIN] * sum(kind in AWAY for kind in wanted)


def change(kind: Kind) -> int:
    """By how many a fault changes the number of peers, when it is over."""
    return -1 if kind in AWAY else int(kind is Kind.JOIN)


def _endless(chance: random.Random, kinds: tuple[Kind, ...]) -> Iterator[Kind]:
    more = 0
    while True:
        left = one_round(kinds)
        while left:
            kind = chance.choice([kind for kind in left if abs(more + change(kind)) <= 1])
            left.remove(kind)
            more += change(kind)
            yield kind
