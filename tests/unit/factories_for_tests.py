"""What a model owner might write, right and wrong, named by tests as `tests.unit.factories_for_tests:NAME`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Regression(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 1)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (self.layer(inputs).squeeze(-1) - targets).square().mean()


class Untraceable(nn.Module):
    """Its forward uses an operator that no graph of ours has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return torch.linalg.slogdet(self.weight).logabsdet + inputs.mean() + targets.mean()


def regression(width: int = 4) -> nn.Module:
    return Regression(width)


def untraceable() -> nn.Module:
    return Untraceable()


def not_a_module() -> str:
    return "weights"


def raising() -> nn.Module:
    raise RuntimeError("no weights\nhere")


def points(count: int = 40, width: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"inputs": torch.randn(width, generator=generator), "targets": torch.tensor(float(number))} for number in range(count)
    ]


def ragged() -> list[dict[str, Tensor]]:
    return [{"inputs": torch.zeros(length)} for length in range(1, 41)]


def no_examples() -> list[dict[str, Tensor]]:
    return []


not_callable = 7
