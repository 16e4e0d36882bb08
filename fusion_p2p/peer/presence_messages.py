"""Between the swarm's messages and its state machine: tokens, lists of members, status. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusion_p2p.ids import PeerId
from fusion_p2p.swarm.announcement import Announcement
from fusion_p2p.swarm.election import Token
from fusion_p2p.swarm.membership import Listed, Membership
from fusion_p2p.swarm.node import BeatArrived, ReplyArrived
from fusion_p2p.wire.swarm_messages import (
    MAX_MEMBERS_LISTED,
    MAX_PEERS_IN_STATUS,
    Beat,
    BeatReply,
    Coordinator,
    Holding,
    JobStatus,
    MemberEntry,
    PeerState,
    PeerStatus,
    StatusReply,
)


@dataclass(frozen=True, slots=True)
class Present:
    """A peer that is here now: what it announced, what it said last, and how long ago."""

    peer: PeerId
    announcement: Announcement | None
    state: PeerState
    holding: Holding | None
    progress: int
    heard_ago_s: float
    joined_at: float
    """On our clock: since when we know it in this incarnation."""
    reported: bool
    """It told us itself a moment ago what it holds; hearsay does not say that."""


def to_token(coordinator: Coordinator | None) -> Token | None:
    return None if coordinator is None else Token(coordinator.term, PeerId(coordinator.peer))


def from_token(token: Token | None) -> Coordinator | None:
    return None if token is None else Coordinator(term=token.term, peer=token.peer)


def beat_arrived(peer: PeerId, beat: Beat) -> BeatArrived:
    return BeatArrived(peer, beat.incarnation, beat.sequence, beat.holding is not None, to_token(beat.coordinator))


def reply_arrived(peer: PeerId, reply: BeatReply) -> ReplyArrived:
    members = tuple(Listed(PeerId(m.peer), m.incarnation, m.holds, m.heard_ago_s) for m in reply.members)
    return ReplyArrived(peer, reply.incarnation, reply.holds, to_token(reply.coordinator), reply.over, members)


def list_members(membership: Membership, now: float, without: PeerId, heard_lately_s: float) -> tuple[MemberEntry, ...]:
    """The members heard lately, latest first, as many as a message carries."""
    latest = sorted(membership.members.items(), key=lambda item: (-item[1].heard_at, item[0]))
    entries = (
        MemberEntry(peer=peer, incarnation=m.incarnation, holds=m.holds, heard_ago_s=max(0.0, now - m.heard_at))
        for peer, m in latest
        if peer != without and now - m.heard_at <= heard_lately_s
    )
    return tuple(entry for entry, _ in zip(entries, range(MAX_MEMBERS_LISTED), strict=False))


def status_reply(
    asked: PeerId, network: str, coordinator: Token | None, present: Sequence[Present], jobs: Iterable[JobStatus]
) -> StatusReply:
    """Who is here, bounded."""
    shown = present[:MAX_PEERS_IN_STATUS]
    return StatusReply(
        network=network,
        asked=asked,
        coordinator=from_token(coordinator),
        peers=tuple(_peer_status(peer) for peer in shown),
        peers_left_out=len(present) - len(shown),
        jobs=tuple(jobs)[:16],
    )


def _peer_status(present: Present) -> PeerStatus:
    announced = present.announcement
    return PeerStatus(
        peer=present.peer,
        state=present.state,
        reachability=announced.reachability if announced else None,
        device=announced.device if announced else "",
        fusion_version=announced.versions.fusion if announced else "",
        free_bytes=announced.free_bytes if announced else 0,
        flops_per_s=announced.rates.matmul_flops if announced else 0.0,
        up_bytes_per_s=announced.line.up_bytes_per_s if announced else None,
        down_bytes_per_s=announced.line.down_bytes_per_s if announced else None,
        holding=present.holding,
        progress=present.progress,
        heard_ago_s=max(0.0, present.heard_ago_s),
    )
