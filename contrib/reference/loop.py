"""A training loop as anybody would write it in PyTorch: autograd on the original module, torch.optim, one process.

It shares no code with the executor: gradients accumulate in `.grad`, the norm is clipped by `clip_grad_norm_`, the optimiser
is torch's. So a distributed run that gives the same losses has cut, sent, summed, clipped and updated correctly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from fusion_p2p.config import TrainConfig


class MicroBatches(Protocol):
    """Where the examples come from: a pure function of (step, index), steps from 1, indices from 0."""

    def micro_batch(self, step: int, index: int) -> Mapping[str, Tensor]: ...


@dataclass
class Curve:
    """What a run did: the mean loss of each step's micro-batches, and when each step ended, in seconds from the start."""

    losses: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)


def reference_run(module: nn.Module, data: MicroBatches, config: TrainConfig, *, steps: int, reverse: bool = False) -> Curve:
    """Train `module` in place for `steps` optimiser steps.

    reverse: take the micro-batches of every step in the opposite order. Mathematically the same run; how far its losses
    drift is what float32 itself is worth.
    """
    module.train()
    optimiser = optimiser_of(module, config)
    curve, start = Curve(), time.perf_counter()
    for step in range(1, steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(config, step)
        order = range(config.micro_batches)
        curve.losses.append(_accumulate(module, data, step, list(reversed(order)) if reverse else list(order)))
        if config.clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), config.clip)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        curve.ended_s.append(time.perf_counter() - start)
    return curve


def _accumulate(module: nn.Module, data: MicroBatches, step: int, order: list[int]) -> float:
    """Forward and backward of every micro-batch; the mean of their losses."""
    losses: list[float] = []
    for index in order:
        loss = module(**data.micro_batch(step, index))
        (loss / len(order)).backward()
        losses.append(loss.item())
    return math.fsum(losses) / len(losses)


def optimiser_of(module: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """torch's own optimiser of that name, one tensor at a time so that no fused kernel reorders sums."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if config.optimiser == "sgd":
        return torch.optim.SGD(
            parameters, config.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay, foreach=False
        )
    kind = torch.optim.Adam if config.optimiser == "adam" else torch.optim.AdamW
    return kind(
        parameters,
        config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        foreach=False,
    )


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up to the highest rate, then constant, or a line or half a cosine that reaches zero after the last step."""
    if step <= config.warmup:
        return config.learning_rate * step / config.warmup
    progress = (step - config.warmup - 1) / max(1, config.steps - config.warmup)
    if config.schedule == "linear":
        return config.learning_rate * (1 - progress)
    if config.schedule == "cosine":
        return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate
