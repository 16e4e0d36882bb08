from __future__ import annotations

from dataclasses import replace

from fusion_p2p.ids import Digest, PeerId
from fusion_p2p.owner.changing import Finish, in_words
from fusion_p2p.plan.plan import EdgePlan, Plan, SlicePlan

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
SPARSE = Plan(Digest("0" * 64), "by hand", 2, (0, 1), (SlicePlan(A, 2), SlicePlan(B, 2)), (EdgePlan(0, 0, 1, "topk:5"),))


def codecs(plan: Plan) -> list[str]:
    return [edge.codec for edge in plan.edges]


def test_a_run_that_goes_back_to_before_its_finish_has_its_codecs_again() -> None:
    finish = Finish(3)
    assert finish.plan_after(2, SPARSE) == SPARSE
    finished = finish.plan_after(3, SPARSE)
    assert codecs(finished) == ["int8"]
    mended = replace(finished, slices=(SlicePlan(A, 2), SlicePlan(C, 2)), predicted_step_s=1.5)
    again = finish.plan_after(2, mended)
    assert (codecs(again), again.slices) == (["topk:5"], mended.slices)
    assert codecs(finish.plan_after(3, again)) == ["int8"]
    assert codecs(finish.asked(mended)) == ["topk:5"]


def test_a_plan_that_others_have_made_keeps_its_codecs() -> None:
    finish = Finish(3)
    finish.plan_after(3, SPARSE)
    other = replace(SPARSE, edges=(EdgePlan(0, 0, 1, "int4"),))
    another_cut = replace(SPARSE, edges=(EdgePlan(1, 0, 1, "int8"),))
    assert finish.plan_after(2, other) == other
    assert finish.plan_after(2, another_cut) == another_cut


def test_a_change_is_told_in_words() -> None:
    moved = replace(SPARSE, slices=(SlicePlan(A, 2), SlicePlan(C, 2)), edges=(EdgePlan(0, 0, 1, "int8"),))
    assert in_words(SPARSE, moved) == "slice 1 moves to peer c; slice 0 to 1: topk:5 -> int8"
    assert "a new cut: 1 slices on 1 peers" in in_words(SPARSE, replace(SPARSE, slice_of=(0, 0), slices=(SlicePlan(A, 2),)))
