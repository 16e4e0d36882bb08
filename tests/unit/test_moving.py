"""What an owner asks for while its run goes on: a plan without who leaves, and a better one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from fusion_p2p.ids import Digest, PeerId
from fusion_p2p.owner.moving import GAIN_EVERY_S, Moving
from fusion_p2p.plan.plan import Plan, SlicePlan
from fusion_p2p.plan.reluctance import COMPARED_STEPS, HASTY_GAIN, LONGEST_PAUSE_S, WARMING_STEPS
from fusion_p2p.plan.replan import GAIN
from tests.protocol.swarm_world import LoopClock, in_virtual_time

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
PLAN = Plan(Digest("0" * 64), "by hand", 2, (0, 1), (SlicePlan(A, 2), SlicePlan(B, 2)), ())
MOVED = replace(PLAN, slices=(SlicePlan(A, 2), SlicePlan(C, 2)))


class Place:
    """Stands for the registrations, the coordinator and the guards of a run."""

    def __init__(self) -> None:
        self.wished: list[tuple[str, Any]] = []
        self.better: str | SimpleNamespace = "the best plan now is the one in use"
        self.held = {1: ((C, 3),)}
        self.moving = Moving(self, self._enlist, self._better, 1000, LoopClock(), self)  # type: ignore[arg-type]

    def asked(self, plan: Plan) -> Plan:
        return plan

    def mend(self, plan: Plan, without: frozenset[PeerId], holders: Any, steps_left: int) -> Any:
        self.wished.append(("mend", holders))

    def improve(self, plan: Plan, without: frozenset[PeerId], holders: Any, so_far: Any) -> Any:
        self.wished.append(("improve", so_far.gain))

    async def _enlist(self, register: object) -> Any:
        return SimpleNamespace(plan=MOVED)

    async def _better(self, register: object) -> Any:
        return self.better

    def began(self, plan: Plan, step: int = 0) -> None:
        self.moving.began(SimpleNamespace(plan=plan, state_step=step))  # type: ignore[arg-type]

    def steps(self, count: int, step_s: float = 1.0) -> None:
        for _ in range(count):
            self.moving.took(step_s)


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Place]:
    place = Place()
    place.began(PLAN)
    looking = asyncio.create_task(place.moving.run())
    yield place
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)


def test_who_leaves_gives_its_state_so_nobody_comes_first_for_an_older_copy() -> None:
    async def scenario() -> None:
        async with running() as place:
            place.moving.leaves(B, "its volunteer wants it back")
            await asyncio.sleep(1.0)
            assert place.wished == [("mend", {})]
            assert place.moving.found(PLAN) is not None

    in_virtual_time(scenario())


def test_a_run_that_has_moved_in_vain_wants_more_than_before() -> None:
    async def scenario() -> None:
        async with running() as place:
            place.steps(3)
            place.better = SimpleNamespace(plan=MOVED)
            await asyncio.sleep(GAIN_EVERY_S + 1)
            assert place.wished == [("improve", GAIN)]
            assert place.moving.found(PLAN) is not None
            place.better = "the best plan now is the one in use"
            place.began(MOVED, 3)
            place.steps(WARMING_STEPS + COMPARED_STEPS)
            await asyncio.sleep(GAIN_EVERY_S + 1)
            assert place.wished[-1] == ("improve", HASTY_GAIN)
            await asyncio.sleep(LONGEST_PAUSE_S)
            assert place.wished[-1] == ("improve", 2 * GAIN)

    in_virtual_time(scenario())


def test_a_change_for_another_reason_is_no_move_for_a_gain() -> None:
    async def scenario() -> None:
        async with running() as place:
            place.moving.leaves(B, "its volunteer wants it back")
            await asyncio.sleep(1.0)
            place.began(MOVED, 3)
            place.steps(WARMING_STEPS + COMPARED_STEPS)
            await asyncio.sleep(GAIN_EVERY_S + 1)
            assert place.wished[-1] == ("improve", GAIN)

    in_virtual_time(scenario())
