"""What peers say to each other about the swarm, and what owners ask of it (`/fusion/swarm/1`).

    peer -> peer          Beat           I am here and hold this           -> BeatReply
                          VoteRequest    let me coordinate this term       -> VoteReply
                          Probe          do you hear that peer? (second observer)         -> ProbeReply
                          Leave          I go, on purpose                  -> (the stream closes)
    coordinator -> peer   LinksRequest   what are your links like?         -> Links
    owner -> coordinator  Register       plan my job          -> Waiting*, then Proposal | Unchanged | NotCoordinator
    anyone -> peer        StatusRequest  who is here?                      -> StatusReply

One question per stream, with two exceptions. Beats to a coordinator may follow each other on one. Register is answered by any
number of Waiting messages, at least one every 5 s, before the Proposal, and among them MeasureLinks, which the owner answers
with Links to the peers it names. Who speaks is the authenticated peer of the stream, so no message carries its sender.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fusion_p2p.wire.job_messages import Contact, Content, Finite, OptimiserSettings, SliceIndex
from fusion_p2p.wire.messages import Count, JobName, Message, MessageSet, Name, PeerName, Record, Seconds, Text
from fusion_p2p.wire.probe_messages import BytesPerSecond

SWARM_PROTOCOL = "/fusion/swarm/1"
MAX_MEMBERS_LISTED = 400
MAX_PEERS_IN_STATUS = 120
MAX_RECORD_BYTES = 2048
MAX_MICRO_BATCHES = 4096
"""In one step of a job: whoever registers has strangers compute a plan, whose work grows with them."""
MAX_LINKS = 128
"""In one table of links."""

PeerState = Literal["standby", "working", "paused", "draining"]
Reachability = Literal["direct", "relayed", "outbound-only"]


class Coordinator(Record):
    """Who coordinates: the term, and the peer elected in it. Compared by term, then peer id."""

    term: Count
    peer: PeerName


class Holding(Record):
    """What a peer executes: slices of one job."""

    job: JobName
    slices: Annotated[tuple[SliceIndex, ...], Field(max_length=256)]


class Beat(Message):
    kind: ClassVar[str] = "beat"
    incarnation: Count
    """Unix milliseconds of the start of this peer, raised by one each time it was evicted: older is longer here."""
    sequence: Count
    coordinator: Coordinator | None
    state: PeerState
    holding: Holding | None
    progress: Count
    """Tasks done so far."""
    roster: Count = 0
    """Up to which number the sender knows the changes of the receiver's roster; 0: not at all."""
    record: Annotated[bytes, Field(max_length=MAX_RECORD_BYTES)] = b""
    """The sender's sealed announcement, when the receiver has not acknowledged the newest one; otherwise empty."""


class MemberEntry(Record):
    """A peer that the sender knows of, and how long ago it was last heard."""

    peer: PeerName
    incarnation: Count
    holds: bool
    heard_ago_s: Seconds


class BeatReply(Message):
    kind: ClassVar[str] = "beat_reply"
    incarnation: Count
    coordinator: Coordinator | None
    state: PeerState
    holds: bool
    over: Count | None
    """The asker's incarnation is over, and so are all up to this one: it comes back with a higher one."""
    members: Annotated[tuple[MemberEntry, ...], Field(max_length=MAX_MEMBERS_LISTED)]
    """From a coordinator: what changed on its roster after the number `since`; from others those heard last."""
    gone: Annotated[tuple[PeerName, ...], Field(max_length=MAX_MEMBERS_LISTED)] = ()
    """Who went from the roster meanwhile."""
    since: Count = 0
    """As the asker knows it; 0: the roster is told from its beginning."""
    roster: Count = 0
    """Up to which number changes are told now; 0: the sender has no roster, as it does not coordinate."""
    more: bool = False
    """The roster has changes after these, which did not fit: beat again at once."""
    standing: Text = ""
    """What the coordinator has for the asker to do, in words for its volunteer; empty from who does not coordinate."""
    again_s: Seconds = 0.0
    """After the beat that is answered, the asker beats again when so much has passed, so that many beats come together; 0: as
    it does anyway."""


class VoteRequest(Message):
    kind: ClassVar[str] = "vote_request"
    term: Count
    incarnation: Count


class VoteReply(Message):
    kind: ClassVar[str] = "vote_reply"
    term: Count
    """The term voted in, or the highest the voter knows when it refuses."""
    granted: bool
    reason: Text
    coordinator: Coordinator | None


class Probe(Message):
    kind: ClassVar[str] = "probe"
    peer: PeerName


class ProbeReply(Message):
    kind: ClassVar[str] = "probe_reply"
    heard: bool


class Leave(Message):
    kind: ClassVar[str] = "leave"
    incarnation: Count


class HeldAt(Record):
    """Who has a copy of a slice's state."""

    slice: SliceIndex
    peer: PeerName


