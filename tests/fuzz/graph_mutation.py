"""Hostile graphs: legal ones with bytes or structure changed, tried as a peer would treat them.

`fuzz(num_inputs, seed)` runs a reproducible stream of them and counts; half are byte strings, half structural mutants. A mutant
that passes the check is run forward and backward, and outside training, on real tensors.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch import Tensor

from fusion_p2p.errors import GraphError
from fusion_p2p.graph.check import Limits, check
from fusion_p2p.graph.encoding import decode_graph, encode_graph
from fusion_p2p.graph.fake import fake_leaves, fake_run, fake_tensors, type_of
from fusion_p2p.graph.initial import RULE_KINDS
from fusion_p2p.graph.operators import OPS
from fusion_p2p.graph.opset import OPERATOR_ERRORS, TORCH_DTYPES, apply, index_bounds
from fusion_p2p.graph.schema import DTYPE_BYTES, Argument, Graph, Node, Parameter, Ref, Rule, Scalar
from fusion_p2p.graph.workload import workload
from tests.fuzz.original_graphs import original

LIMITS = Limits(value_bytes=1 << 20, total_bytes=16 << 20, workspace_bytes=16 << 20)
INTEGERS = (0, 1, -1, 2, 3, 5, 7, -2, 16, 63, 255, 1 << 20, 1 << 31, -(1 << 31), (1 << 63) - 1, -(1 << 63) + 1, 1 << 63)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, 1e308, float("inf"), float("-inf"), float("nan"))
WORDS = ("tanh", "none", "constant", "same", "float32", "int64", "bool", "os.system", "", "x" * 600)


class Outcome(Enum):
    REFUSED = "refused with GraphError"
    RAN = "ran forward and backward"
    REFUSED_AT_RUN = "passed the check, refused by torch when run"


@dataclass
class Counts:
    """What became of the inputs; `unexpected` holds the numbers of those that broke a promise, with the exception."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    unexpected: list[tuple[int, str]] = field(default_factory=list)

    @property
    def inputs(self) -> int:
        return sum(self.outcomes.values()) + len(self.unexpected)


def fuzz(num_inputs: int, seed: int = 0) -> Counts:
    """Try `num_inputs` inputs; input number n depends on `seed` and n only."""
    counts = Counts()
    for number in range(num_inputs):
        rng = random.Random(f"{seed} {number}")
        try:
            outcome = try_bytes(mutated_bytes(rng)) if number % 2 else try_graph(mutated_graph(rng))
        except Exception as error:  # noqa: BLE001 - what a fuzzer looks for
            counts.unexpected.append((number, f"{type(error).__name__}: {error}"))
        else:
            counts.outcomes[outcome] += 1
    return counts


def mutated_bytes(rng: random.Random) -> bytes:
    """The encoding of a legal graph with a few bytes changed, cut, repeated or inserted."""
    data = bytearray(encode_graph(original(rng)))
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data))
        match rng.randrange(5):
            case 0:
                data[place] = rng.randrange(256)
            case 1:
                data[place] ^= 1 << rng.randrange(8)
            case 2:
                data[place:place] = rng.randbytes(rng.randint(1, 8))
            case 3:
                del data[place : place + rng.randint(1, 8)]
            case _:
                data[place : place + 5] = rng.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6")) + rng.randbytes(4)
        if not data:
            break
    return bytes(data)


def mutated_graph(rng: random.Random) -> Graph:
    """A legal graph with one to three changes; often with its types corrected afterwards, so that only torch can refuse it."""
    graph = original(rng)
    for _ in range(rng.choice((1, 1, 2, 3))):
        graph = rng.choice(_MUTATIONS)(graph, rng)
    return _with_types_corrected(graph) if rng.random() < 0.5 else graph


def try_bytes(data: bytes) -> Outcome:
    """Treat bytes as a peer does."""
    try:
        graph = decode_graph(data)
    except GraphError:
        return Outcome.REFUSED
    return try_graph(graph)


def try_graph(graph: Graph) -> Outcome:
    """Check a graph, and run it if it passes. Whatever else than GraphError escapes the check is a fault."""
    try:
        check(graph, LIMITS)
        workload(graph)
        index_bounds(graph)
    except GraphError:
        return Outcome.REFUSED
    try:
        _run(graph, training=True)
        _run(graph, training=False)
    except OPERATOR_ERRORS:
        return Outcome.REFUSED_AT_RUN
    return Outcome.RAN


