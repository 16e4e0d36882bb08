"""One slice at work: remote autodiff over its part of the graph, for many micro-batches in flight.

A slice may have replicas, each with micro-batches of its own: what they have to agree on (`shared`: gradients, and the new
values of buffers) is exchanged once a step.

A step is a transaction. Until `update`, nothing changes that a repetition of the step would see: gradients accumulate beside
the parameters and new buffer values (BatchNorm's statistics) are kept aside. Sums are taken in a fixed order: micro-batches in
their order, several consumers of a value in slice order, everything else as torch's autograd does, so that a chain of slices
gives the bits of a plain `(loss / n).backward()` loop.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusion_p2p.compress.dense import all_finite
from fusion_p2p.errors import SliceFailed
from fusion_p2p.execute.arrivals import Arrivals
from fusion_p2p.execute.interpreter import Interpreter, describe
from fusion_p2p.execute.optimiser import UpdatePoint, update
from fusion_p2p.execute.state import HALF_APPLIED, SliceState
from fusion_p2p.graph.opset import OPERATOR_ERRORS, TORCH_DTYPES
from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Slice
from fusion_p2p.plan.plan import Turns
from fusion_p2p.wire.frames import Moment
from fusion_p2p.wire.job_messages import TrainingSettings


@dataclass(frozen=True, slots=True)
class _Tape:
    """A forward pass that can be differentiated: received values as leaves, and what was made of them, by value number."""

    leaves: Mapping[int, Tensor]
    outgoing: Mapping[int, Tensor]
    buffers: Mapping[int, Tensor]


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A micro-batch between its forward and its backward pass; without a tape it is computed again from the rest."""

    arrived: Mapping[int, Tensor]
    buffers: Mapping[int, Tensor]
    tape: _Tape | None


