"""What an owner accepts from a coordinator: what every scheduler makes of its wishes, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion_p2p.ids import Digest, PeerId
from fusion_p2p.owner.proposals import departure
from fusion_p2p.plan.plan import EdgePlan, Plan, SlicePlan
from fusion_p2p.plan.request import PlanRequest
from fusion_p2p.plan.schedulers import SCHEDULERS, plan
from fusion_p2p.wire.job_messages import Content, OptimiserSettings
from fusion_p2p.wire.swarm_messages import Current, Register
from tests.unit.chain_graphs import chain, chain_costs
from tests.unit.planning_cases import random_network

DIGEST = "cd" * 32
ADAM = OptimiserSettings(name="adam")


def asked(**wishes: object) -> Register:
    content = Content(digest=DIGEST, num_bytes=1)
    known = {"micro_batches": 4, "optimiser": ADAM, "precision": "fp32", "base_epoch": 0}
    return Register(job="0a" * 16, incarnation=1, graph=content, **known | wishes)  # type: ignore[arg-type]


def proposed(*codecs: str, **others: object) -> Plan:
    slices = tuple(SlicePlan(PeerId(f"p{index}"), 1) for index in range(len(codecs) + 1))
    edges = tuple(EdgePlan(index, index, index + 1, codec) for index, codec in enumerate(codecs))
    made = Plan(Digest(DIGEST), "equal-compute", 4, tuple(range(len(slices))), slices, edges)
    return replace(made, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("codec", "ratio"),
    [("none", 100.0), ("uniform", 30.0), ("uniform", 2.0), ("adatopk", 7.77), ("topk:10", 100.0), ("int8", 1.0)]
    + [("adaptive", ratio) for ratio in (1.0, 3.0, 7.52, 7.6, 40.0, 1e6)],
)
@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
def test_what_is_planned_as_asked_is_accepted(scheduler: str, codec: str, ratio: float) -> None:
    graph = chain(5)
    costs = chain_costs(graph)
    for seed in range(3):
        wishes = {
            "micro_batches": 4,
            "recompute": seed == 1,
            "codec": codec,
            "ratio": ratio,
            "schedule": ("auto", "gpipe", "1f1b")[seed],
        }
        made = plan(scheduler, graph, costs, random_network(seed, 3), PlanRequest(Digest(DIGEST), optimiser=ADAM, **wishes))  # type: ignore[arg-type]
        assert isinstance(made, Plan)
        assert departure(made, asked(scheduler=scheduler, peers=3, **wishes)) is None


@pytest.mark.parametrize(
    ("policy", "ratio", "codec", "allowed"),
    [
        ("none", 100.0, "topk:1000000", False),
        ("none", 100.0, "bf16", False),
        ("int8", 100.0, "none", True),
        ("int8", 100.0, "int4", False),
        ("topk:10", 100.0, "topk:10:int8", True),
        ("topk:10", 100.0, "topk:11", False),
        ("topk:10", 100.0, "topk-independent:10", False),
        ("uniform", 30.0, "topk-paper:31", False),
        ("adatopk", 30.0, "topk-paper:90", True),
        ("adatopk", 30.0, "topk-paper:91", False),
        ("adatopk", 30.0, "topk:3:int8", False),
        ("adaptive", 7.52, "int4", True),
        ("adaptive", 7.5, "topk:3:int8", False),
        ("adaptive", 20.0, "topk:10:int8", True),
        ("adaptive", 20.0, "topk:20:int8", False),
        ("adaptive", 20.0, "fp16", False),
        ("adaptive", 1e6, "topk:1000000", False),
        ("none", 1.0, "no such codec", False),
    ],
)
def test_an_edge_is_coded_only_as_the_policy_may(policy: str, ratio: float, codec: str, allowed: bool) -> None:
    found = departure(proposed("none", codec), asked(codec=policy, ratio=ratio))
    assert (found is None) == allowed
    if found is not None:
        assert found == f"it sends from slice 1 to 2 by codec {codec!r}, not by {policy}"


def test_everything_else_that_was_asked_for_counts_too() -> None:
    assert departure(proposed("none"), asked()) is None
    recomputing = proposed("none", slices=(SlicePlan(PeerId("p0"), 1), SlicePlan(PeerId("p1"), 1, recompute=True)))
    for wrong, wishes, why in (
        (proposed("none", graph=Digest("ab" * 32)), {}, "another graph"),
        (proposed("none", micro_batches=8), {}, "8 micro-batches, not 4"),
        (proposed("none", scheduler="equal-number"), {}, "by scheduler 'equal-number', not equal-compute"),
        (proposed("none", schedule="gpipe"), {"schedule": "1f1b"}, "gpipe, not 1f1b"),
        (proposed("none", "none"), {"peers": 2}, "3 peers, not 2"),
        (recomputing, {}, "slice 1 recomputes"),
        (recomputing, {"recompute": True}, "slice 0 does not recompute"),
    ):
        assert why in str(departure(wrong, asked(**wishes)))
    alone = replace(recomputing, scheduler="auto")
    assert departure(alone, asked(scheduler="auto")) is None, "auto may"


def mended(*without: str) -> Register:
    current = Current(purpose="mend", plan=Content(digest=DIGEST, num_bytes=1), without=without)
    return asked().model_copy(update={"current": current})


def test_a_mended_plan_may_leave_as_it_is_what_the_owner_chose_later() -> None:
    chosen = proposed("int8", scheduler="by hand", schedule="gpipe")
    moved = replace(chosen, slices=(SlicePlan(PeerId("spare"), 1), chosen.slices[1]))
    strict = mended("p0").model_copy(update={"schedule": "1f1b"})
    assert departure(moved, strict, chosen) is None
    assert "by scheduler" in str(departure(moved, strict))
    assert "by codec 'int4'" in str(departure(replace(moved, edges=proposed("int4").edges), strict, chosen))
    other_cut = replace(moved, slice_of=(0, 0))
    assert "by scheduler" in str(departure(other_cut, strict, chosen)), "a new cut is a new plan"


def test_nobody_comes_back_against_the_owners_will() -> None:
    plan = proposed("none")
    assert departure(plan, mended("somebody else"), plan) is None
    assert departure(plan, mended("p1"), plan) == "it takes peer p1, which is lost, leaves, or failed"
