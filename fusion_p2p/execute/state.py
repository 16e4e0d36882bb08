"""Everything a slice needs to go on from a step: parameters, buffers, optimiser moments and the step, as one unit.

Tensors are stored and sent by name, one by one:

    parameter/<name>      a trainable parameter or a buffer, by its name in the model's state_dict
    momentum/<name>       sgd with momentum
    first_moment/<name>   adam, adamw
    second_moment/<name>
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fusion_p2p.compress.dense import to_host
from fusion_p2p.errors import SliceFailed
from fusion_p2p.execute.optimiser import moment_names
from fusion_p2p.graph.initial import initial_value
from fusion_p2p.graph.opset import TORCH_DTYPES
from fusion_p2p.graph.schema import Graph, TensorType
from fusion_p2p.graph.slices import Slice
from fusion_p2p.wire.job_messages import TrainingSettings


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An immutable copy of a state on the host."""

    step: int
    tensors: Mapping[str, Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(slots=True)
class SliceState:
    """The tensors of one slice on its device; `names` and `parameters` by value number, `moments` by kind, then value number.

    `step` is the last step that was applied or skipped; HALF_APPLIED when an update broke off: then only `restore` helps.
    """

    step: int
    names: Mapping[int, str]
    parameters: dict[int, Tensor]
    moments: dict[str, dict[int, Tensor]]
    device: torch.device

    @staticmethod
    def initial(
        graph: Graph, part: Slice, settings: TrainingSettings, device: torch.device, weights: Mapping[str, Tensor]
    ) -> SliceState:
        """The state before the first step: by the graph's rules where there are any, else from `weights` by parameter name.

        SliceFailed when a weight is missing or of another type than the graph declares.
        """
        tensors: dict[str, Tensor] = {}
        for value in part.parameters:
            parameter, type = graph.parameter(value), graph.types[value]
            if parameter.rule is not None:
                tensors[f"parameter/{parameter.name}"] = initial_value(parameter.rule, parameter.name, type, settings.seed)
            elif parameter.name in weights:
                tensors[f"parameter/{parameter.name}"] = weights[parameter.name]
            for kind in moment_names(settings.optimiser) if parameter.trainable else ():
                tensors[f"{kind}/{parameter.name}"] = torch.zeros(type.shape, dtype=TORCH_DTYPES[type.dtype])
        return SliceState.restore(graph, part, settings, device, 0, tensors)

    @staticmethod
    def restore(
        graph: Graph, part: Slice, settings: TrainingSettings, device: torch.device, step: int, tensors: Mapping[str, Tensor]
    ) -> SliceState:
        """The state after `step` from its tensors, which are copied. SliceFailed unless they are exactly `required_tensors`."""
        _refuse_other_tensors(part, required_tensors(graph, part, settings), tensors)
        names = {value: graph.parameter(value).name for value in part.parameters}
        trainable = [value for value in part.parameters if graph.parameter(value).trainable]
        parameters = {value: _copy(tensors[f"parameter/{name}"], device) for value, name in names.items()}
        for value in trainable:
            parameters[value].requires_grad_()
        moments = {
            kind: {value: _copy(tensors[f"{kind}/{names[value]}"], device) for value in trainable}
            for kind in moment_names(settings.optimiser)
        }
        return SliceState(step, names, parameters, moments, device)

    def named_tensors(self) -> dict[str, Tensor]:
        """The live tensors by name, without history; they change with the next update."""
        named = {f"parameter/{self.names[value]}": tensor.detach() for value, tensor in self.parameters.items()}
        for kind, moments in self.moments.items():
            named |= {f"{kind}/{self.names[value]}": tensor for value, tensor in moments.items()}
        return named

    def snapshot(self) -> Snapshot:
        """A copy on the host. SliceFailed when an update broke off half-way."""
        if self.step == HALF_APPLIED:
            raise SliceFailed("the state is half-way through an update: it cannot be kept")
        host = torch.device("cpu")
        return Snapshot(self.step, {name: _copy(tensor, host) for name, tensor in self.named_tensors().items()})

    def retired(self) -> Snapshot | None:
        """The state as it lies here, for when nobody will change it any more: on the CPU nothing is copied.

        None when an update broke off half-way.
        """
        if self.step == HALF_APPLIED:
            return None
        return Snapshot(self.step, {name: to_host(tensor) for name, tensor in self.named_tensors().items()})

    def copied(self, name: str) -> Tensor | None:
        """A copy of one tensor on the host; None when there is none of this name."""
        tensor = self.named_tensors().get(name)
        return None if tensor is None else _copy(tensor, torch.device("cpu"))


HALF_APPLIED = -1
"""The `step` of a state whose update broke off."""


def required_tensors(graph: Graph, part: Slice, settings: TrainingSettings) -> dict[str, TensorType]:
    """Names and types of all tensors of a slice's state, parameters first, in graph order."""
    required: dict[str, TensorType] = {}
    for value in part.parameters:
        required[f"parameter/{graph.parameter(value).name}"] = graph.types[value]
    for kind in moment_names(settings.optimiser):
        for value in part.parameters:
            if graph.parameter(value).trainable:
                required[f"{kind}/{graph.parameter(value).name}"] = graph.types[value]
    return required


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)


def _refuse_other_tensors(part: Slice, required: Mapping[str, TensorType], tensors: Mapping[str, Tensor]) -> None:
    missing = [name for name in required if name not in tensors]
    if missing:
        raise SliceFailed(
            f"slice {part.index} cannot start: {missing[0]} is missing ({len(missing)} of {len(required)} tensors)"
        )
    surplus = [name for name in tensors if name not in required]
    if surplus:
        raise SliceFailed(f"slice {part.index} cannot start: {surplus[0]} does not belong to it")
    for name, type in required.items():
        given = tensors[name]
        if tuple(given.shape) != type.shape or given.dtype != TORCH_DTYPES[type.dtype]:
            found = f"{given.dtype} of shape {list(given.shape)}".removeprefix("torch.")
            raise SliceFailed(
                f"slice {part.index} cannot start: {name} is {found}, not {type.dtype} of shape {list(type.shape)}"
            )
