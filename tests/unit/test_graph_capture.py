"""Capturing modules: what comes out equals the module, and what cannot is refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fusion_p2p.errors import GraphError
from fusion_p2p.graph.capture import capture
from fusion_p2p.graph.schema import Rule
from fusion_p2p.models.catalogue import build
from tests.unit.graph_running import assert_same_as_eager, run


class Loss(nn.Module):
    """A module of one linear layer whose forward is a function of (module, x)."""

    def __init__(self, function: Callable[[Loss, Tensor], object]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("average", torch.zeros(4))
        with torch.no_grad():
            self.linear.weight.copy_(torch.linspace(-1, 1, 16).reshape(4, 4))

    def forward(self, x: Tensor) -> object:
        return self.function(self, x)


def x() -> dict[str, Tensor]:
    return {"x": torch.randn(3, 4, generator=torch.Generator().manual_seed(0))}


def refused(function: Callable[[Loss, Tensor], object], feeds: Mapping[str, Tensor] | None = None) -> str:
    with pytest.raises(GraphError) as refusal:
        capture(Loss(function), feeds or x())
    text = str(refusal.value)
    assert "\n" not in text
    return text


def tokens(seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(seed))
    return {"tokens": ids, "targets": ids.roll(1, 1)}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("tied", [True, False])
def test_gpt2(dropout: float, tied: bool) -> None:
    options = {"layers": 2, "width": 16, "heads": 2, "context": 8, "vocabulary": 50, "dropout": dropout, "tied": tied}
    captured = assert_same_as_eager(build("gpt2", options, device="cpu").module, tokens())
    names = [parameter.name for parameter in captured.graph.parameters]
    assert ("lm_head.weight" in names) == (not tied)
    assert set(captured.weights) == set(names)
    if tied:
        assert captured.graph.parameters[names.index("wte.weight")].aliases == ("lm_head.weight",)


def test_resnet_with_byte_images() -> None:
    feeds = {
        "images": torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)),
        "labels": torch.arange(4),
    }
    captured = assert_same_as_eager(build("resnet", {"blocks": [1, 1], "width": 4}, device="cpu").module, feeds)
    assert captured.graph.types[0].dtype == "uint8"
    updated = [parameter.name for parameter in captured.graph.parameters if parameter.update is not None]
    assert len(updated) == 3 * 9  # mean, variance and count of 1 + 2 * 4 BatchNorm layers
    assert captured.unused == {}


def test_meta_modules_are_never_materialised() -> None:
    built = build("gpt2-xl")
    ids = torch.zeros(1, 16, dtype=torch.int64)
    captured = capture(built.module, {"tokens": ids, "targets": ids}, built.rules)
    assert captured.weights == {}
    assert all(parameter.rule is not None for parameter in captured.graph.parameters)
    sizes = captured.graph.types[captured.graph.first_parameter : captured.graph.first_node_value]
    assert sum(item.num_elements for item in sizes) == 1_557_611_200


def test_inputs_keep_their_names_in_any_order() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, first: Tensor, second: Tensor, third: Tensor | None = None) -> Tensor:
            assert third is None
            return (self.weight * first - second).sum()

    captured = capture(Two(), {"second": torch.full((3,), 2.0), "first": torch.full((3,), 5.0)})
    ran = run(captured.graph, captured.weights, {"first": torch.full((3,), 5.0), "second": torch.full((3,), 2.0)})
    assert ran.loss.item() == 9.0


RETURNS: dict[str, Callable[[Tensor], object]] = {
    "scalar": lambda loss: loss,
    "one element": lambda loss: loss.reshape(1),
    "mapping": lambda loss: {"logits": loss * 2, "loss": loss},
    "tuple": lambda loss: (loss, loss * 2),
}


@pytest.mark.parametrize("kind", RETURNS)
def test_the_loss_is_found_and_nothing_else_kept(kind: str) -> None:
    captured = capture(Loss(lambda self, x: RETURNS[kind](self.linear(x).square().mean())), x())
    assert len(captured.graph.outputs) == 1
    assert captured.graph.types[captured.graph.outputs[0]].shape == ()
    assert "mul.Tensor" not in {node.op for node in captured.graph.nodes}


IN_PLACE: dict[str, Callable[[Loss, Tensor], object]] = {
    "relu on a computed value": lambda self, x: functional.relu(self.linear(x), inplace=True).sum(),
    "a residual added in place": lambda self, x: add_in_place(self.linear(x), x).square().sum(),
    "a copy is written, the original read": lambda self, x: clone_and_write(self.linear(x)),
    "dropout in place": lambda self, x: functional.dropout(self.linear(x), 0.3, inplace=True).sum(),
    "fill, zero and copy": lambda self, x: (self.linear(x) * fill_zero_copy(x)).sum(),
    "a moving average without gradient": lambda self, x: (self.linear(x) * moving_average(self, x)).sum(),
    "a part": lambda self, x: part_written(self.linear(x)),
    "a part of a part": lambda self, x: part_of_part_written(self.linear(x), x),
    "a part of a buffer": lambda self, x: part_of_buffer_written(self, x),
    "a shifted copy": lambda self, x: (self.linear(x) * shifted(x)).sum(),
    "a normalisation layer used twice": lambda self, x: self.norm(self.norm(self.linear(x)) * x).square().sum(),
}


def add_in_place(left: Tensor, right: Tensor) -> Tensor:
    left += right
    return left


def clone_and_write(computed: Tensor) -> Tensor:
    copied = computed.clone()
    copied.mul_(3)
    return (copied * computed).sum()


def fill_zero_copy(given: Tensor) -> Tensor:
    target = torch.ones(3, 4)
    target.fill_(2.0)
    other = torch.ones(3, 4)
    other.zero_()
    copied = torch.ones(3, 4)
    copied.copy_(given[0])
    return target + other + copied


def part_written(hidden: Tensor) -> Tensor:
    hidden[:, 0] = 1
    hidden[1:, 2:].mul_(3)
    return hidden.square().sum()


def part_of_part_written(hidden: Tensor, given: Tensor) -> Tensor:
    rows = hidden[1:]
    rows[0] += given[0]
    rows[:, 1] = hidden[1:, 0] * 2
    return hidden.square().sum()


def part_of_buffer_written(self: Loss, given: Tensor) -> Tensor:
    self.average[:2] = given[0, :2]
    return (self.linear(given) * self.average).sum()


def shifted(given: Tensor) -> Tensor:
    moved = given.new_zeros(given.shape)
    moved[:, 1:] = given[:, :-1].clone()
    return moved


def moving_average(self: Loss, given: Tensor) -> Tensor:
    with torch.no_grad():
        self.average.mul_(0.9).add_(self.linear(given).mean(0))
    return self.average


@pytest.mark.parametrize("kind", IN_PLACE)
def test_writes_in_place_become_new_values(kind: str) -> None:
    assert_same_as_eager(Loss(IN_PLACE[kind]), x())


@pytest.mark.row(28)
def test_no_gradient_flows_out_of_no_grad() -> None:
    def forward(self: Loss, given: Tensor) -> Tensor:
        hidden = self.linear(given)
        with torch.no_grad():
            scale = hidden.abs().mean() * self.linear.weight.sum()
        return (hidden * scale).sum()

    captured = assert_same_as_eager(Loss(forward), x())
    assert "detach" in {node.op for node in captured.graph.nodes}


def test_disabled_autocast_is_transparent() -> None:
    def forward(self: Loss, given: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.linear(given).square().mean()

    assert_same_as_eager(Loss(forward), x())


def test_what_nothing_reads_is_left_out() -> None:
    captured = capture(Loss(lambda self, x: self.linear(x).sum()), x())
    assert [parameter.name for parameter in captured.graph.parameters] == ["linear.weight", "linear.bias"]
    assert "norm.weight" in captured.unused
    assert "average" in captured.unused


def test_frozen_parameters_are_not_trained() -> None:
    module = Loss(lambda self, x: self.linear(x).sum())
    module.linear.bias.requires_grad_(False)
    captured = assert_same_as_eager(module, x())
    assert {item.name: item.trainable for item in captured.graph.parameters} == {"linear.weight": True, "linear.bias": False}


def test_constants_made_in_forward_are_part_of_the_graph() -> None:
    captured = assert_same_as_eager(Loss(lambda self, x: (self.linear(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum()), x())
    assert any(name.startswith("lifted_tensor") for name in captured.weights)


def custom_gradient(self: Loss, given: Tensor) -> Tensor:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, value: Tensor) -> Tensor:
            return value * 2

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return gradient * 5

    return Doubled.apply(self.linear(given)).sum()


def written_behind_a_view(self: Loss, given: Tensor) -> Tensor:
    hidden = self.linear(given)
    column = hidden[:, 1]
    hidden.mul_(2)
    return (hidden[:, 0] * column).sum()


def written_by_index(self: Loss, given: Tensor) -> Tensor:
    hidden = self.linear(given)
    hidden[torch.tensor([0, 2])] = 1.0
    return hidden.sum()


def weight_written(self: Loss, given: Tensor) -> Tensor:
    with torch.no_grad():
        self.linear.weight.mul_(0.5)
    return self.linear(given).sum()


def enabled_autocast(self: Loss, given: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.linear(given).float().sum()


def raising(self: Loss, given: Tensor) -> Tensor:
    raise KeyError("no such head")


REFUSED: dict[str, tuple[Callable[[Loss, Tensor], object], str]] = {
    "an operator out of the table": (lambda self, x: self.linear(x).cummax(0).values.sum(), "cummax"),
    "random numbers other than dropout": (lambda self, x: (self.linear(x) * torch.rand(3, 4)).sum(), "rand"),
    "a choice by content": (lambda self, x: self.linear(x).sum() if x.sum() > 0 else self.linear(x).mean(), "data-dependent"),
    "a size by content": (lambda self, x: self.linear(x)[x[:, 0] > 0].sum(), "content of tensors"),
    "an own gradient": (custom_gradient, "Doubled"),
    "a write seen through a view": (written_behind_a_view, "in place"),
    "a write by index": (written_by_index, "index_put"),
    "a write into a weight": (weight_written, "in place"),
    "autocast": (enabled_autocast, "autocast"),
    "no loss in a mapping": (lambda self, x: {"logits": self.linear(x)}, "without a loss"),
    "nothing returned": (lambda self, x: None, "without a loss"),
    "an empty tuple": (lambda self, x: (), "without a loss"),
    "a loss that is no number": (lambda self, x: self.linear(x), "one floating-point number"),
    "a loss that is an integer": (lambda self, x: self.linear(x).sum().long(), "one floating-point number"),
    "a loss without gradient": (lambda self, x: x.sum(), "trainable"),
    "a loss that is cut off": (lambda self, x: self.linear(x).sum().detach(), "trainable"),
    "a forward that raises": (raising, "no such head"),
    "an unsupported dtype": (lambda self, x: self.linear(x).double().sum().float(), "float64"),
    "complex numbers": (lambda self, x: torch.fft.fft(self.linear(x)).abs().sum(), "fft_fft"),
}


@pytest.mark.row(33)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_captured_is_named(kind: str) -> None:
    function, word = REFUSED[kind]
    assert word in refused(function)


def test_lstm_is_refused_by_name() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0].sum()

    with pytest.raises(GraphError, match=r"lstm\.input in module 'lstm' cannot be captured"):
        capture(Recurrent(), x())


@pytest.mark.parametrize(
    ("feeds", "word"),
    [
        ({}, "needs input 'x'"),
        ({"x": torch.ones(3, 4), "y": torch.ones(1)}, "no input 'y'"),
        ({"x": torch.ones(3, 4, dtype=torch.float64)}, "float64"),
        ({"x": torch.ones(0, 4)}, "empty"),
        ({"x": [1, 2]}, "list"),
    ],
)
def test_wrong_inputs_are_named(feeds: dict[str, Tensor], word: str) -> None:
    with pytest.raises(GraphError, match=word):
        capture(Loss(lambda self, x: self.linear(x).sum()), feeds)


def test_rules_have_to_fit_the_module() -> None:
    module = Loss(lambda self, x: self.linear(x).sum())
    with pytest.raises(GraphError, match=r"linear\.typo"):
        capture(module, x(), {"linear.typo": Rule("constant", 0.0)})
    with torch.device("meta"):
        on_meta = Loss(lambda self, x: self.linear(x).sum())
    with pytest.raises(GraphError, match=r"'linear\.bias' is on the meta device"):
        capture(on_meta, x(), {"linear.weight": Rule("constant", 0.0)})


def test_evaluation_uses_buffers_and_no_dropout() -> None:
    def forward(self: Loss, given: Tensor) -> Tensor:
        return functional.dropout(self.norm(self.linear(given)), 0.5, self.training).square().sum()

    module = Loss(forward)
    module.norm.running_mean.fill_(0.3)
    module.norm.running_var.fill_(2.0)
    captured = capture(module, x())
    ran = run(captured.graph, captured.weights, x(), training=False)
    module.eval()
    assert torch.equal(ran.loss, module(**x()))
    for parameter in captured.graph.parameters:
        if parameter.name in ("norm.running_mean", "norm.running_var"):
            assert parameter.update is not None
            assert torch.equal(ran.values[parameter.update], captured.weights[parameter.name])
