"""Running one node of a checked graph, and what its index arguments demand of the tensors that arrive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusion_p2p.graph.operators import OPS, Op
from fusion_p2p.graph.schema import Argument, Graph, Node, Ref, is_random

__all__ = ["OPERATOR_ERRORS", "OPS", "TORCH_DTYPES", "IndexBound", "Op", "apply", "index_bounds", "is_random"]

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}

OPERATOR_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What torch raises when an operator gets arguments that do not fit it."""


def apply(node: Node, values: Mapping[int, Tensor], device: torch.device, *, training: bool) -> list[Tensor]:
    """Run one checked node on the values it reads and return its outputs, in order.

    Random nodes draw from torch's current generator: the caller seeds it. Outside training dropout does nothing and
    `batch_norm` uses its buffers and returns them unchanged as their own new values. Raises what torch raises.
    """
    op = OPS[node.op]
    arguments: dict[str, Any] = {name: _resolve(argument, values) for name, argument in node.arguments.items()}
    dtype = arguments.get("dtype")
    if dtype is not None:
        arguments["dtype"] = TORCH_DTYPES[dtype]
    if op.source:
        arguments["device"] = device
    run = op.run if training or op.evaluate is None else op.evaluate
    result = run(**arguments)
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _resolve(argument: Argument, values: Mapping[int, Tensor]) -> object:
    if isinstance(argument, Ref):
        return values[argument.value]
    if isinstance(argument, tuple):
        return [values[item.value] if isinstance(item, Ref) else item for item in argument]
    return argument


class IndexBound(NamedTuple):
    """Legal elements of an integer value: `low <= element < high`, or `ignored` (the label that a loss skips)."""

    low: int
    high: int
    ignored: int | None = None

    def first_illegal(self, tensor: Tensor) -> int | None:
        """An element of an integer tensor that is out of range, or None."""
        elements = tensor.long()  # torch compares a byte with 50257 by wrapping the number around
        illegal = (elements < self.low) | (elements >= self.high)
        if self.ignored is not None:
            illegal &= elements != self.ignored
        if not bool(illegal.any()):
            return None
        return int(elements[illegal][0])

    def both(self, other: IndexBound) -> IndexBound:
        """The elements that are legal for two readers."""
        ignored = self.ignored if self.ignored == other.ignored else None
        return IndexBound(max(self.low, other.low), min(self.high, other.high), ignored)


_INDEX_PRESERVING = {
    "cast": "input",
    "clone": "self",
    "expand": "self",
    "flatten.using_ints": "self",
    "flip": "self",
    "pad": "self",
    "permute": "self",
    "repeat": "self",
    "reshape": "self",
    "select.int": "self",
    "slice.Tensor": "self",
    "squeeze": "self",
    "squeeze.dim": "self",
    "t": "self",
    "transpose.int": "self",
    "unflatten.int": "self",
    "unsqueeze": "self",
}
"""Operators whose output holds only elements of this argument (and, for `pad`, a constant)."""


def index_bounds(graph: Graph) -> dict[int, IndexBound]:
    """For integer values used as indices, directly or through reshapes, slices, padding and casts: what they may hold.

    A graph check cannot see contents, and an index out of range kills a CUDA context, so whoever receives such a value (an
    input, or a value of another slice) compares it on arrival.
    """
    bounds: dict[int, IndexBound] = {}

    def demand(value: int, bound: IndexBound) -> None:
        if graph.types[value].dtype in ("int64", "int32", "uint8"):
            bounds[value] = bounds[value].both(bound) if value in bounds else bound

    for node in reversed(graph.nodes):
        for value, bound in _own_bounds(graph, node):
            demand(value, bound)
        source = node.arguments.get(_INDEX_PRESERVING.get(node.op, ""))
        if node.first in bounds and isinstance(source, Ref):
            demand(source.value, bounds[node.first])
    return {value: bounds[value] for value in sorted(bounds)}


def _own_bounds(graph: Graph, node: Node) -> list[tuple[int, IndexBound]]:
    """What one indexing node demands of the values it reads."""
    arguments = node.arguments
    match node.op:
        case "embedding":
            return _bound(graph, arguments["indices"], _size(graph, arguments["weight"], 0))
        case "cross_entropy_loss" | "nll_loss_nd":
            classes = _size(graph, arguments["self"], 1 if _rank(graph, arguments["self"]) > 1 else 0)
            ignored = arguments["ignore_index"]
            return _bound(graph, arguments["target"], classes, ignored=ignored if isinstance(ignored, int) else None)
        case "gather" | "index_select":
            dim = arguments["dim"]
            return _bound(graph, arguments["index"], _size(graph, arguments["self"], dim if isinstance(dim, int) else 0))
        case "one_hot":
            count = arguments["num_classes"]
            return _bound(graph, arguments["self"], count if isinstance(count, int) else 0)
        case "index.Tensor":
            indices = arguments["indices"]
            found: list[tuple[int, IndexBound]] = []
            for dim, index in enumerate(indices if isinstance(indices, tuple) else ()):
                size = _size(graph, arguments["self"], dim)
                found += _bound(graph, index, size, low=-size)
            return found
    return []


def _bound(
    graph: Graph, argument: Argument, size: int, *, low: int = 0, ignored: int | None = None
) -> list[tuple[int, IndexBound]]:
    if not isinstance(argument, Ref) or graph.types[argument.value].dtype == "bool":
        return []
    return [(argument.value, IndexBound(low, size, ignored))]


def _rank(graph: Graph, argument: Argument) -> int:
    return len(graph.types[argument.value].shape) if isinstance(argument, Ref) else 0


def _size(graph: Graph, argument: Argument, dim: int) -> int:
    """The size of one dimension of a value; 0, so that nothing is legal, where there is none."""
    if not isinstance(argument, Ref):
        return 0
    shape = graph.types[argument.value].shape
    return shape[dim] if -len(shape) <= dim < len(shape) else 0
