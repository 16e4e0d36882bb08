"""The states of runs as others see them: copies that lie here, what is at work here, and who may fetch it.

Copies of our own slices are made when the owner asks for one with a decision, and told of once their digest is known. They stay
until a newer step is durable, the run is stopped, or its owner has not been heard for ABSENT_S.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fusion_p2p.clock import Clock
from fusion_p2p.compress.dense import to_bytes
from fusion_p2p.device.memory import free_bytes
from fusion_p2p.execute.state import HALF_APPLIED, Snapshot, required_tensors
from fusion_p2p.ids import JobId, PeerId
from fusion_p2p.net.blobs import BlobServer
from fusion_p2p.net.pacing import Pace
from fusion_p2p.peer.building import Bench
from fusion_p2p.peer.copies import Copies, Copy, CopyKey, Lineage, digest_of_state
from fusion_p2p.peer.epoch_work import BuiltEpoch
from fusion_p2p.peer.supervision import Supervisor
from fusion_p2p.plan.memory import gib
from fusion_p2p.wire.blob_messages import FetchTensor
from fusion_p2p.wire.job_messages import Admit, Kept, Stock
from fusion_p2p.wire.manifest import encode_manifest

log = logging.getLogger(__name__)

HOST = torch.device("cpu")
ABSENT_S = 600.0
"""Copies of a run whose owner has been silent for so long are given up."""
MAX_LINEAGES = 64
MAX_STOCK_STEPS = 8

AtWork = Callable[[], Mapping[Lineage, Sequence[BuiltEpoch]]]
"""The runs that this peer is engaged for, and their epochs whose slices are allocated here."""


class Keeping:
    """Copies of states, and the answers to who asks for tensors of any state that lies here."""

    def __init__(self, blobs: BlobServer, bench: Bench, clock: Clock, tasks: Supervisor, at_work: AtWork) -> None:
        self._blobs, self._bench, self._clock, self._tasks, self._at_work = blobs, bench, clock, tasks, at_work
        self.copies = Copies(self._offered_bytes())
        self.pace = Pace()
        """How fast copies leave while this peer computes."""
        self._admitted: dict[Lineage, frozenset[PeerId]] = {}
        self._heard: dict[PeerId, float] = {}
        self._offered: set[JobId] = set()
        self._retiring: set[asyncio.Task[None]] = set()

    def heard(self, owner: PeerId) -> None:
        """An owner has said something."""
        self._heard[owner] = self._clock.now()

    def admit(self, owner: PeerId, message: Admit) -> None:
        """These peers may fetch states of the owner's run, and no others."""
        lineage = Lineage(owner, JobId(message.job), message.incarnation)
        self._admitted.pop(lineage, None)
        self._admitted[lineage] = frozenset(map(PeerId, message.peers))
        while len(self._admitted) > MAX_LINEAGES:
            self._admitted.pop(next(iter(self._admitted)))
        self.offer(lineage.job)

    def offer(self, job: JobId) -> None:
        """Answer who asks for tensors of this job."""
        self._offered.add(job)
        self._blobs.offer_tensors(job, self._tensor)

    def keep(self, lineage: Lineage, index: int, snapshot: Snapshot) -> Copy:
        """Keep a copy of a slice of our own."""
        copy = Copy(CopyKey(lineage, index, snapshot.step), snapshot.tensors, own=True)
        self.copies.put(copy)
        return copy

    async def tell_kept(self, built: BuiltEpoch, copy: Copy, tell: Callable[[Kept], None]) -> None:
        """Compute the digest of a copy, beside everything else, and tell the owner."""
        required = required_tensors(built.graph, built.parts.slices[copy.key.slice], built.settings)
        tensors = [copy.tensors[name] for name in required]
        copy.digest = await asyncio.to_thread(digest_of_state, encode_manifest(required), tensors)
        if self.copies.get(copy.key) is copy:
            tell(
                Kept(
                    epoch=built.run.epoch,
                    slice=copy.key.slice,
                    step=copy.key.step,
                    digest=copy.digest,
                    num_bytes=copy.num_bytes,
                )
            )

    def retire(self, lineage: Lineage, built: BuiltEpoch) -> None:
        """Keep the states of an epoch that is over, in case its run goes on here."""
        task = self._tasks.spawn(self._retire(lineage, built))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _retire(self, lineage: Lineage, built: BuiltEpoch) -> None:
        self.make_room()  # what was at work until now is not any more
        for index, state in built.states.items():
            snapshot = await self._bench.run(state.retired)
            if snapshot is None or self.copies.get(CopyKey(lineage, index, snapshot.step)) is not None:
                continue
            lacking = self.copies.missing_bytes(snapshot.num_bytes)
            if lacking:
                log.info("slice=%d of job=%s is not kept: %s lacking", index, lineage.job[:8], gib(lacking))
            else:
                self.keep(lineage, index, snapshot)
        self.copies.disown(lineage)

    async def at_hand(self, lineage: Lineage, step: int) -> Mapping[str, Tensor]:
        """The tensors of a step of which copies lie here; those of other incarnations of the job go."""
        if self._retiring:
            await asyncio.wait(self._retiring)
        for other in self.copies.lineages:
            if other.job == lineage.job and other.owner == lineage.owner and other.incarnation < lineage.incarnation:
                self.copies.forget(other)
        return self.copies.at(lineage, step)

    def stock(self, built: BuiltEpoch) -> tuple[Stock, ...]:
        """Of which steps the state of each slice of an epoch lies here, complete."""
        run = built.run
        names: dict[int, set[str]] = defaultdict(set)
        for copy in self.copies.of(Lineage(built.owner, run.job, run.incarnation)):
            names[copy.key.step] |= copy.tensors.keys()
        for state in built.states.values():
            if state.step != HALF_APPLIED:
                names[state.step] |= state.named_tensors().keys()
        stock: list[Stock] = []
        for part in built.parts.slices:
            required = required_tensors(built.graph, part, built.settings).keys()
            steps = sorted(step for step, held in names.items() if required <= held)
            if steps:
                stock.append(Stock(slice=part.index, steps=tuple(steps[-MAX_STOCK_STEPS:])))
        return tuple(stock)

    def guarded(self, owner: PeerId) -> tuple[Stock, ...]:
        """Of which steps copies lie here for an owner, whatever its plan is now."""
        steps: dict[int, set[int]] = defaultdict(set)
        for copy in self.copies:
            if copy.key.lineage.owner == owner:
                steps[copy.key.slice].add(copy.key.step)
        return tuple(Stock(slice=index, steps=tuple(sorted(own)[-MAX_STOCK_STEPS:])) for index, own in sorted(steps.items()))

    def went_back(self, owner: PeerId, step: int) -> None:
        """The owner's run goes on from this step: copies of later ones are of what did not happen."""
        for lineage in self.copies.lineages:
            if lineage.owner == owner:
                self.copies.rolled_back(lineage, step)

    def ended(self, owner: PeerId, job: str) -> None:
        """The owner has stopped the run."""
        for lineage in {*self.copies.lineages, *self._admitted}:
            if (lineage.owner, lineage.job) == (owner, job):
                self._forget(lineage)
        self.tidy()

    def tidy(self) -> None:
        """Give up what nobody will ask for: copies of runs whose owners are gone."""
        now, working = self._clock.now(), self._at_work()
        for lineage in self._known():
            if lineage not in working and now - self._heard.setdefault(lineage.owner, now) > ABSENT_S:
                log.info("copies of job=%s are given up: no word from its owner for %g s", lineage.job[:8], ABSENT_S)
                self._forget(lineage)
        owners, jobs = {lineage.owner for lineage in self._known()}, {lineage.job for lineage in self._known()}
        self._heard = {owner: heard for owner, heard in self._heard.items() if owner in owners}
        for job in self._offered - jobs:
            self._blobs.withdraw_tensors(job)
        self._offered &= jobs

    def _known(self) -> set[Lineage]:
        return {*self.copies.lineages, *self._admitted, *self._at_work()}

    def make_room(self) -> list[Copy]:
        """What slices at work here need is not there for copies: which guarded ones had to go for it."""
        needed = sum(built.needed_bytes for every in self._at_work().values() for built in every)
        on_host = needed if self._bench.device.type == "cpu" else 0
        self.copies.limit_bytes = max(0, self._offered_bytes() - on_host)
        return self.copies.shrink()

    def _offered_bytes(self) -> int:
        """An accelerator's memory is not the host's."""
        return self._bench.offered_bytes if self._bench.device.type == "cpu" else free_bytes(HOST) // 2

    def _forget(self, lineage: Lineage) -> None:
        self.copies.forget(lineage)
        self._admitted.pop(lineage, None)

    def may_fetch(self, asker: PeerId, lineage: Lineage) -> bool:
        return asker == lineage.owner or asker in self._admitted.get(lineage, frozenset())

    async def _tensor(self, asker: PeerId, asked: FetchTensor) -> memoryview | None:
        for lineage in self._known():
            if (lineage.job, lineage.incarnation) == (asked.job, asked.incarnation) and self.may_fetch(asker, lineage):
                found = await self._find(lineage, asker, asked)
                if found is not None:
                    return to_bytes(found)
        return None

    async def _find(self, lineage: Lineage, asker: PeerId, asked: FetchTensor) -> Tensor | None:
        copy = self.copies.find(lineage, asked.step, asked.name)
        if copy is not None:
            copy.fetched = copy.fetched or asker != lineage.owner
            return copy.tensors[asked.name]
        for built in self._at_work().get(lineage, ()):
            tensor = await self._bench.run(built.copied, asked.step, asked.name)
            if tensor is not None:
                return tensor
        return None
