"""Small hand-made graphs: a chain of linear layers with a loss, optionally with a constant node and an updated buffer."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_p2p.graph.kinds import MATMUL
from fusion_p2p.graph.schema import OPSET, Graph, Node, Parameter, Ref, TensorType

WIDTH = 8
BATCH = 4
ACTIVATION = TensorType((BATCH, WIDTH), "float32", True)


@dataclass(frozen=True)
class Cost:
    """What a node of a test graph costs."""

    forward_flops: float
    backward_flops: float
    saved_bytes: int
    kind: str = MATMUL
    bytes_moved: float = 0.0


def chain(layers: int) -> Graph:
    """`layers` linear nodes without bias, one weight each, and a mean: the loss."""
    first = 1 + layers
    linears = tuple(
        Node(
            "linear", {"input": Ref(first + i - 1 if i else 0), "weight": Ref(1 + i), "bias": None}, first + i, 1, f"layer.{i}"
        )
        for i in range(layers)
    )
    loss = Node("mean", {"self": Ref(first + layers - 1), "dtype": None}, first + layers, 1, "loss")
    types = (
        TensorType((BATCH, WIDTH), "float32", False),
        *(TensorType((WIDTH, WIDTH), "float32", True) for _ in range(layers)),
        *(ACTIVATION for _ in range(layers)),
        TensorType((), "float32", True),
    )
    weights = tuple(Parameter(f"layer.{i}.weight", True) for i in range(layers))
    return Graph(OPSET, ("x",), weights, (*linears, loss), types, (first + layers,))


def chain_costs(graph: Graph, saved_bytes: int = BATCH * WIDTH * 4) -> tuple[Cost, ...]:
    """Linear nodes cost 1 forward and 2 backward, the loss nothing."""
    return tuple(Cost(1.0, 2.0, saved_bytes) if node.op == "linear" else Cost(0.0, 0.0, 0) for node in graph.nodes)


def counting_chain() -> Graph:
    """A step counter read by the first node and updated by the last but one: all nodes between belong together."""
    scalar = TensorType((), "float32", False)
    nodes = (
        Node("full", {"size": (), "fill_value": 1.0, "dtype": "float32"}, 2, 1, "one"),
        Node("mul", {"self": Ref(0), "other": Ref(1)}, 3, 1, "scaled"),
        Node("relu", {"self": Ref(3)}, 4, 1, "kept"),
        Node("add", {"self": Ref(1), "other": Ref(2), "alpha": 1}, 5, 1, "counter"),
        Node("relu", {"self": Ref(4)}, 6, 1, "free"),
        Node("mean", {"self": Ref(6), "dtype": None}, 7, 1, "loss"),
    )
    wide = TensorType((BATCH, WIDTH), "float32", False)
    types = (wide, scalar, scalar, wide, wide, scalar, wide, scalar)
    return Graph(OPSET, ("x",), (Parameter("steps", False, update=5),), nodes, types, (7,))
