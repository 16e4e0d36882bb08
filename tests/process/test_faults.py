"""Who is killed or stopped during a run: lost peers are replaced, an owner that has ended goes on by the command it prints."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from contrib.benchmarks.swarm import Swarm
from contrib.chaos.population import read_plan
from contrib.processes import Program, fusion_peer
from fusion_p2p.job.tenure import OWNER_SILENT_S
from fusion_p2p.owner.metrics import read_curves
from tests.process.swarm_of_processes import (
    EXIT_S,
    RUN_S,
    STANDBY,
    START_S,
    daemon_of,
    holders,
    leave,
    leave_rates,
    lines_of,
    living,
    no_traceback,
    one_more,
    peer_id,
    status_once,
    swarm_of,
)

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

FROZEN_S = 8.0
"""A run knows within this that a peer is frozen: three seconds of silence and a confirmation, on a busy machine."""
FREED_S = OWNER_SILENT_S + 15.0
"""Peers whose owner is dead step in the next job within this: they let go, it finds them and begins, on a busy machine."""
BROKEN = r"epoch=\d+ broken"
"""What an owner logs as soon as it knows; what it does then it says when it has a plan."""
INTERRUPTED = 130
STEPS = 120
CHECKPOINT_EVERY = 10
MODEL = (
    "--model", "gpt2", "--layers", "4", "--width", "128", "--heads", "4", "--context", "64", "--batch-size", "8",
    "--micro-batches", "4", "--validate-every", "0", "--checkpoint-every", str(CHECKPOINT_EVERY), "--peers", "3",
)  # fmt: skip


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Four peers, of which every run here takes three; the coordinator looks slow, so that it is not among them."""
    folder = tmp_path_factory.mktemp("swarm")
    leave_rates(folder / "peer-1", matmul_flops=1e6)
    with swarm_of(folder, 1) as swarm:
        swarm.peers[0].wait_for("coordinating the swarm", START_S)
        four_peers(swarm)
        yield swarm


def four_peers(swarm: Swarm) -> None:
    """Replace the peers that have been lost."""
    new = [one_more(swarm) for _ in range(4 - len(living(swarm)))]
    for peer in new:
        peer.wait_for(STANDBY, START_S)


@contextmanager
def running(swarm: Swarm, name: str, steps: int, until: int) -> Iterator[Program]:
    """An owner that has done some steps."""
    with swarm.start_owner(name, *MODEL, "--steps", str(steps)) as owner:
        wait_for_step(owner, until)
        yield owner


def wait_for_step(owner: Program, step: int) -> None:
    owner.wait_for(rf"^step {step}/", RUN_S)


def as_printed(swarm: Swarm, owner: Program) -> Program:
    """The command that an owner printed at its end."""
    command = owner.wait_for(r"resume with: fusion-peer (.+)$", 1.0).group(1)
    return start(swarm, *shlex.split(command))


def start(swarm: Swarm, *arguments: str) -> Program:
    return fusion_peer("resumed owner", *arguments, environment={"FUSION_STATE_DIR": str(swarm.folder / "owner")})


@pytest.mark.row(23)
def test_a_run_goes_on_when_the_coordinator_is_killed_and_when_daemons_are(swarm: Swarm):
    four_peers(swarm)
    with running(swarm, "goes-on", STEPS, 1) as owner:
        coordinator = next(peer for peer in living(swarm) if any("coordinating" in line for line in peer.lines))
        if coordinator in holders(swarm, owner):
            pytest.skip("the coordinator holds a slice")
        victim = holders(swarm, owner)[0]
        leave(coordinator, signal.SIGKILL)
        for program, step in ((victim, 26), (owner, 40)):
            wait_for_step(owner, step)
            killed, since = daemon_of(program), time.monotonic()
            killed.kill()
            wait_for_step(owner, step + 10)
            print(f"{program.name}: ten steps later {time.monotonic() - since:.2f} s after its daemon died")
            assert daemon_of(program).pid != killed.pid
        assert owner.wait(RUN_S) == 0, owner.tail()
        no_traceback(owner)
    answer = status_once(swarm, lambda answer: answer["coordinator"] is not None, START_S)
    assert {peer_id(peer) for peer in living(swarm)} == {peer["peer"] for peer in answer["peers"]}


