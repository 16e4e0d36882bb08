"""What planners and peers compute of a slice's memory is enough for what the slice really keeps, and not far above it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from fusion_p2p.graph.workload import workload
from fusion_p2p.plan.memory import Holding, slice_bytes
from tests.training.builtin import example
from tests.training.local_run import SGD, LocalRun


def storages_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes by address of the memory."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


@pytest.mark.parametrize("family", ["gpt2", "resnet"])
@pytest.mark.parametrize("num_slices", [1, 3])
@pytest.mark.parametrize("recompute", [False, True])
def test_predicted_bytes_cover_what_is_held(family: str, num_slices: int, recompute: bool):
    """Two micro-batches in flight: state and gradients, what autograd keeps, and what crosses, each memory counted once."""
    model = example(family)
    count = len(model.graph.nodes)
    slice_of = [min(num_slices - 1, index * num_slices // count) for index in range(count)]
    run = LocalRun(model.graph, slice_of, {}, settings=SGD, micro_batches=2, recompute=recompute)
    saved_bytes = [node.saved_bytes for node in workload(model.graph)]
    held: list[dict[int, int]] = [storages_of(executor.state.named_tensors().values()) for executor in run.slices]
    for micro_batch, batch in enumerate(model.batches(2)):
        values: dict[int, Tensor] = dict(enumerate(batch[name] for name in model.graph.inputs))
        for index, executor in enumerate(run.slices):
            kept: list[Tensor] = []
            part = run.cut.slices[index]
            arrived = {value: values[value].clone() for value in (*part.inputs, *part.receives)}
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor, kept=kept: kept.append(tensor) or tensor, same):
                sent = executor.forward(1, micro_batch, arrived)
            taped = not recompute or micro_batch == 1  # as while the last one is computed again
            held[index] |= storages_of([*arrived.values(), *([*kept, *sent.values()] if taped else [])])
            values |= sent
    for index, part in enumerate(run.cut.slices):
        gradients = sum(model.graph.types[value].num_bytes for value in part.parameters if model.graph.types[value].grad)
        really = sum(held[index].values()) + gradients
        predicted = slice_bytes(model.graph, part, saved_bytes, Holding(2, credits=1, moments=0, recompute=recompute))
        assert really <= predicted <= 3 * really, (index, really, predicted)


def same(tensor: Tensor) -> Tensor:
    return tensor


class Kept:
    """A tensor that autograd keeps; it dies with the tape."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # with its history it would keep itself alive


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputing_slice_keeps_no_tape_between_forward_and_backward(recompute: bool):
    model = example("gpt2")
    run = LocalRun(model.graph, [0] * len(model.graph.nodes), {}, recompute=recompute)
    alive: weakref.WeakSet[Kept] = weakref.WeakSet()
    made = 0

    def pack(tensor: Tensor) -> Kept:
        nonlocal made
        made += 1
        kept = Kept(tensor)
        alive.add(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        run.forward(1, 0, model.batches(1)[0])
    assert made > 50
    assert len(alive) == (0 if recompute else made)
    run.backward(1, 0)
    assert len(alive) == 0
