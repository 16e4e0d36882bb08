"""First values of parameters, made where the parameter lives: nobody has to hold or send the whole model.

Drawn with numpy's PCG64 in float64 and then rounded: torch's own normal numbers differ between processors with and without
AVX-512, and two peers may hold the same tied parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from fusion_p2p.errors import GraphError
from fusion_p2p.graph.cut_layers import Projection
from fusion_p2p.graph.opset import TORCH_DTYPES
from fusion_p2p.graph.schema import Rule, TensorType

RULE_KINDS = ("normal", "uniform", "constant")

_CHUNK = 1 << 20
"""Numbers drawn at a time, so that float64 costs 8 MiB and not twice the parameter."""


def initial_value(rule: Rule, name: str, type: TensorType, seed: int) -> Tensor:
    """A CPU tensor that depends on nothing but the arguments: the same on every peer that holds the parameter.

    GraphError for an unknown rule.
    """
    generator = np.random.Generator(np.random.PCG64(_entropy(seed, name)))
    match rule.kind:
        case "constant":
            return torch.full(type.shape, rule.a, dtype=torch.float64).to(TORCH_DTYPES[type.dtype])
        case "normal":
            return _drawn(type, lambda count: rule.a + rule.b * generator.standard_normal(count))
        case "uniform":
            return _drawn(type, lambda count: rule.a + (rule.b - rule.a) * generator.random(count))
    raise GraphError(f"parameter {name!r} has the unknown rule {rule.kind!r}; known are {', '.join(RULE_KINDS)}")


def initial_projections(projections: Iterable[Projection], seed: int) -> dict[str, Tensor]:
    """First values by name: the rows of `project` are orthonormal and random, `expand` is its transpose."""
    weights: dict[str, Tensor] = {}
    for item in projections:
        generator = np.random.Generator(np.random.PCG64(_entropy(seed, item.project)))
        basis = np.linalg.qr(generator.standard_normal((item.width, item.rank)))[0]
        weights[item.project] = torch.from_numpy(basis.T.copy()).float()
        weights[item.expand] = torch.from_numpy(basis.copy()).float()
    return weights


def _drawn(type: TensorType, draw: Callable[[int], np.ndarray]) -> Tensor:
    flat = torch.empty(type.num_elements, dtype=TORCH_DTYPES[type.dtype])
    for start in range(0, type.num_elements, _CHUNK):
        part = flat[start : start + _CHUNK]
        part.copy_(torch.from_numpy(draw(part.numel())))
    return flat.reshape(type.shape)


def _entropy(seed: int, name: str) -> int:
    """From the run's seed and the parameter's name, the same in every Python (unlike `hash`)."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=16, person=b"fusion initial").digest()
    return int.from_bytes(digest, "little")


def initialise(module: nn.Module, rules: Mapping[str, Rule], seed: int) -> None:
    """Give a module in memory, in place, the first values that peers generate: what a single machine would start from."""
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in rules:
                dtype = str(tensor.dtype).removeprefix("torch.")
                tensor.copy_(initial_value(rules[name], name, TensorType(tuple(tensor.shape), dtype, grad=False), seed))
