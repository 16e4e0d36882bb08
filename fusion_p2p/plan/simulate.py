"""The judge of plans: one training step as discrete events, on devices that compute and links that carry, both at once.

Devices do one task at a time and choose as `job.flow` does: micro-batches in order, a ready backward before the next forward
(`gpipe`: no backward before the last forward), at most `in_flight` between the two. Of several stages on one device a ready
backward goes first, then the lower stage; what a task makes for its own device is there after the device has chosen again.

A peer codes beside its tasks, one message at a time: encodes before sending, decodes before the message counts as there.

Links follow the alpha-beta model: n bytes occupy a link for n * beta seconds and arrive alpha later; alpha occupies nothing.
Every directed pair of nodes is a queue of its own, first come first served in whole messages; on half-duplex networks both
directions are one queue. Where a site's uplink or downlink is limited, a message between sites occupies that queue too: it
begins when all are free, ends at the pace of the slowest, and keeps each for its own share of the time, so that a fast uplink
carries other flows beside one that a slow downlink holds up. That is coarser than fair sharing between flows: the order of
small and large messages differs, the time at which a busy uplink has carried everything does not, but an uplink may idle while
a message waits for a busy downlink.

Not modelled: jitter, congestion, loss, the time of the owner's decision, and traffic other than values.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any

from fusion_p2p.plan.network import Queue
from fusion_p2p.plan.pipeline import OWNER_STAGE, Pipeline, PipelineEdge
from fusion_p2p.plan.timeline import TaskKind, TaskSpan, Timeline, TransferSpan


def simulate(pipeline: Pipeline, *, trace: bool = False) -> Timeline:
    """The timeline of one step. RuntimeError, with the state of every stage, if it cannot end (no valid plan leads to that)."""
    return _Simulation(pipeline, trace=trace).run()


@dataclass(eq=False, slots=True)
class _Link:
    """What carries one message at a time."""

    free_s: float = -inf
    busy_s: float = 0.0
    shared_s: float = 0.0


_Occupied = tuple[tuple[_Link, float], ...]
"""The links that a message occupies, each for so many seconds."""


@dataclass(eq=False, slots=True)
class _Channel:
    """The way of one edge, in one direction, between two nodes: the links that it occupies, and its credits."""

    edge: int
    kind: TaskKind
    source: int
    target: int
    links: _Occupied
    alpha_s: float
    credit_alpha_s: float
    credits: int
    encode_s: float
    decode_s: float
    parked: deque[int] = field(default_factory=deque)


Ways = list[_Channel]
"""For every micro-batch, the channel that an edge uses."""


@dataclass(eq=False, slots=True)
class _Stage:
    """What the members of a stage share.

    forward_waits, backward_waits: for every micro-batch, how many values a task still waits for. to_readers, to_sources: the
    ways of what a forward (a backward) makes. from_sources, from_readers: those of what it takes, where credits count.
    """

    forward_waits: list[int]
    backward_waits: list[int]
    members: list[_Unit] = field(default_factory=list)
    to_readers: list[Ways] = field(default_factory=list)
    to_sources: list[Ways] = field(default_factory=list)
    from_sources: list[Ways] = field(default_factory=list)
    from_readers: list[Ways] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Device:
    """What executes tasks: one at a time, for all stages that are placed on it, once all have decided and updated."""

    units: list[_Unit] = field(default_factory=list)
    idle: bool = False
    decided_s: float = 0.0
    update_s: float = 0.0


@dataclass(eq=False, slots=True)
class _Unit:
    """One member of a stage. `forwards` and `backwards` count tasks begun among its `own` micro-batches."""

    index: int
    member: int
    node: int
    stage: _Stage
    device: _Device
    own: list[int]
    in_flight: int
    forward_s: float
    backward_s: float
    forwards: int = 0
    backwards: int = 0
    peak: int = 0
    busy_s: float = 0.0
    ended_s: float = 0.0
    homes: list[tuple[_Unit, float]] = field(default_factory=list)
    """Where it sends gradients after its last backward, and how many bytes."""


Event = Callable[[float, Any, int], None]
"""What happens at a time to a unit, a channel or a device, for a micro-batch."""


class _Simulation:
    """The tables of one call of `simulate`. Events of one moment happen in the order in which they were caused."""

    def __init__(self, pipeline: Pipeline, *, trace: bool) -> None:
        self.pipeline, self.network, self.trace = pipeline, pipeline.network, trace
        self.gpipe = pipeline.schedule == "gpipe"
        self.events: list[tuple[float, int, Event, Any, int]] = []
        self.caused = 0
        self.links: dict[Queue, _Link] = {}
        self.devices: dict[int, _Device] = {}
        self.coders: dict[int, _Link] = defaultdict(_Link)
        self.tasks: list[TaskSpan] = []
        self.transfers: list[TransferSpan] = []
        self.stages = [self._stage(index) for index in range(len(pipeline.stages))]
        self.feeds: list[Ways] = []
        for index in range(len(pipeline.edges)):
            self._lay(index)

    def run(self) -> Timeline:
        self._spread_sums()
        for device in self.devices.values():
            self._cause(device.decided_s + device.update_s, self._released, device, 0)
        for micro_batch in range(self.pipeline.micro_batches):
            self._send(0.0, self.feeds, micro_batch)
        while self.events:
            time, _, event, subject, micro_batch = heappop(self.events)
            event(time, subject, micro_batch)
        self._check_ended()
        return self._timeline()

    # Laying out

    def _stage(self, index: int) -> _Stage:
        """The units of a stage, and how many values each of its tasks waits for."""
        planned, edges = self.pipeline.stages[index], self.pipeline.edges
        incoming = [edge for edge in edges if edge.target == index]
        outgoing = [edge for edge in edges if edge.source == index]
        stage = _Stage(
            [len(incoming)] * self.pipeline.micro_batches,
            [sum(edge.gradient for edge in outgoing)] * self.pipeline.micro_batches,
        )
        for member, node in enumerate(planned.nodes):
            device = self.devices.setdefault(node, _Device())
            own = [micro_batch for micro_batch, dealt in enumerate(planned.deal) if dealt == member]
            in_flight = len(own) if self.gpipe else planned.in_flight
            times = planned.forward_s[member], planned.backward_s[member]
            unit = _Unit(index, member, node, stage, device, own, in_flight, *times)
            device.units.append(unit)
            device.decided_s = max(device.decided_s, planned.start_s)
            device.update_s += planned.update_s
            stage.members.append(unit)
        return stage

    def _lay(self, index: int) -> None:
        """Make the channels of an edge, and tell both ends."""
        edge = self.pipeline.edges[index]
        target = self.stages[edge.target]
        readers = [target.members[member].node for member in self.pipeline.stages[edge.target].deal]
        if edge.source == OWNER_STAGE:
            if self.network.owner is None:
                raise ValueError("an edge comes from the owner, but the owner is no node of the network")
            ways = self._ways(index, "F", [self.network.owner] * len(readers), readers)
            self.feeds.append(ways)
        else:
            source = self.stages[edge.source]
            senders = [source.members[member].node for member in self.pipeline.stages[edge.source].deal]
            ways = self._ways(index, "F", senders, readers)
            source.to_readers.append(ways)
        if edge.credits:
            target.from_sources.append(ways)
        if _returns(edge):
            back = self._ways(index, "B", readers, senders)
            target.to_sources.append(back)
            if edge.credits:
                source.from_readers.append(back)

    def _ways(self, edge: int, kind: TaskKind, sources: Sequence[int], targets: Sequence[int]) -> Ways:
        made: dict[tuple[int, int], _Channel] = {}
        ways = []
        for pair in zip(sources, targets, strict=True):
            if pair not in made:
                made[pair] = self._channel(edge, kind, *pair)
            ways.append(made[pair])
        return ways

    def _channel(self, index: int, kind: TaskKind, source: int, target: int) -> _Channel:
        edge, network = self.pipeline.edges[index], self.network
        links = self._links(source, target, edge.forward_bytes if kind == "F" else edge.backward_bytes)
        alpha_s, back_s = float(network.alpha_s[source, target]), float(network.alpha_s[target, source])
        encode_bytes, decode_bytes = edge.forward_coding if kind == "F" else edge.backward_coding
        encode_s = encode_bytes / float(network.memory_bytes_per_s[source]) if encode_bytes else 0.0
        decode_s = decode_bytes / float(network.memory_bytes_per_s[target]) if decode_bytes else 0.0
        return _Channel(index, kind, source, target, links, alpha_s, back_s, edge.credits, encode_s, decode_s)

    def _links(self, source: int, target: int, num_bytes: float) -> _Occupied:
        queues = self.network.queues(source, target)
        return tuple((self.links.setdefault(queue, _Link()), num_bytes * pace) for queue, pace in queues)

    # Playing

    def _spread_sums(self) -> None:
        """The sums of the last step leave their homes together with the reports, before this step begins for the owner."""
        for exchange in self.pipeline.exchanges:
            source, home = (self.stages[stage].members[member] for stage, member in (exchange.source, exchange.home))
            source.homes.append((home, exchange.num_bytes))
            arrival = self._exchange(-self.pipeline.stages[home.index].finish_s, home.node, source.node, exchange.num_bytes)
            source.device.decided_s = max(source.device.decided_s, arrival)

    def _exchange(self, time: float, source: int, target: int, num_bytes: float) -> float:
        """When a message that is not waited for by any task is there."""
        links = self._links(source, target, num_bytes)
        for link, seconds in links:
            link.shared_s += seconds
        return _occupy(links, time)[1] + float(self.network.alpha_s[source, target])

    def _cause(self, time: float, event: Event, subject: Any, micro_batch: int) -> None:
        heappush(self.events, (time, self.caused, event, subject, micro_batch))
        self.caused += 1

    def _released(self, time: float, device: _Device, _: int) -> None:
        device.idle = True
        self._start_next(time, device)

    def _start_next(self, time: float, device: _Device) -> None:
        """Begin the most urgent task that is ready, if any."""
        for unit in device.units:
            begun = unit.backwards
            ready = begun < (unit.forwards if not self.gpipe or unit.forwards == len(unit.own) else 0)
            if ready and not unit.stage.backward_waits[unit.own[begun]]:
                unit.backwards += 1
                self._start(time, unit, "B", unit.own[begun])
                return
        for unit in device.units:
            begun = unit.forwards
            held = begun - unit.backwards
            if begun < len(unit.own) and held < unit.in_flight and not unit.stage.forward_waits[unit.own[begun]]:
                unit.forwards += 1
                unit.peak = max(unit.peak, held + 1)
                self._start(time, unit, "F", unit.own[begun])
                return

    def _start(self, time: float, unit: _Unit, kind: TaskKind, micro_batch: int) -> None:
        unit.device.idle = False
        seconds = unit.forward_s if kind == "F" else unit.backward_s
        unit.busy_s += seconds
        for ways in unit.stage.from_sources if kind == "F" else unit.stage.from_readers:
            channel = ways[micro_batch]
            self._cause(time + channel.credit_alpha_s, self._credited, channel, 0)
        if self.trace:
            self.tasks.append(TaskSpan(unit.index, unit.member, kind, micro_batch, time, time + seconds))
        self._cause(time + seconds, self._forward_done if kind == "F" else self._backward_done, unit, micro_batch)

    def _forward_done(self, time: float, unit: _Unit, micro_batch: int) -> None:
        self._send(time, unit.stage.to_readers, micro_batch)
        self._released(time, unit.device, 0)

    def _backward_done(self, time: float, unit: _Unit, micro_batch: int) -> None:
        unit.ended_s = max(unit.ended_s, time)
        self._send(time, unit.stage.to_sources, micro_batch)
        if unit.homes and unit.backwards == len(unit.own):
            for home, num_bytes in unit.homes:
                home.ended_s = max(home.ended_s, self._exchange(time, unit.node, home.node, num_bytes))
        self._released(time, unit.device, 0)

    def _send(self, time: float, edges: list[Ways], micro_batch: int) -> None:
        """Encode and offer what a task made."""
        for ways in edges:
            channel = ways[micro_batch]
            if channel.encode_s:
                _, coded = _occupy(((self.coders[channel.source], channel.encode_s),), time)
                self._cause(coded, self._offer, channel, micro_batch)
            else:
                self._offer(time, channel, micro_batch)

    def _offer(self, time: float, channel: _Channel, micro_batch: int) -> None:
        """A value leaves at once where credits allow."""
        if not self.pipeline.edges[channel.edge].credits:
            self._transmit(time, channel, micro_batch)
        elif channel.credits:
            channel.credits -= 1
            self._transmit(time, channel, micro_batch)
        else:
            channel.parked.append(micro_batch)

    def _credited(self, time: float, channel: _Channel, _: int) -> None:
        if channel.parked:
            self._transmit(time, channel, channel.parked.popleft())
        else:
            channel.credits += 1

    def _transmit(self, time: float, channel: _Channel, micro_batch: int) -> None:
        start, end = _occupy(channel.links, time)
        arrival = end + channel.alpha_s
        if self.trace and channel.links:
            ends = channel.source, channel.target, start, end, arrival
            self.transfers.append(TransferSpan(channel.edge, channel.kind, micro_batch, *ends))
        self._cause(arrival, self._decode if channel.decode_s else self._there(channel), channel, micro_batch)

    def _decode(self, time: float, channel: _Channel, micro_batch: int) -> None:
        _, decoded = _occupy(((self.coders[channel.target], channel.decode_s),), time)
        self._cause(decoded, self._there(channel), channel, micro_batch)

    def _there(self, channel: _Channel) -> Event:
        return self._value_arrived if channel.kind == "F" else self._gradient_arrived

    def _value_arrived(self, time: float, channel: _Channel, micro_batch: int) -> None:
        self.stages[self.pipeline.edges[channel.edge].target].forward_waits[micro_batch] -= 1
        self._arrived(time, channel.target)

    def _gradient_arrived(self, time: float, channel: _Channel, micro_batch: int) -> None:
        self.stages[self.pipeline.edges[channel.edge].source].backward_waits[micro_batch] -= 1
        self._arrived(time, channel.target)

    def _arrived(self, time: float, node: int) -> None:
        device = self.devices[node]
        if device.idle:
            self._start_next(time, device)

    # Summing up

    def _check_ended(self) -> None:
        units = [unit for stage in self.stages for unit in stage.members]
        if all(unit.backwards == len(unit.own) for unit in units):
            return
        state = ", ".join(f"stage {u.index}.{u.member}: F{u.forwards} B{u.backwards} of {len(u.own)}" for u in units)
        raise RuntimeError(f"the simulated pipeline stands still: {state}")

    def _timeline(self) -> Timeline:
        ends = [
            max(unit.ended_s for unit in stage.members) + planned.finish_s
            for stage, planned in zip(self.stages, self.pipeline.stages, strict=True)
        ]
        return Timeline(
            step_s=max(ends, default=0.0),
            busy_s=tuple(tuple(unit.busy_s for unit in stage.members) for stage in self.stages),
            peak_in_flight=tuple(tuple(unit.peak for unit in stage.members) for stage in self.stages),
            queue_busy_s={queue: link.busy_s for queue, link in self.links.items()},
            queue_shared_s={queue: link.shared_s for queue, link in self.links.items() if link.shared_s},
            tasks=tuple(self.tasks),
            transfers=tuple(sorted(self.transfers, key=lambda span: span.start_s)),
        )


def _returns(edge: PipelineEdge) -> bool:
    """Whether a gradient travels back over an edge."""
    return edge.gradient and edge.source != OWNER_STAGE


def _occupy(links: _Occupied, time: float) -> tuple[float, float]:
    """Put a message that is ready at `time` on all these links at once, when all are free: when it begins and has left."""
    for link, _ in links:
        if link.free_s > time:
            time = link.free_s
    end = time
    for link, seconds in links:
        link.free_s = time + seconds
        link.busy_s += seconds
        if link.free_s > end:
            end = link.free_s
    return time, end
