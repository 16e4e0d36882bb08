"""Equal-compute plans of captured models: legal for any number of peers, of equal work, and the same after the wire."""

from __future__ import annotations

import pytest

from fusion_p2p.graph.slices import cut
from fusion_p2p.graph.workload import NodeWorkload, workload
from fusion_p2p.ids import Digest, PeerId
from fusion_p2p.plan import schedulers
from fusion_p2p.plan.encoding import check_plan, decode_plan, encode_plan
from fusion_p2p.plan.explain import explain
from fusion_p2p.plan.measured import network_of
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.request import PeerCapability, PlanRequest
from fusion_p2p.wire.job_messages import OptimiserSettings
from tests.training.builtin import example

ADAM = OptimiserSettings(name="adam")


def work(cost: NodeWorkload) -> float:
    return cost.forward_flops + cost.backward_flops


@pytest.mark.parametrize(("family", "options"), [("gpt2", {}), ("gpt2", {"tied": True, "dropout": 0.1}), ("resnet", {})])
@pytest.mark.row(26)
@pytest.mark.row(29)
def test_plans_of_built_in_models(family: str, options: dict[str, object]) -> None:
    graph = example(family, **options).graph
    costs = workload(graph)
    request = PlanRequest(Digest("ef" * 32), micro_batches=4, optimiser=ADAM)
    total, largest = sum(map(work, costs)), max(map(work, costs))
    for num_peers in range(1, 13):
        peers = [PeerCapability(PeerId(f"peer{i}"), 1 << 34, 1e9) for i in range(num_peers)]
        plan = schedulers.plan("equal-compute", graph, costs, network_of(peers, {}), request)
        assert isinstance(plan, Plan)
        assert decode_plan(encode_plan(plan)) == plan
        parts = cut(graph, plan.slice_of)
        check_plan(plan, graph, parts)
        assert len(plan.slices) == num_peers
        for part in parts.slices:
            share = sum(work(costs[node]) for node in part.nodes)
            assert share <= total / num_peers + 2 * largest, "a border is off by at most the node it lies in"
        lines = explain(plan, graph, parts, costs, ADAM)
        tied = [line for line in lines if line.startswith("tied ")]
        assert len(lines) == 1 + num_peers + len({(edge.source, edge.target) for edge in plan.edges}) + len(tied)
        assert bool(tied) == (bool(options.get("tied")) and num_peers > 1)
