"""What the owner of a run and the holders of its slices say to each other (`/fusion/job/1`, one long-lived stream per peer).

    owner -> peer   Prepare      take these slices of this plan for an epoch          -> Prepared | Refused
                    Start        run the epoch, from this step on                     -> Started
                    Abort        the epoch will not run; forget it
                    Commit, Skip the fate of a step                                   -> Applied, per replica
                    Halt         run no further task of the epoch, keep the states    -> Halted
                    Guard        fetch a copy of a slice's state and keep it          -> Held | NotHeld
                    Admit        who else may fetch states of this run here
                    Durable      states older than this step need not be kept
                    Stop         the run has ended; become standby                    -> (the stream closes)
    peer -> owner   StepReport   a replica has done its backward passes of a step
                    EvalReport   the loss of one validation micro-batch
                    Failed       a replica cannot go on
                    Lost         a neighbour in the plan went away
                    Kept         a copy of a slice's state lies in this peer's memory
                    Leaving      this peer wants to go: hand its slices over
    both            Pulse        alive; once a second when nothing else was said

A message is obeyed only from the authenticated owner (or holder) of the run, in its incarnation and epoch.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fusion_p2p.wire.messages import Count, DigestText, JobName, Message, MessageSet, PeerName, Record, Seconds, Text

JOB_PROTOCOL = "/fusion/job/1"
Finite = Annotated[float, Field(allow_inf_nan=False)]
SliceIndex = Annotated[int, Field(ge=0, lt=0xFFFF)]
ReplicaIndex = Annotated[int, Field(ge=0, lt=0xFFFF)]
"""The number of a replica in its plan; in a plan without stage replicas that of its slice."""
Number = Annotated[float, Field()]
"""A float that may be infinite or NaN: what a report says of a step that went wrong."""


class Content(Record):
    """Some bytes that the owner serves by their digest."""

    digest: DigestText
    num_bytes: Count


class OptimiserSettings(Record):
    """The optimiser by name; fields that a kind does not use are ignored by it. Formulas are torch.optim's."""

    name: Literal["sgd", "adam", "adamw"]
    momentum: Finite = 0.0
    beta1: Finite = 0.9
    beta2: Finite = 0.999
    epsilon: Finite = 1e-8
    weight_decay: Finite = 0.0


class TrainingSettings(Record):
    """Everything of a run that changes what a slice computes."""

    seed: Count
    optimiser: OptimiserSettings
    precision: Literal["fp32", "bf16"] = "fp32"


class Contact(Record):
    """How to dial a peer of the plan."""

    peer: PeerName
    addresses: Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=8)]


class Source(Record):
    """Who may have the tensors of a slice's state; another cut may have several, each with some of them."""

    slice: SliceIndex
    peers: Annotated[tuple[PeerName, ...], Field(max_length=64)]


class Stock(Record):
    """The steps after which a peer can still produce the state of a slice: the running one, and copies that it keeps."""

    slice: SliceIndex
    steps: Annotated[tuple[Count, ...], Field(max_length=8)]


class Prepare(Message):
    kind: ClassVar[str] = "prepare"
    job: JobName
    incarnation: Count
    epoch: Count
    graph: Content
    plan: Content
    settings: TrainingSettings
    state_step: Count
    """The slices' state is that after this step; 0: as the graph's rules or the owner's initial weights say."""
    contacts: Annotated[tuple[Contact, ...], Field(max_length=256)]
    beside: bool = False
    """The epoch that runs here goes on until this one is started, with the state of the same slices as it lies there."""
    sources: Annotated[tuple[Source, ...], Field(max_length=512)] = ()
    """Where to fetch what is not here: these peers in turn, tensor by tensor, then the owner."""


class Prepared(Message):
    kind: ClassVar[str] = "prepared"
    epoch: Count


class Refused(Message):
    kind: ClassVar[str] = "refused"
    epoch: Count
    reason: Text


class Start(Message):
    kind: ClassVar[str] = "start"
    epoch: Count
    state_step: Count


class Started(Message):
    kind: ClassVar[str] = "started"
    epoch: Count


class Abort(Message):
    kind: ClassVar[str] = "abort"
    epoch: Count
    reason: Text


class Halt(Message):
    kind: ClassVar[str] = "halt"
    epoch: Count
    reason: Text
    """What was decided before is still applied; an open step is forgotten."""


