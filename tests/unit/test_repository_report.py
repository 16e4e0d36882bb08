"""Figures of benchmarks: what is kept, and what is held against them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from contrib.benchmarks.main_job import SECTIONS
from contrib.benchmarks.report import holds, print_figures, write_figures


def test_sections_add_up_in_one_file(tmp_path: Path):
    write_figures("main", {"parity_sgd": 1e-7, "help_seconds": 0.9}, tmp_path)
    path = write_figures("main", {"help_seconds": 0.2}, tmp_path)
    assert json.loads(path.read_text()) == {"figures": {"parity_sgd": 1e-7, "help_seconds": 0.2}}


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("parity_dropout", 0.0, True),
        ("parity_dropout", 1e-12, False),
        ("efficiency_8", 0.75, True),
        ("efficiency_8", 0.74, False),
        ("parity_sgd", math.nan, False),
        ("parity_resnet", math.inf, False),
        ("steps", 300, None),
    ],
)
def test_figures_are_held_to_their_limits(name: str, value: float, verdict: bool | None):
    assert holds(name, value) is verdict


def test_a_missed_figure_is_seen(capsys: pytest.CaptureFixture[str]):
    assert print_figures("all", {"help_seconds": 0.2})
    assert not print_figures("all", {"help_seconds": 0.7, "steps": 300})
    assert "NOT MET" in capsys.readouterr().out


def test_every_section_says_what_it_measures():
    assert all(section.__doc__ for section in SECTIONS.values())
