"""Better plans for jobs that run: judged on the network as it is, with as many peers as the owner wants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fusion_p2p.graph.slices import cut
from fusion_p2p.ids import Digest
from fusion_p2p.plan.encoding import check_plan
from fusion_p2p.plan.improvement import Asked, about_equal, improved
from fusion_p2p.plan.network import Floats, Network
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
    """The answer at the second asking, by the same figures."""
    first = once(net, question)
    assert isinstance(first, Keep), "nothing moves at the first asking"
    return first if first.promising is None else once(net, replace(question, promising=first.promising))


def once(net: Network, question: Asked, scheduler: str = "equal-compute") -> Plan | Keep:
    return improved(scheduler, GRAPH, COSTS, net, REQUEST, question)


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


@pytest.mark.parametrize(
    ("step_s", "changes"),
    [(0.0, True), (1e-9, False), (100.0, True), (1e3, False)],
    ids=["as-simulated", "moving-takes-longer", "a-little-longer", "mostly-for-other-reasons"],
)
def test_what_steps_really_take_decides_whether_moving_pays(step_s: float, changes: bool) -> None:
    net = network([0, 0], within=(0.0, 1e-3))
    question = replace(asked(net.select([0])), steps_left=10, step_s=step_s)
    assert isinstance(better(net, question), Plan if changes else Keep)


@pytest.mark.parametrize(("gain", "changes"), [(0.1, True), (0.45, False)])
def test_a_run_may_want_more_than_a_tenth(gain: float, changes: bool) -> None:
    net = network([0, 0, 0], speeds=[1, 1, 4])
    question = replace(asked(net.select([0, 1])), peers=2, gain=gain)
    assert isinstance(better(net, question), Plan if changes else Keep)


def test_a_plan_that_pays_no_more_at_the_second_look_is_forgotten() -> None:
    net = network([0, 0, 0], speeds=[10, 10, 500])
    question = asked(net.select([0, 1]))
    first = once(net, question)
    assert isinstance(first, Keep)
    assert first.promising is not None
    slower = replace(net, flops_per_s=np.outer([10.0, 10.0, 1.0], np.ones(3)))
    again = once(slower, replace(question, promising=first.promising))
    assert isinstance(again, Keep)
    assert again.promising is None
    gone = once(net.select([0, 1]), replace(question, promising=first.promising))
    assert isinstance(gone, Keep)
    assert gone.promising is None


def noisy(net: Network, random: np.random.Generator, *, rates: float = 0.1, links: float = 0.3) -> Network:
    """The network as it is measured once more."""

    def again(figures: Floats, spread: float) -> Floats:
        return figures * random.lognormal(0.0, spread, figures.shape)

    return replace(
        net,
        flops_per_s=again(net.flops_per_s, rates),
        alpha_s=again(net.alpha_s, links),
        beta_s=again(net.beta_s, links),
    )


LIKE_MOST = network([0] * 6, speeds=[100.0] * 6, within=(0.05, 1e-3))
"""Work and links both count: a step takes some seconds."""


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("scheduler", ["equal-compute", "fence"])
def test_equal_peers_never_move_by_what_measuring_makes_of_them(scheduler: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    question = replace(asked(noisy(LIKE_MOST, random).select(range(4))), peers=4)
    moves = 0
    for _ in range(100):
        answer = once(noisy(LIKE_MOST, random), question, scheduler)
        moves += isinstance(answer, Plan)
        question = replace(question, promising=answer.promising if isinstance(answer, Keep) else None)
    assert moves == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_peer_half_as_fast_again_is_used_at_the_second_or_third_asking(seed: int) -> None:
    random = np.random.default_rng(seed)
    faster = replace(LIKE_MOST, flops_per_s=LIKE_MOST.flops_per_s * np.array([1, 1, 1, 1, 1, 1.5])[:, None])
    question = asked(LIKE_MOST.select([0]), peers=1)
    for _ in range(3):
        answer = once(noisy(faster, random), question)
        question = replace(question, promising=answer.promising if isinstance(answer, Keep) else None)
        if isinstance(answer, Plan):
            break
    assert isinstance(answer, Plan)
    assert answer.peers == {"p5"}


def test_networks_that_differ_by_noise_are_equal() -> None:
    net = network([0, 0, 1])
    assert about_equal(net, replace(net))
    assert about_equal(net, replace(net, alpha_s=net.alpha_s * 1.05, beta_s=net.beta_s * 0.95))
    assert about_equal(net, replace(net, beta_s=np.where(net.beta_s == 1e-9, 2e-9, net.beta_s))), "fast is fast"
    assert not about_equal(net, replace(net, beta_s=net.beta_s * 1.2))
    assert not about_equal(net, replace(net, flops_per_s=net.flops_per_s * 2))
    assert not about_equal(net, net.select([0, 1]))
    assert not about_equal(net, network([0, 1, 1]))
