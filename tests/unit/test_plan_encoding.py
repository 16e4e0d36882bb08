"""Plans survive the wire, and nothing else does."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.errors import GraphError, WireError
from fusion_p2p.graph.slices import cut
from fusion_p2p.ids import Digest, PeerId
from fusion_p2p.plan.encoding import MAX_PLAN_BYTES, check_plan, decode_plan, encode_plan
from fusion_p2p.plan.plan import EdgePlan, Plan, SlicePlan
from tests.unit.chain_graphs import chain

PLAN = Plan(
    graph=Digest("ab" * 32),
    scheduler="equal-compute",
    micro_batches=4,
    slice_of=(0, 0, 1, 1, 2),
    slices=(SlicePlan(PeerId("a"), 3), SlicePlan(PeerId("b"), 2, recompute=True), SlicePlan(PeerId("a"), 1)),
    edges=(EdgePlan(6, 0, 1), EdgePlan(8, 1, 2, credits=1)),
    idle=((PeerId("c"), "too far away"),),
    predicted_step_s=0.25,
)
GROUPED = replace(
    PLAN,
    schedule="gpipe",
    slices=(SlicePlan(PeerId("a"), 3, False, (PeerId("d"),), (0, 1, 0)), *(SlicePlan(PeerId("b"), 4),) * 2),
)


def fields(**changes: object) -> bytes:
    return msgpack.packb({**msgpack.unpackb(encode_plan(PLAN)), **changes})


@pytest.mark.parametrize("plan", [PLAN, GROUPED], ids=["single", "replicas"])
def test_a_plan_comes_back_equal(plan: Plan) -> None:
    assert decode_plan(encode_plan(plan)) == plan
    assert encode_plan(decode_plan(encode_plan(plan))) == encode_plan(plan)


def test_neighbouring_nodes_travel_as_runs() -> None:
    long = replace(PLAN, slice_of=(0,) * 10_000 + (1,) * 9_000)
    assert len(encode_plan(long)) < 500
    assert decode_plan(encode_plan(long)) == long


@given(st.lists(st.integers(0, 40), min_size=1, max_size=200))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_any_placement_comes_back(slice_of: list[int]) -> None:
    plan = replace(PLAN, slice_of=tuple(slice_of))
    assert decode_plan(encode_plan(plan)) == plan


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "malformed"),
        (msgpack.packb([1]), "plan"),
        (fields(more=1), "more"),
        (fields(graph="zz"), "graph"),
        (fields(micro_batches=0), "micro_batches"),
        (fields(slice_of=[[0, 0]]), "slice_of"),
        (fields(slice_of=[[0, 1 << 30]]), "nodes"),
        (fields(slice_of=[[70_000, 1]]), "slice_of"),
        (fields(slices=[]), "slices"),
        (fields(slices=[["a", 0, False, [], [0]]]), "slices"),
        (fields(slices=[["a", 1, 1, [], [0]]]), "slices"),
        (fields(slices=[["a", 1, False, [""], [0, 1]]]), "slices"),
        (fields(slices=[["a", 1, False, ["b"], []]]), "slices"),
        (fields(slices=[["a", 1, False, ["b"], [0, -1]]]), "slices"),
        (fields(schedule="zigzag"), "schedule"),
        (fields(edges=[[1, 0, 1, "none", 0]]), "edges"),
        (fields(edges=[[1, 0, 1, "none"]]), "edges"),
        (fields(predicted_step_s=float("nan")), "predicted_step_s"),
        (b"\x81\xa5graph\xdd\xff\xff\xff\xff", "malformed"),
        (bytes(MAX_PLAN_BYTES + 1), "exceeds"),
    ],
)
def test_what_is_not_a_plan_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(WireError, match=says):
        decode_plan(data)


def mutated(data: bytes, random: Random) -> bytes:
    """A few bytes changed, cut out or doubled."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        place = random.randrange(len(changed))
        match random.randrange(3):
            case 0:
                changed[place] = random.randrange(256)
            case 1:
                del changed[place : place + random.randint(1, 8)]
            case _:
                changed[place:place] = changed[place : place + random.randint(1, 8)]
        if not changed:
            return b""
    return bytes(changed)


@pytest.mark.row(37)
def test_mutated_plans_are_plans_or_wire_errors() -> None:
    random, data, plans = Random(7), encode_plan(PLAN), 0
    for _ in range(5000):
        try:
            plan = decode_plan(mutated(data, random))
        except WireError:
            continue
        plans += 1
        assert isinstance(plan, Plan)
    assert 0 < plans < 2500


def test_a_plan_is_held_against_its_cut() -> None:
    graph = chain(4)
    parts = cut(graph, PLAN.slice_of)
    fitting = replace(PLAN, edges=tuple(EdgePlan(e.value, e.source, e.target) for e in parts.edges))
    check_plan(fitting, graph, parts)
    bad: list[tuple[Plan, type[Exception], str]] = [
        (replace(fitting, edges=fitting.edges[::-1]), GraphError, "edges"),
        (replace(fitting, edges=fitting.edges[1:]), GraphError, "edges"),
        (replace(fitting, slices=fitting.slices[1:]), GraphError, "2 slices"),
        (replace(fitting, slice_of=fitting.slice_of[1:]), GraphError, "4 nodes"),
        (replace(fitting, edges=tuple(replace(e, codec="zip") for e in fitting.edges)), WireError, "codec"),
        (replace(fitting, edges=tuple(replace(e, credits=0) for e in fitting.edges)), WireError, "credit"),
        (replace(fitting, slices=tuple(replace(s, in_flight=0) for s in fitting.slices)), WireError, "in flight"),
    ]
    check_plan(replace(GROUPED, edges=fitting.edges), graph, parts)
    grouped = GROUPED.slices[0]
    for change, says in [
        ({"replicas": (PeerId("a"),)}, "twice"),
        ({"deal": (0, 1, 2)}, "deal"),
        ({"deal": (1, 1)}, "deal"),
        ({"deal": (0, 1, 0, 1, 0)}, "deal"),
        ({"in_flight": 2}, "gpipe"),
        ({"replicas": tuple(PeerId(str(n)) for n in range(70_000))}, "deal"),
    ]:
        slices = (replace(grouped, **change), *GROUPED.slices[1:])
        bad.append((replace(GROUPED, edges=fitting.edges, slices=slices), WireError, says))
    crowd = tuple(PeerId(str(number)) for number in range(4095))
    crowded = SlicePlan(PeerId("a"), 4, False, crowd, tuple(range(4096)))
    bad.append((replace(fitting, micro_batches=5000, slices=(crowded,) * 3), WireError, "too many"))
    for plan, error, says in bad:
        with pytest.raises(error, match=says):
            check_plan(plan, graph, parts)
