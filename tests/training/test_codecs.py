"""Whole runs whose edges are coded: real peers and owner over the simulated network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion_p2p.errors import RunStopped
from fusion_p2p.ids import PeerId
from fusion_p2p.net import values
from fusion_p2p.net.memory import SimulatedNetwork
from fusion_p2p.owner.checkpoint import newest_checkpoint
from fusion_p2p.plan.plan import Plan
from fusion_p2p.wire.codecs import FAMILIES, backward_bytes, effective, forward_bytes, parse
from fusion_p2p.wire.frames import OWNER, Direction, FrameKind, Header
from tests.swarm_in_memory import Owner, owner, run_config, volunteers
from tests.training.local_run import LocalRun
from tests.training.test_run import contiguous

SPECS = ("bf16", "int8", "topk:10:int8", "topk-paper:30", "fp16", "int4", "topk:10:fp16", "topk-independent:10")
SLICES = 5


async def train(path: Path, *codecs: str, **settings: Any) -> Owner:
    """A run of five slices on three peers; the codecs are those of its four borders in turn."""
    config = run_config(path, steps=4, **settings)

    def coded(plan: Plan, peers: Sequence[PeerId]) -> Plan:
        edges = tuple(replace(edge, codec=codecs[edge.source % len(codecs)]) for edge in plan.edges)
        return replace(plan, edges=edges)

    async with (
        SimulatedNetwork(seed=1) as network,
        volunteers(network, 3) as helpers,
        owner(network, config, contiguous(SLICES), helpers, coded) as owned,
    ):
        await owned.run.finish()
    return owned


def final_state(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = newest_checkpoint(path / "checkpoint", print)
    assert checkpoint is not None
    return {name: checkpoint.tensor(name) for name in checkpoint.names}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Header]:
    """The headers of all frames that cross."""
    headers: list[Header] = []
    encode = values.encode_header

    def recorded(header: Header) -> bytes:
        headers.append(header)
        return encode(header)

    monkeypatch.setattr(values, "encode_header", recorded)
    return headers


@pytest.mark.parametrize("codecs", [SPECS[:4], SPECS[4:]], ids="-".join)
async def test_a_run_trains_and_validates_and_sends_what_its_plan_announced(
    tmp_path: Path, codecs: tuple[str, ...], sent: list[Header]
):
    owned = await train(tmp_path / "run", *codecs, validate_every=2)
    assert len(owned.recorder.losses) == 4
    assert owned.recorder.losses[-1] < owned.recorder.losses[0]
    assert owned.recorder.snapshots[-1].validation_loss is not None
    types = owned.run._job.graph.types
    carried: dict[str, set[Direction]] = defaultdict(set)
    for header in sent:
        if header.kind is not FrameKind.VALUE or header.edge.direction is Direction.TIED or header.edge.source == OWNER:
            continue
        type_, backward = types[header.edge.value], header.edge.direction is Direction.BACKWARD
        codec = codecs[header.edge.target if backward else header.edge.source]
        spec = parse(codec)
        if header.edge.direction is Direction.EVALUATE:  # of the model as it is exported, which has no codecs
            assert (header.codec, header.payload_bytes) == ("none", type_.num_bytes)
            continue
        assert header.codec == effective(spec, type_).family
        announced = (backward_bytes if backward else forward_bytes)(spec, type_)
        exact = header.codec not in ("topk", "topk-independent")
        assert header.payload_bytes == announced if exact else 0 < header.payload_bytes <= announced
        carried[header.codec].add(header.edge.direction)
    every = {Direction.FORWARD, Direction.BACKWARD}
    assert {codec for codec, directions in carried.items() if directions == every} == {parse(codec).family for codec in codecs}


@pytest.mark.parametrize("kept", [False, True], ids=["codec alone", "mask in the graph"])
async def test_validation_is_of_the_model_as_it_is_exported(tmp_path: Path, kept: bool):
    """Without the codec's mask; with it where it is an operator of the graph."""
    masks: dict[str, Any] = {"codec": "topk:3", "keep_sparsifier": True, "cuts": 1} if kept else {}
    owned = await train(tmp_path / "run", "topk:3", validate_every=4, validation_batches=2, **masks)
    config = owned.run._context.config
    graph, trained = owned.run._job.graph, final_state(tmp_path / "run")
    assert any(node.op == "mul.Tensor" and node.module.startswith("cut.") for node in graph.nodes) == kept
    exported = LocalRun(graph, [0] * len(graph.nodes), {})
    (whole,) = (executor.state.parameters for executor in exported.slices)
    for value, tensor in whole.items():
        tensor.detach().copy_(trained[f"parameter/{graph.parameter(value).name}"])
    losses = [exported.evaluate(config.steps + 1, index, owned.data.validation(index)) for index in range(2)]
    assert owned.recorder.snapshots[-1].validation_loss == pytest.approx(sum(losses) / 2, rel=1e-6)


async def test_coded_runs_end_with_the_same_bits(tmp_path: Path):
    for name in ("one", "two"):
        await train(tmp_path / name, "topk:10:int8", "int4", optimiser="adam", learning_rate=1e-3)
    one, two = final_state(tmp_path / "one"), final_state(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


async def test_eight_bits_are_close_to_dense(tmp_path: Path):
    dense, coded = [(await train(tmp_path / codec, codec)).recorder.losses for codec in ("none", "int8")]
    assert coded == pytest.approx(dense, rel=2e-3)
    assert coded != dense


@pytest.mark.row(30)
async def test_what_is_not_finite_is_refused_and_named_and_the_run_stops_as_without_codec(tmp_path: Path, sent: list[Header]):
    with pytest.raises(RunStopped, match=r"3 steps in a row.*computed by"):
        await train(tmp_path / "run", "int8", learning_rate=1e30)
    assert any(header.codec == "int8" and not header.payload_bytes for header in sent)


def test_every_family_is_tried():
    assert {parse(codec).family for codec in SPECS} | {"none"} == set(FAMILIES)
