"""Train, status, export, resume: what an owner types, against real processes; what is exported is what was trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from contrib.processes import Program, fusion_peer, start_bootstrap, start_peer, wait_until_joined
from fusion_p2p.config import TrainConfig, resolve
from fusion_p2p.models.catalogue import build
from fusion_p2p.owner.data import open_data
from fusion_p2p.owner.ledger import read_ledger

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]

LIMIT_S = 90.0
SHAPE = {"layers": 2, "width": 32, "heads": 2, "context": 16}
SETTINGS = (
    *(word for name, value in SHAPE.items() for word in (f"--{name}", str(value))),
    "--batch-size", "4", "--micro-batches", "2", "--steps", "6", "--checkpoint-every", "3", "--validate-every", "3",
    "--learning-rate", "0.01", "--peers", "2", "--scheduler", "equal-compute", "--tied",
)  # fmt: skip


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[str]:
    """The address of a bootstrap node with two peers."""
    node, address = start_bootstrap(tmp_path / "state", "--no-relay")
    with node, start_peer("one", tmp_path, address) as one, start_peer("two", tmp_path, address) as two:
        wait_until_joined([one, two], LIMIT_S)
        yield address


def ask(name: str, folder: Path, *arguments: str) -> Program:
    """Run a command to its end; AssertionError unless it succeeds."""
    with fusion_peer(name, *arguments, environment={"FUSION_STATE_DIR": str(folder / "owner")}) as program:
        assert program.wait(LIMIT_S) == 0, program.tail()
    return program


def dialling(address: str) -> tuple[str, ...]:
    return ("--bootstrap", address, "--no-nat", "--listen", "/ip4/127.0.0.1/tcp/0")


def validation_losses(run: Path) -> dict[int, float]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["validation_loss"] for line in lines if line["validation_loss"] is not None}


def exported_loss(run: Path) -> float:
    """Validation loss of the exported weights in the original module, in this process."""
    config = resolve(TrainConfig, {}, {}, (run / "config.toml",))
    module = build("gpt2", {**SHAPE, "vocabulary": 256, "tied": True}, device="cpu").module
    module.load_state_dict(load_file(run / "model.safetensors"))
    module.eval()
    data = open_data(config)
    with torch.no_grad():
        losses = [float(module(**data.validation(index))) for index in range(config.validation_batches)]
    return sum(losses) / len(losses)


def test_an_owner_plans_trains_looks_exports_and_goes_on(swarm: str, tmp_path: Path):
    run = tmp_path / "run"
    picture = tmp_path / "plan.svg"
    model = (*SETTINGS[: 2 * len(SHAPE)], "--data", "stdlib-text", "--batch-size", "4", "--micro-batches", "2", "--tied")
    dry = ask(
        "plan", tmp_path, "plan", "--scheduler", "equal-compute", "--json", "--plot", str(picture), *model, *dialling(swarm)
    )  # fmt: skip
    planned = json.loads(next(line for line in dry.lines if line.startswith("{")))
    assert len(planned["slices"]) == len(planned["peers"]) == 2
    assert {edge["source"] for edge in planned["edges"]} == {-1, 0}, "the owner's feeds count"
    assert picture.stat().st_size > 10_000

    trained = ask("train", tmp_path, "train", *dialling(swarm), *SETTINGS, "--run", str(run))
    assert any("step 6/6" in line for line in trained.lines)
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "slice 1 on" in (run / "plan.txt").read_text()
    assert "slice 1 on" in (run / "log.txt").read_text()

    status = json.loads(ask("status", tmp_path, "status", "--json", *dialling(swarm)).lines[-1])
    assert len(status["peers"]) == 2
    assert status["coordinator"]["peer"] in {peer["peer"] for peer in status["peers"]}

    exported = ask("export", tmp_path, "export", str(run))
    assert "after step 6" in exported.lines[-1]
    assert exported_loss(run) == pytest.approx(validation_losses(run)[6], rel=1e-5)

    ask("resume", tmp_path, "train", "--resume", str(run), "--steps", "9", *dialling(swarm))
    history = read_ledger(run / "ledger.jsonl")
    assert history.opened is not None
    assert (history.opened.incarnation, history.step, list(history.fates)) == (2, 9, list(range(1, 10)))
    ask("export", tmp_path, "export", str(run))
    assert exported_loss(run) == pytest.approx(validation_losses(run)[9], rel=1e-5)
    assert validation_losses(run)[9] < validation_losses(run)[3]
