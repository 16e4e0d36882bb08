"""Cut == uncut for the built-in models: the module itself under plain autograd is the oracle, random legal cuts the subject."""

from __future__ import annotations

import pytest
import torch

from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import cut
from tests.training.builtin import example
from tests.training.cuts import is_contiguous, random_cuts, skips_or_branches
from tests.training.local_run import DEVICES, LocalRun, accumulate, gradients_of, worst_difference

pytestmark = [pytest.mark.row(25), pytest.mark.parametrize("device", DEVICES, ids=str)]

MODELS = {"gpt2": ("gpt2", {}), "gpt2-tied": ("gpt2", {"tied": True}), "resnet": ("resnet", {})}


def contiguous_cut(graph: Graph, num_slices: int) -> list[int]:
    return [index * num_slices // len(graph.nodes) for index in range(len(graph.nodes))]


@pytest.mark.row(29)
@pytest.mark.parametrize("name", MODELS)
def test_random_cuts_give_gradients_and_buffers_of_the_uncut_model(name: str, device: torch.device):
    family, options = MODELS[name]
    model = example(family, **options)
    batches = [{key: tensor.to(device) for key, tensor in batch.items()} for batch in model.batches(2)]
    module = model.module.to(device)
    losses = accumulate(module, batches)
    expected, buffers = gradients_of(module), dict(module.named_buffers())
    cuts = random_cuts(model.graph, seed=5)
    assert sum(not is_contiguous(model.graph, slice_of) for slice_of in cuts) >= len(cuts) // 2
    assert {max(slice_of) + 1 for slice_of in cuts} == set(range(1, 13))
    assert sum(skips_or_branches(cut(model.graph, slice_of)) for slice_of in cuts) >= 5
    for index, slice_of in enumerate(cuts):
        run = LocalRun(model.graph, slice_of, {}, micro_batches=2, recompute=index % 4 == 0, device=device)
        assert run.accumulate(1, batches) == pytest.approx(losses, rel=1e-6), slice_of
        assert worst_difference(run.gradients(), expected) <= 1e-6, slice_of
        for executor in run.slices:
            executor.update(1, 1.0, 0.0)
        held = run.parameters()
        for buffer in buffers:
            assert torch.allclose(held[buffer], buffers[buffer], rtol=1e-6, atol=1e-7), (buffer, slice_of)


@pytest.mark.parametrize("num_slices", [1, 3])
def test_sequential_slices_give_the_bits_of_a_plain_loop(num_slices: int, device: torch.device):
    """GPT-2 cut at the end of blocks: one value crosses each cut, so every sum is taken in autograd's own order."""
    if device.type != "cpu":
        pytest.skip("the order of sums inside a CUDA kernel is its own")
    model = example("gpt2")
    block = [0 if node.module.startswith(("wte", "wpe", "h.0", "dropout")) else 1 for node in model.graph.nodes]
    slice_of = [0] * len(block) if num_slices == 1 else _by_block(model.graph)
    batches = model.batches(4)
    losses = accumulate(model.module, batches)
    run = LocalRun(model.graph, slice_of, {}, micro_batches=4)
    assert len(run.slices) == num_slices
    assert run.accumulate(1, batches) == losses
    expected = gradients_of(model.module)
    ours = run.gradients()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def _by_block(graph: Graph) -> list[int]:
    """The slice of a node is its block's number; what comes before belongs to the first, what comes after to the last."""
    slices, current = [], 0
    for node in graph.nodes:
        if node.module.startswith("h."):
            current = int(node.module.split(".")[1])
        slices.append(current)
    return slices
