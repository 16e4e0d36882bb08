"""The owner finds out who is lost: by itself, with the help of others, and without mistaking its own sleep for theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from fusion_p2p.errors import NetworkError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.base import Stream
from fusion_p2p.net.memory import SimulatedNetwork, SimulatedPeer
from fusion_p2p.net.messaging import MessageStream
from fusion_p2p.owner import links as links_module
from fusion_p2p.owner.links import PULSE_S, Event, Gone, Heard, Links, Parted
from fusion_p2p.wire.job_messages import JOB_MESSAGES, JOB_PROTOCOL, Pulse, Stop
from tests.protocol.swarm_world import in_virtual_time

STOP = Stop(job="a" * 32, reason="it is over")


@dataclass
class Pulsing:
    """A peer that pulses, and ends the stream when it is told to stop."""

    peer: SimulatedPeer
    heard: list[str] = field(default_factory=list)

    async def serve(self, stream: Stream) -> None:
        messages = MessageStream(stream, JOB_MESSAGES)
        pulsing = asyncio.create_task(self._pulse(messages))
        try:
            while not self.heard or self.heard[-1] != "stop":
                self.heard.append((await messages.receive()).kind)
        finally:
            pulsing.cancel()

    async def _pulse(self, messages: MessageStream) -> None:
        with suppress(NetworkError):
            while True:
                await messages.send(Pulse(progress=1))
                await asyncio.sleep(1)


@dataclass
class Told:
    """Observers that say what the test has put here."""

    nobody: bool = True
    takes_s: float = 1.5
    asked: list[PeerId] = field(default_factory=list)

    async def nobody_reaches(self, suspect: PeerId, others: Sequence[PeerId]) -> bool:
        assert others
        assert suspect not in others
        self.asked.append(suspect)
        await asyncio.sleep(self.takes_s)
        return self.nobody

    async def find(self, peer: PeerId) -> None:
        pass


@dataclass
class World:
    network: SimulatedNetwork
    peers: list[Pulsing]
    links: Links
    observers: Told

    def id(self, number: int) -> PeerId:
        return self.peers[number].peer.peer_id

    async def next_end(self, timeout_s: float = 60) -> tuple[Event, float]:
        """The next event that is no pulse, and how long it took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.timeout(timeout_s):
            while True:
                event = await self.links.inbox.get()
                if not isinstance(event, Heard):
                    return event, loop.time() - began


@asynccontextmanager
async def world(count: int = 3, observers: Told | None = None) -> AsyncIterator[World]:
    told = observers or Told()
    async with SimulatedNetwork(seed=1) as network:
        peers = [Pulsing(network.join()) for _ in range(count)]
        for peer in peers:
            await peer.peer.transport.serve(JOB_PROTOCOL, peer.serve)
        links = Links(network.join().transport, [peer.peer.peer_id for peer in peers], told)
        running = asyncio.create_task(links.run())
        await asyncio.sleep(2)
        yield World(network, peers, links, told)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.row(12)
def test_a_peer_that_is_gone_and_that_nobody_reaches_is_lost_at_once() -> None:
    async def scenario() -> None:
        async with world(observers=Told(takes_s=0.1)) as known:
            known.network.crash(known.id(1))
            event, took_s = await known.next_end()
            assert isinstance(event, Gone)
            assert (event.peer, known.observers.asked) == (known.id(1), [known.id(1)])
            assert took_s < 1
            assert known.links.peers == {known.id(0), known.id(2)}

    in_virtual_time(scenario())


@pytest.mark.row(11)
def test_a_frozen_peer_is_lost_after_three_seconds_and_one_confirmation() -> None:
    async def scenario() -> None:
        async with world() as known:
            known.network.freeze(known.id(1))
            event, took_s = await known.next_end()
            assert isinstance(event, Gone)
            assert event.peer == known.id(1)
            assert 2 < took_s < 3 + 1.5

    in_virtual_time(scenario())


@pytest.mark.row(5)
def test_a_peer_that_others_reach_is_waited_for_and_a_reset_is_no_suspicion() -> None:
    async def scenario() -> None:
        async with world(observers=Told(nobody=False)) as known:
            known.network.reset_streams()
            with pytest.raises(TimeoutError):
                await known.next_end(2)
            assert known.observers.asked == []
            known.network.freeze(known.id(1))
            await asyncio.sleep(6)
            known.network.thaw(known.id(1))
            with pytest.raises(TimeoutError):
                await known.next_end(20)
            known.network.freeze(known.id(1))
            event, took_s = await known.next_end()
            assert isinstance(event, Gone)
            assert 8 - PULSE_S <= took_s < 14  # it had said its last word up to a pulse before

    in_virtual_time(scenario())


def test_an_owner_that_slept_doubts_itself_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock jumps, as after SIGCONT, and nobody has been heard for long."""

    async def scenario() -> None:
        jump, loop = [0.0], asyncio.get_running_loop()
        monkeypatch.setattr(links_module, "_now", lambda: loop.time() + jump[0])
        async with world() as known:
            jump[0] = 60.0
            with pytest.raises(TimeoutError):
                await known.next_end(20)
            assert known.links.gone == {}

    in_virtual_time(scenario())


def test_a_neighbours_word_is_no_death_by_hearsay() -> None:
    async def scenario() -> None:
        async with world() as known:
            known.links.suspect(known.id(1), known.id(0), "stream closed")
            event, _ = await known.next_end()
            assert event == Parted(known.id(0), known.id(1), "stream closed")
            known.network.freeze(known.id(1))
            await asyncio.sleep(1.5)
            known.links.suspect(known.id(1), known.id(0), "stream closed")
            event, took_s = await known.next_end()
            assert isinstance(event, Gone)
            assert took_s < 2

    in_virtual_time(scenario())


def test_peers_come_and_go_and_who_was_lost_is_told_when_it_comes_back() -> None:
    async def scenario() -> None:
        async with world(2) as known:
            new = Pulsing(known.network.join())
            await new.peer.transport.serve(JOB_PROTOCOL, new.serve)
            known.links.add([new.peer.peer_id])
            known.links.drop(known.id(0), STOP)
            await asyncio.sleep(1)
            assert known.peers[0].heard[-1] == "stop"
            assert known.links.peers == {known.id(1), new.peer.peer_id}
            known.network.freeze(known.id(1))
            event, _ = await known.next_end()
            assert event.peer == known.id(1)
            known.links.drop(known.id(1), STOP)
            await asyncio.sleep(30)
            assert "stop" not in known.peers[1].heard
            known.network.thaw(known.id(1))
            await asyncio.sleep(5)
            assert known.peers[1].heard[-1] == "stop"
            with pytest.raises(TimeoutError):
                await known.next_end(20)

    in_virtual_time(scenario())
