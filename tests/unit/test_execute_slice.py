from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusion_p2p.errors import SliceFailed
from fusion_p2p.execute.slice import SliceExecutor, first_non_finite
from fusion_p2p.execute.state import SliceState
from fusion_p2p.graph.schema import Graph, Ref, TensorType
from fusion_p2p.graph.slices import cut
from fusion_p2p.wire.job_messages import OptimiserSettings, TrainingSettings
from tests.unit.graph_builder import GraphBuilder

CPU = torch.device("cpu")
SGD = TrainingSettings(seed=5, optimiser=OptimiserSettings(name="sgd"))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def executors(graph: Graph, slice_of: list[int], weights: dict[str, Tensor], **options: Any) -> list[SliceExecutor]:
    settings = options.pop("settings", SGD)
    options = {"micro_batches": 1, "recompute": False} | options
    parts = cut(graph, slice_of).slices
    states = [SliceState.initial(graph, part, settings, CPU, weights) for part in parts]
    return [SliceExecutor(graph, part, state, settings, **options) for part, state in zip(parts, states, strict=True)]


def chain() -> tuple[GraphBuilder, Graph]:
    """loss = mean((relu(x @ first) @ second) ** 2), nodes 0 to 4."""
    builder = GraphBuilder({"x": random(4, 3)}, {"first": random(3, 5, seed=1), "second": random(5, 2, seed=2)}, {})
    hidden = builder.add("relu", self=builder.add("mm", self=builder.ref("x"), mat2=builder.ref("first")))
    output = builder.add("square", self=builder.add("mm", self=hidden, mat2=builder.ref("second")))
    return builder, builder.graph(builder.add("mean", self=output, dtype=None))


def test_chain_of_slices_gives_the_bits_of_autograd():
    builder, graph = chain()
    low, high = executors(graph, [0, 0, 1, 1, 1], builder.weights, micro_batches=3)
    first, second = (builder.weights[name].clone().requires_grad_() for name in ("first", "second"))
    for micro_batch in range(3):
        x = random(4, 3, seed=10 + micro_batch)
        loss = (torch.relu(x @ first) @ second).square().mean()
        (loss / 3).backward()
        (value,) = low.forward(1, micro_batch, {0: x}).items()
        sent = high.forward(1, micro_batch, dict([value]))
        assert torch.equal(sent[graph.outputs[0]], loss.detach())
        gradients = high.backward(1, micro_batch, {})
        assert low.backward(1, micro_batch, {value[0]: [gradients[value[0]]]}) == {}
    assert torch.equal(low.shared(1), first.grad)
    assert torch.equal(high.shared(2), second.grad)
    assert low.squares([1])[0] == pytest.approx(float(first.grad.double().square().sum()), rel=1e-12)
    for executor in (low, high):
        executor.update(1, 0.5, 0.1)
    assert torch.allclose(low.state.parameters[1], first.detach() - 0.05 * first.grad)
    assert low.state.step == high.state.step == 1
    assert low.squares([1]) == (0.0,)


@pytest.mark.row(25)
def test_gradients_of_several_consumers_are_summed_in_order():
    builder, graph = chain()
    low = executors(graph, [0, 0, 1, 1, 1], builder.weights)[0]
    (value,) = low.forward(1, 0, {0: random(4, 3)})
    terms = [torch.full((4, 5), 1e8), torch.full((4, 5), -1e8), torch.full((4, 5), 1.0)]
    low.backward(1, 0, {value: [terms[0], None, terms[1], terms[2]]})
    in_order = low.shared(1).clone()
    low.abort_step()
    low.forward(1, 0, {0: random(4, 3)})
    low.backward(1, 0, {value: [terms[2]]})
    assert torch.equal(low.shared(1), in_order)


@pytest.mark.row(28)
def test_none_means_no_gradient_and_is_passed_on():
    builder, graph = chain()
    low, middle, _ = executors(graph, [0, 0, 1, 2, 2], builder.weights)
    (hidden,) = low.forward(1, 0, {0: random(4, 3)}).items()
    (product,) = middle.forward(1, 0, dict([hidden]))
    assert middle.backward(1, 0, {product: [None]}) == {hidden[0]: None}
    low.backward(1, 0, {hidden[0]: [None]})
    assert torch.equal(low.shared(1), torch.zeros(3, 5))
    before = low.state.parameters[1].detach().clone()
    low.update(1, 1.0, 0.1)
    assert torch.equal(low.state.parameters[1], before)


