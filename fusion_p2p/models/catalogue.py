"""The built-in models by name. They are built on the meta device: nobody, not even the owner, holds all their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from fusion_p2p.errors import ConfigError
from fusion_p2p.graph.schema import Rule
from fusion_p2p.models import gpt2, resnet

NAMES: tuple[str, ...] = (*gpt2.SIZES, *resnet.SIZES)

Option = bool | int | float | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Built:
    """A model in training mode, and how each of its parameters and buffers gets its first value."""

    module: nn.Module
    rules: dict[str, Rule]


def build(name: str, options: Mapping[str, object] | None = None, *, device: str = "meta") -> Built:
    """Build a model of the catalogue; `options` replace fields of its shape. ConfigError for unknown names and values.

    On another device than meta its parameters hold torch's own first values: `graph.initial.initialise` gives it the ones
    that peers generate.
    """
    if name in gpt2.SIZES:
        gpt2_shape = _gpt2_shape(name, options or {})
        with torch.device(device):
            transformer = gpt2.GPT2(gpt2_shape)
        return Built(transformer, gpt2.initial_rules(transformer))
    if name in resnet.SIZES:
        resnet_shape = _resnet_shape(name, options or {})
        with torch.device(device):
            network = resnet.ResNet(resnet_shape)
        return Built(network, resnet.initial_rules(network))
    raise ConfigError(f"there is no built-in model {name!r}; choose {', '.join(NAMES)} or give package.module:factory")


def option_names(name: str) -> tuple[str, ...]:
    """The options of a built-in model."""
    shape = gpt2.GPT2Shape if name in gpt2.SIZES else resnet.ResNetShape
    return tuple(field.name for field in fields(shape))


def _gpt2_shape(name: str, options: Mapping[str, object]) -> gpt2.GPT2Shape:
    base = gpt2.SIZES[name]
    shape = replace(base, **_checked(name, base, options))
    if shape.width % shape.heads:
        raise ConfigError(f"model {name}: width {shape.width} is not divisible by {shape.heads} heads")
    if not 0 <= shape.dropout < 1:
        raise ConfigError(f"model {name}: dropout has to be at least 0 and under 1, not {shape.dropout}")
    return shape


def _resnet_shape(name: str, options: Mapping[str, object]) -> resnet.ResNetShape:
    base = resnet.SIZES[name]
    shape = replace(base, **_checked(name, base, options))
    if shape.stem not in resnet.STEMS:
        raise ConfigError(f"model {name}: stem is {' or '.join(resnet.STEMS)}, not {shape.stem!r}")
    return shape


def _checked(name: str, base: gpt2.GPT2Shape | resnet.ResNetShape, options: Mapping[str, object]) -> dict[str, Any]:
    """The options, each of the type of the field it replaces."""
    defaults = {field.name: getattr(base, field.name) for field in fields(base)}
    checked: dict[str, Any] = {}
    for option, value in options.items():
        if option not in defaults:
            raise ConfigError(f"model {name} has no option {option!r}; its options are {', '.join(defaults)}")
        checked[option] = _converted(name, option, defaults[option], value)
    return checked


def _converted(name: str, option: str, default: Option, value: object) -> Option:
    match default:
        case bool():
            if isinstance(value, bool):
                return value
            expected = "true or false"
        case int():
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
            expected = "a whole number above 0"
        case float():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return float(value)
            expected = "a number"
        case str():
            if isinstance(value, str):
                return value
            expected = "a word"
        case tuple():
            items = tuple(value) if isinstance(value, (list, tuple)) else ()
            if items and all(isinstance(item, int) and not isinstance(item, bool) and item > 0 for item in items):
                return items
            expected = "a list of whole numbers above 0"
    raise ConfigError(f"model {name}: option {option} has to be {expected}, not {value!r}")
