"""The main job by hand: a bootstrap node, three peers, an owner; a text folder, a run folder, and what is exported from it."""

from __future__ import annotations

import random
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from contrib.benchmarks.swarm import Swarm
from contrib.processes import Program, fusion_peer, start_peer
from contrib.reference.modules import config_of_run, reference_of
from fusion_p2p.owner.metrics import read_curves
from tests.process.swarm_of_processes import (
    EXIT_S,
    RUN_S,
    STANDBY,
    START_S,
    daemon_of,
    leave,
    lines_of,
    no_traceback,
    peer_id,
    status,
    swarm_of,
)

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 60
MODEL = (
    "--model", "gpt2", "--layers", "3", "--width", "128", "--heads", "4", "--context", "64", "--batch-size", "24",
    "--micro-batches", "4", "--learning-rate", "0.003", "--steps", str(STEPS), "--validate-every", "30",
    "--validation-batches", "4", "--checkpoint-every", "20", "--peers", "3",
)  # fmt: skip
WORDS = ("peer", "swarm", "owner", "slice", "edge", "plan", "epoch", "step")


@dataclass
class Trained:
    """A finished run, and what was seen of the swarm while it ran."""

    folder: Path
    owner: Program
    status: dict[str, Any]
    open_files: list[list[int]]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    with swarm_of(tmp_path_factory.mktemp("swarm"), 3) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def trained(swarm: Swarm) -> Trained:
    text = swarm.folder / "text"
    text.mkdir()
    rng = random.Random(7)
    for number in range(20):
        (text / f"{number}.txt").write_text(" ".join(rng.choices(WORDS, k=800)))
    open_files, lines = [], {peer: len(peer.lines) for peer in swarm.peers}
    with swarm.start_owner("run", *MODEL, "--data", str(text)) as owner:
        owner.wait_for(r"^step \d+/", RUN_S)
        seen = status(swarm)
        for step in (20, 50):
            owner.wait_for(rf"^step {step}/", RUN_S)
            open_files.append([num_open(program) for program in (owner, *swarm.peers)])
        assert owner.wait(RUN_S) == 0, owner.tail()
    no_traceback(owner)
    for peer in swarm.peers:
        peer.wait_for(STANDBY, EXIT_S, after=lines[peer])
    return Trained(swarm.folder / "run", owner, seen, open_files)


def num_open(program: Program) -> int:
    """Open files of a process and its daemon."""
    return psutil.Process(program.session).num_fds() + daemon_of(program).num_fds()


def test_status_during_the_run_lists_the_peers_their_slices_and_the_coordinator(trained: Trained, swarm: Swarm):
    peers = {peer["peer"]: peer for peer in trained.status["peers"]}
    assert set(peers) == {peer_id(peer) for peer in swarm.peers}
    assert trained.status["coordinator"]["peer"] in peers
    assert sorted(index for peer in peers.values() for index in peer["holding"]["slices"]) == [0, 1, 2]
    assert all(peer["reachability"] == "direct" and peer["flops_per_s"] > 0 for peer in peers.values())


def test_the_run_folder_keeps_everything(trained: Trained):
    folder = trained.folder
    assert {"config.toml", "graph.fusion", "plan.json", "log.txt"} <= {path.name for path in folder.iterdir()}
    assert "slice 2 on" in (folder / "plan.txt").read_text()
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    ledger = lines_of(folder / "ledger.jsonl")
    assert [line["step"] for line in ledger if line["kind"] == "commit"] == list(range(1, STEPS + 1))
    assert [line["step"] for line in ledger if line["kind"] == "checkpoint"] == [20, 40, 60]
    assert list((folder / "checkpoint").glob("*60*"))
    losses, validation = read_curves(folder / "metrics.jsonl")
    assert losses[-1][1] < 0.7 * losses[0][1]
    assert {30, STEPS} <= {step for step, _ in validation}


def test_the_exported_weights_load_into_the_plain_module_and_give_the_loss_that_was_printed(trained: Trained, tmp_path: Path):
    with fusion_peer("export", "export", str(trained.folder), "--out", str(tmp_path / "weights.safetensors")) as export:
        assert export.wait(START_S) == 0, export.tail()
    config = config_of_run(trained.folder)
    module, data = reference_of(config)
    module.load_state_dict(load_file(tmp_path / "weights.safetensors"), strict=True)
    module.eval()
    with torch.no_grad():
        losses = [float(module(**data.validation(index))) for index in range(config.validation_batches)]
    loss = sum(losses) / len(losses)
    assert loss == pytest.approx(read_curves(trained.folder / "metrics.jsonl")[1][-1][1], rel=1e-5)
    assert f"validation {loss:.4f}" in trained.owner.lines[-1]


@pytest.mark.row(24)
def test_open_files_do_not_grow_with_the_steps(trained: Trained):
    print(f"open files of owner and peers after 20 and 50 steps: {trained.open_files}")
    before, after = trained.open_files
    assert all(later <= earlier + 4 for earlier, later in zip(before, after, strict=True))


@pytest.mark.row(8)
def test_a_copied_identity_is_refused_and_a_restart_after_a_crash_is_not(swarm: Swarm):
    peer = swarm.peers[0]
    copied = swarm.folder / "copied.key"
    shutil.copy(swarm.folder / peer.name / "join.key", copied)
    with start_peer("copy", swarm.folder, swarm.address, "--identity", str(copied)) as second:
        assert second.wait(START_S) == 2
        assert re.search(rf"error: identity in use by /ip4/127.0.0.1/tcp/\d+: .*{peer_id(peer)}", second.lines[-1]), (
            second.tail()
        )
        no_traceback(second)
    leave(peer, signal.SIGKILL)
    swarm.peers[0] = start_peer(peer.name, swarm.folder, swarm.address)
    assert peer_id(swarm.peers[0]) == peer_id(peer)
    swarm.peers[0].wait_for(STANDBY, START_S)
