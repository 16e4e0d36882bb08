"""Cut layers as a module: for whoever reads an exported model that was trained with them.

A model that holds them as `self.cut = nn.ModuleList(...)`, one for each cut in order, and calls each where the run said that it
was inserted, loads the exported state_dict.
"""

from __future__ import annotations

from torch import Tensor, nn


class CutLayer(nn.Module):
    """What is inserted after one activation of shape (batch, length, width); see `graph.cut_layers` for the formula.

    rank, keep: 0 for none. vocabulary, context: sizes of the embedding of tokens and positions; vocabulary 0 for none.
    """

    def __init__(self, width: int, *, rank: int = 0, keep: int = 0, vocabulary: int = 0, context: int = 0) -> None:
        super().__init__()
        self.keep = keep
        self.project = nn.Linear(width, rank, bias=False) if rank else None
        self.expand = nn.Linear(rank, width, bias=False) if rank else None
        self.tokens = nn.Embedding(vocabulary, width) if vocabulary else None
        self.positions = nn.Embedding(context, width) if vocabulary else None

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """x: (batch, length, width). tokens: (batch, length) integers."""
        if self.project is not None:
            x = self.project(x)
        if self.keep:
            size = x.abs()
            x = x * (size >= size.topk(self.keep).values.amin(-1, keepdim=True))
        if self.expand is not None:
            x = self.expand(x)
        if self.tokens is not None and self.positions is not None:
            x = x + (self.tokens(tokens.long()) + self.positions.weight[: x.shape[1]])
        return x
