"""Candidates for the best layout: what the path planner finds under several assumptions that only a simulation can settle.

Assumed are the wire ratio (codecs are fitted to a layout afterwards), whether stages have replicas, and how many micro-batches
stages hold in memory: few, as many as hide their round trip, or all, as GPipe needs. One site alone, one peer alone and all
peers are always among the candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fusion_p2p.plan.chain import Chain, coarsen
from fusion_p2p.plan.communities import Communities, communities
from fusion_p2p.plan.layout import Stage
from fusion_p2p.plan.network import Floats, Network
from fusion_p2p.plan.order_search import Order, anneal, best_orders, community_orders, greedy_orders
from fusion_p2p.plan.path import REPLICAS, Path, PathProblem, best_path, holding, prepare
from fusion_p2p.plan.ratios import most
from fusion_p2p.plan.request import Terms
from fusion_p2p.plan.times import work

COARSE = 64
"""Blocks of the chain on which orders are compared."""
FINE = 256
"""Blocks of the chain on which the chosen orders are cut."""
STEPS, STEPS_PER_PEER = 300, 30
"""Of the random walk over orders: at most so many, fewer for few peers."""
STEPS_WITH_REPLICAS = 40
KEPT = 8
"""Orders of those to begin with that are looked at more closely."""
CUT = 2
"""Orders that are cut finely."""
BINDING = 1.02
"""Memory limits a layout if without limits it would be so many times faster."""
SHORTLIST = 72
"""Peers among which orders are searched, chosen by path planning over all peers in a few orders."""
SINGLES = 3
SITES = 4

Stages = tuple[Stage, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Portfolio:
    """What the candidates for one chain, network and terms have in common. Stages are in blocks of `chain`."""

    chain: Chain
    network: Network
    terms: Terms
    coarse: Chain
    fine: Chain
    speeds: Floats
    sites: Communities

    @classmethod
    def of(cls, chain: Chain, network: Network, terms: Terms) -> Portfolio:
        speeds = 1.0 / np.maximum(work(chain, network, terms.recompute)[:, -1], 1e-30)
        return cls(chain, network, terms, coarsen(chain, COARSE), coarsen(chain, FINE), speeds, _sites(network))

    def candidates(self) -> Iterator[Stages]:
        """All candidates; many are alike."""
        yield from self._singles()
        yield from self._single_sites()
        starts = self._starts(self._shortlist())
        for ratio in self._ratios():
            orders = starts
            for sizes in self._sizes():
                found = self._search(ratio, sizes, orders)
                yield from self._cut(ratio, sizes, found[:CUT])
                orders = found
            yield from self._with_all(ratio, starts)

    def lacks_memory(self) -> bool:
        """Whether peers with more memory would make a faster pipeline, by estimate."""
        orders = community_orders(self.network, self.sites, self.speeds)
        free = prepare(self.coarse, self.network, replace(self.terms, respect_memory=False), ratio=most(self.terms))
        best = best_orders(free, orders, 1)
        if not best:
            return False
        tight = prepare(self.coarse, self.network, self.terms, ratio=most(self.terms))
        held = best_orders(holding(tight, in_flight_profile(tight, best[0][0])), orders, 1)
        return not held or held[0][0].step_s > BINDING * best[0][0].step_s

    def _ratios(self) -> tuple[float, ...]:
        """Wire ratios to assume, from none to the most that the policy gives."""
        top = max(1.0, most(self.terms))
        if self.terms.codec in ("adatopk", "adaptive"):
            return tuple(dict.fromkeys((1.0, math.sqrt(top), top)))
        return (top,)

    def _sizes(self) -> tuple[tuple[int, ...], ...]:
        """Group sizes to allow: single peers first, then replicas where sites have several."""
        largest = min(max(len(site) for site in self.sites), self.terms.micro_batches)
        allowed = tuple(size for size in REPLICAS if size <= largest)
        return ((1,), allowed) if len(allowed) > 1 else ((1,),)

    def _shortlist(self) -> Order:
        """The peers among which orders are searched: all, or of many those used by paths through all, then the fastest."""
        everybody = tuple(range(len(self.speeds)))
        if len(everybody) <= SHORTLIST:
            return everybody
        chosen: dict[int, None] = {}
        orders = community_orders(self.network, self.sites, self.speeds)
        for ratio in self._ratios():
            problem = prepare(self.coarse, self.network, self.terms, ratio=ratio)
            for path, _ in best_orders(problem, orders, 1):
                chosen.update(dict.fromkeys(peer for stage in path.stages for peer in stage.peers))
        fastest = (int(peer) for peer in np.argsort(-self.speeds, kind="stable"))
        chosen.update(dict.fromkeys(fastest))
        return tuple(sorted(list(chosen)[:SHORTLIST]))

    def _starts(self, peers: Order) -> tuple[Order, ...]:
        """Orders of these peers to begin with: through communities, through sites, from neighbour to neighbour."""
        part = self.network.select(peers)
        speeds = self.speeds[list(peers)]
        problem = prepare(self.coarse, part, self.terms, ratio=max(1.0, math.sqrt(most(self.terms))))
        local = [*greedy_orders(problem)]
        for groups in dict.fromkeys((communities(part, self.terms.seed), _sites(part))):
            local.extend(community_orders(part, groups, speeds))
        return tuple(dict.fromkeys(tuple(peers[index] for index in order) for order in local))

    def _search(self, ratio: float, sizes: Sequence[int], orders: Sequence[Order]) -> tuple[Order, ...]:
        """The best orders met, by estimate, best first, at most `KEPT`."""
        light = prepare(self.coarse, self.network, self.terms, ratio=ratio, sizes=sizes)
        first = best_orders(light, orders, KEPT)
        if not first:
            return ()
        problem = holding(light, in_flight_profile(light, first[0][0]))
        starts = best_orders(problem, [order for _, order in first], KEPT) or first
        steps = min(STEPS if len(sizes) == 1 else STEPS_WITH_REPLICAS, STEPS_PER_PEER * len(orders[0]))
        annealed = anneal(problem, starts[0], steps, self.terms.seed)
        ranked = [annealed, *starts, *first]
        return tuple(dict.fromkeys(order for _, order in ranked))[:KEPT]

    def _cut(self, ratio: float, sizes: Sequence[int], orders: Sequence[Order]) -> Iterator[Stages]:
        """The orders cut finely, among the peers that the coarse cut uses, under each assumption about memory."""
        light = prepare(self.coarse, self.network, self.terms, ratio=ratio, sizes=sizes)
        fine = prepare(self.fine, self.network, self.terms, ratio=ratio, sizes=sizes)
        for order in orders:
            rough = best_path(light, order)
            if rough is None:
                continue
            known: set[Stages] = set()
            for held in (1.0, in_flight_profile(light, rough), float(self.terms.micro_batches)):
                coarse = best_path(holding(light, held), order)
                if coarse is None or coarse.stages in known:
                    continue
                known.add(coarse.stages)
                used = {peer for stage in coarse.stages for peer in stage.peers}
                on_fine = np.interp(self.fine.positions, self.coarse.positions, np.broadcast_to(held, light.rest_s.shape))
                path = best_path(holding(fine, on_fine), [peer for peer in order if peer in used])
                yield self._mapped(path.stages if path else coarse.stages, self.fine if path else self.coarse)

    def _with_all(self, ratio: float, orders: Sequence[Order]) -> Iterator[Stages]:
        """No peer idle."""
        if len(self.speeds) > min(self.coarse.num_blocks, SHORTLIST):
            return
        problem = prepare(self.coarse, self.network, self.terms, ratio=ratio, use_all=True)
        for path, _ in best_orders(problem, orders, 1):
            yield self._mapped(path.stages, self.coarse)

    def _single_sites(self) -> Iterator[Stages]:
        """The fastest sites, each alone."""
        sites = sorted(self.sites, key=lambda site: -float(self.speeds[list(site)].sum()))
        for site in sites[:SITES]:
            order = tuple(sorted(site, key=lambda peer: (-self.speeds[peer], peer)))
            yield from self._cut(1.0, self._sizes()[-1], [order])

    def _singles(self) -> Iterator[Stages]:
        """The fastest peers, each alone."""
        for peer in np.argsort(-self.speeds, kind="stable")[:SINGLES]:
            yield (Stage(0, self.chain.num_blocks, (int(peer),)),)

    def _mapped(self, stages: Stages, source: Chain) -> Stages:
        """Stages in blocks of another chain of the same operators, in blocks of this one."""
        at = np.searchsorted(self.chain.positions, source.positions)
        return tuple(replace(stage, first=int(at[stage.first]), last=int(at[stage.last])) for stage in stages)


def in_flight_profile(problem: PathProblem, path: Path) -> Floats:
    """(N + 1,) micro-batches that a stage which begins at each position holds to hide its round trip, about.

    The whole round trip is the fill of a known path; what lies behind a position is in proportion to its work.
    """
    behind = problem.rest_s / max(float(problem.rest_s[0]), 1e-30)
    paces = path.fill_s / max(path.bottleneck_s, 1e-30)
    held: Floats = np.minimum(np.ceil(behind * paces) + 1, problem.more + 1)
    return held


def _sites(network: Network) -> Communities:
    """Peers by site, ascending."""
    sites = network.sites[: len(network.peers)]
    return tuple(tuple(int(peer) for peer in np.flatnonzero(sites == site)) for site in np.unique(sites))
