"""The closed operator table: the only code that a graph from the network can reach.

A name from the wire is only ever a key of `OPS`. Every argument of an operator is written out in the graph, so a default that
changes in torch cannot change a result. Left out on purpose: what can show a peer's memory (`empty`, `as_strided`,
`resize_`), what reads files, what writes in place, what draws random numbers other than dropout, and custom operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fusion_p2p.graph.schema import Argument

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Op:
    """One operator.

    run: called with exactly `arguments` by name (and `device` when it is a `source`), returns a tensor or several.
    evaluate: replaces `run` outside training.
    outputs: how many; None when the arguments decide (split, chunk, unbind).
    pinned: arguments with one legal value.
    strings: legal words of string arguments, dtypes aside.
    """

    run: Callable[..., Any]
    arguments: frozenset[str]
    outputs: int | None = 1
    random: bool = False
    source: bool = False
    evaluate: Callable[..., Any] | None = None
    pinned: Mapping[str, Argument] = field(default_factory=dict)
    strings: frozenset[str] = frozenset()


def _arange(start: float, end: float, step: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(start, end, step, dtype=dtype, device=device)


def _full(size: list[int], fill_value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(size, fill_value, dtype=dtype, device=device)


def _cast(input: Tensor, dtype: torch.dtype) -> Tensor:
    return input.to(dtype)


def _dropout(input: Tensor, p: float) -> Tensor:
    return functional.dropout(input, p, training=True)


def _no_dropout(input: Tensor, p: float) -> Tensor:
    return input


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _attention_without_dropout(dropout_p: float, **arguments: Any) -> Tensor:
    return _attention(dropout_p=0.0, **arguments)


def _batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise by the batch's statistics; the new running statistics are outputs instead of writes into the buffers."""
    mean, variance = running_mean.clone(), running_var.clone()
    return functional.batch_norm(input, mean, variance, weight, bias, True, momentum, eps), mean, variance


def _batch_norm_by_buffers(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    output = functional.batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps)
    return output, running_mean, running_var


def _batch_norm_evaluate(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, eps: float
) -> Tensor:
    return functional.batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps)


