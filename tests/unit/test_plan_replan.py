"""When a running job changes its plan, and how little it then moves."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fusion_p2p.graph.schema import Graph, Parameter
from fusion_p2p.graph.slices import cut
from fusion_p2p.ids import Digest, PeerId
from fusion_p2p.plan.chain import chain_of
from fusion_p2p.plan.layout import Stage
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.plan import Plan, SlicePlan
from fusion_p2p.plan.replan import GONE, Change, Keep, Predicted, Running, layout_of, replan
from tests.unit.chain_graphs import WIDTH, chain, chain_costs
from tests.unit.networks import network

GRAPH = chain(6)
WEIGHT_BYTES = 4 * WIDTH * WIDTH
STATE_BYTES = 3 * WEIGHT_BYTES
"""Of one layer with Adam's moments."""
MOMENTS = 2
S_PER_BYTE = 1e-6
A_LOT = 10**9


def alike_network(num_peers: int = 4, owner_s_per_byte: float | None = None) -> Network:
    """Alike peers and, if its links are known, an owner."""
    net = network([0] * (num_peers + 1), within=(0.0, S_PER_BYTE))
    if owner_s_per_byte is None:
        return net.select(range(num_peers))
    beta = net.beta_s.copy()
    beta[-1, :-1] = beta[:-1, -1] = owner_s_per_byte
    picked = net.select(range(num_peers))
    return replace(picked, sites=net.sites, alpha_s=net.alpha_s, beta_s=beta, has_owner=True)


def running(*slices: tuple[int, tuple[int, ...]], graph: Graph = GRAPH) -> Running:
    """Slices of so many layers on the peers with these numbers; the last one has the loss too."""
    slice_of = tuple(index for index, (layers, _) in enumerate(slices) for _ in range(layers))
    slice_of = (*slice_of, len(slices) - 1)
    parts = cut(graph, slice_of)
    placed = tuple(
        SlicePlan(PeerId(f"p{peers[0]}"), 1, False, tuple(PeerId(f"p{one}") for one in peers[1:]), tuple(range(len(peers))))
        for _, peers in slices
    )
    return Running(Plan(Digest("ab" * 32), "auto", 4, slice_of, placed, ()), parts)


def members(change: Keep | Change) -> list[tuple[PeerId, ...]]:
    assert isinstance(change, Change), change
    return [part.members for part in change.plan.slices]


def test_slices_stay_with_alike_peers() -> None:
    current, candidate = running((3, (0,)), (3, (1,))), running((3, (2,)), (3, (0,)))
    decision = replan(GRAPH, alike_network(), MOMENTS, current, candidate, Predicted(2.0, 1.0, 10))
    assert decision == Keep("the best plan now is the one in use")


def test_idle_peers_are_exchanged_too() -> None:
    current, made = running((3, (0,)), (3, (1,))), running((4, (3,)), (2, (2,)))
    candidate = Running(replace(made.plan, idle=((PeerId("p0"), "slow"), (PeerId("p1"), "slow"))), made.parts)
    decision = replan(GRAPH, alike_network(), MOMENTS, current, candidate, Predicted(2.0, 1.0, A_LOT))
    assert members(decision) == [("p0",), ("p1",)]
    assert isinstance(decision, Change)
    assert {peer for peer, _ in decision.plan.idle} == {"p2", "p3"}


def test_what_changes_hands_comes_from_the_peer_that_holds_it() -> None:
    current = running((3, (0,)), (3, (1,)))
    net = alike_network(owner_s_per_byte=1.0)
    uneven = replace(net, flops_per_s=np.outer([1.0, 1.0, 2.0, 2.0], np.ones(3)))
    decision = replan(GRAPH, uneven, MOMENTS, current, running((3, (0,)), (3, (2,))), Predicted(2.0, 1.0, A_LOT))
    assert isinstance(decision, Change)
    assert decision.moved_bytes == pytest.approx(3 * STATE_BYTES)
    assert decision.move_s == pytest.approx(3 * STATE_BYTES * S_PER_BYTE)


def test_with_another_cut_only_the_layers_that_a_peer_lacks_are_fetched() -> None:
    current, candidate = running((3, (0,)), (3, (1,))), running((2, (3,)), (4, (2,)))
    decision = replan(GRAPH, alike_network(), MOMENTS, current, candidate, Predicted(2.0, 1.0, A_LOT))
    assert members(decision) == [("p0",), ("p1",)]
    assert isinstance(decision, Change)
    assert decision.moved_bytes == pytest.approx(STATE_BYTES)
    assert decision.move_s == pytest.approx(STATE_BYTES * S_PER_BYTE)


