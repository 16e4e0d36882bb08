"""Feeding: the owner sends every graph input to the replicas that read it, under their credits, as any sender does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from fusion_p2p.compress.dense import to_bytes, type_of
from fusion_p2p.errors import ConfigError
from fusion_p2p.graph.schema import Graph, TensorType
from fusion_p2p.ids import PeerId
from fusion_p2p.job.topology import TRIGGER, ReplicaEdges, as_evaluation, edge_credits
from fusion_p2p.net.base import Transport
from fusion_p2p.net.values import NOTHING, Payload, ValueSender
from fusion_p2p.owner.data import DataSet
from fusion_p2p.plan.plan import Plan
from fusion_p2p.wire.frames import OWNER, Edge, Moment, RunId


class Feeder:
    """Offers the micro-batches of a step, or of a validation, to the replicas that execute them."""

    def __init__(
        self,
        transport: Transport,
        run: RunId,
        graph: Graph,
        plan: Plan,
        edges: Sequence[ReplicaEdges],
        *,
        data: DataSet,
        lost: Callable[[PeerId, str], None],
    ) -> None:
        self._graph, self._data, self._micro_batches = graph, data, plan.micro_batches
        self._feeds = [(part, edge) for part in edges for edge in part.feeds]
        credits = {edge: allowed for edge, allowed in edge_credits(plan, edges).items() if edge.source == OWNER}
        peer_of = {number: replica.peer for number, replica in enumerate(plan.replicas)}
        self._sender = ValueSender(transport, run, credits, peer_of, local=_nothing_is_local, lost=lost)

    async def run(self) -> None:
        """Send until cancelled."""
        await self._sender.run()

    def reached(self, step: int) -> int:
        """The first micro-batch of a step of which some reader has not taken everything; the last one when all have."""
        waiting = (moment.micro_batch for moment in self._sender.not_taken if moment.step == step)
        return min(waiting, default=self._micro_batches - 1)

    def feed_step(self, step: int) -> None:
        """Offer all micro-batches of a training step."""
        for micro_batch in range(self._micro_batches):
            tensors = self._data.micro_batch(step, micro_batch)
            self._offer(tensors, Moment(step, micro_batch), lambda edge: edge)

    def feed_validation(self, step: int, micro_batches: int) -> None:
        """Offer validation micro-batches before step `step`."""
        for micro_batch in range(micro_batches):
            self._offer(self._data.validation(micro_batch), Moment(step, micro_batch), as_evaluation)

    def _offer(self, tensors: Mapping[str, Tensor], moment: Moment, direction: Callable[[Edge], Edge]) -> None:
        payloads = {
            value: as_payload(name, tensors[name], self._graph.types[value]) for value, name in enumerate(self._graph.inputs)
        }
        for part, edge in self._feeds:
            if part.carries(edge, moment.micro_batch):
                self._sender.offer(direction(edge), moment, NOTHING if edge.value == TRIGGER else payloads[edge.value])


def as_payload(name: str, tensor: Tensor, declared: TensorType) -> Payload:
    """A tensor of the data set as it travels. ConfigError when it is not what the model was captured with."""
    found = type_of(tensor)
    if (found.shape, found.dtype) != (declared.shape, declared.dtype):
        raise ConfigError(
            f"data gives {name} as {found.dtype} of shape {list(found.shape)}, but the model was captured with "
            f"{declared.dtype} of shape {list(declared.shape)}; every micro-batch must have the same shapes"
        )
    return Payload(declared, to_bytes(tensor))


def _nothing_is_local(edge: Edge, moment: Moment, payload: Payload) -> None:
    raise RuntimeError("the owner of a run holds no slice of it")
