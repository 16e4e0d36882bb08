"""From what peers measured to the network that a plan is made for: missing links filled in, sites found.

What is measured stands as it is, up to `FASTEST_BYTES_PER_S` and the caps that both ends announce. For the rest, in
this order:

* **one direction known**: the other has the same latency.
* **rates** of a peer, out and in: the best on its links to other sites of which both ends tell, else on any of them, else what
  it announces; the median of all
  peers where there is neither, `UNKNOWN_BYTES_PER_S` where nobody knows anything. No peer exceeds the caps in its announcement.
* **beta of a missing pair** i -> j: max(1 / out_i, 1 / in_j). Inside a site: the median of what was measured there. When the
  peers' rates are unknown but the reverse is measured: that.
* **alpha of a missing pair**: the mean of the two peers' median latencies (over their known links); the median of all links
  where a peer has none, `UNKNOWN_LATENCY_S` where nothing is known.
* **sites**: peers joined by fast and close links (at most `CLOSE_LATENCY_S`, at least `CLOSE_BYTES_PER_S` both ways) of which
  both ends tell, or not measured against each other while they announce the same public host, or no public host and the same
  private network, unless a measurement between two others that announce the same says that it means nothing. Two peers that
  were measured far from each other are never in one site, whoever says to be close to both; links that others' links support
  come first. The owner is believed about its links: the plan is its own.
* **lines**: peers behind one public host, or behind one relay, share a line, as fast as the fastest of them; every other peer
  has a line of its own. All flows that leave a site share the sum of its lines, and likewise those that enter. Peers behind one
  relay are one site, for what they send to others crosses the relay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fusion_p2p.ids import PeerId
from fusion_p2p.plan.network import Bools, Floats, Network
from fusion_p2p.plan.request import PeerCapability

CLOSE_LATENCY_S = 0.001
"""Half of a round trip of 2 ms: one building, or two in one town."""
CLOSE_BYTES_PER_S = 200e6 / 8
"""A local network at a gigabit carries no more between machines that are busy or slow: the daemons encrypt."""
FASTEST_BYTES_PER_S = 10e9 / 8
"""No peer encrypts faster on one stream, whatever it says."""
UNKNOWN_LATENCY_S = 0.02
UNKNOWN_BYTES_PER_S = 20e6 / 8
"""A home's uplink, when nobody has measured anything."""


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """One direction between two peers: seconds until the first byte is there, bytes per second from then on. None: unknown.

    by_both: both ends tell of it, so that neither can have invented it alone.
    """

    latency_s: float | None
    bytes_per_s: float | None
    by_both: bool = True


Links = Mapping[tuple[PeerId, PeerId], LinkFigures]
"""Directed: (from, to)."""


def network_of(peers: Sequence[PeerCapability], links: Links, owner: PeerId | None = None) -> Network:
    """The network of these peers in this order, with the owner as its last node; see above for what is not in `links`.

    Links of peers that are not listed are ignored. The owner only feeds; where it executes slices too, that is another peer.
    """
    nodes = [peer.peer for peer in peers] + ([owner] if owner is not None else [])
    alpha, rate, believed = _known(nodes, links)
    if owner is not None:
        believed[-1, :] = believed[:, -1] = True
    sites = _sites(peers, alpha, rate, believed)
    abroad = np.where(sites[:, None] != sites[None, :], rate, np.nan)
    silent: list[float | None] = [None] * (len(nodes) - len(peers))
    out = _best(
        _preferred(abroad, believed), [*(p.up_bytes_per_s for p in peers), *silent], [*(p.up_cap for p in peers), *silent]
    )
    into = _best(
        _preferred(abroad.T, believed.T),
        [*(p.down_bytes_per_s for p in peers), *silent],
        [*(p.down_cap for p in peers), *silent],
    )
    alpha, beta = _fill_latencies(alpha), np.maximum(_fill_rates(rate, out, into, sites), _capped(peers, len(nodes)))
    for matrix in (alpha, beta):
        np.fill_diagonal(matrix, 0.0)
    lines = _lines(peers, len(nodes))
    return Network(
        peers=tuple(peer.peer for peer in peers),
        flops_per_s=np.array([_flops(peer) for peer in peers], dtype=np.float64).reshape(len(peers), 3),
        memory_bytes_per_s=np.array([peer.memory_bytes_per_s or np.inf for peer in peers], dtype=np.float64),
        free_bytes=np.array([peer.free_bytes for peer in peers], dtype=np.float64),
        sites=sites,
        alpha_s=alpha,
        beta_s=beta,
        uplink_s=_shared(out, lines, sites),
        downlink_s=_shared(into, lines, sites),
        has_owner=owner is not None,
    )


