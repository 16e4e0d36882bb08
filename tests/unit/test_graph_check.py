"""What a stranger's graph must not do, each refused before a tensor exists."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusion_p2p.errors import GraphError
from fusion_p2p.graph.capture import capture
from fusion_p2p.graph.check import Limits, check
from fusion_p2p.graph.opset import IndexBound, index_bounds
from fusion_p2p.graph.schema import Graph, Node, Parameter, Ref, Rule, TensorType
from fusion_p2p.models.catalogue import build
from tests.unit.graph_builder import GraphBuilder

X, W, Y, LOSS = range(4)
MATRIX = TensorType((4, 6), "float32", False)


def small() -> Graph:
    """y = x * w; loss = sum y."""
    builder = GraphBuilder({"x": torch.ones(4, 6)}, {"w": torch.ones(4, 6)}, {})
    product = builder.add("mul.Tensor", self=builder.ref("x"), other=builder.ref("w"))
    return builder.graph(builder.add("sum", self=product, dtype=None))


def with_node(op: str, output: TensorType, **arguments: Any) -> Graph:
    """The small graph with one more node, that nothing reads, behind the product."""
    graph = small()
    product, total = graph.nodes
    total = dataclasses.replace(total, first=total.first + 1)
    added = Node(op, arguments, Y + 1, 1)
    types = (*graph.types[: Y + 1], output, graph.types[LOSS])
    return dataclasses.replace(graph, nodes=(product, added, total), types=types, outputs=(LOSS + 1,))


def with_wide_loss(size: int) -> Graph:
    """The mean squared error of a column and a row."""
    column, row = TensorType((size, 1), "float32", True), TensorType((1, size), "float32", False)
    parameters = (Parameter("w", True),)
    loss = Node("mse_loss", {"self": Ref(W), "target": Ref(X), "reduction": 1}, 2, 1)
    return Graph(1, ("x",), parameters, (loss,), (row, column, TensorType((), "float32", True)), (2,))


def with_parameter(parameter: Parameter) -> Graph:
    return dataclasses.replace(small(), parameters=(parameter,))


def with_type(value: int, item: TensorType) -> Graph:
    types = list(small().types)
    types[value] = item
    return dataclasses.replace(small(), types=tuple(types))


def with_first_node(**changes: Any) -> Graph:
    graph = small()
    return dataclasses.replace(graph, nodes=(dataclasses.replace(graph.nodes[0], **changes), graph.nodes[1]))


def test_the_small_graph_is_legal() -> None:
    check(small())
    check(with_node("relu", dataclasses.replace(MATRIX, grad=True), self=Ref(Y)))


REFUSED: dict[str, tuple[Callable[[], Graph], str]] = {
    "another opset": (lambda: dataclasses.replace(small(), opset=2), "operator set 2"),
    "no nodes": (lambda: dataclasses.replace(small(), nodes=(), types=small().types[:2]), "nodes"),
    "one name twice": (lambda: with_parameter(Parameter("x", True)), "names"),
    "an alias that is a name": (lambda: with_parameter(Parameter("w", True, aliases=("x",))), "names"),
    "an empty name": (lambda: with_parameter(Parameter("", True)), "names"),
    "an operator of the system": (lambda: with_first_node(op="os.system"), "os.system"),
    "an attribute of an operator": (lambda: with_first_node(op="__class__"), "not in the operator table"),
    "an operator in place": (lambda: with_first_node(op="mul_.Tensor"), "not in the operator table"),
    "a missing argument": (lambda: with_first_node(arguments={"self": Ref(X)}), "other"),
    "a surplus argument": (lambda: with_first_node(arguments={"self": Ref(X), "other": Ref(W), "out": Ref(X)}), "out"),
    "a value of the future": (lambda: with_first_node(arguments={"self": Ref(X), "other": Ref(Y)}), "not computed before"),
    "an output number taken": (lambda: with_first_node(first=X), "numbered wrongly"),
    "no outputs": (lambda: with_first_node(count=0), "numbered wrongly"),
    "too many outputs": (lambda: with_first_node(count=65), "numbered wrongly"),
    "a missing type": (lambda: dataclasses.replace(small(), types=small().types[:-1]), "declares 3 types"),
    "a huge integer": (lambda: with_node("mul.Tensor", MATRIX, self=Ref(X), other=2**63), "cannot be"),
    "a long list": (lambda: with_node("reshape", MATRIX, self=Ref(X), shape=(1,) * 257), "257 items"),
    "not a number": (lambda: with_node("mul.Tensor", MATRIX, self=Ref(X), other=float("nan")), "cannot be"),
    "a word that is no dtype": (lambda: with_node("sum", MATRIX, self=Ref(X), dtype="os"), "'os'"),
    "a number as dtype": (lambda: with_node("sum", MATRIX, self=Ref(X), dtype=1), "dtype cannot be '1'"),
    "a word of another operator": (lambda: with_node("gelu", MATRIX, self=Ref(X), approximate="constant"), "constant"),
    "a reduction that is none": (
        lambda: with_node("mse_loss", MATRIX, self=Ref(X), target=Ref(W), reduction=-2),
        "reduction cannot be '-2'",
    ),
    "a matrix behind one number": (
        lambda: with_wide_loss(1 << 17),
        "takes 68719476736 bytes to run",
    ),
    "a sparse gradient": (
        lambda: with_node("gather", MATRIX, self=Ref(X), dim=0, index=Ref(X), sparse_grad=True),
        "sparse_grad can only be False",
    ),
    "a difference repeated for ever": (
        lambda: with_node("diff", MATRIX, self=Ref(X), n=1 << 40, dim=0, prepend=None, append=None),
        "n can only be 1",
    ),
    "an unknown dtype": (lambda: with_type(X, TensorType((4, 6), "complex64", False)), "illegal"),
    "rank 9": (lambda: with_type(X, TensorType((1,) * 9, "float32", False)), "illegal"),
    "a negative size": (lambda: with_type(X, TensorType((-4, 6), "float32", False)), "illegal"),
    "an empty value": (lambda: with_type(X, TensorType((0, 6), "float32", False)), "illegal"),
    "an endless value": (lambda: with_type(X, TensorType((1 << 32,), "uint8", False)), "illegal"),
    "a value of 16 GiB": (lambda: with_type(X, TensorType((1 << 31, 2), "float32", False)), "the limit is"),
    "nine petabytes from nothing": (
        lambda: with_node("full", TensorType((4,), "uint8", False), size=(1 << 31, 1 << 22), fill_value=0, dtype="uint8"),
        "gives uint8",
    ),
    "an integer with a gradient": (lambda: with_type(Y, TensorType((4, 6), "int64", True)), "cannot have a gradient"),
    "an input with a gradient": (lambda: with_type(X, dataclasses.replace(MATRIX, grad=True)), "cannot have a gradient"),
    "a lie about a shape": (lambda: with_type(Y, TensorType((6, 4), "float32", True)), "declared is float32[6, 4]"),
    "a lie about a dtype": (lambda: with_type(Y, TensorType((4, 6), "float16", True)), "declared is float16"),
    "a lie about a gradient": (lambda: with_type(Y, MATRIX), "without gradient"),
    "shapes that do not fit": (lambda: with_node("matmul", MATRIX, self=Ref(X), other=Ref(X)), "RuntimeError"),
    "text where a tensor belongs": (lambda: with_node("relu", MATRIX, self=1), "relu"),
    "a billion outputs": (
        lambda: with_node("split.Tensor", MATRIX, self=Ref(X), split_size=1, dim=1),
        "does not have 1 outputs",
    ),
    "a split that never ends": (lambda: with_node("split.Tensor", MATRIX, self=Ref(X), split_size=0, dim=1), "outputs"),
    "a size by content": (lambda: with_node("index.Tensor", MATRIX, self=Ref(X), indices=(Ref(Y + 1),)), "not computed"),
    "a parameter without gradient": (lambda: with_type(W, MATRIX), "trainable"),
    "a rule that is none": (lambda: with_parameter(Parameter("w", True, rule=Rule("exec", 0.0))), "unknown rule"),
    "a rule without end": (lambda: with_parameter(Parameter("w", True, rule=Rule("constant", float("inf")))), "rule"),
    "a negative deviation": (lambda: with_parameter(Parameter("w", True, rule=Rule("normal", 0.0, -1.0))), "negative"),
    "an update of a trained parameter": (lambda: with_parameter(Parameter("w", True, update=Y)), "cannot be updated"),
    "no output": (lambda: dataclasses.replace(small(), outputs=()), "one output"),
    "two outputs": (lambda: dataclasses.replace(small(), outputs=(LOSS, Y)), "one output"),
    "a loss that is a parameter": (lambda: dataclasses.replace(small(), outputs=(W,)), "one output"),
    "a loss that is a matrix": (lambda: dataclasses.replace(small(), outputs=(Y,)), "one number"),
}


@pytest.mark.row(34)
@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind: str) -> None:
    make, text = REFUSED[kind]
    with pytest.raises(GraphError) as refusal:
        check(make())
    assert text in str(refusal.value)
    assert len(str(refusal.value)) < 500


def test_a_buffer_keeps_its_type() -> None:
    builder = GraphBuilder({}, {"w": torch.ones(2)}, {"b": torch.zeros(2)})
    builder.update("b", builder.add("sum", self=builder.ref("b"), dtype=None))
    with pytest.raises(GraphError, match="another type"):
        check(builder.graph(builder.add("sum", self=builder.ref("w"), dtype=None)))


def test_limits_are_the_callers() -> None:
    check(small(), Limits(value_bytes=96, total_bytes=400))
    with pytest.raises(GraphError, match="96 bytes, the limit is 95"):
        check(small(), Limits(value_bytes=95, total_bytes=400))
    with pytest.raises(GraphError, match="take 292 bytes"):
        check(small(), Limits(value_bytes=96, total_bytes=291))


def test_refusals_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(GraphError):
        check(with_node("matmul", MATRIX, self=Ref(X), other=Ref(X)))
    assert caplog.records == []


def test_index_bounds_reach_the_inputs() -> None:
    options = {"layers": 1, "width": 8, "heads": 1, "context": 6, "vocabulary": 50, "dropout": 0.0}
    built = build("gpt2", options)
    ids = torch.zeros(2, 6, dtype=torch.int64)
    graph = capture(built.module, {"tokens": ids, "targets": ids}, built.rules).graph
    bounds = index_bounds(graph)
    tokens, targets = bounds[graph.inputs.index("tokens")], bounds[graph.inputs.index("targets")]
    assert tokens == (0, 50, None)
    assert targets == (0, 50, -100)
    assert tokens.first_illegal(torch.tensor([0, 49])) is None
    assert tokens.first_illegal(torch.tensor([[3, 50]])) == 50
    assert tokens.first_illegal(torch.tensor([-1])) == -1
    assert targets.first_illegal(torch.tensor([-100, 3])) is None
    assert targets.first_illegal(torch.tensor([-99])) == -99


def test_index_bounds_of_bytes() -> None:
    data = torch.tensor([0, 100, 255], dtype=torch.uint8)
    assert IndexBound(0, 50257, -100).first_illegal(data) is None
    assert IndexBound(-300, 256).first_illegal(data) is None
    assert IndexBound(0, 255).first_illegal(data) == 255


def test_index_bounds_of_every_reader_hold() -> None:
    ids = torch.zeros(3, dtype=torch.int64)
    builder = GraphBuilder({"ids": ids}, {"big": torch.ones(9, 2), "small": torch.ones(5, 2)}, {})
    reversed_ids = builder.add("flip", self=builder.ref("ids"), dims=(0,))
    plain = {"padding_idx": -1, "scale_grad_by_freq": False, "sparse": False}
    first = builder.add("embedding", weight=builder.ref("big"), indices=builder.ref("ids"), **plain)
    second = builder.add("index_select", self=builder.ref("small"), dim=0, index=reversed_ids)
    third = builder.add("index.Tensor", self=builder.ref("small"), indices=(builder.ref("ids"),))
    total = builder.add("sum", self=builder.add("stack", tensors=(first, second, third), dim=0), dtype=None)
    assert index_bounds(builder.graph(total))[0] == (0, 5, None)
