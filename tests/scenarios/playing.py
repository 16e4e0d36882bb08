"""Plays a scenario and says what it broke. What a swarm owes after the last fault:

* within SETTLED_S each set of peers that reach each other has one coordinator, whom all of it follow;
* by then all of them know each other and nobody else: no peer id is lost for ever, nobody dead is believed in;
* while nothing happens nobody who lives and is reached is evicted, and the coordinator stays;
* when all have left, no task and no stream is left behind, and no handler failed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any

from fusion_p2p.ids import PeerId
from fusion_p2p.swarm.settings import WAN
from tests.scenarios.faults import Fault, Scenario, draw
from tests.scenarios.loop import PausableLoop
from tests.scenarios.swarm import FEWEST, Swarm

SETTLED_S = WAN.heard_lately_s + WAN.suspect_after_s + 2 * WAN.vote_s + 3 * WAN.random_beat_s + 3 * WAN.suspect_after_s
"""The dead must not count for a majority any more, a vote or two, those parted must meet by chance, the silent be evicted."""
QUIET_S = 5.0
NOTICED_S = WAN.suspect_after_s + WAN.beat_s
"""Sooner a swarm may look settled because nobody has noticed yet what happened."""
LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a scenario: what was broken (empty: nothing), what happened, and how long it took to settle."""

    scenario: Scenario
    broken: tuple[str, ...]
    log: tuple[str, ...]
    settled_s: float

    @property
    def replay(self) -> str:
        """The command that plays it again."""
        peers = self.scenario.num_peers
        return f"PYTHONHASHSEED=0 python -m tests.scenarios {self.scenario.seed} --peers {peers if peers > 9 else '5-9'}"

    def explain(self) -> str:
        return f"{self.replay}   # {'; '.join(self.broken)}"


def play(seed: int, fewest: int, most: int) -> Outcome:
    """Draw and play one scenario in virtual time."""
    scenario = draw(seed, fewest, most)
    return in_virtual_time(_played(scenario))


def in_virtual_time(work: Coroutine[Any, Any, Outcome]) -> Outcome:
    with asyncio.Runner(loop_factory=PausableLoop) as runner:
        return runner.run(work)


async def _played(scenario: Scenario) -> Outcome:
    settled_s = -1.0
    swarm = Swarm(scenario.seed, scenario.link, scenario.duplicates)
    async with swarm:
        swarm.do(_arrive(swarm, scenario))
        for fault in scenario.faults:
            await _sleep_until(fault.at_s)
            swarm.note(str(fault))
            _happen(swarm, scenario, fault)
        await _sleep_until(scenario.over_at_s)
        await swarm.all_done()
        await asyncio.sleep(NOTICED_S)
        settled_s = await settle(swarm, SETTLED_S - NOTICED_S, LOOK_S)
        if settled_s >= 0:
            await _stay_settled(swarm)
    return Outcome(scenario, tuple(swarm.broken), tuple(swarm.log), settled_s)


async def _sleep_until(at_s: float) -> None:
    await asyncio.sleep(max(0.0, at_s - asyncio.get_running_loop().time()))


async def _arrive(swarm: Swarm, scenario: Scenario) -> None:
    for skew_s in scenario.skews_s:
        swarm.start(skew_s)
        await asyncio.sleep(scenario.arrive_within_s / scenario.num_peers)


def _happen(swarm: Swarm, scenario: Scenario, fault: Fault) -> None:
    here = swarm.here()
    chosen = [here[int(place * len(here))] for place in fault.places] if here else []
    if fault.kind.endswith("coordinator"):
        chosen = swarm.coordinators()[:1]
    match fault.kind:
        case "crash" | "crash coordinator" | "crash many" | "leave" | "restart":
            for peer in dict.fromkeys(chosen):
                if len(swarm.machines) > FEWEST:
                    _take_away(swarm, scenario, fault, peer)
        case "pause" | "pause coordinator":
            for peer in chosen:
                swarm.pause(peer)
                swarm.do(_later(fault.for_s, swarm.resume, peer))
        case "join":
            swarm.start(fault.amount)
        case "join with a wrong clock":
            swarm.do(swarm.join_with_wrong_clock(fault.amount))
        case "partition":
            swarm.partition(peer for peer in here if swarm.rng.random() < fault.places[0])
            if fault.for_s:
                swarm.do(_later(fault.for_s, swarm.heal))
        case "lose" | "slow down":
            _worsen(swarm, fault, chosen)
        case "reset streams":
            swarm.network.reset_streams()


def _take_away(swarm: Swarm, scenario: Scenario, fault: Fault, peer: PeerId) -> None:
    if fault.kind == "leave":
        swarm.leave(peer)
        return
    identity = swarm.crash(peer)
    if fault.kind == "restart":
        swarm.do(_later(fault.for_s, swarm.start, swarm.rng.uniform(-45, 45), identity))


def _worsen(swarm: Swarm, fault: Fault, chosen: list[PeerId]) -> None:
    link = replace(swarm.link, loss=fault.amount) if fault.kind == "lose" else replace(swarm.link, latency_s=fault.amount)
    for peer in chosen:
        swarm.set_link(peer, link)
        swarm.do(_later(fault.for_s, swarm.set_link, peer, swarm.link))


async def _later(after_s: float, act: Any, *arguments: Any) -> None:
    await asyncio.sleep(after_s)
    act(*arguments)


async def settle(swarm: Swarm, within_s: float, look_s: float) -> float:
    """Seconds until the swarm was as it should be; -1 when that took too long."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while why := swarm.why_unsettled():
        if loop.time() - began > within_s:
            swarm.broken.append(f"not settled {within_s:g} s after the last fault: {why}")
            return -1.0
        await asyncio.sleep(look_s)
    return loop.time() - began


async def _stay_settled(swarm: Swarm) -> None:
    """Two looks apart: between the first and the last nobody may go, not even for a moment that nobody looks at.

    Nothing comes twice meanwhile: a beat from before two restarts that the coordinator never heard would be news to it.
    """
    await swarm.replays.stop()
    tokens = {peer: machine.presence.coordinator for peer, machine in swarm.machines.items()}
    since = {peer: _joined(swarm, peer) for peer in swarm.coordinators()}
    await asyncio.sleep(QUIET_S)
    if why := swarm.why_unsettled():
        swarm.broken.append(f"unsettled while nothing happened: {why}")
    elif tokens != {peer: machine.presence.coordinator for peer, machine in swarm.machines.items()}:
        swarm.broken.append("another coordinator while nothing happened")
    elif since != {peer: _joined(swarm, peer) for peer in swarm.coordinators()}:
        swarm.broken.append("evicted and back while nothing happened")


def _joined(swarm: Swarm, coordinator: PeerId) -> dict[PeerId, float]:
    return {present.peer: present.joined_at for present in swarm.machines[coordinator].presence.members()}


def play_many(first: int, count: int, fewest: int, most: int) -> list[Outcome]:
    """The scenarios of so many seeds, each told on stderr with a line that replays it when it broke something."""
    outcomes = [play(seed, fewest, most) for seed in range(first, first + count)]
    for outcome in outcomes:
        if outcome.broken:
            print(outcome.explain(), file=sys.stderr, flush=True)
    return outcomes


def reproducible() -> bool:
    """Whether sets are iterated in the same order in every process."""
    return os.environ.get("PYTHONHASHSEED") == "0"
