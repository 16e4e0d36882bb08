"""Collecting a checkpoint: the owner fetches the snapshot of every slice, tensor by tensor, while training goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fusion_p2p.compress.dense import from_bytes
from fusion_p2p.errors import PeerUnreachable, StreamClosed
from fusion_p2p.execute.state import required_tensors
from fusion_p2p.graph.schema import Graph, TensorType
from fusion_p2p.graph.slices import Cut
from fusion_p2p.ids import Digest, JobId, PeerId
from fusion_p2p.net.base import Transport
from fusion_p2p.net.blobs import BlobReader
from fusion_p2p.net.reconnecting import RECONNECT_S
from fusion_p2p.owner.checkpoint import CheckpointWriter
from fusion_p2p.plan.plan import Plan
from fusion_p2p.wire.blob_messages import FetchTensor
from fusion_p2p.wire.job_messages import TrainingSettings

REOPEN_PAUSE_S = 0.25


@dataclass(frozen=True, slots=True)
class Collection:
    """Which tensors are fetched from whom: from the first member of each slice; a tied parameter once."""

    job: JobId
    incarnation: int
    graph: Digest
    tensors: Mapping[PeerId, Mapping[str, TensorType]]


def collection(job: JobId, incarnation: int, graph: Graph, parts: Cut, plan: Plan, settings: TrainingSettings) -> Collection:
    """What a checkpoint of this plan consists of."""
    tensors: dict[PeerId, dict[str, TensorType]] = {part.peer: {} for part in plan.slices}
    seen: set[str] = set()
    for part, planned in zip(parts.slices, plan.slices, strict=True):
        required = required_tensors(graph, part, settings)
        tensors[planned.peer] |= {name: type_ for name, type_ in required.items() if name not in seen}
        seen |= required.keys()
    return Collection(job, incarnation, plan.graph, tensors)


async def collect(transport: Transport, what: Collection, step: int, folder: Path) -> Path:
    """Write the checkpoint of a step. NetworkError when a peer does not deliver, ConfigError when the disk is full."""
    writer = CheckpointWriter(folder, what.graph, step)
    writing = asyncio.Lock()
    try:
        async with asyncio.TaskGroup() as group:
            for peer, tensors in what.tensors.items():
                group.create_task(_collect_from(transport, peer, tensors, what, step, writer, writing))
    except BaseExceptionGroup as errors:
        writer.abandon()
        raise errors.exceptions[0] from None
    return await asyncio.to_thread(writer.finish)


async def _collect_from(
    transport: Transport,
    peer: PeerId,
    tensors: Mapping[str, TensorType],
    what: Collection,
    step: int,
    writer: CheckpointWriter,
    writing: asyncio.Lock,
) -> None:
    """Fetch one tensor after another; a stream that is reset is opened again, for RECONNECT_S without a tensor."""
    waiting, clock = list(tensors.items()), asyncio.get_running_loop().time
    moved = clock()
    while waiting:
        try:
            async with BlobReader(transport, peer) as reader:
                while waiting:
                    name, type_ = waiting[0]
                    request = FetchTensor(job=what.job, incarnation=what.incarnation, step=step, name=name)
                    tensor = from_bytes(await reader.tensor(request, type_.num_bytes), type_, torch.device("cpu"))
                    async with writing:
                        await asyncio.to_thread(writer.add, name, tensor)
                    del waiting[0]
                    moved = clock()
        except (StreamClosed, PeerUnreachable):
            if clock() - moved > RECONNECT_S:
                raise
            await asyncio.sleep(REOPEN_PAUSE_S)
