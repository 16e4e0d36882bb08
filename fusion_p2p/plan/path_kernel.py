"""The inner loop of the path planner, compiled by numba: the least fill time of a pipeline whose bottleneck is at most T.

For peers in a given order, `reach[j, q, i]` is the least fill time of all pipelines whose stages hold the first i blocks and
whose last stage is a group of `sizes[q]` peers that ends at place j of the order:

    reach[j, q, i] = min over u < i of   start[u] + C(u, i)        C: seconds of the slowest member for blocks u to i - 1
    start[u]       = min over k, r  of   reach[k, r, u] + R        R: both messages over the worst link between the groups
    start[0]       = the time of the feeds (earlier peers stay idle)

subject to: every stage and every link takes at most T per micro-batch, every stage fits memory, and the fill so far plus what
the fastest peer needs for the rest is at most the limit. Peers between k and the group stay idle, so this covers every
contiguous partition over every subsequence of the order in which neighbours are not too far apart.

Everything here is plain arrays in tuples, because numba compiles those without a class.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from fusion_p2p.plan.network import Floats

Ints = NDArray[np.int64]
INFINITE = 1e30
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compiled at its first call, for the types of that call, and kept beside the module for the next process if possible."""
    try:
        return cast("Function", njit(function, cache=True))
    except RuntimeError:  # numba found no folder to write to
        return cast("Function", njit(function))


class Blocks(NamedTuple):
    """The chain. Arrays have one entry per position (N + 1).

    work: (P, N + 1) seconds per micro-batch of each peer for all blocks before the position. rest_s: the least seconds for all
    blocks after it. forward_bytes, backward_bytes: what a cut there sends. kept_bytes, returned_bytes: the same
    before coding. state_bytes, saved_bytes, parameter_bytes, feed_bytes: sums over all blocks before the position.
    in_flight: micro-batches that a stage beginning there is assumed to hold.
    """

    work: Floats
    rest_s: Floats
    forward_bytes: Floats
    backward_bytes: Floats
    kept_bytes: Floats
    returned_bytes: Floats
    state_bytes: Floats
    saved_bytes: Floats
    parameter_bytes: Floats
    feed_bytes: Floats
    in_flight: Floats


class Groups(NamedTuple):
    """Groups of peers that may hold a stage: for each place j where one ends, and size q. Arrays are (n, Q) but `sizes` (Q,).

    allowed: whether there is such a group. slowest: the peer whose seconds count for the fill. share: seconds per micro-batch
    of the group as a share of its slowest member's. sync_s, sync_s_per_byte: what summing gradients costs a step. free_bytes:
    of the member with least. feed_alpha_s, feed_s_per_byte: from the owner to the member that is worst connected.
    """

    sizes: Ints
    allowed: NDArray[np.bool_]
    slowest: Ints
    share: Floats
    sync_s: Floats
    sync_s_per_byte: Floats
    free_bytes: Floats
    feed_alpha_s: Floats
    feed_s_per_byte: Floats


class Links(NamedTuple):
    """The worst link between two groups, (n, Q, D, Q): at place j of size q, and of size r with d peers between them.

    alpha_s: both directions together. forward_s, backward_s: seconds per byte of one message. forward_hold_s, backward_hold_s:
    seconds per byte that one micro-batch occupies the link, less if several links work side by side.
    """

    alpha_s: Floats
    forward_s: Floats
    backward_s: Floats
    forward_hold_s: Floats
    backward_hold_s: Floats


class Limits(NamedTuple):
    """What a pipeline must respect: the bottleneck and the fill in seconds, and how memory is counted."""

    bottleneck_s: float
    fill_s: float
    micro_batches: float
    credits: float
    recompute: bool
    full_duplex: bool
    use_all: bool


@compiled
def stage_bytes(blocks: Blocks, limits: Limits, first: int, last: int, size: int) -> float:
    """Memory of each member of a stage; the same arithmetic as `plan.memory.slice_bytes`."""
    held = max(1.0, math.ceil(blocks.in_flight[first] / size))
    fed = blocks.feed_bytes[last] - blocks.feed_bytes[first]
    kept = held * (blocks.kept_bytes[first] + blocks.kept_bytes[last] + fed)
    saved = (1.0 if limits.recompute else held) * (blocks.saved_bytes[last] - blocks.saved_bytes[first])
    arriving = limits.credits * (blocks.kept_bytes[first] + blocks.returned_bytes[last])
    return float(blocks.state_bytes[last] - blocks.state_bytes[first] + kept + saved + arriving)


