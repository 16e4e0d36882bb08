"""Strangers at work: while a run goes on, a peer that belongs to nothing says everything that can be said, to everybody."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from fusion_p2p.errors import NetworkError
from fusion_p2p.ids import JobId, PeerId
from fusion_p2p.net.base import Transport
from fusion_p2p.net.memory import SimulatedNetwork
from fusion_p2p.net.values import VALUES_PROTOCOL
from fusion_p2p.wire.blob_messages import BLOB_MESSAGES, BLOB_PROTOCOL
from fusion_p2p.wire.frames import Direction, Edge, FrameKind, Header, Moment, RunId, encode_header
from fusion_p2p.wire.job_messages import JOB_MESSAGES, JOB_PROTOCOL
from fusion_p2p.wire.messages import Message
from tests.fuzz.examples import examples
from tests.swarm_in_memory import owner, run_config, volunteers
from tests.training.test_run import contiguous, reached, train


class Stranger:
    """Says valid words about the run it overheard, at a rate that an honest peer would never reach."""

    def __init__(self, transport: Transport, victims: list[PeerId], job: JobId, seed: int) -> None:
        self._transport, self._victims, self._job = transport, victims, job
        self._random = random.Random(seed)
        self.said = 0

    async def run(self) -> None:
        while True:
            victim = self._random.choice(self._victims)
            attack = self._random.choice([self._orders, self._values, self._questions, self._noise])
            try:
                async with asyncio.timeout(2.0):
                    await attack(victim)
            except (NetworkError, TimeoutError):
                pass
            self.said += 1
            await asyncio.sleep(0)

    async def _orders(self, victim: PeerId) -> None:
        stream = await self._transport.open(victim, JOB_PROTOCOL)
        for message in self._random.sample(examples(JOB_MESSAGES), 5):
            await stream.write(JOB_MESSAGES.encode(self._about_this_run(message)))
        await stream.close()

    def _about_this_run(self, message: Message) -> Message:
        told = {"job": self._job, "incarnation": self._random.randint(1, 9), "epoch": self._random.randint(0, 3), "step": 2}
        return message.model_copy(update={name: value for name, value in told.items() if name in type(message).model_fields})

    async def _values(self, victim: PeerId) -> None:
        stream = await self._transport.open(victim, VALUES_PROTOCOL)
        edge = Edge(
            self._random.randint(0, 120), self._random.choice([0, 1, 2, 0xFFFF]), 1, self._random.choice(list(Direction))
        )
        run = RunId(self._job, 1, self._random.randint(0, 2))
        await stream.write(encode_header(Header(self._random.choice(list(FrameKind)), run, Moment(2, 0), edge)))
        await stream.close()

    async def _questions(self, victim: PeerId) -> None:
        stream = await self._transport.open(victim, BLOB_PROTOCOL)
        for message in examples(BLOB_MESSAGES):
            await stream.write(BLOB_MESSAGES.encode(self._about_this_run(message)))
        await stream.close()

    async def _noise(self, victim: PeerId) -> None:
        stream = await self._transport.open(victim, self._random.choice([JOB_PROTOCOL, VALUES_PROTOCOL, BLOB_PROTOCOL]))
        await stream.write(self._random.randbytes(300))
        await stream.close()


@pytest.mark.row(39)
@pytest.mark.timeout(120)
async def test_a_run_among_strangers_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    undisturbed = await train(run_config(tmp_path / "quiet", steps=12, tied=True, checkpoint_every=4))
    config = run_config(tmp_path / "loud", steps=12, tied=True, checkpoint_every=4)
    async with (
        SimulatedNetwork(seed=1) as network,
        volunteers(network, 3) as helpers,
        owner(network, config, contiguous(3), helpers) as owned,
    ):
        victims = [helper.peer.peer_id for helper in helpers] + [owned.run._transport.peer_id]
        job = JobId(owned.folder.ledger.history.opened.job)
        finishing = asyncio.create_task(owned.run.finish())
        await reached(owned.recorder, 1)
        strangers = [Stranger(network.join().transport, victims, job, seed) for seed in range(3)]
        attacks = [asyncio.create_task(stranger.run()) for stranger in strangers]
        await finishing
        for attack in attacks:
            attack.cancel()
        await asyncio.gather(*attacks, return_exceptions=True)
        assert sum(stranger.said for stranger in strangers) > 100
        assert not any(helper.task.done() for helper in helpers)
    assert owned.recorder.losses == undisturbed.recorder.losses
