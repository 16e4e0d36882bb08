"""Many slices with the real `job.flow` and `job.credits`, a fake network that delivers in random order, and no clock."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

from fusion_p2p.job import credits as outboxes
from fusion_p2p.job import flow as flows
from fusion_p2p.job.topology import TRIGGER, SliceEdges
from fusion_p2p.wire.frames import OWNER, Direction, Edge, Moment


@dataclass
class RandomPlan:
    """A random DAG of slices: values with and without gradient, skips, several readers, tied parameters, caps and credits."""

    edges: list[SliceEdges]
    in_flight: list[int]
    peer_of: list[int]
    credits: dict[Edge, int]
    micro_batches: int
    feeds: list[Edge] = field(default_factory=list)


def random_plan(rng: random.Random) -> RandomPlan:
    """1 to 8 slices on as many or fewer peers; every slice has something to wait for."""
    count = rng.randint(1, 8)
    parts: list[dict[str, list[Edge]]] = [defaultdict(list) for _ in range(count)]
    value = 100
    for source in range(count - 1):
        for _ in range(rng.randint(1, 3)):
            for target in rng.sample(range(source + 1, count), rng.randint(1, count - 1 - source)):
                _connect(parts, value, source, target, with_gradient=rng.random() < 0.7)
            value += 1
    for tied in range(rng.randint(0, 2)):
        holders = sorted(rng.sample(range(count), rng.randint(1, count)))
        for holder in holders[1:]:
            gradient, total = (
                Edge(10 + tied, holder, holders[0], Direction.TIED),
                Edge(10 + tied, holders[0], holder, Direction.TIED),
            )
            parts[holder]["gradients_out"].append(gradient)
            parts[holders[0]]["gradients_in"].append(gradient)
            parts[holders[0]]["sums_out"].append(total)
            parts[holder]["sums_in"].append(total)
    for index, part in enumerate(parts):
        if not part["forward_in"] or rng.random() < 0.3:
            part["feeds"] = [Edge(rng.choice([0, 1, TRIGGER]), OWNER, index, Direction.FORWARD)]
    names = SliceEdges.__dataclass_fields__.keys() - {"index", "answers"}
    edges = [SliceEdges(index, answers=(), **{name: tuple(part[name]) for name in names}) for index, part in enumerate(parts)]
    every = {edge for part in parts for listed in part.values() for edge in listed}
    return RandomPlan(
        edges,
        [rng.randint(1, 4) for _ in parts],
        [rng.randrange(count) for _ in parts],
        {edge: 1 if edge.direction is Direction.TIED else rng.randint(1, 3) for edge in every},
        rng.randint(1, 6),
        [edge for part in parts for edge in part["feeds"]],
    )


def _connect(parts: list[dict[str, list[Edge]]], value: int, source: int, target: int, *, with_gradient: bool) -> None:
    forward, backward = Edge(value, source, target, Direction.FORWARD), Edge(value, target, source, Direction.BACKWARD)
    parts[source]["forward_out"].append(forward)
    parts[target]["forward_in"].append(forward)
    if with_gradient:
        parts[target]["backward_out"].append(backward)
        parts[source]["backward_in"].append(backward)


class PipelineSimulation:
    """Runs whole steps; `log[s]` is what slice s ran. Streams between two ends keep their order, nothing else does."""

    def __init__(self, plan: RandomPlan, rng: random.Random, *, resend: float = 0.0) -> None:
        self.plan, self.rng, self.resend = plan, rng, resend
        self.flows = [
            flows.Flow(edges, plan.micro_batches, in_flight, step=1)
            for edges, in_flight in zip(plan.edges, plan.in_flight, strict=True)
        ]
        self.outboxes = {end: outboxes.Outbox(plan.credits) for end in [OWNER, *range(len(plan.edges))]}
        self.streams: dict[tuple[int, int, bool], list[tuple[Edge, Moment]]] = defaultdict(list)
        self.running: dict[int, tuple[int, flows.Task]] = {}
        self.log: list[list[str]] = [[] for _ in plan.edges]
        self.most_in_flight = [0] * len(plan.edges)

    def run_step(self, step: int) -> None:
        """Feed a step, run until nothing moves, decide, run until nothing moves. AssertionError when stuck."""
        offers = {edge: [Moment(step, m) for m in range(self.plan.micro_batches)] for edge in self.plan.feeds}
        while offers:
            edge = self.rng.choice(list(offers))
            self._outbox(OWNER, outboxes.Offered(edge, offers[edge].pop(0)))
            if not offers[edge]:
                del offers[edge]
        self._settle()
        stuck = [flow for flow in self.flows if not flow.reported]
        assert not stuck, f"deadlock: {[(flow.edges.index, flow.forwards, flow.backwards) for flow in stuck]}"
        for index in range(len(self.flows)):
            self._flow(index, flows.Decided(step, flows.Fate.COMMIT))
        self._settle()
        assert all(flow.step == step + 1 for flow in self.flows)

    def _settle(self) -> None:
        while moves := self._moves():
            self.rng.choice(moves)()

    def _moves(self) -> list:
        moves = [lambda key=key: self._deliver(key) for key, stream in self.streams.items() if stream]
        for peer in set(self.plan.peer_of):
            if peer in self.running:
                moves.append(lambda peer=peer: self._finish(peer))
            else:
                ready = [i for i, p in enumerate(self.plan.peer_of) if p == peer and flows.next_task(self.flows[i])]
                moves += [lambda index=index: self._flow(index, flows.Idle()) for index in ready]
        return moves

    def _deliver(self, key: tuple[int, int, bool]) -> None:
        edge, moment = self.streams[key].pop(0)
        if self.rng.random() < self.resend:
            carried = frozenset(edge for edge in self.plan.credits if (edge.source, edge.target) == key[:2])
            self._outbox(key[0], outboxes.Reconnected(carried))
        self._flow(edge.target, flows.Arrived(edge, moment, self.plan.credits[edge]))

    def _finish(self, peer: int) -> None:
        index, task = self.running.pop(peer)
        edges = self.plan.edges[index]
        outgoing = {
            flows.TaskKind.FORWARD: edges.forward_out,
            flows.TaskKind.BACKWARD: edges.backward_out,
            flows.TaskKind.REPORT: edges.gradients_out + edges.sums_out,
        }.get(task.kind, ())
        self._flow(index, flows.Finished())
        for edge in outgoing:
            self._outbox(index, outboxes.Offered(edge, task.moment))

    def _flow(self, index: int, event: flows.Event) -> None:
        self.flows[index], actions = flows.step(self.flows[index], event)
        flow = self.flows[index]
        self.most_in_flight[index] = max(self.most_in_flight[index], flow.forwards - flow.backwards)
        for action in actions:
            match action:
                case flows.Run(task):
                    self.running[self.plan.peer_of[index]] = (index, task)
                    self.log[index].append(repr(task))
                case flows.Acknowledge(edge, moment):
                    self._outbox(edge.source, outboxes.Acknowledged(edge, moment))

    def _outbox(self, end: int, event: outboxes.Event) -> None:
        self.outboxes[end], actions = outboxes.step(self.outboxes[end], event)
        for action in actions:
            if isinstance(action, outboxes.Send):
                edge = action.edge
                self.streams[edge.source, edge.target, edge.direction is Direction.BACKWARD].append((edge, action.moment))
