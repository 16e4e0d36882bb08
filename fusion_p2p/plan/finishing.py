"""The finish of a run: the same plan on codecs that leave no trace in the model.

A network adapts to the sparsifier that it is trained through and is worse without; its last steps go without, so that the
exported model is what was trained. A finish is short, so it may take a few times the bytes: it gets the least lossy codec whose
messages are at most `GROWTH` times as large as the sparse ones.
"""

from __future__ import annotations

from dataclasses import replace

from fusion_p2p.plan.plan import EdgePlan, Plan
from fusion_p2p.plan.ratios import nominal_ratio
from fusion_p2p.wire.codecs import SPARSE, parse

GROWTH = 8.5
CODECS = ("int8", "int4")
"""Least lossy first."""


def traceless(plan: Plan) -> Plan:
    """The plan without sparse codecs; the plan itself if it has none."""
    edges = tuple(_traceless(edge) for edge in plan.edges)
    return plan if edges == plan.edges else replace(plan, edges=edges, predicted_step_s=0.0)


def _traceless(edge: EdgePlan) -> EdgePlan:
    if parse(edge.codec).family not in SPARSE:
        return edge
    sparse = nominal_ratio(edge.codec)
    enough = (codec for codec in CODECS if sparse <= GROWTH * nominal_ratio(codec))
    return replace(edge, codec=next(enough, CODECS[-1]))
