"""The table of a peer's links, and whom to probe next. Pure: the runner in `peer/` measures and tells.

A newcomer probes a few peers, near ones first, so that sites are found, then others in an order of its own; in a small swarm
that is everybody. Whoever is probed learns the same figures, so most pairs are measured once. Afterwards what is oldest is
measured again now and then: traffic says how one direction is, not the other. Nobody is probed while this peer is at work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from fusion_p2p.ids import PeerId, digest_of
from fusion_p2p.plan.measured import CLOSE_BYTES_PER_S, CLOSE_LATENCY_S, LinkFigures
from fusion_p2p.wire.swarm_messages import MAX_LINKS, LinkEntry

TARGETS = 8
"""Links that every peer should know by probes, its own or others'."""
NEAR_TARGETS = 4
"""Of these at most so many to peers of the same place."""
REFRESH_S = 600.0
"""A link not measured for so long is measured again."""
NEAR_REFRESH_S = 3 * REFRESH_S
"""The same within one place: what carries that changes seldom, and measuring it takes all of both machines for a moment."""
UNKNOWN_AGE_S = 1e9
"""Of what was never measured, or by nobody knows when."""
REFRESH_PAUSE_S = 60.0
"""Between two such probes."""
FAILED_PAUSE_S = 300.0
SOON_S = 5.0
"""A probe that can begin within this time is worth waiting for."""
SECOND_LOOK_S = 30.0
"""After so long a link is probed once more: everybody is busy while a swarm comes together."""
SECOND_PAUSE_S = 3.0
"""Between two such probes."""
BETTER_WEIGHT, WORSE_WEIGHT = 0.8, 0.2
"""Of a new figure when a link is measured again within REFRESH_S: whatever else goes on can only make it look worse."""
TRAFFIC_WINDOW_S = 30.0
"""Values share the line with each other, so only the fastest of so many seconds counts as a measurement."""


@dataclass(frozen=True, slots=True)
class Link:
    """Both directions to one peer. None: not measured.

    `probed_at`: when a probe last told of all figures. `in_at`: when a probe or traffic last told of the rate from the peer;
    traffic says nothing of the other direction. `fastest`: the best rate seen in traffic from the peer since `watched_from`.
    """

    probed_at: float | None = None
    in_at: float | None = None
    latency_s: float | None = None
    out_bytes_per_s: float | None = None
    in_bytes_per_s: float | None = None
    probes: int = 0
    watched_from: float | None = None
    fastest: float = 0.0

    @property
    def probed(self) -> bool:
        return self.latency_s is not None

    @property
    def newest_at(self) -> float:
        """When anything last told of it."""
        return max(at for at in (self.probed_at, self.in_at, self.watched_from, -math.inf) if at is not None)

    @property
    def oldest_at(self) -> float:
        """When the oldest of its figures was measured: long ago where one never was."""
        return -math.inf if self.probed_at is None else self.probed_at

    @property
    def close(self) -> bool:
        """Whether the peer must be in the same place."""
        slowest = min(self.out_bytes_per_s or 0.0, self.in_bytes_per_s or 0.0)
        return self.latency_s is not None and self.latency_s <= CLOSE_LATENCY_S and slowest >= CLOSE_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class LinkTable:
    """State. `not_before`: when a peer that was busy or failed may be probed again.

    `measuring`: more will be known soon, so also as long as nobody else has been seen.
    """

    me: PeerId
    links: Mapping[PeerId, Link] = field(default_factory=dict)
    not_before: Mapping[PeerId, float] = field(default_factory=dict)
    probing: PeerId | None = None
    measuring: bool = True
    refreshed_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Probed:
    """A probe, ours or of the peer, has found this."""

    peer: PeerId
    latency_s: float
    out_bytes_per_s: float
    in_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Postponed:
    """The peer is busy for so long."""

    peer: PeerId
    retry_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    peer: PeerId


@dataclass(frozen=True, slots=True)
class Traffic:
    """So fast a large value came from a peer."""

    peer: PeerId
    in_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Look:
    """Probe somebody now? `others`: who can be dialled, and whether it seems to be in the same place."""

    others: Mapping[PeerId, bool]
    idle: bool


Event = Probed | Postponed | Failed | Traffic | Look


@dataclass(frozen=True, slots=True)
class Probe:
    """Measure the links with this peer, and tell what came of it."""

    peer: PeerId


