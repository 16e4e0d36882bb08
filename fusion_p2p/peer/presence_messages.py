"""Between the swarm's messages and its state machine: tokens, lists of members, status. No I/O."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusion_p2p.ids import PeerId
from fusion_p2p.swarm.announcement import Announcement
from fusion_p2p.swarm.election import Token
from fusion_p2p.swarm.members import Member, Membership
from fusion_p2p.swarm.membership import Listed, RosterTold
from fusion_p2p.swarm.node import BeatArrived, ReplyArrived
from fusion_p2p.wire.swarm_messages import (
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

MAX_SAMPLE = 32
"""Members told to who asks a peer that does not coordinate."""
MAX_CHANGES = 300
"""Of the roster, in one reply: 30 KiB at most."""


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


@dataclass(frozen=True, slots=True)
class RosterChanges:
    """What a coordinator tells who beats to it: the changes of its roster after one number, up to another."""

    since: int
    version: int
    members: tuple[MemberEntry, ...]
    gone: tuple[PeerId, ...]
    more: bool = False
    """There are more after these."""


def to_token(coordinator: Coordinator | None) -> Token | None:
    return None if coordinator is None else Token(coordinator.term, PeerId(coordinator.peer))


def from_token(token: Token | None) -> Coordinator | None:
    return None if token is None else Coordinator(term=token.term, peer=token.peer)


def beat_arrived(peer: PeerId, beat: Beat) -> BeatArrived:
    return BeatArrived(peer, beat.incarnation, beat.sequence, beat.holding is not None, to_token(beat.coordinator))


def reply_arrived(peer: PeerId, reply: BeatReply, asked_at: float) -> ReplyArrived:
    members = tuple(Listed(PeerId(m.peer), m.incarnation, m.holds, m.heard_ago_s) for m in reply.members)
    roster = None
    if reply.roster:
        gone = frozenset(map(PeerId, reply.gone))
        roster = RosterTold(peer, reply.since, reply.roster, members, gone, complete=not reply.more)
    return ReplyArrived(
        peer, reply.incarnation, reply.holds, to_token(reply.coordinator), reply.over, members, roster, asked_at
    )


def sample_of(membership: Membership, now: float, without: PeerId, heard_lately_s: float) -> tuple[MemberEntry, ...]:
    """The members heard last, as hearsay: few, because everybody tells everybody."""
    living = ((membership.heard_at(peer), peer) for peer in membership.heard_since(now - heard_lately_s) if peer != without)
    latest = heapq.nsmallest(MAX_SAMPLE, living, key=lambda item: (-item[0], item[1]))
    return tuple(_entry(peer, membership.members[peer], now - heard_at) for heard_at, peer in latest)


def changes_since(membership: Membership, known: int, now: float, without: PeerId) -> RosterChanges:
    """What changed on our roster after the number `known`, as much as a message carries; all of it when that is long ago."""
    since = known if membership.departed_since <= known <= membership.version else 0
    if since == membership.version:
        return RosterChanges(since, since, (), ())
    changes: list[tuple[int, PeerId, Member | None]]
    changes = [(m.version, peer, m) for peer, m in membership.members.items() if m.version > since]
    changes += [(version, peer, None) for peer, version in membership.departed.items() if version > since > 0]
    changes.sort(key=lambda change: change[0])
    more = len(changes) > MAX_CHANGES
    version = changes[MAX_CHANGES - 1][0] if more else membership.version
    del changes[MAX_CHANGES:]
    return RosterChanges(
        since,
        version,
        tuple(_entry(peer, m, now - m.heard_at) for _, peer, m in changes if m is not None and peer != without),
        tuple(peer for _, peer, m in changes if m is None),
        more,
    )


def _entry(peer: PeerId, member: Member, heard_ago_s: float) -> MemberEntry:
    return MemberEntry(peer=peer, incarnation=member.incarnation, holds=member.holds, heard_ago_s=max(0.0, heard_ago_s))


def status_reply(
    asked: PeerId,
    network: str,
    coordinator: Token | None,
    present: Sequence[Present],
    jobs: Iterable[JobStatus],
    standings: Mapping[PeerId, str],
) -> StatusReply:
    """Who is here, bounded."""
    shown = present[:MAX_PEERS_IN_STATUS]
    return StatusReply(
        network=network,
        asked=asked,
        coordinator=from_token(coordinator),
        peers=tuple(_peer_status(peer, standings.get(peer.peer, "")) for peer in shown),
        peers_left_out=len(present) - len(shown),
        jobs=tuple(jobs)[:16],
    )


def _peer_status(present: Present, standing: str) -> PeerStatus:
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
        standing=standing,
    )
