"""Models at the level of papers: lists of operators with FLOPs and fp32 bytes for one micro-batch, without capturing anything.

GPT-2 has ten operators a block, its residual additions among them, and an untied output projection (usual in pipelines). ResNet
has convolution + normalisation, rectifier and addition as operators. Sizes follow from the shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from fusion_p2p.plan.chain import Chain, Operator, chain_of_operators

FP32 = 4
VOCABULARY = 50257


class OperatorList:
    """Collects operators in topological order; every method returns the number of the one it added."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []

    def add(
        self,
        name: str,
        flops: float,
        output_bytes: float,
        *predecessors: int,
        parameters: float = 0,
        saved_bytes: float | None = None,
    ) -> int:
        """An operator of so many FLOPs forward; it keeps its output for the backward pass unless told otherwise."""
        kept = output_bytes if saved_bytes is None else saved_bytes
        self.operators.append(Operator(name, flops, output_bytes, predecessors, parameters * FP32, kept))
        return len(self.operators) - 1


def gpt2(layers: int, width: int, heads: int, *, batch: int, context: int = 1024) -> Chain:
    """A GPT-2 on `batch` sequences."""
    model = OperatorList()
    tokens = batch * context
    size = tokens * width * FP32
    hidden = model.add("embed", 2 * tokens * width, size, parameters=(VOCABULARY + context) * width)
    for layer in range(layers):
        hidden = _gpt2_block(model, f"{layer}", hidden, (batch, context, width, heads))
    last = model.add("norm", 8 * tokens * width, size, hidden, parameters=2 * width)
    logits = tokens * VOCABULARY
    head = model.add("head", 2 * logits * width, logits * FP32, last, parameters=VOCABULARY * width)
    model.add("loss", 5 * logits, FP32, head)
    return chain_of_operators(f"gpt2-{layers}x{width}", model.operators)


def _gpt2_block(model: OperatorList, name: str, hidden: int, shape: tuple[int, int, int, int]) -> int:
    batch, context, width, heads = shape
    tokens, square = batch * context, width * width
    size = tokens * width * FP32
    scores = 2 * batch * heads * context * context * FP32
    norm = model.add(f"{name}.norm1", 8 * tokens * width, size, hidden, parameters=2 * width)
    qkv = model.add(f"{name}.qkv", 6 * tokens * square, 3 * size, norm, parameters=3 * square)
    mixed = model.add(f"{name}.attention", 4 * batch * context * context * width, size, qkv, saved_bytes=size + scores)
    projected = model.add(f"{name}.projection", 2 * tokens * square, size, mixed, parameters=square)
    middle = model.add(f"{name}.add1", tokens * width, size, hidden, projected)
    norm = model.add(f"{name}.norm2", 8 * tokens * width, size, middle, parameters=2 * width)
    wide = model.add(f"{name}.up", 8 * tokens * square, 4 * size, norm, parameters=4 * square)
    active = model.add(f"{name}.gelu", 32 * tokens * width, 4 * size, wide)
    narrow = model.add(f"{name}.down", 8 * tokens * square, size, active, parameters=4 * square)
    return model.add(f"{name}.add2", tokens * width, size, middle, narrow)


def resnet101(*, batch: int = 32, image: int = 224, classes: int = 1000) -> Chain:
    """A ResNet-101 on `batch` images of `image` pixels a side."""
    model = OperatorList()
    images = model.add("input", 0, batch * 3 * image * image * FP32)
    stem = _convolution(model, "stem", images, (3, 64, 7, image // 2), batch)
    hidden, side = _rectifier(model, "stem.relu", stem), image // 4
    hidden = model.add("pool", batch * 64 * side * side * 9, batch * 64 * side * side * FP32, hidden)
    channels = 64
    for stage, count in enumerate((3, 4, 23, 3)):
        for index in range(count):
            width, stride = 64 << stage, 2 if stage > 0 and index == 0 else 1
            hidden = _bottleneck(model, f"{stage}.{index}", hidden, (channels, width, side, stride), batch)
            channels, side = 4 * width, side // stride
    pooled = model.add("mean", batch * channels * side * side, batch * channels * FP32, hidden)
    scores = model.add("head", 2 * batch * channels * classes, batch * classes * FP32, pooled, parameters=channels * classes)
    model.add("loss", 5 * batch * classes, FP32, scores)
    return chain_of_operators("resnet101", model.operators)


def _bottleneck(model: OperatorList, name: str, source: int, shape: tuple[int, int, int, int], batch: int) -> int:
    channels, width, side, stride = shape
    outputs, after = 4 * width, side // stride
    first = _convolution(model, f"{name}.conv1", source, (channels, width, 1, side), batch)
    middle = _convolution(model, f"{name}.conv2", _rectifier(model, f"{name}.relu1", first), (width, width, 3, after), batch)
    last = _convolution(model, f"{name}.conv3", _rectifier(model, f"{name}.relu2", middle), (width, outputs, 1, after), batch)
    shortcut = source
    if channels != outputs or stride != 1:
        shortcut = _convolution(model, f"{name}.shortcut", source, (channels, outputs, 1, after), batch)
    elements = batch * outputs * after * after
    total = model.add(f"{name}.add", elements, elements * FP32, shortcut, last)
    return _rectifier(model, f"{name}.relu3", total)


def _convolution(model: OperatorList, name: str, source: int, shape: tuple[int, int, int, int], batch: int) -> int:
    """A convolution and its normalisation; shape: channels in and out, kernel, side of the output."""
    inputs, outputs, kernel, side = shape
    elements = batch * outputs * side * side
    weights = inputs * outputs * kernel * kernel
    convolved = model.add(name, 2 * elements * inputs * kernel * kernel, elements * FP32, source, parameters=weights)
    return model.add(f"{name}.norm", 4 * elements, elements * FP32, convolved, parameters=4 * outputs)


def _rectifier(model: OperatorList, name: str, source: int) -> int:
    num_bytes = model.operators[source].output_bytes
    return model.add(name, num_bytes / FP32, num_bytes, source)


def random_operators(count: int, *, seed: int = 0, skips: float = 0.2) -> Chain:
    """A model of so many operators with random costs, of which some read a value made a few operators earlier."""
    random = np.random.default_rng(seed)
    model = OperatorList()
    for index in range(count):
        read = [index - 1] if index else []
        if index > 3 and random.random() < skips:
            read.append(index - 1 - int(random.integers(1, 4)))
        flops, output_bytes = random.lognormal(0, 1) * 2e12 / count, random.lognormal(0, 0.5) * 4e6
        model.add(f"{index}", flops, output_bytes, *read, parameters=250e6 / count, saved_bytes=2e9 / count)
    return chain_of_operators(f"random-{count}", model.operators)


MODELS: Mapping[str, Callable[[], Chain]] = {
    "gpt2-xl": lambda: gpt2(48, 1600, 25, batch=1),
    "gpt2-medium": lambda: gpt2(24, 1024, 16, batch=2),
    "resnet101": lambda: resnet101(batch=32, image=224),
}
"""What planners are compared on, each with its micro-batch: 1 and 2 sequences of 1024 tokens, 32 images of 224 pixels."""
