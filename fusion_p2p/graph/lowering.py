"""From an exported program to a graph: every torch operator becomes one of `OPS` with all its arguments written out.

torch calls differ from the table in three ways, and each has its place here: other names or arguments for the same thing
(`rewrites.py`), calls that only rename a tensor (`renames`), and writes in place, after which every later use of the tensor
means the new value. A write into a slice becomes a new whole; one that other views would see is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fusion_p2p.errors import GraphError
from fusion_p2p.graph.bindings import Bindings
from fusion_p2p.graph.composites import is_composite, taken_apart
from fusion_p2p.graph.emission import Emitted
from fusion_p2p.graph.fake import type_of
from fusion_p2p.graph.rewrites import Arguments, is_contiguous, operator_name, renames, rewrite, where
from fusion_p2p.graph.schema import Argument, Node, Ref, Scalar, TensorType

_IGNORED_ARGUMENTS = frozenset(
    {
        "device",
        "pin_memory",
        "layout",
        "memory_format",
        "cudnn_enable",
        "cudnn_enabled",
        "non_blocking",
        "copy",
        "requires_grad",
    }
)
_DROPPED = frozenset({"_assert_tensor_metadata", "_assert_scalar", "_assert_async.msg", "sym_constrain_range_for_size"})
_IN_PLACE_REWRITES = frozenset({"copy_", "zero_", "fill_.Scalar", "fill_.Tensor", "detach_"})


@dataclass(frozen=True, slots=True)
class Lowered:
    """Nodes and types of all values, dead ones included; `updates` maps what was written in place to its new value."""

    nodes: list[Node]
    types: list[TensorType]
    updates: dict[int, int]
    output: int


def lower(graph_module: fx.GraphModule, leaves: dict[fx.Node, int], types: list[TensorType]) -> Lowered:
    """Lower all calls of an exported program whose single output is the loss.

    leaves: the value number of each placeholder (tied ones share a number); types: of those values, in order.
    GraphError names what cannot be lowered.
    """
    lowering = _Lowering(leaves, types)
    output = lowering.run(graph_module)
    if len(output) != 1 or not isinstance(output[0], fx.Node):
        raise GraphError("the model does not return one loss tensor")
    loss, updates = lowering.names.value(output[0]), lowering.updates()
    return Lowered(lowering.values.nodes, lowering.values.types, updates, loss)


@dataclass(frozen=True, slots=True)
class _Part:
    """How to put a part back: `scatter(whole, part, **arguments)`."""

    whole: fx.Node
    scatter: str
    arguments: Arguments


_SCATTERS = {"slice.Tensor": "slice_scatter", "select.int": "select_scatter"}


class _Lowering:
    def __init__(self, leaves: dict[fx.Node, int], types: list[TensorType]) -> None:
        self.values = Emitted(types)
        self.names = Bindings(leaves, len(types))
        self._num_leaves = len(types)
        self._parts: dict[fx.Node, _Part] = {}
        """Names of a slice or an item of another tensor: a write into one is a write into the whole."""

    def run(self, graph_module: fx.GraphModule) -> Any:
        """Lower all calls; the fx nodes that are returned."""
        for node in graph_module.graph.nodes:
            if node.op == "output":
                return node.args[0]
            if node.op == "call_function":
                self._call(graph_module, node)
        raise GraphError("the exported program has no output")

    def updates(self) -> dict[int, int]:
        """What was written into inputs and buffers: no gradient flows back through it."""
        return {leaf: self.values.detached(value) for leaf, value in self.names.written_leaves().items()}

    def _call(self, graph_module: fx.GraphModule, node: fx.Node) -> None:
        target = node.target
        if target is operator.getitem:
            self.names.bind_item(node, *node.args)
        elif isinstance(target, torch._ops.HigherOrderOperator):
            self._region(graph_module, node, str(target))
        elif isinstance(target, torch._ops.OpOverload):
            self._operator(node, target)
        else:
            raise GraphError(f"{operator_name(target)}{where(node)} cannot be captured: sizes have to be fixed numbers")

    def _region(self, graph_module: fx.GraphModule, node: fx.Node, name: str) -> None:
        """Inline the body of `torch.no_grad()` or of a disabled autocast."""
        if name == "wrap_with_set_grad_enabled":
            stops_gradient, body, arguments = not node.args[0], node.args[1], node.args[2:]
        elif name == "wrap_with_autocast" and not node.args[2]:
            stops_gradient, body, arguments = False, node.args[4], node.args[5:]
        elif name == "wrap_with_autocast":
            raise GraphError(f"autocast{where(node)} cannot be captured: leave precision to the peers (--precision)")
        else:
            raise GraphError(f"{name}{where(node)} cannot be captured: it is not in the operator table")
        inner = graph_module.get_submodule(str(body.target)) if isinstance(body, fx.Node) else None
        if not isinstance(inner, fx.GraphModule):
            raise GraphError(f"{name}{where(node)} cannot be captured: it has no body")
        results = self._inline(inner, arguments, stops_gradient=stops_gradient)
        self.names.bind_list(node, [self.names.value(item) for item in results], [self.names.storage(item) for item in results])

    def _inline(self, inner: fx.GraphModule, arguments: Sequence[Any], *, stops_gradient: bool) -> list[fx.Node]:
        """Lower the calls of a body where it is called; the names of what it returns."""
        placeholders = [item for item in inner.graph.nodes if item.op == "placeholder"]
        for placeholder, argument in zip(placeholders, arguments, strict=True):
            if isinstance(argument, fx.Node):
                self._enter(placeholder, argument, stops_gradient=stops_gradient)
        returned = self.run(inner)
        return [item for item in (returned if isinstance(returned, (tuple, list)) else [returned]) if isinstance(item, fx.Node)]

    def _composite(self, node: fx.Node, target: torch._ops.OpOverload) -> None:
        try:
            results = self._inline(*taken_apart(node, target), stops_gradient=False)
        except GraphError as error:
            raise GraphError(
                f"{operator_name(target)}{where(node)} cannot be captured: it is made of others, and {error}"
            ) from error
        if isinstance(node.meta["val"], (tuple, list)):
            self.names.bind_list(
                node, [self.names.value(item) for item in results], [self.names.storage(item) for item in results]
            )
        else:
            self.names.bind(node, self.names.value(results[0]), self.names.storage(results[0]))

    def _enter(self, placeholder: fx.Node, argument: fx.Node, *, stops_gradient: bool) -> None:
        value, storage = self.names.value(argument), self.names.storage(argument)
        if stops_gradient and self.values.types[value].grad:
            value = self.values.emit("detach", {"self": Ref(value)}, [placeholder.meta["val"]], argument)[0]
            storage = self.names.sealed_storage()
        self.names.bind(placeholder, value, storage)

    def _operator(self, node: fx.Node, target: torch._ops.OpOverload) -> None:
        name = operator_name(target)
        if name in _DROPPED:
            return
        if name.startswith("sym_"):
            raise GraphError(f"{name}{where(node)} cannot be captured: a shape depends on the content of tensors")
        if target._schema.arguments and target._schema.arguments[0].is_write:
            self._write_in_place(node, target, name)
            return
        arguments = self._arguments(node, target)
        result = node.meta["val"]
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and renames(name, arguments, node):
            copies = name in ("clone", "lift_fresh_copy") or (name == "contiguous" and not is_contiguous(source))
            storage = self.names.new_storage() if copies else self.names.storage(source)
            self.names.bind(node, self.names.value(source), storage)
            return
        if is_composite(target):
            self._composite(node, target)
            return
        if name == "batch_norm":
            outputs = self._batch_norm(node, arguments)
        elif name == "cat":
            outputs = self._concatenation(node, arguments)
        elif name == "broadcast_tensors":
            outputs = self._broadcast(node, arguments)
        else:
            outputs = self.values.emit(
                *rewrite(name, arguments, node), result if isinstance(result, (tuple, list)) else [result], node
            )
        if name in _SCATTERS and isinstance(source, fx.Node):
            self._parts[node] = _Part(source, _SCATTERS[name], {key: arguments[key] for key in arguments if key != "self"})
        shares = any(item.alias_info is not None for item in target._schema.returns)
        sources: Any = source if name == "broadcast_tensors" else [source if shares else None] * len(outputs)
        storages = [self.names.storage(item) if isinstance(item, fx.Node) else self.names.new_storage() for item in sources]
        if isinstance(result, (tuple, list)):
            self.names.bind_list(node, outputs, storages)
        else:
            self.names.bind(node, outputs[0], storages[0])

    def _concatenation(self, node: fx.Node, arguments: Arguments) -> list[int]:
        """torch lets `cat` join an empty tensor of any rank (an empty cache, say); graphs have no empty tensors."""
        tensors = arguments["tensors"]
        items = tensors if isinstance(tensors, tuple) else ()
        kept = tuple(item for item in items if isinstance(item, Ref) and self.values.types[item.value].num_elements > 0)
        if len(kept) == 1:
            return [kept[0].value]
        return self.values.emit("cat", {"tensors": kept, "dim": arguments["dim"]}, [node.meta["val"]], node)

    def _broadcast(self, node: fx.Node, arguments: Arguments) -> list[int]:
        tensors = arguments["tensors"]
        outputs: list[int] = []
        for item, result in zip(tensors if isinstance(tensors, tuple) else (), node.meta["val"], strict=True):
            shape = type_of(result).shape
            if isinstance(item, Ref) and self.values.types[item.value].shape == shape:
                outputs.append(item.value)
            else:
                outputs += self.values.emit("expand", {"self": item, "size": shape, "implicit": False}, [result], node)
        return outputs

    def _write_in_place(self, node: fx.Node, target: torch._ops.OpOverload, name: str) -> None:
        """`x.op_()` becomes `new = op(x)`, and every later use of x, under any name, means `new`."""
        written = node.args[0]
        if not isinstance(written, fx.Node):
            raise GraphError(f"{name}{where(node)} writes in place into what is not one tensor")
        arguments = self._arguments(node, target)
        if name in _IN_PLACE_REWRITES:
            new = self._overwritten(node, name, arguments)
        else:
            packet, _, overload = name.partition(".")
            pure = packet.removesuffix("_") + (f".{overload}" if overload else "")
            if renames(pure, arguments, node):
                new = self.names.value(written)
            else:
                new = self.values.emit(*rewrite(pure, arguments, node), [node.meta["val"]], node)[0]
        self._write(node, written, new)
        self.names.bind(node, new, self.names.storage(written))

    def _overwritten(self, node: fx.Node, name: str, arguments: Arguments) -> int:
        """The value of x after `x.copy_()`, `x.fill_()`, `x.zero_()` or `x.detach_()`."""
        result: Tensor = node.meta["val"]
        item = type_of(result)
        if name == "detach_":
            value = arguments["self"]
            if isinstance(value, Ref) and not self.values.types[value.value].grad:
                return value.value
            return self.values.emit("detach", {"self": value}, [result], node)[0]
        source: Argument = {"zero_": 0}.get(name, arguments.get("value", arguments.get("src")))
        if not isinstance(source, Ref):
            full: Arguments = {"size": item.shape, "fill_value": source, "dtype": item.dtype}
            return self.values.emit("full", full, [result], node)[0]
        if self.values.types[source.value].dtype != item.dtype:
            fake: Tensor = result.new_empty(self.values.types[source.value].shape)
            source = Ref(self.values.emit("cast", {"input": source, "dtype": item.dtype}, [fake], node)[0])
        if self.values.types[source.value].shape != item.shape:
            source = Ref(self.values.emit("expand", {"self": source, "size": item.shape, "implicit": False}, [result], node)[0])
        return self.values.emit("clone", {"self": source}, [result], node)[0]

    def _write(self, node: fx.Node, written: fx.Node, new: int) -> None:
        old = self.names.value(written)
        call = f"{operator_name(node.target)}{where(node)}"
        if old < self._num_leaves and self.values.types[old].grad:
            raise GraphError(f"{call} writes in place into a trainable parameter, which cannot be captured")
        part = self._parts.get(written)
        if part is None:
            self.names.write(written, new, call)
            return
        arguments = {"self": Ref(self.names.value(part.whole)), "src": Ref(new), **part.arguments}
        self._write(node, part.whole, self.values.emit(part.scatter, arguments, [part.whole.meta["val"]], node)[0])
        self.names.bind(written, new, self.names.storage(written))

    def _batch_norm(self, node: fx.Node, arguments: Arguments) -> list[int]:
        """torch writes the running statistics although its schema does not say so; here they are outputs."""
        names: tuple[str, ...] = ("input", "weight", "bias", "eps")
        result = [node.meta["val"]]
        if arguments["running_mean"] is None:
            return self.values.emit("batch_norm_by_batch", {name: arguments[name] for name in names}, result, node)
        names = (*names, "running_mean", "running_var")
        if not arguments["training"]:
            return self.values.emit("batch_norm_evaluate", {name: arguments[name] for name in names}, result, node)
        mean, variance = node.args[3], node.args[4]
        if not isinstance(mean, fx.Node) or not isinstance(variance, fx.Node):
            raise GraphError(f"batch_norm{where(node)} has a running mean without a running variance")
        results = [*result, mean.meta["val"], variance.meta["val"]]
        outputs = self.values.emit("batch_norm", {name: arguments[name] for name in (*names, "momentum")}, results, node)
        for statistic in outputs[1:]:
            self.values.types[statistic] = replace(self.values.types[statistic], grad=False)
        self._write(node, mean, outputs[1])
        self._write(node, variance, outputs[2])
        return outputs[:1]

    def _arguments(self, node: fx.Node, target: torch._ops.OpOverload) -> Arguments:
        """All arguments of a call by their schema names, defaults written out."""
        schema = target._schema.arguments
        given = dict(zip((argument.name for argument in schema), node.args, strict=False)) | dict(node.kwargs)
        for argument in schema:
            if argument.name not in given and argument.has_default_value():
                given[argument.name] = argument.default_value
        return {
            name: self._argument(item, node)
            for name, item in given.items()
            if name not in _IGNORED_ARGUMENTS or isinstance(item, fx.Node)
        }

    def _argument(self, item: Any, node: fx.Node) -> Argument:
        if isinstance(item, (list, tuple)):
            return tuple(self._scalar(part, node) for part in item)
        return self._scalar(item, node)

    def _scalar(self, item: Any, node: fx.Node) -> Scalar:
        if isinstance(item, fx.Node):
            if not isinstance(item.meta.get("val"), Tensor):
                raise GraphError(f"{item.name}{where(item)} is a size that is not fixed, which cannot be captured")
            return Ref(self.names.value(item))
        if isinstance(item, torch.dtype):
            return str(item).removeprefix("torch.")
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        raise GraphError(
            f"{operator_name(node.target)}{where(node)} has an argument of type {type(item).__name__}, which graphs do not have"
        )
