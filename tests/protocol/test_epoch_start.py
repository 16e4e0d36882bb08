"""The owner starts an epoch: what is said about another epoch does not end this one."""

from __future__ import annotations

import pytest

from fusion_p2p.clock import SystemClock
from fusion_p2p.ids import PeerId
from fusion_p2p.job.epochs import Proposed
from fusion_p2p.net.memory import SimulatedNetwork
from fusion_p2p.owner.epoch_start import EpochStart
from fusion_p2p.owner.links import Heard, Links
from fusion_p2p.wire.job_messages import (
    Content,
    Failed,
    Lost,
    OptimiserSettings,
    Prepare,
    Prepared,
    Refused,
    Started,
    TrainingSettings,
)
from fusion_p2p.wire.messages import Message

PEER = PeerId("12D3KooWGBfGbUe8kHzUJ7bUG1oFyTzUPQHzjxLzWcEDKhHrYh5P")
CONTENT = Content(digest="0" * 64, num_bytes=1)
EPOCH = 3
ORDER = Prepare(
    job="a" * 32,
    incarnation=2,
    epoch=EPOCH,
    graph=CONTENT,
    plan=CONTENT,
    settings=TrainingSettings(seed=0, optimiser=OptimiserSettings(name="sgd")),
    state_step=0,
    contacts=(),
)


async def started(*said: Message) -> str | None:
    """How a start ends when its only peer says this and then that it is ready."""
    links = Links(SimulatedNetwork(seed=1).join().transport, [PEER])
    for message in (*said, Prepared(epoch=EPOCH), Started(epoch=EPOCH)):
        links.inbox.put_nowait(Heard(PEER, message))
    proposed = Proposed(term=1, coordinator=PEER, base_epoch=EPOCH - 1, peers=frozenset({PEER}))
    return await EpochStart(SystemClock(), EPOCH - 1).start(links, proposed, ORDER, lambda: None)


def ends(epoch: int) -> list[Message]:
    return [
        Lost(epoch=epoch, peer=PEER, reason="it is gone"),
        Failed(epoch=epoch, replica=0, reason="it is gone"),
        Refused(epoch=epoch, reason="it is gone"),
    ]


@pytest.mark.parametrize("message", ends(EPOCH - 2), ids=lambda message: message.kind)
async def test_what_a_frozen_peer_says_about_an_old_epoch_does_not_end_the_new_one(message: Message):
    assert await started(message) is None


@pytest.mark.parametrize("message", ends(EPOCH), ids=lambda message: message.kind)
async def test_what_a_peer_says_about_this_epoch_ends_it(message: Message):
    assert "it is gone" in str(await started(message))