class SliceExecutor:
    """Forward, backward and update of one slice. Not thread-safe: all calls belong on the process's compute thread.

    After SliceFailed the slice can be used again once `abort_step` has forgotten the open step.
    """

    def __init__(
        self,
        graph: Graph,
        part: Slice,
        state: SliceState,
        settings: TrainingSettings,
        *,
        micro_batches: int,
        recompute: bool,
        turns: Turns = Turns(),  # noqa: B008 - frozen
    ) -> None:
        """`state` belongs to this executor from now on, which computes where it lies; `turns`: its share of `micro_batches`."""
        self.state = state
        self._graph = graph
        self._part = part
        self._settings = settings
        self._device = state.device
        self.micro_batches = micro_batches
        self._turns = turns
        self._recompute = recompute
        self._trainable = tuple(value for value in part.parameters if graph.parameter(value).trainable)
        held = ((value, graph.parameter(value).update) for value in part.parameters)
        self._updated_by = {buffer: source for buffer, source in held if source is not None}
        self._wanted = tuple(sorted({*part.sends, *part.outputs}))
        self._arrivals = Arrivals(graph, part, state.device)
        self._interpreter = Interpreter(graph, part, settings, state.device, {*self._wanted, *self._updated_by.values()})
        self._in_flight: dict[int, _InFlight] = {}
        self._buffers: dict[int, Tensor] = {}
        self._backward_done: set[int] = set()

    def forward(self, step: int, micro_batch: int, arrived: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The sent values and outputs, without history. `arrived` holds exactly the slice's inputs and received values.

        SliceFailed when they have other types or indices out of range, an operator fails, or it is not this micro-batch's turn.
        """
        self._expect_step(step)
        known = micro_batch in self._in_flight or micro_batch in self._backward_done
        if known or not 0 <= micro_batch < self.micro_batches or micro_batch not in self._turns:
            raise SliceFailed(f"slice {self._part.index} cannot run micro-batch {micro_batch} of step {step} (again)")
        values, buffers = self._arrivals.check(arrived), dict(self._buffers)
        tape = self._record(Moment(step, micro_batch), values, buffers)
        self._buffers.update(tape.buffers)
        self._in_flight[micro_batch] = _InFlight(values, buffers, None if self._recompute else tape)
        return {value: tensor.detach() for value, tensor in tape.outgoing.items()}

    def backward(
        self, step: int, micro_batch: int, gradients: Mapping[int, Sequence[Tensor | None]]
    ) -> dict[int, Tensor | None]:
        """Take the gradients of sent values, one per consumer in slice order, and return those of the received values.

        The loss's own gradient, 1 / micro_batches, is added inside. None says that no gradient flows. Parameter gradients
        accumulate until `update`, `skip` or `abort_step`. SliceFailed for other types than declared, or a failing operator.
        """
        self._expect_step(step)
        kept = self._in_flight.pop(micro_batch, None)
        if kept is None:
            raise SliceFailed(f"slice {self._part.index} has no forward pass of micro-batch {micro_batch} of step {step}")
        at = Moment(step, micro_batch)
        seeds = self._seeds(gradients)
        tape = kept.tape or self._record(at, kept.arrived, kept.buffers)
        roots = [value for value in seeds if tape.outgoing[value].requires_grad]
        self._differentiate([tape.outgoing[value] for value in roots], [seeds[value] for value in roots], at)
        self._backward_done.add(micro_batch)
        return {value: leaf.grad for value, leaf in tape.leaves.items()}

    def evaluate(self, step: int, micro_batch: int, arrived: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Sent values and outputs as `forward` gives them, with dropout off and buffers as they are; changes nothing."""
        if self.state.step == HALF_APPLIED:
            raise SliceFailed(f"slice {self._part.index} is half-way through an update and has to be restored")
        values = self.state.parameters | self._arrivals.check(arrived)
        with torch.no_grad():
            self._interpreter.run(values, Moment(step, micro_batch), training=False)
            return {value: self._as_declared(value, values[value]).detach() for value in self._wanted}

    def shared(self, parameter: int) -> Tensor:
        """What is exchanged of a parameter that others hold too: its gradient over the step so far, or a buffer's new value.

        Zeros when there is no gradient; a buffer that no forward pass has updated is as it was.
        """
        tensor = self.state.parameters[parameter]
        if not self._graph.parameter(parameter).trainable:
            return self._buffers.get(parameter, tensor)
        return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.detach()

    def set_shared(self, parameter: int, tensor: Tensor) -> None:
        """Replace it by what all holders agreed on. SliceFailed when it has another type than the parameter."""
        agreed = self._arrivals.check_type(parameter, tensor).detach().clone()
        if self._graph.parameter(parameter).trainable:
            self.state.parameters[parameter].grad = agreed
        else:
            self._buffers[parameter] = agreed

    def combine(self, parameter: int, terms: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
        """What the holders agree on, from what each of them shared, in order; `counts` are their numbers of micro-batches.

        The terms may lie on the host: they come to the device one after another.
        Gradients are summed. Of a buffer that counts (integers) the increments are summed; of one that averages, like the
        statistics of BatchNorm, the mean is taken, weighted by micro-batches: each replica has averaged over its own.
        """
        here = (term.to(self._device) for term in terms)
        if self._graph.parameter(parameter).trainable:
            return sum_in_order(here)
        before = self.state.parameters[parameter]
        if not before.is_floating_point():
            return before + sum_in_order(term - before for term in here)
        weighted = (term.to(torch.float64) * (count / sum(counts)) for term, count in zip(here, counts, strict=True))
        return sum_in_order(weighted).to(before.dtype)

    def squares(self, parameters: Iterable[int]) -> tuple[float, ...]:
        """The sum of squares of each parameter's gradient, in float64; infinite or NaN when the gradient is."""
        return tuple(_sum_of_squares(self.state.parameters[value].grad) for value in parameters)

    def update(self, step: int, clip: float, rate: float) -> None:
        """Apply the step: gradients times `clip`, then the optimiser at this learning rate, then the new buffer values.

        SliceFailed when the step is not complete; or when memory runs out half-way, after which the state must be restored.
        """
        self._expect_step(step)
        done, own = len(self._backward_done), self._turns.before(self.micro_batches)
        if done != own:
            raise SliceFailed(f"slice {self._part.index} has done {done} of {own} micro-batches of step {step}")
        self.state.step = HALF_APPLIED
        try:
            self._apply(clip, UpdatePoint(rate, step))
        except OPERATOR_ERRORS as error:
            raise SliceFailed(f"slice {self._part.index} failed half-way through update {step}: {describe(error)}") from None
        self.abort_step()
        self.state.step = step

    def skip(self, step: int) -> None:
        """Pass over a step: its gradients and new buffer values are forgotten."""
        self._expect_step(step)
        self.abort_step()
        self.state.step = step

    def abort_step(self) -> None:
        """Forget all micro-batches, gradients and new buffer values of the open step; it can be run again."""
        self._in_flight.clear()
        self._buffers.clear()
        self._backward_done.clear()
        for value in self._trainable:
            self.state.parameters[value].grad = None

    def _expect_step(self, step: int) -> None:
        if step != self.state.step + 1 or self.state.step == HALF_APPLIED:
            raise SliceFailed(f"slice {self._part.index} has the state of step {self.state.step}: it cannot run step {step}")

    def _record(self, at: Moment, arrived: Mapping[int, Tensor], buffers: Mapping[int, Tensor]) -> _Tape:
        leaves = {value: arrived[value].detach().requires_grad_() for value in self._part.receives if self._has_gradient(value)}
        values = {**self.state.parameters, **buffers, **arrived, **leaves}
        self._interpreter.run(values, at, training=True)
        outgoing = {value: self._as_declared(value, values[value]) for value in self._wanted}
        updated = {buffer: self._as_declared(buffer, values[source].detach()) for buffer, source in self._updated_by.items()}
        return _Tape(leaves, outgoing, updated)

    def _has_gradient(self, value: int) -> bool:
        return self._graph.types[value].grad

    def _as_declared(self, value: int, tensor: Tensor) -> Tensor:
        """Under autocast a value may be in bfloat16; what leaves the slice has the dtype that the graph declares."""
        return tensor.to(TORCH_DTYPES[self._graph.types[value].dtype])

    def _seeds(self, gradients: Mapping[int, Sequence[Tensor | None]]) -> dict[int, Tensor]:
        """The gradient of each sent value and output that has one."""
        expected = {value for value in self._part.sends if self._has_gradient(value)}
        if gradients.keys() != expected:
            odd = sorted(gradients.keys() ^ expected)
            raise SliceFailed(f"slice {self._part.index} needs gradients of {sorted(expected)}: {odd} are missing or surplus")
        seeds: dict[int, Tensor] = {}
        for value in self._wanted:
            terms = [self._arrivals.check_type(value, term) for term in gradients.get(value, ()) if term is not None]
            if value in self._part.outputs and self._has_gradient(value):
                terms.append(self._loss_gradient(value))
            if terms:
                seeds[value] = sum_in_order(terms)
        return seeds

    def _loss_gradient(self, value: int) -> Tensor:
        declared = self._graph.types[value]
        one = torch.ones(declared.shape, dtype=TORCH_DTYPES[declared.dtype], device=self._device)
        return one / self.micro_batches

    def _differentiate(self, roots: Sequence[Tensor], seeds: Sequence[Tensor], at: Moment) -> None:
        if not roots:
            return
        reason = ""
        try:
            torch.autograd.backward(roots, seeds)
        except OPERATOR_ERRORS as error:
            reason = describe(error)
        if reason:
            where = f"at step {at.step}, micro-batch {at.micro_batch}"
            raise SliceFailed(f"slice {self._part.index} failed in its backward pass {where}: {reason}")

    def _apply(self, clip: float, at: UpdatePoint) -> None:
        for value in self._trainable:
            parameter = self.state.parameters[value]
            if parameter.grad is None:
                continue
            gradient = parameter.grad if clip == 1.0 else parameter.grad.mul_(clip)
            moments = {kind: by_value[value] for kind, by_value in self.state.moments.items()}
            update(self._settings.optimiser, parameter, gradient, moments, at)
            parameter.grad = None
        for buffer, tensor in self._buffers.items():
            self.state.parameters[buffer] = tensor.clone(memory_format=torch.contiguous_format)


def first_non_finite(graph: Graph, values: Mapping[int, Tensor]) -> str | None:
    """Which of some values holds a NaN or an infinity, and the op that computed it; None when all are finite."""
    for value in sorted(values):
        tensor = values[value]
        if tensor.is_floating_point() and not all_finite(tensor):
            return f"value {value}, {_origin(graph, value)}, is not finite"
    return None


def _origin(graph: Graph, value: int) -> str:
    for node in graph.nodes:
        if value in node.outputs:
            return f"computed by {node.op}" + (f" of {node.module}" if node.module else "")
    return f"parameter {graph.parameter(value).name}" if graph.is_parameter(value) else f"input {graph.inputs[value]}"


def sum_in_order(terms: Iterable[Tensor]) -> Tensor:
    """The sum from the first term on: one order, so that every run has the same bits."""
    return functools.reduce(torch.add, terms)


def _sum_of_squares(gradient: Tensor | None) -> float:
    if gradient is None:
        return 0.0
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
