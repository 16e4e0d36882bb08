"""A model and a data set of your own.

    fusion-peer train --bootstrap ADDRESS \
        --model contrib.examples.two_towers:model --option width=48 \
        --data contrib.examples.two_towers:data --data-option examples=4000 \
        --batch-size 32 --micro-batches 4 --steps 200

`model` returns any `nn.Module` whose forward takes the data set's named tensors and returns the loss. It runs on your machine
only: peers get the captured graph of operators. This one is no chain: two towers read different inputs, meet by a product, and
one of them also feeds the output directly, so that a cut has values that skip a slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class TwoTowers(nn.Module):
    """Predicts a number from a vector of measurements and a category."""

    def __init__(self, features: int, categories: int, width: int) -> None:
        super().__init__()
        self.measured = nn.Sequential(nn.Linear(features, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.named = nn.Sequential(nn.Embedding(categories, width), nn.Linear(width, width), nn.GELU())
        self.joint = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.output = nn.Linear(2 * width, 1)

    def forward(self, measurements: Tensor, category: Tensor, target: Tensor) -> Tensor:
        measured = self.measured(measurements)
        joint = self.joint(measured * self.named(category))
        predicted = self.output(torch.cat([joint, measured], dim=-1)).squeeze(-1)
        return functional.mse_loss(predicted, target)


def model(features: int = 8, categories: int = 5, width: int = 32) -> nn.Module:
    """The factory named by `--model`; its keywords are set by `--option NAME=VALUE`."""
    torch.manual_seed(0)
    return TwoTowers(features, categories, width)


def data(examples: int = 2000, features: int = 8, categories: int = 5) -> Sequence[dict[str, Tensor]]:
    """The factory named by `--data`: a sequence of examples, dicts of the tensors that forward takes, without a batch axis.

    Batches, their order and the held-out tenth are made from it. For full control return an object with the methods of
    `fusion_p2p.owner.data.DataSet` instead.
    """
    generator = torch.Generator().manual_seed(1)
    measurements = torch.randn(examples, features, generator=generator)
    category = torch.randint(categories, (examples,), generator=generator)
    weights = torch.randn(categories, features, generator=generator)
    target = torch.tanh((weights[category] * measurements).sum(-1) / features**0.5)
    return [{"measurements": measurements[row], "category": category[row], "target": target[row]} for row in range(examples)]
