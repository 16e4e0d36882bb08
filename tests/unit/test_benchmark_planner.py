"""The planner's benchmark: its models, its figures, and that our baselines are no straw men."""

from __future__ import annotations

import math

import numpy as np
import pytest

from contrib.benchmarks import planner
from contrib.benchmarks.operators import MODELS, random_operators
from contrib.benchmarks.planner_cases import CLUSTERED, FENCE, Case, Result, deviations, run_baselines
from contrib.benchmarks.random_networks import random_network
from contrib.benchmarks.report import MUST
from contrib.benchmarks.volunteers import Throughput

CASE = Case(CLUSTERED[1], "gpt2-xl", 8, "adatopk")


def result(case: Case = CASE, *, auto_s: float = 2.0, fence_s: float = 3.0) -> Result:
    seconds = {(name, order): 9.0 for name in ("equal-number", "equal-compute") for order in ("gpipe", "1f1b")}
    seconds |= {(FENCE, "gpipe"): fence_s + 1, (FENCE, "1f1b"): fence_s, ("auto", "auto"): auto_s}
    return Result(case, seconds, frozenset(), 1.6, "", ())


@pytest.mark.parametrize(
    ("model", "operators", "forward_tflops", "million_parameters"),
    [("gpt2-xl", 484, 3.51, 1636), ("gpt2-medium", 244, 1.68, 406), ("resnet101", 346, 0.50, 44.5)],
)
def test_models_have_their_published_sizes(model: str, operators: int, forward_tflops: float, million_parameters: float):
    chain = MODELS[model]()
    assert chain.num_blocks == operators
    assert chain.forward_flops.sum() / 1e12 == pytest.approx(forward_tflops, rel=0.02)
    assert chain.parameter_bytes[-1] / 4e6 == pytest.approx(million_parameters, rel=0.01)


def test_a_cut_between_blocks_of_gpt2_sends_one_tensor_and_one_inside_more():
    chain = MODELS["gpt2-xl"]()
    assert chain.crossing[1:-1].min() == 1024 * 1600 * 4
    assert chain.crossing[1:-1].max() == 1024 * 50257 * 4


@pytest.mark.parametrize("testbed", CLUSTERED)
def test_baselines_and_op_fence_agree_with_the_prototype(testbed: str):
    measured = []
    for codec in ("none", "uniform", "adatopk"):
        case = Case(testbed, "gpt2-xl", 8, codec)
        measured.append((case, run_baselines(case)[0]))
    found = list(deviations(measured))
    assert len(found) == 7
    assert max(share for _, share in found) < 0.001


def test_figures_of_results():
    uniform = Case(CLUSTERED[1], "gpt2-medium", 8, "uniform")
    other = Case("t4-24-homes", "gpt2-xl", 8, "none")
    figures = planner.figures_of([result(), result(uniform, fence_s=4.5), result(other, auto_s=3.5)])
    assert figures["auto_over_fence_gpt2_geo"] == pytest.approx(1.5)
    assert figures["fence_over_equal_min"] == pytest.approx(2.0)
    assert figures["auto_over_bound_max"] == pytest.approx(2.0 / 1.6)
    assert figures["auto_losses"] == 1


def test_names_of_figures_are_those_that_must_hold():
    figures = planner.figures_of([result(), result(Case(CLUSTERED[0], "resnet101", 8, "adatopk"))])
    assert {name for name in figures if name in MUST} >= {
        "baseline_deviation_max", "auto_over_fence_gpt2_geo", "auto_over_fence_resnet_geo", "auto_over_bound_geo",
        "auto_over_bound_max", "auto_losses",
    }  # fmt: skip


@pytest.mark.slow
def test_the_quick_benchmark_holds():
    figures = planner.compare(planner.QUICK)
    assert figures["auto_losses"] == 0
    assert figures["auto_over_fence_gpt2_geo"] >= 1.4
    assert figures["auto_over_bound_max"] <= 1.35


def test_made_up_worlds_are_networks():
    network = random_network(60, seed=3)
    count = len(network.peers)
    assert len(set(network.peers)) == count == 60
    assert (network.beta_s[~np.eye(count, dtype=bool)] > 0).all()
    assert np.array_equal(network.beta_s, network.beta_s.T)
    inside = network.sites[:, None] == network.sites[None, :]
    assert network.beta_s[inside].max() < network.beta_s[~inside].min() * 1.01
    assert random_operators(100).num_blocks == 100


def test_ratio_of_two_sides_of_which_one_may_not_hold_the_model():
    assert Throughput("a", 100, 2.0, 4.0).ratio == 0.5
    assert Throughput("a", 100, 2.0, 0.0).ratio == math.inf
    assert Throughput("a", 100, 0.0, 0.0).ratio == 0.0
