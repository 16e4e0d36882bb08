"""Greetings on the simulated network, in virtual time: versions, clocks, one id used twice, reachability."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

import fusion_p2p
from fusion_p2p.errors import ConfigError, Incompatible, NetworkError, StreamClosed
from fusion_p2p.ids import PeerId
from fusion_p2p.net.base import Stream
from fusion_p2p.net.hello import Greeting, HelloHost, ask_who, greet
from fusion_p2p.net.memory import SimulatedNetwork, SimulatedPeer
from fusion_p2p.net.memory_pipe import Link
from fusion_p2p.net.messaging import MessageStream, expect
from fusion_p2p.wire.hello_messages import HELLO_MESSAGES, HELLO_PROTOCOL, DialBack, Hello, Versions, Welcome, WhoAreYou
from fusion_p2p.wire.messages import Message
from tests.protocol.swarm_world import in_virtual_time

ONE, OTHER = bytes(15) + b"1", bytes(15) + b"2"


class SkewedClock:
    """The event loop's time, off by some seconds."""

    def __init__(self, skew_s: float = 0.0) -> None:
        self._skew_s = skew_s

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        return 1_000_000 + self.now() + self._skew_s

    def pause_s(self, about_s: float, *, often: bool = False) -> float:
        return about_s

    def keep_step(self, moment: float) -> None:
        """Nobody pauses for its sake."""


class Dialler:
    """Says of each address what it was told to say, after a while."""

    def __init__(self, reasons: dict[str, str]) -> None:
        self._reasons = reasons

    async def dial_back(self, peer: PeerId, process: bytes, addresses: Sequence[str], seen_at: str) -> tuple[DialBack, ...]:
        await asyncio.sleep(4)
        return tuple(DialBack(address=address, reason=self._reasons.get(address, "no answer")) for address in addresses)


async def hosted(network: SimulatedNetwork, dialler: Dialler | None = None, relays: Sequence[str] = ()) -> SimulatedPeer:
    peer = network.join()
    await HelloHost(SkewedClock(), process=bytes(16), dialler=dialler, relays=lambda: relays).serve(peer.transport)
    return peer


async def greeted(peer: SimulatedPeer, host: SimulatedPeer, process: bytes = ONE, skew_s: float = 0.0) -> Greeting:
    return await greet(peer.transport, host.peer_id, SkewedClock(skew_s), network="test", process=process)


def test_a_peer_without_dialler_says_that_it_does_not_know():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            host, peer = await hosted(network), network.join()
            assert (await greeted(peer, host)).welcome.reachability == "unknown"

    in_virtual_time(scenario())


@pytest.mark.row(4)
@pytest.mark.parametrize(("reason", "reachability"), [("", "direct"), ("no answer", "unreachable")])
def test_reachability_is_what_the_dial_back_found(reason: str, reachability: str):
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            peer = network.join()
            address = peer.transport.addresses[0]
            host = await hosted(network, Dialler({address: reason}), ["/relay"])
            welcome = (await greeted(peer, host)).welcome
            assert welcome.reachability == reachability
            assert welcome.dial_backs == (DialBack(address=address, reason=reason),)
            assert welcome.relays == ("/relay",)

    in_virtual_time(scenario())


@pytest.mark.row(14)
@pytest.mark.parametrize("skew_s", [-119.0, -1.5, 0.0, 60.0, 119.0])
def test_the_clock_offset_is_measured(skew_s: float):
    """Also over a slow link, and when the dial-back takes seconds."""

    async def scenario() -> None:
        async with SimulatedNetwork(seed=1, link=Link(latency_s=0.2)) as network:
            host, peer = await hosted(network, Dialler({})), network.join()
            assert (await greeted(peer, host, skew_s=skew_s)).clock_offset_s == pytest.approx(skew_s, abs=0.01)

    in_virtual_time(scenario())


@pytest.mark.row(14)
@pytest.mark.parametrize(("skew_s", "said"), [(-7200.0, "7200 s behind"), (125.0, "125 s ahead of")])
def test_a_clock_far_off_is_refused_with_the_seconds(skew_s: float, said: str):
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            host, peer = await hosted(network), network.join()
            with pytest.raises(Incompatible, match=said):
                await greeted(peer, host, skew_s=skew_s)

    in_virtual_time(scenario())


