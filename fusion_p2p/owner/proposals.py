"""Whether a proposed plan is what the owner asked for: who coordinates may choose badly, but not something else."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_p2p.errors import WireError
from fusion_p2p.plan.auto import NAME as AUTO
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.ratios import OVERHEAD
from fusion_p2p.wire.codecs import LADDER, NONE, SPARSE_LADDER, CodecSpec, parse
from fusion_p2p.wire.swarm_messages import Register

ROUNDING = 1.001
"""A plan writes ratios with six digits."""


def departure(plan: Plan, asked: Register, current: Plan | None = None) -> str | None:
    """How a plan departs from what was asked for, in a few words; None when it does not.

    current: the plan that runs, if it is to be mended or improved. One of the same cut may leave as it is what that one has.
    """
    same = current is not None and (current.slice_of, len(current.slices)) == (plan.slice_of, len(plan.slices))
    kept = current if same else None
    return next(_departures(plan, asked, kept), None)


def _departures(plan: Plan, asked: Register, kept: Plan | None) -> Iterator[str]:
    if plan.graph != asked.graph.digest:
        yield "it is for another graph"
    if plan.micro_batches != asked.micro_batches:
        yield f"it has {plan.micro_batches} micro-batches, not {asked.micro_batches}"
    if plan.scheduler not in (asked.scheduler, kept.scheduler if kept else None):
        yield f"it is by scheduler {plan.scheduler[:40]!r}, not {asked.scheduler}"
    if asked.schedule not in ("auto", plan.schedule) and not (kept and kept.schedule == plan.schedule):
        yield f"its pipeline is {plan.schedule}, not {asked.schedule}"
    if asked.peers is not None and len(plan.peers) > asked.peers:
        yield f"it takes {len(plan.peers)} peers, not {asked.peers}"
    yield from _recomputing(plan, asked, kept)
    yield from _unwanted(plan, asked)
    as_before = {(edge.value, edge.target): edge.codec for edge in kept.edges} if kept else {}
    for edge in plan.edges:
        if as_before.get((edge.value, edge.target)) != edge.codec and not _allowed(edge.codec, asked.codec, asked.ratio):
            yield f"it sends from slice {edge.source} to {edge.target} by codec {edge.codec[:40]!r}, not by {asked.codec}"


def _unwanted(plan: Plan, asked: Register) -> Iterator[str]:
    """Peers that it was told to do without."""
    without = asked.current.without if asked.current is not None else ()
    for peer in sorted(plan.peers.intersection(without)):
        yield f"it takes peer {peer}, which is lost, leaves, or failed"


def _recomputing(plan: Plan, asked: Register, kept: Plan | None) -> Iterator[str]:
    """Only `auto` may recompute unasked: where nothing fits without."""
    for index, part in enumerate(plan.slices):
        if kept is not None and kept.slices[index].recompute == part.recompute:
            continue
        if asked.recompute and not part.recompute:
            yield f"slice {index} does not recompute"
        if part.recompute and not asked.recompute and asked.scheduler != AUTO:
            yield f"slice {index} recomputes"


def _allowed(codec: str, policy: str, ratio: float) -> bool:
    """Whether a policy may give an edge this codec; every one may leave an edge as it is."""
    try:
        spec = parse(codec)
        return spec == NONE or _by_policy(spec, policy, ratio)
    except WireError:
        return False


def _by_policy(spec: CodecSpec, policy: str, ratio: float) -> bool:
    match policy:
        case "uniform":
            return spec.family == "topk-paper" and spec.ratio <= ROUNDING * ratio
        case "adatopk":
            return spec.family == "topk-paper" and spec.ratio <= ROUNDING * OVERHEAD * ratio
        case "adaptive":
            return spec in _rungs(ratio)
    return spec == parse(policy)


def _rungs(most: float) -> list[CodecSpec]:
    """Those that leave no trace; if they do not reach `most`, also the sparse ones up to the first that does."""
    if most <= LADDER[-1][0]:
        return [parse(text) for _, text in LADDER]
    below = sum(reached < most for reached, _ in SPARSE_LADDER)
    return [parse(text) for _, text in SPARSE_LADDER[: below + 1]]
