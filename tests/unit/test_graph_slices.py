"""Cutting graphs: who computes, holds, sends and receives what."""

from __future__ import annotations

import random

import pytest
import torch

from fusion_p2p.errors import GraphError
from fusion_p2p.graph.opset import apply
from fusion_p2p.graph.schema import Graph, Ref
from fusion_p2p.graph.slices import Crossing, Cut, constant_nodes, cut
from tests.training.cuts import random_cut
from tests.unit.graph_builder import GraphBuilder
from tests.unit.graph_running import CPU, run


def add(builder: GraphBuilder, left: Ref, right: Ref) -> Ref:
    return builder.add("add.Tensor", self=left, other=right, alpha=1)


def branching() -> GraphBuilder:
    """x -> [0] a = x * w -> [1] b = relu a -> [2] c = tanh b -> [3] d = a + c -> [4] loss = sum d."""
    return GraphBuilder({"x": torch.ones(2)}, {"w": torch.tensor([1.0, 2.0])}, {})


def branching_graph() -> Graph:
    builder = branching()
    a = builder.add("mul.Tensor", self=builder.ref("x"), other=builder.ref("w"))
    c = builder.add("tanh", self=builder.add("relu", self=a))
    return builder.graph(builder.add("sum", self=add(builder, a, c), dtype=None))


@pytest.mark.row(25)
def test_a_value_may_skip_slices_and_have_several_readers() -> None:
    parts = cut(branching_graph(), [0, 1, 1, 2, 2])
    assert parts.edges == (Crossing(2, 0, 1), Crossing(2, 0, 2), Crossing(4, 1, 2))
    first, second, third = parts.slices
    assert (first.nodes, first.inputs, first.parameters, first.sends) == ((0,), (0,), (1,), (2,))
    assert (second.nodes, second.receives, second.sends, second.parameters) == ((1, 2), (2,), (4,), ())
    assert (third.receives, third.sends, third.outputs) == ((2, 4), (), (6,))
    assert first.outputs == second.outputs == ()


def test_a_cut_need_not_follow_topological_order() -> None:
    builder = GraphBuilder({"x": torch.ones(2)}, {"w": torch.ones(2)}, {})
    left = builder.add("mul.Tensor", self=builder.ref("x"), other=builder.ref("w"))
    right = builder.add("relu", self=builder.ref("x"))
    loss = builder.add("sum", self=add(builder, left, builder.add("tanh", self=right)), dtype=None)
    parts = cut(builder.graph(loss), [1, 0, 0, 1, 1])
    assert [part.nodes for part in parts.slices] == [(1, 2), (0, 3, 4)]
    assert len(parts.edges) == 1


@pytest.mark.row(26)
def test_tied_parameters_live_in_every_slice_that_reads_them() -> None:
    builder = branching()
    first = builder.add("mul.Tensor", self=builder.ref("x"), other=builder.ref("w"))
    second = builder.add("mul.Tensor", self=first, other=builder.ref("w"))
    parts = cut(builder.graph(builder.add("sum", self=second, dtype=None)), [0, 1, 1])
    assert parts.holders(1) == (0, 1)


def with_constants() -> Graph:
    builder = branching()
    mask = builder.add("full", size=(2,), fill_value=2, dtype="float32")
    scaled_mask = builder.add("neg", self=mask)
    first = builder.add("mul.Tensor", self=builder.ref("x"), other=scaled_mask)
    noise = builder.add("dropout", input=scaled_mask, p=0.5)
    second = builder.add("mul.Tensor", self=add(builder, first, noise), other=builder.ref("w"))
    third = builder.add("mul.Tensor", self=second, other=scaled_mask)
    return builder.graph(builder.add("sum", self=third, dtype=None))


def test_constants_are_copied_and_randomness_is_sent() -> None:
    graph = with_constants()
    assert constant_nodes(graph) == {0, 1}
    parts = cut(graph, [0, 0, 0, 1, 2, 2, 2, 2])
    assert [part.nodes for part in parts.slices] == [(0, 1, 2), (0, 1, 3), (0, 1, 4, 5, 6, 7)]
    crossing = {graph.nodes[node].op for edge in parts.edges for node in range(8) if edge.value in graph.nodes[node].outputs}
    assert crossing == {"mul.Tensor", "dropout"}


def test_dropout_with_probability_zero_is_a_constant() -> None:
    builder = branching()
    mask = builder.add("dropout", input=builder.add("full", size=(2,), fill_value=1, dtype="float32"), p=0.0)
    product = builder.add("mul.Tensor", self=builder.ref("w"), other=mask)
    assert constant_nodes(builder.graph(builder.add("sum", self=product, dtype=None))) == {0, 1}


