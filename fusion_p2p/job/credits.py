"""What a sender may send: an edge's credits say how many of its values may be on the way or waiting at the reader; pure.

A value is offered once, sent when the edge has a credit (parked until then), and kept until the reader acknowledges that a task
has taken it. After a reconnect everything not acknowledged is sent again; the reader drops what it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from fusion_p2p.wire.frames import Edge, Moment


@dataclass(frozen=True, slots=True)
class Outbox:
    """Per edge the moments sent but not acknowledged, and those parked, both in order of offering."""

    credits: Mapping[Edge, int]
    sent: Mapping[Edge, tuple[Moment, ...]] = field(default_factory=lambda: MappingProxyType({}))
    parked: Mapping[Edge, tuple[Moment, ...]] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Offered:
    """A task has computed this value."""

    edge: Edge
    moment: Moment


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The reader's task has taken this value."""

    edge: Edge
    moment: Moment


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The stream that carries these edges was opened anew."""

    edges: frozenset[Edge]


Event = Offered | Acknowledged | Reconnected


@dataclass(frozen=True, slots=True)
class Send:
    """Write this value to its stream."""

    edge: Edge
    moment: Moment


@dataclass(frozen=True, slots=True)
class Forget:
    """Nobody will ask for this value again."""

    edge: Edge
    moment: Moment


Action = Send | Forget


def step(outbox: Outbox, event: Event) -> tuple[Outbox, tuple[Action, ...]]:
    """The next state and what to send or forget."""
    match event:
        case Offered(edge, moment):
            return _filled(outbox, edge, _sent(outbox, edge), (*_parked(outbox, edge), moment))
        case Acknowledged(edge, moment):
            return _acknowledged(outbox, edge, moment)
        case Reconnected(edges):
            ordered = sorted(edges & outbox.sent.keys(), key=lambda edge: (edge.value, edge.target))
            return outbox, tuple(Send(edge, moment) for edge in ordered for moment in outbox.sent[edge])


def _acknowledged(outbox: Outbox, edge: Edge, moment: Moment) -> tuple[Outbox, tuple[Action, ...]]:
    sent = _sent(outbox, edge)
    if moment not in sent:
        return outbox, ()
    rest = tuple(other for other in sent if other != moment)
    filled, sends = _filled(outbox, edge, rest, _parked(outbox, edge))
    return filled, (Forget(edge, moment), *sends)


def _filled(
    outbox: Outbox, edge: Edge, sent: tuple[Moment, ...], parked: tuple[Moment, ...]
) -> tuple[Outbox, tuple[Send, ...]]:
    """The outbox with this on the way and parked on an edge, once as much of it is sent as there are credits for."""
    free = max(outbox.credits[edge] - len(sent), 0)
    now, later = parked[:free], parked[free:]
    filled = Outbox(outbox.credits, {**outbox.sent, edge: sent + now}, {**outbox.parked, edge: later})
    return filled, tuple(Send(edge, moment) for moment in now)


def _sent(outbox: Outbox, edge: Edge) -> tuple[Moment, ...]:
    return outbox.sent.get(edge, ())


def _parked(outbox: Outbox, edge: Edge) -> tuple[Moment, ...]:
    return outbox.parked.get(edge, ())
