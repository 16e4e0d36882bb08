"""The nodes and types of a graph as they are appended during lowering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, fx

from fusion_p2p.errors import GraphError
from fusion_p2p.graph.fake import type_of
from fusion_p2p.graph.operators import OPS
from fusion_p2p.graph.rewrites import Arguments, module_path, where
from fusion_p2p.graph.schema import Node, Ref, TensorType


class Emitted:
    """Nodes in order and the types of all values, those of the leaves first. Gradients are marked where they may flow."""

    def __init__(self, leaves: Sequence[TensorType]) -> None:
        self.nodes: list[Node] = []
        self.types = list(leaves)

    def emit(self, name: str, arguments: Arguments, results: Sequence[Tensor], node: fx.Node) -> list[int]:
        """Append one node; `results` are fake tensors of its outputs."""
        op = OPS.get(name)
        if op is None:
            raise GraphError(f"{name}{where(node)} cannot be captured: it is not in the operator table")
        if arguments.keys() != op.arguments:
            odd = ", ".join(sorted(arguments.keys() ^ op.arguments))
            raise GraphError(f"{name}{where(node)} cannot be captured with these arguments: {odd}")
        for argument, only in op.pinned.items():
            if arguments[argument] != only:
                raise GraphError(f"{name}{where(node)} cannot be captured with {argument}={arguments[argument]}, only {only}")
        new = Node(name, arguments, len(self.types), 1, module_path(node))
        grad = any(self.types[value].grad for value in new.reads()) and name != "detach"
        types = [type_of(item) for item in results]
        self.types += [
            TensorType(item.shape, item.dtype, grad and item.dtype.endswith(("float16", "float32"))) for item in types
        ]
        self.nodes.append(Node(name, arguments, new.first, len(types), new.module))
        return list(range(new.first, new.first + len(types)))

    def detached(self, value: int) -> int:
        """The same value without a gradient."""
        item = self.types[value]
        if not item.grad:
            return value
        self.nodes.append(Node("detach", {"self": Ref(value)}, len(self.types), 1))
        self.types.append(replace(item, grad=False))
        return len(self.types) - 1
