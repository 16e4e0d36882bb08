"""When a run counts as having reached a loss, and what the others are compared with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from contrib.benchmarks import time_to_loss
from contrib.benchmarks.time_to_loss import ADAPTIVE, BF16, DENSE, TOPK, Policy, Race, curve_of, figures_of


def metrics(folder: Path, losses: Sequence[float | None], torn: str = "") -> Path:
    """A run of two seconds a step, of which some were validated after."""
    lines = [{"step_s": 2.0, "loss": 9.0, "validation_loss": loss} for loss in losses]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    return folder


def test_the_curve_has_the_seconds_of_all_steps_and_the_loss_of_those_that_were_validated(tmp_path: Path) -> None:
    assert curve_of(metrics(tmp_path, [None, 5.0, None, 3.0, None], torn='{"step_s"')) == [(4.0, 5.0), (8.0, 3.0)]


def test_a_run_without_steps_has_no_curve(tmp_path: Path) -> None:
    assert curve_of(tmp_path) == []


def test_who_does_not_reach_the_loss_took_at_least_as_long_as_it_was_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def race(policy: Policy, *losses: float) -> Race:
        return Race(policy, Path(), [(2.0 * (1 + index), loss) for index, loss in enumerate(losses)])

    monkeypatch.setattr(time_to_loss, "median_step_s", lambda run: 8.0)
    monkeypatch.setattr(time_to_loss, "busy_of_slices", lambda run: [0.5, 1.0])
    runs = {policy: race(policy, 3.0, 3.0, 3.0) for policy in TOPK}
    runs |= {DENSE: race(DENSE, 4.0, 4.0, 4.0, 4.0, 2.0, 3.0), ADAPTIVE: race(ADAPTIVE, 2.5, 2.0), BF16: race(BF16, 3.0, 2.0)}
    assert figures_of(runs, 2.0) == {
        "time_to_loss_over_fp32": 2.5,
        "time_to_loss_over_bf16": 1.0,
        "time_to_loss_over_topk": 1.5,
        "topk_runs_that_reached": 0,
        "dense_step_over_compute": 8.0,
    }


def test_an_adaptive_run_that_fails_is_never_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_to_loss, "median_step_s", lambda run: 8.0)
    monkeypatch.setattr(time_to_loss, "busy_of_slices", lambda run: [1.0])
    runs = {
        policy: Race(policy, Path(), [(5.0, 3.0 if policy == ADAPTIVE else 2.0)]) for policy in (DENSE, ADAPTIVE, BF16, *TOPK)
    }
    assert figures_of(runs, 2.0)["time_to_loss_over_topk"] == 0.0
