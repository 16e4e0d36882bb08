"""Real presences on the simulated network: they find each other, elect, notice deaths, heal, and say goodbye."""

from __future__ import annotations

import asyncio
import logging
from unittest import mock

import pytest

import fusion_p2p
from fusion_p2p.clock import OFTEN_S
from fusion_p2p.ids import PeerId
from fusion_p2p.net.memory import SimulatedDirectory
from fusion_p2p.peer.presence import CALM_ROUNDS
from fusion_p2p.peer.swarm_questions import SwarmQuestions
from fusion_p2p.peer.swarm_view import SwarmView
from fusion_p2p.swarm.settings import WAN
from fusion_p2p.wire.swarm_messages import Beat, Holding
from tests.protocol.swarm_world import PROFILE, LoopClock, WakingClock, World, always, eventually, in_virtual_time

ELECTION_S = WAN.quiet_s + 2 * WAN.vote_s + 2.0
FAILOVER_S = WAN.suspect_after_s + 2 * WAN.vote_s + 2.0


@pytest.mark.parametrize("num_peers", [1, 2, 5, 20, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.row(13)
def test_peers_that_start_together_elect_one_coordinator(num_peers: int) -> None:
    async def scenario() -> None:
        async with World(seed=num_peers) as world:
            for _ in range(num_peers):
                world.add()
            await eventually(world.complete, within_s=ELECTION_S)
            leader = world.leader
            await always(lambda: world.agreed() and world.leader is leader, for_s=60.0)
            assert world.complete()

    in_virtual_time(scenario())


@pytest.mark.parametrize("seed", range(5))
def test_newcomers_follow_whoever_coordinates(seed: int) -> None:
    async def scenario() -> None:
        async with World(seed) as world:
            world.add()
            await eventually(world.complete, within_s=ELECTION_S)
            leader = world.leader
            for _ in range(4):
                await asyncio.sleep(7.3)
                world.add()
                await eventually(world.complete, within_s=4.0)
                assert world.leader is leader, "a newcomer does not disturb a coordinator that is heard"

    in_virtual_time(scenario())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.row(12)
def test_a_killed_coordinator_is_replaced_in_time(seed: int) -> None:
    async def scenario() -> None:
        async with World(seed) as world:
            for _ in range(5):
                world.add()
            await eventually(world.complete, within_s=ELECTION_S)
            for _ in range(3):
                before = world.leader.coordinator
                await world.kill(world.leader.me)
                await eventually(world.agreed, within_s=FAILOVER_S)
                after = world.leader.coordinator
                assert before is not None
                assert after is not None
                assert after.term > before.term
                # Followers count the dead for a majority until they know.
                await eventually(world.known_to_all, within_s=WAN.heard_lately_s + 5)

    in_virtual_time(scenario())


def test_a_coordinator_that_says_goodbye_is_replaced_faster() -> None:
    async def scenario() -> None:
        async with World(3) as world:
            for _ in range(3):
                world.add()
            await eventually(world.complete, within_s=ELECTION_S)
            await world.stop(world.leader.me)
            assert await eventually(world.agreed, within_s=FAILOVER_S) < WAN.suspect_after_s

    in_virtual_time(scenario())


def test_standby_peers_coordinate_before_slice_holders() -> None:
    async def scenario() -> None:
        async with World(4) as world:
            peers = [world.add() for _ in range(4)]
            await eventually(world.complete, within_s=ELECTION_S)
            idle = next(peer for peer in reversed(peers) if not peer.coordinating)
            for peer in peers:
                if peer is not idle:
                    world.work[peer.me].held = Holding(job="ab" * 16, slices=(0,))
            await asyncio.sleep(3 * WAN.beat_s)
            await world.kill(world.leader.me)
            await eventually(world.agreed, within_s=FAILOVER_S)
            assert world.leader is idle

    in_virtual_time(scenario())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.row(13)
def test_after_a_partition_heals_one_coordinator_remains(seed: int) -> None:
    async def scenario() -> None:
        async with World(seed) as world:
            peers = [world.add() for _ in range(6)]
            await eventually(world.complete, within_s=ELECTION_S)
            world.network.partition([peer.me for peer in peers[:3]])
            await eventually(lambda: len(world.coordinators()) == 2, within_s=WAN.heard_lately_s + FAILOVER_S)
            await asyncio.sleep(60.0)
            terms = [peer.coordinator for peer in world.coordinators()]
            world.network.heal()
            await eventually(world.complete, within_s=WAN.heard_lately_s + 3 * WAN.random_beat_s)
            assert world.leader.coordinator == max(token for token in terms if token is not None)
            await always(world.agreed, for_s=30.0)

    in_virtual_time(scenario())


@pytest.mark.row(11)
def test_the_dead_are_evicted_and_a_frozen_peer_comes_back_by_itself() -> None:
    async def scenario() -> None:
        async with World(8) as world:
            for _ in range(4):
                world.add()
            await eventually(world.complete, within_s=ELECTION_S)
            leader = world.leader
            frozen, dead = [peer for peer in world.presences if peer != leader.me][:2]
            world.network.freeze(frozen)
            await world.kill(dead)

            def heard() -> set[str]:
                return {peer.peer for peer in leader.members()}

            await eventually(lambda: not heard() & {frozen, dead}, within_s=WAN.suspect_after_s + WAN.confirm_s + 2)
            world.network.thaw(frozen)
            await eventually(lambda: frozen in heard(), within_s=5 * WAN.beat_s)
            assert world.leader is leader

    in_virtual_time(scenario())


def test_a_restart_is_welcome_at_once() -> None:
    async def scenario() -> None:
        async with World(9) as world:
            for _ in range(3):
                world.add()
            await eventually(world.complete, within_s=ELECTION_S)
            follower = next(peer for peer in world.presences if peer != world.leader.me)
            leader = world.leader
            world.add(back=await world.kill(follower))
            await eventually(world.complete, within_s=4.0)
            assert world.leader is leader

    in_virtual_time(scenario())


def test_beats_carry_what_a_peer_holds_and_can_do() -> None:
    async def scenario() -> None:
        async with World(10) as world:
            for _ in range(3):
                world.add()
            await eventually(world.complete, within_s=ELECTION_S)
            worker = next(peer for peer in world.presences if peer != world.leader.me)
            world.work[worker].held = Holding(job="cd" * 16, slices=(1, 2))
            world.presences[worker].set_profile(PROFILE.model_copy(update={"free_bytes": 5}))

            def told() -> bool:
                seen = next(peer for peer in world.leader.snapshot().peers if peer.peer == worker)
                return (seen.state, seen.holding, seen.progress, seen.free_bytes) == (
                    "working", Holding(job="cd" * 16, slices=(1, 2)), 7, 5,
                )  # fmt: skip

            await eventually(told, within_s=3 * WAN.beat_s)
            world.presences[worker].set_state("draining")
            await eventually(lambda: "draining" in {p.state for p in world.leader.members()}, within_s=3 * WAN.beat_s)

    in_virtual_time(scenario())


@pytest.mark.row(14)
def test_clocks_that_differ_by_hours_change_nothing() -> None:
    async def scenario() -> None:
        async with World(14) as world:
            for offset_s in (0.0, 86400.0, -86400.0, 3600.0):
                world.add(clock=LoopClock(offset_s))
            await eventually(world.complete, within_s=ELECTION_S)
            leader = world.leader
            await always(lambda: world.agreed() and world.leader is leader, for_s=60.0)

    in_virtual_time(scenario())


@pytest.mark.row(14)
def test_a_restart_with_the_clock_set_back_is_welcome_at_once() -> None:
    async def scenario() -> None:
        async with World(15) as world:
            for _ in range(3):
                world.add(clock=LoopClock(7200.0))
            await eventually(world.complete, within_s=ELECTION_S)
            follower = next(peer for peer in world.presences if peer != world.leader.me)
            stopped = await world.kill(follower)
            world.add(PROFILE.model_copy(update={"device": "after"}), back=stopped, clock=LoopClock(-7200.0))

            def announced() -> bool:
                return world.complete() and "after" in {peer.device for peer in world.leader.snapshot().peers}

            await eventually(announced, within_s=4.0)

    in_virtual_time(scenario())


@pytest.mark.row(3)
def test_who_is_alone_says_what_it_listens_on_dialled_and_got(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with World(16) as world:
            dead = world.add()
            await asyncio.sleep(5.0)
            await world.kill(dead.me)
            lonely = world.add()
            await asyncio.sleep(60.0)
            said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
            assert said[0] == f"nobody else heard yet; listening on {world.nodes[lonely.me].transport.addresses[0]}"
            assert said[1].startswith(f"dialled {dead.me}: ")
            assert "refused" in said[1]
            assert len(said) == 2, "once"

    in_virtual_time(scenario())


@pytest.mark.row(6)
@pytest.mark.parametrize(
    "other",
    [
        PROFILE.model_copy(update={"network": "another"}),
        PROFILE.model_copy(update={"versions": PROFILE.versions.model_copy(update={"protocol": fusion_p2p.PROTOCOL + 1})}),
    ],
)
def test_another_network_or_protocol_is_left_out_with_a_reason(other: object) -> None:
    async def scenario() -> None:
        async with World(11) as world:
            ours = [world.add(), world.add()]
            stranger = world.add(other)  # type: ignore[arg-type]
            await asyncio.sleep(30.0)
            assert all(stranger.me not in {p.peer for p in peer.members()} for peer in ours)
            assert any(stranger.me in peer.others.refused for peer in ours)

    in_virtual_time(scenario())


@pytest.mark.row(6)
def test_other_torch_and_python_versions_work_together() -> None:
    async def scenario() -> None:
        async with World(12) as world:
            world.add()
            older = PROFILE.versions.model_copy(update={"torch": "2.6.0", "python": "3.12.1", "fusion": "0.0.9"})
            world.add(PROFILE.model_copy(update={"versions": older}))
            await eventually(world.complete, within_s=ELECTION_S)

    in_virtual_time(scenario())


@pytest.mark.row(4)
def test_every_listing_says_how_a_peer_is_reached() -> None:
    async def scenario() -> None:
        async with World(13) as world:
            world.add()
            world.add(PROFILE.model_copy(update={"reachability": "relayed"}))
            await eventually(world.complete, within_s=ELECTION_S)
            ways = {peer.reachability for peer in world.leader.snapshot().peers}
            assert ways == {"direct", "relayed"}

    in_virtual_time(scenario())


def test_while_nothing_happens_the_coordinator_reads_the_directory_every_other_minute_and_others_seldom() -> None:
    async def live() -> None:
        async with World(seed=5) as world:
            for _ in range(5):
                world.add()
            await eventually(world.known_to_all, 30.0)
            await asyncio.sleep(2 * WAN.lookup_as_follower_s)  # the pauses grow up to it
            with mock.patch.object(SimulatedDirectory, "lookup", autospec=True, side_effect=SimulatedDirectory.lookup) as read:
                await asyncio.sleep(10 * WAN.lookup_s)
            followers = 4 * 10 * WAN.lookup_s / WAN.lookup_as_follower_s
            assert 9 + followers - 4 <= read.call_count <= 10 + followers

    in_virtual_time(live())


def test_a_peer_that_is_elected_reads_the_directory_at_once() -> None:
    async def live() -> None:
        async with World(seed=7) as world:
            for _ in range(4):
                world.add()
            await eventually(world.known_to_all, 30.0)
            await asyncio.sleep(2 * WAN.lookup_as_follower_s)
            first = world.leader.me
            with mock.patch.object(SimulatedDirectory, "lookup", autospec=True, side_effect=SimulatedDirectory.lookup) as read:
                await world.kill(first)
                await eventually(world.complete, 30.0)
                readers = {call.args[0] for call in read.call_args_list}
            assert world.nodes[world.leader.me].directory in readers

    in_virtual_time(live())


def test_while_everybody_is_known_few_random_beats_are_sent_and_with_strangers_more() -> None:
    async def live() -> None:
        async with World(seed=6) as world:
            for _ in range(6):
                world.add()
            await eventually(world.known_to_all, 30.0)
            await asyncio.sleep(2 * WAN.lookup_s)  # until everybody has read everybody's announcement
            calm = await beats_at_random(20)
            world.network.freeze(min(set(world.presences) - {world.leader.me}))
            await asyncio.sleep(3 * WAN.heard_lately_s)  # it is evicted, and still announced
            assert 6 * 20 / CALM_ROUNDS - 6 <= calm <= 6 * 20 / CALM_ROUNDS + 6
            assert await beats_at_random(20) > 6 * 20

    in_virtual_time(live())


@pytest.mark.parametrize("past_s", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_coordinator_that_leaves_a_calm_swarm_is_replaced_at_once(past_s: float) -> None:
    async def live() -> None:
        async with World(seed=10) as world:
            for number in range(5):
                world.add(clock=WakingClock(0.2 * number))
            await eventually(world.known_to_all, 30.0)
            await asyncio.sleep(20.0 + past_s)
            await world.stop(world.leader.me)
            assert await eventually(world.agreed, 5.0) < 0.5

    in_virtual_time(live())


def test_beats_come_to_the_coordinator_when_it_looks_up_anyway() -> None:
    async def live() -> None:
        async with World(seed=8) as world:
            for number in range(12):
                world.add(clock=WakingClock(0.083 * number))
            await eventually(world.known_to_all, 30.0)
            await asyncio.sleep(10.0)
            moments, note_beat = list[float](), SwarmView.note_beat

            def note(view: SwarmView, peer: PeerId, beat: Beat) -> None:
                if view.coordinating:
                    moments.append(view.now() % OFTEN_S)
                note_beat(view, peer, beat)

            with mock.patch.object(SwarmView, "note_beat", note):
                await asyncio.sleep(20.0)
            assert 11 * 19 <= len(moments) <= 11 * 21
            apart_s = [abs(one - moments[0]) for one in moments]
            assert max(min(one, OFTEN_S - one) for one in apart_s) < 0.04

    in_virtual_time(live())


@pytest.mark.parametrize("again_s", [0.01, 3.0, 1e6])
def test_a_coordinator_that_asks_for_too_many_beats_or_too_few_gets_one_a_second(again_s: float) -> None:
    async def live() -> None:
        async with World(seed=9) as world:
            for _ in range(4):
                world.add()
            await eventually(world.known_to_all, 30.0)
            with (
                mock.patch.object(SwarmView, "_again_s", return_value=again_s),
                mock.patch.object(SwarmView, "note_beat", autospec=True, side_effect=SwarmView.note_beat) as noted,
            ):
                await asyncio.sleep(20.0)
            beats = sum(call.args[0].coordinating for call in noted.call_args_list)
            assert 3 * 19 <= beats <= 3 * 21
            assert world.known_to_all()

    in_virtual_time(live())


async def beats_at_random(rounds: int) -> int:
    """How many all peers together send in so many rounds, to others than their coordinator."""
    with mock.patch.object(SwarmQuestions, "beat", autospec=True, side_effect=SwarmQuestions.beat) as beat:
        await asyncio.sleep(rounds * WAN.random_beat_s)
    return beat.call_count
