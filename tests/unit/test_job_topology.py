"""Edges of replicas: who sends what to whom, and who sums what they share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import cut
from fusion_p2p.ids import Digest, PeerId
from fusion_p2p.job.topology import ReplicaEdges, edge_credits, replica_edges
from fusion_p2p.plan.plan import EdgePlan, Plan, SlicePlan, Turns
from fusion_p2p.plan.sharing import exchange_bytes
from fusion_p2p.wire.frames import OWNER, Direction, Edge
from tests.training.builtin import example
from tests.unit.chain_graphs import chain

places = st.integers(1, 12).flatmap(
    lambda period: st.builds(
        lambda chosen: Turns(tuple(sorted(chosen)), period), st.sets(st.integers(0, period - 1), min_size=1, max_size=period)
    )
)


@given(places, st.integers(0, 60))
@settings(derandomize=True, deadline=None)
def test_turns_count_and_list_the_same_micro_batches(turns: Turns, limit: int) -> None:
    own = [m for m in range(limit) if m % turns.period in turns.places]
    assert own == [m for m in range(limit) if m in turns]
    assert own == [turns.nth(turn) for turn in range(len(own))]
    assert turns.before(limit) == len(own)


@given(places, places)
@settings(derandomize=True, deadline=None)
def test_two_members_meet_when_some_micro_batch_is_dealt_to_both(one: Turns, other: Turns) -> None:
    assert one.meets(other) == any(m in one and m in other for m in range(math.lcm(one.period, other.period)))


def planned(graph: Graph, slice_of: list[int], deals: list[tuple[int, ...]]) -> tuple[Plan, tuple[ReplicaEdges, ...]]:
    parts = cut(graph, slice_of)
    slices = tuple(
        SlicePlan(PeerId(f"{index}.0"), 2, replicas=tuple(PeerId(f"{index}.{m}") for m in range(1, max(deal) + 1)), deal=deal)
        for index, deal in enumerate(deals)
    )
    edges = tuple(EdgePlan(e.value, e.source, e.target, credits=3) for e in parts.edges)
    plan = Plan(Digest("0" * 64), "by hand", 4, tuple(slice_of), slices, edges)
    return plan, replica_edges(graph, parts, plan)


def test_without_groups_replicas_are_slices() -> None:
    plan, edges = planned(chain(4), [0, 0, 1, 1, 2], [(0,), (0,), (0,)])
    assert [(part.replica, part.slice) for part in edges] == [(0, 0), (1, 1), (2, 2)]
    assert [(edge.source, edge.target) for part in edges for edge in part.forward_out] == [(0, 1), (1, 2)]
    assert plan.replicas_of(PeerId("1.0")) == (1,)


def test_values_cross_only_between_replicas_that_share_micro_batches() -> None:
    _, edges = planned(chain(4), [0, 0, 1, 1, 2], [(0, 1), (0, 1), (0,)])
    ways = {(edge.source, edge.target) for part in edges for edge in part.forward_out}
    assert ways == {(0, 2), (1, 3), (2, 4), (3, 4)}
    (value,) = {edge.value for edge in edges[4].forward_in}
    assert edges[4].arrivals(Direction.FORWARD, 3) == (Edge(value, 3, 4, Direction.FORWARD),)
    assert edges[3].departures(Direction.EVALUATE, 7) == (Edge(value, 3, 4, Direction.EVALUATE),)
    assert edges[3].departures(Direction.FORWARD, 2) == ()


def test_every_edge_has_its_credits_and_two_ends() -> None:
    _, edges = planned(chain(4), [0, 0, 1, 1, 2], [(0, 1, 0), (0, 1), (0, 1, 2)])
    credits = edge_credits(_, edges)
    for into, out_of, allowed in (
        ("forward_in", "forward_out", 3),
        ("backward_in", "backward_out", 3),
        ("gradients_in", "gradients_out", 1),
        ("sums_in", "sums_out", 1),
    ):
        arriving = sorted((edge for part in edges for edge in getattr(part, into)), key=repr)
        assert arriving == sorted((edge for part in edges for edge in getattr(part, out_of)), key=repr)
        assert {credits[edge] for edge in arriving} <= {allowed}
    assert all(credits[edge] == 2 for part in edges for edge in part.feeds if edge.source == OWNER)


@pytest.mark.parametrize("members", [2, 3, 4])
def test_homes_are_spread_so_that_each_member_moves_about_what_it_would_in_a_ring(members: int) -> None:
    graph = example("gpt2", layers=4).graph
    _, edges = planned(graph, [0] * len(graph.nodes), [tuple(range(members))])
    trainable = [v for v in range(graph.first_parameter, graph.first_node_value) if graph.parameter(v).trainable]
    assert sorted(value for part in edges for value in part.answers) == trainable
    total = sum(graph.types[value].num_bytes for value in trainable)
    sent: Counter[int] = Counter()
    for edge in (edge for part in edges for edge in part.gradients_out + part.sums_out):
        sent[edge.source] += graph.types[edge.value].num_bytes
    ring = 2 * (members - 1) / members * total
    assert max(sent.values()) <= 1.1 * ring
    assert sum(sent.values()) == 2 * (members - 1) * total


def test_a_tied_parameter_of_replicated_slices_is_summed_over_all_their_members_by_one() -> None:
    graph = example("gpt2", tied=True).graph
    half = [0 if index < len(graph.nodes) // 2 else 1 for index in range(len(graph.nodes))]
    _, edges = planned(graph, half, [(0, 1), (0, 1, 2)])
    (embedding,) = (v for v in range(graph.first_parameter, graph.first_node_value) if graph.parameter(v).name == "wte.weight")
    (home,) = (part for part in edges if embedding in part.answers)
    assert home.slice == 0
    givers = [edge.source for edge in home.gradients_in if edge.value == embedding]
    assert sorted([home.replica, *givers]) == [0, 1, 2, 3, 4]


def test_buffers_are_exchanged_only_where_a_slice_has_several_members() -> None:
    graph = example("resnet").graph
    whole = [0] * len(graph.nodes)
    assert planned(graph, whole, [(0,)])[1][0].gradients_in == ()
    _, edges = planned(graph, whole, [(0, 1)])
    exchanged = {edge.value for part in edges for edge in part.gradients_in}
    updated = {v for v in range(graph.first_parameter, graph.first_node_value) if graph.parameter(v).update is not None}
    assert updated <= exchanged
    assert not updated & {value for part in edges for value in part.answers}


@pytest.mark.parametrize("family", ["gpt2", "resnet"])
@pytest.mark.parametrize("deals", [[(0,), (0,)], [(0, 1), (0,)], [(0, 1, 2), (0, 1, 2, 3)]])
def test_the_memory_for_agreeing_is_that_of_what_the_edges_bring_and_take(family: str, deals: list[tuple[int, ...]]) -> None:
    """At most at one time: gradients that came and the copy of each sum, or the copy of each gradient and its sum."""
    graph = example(family, **({"tied": True} if family == "gpt2" else {})).graph
    half = [0 if index < len(graph.nodes) // 2 else 1 for index in range(len(graph.nodes))]
    plan, edges = planned(graph, half, deals)

    def size(values: Iterable[int]) -> int:
        return sum(graph.types[value].num_bytes for value in values)

    needed = [0, 0]
    for part in edges:
        came = size(edge.value for edge in part.gradients_in) + size({edge.value for edge in part.sums_out})
        went = size({edge.value for edge in part.gradients_out}) + size(edge.value for edge in part.sums_in)
        needed[part.slice] = max(needed[part.slice], came + went)
    assert exchange_bytes(graph, cut(graph, half), [len(part.members) for part in plan.slices]) == tuple(needed)
    assert (max(needed) > 0) == (family == "gpt2" or max(map(len, deals)) > 1)