@compiled
def begin(start: Floats, came: Ints, blocks: Blocks, groups: Groups, links: Links, limits: Limits, at: Any) -> None:
    """Fill `start` (N + 1) for the group `at` = (place, size index, reach): the least time until its inputs are there."""
    reach, finite, place, which = at
    num_sizes = len(groups.sizes)
    begins = place - groups.sizes[which] + 1
    for position in range(len(start)):
        start[position] = INFINITE
    if begins == 0 or not limits.use_all:
        start[0] = 0.0
    for before in range(begins - 1, max(-1, begins - 1 - links.alpha_s.shape[2]), -1):
        if limits.use_all and before < begins - 1:
            break
        for size in range(num_sizes):
            if finite[before, size, 1] == 0:
                continue
            distance = begins - 1 - before
            alpha = links.alpha_s[place, which, distance, size]
            forward = links.forward_s[place, which, distance, size]
            backward = links.backward_s[place, which, distance, size]
            forward_hold = links.forward_hold_s[place, which, distance, size]
            backward_hold = links.backward_hold_s[place, which, distance, size]
            source = before * num_sizes + size
            for position in range(finite[before, size, 0], finite[before, size, 1]):
                out = blocks.forward_bytes[position]
                back = blocks.backward_bytes[position]
                held = max(out * forward_hold, back * backward_hold)
                if not limits.full_duplex:
                    held = out * forward_hold + back * backward_hold
                value = reach[before, size, position] + alpha + out * forward + back * backward
                if held <= limits.bottleneck_s and value < start[position]:
                    start[position] = value
                    came[position] = source


@compiled
def extend(reach: Floats, cut: Ints, start: Floats, blocks: Blocks, groups: Groups, limits: Limits, at: Any) -> None:
    """Fill `reach` and `cut` (N + 1) for the group `at`, from `start`."""
    place, which = at
    work = blocks.work[groups.slowest[place, which]]
    size = groups.sizes[which]
    share = groups.share[place, which]
    free = groups.free_bytes[place, which]
    sync = groups.sync_s[place, which] / limits.micro_batches
    sync_per_byte = groups.sync_s_per_byte[place, which] / limits.micro_batches
    feed = groups.feed_s_per_byte[place, which]
    for last in range(1, len(work)):
        best = limits.fill_s - blocks.rest_s[last]
        for first in range(last - 1, -1, -1):
            seconds = work[last] - work[first]
            synchronised = sync + sync_per_byte * (blocks.parameter_bytes[last] - blocks.parameter_bytes[first])
            if seconds * share + synchronised > limits.bottleneck_s:
                break
            value = start[first] + seconds
            if value >= best:
                continue
            fed = blocks.feed_bytes[last] - blocks.feed_bytes[first]
            if fed * feed / size > limits.bottleneck_s:
                break
            if first == 0:
                value += groups.feed_alpha_s[place, which] + fed * feed
            if value < best and stage_bytes(blocks, limits, first, last, size) <= free:
                best = value
                reach[last] = value
                cut[last] = first


@compiled
def least_fill(blocks: Blocks, groups: Groups, links: Links, limits: Limits) -> tuple[float, int, Ints, Ints]:
    """The least fill in seconds (INFINITE: there is none), where its last stage is, and the back pointers (n * Q, N + 1)."""
    places, num_sizes = groups.allowed.shape
    width = blocks.work.shape[1]
    reach = np.full((places, num_sizes, width), INFINITE)
    cuts = np.full((places * num_sizes, width), -1)
    sources = np.full((places * num_sizes, width), -1)
    finite = np.zeros((places, num_sizes, 2), np.int64)
    start = np.empty(width)
    least = INFINITE
    at = -1
    for place in range(places):
        for which in range(num_sizes):
            if not groups.allowed[place, which]:
                continue
            row = place * num_sizes + which
            begin(start, sources[row], blocks, groups, links, limits, (reach, finite, place, which))
            extend(reach[place, which], cuts[row], start, blocks, groups, limits, (place, which))
            for position in range(width - 1):
                if reach[place, which, position] < INFINITE:
                    if finite[place, which, 1] == 0:
                        finite[place, which, 0] = position
                    finite[place, which, 1] = position + 1
            if reach[place, which, width - 1] < least and (place == places - 1 or not limits.use_all):
                least = reach[place, which, width - 1]
                at = row
    return least, at, cuts, sources