Step = tuple[LinkTable, tuple[Probe, ...]]


def step(state: LinkTable, event: Event, now: float) -> Step:
    """The next state, and at most one probe to begin."""
    match event:
        case Probed():
            return _probed(state, event, now), ()
        case Postponed(peer, retry_s):
            return _not_before(state, peer, now + retry_s), ()
        case Failed(peer):
            return _not_before(state, peer, now + FAILED_PAUSE_S), ()
        case Traffic(peer, rate):
            return _traffic(state, peer, rate, now), ()
        case Look():
            return _look(state, event, now)
        case _:
            assert_never(event)


def summary(state: LinkTable) -> tuple[float | None, float | None]:
    """The best rates out and in, bytes per second, to other places where any is known: what the line to the world carries."""
    links = [link for link in state.links.values() if not link.close] or list(state.links.values())
    out = max((link.out_bytes_per_s for link in links if link.out_bytes_per_s is not None), default=None)
    into = max((link.in_bytes_per_s for link in links if link.in_bytes_per_s is not None), default=None)
    return out, into


def entries(state: LinkTable, now: float) -> tuple[LinkEntry, ...]:
    """The table as it is sent, newest first."""
    newest = sorted(state.links.items(), key=lambda item: (-item[1].newest_at, item[0]))
    return tuple(_entry(peer, link, now) for peer, link in newest if link.probed or link.in_bytes_per_s is not None)


def _entry(peer: PeerId, link: Link, now: float) -> LinkEntry:
    return LinkEntry(
        peer=peer,
        latency_s=link.latency_s,
        out_bytes_per_s=link.out_bytes_per_s,
        in_bytes_per_s=link.in_bytes_per_s,
        age_s=_age_s(link.probed_at, now),
        in_age_s=_age_s(link.in_at, now),
    )


def _age_s(at: float | None, now: float) -> float:
    return UNKNOWN_AGE_S if at is None else max(0.0, now - at)


def merged(tables: Mapping[PeerId, Iterable[LinkEntry]]) -> dict[tuple[PeerId, PeerId], LinkFigures]:
    """All links that these peers tell of, by (from, to).

    Where both ends tell of one, the slower figure counts: who claims too much gets no more than the other end saw. A figure
    that is older than the other end's by more than REFRESH_S is not heard.
    """
    told: dict[tuple[PeerId, PeerId], dict[PeerId, _Told]] = {}
    for peer, table in tables.items():
        for entry in table:
            other = PeerId(entry.peer)
            if other != peer:
                out = _Told(entry.latency_s, entry.out_bytes_per_s, entry.age_s, entry.age_s)
                into = _Told(entry.latency_s, entry.in_bytes_per_s, entry.age_s, entry.in_age_s)
                told.setdefault((peer, other), {})[peer] = out
                told.setdefault((other, peer), {})[peer] = into
    return {pair: _agreed(list(ends.values())) for pair, ends in told.items()}


@dataclass(frozen=True, slots=True)
class _Told:
    """What one end says of one direction, and how old that is."""

    latency_s: float | None
    bytes_per_s: float | None
    latency_age_s: float
    rate_age_s: float


def _agreed(ends: Sequence[_Told]) -> LinkFigures:
    latencies = [(end.latency_age_s, end.latency_s) for end in ends if end.latency_s is not None]
    rates = [(end.rate_age_s, end.bytes_per_s) for end in ends if end.bytes_per_s is not None]
    return LinkFigures(
        latency_s=max(_recent(latencies), default=None),
        bytes_per_s=min(_recent(rates), default=None),
        by_both=len(latencies) == len(rates) == 2,
    )


def _recent(figures: Sequence[tuple[float, float]]) -> list[float]:
    """Without those that are much older than the newest."""
    newest_s = min((age_s for age_s, _ in figures), default=0.0)
    return [figure for age_s, figure in figures if age_s <= newest_s + REFRESH_S]


def _probed(state: LinkTable, event: Probed, now: float) -> LinkTable:
    old = state.links.get(event.peer, Link())
    slowness = None if old.latency_s is None else -old.latency_s
    link = replace(
        old,
        probed_at=now,
        in_at=now,
        latency_s=-_mixed(slowness, old.probed_at, -event.latency_s, now),
        out_bytes_per_s=_mixed(old.out_bytes_per_s, old.probed_at, event.out_bytes_per_s, now),
        in_bytes_per_s=_mixed(old.in_bytes_per_s, old.in_at, event.in_bytes_per_s, now),
        probes=old.probes + 1,
    )
    return _free(_with(state, event.peer, link), event.peer)


