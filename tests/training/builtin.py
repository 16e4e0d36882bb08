"""Small models of the built-in families: the graph as captured from the meta device, and the module itself as an oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusion_p2p.graph.capture import capture
from fusion_p2p.graph.initial import initialise
from fusion_p2p.graph.schema import Graph
from fusion_p2p.models.catalogue import build
from tests.training.local_run import SGD

VOCABULARY = 37
GPT2 = {"layers": 3, "width": 24, "heads": 3, "context": 12, "vocabulary": VOCABULARY, "dropout": 0.0, "tied": False}
RESNET = {"blocks": (1, 2), "width": 8, "classes": 10, "channels": 1, "stem": "small"}


@dataclass(frozen=True)
class Example:
    """`module` has the parameters that the graph's rules give for the seed of `settings`; batches by seed."""

    graph: Graph
    module: nn.Module
    batch_of: Callable[[int], dict[str, Tensor]]

    def batches(self, count: int, step: int = 1) -> list[dict[str, Tensor]]:
        return [self.batch_of(1000 * step + number) for number in range(count)]


def text(seed: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def digits(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8, generator=generator)
    return {"images": images, "labels": torch.randint(0, 10, (4,), generator=generator)}


def example(family: str, seed: int = SGD.seed, **options: Any) -> Example:
    """`gpt2` or `resnet`, in training mode."""
    defaults: Mapping[str, Any] = GPT2 if family == "gpt2" else RESNET
    batch_of = text if family == "gpt2" else digits
    shape = {**defaults, **options}
    on_meta = build(family, shape)
    graph = capture(on_meta.module, batch_of(0), on_meta.rules).graph
    module = build(family, shape, device="cpu").module
    initialise(module, on_meta.rules, seed)
    return Example(graph, module, batch_of)
