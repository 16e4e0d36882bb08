"""Turning a model owner's module into a graph and its weights. The only place that runs the owner's own code."""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from fusion_p2p.errors import GraphError
from fusion_p2p.graph.fake import describe, fake_leaves, fake_run, fake_tensors, type_of
from fusion_p2p.graph.lowering import Lowered, lower
from fusion_p2p.graph.opset import OPERATOR_ERRORS
from fusion_p2p.graph.schema import DTYPE_BYTES, OPSET, Argument, Graph, Node, Parameter, Ref, Rule, Scalar, TensorType

_WRAPPER = "module."
"""Names of parameters in the exported program start with this, see `_LossOnly`."""

FORWARD_ERRORS = (*OPERATOR_ERRORS, ImportError, OSError)
"""What a model's own forward may raise."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured model.

    weights: tensors by state_dict name, tied ones once, for every parameter of the graph that the module holds in memory
    (none of those on the meta device). unused: what the module's state_dict holds but the loss does not read.
    """

    graph: Graph
    weights: dict[str, Tensor]
    unused: dict[str, Tensor]


class _LossOnly(nn.Module):
    """Returns nothing but the loss, so that logits and caches are never part of the graph."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **tensors: Tensor) -> Tensor:
        return _loss_of(self.module(**tensors))


def capture(module: nn.Module, example: Mapping[str, Tensor], rules: Mapping[str, Rule] | None = None) -> Captured:
    """Capture a module whose `forward(**example)` returns the loss of one micro-batch.

    The loss is a scalar: the result itself, its "loss" entry or its first item. The graph is fixed to the example's shapes
    and to the mode (training or evaluation) the module is in. `rules` give first values by state_dict name; a parameter on the
    meta device needs one. GraphError, in one sentence, for what cannot be captured.
    """
    _check_example(module, example)
    with _no_collection():
        program = _export(module, example)
        names = _Names(module, program)
        lowered = lower(program.graph_module, names.leaves, names.types)
        graph = _assemble(names, lowered, rules or {})
        graph = _proven(_without_dead(graph))
    return _with_weights(graph, names, module)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Tracing makes millions of objects that stay: looking for garbage again and again takes a quarter of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _loss_of(result: Any) -> Tensor:
    """The loss among what a forward returned."""
    loss = result
    if isinstance(result, Mapping):
        loss = result.get("loss")
    elif isinstance(result, (tuple, list)):
        loss = result[0] if result else None
    if not isinstance(loss, Tensor):
        raise GraphError(
            f"the model's forward returned {type(result).__name__} without a loss: return a scalar tensor, "
            'a mapping with "loss", or a tuple that starts with it'
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        raise GraphError(
            f"the loss has shape {tuple(loss.shape)} and dtype {loss.dtype}; it has to be one floating-point number"
        )
    return loss.reshape(())


def _check_example(module: nn.Module, example: Mapping[str, Tensor]) -> None:
    for name, tensor in example.items():
        if not isinstance(tensor, Tensor):
            raise GraphError(f"input {name!r} is a {type(tensor).__name__} instead of a tensor")
        if str(tensor.dtype).removeprefix("torch.") not in DTYPE_BYTES:
            raise GraphError(f"input {name!r} has dtype {tensor.dtype}; use one of {', '.join(DTYPE_BYTES)}")
        if tensor.numel() == 0:
            raise GraphError(f"input {name!r} is empty: its shape is {tuple(tensor.shape)}")
    parameters = inspect.signature(module.forward).parameters.values()
    accepts_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    known = [parameter.name for parameter in parameters]
    for name in example:
        if name not in known and not accepts_any:
            raise GraphError(f"the model's forward has no input {name!r}; it takes {', '.join(known)}")
    for parameter in parameters:
        positional = parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        if positional and parameter.default is inspect.Parameter.empty and parameter.name not in example:
            raise GraphError(f"the model's forward needs input {parameter.name!r}, but the data has only {', '.join(example)}")


def _export(module: nn.Module, example: Mapping[str, Tensor]) -> ExportedProgram:
    on_meta = any(tensor.is_meta for tensor in module.parameters())
    tensors = {name: tensor.to("meta") if on_meta else tensor for name, tensor in example.items()}
    wrapper = _LossOnly(module)
    wrapper.training = module.training
    try:
        with _no_custom_gradients(), warnings.catch_warnings():
            # Modules that keep lists of their own weights; what matters to us is checked afterwards.
            warnings.filterwarnings("ignore", "The tensor attributes? ", UserWarning)
            # The training IR, as it is: decompositions would tear attention and dropout apart.
            return torch.export.export(wrapper, (), tensors, strict=False)
    except GraphError:
        raise
    except FORWARD_ERRORS as error:
        reason = " ".join(str(error).split())[:300]
        raise GraphError(f"the model cannot be captured: {type(error).__name__}: {reason}") from error


@contextmanager
def _no_custom_gradients() -> Iterator[None]:
    """Refuse `torch.autograd.Function`: torch.export would keep its forward and silently forget its backward."""

    def apply(function: type[torch.autograd.Function], *arguments: Any, **named: Any) -> Any:
        raise GraphError(f"{function.__name__}, an autograd.Function with its own gradient, cannot be captured")

    patched: Any = torch.autograd.Function
    original = inspect.getattr_static(patched, "apply")
    patched.apply = classmethod(apply)
    try:
        yield
    finally:
        patched.apply = original


class _Names:
    """Inputs, parameters and buffers of an exported program: their fx placeholders, value numbers, names and types."""

    def __init__(self, module: nn.Module, program: ExportedProgram) -> None:
        self.tensors = dict(_named_tensors(module, program))
        specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        users = [node for node in placeholders if specs[node.name].kind is InputKind.USER_INPUT]
        self.inputs = _input_names(program, len(users))
        self.leaves: dict[fx.Node, int] = {node: index for index, node in enumerate(users)}
        self.types = [replace(type_of(node.meta["val"]), grad=False) for node in users]
        self.parameters: list[Parameter] = []
        by_identity: dict[int, int] = {}
        for node in placeholders:
            spec = specs[node.name]
            if spec.kind is InputKind.USER_INPUT:
                continue
            if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR) or spec.target is None:
                raise GraphError(f"the model reads {node.name}, a {spec.kind.name.lower()}, which cannot be captured")
            name = spec.target.removeprefix(_WRAPPER)
            tensor = self.tensors[name]
            number = by_identity.setdefault(id(tensor), len(self.types))
            if number == len(self.types):
                self._add(name, tensor, trainable=spec.kind is InputKind.PARAMETER and tensor.requires_grad)
            self.leaves[node] = number

    def _add(self, name: str, tensor: Tensor, *, trainable: bool) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise GraphError(f"parameter {name!r} has dtype {tensor.dtype}; use one of {', '.join(DTYPE_BYTES)}")
        aliases = tuple(other for other, same in self.tensors.items() if same is tensor and other != name)
        self.types.append(TensorType(tuple(tensor.shape), dtype, trainable))
        self.parameters.append(Parameter(name, trainable, aliases=aliases))


def _named_tensors(module: nn.Module, program: ExportedProgram) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under every name they have, then the constants that the forward made."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    for name, tensor in program.constants.items():
        if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter):
            yield name.removeprefix(_WRAPPER), tensor


def _input_names(program: ExportedProgram, count: int) -> tuple[str, ...]:
    """Names of the user's inputs in the order of their placeholders."""
    _, by_name = pytree.tree_unflatten(list(range(count)), program.call_spec.in_spec)
    return tuple(sorted(by_name, key=by_name.__getitem__))


