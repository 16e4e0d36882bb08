"""Swarms in virtual time under faults drawn from seeds: what they owe is in `tests.scenarios.playing`."""

from __future__ import annotations

import asyncio

import pytest

from fusion_p2p.net.memory_pipe import Link
from fusion_p2p.peer import presence_messages
from fusion_p2p.swarm.settings import WAN
from tests.scenarios.loop import PausableLoop
from tests.scenarios.playing import play_many, settle
from tests.scenarios.swarm import Swarm

BLOCKS, SMALL, LARGE = 10, 50, 2
BROKE_ONCE = [(1_000_004, 60, 60), (1_000_304, 5, 9)]
"""A partition left two peers among followers of a coordinator whose term was lower than that of the one they had lost;
and two alone, who stood for election at the same moments again and again."""
CROWD, CHANGES_IN_A_PIECE = 24, 5


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.row(11)
@pytest.mark.row(13)
@pytest.mark.timeout(240)
def test_nothing_that_peers_owe_each_other_breaks_under_faults(block: int) -> None:
    """500 swarms of 5 to 9 peers and 20 of 60."""
    outcomes = [*play_many(block * SMALL, SMALL, 5, 9), *play_many(block * LARGE, LARGE, 60, 60)]
    assert not [outcome.explain() for outcome in outcomes if outcome.broken]


@pytest.mark.parametrize(("seed", "fewest", "most"), BROKE_ONCE)
@pytest.mark.timeout(240)
def test_what_broke_once_breaks_no_more(seed: int, fewest: int, most: int) -> None:
    assert not [outcome.explain() for outcome in play_many(seed, 1, fewest, most) if outcome.broken]


def test_a_new_coordinator_whose_roster_comes_in_pieces_makes_nobody_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence_messages, "MAX_CHANGES", CHANGES_IN_A_PIECE)
    with asyncio.Runner(loop_factory=PausableLoop) as runner:
        forgotten, broken = runner.run(_forgotten_after_an_election())
    assert (forgotten, broken) == (set(), [])


async def _forgotten_after_an_election() -> tuple[set[str], list[str]]:
    """Who was missing at some peer, at some moment, until the next coordinator had settled."""
    forgotten = set[str]()
    async with Swarm(1, Link(latency_s=0.02), duplicates=0.0) as swarm:
        for _ in range(CROWD):
            swarm.start()
        await settle(swarm, 10.0, 0.5)
        await asyncio.sleep(2 * WAN.heard_lately_s)  # they believe in each other because the roster says so, not their ears
        swarm.crash(swarm.coordinators()[0])
        living = set(swarm.machines)
        while swarm.why_unsettled() and asyncio.get_running_loop().time() < 100:
            forgotten.update(*(living - machine.presence.peers for machine in swarm.machines.values()))
            await asyncio.sleep(0.05)
    return forgotten, swarm.broken