def _batch_norm_by_batch(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """For a layer without running statistics: the batch's own, in training and outside."""
    return functional.batch_norm(input, None, None, weight, bias, True, 0.0, eps)


def _instance_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return functional.instance_norm(input, None, None, weight, bias, True, 0.0, eps)


def _op(run: Callable[..., Any], arguments: str, **rest: Any) -> Op:
    return Op(run, frozenset(arguments.split()), **rest)


_SOURCES = {
    "arange": _op(_arange, "start end step dtype", source=True),
    "full": _op(_full, "size fill_value dtype", source=True),
}

_CONVOLUTION = "input weight bias stride padding dilation groups"
_PADDINGS = frozenset({"valid", "same"})
_LAYERS = {
    "linear": _op(aten.linear.default, "input weight bias"),
    "addmm": _op(aten.addmm.default, "self mat1 mat2 beta alpha"),
    "matmul": _op(aten.matmul.default, "self other"),
    "mm": _op(aten.mm.default, "self mat2"),
    "bmm": _op(aten.bmm.default, "self mat2"),
    "baddbmm": _op(aten.baddbmm.default, "self batch1 batch2 beta alpha"),
    "mv": _op(aten.mv.default, "self vec"),
    "dot": _op(aten.dot.default, "self tensor"),
    "outer": _op(aten.outer.default, "self vec2"),
    "conv1d": _op(aten.conv1d.default, _CONVOLUTION),
    "conv2d": _op(aten.conv2d.default, _CONVOLUTION),
    "conv3d": _op(aten.conv3d.default, _CONVOLUTION),
    "conv1d.padding": _op(aten.conv1d.padding, _CONVOLUTION, strings=_PADDINGS),
    "conv2d.padding": _op(aten.conv2d.padding, _CONVOLUTION, strings=_PADDINGS),
    "conv_transpose2d.input": _op(aten.conv_transpose2d.input, f"{_CONVOLUTION} output_padding"),
    "embedding": _op(
        aten.embedding.default,
        "weight indices padding_idx scale_grad_by_freq sparse",
        pinned={"scale_grad_by_freq": False, "sparse": False},
    ),
    "_weight_norm_interface": _op(aten._weight_norm_interface.default, "v g dim", outputs=2),
    "layer_norm": _op(aten.layer_norm.default, "input normalized_shape weight bias eps"),
    "rms_norm": _op(aten.rms_norm.default, "input normalized_shape weight eps"),
    "group_norm": _op(aten.group_norm.default, "input num_groups weight bias eps"),
    "instance_norm": _op(_instance_norm, "input weight bias eps"),
    "batch_norm": _op(
        _batch_norm,
        "input weight bias running_mean running_var momentum eps",
        outputs=3,
        evaluate=_batch_norm_by_buffers,
    ),
    "batch_norm_evaluate": _op(_batch_norm_evaluate, "input weight bias running_mean running_var eps"),
    "batch_norm_by_batch": _op(_batch_norm_by_batch, "input weight bias eps"),
    "scaled_dot_product_attention": _op(
        _attention,
        "query key value attn_mask dropout_p is_causal scale enable_gqa",
        random=True,
        evaluate=_attention_without_dropout,
    ),
    "dropout": _op(_dropout, "input p", random=True, evaluate=_no_dropout),
    "max_pool2d": _op(aten.max_pool2d.default, "self kernel_size stride padding dilation ceil_mode"),
    "avg_pool2d": _op(aten.avg_pool2d.default, "self kernel_size stride padding ceil_mode count_include_pad divisor_override"),
    "adaptive_avg_pool1d": _op(aten.adaptive_avg_pool1d.default, "self output_size"),
    "adaptive_avg_pool2d": _op(aten.adaptive_avg_pool2d.default, "self output_size"),
    "upsample_nearest2d.vec": _op(aten.upsample_nearest2d.vec, "input output_size scale_factors"),
    "upsample_bilinear2d.vec": _op(aten.upsample_bilinear2d.vec, "input output_size align_corners scale_factors"),
    "pixel_shuffle": _op(aten.pixel_shuffle.default, "self upscale_factor"),
}

_LOSSES = {
    "cross_entropy_loss": _op(aten.cross_entropy_loss.default, "self target weight reduction ignore_index label_smoothing"),
    "nll_loss_nd": _op(aten.nll_loss_nd.default, "self target weight reduction ignore_index"),
    "mse_loss": _op(aten.mse_loss.default, "self target reduction"),
    "l1_loss": _op(aten.l1_loss.default, "self target reduction"),
    "smooth_l1_loss": _op(aten.smooth_l1_loss.default, "self target reduction beta"),
    "huber_loss": _op(aten.huber_loss.default, "self target reduction delta"),
    "kl_div": _op(aten.kl_div.default, "self target reduction log_target"),
    "binary_cross_entropy_with_logits": _op(
        aten.binary_cross_entropy_with_logits.default, "self target weight pos_weight reduction"
    ),
}

_UNARY = {
    name: _op(run, "self")
    for name, run in {
        "abs": aten.abs.default,
        "bitwise_not": aten.bitwise_not.default,
        "ceil": aten.ceil.default,
        "clone": aten.clone.default,
        "cos": aten.cos.default,
        "detach": aten.detach.default,
        "erf": aten.erf.default,
        "exp": aten.exp.default,
        "expm1": aten.expm1.default,
        "floor": aten.floor.default,
        "hardsigmoid": aten.hardsigmoid.default,
        "hardswish": aten.hardswish.default,
        "isinf": aten.isinf.default,
        "isnan": aten.isnan.default,
        "log": aten.log.default,
        "log1p": aten.log1p.default,
        "log_sigmoid": aten.log_sigmoid.default,
        "logical_not": aten.logical_not.default,
        "mish": aten.mish.default,
        "neg": aten.neg.default,
        "reciprocal": aten.reciprocal.default,
        "relu": aten.relu.default,
        "relu6": aten.relu6.default,
        "round": aten.round.default,
        "rsqrt": aten.rsqrt.default,
        "selu": aten.selu.default,
        "sigmoid": aten.sigmoid.default,
        "sign": aten.sign.default,
        "silu": aten.silu.default,
        "sin": aten.sin.default,
        "sqrt": aten.sqrt.default,
        "square": aten.square.default,
        "tan": aten.tan.default,
        "tanh": aten.tanh.default,
    }.items()
}

_BINARY = {
    name: _op(run, "self other")
    for name, run in {
        "and.Tensor": aten.__and__.Tensor,
        "bitwise_and.Tensor": aten.bitwise_and.Tensor,
        "bitwise_or.Tensor": aten.bitwise_or.Tensor,
        "div.Tensor": aten.div.Tensor,
        "eq.Scalar": aten.eq.Scalar,
        "eq.Tensor": aten.eq.Tensor,
        "floor_divide": aten.floor_divide.default,
        "ge.Scalar": aten.ge.Scalar,
        "ge.Tensor": aten.ge.Tensor,
        "gt.Scalar": aten.gt.Scalar,
        "gt.Tensor": aten.gt.Tensor,
        "le.Scalar": aten.le.Scalar,
        "le.Tensor": aten.le.Tensor,
        "logical_and": aten.logical_and.default,
        "logical_or": aten.logical_or.default,
        "lt.Scalar": aten.lt.Scalar,
        "lt.Tensor": aten.lt.Tensor,
        "max.other": aten.max.other,
        "maximum": aten.maximum.default,
        "min.other": aten.min.other,
        "minimum": aten.minimum.default,
        "mul.Tensor": aten.mul.Tensor,
        "ne.Scalar": aten.ne.Scalar,
        "ne.Tensor": aten.ne.Tensor,
        "or.Tensor": aten.__or__.Tensor,
        "remainder.Scalar": aten.remainder.Scalar,
    }.items()
}

_APPROXIMATIONS = frozenset({"none", "tanh"})
_ROUNDINGS = frozenset({"floor", "trunc"})
_POINTWISE = {
    "add.Tensor": _op(aten.add.Tensor, "self other alpha"),
    "sub.Tensor": _op(aten.sub.Tensor, "self other alpha"),
    "rsub.Scalar": _op(aten.rsub.Scalar, "self other alpha"),
    "div.Tensor_mode": _op(aten.div.Tensor_mode, "self other rounding_mode", strings=_ROUNDINGS),
    "pow.Tensor_Scalar": _op(aten.pow.Tensor_Scalar, "self exponent"),
    "pow.Tensor_Tensor": _op(aten.pow.Tensor_Tensor, "self exponent"),
    "pow.Scalar": _op(aten.pow.Scalar, "self exponent"),
    "gelu": _op(aten.gelu.default, "self approximate", strings=_APPROXIMATIONS),
    "glu": _op(aten.glu.default, "self dim"),
    "elu": _op(aten.elu.default, "self alpha scale input_scale"),
    "leaky_relu": _op(aten.leaky_relu.default, "self negative_slope"),
    "prelu": _op(aten.prelu.default, "self weight"),
    "hardtanh": _op(aten.hardtanh.default, "self min_val max_val"),
    "softplus": _op(aten.softplus.default, "self beta threshold"),
    "clamp": _op(aten.clamp.default, "self min max"),
    "clamp_min": _op(aten.clamp_min.default, "self min"),
    "addcmul": _op(aten.addcmul.default, "self tensor1 tensor2 value"),
    "lerp.Scalar": _op(aten.lerp.Scalar, "self end weight"),
    "lerp.Tensor": _op(aten.lerp.Tensor, "self end weight"),
    "where.self": _op(aten.where.self, "condition self other"),
    "where.ScalarOther": _op(aten.where.ScalarOther, "condition self other"),
    "where.ScalarSelf": _op(aten.where.ScalarSelf, "condition self other"),
    "masked_fill.Scalar": _op(aten.masked_fill.Scalar, "self mask value"),
    "masked_fill.Tensor": _op(aten.masked_fill.Tensor, "self mask value"),
    "cast": _op(_cast, "input dtype"),
    "tril": _op(aten.tril.default, "self diagonal"),
    "triu": _op(aten.triu.default, "self diagonal"),
}

_REDUCTIONS = {
    "softmax.int": _op(aten.softmax.int, "self dim dtype"),
    "log_softmax.int": _op(aten.log_softmax.int, "self dim dtype"),
    "mean": _op(aten.mean.default, "self dtype"),
    "mean.dim": _op(aten.mean.dim, "self dim keepdim dtype"),
    "sum": _op(aten.sum.default, "self dtype"),
    "sum.dim_IntList": _op(aten.sum.dim_IntList, "self dim keepdim dtype"),
    "var.correction": _op(aten.var.correction, "self dim correction keepdim"),
    "std.correction": _op(aten.std.correction, "self dim correction keepdim"),
    "amax": _op(aten.amax.default, "self dim keepdim"),
    "amin": _op(aten.amin.default, "self dim keepdim"),
    "max": _op(aten.max.default, "self"),
    "min": _op(aten.min.default, "self"),
    "max.dim": _op(aten.max.dim, "self dim keepdim", outputs=2),
    "min.dim": _op(aten.min.dim, "self dim keepdim", outputs=2),
    "argmax": _op(aten.argmax.default, "self dim keepdim"),
    "argmin": _op(aten.argmin.default, "self dim keepdim"),
    "any": _op(aten.any.default, "self"),
    "any.dim": _op(aten.any.dim, "self dim keepdim"),
    "all": _op(aten.all.default, "self"),
    "all.dim": _op(aten.all.dim, "self dim keepdim"),
    "logsumexp": _op(aten.logsumexp.default, "self dim keepdim"),
    "linalg_vector_norm": _op(aten.linalg_vector_norm.default, "self ord dim keepdim dtype"),
    "norm.ScalarOpt_dim": _op(aten.norm.ScalarOpt_dim, "self p dim keepdim"),
    "cosine_similarity": _op(aten.cosine_similarity.default, "x1 x2 dim eps"),
    "cumsum": _op(aten.cumsum.default, "self dim dtype"),
    "diff": _op(aten.diff.default, "self n dim prepend append", pinned={"n": 1}),
    "topk": _op(aten.topk.default, "self k dim largest sorted", outputs=2),
    "sort": _op(aten.sort.default, "self dim descending", outputs=2),
}

_PADDING_MODES = frozenset({"constant", "reflect", "replicate", "circular"})
_SHAPES = {
    "reshape": _op(aten.reshape.default, "self shape"),
    "unflatten.int": _op(aten.unflatten.int, "self dim sizes"),
    "flatten.using_ints": _op(aten.flatten.using_ints, "self start_dim end_dim"),
    "t": _op(aten.t.default, "self"),
    "transpose.int": _op(aten.transpose.int, "self dim0 dim1"),
    "permute": _op(aten.permute.default, "self dims"),
    "movedim.int": _op(aten.movedim.int, "self source destination"),
    "unsqueeze": _op(aten.unsqueeze.default, "self dim"),
    "squeeze": _op(aten.squeeze.default, "self"),
    "squeeze.dim": _op(aten.squeeze.dim, "self dim"),
    "squeeze.dims": _op(aten.squeeze.dims, "self dim"),
    "expand": _op(aten.expand.default, "self size implicit"),
    "slice.Tensor": _op(aten.slice.Tensor, "self dim start end step"),
    "select.int": _op(aten.select.int, "self dim index"),
    "slice_scatter": _op(aten.slice_scatter.default, "self src dim start end step"),
    "select_scatter": _op(aten.select_scatter.default, "self src dim index"),
    "split.Tensor": _op(aten.split.Tensor, "self split_size dim", outputs=None),
    "split_with_sizes": _op(aten.split_with_sizes.default, "self split_sizes dim", outputs=None),
    "chunk": _op(aten.chunk.default, "self chunks dim", outputs=None),
    "unbind.int": _op(aten.unbind.int, "self dim", outputs=None),
    "cat": _op(aten.cat.default, "tensors dim"),
    "stack": _op(aten.stack.default, "tensors dim"),
    "pad": _op(aten.pad.default, "self pad mode value", strings=_PADDING_MODES),
    "repeat": _op(aten.repeat.default, "self repeats"),
    "repeat_interleave.self_int": _op(aten.repeat_interleave.self_int, "self repeats dim output_size"),
    "roll": _op(aten.roll.default, "self shifts dims"),
    "flip": _op(aten.flip.default, "self dims"),
}

_INDEXING = {
    "one_hot": _op(aten.one_hot.default, "self num_classes"),
    "gather": _op(aten.gather.default, "self dim index sparse_grad", pinned={"sparse_grad": False}),
    "index.Tensor": _op(aten.index.Tensor, "self indices"),
    "index_select": _op(aten.index_select.default, "self dim index"),
}

OPS: dict[str, Op] = {
    **_SOURCES,
    **_LAYERS,
    **_LOSSES,
    **_UNARY,
    **_BINARY,
    **_POINTWISE,
    **_REDUCTIONS,
    **_SHAPES,
    **_INDEXING,
}
