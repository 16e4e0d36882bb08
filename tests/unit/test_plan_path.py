"""The path planner against all pipelines there are, on cases small enough to try them all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.layout import Stage
from fusion_p2p.plan.memory import CREDITS, Holding, stage_bytes
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.path import PathProblem, best_path, prepare
from fusion_p2p.plan.request import Terms
from fusion_p2p.plan.times import deal, times
from tests.unit.planning_cases import random_chain, random_network


class Everything:
    """Judges pipelines by the definition, and tries every one over subsequences of an order."""

    def __init__(self, chain: Chain, network: Network, terms: Terms, in_flight: int = 1) -> None:
        self.chain, self.network, self.terms, self.in_flight = chain, network, terms, in_flight
        self.known = times(chain, network)

    def step_s(self, stages: Sequence[Stage]) -> float:
        fill, busy = 0.0, []
        for stage in stages:
            each = [self.known.both(peer, stage.first, stage.last) for peer in stage.peers]
            dealt = np.bincount(deal(each, self.terms.micro_batches), minlength=len(each))
            count = len(stage.peers)
            sync = 0.0
            if count > 1:
                ring = list(zip(stage.peers, stage.peers[1:] + stage.peers[:1], strict=True))
                size = self.chain.parameter_bytes[stage.last] - self.chain.parameter_bytes[stage.first]
                sync = 2 * (count - 1) * max(self.network.alpha_s[pair] for pair in ring)
                sync += 2 * (count - 1) / count * size * max(self.network.beta_s[pair] for pair in ring)
            busy.append((max(n * s for n, s in zip(dealt, each, strict=True)) + sync) / self.terms.micro_batches)
            fill += max(each)
            if self.network.owner is not None:
                feed = self.chain.feed(stage.first, stage.last)
                per_byte = max(self.network.beta_s[self.network.owner, peer] for peer in stage.peers)
                busy.append(feed * per_byte / count)
                if stage.first == 0:
                    fill += feed * per_byte + max(self.network.alpha_s[self.network.owner, peer] for peer in stage.peers)
        for stage, after in pairwise(stages):
            size = self.chain.crossing[stage.last]
            pairs = [(one, other) for one in stage.peers for other in after.peers]
            beside = min(len(stage.peers), len(after.peers))
            for there in (pairs, [(other, one) for one, other in pairs]):
                busy.append(size * max(self.network.beta_s[pair] for pair in there) / beside)
                fill += size * max(self.network.beta_s[pair] for pair in there)
            fill += max(self.network.alpha_s[a, b] + self.network.alpha_s[b, a] for a, b in pairs)
        return fill + (self.terms.micro_batches - 1) * max(busy)

    def fits(self, stages: Sequence[Stage]) -> bool:
        for stage in stages:
            held = max(1, -(-self.in_flight // len(stage.peers)))
            need = stage_bytes(
                self.chain, stage.first, stage.last, Holding(held, CREDITS, self.terms.moments, members=len(stage.peers))
            )
            if need > min(self.network.free_bytes[peer] for peer in stage.peers):
                return False
        return True

    def best(self, order: Sequence[int], sizes: Sequence[int] = (1,)) -> float:
        end = self.chain.num_blocks
        return min(
            (
                self.step_s(stages)
                for groups in self.groups(tuple(order), sizes)
                for cuts in combinations(range(1, end), len(groups) - 1)
                for stages in [tuple(map(Stage, (0, *cuts), (*cuts, end), groups))]
                if self.fits(stages)
            ),
            default=np.inf,
        )

    def groups(self, order: tuple[int, ...], sizes: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Every non-empty sequence of groups of neighbours in an order."""
        if not order:
            return
        yield from self.groups(order[1:], sizes)
        for size in sizes:
            group = order[:size]
            if len(group) == size and len({int(self.network.sites[peer]) for peer in group}) == 1:
                yield (group,)
                yield from ((group, *rest) for rest in self.groups(order[size:], sizes))


