"""Communities by bandwidth, the path through them, and the cuts of op-fence."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.plan.chain import Chain, Operator, chain_of_operators
from fusion_p2p.plan.communities import bandwidth, communities, order_along, path_through
from fusion_p2p.plan.fence import op_fence
from fusion_p2p.plan.layout import Layout
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.request import NoPlan, Terms
from tests.unit.networks import network

TERMS = Terms(micro_batches=8)


def line(outputs: list[float], flops: float = 1.0) -> Chain:
    """Operators one after the other, with these sizes of output."""
    operators = [Operator(f"o{i}", flops, size, (i - 1,) if i else ()) for i, size in enumerate(outputs)]
    return chain_of_operators("line", operators)


def with_hop(net: Network, one: int, other: int, beta: float) -> Network:
    changed = net.beta_s.copy()
    changed[one, other] = changed[other, one] = beta
    return replace(net, beta_s=changed)


@pytest.mark.parametrize("sites", [[0, 0, 0, 1, 1], [0, 1, 0, 1, 0, 1, 2, 2], [0], [0, 0], [0] * 60 + [1] * 60 + [2] * 20])
def test_communities_are_the_sites(sites: list[int]) -> None:
    found = communities(network(sites))
    assert {frozenset(group) for group in found} == {
        frozenset(peer for peer, site in enumerate(sites) if site == wanted) for wanted in set(sites)
    }
    assert communities(network(sites)) == found


def test_alike_links_make_one_community_whatever_the_speed() -> None:
    assert communities(network([0, 1, 2, 3], between=(0.02, 1e-3))) == ((0, 1, 2, 3),)


def test_a_slow_direction_or_a_slow_site_makes_a_slow_link() -> None:
    one_way = network([0, 1])
    beta = one_way.beta_s.copy()
    beta[0, 1] = 1e-3
    assert bandwidth(replace(one_way, beta_s=beta))[1, 0] == pytest.approx(1e3)
    assert bandwidth(network([0, 1], uplink_s=1e-2))[0, 1] == pytest.approx(100)
    assert bandwidth(network([0, 0], uplink_s=1e-2))[0, 1] == pytest.approx(1e9)


@given(st.integers(2, 6), st.integers(0, 10_000))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_the_path_has_the_fastest_slowest_hop(count: int, seed: int) -> None:
    fast = np.exp(np.random.default_rng(seed).normal(0, 2, (count, count)))
    fast = np.minimum(fast, fast.T)
    path = path_through(fast, tuple((peer,) for peer in range(count)))
    slowest = min(fast[a, b] for a, b in itertools.pairwise(path))
    best = max(
        min(fast[a, b] for a, b in itertools.pairwise(order)) for order in itertools.permutations(range(count)) if count > 1
    )
    assert slowest == best


def test_a_long_path_follows_the_fast_hops() -> None:
    count = 12
    shuffled = np.random.default_rng(5).permutation(count)
    fast = np.full((count, count), 1.0)
    for a, b in itertools.pairwise(shuffled):
        fast[a, b] = fast[b, a] = 100.0
    path = list(path_through(fast, tuple((peer,) for peer in range(count))))
    assert path in (shuffled.tolist(), shuffled.tolist()[::-1])


def test_the_ends_of_a_hop_are_its_best_link() -> None:
    net = with_hop(network([0, 0, 0, 1, 1, 1], speeds=[3, 2, 1, 1, 2, 3]), 0, 3, 1e-7)
    groups = order_along(bandwidth(net), ((0, 1, 2), (3, 4, 5)), net.flops_per_s[:, 0])
    assert groups == ((1, 2, 0), (3, 5, 4))


def test_the_fence_is_the_cheapest_cut_near_the_fair_share() -> None:
    outputs = [9.0, 9.0, 9.0, 9.0, 5.0, 9.0, 1.0, 9.0, 9.0, 9.0, 9.0, 0.5, 9.0, 9.0]
    layout = op_fence(line(outputs), network([0, 0, 1, 1]), TERMS)
    assert isinstance(layout, Layout)
    assert layout.stages[2].first == 7, "the cut of 1 byte lies within the window, that of half a byte does not"


def test_shares_follow_speed_inside_a_site() -> None:
    layout = op_fence(line([1.0] * 12), network([0, 0, 0], speeds=[1, 3, 2]), TERMS)
    assert isinstance(layout, Layout)
    assert [(stage.first, stage.last, stage.peers) for stage in layout.stages] == [(0, 6, (1,)), (6, 10, (2,)), (10, 12, (0,))]


def test_more_peers_than_blocks_leaves_the_slowest_out() -> None:
    layout = op_fence(line([1.0] * 3), network([0, 0, 1, 1, 1], speeds=[5, 1, 2, 4, 3]), TERMS)
    assert isinstance(layout, Layout)
    assert layout.peers == {0, 3, 4}


def test_what_does_not_fit_is_no_plan_unless_memory_is_ignored() -> None:
    heavy = chain_of_operators("heavy", [Operator(f"o{i}", 1.0, 4.0, (i - 1,) if i else (), 1e6, 8.0) for i in range(4)])
    poor = network([0, 0], free_bytes=7e6)
    refused = op_fence(heavy, poor, TERMS)
    assert isinstance(refused, NoPlan)
    assert refused.reason.startswith("slice 0 needs 1.0 MiB more (7.6 MiB on p")
    assert isinstance(op_fence(heavy, poor, replace(TERMS, respect_memory=False)), Layout)
    assert isinstance(op_fence(heavy, poor, replace(TERMS, moments=0)), Layout)


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=80)
def test_any_chain_on_any_network_gives_a_whole_layout(data: st.DataObject) -> None:
    sites = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=9))
    places = [sorted(set(sites)).index(site) for site in sites]
    outputs = data.draw(st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
    speeds = data.draw(st.lists(st.floats(0.1, 10), min_size=len(sites), max_size=len(sites)))
    layout = op_fence(line(outputs), network(places, speeds=speeds), TERMS)
    assert isinstance(layout, Layout)
    assert len(layout.stages) == min(len(sites), len(outputs))
    assert layout.stages[0].first == 0
    assert layout.stages[-1].last == len(outputs)
    assert all(one.last == other.first and one.first < one.last for one, other in itertools.pairwise(layout.stages))
