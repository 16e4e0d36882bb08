"""What happens to a simulated swarm: drawn from a seed, the same for the same seed. No I/O."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from fusion_p2p.net.memory_pipe import Link

Kind = Literal[
    "crash", "restart", "leave", "join", "join with a wrong clock", "pause", "partition", "lose", "slow down", "reset streams",
    "crash coordinator", "pause coordinator", "crash many",
]  # fmt: skip
WEIGHTS: dict[Kind, int] = {
    "crash": 4, "restart": 4, "leave": 3, "join": 3, "join with a wrong clock": 1, "pause": 4, "partition": 4, "lose": 3,
    "slow down": 2, "reset streams": 2, "crash coordinator": 3, "pause coordinator": 3, "crash many": 1,
}  # fmt: skip
SKEW_S = 90.0
WRONG_S = 3600.0
LASTING = 0.25
"""How many of the scenarios end with a partition that nobody heals."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`places` choose peers among those that are here then; `for_s` until it is undone; `amount`: seconds, or a probability."""

    at_s: float
    kind: Kind
    places: tuple[float, ...] = ()
    for_s: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        places = " ".join(f"{place:.2f}" for place in self.places)
        return f"{self.at_s:.2f} s: {self.kind} [{places}] for {self.for_s:.1f} s, {self.amount:.3g}"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A swarm and its faults. `skews_s`: what the clocks of peers, in turn, are wrong by; `duplicates`: of questions sent."""

    seed: int
    num_peers: int
    link: Link
    skews_s: tuple[float, ...]
    duplicates: float
    arrive_within_s: float
    faults: tuple[Fault, ...]
    lasting_partition: bool

    @property
    def over_at_s(self) -> float:
        """When the last fault is undone, but for a partition that lasts."""
        return max((fault.at_s + fault.for_s for fault in self.faults), default=0.0)


def draw(seed: int, fewest: int, most: int) -> Scenario:
    """The scenario of a seed, with so many peers at the start."""
    rng = random.Random(seed)
    num_peers = rng.randint(fewest, most)
    link = Link(
        latency_s=rng.choice((0.0005, 0.01, 0.04, 0.15)),
        jitter_s=rng.choice((0.0, 0.01, 0.1)),
        loss=rng.choice((0.0, 0.0, 0.05)),
    )
    lasting = rng.random() < LASTING
    faults = list(_faults(rng, num_peers))
    if lasting:
        at_s = max((fault.at_s + fault.for_s for fault in faults if fault.kind == "partition"), default=0.0)
        at_s = max(at_s, faults[-1].at_s if faults else 0.0) + rng.uniform(0.5, 3)
        faults.append(Fault(at_s, "partition", (rng.random(),)))
    return Scenario(
        seed=seed,
        num_peers=num_peers,
        link=link,
        skews_s=tuple(rng.uniform(-SKEW_S, SKEW_S) / 2 for _ in range(num_peers)),
        duplicates=rng.choice((0.0, 0.05, 0.2)),
        arrive_within_s=rng.choice((0.0, 1.0, 8.0)),
        faults=tuple(faults),
        lasting_partition=lasting,
    )


def _faults(rng: random.Random, num_peers: int) -> list[Fault]:
    kinds = list(WEIGHTS)
    at_s, parted_until, faults = rng.uniform(0.0, 8.0), 0.0, []
    for _ in range(rng.randint(2, 7)):
        kind = rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        if kind == "partition":  # one at a time
            at_s = max(at_s, parted_until)
        fault = _fault(rng, at_s, kind, num_peers)
        if kind == "partition":
            parted_until = fault.at_s + fault.for_s + 0.1
        faults.append(fault)
        at_s += rng.expovariate(1 / 3)
    return faults


def _fault(rng: random.Random, at_s: float, kind: Kind, num_peers: int) -> Fault:
    one = (rng.random(),)
    match kind:
        case "restart" | "pause" | "pause coordinator":
            return Fault(at_s, kind, one, for_s=rng.choice((0.3, 2.0, 5.0, 12.0)) * rng.uniform(0.5, 1.5))
        case "partition":
            return Fault(at_s, kind, one, for_s=rng.choice((1.0, 4.0, 20.0)) * rng.uniform(0.5, 1.5))
        case "lose":
            return Fault(at_s, kind, one, for_s=rng.uniform(1, 10), amount=rng.choice((0.1, 0.3, 0.6)))
        case "slow down":
            return Fault(at_s, kind, one, for_s=rng.uniform(1, 10), amount=rng.choice((0.2, 0.5, 1.5)))
        case "join with a wrong clock":
            return Fault(at_s, kind, one, amount=rng.choice((-WRONG_S, WRONG_S)))
        case "join":
            return Fault(at_s, kind, one, amount=rng.uniform(-SKEW_S, SKEW_S) / 2)
        case "crash many":
            return Fault(at_s, kind, tuple(rng.random() for _ in range(max(1, num_peers // 3))))
        case _:
            return Fault(at_s, kind, one)