class Halted(Message):
    kind: ClassVar[str] = "halted"
    epoch: Count
    stock: Annotated[tuple[Stock, ...], Field(max_length=256)]
    """All states of this run that lie here, also of slices that are only guarded."""


class Kept(Message):
    kind: ClassVar[str] = "kept"
    epoch: Count
    slice: SliceIndex
    step: Count
    digest: DigestText
    num_bytes: Count


class Guard(Message):
    kind: ClassVar[str] = "guard"
    job: JobName
    incarnation: Count
    slice: SliceIndex
    step: Count
    digest: DigestText
    """Of the state, as its source has it (`Kept`)."""
    manifest: Content
    """Names and types of its tensors; the owner serves it."""
    sources: Annotated[tuple[PeerName, ...], Field(max_length=64)]
    """Who has it: asked in turn."""
    contacts: Annotated[tuple[Contact, ...], Field(max_length=64)]


class Fetching(Message):
    kind: ClassVar[str] = "fetching"
    job: JobName
    incarnation: Count
    step: Count
    slices: Annotated[tuple[SliceIndex, ...], Field(max_length=256)]
    """Those whose state after this step is being fetched, or waits for its turn."""
    pieces: Count
    """That came so far, of whatever slice and step: when no more come nothing moves."""


class Held(Message):
    kind: ClassVar[str] = "held"
    job: JobName
    incarnation: Count
    slice: SliceIndex
    step: Count
    digest: DigestText
    """Of what lies here now."""


class NotHeld(Message):
    kind: ClassVar[str] = "not_held"
    job: JobName
    incarnation: Count
    slice: SliceIndex
    step: Count
    reason: Text


class Admit(Message):
    kind: ClassVar[str] = "admit"
    job: JobName
    incarnation: Count
    peers: Annotated[tuple[PeerName, ...], Field(max_length=512)]
    """All who may; it replaces what was said before."""


class Durable(Message):
    kind: ClassVar[str] = "durable"
    job: JobName
    incarnation: Count
    step: Count


class Leaving(Message):
    kind: ClassVar[str] = "leaving"
    job: JobName
    reason: Text


class StepReport(Message):
    kind: ClassVar[str] = "step_report"
    epoch: Count
    step: Count
    replica: ReplicaIndex
    squares: Annotated[tuple[Number, ...], Field(max_length=6000)]
    """Sum of squares of the gradient, float64, of each trainable parameter this replica answers for, in graph order."""
    losses: Annotated[tuple[Number, ...], Field(max_length=6000)]
    """The losses of this replica's micro-batches, in their order, if it computes them; otherwise empty."""
    note: Text = ""
    """Which op first computed a value that is not finite, if one did."""
    busy_s: Seconds
    bytes_sent: Count
    bytes_received: Count


class Commit(Message):
    kind: ClassVar[str] = "commit"
    epoch: Count
    step: Count
    clip: Finite
    rate: Finite
    snapshot: bool = False
    """Keep a copy of the state after this step, until it has been fetched or a newer one is asked for."""


class Skip(Message):
    kind: ClassVar[str] = "skip"
    epoch: Count
    step: Count
    snapshot: bool = False
    """As with a commit."""


class Applied(Message):
    kind: ClassVar[str] = "applied"
    epoch: Count
    step: Count
    replica: ReplicaIndex


class EvalReport(Message):
    kind: ClassVar[str] = "eval_report"
    epoch: Count
    step: Count
    micro_batch: Count
    loss: Number


class Failed(Message):
    kind: ClassVar[str] = "failed"
    epoch: Count
    replica: ReplicaIndex
    reason: Text


class Lost(Message):
    kind: ClassVar[str] = "lost"
    epoch: Count
    peer: PeerName
    reason: Text


class Pulse(Message):
    kind: ClassVar[str] = "pulse"
    progress: Count
    """Tasks done so far: alive without progress is suspect too."""


class Stop(Message):
    kind: ClassVar[str] = "stop"
    job: JobName
    reason: Text


JOB_MESSAGES = MessageSet(
    Prepare, Prepared, Refused, Start, Started, Abort, Halt, Halted, StepReport, Commit, Skip, Applied, EvalReport, Failed,
    Lost, Kept, Guard, Fetching, Held, NotHeld, Admit, Durable, Leaving, Pulse, Stop,
)  # fmt: skip