class Current(Record):
    """What a job that registers again runs on, or ran on until it lost somebody."""

    purpose: Literal["mend", "improve"]
    """mend: it cannot go on with `without`, the least change is wanted. improve: another plan only if it pays."""
    plan: Content
    """The owner serves it."""
    without: Annotated[tuple[PeerName, ...], Field(max_length=256)] = ()
    """Peers of the plan that are lost, leave, or must not be used again."""
    held: Annotated[tuple[HeldAt, ...], Field(max_length=1024)] = ()
    """Copies of slices at peers that do not execute them: these can take over without a download."""
    step_s: Seconds = 0.0
    """Measured seconds per step of the plan; 0: not known."""
    steps_left: Count = 0
    gain: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.1
    """The share of a step that a better plan has to gain."""


class Register(Message):
    kind: ClassVar[str] = "register"
    job: JobName
    incarnation: Count
    graph: Content
    micro_batches: Annotated[int, Field(ge=1, le=MAX_MICRO_BATCHES)]
    optimiser: OptimiserSettings
    precision: Literal["fp32", "bf16"]
    base_epoch: Count
    """The owner's newest epoch: a proposal is for the next one."""
    peers: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Plan with exactly so many peers as soon as they are here; None: all that are free once nobody new comes."""
    scheduler: Name = "equal-compute"
    recompute: bool = False
    schedule: Literal["auto", "gpipe", "1f1b"] = "auto"
    codec: Name = "none"
    ratio: Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)] = 100.0
    current: Current | None = None
    """None: it runs on nothing yet."""


class LinkEntry(Record):
    """What the sender knows of the links between itself and a peer, None where it knows nothing."""

    peer: PeerName
    latency_s: Seconds | None
    out_bytes_per_s: BytesPerSecond | None
    """From the sender to the peer."""
    in_bytes_per_s: BytesPerSecond | None
    age_s: Seconds
    """Since latency and the rate out were last measured: only probes tell them."""
    in_age_s: Seconds
    """Since the rate in was, by a probe or by traffic."""


class LinksRequest(Message):
    kind: ClassVar[str] = "links_request"


class Links(Message):
    kind: ClassVar[str] = "links"
    entries: Annotated[tuple[LinkEntry, ...], Field(max_length=MAX_LINKS)]
    measuring: bool
    """More will be known in a few seconds."""
    request: Count = 0
    """The number of the MeasureLinks that this answers."""


class MeasureLinks(Message):
    kind: ClassVar[str] = "measure_links"
    request: Count
    """An answer that comes too late names another one."""
    peers: Annotated[tuple[PeerName, ...], Field(max_length=MAX_LINKS)]


class Waiting(Message):
    kind: ClassVar[str] = "waiting"
    reason: Text


class Unchanged(Message):
    """To who asks for a better plan: there is none that pays, and why."""

    kind: ClassVar[str] = "unchanged"
    reason: Text


class NotCoordinator(Message):
    kind: ClassVar[str] = "not_coordinator"
    coordinator: Coordinator | None
    addresses: Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=8)] = ()


class Proposal(Message):
    kind: ClassVar[str] = "proposal"
    job: JobName
    term: Count
    coordinator: PeerName
    base_epoch: Count
    plan: Content
    contacts: Annotated[tuple[Contact, ...], Field(max_length=256)]


class PeerStatus(Record):
    """One peer as its announcement and its last beat describe it."""

    peer: PeerName
    state: PeerState
    reachability: Reachability | None
    device: Name
    fusion_version: Name
    free_bytes: Count
    flops_per_s: Finite
    up_bytes_per_s: BytesPerSecond | None
    down_bytes_per_s: BytesPerSecond | None
    """What it was seen to send and receive at best; None: not measured yet."""
    holding: Holding | None
    progress: Count
    heard_ago_s: Seconds
    standing: Text = ""
    """What it does or waits for, in words."""


class JobStatus(Record):
    """One job that the coordinator knows of."""

    job: JobName
    owner: PeerName
    state: Literal["waiting", "proposed"]
    reason: Text


class StatusRequest(Message):
    kind: ClassVar[str] = "status_request"


class StatusReply(Message):
    kind: ClassVar[str] = "status_reply"
    network: Name
    asked: PeerName
    coordinator: Coordinator | None
    peers: Annotated[tuple[PeerStatus, ...], Field(max_length=MAX_PEERS_IN_STATUS)]
    peers_left_out: Count
    jobs: Annotated[tuple[JobStatus, ...], Field(max_length=16)]


SWARM_MESSAGES = MessageSet(
    Beat, BeatReply, VoteRequest, VoteReply, Probe, ProbeReply, Leave,
    LinksRequest, Links, MeasureLinks, Register, Waiting, Unchanged, NotCoordinator, Proposal, StatusRequest, StatusReply,
)  # fmt: skip
