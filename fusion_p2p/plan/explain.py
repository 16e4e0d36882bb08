"""A plan in words: who computes what, what crosses, what limits the step, who is idle and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Cut
from fusion_p2p.ids import PeerId
from fusion_p2p.plan.advice import CUT_LAYERS
from fusion_p2p.plan.forecast import EdgeForecast, Forecast, Limit, SliceForecast, forecast
from fusion_p2p.plan.memory import gib
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.pipeline import OWNER_STAGE
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.request import NodeCost
from fusion_p2p.plan.testbed import site_names
from fusion_p2p.wire.codecs import SPARSE, parse
from fusion_p2p.wire.job_messages import OptimiserSettings

SHORT_PEER = 8
PEERS_NAMED = 6
"""Idle peers with one reason are named up to this many."""
MOSTLY_BUSY = 0.8


def explain(
    plan: Plan,
    graph: Graph,
    parts: Cut,
    costs: Sequence[NodeCost],
    optimiser: OptimiserSettings,
    network: Network | None = None,
) -> tuple[str, ...]:
    """Lines of text: one per slice, one per pair of slices with traffic, per tied parameter and per reason to be idle."""
    return in_words(forecast(plan, graph, parts, costs, optimiser, network), network)


def in_words(figures: Forecast, network: Network | None = None) -> tuple[str, ...]:
    """The lines of a forecast; `network` is the one it was made with."""
    return (
        _headline(figures),
        *_verdict(figures, network),
        *(_slice_line(part) for part in figures.slices),
        *(_edge_line(edge) for edge in figures.edges),
        *_tied_lines(figures),
        *_idle_lines(figures),
        *_traded(figures),
        *_advice(figures),
    )


def short_peer(peer: PeerId) -> str:
    """The end of a peer id, because its beginning is the same for all Ed25519 keys; names of simulated peers as they are."""
    return peer if "/" in peer else peer[-SHORT_PEER:]


def seconds(value: float) -> str:
    """Seconds for people: `12.3 s`, `45 ms`."""
    if value >= 100:
        return f"{value:.0f} s"
    return f"{value:.3g} s" if value >= 0.1 else f"{value * 1e3:.3g} ms"


def size(num_bytes: float) -> str:
    """Bytes that cross a link, in decimal units as link rates are."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"


def _headline(figures: Forecast) -> str:
    took = "a step" if figures.limit is not None else "of compute a step"
    return (
        f"{figures.scheduler}: {_count(len(figures.slices), 'slice')} on {_count(len(figures.peers), 'peer')}, "
        f"{_count(figures.micro_batches, 'micro-batch', 'es')} ({figures.schedule}), about {figures.step_s:.2f} s {took}"
    )


def _verdict(figures: Forecast, network: Network | None) -> Iterator[str]:
    """What limits the step, and how far it is from what a chain of single peers cannot beat."""
    limit = figures.limit
    if limit is not None and network is not None:
        share = f"busy {limit.busy:.0%} of the step"
        if _mostly_shared(limit):
            share += f", {limit.shared:.0%} with gradients of shared parameters and their sums, once a step, while others wait"
        elif limit.busy < MOSTLY_BUSY:
            share += ", the rest is the pipeline filling, draining and waiting"
        yield f"bottleneck: the {_what(limit, figures, network)}, {share}"
    if figures.bound_s and figures.step_s >= figures.bound_s:  # replicas, and latency that many micro-batches hide, beat it
        times = f"{figures.step_s / figures.bound_s:.2f} times"
        yield f"bound: a chain of single peers takes at least {figures.bound_s:.2f} s a step here; this plan {times} that"


def _count(number: int, what: str, ending: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else ending}"


def _what(limit: Limit, figures: Forecast, network: Network) -> str:
    match limit.way:
        case "device":
            held = [str(part.index) for part in figures.slices if network.peers[limit.source] in part.members]
            return f"device of {_node(network, limit.source)} (slice {', '.join(held)})"
        case "pair":
            return f"link {_node(network, limit.source)} -> {_node(network, limit.target)}"
        case way:
            return f"{way}link of site {site_names(network)[limit.source].removeprefix('site ')}"


