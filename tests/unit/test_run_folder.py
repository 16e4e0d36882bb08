"""Run folders: created once, held by one process, resumed; metrics and the loss curve."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusion_p2p.config import TrainConfig, resolve
from fusion_p2p.errors import ConfigError
from fusion_p2p.ids import Digest, PeerId
from fusion_p2p.job.progress import PeerLoad, RunSnapshot
from fusion_p2p.lock import InUse
from fusion_p2p.owner.ledger import End
from fusion_p2p.owner.metrics import Metrics, draw_loss, read_curves
from fusion_p2p.owner.run_folder import RunFolder, stored_config
from fusion_p2p.plan.plan import Plan, SlicePlan

ADDRESS = "/ip4/192.0.2.7/tcp/31337/p2p/12D3KooWGBfGbUe8kHzUJ7bUG1oFyTzUPQHzjxLzWcEDKhHrYh5P"


def config(path: Path | None) -> TrainConfig:
    return TrainConfig(bootstrap=(ADDRESS,), seed=5, run=path)


def snapshot(step: int, loss: float | None, validation: float | None = None) -> RunSnapshot:
    load = PeerLoad(PeerId("12D3KooWa"), (0,), 0.5, 10, 20)
    return RunSnapshot(step, 100, 1, loss, validation, 1e-3, 0.5, 2048.0, "tokens", (load,))


def test_a_run_keeps_what_it_was_given(tmp_path: Path):
    path = tmp_path / "run"
    with RunFolder.create(config(path)) as folder:
        folder.write_model(b"graph", (), {})
        plan = Plan(Digest("0" * 64), "equal-compute", 2, (0, 0), (SlicePlan(PeerId("a"), 1),), ())
        folder.write_plan(plan, ("one", "two"), 1)
        folder.ledger.append(End(step=3))
        logging.getLogger("fusion_p2p.test").warning("peer went away")
    with RunFolder.resume(path) as folder:
        assert folder.read_graph() == b"graph"
        assert folder.ledger.history.ended
    assert (path / "plan.txt").read_text() == "one\ntwo\n"
    assert json.loads((path / "plan.json").read_text())["slices"] == [
        {"peer": "a", "in_flight": 1, "recompute": False, "replicas": [], "deal": [0]}
    ]
    assert "peer went away" in (path / "log.txt").read_text()
    assert resolve(TrainConfig, {}, {}, (stored_config(path),)).seed == 5


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path):
    with RunFolder.create(config(tmp_path / "run")) as folder:
        folder.write_model(b"graph", (), {})
    with pytest.raises(ConfigError, match="holds a run already; go on with --resume"):
        RunFolder.create(config(tmp_path / "run"))


def test_a_run_that_never_had_a_graph_can_be_started_again_but_not_resumed(tmp_path: Path):
    RunFolder.create(config(tmp_path / "run")).close()
    with pytest.raises(ConfigError, match="cannot be resumed: it ended before its model was captured"):
        RunFolder.resume(tmp_path / "run")
    RunFolder.create(config(tmp_path / "run")).close()


def test_a_folder_in_use_is_refused_with_the_pid_of_its_holder(tmp_path: Path):
    with RunFolder.create(config(tmp_path / "run")) as folder:
        folder.write_model(b"graph", (), {})
        program = (
            "import sys; from pathlib import Path; from fusion_p2p.owner.run_folder import RunFolder; "
            "RunFolder.resume(Path(sys.argv[1]))"
        )
        other = subprocess.run([sys.executable, "-c", program, str(folder.path)], capture_output=True, text=True, check=False)
    assert f"run folder {tmp_path}/run is in use by process {os.getpid()}" in other.stderr
    with RunFolder.resume(tmp_path / "run"), pytest.raises(InUse):
        RunFolder.resume(tmp_path / "run")


def test_wrong_places_are_one_sentence(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a run folder: it has no config"):
        RunFolder.resume(tmp_path / "absent")
    with pytest.raises(ConfigError, match="cannot create run folder"):
        RunFolder.create(config(tmp_path / "file" / "run"))


def test_runs_without_a_name_do_not_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with RunFolder.create(config(None)) as first, RunFolder.create(config(None)) as second:
        assert first.path != second.path
        assert first.path.parent.name == second.path.parent.name == "runs"
        assert "gpt2" in first.path.name


def test_curves_take_the_last_line_of_a_step_and_each_validation_once(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    for step, loss, validation in [(1, 3.0, None), (2, 2.0, 2.5), (3, None, 2.5), (2, 1.5, 2.5)]:
        metrics.append(snapshot(step, loss, validation), wall_s=1.0, norm=0.5)
    metrics.close()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert read_curves(path) == ([(1, 3.0), (2, 1.5)], [(2, 2.5)])
    resumed = Metrics(path)
    resumed.append(snapshot(5, 1.0), wall_s=2.0)
    resumed.close()
    assert read_curves(path)[0][-1] == (5, 1.0)
    first = json.loads(path.read_text().splitlines()[0])
    assert first["peers"] == [{"peer": "12D3KooWa", "slices": [0], "busy_share": 0.5, "bytes_sent": 10, "bytes_received": 20}]
    assert first["norm"] == 0.5


def test_the_loss_curve_is_a_picture(tmp_path: Path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    draw_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png", "empty")
    empty = (tmp_path / "loss.png").read_bytes()
    for step in range(1, 20):
        metrics.append(snapshot(step, 3.0 / step, 2.0), wall_s=1.0)
    metrics.close()
    draw_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png", "run")
    drawn = (tmp_path / "loss.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    assert drawn != empty
