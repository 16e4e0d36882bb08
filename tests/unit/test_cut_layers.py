"""Cut layers: what is inserted into a graph, where, and what the owner's settings ask for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from fusion_p2p.config import TRACELESS_RATIO, TrainConfig
from fusion_p2p.errors import ConfigError, GraphError
from fusion_p2p.graph.check import check
from fusion_p2p.graph.cut_layers import CutLayers, cut_values, insert, narrow_places
from fusion_p2p.graph.encoding import decode_graph, encode_graph
from fusion_p2p.graph.initial import initial_projections
from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import cut
from fusion_p2p.owner.narrowing import narrowed, sparse_ratio
from fusion_p2p.plan.chain import legal_boundaries
from tests.swarm_in_memory import run_config
from tests.training import builtin

LAYERS = [CutLayers(embedding=True), CutLayers(rank=4), CutLayers(True, 4), CutLayers(keep=3), CutLayers(True, 8, 3)]


@cache
def text() -> Graph:
    return builtin.example("gpt2").graph


def config(**settings: Any) -> TrainConfig:
    return run_config(None, **settings)


def blocks(graph: Graph) -> list[int]:
    """The values that leave the first two blocks."""
    module = {node.first: node.module for node in graph.nodes}
    return [max(value for value in cut_values(graph) if module[value] == f"h.{block}") for block in range(2)]


def test_through_cut_values_goes_everything():
    graph = text()
    for value in cut_values(graph):
        slice_of = [int(node.first > value) for node in graph.nodes]
        crossing = [edge.value for edge in cut(graph, slice_of).edges if graph.types[edge.value].grad]
        assert crossing == [value]
    inside = {node.first for node in graph.nodes if node.op == "scaled_dot_product_attention"}
    assert inside.isdisjoint(cut_values(graph))


@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_a_graph_with_cut_layers_is_sound_and_travels(layers: CutLayers):
    made = insert(text(), blocks(text()), layers)
    check(made.graph)
    assert decode_graph(encode_graph(made.graph)) == made.graph


@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_plans_cut_it_only_where_it_is_narrow_and_only_that_crosses(layers: CutLayers):
    made = insert(text(), blocks(text()), layers)
    graph, boundaries = made.graph, legal_boundaries(made.graph)
    assert len(boundaries) == len(narrow_places(graph)) == 2
    parts = cut(graph, [sum(index >= boundary for boundary in boundaries) for index in range(len(graph.nodes))])
    assert tuple(edge.value for edge in parts.edges if graph.types[edge.value].grad) == made.borders
    width = graph.types[made.borders[0]].shape[-1]
    assert width == (layers.rank or builtin.GPT2["width"])


def test_names_and_first_values():
    made = insert(text(), blocks(text()), CutLayers(True, 4))
    names = [parameter.name for parameter in made.graph.parameters if parameter.name.startswith("cut.")]
    parts = ("project", "expand", "tokens", "positions")
    assert names == [f"cut.{number}.{part}.weight" for number in range(2) for part in parts]
    first, second = (initial_projections(made.projections, seed=1) for _ in range(2))
    project, expand = first["cut.0.project.weight"], first["cut.0.expand.weight"]
    torch.testing.assert_close(project @ expand, torch.eye(4))
    assert torch.equal(project, expand.T)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(project, first["cut.1.project.weight"])


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (CutLayers(rank=builtin.GPT2["width"]), "narrower"),
        (CutLayers(keep=builtin.GPT2["width"]), "narrower"),
        (CutLayers(rank=4, keep=4), "narrower"),
    ],
    ids=["bottleneck", "mask", "mask in bottleneck"],
)
def test_layers_that_narrow_nothing_are_refused(layers: CutLayers, message: str):
    with pytest.raises(GraphError, match=message):
        insert(text(), blocks(text()), layers)


def test_places_where_more_than_one_value_crosses_are_refused():
    inside = next(node.first for node in text().nodes if node.op == "scaled_dot_product_attention")
    with pytest.raises(GraphError, match=f"value {inside}"):
        insert(text(), [inside], CutLayers(rank=4))


def test_cut_layers_are_inserted_once():
    made = insert(text(), blocks(text()), CutLayers(rank=4))
    again = [value for value in cut_values(made.graph) if len(made.graph.types[value].shape) == 3]
    with pytest.raises(GraphError, match="inserted before"):
        insert(made.graph, again[-1:], CutLayers(rank=4))


def test_images_have_no_tokens():
    graph = builtin.example("resnet").graph
    with pytest.raises(GraphError, match="tokens"):
        insert(graph, cut_values(graph)[:1], CutLayers(embedding=True))
    with pytest.raises(ConfigError, match="fewer than the 1 cuts"):
        narrowed(graph, config(bottleneck=2), 1)


def test_the_owner_places_them_at_equal_cuts_and_says_so():
    made = narrowed(text(), config(bottleneck=4, cut_embedding=True), 2)
    assert "2 cuts" in made.said
    assert "24 numbers to 4" in made.said
    assert set(made.weights) == {f"cut.{number}.{part}.weight" for number in range(2) for part in ("project", "expand")}
    assert set(made.weights) < set(made.parameters)
    assert "after h.0, h.1: " in made.said
    plain = narrowed(text(), config(), None)
    assert plain.graph is text()
    assert not plain.said


def test_the_mask_that_is_kept_is_no_wider_than_what_the_codec_sends():
    made = narrowed(text(), config(keep_sparsifier=True, codec="topk:5"), 1)
    assert f"the {24 // 5} largest of each place's 24" in made.said
    assert sparse_ratio(config(keep_sparsifier=True, codec="adaptive")) == 5
    assert sparse_ratio(config(keep_sparsifier=True, codec="adaptive", ratio=30.0)) == 10


@pytest.mark.parametrize("codec", ["none", "int8", "uniform", "adatopk"])
def test_codecs_without_a_mask_have_none_to_keep(codec: str):
    with pytest.raises(ConfigError, match="mask"):
        narrowed(text(), config(keep_sparsifier=True, codec=codec), 1)


def test_how_many_cuts_has_to_be_known():
    with pytest.raises(ConfigError, match="--cuts"):
        narrowed(text(), config(bottleneck=4), None)
    assert config(peers=5).num_cuts == 4
    assert config(peers=5, cuts=2).num_cuts == 2


def test_the_finish_is_the_last_share_of_the_steps_without_topk():
    chosen = replace(config(codec="topk:10"), steps=600, finish=0.25)
    assert chosen.finish_after == 450
    assert config(codec="adaptive", finish=0.25).most_ratio > TRACELESS_RATIO
    assert config().finish_after == config().steps
