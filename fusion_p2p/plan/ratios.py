"""By how much each boundary of a layout is compressed: the policies `none`, `uniform`, `adatopk`, `adaptive`, or one codec.

A ratio divides the dense bytes that cross, forward and back alike.

uniform    TopK that keeps 1 / r of the elements, as float32 value and int64 index: 12 bytes each, so a ratio of r / 3.
adatopk    AdaTopK, literal: keeps 1 / r_i with r_i = max(1, 3 r R_i / max R), R_i the seconds of the dense message; so the
           ratio is r_i / 3, and every compressed link takes max R / r seconds. Links with 1 < r_i < 3 send more than the dense
           message; `guarded_adatopk` leaves those dense.
adaptive   The least compression that costs at most `SLACK` of the step: one time cap tau for all links, ratio_i =
           clip(wire seconds_i / (tau - latency_i), 1, r), with the largest tau whose step is at most (1 + SLACK) times that of
           all links at r. One cap for all: that is the least total log-compression for a given time, by the KKT conditions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from fusion_p2p.errors import WireError
from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.coding import Way, pays
from fusion_p2p.plan.estimate import Formula, formula
from fusion_p2p.plan.layout import Layout
from fusion_p2p.plan.network import Floats, Network
from fusion_p2p.plan.request import PlanRequest, Terms
from fusion_p2p.wire.codecs import LADDER, MAX_RATIO, NONE, SPARSE, SPARSE_LADDER, CodecSpec, parse, rung_for

POLICIES = ("uniform", "adatopk", "adaptive")
OVERHEAD = 3.0
"""Bytes of a kept element, 12, over those of a float32."""
SLACK = 0.05
REFINEMENTS, POINTS = 5, 65
"""How the time cap is found: so many times a finer grid of so many caps."""


def with_ratios(chain: Chain, network: Network, layout: Layout, terms: Terms) -> Layout:
    """The layout with the ratios that `terms.codec` means for it."""
    return replace(layout, ratios=tuple(float(ratio) for ratio in ratios_of(chain, network, layout, terms)))


def ratios_of(chain: Chain, network: Network, layout: Layout, terms: Terms) -> Floats:
    """(stages - 1,) ratios by `terms.codec` and `terms.ratio`; WireError if there is no such codec."""
    count = len(layout.stages) - 1
    match terms.codec:
        case "uniform":
            return np.full(count, max(1.0, terms.ratio) / OVERHEAD)
        case "adatopk":
            return adatopk(formula(chain, network, layout, terms.micro_batches).message_s, terms.ratio)
        case "adaptive":
            return adaptive(formula(chain, network, layout, terms.micro_batches), terms.ratio)
    return np.full(count, nominal_ratio(terms.codec))


def most(terms: Terms) -> float:
    """The largest ratio that a policy gives any link."""
    if terms.codec == "uniform":
        return max(1.0, terms.ratio / OVERHEAD)
    return terms.ratio if terms.codec in ("adatopk", "adaptive") else nominal_ratio(terms.codec)


def nominal_ratio(codec: str) -> float:
    """By how much one codec divides the bytes of large float32 values, about: sizes depend on shapes."""
    spec = parse(codec)
    if spec.family == "topk-paper":
        return max(1.0, spec.ratio / OVERHEAD)
    known = {text: ratio for ratio, text in SPARSE_LADDER}
    if spec.family == "fp16":
        return known["bf16"]
    if spec.family not in SPARSE:
        return known[spec.family]
    ratios, reached = zip(
        *((parse(text).ratio, ratio) for ratio, text in SPARSE_LADDER if parse(text).family == "topk"), strict=True
    )
    return max(1.0, float(np.interp(spec.ratio, ratios, reached)))


def why_unknown(codec: str) -> str | None:
    """What is wrong with the name of a policy or codec."""
    try:
        if codec not in POLICIES:
            parse(codec)
    except WireError as error:
        return f"{error}; or one of the policies {', '.join(POLICIES)}"
    return None


def codec_of(ratios: Sequence[float], request: PlanRequest, way: Way) -> str:
    """The codec of an edge that spans boundaries with these ratios, as text for the plan: one that divides by the largest.

    `adaptive` takes the least lossy rung that is enough, of those that leave no trace in the model as far as they reach, and
    never one that takes longer than it saves on this link between these devices.
    """
    ratio = max(ratios)
    match request.codec:
        case "uniform" | "adatopk":
            kept = CodecSpec("topk-paper", min(OVERHEAD * ratio, MAX_RATIO))
            return str(kept) if ratio > 1.0 else NONE.family
        case "adaptive":
            sparse = request.ratio > LADDER[-1][0]
            useful = partial(_pays, way)
            return rung_for(ratio, sparse=sparse, pays=useful) if ratio > 1.0 else NONE.family
    return request.codec


def _pays(way: Way, spec: CodecSpec) -> bool:
    return pays(spec, nominal_ratio(str(spec)), way)


def adatopk(message_s: Floats, ratio: float) -> Floats:
    """AdaTopK, literal. message_s: (n,) seconds of every dense message."""
    kept = _one_in(message_s, ratio)
    return np.where(kept <= 1.0, 1.0, kept / OVERHEAD)


def guarded_adatopk(message_s: Floats, ratio: float) -> Floats:
    """AdaTopK without messages that are larger than the dense ones."""
    return np.maximum(1.0, _one_in(message_s, ratio) / OVERHEAD)


def adaptive(links: Formula, most: float, slack: float = SLACK) -> Floats:
    """The ratios of the largest time cap whose step is at most (1 + slack) times the step with all links at `most`."""
    allowed = links.step_s(np.full(len(links.latency_s), most)) * (1 + slack)
    dense = np.ones(len(links.latency_s))
    if links.step_s(dense) <= allowed:
        return dense
    low, high = _least_cap(links, most), float(np.max(links.message_s))
    for _ in range(REFINEMENTS):
        caps = np.geomspace(low, high, POINTS)
        enough = links.steps_s(capped(links, caps[:, None], most)) <= allowed
        found = max(0, int(np.argmin(enough)) - 1)  # the step grows with the cap: the last that is enough
        low, high = float(caps[found]), float(caps[found + 1])
    return capped(links, np.array(low), most)


def capped(links: Formula, cap_s: Floats, most: float) -> Floats:
    """The ratios that bring every message to `cap_s`, none above `most`; one row for each row of caps."""
    wire = np.maximum(links.forward_s, links.backward_s)
    return np.clip(wire / np.maximum(cap_s - links.latency_s, 1e-12), 1.0, most)


def _least_cap(links: Formula, most: float) -> float:
    """A cap at which every link is at `most`."""
    wire = np.maximum(links.forward_s, links.backward_s)
    return max(float(np.min((links.latency_s + wire / most)[wire > 0])), 1e-12)


def _one_in(message_s: Floats, ratio: float) -> Floats:
    """r_i: link i keeps one in so many elements."""
    return np.maximum(1.0, OVERHEAD * ratio * message_s / max(float(np.max(message_s, initial=0.0)), 1e-30))
