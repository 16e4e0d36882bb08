"""Operators that torch itself defines by simpler ones (`einsum`, `meshgrid`, `tile`, ...), taken apart for the table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_p2p.graph.operators import OPS
from fusion_p2p.graph.rewrites import is_rewritten, operator_name


def is_composite(target: torch._ops.OpOverload) -> bool:
    """Whether the table lacks an operator that torch defines by simpler ones; its gradient is then theirs, too."""
    name = operator_name(target)
    if name in OPS or is_rewritten(name):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(target._name, "CompositeImplicitAutograd")


def taken_apart(node: fx.Node, target: torch._ops.OpOverload) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The body of one call, and the fx nodes that its placeholders stand for, in order."""
    arguments = node.all_input_nodes

    def call(*tensors: Tensor) -> Any:
        given = dict(zip(arguments, tensors, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda item: given[item])
        return target.decompose(*args, **kwargs)

    values = [argument.meta["val"] for argument in arguments]
    with values[0].fake_mode:
        body = make_fx(call)(*values)
    for inner in body.graph.nodes:
        inner.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
    return body, arguments
