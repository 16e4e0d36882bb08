"""The trust boundary: whether a stranger's graph may run here, decided before any tensor exists.

In this order, each step relying on the ones before: structure (known operators with exactly their arguments, numbering, legal
words), declared sizes against the limits, then every operator on fake tensors, whose outputs must equal the declared types.
What a check cannot see is the content of tensors: `opset.index_bounds` says what to compare when they arrive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusion_p2p.errors import GraphError
from fusion_p2p.graph.fake import describe, fake_leaves, fake_run, fake_tensors, type_of
from fusion_p2p.graph.initial import RULE_KINDS
from fusion_p2p.graph.opset import OPS, Op
from fusion_p2p.graph.schema import (
    DTYPE_BYTES,
    MAX_DIMENSION,
    MAX_LIST,
    MAX_NODE_OUTPUTS,
    MAX_NODES,
    MAX_RANK,
    OPSET,
    Argument,
    Graph,
    Node,
    Parameter,
    Ref,
    Scalar,
    TensorType,
)
from fusion_p2p.graph.workspace import workspace_bytes

_FLOATS = ("float32", "float16", "bfloat16")
_MAX_INTEGER = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What a graph may occupy, by its declared types: each value, all values, and any node while it runs."""

    value_bytes: int = 4 << 30
    total_bytes: int = 256 << 30
    workspace_bytes: int = 8 << 30


DEFAULT_LIMITS = Limits()


def check(graph: Graph, limits: Limits = DEFAULT_LIMITS) -> None:
    """Return if the graph is well formed, uses only known operators, tells the truth about its types and keeps the limits.

    GraphError, and nothing else, otherwise; its text names the node or value.
    """
    _check_counts(graph)
    _check_nodes(graph)
    _check_types(graph, limits)
    for index, parameter in enumerate(graph.parameters):
        _check_parameter(graph, graph.first_parameter + index, parameter)
    _check_output(graph)
    _check_workspace(graph, limits)
    _prove_types(graph)


def _check_counts(graph: Graph) -> None:
    if graph.opset != OPSET:
        raise GraphError(f"the graph uses operator set {graph.opset}, this version of fusion_p2p knows {OPSET}")
    if not 0 < len(graph.nodes) <= MAX_NODES:
        raise GraphError(f"a graph has 1 to {MAX_NODES} nodes, not {len(graph.nodes)}")
    if len(graph.inputs) + len(graph.parameters) > MAX_NODES:
        raise GraphError(f"a graph has at most {MAX_NODES} inputs and parameters")
    names = [*graph.inputs, *(name for item in graph.parameters for name in (item.name, *item.aliases))]
    if len(set(names)) != len(names) or "" in names:
        raise GraphError("inputs and parameters need names, each different")


def _check_nodes(graph: Graph) -> None:
    value = graph.first_node_value
    for index, node in enumerate(graph.nodes):
        op = OPS.get(node.op)
        if op is None:
            raise GraphError(f"{describe(index, node)} is not in the operator table")
        outputs = node.count if op.outputs is None else op.outputs
        if node.first != value or node.count != outputs or not 1 <= node.count <= MAX_NODE_OUTPUTS:
            raise GraphError(f"{describe(index, node)}: its outputs are numbered wrongly")
        if any(not 0 <= read < value for read in node.reads()):
            raise GraphError(f"{describe(index, node)} reads a value that is not computed before it")
        _check_arguments(index, node, op)
        value += node.count
    if value != len(graph.types):
        raise GraphError(f"the graph has {value} values, but declares {len(graph.types)} types")


def _check_arguments(index: int, node: Node, op: Op) -> None:
    if node.arguments.keys() != op.arguments:
        odd = ", ".join(sorted(repr(name[:64]) for name in node.arguments.keys() ^ op.arguments))
        raise GraphError(f"{describe(index, node)}: missing or unknown arguments {odd}")
    for name, only in op.pinned.items():
        if node.arguments[name] is not only and node.arguments[name] != only:
            raise GraphError(f"{describe(index, node)}: {name} can only be {only}")
    for name, argument in node.arguments.items():
        items = argument if isinstance(argument, tuple) else (argument,)
        if len(items) > MAX_LIST:
            raise GraphError(f"{describe(index, node)}: {name} has {len(items)} items, at most {MAX_LIST} are allowed")
        for item in items:
            if not _is_legal(op, name, item):
                raise GraphError(f"{describe(index, node)}: {name} cannot be {str(item)[:64]!r}")


def _is_legal(op: Op, name: str, item: Scalar) -> bool:
    if isinstance(item, str):
        return item in (DTYPE_BYTES if name == "dtype" else op.strings)
    if name == "dtype":
        return item is None
    if name == "reduction":  # torch takes other numbers, too, and its fake tensors disagree with the real ones about them
        return item in (0, 1, 2)
    if isinstance(item, float):
        return not math.isnan(item)
    return not isinstance(item, int) or abs(item) <= _MAX_INTEGER


