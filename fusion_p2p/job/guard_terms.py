"""What the machine that keeps copies of slices elsewhere (`job.guarding`) speaks of: rounds, events, actions; pure data."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_p2p.ids import Digest, PeerId
from fusion_p2p.job.guard_choice import Candidate


@dataclass(frozen=True, slots=True)
class Part:
    """A slice: who executes it, and the bytes of its state."""

    members: frozenset[PeerId]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Copy:
    """The state of a slice after a step, at a peer that does not execute it."""

    slice: int
    step: int
    peer: PeerId


@dataclass(frozen=True, slots=True)
class Errand:
    """One slice of a round. guard: who is to hold it, None when nobody can; digest: of what the `sources` keep.

    deadline: until when something has to be heard of it. pieces: how many the guard had fetched when it was heard last.
    """

    guard: PeerId | None
    deadline: float
    digest: Digest | None = None
    sources: tuple[PeerId, ...] = ()
    held: bool = False
    failed: frozenset[PeerId] = frozenset()
    pieces: int = -1

    @property
    def is_open(self) -> bool:
        """Whether something may still come of it."""
        return self.guard is not None and not self.held


@dataclass(frozen=True, slots=True)
class Round:
    """A copy of all slices, on its way; an errand per slice."""

    step: int
    begun: float
    errands: tuple[Errand, ...]


@dataclass(frozen=True, slots=True)
class Began:
    """An epoch runs from the state after `state_step`: `parts` are its slices, `cut` says which operators are in which."""

    cut: tuple[int, ...]
    parts: tuple[Part, ...]
    state_step: int


@dataclass(frozen=True, slots=True)
class Broken:
    """No epoch runs: until one does again, nobody knows to which step the run goes back."""


@dataclass(frozen=True, slots=True)
class Deciding:
    """The fate of a step is about to be told."""

    step: int


@dataclass(frozen=True, slots=True)
class KeptBy:
    """A member of a slice keeps a copy of its state."""

    peer: PeerId
    slice: int
    step: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class FetchingBy:
    """A guard is at work for these slices, and so many pieces have come to it so far."""

    peer: PeerId
    slices: tuple[int, ...]
    step: int
    pieces: int


@dataclass(frozen=True, slots=True)
class HeldBy:
    """A guard has fetched a copy."""

    peer: PeerId
    slice: int
    step: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class NotHeldBy:
    """A guard has no such copy, or has it no longer."""

    peer: PeerId
    slice: int
    step: int


@dataclass(frozen=True, slots=True)
class Seen:
    """Who could guard now; it replaces what was known before."""

    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """A peer is gone, with all it held. left: on purpose, which says nothing about how often peers are lost."""

    peer: PeerId
    left: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Began | Broken | Deciding | KeptBy | FetchingBy | HeldBy | NotHeldBy | Seen | Lost | Tick


@dataclass(frozen=True, slots=True)
class AskCopy:
    """The step that is being decided is to be kept by the members of every slice."""

    step: int


@dataclass(frozen=True, slots=True)
class SendGuard:
    """`peer` is to fetch the state of a slice from any of `sources`."""

    peer: PeerId
    slice: int
    step: int
    digest: Digest
    sources: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Durable:
    """Every slice of this step is held elsewhere: copies of earlier steps may go."""

    step: int


@dataclass(frozen=True, slots=True)
class GoBack:
    """Copies of later steps are of a past that did not happen: these guards drop them."""

    step: int
    peers: frozenset[PeerId]


Action = AskCopy | SendGuard | Durable | GoBack
