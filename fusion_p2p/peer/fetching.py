"""Fetching the tensors of a state from whoever has them: from several in turn, the next going on where one broke off."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusion_p2p.compress.dense import from_bytes
from fusion_p2p.errors import NetworkError, WireError
from fusion_p2p.graph.schema import TensorType
from fusion_p2p.ids import PeerId
from fusion_p2p.net.base import Transport
from fusion_p2p.net.blobs import BlobReader, NotThere
from fusion_p2p.peer.copies import Lineage
from fusion_p2p.wire.blob_messages import FetchTensor

log = logging.getLogger(__name__)

REACH_S = 2.0
"""A holder that cannot be reached for so long is passed over for the next one."""
SILENT_S = 5.0
"""So is one that sends nothing for so long; a slow link still brings a piece in that time."""
PATIENCE_S = 10.0
"""After so long without a tensor from anybody it is given up. Holders may not have been told yet that we may ask."""
PAUSE_S = 0.2
STRANGERS = 3
"""A holder that lacks the first so many tensors it is asked for is not asked for the others."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The state after a step of a run, and who may have it, to be asked in this order."""

    lineage: Lineage
    step: int
    holders: Sequence[PeerId]

    def request(self, name: str) -> FetchTensor:
        return FetchTensor(job=self.lineage.job, incarnation=self.lineage.incarnation, step=self.step, name=name)


async def fetch_tensors(
    transport: Transport, wanted: Wanted, types: Mapping[str, TensorType], progressed: Callable[[], None]
) -> dict[str, Tensor]:
    """Tensors of these names and types, on the host. NetworkError says whom nothing came from, and why.

    `progressed` is told of every piece that comes.
    """
    fetched: dict[str, Tensor] = {}
    clock = asyncio.get_running_loop().time
    moved = clock()
    while len(fetched) < len(types):
        before, refusals = len(fetched), list[str]()
        for holder in wanted.holders:
            try:
                await _fetch_from(transport, holder, wanted, types, fetched, progressed)
            except (NetworkError, WireError) as error:
                log.info("cannot fetch step=%d from peer=%s: %s", wanted.step, holder, error)
                refusals.append(str(error))
            if len(fetched) == len(types):
                return fetched
        if len(fetched) > before:
            moved = clock()
        elif clock() - moved > PATIENCE_S or not wanted.holders:
            name = next(name for name in types if name not in fetched)
            reasons = "; ".join(refusals) or "nobody is known to have it"
            raise NetworkError(f"nobody sends {name} of step {wanted.step} ({len(fetched)} of {len(types)} came): {reasons}")
        await asyncio.sleep(PAUSE_S)
    return fetched


async def _fetch_from(
    transport: Transport,
    holder: PeerId,
    wanted: Wanted,
    types: Mapping[str, TensorType],
    fetched: dict[str, Tensor],
    progressed: Callable[[], None],
) -> None:
    """Add what this holder has. NetworkError or WireError when it breaks off, or has nothing of it."""
    host, given, absent = torch.device("cpu"), 0, 0
    async with BlobReader(transport, holder, patience_s=REACH_S, idle_s=SILENT_S, progressed=progressed) as reader:
        lacking = [name for name in types if name not in fetched]
        requests = [(wanted.request(name), types[name].num_bytes) for name in lacking]
        async for data in reader.tensors(requests):
            name = lacking[given + absent]
            if data is not None:
                fetched[name] = from_bytes(data, types[name], host)
                given += 1
                continue
            absent += 1
            if not given and absent >= STRANGERS:
                raise NotThere(f"{holder} does not hold {name} of step {wanted.step}, or not for us")
