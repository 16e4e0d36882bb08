"""Runs the nodes of a slice in graph order, seeds random ones, frees values after their last use, names the node that fails."""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fusion_p2p.errors import SliceFailed
from fusion_p2p.graph.opset import OPERATOR_ERRORS, apply, is_random
from fusion_p2p.graph.schema import Graph, Node
from fusion_p2p.graph.slices import Slice
from fusion_p2p.wire.frames import Moment
from fusion_p2p.wire.job_messages import TrainingSettings

_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")
_REASON_LENGTH = 200


@dataclass(frozen=True, slots=True)
class _Step:
    """A node, and the values nobody in the slice reads after it."""

    node: Node
    random: bool
    dead: tuple[int, ...]


class Interpreter:
    """The nodes of one slice, ready to run any number of times on one device."""

    def __init__(
        self, graph: Graph, part: Slice, settings: TrainingSettings, device: torch.device, keep: Collection[int]
    ) -> None:
        """`keep` are the values wanted at the end of a run."""
        self._index = part.index
        self._seed = settings.seed
        self._device = device
        self._bf16 = settings.precision == "bf16"
        self._steps = _steps([graph.nodes[index] for index in part.nodes], keep)
        self._draws = any(step.random for step in self._steps)

    def run(self, values: dict[int, Tensor], at: Moment, *, training: bool) -> None:
        """Compute all nodes from the parameters and arrived values in `values`, which holds the kept values afterwards.

        SliceFailed names the node when an operator fails or memory runs out; then `values` is empty.
        """
        generator = _generator(self._device)
        node: Node | None = None
        reason = ""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16), _kept(generator, self._draws and training):
            try:
                for step in self._steps:
                    node = step.node
                    if step.random and training:
                        generator.manual_seed(node_seed(self._seed, at, node))
                    values.update(zip(node.outputs, apply(node, values, self._device, training=training), strict=True))
                    for value in step.dead:
                        del values[value]
            except OPERATOR_ERRORS as error:
                values.clear()
                reason = describe(error)
        if node is not None and reason:
            # Raised here, not in the except block: the first error's traceback would keep all intermediate values alive.
            where = f"{node.op}" + (f" of {node.module}" if node.module else "")
            raise SliceFailed(
                f"slice {self._index} failed in {where} at step {at.step}, micro-batch {at.micro_batch}: {reason}"
            )


def node_seed(seed: int, at: Moment, node: Node) -> int:
    """The seed of one random node's draw: of the run, the step, the micro-batch and the node alone, wherever it is computed."""
    packed = struct.pack("<4Q", seed, at.step, at.micro_batch, node.first)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"fusion node").digest(), "little")


def describe(error: BaseException) -> str:
    """An operator's error in one short line; never empty."""
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(words in text for words in _OUT_OF_MEMORY):
        return f"out of memory ({text[:_REASON_LENGTH]})"
    return f"{type(error).__name__}: {text[:_REASON_LENGTH]}"


def _steps(nodes: list[Node], keep: Collection[int]) -> tuple[_Step, ...]:
    last_use: dict[int, int] = {}
    for position, node in enumerate(nodes):
        for value in (*node.outputs, *node.reads()):
            last_use[value] = position
    dead: list[list[int]] = [[] for _ in nodes]
    for value, position in last_use.items():
        if value not in keep:
            dead[position].append(value)
    return tuple(_Step(node, is_random(node), tuple(gone)) for node, gone in zip(nodes, dead, strict=True))


def _generator(device: torch.device) -> torch.Generator:
    """The generator that torch's random operators draw from on this device."""
    if device.type == "cuda":
        current = torch.cuda.current_device()  # also makes sure that there are generators
        return torch.cuda.default_generators[current if device.index is None else device.index]
    return torch.default_generator


@contextlib.contextmanager
def _kept(generator: torch.Generator, seeded: bool) -> Iterator[None]:
    """Leave the generator afterwards as it was: it belongs to the process, not to this slice."""
    if not seeded:
        yield
        return
    before = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(before)
