"""Figures of a target: printed as a table with what must hold, and kept as `bench-results/TARGET.json`."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parents[2] / "bench-results"
MUST: dict[str, tuple[str, float]] = {
    "seconds_train": ("<", 360),
    "processes_left": ("<=", 0),
    "parity_sgd": ("<=", 1e-6),
    "parity_adam_clip": ("<=", 1e-6),
    "parity_tied": ("<=", 1e-6),
    "parity_resnet": ("<=", 1e-5),
    "parity_dropout": ("<=", 0),
    "efficiency_8": (">=", 0.75),
    "efficiency_32": (">=", 0.82),
    "interpreter_overhead": ("<=", 0.05),
    "frame_rate_ratio": (">=", 0.80),
    "fuzz_inputs": (">=", 40_000),
    "fuzz_unexpected": ("<=", 0),
    "fuzz_seconds": ("<", 240),
    "exit_seconds_max": ("<=", 5.0),
    "help_seconds": ("<", 0.5),
    "codec_speedup": (">=", 6.0),
    "index_bits_over_bound": ("<=", 0.05),
    "bits_per_kept_element": ("<=", 16.0),
    "loss_int8": ("<=", 0.005),
    "loss_7x": ("<=", 0.025),
    "ratio_7x": (">=", 7.0),
    "loss_16x_finished": ("<=", 0.035),
    "ratio_16x_finished": (">=", 15.0),
    "loss_16x_kept": ("<=", 0.01),
    "ratio_16x_kept": (">=", 15.0),
    "loss_30x_kept": ("<=", 0.04),
    "ratio_30x_kept": (">=", 30.0),
    "loss_bottleneck_31x": ("<=", 0.005),
    "ratio_bottleneck_31x": (">=", 30.0),
    "control_worse": (">=", 0.05),
    "baseline_deviation_max": ("<=", 0.10),
    "fence_over_equal_min": (">=", 1.35),
    "fence_over_equal_geo": (">=", 2.8),
    "auto_over_fence_gpt2_geo": (">=", 2.0),
    "auto_over_fence_resnet_geo": (">=", 10.0),
    "auto_over_bound_geo": ("<=", 1.35),
    "auto_over_bound_max": ("<=", 1.75),
    "auto_losses": ("<=", 0),
    "small_gap_mean": ("<=", 0.02),
    "small_gap_max": ("<=", 0.06),
    "auto_over_dtfm_geo": (">=", 1.2),
    "auto_over_dtfm_min": (">=", 1.0),
    "plan_seconds_48": ("<=", 15.0),
    "plan_seconds_200": ("<=", 25.0),
    "plan_seconds_1000": ("<=", 60.0),
    "capture_seconds_xl": ("<=", 10.0),
    "prediction_error_median": ("<=", 0.12),
    "prediction_error_max": ("<=", 0.30),
    "best_prediction_over_best": ("<=", 1.10),
    "cores_together": ("<", 1.2),
    "plans_measured": (">=", 12),
    "measured_speedup": (">=", 3.0),
    "time_to_loss_over_fp32": (">=", 4.0),
    "time_to_loss_over_bf16": (">=", 1.5),
    "time_to_loss_over_topk": (">", 1.0),
    "overlap_over_ideal": ("<=", 1.15),
    "overlap_over_serial": ("<=", 0.60),
    "faults": (">=", 50),
    "faults_of_each_kind_min": (">=", 5),
    "parameters_identical": (">=", 1),
    "adaptive_loss_difference": ("<=", 0.01),
    "recovery_seconds_median": ("<=", 5.0),
    "recovery_seconds_p95": ("<=", 10.0),
    "kills": (">=", 10),
    "frozen_seconds_max": ("<=", 4.5),
    "coordinator_delay_max": ("<=", 1.0),
    "join_seconds": ("<=", 6.0),
    "seconds_to_a_slice": ("<=", 20.0),
    "snapshot_overhead": ("<=", 0.05),
    "crowd_peers": (">=", 24),
    "crowd_seconds_to_see_all": ("<=", 60.0),
    "idle_share_max": ("<=", 0.01),
    "coordinator_share": ("<=", 0.03),
    "pss_mb_max": ("<=", 450),
    "pss_growth_mb_median": ("<=", 5.0),
    "crowd_job_steps": (">=", 10),
    "scenarios": (">=", 20_200),
    "broken": ("<=", 0),
    "simulated_peers": (">=", 1_000),
    "simulated_broken": ("<=", 0),
    "simulated_seconds_to_see_all": ("<=", 60.0),
}
"""What the figures of all targets are held to; a figure that is not listed only informs."""
_COMPARE = {"<": operator.lt, "<=": operator.le, ">=": operator.ge, ">": operator.gt}


def holds(name: str, value: float, must: Mapping[str, tuple[str, float]] = MUST) -> bool | None:
    """Whether a figure is good enough; None when nothing is asked of it."""
    if name not in must:
        return None
    sign, limit = must[name]
    return bool(_COMPARE[sign](value, limit))


def write_figures(target: str, figures: Mapping[str, float], folder: Path = RESULTS) -> Path:
    """Keep the figures; those of other sections of the target that were measured earlier stay."""
    path = folder / f"{target}.json"
    earlier = json.loads(path.read_text())["figures"] if path.exists() else {}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"figures": earlier | dict(figures)}, indent=2) + "\n")
    return path


def print_figures(title: str, figures: Mapping[str, float], must: Mapping[str, tuple[str, float]] = MUST) -> bool:
    """Show the figures as a table; whether all that must hold do."""
    table = Table(title=title, title_justify="left")
    for heading in ("figure", "value", "must be", ""):
        table.add_column(heading, justify="right" if heading == "value" else "left")
    verdicts = []
    for name, value in figures.items():
        verdict = holds(name, value, must)
        wanted = " ".join(map(str, must[name])) if name in must else ""
        table.add_row(name, f"{value:.6g}", wanted, {True: "ok", False: "NOT MET", None: ""}[verdict])
        verdicts.append(verdict is not False)
    Console(width=100, highlight=False).print(table)
    return all(verdicts)
