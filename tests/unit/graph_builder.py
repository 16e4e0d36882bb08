"""Small graphs written by hand: every node is run once, for real, to find the types of what it makes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fusion_p2p.compress.dense import type_of
from fusion_p2p.graph.opset import apply
from fusion_p2p.graph.schema import OPSET, Argument, Graph, Node, Parameter, Ref, TensorType


class GraphBuilder:
    """Inputs and parameters first, then nodes in order. Floating parameters are trainable unless they are buffers."""

    def __init__(self, inputs: Mapping[str, Tensor], parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        self.weights = {**parameters, **buffers}
        self._inputs = tuple(inputs)
        self._buffers = tuple(buffers)
        self._updates: dict[str, int] = {}
        self._nodes: list[Node] = []
        leaves = [tensor.clone().requires_grad_() for tensor in parameters.values()]
        self._tensors: list[Tensor] = [*inputs.values(), *leaves, *buffers.values()]
        self._types = [type_of(tensor) for tensor in self._tensors]

    def ref(self, name: str) -> Ref:
        """An input, parameter or buffer."""
        return Ref((*self._inputs, *self.weights).index(name))

    def add(self, op: str, /, **arguments: Argument) -> Ref:
        """A node; its (first) output."""
        node = Node(op, arguments, len(self._tensors), 0, f"module.{len(self._nodes)}")
        outputs = apply(node, dict(enumerate(self._tensors)), torch.device("cpu"), training=True)
        self._nodes.append(Node(op, arguments, node.first, len(outputs), node.module))
        self._tensors += outputs
        self._types += [type_of(tensor) for tensor in outputs]
        return Ref(node.first)

    def declare(self, op: str, type: TensorType, /, **arguments: Argument) -> Ref:
        """A node that is not run now, because it would fail."""
        self._nodes.append(Node(op, arguments, len(self._tensors), 1, f"module.{len(self._nodes)}"))
        self._tensors.append(torch.empty(0))
        self._types.append(type)
        return Ref(self._nodes[-1].first)

    def update(self, buffer: str, value: Ref) -> None:
        """After a step the buffer becomes this value."""
        self._updates[buffer] = value.value

    def graph(self, loss: Ref) -> Graph:
        parameters = tuple(Parameter(name, name not in self._buffers, self._updates.get(name)) for name in self.weights)
        return Graph(OPSET, self._inputs, parameters, tuple(self._nodes), tuple(self._types), (loss.value,))
