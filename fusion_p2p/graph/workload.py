"""What each node costs, computed from types alone: the workload estimator of FusionLLM (arXiv 2410.12707, section 3.4).

FLOPs are counted by formula (a multiply-add is two), not by torch's counter, which does not see fused attention on a CPU:

    matrix product   2 * output elements * inner size
    convolution      2 * output elements * input channels per group * kernel elements (transposed: the other way round)
    attention        2 * batch * heads * queries * keys * (key width + value width)
    all others       1 per output element

Saved bytes are the storages that autograd keeps for the backward pass, found by running the graph on fake tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusion_p2p.graph.fake import fake_leaves, fake_run, fake_tensors
from fusion_p2p.graph.kinds import ATTENTION, CONVOLUTION, MATMUL, MEMORY
from fusion_p2p.graph.schema import Graph, Node, Ref, TensorType

_MATMUL_OPERANDS = {
    "linear": ("input", "weight"),
    "addmm": ("mat1", "mat2"),
    "matmul": ("self", "other"),
    "mm": ("self", "mat2"),
    "mv": ("self", "vec"),
    "dot": ("self", "tensor"),
    "bmm": ("self", "mat2"),
    "baddbmm": ("batch1", "batch2"),
}
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv_transpose2d.input"})
_VIEWS = frozenset(
    {
        "chunk", "detach", "expand", "flatten.using_ints", "movedim.int", "permute", "reshape", "select.int", "slice.Tensor",
        "split.Tensor", "split_with_sizes", "squeeze", "squeeze.dim", "squeeze.dims", "t", "transpose.int", "unbind.int",
        "unflatten.int", "unsqueeze",
    }
)  # fmt: skip
"""Operators that, as a rule, compute and move nothing."""


@dataclass(frozen=True, slots=True)
class NodeWorkload:
    """Cost of one node for one micro-batch.

    kind: which of a peer's measured rates applies. bytes_moved: read and written by the forward pass; the backward pass moves
    about twice as many. saved_bytes: kept until the backward pass, not counting what an earlier node already keeps.
    saved: every storage it keeps, as (storage number, bytes), parameters aside.
    """

    kind: str
    forward_flops: int
    backward_flops: int
    bytes_moved: int
    saved_bytes: int
    saved: tuple[tuple[int, int], ...]


def workload(graph: Graph) -> tuple[NodeWorkload, ...]:
    """The cost of every node of a checked graph, in order."""
    saved = _saved_storages(graph)
    seen: set[int] = set()
    costs: list[NodeWorkload] = []
    for node, storages in zip(graph.nodes, saved, strict=True):
        new_bytes = sum(num_bytes for number, num_bytes in storages if number not in seen)
        seen.update(number for number, _ in storages)
        kind, forward = _forward(graph, node)
        costs.append(
            NodeWorkload(kind, forward, _backward(graph, node, forward), _bytes_moved(graph, node), new_bytes, storages)
        )
    return tuple(costs)


def saved_bytes(costs: Sequence[NodeWorkload], nodes: Iterable[int]) -> int:
    """Bytes that a slice of these nodes keeps per micro-batch in flight; a storage that several nodes keep counts once."""
    return sum(dict(storage for index in nodes for storage in costs[index].saved).values())


def _forward(graph: Graph, node: Node) -> tuple[str, int]:
    elements = sum(graph.types[value].num_elements for value in node.outputs)
    if node.op in _MATMUL_OPERANDS:
        inner = _type(graph, node, _MATMUL_OPERANDS[node.op][0]).shape[-1]
        return MATMUL, 2 * elements * inner
    if node.op in _CONVOLUTIONS:
        kernel = math.prod(_type(graph, node, "weight").shape[1:])
        if node.op == "conv_transpose2d.input":
            elements = _type(graph, node, "input").num_elements
        return CONVOLUTION, 2 * elements * kernel
    if node.op == "scaled_dot_product_attention":
        query, key, value = (_type(graph, node, name).shape for name in ("query", "key", "value"))
        return ATTENTION, 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    return MEMORY, 0 if node.op in _VIEWS else elements


def _backward(graph: Graph, node: Node, forward: int) -> int:
    """One product of the forward's size for each operand that gets a gradient; attention has twice its forward."""
    if not any(graph.types[value].grad for value in node.outputs):
        return 0
    operands = _MATMUL_OPERANDS.get(node.op, ("input", "weight") if node.op in _CONVOLUTIONS else ())
    if operands:
        return forward * sum(_type(graph, node, name).grad for name in operands)
    return 2 * forward if node.op == "scaled_dot_product_attention" else forward


def _bytes_moved(graph: Graph, node: Node) -> int:
    if node.op in _VIEWS:
        return 0
    values = [*node.outputs, *set(node.reads())]
    if node.op == "embedding":  # reads the rows it needs, not the table
        values = [*node.outputs, *node.outputs]
    return sum(graph.types[value].num_bytes for value in values)


def _type(graph: Graph, node: Node, name: str) -> TensorType:
    argument = node.arguments[name]
    if not isinstance(argument, Ref):
        raise TypeError(f"{name} of {node.op} is not a value: only checked graphs have a workload")
    return graph.types[argument.value]


def _saved_storages(graph: Graph) -> list[tuple[tuple[int, int], ...]]:
    """For each node the storages that its backward keeps, numbered through the whole graph."""
    kept: list[Tensor] = []
    found: list[tuple[tuple[int, int], ...]] = []
    numbers: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with fake_tensors(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        leaves = fake_leaves(graph)
        weights = {leaves[value].untyped_storage()._cdata for value in leaves if graph.is_parameter(value)}
        start = 0
        for _ in fake_run(graph, leaves):
            storages: dict[int, int] = {}
            for tensor in kept[start:]:  # tensors stay in `kept`, so that no address of a storage is used twice
                storage = tensor.untyped_storage()
                if storage._cdata not in weights:
                    storages[numbers.setdefault(storage._cdata, len(numbers))] = storage.nbytes()
            start = len(kept)
            found.append(tuple(storages.items()))
    return found
