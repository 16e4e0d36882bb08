"""Copies of slices at other peers: what they hold is what was kept, whoever they got it from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusion_p2p.errors import NetworkError
from fusion_p2p.execute.compute import ComputeThread
from fusion_p2p.ids import PeerId
from fusion_p2p.job.tenure import OWNER_SILENT_S
from fusion_p2p.net.memory import SimulatedNetwork
from fusion_p2p.net.memory_pipe import Link
from fusion_p2p.peer import fetching
from fusion_p2p.peer.building import Bench
from fusion_p2p.peer.keeping import ABSENT_S, Keeping
from fusion_p2p.wire.job_messages import Fetching, Held, NotHeld, Start, Stop
from tests.scripted_owner import scripted, until
from tests.swarm_in_memory import Volunteer, volunteering, volunteers
from tests.training.test_halting import ADAM, begin


class Served:
    """Which tensors were given to whom, and by whom."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[tuple[Keeping, PeerId, str]] = []
        find = Keeping._find

        async def spied(keeping: Keeping, lineage: Any, asker: PeerId, asked: Any) -> Any:
            found = await find(keeping, lineage, asker, asked)
            if found is not None:
                self.names.append((keeping, asker, asked.name))
            return found

        monkeypatch.setattr(Keeping, "_find", spied)

    def to(self, asker: PeerId, giver: Volunteer | None = None) -> list[str]:
        givers = None if giver is None else giver.service._keeping
        return [name for keeping, peer, name in self.names if peer == asker and givers in (None, keeping)]


@pytest.mark.row(15)
async def test_a_guard_holds_the_very_state_and_can_go_on_from_it_without_its_peer() -> None:
    async with SimulatedNetwork(seed=1) as network, volunteers(network, 4) as helpers, scripted(network, **ADAM) as owner:
        peers = [helper.peer.peer_id for helper in helpers]
        await begin(owner, helpers)
        await owner.step(1)
        await owner.step(2, snapshot=True)
        kept = await owner.kept(1, 2)
        await owner.guard(peers[3], kept, peers[1])
        held = await owner.hear(peers[3], Held)
        assert (held.slice, held.step, held.digest) == (1, 2, kept.digest)
        original, copy = await owner.state(1, 2, peers[1]), await owner.state(1, 2, peers[3])
        assert all(torch.equal(original[name], copy[name]) for name in original)
        await owner.step(3)
        expected = await owner.states(3)
        network.crash(peers[1])
        await owner.halt(peers[0], peers[2])
        await owner.start(owner.plan([helpers[0], helpers[3], helpers[2]]), 2, beside=True)
        await owner.step(3)
        for found, before in zip(await owner.states(3), expected, strict=True):
            assert all(torch.equal(found[name], before[name]) for name in before)


@pytest.mark.row(16)
async def test_a_source_that_falls_silent_is_followed_by_the_next_which_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetching, "SILENT_S", 0.5)
    served = Served(monkeypatch)
    async with SimulatedNetwork(seed=1) as network, volunteers(network, 5) as helpers, scripted(network, **ADAM) as owner:
        peers = [helper.peer.peer_id for helper in helpers]
        await begin(owner, helpers)
        await owner.step(1, snapshot=True)
        kept = await owner.kept(1, 1)
        await owner.guard(peers[3], kept, peers[1])
        await owner.hear(peers[3], Held)
        whole, before = served.to(peers[3]), helpers[4].service.progress()
        network.set_link(peers[1], peers[4], Link(bytes_per_s=1e5, buffer_bytes=4 << 10))
        await owner.guard(peers[4], kept, peers[1], peers[3])
        await until(lambda: helpers[4].service.progress() >= before + 5)
        network.freeze(peers[1])
        held = await owner.hear(peers[4], Held)
        assert held.digest == kept.digest
        rest = served.to(peers[4], helpers[3])
        assert 0 < len(rest) <= len(whole) - 5
        assert rest == whole[-len(rest) :], "it went on where the first had broken off"


