"""The legal graphs from which hostile ones are made: small models, and a graph for each kind of operator."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from fusion_p2p.graph.capture import capture
from fusion_p2p.graph.schema import Graph
from fusion_p2p.models.catalogue import build

MAX_MUTANT_NODES = 40


@dataclass(frozen=True)
class Original:
    """A legal graph, and how often it is taken: most mutants are small, so that many can be tried."""

    graph: Graph
    weight: int


@cache
def originals() -> tuple[Original, ...]:
    """A transformer with dropout, a convolutional network with BatchNorm, and small graphs of all kinds of operators."""
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    options = {"layers": 1, "width": 8, "heads": 2, "context": 4, "vocabulary": 11, "dropout": 0.1}
    transformer = build("gpt2", options)
    network = build("resnet", {"blocks": [1], "width": 2, "classes": 3})
    images = {"images": torch.zeros(2, 1, 4, 4, dtype=torch.uint8), "labels": torch.zeros(2, dtype=torch.int64)}
    large = (
        capture(transformer.module, {"tokens": tokens, "targets": tokens}, transformer.rules).graph,
        capture(network.module, images, network.rules).graph,
    )
    feeds = {"x": torch.ones(4, 6), "ids": torch.zeros(4, dtype=torch.int64)}
    small = [capture(Small(function), feeds).graph for function in _SMALL]
    if max(len(graph.nodes) for graph in (*large, *small)) > MAX_MUTANT_NODES:
        raise ValueError("originals have at most 40 nodes")
    return (*(Original(graph, 1) for graph in large), *(Original(graph, 5) for graph in small))


class Small(torch.nn.Module):
    """The sum of what a function makes of a trainable matrix (4, 6), a buffer (6) and four indices."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.matrix = torch.nn.Parameter(torch.ones(4, 6))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0))
        return self.function(self.matrix * x, self.mean, ids).sum()


def _indexed(y: Tensor, mean: Tensor, ids: Tensor) -> Tensor:
    rows = functional.embedding(ids, y)[ids] - mean
    return rows.gather(1, ids[:, None].clamp(0, 3)) + y.index_select(0, ids).sum()


def _split(y: Tensor, mean: Tensor, ids: Tensor) -> Tensor:
    left, right = y.chunk(2, 1)
    return torch.cat((left, *right.split(2, 1), functional.pad(left, (1, 2))), 1).unbind(0)[1] + y.topk(1, 0).values.sum()


def _compared(y: Tensor, mean: Tensor, ids: Tensor) -> Tensor:
    masked = torch.where(y > mean, y, y.abs()).masked_fill(y < 0, 0.5)
    return masked.to(torch.float16).float() + torch.full((4, 6), 2.0) * (ids == 1)[:, None]


def _reduced(y: Tensor, mean: Tensor, ids: Tensor) -> Tensor:
    best, _ = y.max(1)
    return (
        functional.layer_norm(y.cumsum(0), (6,)).std(1)
        + best
        + functional.cross_entropy(y, ids)
        + functional.mse_loss(y, y * 2)
    )


def _convolved(y: Tensor, mean: Tensor, ids: Tensor) -> Tensor:
    image = y.reshape(1, 2, 3, 4)
    convolved = functional.conv2d(image, y[:2, :4].reshape(1, 2, 2, 2), padding=1)
    up = functional.conv_transpose2d(functional.max_pool2d(convolved, 2), y[:1, :4].reshape(1, 1, 2, 2), stride=2)
    return functional.avg_pool2d(functional.interpolate(up, scale_factor=2), 2)


def _attended(y: Tensor, mean: Tensor, ids: Tensor) -> Tensor:
    heads = y.reshape(1, 2, 3, 4)
    mixed = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1, is_causal=True)
    return functional.linear(functional.dropout(mixed, 0.2), y[:, :4]).permute(3, 0, 1, 2).flatten(1)


_SMALL = (_indexed, _split, _compared, _reduced, _convolved, _attended)


def original(rng: random.Random) -> Graph:
    """One of them, small ones more often."""
    known = originals()
    return rng.choices(known, [original.weight for original in known])[0].graph
