"""A plan in figures, words and pictures."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fusion_p2p.graph.cut_layers import State
from fusion_p2p.graph.slices import cut
from fusion_p2p.graph.workload import workload
from fusion_p2p.ids import Digest, PeerId
from fusion_p2p.plan.advice import in_a_run
from fusion_p2p.plan.charts import draw
from fusion_p2p.plan.explain import explain, in_words, seconds, short_peer, size
from fusion_p2p.plan.forecast import Limit, forecast
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.pipeline import OWNER_STAGE
from fusion_p2p.plan.pipelines import pipeline_of_plan
from fusion_p2p.plan.plan import EdgePlan, Plan, SlicePlan
from fusion_p2p.plan.simulate import simulate
from fusion_p2p.wire.job_messages import OptimiserSettings
from tests.training.builtin import example
from tests.unit.chain_graphs import BATCH, WIDTH, chain, chain_costs

SGD = OptimiserSettings(name="sgd")
DENSE = BATCH * WIDTH * 4
GRAPH = chain(4)
SLICE_OF = (0, 0, 1, 1, 1)
PLAN = Plan(
    graph=Digest("ab" * 32),
    scheduler="by-hand",
    micro_batches=4,
    slice_of=SLICE_OF,
    slices=(SlicePlan(PeerId("A/0/gpu"), 4), SlicePlan(PeerId("B/0/gpu"), 2, replicas=(PeerId("B/1/gpu"),), deal=(0, 1))),
    edges=(EdgePlan(cut(GRAPH, SLICE_OF).edges[0].value, 0, 1),),
    idle=((PeerId("C/0/gpu"), "too slow"), (PeerId("C/1/gpu"), "too slow"), (PeerId("C/2/gpu"), "too far")),
    predicted_step_s=3.0,
)


def network(*, owner: bool = False, slow: float = 1e-4) -> Network:
    """A in one site, B/0 and B/1 in another, with links of `slow` seconds per byte between them; the owner is with A."""
    sites = np.array([0, 1, 1, 0][: 3 + owner])
    count = len(sites)
    beta = np.where(sites[:, None] == sites[None, :], 1e-9, slow)
    np.fill_diagonal(beta, 0.0)
    return Network(
        peers=(PeerId("A/0/gpu"), PeerId("B/0/gpu"), PeerId("B/1/gpu")),
        flops_per_s=np.full((3, 3), 10.0),
        memory_bytes_per_s=np.full(3, np.inf),
        free_bytes=np.full(3, 1e9),
        sites=sites,
        alpha_s=np.where(sites[:, None] == sites[None, :], 0.0, 0.5) * np.ones((count, count)),
        beta_s=beta,
        uplink_s=np.zeros(2),
        downlink_s=np.zeros(2),
        has_owner=owner,
    )


def made(plan: Plan = PLAN, world: Network | None = None):
    return forecast(plan, GRAPH, cut(GRAPH, plan.slice_of), chain_costs(GRAPH), SGD, world)


def test_figures_without_a_network_are_bytes_and_shares():
    figures = made()
    assert figures.step_s == 3.0
    assert [part.flops_share for part in figures.slices] == pytest.approx([0.5, 0.5])
    assert (figures.edges[0].forward_bytes, figures.edges[0].backward_bytes) == (DENSE, DENSE)
    assert figures.edges[0].forward_s is None
    assert figures.limit is None
    assert figures.slices[0].busy == ()


def test_figures_with_a_network_say_how_long_and_how_busy():
    world = network()
    figures = made(world=world)
    assert figures.edges[0].forward_s == pytest.approx(0.5 + DENSE * 1e-4)
    timeline = simulate(pipeline_of_plan(GRAPH, cut(GRAPH, PLAN.slice_of), chain_costs(GRAPH), PLAN, world))
    assert figures.step_s == timeline.step_s
    assert figures.slices[1].busy == pytest.approx([busy / timeline.step_s for busy in timeline.busy_s[1]])


def test_the_bottleneck_is_the_busiest_device_or_link():
    quick = in_words(made(world=network()), network())
    assert any(line.startswith("bottleneck: the device of A/0/gpu (slice 0), busy") for line in quick)
    slow = network(slow=1.0)
    figures = made(world=slow)
    assert figures.limit is not None
    assert 0.5 < figures.limit.busy <= 1.0
    assert any(line.startswith("bottleneck: the link ") and "B/" in line for line in in_words(figures, slow))


def test_a_limited_uplink_of_a_site_can_be_the_bottleneck():
    """Two peers of B send gradients back, each over a link of its own, both over one uplink."""
    free = network(slow=1.0)
    shared = replace(free, uplink_s=np.array([0.0, 1.0]))
    figures = made(world=shared)
    assert figures.limit is not None
    assert (figures.limit.way, figures.limit.source) == ("up", 1)
    pairs = simulate(pipeline_of_plan(GRAPH, cut(GRAPH, PLAN.slice_of), chain_costs(GRAPH), PLAN, shared)).link_busy_s
    assert figures.limit.busy > 1.5 * max(pairs[1, 0], pairs[2, 0]) / figures.step_s
    assert any(line.startswith("bottleneck: the uplink of site B, busy ") for line in in_words(figures, shared))


def test_gradients_of_tied_parameters_are_named_where_they_limit():
    graph = example("gpt2", tied=True, vocabulary=512).graph
    half = tuple(int(index >= len(graph.nodes) // 2) for index in range(len(graph.nodes)))
    parts = cut(graph, half)
    edges = tuple(EdgePlan(edge.value, edge.source, edge.target) for edge in parts.edges)
    plan = replace(PLAN, slice_of=half, slices=(PLAN.slices[0], SlicePlan(PeerId("B/0/gpu"), 2)), edges=edges, micro_batches=1)
    costs = workload(graph)
    world = replace(network(slow=1e-5), flops_per_s=np.full((3, 3), 1e12))
    figures = forecast(plan, graph, parts, costs, SGD, world)
    (tied,) = figures.tied
    assert (tied.name, tied.holders) == ("wte.weight", (0, 1))
    assert tied.exchange_s == pytest.approx(2 * (0.5 + 1e-5 * tied.num_bytes))
    assert figures.limit is not None
    assert 0 < figures.limit.shared <= figures.limit.busy
    text = "\n".join(in_words(figures, world))
    assert "s there and back" in text
    assert "with gradients of shared parameters" in text
    assert "advice" not in text


def test_a_device_with_two_slices_is_as_busy_as_both_ask():
    alone = replace(PLAN, slices=(SlicePlan(PeerId("A/0/gpu"), 4), SlicePlan(PeerId("A/0/gpu"), 2)))
    figures = made(alone, network())
    assert figures.limit is not None
    assert figures.limit.busy == pytest.approx(sum(part.busy[0] for part in figures.slices))
    assert "device of A/0/gpu (slice 0, 1)" in "\n".join(in_words(figures, network()))


def test_feeds_of_an_owner_in_the_network_are_edges():
    figures = made(world=network(owner=True))
    assert figures.edges[0].source == OWNER_STAGE
    assert any(line.startswith("edge owner -> 0: ") for line in in_words(figures, network(owner=True)))


def test_words_name_members_idle_peers_and_the_bound():
    lines = in_words(replace(made(world=network()), bound_s=1.0), network())
    text = "\n".join(lines)
    assert "slice 1 on B/0/gpu + B/1/gpu: " in text
    assert "idle C/0/gpu, C/1/gpu: too slow" in text
    assert "idle C/2/gpu: too far" in text
    assert "bound: a chain of single peers takes at least 1.00 s" in text
    assert "traded" not in text


def test_a_bound_that_replicas_beat_is_not_called_one():
    figures = made(world=network())
    assert not any(line.startswith("bound") for line in in_words(replace(figures, bound_s=1.01 * figures.step_s), network()))


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        ("int8", "the trained model is a plain one"),
        ("topk:4", "worse than it looks"),
        ("topk-independent:8", "train badly"),
    ],
)
def test_what_a_lossy_codec_trades_is_one_sentence(codec: str, words: str):
    plan = replace(PLAN, edges=(replace(PLAN.edges[0], codec=codec),))
    lines = explain(plan, GRAPH, cut(GRAPH, plan.slice_of), chain_costs(GRAPH), SGD)
    traded = [line for line in lines if line.startswith("traded: ")]
    assert len(traded) == 1
    assert words in traded[0]
    assert "1 of 1 edges" in traded[0]
    assert any("x smaller" in line for line in lines)


def test_a_mask_that_is_part_of_the_model_is_not_called_a_loss():
    plan = replace(PLAN, edges=(replace(PLAN.edges[0], codec="topk:4"),))
    lines = in_words(replace(made(plan), cut_layers="masks"))
    assert any(line.startswith("traded: ") and "the masks are part of it" in line for line in lines)


@pytest.mark.parametrize(
    ("target", "busy", "state", "advised"),
    [
        (1, 0.95, "possible", True),
        (1, 0.5, "possible", False),
        (0, 0.95, "possible", False),
        (1, 0.95, "impossible", False),
        (1, 0.95, "inserted", False),
    ],
    ids=["busy link", "idle link", "device", "no places", "has them"],
)
def test_cut_layers_are_advised_where_a_link_limits(target: int, busy: float, state: State, advised: bool):
    limit = Limit("pair" if target else "device", 0, target, busy)
    lines = in_words(replace(made(), limit=limit, cut_layers=state))
    assert any("--bottleneck RANK" in line for line in lines) == advised


@pytest.mark.parametrize(
    ("busy", "micro_batches", "num_slices", "advised"),
    [
        ((0.1, 0.2), 8, 2, True),
        ((0.1, 0.9), 8, 2, False),
        ((0.3, 0.3), 1, 2, False),
        ((0.1,), 8, 1, False),
        ((), 8, 2, False),
    ],
    ids=["they wait", "one is busy", "they take turns", "one slice", "no reports"],
)
def test_an_owner_is_told_when_its_peers_wait_for_the_network(
    busy: tuple[float, ...], micro_batches: int, num_slices: int, advised: bool
):
    plan = replace(PLAN, slices=PLAN.slices[:num_slices], micro_batches=micro_batches)
    told = in_a_run(example("gpt2").graph, plan, busy)
    assert (told is not None) == advised
    assert told is None or ("busiest peer computes 20% of the time" in told and "changes the model" in told)
    assert in_a_run(GRAPH, plan, busy) is None, "this model has no places for cut layers"


def test_a_codec_that_does_not_apply_trades_nothing():
    plan = replace(PLAN, edges=(replace(PLAN.edges[0], codec="topk:1:fp32"),))
    assert not any(
        line.startswith("traded") for line in explain(plan, GRAPH, cut(GRAPH, plan.slice_of), chain_costs(GRAPH), SGD)
    )


def test_one_is_not_many():
    alone = replace(PLAN, slice_of=(0,) * 5, slices=(SlicePlan(PeerId("A/0/gpu"), 1),), edges=(), micro_batches=1)
    assert in_words(made(alone))[0].startswith("by-hand: 1 slice on 1 peer, 1 micro-batch (1f1b), ")


def test_numbers_for_people():
    assert [seconds(value) for value in (123.4, 1.234, 0.0456)] == ["123 s", "1.23 s", "45.6 ms"]
    assert [size(value) for value in (2.5e9, 6.55e6, 1234, 99)] == ["2.5 GB", "6.55 MB", "1.23 kB", "99 bytes"]
    assert short_peer(PeerId("12D3KooWGBfGbUe8kHzUJ7bUG1oFyTzUPQHzjxLzWcEDKhHrYh5P")) == "KhHrYh5P"
    assert short_peer(PeerId("A/0/gpu")) == "A/0/gpu"


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_pictures_are_drawn(tmp_path: Path, ending: str):
    world = network(owner=True, slow=1e-2)
    pipeline = pipeline_of_plan(GRAPH, cut(GRAPH, PLAN.slice_of), chain_costs(GRAPH), PLAN, world)
    path = tmp_path / f"plan.{ending}"
    draw(made(world=world), pipeline, simulate(pipeline, trace=True), path)
    data = path.read_bytes()
    if ending == "png":
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", data[16:24])
        assert width > 1000 < height * 4
    else:
        assert b"<svg" in data
        assert data.count(b"<g id=") > 10
