"""A volunteer's commands and caps at a peer of a swarm: what it hands over, what the others are told, what the answers say."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest

from fusion_p2p.ids import PeerId
from fusion_p2p.net.metering import Meter
from fusion_p2p.peer.control_socket import Command
from fusion_p2p.peer.traffic import MonthlyTraffic
from fusion_p2p.peer.volunteer import GIB, Allowed
from fusion_p2p.peer.volunteer_service import Farewell, VolunteerService, local_time
from fusion_p2p.swarm.settings import WAN
from fusion_p2p.time_of_day import parse_hours
from fusion_p2p.wire.swarm_messages import Holding
from tests.protocol.swarm_world import LoopClock, World, eventually, in_virtual_time

pytestmark = pytest.mark.row(21)

JOB = "ab" * 16
DRAIN_S = 25.0
TOLD_S = 2 * WAN.beat_s


class Work:
    """Holds slice 2 until the test has somebody take it over."""

    def __init__(self) -> None:
        self.held: Holding | None = Holding(job=JOB, slices=(2,))
        self.taken_over = asyncio.Event()
        self.closed: str | None = None
        self.drained: list[str] = []

    def holding(self) -> Holding | None:
        return self.held

    def describe(self) -> str:
        return "standby" if self.held is None else "training: slice 2"

    async def drain(self, reason: str, timeout_s: float) -> bool:
        self.drained.append(reason)
        try:
            async with asyncio.timeout(timeout_s if self.held is not None else 0.01):
                await self.taken_over.wait()
                self.held = None
        except TimeoutError:
            pass
        return self.held is None

    def close(self, reason: str) -> None:
        self.closed, self.held = reason, None

    def reopen(self) -> None:
        self.closed = None


class Place:
    """One volunteer's peer beside two others. `said`: what its process was asked to do."""

    def __init__(self, world: World, folder: Path, allowed: Allowed) -> None:
        self.world, self.work, self.meter, self.clock = world, Work(), Meter(), LoopClock()
        presence = world.add(clock=self.clock)
        world.add()
        world.add()
        self.me: PeerId = presence.me
        self.farewell, self.signalled = Farewell(), 0
        traffic = MonthlyTraffic(folder, self.me, self.meter, local_time(self.clock))
        self.service = VolunteerService(allowed, self.work, presence.set_state, traffic, self.clock, self._signal, "join.key")
        self.farewell.leave = self.service.leave
        self.task = asyncio.create_task(self.service.run())

    def _signal(self) -> None:
        self.signalled += 1

    async def answers(self, name: str, for_s: float | None = None) -> list[str]:
        return [answer.text async for answer in self.service.obey(Command(name, for_s))]

    def listed(self) -> str | None:
        """What the coordinator says of it."""
        leader = next((one for one in self.world.presences.values() if one.coordinating), None)
        peers = leader.snapshot().peers if leader is not None else ()
        return next((peer.state for peer in peers if peer.peer == self.me), None)


