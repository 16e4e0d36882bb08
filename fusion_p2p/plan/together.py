"""Layouts that hold the copies of a tied parameter on one peer: a language model's embedding and its output projection.

Exchanging the gradient of an embedding once a step may cost more than everything else that crosses a slow link. So the stage
that reads the parameter last, or the end of it, goes to the peers that read it first; they then execute two stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fusion_p2p.plan.chain import Chain, TiedParameter
from fusion_p2p.plan.layout import Stage

Stages = tuple[Stage, ...]


def together(chain: Chain, stages: Sequence[Stage]) -> Iterator[Stages]:
    """For every tied parameter that the first and a later stage hold: that stage moved, or split and its end moved."""
    for tied in chain.tied:
        holders = chain.holders(tied, [stage.first for stage in stages])
        home, moved = stages[holders[0]].peers, holders[-1]
        if len(holders) < 2 or stages[moved].peers == home:
            continue
        stage = stages[moved]
        if moved > holders[0] + 1:
            yield (*stages[:moved], Stage(stage.first, stage.last, home), *stages[moved + 1 :])
        border = _before_reader(chain, stage, tied)
        if border is not None:
            parts = (Stage(stage.first, border, stage.peers), Stage(border, stage.last, home))
            yield (*stages[:moved], *parts, *stages[moved + 1 :])


def _before_reader(chain: Chain, stage: Stage, tied: TiedParameter) -> int | None:
    """The cheapest position inside a stage before it reads the parameter first, the last of the cheapest."""
    first_operator = int(chain.positions[stage.first])
    reader = min(operator for operator in tied.readers if operator >= first_operator)
    inside = np.arange(stage.first + 1, stage.last)
    before = inside[chain.positions[inside] <= reader]
    if not len(before):
        return None
    crossing = chain.crossing[before]
    return int(before[np.flatnonzero(crossing == crossing.min())[-1]])
