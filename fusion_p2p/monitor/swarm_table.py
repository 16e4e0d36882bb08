"""Who is in the swarm, as a table and as JSON, built from one answer of a peer."""

from __future__ import annotations

import json

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fusion_p2p.ids import PeerId
from fusion_p2p.monitor.text import harmless, num_bytes, peer_name
from fusion_p2p.wire.swarm_messages import JobStatus, PeerStatus, StatusReply

HEADINGS = ("peer", "state", "holds", "reachable", "device", "memory", "GFLOP/s", "Mbit/s up/down", "heard")
NUMBERS = ("memory", "GFLOP/s", "Mbit/s up/down", "heard")


def swarm_json(reply: StatusReply) -> str:
    """The whole answer as one JSON object on one line."""
    return json.dumps(reply.model_dump(mode="json"))


def swarm_picture(reply: StatusReply) -> RenderableType:
    """The coordinator, a row per peer, what those that execute nothing are for, and the jobs that wait or run."""
    parts: list[RenderableType] = [Text(_headline(reply)), _peer_table(reply)]
    if reply.peers_left_out:
        parts.append(Text(f"and {reply.peers_left_out} more peers"))
    parts += [Text(f"{peer_name(PeerId(peer.peer))}: {harmless(peer.standing)}") for peer in reply.peers if peer.standing]
    parts += [Text(f"job {job.job[:8]} of {peer_name(PeerId(job.owner))}: {_what_it_does(job, reply)}") for job in reply.jobs]
    return Group(*parts)


def _what_it_does(job: JobStatus, reply: StatusReply) -> str:
    """`waiting: 2 peers wanted: 1 peer free, 2 busy or unfit`, or on how many of the peers shown it runs."""
    if job.state == "waiting":
        return f"waiting: {harmless(job.reason)}"
    holders = sum(peer.holding is not None and peer.holding.job == job.job for peer in reply.peers)
    return f"runs on {_peers(holders)}" if holders else harmless(job.reason)


def _peers(count: int) -> str:
    return "1 peer" if count == 1 else f"{count} peers"


def _headline(reply: StatusReply) -> str:
    coordinator = reply.coordinator
    who = "nobody coordinates yet" if coordinator is None else (
        f"{peer_name(PeerId(coordinator.peer))} coordinates in term {coordinator.term}"
    )  # fmt: skip
    count = len(reply.peers) + reply.peers_left_out
    return f"swarm {harmless(reply.network)}: {_peers(count)}, {who}"


def _peer_table(reply: StatusReply) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading in NUMBERS else "left", no_wrap=heading == "peer")
    for peer in reply.peers:
        is_coordinator = reply.coordinator is not None and reply.coordinator.peer == peer.peer
        table.add_row(*(Text(cell) for cell in _row(peer, is_coordinator)))
    return table


def _row(peer: PeerStatus, is_coordinator: bool) -> tuple[str, ...]:
    holding = peer.holding
    holds = "-" if holding is None else f"{','.join(map(str, holding.slices[:12]))} of {holding.job[:8]}"
    return (
        peer_name(PeerId(peer.peer)) + (" *" if is_coordinator else ""),
        peer.state,
        holds,
        peer.reachability or "unknown",
        harmless(peer.device, 32),
        num_bytes(peer.free_bytes),
        f"{peer.flops_per_s / 1e9:,.0f}",
        f"{_mbit(peer.up_bytes_per_s)}/{_mbit(peer.down_bytes_per_s)}",
        f"{peer.heard_ago_s:.0f} s ago",
    )


def _mbit(bytes_per_s: float | None) -> str:
    """Mbit/s; a dash for what was not measured yet."""
    return "-" if bytes_per_s is None else f"{bytes_per_s * 8 / 1e6:.{0 if bytes_per_s >= 1.25e6 else 1}f}"