@pytest.mark.row(6)
@pytest.mark.parametrize("theirs", [0, 2, 99])
def test_another_protocol_is_refused_with_the_remedy_by_the_greeter(theirs: int):
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            host, peer = network.join(), network.join()

            async def other_version(stream: Stream) -> None:
                messages = MessageStream(stream, HELLO_MESSAGES)
                await messages.receive()
                await messages.send(Versions(protocol=theirs, fusion="9.9"))
                await messages.receive()

            await host.transport.serve(HELLO_PROTOCOL, other_version)
            with pytest.raises(Incompatible) as caught:
                await greeted(peer, host)
            said = str(caught.value)
            assert f"protocol {fusion_p2p.PROTOCOL}" in said
            assert f"protocol {theirs}" in said
            assert ("upgrade this side" in said) == (theirs > fusion_p2p.PROTOCOL)

    in_virtual_time(scenario())


@pytest.mark.row(6)
def test_another_protocol_is_refused_by_the_host_and_other_versions_are_not():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            host, peer = await hosted(network), network.join()

            async def answer_to(protocol: int) -> Message:
                stream = MessageStream(await peer.transport.open(host.peer_id, HELLO_PROTOCOL), HELLO_MESSAGES)
                await stream.send(Versions(protocol=protocol, fusion="0.0.1-other"))
                expect(await stream.receive(timeout_s=5), Versions)
                await stream.send(Hello(network="test", process=ONE, addresses=()))
                return await stream.receive(timeout_s=5)

            assert isinstance(await answer_to(fusion_p2p.PROTOCOL), Welcome)
            with pytest.raises(StreamClosed):
                await answer_to(fusion_p2p.PROTOCOL + 1)

    in_virtual_time(scenario())


@pytest.mark.row(8)
def test_an_id_used_by_two_living_processes_is_refused_with_the_address_of_the_first():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            host, peer = await hosted(network), network.join()
            first = await greeted(peer, host, ONE)
            async with asyncio.TaskGroup() as tasks:
                staying = tasks.create_task(first.stay())
                with pytest.raises(ConfigError, match=f"identity in use by .*{peer.peer_id}"):
                    await greeted(peer, host, OTHER)
                assert not staying.done(), "the first one is not disturbed"
                staying.cancel()

    in_virtual_time(scenario())


@pytest.mark.row(8)
def test_a_restart_after_a_crash_is_accepted_at_once():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            host, peer = await hosted(network), network.join()
            await greeted(peer, host, ONE)
            network.crash(peer.peer_id)
            back = network.join(identity=peer.identity)
            started = asyncio.get_running_loop().time()
            await greeted(back, host, OTHER)
            assert asyncio.get_running_loop().time() - started < 1

    in_virtual_time(scenario())


@pytest.mark.row(8)
def test_a_frozen_predecessor_is_not_waited_for_long():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            host, peer = await hosted(network), network.join()
            await greeted(peer, host, ONE)  # and then it never answers
            started = asyncio.get_running_loop().time()
            await greeted(peer, host, OTHER)
            assert asyncio.get_running_loop().time() - started < 5

    in_virtual_time(scenario())


def test_a_guest_is_asked_now_and_then_and_forgotten_when_it_does_not_answer():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            host, peer, silent = await hosted(network), network.join(), network.join()
            living, dead = await greeted(peer, host), await greeted(silent, host)
            staying = asyncio.create_task(living.stay())
            await asyncio.sleep(600)
            assert not staying.done()
            with pytest.raises((StreamClosed, NetworkError)):
                await dead.stay()
            staying.cancel()
            await asyncio.wait([staying])

    in_virtual_time(scenario())


def test_a_prober_learns_which_process_answers():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            host, prober = await hosted(network), network.join()
            assert await ask_who(prober.transport, host.peer_id) == bytes(16)

    in_virtual_time(scenario())


def test_a_host_survives_guests_that_talk_nonsense():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            host, peer = await hosted(network), network.join()
            for nonsense in (b"", b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1", HELLO_MESSAGES.encode(WhoAreYou())[:-1]):
                stream = await peer.transport.open(host.peer_id, HELLO_PROTOCOL)
                await stream.write(nonsense)
                with pytest.raises(StreamClosed):
                    await stream.read_exactly(1)
            assert (await greeted(peer, host)).welcome.reachability == "unknown"

    in_virtual_time(scenario())
