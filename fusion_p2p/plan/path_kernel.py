"""The inner loop of the path planner, compiled by numba: the least fill time of a pipeline whose bottleneck is at most T.

For peers in a given order, `reach[j, q, i]` is the least fill time of all pipelines whose stages hold the first i blocks and
whose last stage is a group of size number q that ends at place j of the order:

    reach[j, q, i] = min over u < i of   start[u] + C(u, i)        C: seconds of the slowest member for blocks u to i - 1
    start[u]       = min over k, r  of   reach[k, r, u] + R        R: both messages over the worst link between the groups
    start[0]       = the time of the feeds (earlier peers stay idle)

subject to: every stage and every link takes at most T per micro-batch, every stage fits memory, and the fill so far plus what
the fastest peer needs for the rest is at most the limit. Peers between k and the group stay idle, so this covers every
contiguous partition over every subsequence of the order in which neighbours are not too far apart.

Everything here is in few plain arrays, with an axis that is numbered by the names below: calling and compiling what takes many
arrays, or classes of them, takes several times as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from fusion_p2p.plan.network import Floats

Ints = NDArray[np.int64]
INFINITE = 1e30
Function = TypeVar("Function", bound=Callable[..., Any])

REST_S, FORWARD_BYTES, BACKWARD_BYTES, KEPT_BYTES, RETURNED_BYTES, STATE_BYTES, SAVED_BYTES = range(7)
PARAMETER_BYTES, FEED_BYTES, IN_FLIGHT = range(7, 10)
"""Blocks, (10, N + 1), by position. REST_S: the least seconds for all blocks after it. FORWARD_BYTES, BACKWARD_BYTES: what a
cut there sends; KEPT_BYTES, RETURNED_BYTES: the same before coding. STATE_BYTES, SAVED_BYTES, PARAMETER_BYTES, FEED_BYTES: sums
over all blocks before it. IN_FLIGHT: micro-batches that a stage beginning there is assumed to hold.
"""

SIZE, SHARE, SYNC_S, SYNC_S_PER_BYTE, FREE_BYTES, FEED_ALPHA_S, FEED_S_PER_BYTE = range(7)
"""Groups of peers that may hold a stage, (n, Q, 7): for each place where one ends, one of each size. SHARE: seconds per
micro-batch of the group as a share of its slowest member's. SYNC_S, SYNC_S_PER_BYTE: what summing gradients costs a step.
FREE_BYTES: of the member with least. FEED_ALPHA_S, FEED_S_PER_BYTE: from the owner to the member that is worst connected.
"""

ALPHA_S, FORWARD_S, BACKWARD_S, FORWARD_HOLD_S, BACKWARD_HOLD_S = range(5)
"""The worst link between two groups, (n, Q, D, Q, 5): at place j of size number q, and of size number r with d peers between
them. ALPHA_S: both directions together. FORWARD_S, BACKWARD_S: seconds per byte of one message. FORWARD_HOLD_S,
BACKWARD_HOLD_S: seconds per byte that one micro-batch occupies the link, less if several links work side by side.
"""

BOTTLENECK_S, FILL_S, MICRO_BATCHES, CREDITS, RECOMPUTE, FULL_DUPLEX, USE_ALL = range(7)
"""What a pipeline must respect, (7,): bottleneck and fill in seconds, how memory is counted, and 1 or 0."""

CUT, SOURCE, SPAN = range(3)
"""Back pointers, (3, n * Q, N + 1), a row for each place and size. CUT: where a last stage that ends at a position begins.
SOURCE: the row of the group before it. SPAN: in its first two entries, the range of positions that are reached.
"""


def compiled(function: Function, *, alone: bool = True) -> Function:
    """Compiled at its first call, for the types of that call, and kept beside the module for the next process if possible.

    alone: not only compiled functions call it.
    """
    options: dict[str, Any] = {"no_cpython_wrapper": not alone, "no_cfunc_wrapper": not alone, "error_model": "numpy"}
    try:
        return cast("Function", njit(cache=True, **options)(function))
    except RuntimeError:  # numba found no folder to write to
        return cast("Function", njit(**options)(function))


def within(function: Function) -> Function:
    """Compiled, for compiled functions to call."""
    return compiled(function, alone=False)


@within
def stage_bytes(blocks: Floats, limits: Floats, first: int, last: int, size: float) -> float:
    """Memory of each member of a stage; the same arithmetic as `plan.memory.stage_bytes`, without tied parameters."""
    held = max(1.0, math.ceil(blocks[IN_FLIGHT, first] / size))
    fed = blocks[FEED_BYTES, last] - blocks[FEED_BYTES, first]
    kept = held * (blocks[KEPT_BYTES, first] + blocks[KEPT_BYTES, last] + fed)
    saved = (1.0 if limits[RECOMPUTE] > 0 else held) * (blocks[SAVED_BYTES, last] - blocks[SAVED_BYTES, first])
    arriving = limits[CREDITS] * (blocks[KEPT_BYTES, first] + blocks[RETURNED_BYTES, last])
    shared = (3.0 - 2.0 / size) * (blocks[PARAMETER_BYTES, last] - blocks[PARAMETER_BYTES, first]) if size > 1 else 0.0
    return float(blocks[STATE_BYTES, last] - blocks[STATE_BYTES, first] + kept + saved + arriving + shared)


@within
def begin(blocks: Floats, groups: Floats, links: Floats, limits: Floats, reach: Floats, pointers: Ints, at: Any) -> None:
    """Fill the last row of `reach` for the group `at` = (place, size number): the least time until its inputs are there."""
    place, which = at
    num_sizes = groups.shape[1]
    begins = place - int(groups[place, which, SIZE]) + 1
    alone = limits[USE_ALL] > 0
    start, came = reach[len(reach) - 1], pointers[SOURCE, place * num_sizes + which]
    forward_bytes, backward_bytes = blocks[FORWARD_BYTES], blocks[BACKWARD_BYTES]
    bottleneck, full_duplex = limits[BOTTLENECK_S], limits[FULL_DUPLEX] > 0
    for position in range(len(start)):
        start[position] = INFINITE
    if begins == 0 or not alone:
        start[0] = 0.0
    for distance in range(min(1 if alone else links.shape[2], begins)):
        for size in range(num_sizes):
            source = (begins - 1 - distance) * num_sizes + size
            span = pointers[SPAN, source]
            if span[1] == 0:
                continue
            link = links[place, which, distance, size]
            alpha, forward, backward = link[ALPHA_S], link[FORWARD_S], link[BACKWARD_S]
            forward_hold, backward_hold = link[FORWARD_HOLD_S], link[BACKWARD_HOLD_S]
            before = reach[source]
            for position in range(span[0], span[1]):
                out = forward_bytes[position]
                back = backward_bytes[position]
                held = max(out * forward_hold, back * backward_hold)
                if not full_duplex:
                    held = out * forward_hold + back * backward_hold
                value = before[position] + alpha + out * forward + back * backward
                if held <= bottleneck and value < start[position]:
                    start[position] = value
                    came[position] = source


@within
def extend(work: Floats, blocks: Floats, groups: Floats, limits: Floats, reach: Floats, pointers: Ints, at: Any) -> None:
    """Fill the rows of the group `at` from the last row of `reach`. work: of its slowest member."""
    place, which = at
    row = place * groups.shape[1] + which
    start, reached, cut = reach[len(reach) - 1], reach[row], pointers[CUT, row]
    rest, parameters, feeds = blocks[REST_S], blocks[PARAMETER_BYTES], blocks[FEED_BYTES]
    group, bottleneck, fill = groups[place, which], limits[BOTTLENECK_S], limits[FILL_S]
    size, share, free, feed = group[SIZE], group[SHARE], group[FREE_BYTES], group[FEED_S_PER_BYTE]
    sync, sync_per_byte = group[SYNC_S] / limits[MICRO_BATCHES], group[SYNC_S_PER_BYTE] / limits[MICRO_BATCHES]
    for last in range(1, len(work)):
        best = fill - rest[last]
        for first in range(last - 1, -1, -1):
            seconds = work[last] - work[first]
            synchronised = sync + sync_per_byte * (parameters[last] - parameters[first])
            if seconds * share + synchronised > bottleneck:
                break
            value = start[first] + seconds
            if value >= best:
                continue
            fed = feeds[last] - feeds[first]
            if fed * feed / size > bottleneck:
                break
            if first == 0:
                value += group[FEED_ALPHA_S] + fed * feed
            if value < best and stage_bytes(blocks, limits, first, last, size) <= free:
                best = value
                reached[last] = value
                cut[last] = first


@compiled
def least_fill(
    work: Floats,
    slowest: Ints,
    blocks: Floats,
    groups: Floats,
    links: Floats,
    limits: Floats,
    reach: Floats,
    pointers: Ints,
) -> tuple[float, int]:
    """The least fill in seconds (INFINITE: there is none) and the row where its last stage is; fills in the back pointers.

    work: (P, N + 1) seconds per micro-batch of each peer for all blocks before a position. slowest: (n, Q) the peer whose
    seconds count for a group, -1 where there is no group. reach: (n * Q + 1, N + 1), all INFINITE. pointers: all 0.
    """
    places, num_sizes = slowest.shape
    width = work.shape[1]
    least = INFINITE
    at = -1
    for place in range(places):
        for which in range(num_sizes):
            if slowest[place, which] < 0:
                continue
            row = place * num_sizes + which
            begin(blocks, groups, links, limits, reach, pointers, (place, which))
            extend(work[slowest[place, which]], blocks, groups, limits, reach, pointers, (place, which))
            span = pointers[SPAN, row]
            for position in range(1, width - 1):
                if reach[row, position] < INFINITE:
                    if span[1] == 0:
                        span[0] = position
                    span[1] = position + 1
            if reach[row, width - 1] < least and (place == places - 1 or limits[USE_ALL] == 0):
                least = reach[row, width - 1]
                at = row
    return least, at
