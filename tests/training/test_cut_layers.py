"""Models with cut layers: cut or whole they train alike, they learn, and the mask that is kept is what the codec did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from contrib.benchmarks.coded_run import CodedRun
from fusion_p2p.graph.cut_layers import CutLayers, cut_values, insert, narrow_places
from fusion_p2p.graph.initial import initial_projections
from fusion_p2p.graph.schema import Graph
from fusion_p2p.net.memory import SimulatedNetwork
from fusion_p2p.owner import driver
from fusion_p2p.owner.export import export_state_dict
from fusion_p2p.owner.ledger import read_ledger
from fusion_p2p.owner.training import RunContext
from fusion_p2p.plan.chain import legal_boundaries
from fusion_p2p.wire.job_messages import OptimiserSettings, TrainingSettings
from tests.swarm_in_memory import Owner, Recorder, owner, run_config, volunteers
from tests.training import builtin
from tests.training.local_run import LocalRun

ADAM = TrainingSettings(seed=7, optimiser=OptimiserSettings(name="adam"))
WIDTH, KEEP = 24, 4
LAYERS = [CutLayers(embedding=True), CutLayers(True, 6), CutLayers(keep=KEEP), CutLayers(True, 8, 3)]


def narrow(layers: CutLayers) -> tuple[Graph, dict[str, torch.Tensor], builtin.Example]:
    """A GPT-2 with layers after its first two blocks, and the first values of projections."""
    example = builtin.example("gpt2")
    module = {node.first: node.module for node in example.graph.nodes}
    ends = [max(value for value in cut_values(example.graph) if module[value] == f"h.{block}") for block in range(2)]
    made = insert(example.graph, ends, layers)
    return made.graph, initial_projections(made.projections, ADAM.seed), example


def at_borders(graph: Graph) -> list[int]:
    boundaries = legal_boundaries(graph)
    return [sum(index >= boundary for boundary in boundaries) for index in range(len(graph.nodes))]


@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_cut_where_it_is_narrow_it_trains_as_the_whole_does(layers: CutLayers):
    graph, weights, example = narrow(layers)
    runs = [
        LocalRun(graph, slice_of, weights, settings=ADAM, micro_batches=2)
        for slice_of in (at_borders(graph), [0] * len(graph.nodes))
    ]
    before = {name: tensor.clone() for name, tensor in runs[1].parameters().items()}
    for step in (1, 2, 3):
        batches = example.batches(2, step)
        cut, whole = (run.train(step, batches, 1e-2) for run in runs)
        assert cut == whole
    trained, expected = (run.parameters() for run in runs)
    assert all(torch.equal(trained[name], expected[name]) for name in expected)
    added = [name for name in expected if name.startswith("cut.")]
    assert len(added) == 2 * (2 * bool(layers.rank) + 2 * layers.embedding)
    assert not any(torch.equal(before[name], expected[name]) for name in added)


def test_the_mask_keeps_so_many_of_each_place_and_their_gradients_come_back():
    graph, _, example = narrow(CutLayers(keep=KEEP))
    run = LocalRun(graph, at_borders(graph), {}, settings=ADAM)
    values = run.forward(1, 0, example.batch_of(1))
    gradients = run.backward(1, 0)
    for border in [edge.value for edge in run.cut.edges if graph.types[edge.value].grad]:
        source = next(node for node in graph.nodes if node.first == border)
        kept = values[border] != 0
        assert source.op == "mul.Tensor"
        assert bool((kept.sum(-1) == KEEP).all())
        assert any(value == border and gradient is not None for (value, _), gradient in gradients.items())


@pytest.mark.parametrize(("values", "tolerance"), [("fp32", 0.0), ("int8", 2e-3)])
def test_the_exported_model_with_its_mask_has_the_loss_that_was_seen_in_training(values: str, tolerance: float):
    graph, weights, example = narrow(CutLayers(keep=KEEP))
    run = CodedRun(graph, at_borders(graph), ADAM, weights, 2)
    run.use([f"topk:{WIDTH / KEEP}:{values}"])
    for step in range(1, 9):
        run.train(step, example.batches(2, step), 1e-2, 1.0)
    batches = example.batches(4, 99)
    coded, exported = (run.evaluate(batches, coded=coded) for coded in (True, False))
    assert exported == pytest.approx(coded, rel=tolerance, abs=0.0)


def test_without_its_mask_a_model_is_another_one():
    example = builtin.example("gpt2")
    graph, _, _ = narrow(CutLayers(embedding=True))
    run = CodedRun(graph, at_borders(graph), ADAM, {}, 2)
    run.use([f"topk:{WIDTH / KEEP}:fp32"])
    for step in range(1, 9):
        run.train(step, example.batches(2, step), 1e-2, 1.0)
    batches = example.batches(4, 99)
    assert abs(run.evaluate(batches, coded=True) / run.evaluate(batches, coded=False) - 1) > 1e-3


async def part_of_a_run(config: Any, codec: str, until: int | None) -> Owner:
    def coded(plan: Any, peers: Any) -> Any:
        return replace(plan, edges=tuple(replace(edge, codec=codec) for edge in plan.edges))

    async with (
        SimulatedNetwork(seed=1) as network,
        volunteers(network, 2) as helpers,
        owner(network, config, at_borders, helpers, coded, until) as owned,
    ):
        await owned.run.finish()
    return owned


async def test_a_run_with_cut_layers_trains_with_topk_finishes_without_and_is_exported_with_them(tmp_path: Path):
    path = tmp_path / "run"
    config = run_config(path, bottleneck=8, cut_embedding=True, cuts=1, finish=0.34, optimiser="adam", learning_rate=1e-2)
    first = await part_of_a_run(config, "topk:2", config.finish_after)
    assert not read_ledger(path / "ledger.jsonl").ended
    second = await part_of_a_run(replace(config, run=None, resume=path), "int8", None)
    assert [len(part.recorder.losses) for part in (first, second)] == [4, 2]
    assert second.recorder.losses[-1] < first.recorder.losses[0]
    assert {snapshot.steps for snapshot in first.recorder.snapshots} == {config.steps}
    assert read_ledger(path / "ledger.jsonl").ended
    export_state_dict(path, tmp_path / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    assert {name for name in exported if name.startswith("cut.")} == {
        f"cut.0.{part}.weight" for part in ("project", "expand", "tokens", "positions")
    }
    assert exported["cut.0.project.weight"].shape == (8, 32)
    assert len(narrow_places(second.run._job.graph)) == 1


async def test_train_changes_codecs_for_the_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    parts: list[tuple[str, float, int]] = []

    async def trained(context: RunContext, job: Any) -> None:
        parts.append((context.config.codec, context.config.most_ratio, context.last_step))

    monkeypatch.setattr(driver, "_train", trained)
    config = run_config(tmp_path / "run", codec="topk:10", steps=8, finish=0.25, keep_sparsifier=True, cuts=1)
    recorder = Recorder()
    assert await driver.run_train(config, recorder) == 0
    assert parts == [("topk:10", 100.0, 6), ("adaptive", 7.5, 8)]
    assert any("finish: from step 7 on" in line for line in recorder.lines)
    assert any("mask that keeps the 3 largest of each place's 32" in line for line in recorder.lines)