@pytest.mark.row(12)
def test_a_run_goes_on_when_a_peer_is_stopped_and_when_one_is_killed_and_when_its_owner_is_resumed(swarm: Swarm):
    four_peers(swarm)
    run = swarm.folder / "lost"
    with running(swarm, "lost", STEPS, 1) as owner:
        stopped = executing(swarm, run)[0]
        wait_for_step(owner, 26)
        lines, since = len(stopped.lines), time.monotonic()
        stopped.process.send_signal(signal.SIGSTOP)
        try:
            owner.wait_for(BROKEN, FROZEN_S)
            print(f"the frozen peer was given up after {time.monotonic() - since:.2f} s")
            owner.wait_for(lost(stopped), RUN_S)
            wait_for_step(owner, 46)
        finally:
            stopped.process.send_signal(signal.SIGCONT)
        assert stopped not in executing(swarm, run)
        stopped.wait_for(STANDBY, OWNER_SILENT_S + EXIT_S, after=lines)

        killed, said, since = executing(swarm, run)[0], len(owner.lines), time.monotonic()
        leave(killed, signal.SIGKILL)
        owner.wait_for(BROKEN, FROZEN_S, after=said)
        owner.wait_for(lost(killed), RUN_S)
        wait_for_step(owner, 66)
        print(f"the run went on {time.monotonic() - since:.2f} s after a peer was killed")
        assert leave(owner, signal.SIGINT).code == INTERRUPTED

    with as_printed(swarm, owner) as owner:
        assert owner.wait(RUN_S) == 0, owner.tail()
        no_traceback(owner)
    assert [step for step, _ in read_curves(run / "metrics.jsonl")[0]] == list(range(1, STEPS + 1))
    *lived, resumed = [line["state_step"] for line in lines_of(run / "ledger.jsonl") if line["kind"] == "start"]
    assert len(lived) == 3
    assert lived == sorted(lived)
    assert resumed in range(CHECKPOINT_EVERY, STEPS, CHECKPOINT_EVERY), "what the peers had copied since went with the run"


def executing(swarm: Swarm, run: Path) -> list[Program]:
    """The peers of the newest plan of a run, in the order of its slices."""
    by_id = {peer_id(peer): peer for peer in swarm.peers if any("reachable: " in line for line in peer.lines)}
    return [by_id[part["peer"]] for part in read_plan(run)["slices"]]


def lost(peer: Program) -> str:
    """What an owner says of a peer that it has given up."""
    return f"lost peer {peer_id(peer)}"


def test_an_owner_that_is_killed_can_go_on_at_once_and_otherwise_frees_its_peers_for_another_job(swarm: Swarm):
    four_peers(swarm)
    with running(swarm, "orphaned", 100_000, 1) as owner:
        holders(swarm, owner)
        leave(owner, signal.SIGKILL)
    begin = time.monotonic()
    with start(swarm, "train", "--resume", str(swarm.folder / "orphaned"), "--bootstrap", swarm.address) as owner:
        owner.wait_for(r"^step \d+/", RUN_S)  # on a fast machine there is a checkpoint already
        print(f"the run went on {time.monotonic() - begin:.2f} s after its owner was started again")
        assert time.monotonic() - begin < OWNER_SILENT_S
        leave(owner, signal.SIGKILL)
    begin = time.monotonic()
    with swarm.start_owner("another", *MODEL, "--steps", "5") as owner:
        owner.wait_for(r"^step \d+/", FREED_S)  # at least two of its three peers were held
        print(f"its peers served another job {time.monotonic() - begin:.2f} s after it was killed")
        assert owner.wait(RUN_S) == 0, owner.tail()
