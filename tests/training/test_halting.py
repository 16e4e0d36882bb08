"""A peer that is halted, in whatever phase of a step, has exactly the state of the last step that counted, and goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion_p2p.net.memory import SimulatedNetwork
from fusion_p2p.peer import keeping
from fusion_p2p.swarm.announcement import Line
from fusion_p2p.wire.job_messages import Abort, Durable, Leaving, Prepared, Source, Stop
from tests.scripted_owner import ScriptedOwner, scripted, until
from tests.swarm_in_memory import Volunteer, volunteers

ADAM: dict[str, Any] = {"optimiser": "adam", "learning_rate": 1e-3, "batch_size": 4, "micro_batches": 2}
LAST = 4
UNDISTURBED: dict[int, list[dict[str, Tensor]]] = {}


def same(one: Sequence[dict[str, Tensor]], other: Sequence[dict[str, Tensor]]) -> bool:
    """Whether two runs have the same states, bit for bit."""
    return all(
        left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
        for left, right in zip(one, other, strict=True)
    )


async def undisturbed() -> dict[int, list[dict[str, Tensor]]]:
    """The states after every step; computed once."""
    if UNDISTURBED:
        return UNDISTURBED
    async with SimulatedNetwork(seed=1) as network, volunteers(network, 3) as helpers, scripted(network, **ADAM) as owner:
        await begin(owner, helpers)
        for step in range(1, LAST + 1):
            await owner.step(step)
            UNDISTURBED[step] = await owner.states(step)
    return UNDISTURBED


async def begin(owner: ScriptedOwner, helpers: Sequence[Volunteer]) -> None:
    await owner.meet(*(helper.peer.peer_id for helper in helpers))
    await owner.start(owner.plan(helpers[:3]))


async def reach(phase: str, owner: ScriptedOwner, helpers: Sequence[Volunteer]) -> None:
    """Bring step 3 to this phase."""
    peers = [helper.peer.peer_id for helper in helpers]
    if phase == "between steps":
        return
    before = [helper.service.progress() for helper in helpers]
    owner.feeder.feed_step(3)
    if phase == "in the forward passes":
        await until(lambda: helpers[1].service.progress() > before[1])
        return
    await owner.reports(3)
    if phase == "committed at one":
        await owner.commit(3, peers[0])
    elif phase == "committed":
        await owner.commit(3)


@pytest.mark.parametrize(
    ("phase", "reached"),
    [
        ("between steps", [2, 2, 2]),
        ("in the forward passes", [2, 2, 2]),
        ("reported", [2, 2, 2]),
        ("committed at one", [3, 2, 2]),
        ("committed", [3, 3, 3]),
    ],
)
@pytest.mark.row(12)
async def test_halted_in_any_phase_it_goes_on_with_the_bits_of_an_undisturbed_run(phase: str, reached: list[int]) -> None:
    expected = await undisturbed()
    async with SimulatedNetwork(seed=1) as network, volunteers(network, 3) as helpers, scripted(network, **ADAM) as owner:
        peers = [helper.peer.peer_id for helper in helpers]
        await begin(owner, helpers)
        await owner.step(1)
        await owner.step(2, snapshot=True)
        await reach(phase, owner, helpers)
        stock = await owner.halt(*peers)
        assert [stock[peer][index][-1] for index, peer in enumerate(peers)] == reached
        assert all(2 in steps for index, peer in enumerate(peers) for steps in [stock[peer][index]])
        found = [await owner.state(index, reached[index], peer) for index, peer in enumerate(peers)]
        assert same(found, [expected[step][index] for index, step in enumerate(reached)])
        assert stock == await owner.halt(*peers), "said again, it changes nothing"
        back = min(reached)
        await owner.start(owner.running, back, beside=True)
        for step in range(back + 1, LAST + 1):
            await owner.step(step)
        assert same(await owner.states(LAST), expected[LAST])


async def test_what_moves_is_fetched_from_whoever_has_it_and_what_stays_is_not() -> None:
    expected = await undisturbed()
    async with SimulatedNetwork(seed=1) as network, volunteers(network, 4) as helpers, scripted(network, **ADAM) as owner:
        peers = [helper.peer.peer_id for helper in helpers]
        await begin(owner, helpers)
        for step in (1, 2):
            await owner.step(step)
        await owner.halt(*peers[:3])
        moved = owner.plan([helpers[0], helpers[3], helpers[2]])
        await owner.start(moved, 2, beside=True, sources=[Source(slice=1, peers=(peers[3], peers[0], peers[1]))])
        await owner.say(peers[1], Stop(job=owner.job, reason="its slice has moved"))
        for step in range(3, LAST + 1):
            await owner.step(step)
        assert same(await owner.states(LAST), expected[LAST])
        assert helpers[1].service.holding() is None


async def test_an_epoch_that_was_halted_for_a_change_goes_on_when_that_is_aborted() -> None:
    expected = await undisturbed()
    async with SimulatedNetwork(seed=1) as network, volunteers(network, 3) as helpers, scripted(network, **ADAM) as owner:
        await begin(owner, helpers)
        await owner.step(1)
        plan, first = owner.running, owner.epoch
        for peer in await owner.prepare(plan, 1, beside=True):
            await owner.hear(peer, Prepared)
            await owner.say(peer, Abort(epoch=owner.epoch, reason="somebody refused"))
        owner.epoch = first
        for step in range(2, LAST + 1):
            await owner.step(step)
        assert same(await owner.states(LAST), expected[LAST])


async def test_training_does_not_wait_for_the_digest_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    digested, computed = threading.Event(), keeping.digest_of_state

    def slow(*arguments: Any) -> Any:
        digested.wait(30)
        return computed(*arguments)

    monkeypatch.setattr(keeping, "digest_of_state", slow)
    async with SimulatedNetwork(seed=1) as network, volunteers(network, 3) as helpers, scripted(network, **ADAM) as owner:
        await begin(owner, helpers)
        await owner.step(1, snapshot=True)
        await owner.step(2)
        await owner.step(3)
        digested.set()
        kept = [await owner.kept(index, 1) for index in range(3)]
        sizes = [sum(tensor.nbytes for tensor in (await owner.state(i, 1, helpers[i].peer.peer_id)).values()) for i in range(3)]
        assert [told.num_bytes for told in kept] == sizes
        assert len({told.digest for told in kept}) == 3


async def test_old_copies_go_once_a_newer_step_is_durable() -> None:
    async with SimulatedNetwork(seed=1) as network, volunteers(network, 3) as helpers, scripted(network, **ADAM) as owner:
        await begin(owner, helpers)
        for step in range(1, 4):
            await owner.step(step, snapshot=True)
        assert [copy.key.step for copy in helpers[0].service.copies] == [1, 2, 3]
        peer = helpers[0].peer.peer_id
        await owner.say(peer, Durable(job=owner.job, incarnation=1, step=3))
        assert (await owner.halt(peer))[peer][0] == (3,)
        assert [copy.key.step for copy in helpers[0].service.copies] == [3]


async def test_a_peer_that_drains_is_free_once_its_owner_lets_it_go() -> None:
    async with SimulatedNetwork(seed=1) as network, volunteers(network, 4) as helpers, scripted(network, **ADAM) as owner:
        await begin(owner, helpers)
        await owner.step(1)
        peer, leaving = helpers[0].peer.peer_id, asyncio.create_task(helpers[0].service.drain("a game is started", 20))
        assert (await owner.hear(peer, Leaving)).reason == "a game is started"
        await owner.step(2)
        assert not leaving.done()
        await owner.say(peer, Stop(job=owner.job, reason="handed over"))
        assert await asyncio.wait_for(leaving, 10)
        assert await helpers[3].service.drain("nothing to do", 1)
        assert not await helpers[1].service.drain("nobody hears", 0.1)


async def test_copies_leave_at_a_share_of_the_line_while_their_peer_trains_and_faster_when_it_is_halted() -> None:
    async with SimulatedNetwork(seed=1) as network, volunteers(network, 3) as helpers, scripted(network, **ADAM) as owner:
        await begin(owner, helpers)
        await owner.step(1, snapshot=True)
        peer, service = helpers[0].peer.peer_id, helpers[0].service
        size = sum(tensor.nbytes for tensor in (await owner.state(0, 1, peer)).values())
        service.line_is(Line(up_bytes_per_s=max(size * 4.0, 1e6)))
        clock = asyncio.get_running_loop().time
        began = clock()
        await owner.state(0, 1, peer)
        assert clock() - began > 0.7 * size / max(size, 2.5e5)
        await owner.halt(peer)
        began = clock()
        await owner.state(0, 1, peer)
        assert clock() - began < 0.7 * size / max(size, 2.5e5)
