"""Images: scikit-learn's handwritten digits, 1,797 of 8 x 8 pixels, the only ones that need no download."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusion_p2p.errors import ConfigError
from fusion_p2p.owner.data import Batching, ExampleData

NUM_CLASSES = 10
BRIGHTEST = 16.0
"""The digits' brightest pixel; it becomes 255."""


class DigitData(ExampleData):
    """`images` uint8 [batch, 1, 8, 8] (bytes on the wire; models scale them) and `labels` int64 [batch]."""

    def __init__(self, images: Tensor, labels: Tensor, batching: Batching) -> None:
        super().__init__(
            [{"images": image, "labels": label} for image, label in zip(images, labels, strict=True)], batching, "images"
        )
        self.model_defaults: Mapping[str, Any] = {"classes": NUM_CLASSES, "channels": 1, "stem": "small"}


def digits(micro_batch_size: int, micro_batches: int, seed: int) -> DigitData:
    """The digits. ConfigError when scikit-learn is not installed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError("data digits needs scikit-learn: pip install 'fusion-p2p[digits]'") from None
    bunch = load_digits()
    pixels = np.rint(bunch.images * (255.0 / BRIGHTEST)).astype(np.uint8)
    images = torch.from_numpy(pixels).unsqueeze(1)
    return DigitData(images, torch.from_numpy(bunch.target.astype(np.int64)), Batching(micro_batch_size, micro_batches, seed))
