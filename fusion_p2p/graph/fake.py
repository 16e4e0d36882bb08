"""Running a graph on fake tensors: shapes, dtypes and the flow of gradients of every value, at no memory cost."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_p2p.errors import GraphError
from fusion_p2p.graph.opset import OPERATOR_ERRORS, TORCH_DTYPES, apply
from fusion_p2p.graph.schema import Graph, Node, TensorType

_CPU = torch.device("cpu")
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


# FakeTensor logs a traceback for each operator that refuses its arguments; strangers' graphs must not fill the log.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Every tensor made inside has a type and no memory. Gradients are recorded."""
    with FakeTensorMode(), torch.enable_grad():
        yield


def fake_run(graph: Graph, leaves: Mapping[int, Tensor]) -> Iterator[tuple[int, Node, list[Tensor]]]:
    """Inside `fake_tensors`: run node after node, giving each with its index and outputs before the next one runs.

    GraphError when an operator refuses its arguments.
    """
    values = dict(leaves)
    for index, node in enumerate(graph.nodes):
        outputs = _apply(index, node, values)
        values.update(zip(node.outputs, outputs, strict=False))
        yield index, node, outputs


def fake_leaves(graph: Graph) -> dict[int, Tensor]:
    """Inputs and parameters inside `fake_tensors`, by value number."""
    return {
        value: torch.empty(item.shape, dtype=TORCH_DTYPES[item.dtype], requires_grad=item.grad)
        for value, item in enumerate(graph.types[: graph.first_node_value])
    }


def _apply(index: int, node: Node, values: Mapping[int, Tensor]) -> list[Tensor]:
    try:
        return apply(node, values, _CPU, training=True)
    except OPERATOR_ERRORS as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else "refused"
        raise GraphError(f"{describe(index, node)}: {type(error).__name__}: {reason}") from error


def type_of(tensor: Tensor) -> TensorType:
    """The type of a fake tensor. GraphError for a dtype that graphs do not have."""
    name = _DTYPE_NAMES.get(tensor.dtype)
    if name is None:
        raise GraphError(f"dtype {tensor.dtype} is not supported; use one of {', '.join(TORCH_DTYPES)}")
    return TensorType(tuple(tensor.shape), name, tensor.requires_grad)


def describe(index: int, node: Node) -> str:
    """How error messages name a node."""
    where = f" in {node.module[:80]!r}" if node.module else ""
    return f"node {index} ({node.op[:64]!r}{where})"