def _run(graph: Graph, *, training: bool) -> None:
    torch.manual_seed(0)
    bounds = index_bounds(graph)
    values: dict[int, Tensor] = {}
    for number, item in enumerate(graph.types[: graph.first_node_value]):
        high = bounds[number].high if number in bounds else 3
        if item.dtype.endswith(("32", "16")) and item.dtype != "int32":
            values[number] = torch.rand(item.shape).to(TORCH_DTYPES[item.dtype]).requires_grad_(item.grad)
        else:
            values[number] = torch.randint(0, max(1, min(high, 200)), item.shape).to(TORCH_DTYPES[item.dtype])
    for node in graph.nodes:
        outputs = apply(node, values, torch.device("cpu"), training=training)
        for value, output in zip(node.outputs, outputs, strict=True):
            declared = graph.types[value]
            if tuple(output.shape) != declared.shape or output.dtype != TORCH_DTYPES[declared.dtype]:
                raise SystemError(f"{node.op} made {output.dtype}{tuple(output.shape)}, proven was {declared}")
            values[value] = output
    values[graph.outputs[0]].backward()


def _integer(rng: random.Random) -> int:
    return rng.choice(INTEGERS) if rng.random() < 0.6 else rng.randint(-6, 12)


def _value(graph: Graph, rng: random.Random) -> Ref:
    return Ref(rng.randrange(len(graph.types) + 2))


def _scalar(graph: Graph, rng: random.Random) -> Scalar:
    makers: tuple[Callable[[], Scalar], ...] = (
        lambda: _integer(rng),
        lambda: rng.choice(FLOATS),
        lambda: rng.choice(WORDS),
        lambda: _value(graph, rng),
        lambda: None,
        lambda: rng.random() < 0.5,
    )
    return rng.choice(makers)()


def _argument(graph: Graph, rng: random.Random) -> Argument:
    if rng.random() < 0.25:
        return tuple(_scalar(graph, rng) for _ in range(rng.choice((0, 1, 2, 4, 300))))
    return _scalar(graph, rng)


def _nudged(graph: Graph, argument: Argument, rng: random.Random) -> Argument:
    """Another argument of the same kind."""
    match argument:
        case bool():
            return not argument
        case int():
            return _integer(rng)
        case float():
            return rng.choice(FLOATS)
        case str():
            return rng.choice(WORDS)
        case Ref():
            return _value(graph, rng)
        case tuple() if argument:
            items = list(argument)
            place = rng.randrange(len(items))
            nudged = _nudged(graph, items[place], rng)
            items[place] = nudged if not isinstance(nudged, tuple) else 0
            return tuple(items)
    return _argument(graph, rng)


def _with_node(graph: Graph, index: int, node: Node) -> Graph:
    return replace(graph, nodes=(*graph.nodes[:index], node, *graph.nodes[index + 1 :]))


def _change_argument(graph: Graph, rng: random.Random) -> Graph:
    index = rng.randrange(len(graph.nodes))
    node = graph.nodes[index]
    if not node.arguments:
        return graph
    name = rng.choice(sorted(node.arguments))
    same_kind = rng.random() < 0.8
    new = _nudged(graph, node.arguments[name], rng) if same_kind else _argument(graph, rng)
    return _with_node(graph, index, replace(node, arguments={**node.arguments, name: new}))


def _change_operator(graph: Graph, rng: random.Random) -> Graph:
    """Another operator, keeping the arguments that fit and inventing the rest."""
    index = rng.randrange(len(graph.nodes))
    node = graph.nodes[index]
    like = [name for name, op in OPS.items() if op.arguments == node.arguments.keys()]
    op = rng.choice(like if like and rng.random() < 0.5 else sorted(OPS))
    return _with_node(graph, index, replace(node, op=op, arguments=_arguments(graph, rng, op, node)))


def _arguments(graph: Graph, rng: random.Random, op: str, node: Node) -> dict[str, Argument]:
    reads = [Ref(value) for value in node.reads()] or [Ref(0)]
    made: dict[str, Argument] = {}
    for name in sorted(OPS[op].arguments):
        if name in OPS[op].pinned:
            made[name] = OPS[op].pinned[name]
        elif name in node.arguments:
            made[name] = node.arguments[name]
        elif name in _TENSORS:
            made[name] = rng.choice(reads)
        else:
            made[name] = rng.choice((0, 1, 2, 1.0, None, False, (1, 1), (2,), rng.choice(reads)))
    return made


