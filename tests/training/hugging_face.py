"""Tiny Hugging Face models with random weights, and batches for them; no dropout, so that the eager model is an oracle."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 61


def _tokens(seed: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def _masked_tokens(seed: int) -> dict[str, Tensor]:
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 9:] = 0
    return {**_tokens(seed), "attention_mask": mask}


def _images(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 5, (2,), generator=generator),
    }


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=24, n_layer=3, n_head=3, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def _vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=16,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ViTForImageClassification(config)


HUGGING_FACE: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]] = {
    "gpt2": (_gpt2, _masked_tokens),
    "llama": (_llama, _tokens),
    "bert": (_bert, _masked_tokens),
    "vit": (_vit, _images),
}


def build(name: str) -> tuple[nn.Module, Callable[[int], dict[str, Tensor]]]:
    """A model in training mode, and its batches by seed."""
    make, batch = HUGGING_FACE[name]
    torch.manual_seed(1)
    return make().train(), batch