def _assemble(names: _Names, lowered: Lowered, rules: Mapping[str, Rule]) -> Graph:
    first_parameter = len(names.inputs)
    parameters = []
    unknown = set(rules)
    for index, parameter in enumerate(names.parameters):
        matching = [name for name in (parameter.name, *parameter.aliases) if name in rules]
        unknown.difference_update(matching)
        parameters.append(
            replace(
                parameter,
                update=lowered.updates.get(first_parameter + index),
                rule=rules[matching[0]] if matching else None,
            )
        )
    unknown.difference_update(names.tensors)
    if unknown:
        raise GraphError(f"there are rules for {', '.join(sorted(unknown))}, which the model does not have")
    if lowered.output < first_parameter + len(parameters):
        raise GraphError("the loss is an input or a parameter itself: nothing is computed")
    return Graph(OPSET, names.inputs, tuple(parameters), tuple(lowered.nodes), tuple(lowered.types), (lowered.output,))


def _without_dead(graph: Graph) -> Graph:
    """Drop the nodes that neither the loss nor a buffer's update needs, and the parameters that nothing reads."""
    live = set(graph.outputs) | {parameter.update for parameter in graph.parameters if parameter.update is not None}
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if not live.isdisjoint(node.outputs):
            nodes.append(node)
            live.update(node.reads())
    nodes.reverse()
    first = graph.first_parameter
    kept = [
        index for index in range(len(graph.parameters)) if first + index in live or graph.parameters[index].update is not None
    ]
    order = [*range(first), *(first + index for index in kept), *(value for node in nodes for value in node.outputs)]
    return _renumbered(graph, kept, nodes, order)


