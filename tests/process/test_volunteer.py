"""A volunteer tells its running peer what to do: pause, resume, leave, on real processes that execute slices."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from contrib.benchmarks.swarm import Swarm
from contrib.processes import Program, fusion_peer, start_peer, wait_until_gone
from tests.process.swarm_of_processes import (
    ENDLESS,
    EXIT_S,
    RUN_S,
    STANDBY,
    START_S,
    holders,
    lines_of,
    no_traceback,
    peer_id,
    status_once,
    swarm_of,
)

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.row(21)]

TOLD_S = 5.0


def place(swarm: Swarm, peer: Program) -> Path:
    """Its state directory."""
    return swarm.folder / peer.name


def tell(state: Path, *arguments: str) -> list[str]:
    """What a command to the peer of this state directory prints; it must succeed."""
    with fusion_peer(arguments[0], *arguments, "--state-dir", str(state)) as command:
        assert command.wait(START_S) == 0, command.tail()
    no_traceback(command)
    return command.lines


def states(answer: dict[str, Any]) -> dict[str, str]:
    return {peer["peer"]: peer["state"] for peer in answer["peers"]}


def steps(swarm: Swarm) -> list[int]:
    """That the run has committed, in order."""
    return [line["step"] for line in lines_of(swarm.folder / "run" / "ledger.jsonl") if line["kind"] == "commit"]


@pytest.mark.row(22)
def test_a_peer_is_paused_resumed_and_told_to_leave(tmp_path: Path):
    hour = (time.localtime().tm_hour + 3) % 24
    hours = f"{hour}-{(hour + 1) % 24}"
    with swarm_of(tmp_path, 3) as swarm, ExitStack() as running:
        night = start_peer("night", tmp_path, swarm.address, "--hours", hours)
        swarm.peers.append(running.enter_context(night))
        owner = running.enter_context(swarm.start_owner("run", *ENDLESS, "--peers", "2"))
        owner.wait_for(r"^step \d+", RUN_S)
        night.wait_for(f"paused: outside of the hours {hours}, until {hour:02}:00", START_S)
        first, second = holders(swarm, owner)

        before = len(first.lines)
        draining, paused = tell(place(swarm, first), "pause", "--for", "2h")
        assert "draining: handing over slice " in draining
        assert "paused: by its volunteer, until " in paused
        first.wait_for("paused: by its volunteer, until ", TOLD_S, after=before)
        done = steps(swarm)[-1]
        wanted = {peer_id(first): "paused", peer_id(night): "paused", peer_id(second): "working"}
        status_once(swarm, lambda answer: wanted.items() <= states(answer).items() and steps(swarm)[-1] > done + 5, START_S)

        before = len(first.lines)
        assert "standby: " in tell(place(swarm, first), "resume")[-1]
        first.wait_for(STANDBY, TOLD_S, after=before)

        assert tell(place(swarm, second), "leave")[-1] == "it has left"
        assert exit_code(second) == 0
        assert list(place(swarm, second).glob("*.sock")) == []
        done = steps(swarm)[-1]
        status_once(swarm, lambda answer: peer_id(second) not in states(answer) and steps(swarm)[-1] > done + 5, START_S)
        assert steps(swarm) == list(range(1, len(steps(swarm)) + 1)), "no step was done twice"

        with fusion_peer("pause", "pause", "--state-dir", str(place(swarm, second))) as command:
            assert command.wait(START_S) == 2
        assert "no peer of this user runs with the state directory" in command.lines[-1]


def exit_code(program: Program) -> int:
    """Of a peer that was told to leave; it and its daemon are gone in time."""
    deadline = time.monotonic() + EXIT_S
    code = program.wait(EXIT_S)
    assert not wait_until_gone([program.session], deadline - time.monotonic())
    return code