def counting(reader: bool = False) -> Graph:
    """A loss, and a counter that grows by one; with `reader` the loss reads the counter, too."""
    builder = GraphBuilder({"x": torch.ones(2)}, {"w": torch.ones(2)}, {"count": torch.tensor(0.0)})
    builder.update("count", builder.add("add.Tensor", self=builder.ref("count"), other=1, alpha=1))
    product = builder.add("mul.Tensor", self=builder.ref("x"), other=builder.ref("w"))
    if reader:
        product = builder.add("mul.Tensor", self=product, other=builder.ref("count"))
    return builder.graph(builder.add("sum", self=product, dtype=None))


def test_a_buffer_lives_where_its_update_is_computed() -> None:
    parts = cut(counting(), [1, 0, 1])
    assert [part.parameters for part in parts.slices] == [(1,), (2,)]
    assert parts.edges == (Crossing(4, 0, 1),)


@pytest.mark.row(29)
def test_an_updated_buffer_cannot_live_in_two_slices() -> None:
    cut(counting(reader=True), [1, 0, 1, 1])
    with pytest.raises(GraphError, match=r"buffer 'count' is updated, so slices \[0, 1\]"):
        cut(counting(reader=True), [0, 0, 1, 1])


def test_a_buffer_that_becomes_a_constant_is_updated_where_it_is_read() -> None:
    builder = GraphBuilder({"x": torch.ones(2)}, {"w": torch.ones(2)}, {"flag": torch.tensor(0.0)})
    builder.update("flag", builder.add("full", size=(), fill_value=1, dtype="float32"))
    product = builder.add("mul.Tensor", self=builder.ref("x"), other=builder.ref("w"))
    scaled = builder.add("mul.Tensor", self=product, other=builder.ref("flag"))
    parts = cut(builder.graph(builder.add("sum", self=scaled, dtype=None)), [0, 0, 1, 1])
    assert [part.nodes for part in parts.slices] == [(1,), (0, 2, 3)]
    assert parts.holders(2) == (1,)


@pytest.mark.parametrize(
    ("slice_of", "text"),
    [
        ([0, 0, 0, 0], "4 nodes, but the graph has 5"),
        ([0, 1, 0, 1, 1], "reads value 3 of the higher slice 1"),
        ([0, 0, 0, 2, 2], "slice 1 of 3 computes nothing"),
        ([0, 0, 0, -1, 0], "numbered from 0"),
    ],
)
def test_illegal_cuts_are_named(slice_of: list[int], text: str) -> None:
    with pytest.raises(GraphError, match=text):
        cut(branching_graph(), slice_of)


def test_an_empty_graph_has_no_cut() -> None:
    with pytest.raises(GraphError, match="at least one node"):
        cut(Graph(1, (), (), (), (), ()), [])


def forward_in_slices(
    graph: Graph, parts: Cut, weights: dict[str, torch.Tensor], feeds: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Run slice after slice, each seeing nothing but what its record says."""
    sent: dict[int, torch.Tensor] = {}
    for part in parts.slices:
        values = {value: feeds[graph.inputs[value]] for value in part.inputs}
        values |= {value: weights[graph.parameter(value).name] for value in part.parameters}
        values |= {value: sent[value] for value in part.receives}
        for index in part.nodes:
            node = graph.nodes[index]
            values.update(zip(node.outputs, apply(node, values, CPU, training=True), strict=True))
        sent |= {value: values[value] for value in (*part.sends, *part.outputs)}
    return sent[graph.outputs[0]]


def test_random_cuts_compute_the_same() -> None:
    rng = random.Random(5)
    for _ in range(30):
        builder = GraphBuilder({"x": torch.ones(3)}, {"w": torch.tensor([0.5, 1.0, 2.0])}, {})
        refs = [builder.ref("x"), builder.ref("w"), builder.add("full", size=(3,), fill_value=0.5, dtype="float32")]
        for _ in range(20):
            refs.append(builder.add("mul.Tensor", self=builder.add("tanh", self=rng.choice(refs)), other=rng.choice(refs)))
        total = builder.add("sum", self=builder.add("stack", tensors=tuple(refs), dim=0), dtype=None)
        graph = builder.graph(total)
        parts = cut(graph, random_cut(graph, rng, rng.randint(1, 8), rng.choice([0.0, 0.5])))
        feeds = {"x": torch.tensor([0.1, -0.2, 0.3])}
        expected = run(graph, builder.weights, feeds).loss
        assert torch.equal(forward_in_slices(graph, parts, builder.weights, feeds), expected)
        for edge in parts.edges:
            assert edge.source < edge.target
            assert edge.value in parts.slices[edge.source].sends
            assert edge.value in parts.slices[edge.target].receives