@pytest.mark.row(27)
def test_integers_and_booleans_cross_without_gradient():
    builder = GraphBuilder({"x": random(6)}, {"scale": random(6, seed=1)}, {})
    mask = builder.add("gt.Scalar", self=builder.ref("x"), other=0.0)
    index = builder.add("argmax", self=builder.ref("x"), dim=None, keepdim=False)
    scaled = builder.add("mul.Tensor", self=builder.ref("x"), other=builder.ref("scale"))
    masked = builder.add("masked_fill.Scalar", self=scaled, mask=mask, value=0.0)
    shifted = builder.add("add.Tensor", self=masked, other=index, alpha=1)
    graph = builder.graph(builder.add("sum", self=shifted, dtype=None))
    low, high = executors(graph, [0, 0, 0, 1, 1, 1], builder.weights)
    sent = low.forward(1, 0, {0: builder._tensors[0]})
    assert {str(sent[ref.value].dtype) for ref in (mask, index)} == {"torch.bool", "torch.int64"}
    high.forward(1, 0, sent)
    gradients = high.backward(1, 0, {})
    assert set(gradients) == {scaled.value}
    low.backward(1, 0, {scaled.value: [gradients[scaled.value]]})
    expected = torch.where(sent[mask.value], 0.0, builder._tensors[0])
    assert torch.equal(low.shared(1), expected)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.row(29)
def test_buffers_chain_over_micro_batches_and_wait_for_the_update(recompute: bool):
    """A buffer that counts: total += sum(x), read in the same forward pass, so recomputing must see the value of that time."""
    builder = GraphBuilder({"x": random(3)}, {"scale": torch.ones(1)}, {"total": torch.zeros(())})
    added = builder.add("sum", self=builder.ref("x"), dtype=None)
    total = builder.add("add.Tensor", self=builder.ref("total"), other=added, alpha=1)
    builder.update("total", total)
    scaled = builder.add("mul.Tensor", self=total, other=builder.ref("scale"))
    graph = builder.graph(builder.add("sum", self=scaled, dtype=None))
    (executor,) = executors(graph, [0, 0, 0, 0], builder.weights, micro_batches=3, recompute=recompute)
    batches = [torch.full((3,), float(number)) for number in (1, 2, 3)]
    losses = [float(executor.forward(1, number, {0: x})[graph.outputs[0]]) for number, x in enumerate(batches)]
    assert losses == [3.0, 9.0, 18.0]
    for micro_batch in range(3):
        executor.backward(1, micro_batch, {})
    assert float(executor.shared(1)) == pytest.approx((3 + 9 + 18) / 3)
    assert float(executor.state.parameters[2]) == 0
    executor.skip(1)
    assert float(executor.state.parameters[2]) == 0
    for micro_batch, x in enumerate(batches):
        executor.forward(2, micro_batch, {0: x})
        executor.backward(2, micro_batch, {})
    assert float(executor.evaluate(2, 0, {0: batches[0]})[graph.outputs[0]]) == 3
    executor.update(2, 1.0, 0.0)
    assert float(executor.state.parameters[2]) == 18


def test_evaluation_changes_nothing():
    builder, graph = chain()
    (executor,) = executors(graph, [0] * 5, builder.weights)
    executor.forward(1, 0, {0: random(4, 3)})
    before = executor.state.snapshot()
    generator = torch.get_rng_state()
    assert executor.evaluate(1, 0, {0: random(4, 3)}).keys() == {graph.outputs[0]}
    executor.backward(1, 0, {})
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(tensor, before.tensors[name]) for name, tensor in executor.state.snapshot().tensors.items())


@pytest.mark.parametrize(
    ("arrived", "sentence"),
    [
        ({}, "are missing or surplus"),
        ({0: random(4, 3), 1: random(3, 5)}, r"\[1\] are missing or surplus"),
        ({0: random(3, 4)}, r"value 0 is float32 of shape \[3, 4\], declared is float32 of shape \[4, 3\]"),
        ({0: random(4, 3).double()}, "value 0 is float64"),
        ({0: random(4, 3).half()}, "value 0 is float16"),
    ],
)
def test_values_of_another_type_are_refused(arrived: dict[int, Tensor], sentence: str):
    builder, graph = chain()
    (executor,) = executors(graph, [0] * 5, builder.weights)
    with pytest.raises(SliceFailed, match=sentence):
        executor.forward(1, 0, arrived)
    with pytest.raises(SliceFailed, match=sentence):
        executor.evaluate(1, 0, arrived)
    executor.forward(1, 0, {0: random(4, 3)})