def _flops(peer: PeerCapability) -> tuple[float, float, float]:
    matmul = peer.flops_per_s
    return matmul, peer.convolution_flops_per_s or matmul, peer.attention_flops_per_s or matmul


def _known(nodes: Sequence[PeerId], links: Links) -> tuple[Floats, Floats, Bools]:
    """(n, n) latencies and bytes per second, NaN where nothing is known, and whether both ends tell of it."""
    place = {node: index for index, node in enumerate(nodes)}
    alpha, rate = np.full((2, len(nodes), len(nodes)), np.nan)
    believed = np.zeros(alpha.shape, dtype=np.bool_)
    for (source, target), figures in links.items():
        if source in place and target in place and source != target:
            here = place[source], place[target]
            alpha[here] = _or_nan(figures.latency_s)
            rate[here] = np.clip(_or_nan(figures.bytes_per_s), 1.0, FASTEST_BYTES_PER_S)
            believed[here] = figures.by_both
    return _first_known(alpha, alpha.T), rate, believed


def _sites(peers: Sequence[PeerCapability], alpha: Floats, rate: Floats, believed: Bools) -> NDArray[np.int64]:
    """(n,) numbers of the sites, in the order of their first nodes."""
    fast = (alpha <= CLOSE_LATENCY_S) & (rate >= CLOSE_BYTES_PER_S) & believed
    close = fast & fast.T
    far = (alpha > CLOSE_LATENCY_S) | ((np.fmin(rate, rate.T) < CLOSE_BYTES_PER_S) & ~np.isnan(alpha))
    together = np.eye(len(alpha), dtype=np.bool_)
    for group in _sharing([peer.relay for peer in peers]):
        together[group] = True
    sites = _components(together)
    announced = np.zeros_like(close)
    for group in _sharing([peer.public_host or peer.local_network for peer in peers]):
        announced[group] = not far[group].any()
    for pairs in (_by_support(close), np.argwhere(announced)):
        _join(sites, pairs, far)
    return np.unique(sites, return_inverse=True)[1].astype(np.int64)


def _by_support(close: Bools) -> NDArray[np.intp]:
    """The pairs of `close` (n, n), those with the most common neighbours first."""
    pairs = np.argwhere(np.triu(close))
    common = close.astype(np.float32) @ close.astype(np.float32)
    return pairs[np.argsort(-common[tuple(pairs.T)], kind="stable")]


def _join(sites: NDArray[np.int64], pairs: NDArray[np.intp], far: Bools) -> None:
    """Unite the sites of each pair, by the lower number, unless any of their members are far from each other."""
    for one, other in pairs.tolist():
        low, high = sorted((sites[one], sites[other]))
        if low != high and not far[np.ix_(sites == low, sites == high)].any():
            sites[sites == high] = low


def _components(together: Bools) -> NDArray[np.int64]:
    """(n,) for each node the lowest one that is reached from it. `together`, (n, n), is symmetric, its diagonal is set."""
    lowest = np.arange(len(together))
    while True:
        lower: NDArray[np.int64] = np.where(together, lowest, len(together)).min(axis=1, initial=len(together))
        if (lower == lowest).all():
            return lower
        lowest = lower


def _sharing(names: Sequence[str]) -> list[tuple[NDArray[np.intp], ...]]:
    """The blocks of a matrix that belong to equal names; the empty name is none."""
    array = np.array(names, dtype=np.str_)
    members = [np.flatnonzero(array == name) for name in np.unique(array) if name]
    return [np.ix_(same, same) for same in members]