def _check_types(graph: Graph, limits: Limits) -> None:
    total = 0
    for value, item in enumerate(graph.types):
        legal_shape = len(item.shape) <= MAX_RANK and all(1 <= size <= MAX_DIMENSION for size in item.shape)
        if item.dtype not in DTYPE_BYTES or not legal_shape:
            raise GraphError(f"value {value} has an illegal shape or dtype")
        if item.grad and (item.dtype not in _FLOATS or graph.is_input(value)):
            raise GraphError(f"value {value} cannot have a gradient")
        if item.num_bytes > limits.value_bytes:
            raise GraphError(f"value {value} takes {item.num_bytes} bytes, the limit is {limits.value_bytes}")
        total += item.num_bytes
    if total > limits.total_bytes:
        raise GraphError(f"the values of the graph take {total} bytes, the limit is {limits.total_bytes}")


def _check_parameter(graph: Graph, value: int, parameter: Parameter) -> None:
    item = graph.types[value]
    name = repr(parameter.name[:80])
    if parameter.trainable != item.grad:
        raise GraphError(f"parameter {name} is trainable or has a gradient, but not both")
    rule = parameter.rule
    if rule is not None and (rule.kind not in RULE_KINDS or not math.isfinite(rule.a) or not math.isfinite(rule.b)):
        raise GraphError(f"parameter {name} has an unknown rule for its first value")
    if rule is not None and rule.kind == "normal" and rule.b < 0:
        raise GraphError(f"parameter {name} has a rule with a negative standard deviation")
    if parameter.update is None:
        return
    if parameter.trainable or not graph.first_node_value <= parameter.update < len(graph.types):
        raise GraphError(f"parameter {name} cannot be updated by value {parameter.update}")
    if graph.types[parameter.update] != item:
        raise GraphError(f"buffer {name} is updated by a value of another type")


def _check_output(graph: Graph) -> None:
    if len(graph.outputs) != 1 or not graph.first_node_value <= graph.outputs[0] < len(graph.types):
        raise GraphError("a graph has one output, the loss, computed by a node")
    loss = graph.types[graph.outputs[0]]
    if loss.shape != () or not loss.grad:
        raise GraphError("the loss has to be one number through which a gradient flows")


def _check_workspace(graph: Graph, limits: Limits) -> None:
    for index, node in enumerate(graph.nodes):
        num_bytes = workspace_bytes(graph, node)
        if num_bytes > limits.workspace_bytes:
            raise GraphError(f"{describe(index, node)} takes {num_bytes} bytes to run, the limit is {limits.workspace_bytes}")


def _prove_types(graph: Graph) -> None:
    """Run every operator on fake tensors: a lie about a type, or arguments that do not fit, surface here."""
    for index, node in enumerate(graph.nodes):
        if _output_count(graph, node) != node.count:
            raise GraphError(f"{describe(index, node)} does not have {node.count} outputs")
    with fake_tensors():
        for index, node, outputs in fake_run(graph, fake_leaves(graph)):
            if len(outputs) != node.count:
                raise GraphError(f"{describe(index, node)} has {len(outputs)} outputs, {node.count} are declared")
            for value, output in zip(node.outputs, outputs, strict=True):
                found = type_of(output)
                if found != graph.types[value]:
                    raise GraphError(f"{describe(index, node)} gives {_text(found)}, declared is {_text(graph.types[value])}")


def _text(item: TensorType) -> str:
    return f"{item.dtype}{list(item.shape)} {'with' if item.grad else 'without'} gradient"


def _output_count(graph: Graph, node: Node) -> int:
    """How many outputs the arguments imply: torch would make a billion of them before they could be counted."""
    if OPS[node.op].outputs is not None:
        return node.count
    if node.op == "split_with_sizes":
        sizes = node.arguments["split_sizes"]
        return len(sizes) if isinstance(sizes, tuple) else 0
    size = _dimension(graph, node.arguments["self"], node.arguments["dim"])
    match node.op:
        case "split.Tensor":
            return _pieces(size, node.arguments["split_size"])
        case "chunk":
            chunks = node.arguments["chunks"]
            return _pieces(size, -(-size // chunks)) if isinstance(chunks, int) and chunks > 0 else 0
        case "unbind.int":
            return size
    raise GraphError(f"operator {node.op} has no rule for the number of its outputs")


def _pieces(size: int, piece: Argument) -> int:
    return -(-size // piece) if isinstance(piece, int) and piece > 0 else 0


def _dimension(graph: Graph, argument: Argument, dim: Argument) -> int:
    """The size of one dimension of a value; 0 when there is none."""
    if not isinstance(argument, Ref) or not isinstance(dim, int):
        return 0
    shape = graph.types[argument.value].shape
    return shape[dim] if -len(shape) <= dim < len(shape) else 0
