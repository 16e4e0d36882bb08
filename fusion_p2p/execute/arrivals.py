"""What a slice accepts from others: the types that the graph declares, and indices that are in range."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fusion_p2p.errors import SliceFailed
from fusion_p2p.graph.opset import TORCH_DTYPES, index_bounds
from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Slice


class Arrivals:
    """Checks the inputs, received values and gradients of one slice before they are computed with."""

    def __init__(self, graph: Graph, part: Slice, device: torch.device) -> None:
        self._types = graph.types
        self._index = part.index
        self._device = device
        self._expected = (*part.inputs, *part.receives)
        bounds = index_bounds(graph)
        self._bounds = {value: bounds[value] for value in self._expected if value in bounds}

    def check(self, arrived: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The values on the slice's device, in value order. SliceFailed when one is missing, surplus or not as declared."""
        if arrived.keys() != set(self._expected):
            odd = sorted(arrived.keys() ^ set(self._expected))
            raise SliceFailed(f"slice {self._index} reads the values {list(self._expected)}: {odd} are missing or surplus")
        values = {value: self.check_type(value, arrived[value]) for value in sorted(arrived)}
        for value, bound in self._bounds.items():
            illegal = bound.first_illegal(values[value])
            if illegal is not None:
                raise SliceFailed(
                    f"slice {self._index}: value {value} holds the index {illegal}, legal are {bound.low} to {bound.high - 1}"
                )
        return values

    def check_type(self, value: int, tensor: Tensor) -> Tensor:
        """A value (or its gradient, which has the same type) on the slice's device. SliceFailed when it has another type."""
        declared = self._types[value]
        if tuple(tensor.shape) != declared.shape or tensor.dtype != TORCH_DTYPES[declared.dtype]:
            found = f"{tensor.dtype} of shape {list(tensor.shape)}".removeprefix("torch.")
            raise SliceFailed(
                f"slice {self._index}: value {value} is {found}, declared is {declared.dtype} of shape {list(declared.shape)}"
            )
        return tensor.to(self._device)
