"""Sending and computing overlap: the real code in virtual time, against the simulator and against doing them in turn."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

import async_solipsism
import pytest

from fusion_p2p.graph.schema import Graph
from fusion_p2p.ids import PeerId
from fusion_p2p.net.memory import SimulatedNetwork
from fusion_p2p.net.memory_pipe import Link
from fusion_p2p.net.values import Payload, ValueSender
from fusion_p2p.peer.epoch_work import EpochWork
from fusion_p2p.plan.plan import Plan
from fusion_p2p.wire.frames import Edge, Moment
from tests.swarm_in_memory import owner, run_config
from tests.training.test_predicted_step import Case, LoopClock, predicted, timed_volunteers

MICRO_BATCHES = 32
VALUE_BYTES = 2 * 16 * 32 * 4
"""Of a micro-batch of two sequences, as it crosses."""
FORWARD_S = 0.02


def by_block(graph: Graph) -> list[int]:
    """Two slices, cut between the blocks: one value crosses."""
    first = next(index for index, node in enumerate(graph.nodes) if node.module.startswith("h.1"))
    return [int(index >= first) for index in range(len(graph.nodes))]


CASE = Case(by_block, (FORWARD_S, FORWARD_S), VALUE_BYTES / (3 * FORWARD_S), 0.001, in_flight=8)
"""A value is on its way for as long as a slice works on its micro-batch, forward and backward."""


async def measured(path: Path) -> tuple[float, Graph, Plan]:
    """Seconds per step of the real code, with the graph and the plan that it ran."""
    config = run_config(path, steps=3, batch_size=2 * MICRO_BATCHES, micro_batches=MICRO_BATCHES)
    graphs: list[Graph] = []
    plans: list[Plan] = []

    def slices(graph: Graph) -> Sequence[int]:
        graphs.append(graph)
        return CASE.slices(graph)

    def arrange(plan: Plan, peers: Sequence[PeerId]) -> Plan:
        plans.append(plan)
        return plan

    link = Link(latency_s=CASE.latency_s, bytes_per_s=CASE.bytes_per_s)
    async with (
        SimulatedNetwork(seed=1, link=link) as network,
        timed_volunteers(network, CASE, 2) as helpers,
        owner(network, config, slices, helpers, arrange, in_flight=CASE.in_flight, credits=2) as owned,
    ):
        owned.run._context = dataclasses.replace(owned.run._context, clock=LoopClock())
        await owned.run.finish()
    return statistics.median(snapshot.step_s for snapshot in owned.recorder.snapshots[1:]), graphs[0], plans[0]


def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer begins no task before what the last one made has been sent."""
    run_task, offer = EpochWork._run_task, ValueSender.offer
    waiting: dict[ValueSender, int] = {}

    def counted(self: ValueSender, edge: Edge, moment: Moment, payload: Payload) -> None:
        waiting[self] = waiting.get(self, 0) + len(payload.data)
        offer(self, edge, moment, payload)

    async def run_and_send(self: EpochWork, index: int) -> bool:
        goes_on = await run_task(self, index)
        await self._coding.settled()
        await asyncio.sleep(waiting.pop(self._sender, 0) / CASE.bytes_per_s)
        return goes_on

    monkeypatch.setattr(ValueSender, "offer", counted)
    monkeypatch.setattr(EpochWork, "_run_task", run_and_send)


def test_a_step_takes_little_more_than_the_ideal_and_much_less_than_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
        overlapped_s, graph, plan = runner.run(measured(tmp_path / "overlapped"))
    in_turn(monkeypatch)
    with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
        serial_s, _, _ = runner.run(measured(tmp_path / "in turn"))
    ideal_s = predicted(CASE, graph, plan)
    assert sum(graph.types[edge.value].num_bytes for edge in plan.edges) == VALUE_BYTES
    assert overlapped_s <= 1.15 * ideal_s, (overlapped_s, ideal_s)
    assert overlapped_s <= 0.60 * serial_s, (overlapped_s, serial_s)