def _mixed(known: float | None, at: float | None, new: float, now: float) -> float:
    """A figure of which more is better, after it was measured once more; it was `known` at `at`."""
    if known is None or at is None or now - at > REFRESH_S:
        return new
    weight = BETTER_WEIGHT if new > known else WORSE_WEIGHT
    return (1 - weight) * known + weight * new


def _traffic(state: LinkTable, peer: PeerId, rate: float, now: float) -> LinkTable:
    old = state.links.get(peer, Link())
    began = now if old.watched_from is None else old.watched_from
    watched = replace(old, watched_from=began, fastest=max(old.fastest, rate))
    if now - began >= TRAFFIC_WINDOW_S:
        mixed = _mixed(old.in_bytes_per_s, old.in_at, watched.fastest, now)
        watched = replace(watched, in_at=now, in_bytes_per_s=mixed, watched_from=now, fastest=0.0)
    return _with(state, peer, watched)


def _with(state: LinkTable, peer: PeerId, link: Link) -> LinkTable:
    links = {**state.links, peer: link}
    if len(links) > MAX_LINKS:
        del links[min(links, key=lambda other: links[other].newest_at)]
    return replace(state, links=links)


def _not_before(state: LinkTable, peer: PeerId, at: float) -> LinkTable:
    return _free(replace(state, not_before={**state.not_before, peer: at}), peer)


def _free(state: LinkTable, peer: PeerId) -> LinkTable:
    return replace(state, probing=None) if state.probing == peer else state


def _look(state: LinkTable, event: Look, now: float) -> Step:
    not_before = {peer: at for peer, at in state.not_before.items() if peer in event.others and at > now}
    state = replace(state, not_before=not_before)
    unknown = _unknown(state, event.others)
    soon = [peer for peer in unknown if not_before.get(peer, now) <= now + SOON_S]
    alone = not event.others.keys() - {state.me}
    state = replace(state, measuring=event.idle and (alone or bool(soon)))
    if not event.idle or state.probing is not None:
        return state, ()
    ready = [peer for peer in unknown if peer not in not_before]
    if ready:
        return _begin(state, ready[0])
    stale = _stale(state, event.others, now)
    if unknown or stale is None:
        return state, ()
    return _begin(replace(state, refreshed_at=now), stale)


def _begin(state: LinkTable, peer: PeerId) -> Step:
    return replace(state, probing=peer), (Probe(peer),)


def _unknown(state: LinkTable, others: Mapping[PeerId, bool]) -> list[PeerId]:
    """Whom to probe, best first, to reach the number of targets; empty when it is reached."""
    known = {peer for peer, link in state.links.items() if link.probed and peer in others}
    if len(known) >= TARGETS:
        return []
    near_known = sum(others[peer] for peer in known)
    ranked = sorted(others.keys() - known - {state.me}, key=lambda peer: digest_of(f"{state.me} {peer}".encode()))
    near = [peer for peer in ranked if others[peer]][: max(0, NEAR_TARGETS - near_known)]
    return near + [peer for peer in ranked if peer not in near]


def _stale(state: LinkTable, others: Mapping[PeerId, bool], now: float) -> PeerId | None:
    """A link to look at a second time, else the one measured longest ago when that is too long; now and then only."""
    known = {peer: link for peer, link in state.links.items() if peer in others and peer not in state.not_before}
    once = {peer: link for peer, link in known.items() if link.probes == 1}
    far = {peer: link for peer, link in known.items() if not others[peer]}
    ways = (once, SECOND_LOOK_S, SECOND_PAUSE_S), (far, REFRESH_S, REFRESH_PAUSE_S), (known, NEAR_REFRESH_S, REFRESH_PAUSE_S)
    for links, age_s, pause_s in ways:
        oldest = min(links, key=lambda peer: (known[peer].oldest_at, peer), default=None)
        if oldest is not None and now - known[oldest].oldest_at >= age_s and now - state.refreshed_at >= pause_s:
            return oldest
    return None