def _renumbered(graph: Graph, kept: Sequence[int], nodes: Sequence[Node], order: Sequence[int]) -> Graph:
    """The graph of these parameters and nodes; `order` lists the old numbers of its values."""
    new = {old: number for number, old in enumerate(order)}

    def moved(argument: Argument) -> Argument:
        if isinstance(argument, tuple):
            return tuple(moved_scalar(item) for item in argument)
        return moved_scalar(argument)

    def moved_scalar(item: Scalar) -> Scalar:
        return Ref(new[item.value]) if isinstance(item, Ref) else item

    parameters = [graph.parameters[index] for index in kept]
    return Graph(
        graph.opset,
        graph.inputs,
        tuple(replace(item, update=None if item.update is None else new[item.update]) for item in parameters),
        tuple(
            replace(node, arguments={name: moved(item) for name, item in node.arguments.items()}, first=new[node.first])
            for node in nodes
        ),
        tuple(graph.types[old] for old in order),
        tuple(new[value] for value in graph.outputs),
    )


def _proven(graph: Graph) -> Graph:
    """Run the graph on fake tensors: shapes must be what torch saw when it exported, and gradients flow as they flow here."""
    types = list(graph.types)
    with fake_tensors():
        for index, node, outputs in fake_run(graph, fake_leaves(graph)):
            for value, output in zip(node.outputs, outputs, strict=True):
                found = type_of(output)
                if (found.shape, found.dtype) != (types[value].shape, types[value].dtype):
                    raise GraphError(f"{describe(index, node)} gives {found} where the model had {types[value]}")
                types[value] = found
    if not types[graph.outputs[0]].grad:
        raise GraphError("the loss does not depend on any trainable parameter")
    return replace(graph, types=tuple(types))


def _with_weights(graph: Graph, names: _Names, module: nn.Module) -> Captured:
    weights: dict[str, Tensor] = {}
    for parameter in graph.parameters:
        tensor = names.tensors[parameter.name]
        if not tensor.is_meta:
            weights[parameter.name] = tensor.detach()
        elif parameter.rule is None:
            raise GraphError(f"parameter {parameter.name!r} is on the meta device and has no rule for its first value")
    used = {name for parameter in graph.parameters for name in (parameter.name, *parameter.aliases)}
    unused = {name: tensor.detach() for name, tensor in module.state_dict().items() if name not in used}
    return Captured(graph, weights, unused)
