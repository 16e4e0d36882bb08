"""Seeded dropout: what is drawn depends on run seed, step, micro-batch and node, never on where or when it is computed."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from fusion_p2p.execute.interpreter import Interpreter, node_seed
from fusion_p2p.graph.opset import is_random
from fusion_p2p.graph.schema import Graph, Node
from fusion_p2p.graph.slices import cut
from fusion_p2p.wire.frames import Moment
from fusion_p2p.wire.job_messages import OptimiserSettings, TrainingSettings
from tests.training.builtin import Example, example
from tests.training.cuts import random_cut
from tests.training.local_run import DEVICES, LocalRun

pytestmark = pytest.mark.row(36)

P = 0.25
GOLDEN = 6_865_254_827_239_643_213
ADAM = TrainingSettings(seed=11, optimiser=OptimiserSettings(name="adam"))


def trained(run: LocalRun, model: Example) -> list[list[float]]:
    """The losses of three steps of two micro-batches."""
    return [run.train(step, model.batches(2, step), 1e-3, max_norm=1.0) for step in range(1, 4)]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_cut_and_recomputed_runs_have_the_bits_of_one_slice(device: torch.device, recompute: bool):
    model = example("gpt2", seed=ADAM.seed, dropout=P)
    assert sum(is_random(node) for node in model.graph.nodes) == 1 + 3 * 3
    blocks = by_block(model.graph)
    whole = LocalRun(model.graph, [0] * len(blocks), {}, settings=ADAM, micro_batches=2, device=device)
    parts = LocalRun(model.graph, blocks, {}, settings=ADAM, micro_batches=2, recompute=recompute, device=device)
    assert len(parts.slices) == 3
    assert trained(parts, model) == trained(whole, model)
    ours, theirs = parts.parameters(), whole.parameters()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def by_block(graph: Graph) -> list[int]:
    slices, current = [], 0
    for node in graph.nodes:
        if node.module.startswith("h."):
            current = int(node.module.split(".")[1])
        slices.append(current)
    return slices


def test_losses_are_the_same_for_every_random_cut():
    model = example("gpt2", seed=ADAM.seed, dropout=P)
    rng = random.Random(2)
    batches = model.batches(2)
    losses = set()
    for num_slices in (1, 2, 5, 9):
        run = LocalRun(model.graph, random_cut(model.graph, rng, num_slices, 0.2), {}, settings=ADAM, micro_batches=2)
        losses.add(tuple(run.accumulate(1, batches)))
    assert len(losses) == 1


def masks(model: Example, moments: list[Moment], seed: int = 11) -> dict[tuple[Moment, int], Tensor]:
    """Which elements each dropout node lets pass, by moment and node value; those that pass are scaled by 1 / (1 - p)."""
    graph = model.graph
    (part,) = cut(graph, [0] * len(graph.nodes)).slices
    nodes = [node for node in graph.nodes if node.op == "dropout"]
    settings = ADAM.model_copy(update={"seed": seed})
    keep = {node.first for node in nodes} | {value for node in nodes for value in node.reads()}
    interpreter = Interpreter(graph, part, settings, torch.device("cpu"), keep)
    found: dict[tuple[Moment, int], Tensor] = {}
    run = LocalRun(graph, [0] * len(graph.nodes), {}, settings=settings)
    batch = model.batches(1)[0]
    for moment in moments:
        values = dict(run.slices[0].state.parameters) | {number: batch[name] for number, name in enumerate(graph.inputs)}
        interpreter.run(values, moment, training=True)
        for node in nodes:
            (source,) = node.reads()
            passed = values[node.first] != 0
            assert torch.allclose(values[node.first][passed], values[source][passed] / (1 - P))
            found[moment, node.first] = passed
    return found


def test_masks_differ_between_steps_micro_batches_and_layers_and_keep_their_share():
    model = example("gpt2", dropout=P, width=48, layers=2)
    moments = [Moment(step, micro_batch) for step in (1, 2) for micro_batch in (0, 1)]
    found = masks(model, moments)
    drawn = list(found.values())
    assert len(drawn) == 4 * 5
    for index, mask in enumerate(drawn):
        assert mask.double().mean().item() == pytest.approx(1 - P, abs=0.05)
        assert not any(mask.shape == other.shape and torch.equal(mask, other) for other in drawn[index + 1 :])
    assert torch.cat([mask.flatten() for mask in drawn]).double().mean().item() == pytest.approx(1 - P, abs=0.01)
    again = masks(model, moments)
    assert all(torch.equal(found[key], again[key]) for key in found)
    other = masks(model, moments, seed=12)
    assert not any(torch.equal(found[key], other[key]) for key in found)


def test_node_seed_is_fixed_for_ever():
    """Peers of different versions of this program must draw the same masks; and no part of the seed may be left out."""
    node = Node("dropout", {}, 9, 1)
    assert node_seed(1, Moment(2, 3), node) == GOLDEN
    others = [(2, Moment(2, 3), 9), (1, Moment(3, 3), 9), (1, Moment(2, 2), 9), (1, Moment(2, 3), 8), (1, Moment(3, 2), 9)]
    assert GOLDEN not in {node_seed(seed, at, Node("dropout", {}, first, 1)) for seed, at, first in others}


def test_process_generator_is_left_as_it_was():
    model = example("gpt2", dropout=P)
    run = LocalRun(model.graph, [0] * len(model.graph.nodes), {})
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    run.accumulate(1, model.batches(1))
    assert torch.equal(torch.rand(3), expected)


def test_evaluation_draws_nothing():
    model = example("gpt2", dropout=P)
    run = LocalRun(model.graph, by_block(model.graph), {})
    batch = model.batches(1)[0]
    losses = {run.evaluate(step, micro_batch, batch) for step in (0, 1) for micro_batch in (0, 1)}
    with torch.no_grad():
        expected = float(model.module.eval()(**batch))
    assert losses == {expected}
