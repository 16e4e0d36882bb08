"""Where models come from: built-in families shaped by the data, factories, sentences for what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusion_p2p.config import TrainConfig
from fusion_p2p.errors import ConfigError, GraphError
from fusion_p2p.graph.capture import capture
from fusion_p2p.owner.data import open_data
from fusion_p2p.owner.model_source import ModelSource, resolve_model

FACTORIES = "tests.unit.factories_for_tests"
TINY = {"layers": 1, "width": 8, "heads": 2, "context": 8}


def source(**settings: Any) -> ModelSource:
    config = TrainConfig(bootstrap=("x",), **({"batch_size": 4, "micro_batches": 2} | settings))
    return resolve_model(config, open_data(config))


def test_a_built_in_model_takes_its_vocabulary_and_context_from_the_data():
    made = source(**TINY)
    shapes = {name: tuple(tensor.shape) for name, tensor in made.module.state_dict().items()}
    assert (256, 8) in shapes.values()
    assert all(tensor.is_meta for tensor in made.module.state_dict().values())
    assert set(made.rules) >= {name for name, _ in made.module.named_parameters()}


def test_digits_shape_a_resnet():
    made = source(model="resnet", data="digits", width=4)
    assert next(tuple(weight.shape) for weight in made.module.parameters()) == (4, 1, 3, 3)


def test_a_factory_gets_its_options_and_its_module_is_used_as_it_is():
    made = source(model=f"{FACTORIES}:regression", option=("width=3",), data=f"{FACTORIES}:points", data_option=("width=3",))
    assert made.rules == {}
    example = open_data(
        TrainConfig(bootstrap=("x",), batch_size=4, micro_batches=2, data=f"{FACTORIES}:points", data_option=("width=3",))
    ).example()
    captured = capture(made.module, example, made.rules)
    assert torch.equal(captured.weights["layer.weight"], made.module.state_dict()["layer.weight"])


@pytest.mark.row(33)
def test_an_operator_that_cannot_be_captured_is_named():
    settings: dict[str, Any] = {"batch_size": 4, "micro_batches": 2, "data": f"{FACTORIES}:points"}
    made = source(model=f"{FACTORIES}:untraceable", **settings)
    with pytest.raises(GraphError, match="slogdet"):
        capture(made.module, open_data(TrainConfig(bootstrap=("x",), **settings)).example(), made.rules)


@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        ({"model": "gpt9"}, "there is no built-in model 'gpt9'"),
        ({"option": ("colour=red",), **TINY}, "has no option 'colour'"),
        ({**TINY, "heads": 3}, "width 8 is not divisible by 3 heads"),
        ({"data": "digits", **TINY}, "data digits gives images, which model gpt2 does not take"),
        ({"model": "resnet"}, "data stdlib-text gives tokens, which model resnet does not take"),
        ({"model": f"{FACTORIES}:not_a_module"}, "returned a str, not a torch.nn.Module"),
        ({"model": "no.such:thing"}, "there is no module 'no'"),
    ],
)
def test_wrong_models_are_one_sentence(settings: dict[str, Any], fragment: str):
    with pytest.raises(ConfigError) as caught:
        source(**settings)
    assert fragment in str(caught.value)
