"""ResNet with bottleneck blocks (He et al. 2015): forward takes images as they are stored and returns the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusion_p2p.graph.schema import Rule

EXPANSION = 4
"""A block's output has this many times the channels of its 3x3 convolution."""


@dataclass(frozen=True, slots=True)
class ResNetShape:
    """Size of a ResNet.

    blocks: blocks per stage; each stage after the first halves the image and doubles the channels, which start at `width`.
    stem: `large` (7x7 convolution and pooling, image / 4) or `small` (one 3x3 convolution, for images under 64 pixels).
    """

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    channels: int = 3
    classes: int = 1000
    stem: str = "large"


SIZES = {
    "resnet50": ResNetShape(),
    "resnet101": ResNetShape(blocks=(3, 4, 23, 3)),
    "resnet152": ResNetShape(blocks=(3, 8, 36, 3)),
    "resnet": ResNetShape(blocks=(1, 1, 1), width=16, channels=1, classes=10, stem="small"),
}
STEMS = ("large", "small")


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut; the 3x3 one carries the stride."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * EXPANSION
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(channels, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = functional.relu(self.bn2(self.conv2(y)))
        return functional.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet(nn.Module):
    """`forward(images, labels)`: images (batch, channels, height, width), uint8 in 0..255 or floats, and class numbers (batch).

    Bytes are scaled to 0..1 here, inside the graph, so that they travel as bytes.
    """

    def __init__(self, shape: ResNetShape) -> None:
        super().__init__()
        self.stem = _stem(shape)
        layers: list[nn.Module] = []
        channels = shape.width
        for stage, count in enumerate(shape.blocks):
            width = shape.width << stage
            for index in range(count):
                layers.append(Bottleneck(channels, width, stride=2 if stage > 0 and index == 0 else 1))
                channels = width * EXPANSION
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(channels, shape.classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        if images.dtype == torch.uint8:
            images = images.to(self.fc.weight.dtype) / 255
        features = self.layers(self.stem(images)).mean((2, 3))
        return functional.cross_entropy(self.fc(features), labels.long())


def _stem(shape: ResNetShape) -> nn.Sequential:
    if shape.stem == "small":
        first = nn.Conv2d(shape.channels, shape.width, 3, 1, 1, bias=False)
        return nn.Sequential(first, nn.BatchNorm2d(shape.width), nn.ReLU())
    first = nn.Conv2d(shape.channels, shape.width, 7, 2, 3, bias=False)
    return nn.Sequential(first, nn.BatchNorm2d(shape.width), nn.ReLU(), nn.MaxPool2d(3, 2, 1))


def initial_rules(model: ResNet) -> dict[str, Rule]:
    """Kaiming initialisation (He et al. 2015) by fan-out, a uniform classifier, BatchNorm as identity."""
    rules: dict[str, Rule] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * math.prod(module.kernel_size)
            rules[f"{path}.weight"] = Rule("normal", 0.0, math.sqrt(2 / fan_out))
        elif isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.in_features)
            rules[f"{path}.weight"] = rules[f"{path}.bias"] = Rule("uniform", -bound, bound)
        elif isinstance(module, nn.BatchNorm2d):
            ones, zeros = ("weight", "running_var"), ("bias", "running_mean", "num_batches_tracked")
            rules |= {f"{path}.{name}": Rule("constant", 1.0) for name in ones}
            rules |= {f"{path}.{name}": Rule("constant", 0.0) for name in zeros}
    return rules