def test_a_pause_hands_over_is_listed_and_ends_by_itself(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(seed=1) as world:
            place = Place(world, tmp_path, Allowed())
            await eventually(lambda: place.listed() == "standby", within_s=30.0)
            asking = asyncio.create_task(place.answers("pause", 90.0))
            await eventually(lambda: place.listed() == "draining", within_s=TOLD_S)
            assert place.service.describe().startswith(
                "draining: handing over slice 2 (at most 25 s), then paused: by its volunt"
            )
            assert not asking.done()
            place.work.taken_over.set()
            first, last = await asking
            assert first.startswith("draining: handing over slice 2")
            assert last.startswith("join.key: paused: by its volunteer, until ")
            assert place.work.closed == "by its volunteer"
            await eventually(lambda: place.listed() == "paused", within_s=TOLD_S)
            await asyncio.sleep(60.0)
            assert place.listed() == "paused"
            await eventually(lambda: place.listed() == "standby", within_s=30.0 + TOLD_S)
            assert place.work.closed is None
            place.task.cancel()

    in_virtual_time(scenario())


def test_slices_that_nobody_takes_over_are_given_up_after_the_time_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(seed=2) as world:
            place = Place(world, tmp_path, Allowed())
            await asyncio.sleep(1.0)
            began = place.clock.now()
            assert "by its volunteer" in (await place.answers("pause"))[-1]
            assert place.clock.now() - began == pytest.approx(DRAIN_S, abs=0.1)
            assert place.work.closed == "by its volunteer"
            assert await place.answers("resume") == ["join.key: standby"]
            assert place.work.closed is None
            place.task.cancel()

    in_virtual_time(scenario())


def test_the_first_signal_hands_over_and_then_the_peer_is_free_to_go(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(seed=3) as world:
            place = Place(world, tmp_path, Allowed())
            await asyncio.sleep(1.0)
            assert place.farewell.asked() == DRAIN_S
            assert place.service.describe() == "draining: handing over slice 2 (at most 25 s; Ctrl+C again leaves at once)"
            await asyncio.sleep(1.0)
            assert place.work.drained == ["it leaves the swarm"]
            assert not place.service.gone.is_set()
            place.work.taken_over.set()
            async with asyncio.timeout(1.0):
                await place.service.gone.wait()
            place.task.cancel()

    in_virtual_time(scenario())


@pytest.mark.parametrize(("holds", "drain_timeout_s"), [(False, DRAIN_S), (True, 0.0)])
def test_who_has_nothing_to_hand_over_or_shall_not_goes_at_once(tmp_path: Path, holds: bool, drain_timeout_s: float) -> None:
    async def scenario() -> None:
        async with World(seed=4) as world:
            place = Place(world, tmp_path, Allowed(drain_timeout_s=drain_timeout_s))
            place.work.held = place.work.held if holds else None
            await asyncio.sleep(1.0)
            assert place.farewell.asked() == 0.0
            place.task.cancel()

    in_virtual_time(scenario())


def test_the_command_to_leave_is_a_signal_and_its_connection_lasts_as_long_as_the_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(seed=5) as world:
            place = Place(world, tmp_path, Allowed())
            await asyncio.sleep(1.0)
            leaving = asyncio.create_task(place.answers("leave"))
            await asyncio.sleep(100.0)
            assert place.signalled == 1
            assert not leaving.done()
            leaving.cancel()
            place.task.cancel()

    in_virtual_time(scenario())


def test_outside_of_its_hours_a_peer_is_paused_from_the_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(seed=6) as world:
            opening = local_time(LoopClock()) + timedelta(minutes=2)
            hours = parse_hours(f"{opening:%H:%M}-{opening + timedelta(hours=1):%H:%M}")
            place = Place(world, tmp_path, Allowed(hours=(hours,)))
            place.work.held = None
            await eventually(lambda: place.listed() == "paused", within_s=30.0)
            (shown,) = await place.answers("show")
            assert shown == f"join.key: paused: outside of the hours {hours.text}, until {opening:%H:%M}"
            assert (await place.answers("resume")) == [shown]
            await eventually(lambda: place.listed() == "standby", within_s=130.0)
            place.task.cancel()

    in_virtual_time(scenario())


def test_a_month_whose_traffic_is_used_up_pauses_the_peer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(seed=7) as world:
            place = Place(world, tmp_path, Allowed(monthly_bytes=GIB))
            await eventually(lambda: place.listed() == "standby", within_s=30.0)
            place.meter.num_bytes += GIB
            place.work.taken_over.set()
            await eventually(lambda: place.listed() == "paused", within_s=20.0)
            assert place.service.describe().startswith("paused: this month's 1 GiB of traffic are used up, until 1 ")
            again = MonthlyTraffic(tmp_path, "another peer", Meter(), local_time(place.clock))
            assert again.count(local_time(place.clock)) == GIB, "all peers of a machine share its line"
            place.task.cancel()

    in_virtual_time(scenario())


def test_a_paused_peers_line_is_not_measured(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(seed=8, measuring=True) as world:
            presences = [world.add() for _ in range(3)]
            presences[0].set_state("paused")
            await eventually(lambda: all(one.links().entries for one in presences[1:]), within_s=30.0)
            await asyncio.sleep(20.0)
            assert presences[0].links().entries == ()
            presences[0].set_state("standby")
            await eventually(lambda: len(presences[0].links().entries) == 2, within_s=60.0)

    in_virtual_time(scenario())