def test_gradients_of_another_type_or_value_are_refused():
    builder, graph = chain()
    low = executors(graph, [0, 0, 1, 1, 1], builder.weights)[0]
    for gradients, sentence in [({}, "missing"), ({3: []}, "surplus"), ({4: [random(4, 4)]}, "value 4 is float32 of shape")]:
        low.forward(1, 0, {0: random(4, 3)})
        with pytest.raises(SliceFailed, match=sentence):
            low.backward(1, 0, gradients)
        low.abort_step()


def test_indices_out_of_range_are_refused_on_arrival():
    builder = GraphBuilder({"tokens": torch.zeros(4, dtype=torch.int64)}, {"table": random(10, 3)}, {})
    rows = builder.add(
        "embedding",
        weight=builder.ref("table"),
        indices=builder.ref("tokens"),
        padding_idx=-1,
        scale_grad_by_freq=False,
        sparse=False,
    )
    graph = builder.graph(builder.add("mean", self=rows, dtype=None))
    (executor,) = executors(graph, [0, 0], builder.weights)
    for bad in (10, -1, 1 << 40):
        with pytest.raises(SliceFailed, match=f"value 0 holds the index {bad}, legal are 0 to 9"):
            executor.forward(1, 0, {0: torch.tensor([0, 9, bad, 1])})
    executor.forward(1, 0, {0: torch.tensor([0, 9, 8, 1])})


def test_out_of_memory_is_an_answer_and_the_slice_goes_on():
    """A real allocation that no machine can serve."""
    builder = GraphBuilder({"x": random(1)}, {"scale": torch.ones(1)}, {})
    scaled = builder.add("mul.Tensor", self=builder.ref("x"), other=builder.ref("scale"))
    huge = builder.declare("repeat", TensorType((1 << 44,), "float32", True), self=scaled, repeats=(1 << 44,))
    graph = builder.graph(builder.declare("mean", TensorType((), "float32", True), self=huge, dtype=None))
    low, high = executors(graph, [0, 1, 1], builder.weights)
    sent = low.forward(1, 0, {0: random(1)})
    sentence = r"slice 1 failed in repeat of module.1 at step 1, micro-batch 0: out of memory \("
    with pytest.raises(SliceFailed, match=sentence):
        high.forward(1, 0, sent)
    high.abort_step()
    with pytest.raises(SliceFailed, match=sentence):
        high.forward(1, 0, sent)
    low.abort_step()
    low.forward(1, 0, {0: random(1)})


def test_failing_operator_is_named_and_its_error_keeps_no_values_alive():
    builder, _ = chain()
    graph = builder.graph(builder.declare("reshape", TensorType((7,), "float32", True), self=Ref(5), shape=(7,)))
    (executor,) = executors(graph, [0] * 6, builder.weights)
    with pytest.raises(
        SliceFailed, match=r"slice 0 failed in reshape of module.5 at step 1, micro-batch 0: RuntimeError"
    ) as caught:
        executor.forward(1, 0, {0: random(4, 3)})
    assert caught.value.__context__ is None
    interpreter = next(entry.frame for entry in caught.traceback if entry.name == "run")
    assert interpreter.f_locals["values"] == {}


def test_order_of_a_step_is_enforced():
    builder, graph = chain()
    (executor,) = executors(graph, [0] * 5, builder.weights, micro_batches=2)
    x = {0: random(4, 3)}
    with pytest.raises(SliceFailed, match="state of step 0: it cannot run step 2"):
        executor.forward(2, 0, x)
    executor.forward(1, 0, x)
    with pytest.raises(SliceFailed, match="cannot run micro-batch 0"):
        executor.forward(1, 0, x)
    with pytest.raises(SliceFailed, match="cannot run micro-batch 2"):
        executor.forward(1, 2, x)
    with pytest.raises(SliceFailed, match="no forward pass of micro-batch 1"):
        executor.backward(1, 1, {})
    executor.backward(1, 0, {})
    with pytest.raises(SliceFailed, match="done 1 of 2 micro-batches"):
        executor.update(1, 1.0, 0.1)
    executor.forward(1, 1, x)
    executor.backward(1, 1, {})
    executor.update(1, 1.0, 0.1)
    with pytest.raises(SliceFailed, match="state of step 1"):
        executor.update(1, 1.0, 0.1)
    executor.skip(2)
    assert executor.state.step == 2


