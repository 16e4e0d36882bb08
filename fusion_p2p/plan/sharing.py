"""Who holds what with others, who is its home, and the memory that agreeing on it takes once a step.

A trainable parameter held by several replicas (of one slice, or of several: tied) is answered for by one of them, its home: the
others send it their gradient once a step, and it sends the sum back, so that all copies get the same update. Among the members
of a slice the homes are spread by bytes, so that each moves what it would move in a ring: 2 (m - 1) / m of the gradients.
Buffers that a forward pass updates (BatchNorm's statistics) go the same way, when their slice has several replicas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate

from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Cut

Groups = Sequence[Sequence[int]]
"""The replicas of each slice, by replica number."""


def groups_of(members: Sequence[int]) -> Groups:
    """The replicas of each slice, if slice i has `members[i]`: they are numbered in (slice, member) order."""
    ends = list(accumulate(members))
    return [range(end - count, end) for end, count in zip(ends, members, strict=True)]


def holders_of(graph: Graph, parts: Cut, groups: Groups) -> dict[int, list[int]]:
    """The replicas that hold each trainable parameter and each buffer that they must agree on, in order."""
    held: dict[int, list[int]] = defaultdict(list)
    for part in parts.slices:
        for value in part.parameters:
            parameter = graph.parameter(value)
            if parameter.trainable or (parameter.update is not None and len(groups[part.index]) > 1):
                held[value] += groups[part.index]
    return dict(sorted(held.items()))


def homes_of(graph: Graph, holders: Mapping[int, Sequence[int]], groups: Groups) -> dict[int, int]:
    """Who sums each of them: of the first slice that holds it the member with the fewest bytes so far, large ones first."""
    group_of = {replica: group for group in groups for replica in group}
    load: dict[int, int] = defaultdict(int)
    homes: dict[int, int] = {}
    for value in sorted(holders, key=lambda value: (-graph.types[value].num_bytes, value)):
        home = min(group_of[holders[value][0]], key=lambda member: (load[member], member))
        load[home] += graph.types[value].num_bytes
        homes[value] = home
    return homes


def exchange_bytes(graph: Graph, parts: Cut, members: Sequence[int]) -> tuple[int, ...]:
    """For every slice, the bytes that agreeing takes at most on one of its members, beside the gradients themselves.

    At its home what every other holder sent and a copy of the sum; elsewhere a copy of what is sent and the sum that comes.
    """
    groups = groups_of(members)
    holders = holders_of(graph, parts, groups)
    homes = homes_of(graph, holders, groups)
    needed: dict[int, int] = defaultdict(int)
    for value, holding in holders.items():
        if len(holding) > 1:
            for replica in holding:
                needed[replica] += graph.types[value].num_bytes * (len(holding) if replica == homes[value] else 2)
    return tuple(max(needed[replica] for replica in group) for group in groups)