def least(problem: PathProblem, order: Sequence[int]) -> float:
    found = best_path(problem, order, tolerance=0.0)
    return np.inf if found is None else found.step_s


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("micro_batches", [1, 8])
def test_equals_the_best_of_all_pipelines_in_order(seed: int, micro_batches: int) -> None:
    chain, network = random_chain(seed, 8), random_network(seed, 4)
    terms = Terms(micro_batches)
    order = np.random.default_rng(seed).permutation(4)
    every = Everything(chain, network, terms, in_flight=3)
    assert least(prepare(chain, network, terms, in_flight=3), order) == pytest.approx(every.best(order), rel=1e-7)


@pytest.mark.parametrize("seed", range(6))
def test_equals_the_best_with_replicas_and_feeds(seed: int) -> None:
    chain, network = random_chain(seed, 6, feed_bytes=3e5), random_network(seed, 5, num_sites=2, has_owner=True)
    terms = Terms(micro_batches=7)
    every = Everything(chain, network, terms)
    problem = prepare(chain, network, terms, sizes=(1, 2, 4))
    assert least(problem, range(5)) == pytest.approx(every.best(range(5), sizes=(1, 2, 4)), rel=1e-7)


@pytest.mark.parametrize("seed", range(3))
def test_members_of_a_group_need_room_for_what_they_exchange(seed: int) -> None:
    chain, network = random_chain(seed, 6), random_network(seed, 5, num_sites=1)
    chain = replace(chain, forward_flops=1000 * chain.forward_flops, backward_flops=1000 * chain.backward_flops)
    free_bytes = np.full(5, 5 * float(chain.parameter_bytes[-1]))
    network = replace(network, free_bytes=free_bytes, flops_per_s=np.full((5, 3), 1e12))
    every = Everything(chain, network, Terms(micro_batches=8))
    problem = prepare(chain, network, every.terms, sizes=(1, 2, 4))
    assert least(problem, range(5)) == pytest.approx(every.best(range(5), sizes=(1, 2, 4)), rel=1e-7)


def test_the_estimate_is_that_of_the_stages() -> None:
    chain, network, terms = random_chain(3, 30), random_network(3, 8, num_sites=2), Terms(16)
    found = best_path(prepare(chain, network, terms, sizes=(1, 2, 4)), range(8))
    assert found is not None
    assert found.step_s == pytest.approx(Everything(chain, network, terms).step_s(found.stages), rel=1e-9)
    assert found.stages[0].first == 0
    assert found.stages[-1].last == 30
    assert all(stage.last == after.first for stage, after in pairwise(found.stages))


def test_tolerance_and_a_limit_that_is_too_low() -> None:
    chain, network, terms = random_chain(1, 40), random_network(1, 10), Terms(16)
    problem = prepare(chain, network, terms)
    exact = least(problem, range(10))
    rough = best_path(problem, range(10), tolerance=0.05)
    assert rough is not None
    assert exact <= rough.step_s <= 1.05 * exact
    assert best_path(problem, range(10), below=exact * 0.999) is None
    within = best_path(problem, range(10), below=exact * 1.001, tolerance=0.0)
    assert within is not None
    assert within.step_s == pytest.approx(exact)


def test_using_all_peers_leaves_none_idle() -> None:
    chain, network, terms = random_chain(2, 20), random_network(2, 6), Terms(4)
    found = best_path(prepare(chain, network, terms, use_all=True), [5, 3, 1, 0, 2, 4])
    assert found is not None
    assert [stage.peers for stage in found.stages] == [(5,), (3,), (1,), (0,), (2,), (4,)]


def test_no_path_when_nothing_fits() -> None:
    chain, network = random_chain(0, 6), random_network(0, 3)
    tight = Terms(micro_batches=4, moments=200)
    assert best_path(prepare(chain, network, tight), range(3)) is None