_TENSORS = frozenset(
    [
        "self",
        "other",
        "input",
        "weight",
        "bias",
        "mat1",
        "mat2",
        "batch1",
        "batch2",
        "vec2",
        "query",
        "key",
        "value",
        "target",
        "indices",
        "index",
        "mask",
        "condition",
        "end",
        "tensor1",
        "tensor2",
        "x1",
        "x2",
        "running_mean",
        "running_var",
    ]
)


def _change_node(graph: Graph, rng: random.Random) -> Graph:
    index = rng.randrange(len(graph.nodes))
    node = graph.nodes[index]
    match rng.randrange(4):
        case 0:
            node = replace(node, first=node.first + rng.choice((-1, 1, 1000, -(1 << 40))))
        case 1:
            node = replace(node, count=rng.choice((0, 2, 3, 64, 65, 1 << 40, -1)))
        case 2:
            node = replace(node, arguments={**node.arguments, rng.choice(("out", "dtype", "self", "")): _argument(graph, rng)})
        case _:
            node = replace(node, arguments=dict(list(node.arguments.items())[1:]))
    return _with_node(graph, index, node)


def _change_type(graph: Graph, rng: random.Random) -> Graph:
    value = rng.randrange(len(graph.types))
    item = graph.types[value]
    match rng.randrange(3):
        case 0:
            shape = list(item.shape) or [1]
            shape[rng.randrange(len(shape))] = rng.choice((*INTEGERS, 2, 3, 4, 6, 8))
            item = replace(item, shape=tuple(shape))
        case 1:
            item = replace(item, dtype=rng.choice((*DTYPE_BYTES, "complex64", "os")))
        case _:
            item = replace(item, grad=not item.grad)
    return replace(graph, types=(*graph.types[:value], item, *graph.types[value + 1 :]))


def _change_parameter(graph: Graph, rng: random.Random) -> Graph:
    index = rng.randrange(len(graph.parameters))
    parameter = graph.parameters[index]
    match rng.randrange(4):
        case 0:
            parameter = replace(parameter, trainable=not parameter.trainable)
        case 1:
            parameter = replace(parameter, update=rng.choice((None, rng.randrange(len(graph.types)), -1, 1 << 40)))
        case 2:
            rule = Rule(rng.choice((*RULE_KINDS, "eval")), rng.choice(FLOATS), rng.choice(FLOATS))
            parameter = replace(parameter, rule=rule)
        case _:
            parameter = Parameter(rng.choice(("", "x", "a\x00b", graph.parameters[0].name)), parameter.trainable)
    return replace(graph, parameters=(*graph.parameters[:index], parameter, *graph.parameters[index + 1 :]))


def _change_outline(graph: Graph, rng: random.Random) -> Graph:
    match rng.randrange(5):
        case 0:
            return replace(graph, outputs=(rng.randrange(len(graph.types)),))
        case 1:
            return replace(graph, outputs=rng.choice(((), (0, 1), (-1,), (1 << 40,))))
        case 2:
            return replace(graph, opset=rng.choice((0, 2, -1, 1 << 70)))
        case 3:
            return replace(graph, types=graph.types[: rng.randint(1, len(graph.types))])
        case _:
            nodes = list(graph.nodes)
            left, right = rng.randrange(len(nodes)), rng.randrange(len(nodes))
            nodes[left], nodes[right] = nodes[right], nodes[left]
            return replace(graph, nodes=tuple(nodes))


_MUTATIONS: tuple[Callable[[Graph, random.Random], Graph], ...] = (
    _change_argument,
    _change_argument,
    _change_argument,
    _change_operator,
    _change_operator,
    _change_node,
    _change_type,
    _change_parameter,
    _change_outline,
)


def _with_types_corrected(graph: Graph) -> Graph:
    """Declare what the operators really give, as far as they run: such a mutant tells the truth."""
    types = list(graph.types)
    try:
        _structure_only(graph)
        with fake_tensors():
            for _, node, outputs in fake_run(graph, fake_leaves(graph)):
                for value, output in zip(node.outputs, outputs, strict=False):
                    types[value] = type_of(output)
    except (GraphError, *OPERATOR_ERRORS):
        pass
    return replace(graph, types=tuple(types))


def _structure_only(graph: Graph) -> None:
    """The parts of the check that the fuzzer itself needs before it runs fake tensors: no endless lists of outputs."""
    for node in graph.nodes:
        size = node.arguments.get("split_size", node.arguments.get("chunks", 1))
        if not isinstance(size, int) or not 0 < size < 64 or node.op not in OPS:
            raise GraphError("not worth correcting")
