"""Coding beside computing: what arrived is decoded before its task begins, what a task made is encoded while others run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from fusion_p2p.errors import SliceFailed, WireError
from fusion_p2p.execute.compute import ComputeThread
from fusion_p2p.execute.handover import Handed
from fusion_p2p.net.values import Payload
from fusion_p2p.peer.edge_codecs import Coded, EdgeCodecs
from fusion_p2p.wire.frames import Edge, Moment


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A value that is being encoded."""

    replica: int
    edge: Edge
    moment: Moment
    coded: Future[Coded]


class CodingFailed(SliceFailed):
    """A value that `replica` made cannot be encoded."""

    def __init__(self, replica: int, reason: str) -> None:
        super().__init__(reason)
        self.replica = replica


class Coding:
    """Gives the work to `thread`, where it is done in order; so the values of an edge leave in theirs."""

    def __init__(
        self, codecs: Mapping[int, EdgeCodecs], thread: ComputeThread, *, send: Callable[[int, Edge, Moment, Coded], None]
    ) -> None:
        """`codecs` by replica. `send` is called for each encoded value, with the replica that it comes from."""
        self._codecs, self._thread, self._send = codecs, thread, send
        self._leaving: asyncio.Queue[_Leaving] = asyncio.Queue()

    async def run(self) -> None:
        """Send until cancelled. CodingFailed when something could not be encoded: from then on nothing is sent or settled."""
        while True:
            leaving = await self._leaving.get()
            try:
                coded = await asyncio.wrap_future(leaving.coded)
            except (SliceFailed, WireError) as error:
                raise CodingFailed(leaving.replica, str(error)) from None
            self._send(leaving.replica, leaving.edge, leaving.moment, coded)
            self._leaving.task_done()

    def decode(self, edge: Edge, moment: Moment, payload: Payload) -> Future[Handed]:
        """Begin to decode what arrived. The future raises WireError for what no encoder could have made."""
        return self._thread.submit(self._codecs[edge.target].decode, edge, moment, payload)

    def encode(self, replica: int, moment: Moment, values: Sequence[tuple[Edge, Handed]]) -> None:
        """Begin to encode what a task made."""
        for edge, handed in values:
            coded = self._thread.submit(self._codecs[replica].encode, edge, moment, handed)
            self._leaving.put_nowait(_Leaving(replica, edge, moment, coded))

    async def settled(self) -> None:
        """Wait until everything that a task has made so far was given to `send`."""
        await self._leaving.join()

    def forget(self, replica: int, step: int) -> None:
        """A step is over: what codecs remember of it is not needed any more."""
        self._thread.submit(self._codecs[replica].forget, step)
