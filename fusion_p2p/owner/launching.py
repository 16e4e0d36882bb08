"""From a proposal to an epoch that runs: check it, have all its peers prepare and start it, write it down."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fusion_p2p.errors import AddressError, NetworkError
from fusion_p2p.graph.slices import Cut, cut
from fusion_p2p.graph.workload import workload
from fusion_p2p.ids import PeerId
from fusion_p2p.job import epochs
from fusion_p2p.job.topology import ReplicaEdges, replica_edges
from fusion_p2p.net.base import Transport
from fusion_p2p.owner import ledger as entries
from fusion_p2p.owner.enlistment import Enlisted
from fusion_p2p.owner.epoch_start import EpochStart, NotStarted
from fusion_p2p.owner.links import Event, Links
from fusion_p2p.owner.registering import Job, Registering
from fusion_p2p.owner.stage import RunContext, Stage
from fusion_p2p.plan.encoding import check_plan
from fusion_p2p.plan.explain import explain
from fusion_p2p.plan.plan import Plan
from fusion_p2p.wire.frames import RunId
from fusion_p2p.wire.job_messages import Contact, Prepare, Source

DIAL_S = 5.0
MAX_CONTACTS = 256
MAX_SOURCES = 64


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposal, checked and cut."""

    enlisted: Enlisted
    parts: Cut
    edges: tuple[ReplicaEdges, ...]
    explanation: tuple[str, ...]

    @property
    def plan(self) -> Plan:
        return self.enlisted.plan


@dataclass(frozen=True, slots=True)
class States:
    """From which step an epoch goes on, and for each of its slices who has any of the state; the owner has what nobody has."""

    step: int
    sources: Mapping[int, tuple[PeerId, ...]]


@dataclass(frozen=True, slots=True)
class Unlaunched:
    """An epoch does not run. `stage`: it was written down before it broke, so that it counts as the newest."""

    why: NotStarted
    stage: Stage | None


class Launcher:
    """Starts the epochs of one run, one after another."""

    def __init__(self, context: RunContext, job: Job, transport: Transport, registering: Registering) -> None:
        self._context, self._job, self._transport, self._registering = context, job, transport, registering
        started = context.folder.ledger.history.start
        self._starting = EpochStart(context.clock, started.epoch if started is not None else 0)
        self._registering.base_epoch = self._starting.state.epoch
        self._contacts: dict[PeerId, Contact] = {}
        self.holders: frozenset[PeerId] = frozenset()
        """Who executes slices, or is to: the owner serves them states."""

    def understand(self, enlisted: Enlisted) -> Draft:
        """Check and cut: GraphError or WireError when the proposal is not a plan for our graph. Takes a while."""
        graph, plan = self._job.graph, enlisted.plan
        parts = cut(graph, plan.slice_of)
        check_plan(plan, graph, parts)
        explanation = explain(plan, graph, parts, workload(graph), self._job.settings.optimiser)
        return Draft(enlisted, parts, replica_edges(graph, parts, plan), tuple(explanation))

    def again(self, plan: Plan) -> Enlisted:
        """The newest proposal, under a plan that needs nobody's leave: for the peers that had agreed to it."""
        term, coordinator = self._starting.state.newest
        contacts = tuple(self._contacts[peer] for peer in sorted(plan.peers) if peer in self._contacts)
        return Enlisted(plan, coordinator, term, contacts)

    async def launch(
        self, links: Links, draft: Draft, states: States, aside: Callable[[Event], None], *, beside: bool
    ) -> Stage | Unlaunched:
        """Run an epoch. Whatever happens meanwhile that does not concern its start goes to `aside`.

        beside: the states of the epoch before, which goes on or is halted, are kept until this one starts.
        """
        self.holders = draft.plan.peers
        self._contacts |= {PeerId(contact.peer): contact for contact in draft.enlisted.contacts}
        await self._meet(draft.enlisted.contacts)
        links.add(sorted(draft.plan.peers))
        order = self._order(draft, states, beside=beside)
        enlisted = draft.enlisted
        proposed = epochs.Proposed(enlisted.term, enlisted.coordinator, self._starting.state.epoch, draft.plan.peers)
        why = await self._starting.start(links, proposed, order, self._recorder(order, draft), aside)
        self._registering.base_epoch = self._starting.state.epoch
        run = RunId(self._job.job, self._job.incarnation, order.epoch)
        stage = Stage(run, self._job.graph, draft.plan, draft.parts, draft.edges, self._job.settings, order.state_step)
        if why is None:
            return stage
        return Unlaunched(why, stage if why.recorded else None)

    async def _meet(self, contacts: Iterable[Contact]) -> None:
        """Learn the way to the peers. One that cannot be dialled shows when its control stream is opened."""

        async def dial(contact: Contact) -> None:
            with contextlib.suppress(NetworkError, AddressError):
                await self._transport.connect(contact.addresses, timeout_s=DIAL_S)

        await asyncio.gather(*(dial(contact) for contact in contacts))

    def _order(self, draft: Draft, states: States, *, beside: bool) -> Prepare:
        """What every peer is asked to prepare; its epoch is the one that is given out when it is sent."""
        sources = tuple(
            Source(slice=index, peers=tuple(peers[:MAX_SOURCES])) for index, peers in sorted(states.sources.items()) if peers
        )
        known = draft.plan.peers.union(*states.sources.values())
        contacts = [self._contacts[peer] for peer in sorted(known) if peer in self._contacts]
        return Prepare(
            job=self._job.job,
            incarnation=self._job.incarnation,
            epoch=self._starting.state.epoch + 1,
            graph=self._registering.graph,
            plan=self._registering.offer(draft.plan),
            settings=self._job.settings,
            state_step=states.step,
            contacts=tuple(contacts[:MAX_CONTACTS]),
            beside=beside,
            sources=sources,
        )

    def _recorder(self, order: Prepare, draft: Draft) -> Callable[[], None]:
        """Keeps the plan and writes the start of its epoch into the ledger."""
        start = entries.Start(
            epoch=order.epoch,
            state_step=order.state_step,
            plan=order.plan.digest,
            coordinator=draft.enlisted.coordinator,
            term=draft.enlisted.term,
            codecs=tuple(edge.codec for edge in draft.plan.edges),
        )

        def record() -> None:
            self._context.folder.write_plan(draft.plan, draft.explanation, order.epoch)
            self._context.folder.ledger.append(start)

        return record
