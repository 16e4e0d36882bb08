"""Many replicas with the real `job.flow` and `job.credits`, a fake network that delivers in random order, and no clock."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fusion_p2p.graph.schema import Graph, Parameter, TensorType
from fusion_p2p.graph.slices import Crossing, Cut, Slice
from fusion_p2p.ids import Digest, PeerId
from fusion_p2p.job import credits as outboxes
from fusion_p2p.job import flow as flows
from fusion_p2p.job.topology import ReplicaEdges, as_evaluation, edge_credits, replica_edges
from fusion_p2p.plan.encoding import check_plan
from fusion_p2p.plan.plan import EdgePlan, Plan, SlicePlan
from fusion_p2p.wire.frames import OWNER, Direction, Edge, Moment

INPUTS, PARAMETERS = 2, 6


@dataclass
class RandomPlan:
    """A random DAG of slices: values with and without gradient, skips, several readers, tied parameters, caps and credits."""

    plan: Plan
    edges: tuple[ReplicaEdges, ...]
    credits: dict[Edge, int]
    peer_of: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.peer_of = [replica.peer for replica in self.plan.replicas]

    def micro_batches(self, replica: int) -> list[int]:
        return [m for m in range(self.plan.micro_batches) if m in self.plan.replicas[replica].turns]

    def in_flight(self, replica: int) -> int:
        return self.plan.slices[self.plan.replicas[replica].slice].in_flight

    def carried(self, edge: Edge, micro_batches: int) -> list[int]:
        part = self.edges[edge.target]
        return [m for m in range(micro_batches) if part.carries(edge, m)]


def random_plan(rng: random.Random, *, most_members: int = 3) -> RandomPlan:
    """1 to 7 slices of up to `most_members` replicas on as many or fewer peers, under either schedule."""
    count = rng.randint(1, 7)
    crossings, with_gradient = _random_crossings(rng, count)
    held = [sorted(rng.sample(range(INPUTS, INPUTS + PARAMETERS), rng.randint(0, PARAMETERS // 2))) for _ in range(count)]
    values = range(100 + len(crossings))
    graph = Graph(
        opset=1,
        inputs=("tokens", "targets"),
        parameters=tuple(Parameter(f"p{number}", trainable=True) for number in range(PARAMETERS)),
        nodes=(),
        types=tuple(TensorType((rng.randint(1, 9),), "float32", value in with_gradient) for value in values),
        outputs=(),
    )
    received = [tuple(edge.value for edge in crossings if edge.target == index) for index in range(count)]
    inputs = [(rng.randrange(INPUTS),) if rng.random() < 0.3 else () for _ in range(count)]
    parts = Cut(
        tuple(Slice(i, (), received[i], (), inputs[i], tuple(held[i]), ()) for i in range(count)),
        tuple(crossings),
    )
    plan = _random_placement(rng, parts, most_members)
    check_plan(plan, graph, parts)
    edges = replica_edges(graph, parts, plan)
    return RandomPlan(plan, edges, edge_credits(plan, edges))


def _random_crossings(rng: random.Random, count: int) -> tuple[list[Crossing], set[int]]:
    """Values that go to one or more higher slices, and those of them that have a gradient."""
    crossings: list[Crossing] = []
    with_gradient: set[int] = set()
    value = 100
    for source in range(count - 1):
        for _ in range(rng.randint(1, 3)):
            targets = sorted(rng.sample(range(source + 1, count), rng.randint(1, count - 1 - source)))
            crossings += [Crossing(value, source, target) for target in targets]
            if rng.random() < 0.7:
                with_gradient.add(value)
            value += 1
    return crossings, with_gradient


def _random_placement(rng: random.Random, parts: Cut, most_members: int) -> Plan:
    peers = [PeerId(f"peer {number}") for number in range(max(most_members, rng.randint(1, len(parts.slices))))]
    micro_batches, gpipe = rng.randint(1, 5), rng.random() < 0.3
    slices: list[SlicePlan] = []
    for _ in parts.slices:
        members = rng.sample(peers, rng.randint(1, min(most_members, micro_batches)))
        deal = [*range(len(members)), *rng.choices(range(len(members)), k=rng.randint(0, micro_batches - len(members)))]
        rng.shuffle(deal)
        most = micro_batches if gpipe else rng.randint(1, 4)
        slices.append(SlicePlan(members[0], most, replicas=tuple(members[1:]), deal=tuple(deal)))
    return Plan(
        graph=Digest("0" * 64),
        scheduler="random",
        micro_batches=micro_batches,
        slice_of=(),
        slices=tuple(slices),
        edges=tuple(EdgePlan(e.value, e.source, e.target, credits=rng.randint(1, 3)) for e in parts.edges),
        schedule="gpipe" if gpipe else "1f1b",
    )


class PipelineSimulation:
    """Runs whole steps; `log[r]` is what replica r ran. Streams between two ends keep their order, nothing else does."""

    def __init__(self, plan: RandomPlan, rng: random.Random, *, resend: float = 0.0) -> None:
        self.plan, self.rng, self.resend = plan, rng, resend
        self.flows = [
            flows.Flow(edges, len(plan.micro_batches(number)), plan.in_flight(number), 1, plan.plan.schedule)
            for number, edges in enumerate(plan.edges)
        ]
        self.outboxes = {end: outboxes.Outbox(plan.credits) for end in [OWNER, *range(len(plan.edges))]}
        self.streams: dict[tuple[int, int, bool], list[tuple[Edge, Moment]]] = defaultdict(list)
        self.running: dict[str, tuple[int, flows.Task]] = {}
        self.ready: dict[int, None] = {}
        """Replicas that have a task to run; a dict keeps their order."""
        self.log: list[list[str]] = [[] for _ in plan.edges]
        self.most_in_flight = [0] * len(plan.edges)

    def run_step(self, step: int) -> None:
        """Feed a step, run until nothing moves, decide, run until nothing moves. AssertionError when stuck."""
        self._feed(step, self.plan.plan.micro_batches, validation=False)
        self._settle()
        stuck = [flow for flow in self.flows if not flow.reported]
        assert not stuck, f"deadlock: {[(flow.edges.replica, flow.forwards, flow.backwards) for flow in stuck]}"
        for index in range(len(self.flows)):
            self._flow(index, flows.Decided(step, flows.Fate.COMMIT))
        self._settle()
        assert all(flow.step == step + 1 for flow in self.flows)

    def validate(self, step: int, micro_batches: int) -> None:
        """Feed validation micro-batches before a step and run until nothing moves. AssertionError when some were not run."""
        self._feed(step, micro_batches, validation=True)
        self._settle()
        for flow in self.flows:
            assert flow.evaluations == flow.edges.own_turns.before(micro_batches), (
                f"deadlock in validation: {flow.edges.replica}"
            )

    def _feed(self, step: int, micro_batches: int, *, validation: bool) -> None:
        offers: dict[Edge, list[int]] = {}
        for edge in (edge for part in self.plan.edges for edge in part.feeds):
            offers[as_evaluation(edge) if validation else edge] = self.plan.carried(edge, micro_batches)
        while offers := {edge: left for edge, left in offers.items() if left}:
            edge = self.rng.choice(list(offers))
            self._outbox(OWNER, outboxes.Offered(edge, Moment(step, offers[edge].pop(0))))

    def _settle(self) -> None:
        while moves := self._moves():
            move, of = self.rng.choice(moves)
            move(of)

    def _moves(self) -> list[tuple[Callable[[Any], None], Any]]:
        """What may happen next: a value arrives, a task ends, a task begins."""
        moves: list[tuple[Callable[[Any], None], Any]] = [
            (self._deliver, key) for key, stream in self.streams.items() if stream
        ]
        moves += [(self._finish, peer) for peer in self.running]
        return moves + [(self._begin, index) for index in self.ready if self.plan.peer_of[index] not in self.running]

    def _begin(self, index: int) -> None:
        self._flow(index, flows.Idle())

    def _deliver(self, key: tuple[int, int, bool]) -> None:
        edge, moment = self.streams[key].pop(0)
        if self.rng.random() < self.resend:
            carried = frozenset(edge for edge in self.plan.credits if (edge.source, edge.target) == key[:2])
            self._outbox(key[0], outboxes.Reconnected(carried))
        self._flow(edge.target, flows.Arrived(edge, moment, self.plan.credits[edge]))

    def _finish(self, peer: str) -> None:
        index, task = self.running.pop(peer)
        edges = self.plan.edges[index]
        directions = {
            flows.TaskKind.FORWARD: Direction.FORWARD,
            flows.TaskKind.BACKWARD: Direction.BACKWARD,
            flows.TaskKind.EVALUATE: Direction.EVALUATE,
        }
        outgoing = {flows.TaskKind.SHARE: edges.gradients_out, flows.TaskKind.REPORT: edges.sums_out}.get(task.kind, ())
        if task.kind in directions:
            outgoing = edges.departures(directions[task.kind], task.moment.micro_batch)
        self._flow(index, flows.Finished())
        for edge in outgoing:
            self._outbox(index, outboxes.Offered(edge, task.moment))

    def _flow(self, index: int, event: flows.Event) -> None:
        self.flows[index], actions = flows.step(self.flows[index], event)
        flow = self.flows[index]
        self.ready.pop(index, None)
        if flows.next_task(flow):
            self.ready[index] = None
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
