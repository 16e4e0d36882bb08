"""`fusion-peer join`: a volunteer's peer from start to goodbye. Proves and measures the device, joins, serves owners.

prove device -> measure rates (cached) -> join (joining.py) -> presence | coordination | job service, until told to stop
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

import torch

from fusion_p2p import __version__
from fusion_p2p.clock import SystemClock
from fusion_p2p.config import JoinConfig
from fusion_p2p.device.choose import choose
from fusion_p2p.device.memory import device_name, free_bytes
from fusion_p2p.device.rates import Rates, rates
from fusion_p2p.execute.compute import ComputeThread
from fusion_p2p.job.progress import PeerSample
from fusion_p2p.net.addresses import by_reach
from fusion_p2p.net.blobs import BlobServer
from fusion_p2p.peer.building import Bench
from fusion_p2p.peer.coordination import Coordination
from fusion_p2p.peer.job_service import JobService
from fusion_p2p.peer.joining import Joined, join_as_peer
from fusion_p2p.peer.link_watch import LinkWatch
from fusion_p2p.peer.presence import Presence
from fusion_p2p.plan.memory import gib
from fusion_p2p.swarm.announcement import MeasuredRates, Profile, own_versions
from fusion_p2p.wire.swarm_messages import Reachability

GIB = 1 << 30
VIEW_S = 0.5


class JoinReport(Protocol):
    """Where a peer says what happens."""

    def say(self, line: str) -> None:
        """Something happened."""

    def state(self, text: str) -> None:
        """What this peer does now; repetitions are not shown."""

    def measured(self, sample: PeerSample) -> None:
        """The numbers of this moment."""


async def run_join(config: JoinConfig, report: JoinReport) -> int:
    """Serve the swarm until cancelled. FusionError says why this machine cannot."""
    report.say(f"fusion_p2p {__version__}, torch {torch.__version__}")
    async with _bench(config) as bench:
        measured = await bench.run(rates, bench.device, config.state_directory, benchmark=config.benchmark)
        report.say(_describe(bench, measured))
        async with join_as_peer(config, report.say) as joined:
            # Any peer serves newcomers as a bootstrap does, so the address that reaches furthest is the one to hand on.
            furthest = by_reach((*config.bootstrap, *joined.transport.addresses))[0]
            report.say(f"on another machine: fusion-peer join --bootstrap {furthest}")
            await _serve(config, joined, bench, measured, report)
    return 0


@contextlib.asynccontextmanager
async def _bench(config: JoinConfig) -> AsyncIterator[Bench]:
    """The device, proved by a small forward and backward pass. DeviceUnusable says what is wrong with it."""
    thread, coding = ComputeThread(config.threads), ComputeThread(name="coding")
    try:
        device = await asyncio.wrap_future(thread.submit(choose, config.device))
        offered = free_bytes(device)
        if config.memory_gib is not None:
            offered = min(offered, int(config.memory_gib * GIB))
        yield Bench(device, offered, thread, coding)
    finally:
        coding.close()
        thread.close()


async def _serve(config: JoinConfig, joined: Joined, bench: Bench, measured: Rates, report: JoinReport) -> None:
    clock, transport = SystemClock(), joined.transport
    blobs = BlobServer(transport)
    jobs = JobService(transport, blobs, bench, clock)
    profile = _profile(config, joined.reachability, bench, measured)
    presence = Presence(transport, joined.directory, joined.identity, clock, profile, jobs)
    Coordination(transport, presence, blobs, clock)
    watch = LinkWatch(transport, presence, jobs, clock)
    jobs.observe_rates(watch.saw_traffic)
    await blobs.start()
    async with asyncio.TaskGroup() as group:
        group.create_task(jobs.run())
        group.create_task(presence.run())
        group.create_task(watch.run())
        group.create_task(_show(jobs, presence, report))


async def _show(jobs: JobService, presence: Presence, report: JoinReport) -> None:
    while True:
        coordinating = ", coordinating the swarm" if presence.coordinating else ""
        report.state(f"{jobs.describe()}{coordinating}")
        report.measured(jobs.sample(members=len(presence.members()), coordinating=presence.coordinating))
        await asyncio.sleep(VIEW_S)


def _profile(config: JoinConfig, reachability: Reachability, bench: Bench, measured: Rates) -> Profile:
    return Profile(
        network=config.network,
        reachability=reachability,
        versions=own_versions(str(torch.__version__)),
        device=device_name(bench.device)[:64],
        rates=MeasuredRates(
            matmul_flops=measured.matmul_flops,
            convolution_flops=measured.convolution_flops,
            attention_flops=measured.attention_flops,
            memory_bytes_per_s=measured.memory_bytes_per_s,
        ),
        free_bytes=bench.offered_bytes,
    )


def _describe(bench: Bench, measured: Rates) -> str:
    rate = f"{measured.matmul_flops / 1e9:.0f} GFLOP/s measured (forward and backward)"
    return f"device {bench.device}: {device_name(bench.device)}, {gib(bench.offered_bytes)} offered, {rate}"
