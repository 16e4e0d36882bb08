from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusion_p2p.errors import SliceFailed
from fusion_p2p.execute.state import HALF_APPLIED, SliceState, required_tensors
from fusion_p2p.graph.initial import initial_value
from fusion_p2p.graph.schema import Graph, Parameter, Rule, TensorType
from fusion_p2p.graph.slices import Slice, cut
from fusion_p2p.wire.job_messages import OptimiserSettings, TrainingSettings
from tests.unit.graph_builder import GraphBuilder

CPU = torch.device("cpu")
ADAM = TrainingSettings(seed=5, optimiser=OptimiserSettings(name="adamw"))
SGD = TrainingSettings(seed=5, optimiser=OptimiserSettings(name="sgd", momentum=0.9))


def example() -> tuple[Graph, Slice, dict[str, Tensor]]:
    """mean(x * scale + shift), with `shift` a buffer."""
    builder = GraphBuilder({"x": torch.ones(3)}, {"scale": torch.arange(3.0)}, {"shift": torch.full((3,), 2.0)})
    scaled = builder.add("mul.Tensor", self=builder.ref("x"), other=builder.ref("scale"))
    shifted = builder.add("add.Tensor", self=scaled, other=builder.ref("shift"), alpha=1)
    graph = builder.graph(builder.add("mean", self=shifted, dtype=None))
    return graph, cut(graph, [0, 0, 0]).slices[0], builder.weights


def test_initial_state_takes_weights_by_name_and_zero_moments():
    graph, part, weights = example()
    state = SliceState.initial(graph, part, ADAM, CPU, weights)
    named = state.named_tensors()
    assert list(named) == list(required_tensors(graph, part, ADAM))
    assert list(named) == ["parameter/scale", "parameter/shift", "first_moment/scale", "second_moment/scale"]
    assert torch.equal(named["parameter/scale"], weights["scale"])
    assert torch.equal(named["first_moment/scale"], torch.zeros(3))
    assert state.step == 0
    assert {value: tensor.requires_grad for value, tensor in state.parameters.items()} == {1: True, 2: False}


def test_initial_state_follows_the_rule_of_the_graph_and_needs_no_weight():
    graph, part, weights = example()
    rule = Rule("normal", 0.0, 0.02)
    parameters = (Parameter("scale", True, rule=rule), graph.parameters[1])
    graph = Graph(graph.opset, graph.inputs, parameters, graph.nodes, graph.types, graph.outputs)
    state = SliceState.initial(graph, part, SGD, CPU, {"shift": weights["shift"]})
    assert torch.equal(state.parameters[1], initial_value(rule, "scale", TensorType((3,), "float32", True), 5))
    assert list(state.moments) == ["momentum"]


def test_state_does_not_share_memory_with_the_weights():
    graph, part, weights = example()
    state = SliceState.initial(graph, part, SGD, CPU, weights)
    weights["scale"].fill_(9)
    assert torch.equal(state.parameters[1], torch.arange(3.0))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"scale": None}, r"slice 0 cannot start: parameter/scale is missing \(1 of 4 tensors\)"),
        ({"scale": torch.zeros(4)}, r"parameter/scale is float32 of shape \[4\], not float32 of shape \[3\]"),
        ({"shift": torch.zeros(3, dtype=torch.float64)}, "parameter/shift is float64"),
    ],
)
def test_missing_or_other_weights_are_refused(change: dict[str, Tensor | None], sentence: str):
    graph, part, weights = example()
    changed = {name: tensor for name, tensor in (weights | change).items() if tensor is not None}
    with pytest.raises(SliceFailed, match=sentence):
        SliceState.initial(graph, part, ADAM, CPU, changed)


@pytest.mark.row(15)
def test_snapshot_is_a_copy_with_its_step_and_restores_to_the_same():
    graph, part, weights = example()
    state = SliceState.initial(graph, part, ADAM, CPU, weights)
    state.moments["first_moment"][1].fill_(0.5)
    state.step = 12
    snapshot = state.snapshot()
    state.parameters[1].detach().fill_(7)
    assert torch.equal(snapshot.tensors["parameter/scale"], torch.arange(3.0))
    assert snapshot.num_bytes == 4 * 3 * 4
    again = SliceState.restore(graph, part, ADAM, CPU, snapshot.step, snapshot.tensors)
    assert again.step == 12
    assert all(torch.equal(tensor, snapshot.tensors[name]) for name, tensor in again.named_tensors().items())
    assert again.parameters[1].requires_grad


def test_restore_is_strict():
    graph, part, weights = example()
    tensors = dict(SliceState.initial(graph, part, ADAM, CPU, weights).snapshot().tensors)
    with pytest.raises(SliceFailed, match="momentum/scale does not belong to it"):
        SliceState.restore(graph, part, ADAM, CPU, 3, tensors | {"momentum/scale": torch.zeros(3)})
    with pytest.raises(SliceFailed, match="second_moment/scale is float32 of shape"):
        SliceState.restore(graph, part, ADAM, CPU, 3, tensors | {"second_moment/scale": torch.zeros(2)})
    del tensors["first_moment/scale"]
    with pytest.raises(SliceFailed, match="first_moment/scale is missing"):
        SliceState.restore(graph, part, ADAM, CPU, 3, tensors)


def test_half_applied_state_is_not_kept():
    graph, part, weights = example()
    state = SliceState.initial(graph, part, SGD, CPU, weights)
    state.step = HALF_APPLIED
    with pytest.raises(SliceFailed, match="half-way"):
        state.snapshot()
