"""The runs of the convergence bench: models, codecs, and one run of them with its losses, bytes and seconds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contrib.benchmarks.coded_run import NOTHING, CodedRun, Traffic
from fusion_p2p.graph.capture import capture
from fusion_p2p.graph.cut_layers import CutLayers, cut_values, insert
from fusion_p2p.graph.initial import initial_projections
from fusion_p2p.graph.schema import Graph
from fusion_p2p.job.learning_rate import RateSettings, rate
from fusion_p2p.models.catalogue import build
from fusion_p2p.owner.data import DataSet
from fusion_p2p.owner.images import digits
from fusion_p2p.owner.text import Text, TextData, stdlib_text
from fusion_p2p.wire.job_messages import OptimiserSettings, TrainingSettings

SLICES = 4
BOTH_SEEDS = (0, 1)
UNCHANGED = CutLayers()
Phase = tuple[float, tuple[str, ...]]
"""From which share of the steps on, and the codec of each border (the last one for the rest)."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What all cases of a model have in common. window: positions that attention sees. curve_every: in steps."""

    model: str = "gpt2"
    width: int = 128
    context: int = 64
    window: int = 4
    micro_batch_size: int = 16
    micro_batches: int = 2
    steps: int = 600
    warmup: int = 50
    peak: float = 1e-3
    curve_every: int = 50
    curve_batches: int = 16
    final_batches: int = 48


TEXT = Settings()
DEPTH = Settings(width=96, context=32, window=2, micro_batch_size=64, peak=3e-3)
"""Where depth matters more: four blocks see five bytes and two see three, and steps of 4 KB teach more of what that is worth.

With TEXT two blocks see seven bytes, and 600 steps of 2 KB teach four blocks hardly more.
"""
DIGITS = Settings(
    model="resnet", micro_batch_size=32, steps=200, warmup=20, peak=2e-3, curve_every=25, curve_batches=5, final_batches=5
)


@dataclass(frozen=True, slots=True)
class Case:
    """A run: how the model is changed at its cuts, and what crosses when. `layers` under SLICES: one slice, a control."""

    name: str
    title: str
    phases: tuple[Phase, ...] = ((0.0, ("none",)),)
    cut_layers: CutLayers = UNCHANGED
    layers: int = SLICES
    seeds: tuple[int, ...] = BOTH_SEEDS


@dataclass(slots=True)
class Result:
    """What a run showed; losses are of validation, in nats, after the last step and (as exported) on the way.

    ratio: bytes that dense float32 would have sent at the cuts of the unchanged model over those sent.
    phases: for each, its first step, and bytes per micro-batch of each border there and back.
    """

    case: str
    seed: int
    coded: float
    exported: float
    curve: list[tuple[int, float]]
    bytes_per_step: float
    ratio: float
    forward_s: list[float]
    backward_s: list[float]
    phases: list[tuple[int, list[float], list[float]]] = field(default_factory=list)


def keeping(width: int, keep: int, values: str = "int8") -> str:
    """The codec that sends `keep` of each place's `width` numbers."""
    return f"topk:{width / keep:.6f}:{values}"


