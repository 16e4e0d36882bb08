"""Every operator of the table: captured from a call, checked, run, and compared with the call itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fusion_p2p.graph.check import check
from fusion_p2p.graph.operators import OPS
from fusion_p2p.graph.schema import OPSET, RANDOM_OPS
from tests.unit.graph_running import assert_same_as_eager

aten = torch.ops.aten
Case = Callable[[Tensor], Tensor | tuple[Tensor, ...]]


def image(x: Tensor) -> Tensor:
    """(4, 6) as a batch of 1 with 2 channels of 3 x 4 pixels."""
    return x.reshape(1, 2, 3, 4)


def integers(*shape: int, below: int) -> Tensor:
    """Deterministic integers from nothing, as constants of a graph are."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 7 % below).reshape(shape)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


CASES: dict[str, Case] = {
    "arange": lambda x: x * torch.arange(6, dtype=torch.float32),
    "full": lambda x: x + torch.full((4, 6), 2.5),
    "linear": lambda x: functional.linear(x, x[:3], x[:3, 0]),
    "addmm": lambda x: torch.addmm(x[:4, :4], x, x.t(), beta=0.5, alpha=2),
    "matmul": lambda x: x.reshape(2, 2, 6) @ x.reshape(2, 6, 2),
    "mm": lambda x: torch.mm(x, x.t()),
    "bmm": lambda x: torch.bmm(x.reshape(2, 2, 6), x.reshape(2, 6, 2)),
    "baddbmm": lambda x: torch.baddbmm(x.reshape(2, 2, 6)[:, :, :2], x.reshape(2, 2, 6), x.reshape(2, 6, 2), alpha=0.3),
    "mv": lambda x: torch.mv(x, x[0]),
    "dot": lambda x: torch.dot(x[0], x[1]),
    "one_hot": lambda x: x * functional.one_hot(integers(4, below=6), 6),
    "_weight_norm_interface": lambda x: torch._weight_norm(x, x.amax(1, keepdim=True), 0),
    "outer": lambda x: torch.outer(x[0], x[1]),
    "conv1d": lambda x: functional.conv1d(x.reshape(1, 4, 6), x[:, :2].reshape(2, 4, 1), stride=2, padding=1),
    "conv2d": lambda x: functional.conv2d(image(x), x[:2, :4].reshape(1, 2, 2, 2), padding=1),
    "conv3d": lambda x: functional.conv3d(x.reshape(1, 1, 2, 3, 4), x[:2, :4].reshape(1, 1, 2, 2, 2)),
    "conv1d.padding": lambda x: functional.conv1d(x.reshape(1, 4, 6), x.reshape(2, 4, 3), padding="same"),
    "conv2d.padding": lambda x: functional.conv2d(image(x), x[:3, :6].reshape(1, 2, 3, 3), padding="same"),
    "conv_transpose2d.input": lambda x: functional.conv_transpose2d(image(x), x[:2, :4].reshape(2, 1, 2, 2), stride=2),
    "embedding": lambda x: functional.embedding(integers(3, 5, below=4), x, padding_idx=1),
    "layer_norm": lambda x: functional.layer_norm(x, (6,), x[0], x[1]),
    "rms_norm": lambda x: functional.rms_norm(x, (6,), x[0], 1e-6),
    "group_norm": lambda x: functional.group_norm(x.reshape(2, 4, 3), 2, x[:, 0], x[:, 1]),
    "instance_norm": lambda x: functional.instance_norm(image(x)) * x[0, 0],
    "batch_norm_by_batch": lambda x: functional.batch_norm(x, None, None, x[0], x[1], training=True),
    "batch_norm_evaluate": lambda x: functional.batch_norm(x, ones(6), ones(6), x[0], x[1], training=False),
    "scaled_dot_product_attention": lambda x: functional.scaled_dot_product_attention(
        x.reshape(1, 2, 3, 4), x.reshape(1, 2, 3, 4), x.reshape(1, 2, 3, 4), is_causal=True, dropout_p=0.25
    ),
    "dropout": lambda x: functional.dropout(x, 0.4, training=True),
    "max_pool2d": lambda x: functional.max_pool2d(image(x), 2, 1),
    "avg_pool2d": lambda x: functional.avg_pool2d(image(x), 2),
    "adaptive_avg_pool1d": lambda x: functional.adaptive_avg_pool1d(x, 3),
    "adaptive_avg_pool2d": lambda x: functional.adaptive_avg_pool2d(image(x), 1),
    "upsample_nearest2d.vec": lambda x: functional.interpolate(image(x), scale_factor=2, mode="nearest"),
    "upsample_bilinear2d.vec": lambda x: functional.interpolate(image(x), size=(5, 5), mode="bilinear"),
    "pixel_shuffle": lambda x: functional.pixel_shuffle(x.reshape(1, 4, 2, 3), 2),
    "cross_entropy_loss": lambda x: functional.cross_entropy(x, integers(4, below=6), label_smoothing=0.1),
    "nll_loss_nd": lambda x: functional.nll_loss(functional.log_softmax(x, 1), integers(4, below=6)),
    "mse_loss": lambda x: functional.mse_loss(x, ones(4, 6)),
    "l1_loss": lambda x: functional.l1_loss(x, ones(4, 6)),
    "smooth_l1_loss": lambda x: functional.smooth_l1_loss(x, ones(4, 6)),
    "huber_loss": lambda x: functional.huber_loss(x, ones(4, 6)),
    "kl_div": lambda x: functional.kl_div(x, ones(4, 6), reduction="batchmean"),
    "binary_cross_entropy_with_logits": lambda x: functional.binary_cross_entropy_with_logits(x, ones(4, 6)),
    "relu6": lambda x: aten.relu6.default(x),
    "log_sigmoid": functional.logsigmoid,
    "hardsigmoid": functional.hardsigmoid,
    "hardswish": functional.hardswish,
    "mish": functional.mish,
    "relu": functional.relu,
    "selu": functional.selu,
    "silu": functional.silu,
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach() * x,
    "bitwise_not": lambda x: x * torch.bitwise_not(integers(4, 6, below=5)),
    "logical_not": lambda x: x * torch.logical_not(x > 1),
    "isinf": lambda x: x * torch.isinf(x),
    "isnan": lambda x: x * torch.isnan(x),
    "and.Tensor": lambda x: x * ((x > 1) & (x < 2)),
    "or.Tensor": lambda x: x * ((x > 2) | (x < 1)),
    "bitwise_and.Tensor": lambda x: x * torch.bitwise_and(x > 1, x < 2),
    "bitwise_or.Tensor": lambda x: x * torch.bitwise_or(x > 2, x < 1),
    "logical_and": lambda x: x * torch.logical_and(x > 1, x < 2),
    "logical_or": lambda x: x * torch.logical_or(x > 2, x < 1),
    "eq.Scalar": lambda x: x * (x == 1.0),
    "ne.Scalar": lambda x: x * (x != 1.0),
    "ge.Scalar": lambda x: x * (x >= 1.0),
    "gt.Scalar": lambda x: x * (x > 1.0),
    "le.Scalar": lambda x: x * (x <= 1.0),
    "lt.Scalar": lambda x: x * (x < 1.0),
    "eq.Tensor": lambda x: x * (x == ones(4, 6)),
    "ne.Tensor": lambda x: x * (x != ones(4, 6)),
    "ge.Tensor": lambda x: x * (x >= ones(4, 6)),
    "gt.Tensor": lambda x: x * (x > ones(4, 6)),
    "le.Tensor": lambda x: x * (x <= ones(4, 6)),
    "lt.Tensor": lambda x: x * (x < ones(4, 6)),
    "div.Tensor": lambda x: x / (x + 1),
    "floor_divide": lambda x: x * torch.floor_divide(integers(4, 6, below=9), 2),
    "remainder.Scalar": lambda x: x % 0.7,
    "max.other": lambda x: torch.max(x, ones(4, 6)),
    "min.other": lambda x: torch.min(x, ones(4, 6)),
    "maximum": lambda x: torch.maximum(x, ones(4, 6)),
    "minimum": lambda x: torch.minimum(x, ones(4, 6)),
    "mul.Tensor": lambda x: x * x,
    "add.Tensor": lambda x: torch.add(x, x * x, alpha=3),
    "sub.Tensor": lambda x: x - x * x,
    "rsub.Scalar": lambda x: torch.rsub(x, 2.0),
    "div.Tensor_mode": lambda x: x * torch.div(x, 0.3, rounding_mode="floor"),
    "pow.Tensor_Scalar": lambda x: x**3,
    "pow.Tensor_Tensor": lambda x: x**x,
    "pow.Scalar": lambda x: 2.0**x,
    "gelu": lambda x: functional.gelu(x, approximate="tanh") + functional.gelu(x),
    "glu": lambda x: functional.glu(x, 1),
    "elu": lambda x: functional.elu(x - 1, 0.7),
    "leaky_relu": lambda x: functional.leaky_relu(x - 1, 0.2),
    "prelu": lambda x: functional.prelu(x - 1, x[0, :1]),
    "hardtanh": lambda x: functional.hardtanh(x),
    "softplus": functional.softplus,
    "clamp": lambda x: x.clamp(0.6, 1.2),
    "clamp_min": lambda x: x.clamp_min(1.0),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "lerp.Scalar": lambda x: torch.lerp(x, x * x, 0.3),
    "lerp.Tensor": lambda x: torch.lerp(x, x * x, x),
    "where.self": lambda x: torch.where(x > 1, x, x * x),
    "where.ScalarOther": lambda x: torch.where(x > 1, x, 0.5),
    "where.ScalarSelf": lambda x: torch.where(x > 1, 0.5, x),
    "masked_fill.Scalar": lambda x: x.masked_fill(x > 1, float("-1e4")),
    "masked_fill.Tensor": lambda x: x.masked_fill(x > 1, x[0, 0]),
    "cast": lambda x: x.to(torch.bfloat16),
    "tril": lambda x: x.tril(1),
    "triu": lambda x: x.triu(1),
    "softmax.int": lambda x: functional.softmax(x, 1) * x,
    "log_softmax.int": lambda x: functional.log_softmax(x, 0),
    "mean": lambda x: x.mean(),
    "mean.dim": lambda x: x.mean((0, 1), keepdim=True),
    "sum": lambda x: x.sum(),
    "sum.dim_IntList": lambda x: x.sum(0),
    "var.correction": lambda x: (x.var(), x.var(1, keepdim=True), torch.var(x, dim=0, correction=0)),
    "std.correction": lambda x: (x.std(), x.std(1), torch.std(x, dim=0, correction=0)),
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin(1),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max.dim": lambda x: x.max(1).values,
    "min.dim": lambda x: x.min(0).values,
    "argmax": lambda x: x * x.argmax(1, keepdim=True),
    "argmin": lambda x: x * x.argmin(1, keepdim=True),
    "any": lambda x: x * (x > 1).any(),
    "any.dim": lambda x: x * (x > 1).any(0),
    "all": lambda x: x * (x > 0).all(),
    "all.dim": lambda x: x * (x > 1).all(0),
    "logsumexp": lambda x: x.logsumexp(1),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, 2, 1),
    "norm.ScalarOpt_dim": lambda x: aten.norm.ScalarOpt_dim(x, 2, [1]),
    "cosine_similarity": lambda x: functional.cosine_similarity(x[:2], x[2:]),
    "cumsum": lambda x: x.cumsum(1),
    "diff": lambda x: x.diff(dim=1),
    "topk": lambda x: x.topk(2, 1).values,
    "sort": lambda x: x.sort(1).values * x,
    "reshape": lambda x: x.t().reshape(3, 8),
    "unflatten.int": lambda x: x.unflatten(1, (2, 3)),
    "flatten.using_ints": lambda x: x.reshape(2, 2, 6).flatten(1),
    "t": lambda x: x.t(),
    "transpose.int": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.reshape(2, 2, 6).permute(2, 0, 1),
    "movedim.int": lambda x: x.movedim(0, 1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(),
    "squeeze.dim": lambda x: x.unsqueeze(1).squeeze(1),
    "squeeze.dims": lambda x: x.unsqueeze(1).unsqueeze(1).squeeze((1, 2)),
    "expand": lambda x: x.unsqueeze(0).expand(3, 4, 6) * x.expand_as(x),
    "slice.Tensor": lambda x: x[:, 1:5:2],
    "select.int": lambda x: x[1],
    "slice_scatter": lambda x: torch.slice_scatter(x, x[:, :2] * 2, 1, 3, 5),
    "select_scatter": lambda x: torch.select_scatter(x, x[0] * 2, 0, 3),
    "split.Tensor": lambda x: x.split(4, 1)[1],
    "split_with_sizes": lambda x: torch.split_with_sizes(x, [1, 5], 1)[1],
    "chunk": lambda x: x.chunk(2, 1)[0],
    "unbind.int": lambda x: x.unbind(0)[2],
    "cat": lambda x: torch.cat((x, x * 2), 1),
    "stack": lambda x: torch.stack((x, x * 2)),
    "pad": lambda x: functional.pad(x, (1, 2), value=0.5),
    "repeat": lambda x: x.repeat(2, 1, 3),
    "repeat_interleave.self_int": lambda x: x.repeat_interleave(3, dim=1),
    "roll": lambda x: x.roll(2, 1),
    "flip": lambda x: x.flip(0),
    "gather": lambda x: x.gather(1, integers(4, 3, below=6)),
    "index.Tensor": lambda x: x[integers(3, below=4), integers(3, below=6) - 6],
    "index_select": lambda x: x.index_select(1, integers(3, below=6)),
}
SIMPLE = {
    "abs", "ceil", "cos", "erf", "exp", "expm1", "floor", "log", "log1p", "neg", "reciprocal", "round", "rsqrt", "sigmoid",
    "sign", "sin", "sqrt", "square", "tan", "tanh",
}  # fmt: skip
CASES |= {name: getattr(torch, name) for name in SIMPLE}
NOT_IDENTITY = {"clone"}
"""Captured as no operator at all, since values never change."""


