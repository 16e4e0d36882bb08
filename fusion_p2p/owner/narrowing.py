"""Cut layers as the owner asks for them: at which places of the model, and how narrow.

The plan is not known yet when they are inserted, so they go where equal cuts would lie, and plans cut the model nowhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from fusion_p2p.config import JobConfig
from fusion_p2p.errors import ConfigError, GraphError
from fusion_p2p.graph.cut_layers import CutLayers, cut_values, insert
from fusion_p2p.graph.initial import initial_projections
from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.workload import workload
from fusion_p2p.wire.codecs import LADDER, SPARSE, parse, rung_for


@dataclass(frozen=True, slots=True)
class Narrowed:
    """The graph to train, first values that follow from no rule, names of new parameters, and a sentence on what changed."""

    graph: Graph
    weights: dict[str, Tensor]
    parameters: tuple[str, ...] = ()
    said: str = ""


def narrowed(graph: Graph, config: JobConfig, cuts: int | None) -> Narrowed:
    """The graph with the cut layers of the configuration at `cuts` places. ConfigError when the model has no such places."""
    if not (config.cut_embedding or config.bottleneck or config.keep_sparsifier):
        return Narrowed(graph, {})
    if cuts is None:
        raise ConfigError("cut layers need --cuts N, the number of places where the model may be cut, or --peers N")
    if cuts < 1:
        raise ConfigError("cut layers need at least one cut, so at least two peers")
    places = _equal_places(graph, cuts)
    width = graph.types[places[0]].shape[-1]
    layers = CutLayers(config.cut_embedding, config.bottleneck or 0, _kept(config, config.bottleneck or width))
    try:
        made = insert(graph, places, layers)
    except GraphError as error:
        raise ConfigError(str(error)) from None
    weights = initial_projections(made.projections, config.seed)
    added = tuple(parameter.name for parameter in made.graph.parameters[len(graph.parameters) :])
    after = ", ".join(_module_of(graph, value) for value in places)
    said = f"inserted at {len(places)} cuts, after {after}: {_described(layers, width)}"
    return Narrowed(made.graph, weights, added, said)


def sparse_ratio(config: JobConfig) -> float:
    """By how much TopK divides the elements at the most, by `codec` and `ratio`. ConfigError when it is not used."""
    text = config.codec if config.codec != "adaptive" else rung_for(config.most_ratio, sparse=True)
    if config.codec in ("none", "uniform", "adatopk") or parse(text).family not in SPARSE:
        raise ConfigError(
            f"keep_sparsifier is for --codec topk:RATIO, or adaptive with a --ratio above {LADDER[-1][0]}: "
            f"{config.codec} leaves no mask to keep"
        )
    return parse(text).ratio


def _module_of(graph: Graph, value: int) -> str:
    """The module that a value leaves, or the last one before."""
    found = ""
    for node in graph.nodes:
        found = node.module or found
        if value in node.outputs:
            break
    return found or "the inputs"


def _leaves_its_module(graph: Graph, value: int) -> bool:
    """Whether all that read a value lie outside of the module that makes it: there a layer fits between two modules."""
    inside = _module_of(graph, value)
    readers = (node.module for node in graph.nodes if value in node.reads())
    return not any(f"{reader}.".startswith(f"{inside}.") for reader in readers)


def _kept(config: JobConfig, width: int) -> int:
    """Numbers of each place that a mask keeps: never more than the codec sends."""
    return max(1, int(width / sparse_ratio(config))) if config.keep_sparsifier else 0


def _equal_places(graph: Graph, cuts: int) -> list[int]:
    """The values nearest to equal cuts of the work, among those of (batch, length, width) that alone cross."""
    values = [value for value in cut_values(graph) if len(graph.types[value].shape) == 3]
    widths = Counter(graph.types[value].shape[-1] for value in values)
    values = [value for value in values if graph.types[value].shape[-1] == widths.most_common(1)[0][0]]
    ends = [value for value in values if _leaves_its_module(graph, value)]
    values = ends if len(ends) >= cuts else values
    if len(values) < cuts:
        raise ConfigError(
            f"the model has {len(values)} places where one activation of shape (batch, length, width) crosses, "
            f"fewer than the {cuts} cuts that are to be made narrow"
        )
    work = list(accumulate(cost.forward_flops + cost.backward_flops for cost in workload(graph)))
    before = {node.first: work[index] for index, node in enumerate(graph.nodes)}
    return _nearest(values, [before[value] for value in values], [work[-1] * cut / (cuts + 1) for cut in range(1, cuts + 1)])


def _nearest(values: Sequence[int], at: Sequence[float], wanted: Sequence[float]) -> list[int]:
    """For each wanted position another value, ascending."""
    chosen: list[int] = []
    first = 0
    for number, position in enumerate(wanted):
        last = len(values) - (len(wanted) - number - 1)
        index = min(range(first, last), key=lambda candidate: abs(at[candidate] - position))
        chosen.append(values[index])
        first = index + 1
    return chosen


def _described(layers: CutLayers, width: int) -> str:
    parts = []
    if layers.rank:
        parts.append(f"a learned projection from {width} numbers to {layers.rank} and back")
    if layers.keep:
        parts.append(f"a mask that keeps the {layers.keep} largest of each place's {layers.rank or width} numbers")
    if layers.embedding:
        parts.append("the reader's own embedding of tokens and positions")
    return f"{' and '.join(parts)}; they stay in the exported model, as fusion_p2p.models.cut_layer reads it"
