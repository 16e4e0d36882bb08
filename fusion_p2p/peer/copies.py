"""Copies of states that a peer keeps on its host, by run, slice and step: those of its own slices, and those that it guards.

A copy is kept by the names of its tensors, so that a run whose cut has changed finds what it needs all the same. What has to
stay is decided by the owner (`durable`, `rolled_back`); within that the store is bounded: at most MAX_STEPS copies of a slice,
and `limit_bytes` in all, beyond which nothing is guarded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fusion_p2p.compress.dense import to_bytes
from fusion_p2p.ids import Digest, JobId, PeerId
from fusion_p2p.wire.manifest import StateDigest

MAX_STEPS = 3
"""Copies of a slice: the one that is durable, one that others are still fetching, and the newest."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """A run from its start or resumption on: all epochs of it continue one another."""

    owner: PeerId
    job: JobId
    incarnation: int


@dataclass(frozen=True, slots=True)
class CopyKey:
    """Whose state it is, and after which step."""

    lineage: Lineage
    slice: int
    step: int


@dataclass(slots=True)
class Copy:
    """A state on the host; nobody changes its tensors.

    own: of a slice that is executed here. fetched: others have begun to fetch it. digest: once it was computed.
    """

    key: CopyKey
    tensors: Mapping[str, Tensor]
    own: bool
    fetched: bool = False
    digest: Digest | None = None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Copies:
    """All copies that lie here."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._copies: dict[CopyKey, Copy] = {}
        self._durable: dict[Lineage, int] = {}

    def __iter__(self) -> Iterator[Copy]:
        return iter(tuple(self._copies.values()))

    @property
    def num_bytes(self) -> int:
        return sum(copy.num_bytes for copy in self._copies.values())

    @property
    def lineages(self) -> frozenset[Lineage]:
        return frozenset(key.lineage for key in self._copies)

    def get(self, key: CopyKey) -> Copy | None:
        return self._copies.get(key)

    def of(self, lineage: Lineage) -> list[Copy]:
        """The copies of a run, oldest step first."""
        return sorted((copy for copy in self._copies.values() if copy.key.lineage == lineage), key=lambda copy: copy.key.step)

    def find(self, lineage: Lineage, step: int, name: str) -> Copy | None:
        """A copy of a step that has a tensor of this name."""
        return next((copy for copy in self.of(lineage) if copy.key.step == step and name in copy.tensors), None)

    def at(self, lineage: Lineage, step: int) -> dict[str, Tensor]:
        """All tensors of a step, whichever slice they belong to."""
        tensors: dict[str, Tensor] = {}
        for copy in self.of(lineage):
            if copy.key.step == step:
                tensors |= copy.tensors
        return tensors

    def missing_bytes(self, num_bytes: int) -> int:
        """How many bytes are lacking for a copy of this size; 0 when it fits."""
        return max(0, self.num_bytes + num_bytes - self.limit_bytes)

    def put(self, copy: Copy) -> None:
        """Keep a copy. What is of no use any more beside it goes: of the same slice, if there are more than MAX_STEPS."""
        self._copies[copy.key] = copy
        lineage = copy.key.lineage
        held = [other for other in self.of(lineage) if other.key.slice == copy.key.slice]
        while len(held) > MAX_STEPS:
            held.remove(spare := self._least_useful(held))
            del self._copies[spare.key]

    def _least_useful(self, held: Sequence[Copy]) -> Copy:
        """Neither the newest nor the durable one; rather one that nobody fetches; the oldest of these."""
        durable = self._durable.get(held[0].key.lineage)
        between = [copy for copy in held[:-1] if copy.key.step != durable] or held[:-1]
        return min(between, key=lambda copy: (copy.fetched, copy.key.step))

    def durable(self, lineage: Lineage, step: int) -> None:
        """States before this step are not needed any more."""
        self._durable[lineage] = max(step, self._durable.get(lineage, 0))
        self._drop(key for key in self._copies if key.lineage == lineage and key.step < step)

    def disown(self, lineage: Lineage) -> None:
        """Nothing of the run is executed here any more: its copies lie here as those of others do."""
        for copy in self.of(lineage):
            copy.own = False

    def rolled_back(self, lineage: Lineage, step: int) -> None:
        """The run goes on from this step: what came after it did not happen."""
        self._drop(key for key in self._copies if key.lineage == lineage and key.step > step)

    def forget(self, lineage: Lineage) -> None:
        """The run has ended."""
        self._durable.pop(lineage, None)
        self._drop(key for key in self._copies if key.lineage == lineage)

    def shrink(self) -> list[Copy]:
        """Give up guarded copies, the oldest first, until what is left is within the limit; which ones."""
        given_up: list[Copy] = []
        for copy in sorted(self._copies.values(), key=lambda copy: copy.key.step):
            if not self.missing_bytes(0):
                break
            if not copy.own:
                given_up.append(copy)
                del self._copies[copy.key]
        return given_up

    def give_up_guarded(self) -> list[Copy]:
        """Give up all copies that are not of our own slices; which ones."""
        given_up = [copy for copy in self._copies.values() if not copy.own]
        self._drop(copy.key for copy in given_up)
        return given_up

    def _drop(self, keys: Iterable[CopyKey]) -> None:
        for key in list(keys):
            del self._copies[key]


def digest_of_state(manifest: bytes, tensors: Iterable[Tensor]) -> Digest:
    """The digest of a state from its tensors in the order of the manifest. Takes a while: not for the event loop."""
    digest = StateDigest(manifest)
    for tensor in tensors:
        digest.add(to_bytes(tensor))
    return digest.result()