class Called(nn.Module):
    """The weighted sum of everything that a function makes of one trainable matrix."""

    def __init__(self, function: Case) -> None:
        super().__init__()
        self.function = function
        self.matrix = nn.Parameter(torch.rand(4, 6, generator=torch.Generator().manual_seed(3)) + 0.5)

    def forward(self, scale: Tensor) -> Tensor:
        made = self.function(self.matrix * scale)
        results: Iterable[Tensor] = made if isinstance(made, tuple) else (made,)
        return sum((result.float().square().sum() + result.float().mean() for result in results), self.matrix.sum())


@pytest.mark.parametrize("name", sorted(CASES))
def test_operator_equals_the_call_it_was_captured_from(name: str) -> None:
    captured = assert_same_as_eager(Called(CASES[name]), {"scale": torch.linspace(0.5, 1.5, 6)})
    check(captured.graph)
    assert name in {node.op for node in captured.graph.nodes} or name in NOT_IDENTITY


COMPOSITES: dict[str, Case] = {
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij"),
    "triplet_margin_loss": lambda x: functional.triplet_margin_loss(x, x.flip(0), x.flip(1)),
    "tensor_split": lambda x: torch.tensor_split(x, 3, 1),
    "tile": lambda x: x.tile(2, 2),
    "ravel": lambda x: x.ravel(),
    "swapaxes": lambda x: x.swapaxes(0, 1),
}


