"""What the links of an emulated network do to packets: rates, latencies, queues. Pure; `links.py` moves the packets.

A packet from i to j is held back by every limit on its way in turn (the uplink of i's site and the downlink of j's where flows
share them, the pair's own rate in between), each a queue of its own, first in, first out; then the latency passes. A
packet that would wait longer than `queue_s` for its turn is dropped, as a router drops it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from fusion_p2p.plan.network import Network

MAX_SITES = 250
QUEUE_S = 0.25
"""What a home router keeps. Enough that one TCP flow fills a link of 50 ms."""


@dataclass(frozen=True, slots=True)
class Shape:
    """n nodes and the n x n directed links between them; shared limits by site, 0 where there is none."""

    addresses: tuple[str, ...]
    sites: tuple[int, ...]
    latency_s: tuple[tuple[float, ...], ...]
    seconds_per_byte: tuple[tuple[float, ...], ...]
    uplink_s: tuple[float, ...]
    downlink_s: tuple[float, ...]
    full_duplex: bool = True
    queue_s: float = QUEUE_S

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def read_shape(text: str) -> Shape:
    """What `to_json` wrote."""
    return Shape(**{name: _as_tuples(value) for name, value in json.loads(text).items()})


def shape_of(network: Network) -> Shape:
    """The links of a network as they are emulated; node n of site s has the address 10.77.s.n, counted from 1.

    ValueError when there are more sites or nodes than addresses.
    """
    sites = tuple(int(site) for site in network.sites)
    if max(len(sites), len(network.uplink_s)) > MAX_SITES:
        raise ValueError(f"{len(sites)} nodes in {len(network.uplink_s)} sites: at most {MAX_SITES} of either are emulated")
    return Shape(
        addresses=tuple(f"10.77.{site + 1}.{node + 1}" for node, site in enumerate(sites)),
        sites=sites,
        latency_s=_as_tuples(network.alpha_s.tolist()),
        seconds_per_byte=_as_tuples(network.beta_s.tolist()),
        uplink_s=_as_tuples(network.uplink_s.tolist()),
        downlink_s=_as_tuples(network.downlink_s.tolist()),
        full_duplex=network.full_duplex,
    )


class Shaper:
    """Decides when each packet arrives. Times are seconds of one clock; calls come in the order of time."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._free_at: dict[tuple[str, int, int], float] = {}
        self.dropped = 0

    def arrival(self, source: int, target: int, num_bytes: int, now: float) -> float | None:
        """When a packet that leaves now is there; None when a queue on its way is full and it is dropped."""
        limits = list(self._limits(source, target))
        starts, ends, begin, end = [], [], now, now
        for key, seconds_per_byte in limits:
            begin = max(begin, self._free_at.get(key, 0.0))
            end = max(end, begin + num_bytes * seconds_per_byte)
            starts.append(begin)
            ends.append(end)
        if begin - now > self._shape.queue_s:
            self.dropped += 1
            return None
        for (key, seconds_per_byte), start in zip(limits, starts, strict=True):
            self._free_at[key] = start + num_bytes * seconds_per_byte
        return end + self._shape.latency_s[source][target]

    def _limits(self, source: int, target: int) -> Iterator[tuple[tuple[str, int, int], float]]:
        shape = self._shape
        out, into = shape.sites[source], shape.sites[target]
        if out != into and shape.uplink_s[out]:
            yield ("up", out, 0), shape.uplink_s[out]
        pair = (source, target) if shape.full_duplex else (min(source, target), max(source, target))
        yield ("pair", *pair), shape.seconds_per_byte[source][target]
        if out != into and shape.downlink_s[into]:
            yield ("down", into, 0), shape.downlink_s[into]


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
