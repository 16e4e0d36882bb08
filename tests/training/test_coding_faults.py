"""When a value cannot be coded, the peer at fault is named and its work ends; nobody waits for what never comes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fusion_p2p.errors import RunStopped, SliceFailed
from fusion_p2p.execute.handover import Handed
from fusion_p2p.ids import PeerId
from fusion_p2p.net.memory import SimulatedNetwork
from fusion_p2p.owner.breaks import Break, EpochBroken, PeerFailed, PeersParted
from fusion_p2p.owner.recovery import Recovery
from fusion_p2p.owner.stage import Stage
from fusion_p2p.peer import engagements
from fusion_p2p.peer.edge_codecs import Coded, EdgeCodecs
from fusion_p2p.peer.epoch_work import EpochWork
from fusion_p2p.wire.frames import OWNER, Direction, Edge, Moment
from fusion_p2p.wire.job_messages import Failed
from fusion_p2p.wire.messages import Message
from tests.swarm_in_memory import owner, run_config, volunteers
from tests.training.test_run import contiguous

SLICES, PEERS = 5, 3
AT = Moment(2, 1)


@dataclass
class Told:
    """What peers told the owner, and whose work ended by itself."""

    messages: list[Message]
    ended: int = 0


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    told = Told([])

    class Watched(EpochWork):
        async def run(self) -> None:
            tell = self._tell

            def noted(message: Message, key: str | None) -> None:
                told.messages.append(message)
                tell(message, key)

            self._tell = noted
            await super().run()
            told.ended += 1

    monkeypatch.setattr(engagements, "EpochWork", Watched)
    yield told


def encoding_fails(monkeypatch: pytest.MonkeyPatch, replica: int) -> None:
    encode = EdgeCodecs.encode

    def failing(self: EdgeCodecs, edge: Edge, moment: Moment, handed: Handed) -> Coded:
        if edge.source == replica and edge.direction is Direction.BACKWARD and moment == AT:
            raise SliceFailed("out of memory")
        return encode(self, edge, moment, handed)

    monkeypatch.setattr(EdgeCodecs, "encode", failing)


def corrupted(monkeypatch: pytest.MonkeyPatch, replica: int, direction: Direction) -> None:
    """What this replica sends has scales that are not finite."""
    encode = EdgeCodecs.encode

    def damaged(self: EdgeCodecs, edge: Edge, moment: Moment, handed: Handed) -> Coded:
        coded = encode(self, edge, moment, handed)
        if edge.source != replica or edge.direction is not direction or moment != AT or coded.payload.codec == "none":
            return coded
        return replace(coded, payload=replace(coded.payload, data=memoryview(b"\xff" * len(coded.payload.data))))

    monkeypatch.setattr(EdgeCodecs, "encode", damaged)


async def broken(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Break, list[str]]:
    """What breaks the first epoch of a run on int8, and the peers."""
    seen: list[Break] = []

    async def recover(self: Recovery, stage: Stage, broken: EpochBroken) -> Stage:
        seen.append(broken.what)
        raise RunStopped("seen enough")

    monkeypatch.setattr(Recovery, "recover", recover)

    def coded(plan: Any, peers: Any) -> Any:
        return replace(plan, edges=tuple(replace(edge, codec="int8") for edge in plan.edges))

    async with (
        SimulatedNetwork(seed=1) as network,
        volunteers(network, PEERS) as helpers,
        owner(network, run_config(path, steps=4), contiguous(SLICES), helpers, coded) as owned,
    ):
        with pytest.raises(RunStopped, match="seen enough"):
            async with asyncio.timeout(60):
                await owned.run.finish()
        return seen[0], [helper.peer.peer_id for helper in helpers]


async def test_a_replica_that_cannot_encode_ends_its_work_and_is_the_one_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding_fails(monkeypatch, 3)  # on the first peer, beside replica 0
    with watched(monkeypatch) as told:
        what, peers = await broken(tmp_path / "run", monkeypatch)
    assert what == PeerFailed(PeerId(peers[0]), 3, "out of memory")
    assert [message.replica for message in told.messages if isinstance(message, Failed)] == [3]
    assert told.ended == 1


@pytest.mark.parametrize(("replica", "direction"), [(1, Direction.FORWARD), (2, Direction.BACKWARD)])
async def test_who_sent_what_cannot_be_decoded_is_blamed_with_value_and_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replica: int, direction: Direction
) -> None:
    corrupted(monkeypatch, replica, direction)
    with watched(monkeypatch) as told:
        what, peers = await broken(tmp_path / "run", monkeypatch)
    assert isinstance(what, PeersParted)
    assert what.other == peers[replica % PEERS]
    reason = what.reason
    assert "step 2, micro-batch 1" in reason
    assert ("gradient of value" in reason) == (direction is Direction.BACKWARD)
    assert "scale" in reason
    assert not any(isinstance(message, Failed) for message in told.messages)
    assert told.ended == 1


async def test_what_the_owner_sent_is_reported_as_a_failure_of_ours_to_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = EdgeCodecs.decode

    def wrong(self: EdgeCodecs, edge: Edge, moment: Moment, payload: Any) -> Handed:
        return decode(self, edge, moment, replace(payload, data=payload.data[:-1]) if edge.source == OWNER else payload)

    monkeypatch.setattr(EdgeCodecs, "decode", wrong)
    what, peers = await broken(tmp_path / "run", monkeypatch)
    assert isinstance(what, PeerFailed)
    assert what.peer in peers
    assert "sent what cannot be read" in what.reason
