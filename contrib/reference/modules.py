"""The module of a run with the first values that a peer-to-peer run begins with, as a plain PyTorch module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fusion_p2p.config import TrainConfig, resolve
from fusion_p2p.graph.initial import initial_value
from fusion_p2p.graph.schema import Rule, TensorType
from fusion_p2p.owner.data import DataSet, open_data
from fusion_p2p.owner.model_source import resolve_model


def reference_of(config: TrainConfig) -> tuple[nn.Module, DataSet]:
    """Module (on the CPU, initialised) and data set of a run's configuration."""
    data = open_data(config)
    source = resolve_model(config, data)
    materialise(source.module, source.rules, config.seed)
    return source.module, data


def config_of_run(run: Path) -> TrainConfig:
    """The configuration that a run folder holds."""
    return resolve(TrainConfig, {}, {}, [run / "config.toml"])


def materialise(module: nn.Module, rules: Mapping[str, Rule], seed: int) -> None:
    """Give every parameter and buffer with a rule its first value, in place; tied parameters stay tied.

    A module of a built-in family lives on torch's meta device until then: it has shapes, but no memory.
    """
    made: dict[int, Tensor] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in rules:
            type = TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad)
            value = initial_value(rules[name], name, type, seed)
            made[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    for part in module.modules():
        own = [*part.named_parameters(recurse=False, remove_duplicate=False), *part.named_buffers(recurse=False)]
        for name, tensor in own:
            if id(tensor) in made:
                setattr(part, name, made[id(tensor)])
    left = [name for name, tensor in module.state_dict().items() if tensor.device.type == "meta"]
    if left:
        raise ValueError(f"no rule for {left[0]} of a module on the meta device")


def relative_difference(first: list[float], second: list[float]) -> float:
    """The largest |a - b| / |b| over the steps of two loss curves of the same length."""
    a, b = torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64)
    return float(((a - b).abs() / b.abs()).max())