def text_cases(settings: Settings = TEXT) -> tuple[Case, ...]:
    """Codecs and cut layers on the text model, with their controls."""
    width = settings.width
    many, few = round(width / 4.85), round(width / 10)
    side, neck = CutLayers(embedding=True), CutLayers(embedding=True, rank=width // 8)
    return (
        Case("dense", "dense fp32, 4 layers"),
        Case("int8", "int8", ((0.0, ("int8",)),)),
        Case("7x", "int4, rotated", ((0.0, ("int4",)),)),
        Case("16x_finished", "topk 31x, last third int4", ((0.0, (keeping(width, few),)), (2 / 3, ("int4",)))),
        Case("16x_kept", "topk 16x, mask kept", ((0.0, (keeping(width, many),)),), CutLayers(keep=many)),
        Case("30x_kept", "topk 31x, mask kept", ((0.0, (keeping(width, few),)),), CutLayers(keep=few)),
        Case("bottleneck_31x", "cut embedding, bottleneck, int8", ((0.0, ("int8",)),), neck),
        Case("cut_embedding", "dense fp32, cut embedding", cut_layers=side),
        Case("control", "cuts carry nothing, cut embedding", ((0.0, (NOTHING,)),), side),
        Case("one_layer", "dense fp32, 1 layer", layers=1),
        Case("two_layers", "dense fp32, 2 layers", layers=2),
        Case("bf16", "bf16", ((0.0, ("bf16",)),), seeds=(0,)),
        Case("16x_rung", "topk 16x, last quarter int8", ((0.0, (keeping(width, many),)), (0.75, ("int8",))), seeds=(0,)),
        Case("adatopk_100", "AdaTopK 100 literal", ((0.0, ("topk-paper:6", "topk-paper:300", "topk-paper:30")),), seeds=(0,)),
        Case("independent_10", "independent TopK 10", ((0.0, ("topk-independent:10:fp16",)),), seeds=(0,)),
    )


def depth_cases() -> tuple[Case, ...]:
    """The cases of the text model that are held to something."""
    controls = ("dense", "control", "one_layer", "two_layers")
    codecs = ("int8", "7x", "16x_finished", "16x_kept", "30x_kept", "bottleneck_31x")
    return tuple(case for case in text_cases(DEPTH) if case.name in controls + codecs)


def digit_cases() -> tuple[Case, ...]:
    """Codecs on the ResNet."""
    return (
        Case("digits_dense", "ResNet on digits, dense"),
        Case("digits_int8", "ResNet on digits, int8", ((0.0, ("int8",)),)),
        Case("digits_7x", "ResNet on digits, int4", ((0.0, ("int4",)),)),
        Case("digits_16x", "ResNet on digits, topk 16x, last quarter int8", ((0.0, ("topk:5",)), (0.75, ("int8",)))),
        Case("digits_independent_10", "ResNet on digits, independent TopK 10", ((0.0, ("topk-independent:10:fp16",)),)),
    )


def run(case: Case, seed: int, settings: Settings) -> Result:
    """Train once, on one thread. Runs of equal seeds begin with equal weights and see equal batches."""
    torch.set_num_threads(1)
    trial = _Trial(case, seed, settings)
    trial.train()
    return trial.result()


@dataclass(frozen=True, slots=True)
class _Model:
    """A captured and cut model; `dense_bytes` cross per micro-batch and direction when nothing is changed or coded."""

    graph: Graph
    slice_of: tuple[int, ...]
    weights: dict[str, Tensor]
    dense_bytes: int


class _Trial:
    """One run and what it has shown so far."""

    def __init__(self, case: Case, seed: int, settings: Settings) -> None:
        self.case, self.seed, self.settings = case, seed, settings
        self.data = _data(settings, seed)
        self.model = _model(case, settings, self.data, seed)
        optimiser = OptimiserSettings(name="adamw", beta2=0.95, weight_decay=0.1)
        training = TrainingSettings(seed=seed, optimiser=optimiser)
        self.coded = CodedRun(self.model.graph, self.model.slice_of, training, self.model.weights, settings.micro_batches)
        self.starts = {1 + round(share * settings.steps): codecs for share, codecs in case.phases}
        self.traffic: dict[int, Traffic] = {}
        self.curve: list[tuple[int, float]] = []

    def train(self) -> None:
        """All steps, or those before the loss is no number any more."""
        settings = self.settings
        rates = RateSettings(settings.peak, "cosine", settings.warmup, settings.steps)
        for step in range(1, settings.steps + 1):
            if step in self.starts:
                self.coded.use(self.starts[step])
                self.coded.traffic = self.traffic[step] = Traffic()
            batches = [self.data.micro_batch(step, index) for index in range(settings.micro_batches)]
            if not math.isfinite(self.coded.train(step, batches, rate(rates, step), max_norm=1.0)):
                return
            if step % settings.curve_every == 0:
                self.curve.append((step, self._loss(settings.curve_batches, coded=False)))

    def result(self) -> Result:
        crossings = sum(part.micro_batches for part in self.traffic.values())
        sent = sum(part.num_bytes for part in self.traffic.values())
        return Result(
            case=self.case.name,
            seed=self.seed,
            coded=self._loss(self.settings.final_batches, coded=True),
            exported=self._loss(self.settings.final_batches, coded=False),
            curve=self.curve,
            bytes_per_step=sent / crossings * self.settings.micro_batches,
            ratio=2 * crossings * self.model.dense_bytes / sent if sent else 0.0,
            forward_s=[seconds / crossings for seconds in self.coded.forward_s],
            backward_s=[seconds / crossings for seconds in self.coded.backward_s],
            phases=[(step, *_per_micro_batch(part)) for step, part in self.traffic.items()],
        )

    def _loss(self, count: int, *, coded: bool) -> float:
        batches = [self.data.validation(index) for index in range(min(count, self.data.num_validation))]
        return self.coded.evaluate(batches, coded=coded)


def _per_micro_batch(traffic: Traffic) -> tuple[list[float], list[float]]:
    """Bytes of each border there and back."""
    borders = sorted(traffic.forward)
    there, back = (
        [way.get(border, 0) / traffic.micro_batches for border in borders] for way in (traffic.forward, traffic.backward)
    )
    return there, back


def _model(case: Case, settings: Settings, data: DataSet, seed: int) -> _Model:
    """The graph in slices of one block each, or in one slice."""
    built = build(settings.model, _options(case, settings) | dict(data.model_defaults))
    graph = capture(built.module, data.example(), built.rules).graph
    if case.layers < SLICES:
        return _Model(graph, (0,) * len(graph.nodes), {}, 0)
    values = _block_ends(graph, "h." if settings.model == "gpt2" else "layers.")[: SLICES - 1]
    dense_bytes = sum(graph.types[value].num_bytes for value in values)
    if case.cut_layers == UNCHANGED:
        return _Model(graph, _cut_at(graph, values), {}, dense_bytes)
    made = insert(graph, values, case.cut_layers)
    weights = initial_projections(made.projections, seed)
    return _Model(made.graph, _cut_at(made.graph, made.borders), weights, dense_bytes)


def _options(case: Case, settings: Settings) -> dict[str, object]:
    if settings.model == "resnet":
        return {"blocks": (1,) * SLICES, "width": 8}
    text = {"layers": case.layers, "width": settings.width, "heads": 4, "context": settings.context, "window": settings.window}
    return text | {"dropout": 0.0, "tied": False}


def _block_ends(graph: Graph, prefix: str) -> list[int]:
    """The last value of each block that alone crosses."""
    module = {node.first: node.module for node in graph.nodes}
    ends: dict[str, int] = {}
    for value in cut_values(graph):
        if module[value].startswith(prefix):
            ends[".".join(module[value].split(".")[:2])] = value
    return list(ends.values())


def _cut_at(graph: Graph, borders: Sequence[int]) -> tuple[int, ...]:
    """The slice of each node when those values are the last of their slices."""
    return tuple(sum(node.first > border for border in borders) for node in graph.nodes)


def _data(settings: Settings, seed: int) -> DataSet:
    if settings.model == "resnet":
        return digits(settings.micro_batch_size, settings.micro_batches, seed)
    return TextData(_text(), settings.context, settings.micro_batch_size, seed)


@cache
def _text() -> Text:
    return stdlib_text()


def remembered(case: Case, seed: int, settings: Settings, folder: Path) -> Result:
    """The result of a run, from `folder` if just this run was made before."""
    path = folder / f"{case.name}-{seed}.json"
    made_of = repr((case, settings))
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        if found["made_of"] == made_of:
            return Result(**found["result"])
    result = run(case, seed, settings)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"made_of": made_of, "result": asdict(result)}))
    return result
