"""Where the model comes from: a built-in family, or a factory of the owner's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from fusion_p2p.config import JobConfig
from fusion_p2p.errors import ConfigError
from fusion_p2p.graph.schema import Rule
from fusion_p2p.models.catalogue import NAMES, build, option_names
from fusion_p2p.owner.data import DataSet
from fusion_p2p.owner.factories import call_factory, is_factory


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A module whose forward takes the data set's tensors and returns the loss, and how its parameters begin.

    rules: by state_dict name; a parameter without one begins with the module's own value, which the owner sends.
    """

    module: nn.Module
    rules: Mapping[str, Rule]


def resolve_model(config: JobConfig, data: DataSet) -> ModelSource:
    """The model of a run. ConfigError for an unknown name or option, or a factory that fails or returns something else."""
    if is_factory(config.model):
        made = call_factory(config.model, config.model_options, "model")
        if not isinstance(made, nn.Module):
            raise ConfigError(f"model {config.model} returned a {type(made).__name__}, not a torch.nn.Module")
        return ModelSource(made, {})
    defaults = data.model_defaults if config.model in NAMES else {}
    unfit = sorted(defaults.keys() - option_names(config.model)) if defaults else []
    if unfit:
        raise ConfigError(
            f"data {config.data} gives {data.unit}, which model {config.model} does not take (no {', '.join(unfit)})"
        )
    built = build(config.model, {**defaults, **config.model_options})
    return ModelSource(built.module, built.rules)
