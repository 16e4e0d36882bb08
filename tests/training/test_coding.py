"""Coding beside computing changes when things happen, not what is computed; what a codec refuses is heard in time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusion_p2p.execute.compute import ComputeThread
from fusion_p2p.execute.handover import Handed
from fusion_p2p.graph.slices import cut
from fusion_p2p.ids import PeerId, digest_of
from fusion_p2p.job.topology import replica_edges
from fusion_p2p.net.memory import SimulatedNetwork
from fusion_p2p.peer.coding import Coding
from fusion_p2p.peer.edge_codecs import EdgeCodecs, planned_codecs
from fusion_p2p.plan.plan import EdgePlan, Plan, SlicePlan
from fusion_p2p.wire.frames import Moment
from tests.swarm_in_memory import Owner, owner, run_config, volunteers
from tests.training.builtin import example
from tests.training.test_run import contiguous, final_state

CODECS = ["int8", "topk:10:int8", "none"]


def coded(plan: Plan, peers: Sequence[PeerId]) -> Plan:
    """Codecs in turn, and a second member for the slice in the middle."""
    edges = tuple(replace(edge, codec=CODECS[index % len(CODECS)]) for index, edge in enumerate(plan.edges))
    middle = replace(plan.slices[1], replicas=(peers[3],), deal=(0, 1))
    return replace(plan, edges=edges, slices=(plan.slices[0], middle, plan.slices[2]))


async def train(path: Path, *, overlap: bool, **settings: object) -> Owner:
    config = run_config(path, steps=4, validate_every=2, validation_batches=3, **settings)
    async with (
        SimulatedNetwork(seed=1) as network,
        volunteers(network, 4, overlap=overlap) as helpers,
        owner(network, config, contiguous(3), helpers, arrange=coded) as owned,
    ):
        await owned.run.finish()
    return owned


async def test_coding_beside_computing_gives_the_same_bits(tmp_path: Path) -> None:
    beside = await train(tmp_path / "beside", overlap=True)
    in_turn = await train(tmp_path / "in turn", overlap=False)
    assert beside.recorder.losses == in_turn.recorder.losses
    validations = [[snapshot.validation_loss for snapshot in run.recorder.snapshots] for run in (beside, in_turn)]
    assert validations[0] == validations[1]
    ours, theirs = final_state(tmp_path / "beside"), final_state(tmp_path / "in turn")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.row(30)
async def test_a_gradient_that_a_codec_refuses_is_named_before_the_report_is_due() -> None:
    """What leaves keeps its order, and `settled` waits for all of it."""
    graph = example("gpt2").graph
    half = [int(index >= len(graph.nodes) // 2) for index in range(len(graph.nodes))]
    parts = cut(graph, half)
    edges = tuple(EdgePlan(edge.value, edge.source, edge.target, codec="int8") for edge in parts.edges)
    slices = (SlicePlan(PeerId("a"), 2), SlicePlan(PeerId("b"), 2))
    plan = Plan(digest_of(b""), "by hand", 3, tuple(half), slices, edges)
    reader = replica_edges(graph, parts, plan)[1]
    edge = next(edge for edge in reader.backward_out if len(graph.types[edge.value].shape) > 2)
    codecs = EdgeCodecs(graph, reader, planned_codecs(plan, replica_edges(graph, parts, plan)), torch.device("cpu"))
    sent: list[tuple[int, str]] = []
    thread = ComputeThread(name="coding")
    coding = Coding({1: codecs}, thread, send=lambda number, edge, moment, coded: sent.append((moment.micro_batch, coded.note)))
    running = asyncio.create_task(coding.run())
    for micro_batch, factor in enumerate([1.0, torch.nan, 1.0]):
        gradient = factor * torch.ones(graph.types[edge.value].shape)
        coding.encode(1, Moment(1, micro_batch), [(edge, Handed(gradient))])
    await coding.settled()
    running.cancel()
    thread.close()
    assert [micro_batch for micro_batch, _ in sent] == [0, 1, 2]
    assert sent[0][1] == sent[2][1] == ""
    assert f"gradient of value {edge.value}, computed by" in sent[1][1]
