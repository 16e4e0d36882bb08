"""Hugging Face families: captured, sent, checked and run, each equals its module to the bit; others are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion_p2p.errors import GraphError
from fusion_p2p.graph.capture import capture
from tests.unit.graph_running import assert_same_as_eager

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.hf, pytest.mark.row(33), pytest.mark.filterwarnings("ignore")]

DECODER = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(0, 61, (2, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def masked_tokens() -> dict[str, Tensor]:
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    return {**tokens(), "attention_mask": mask}


def images() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": torch.tensor([0, 3])}


Family = tuple[str, str, dict[str, Any], Callable[[], dict[str, Tensor]]]
VIT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16}
FAMILIES: dict[str, Family] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 2}, masked_tokens),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**DECODER, "num_key_value_heads": 1}, tokens),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**DECODER, "num_key_value_heads": 1, "head_dim": 8}, tokens),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**DECODER, "num_key_value_heads": 1, "head_dim": 8}, tokens),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", DECODER, tokens),
    "bert": ("BertConfig", "BertForMaskedLM", {**DECODER, **NO_DROPOUT}, masked_tokens),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0},
        tokens,
    ),
    "vit": ("ViTConfig", "ViTForImageClassification", {**VIT, "patch_size": 4, "num_labels": 5}, images),
    "resnet": (
        "ResNetConfig",
        "ResNetForImageClassification",
        {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "num_labels": 5},
        images,
    ),
    "convnext": (
        "ConvNextConfig",
        "ConvNextForImageClassification",
        {"hidden_sizes": [4, 8], "depths": [1, 1], "num_stages": 2, "num_labels": 5},
        images,
    ),
}


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    config, model, options, feeds = FAMILIES[name]
    torch.manual_seed(0)
    module: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    return module.train(), feeds()


@pytest.mark.parametrize("name", FAMILIES)
def test_family_equals_its_module(name: str) -> None:
    module, feeds = build(name)
    captured = assert_same_as_eager(module, feeds)
    tied = {alias for parameter in captured.graph.parameters for alias in parameter.aliases}
    assert ("lm_head.weight" in tied) == (name in ("gpt2", "t5", "gemma2"))


def test_experts_that_are_chosen_by_content_are_refused_by_name() -> None:
    options = {**DECODER, "num_key_value_heads": 1, "num_local_experts": 2}
    module = transformers.MixtralForCausalLM(transformers.MixtralConfig(**options))
    with pytest.raises(GraphError, match="cannot be captured") as refusal:
        capture(module, tokens())
    assert "grouped_mm" in str(refusal.value)
