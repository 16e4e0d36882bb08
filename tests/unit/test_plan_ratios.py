"""Ratios per boundary, the formula they are chosen by, and the bound: hand-computed cases and what must hold for any link."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.errors import WireError
from fusion_p2p.plan.bound import bound_s
from fusion_p2p.plan.chain import Operator, chain_of_operators
from fusion_p2p.plan.estimate import Formula, formula, step_estimate
from fusion_p2p.plan.layout import Layout, Stage
from fusion_p2p.plan.network import Floats
from fusion_p2p.plan.ratios import adaptive, adatopk, capped, guarded_adatopk, nominal_ratio, ratios_of, with_ratios
from fusion_p2p.plan.request import Terms
from tests.unit.networks import network

CHAIN = chain_of_operators("line", [Operator(f"o{i}", 1.0, 1e6, (i - 1,) if i else (), 1e6) for i in range(6)])
seconds = st.floats(1e-4, 1e3)


def links(wire_s: list[float], latency_s: float = 0.0, stage_s: float = 1.0, micro_batches: int = 8) -> Formula:
    wire, latency = np.array(wire_s), np.full(len(wire_s), latency_s)
    return Formula(stage_s, stage_s * (len(wire) + 1), latency, wire, wire, np.ones(len(wire)), micro_batches, True)


def one_each(cuts: list[int]) -> Layout:
    ends = [0, *cuts, CHAIN.num_blocks]
    return Layout("test", tuple(Stage(ends[i], ends[i + 1], (i,)) for i in range(len(cuts) + 1)))


def test_adatopk_on_a_case_worked_out_by_hand() -> None:
    messages = np.array([8.0, 0.8, 0.04, 0.02])
    assert adatopk(messages, 100) == pytest.approx([100.0, 10.0, 0.5, 1.0])
    assert guarded_adatopk(messages, 100) == pytest.approx([100.0, 10.0, 1.0, 1.0])


@given(st.lists(seconds, min_size=1, max_size=8), st.floats(2, 1000))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_adatopk_gives_compressed_links_one_time_and_leaves_fast_ones_dense(messages: list[float], ratio: float) -> None:
    dense_s = np.array(messages)
    ratios = adatopk(dense_s, ratio)
    slowest = dense_s.max()
    assert ratios[dense_s.argmax()] == pytest.approx(ratio, rel=1e-9)
    compressed = 3 * ratio * dense_s / slowest > 1
    assert dense_s[compressed] / ratios[compressed] == pytest.approx(slowest / ratio, rel=1e-9)
    assert np.all(ratios[~compressed] == 1.0)
    assert np.all(guarded_adatopk(dense_s, ratio) >= 1.0), "no message is larger than the dense one"


@given(st.lists(seconds, min_size=1, max_size=8), st.floats(0, 2), st.floats(1e-3, 10), st.integers(1, 64), st.floats(2, 100))
@settings(derandomize=True, deadline=None, max_examples=80)
def test_adaptive_spends_its_slack_and_no_more(
    wire_s: list[float], latency_s: float, stage_s: float, micro_batches: int, most: float
) -> None:
    line = links(wire_s, latency_s, stage_s, micro_batches)
    allowed = 1.05 * line.step_s(np.full(len(wire_s), most))
    ratios = adaptive(line, most)
    assert np.all((ratios >= 1.0) & (ratios <= most))
    assert line.step_s(ratios) <= allowed * (1 + 1e-9)
    if line.step_s(np.ones(len(wire_s))) <= allowed:
        assert np.all(ratios == 1.0)
        return
    wire = np.array(wire_s)
    touched = (ratios > 1.0) & (ratios < most)
    if touched.any():
        caps = latency_s + wire[touched] / ratios[touched]
        assert caps == pytest.approx(caps[0], rel=1e-6), "one cap for all links"
        assert line.step_s(capped(line, np.array(caps[0] * 1.001), most)) > allowed, "a larger cap costs more than the slack"


def test_what_the_slowest_stage_hides_is_not_compressed() -> None:
    ratios = adaptive(links([0.1, 0.2, 50.0], stage_s=1.0, micro_batches=1000), 100)
    assert list(ratios[:2]) == [1.0, 1.0]
    assert 45 < ratios[2] < 50, "just enough to hide behind a stage of one second, five percent of slack aside"


def test_the_formula_on_a_case_worked_out_by_hand() -> None:
    net = network([0, 0, 1], speeds=[1, 2, 3], within=(0.0, 1e-8), between=(0.5, 2e-6))
    layout = one_each([1, 3])
    line = formula(CHAIN, net, layout, micro_batches=4)
    assert line.message_s == pytest.approx([0.01, 2.5])
    assert line.stage_fill_s == pytest.approx(3 + 3 + 3)
    assert line.step_s(np.ones(2)) == pytest.approx(9 + 2 * 2.51 + 3 * 3.0)
    assert step_estimate(CHAIN, net, layout, 4) == pytest.approx(9 + 5.02 + 9)
    assert replace(line, full_duplex=False).bottleneck_s(np.ones(2)) == pytest.approx(4.0)
    assert line.bottleneck_s(np.array([1.0, 1.0])) == pytest.approx(3.0), "latency occupies no link"


def test_replicas_share_work_and_links_and_pay_for_their_gradients() -> None:
    layout = Layout("test", (Stage(0, 3, (0, 1)), Stage(3, 6, (2, 3))))
    free = formula(CHAIN, network([0, 0, 1, 1], within=(0.0, 0.0), between=(0.0, 4e-6)), layout, 4)
    assert free.stage_s == pytest.approx(4.5)
    assert free.bottleneck_s(np.ones(1)) == pytest.approx(4.5)
    assert free.bottleneck_s(np.full(1, 0.2)) == pytest.approx(4.0 / 0.2 / 2)
    dear = formula(CHAIN, network([0, 0, 1, 1], within=(1.0, 1e-6), between=(0.0, 4e-6)), layout, 4)
    assert dear.stage_s == pytest.approx(4.5 + 2 * (1.0 + 1.5e6 * 1e-6) / 4)
    lined = formula(CHAIN, network([0, 0, 1, 1], within=(0.0, 0.0), between=(0.0, 4e-6), uplink_s=4e-6), layout, 4)
    assert lined.bottleneck_s(np.full(1, 0.2)) == pytest.approx(4.0 / 0.2), "two flows over one line are no faster than one"


@pytest.mark.parametrize(
    ("codec", "ratio", "expected"),
    [
        ("none", 100, [1, 1]),
        ("uniform", 90, [30, 30]),
        ("adatopk", 90, [90, 30]),
        ("int8", 100, [3.87] * 2),
        ("bf16", 1, [2, 2]),
        ("topk:10:int8", 1, [31, 31]),
        ("topk-paper:30", 1, [10, 10]),
    ],
)
def test_policies(codec: str, ratio: float, expected: list[float]) -> None:
    net = network([0, 1, 2], between=(0.0, 3e-6))
    beta = net.beta_s.copy()
    beta[1, 2] = beta[2, 1] = 1e-6
    layout = with_ratios(CHAIN, replace(net, beta_s=beta), one_each([2, 4]), Terms(8, codec=codec, ratio=ratio))
    assert layout.ratios == pytest.approx(expected)


def test_unknown_policies_are_refused_and_one_stage_needs_none() -> None:
    alone = Layout("test", (Stage(0, 6, (0,)),))
    for codec in ("none", "uniform", "adatopk", "adaptive"):
        assert len(ratios_of(CHAIN, network([0]), alone, Terms(8, codec=codec))) == 0
    with pytest.raises(WireError, match="unknown codec 'zip'"):
        ratios_of(CHAIN, network([0, 1]), one_each([3]), Terms(8, codec="zip"))
    assert nominal_ratio("fp16") == 2.0
    assert 31 < nominal_ratio("topk:15:int8") < 59


def bound(sites: list[int], codec: str = "none", *, strict: bool = False, **terms: float) -> float:
    net = network(sites, between=(0.5, 1e-6))
    return bound_s(CHAIN, net, Terms(int(terms.get("micro_batches", 4)), codec=codec, ratio=10), strict=strict)


def test_the_bound_on_cases_worked_out_by_hand() -> None:
    assert bound([0]) == pytest.approx(4 * 18)
    assert bound([0, 0, 0]) == pytest.approx(18 + 3 * 6)
    assert bound([0, 1]) == pytest.approx(min(4 * 18, 18 + 2 * 1.5 + 3 * 9))
    assert bound([0, 1], "adatopk") == pytest.approx(18 + 2 * 0.6 + 3 * 9)
    assert bound(list(range(9))) == pytest.approx(
        min(18 + 3.0 * (k - 1) + 3 * max(18 / k, 1.5 * (k > 1)) for k in range(1, 10))
    )
    assert bound(list(range(12))) == pytest.approx(bound(list(range(9)))), "many sites, the same by the fastest hops"
    assert bound([], micro_batches=4) == 0.0


def test_a_strict_bound_counts_no_latency_against_a_link() -> None:
    slow = network([0, 1], speeds=[100, 100], between=(0.5, 0.0))
    terms = Terms(1000)
    assert bound_s(CHAIN, slow, terms) == pytest.approx(180.0), "one peer alone"
    assert bound_s(CHAIN, slow, terms, strict=True) == pytest.approx(0.18 + 2 * 0.5 + 999 * 0.09)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(1, 16), st.integers(0, 1000))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_no_chain_of_single_peers_is_estimated_below_the_strict_bound(sites: list[int], micro_batches: int, seed: int) -> None:
    places = [sorted(set(sites)).index(site) for site in sites]
    draw = np.random.default_rng(seed)
    net = network(places, speeds=draw.uniform(0.1, 10, len(sites)).tolist(), between=(0.1, 1e-6))
    order: Floats = draw.permutation(len(sites))[: 1 + int(draw.integers(len(sites)))]
    cuts = sorted(draw.choice(np.arange(1, 6), size=len(order) - 1, replace=False).tolist())
    ends = [0, *cuts, 6]
    layout = Layout("test", tuple(Stage(ends[i], ends[i + 1], (int(order[i]),)) for i in range(len(order))))
    least = bound_s(CHAIN, net, Terms(micro_batches), strict=True)
    assert math.isfinite(least)
    assert least <= step_estimate(CHAIN, net, layout, micro_batches) * (1 + 1e-9)