async def test_a_newer_step_of_a_slice_replaces_one_that_is_still_being_fetched() -> None:
    async with SimulatedNetwork(seed=1) as network, volunteers(network, 4) as helpers, scripted(network, **ADAM) as owner:
        peers = [helper.peer.peer_id for helper in helpers]
        await begin(owner, helpers)
        await owner.step(1, snapshot=True)
        await owner.step(2, snapshot=True)
        first, second = await owner.kept(1, 1), await owner.kept(1, 2)
        before = helpers[3].service.progress()
        network.set_link(peers[1], peers[3], Link(bytes_per_s=2e4, buffer_bytes=4 << 10))
        await owner.guard(peers[3], first, peers[1])
        await until(lambda: helpers[3].service.progress() > before)
        network.set_link(peers[1], peers[3], Link())
        await owner.guard(peers[3], second, peers[1])
        assert (await owner.hear(peers[3], Held)).step == 2
        assert [copy.key.step for copy in helpers[3].service.copies] == [2]


async def test_a_guard_says_what_it_fetches_as_long_as_it_does_and_that_more_has_come() -> None:
    async with SimulatedNetwork(seed=1) as network, volunteers(network, 4) as helpers, scripted(network, **ADAM) as owner:
        peers = [helper.peer.peer_id for helper in helpers]
        await begin(owner, helpers)
        await owner.step(1, snapshot=True)
        first, second = await owner.kept(1, 1), await owner.kept(2, 1)
        network.set_link(peers[1], peers[3], Link(bytes_per_s=1e4, buffer_bytes=4 << 10))
        await owner.guard(peers[3], first, peers[1])
        await owner.guard(peers[3], second, peers[2])
        told = await owner.hear(peers[3], Fetching, lambda message: message.pieces > 0)
        assert (told.step, told.slices) == (1, (1, 2))
        await owner.hear(peers[3], Fetching, lambda message: message.pieces > told.pieces)
        network.set_link(peers[1], peers[3], Link())
        assert {(await owner.hear(peers[3], Held)).slice for _ in range(2)} == {1, 2}
        assert helpers[3].service._guarding._now == {}


@pytest.mark.parametrize(("fetched", "wanted"), [(1, 2), (2, 1)], ids=["another step", "the run went back"])
async def test_what_is_not_wanted_any_more_is_not_waited_for(fetched: int, wanted: int) -> None:
    async with SimulatedNetwork(seed=1) as network, volunteers(network, 4) as helpers, scripted(network, **ADAM) as owner:
        peers = [helper.peer.peer_id for helper in helpers]
        await begin(owner, helpers)
        await owner.step(1, snapshot=True)
        await owner.step(2, snapshot=True)
        network.set_link(peers[1], peers[3], Link(bytes_per_s=1e3, buffer_bytes=4 << 10))
        await owner.guard(peers[3], await owner.kept(1, fetched), peers[1])
        await owner.guard(peers[3], await owner.kept(2, fetched), peers[2])
        await owner.hear(peers[3], Fetching, lambda message: message.slices == (1, 2))
        if wanted < fetched:
            await owner.say(peers[3], Start(epoch=2, state_step=wanted))
            await until(lambda: not helpers[3].service._guarding._now)
        await owner.guard(peers[3], await owner.kept(0, wanted), peers[0])
        held = await owner.hear(peers[3], Held)
        assert (held.slice, held.step) == (0, wanted)
        await until(lambda: not helpers[3].service._guarding._now)
        assert [(copy.key.slice, copy.key.step) for copy in helpers[3].service.copies] == [(0, wanted)]


async def test_what_goes_to_a_peer_in_the_same_place_does_not_wait_for_the_line() -> None:
    async with SimulatedNetwork(seed=1) as network, volunteers(network, 5) as helpers, scripted(network, **ADAM) as owner:
        peers = [helper.peer.peer_id for helper in helpers]
        await begin(owner, helpers)
        await owner.step(1, snapshot=True)
        kept = await owner.kept(1, 1)
        helpers[1].service._keeping.pace.set_rate(1e3)
        helpers[1].service.is_near = peers[3].__eq__
        await owner.guard(peers[4], kept, peers[1])
        await owner.hear(peers[4], Fetching)
        await owner.guard(peers[3], kept, peers[1])
        await owner.hear(peers[3], Held)
        await owner.hear(peers[4], Fetching)
        assert helpers[4].service.copies == ()


