"""Memory that an operator takes for itself while it runs, beyond what it reads and returns.

The declared types of a graph bound every value, but not this: a mean squared error of a column and a row returns one number
and computes a matrix. An upper bound for the plainest implementation of each operator that can take more than its values do.
"""

from __future__ import annotations

import math
from itertools import zip_longest

from fusion_p2p.graph.schema import DTYPE_BYTES, Argument, Graph, Node, Ref

_BROADCASTING = frozenset(
    {
        "binary_cross_entropy_with_logits",
        "cosine_similarity",
        "huber_loss",
        "kl_div",
        "l1_loss",
        "mse_loss",
        "smooth_l1_loss",
    }
)
"""Operators that reduce the broadcast of everything they read."""


def workspace_bytes(graph: Graph, node: Node) -> int:
    """Bytes that one node may need while it runs; 0 where its values say it all. Works on types that nothing has proven yet."""
    width = max((DTYPE_BYTES[graph.types[value].dtype] for value in (*node.reads(), *node.outputs)), default=0)
    return width * _elements(graph, node)


def _elements(graph: Graph, node: Node) -> int:
    if node.op in _BROADCASTING:
        return _broadcast([graph.types[value].shape for value in node.reads()])
    output = graph.types[node.first].shape
    if node.op == "matmul":
        left, right = _shape(graph, node, "self"), _shape(graph, node, "other")
        batch = _broadcast([left[:-2], right[:-2]])
        return batch * (math.prod(left[-2:]) + math.prod(right[-2:]))
    if node.op.startswith("conv_transpose"):
        return math.prod(_shape(graph, node, "weight")[1:]) * math.prod(_shape(graph, node, "input")[-2:])
    if node.op.startswith("conv"):
        weight = _shape(graph, node, "weight")
        return math.prod(weight[1:]) * math.prod(output[-(len(weight) - 2) :])
    if node.op == "scaled_dot_product_attention":
        query, key = _shape(graph, node, "query"), _shape(graph, node, "key")
        return _broadcast([query[:-2], key[:-2]]) * math.prod(query[-2:-1]) * math.prod(key[-2:-1])
    return 0


def _shape(graph: Graph, node: Node, name: str) -> tuple[int, ...]:
    argument: Argument = node.arguments[name]
    return graph.types[argument.value].shape if isinstance(argument, Ref) else ()


def _broadcast(shapes: list[tuple[int, ...]]) -> int:
    """Elements of the broadcast of shapes, whether they fit or not."""
    aligned = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return math.prod(max(sizes) for sizes in aligned)
