"""Why a layout leaves peers out, in words for their volunteers."""

from __future__ import annotations

import numpy as np

from fusion_p2p.ids import PeerId
from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.communities import bandwidth
from fusion_p2p.plan.layout import Layout
from fusion_p2p.plan.memory import CREDITS, Holding, stage_bytes
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.times import work

NO_PLACE = "the model has fewer places to cut than there are peers"
NO_MEMORY = "has too little memory for any slice of the plan"
SLOW_DEVICE = "slower than the plan needs"
SLOW_LINK = "its links are slower than the plan needs"
SPARE = "the plan is no faster with it"


def why_idle(chain: Chain, network: Network, layout: Layout) -> tuple[tuple[PeerId, str], ...]:
    """Every peer that executes nothing, with the most telling reason there is."""
    idle = [peer for peer in range(len(network.peers)) if peer not in layout.peers]
    if not idle:
        return ()
    if len(layout.stages) == chain.num_blocks:
        return tuple((network.peers[peer], NO_PLACE) for peer in idle)
    return tuple((network.peers[peer], _why(chain, network, layout, peer)) for peer in idle)


def _why(chain: Chain, network: Network, layout: Layout, peer: int) -> str:
    used = sorted(layout.peers)
    least = Holding(in_flight=1, credits=CREDITS, moments=0, recompute=layout.recompute)
    if network.free_bytes[peer] < min(stage_bytes(chain, stage.first, stage.last, least) for stage in layout.stages):
        return NO_MEMORY
    seconds = work(chain, network, layout.recompute)[:, -1]
    if seconds[peer] > seconds[used].max():
        return SLOW_DEVICE
    fast = bandwidth(network)
    if len(used) > 1 and fast[peer, used].max() < fast[np.ix_(used, used)].max(axis=1).min():
        return SLOW_LINK
    return SPARE
