"""`fusion-peer plan`: the plan that a coordinator would propose, its figures, and one step of it by simulation."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from fusion_p2p.config import PlanConfig
from fusion_p2p.errors import ConfigError
from fusion_p2p.graph.capture import capture
from fusion_p2p.graph.encoding import encode_graph
from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import cut
from fusion_p2p.graph.workload import NodeWorkload, workload
from fusion_p2p.ids import digest_of
from fusion_p2p.models.catalogue import build
from fusion_p2p.owner.data import open_data
from fusion_p2p.owner.factories import is_factory
from fusion_p2p.owner.model_source import resolve_model
from fusion_p2p.owner.narrowing import narrowed
from fusion_p2p.owner.synthetic import synthetic_example
from fusion_p2p.plan.bound import bound_s
from fusion_p2p.plan.chain import chain_of
from fusion_p2p.plan.forecast import Forecast, forecast_of
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.pipeline import Pipeline
from fusion_p2p.plan.pipelines import pipeline_of_plan
from fusion_p2p.plan.request import NoPlan, PlanRequest
from fusion_p2p.plan.schedulers import plan, terms_of
from fusion_p2p.plan.simulate import simulate
from fusion_p2p.plan.timeline import Timeline
from fusion_p2p.wire.job_messages import OptimiserSettings

SYNTHETIC = "synthetic"


@dataclass(frozen=True, slots=True)
class CostedModel:
    """A captured model and the cost of its nodes on one micro-batch."""

    name: str
    graph: Graph
    costs: tuple[NodeWorkload, ...]
    capture_s: float

    @property
    def num_parameters(self) -> int:
        """Parameters and buffers, tied ones once."""
        return sum(kind.num_elements for kind in self.graph.types[self.graph.first_parameter : self.graph.first_node_value])


@dataclass(frozen=True, slots=True)
class DryRun:
    """A plan that was only looked at."""

    model: CostedModel
    figures: Forecast
    pipeline: Pipeline
    timeline: Timeline
    planning_s: float

    @property
    def network(self) -> Network:
        """What it is a plan for."""
        return self.pipeline.network


def cost_model(config: PlanConfig) -> CostedModel:
    """Capture the model from meta tensors (a built-in one takes no memory, whatever its size) and count its work."""
    started = time.perf_counter()
    if config.data != SYNTHETIC or is_factory(config.model):
        if config.data == SYNTHETIC:
            raise ConfigError(f"model {config.model} is a factory: give its --data, so that the shapes of its inputs are known")
        data = open_data(config)
        source = resolve_model(config, data)
        module, example, rules = source.module, data.example(), source.rules
    else:
        built = build(config.model, config.model_options)
        module, example, rules = built.module, synthetic_example(config, built.module), built.rules
    module.train()
    graph = narrowed(capture(module, example, rules).graph, config, config.num_cuts).graph
    return CostedModel(config.model, graph, workload(graph), time.perf_counter() - started)


def dry_run(
    config: PlanConfig, model: CostedModel, network: Network, report: Callable[[str], None] = lambda line: None
) -> DryRun:
    """Plan for the network and simulate one step. ConfigError, with what is missing, when there is no plan."""
    report(f"planning over {len(network.peers)} peers")
    started = time.perf_counter()
    request = _request(config, model.graph)
    made = plan(config.scheduler, model.graph, model.costs, network, request)
    if isinstance(made, NoPlan):
        raise ConfigError(f"there is no plan for {model.name} here: {made.reason}")
    planning_s = time.perf_counter() - started
    parts = cut(model.graph, made.slice_of)
    pipeline = pipeline_of_plan(model.graph, parts, model.costs, made, network)
    timeline = simulate(pipeline, trace=True)
    figures = forecast_of(made, model.graph, parts, model.costs, request.optimiser, network, timeline)
    chain = chain_of(model.graph, model.costs)
    bound = bound_s(chain, network, terms_of(request))
    return DryRun(model, replace(figures, bound_s=bound), pipeline, timeline, planning_s)


def _request(config: PlanConfig, graph: Graph) -> PlanRequest:
    return PlanRequest(
        graph=digest_of(encode_graph(graph)),
        micro_batches=config.micro_batches,
        optimiser=OptimiserSettings(name=config.optimiser, momentum=config.momentum),
        recompute=config.recompute,
        schedule=config.pipeline,
        codec=config.codec,
        ratio=config.most_ratio,
        seed=config.seed,
    )