@pytest.mark.row(33)
@pytest.mark.parametrize("name", sorted(COMPOSITES))
def test_what_torch_defines_by_simpler_operators_is_taken_apart(name: str) -> None:
    assert_same_as_eager(Called(COMPOSITES[name]), {"scale": torch.linspace(0.5, 1.5, 6)}, tolerance=1e-6)


def test_every_operator_is_tested() -> None:
    assert OPS.keys() - CASES.keys() == {"batch_norm"}  # its buffers are tested with whole modules


def test_the_table_is_consistent() -> None:
    assert {name for name, op in OPS.items() if op.random} == set(RANDOM_OPS)
    for name, op in OPS.items():
        assert op.pinned.keys() <= op.arguments, name
        assert not op.source or "dtype" in op.arguments, name
    in_place = [name for name in OPS if name.partition(".")[0].endswith("_")]
    assert in_place == []


def test_operator_set_1_keeps_its_promises() -> None:
    """Adding an operator appends a line. Changing or removing one breaks graphs that exist: raise `OPSET` and add a file."""
    promised = (Path(__file__).parent / f"opset_{OPSET}.txt").read_text().splitlines()
    now = {f"{name}({', '.join(sorted(op.arguments))}) -> {op.outputs or 'any'}" for name, op in OPS.items()}
    assert set(promised) == now
