"""GPT-2 (Radford et al. 2019): a decoder-only transformer whose forward returns the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusion_p2p.graph.schema import Rule


@dataclass(frozen=True, slots=True)
class GPT2Shape:
    """Size of a GPT-2; the default is the published small one.

    tied: the output projection is the token embedding. window: a position attends to itself and to this many less one before
    it (0: to all before it).
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    context: int = 1024
    vocabulary: int = 50257
    dropout: float = 0.1
    tied: bool = True
    window: int = 0


SIZES = {
    "gpt2": GPT2Shape(),
    "gpt2-medium": GPT2Shape(layers=24, width=1024, heads=16),
    "gpt2-large": GPT2Shape(layers=36, width=1280, heads=20),
    "gpt2-xl": GPT2Shape(layers=48, width=1600, heads=25),
}


class Attention(nn.Module):
    """Causal self-attention with all heads in one projection."""

    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_dropout = shape.dropout
        self.window = shape.window
        self.c_attn = nn.Linear(shape.width, 3 * shape.width)
        self.c_proj = nn.Linear(shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        dropout = self.attention_dropout if self.training else 0.0
        mask = self._near(length, x.device) if self.window else None
        mixed = functional.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=mask is None)
        output: Tensor = self.dropout(self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width)))
        return output

    def _near(self, length: int, device: torch.device) -> Tensor:
        """(length, length) bool: which positions, columns, each position sees."""
        positions = torch.arange(length, device=device)
        back = positions.unsqueeze(1) - positions
        return (back >= 0) & (back < self.window)


class FeedForward(nn.Module):
    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.c_fc = nn.Linear(shape.width, 4 * shape.width)
        self.c_proj = nn.Linear(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.c_fc(x), approximate="tanh")
        output: Tensor = self.dropout(self.c_proj(hidden))
        return output


class Block(nn.Module):
    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width)
        self.attn = Attention(shape)
        self.ln_2 = nn.LayerNorm(shape.width)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        mixed: Tensor = x + self.mlp(self.ln_2(x))
        return mixed


class GPT2(nn.Module):
    """`forward(tokens, targets)`, both integers of shape (batch, length <= context), gives the mean cross-entropy in nats."""

    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.shape = shape
        self.wte = nn.Embedding(shape.vocabulary, shape.width)
        self.wpe = nn.Embedding(shape.context, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.h = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.wte(tokens.long()) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.long().flatten())


def initial_rules(model: GPT2) -> dict[str, Rule]:
    """GPT-2's initialisation: normal(0, 0.02), projections into the residual stream scaled by 1 / sqrt(2 layers)."""
    residual = 0.02 / math.sqrt(2 * model.shape.layers)
    return {name: _rule(name, residual) for name, _ in model.named_parameters()}


def _rule(name: str, residual: float) -> Rule:
    if name.endswith("bias"):
        return Rule("constant", 0.0)
    if ".ln_" in f".{name}":
        return Rule("constant", 1.0)
    return Rule("normal", 0.0, residual if name.endswith("c_proj.weight") else 0.02)
