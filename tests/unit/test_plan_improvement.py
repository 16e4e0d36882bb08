"""Better plans for jobs that run: judged on the network as it is, with as many peers as the owner wants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fusion_p2p.graph.slices import cut
from fusion_p2p.ids import Digest
from fusion_p2p.plan.encoding import check_plan
from fusion_p2p.plan.improvement import Asked, about_equal, improved
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.replan import Keep, Running
from fusion_p2p.plan.request import PlanRequest
from fusion_p2p.plan.schedulers import plan
from fusion_p2p.wire.job_messages import OptimiserSettings
from tests.unit.chain_graphs import chain, chain_costs
from tests.unit.networks import network

GRAPH = chain(6)
COSTS = chain_costs(GRAPH)
REQUEST = PlanRequest(Digest("cd" * 32), micro_batches=4, optimiser=OptimiserSettings(name="sgd"))


def asked(net: Network, **more: object) -> Asked:
    made = plan("equal-compute", GRAPH, COSTS, net, REQUEST)
    assert isinstance(made, Plan)
    running = Running(made, cut(GRAPH, made.slice_of))
    return Asked(running, steps_left=10**6, **more)  # type: ignore[arg-type]


def better(net: Network, question: Asked) -> Plan | Keep:
    return improved("equal-compute", GRAPH, COSTS, net, REQUEST, question)


def test_a_faster_peer_is_worth_changing_for_and_an_equal_plan_is_not() -> None:
    before = network([0, 0, 0], speeds=[1, 1, 1])
    question = asked(before.select([0, 1]))
    assert isinstance(better(before.select([0, 1]), question), Keep)
    faster = replace(before, flops_per_s=np.outer([1.0, 1.0, 50.0], np.ones(3)))
    made = better(faster, question)
    assert isinstance(made, Plan)
    check_plan(made, GRAPH, cut(GRAPH, made.slice_of))
    assert made.predicted_step_s < 0.9 * question.current.plan.predicted_step_s


def test_no_more_peers_than_wanted_and_its_own_before_equal_ones() -> None:
    net = network([0] * 4, speeds=[1.01, 1.0, 1.02, 0.99])
    question = asked(net.select([0, 3]), peers=2)
    assert isinstance(better(net, question), Keep)
    fast = replace(net, flops_per_s=np.outer([1.01, 9.0, 1.02, 0.99], np.ones(3)))
    made = better(fast, question)
    assert isinstance(made, Plan)
    assert made.peers in ({"p0", "p1"}, {"p1", "p3"})


def test_a_peer_of_the_plan_that_is_not_known_is_a_reason_to_wait() -> None:
    net = network([0] * 3)
    assert better(net.select([0, 2]), asked(net)) == Keep("peer p1 of the plan has not reported lately")


@pytest.mark.parametrize(("step_s", "changes"), [(0.0, True), (1e-9, False), (1e3, True)])
def test_what_steps_really_take_decides_whether_moving_pays(step_s: float, changes: bool) -> None:
    net = network([0, 0], within=(0.0, 1e-3))
    question = replace(asked(net.select([0])), steps_left=10, step_s=step_s)
    assert isinstance(better(net, question), Plan if changes else Keep)


def test_networks_that_differ_by_noise_are_equal() -> None:
    net = network([0, 0, 1])
    assert about_equal(net, replace(net))
    assert about_equal(net, replace(net, alpha_s=net.alpha_s * 1.05, beta_s=net.beta_s * 0.95))
    assert about_equal(net, replace(net, beta_s=np.where(net.beta_s == 1e-9, 2e-9, net.beta_s))), "fast is fast"
    assert not about_equal(net, replace(net, beta_s=net.beta_s * 1.2))
    assert not about_equal(net, replace(net, flops_per_s=net.flops_per_s * 2))
    assert not about_equal(net, net.select([0, 1]))
    assert not about_equal(net, network([0, 1, 1]))
