"""One micro-batch for capturing a built-in model when there is no data yet: right shapes and types, on the meta device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fusion_p2p.config import PlanConfig
from fusion_p2p.errors import ConfigError
from fusion_p2p.models.gpt2 import GPT2
from fusion_p2p.models.resnet import ResNet

LARGE_IMAGE, SMALL_IMAGE = 224, 32
"""Pixels of a side, for the stem that reduces images and the one that does not."""


def synthetic_example(config: PlanConfig, module: nn.Module) -> dict[str, Tensor]:
    """Inputs of the forward of a built-in model. ConfigError for a model that only its owner knows the inputs of."""
    batch = config.micro_batch_size
    if isinstance(module, GPT2):
        shape = (batch, module.shape.context)
        return {name: torch.zeros(shape, dtype=torch.int64, device="meta") for name in ("tokens", "targets")}
    if isinstance(module, ResNet):
        first = module.stem[0]
        reduces = any(isinstance(layer, nn.MaxPool2d) for layer in module.stem)
        side = config.image or (LARGE_IMAGE if reduces else SMALL_IMAGE)
        images = torch.zeros((batch, int(first.in_channels), side, side), dtype=torch.uint8, device="meta")  # type: ignore[arg-type]
        return {"images": images, "labels": torch.zeros(batch, dtype=torch.int64, device="meta")}
    raise ConfigError(f"model {config.model} is not built in: give its --data, so that the shapes of its inputs are known")
