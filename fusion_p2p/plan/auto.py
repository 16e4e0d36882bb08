"""The scheduler that looks for the best layout it can find, by simulation.

Every other scheduler's layout, the candidates of `plan.portfolio`, and small changes to the best of them are judged alike:
ratios fitted to each, memory respected, each schedule that the terms allow, one step simulated. So it is never slower than the
others. Peers that would not make it faster stay idle. Recomputation is tried where memory limits the layout without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.equal_compute import equal_compute
from fusion_p2p.plan.equal_number import equal_number
from fusion_p2p.plan.fence import op_fence
from fusion_p2p.plan.improving import improve
from fusion_p2p.plan.judging import Judge
from fusion_p2p.plan.layout import Layout
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.portfolio import Portfolio
from fusion_p2p.plan.request import NoPlan, Terms
from fusion_p2p.plan.together import together

NAME = "auto"
KEPT_TOGETHER = 4
"""Of the fastest layouts so many are tried with the copies of tied parameters on one peer."""
DOUBTED, DOUBTED_WITH_REPLICAS = 1.25, 2.0
"""A candidate is not simulated if the formula says that it takes so many times longer than the best one simulated."""
OTHERS: tuple[Callable[[Chain, Network, Terms], Layout | NoPlan], ...] = (equal_number, equal_compute, op_fence)


def auto(chain: Chain, network: Network, terms: Terms) -> Layout | NoPlan:
    """The fastest layout found, perhaps with recomputation nobody asked for; NoPlan, with what is missing, if nothing fits."""
    if not network.peers:
        return NoPlan("no peer is free")
    judge = Judge(chain, network, terms)
    portfolio = Portfolio.of(chain, network, terms)
    _offer_all(judge, portfolio)
    if not terms.recompute and (judge.best is None or portfolio.lacks_memory()):
        _offer_all(judge, Portfolio.of(chain, network, replace(terms, recompute=True)))
    if judge.best is None:
        return judge.refusal or NoPlan("no layout fits the memory of the peers")
    for stages, recompute in judge.fastest(KEPT_TOGETHER):
        for joined in together(chain, stages):
            judge.stages(NAME, joined, recompute=recompute)
    improve(judge)
    return replace(judge.best, scheduler=NAME)


def _offer_all(judge: Judge, portfolio: Portfolio) -> None:
    for scheduler in OTHERS:
        layout = scheduler(judge.chain, judge.network, portfolio.terms)
        if isinstance(layout, Layout):
            judge.offer(layout)
        else:
            judge.refusal = judge.refusal or layout
    recompute = portfolio.terms.recompute
    candidates = dict.fromkeys(portfolio.candidates())
    ranked = sorted((judge.estimate(stages, recompute=recompute), number, stages) for number, stages in enumerate(candidates))
    for estimated_s, _, stages in ranked:
        alone = all(len(stage.peers) == 1 for stage in stages)
        if estimated_s <= (DOUBTED if alone else DOUBTED_WITH_REPLICAS) * judge.best_s:
            judge.stages(NAME, stages, recompute=recompute)
