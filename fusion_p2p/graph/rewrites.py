"""How torch's names, defaults and shorthands map to the operator table: `lowering.py` asks here for each call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, fx

from fusion_p2p.errors import GraphError
from fusion_p2p.graph.fake import type_of
from fusion_p2p.graph.schema import Argument

Arguments = dict[str, Argument]
Rewritten = tuple[str, Arguments]


def operator_name(target: Any) -> str:
    """`relu`, `add.Tensor`: torch's name of an overload without its namespace."""
    return str(target).removeprefix("aten.").removesuffix(".default")


def where(node: fx.Node) -> str:
    """The module that made a call, for error messages."""
    path = module_path(node)
    return f" in module {path!r}" if path else ""


def module_path(node: fx.Node) -> str:
    """The path of the module that made a call, below the wrapper that `capture` puts around the user's module."""
    stack = node.meta.get("nn_module_stack") or {}
    path: str = list(stack.values())[-1][0] if stack else ""
    return path.removeprefix("module").removeprefix(".")


def is_contiguous(source: Any) -> bool:
    """Whether the tensor of an fx node has the default layout, so that `contiguous()` returns itself."""
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    return isinstance(value, Tensor) and value.is_contiguous()


def renames(name: str, arguments: Arguments, node: fx.Node) -> bool:
    """Whether a call returns its first argument unchanged, as far as values go."""
    match name:
        case "alias" | "contiguous" | "clone" | "lift_fresh_copy":
            return True
        case "dropout" | "feature_dropout":
            return not arguments["train"] or arguments["p"] == 0
        case "to.dtype" | "to.dtype_layout" | "to.device" | "to.other" | "type_as" | "_to_copy":
            source = node.args[0]
            return isinstance(source, fx.Node) and source.meta["val"].dtype == node.meta["val"].dtype
    return False


def is_rewritten(name: str) -> bool:
    """Whether calls of this name become something else here or in `lowering.py`, even if the table has no such operator."""
    return name in _REWRITES or name in ("broadcast_tensors", "to.other", "feature_dropout")


def rewrite(name: str, arguments: Arguments, node: fx.Node) -> Rewritten:
    """The table's name and arguments for a call; unknown names pass through and are refused when emitted."""
    rule = _REWRITES.get(name)
    return (name, arguments) if rule is None else rule(arguments, node.meta["val"])


def _pick(arguments: Arguments, names: Iterable[str]) -> Arguments:
    return {name: arguments[name] for name in names}


def _shape(value: Tensor) -> tuple[int, ...]:
    return type_of(value).shape


def _dtype(value: Tensor) -> str:
    return type_of(value).dtype


def _full(fill: Argument) -> Callable[[Arguments, Any], Rewritten]:
    return lambda arguments, value: ("full", {"size": _shape(value), "fill_value": fill, "dtype": _dtype(value)})


def _full_as_given(arguments: Arguments, value: Any) -> Rewritten:
    fill = arguments["s"] if "s" in arguments else arguments["fill_value"]
    return _full(fill)(arguments, value)


def _cast(arguments: Arguments, value: Any) -> Rewritten:
    return "cast", {"input": arguments["self"], "dtype": _dtype(value)}


def _arange(arguments: Arguments, value: Any) -> Rewritten:
    start, step = arguments.get("start", 0), arguments.get("step", 1)
    return "arange", {"start": start, "end": arguments["end"], "step": step, "dtype": _dtype(value)}


def _reshape(arguments: Arguments, value: Any) -> Rewritten:
    return "reshape", {"self": arguments["self"], "shape": _shape(value)}


def _expand(arguments: Arguments, value: Any) -> Rewritten:
    return "expand", {"self": arguments["self"], "size": _shape(value), "implicit": False}


def _dropout(arguments: Arguments, value: Any) -> Rewritten:
    source = arguments["self"] if "self" in arguments else arguments["input"]  # dropout_ names it differently
    return "dropout", {"input": source, "p": arguments["p"]}


def _instance_norm(arguments: Arguments, value: Any) -> Rewritten:
    if arguments["running_mean"] is not None or not arguments["use_input_stats"]:
        raise GraphError("instance_norm with running statistics cannot be captured")
    return "instance_norm", _pick(arguments, ("input", "weight", "bias", "eps"))


def _swapped_difference(arguments: Arguments, value: Any) -> Rewritten:
    return "sub.Tensor", {"self": arguments["other"], "other": arguments["self"], "alpha": arguments["alpha"]}


def _transposed(arguments: Arguments, value: Any) -> Rewritten:
    return "transpose.int", {"self": arguments["self"], "dim0": -2, "dim1": -1}


def _named(name: str) -> Callable[[Arguments, Any], Rewritten]:
    return lambda arguments, value: (name, arguments)


def _with_correction(name: str) -> Callable[[Arguments, Any], Rewritten]:
    def unbiased(arguments: Arguments, value: Any) -> Rewritten:
        correction = 1 if arguments["unbiased"] else 0
        return name, {
            "self": arguments["self"],
            "dim": arguments.get("dim"),
            "correction": correction,
            "keepdim": arguments.get("keepdim", False),
        }

    return unbiased


_REWRITES: dict[str, Callable[[Arguments, Any], Rewritten]] = {
    "__and__.Tensor": _named("and.Tensor"),
    "__or__.Tensor": _named("or.Tensor"),
    "_to_copy": _cast,
    "_unsafe_view": _reshape,
    "add.Scalar": _named("add.Tensor"),
    "arange": _arange,
    "arange.start": _arange,
    "arange.start_step": _arange,
    "div.Scalar": _named("div.Tensor"),
    "dropout": _dropout,
    "expand_as": _expand,
    "full": _full_as_given,
    "full_like": _full_as_given,
    "instance_norm": _instance_norm,
    "mT": _transposed,
    "mul.Scalar": _named("mul.Tensor"),
    "new_full": _full_as_given,
    "new_ones": _full(1),
    "new_zeros": _full(0),
    "numpy_T": _named("t"),
    "ones": _full(1),
    "ones_like": _full(1),
    "reshape_as": _reshape,
    "rsub.Tensor": _swapped_difference,
    "scalar_tensor": _full_as_given,
    "split.sizes": _named("split_with_sizes"),
    "std": _with_correction("std.correction"),
    "std.dim": _with_correction("std.correction"),
    "sub.Scalar": _named("sub.Tensor"),
    "to.device": _cast,
    "to.dtype": _cast,
    "to.dtype_layout": _cast,
    "to.other": _cast,
    "type_as": _cast,
    "unsafe_split.Tensor": _named("split.Tensor"),
    "var": _with_correction("var.correction"),
    "var.dim": _with_correction("var.correction"),
    "view": _reshape,
    "view_as": _reshape,
    "zeros": _full(0),
    "zeros_like": _full(0),
}