def test_members_of_a_group_share_the_sending_and_each_receiver_waits_for_all_of_its_own() -> None:
    fast = replace(alike_network(5), flops_per_s=np.outer([1.0, 1.0, 1.0, 9.0, 9.0], np.ones(3)))
    pair, both = running((6, (0, 1))), running((3, (3,)), (3, (4,)))
    decision = replan(GRAPH, fast, MOMENTS, pair, both, Predicted(2.0, 1.0, A_LOT))
    assert isinstance(decision, Change)
    assert decision.moved_bytes == pytest.approx(6 * STATE_BYTES)
    assert decision.move_s == pytest.approx(3 * STATE_BYTES * S_PER_BYTE), "two senders, two receivers"
    alone = replan(GRAPH, fast, MOMENTS, running((6, (0,))), both, Predicted(2.0, 1.0, A_LOT))
    assert isinstance(alone, Change)
    assert alone.move_s == pytest.approx(6 * STATE_BYTES * S_PER_BYTE), "one sender"


def test_buffers_move_without_moments() -> None:
    frozen = replace(GRAPH, parameters=(Parameter("layer.0.weight", False), *GRAPH.parameters[1:]))
    current, candidate = running((1, (0,)), (5, (1,)), graph=frozen), running((6, (1,)), graph=frozen)
    uneven = replace(alike_network(2), flops_per_s=np.outer([1.0, 5.0], np.ones(3)))
    decision = replan(frozen, uneven, MOMENTS, current, candidate, Predicted(2.0, 1.0, A_LOT))
    assert isinstance(decision, Change)
    assert decision.moved_bytes == pytest.approx(WEIGHT_BYTES)


def test_what_only_a_lost_peer_held_comes_from_the_owner_or_not_at_all() -> None:
    current, candidate = running((3, (0,)), (3, (9,))), running((3, (0,)), (3, (1,)))
    known = replan(GRAPH, alike_network(owner_s_per_byte=0.5), MOMENTS, current, candidate, Predicted(math.inf, 5.0, 1))
    assert isinstance(known, Change)
    assert known.move_s == pytest.approx(3 * STATE_BYTES * 0.5)
    unknown = replan(GRAPH, alike_network(), MOMENTS, current, candidate, Predicted(2.0, 5.0, 1))
    assert isinstance(unknown, Change), "it cannot go on as it is"
    assert math.isinf(unknown.move_s)


@pytest.mark.parametrize(("steps", "changes"), [(1, False), (10**6, True)])
def test_moving_has_to_pay(steps: int, changes: bool) -> None:
    net = network([0, 0], within=(0.0, 1.0))
    decision = replan(GRAPH, net, MOMENTS, running((6, (0,))), running((3, (0,)), (3, (1,))), Predicted(2.0, 1.0, steps))
    assert isinstance(decision, Change if changes else Keep)


@pytest.mark.parametrize(("candidate_s", "changes"), [(0.91, False), (0.89, True)])
def test_less_than_a_tenth_faster_is_noise(candidate_s: float, changes: bool) -> None:
    current, candidate = running((6, (0,))), running((3, (0,)), (3, (1,)))
    decision = replan(GRAPH, alike_network(), MOMENTS, current, candidate, Predicted(1.0, candidate_s, A_LOT))
    assert isinstance(decision, Change if changes else Keep)


def test_peers_of_different_rates_do_not_stand_for_each_other() -> None:
    net = alike_network()
    uneven = replace(net, flops_per_s=np.outer([1.0, 1.0, 2.0, 2.0], np.ones(3)))
    current, candidate = running((6, (0,))), running((6, (3,)))
    assert members(replan(GRAPH, uneven, MOMENTS, current, candidate, Predicted(2.0, 1.0, A_LOT))) == [("p3",)]
    about = replace(net, flops_per_s=np.outer([1.0, 1.01, 1.02, 0.99], np.ones(3)))
    assert isinstance(replan(GRAPH, about, MOMENTS, current, candidate, Predicted(2.0, 1.0, A_LOT)), Keep)


def test_other_codecs_and_limits_alone_are_not_worth_moving_for() -> None:
    current = running((3, (0,)), (3, (1,)))
    slices = tuple(replace(part, in_flight=4) for part in current.plan.slices)
    candidate = Running(replace(current.plan, slices=slices), current.parts)
    assert isinstance(replan(GRAPH, alike_network(), MOMENTS, current, candidate, Predicted(2.0, 1.0, A_LOT)), Keep)


def test_the_layout_of_a_plan() -> None:
    net = alike_network(2)
    plan = running((4, (1,)), (2, (8,))).plan
    blocks = chain_of(GRAPH, chain_costs(GRAPH))
    assert layout_of(plan, blocks, net).stages == (Stage(0, 4, (1,)), Stage(4, 7, (GONE,)))
