"""The convergence bench: its cases are what it says, its arithmetic, and a short run of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from contrib.benchmarks import convergence, convergence_cases
from contrib.benchmarks.convergence import QUICK, losses, quick, step_reaching, step_s, time_to
from contrib.benchmarks.convergence_cases import (
    DEPTH,
    TEXT,
    Case,
    Result,
    Settings,
    depth_cases,
    digit_cases,
    remembered,
    text_cases,
)
from contrib.benchmarks.report import MUST
from fusion_p2p.wire.codecs import parse

CURVE = [(150, 3.0), (300, 2.0), (450, 1.9), (600, 1.8)]


def result(case: str = "dense", seed: int = 0, exported: float = 2.0, num_bytes: float = 524_288.0) -> Result:
    sizes = [num_bytes] * 3
    return Result(case, seed, exported, exported, CURVE, 12 * num_bytes, 1.0, [0.01] * 4, [0.02] * 4, [(1, sizes, sizes)])


def test_differences_are_paired_by_seed_and_the_weakest_control_counts():
    found = {
        "dense": [result(seed=0, exported=2.0), result(seed=1, exported=1.0)],
        "int8": [result("int8", 0, 2.2), result("int8", 1, 1.0)],
        "control": [result("control", 0, 3.0)],
        "one_layer": [result("one_layer", 1, 1.25)],
        "two_layers": [result("two_layers", 0, 2.4), result("two_layers", 1, 1.08)],
        "bf16": [result("bf16", 0, math.nan)],
    }
    figures = losses(found)
    assert figures["loss_int8"] == pytest.approx(0.05)
    assert figures["control_worse"] == pytest.approx(0.25)
    assert losses(found, convergence.DEPTH_CONTROLS)["control_worse"] == pytest.approx(0.14)
    assert losses(found | {"control": [result("control", 0, 2.02)]})["control_worse"] == pytest.approx(0.01)
    assert "loss_bf16" not in figures


def test_the_step_that_reaches_a_loss():
    assert step_reaching(CURVE, 2.5) == pytest.approx(225)
    assert step_reaching(CURVE, 3.5) == 150
    assert step_reaching(CURVE, 1.0) == math.inf
    assert step_reaching([], 1.0) == math.inf


def test_steps_take_what_computing_and_wires_take():
    dense = [result()]
    fast, slow = (step_s([524_288.0] * 3, [524_288.0] * 3, ("none",), dense, rate) for rate in (1e6, 8))
    assert 2 * (0.01 + 0.02) < fast < 0.6
    wire_s = 8 * 524_288 / 8e6
    assert slow >= 6 * wire_s
    eighth = step_s([65_536.0] * 3, [65_536.0] * 3, ("int4",), dense, 8)
    assert 5 < slow / eighth < 9


def test_time_to_a_loss_counts_every_phase_with_its_own_bytes():
    sparse, rounded = [40_000.0] * 3, [135_000.0] * 3
    case = Case("16x_finished", "", ((0.0, ("topk:10",)), (0.5, ("int8",))))
    both = replace(result("16x_finished"), phases=[(1, sparse, sparse), (301, rounded, rounded)])
    first, second = (
        step_s(size, size, codecs, [result()], 50) for size, (_, codecs) in zip((sparse, rounded), case.phases, strict=True)
    )
    assert time_to(case, both, 1.9, [result()], 50) == pytest.approx(300 * first + 150 * second)
    assert time_to(case, both, 2.0, [result()], 50) == pytest.approx(300 * first)
    assert time_to(case, both, 1.0, [result()], 50) == math.inf


def test_cases_have_names_of_their_own_and_every_limit_has_its_case():
    names = [case.name for case in (*text_cases(), *digit_cases())]
    assert len(set(names)) == len(names)
    limited = {name.removeprefix("loss_") for name in MUST if name.startswith("loss_")}
    assert limited <= set(names)
    assert all(len(case.seeds) == 2 for case in text_cases() if case.name in limited)
    again = {case.name: case.seeds for case in depth_cases()}
    assert again.keys() == (limited & {case.name for case in text_cases()}) | {"dense", *convergence.DEPTH_CONTROLS}
    assert all(len(seeds) == 2 for seeds in again.values())
    for case in (*text_cases(), *digit_cases()):
        for _, codecs in case.phases:
            assert all(codec == convergence.NOTHING or parse(codec) for codec in codecs)


def test_a_run_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran: list[str] = []

    def counted(case: Case, seed: int, settings: object) -> Result:
        ran.append(case.name)
        return result(case.name, seed)

    monkeypatch.setattr(convergence_cases, "run", counted)
    case = Case("dense", "")
    first, second = (remembered(case, 0, TEXT, tmp_path) for _ in range(2))
    assert [tuple(point) for point in second.curve] == first.curve
    assert ran == ["dense"]
    remembered(case, 0, QUICK, tmp_path)
    assert ran == ["dense", "dense"]


def test_where_depth_matters_more_cases_are_run_again_with_their_own_settings_and_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked: list[tuple[list[Case], Settings, Path]] = []

    def remembering(cases: list[Case], text: Settings, folder: Path) -> dict[str, list[Result]]:
        asked.append((cases, text, folder))
        return {case.name: [result(case.name, exported=2.0 + 0.1 * index)] for index, case in enumerate(cases)}

    monkeypatch.setattr(convergence, "run_all", remembering)
    figures = convergence.measure_depth(["dense", "16x_kept", "two_layers"])
    [(cases, text, folder)] = asked
    assert [case.cut_layers.keep for case in cases] == [0, round(DEPTH.width / 4.85), 0]
    assert text == DEPTH
    assert folder != convergence.RUNS
    assert {name: figures[name] for name in ("depth_16x_kept", "depth_two_layers")} == pytest.approx(
        {"depth_16x_kept": 0.05, "depth_two_layers": 0.1}
    )
    assert figures["depth_control_worse"] == pytest.approx(0.1)
    assert "+5.00 %" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_short_run_shows_that_int8_costs_nothing_and_that_what_crosses_matters():
    figures = quick()
    assert abs(figures["loss_int8"]) < 0.015
    assert figures["control_worse"] > 0.04
    assert figures["ratio_int8"] == pytest.approx(3.88, abs=0.02)
