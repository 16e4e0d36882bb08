"""Three real peers against plain PyTorch in one process: the loss of every step, 60 steps, no compression, float32.

Beside each difference stands the drift that float32 itself is worth: the reference against itself with the micro-batches of
every step in reverse order, which is the same run in exact arithmetic.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from contrib.benchmarks.swarm import Swarm, running_swarm
from contrib.reference.loop import reference_run
from contrib.reference.modules import config_of_run, reference_of, relative_difference
from fusion_p2p.config import TrainConfig
from fusion_p2p.execute.slice import SliceExecutor
from fusion_p2p.execute.state import SliceState
from fusion_p2p.graph.encoding import decode_graph
from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Slice, cut
from fusion_p2p.job.clipping import clip_coefficient
from fusion_p2p.job.learning_rate import RateSettings, rate
from fusion_p2p.owner.data import DataSet, open_data
from fusion_p2p.owner.export import export_state_dict
from fusion_p2p.owner.metrics import read_curves
from fusion_p2p.wire.job_messages import OptimiserSettings, TrainingSettings

STEPS = 60
LEARNS = 0.30
"""The loss of every case must fall by this share, or equal losses would prove little."""
GPT2 = (
    "--model", "gpt2", "--layers", "4", "--width", "64", "--heads", "4", "--context", "64", "--dropout", "0",
    "--data", "stdlib-text",
    "--batch-size", "16", "--micro-batches", "4",
)  # fmt: skip
RESNET = (
    "--model", "resnet", "--option", "blocks=[1,1]", "--width", "16", "--data", "digits", "--batch-size", "64",
    "--micro-batches", "4",
)  # fmt: skip
SGD = ("--optimiser", "sgd", "--learning-rate", "0.02", "--momentum", "0.9")
ADAM = ("--optimiser", "adam", "--learning-rate", "1e-3", "--warmup", "10", "--clip", "1.0")
CASES: dict[str, tuple[str, ...]] = {
    "parity_sgd": (*GPT2, *SGD, "--no-tied"),
    "parity_adam_clip": (*GPT2, *ADAM, "--no-tied"),
    "parity_tied": (*GPT2, *SGD, "--tied"),
    "parity_resnet": (*RESNET, *SGD),
}
DROPOUT = (*(word if word != "0" else "0.1" for word in GPT2), *ADAM, "--no-tied")
COMMON = ("--peers", "3", "--steps", str(STEPS), "--seed", "1", "--validate-every", "0", "--checkpoint-every", "30")


def measure(only: Iterable[str] = ()) -> dict[str, float]:
    """All cases, or some by name, on one swarm of three peers; prints a table."""
    torch.set_num_threads(1)
    wanted = set(only) or {*CASES, "parity_dropout"}
    table = Table(title="3 peers against one process", title_justify="left")
    for heading in ("case", "loss first", "last", "largest difference", "reversed micro-batches"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="fusion-parity-") as folder, running_swarm(Path(folder), 3) as swarm:
        for name in [name for name in CASES if name in wanted]:
            figures[name] = _plain(swarm, name, table)
        if "parity_dropout" in wanted:
            figures["parity_dropout"] = _dropout(swarm, table)
    Console(width=100, highlight=False).print(table)
    return figures


def _plain(swarm: Swarm, name: str, table: Table) -> float:
    """Train over the peers, then by plain PyTorch forwards and reversed."""
    run = swarm.train(name, (*CASES[name], *COMMON))
    losses = _losses(run)
    config = config_of_run(run)
    reference = reference_run(*reference_of(config), config, steps=STEPS).losses
    reversed_ = reference_run(*reference_of(config), config, steps=STEPS, reverse=True).losses
    difference = relative_difference(losses, reference)
    drift = relative_difference(reversed_, reference)
    if name == "parity_resnet" and not cut_inside_a_branch(run):
        raise ValueError("no cut of the ResNet lies inside a residual block: choose other blocks")
    table.add_row(name, f"{losses[0]:.4f}", f"{losses[-1]:.4f}", f"{difference:.2e}", f"{drift:.2e}")
    return difference if _learnt(losses) else math.inf


def cut_inside_a_branch(run: Path) -> bool:
    """Whether several values with a gradient cross one border of slices: a shortcut runs beside the main path."""
    graph = decode_graph((run / "graph.fusion").read_bytes())
    parts = cut(graph, json.loads((run / "plan.json").read_text())["slice_of"])
    crossing = [
        {edge.value for edge in parts.edges if edge.source < border <= edge.target and graph.types[edge.value].grad}
        for border in range(1, len(parts.slices))
    ]
    return any(len(values) > 1 for values in crossing)


def _learnt(losses: list[float]) -> bool:
    return sum(losses[-3:]) <= (1 - LEARNS) * sum(losses[:3])


def _losses(run: Path) -> list[float]:
    steps, losses = zip(*read_curves(run / "metrics.jsonl")[0], strict=True)
    if list(steps) != list(range(1, STEPS + 1)):
        raise ValueError(f"{run} has losses of {len(steps)} steps, not of {STEPS}")
    return list(losses)


def _dropout(swarm: Swarm, table: Table) -> float:
    """3 peers against the same graph as one slice in this process: how far losses and final parameters are apart at most."""
    run = swarm.train("parity_dropout", (*DROPOUT, *COMMON))
    losses, parameters = _losses(run), _exported(run)
    config = config_of_run(run)
    graph = decode_graph((run / "graph.fusion").read_bytes())
    alone = OneSlice(graph, config, open_data(config))
    own_losses = [alone.step(step) for step in range(1, STEPS + 1)]
    apart = [abs(first - second) for first, second in zip(losses, own_losses, strict=True)]
    apart += [float((parameters[name] - tensor).abs().max()) for name, tensor in alone.parameters().items()]
    table.add_row("parity_dropout", f"{losses[0]:.4f}", f"{losses[-1]:.4f}", f"{max(apart):.2e}", "")
    return max(apart) if _learnt(losses) else math.inf


def _exported(run: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    path = run / "exported.safetensors"
    export_state_dict(run, path)
    return load_file(path)


class OneSlice:
    """The whole graph as one slice on one thread, with the owner's arithmetic around it."""

    def __init__(self, graph: Graph, config: TrainConfig, data: DataSet) -> None:
        self._graph = graph
        self._config = config
        self._data = data
        self._rates = RateSettings(config.learning_rate, config.schedule, config.warmup, config.steps)
        self._part: Slice = cut(graph, [0] * len(graph.nodes)).slices[0]
        settings = TrainingSettings(seed=config.seed, optimiser=_optimiser(config))
        device = torch.device("cpu")
        self._state = SliceState.initial(graph, self._part, settings, device, {})
        self._executor = SliceExecutor(
            graph, self._part, self._state, settings, micro_batches=config.micro_batches, recompute=False
        )

    def step(self, step: int) -> float:
        """One optimiser step; the mean loss of its micro-batches."""
        losses = []
        for index in range(self._config.micro_batches):
            fed = self._data.micro_batch(step, index)
            outputs = self._executor.forward(step, index, {value: fed[name] for value, name in enumerate(self._graph.inputs)})
            losses.append(outputs[self._part.outputs[0]].item())
            self._executor.backward(step, index, {})
        trainable = [value for value in self._part.parameters if self._graph.parameter(value).trainable]
        clip = clip_coefficient(self._executor.squares(trainable), self._config.clip)
        self._executor.update(step, clip, rate(self._rates, step))
        return math.fsum(losses) / len(losses)

    def parameters(self) -> dict[str, Tensor]:
        """Parameters and buffers by their names in the module."""
        return {self._graph.parameter(value).name: tensor.detach() for value, tensor in self._state.parameters.items()}


def _optimiser(config: TrainConfig) -> OptimiserSettings:
    return OptimiserSettings(
        name=config.optimiser,
        momentum=config.momentum,
        beta1=config.beta1,
        beta2=config.beta2,
        epsilon=config.epsilon,
        weight_decay=config.weight_decay,
    )
