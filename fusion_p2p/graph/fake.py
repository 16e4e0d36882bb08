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
from fusion_p2p.graph.schema import Node, TensorType

_CPU = torch.device("cpu")
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Every tensor made inside has a type and no memory. Gradients are recorded."""
    # FakeTensor logs a traceback for each refused operator; strangers' graphs must not fill the log.
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with FakeTensorMode(), torch.enable_grad():
            yield
    finally:
        logger.setLevel(level)


def fake_leaf(type: TensorType) -> Tensor:
    """An input or parameter inside `fake_tensors`."""
    return torch.empty(type.shape, dtype=TORCH_DTYPES[type.dtype], requires_grad=type.grad)


def fake_apply(index: int, node: Node, values: Mapping[int, Tensor]) -> list[Tensor]:
    """Run node number `index` inside `fake_tensors`. GraphError when the operator refuses its arguments."""
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
