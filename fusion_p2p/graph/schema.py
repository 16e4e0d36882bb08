"""The operator graph (OP-DAG) as plain data: no code, no torch.

Values are numbered: the graph's inputs first, then its parameters, then the outputs of its nodes in order. So an argument can
only refer to what is already computed, and a cycle cannot be written down. `encoding.py` turns a graph into bytes and back,
`check.py` decides whether a stranger's graph may run here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

OPSET = 1
"""Number of the operator table. Adding a name keeps it; changing the meaning of one raises it."""

MAX_GRAPH_BYTES = 16 << 20
MAX_NODES = 20_000
MAX_RANK = 8
MAX_DIMENSION = 1 << 31
MAX_NODE_OUTPUTS = 64
MAX_LIST = 256

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a value, by its number."""

    value: int


Scalar = None | bool | int | float | str | Ref
Argument = None | bool | int | float | str | Ref | tuple[Scalar, ...]


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and dtype of a value; `grad` says whether a gradient flows back through it."""

    shape: tuple[int, ...]
    dtype: str
    grad: bool

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Rule:
    """How a parameter gets its first value on the peer that holds it, seeded by (run seed, parameter name).

    kind: `normal` (a = mean, b = standard deviation), `uniform` (a = low, b = high) or `constant` (a = value).
    """

    kind: str
    a: float
    b: float = 0.0


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trainable tensor or a buffer of the captured module, by its name in the module's state_dict.

    `update` is the value that replaces a buffer after a training forward pass. Without a `rule` the first value is sent
    by the owner. `aliases` are further state_dict names of the same (tied) tensor.
    """

    name: str
    trainable: bool
    update: int | None = None
    rule: Rule | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Node:
    """One operator. Its `count` outputs are the values `first`, `first + 1`, ...; `module` is a hint for planners."""

    op: str
    arguments: dict[str, Argument]
    first: int
    count: int
    module: str = ""

    @property
    def outputs(self) -> range:
        return range(self.first, self.first + self.count)

    def reads(self) -> Iterator[int]:
        """The values among the arguments, in argument order, repeats included."""
        for argument in self.arguments.values():
            for item in argument if isinstance(argument, tuple) else (argument,):
                if isinstance(item, Ref):
                    yield item.value


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured model whose single output is the loss, for one fixed micro-batch shape."""

    opset: int
    inputs: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    nodes: tuple[Node, ...]
    types: tuple[TensorType, ...]
    outputs: tuple[int, ...]

    @property
    def first_parameter(self) -> int:
        return len(self.inputs)

    @property
    def first_node_value(self) -> int:
        return len(self.inputs) + len(self.parameters)

    def parameter(self, value: int) -> Parameter:
        """The parameter that is the value of this number."""
        return self.parameters[value - self.first_parameter]

    def is_input(self, value: int) -> bool:
        return value < self.first_parameter

    def is_parameter(self, value: int) -> bool:
        return self.first_parameter <= value < self.first_node_value


RANDOM_OPS = {"dropout": "p", "scaled_dot_product_attention": "dropout_p"}
"""Operators that draw random numbers, each with the argument that is the probability: at zero they draw none."""


def is_random(node: Node) -> bool:
    """Whether a training forward pass of this node draws random numbers, so that its caller has to seed it."""
    probability = RANDOM_OPS.get(node.op)
    return probability is not None and node.arguments.get(probability) != 0
