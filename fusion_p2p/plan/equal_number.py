"""The papers' simplest baseline: as many operators for each peer, in listed order (FusionLLM, arXiv 2410.12707)."""

from __future__ import annotations

from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.layout import Layout
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.request import NoPlan, Terms
from fusion_p2p.plan.splitting import one_each, split

NAME = "equal-number"


def equal_number(chain: Chain, network: Network, terms: Terms) -> Layout | NoPlan:
    """One stage per peer in the order of the network, of M / P operators each."""
    count = min(len(network.peers), chain.num_blocks)
    if not count:
        return NoPlan("no peer is free")
    cuts = split(chain.positions.astype(float), [1.0] * count)
    return one_each(NAME, chain, network, cuts, range(count), terms)
