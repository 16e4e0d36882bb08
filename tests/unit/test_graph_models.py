"""Built-in models, and the first values of their parameters."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fusion_p2p.errors import ConfigError, GraphError
from fusion_p2p.graph.capture import capture
from fusion_p2p.graph.initial import initial_value, initialise
from fusion_p2p.graph.schema import Rule, TensorType
from fusion_p2p.ids import digest_of
from fusion_p2p.models.catalogue import NAMES, build, option_names

SMALL_GPT2 = {"layers": 2, "width": 32, "heads": 2, "context": 8, "vocabulary": 97, "dropout": 0.0}
TOKENS = {"tokens": torch.arange(16).reshape(2, 8), "targets": torch.arange(16).reshape(2, 8) + 1}


def value(rule: Rule, *shape: int, dtype: str = "float32", name: str = "w", seed: int = 1) -> Tensor:
    return initial_value(rule, name, TensorType(shape, dtype, True), seed)


def test_values_depend_on_seed_and_name_only() -> None:
    rule = Rule("normal", 0.0, 1.0)
    assert torch.equal(value(rule, 5, 7), value(rule, 5, 7))
    assert not torch.equal(value(rule, 5, 7), value(rule, 5, 7, seed=2))
    assert not torch.equal(value(rule, 5, 7), value(rule, 5, 7, name="v"))
    torch.manual_seed(3)
    before = torch.rand(1)
    torch.manual_seed(3)
    value(rule, 5)
    assert torch.equal(torch.rand(1), before)


def test_values_are_the_same_on_every_machine() -> None:
    """Golden: tied copies on two peers have to be equal to the bit."""
    drawn = value(Rule("normal", 0.0, 0.02), 1000, 3)
    assert digest_of(drawn.numpy().tobytes())[:16] == "e64175bfe78f3633"


def test_distributions() -> None:
    normal = value(Rule("normal", 0.5, 0.1), 1 << 21)
    assert normal.mean().item() == pytest.approx(0.5, abs=1e-3)
    assert normal.std().item() == pytest.approx(0.1, rel=1e-2)
    uniform = value(Rule("uniform", -0.25, 0.75), 10_000)
    assert -0.25 <= uniform.min().item() < -0.24
    assert 0.74 < uniform.max().item() <= 0.75
    assert torch.equal(value(Rule("constant", 1.0), 3, dtype="int64"), torch.ones(3, dtype=torch.int64))
    assert value(Rule("normal", 0.0, 1.0), 4, dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(GraphError, match="unknown rule 'zipf'"):
        value(Rule("zipf", 0.0), 3)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_and_buffer_has_a_rule(name: str) -> None:
    built = build(name)
    assert built.module.training
    named = {*dict(built.module.named_parameters()), *dict(built.module.named_buffers())}
    assert set(built.rules) == named
    assert all(tensor.is_meta for tensor in built.module.parameters())


def test_gpt2_starts_near_the_uniform_guess() -> None:
    built = build("gpt2", SMALL_GPT2, device="cpu")
    initialise(built.module, built.rules, seed=5)
    assert built.module(**TOKENS).item() == pytest.approx(math.log(97), rel=0.02)
    residual = built.module.get_parameter("h.0.mlp.c_proj.weight")
    assert residual.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.05)
    assert built.module.get_parameter("lm_head.weight") is built.module.get_parameter("wte.weight")


def test_resnet_starts_near_the_uniform_guess() -> None:
    built = build("resnet", device="cpu")
    initialise(built.module, built.rules, seed=5)
    images = torch.randint(0, 256, (16, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    loss = built.module(images=images, labels=torch.arange(16) % 10).item()
    assert math.log(10) - 0.5 < loss < math.log(10) + 1.5


def test_a_module_in_memory_starts_as_peers_do() -> None:
    in_memory = build("gpt2", SMALL_GPT2, device="cpu")
    initialise(in_memory.module, in_memory.rules, seed=5)
    on_meta = build("gpt2", SMALL_GPT2)
    graph = capture(on_meta.module, TOKENS, on_meta.rules).graph
    state = in_memory.module.state_dict()
    for number, parameter in enumerate(graph.parameters, graph.first_parameter):
        assert parameter.rule is not None
        made = initial_value(parameter.rule, parameter.name, graph.types[number], 5)
        for name in (parameter.name, *parameter.aliases):
            assert torch.equal(made, state[name])


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
    ],
)
def test_published_sizes(name: str, parameters: int) -> None:
    assert sum(parameter.numel() for parameter in build(name).module.parameters()) == parameters


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("gpt3", {}, "choose gpt2, gpt2-medium"),
        ("gpt2", {"depth": 3}, "its options are layers, width"),
        ("gpt2", {"layers": 0}, "layers has to be a whole number above 0, not 0"),
        ("gpt2", {"layers": True}, "layers has to be a whole number"),
        ("gpt2", {"layers": "3"}, "layers has to be a whole number"),
        ("gpt2", {"tied": 1}, "tied has to be true or false"),
        ("gpt2", {"dropout": "0.1"}, "dropout has to be a number"),
        ("gpt2", {"dropout": 1}, "dropout has to be at least 0 and under 1"),
        ("gpt2", {"width": 30, "heads": 4}, "width 30 is not divisible by 4 heads"),
        ("resnet", {"blocks": []}, "blocks has to be a list of whole numbers"),
        ("resnet", {"blocks": 3}, "blocks has to be a list"),
        ("resnet", {"stem": "wide"}, "stem is large or small, not 'wide'"),
        ("resnet", {"stem": 7}, "stem has to be a word"),
    ],
)
def test_wrong_models_and_options_are_named(name: str, options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build(name, options)


def test_options_are_listed() -> None:
    assert option_names("gpt2") == ("layers", "width", "heads", "context", "vocabulary", "dropout", "tied", "window")
    assert option_names("resnet") == ("blocks", "width", "channels", "classes", "stem")
