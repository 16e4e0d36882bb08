"""Cut == uncut for Hugging Face models: the module itself under plain autograd is the oracle."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from fusion_p2p.graph.capture import capture
from fusion_p2p.graph.slices import cut
from tests.training.cuts import is_contiguous, random_cuts, skips_or_branches
from tests.training.hugging_face import HUGGING_FACE, build
from tests.training.local_run import DEVICES, LocalRun, accumulate, gradients_of, worst_difference

pytestmark = [pytest.mark.hf, pytest.mark.row(25), pytest.mark.row(33)]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_random_cuts_give_the_gradients_of_the_uncut_model(name: str, device: torch.device):
    module, batch_of = build(name)
    batches = [batch_of(seed) for seed in range(2)]
    captured = capture(module, batches[0])
    module.to(device)
    batches = [{key: tensor.to(device) for key, tensor in batch.items()} for batch in batches]
    losses = accumulate(module, batches)
    expected = gradients_of(module)
    cuts = random_cuts(captured.graph, seed=3)
    assert sum(not is_contiguous(captured.graph, slice_of) for slice_of in cuts) >= 12
    assert any(skips_or_branches(cut(captured.graph, slice_of)) for slice_of in cuts)
    for index, slice_of in enumerate(cuts):
        run = LocalRun(captured.graph, slice_of, captured.weights, micro_batches=2, recompute=index % 4 == 0, device=device)
        assert run.accumulate(1, batches) == pytest.approx(losses, rel=1e-6), slice_of
        assert worst_difference(run.gradients(), expected) <= 1e-6, slice_of
