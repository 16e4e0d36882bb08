"""All slices of a cut graph in one process, without network: what owner and peers do together in a step, in plain calls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fusion_p2p.compress.dense import from_bytes, to_bytes
from fusion_p2p.execute.slice import SliceExecutor
from fusion_p2p.execute.state import SliceState
from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import cut
from fusion_p2p.wire.job_messages import OptimiserSettings, TrainingSettings

Batch = Mapping[str, Tensor]
SGD = TrainingSettings(seed=7, optimiser=OptimiserSettings(name="sgd"))
DEVICES = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]


class LocalRun:
    """Slices that pass values to each other as bytes, as they would cross a network."""

    def __init__(
        self,
        graph: Graph,
        slice_of: Sequence[int],
        weights: Mapping[str, Tensor],
        *,
        settings: TrainingSettings = SGD,
        micro_batches: int = 1,
        recompute: bool = False,
        device: torch.device = DEVICES[0],
    ) -> None:
        self.graph = graph
        self.cut = cut(graph, slice_of)
        self.device = device
        self.slices: list[SliceExecutor] = []
        for part in self.cut.slices:
            state = SliceState.initial(graph, part, settings, device, weights)
            self.slices.append(SliceExecutor(graph, part, state, settings, micro_batches=micro_batches, recompute=recompute))

    def cross(self, value: int, tensor: Tensor) -> Tensor:
        return from_bytes(bytearray(to_bytes(tensor)), self.graph.types[value], self.device)

    def _arrived(self, index: int, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        part = self.cut.slices[index]
        return {value: self.cross(value, values[value]) for value in (*part.inputs, *part.receives)}

    def forward(self, step: int, micro_batch: int, batch: Batch) -> dict[int, Tensor]:
        """All crossing values and outputs, the inputs included."""
        values: dict[int, Tensor] = {number: batch[name] for number, name in enumerate(self.graph.inputs)}
        for index, executor in enumerate(self.slices):
            values |= executor.forward(step, micro_batch, self._arrived(index, values))
        return values

    def evaluate(self, step: int, micro_batch: int, batch: Batch) -> float:
        values: dict[int, Tensor] = {number: batch[name] for number, name in enumerate(self.graph.inputs)}
        for index, executor in enumerate(self.slices):
            values |= executor.evaluate(step, micro_batch, self._arrived(index, values))
        return float(values[self.graph.outputs[0]])

    def backward(self, step: int, micro_batch: int) -> dict[tuple[int, int], Tensor | None]:
        """Gradients by (value, slice that read it)."""
        found: dict[tuple[int, int], Tensor | None] = {}
        for index in reversed(range(len(self.slices))):
            part = self.cut.slices[index]
            wanted = {
                value: [found[edge.value, edge.target] for edge in self.cut.edges if edge.value == value]
                for value in part.sends
                if self.graph.types[value].grad
            }
            for value, gradient in self.slices[index].backward(step, micro_batch, wanted).items():
                found[value, index] = None if gradient is None else self.cross(value, gradient)
        return found

    def accumulate(self, step: int, batches: Sequence[Batch]) -> list[float]:
        """Forward and backward of all micro-batches, two in flight, then the sums of tied gradients; the losses."""
        losses: list[float] = []
        for micro_batch, batch in enumerate(batches):
            losses.append(float(self.forward(step, micro_batch, batch)[self.graph.outputs[0]]))
            if micro_batch:
                self.backward(step, micro_batch - 1)
        self.backward(step, len(batches) - 1)
        self._exchange_tied()
        return losses

    def _exchange_tied(self) -> None:
        for value in range(self.graph.first_parameter, self.graph.first_node_value):
            holders = [self.slices[index] for index in self.cut.holders(value)]
            if len(holders) < 2 or not self.graph.parameter(value).trainable:
                continue
            total = sum(holder.shared(value) for holder in holders)
            for holder in holders:
                holder.set_shared(value, torch.as_tensor(total))

    def gradient_norm(self) -> float:
        """Over all slices, tied parameters counted once."""
        total = 0.0
        for value in range(self.graph.first_parameter, self.graph.first_node_value):
            if self.graph.parameter(value).trainable and self.cut.holders(value):
                total += self.slices[self.cut.holders(value)[0]].squares([value])[0]
        return math.sqrt(total)

    def train(self, step: int, batches: Sequence[Batch], rate: float, max_norm: float | None = None) -> list[float]:
        """One whole step; the losses of its micro-batches."""
        losses = self.accumulate(step, batches)
        clip = 1.0 if max_norm is None else min(1.0, max_norm / (self.gradient_norm() + 1e-6))
        for executor in self.slices:
            executor.update(step, clip, rate)
        return losses

    def gradients(self) -> dict[str, Tensor]:
        """By parameter name; parameters without a gradient are left out."""
        found: dict[str, Tensor] = {}
        for executor in self.slices:
            for value, tensor in executor.state.parameters.items():
                if tensor.grad is not None:
                    found[self.graph.parameter(value).name] = tensor.grad
        return found

    def parameters(self) -> dict[str, Tensor]:
        """Parameters and buffers by name."""
        found: dict[str, Tensor] = {}
        for executor in self.slices:
            for name, tensor in executor.state.named_tensors().items():
                if name.startswith("parameter/"):
                    found[name.removeprefix("parameter/")] = tensor
        return found


def loss_of(module: nn.Module, batch: Batch) -> Tensor:
    """The loss as the module's forward returns it: itself, or the `loss` of a model output."""
    result = module(**batch)
    return result if isinstance(result, Tensor) else result["loss"]


def accumulate(module: nn.Module, batches: Sequence[Batch]) -> list[float]:
    """The reference: plain autograd on the original module, micro-batch after micro-batch."""
    losses = []
    for batch in batches:
        loss = loss_of(module, batch)
        (loss / len(batches)).backward()
        losses.append(float(loss.detach()))
    return losses


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """By name, tied parameters once."""
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def worst_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest difference of any element, relative to the largest element of all of `theirs`."""
    assert ours.keys() == theirs.keys()
    largest = max(float(tensor.abs().max()) for tensor in theirs.values())
    return max(float((ours[name].cpu() - theirs[name].cpu()).abs().max()) for name in theirs) / largest
