"""The owner's links to the guards of its slices: made when one is needed, ended when it is not."""

from __future__ import annotations

import asyncio

from fusion_p2p.ids import PeerId
from fusion_p2p.owner.links import Links
from fusion_p2p.owner.spares import Surroundings
from fusion_p2p.wire.messages import Message


class GuardLinks:
    """Links to guards that execute nothing, among the `Links` of a run; those to its members are not ours to make or end."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        self._links: Links | None = None
        self._members: frozenset[PeerId] = frozenset()
        self._own: set[PeerId] = set()
        self._unsaid: dict[PeerId, list[tuple[Message, str]]] = {}
        self._to_meet: asyncio.Queue[PeerId] = asyncio.Queue()

    @property
    def linked(self) -> frozenset[PeerId]:
        """The guards that a link was made to."""
        return frozenset(self._own)

    def began(self, links: Links, members: frozenset[PeerId]) -> None:
        """From now on these execute slices; the links to them belong to the run."""
        if links is not self._links:
            self._links, self._own, self._unsaid = links, set(), {}
        self._members = members
        self._own -= members
        for peer in members:
            self._unsaid.pop(peer, None)

    def keep(self, guards: frozenset[PeerId], farewell: Message) -> None:
        """Link these guards, and say farewell to those that are no longer among them."""
        for peer in guards - self._own - self._unsaid.keys():
            self._unsaid[peer] = []
            self._to_meet.put_nowait(peer)
        for peer in self._own - guards:
            self._own.discard(peer)
            if self._links is not None:
                self._links.drop(peer, farewell)
        self._unsaid = {peer: unsaid for peer, unsaid in self._unsaid.items() if peer in guards}

    def say(self, peer: PeerId, message: Message, key: str) -> None:
        """Say it until it is settled, or another message is said under the same key."""
        if peer in self._unsaid:
            self._unsaid[peer] = [*(said for said in self._unsaid[peer] if said[1] != key), (message, key)]
        elif self._links is not None and (peer in self._own or peer in self._members):
            self._links.say(peer, message, until_settled=key)

    def settle(self, peer: PeerId, key: str) -> None:
        """The peer has answered."""
        if self._links is not None:
            self._links.settle(peer, key)

    def gone(self, peer: PeerId) -> None:
        """The link to a peer has ended."""
        self._own.discard(peer)

    async def run(self) -> None:
        """Make links until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._introduce(await self._to_meet.get()))

    async def _introduce(self, peer: PeerId) -> None:
        await self._surroundings.meet(peer)
        unsaid = self._unsaid.pop(peer, None)
        if unsaid is None or self._links is None:
            return  # it is not needed any more, or executes something by now
        self._own.add(peer)
        self._links.add([peer])
        for message, key in unsaid:
            self._links.say(peer, message, until_settled=key)
