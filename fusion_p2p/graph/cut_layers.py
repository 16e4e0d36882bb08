"""Layers that make a model narrow where it is to be cut: inserted into its graph before training, and part of it from then on.

What crosses after them is a sparse or a short vector per place instead of the whole activation `x`:

    sender    y = x W_p^T                  (bottleneck: d to `rank` numbers), or x with all but its largest elements set to 0
    reader    x' = y W_e^T + T[token] + P[position]

The reader's own embedding of the tokens (T) and positions (P) tells it what need not cross: the tokens come from the owner, a
few bytes each. W_p and W_e begin as a projection on a random subspace and back, T like any embedding, P at zero. All of it is
made of ordinary operators and parameters, so gradients are exact and peers need no new code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fusion_p2p.errors import GraphError
from fusion_p2p.graph.schema import Argument, Graph, Node, Parameter, Ref, Rule, Scalar, TensorType

PREFIX = "cut"
"""Parameters of inserted layers are called cut.0.project.weight and so on."""
State = Literal["impossible", "possible", "inserted", "masks"]
"""What there is of cut layers in a graph; `masks`: also masks of the largest elements."""
SENDER, READER = "send", "read"
"""Last words of the module names of inserted nodes, as in cut.0.send: which side of the cut they are meant for."""
EMBEDDING_STD = 0.02


@dataclass(frozen=True, slots=True)
class CutLayers:
    """What is inserted at each cut.

    embedding: the reader adds its own embedding of tokens and positions. rank: numbers that cross per place (0: no bottleneck).
    keep: of each place's numbers this many keep their value, the largest (0: all).
    """

    embedding: bool = False
    rank: int = 0
    keep: int = 0


@dataclass(frozen=True, slots=True)
class Projection:
    """Two parameters, (rank, width) and (width, rank), that should begin as a projection and its transpose."""

    project: str
    expand: str
    width: int
    rank: int


@dataclass(frozen=True, slots=True)
class Inserted:
    """A graph with cut layers.

    borders: for each cut, in order, the value that should cross. projections: parameters that have no rule for their first
    value.
    """

    graph: Graph
    borders: tuple[int, ...]
    projections: tuple[Projection, ...]


def cut_values(graph: Graph) -> tuple[int, ...]:
    """Values with a gradient that alone cross where they are made: what is before reaches the loss through them only.

    In graph order. They have at least two dimensions, (batch, ..., width).
    """
    last_read = {value: index for index, node in enumerate(graph.nodes) for value in node.reads()}
    alive: set[int] = set()
    found: list[int] = []
    for index, node in enumerate(graph.nodes):
        alive |= {value for value in node.outputs if graph.types[value].grad and last_read.get(value, -1) > index}
        alive -= {value for value in alive if last_read[value] <= index}
        if len(alive) == 1 and alive <= set(node.outputs) and len(graph.types[node.first].shape) > 1:
            found.append(next(iter(alive)))
    return tuple(found)


def narrow_places(graph: Graph) -> tuple[int, ...]:
    """Indices of the nodes before which a graph with cut layers is meant to be cut, ascending; none if it has none."""
    before: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        name, _, side = node.module.rpartition(".")
        if name.startswith(f"{PREFIX}.") and side == SENDER:
            before[name] = index + 1
        elif name.startswith(f"{PREFIX}.") and side == READER:
            before.setdefault(name, index)
    return tuple(sorted(before.values()))


def state_of(graph: Graph) -> State:
    """Whether a graph has cut layers, or could have those that a slow network calls for."""
    if narrow_places(graph):
        masks = any(node.op == "topk" and node.module.startswith(f"{PREFIX}.") for node in graph.nodes)
        return "masks" if masks else "inserted"
    looks_up = any(node.op == "embedding" for node in graph.nodes)
    places = any(len(graph.types[value].shape) == 3 for value in cut_values(graph))
    return "possible" if looks_up and places else "impossible"


def insert(graph: Graph, values: Sequence[int], layers: CutLayers) -> Inserted:
    """The graph with layers after each of `values` (from `cut_values`); later readers read what the layers make of it.

    GraphError when the layers do not fit: an embedding needs a token lookup in the model, and bottleneck and mask need fewer
    numbers than cross now.
    """
    return _Inserting(graph, values, layers).run()


class _Inserting:
    """The new graph while it grows: parameters first, then old and new nodes in order."""

    def __init__(self, graph: Graph, values: Sequence[int], layers: CutLayers) -> None:
        unknown = sorted(set(values) - set(cut_values(graph)))
        if unknown or not values:
            raise GraphError(f"no cut can be made narrow at value {unknown[0] if unknown else '(none given)'}")
        self.graph, self.values, self.layers = graph, sorted(set(values)), layers
        self.parameters: list[Parameter] = list(graph.parameters)
        self.nodes: list[Node] = []
        self.types: list[TensorType] = list(graph.types[: graph.first_node_value])
        self.projections: list[Projection] = []
        self.borders: list[int] = []
        self.owned: dict[str, int] = {}
        self.tokens = _token_input(graph) if layers.embedding else (0, 0)

    def run(self) -> Inserted:
        for number, value in enumerate(self.values):
            self._add_parameters(number, self.graph.types[value])
        made: dict[int, int] = {value: value for value in range(self.graph.first_node_value)}
        read = dict(made)
        for node in self.graph.nodes:
            first = self._append(replace(node, arguments=_moved(node.arguments, read)), node.outputs)
            renamed = {old: first + offset for offset, old in enumerate(node.outputs)}
            made |= renamed
            read |= renamed
            for value in renamed.keys() & set(self.values):
                read[value] = self._layers_after(self.values.index(value), made[value])
        return Inserted(self._finished(made), tuple(self.borders), tuple(self.projections))

    def _finished(self, made: Mapping[int, int]) -> Graph:
        parameters = tuple(
            parameter if parameter.update is None else replace(parameter, update=made[parameter.update])
            for parameter in self.parameters
        )
        outputs = tuple(made[value] for value in self.graph.outputs)
        return replace(self.graph, parameters=parameters, nodes=tuple(self.nodes), types=tuple(self.types), outputs=outputs)

    def _add_parameters(self, number: int, crossing: TensorType) -> None:
        width, rank, keep = crossing.shape[-1], self.layers.rank, self.layers.keep
        if not 0 <= rank < width or not 0 <= keep < (rank or width):
            raise GraphError(f"a bottleneck or mask must be narrower than the {rank or width} numbers that cross at a cut")
        if rank:
            names = self._weight(number, "project", (rank, width), None), self._weight(number, "expand", (width, rank), None)
            self.projections.append(Projection(*names, width, rank))
        if self.layers.embedding:
            if len(crossing.shape) != 3 or crossing.shape[:2] != self.graph.types[self.tokens[0]].shape:
                raise GraphError("an embedding needs cuts at activations of shape (batch, length, width), one for each token")
            self._weight(number, "tokens", (self.tokens[1], width), Rule("normal", 0.0, EMBEDDING_STD))
            self._weight(number, "positions", (crossing.shape[1], width), Rule("constant", 0.0))

    def _weight(self, number: int, part: str, shape: tuple[int, ...], rule: Rule | None) -> str:
        name = f"{PREFIX}.{number}.{part}.weight"
        if any(name in (parameter.name, *parameter.aliases) for parameter in self.parameters):
            raise GraphError(f"the model already has a parameter {name!r}: cut layers were inserted before")
        self.owned[name] = len(self.types)
        self.parameters.append(Parameter(name, trainable=True, rule=rule))
        self.types.append(TensorType(shape, "float32", grad=True))
        return name

    def _layers_after(self, number: int, value: int) -> int:
        name, shape = f"{PREFIX}.{number}", self.types[value].shape
        sender, reader = f"{name}.{SENDER}", f"{name}.{READER}"
        if self.layers.rank:
            value = self._linear(f"{name}.project", value, (*shape[:-1], self.layers.rank), sender)
        if self.layers.keep:
            value = self._largest(value, sender)
        self.borders.append(value)
        if self.layers.rank:
            value = self._linear(f"{name}.expand", value, shape, reader)
        if self.layers.embedding:
            value = self._sum(value, self._embedded(name, shape, reader), reader)
        return value

    def _linear(self, parameter: str, value: int, shape: tuple[int, ...], module: str) -> int:
        arguments: dict[str, Argument] = {"input": Ref(value), "weight": self._weights_of(parameter), "bias": None}
        return self._node("linear", arguments, shape, module=module)

    def _largest(self, value: int, module: str) -> int:
        """The value times a mask of each place's largest elements: the gradient goes where the mask is."""
        shape, keep = self.types[value].shape, self.layers.keep
        size = self._node("abs", {"self": Ref(value)}, shape, module=module)
        arguments: dict[str, Argument] = {"self": Ref(size), "k": keep, "dim": -1, "largest": True, "sorted": False}
        kept = (*shape[:-1], keep)
        top = self._node("topk", arguments, kept, module=module, also=TensorType(kept, "int64", grad=False))
        least = self._node("amin", {"self": Ref(top), "dim": (-1,), "keepdim": True}, (*shape[:-1], 1), module=module)
        chosen = self._node("ge.Tensor", {"self": Ref(size), "other": Ref(least)}, shape, "bool", module=module)
        mask = self._node("cast", {"input": Ref(chosen), "dtype": "float32"}, shape, module=module, grad=False)
        return self._node("mul.Tensor", {"self": Ref(value), "other": Ref(mask)}, shape, module=module)

    def _embedded(self, name: str, shape: tuple[int, ...], module: str) -> int:
        tokens = self._looked_up(f"{name}.tokens", self._token_numbers(module), shape, module)
        arguments: dict[str, Argument] = {"start": 0, "end": shape[1], "step": 1, "dtype": "int64"}
        places = self._node("arange", arguments, (shape[1],), "int64", module=module)
        return self._sum(tokens, self._looked_up(f"{name}.positions", places, shape[1:], module), module)

    def _token_numbers(self, module: str) -> int:
        """The owner's tokens as an index: bytes travel as bytes."""
        tokens = self.tokens[0]
        if self.types[tokens].dtype != "uint8":
            return tokens
        arguments: dict[str, Argument] = {"input": Ref(tokens), "dtype": "int64"}
        return self._node("cast", arguments, self.types[tokens].shape, "int64", module=module)

    def _looked_up(self, parameter: str, indices: int, shape: tuple[int, ...], module: str) -> int:
        arguments: dict[str, Argument] = {
            "weight": self._weights_of(parameter),
            "indices": Ref(indices),
            "padding_idx": -1,
            "scale_grad_by_freq": False,
            "sparse": False,
        }
        return self._node("embedding", arguments, shape, module=module)

    def _weights_of(self, parameter: str) -> Ref:
        return Ref(self.owned[f"{parameter}.weight"])

    def _sum(self, first: int, second: int, module: str) -> int:
        arguments: dict[str, Argument] = {"self": Ref(first), "other": Ref(second), "alpha": 1}
        return self._node("add.Tensor", arguments, self.types[first].shape, module=module)

    def _node(
        self,
        op: str,
        arguments: dict[str, Argument],
        shape: tuple[int, ...],
        dtype: str = "float32",
        *,
        module: str,
        also: TensorType | None = None,
        grad: bool = True,
    ) -> int:
        """Append a node with one output, or two; the first has a gradient if it is a float."""
        first = len(self.types)
        types = [TensorType(shape, dtype, grad and dtype == "float32"), *([also] if also else [])]
        self.nodes.append(Node(op, arguments, first, len(types), module))
        self.types += types
        return first

    def _append(self, node: Node, outputs: range) -> int:
        first = len(self.types)
        self.nodes.append(replace(node, first=first))
        self.types += [self.graph.types[value] for value in outputs]
        return first


def _moved(arguments: Mapping[str, Argument], new: Mapping[int, int]) -> dict[str, Argument]:
    def moved(item: Scalar) -> Scalar:
        return Ref(new[item.value]) if isinstance(item, Ref) else item

    return {
        name: tuple(map(moved, argument)) if isinstance(argument, tuple) else moved(argument)
        for name, argument in arguments.items()
    }


def _token_input(graph: Graph) -> tuple[int, int]:
    """The input that holds tokens, and how many tokens there are: what the first embedding looks up. GraphError without one."""
    source = {node.first: node for node in graph.nodes if node.op == "cast"}
    for node in graph.nodes:
        indices, weight = node.arguments.get("indices"), node.arguments.get("weight")
        if node.op != "embedding" or not isinstance(indices, Ref) or not isinstance(weight, Ref):
            continue
        value = indices.value
        while value in source and isinstance(item := source[value].arguments["input"], Ref):
            value = item.value
        if graph.is_input(value):
            return value, graph.types[weight.value].shape[0]
    raise GraphError("the model looks up no tokens: a cut embedding is for models whose input is a sequence of tokens")