def test_aborted_step_leaves_no_trace():
    builder, graph = chain()
    settings = TrainingSettings(seed=5, optimiser=OptimiserSettings(name="adamw", weight_decay=0.1))
    (disturbed,) = executors(graph, [0] * 5, builder.weights, micro_batches=2, settings=settings)
    (calm,) = executors(graph, [0] * 5, builder.weights, micro_batches=2, settings=settings)
    for step in range(1, 4):
        disturbed.forward(step, 0, {0: random(4, 3, seed=99)})
        disturbed.backward(step, 0, {})
        disturbed.forward(step, 1, {0: random(4, 3, seed=99)})
        disturbed.abort_step()
        for executor in (disturbed, calm):
            for micro_batch in range(2):
                executor.forward(step, micro_batch, {0: random(4, 3, seed=step)})
                executor.backward(step, micro_batch, {})
            executor.update(step, 1.0, 0.01)
    ours, theirs = disturbed.state.snapshot(), calm.state.snapshot()
    assert all(torch.equal(ours.tensors[name], theirs.tensors[name]) for name in theirs.tensors)


def test_values_are_freed_after_their_last_use():
    """A chain of casts between integers saves nothing for backward, so two values at most are alive at once."""
    builder = GraphBuilder({"x": torch.zeros(256, 1024, dtype=torch.int64)}, {"scale": torch.ones(1)}, {})
    value = builder.ref("x")
    for _ in range(6):
        value = builder.add("add.Tensor", self=value, other=1, alpha=1)
    total = builder.add("sum", self=value, dtype=None)
    graph = builder.graph(builder.add("mul.Tensor", self=total, other=builder.ref("scale")))
    (executor,) = executors(graph, [0] * 8, builder.weights)
    dead = [step.dead for step in executor._interpreter._steps]
    assert all(len(gone) == 1 for gone in dead[:7])
    assert graph.outputs[0] not in {value for gone in dead for value in gone}


@pytest.mark.row(30)
def test_first_non_finite_names_the_op():
    _builder, graph = chain()
    assert first_non_finite(graph, {0: random(2), 4: random(2)}) is None
    bad = torch.tensor([1.0, float("nan")])
    assert first_non_finite(graph, {4: bad, 5: bad}) == "value 4, computed by relu of module.1, is not finite"
    assert first_non_finite(graph, {1: bad}) == "value 1, parameter first, is not finite"


def test_non_finite_gradients_are_reported_by_squares_and_can_be_skipped():
    builder, graph = chain()
    (executor,) = executors(graph, [0] * 5, builder.weights)
    executor.forward(1, 0, {0: torch.full((4, 3), float("inf"))})
    executor.backward(1, 0, {})
    assert not all(torch.isfinite(torch.tensor(executor.squares([1, 2]))))
    executor.skip(1)
    executor.forward(2, 0, {0: random(4, 3)})
    executor.backward(2, 0, {})
    assert all(torch.isfinite(torch.tensor(executor.squares([1, 2]))))


def test_update_that_breaks_off_leaves_a_state_that_nobody_may_use():
    builder, graph = chain()
    (executor,) = executors(graph, [0] * 5, builder.weights)
    executor.forward(1, 0, {0: random(4, 3)})
    executor.backward(1, 0, {})
    with pytest.raises(SliceFailed, match="slice 0 failed half-way through update 1"):
        executor.update(1, 10**400, 0.1)  # no float: the first gradient cannot be multiplied by it
    executor.abort_step()
    for use in (
        lambda: executor.forward(1, 0, {0: random(4, 3)}),
        lambda: executor.forward(0, 0, {0: random(4, 3)}),
        lambda: executor.evaluate(1, 0, {0: random(4, 3)}),
        lambda: executor.skip(1),
        executor.state.snapshot,
    ):
        with pytest.raises(SliceFailed):
            use()
