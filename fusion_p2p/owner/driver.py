"""`fusion-peer train`: open the data, capture the model or read it back, and hand both to an `OwnedRun` on the real network."""

from __future__ import annotations

import asyncio
import functools
import uuid
from dataclasses import replace

from fusion_p2p.clock import SystemClock
from fusion_p2p.config import TrainConfig
from fusion_p2p.graph.capture import Captured, capture
from fusion_p2p.graph.encoding import decode_graph, encode_graph
from fusion_p2p.ids import JobId, digest_of
from fusion_p2p.job.progress import RunReport
from fusion_p2p.net.blobs import BlobServer
from fusion_p2p.owner import ledger as entries
from fusion_p2p.owner.checkpoint import CheckpointWriter, newest_checkpoint
from fusion_p2p.owner.data import DataSet, open_data
from fusion_p2p.owner.enlistment import better_plan, enlist
from fusion_p2p.owner.finder import Finder
from fusion_p2p.owner.guards import Guards
from fusion_p2p.owner.model_source import resolve_model
from fusion_p2p.owner.narrowing import narrowed
from fusion_p2p.owner.observers import SwarmObservers
from fusion_p2p.owner.own_links import OwnLinks
from fusion_p2p.owner.owned_run import OwnedRun, Partners
from fusion_p2p.owner.registering import Job
from fusion_p2p.owner.retuner import Retuner, Survey
from fusion_p2p.owner.run_folder import RunFolder
from fusion_p2p.owner.spares import Swarm
from fusion_p2p.owner.stage import RunContext
from fusion_p2p.owner.swarm_survey import survey_of
from fusion_p2p.plan.request import PlanRequest
from fusion_p2p.wire.job_messages import OptimiserSettings, TrainingSettings


async def run_train(config: TrainConfig, report: RunReport) -> int:
    """Train to the last step and return 0. FusionError otherwise: RunStopped when the run can be resumed."""
    data = await asyncio.to_thread(open_data, config)
    fresh = None if config.resume is not None else await asyncio.to_thread(_capture, config, data, report)
    with RunFolder.create(config) if config.resume is None else RunFolder.resume(config.resume) as folder:
        if fresh is not None:
            write_down(folder, *fresh)
        job = open_job(config, folder, report)
        if job.state_step >= config.steps:
            report.say(f"nothing to do: the run has all of its {config.steps} steps; --steps takes it further")
            return 0
        if config.finish_after < config.steps:
            report.say(f"finish: from step {config.finish_after + 1} on with codecs that leave no trace in the model")
        await _train(RunContext(config, data, folder, report, SystemClock()), job)
    return 0


async def _train(context: RunContext, job: Job) -> None:
    """Train a job to its last step, as a peer of the swarm."""
    from fusion_p2p.peer.joining import join_as_owner  # imports hivemind

    config, report = context.config, context.report
    async with join_as_owner(config, report.say) as network:
        own_links = OwnLinks(network.identity.peer_id, SystemClock())
        blobs, finder = BlobServer(network.transport), Finder(network.transport, network.directory)
        register = functools.partial(
            enlist,
            network.transport,
            network.directory,
            report=report.say,
            own_links=own_links,
            no_peers_timeout_s=config.no_peers_timeout_s,
            finder=finder,
            offered=blobs.offered,
        )
        better = functools.partial(
            better_plan, network.transport, network.directory, own_links=own_links, finder=finder, offered=blobs.offered
        )
        look = functools.partial(survey_of, network.transport, network.directory, own_links)
        retuner = await asyncio.to_thread(retuner_for, context, job, look)
        surroundings = Swarm(network.transport, network.directory)
        guards = Guards(job.job, job.incarnation, blobs, surroundings, context.clock, config.copy_every, report.say)
        observers = SwarmObservers(network.transport, network.directory)
        partners = Partners(register, better, observers, guards)
        await OwnedRun(context, job, network.transport, blobs, partners, retuner).finish()


def retuner_for(context: RunContext, job: Job, survey: Survey) -> Retuner | None:
    """What keeps the codecs of a run to its links, if its policy depends on them."""
    config = context.config
    if config.codec != "adaptive":
        return None
    request = PlanRequest(
        graph=digest_of(job.graph_bytes),
        micro_batches=config.micro_batches,
        optimiser=job.settings.optimiser,
        recompute=config.recompute,
        codec=config.codec,
        ratio=config.most_ratio,
    )
    return Retuner(survey, job.graph, request, context.clock)


def _capture(config: TrainConfig, data: DataSet, report: RunReport) -> tuple[Captured, tuple[str, ...]]:
    """The captured model, and the names of its state_dict. Whatever mode the module comes in, it is trained."""
    source = resolve_model(config, data)
    source.module.train()
    captured = capture(source.module, data.example(), source.rules)
    made = narrowed(captured.graph, config, config.num_cuts)
    graph = made.graph
    numbers = sum(type_.num_elements for type_ in graph.types[graph.first_parameter : graph.first_node_value])
    report.say(f"captured {config.model}: {len(graph.nodes)} operators, {numbers:,} parameters")
    if made.said:
        report.say(made.said)
    names = (*source.module.state_dict(), *made.parameters)
    return replace(captured, graph=graph, weights=captured.weights | made.weights), names


def write_down(folder: RunFolder, captured: Captured, names: tuple[str, ...]) -> None:
    """Keep what a resumed run needs: the graph, and first values that follow from no rule, as the checkpoint of step 0."""
    encoded = encode_graph(captured.graph)
    unruled = [parameter.name for parameter in captured.graph.parameters if parameter.rule is None]
    if unruled:
        writer = CheckpointWriter(folder.checkpoints, digest_of(encoded), 0)
        for name in unruled:
            writer.add(f"parameter/{name}", captured.weights[name])
        writer.finish()
    untouched = {name: tensor for name, tensor in captured.unused.items() if not tensor.is_meta}
    folder.write_model(encoded, names, untouched)


def open_job(config: TrainConfig, folder: RunFolder, report: RunReport) -> Job:
    """The run as its folder has it, under a new incarnation."""
    before = folder.ledger.history.opened
    job = before.job if before is not None else uuid.uuid4().hex
    incarnation = before.incarnation + 1 if before is not None else 1
    folder.ledger.append(entries.Opened(job=job, incarnation=incarnation))
    encoded = folder.read_graph()
    return Job(
        job=JobId(job),
        incarnation=incarnation,
        graph=decode_graph(encoded),
        graph_bytes=encoded,
        settings=_settings(config),
        checkpoint=newest_checkpoint(folder.checkpoints, report.say),
    )


def _settings(config: TrainConfig) -> TrainingSettings:
    optimiser = OptimiserSettings(
        name=config.optimiser,
        momentum=config.momentum,
        beta1=config.beta1,
        beta2=config.beta2,
        epsilon=config.epsilon,
        weight_decay=config.weight_decay,
    )
    return TrainingSettings(seed=config.seed, optimiser=optimiser, precision=config.precision)
