"""The least change of a plan that lets its job go on without some of its peers: same cut, same groups, same codecs.

Every place of a peer that is lost, of one slice or of several, is taken by one other peer. What is sought, first things first:

    memory    nobody gets more than fits beside what it has already
    groups    none shrinks, unless nobody has room for that slice
    moving    as few as possible have to fetch what they take over: peers that guard a copy of it come first
    spares    as few as possible execute something else too
    seconds   per step, by a closed formula for many, by simulation for the best

Places are filled one after the other, the largest first, and the best few partial choices are carried on, so that it takes
milliseconds: a run stands still meanwhile. Peers that stay keep what they have, also where the network knows nothing of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import nsmallest

import numpy as np

from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Cut
from fusion_p2p.ids import PeerId
from fusion_p2p.plan.memory import CREDITS, Holding, holding_of, num_moments, remembered_places, shortage, slice_bytes
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.pipeline import OWNER_STAGE
from fusion_p2p.plan.pipelines import PlannedStep, pipeline_of_plan
from fusion_p2p.plan.plan import Plan, SlicePlan
from fusion_p2p.plan.replan import Running
from fusion_p2p.plan.request import NodeCost, NoPlan, PlanRequest
from fusion_p2p.plan.sharing import exchange_bytes
from fusion_p2p.plan.simulate import simulate
from fusion_p2p.plan.sizing import all_in_flight, sized

CARRIED, LOOKED_AT = 64, 512
"""Partial choices that are carried on to the next place: so many, or of very many places so many for all of them together."""
MOST_PLACES = 64
"""A plan that lost more is not mended: who takes so many places is found sooner by planning anew."""
TRIED = 12
"""Complete choices that are looked at exactly."""
SIMULATED_TASKS = 4_000
"""Of those that are equally good so far, so many that their steps have about this many tasks together are simulated."""
MOST_TASKS = 40_000
"""A step of more tasks takes too long to simulate while a run stands still: it is predicted as before."""
COVERED = "all slices are covered"

Held = Mapping[int, Collection[PeerId]]
"""Who keeps a copy of which slice."""


def mend(
    graph: Graph,
    parts: Cut,
    costs: Sequence[NodeCost],
    plan: Plan,
    network: Network,
    request: PlanRequest,
    without: Collection[PeerId],
    held: Held,
) -> Plan | NoPlan:
    """The plan without these peers, or what is missing for that.

    `parts` is the cut that the plan makes; the network has all of its peers that stay, those that may take something, and
    perhaps others of `without`. Peers of the network that get nothing are idle in the plan.
    """
    mending = _Mending(graph, Running(plan, parts), costs, network, num_moments(request.optimiser), frozenset(without), held)
    made = mending.mended()
    if isinstance(made, NoPlan):
        return made
    spare = [(peer, COVERED) for peer in network.peers if peer not in made.peers and peer not in without]
    return replace(made, idle=request.idle + tuple(spare))


@dataclass(frozen=True, slots=True)
class _Place:
    """A member of a slice that is to be replaced."""

    slice: int
    member: int


@dataclass(frozen=True, slots=True)
class _Choice:
    """Who takes the first so many places; None: nobody, the group shrinks.

    busiest_s: seconds per micro-batch of the busiest peer or link. filling_s: of the way of one micro-batch there and back, as
    far as it leads through these places.
    """

    takers: tuple[PeerId | None, ...] = ()
    shrunk: int = 0
    fetching: int = 0
    doubled: int = 0
    busiest_s: float = 0.0
    filling_s: float = 0.0

    @property
    def rank(self) -> tuple[int, int, int]:
        """What counts before seconds."""
        return self.shrunk, self.fetching, self.doubled


class _Mending:
    """The tables of one call of `mend`."""

    def __init__(
        self,
        graph: Graph,
        running: Running,
        costs: Sequence[NodeCost],
        network: Network,
        moments: int,
        without: frozenset[PeerId],
        held: Held,
    ) -> None:
        plan, parts = running.plan, running.parts
        self.graph, self.parts, self.costs, self.plan = graph, parts, costs, plan
        self.moments, self.without, self.held = moments, without, held
        self.working = plan.peers
        self.shared = exchange_bytes(graph, parts, [len(part.members) for part in plan.slices])
        self.saved = [cost.saved_bytes for cost in costs]
        self.network = self._with_what_is_held(network)
        self.nodes = {peer: node for node, peer in enumerate(network.peers)}
        self.takers = [peer for peer in network.peers if peer not in without]
        self.needs = [self._bytes(index, self._least(index)) for index in range(len(plan.slices))]
        self.room = {peer: float(self.network.free_bytes[self.nodes[peer]]) - self._kept(peer) for peer in self.takers}
        places = [
            _Place(index, member)
            for index, part in enumerate(plan.slices)
            for member, peer in enumerate(part.members)
            if peer in without
        ]
        self.places = sorted(places, key=lambda place: (-self.needs[place.slice], place.slice, place.member))

    def mended(self) -> Plan | NoPlan:
        """The best of the best choices."""
        if self.places and not self.takers:
            return NoPlan(f"slice {self.places[0].slice} needs a peer: nobody else is here")
        if len(self.places) > MOST_PLACES:
            return NoPlan(f"{len(self.places)} places of the plan are empty, too many to be filled one by one")
        choices = self._choices()
        if isinstance(choices, NoPlan):
            return choices
        refusal: NoPlan | None = None
        found: list[Plan] = []
        rank = choices[0].rank
        for choice in choices[:TRIED]:
            if found and (choice.rank != rank or len(found) >= self._most_simulated):
                break
            rank = choice.rank
            made = self._judged(choice)
            if isinstance(made, Plan):
                found.append(made)
            else:
                refusal = refusal or made
        if found:
            return min(found, key=lambda plan: plan.predicted_step_s)
        return refusal or NoPlan("the slices of the lost peers fit nobody")

    @property
    def _most_simulated(self) -> int:
        return max(1, SIMULATED_TASKS // (2 * self.plan.micro_batches * len(self.plan.slices)))

    # Choosing

    def _choices(self) -> list[_Choice] | NoPlan:
        """Complete choices, best first, or whose room is short of what."""
        choices = [_Choice(busiest_s=max(self._loads.values(), default=0.0))]
        for number, place in enumerate(self.places):
            longer = [further for choice in choices for further in self._further(choice, place)]
            if not longer:
                return self._shortage(choices, place)
            carried = min(CARRIED, max(1, LOOKED_AT // len(self.places)))
            choices = nsmallest(carried, longer, key=lambda choice: self._cost(choice, number + 1))
        return choices

    def _cost(self, choice: _Choice, filled: int) -> tuple[tuple[int, int, int], float, list[str]]:
        seconds = choice.filling_s + (self.plan.micro_batches - 1) * choice.busiest_s
        return choice.rank, seconds, [taker or "" for taker in choice.takers[:filled]]

    def _further(self, choice: _Choice, place: _Place) -> Iterator[_Choice]:
        """The choices that also fill this place."""
        part = self.plan.slices[place.slice]
        filled = list(zip(self.places, choice.takers, strict=False))
        members = {peer for peer in part.members if peer not in self.without}
        members |= {taker for other, taker in filled if other.slice == place.slice and taker is not None}
        for peer in self.takers:
            given = [other.slice for other, taker in filled if taker == peer]
            room = self.room[peer] - sum(self.needs[index] for index in given)
            if peer not in members and room >= self.needs[place.slice]:
                yield self._with_taker(choice, place, peer, given)
        if members:
            yield replace(choice, takers=(*choice.takers, None), shrunk=choice.shrunk + 1)

    def _with_taker(self, choice: _Choice, place: _Place, peer: PeerId, given: Sequence[int]) -> _Choice:
        node, share = self.nodes[peer], self._share(place)
        work_s = self._work_s(place.slice, node)
        busy_s = self._loads.get(peer, 0.0) + share * work_s
        busy_s += sum(self._work_s(index, node) / len(self.plan.slices[index].members) for index in given)
        way_s, wire_s = self._way_s(place.slice, node)
        return _Choice(
            takers=(*choice.takers, peer),
            shrunk=choice.shrunk,
            fetching=choice.fetching + (peer not in self.held.get(place.slice, ())),
            doubled=choice.doubled + (peer in self.working or bool(given)),
            busiest_s=max(choice.busiest_s, busy_s, share * wire_s),
            filling_s=choice.filling_s + work_s + way_s,
        )

    def _shortage(self, choices: Sequence[_Choice], place: _Place) -> NoPlan:
        """Who comes nearest to having room, when this is the first place that nobody can take."""
        roomy = choices[0]
        given: dict[PeerId, float] = defaultdict(float)
        for other, taker in zip(self.places, roomy.takers, strict=False):
            if taker is not None:
                given[taker] += self.needs[other.slice]
        rooms = {peer: self.room[peer] - given[peer] for peer in self.takers}
        most = max(rooms, key=lambda peer: (rooms[peer], peer))
        return shortage(place.slice, most, self.needs[place.slice], rooms[most])

    # Judging

    def _judged(self, choice: _Choice) -> Plan | NoPlan:
        """The plan of a complete choice, with its step simulated."""
        draft = self._draft(choice)
        made = sized(self.graph, self.parts, self.costs, draft, self.network, self.moments)
        if isinstance(made, NoPlan) or 2 * made.micro_batches * len(made.replicas) > MOST_TASKS:
            return made
        step = simulate(pipeline_of_plan(self.graph, self.parts, self.costs, made, self.network))
        return replace(made, predicted_step_s=step.step_s)

    def _draft(self, choice: _Choice) -> Plan:
        taken: dict[int, dict[int, PeerId | None]] = defaultdict(dict)
        for place, taker in zip(self.places, choice.takers, strict=True):
            taken[place.slice][place.member] = taker
        slices = (_regrouped(part, taken[index]) for index, part in enumerate(self.plan.slices))
        return replace(self.plan, slices=tuple(all_in_flight(part, self.plan.micro_batches) for part in slices))

    # Figures

    def _with_what_is_held(self, network: Network) -> Network:
        """The network in which every peer has at least the memory that its slices take now: they lie there already."""
        held: dict[PeerId, float] = defaultdict(float)
        for index, part in enumerate(self.plan.slices):
            needed = self._bytes(index, holding_of(self.graph, self.plan, index, self.moments))
            for peer in part.members:
                held[peer] += needed
        least = np.array([held[peer] for peer in network.peers], dtype=np.float64)
        return replace(network, free_bytes=np.maximum(network.free_bytes, least))

    def _kept(self, peer: PeerId) -> int:
        """The least bytes that a peer needs for what it has."""
        return sum(self.needs[index] for index in self.plan.slices_of(peer))

    def _least(self, index: int) -> Holding:
        part = self.plan.slices[index]
        in_flight = part.in_flight if self.plan.schedule == "gpipe" else 1
        places = remembered_places(self.graph, self.plan, index)
        return Holding(in_flight, CREDITS, self.moments, part.recompute, places=places)

    def _bytes(self, index: int, holding: Holding) -> int:
        return slice_bytes(self.graph, self.parts.slices[index], self.saved, holding) + self.shared[index]

    def _share(self, place: _Place) -> float:
        """The part of the micro-batches that this member executes."""
        deal = self.plan.slices[place.slice].deal
        return deal.count(place.member) / len(deal)

    @cached_property
    def _step(self) -> PlannedStep:
        """Tables of the plan's step, with somebody in the places of those that the network may not have."""
        slices = (
            _regrouped(part, {member: self.takers[0] for member, peer in enumerate(part.members) if peer in self.without})
            for part in self.plan.slices
        )
        return PlannedStep(self.graph, self.parts, self.costs, replace(self.plan, slices=tuple(slices)), self.network)

    @cached_property
    def _loads(self) -> dict[PeerId, float]:
        """Seconds per micro-batch of the peers that stay, for what they have."""
        loads: dict[PeerId, float] = defaultdict(float)
        for index, part in enumerate(self.plan.slices):
            for member, peer in enumerate(part.members):
                if peer not in self.without:
                    loads[peer] += self._share(_Place(index, member)) * self._work_s(index, self.nodes[peer])
        return dict(loads)

    def _work_s(self, index: int, node: int) -> float:
        """Seconds of one micro-batch of a slice on a peer, there and back; peers of equal rates are asked once."""
        rates = (index, *self.network.flops_per_s[node].tolist(), float(self.network.memory_bytes_per_s[node]))
        if rates not in self._worked:
            recompute = self.plan.slices[index].recompute
            self._worked[rates] = sum(self._step.seconds(self.parts.slices[index], node, recompute=recompute))
        return self._worked[rates]

    @cached_property
    def _worked(self) -> dict[tuple[float, ...], float]:
        return {}

    @cached_property
    def _messages(self) -> list[list[tuple[tuple[int, ...], float, float]]]:
        """For every slice what it exchanges with others: their nodes, as far as they stay; bytes to them, and from them."""
        found: list[list[tuple[tuple[int, ...], float, float]]] = [[] for _ in self.plan.slices]
        staying = [tuple(self.nodes[peer] for peer in part.members if peer not in self.without) for part in self.plan.slices]
        owner = () if self.network.owner is None else (self.network.owner,)
        for edge in (*self._step.feeds(), *self._step.edges()):
            sources = owner if edge.source == OWNER_STAGE else staying[edge.source]
            found[edge.target].append((sources, edge.backward_bytes, edge.forward_bytes))
            if edge.source != OWNER_STAGE:
                found[edge.source].append((staying[edge.target], edge.forward_bytes, edge.backward_bytes))
        return found

    def _way_s(self, index: int, node: int) -> tuple[float, float]:
        """Seconds of all messages of a micro-batch between a slice on this peer and the others, and of the busiest link."""
        way_s = busiest_s = 0.0
        for others, sent, received in self._messages[index]:
            for other in others:
                there, back = sent * self.network.pace(node, other), received * self.network.pace(other, node)
                latency_s = float(self.network.alpha_s[node, other] + self.network.alpha_s[other, node])
                way_s += (there + back + latency_s) / len(others)
                busiest_s = max(busiest_s, there, back)
        return way_s, busiest_s


def _regrouped(part: SlicePlan, taken: Mapping[int, PeerId | None]) -> SlicePlan:
    """The slice with other peers in some places; where nobody takes one, its micro-batches go to the other members."""
    members = [taken.get(member, peer) for member, peer in enumerate(part.members)]
    staying = [member for member, peer in enumerate(members) if peer is not None]
    first, *others = [peer for peer in members if peer is not None]
    deal = tuple(staying.index(member) for member in part.deal if member in staying)
    return replace(part, peer=first, replicas=tuple(others), deal=deal if others else (0,))
