"""`fusion-peer join`: a volunteer's peer from start to goodbye. Proves and measures the device, joins, serves owners.

prove device -> measure rates (cached) -> join (joining.py) -> presence | coordination | job service, until told to stop
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from datetime import datetime
from functools import partial
from typing import Protocol

import torch

from fusion_p2p import __version__
from fusion_p2p.clock import SystemClock, pause_unless
from fusion_p2p.config import JoinConfig
from fusion_p2p.device.choose import choose
from fusion_p2p.device.memory import device_name, free_bytes
from fusion_p2p.device.rates import Rates, rates
from fusion_p2p.execute.compute import ComputeThread
from fusion_p2p.job.progress import PeerSample
from fusion_p2p.net.addresses import by_reach
from fusion_p2p.net.blobs import BlobServer
from fusion_p2p.net.metering import Meter, MeteredTransport
from fusion_p2p.net.pacing import Bandwidth
from fusion_p2p.peer.background import beside
from fusion_p2p.peer.building import Bench
from fusion_p2p.peer.control_socket import ControlSocket, socket_path
from fusion_p2p.peer.coordination import Coordination
from fusion_p2p.peer.job_service import JobService
from fusion_p2p.peer.joining import Joined, join_as_peer
from fusion_p2p.peer.link_watch import LinkWatch
from fusion_p2p.peer.memory_watch import MemoryWatch
from fusion_p2p.peer.presence import Presence
from fusion_p2p.peer.traffic import MonthlyTraffic
from fusion_p2p.peer.volunteer import Allowed
from fusion_p2p.peer.volunteer_service import Farewell, VolunteerService
from fusion_p2p.peer.warming import warm_up_soon
from fusion_p2p.plan.memory import gib
from fusion_p2p.swarm.announcement import Caps, MeasuredRates, Profile, own_versions
from fusion_p2p.wire.swarm_messages import Reachability

GIB = 1 << 30
MEGABIT = 1e6 / 8
VIEW_S = 3.0
"""Between two looks at what is shown; what the volunteer does is shown at once."""


class JoinReport(Protocol):
    """Where a peer says what happens."""

    def say(self, line: str) -> None:
        """Something happened."""

    def state(self, text: str) -> None:
        """What this peer does now; repetitions are not shown."""

    def measured(self, sample: PeerSample) -> None:
        """The numbers of this moment."""


async def run_join(config: JoinConfig, report: JoinReport, farewell: Farewell) -> int:
    """Serve the swarm until cancelled, or until what `farewell` or a command began has ended.

    FusionError says why this machine cannot.
    """
    report.say(f"fusion_p2p {__version__}, torch {torch.__version__}")
    async with _bench(config) as bench:
        measured = await bench.run(rates, bench.device, config.state_directory, benchmark=config.benchmark)
        report.say(_describe(bench, measured))
        async with join_as_peer(config, report.say) as joined:
            # Any peer serves newcomers as a bootstrap does, so the address that reaches furthest is the one to hand on.
            furthest = by_reach((*config.bootstrap, *joined.transport.addresses))[0]
            report.say(f"on another machine: fusion-peer join --bootstrap {furthest}")
            profile = _profile(config, joined.reachability, bench, measured)
            await _Station(config, joined, bench, profile).serve(report, farewell)
    return 0


@contextlib.asynccontextmanager
async def _bench(config: JoinConfig) -> AsyncIterator[Bench]:
    """The device, proved by a small forward and backward pass. DeviceUnusable says what is wrong with it."""
    thread, coding = ComputeThread(config.threads), ComputeThread(name="coding")
    try:
        device = await asyncio.wrap_future(thread.submit(choose, config.device))
        yield Bench(device, _offered_bytes(device, config.memory_gib), thread, coding)
    finally:
        coding.close()
        thread.close()


def _offered_bytes(device: torch.device, most_gib: float | None, copies_bytes: int = 0) -> int:
    """What is free now, at most what the volunteer gives. Copies for others, on the host, go when slices need their room."""
    free = free_bytes(device) + (copies_bytes if device.type == "cpu" else 0)
    return free if most_gib is None else min(free, int(most_gib * GIB))


class _Station:
    """Everything that a joined peer consists of, wired together."""

    def __init__(self, config: JoinConfig, joined: Joined, bench: Bench, profile: Profile) -> None:
        self._clock = clock = SystemClock()
        meter = Meter()
        transport = MeteredTransport(joined.transport, meter)
        identity = config.identity or config.state_directory / "join.key"
        self._config, self._bench = config, bench
        keep_to(joined.transport.bandwidth, profile.caps)
        self._blobs = BlobServer(transport)
        self._jobs = JobService(transport, self._blobs, bench, clock)
        self._presence = Presence(transport, joined.directory, joined.identity, clock, profile, self._jobs)
        Coordination(transport, self._presence, self._blobs, clock)
        self._watch = LinkWatch(transport, self._presence, self._jobs, clock)
        self._jobs.observe_rates(self._watch.saw_traffic)
        self._watch.measured = self._jobs.line_is
        self._jobs.is_near = self._watch.is_near
        self._jobs.standing = lambda: self._presence.standing
        traffic = MonthlyTraffic(config.state_directory, joined.identity.peer_id, meter, datetime.now().astimezone())
        self._volunteer = VolunteerService(
            _allowed(config),
            self._jobs,
            self._presence.set_state,
            traffic,
            clock,
            leave_process=partial(signal.raise_signal, signal.SIGTERM),
            name=str(identity),
        )
        self._control = ControlSocket(socket_path(config.state_directory, identity), self._volunteer.obey)

    async def serve(self, report: JoinReport, farewell: Farewell) -> None:
        """Until cancelled, or gone. The control socket closes last, so that whoever said `leave` knows when."""
        farewell.leave = self._volunteer.leave
        await self._blobs.start()
        warm_up_soon()
        memory = MemoryWatch(self._bench.offered_bytes, self._free_bytes, self._is_idle, self._offer)
        async with beside(self._control.run()), asyncio.TaskGroup() as group:
            parts = (self._jobs.run(), self._presence.run(), self._watch.run(), self._volunteer.run(), memory.run())
            tasks = [group.create_task(part) for part in (*parts, self._show(report))]
            await self._volunteer.gone.wait()
            for task in tasks:
                task.cancel()

    async def _free_bytes(self) -> int:
        copies_bytes = sum(copy.num_bytes for copy in self._jobs.copies)
        return await self._bench.run(_offered_bytes, self._bench.device, self._config.memory_gib, copies_bytes)

    def _is_idle(self) -> bool:
        return self._jobs.holding() is None

    def _offer(self, num_bytes: int) -> None:
        self._bench.offered_bytes = num_bytes
        self._presence.set_free_bytes(num_bytes)

    async def _show(self, report: JoinReport) -> None:
        while True:
            coordinating = self._presence.coordinating
            report.state(f"{self._volunteer.describe()}{', coordinating the swarm' if coordinating else ''}")
            report.measured(self._jobs.sample(members=len(self._presence.peers), coordinating=coordinating))
            self._volunteer.changed.clear()
            await pause_unless(self._volunteer.changed, self._clock, VIEW_S)


def _allowed(config: JoinConfig) -> Allowed:
    monthly_bytes = None if config.monthly_gib is None else int(config.monthly_gib * GIB)
    return Allowed(config.working_hours, monthly_bytes, config.on_battery == "run", config.drain_timeout_s)


def announced_caps(config: JoinConfig) -> Caps:
    """The caps on the line, as planners are told of them."""
    up, down = (None if mbit is None else mbit * MEGABIT for mbit in (config.upload_mbit, config.download_mbit))
    return Caps(upload_bytes_per_s=up, download_bytes_per_s=down)


def keep_to(bandwidth: Bandwidth, caps: Caps) -> None:
    """Have whoever moves bulk data keep to these caps."""
    bandwidth.up.set_rate(caps.upload_bytes_per_s)
    bandwidth.down.set_rate(caps.download_bytes_per_s)


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
        caps=announced_caps(config),
    )


def _describe(bench: Bench, measured: Rates) -> str:
    rate = f"{measured.matmul_flops / 1e9:.0f} GFLOP/s measured (forward and backward)"
    return f"device {bench.device}: {device_name(bench.device)}, {gib(bench.offered_bytes)} offered, {rate}"
