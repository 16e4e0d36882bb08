"""Models with cut layers: cut or whole they train alike, they learn, and the mask that is kept is what the codec did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from contrib.benchmarks.coded_run import CodedRun
from fusion_p2p.graph.cut_layers import CutLayers, cut_values, insert, narrow_places
from fusion_p2p.graph.initial import initial_projections
from fusion_p2p.graph.schema import Graph
from fusion_p2p.models import gpt2
from fusion_p2p.models.cut_layer import CutLayer
from fusion_p2p.net.memory import SimulatedNetwork
from fusion_p2p.owner import driver
from fusion_p2p.owner.export import export_state_dict
from fusion_p2p.owner.ledger import read_ledger
from fusion_p2p.owner.stage import RunContext
from fusion_p2p.plan.chain import legal_boundaries
from fusion_p2p.wire.job_messages import OptimiserSettings, TrainingSettings
from tests.swarm_in_memory import Recorder, owner, run_config, volunteers
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


class Read(nn.Module):
    """A GPT-2 with cut layers after its first two blocks, as somebody writes it who has exported weights."""

    def __init__(self, plain: gpt2.GPT2, layers: CutLayers) -> None:
        super().__init__()
        vocabulary = builtin.VOCABULARY if layers.embedding else 0
        options = {"rank": layers.rank, "keep": layers.keep, "vocabulary": vocabulary, "context": plain.shape.context}
        self.wte, self.wpe, self.h, self.ln_f, self.lm_head = plain.wte, plain.wpe, plain.h, plain.ln_f, plain.lm_head
        self.cut = nn.ModuleList(CutLayer(plain.shape.width, **options) for _ in range(2))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for index, block in enumerate(self.h):
            x = block(x)
            if index < 2:
                x = self.cut[index](x, tokens)
        return functional.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_a_module_with_the_same_layers_reads_what_was_trained(layers: CutLayers):
    graph, weights, example = narrow(layers)
    run = LocalRun(graph, at_borders(graph), weights, settings=ADAM, micro_batches=2)
    run.train(1, example.batches(2), 1e-2)
    module = Read(example.module, layers)
    module.load_state_dict({name: tensor.detach() for name, tensor in run.parameters().items()})
    batch = example.batch_of(77)
    assert run.evaluate(2, 0, batch) == pytest.approx(module.eval()(**batch).item(), rel=1e-6)


def test_without_its_mask_a_model_is_another_one():
    example = builtin.example("gpt2")
    graph, _, _ = narrow(CutLayers(embedding=True))
    run = CodedRun(graph, at_borders(graph), ADAM, {}, 2)
    run.use([f"topk:{WIDTH / KEEP}:fp32"])
    for step in range(1, 9):
        run.train(step, example.batches(2, step), 1e-2, 1.0)
    batches = example.batches(4, 99)
    assert abs(run.evaluate(batches, coded=True) / run.evaluate(batches, coded=False) - 1) > 1e-3


async def test_a_run_with_cut_layers_trains_with_topk_finishes_without_and_is_exported_with_them(tmp_path: Path):
    path = tmp_path / "run"
    config = run_config(path, bottleneck=8, cut_embedding=True, cuts=1, finish=0.34, optimiser="adam", learning_rate=1e-2)

    def coded(plan: Any, peers: Any) -> Any:
        return replace(plan, edges=tuple(replace(edge, codec="topk:2") for edge in plan.edges))

    async with (
        SimulatedNetwork(seed=1) as network,
        volunteers(network, 2) as helpers,
        owner(network, config, at_borders, helpers, coded) as owned,
    ):
        await owned.run.finish()
    assert [snapshot.epoch for snapshot in owned.recorder.snapshots] == [1, 1, 1, 1, 2, 2]
    assert owned.recorder.losses[-1] < owned.recorder.losses[0]
    start = read_ledger(path / "ledger.jsonl").start
    assert start is not None
    assert set(start.codecs) == {"int8"}
    export_state_dict(path, tmp_path / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    assert {name for name in exported if name.startswith("cut.")} == {
        f"cut.0.{part}.weight" for part in ("project", "expand", "tokens", "positions")
    }
    assert exported["cut.0.project.weight"].shape == (8, 32)
    assert len(narrow_places(owned.run._job.graph)) == 1


async def test_train_says_what_is_changed_for_the_mask_and_for_the_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def trained(context: RunContext, job: Any) -> None:
        pass

    monkeypatch.setattr(driver, "_train", trained)
    config = run_config(tmp_path / "run", codec="topk:10", steps=8, finish=0.25, keep_sparsifier=True, cuts=1)
    recorder = Recorder()
    assert await driver.run_train(config, recorder) == 0
    assert any("finish: from step 7 on" in line for line in recorder.lines)
    assert any("mask that keeps the 3 largest of each place's 32" in line for line in recorder.lines)