def _mostly_shared(limit: Limit) -> bool:
    return 2 * limit.shared > limit.busy


def _node(network: Network, node: int) -> str:
    return "the owner" if node == network.owner else short_peer(network.peers[node])


def _slice_line(part: SliceForecast) -> str:
    on = " + ".join(short_peer(peer) for peer in part.members)
    busy = f", busy {' + '.join(f'{share:.0%}' for share in part.busy)}" if part.busy else ""
    return (
        f"slice {part.index} on {on}: {part.layers}, {_count(part.num_nodes, 'node')}, "
        f"{part.flops_share:.0%} of the FLOPs, {gib(part.num_bytes)}, {part.in_flight} in flight{busy}"
        + (", recomputes" if part.recompute else "")
    )


def _edge_line(edge: EdgeForecast) -> str:
    source = "owner" if edge.source == OWNER_STAGE else str(edge.source)
    took = ""
    if edge.forward_s is not None:
        took = f", {seconds(edge.forward_s)} there" + (f", {seconds(edge.backward_s)} back" if edge.backward_s else "")
    shrunk = f" ({edge.ratio:.1f}x smaller)" if edge.ratio > 1.05 else ""
    return (
        f"edge {source} -> {edge.target}: {_count(edge.num_values, 'value')}, {size(edge.forward_bytes)} forward and "
        f"{size(edge.backward_bytes)} back per micro-batch, codec {', '.join(edge.codecs)}{shrunk}{took}"
    )


def _tied_lines(figures: Forecast) -> Iterator[str]:
    for tied in figures.tied:
        slices = " and ".join(map(str, tied.holders))
        took = "" if tied.exchange_s is None else f", {seconds(tied.exchange_s)} there and back"
        yield f"tied {tied.name}: held by slices {slices}, {gib(tied.num_bytes)} of gradient summed each step{took}"


def _idle_lines(figures: Forecast) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for peer, reason in figures.idle:
        reasons.setdefault(reason, []).append(short_peer(peer))
    for reason, peers in reasons.items():
        more = f" and {len(peers) - PEERS_NAMED} more" if len(peers) > PEERS_NAMED else ""
        yield f"idle {', '.join(peers[:PEERS_NAMED])}{more}: {reason}"


def _traded(figures: Forecast) -> Iterator[str]:
    """One sentence about what lossy codecs cost, if there are any."""
    lossy = [edge for edge in figures.edges if set(edge.codecs) != {"none"}]
    if not lossy:
        return
    saved = sum(edge.dense_bytes for edge in lossy) / sum(edge.forward_bytes + edge.backward_bytes for edge in lossy)
    crossing = len([edge for edge in figures.edges if edge.source != OWNER_STAGE])
    families = {parse(codec).family for edge in lossy for codec in edge.codecs}
    effect = "values are rounded there, and the trained model is a plain one"
    if families & SPARSE:
        effect = (
            "the model learns to live with what is dropped there, so without the codec it is worse than it looks in training"
        )
    if families & SPARSE and figures.cut_layers == "masks":
        effect = "what is dropped there is dropped by the exported model, too: the masks are part of it"
    if "topk-independent" in families or "topk-paper" in families:
        effect = "gradients there are not those of what was computed, which is known to train badly"
    yield f"traded: {len(lossy)} of {crossing} edges carry {saved:.1f}x fewer bytes; {effect}"


def _advice(figures: Forecast) -> Iterator[str]:
    """One sentence on cut layers where a link is what limits the step."""
    limit = figures.limit
    if limit is None or limit.way == "device" or limit.busy < MOSTLY_BUSY or figures.cut_layers != "possible":
        return
    if _mostly_shared(limit):
        return
    yield f"advice: a link limits this plan; {CUT_LAYERS}"