def _preferred(seen: Floats, believed: Bools) -> Floats:
    """(n, n) in each row only what is believed, where anything is."""
    sure = np.where(believed, seen, np.nan)
    return np.where(np.isnan(sure).all(axis=1, keepdims=True), seen, sure)


def _best(seen: Floats, announced: Sequence[float | None], caps: Sequence[float | None]) -> Floats:
    """(n,) the best of each row of `seen` (n, n), else what is announced, NaN where neither is known; at most the cap."""
    measured = np.where(np.isnan(seen), -np.inf, seen).max(axis=1, initial=-np.inf)
    told = np.maximum(np.array([_or_nan(rate) for rate in announced], dtype=np.float64), 1.0)
    allowed = np.array([np.inf if cap is None else max(cap, 1.0) for cap in caps], dtype=np.float64)
    return np.minimum(np.where(np.isfinite(measured), measured, told), allowed)


def _fill_latencies(alpha: Floats) -> Floats:
    everywhere = _median(alpha, UNKNOWN_LATENCY_S)
    usual = np.array([_median(row, everywhere) for row in alpha], dtype=np.float64)
    return _first_known(alpha, (usual[:, None] + usual[None, :]) / 2)


def _fill_rates(rate: Floats, out: Floats, into: Floats, sites: NDArray[np.int64]) -> Floats:
    """(n, n) seconds per byte."""
    beta = 1 / rate
    guesses = (_inside_sites(beta, sites), _slower(out, into), beta.T, _slower(_or_usual(out), _or_usual(into)))
    for guess in guesses:
        beta = _first_known(beta, guess)
    return beta


def _inside_sites(beta: Floats, sites: NDArray[np.int64]) -> Floats:
    """(n, n) the median of what was measured inside the site that both are in, NaN elsewhere."""
    inside = np.full_like(beta, np.nan)
    for site in np.unique(sites):
        block = np.ix_(sites == site, sites == site)
        inside[block] = _median(beta[block], np.nan)
    return inside


def _capped(peers: Sequence[PeerCapability], num_nodes: int) -> Floats:
    """(n, n) seconds per byte below which no volunteer's caps let a link come, however it was measured."""
    out, into = np.zeros((2, num_nodes))
    for index, peer in enumerate(peers):
        out[index] = 0.0 if peer.up_cap is None else 1 / max(peer.up_cap, 1.0)
        into[index] = 0.0 if peer.down_cap is None else 1 / max(peer.down_cap, 1.0)
    return np.maximum(out[:, None], into[None, :])


def _slower(out: Floats, into: Floats) -> Floats:
    return np.maximum(1 / out[:, None], 1 / into[None, :])


def _or_usual(rates: Floats) -> Floats:
    return _first_known(rates, np.full_like(rates, _median(rates, UNKNOWN_BYTES_PER_S)))


def _first_known(known: Floats, guess: Floats) -> Floats:
    return np.where(np.isnan(known), guess, known)


def _or_nan(figure: float | None) -> float:
    return np.nan if figure is None else figure


def _median(values: Floats, otherwise: float) -> float:
    """Of what is known."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else otherwise


def _lines(peers: Sequence[PeerCapability], num_nodes: int) -> list[str]:
    """What each node's line to the rest of the world is called: nodes with one name share it."""
    names = [f"relay {peer.relay}" if peer.relay else f"host {peer.public_host}" if peer.public_host else "" for peer in peers]
    return [name or f"node {index}" for index, name in enumerate(names + [""] * (num_nodes - len(names)))]


def _shared(rates: Floats, lines: Sequence[str], sites: NDArray[np.int64]) -> Floats:
    """(sites,) seconds per byte of all lines of a site together; 0, no limit, when one of them is unknown."""
    carried: dict[tuple[int, str], float] = {}
    for site, line, rate in zip(sites.tolist(), lines, rates.tolist(), strict=True):
        key = (site, line)
        carried[key] = np.fmax(carried.get(key, np.nan), rate)
    total = np.zeros(int(sites.max(initial=-1)) + 1)
    for (site, _), rate in carried.items():
        total[site] += rate
    return np.where(np.isnan(total), 0.0, 1 / total)
