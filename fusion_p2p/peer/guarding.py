"""Guarding: a peer fetches a copy of a slice's state and keeps it, so that it can take the slice over, or give it to who does.

    owner --Guard--> this peer --FetchTensor--> who has the state ... digest compared --Held | NotHeld--> owner

It is no promise of anything else: a guard may serve another job meanwhile. One copy is fetched at a time for each owner. Owners
copy one step at a time: when another one is asked for, what is still being fetched of the one before is not wanted any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from functools import partial

from fusion_p2p.errors import NetworkError, WireError
from fusion_p2p.ids import Digest, JobId, PeerId
from fusion_p2p.net.base import Transport
from fusion_p2p.net.blobs import BlobReader
from fusion_p2p.peer.building import meet
from fusion_p2p.peer.copies import Copy, CopyKey, Lineage, digest_of_state
from fusion_p2p.peer.fetching import Wanted, fetch_tensors
from fusion_p2p.peer.keeping import Keeping
from fusion_p2p.peer.supervision import Supervisor
from fusion_p2p.peer.voice import Say
from fusion_p2p.plan.memory import gib
from fusion_p2p.wire.job_messages import Fetching, Guard, Held, NotHeld
from fusion_p2p.wire.manifest import MAX_MANIFEST_BYTES, decode_manifest, state_bytes

log = logging.getLogger(__name__)

MAX_WAITING = 256
"""Slices that one owner may ask to be guarded at a time."""


class Guarding:
    """Fetches what owners ask for, and tells them what came of it."""

    def __init__(self, transport: Transport, keeping: Keeping, tasks: Supervisor, say: Say) -> None:
        self._transport, self._keeping, self._tasks, self._say = transport, keeping, tasks, say
        self._waiting: dict[PeerId, dict[tuple[Lineage, int], Guard]] = {}
        self._errands: dict[PeerId, asyncio.Task[None]] = {}
        self._now: dict[PeerId, tuple[Guard, asyncio.Task[None]]] = {}
        self._pieces: Counter[PeerId] = Counter()
        """That came so far, for each owner."""

    @property
    def pieces(self) -> int:
        """That came so far: a peer that guards is alive without computing."""
        return self._pieces.total()

    def report(self) -> None:
        """Tell every owner what is being fetched for it: it knows then that an errand that is not told of was lost."""
        for owner, (now, _) in self._now.items():
            slices: dict[tuple[JobId, int, int], list[int]] = {}
            for errand in (now, *self._waiting[owner].values()):
                slices.setdefault((JobId(errand.job), errand.incarnation, errand.step), []).append(errand.slice)
            for (job, incarnation, step), at_step in slices.items():
                asked = tuple(at_step[:MAX_WAITING])
                fetching = Fetching(job=job, incarnation=incarnation, step=step, slices=asked, pieces=self._pieces[owner])
                self._say(owner, fetching)

    def guard(self, owner: PeerId, message: Guard) -> None:
        """Fetch a copy, unless a newer one is wanted or here."""
        key = key_of(owner, message)
        held = self._keeping.copies.get(key)
        if held is not None and held.digest == message.digest:
            self._say(owner, held_message(key, held.digest))
            return
        waiting, slice_of = self._waiting.setdefault(owner, {}), (key.lineage, key.slice)
        for lineage, index in [other for other in waiting if other[0] == key.lineage]:
            if waiting[lineage, index].step != message.step:
                del waiting[lineage, index]
        if owner in self._now:
            now, fetching = self._now[owner]
            if message == now:
                return  # said again on a new stream; anything else is newer, also an earlier step of a run that went back
            if key_of(owner, now).lineage == key.lineage and (now.slice == message.slice or now.step != message.step):
                fetching.cancel()
        if len(waiting) >= MAX_WAITING and slice_of not in waiting:
            self._refuse(owner, message, f"{MAX_WAITING} slices are waiting to be guarded already")
            return
        waiting[slice_of] = message
        self._keeping.offer(key.lineage.job)
        self._go_on(owner)

    def give_up(self, reason: str) -> None:
        """Keep nothing for others any more, and say so."""
        for owner in list(self._errands):
            self.ended(owner)
        for copy in self._keeping.copies.give_up_guarded():
            self.gave_up(copy, reason)

    def gave_up(self, copy: Copy, reason: str) -> None:
        """A copy had to go: its owner has to know."""
        key = copy.key
        lineage = key.lineage
        self._say(
            lineage.owner,
            NotHeld(job=lineage.job, incarnation=lineage.incarnation, slice=key.slice, step=key.step, reason=reason[:1000]),
        )

    def went_back(self, owner: PeerId, step: int) -> None:
        """The owner's run goes on from this step: later ones did not happen, and who had them may have them no more."""
        waiting = self._waiting.get(owner, {})
        for lineage, index in [other for other, message in waiting.items() if message.step > step]:
            del waiting[lineage, index]
        if owner in self._now:
            now, fetching = self._now[owner]
            if now.step > step:
                fetching.cancel()

    def ended(self, owner: PeerId) -> None:
        """The owner has stopped its run: nothing of it is wanted any more."""
        self._waiting.pop(owner, None)
        self._now.pop(owner, None)
        errand = self._errands.pop(owner, None)
        if errand is not None:
            errand.cancel()

    def _go_on(self, owner: PeerId) -> None:
        if owner not in self._errands:
            waiting = self._waiting[owner]

            def failed(reason: str) -> None:
                for message in waiting.values():
                    self._refuse(owner, message, reason)
                waiting.clear()

            self._errands[owner] = self._tasks.spawn(self._fetch_all(owner, waiting), failed)

    async def _fetch_all(self, owner: PeerId, waiting: dict[tuple[Lineage, int], Guard]) -> None:
        """Fetch one copy after the other."""
        try:
            while waiting:
                await self._fetch_next(owner, waiting)
        finally:
            if self._errands.get(owner) is asyncio.current_task():
                del self._errands[owner]
                self._now.pop(owner, None)

    async def _fetch_next(self, owner: PeerId, waiting: dict[tuple[Lineage, int], Guard]) -> None:
        message = waiting.pop(next(iter(waiting)))
        fetching = asyncio.create_task(self._fetch(owner, message))
        self._now[owner] = (message, fetching)
        try:
            await asyncio.wait([fetching])
        finally:
            fetching.cancel()
        error = None if fetching.cancelled() else fetching.exception()
        if error is not None:
            self._refuse(owner, message, str(error) or type(error).__name__)
        if error is not None and not isinstance(error, NetworkError | WireError):
            raise error

    async def _fetch(self, owner: PeerId, message: Guard) -> None:
        """Fetch, compare and keep one copy. NetworkError or WireError says why not."""
        key = key_of(owner, message)
        manifest = await self._manifest(owner, message)
        types = decode_manifest(manifest)
        lacking = self._keeping.copies.missing_bytes(state_bytes(types))
        if lacking:
            raise NetworkError(f"{gib(lacking)} are lacking for a copy of {gib(state_bytes(types))}")
        await meet(self._transport, message.contacts)
        wanted = Wanted(key.lineage, message.step, [PeerId(peer) for peer in message.sources])
        tensors = await fetch_tensors(self._transport, wanted, types, partial(self._count, owner))
        digest = await asyncio.to_thread(digest_of_state, manifest, [tensors[name] for name in types])
        if digest != message.digest:
            raise WireError(f"what came of slice {message.slice} is not the state after step {message.step}")
        self._keeping.copies.put(Copy(key, tensors, own=False, digest=digest))
        log.info("guarding slice=%d of job=%s at step=%d", message.slice, message.job[:8], message.step)
        self._say(owner, held_message(key, digest))

    async def _manifest(self, owner: PeerId, message: Guard) -> bytes:
        if message.manifest.num_bytes > MAX_MANIFEST_BYTES:
            raise WireError(f"a manifest of {message.manifest.num_bytes} bytes")
        async with BlobReader(self._transport, owner) as reader:
            return await reader.content(Digest(message.manifest.digest), message.manifest.num_bytes)

    def _count(self, owner: PeerId) -> None:
        self._pieces[owner] += 1

    def _refuse(self, owner: PeerId, message: Guard, reason: str) -> None:
        log.info("cannot guard slice=%d of job=%s: %s", message.slice, message.job[:8], reason)
        self._say(
            owner,
            NotHeld(
                job=message.job, incarnation=message.incarnation, slice=message.slice, step=message.step, reason=reason[:1000]
            ),
        )


def key_of(owner: PeerId, message: Guard) -> CopyKey:
    """Which copy an owner asks for."""
    return CopyKey(Lineage(owner, JobId(message.job), message.incarnation), message.slice, message.step)


def held_message(key: CopyKey, digest: Digest) -> Held:
    """What is said of a copy that lies here."""
    lineage = key.lineage
    return Held(job=lineage.job, incarnation=lineage.incarnation, slice=key.slice, step=key.step, digest=digest)