async def test_what_is_not_the_state_that_was_kept_is_not_held() -> None:
    async with SimulatedNetwork(seed=1) as network, volunteers(network, 4) as helpers, scripted(network, **ADAM) as owner:
        peers = [helper.peer.peer_id for helper in helpers]
        await begin(owner, helpers)
        await owner.step(1, snapshot=True)
        kept = await owner.kept(1, 1)
        await owner.guard(peers[3], kept.model_copy(update={"digest": "0" * 64}), peers[1])
        refused = await owner.hear(peers[3], NotHeld)
        assert "not the state" in refused.reason
        assert helpers[3].service.copies == ()


async def test_a_stranger_gets_nothing_and_a_stopped_run_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "PATIENCE_S", 0.5)
    served = Served(monkeypatch)
    async with (
        SimulatedNetwork(seed=1) as network,
        volunteers(network, 4) as helpers,
        scripted(network, **ADAM) as owner,
        scripted(network, **ADAM) as thief,
    ):
        peers = [helper.peer.peer_id for helper in helpers]
        await begin(owner, helpers)
        await owner.step(1, snapshot=True)
        kept = await owner.kept(1, 1)
        await thief.meet(peers[3])
        thief.running = owner.running
        with pytest.raises(NetworkError, match="nobody sends"):
            await thief.state(1, 1, peers[1])
        await thief.guard(peers[3], kept)
        refused = await thief.hear(peers[3], NotHeld)
        assert "nobody" in refused.reason
        await owner.guard(peers[3], kept, peers[1])
        await owner.hear(peers[3], Held)
        assert served.to(thief.peer.peer_id) == []
        await owner.say(peers[3], Stop(job=owner.job, reason="the run has ended"))
        await until(lambda: not helpers[3].service.copies)


async def test_a_guard_without_room_says_how_much_is_lacking() -> None:
    async with (
        SimulatedNetwork(seed=1) as network,
        volunteers(network, 3) as helpers,
        volunteers(network, 1, offered_bytes=1000) as small,
        scripted(network, **ADAM) as owner,
    ):
        await begin(owner, helpers)
        await owner.step(1, snapshot=True)
        kept = await owner.kept(1, 1)
        peer = small[0].peer.peer_id
        await owner.meet(peer)
        await owner.guard(peer, kept, helpers[1].peer.peer_id)
        assert "MiB are lacking" in (await owner.hear(peer, NotHeld)).reason


class Hands:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return self.seconds

    def pause_s(self, about_s: float, *, often: bool = False) -> float:
        return about_s


async def test_without_its_owner_a_peer_is_free_but_keeps_the_state_for_ten_minutes() -> None:
    clock, thread = Hands(), ComputeThread(1)
    bench = Bench(torch.device("cpu"), 1 << 30, thread)
    async with (
        SimulatedNetwork(seed=1) as network,
        volunteering(network, 3, bench, clock) as helpers,
        scripted(network, **ADAM) as owner,
    ):
        await begin(owner, helpers)
        await owner.step(1)
        expected = await owner.states(1)
        owner.pulses = False
        clock.seconds += OWNER_SILENT_S + 1
        await until(lambda: all(helper.service.holding() is None and helper.service.copies for helper in helpers))
        served = [copy.key.step for helper in helpers for copy in helper.service.copies]
        assert served == [1, 1, 1]
        await owner.start(owner.running, 1)
        for found, before in zip(await owner.states(1), expected, strict=True):
            assert all(torch.equal(found[name], before[name]) for name in before)
        await owner.step(2)
        clock.seconds += OWNER_SILENT_S + 1
        await until(lambda: all(helper.service.holding() is None for helper in helpers))
        await owner.close()
        clock.seconds += ABSENT_S + 2
        await until(lambda: not any(helper.service.copies for helper in helpers))
    thread.close()
