"""What planners and peers compute of a slice's memory is enough for what the slice really keeps, and not far above it."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from fusion_p2p.graph.workload import workload
from fusion_p2p.plan.memory import Holding, slice_bytes
from tests.training.builtin import example
from tests.training.local_run import SGD, LocalRun


class Saved:
    """Bytes of all storages that autograd keeps and slices hold, as hooks see them."""

    def __init__(self, ignored: set[int]) -> None:
        self.storages: dict[int, int] = {}
        self._ignored = ignored

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._ignored:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor


@pytest.mark.parametrize("family", ["gpt2", "resnet"])
@pytest.mark.parametrize("num_slices", [1, 3])
def test_predicted_bytes_cover_what_is_saved(family: str, num_slices: int):
    model = example(family)
    count = len(model.graph.nodes)
    slice_of = [min(num_slices - 1, index * num_slices // count) for index in range(count)]
    run = LocalRun(model.graph, slice_of, {}, settings=SGD, micro_batches=2)
    saved_bytes = [node.saved_bytes for node in workload(model.graph)]
    held: list[Saved] = []
    values: dict[int, Tensor] = dict(enumerate(model.batches(1)[0][name] for name in model.graph.inputs))
    for index, executor in enumerate(run.slices):
        saved = Saved({tensor.data_ptr() for tensor in executor.state.parameters.values()})
        part = run.cut.slices[index]
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            values |= executor.forward(1, 0, {value: values[value] for value in (*part.inputs, *part.receives)})
        held.append(saved)
    for index, part in enumerate(run.cut.slices):
        state = sum(tensor.nbytes for tensor in run.slices[index].state.named_tensors().values())
        really = state + sum(held[index].storages.values())
        predicted = slice_bytes(model.graph, part, saved_bytes, Holding(in_flight=1, credits=1, moments=0))
        assert really <= predicted <= 3 * really, (index, really, predicted)


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
