"""From `auto`, `cpu` or `cuda:N` to a device that has really run a forward and backward pass.

A driver may list a card that this torch build has no kernels for; the only proof is to run what training runs.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor
from torch.nn import functional

from fusion_p2p.errors import ConfigError, DeviceUnusable


def choose(name: str) -> torch.device:
    """The device of this name, proved usable; `auto` takes the first CUDA device that is, else the CPU.

    ConfigError for a name that is not `auto`, `cpu` or `cuda:N`; DeviceUnusable when the device fails the proof.
    """
    if name == "auto":
        return _first_usable()
    if name != "cpu" and not re.fullmatch(r"cuda(:\d{1,3})?", name):
        raise ConfigError(f"device {name!r} is not known: use auto, cpu or cuda:N")
    device = torch.device("cuda:0" if name == "cuda" else name)
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise DeviceUnusable(f"{device} does not exist: torch sees {torch.cuda.device_count()} CUDA devices (use --device cpu)")
    prove(device)
    return device


def _first_usable() -> torch.device:
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        try:
            prove(device)
        except DeviceUnusable:
            continue
        return device
    prove(torch.device("cpu"))
    return torch.device("cpu")


def prove(device: torch.device) -> None:
    """Run a small convolution, attention and matrix product forward and backward; DeviceUnusable says what failed."""
    try:
        gradients = _small_pass(device)
        finite = all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    except (RuntimeError, MemoryError) as error:
        reason = str(error).partition("\n")[0]
        raise DeviceUnusable(f"{device} cannot run a forward and backward pass: {reason}") from error
    if not finite:
        raise DeviceUnusable(f"{device} computes non-finite gradients in a small forward and backward pass")


def _small_pass(device: torch.device) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 8, 8), (16, 3, 3, 3), (16, 4))
    leaves = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
    images, kernel, weight = leaves
    tokens = functional.relu(functional.conv2d(images, kernel, padding=1)).flatten(2).transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(tokens, tokens, tokens, is_causal=True)
    scores = functional.layer_norm(mixed, (16,)).mean(1) @ weight
    loss = functional.cross_entropy(scores, torch.tensor([1, 2], device=device))
    return torch.autograd.grad(loss, leaves)
