"""Running a whole graph in one place, and comparing it with the module it was captured from."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fusion_p2p.graph.capture import Captured, capture
from fusion_p2p.graph.check import check
from fusion_p2p.graph.encoding import decode_graph, encode_graph
from fusion_p2p.graph.opset import apply
from fusion_p2p.graph.schema import Graph

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ran:
    """Values of one forward pass by number, and trainable leaves by parameter name."""

    values: dict[int, Tensor]
    leaves: dict[str, Tensor]
    loss: Tensor


def run(graph: Graph, weights: Mapping[str, Tensor], feeds: Mapping[str, Tensor], *, training: bool = True) -> Ran:
    values = {number: feeds[name] for number, name in enumerate(graph.inputs)}
    leaves: dict[str, Tensor] = {}
    for number, parameter in enumerate(graph.parameters, graph.first_parameter):
        values[number] = weights[parameter.name].clone()
        if parameter.trainable:
            leaves[parameter.name] = values[number].requires_grad_()
    for node in graph.nodes:
        values.update(zip(node.outputs, apply(node, values, CPU, training=training), strict=True))
    return Ran(values, leaves, values[graph.outputs[0]])


def assert_same_as_eager(module: nn.Module, feeds: Mapping[str, Tensor], *, tolerance: float = 0.0) -> Captured:
    """Capture, send, check and run a module: loss, gradients and buffers equal the module's own, random numbers included."""
    captured = capture(module, feeds)
    graph = decode_graph(encode_graph(captured.graph))
    assert graph == captured.graph
    check(graph)
    torch.manual_seed(1)
    ran = run(graph, captured.weights, feeds)
    ran.loss.backward()
    eager = copy.deepcopy(module)
    torch.manual_seed(1)
    result = eager(**feeds)
    loss = result if isinstance(result, Tensor) else result["loss"] if isinstance(result, Mapping) else result[0]
    loss.backward()
    torch.testing.assert_close(ran.loss, loss.reshape(()), rtol=tolerance, atol=tolerance)
    parameters = dict(eager.named_parameters())
    for name, leaf in ran.leaves.items():
        assert (leaf.grad is None) == (parameters[name].grad is None), name
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, parameters[name].grad, rtol=tolerance, atol=tolerance)
    buffers = dict(eager.named_buffers())
    for parameter in graph.parameters:
        if parameter.update is not None:
            torch.testing.assert_close(ran.values[parameter.update], buffers[parameter.name], rtol=0, atol=0)
    return captured
