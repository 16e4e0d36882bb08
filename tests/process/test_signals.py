"""Ctrl+C, SIGTERM and SIGKILL of every kind of process: out within 5 s, with its daemon and relay; the others are told."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from contrib.benchmarks.swarm import Swarm
from contrib.processes import Program
from tests.process.swarm_of_processes import (
    ENDLESS,
    EXIT_S,
    RUN_S,
    STANDBY,
    START_S,
    holders,
    leave,
    no_traceback,
    one_more,
    peer_id,
    status_once,
    swarm_of,
)

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.row(22)]

ASKED = [signal.SIGINT, signal.SIGTERM]
INTERRUPTED = 130
STOPPED = 6
TOLD_S = 3.0
"""A peer whose owner said that the run is over is free at once; silence would take it half a minute."""


def training_owner(swarm: Swarm, name: str, num_peers: int) -> Program:
    owner = swarm.start_owner(name, *ENDLESS, "--peers", str(num_peers))
    owner.wait_for(r"^step \d+", RUN_S)
    return owner


@pytest.mark.parametrize("number", ASKED, ids=lambda number: number.name)
def test_whoever_is_asked_to_leave_is_out_within_five_seconds_and_the_others_are_told(tmp_path: Path, number: signal.Signals):
    with swarm_of(tmp_path, 3) as swarm:
        with training_owner(swarm, "first", 2) as owner:
            working, lines = holders(swarm, owner), {peer: len(peer.lines) for peer in swarm.peers}
            assert leave(owner, number).code == INTERRUPTED
            assert "no checkpoint yet; resume with: fusion-peer train --resume" in owner.tail()
            for peer in working:
                peer.wait_for(STANDBY, TOLD_S, after=lines[peer])

        with training_owner(swarm, "second", 2) as owner:
            working = holders(swarm, owner)
            assert leave(working[0], number).code == 0
            begin = time.monotonic()
            assert owner.wait(EXIT_S) == STOPPED
            print(f"the owner of the peer that left ended after {time.monotonic() - begin:.2f} s")
            assert f"{peer_id(working[0])} (slice" in owner.lines[-1]
            no_traceback(owner)
            working[1].wait_for(STANDBY, TOLD_S, after=len(working[1].lines) - 1)

        with swarm.start_owner("too-large", *ENDLESS, "--peers", "9") as waiting:
            waiting.wait_for("waiting: ", START_S)
            assert leave(waiting, number).code == INTERRUPTED

        left = [peer for peer in swarm.peers if peer is not working[0]]
        assert leave(left[0], number).code == 0
        status_once(swarm, lambda answer: [peer["peer"] for peer in answer["peers"]] == [peer_id(left[1])], EXIT_S)
        assert leave(swarm.bootstrap, number).code == 0


def test_whoever_is_killed_leaves_no_daemon_and_no_relay_and_its_sockets_go_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with tempfile.TemporaryDirectory(prefix="fp-") as short:
        monkeypatch.setenv("TMPDIR", short)
        sockets = Path(short) / f"fusion-p2p-{os.getuid()}"
        with swarm_of(tmp_path, 3) as swarm:
            with training_owner(swarm, "first", 2) as owner:
                working = holders(swarm, owner)
                (idle,) = (peer for peer in swarm.peers if peer not in working)
                with swarm.start_owner("too-large", *ENDLESS, "--peers", "9") as waiting:
                    waiting.wait_for("waiting: ", START_S)
                    killed = [working[0], owner, waiting, idle, swarm.bootstrap]
                    for program in killed:
                        assert leave(program, signal.SIGKILL).code == -signal.SIGKILL
            dead = {str(program.session) for program in killed}
            assert dead <= pids_of(sockets)
            with one_more(swarm) as late:
                late.wait_for("local daemon up", START_S)
                assert pids_of(sockets) == {str(working[1].session), str(late.session)}
                assert leave(late, signal.SIGINT).code == 0  # while it looks for the bootstrap


def pids_of(sockets: Path) -> set[str]:
    """Processes that have, or had, a folder of sockets."""
    return {folder.name.partition("-")[0] for folder in sockets.iterdir()}
