"""Ctrl+C, SIGTERM and SIGKILL of every kind of process: out within 5 s, with its daemon and relay; the others are told."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from contrib.benchmarks.swarm import Swarm
from contrib.chaos.watching import LedgerWatch
from contrib.processes import Program, start_bootstrap
from tests.process.swarm_of_processes import (
    ENDLESS,
    EXIT_S,
    RUN_S,
    STANDBY,
    START_S,
    holders,
    leave,
    living,
    no_traceback,
    one_more,
    peer_id,
    status_once,
    swarm_of,
)

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.row(22)]

ASKED = [signal.SIGINT, signal.SIGTERM]
INTERRUPTED = 130
TOLD_S = 3.0
"""A peer whose owner said that the run is over is free at once; silence would take it half a minute."""


def training_owners(swarm: Swarm, running: ExitStack, *names: str) -> list[Program]:
    """Owners of runs of their own, at work on two peers each."""
    owners = [running.enter_context(swarm.start_owner(name, *ENDLESS, "--peers", "2")) for name in names]
    for owner in owners:
        owner.wait_for(r"^step \d+", RUN_S)
    return owners


def test_whoever_is_asked_to_leave_is_out_within_five_seconds_and_the_others_are_told(tmp_path: Path):
    with swarm_of(tmp_path, 4) as swarm, ExitStack() as running:
        bootstrap, _ = start_bootstrap(tmp_path / "second", "--bootstrap", swarm.address)
        running.enter_context(bootstrap)
        owners = training_owners(swarm, running, "first", "second")
        waiting = [running.enter_context(swarm.start_owner(name, *ENDLESS, "--peers", "9")) for name in ("third", "fourth")]
        working = [holders(swarm, owner) for owner in owners]
        for number, owner, name, (gone, stays) in zip(ASKED, owners, ("first", "second"), working, strict=True):
            with LedgerWatch(tmp_path / name) as watch:
                lines = len(gone.lines)
                gone.process.send_signal(number)
                gone.wait_for(r"draining: handing over slice .*Ctrl\+C again leaves at once", TOLD_S, after=lines)
                assert leave(gone, number).code == 0, "at once, at the second signal"
                begin = time.monotonic()
                assert watch.wait_for(lambda one: one.kind == "commit" and one.entry["epoch"] > 1, RUN_S), owner.tail()
                print(f"its run went on {time.monotonic() - begin:.2f} s later")
            no_traceback(owner)
            lines = len(stays.lines)
            assert leave(owner, number).code == INTERRUPTED
            assert "; resume with: fusion-peer train --resume" in owner.lines[-1]
            stays.wait_for(STANDBY, TOLD_S, after=lines)

        for number, owner in zip(ASKED, waiting, strict=True):
            owner.wait_for("waiting: ", START_S)
            assert leave(owner, number).code == INTERRUPTED
        first, last = living(swarm)
        status_once(swarm, lambda answer: {peer["state"] for peer in answer["peers"]} == {"standby"}, START_S)
        assert leave(first, signal.SIGINT).code == 0
        status_once(swarm, lambda answer: [peer["peer"] for peer in answer["peers"]] == [peer_id(last)], EXIT_S)
        assert leave(last, signal.SIGTERM).code == 0
        assert leave(swarm.bootstrap, signal.SIGINT).code == 0
        assert leave(bootstrap, signal.SIGTERM).code == 0


def test_whoever_is_killed_leaves_no_daemon_and_no_relay_and_its_sockets_go_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with tempfile.TemporaryDirectory(prefix="fp-") as short:
        monkeypatch.setenv("TMPDIR", short)
        sockets = Path(short) / f"fusion-p2p-{os.getuid()}"
        with swarm_of(tmp_path, 3) as swarm:
            with ExitStack() as running:
                (owner,) = training_owners(swarm, running, "first")
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
