"""A testbed as real processes on this machine: every peer on a node of an emulated network, slowed as its device says.

The owner and the bootstrap node share one more node, in the site that the testbed names as the owner's, else in the first
peer's. What a program says, and how it ends, is as on real machines: nothing in the product knows that it is emulated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from contrib.processes import ADDRESS, Program, ProgramFailed, processes_of, python_module, wait_until_joined
from contrib.testbeds.awake import awake
from contrib.testbeds.shaping import Shape, shape_of
from fusion_p2p.ids import PeerId
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.testbed import load_testbed

START_S = 60.0
RATES = "rates"
"""Folder of the rates that were measured once for all peers."""
LISTING_STEP = 1e-6
"""Peers of one speed are listed in the order of their ids, which nobody chose: so much slower is each than the one before."""


@dataclass(frozen=True, slots=True)
class Wire:
    """A link as measured: seconds one way, and bytes per second."""

    latency_s: float
    bytes_per_s: float


@dataclass
class EmulatedNetwork:
    """Nodes that programs can run on. `shape` is what their links are told to do."""

    shape: Shape
    links: Program
    namespaces: dict[str, str]

    def start(self, name: str, node: int, command: Sequence[str]) -> Program:
        """Start a program on a node."""
        namespace = self.namespaces[self.shape.addresses[node]]
        return Program(name, ["nsenter", f"--net={namespace}", "--", *command])

    def measure(self, source: int, target: int, stream_s: float = 1.0) -> Wire:
        """Really send for about `stream_s`, with nothing of the product in between."""
        module, address = "contrib.testbeds.wire_check", self.shape.addresses[target]
        num_bytes = max(1 << 16, int(stream_s / self.shape.seconds_per_byte[source][target]))
        with self.start(f"node {target}", target, python_module(module, address)) as answering:
            port = answering.wait_for(r"^port (\d+)", START_S).group(1)
            counts = ("--num-bytes", str(num_bytes), "--quiet-bytes", str(num_bytes // 2))
            with self.start(f"node {source}", source, python_module(module, address, port, *counts)) as asking:
                if asking.wait(START_S + 3 * stream_s):
                    raise ProgramFailed(f"{asking.name} could not ask node {target}:\n{asking.tail()}")
                return Wire(**json.loads(asking.lines[-1]))


@contextmanager
def emulated_network(shape: Shape, folder: Path) -> Iterator[EmulatedNetwork]:
    """The network is up in the block. ProgramFailed says why this machine cannot emulate one."""
    path = folder / "shape.json"
    path.write_text(shape.to_json(), encoding="utf-8")
    with Program("links", python_module("contrib.testbeds.links", str(path))) as links:
        links.wait_for("^links are up", START_S)
        named = [line.split() for line in links.lines if line.startswith("node ")]
        yield EmulatedNetwork(shape, links, {address: namespace for _, address, namespace in named})


@dataclass
class EmulatedSwarm:
    """A swarm on an emulated network: peers are listed in the order of the testbed, the owner's node comes last."""

    folder: Path
    network: EmulatedNetwork
    bootstrap: Program
    address: str
    peers: list[Program]

    @property
    def owner_node(self) -> int:
        return len(self.network.shape.addresses) - 1

    def train(self, name: str, arguments: Sequence[str], *, timeout_s: float = 600.0) -> Path:
        """Train to the end; the run folder. ProgramFailed with the last lines of owner and peers when it does not get there."""
        folder = self.folder / name
        with self.start_training(folder, arguments) as owner:
            code = owner.wait(timeout_s)
        if code:
            raise self.failure(owner, f"ended with exit code {code}")
        return folder

    def start_training(self, run: Path, arguments: Sequence[str]) -> Program:
        """Start an owner that trains into a run folder."""
        command = python_module(
            "fusion_p2p.cli.main", "train", "--bootstrap", self.address, *_reachable(self.network, self.owner_node),
            "--state-dir", str(self.folder / "owner"), "--run", str(run), *arguments,
        )  # fmt: skip
        return self.network.start(f"owner of {run.name}", self.owner_node, command)

    def failure(self, owner: Program, what: str) -> ProgramFailed:
        """What happened to an owner, with the last lines of everybody."""
        said = "\n".join(f"{program.name}:\n{program.tail(12)}" for program in (owner, *self.peers))
        return ProgramFailed(f"{owner.name} {what}\n{said}")

    def survey(self) -> dict[str, Any]:
        """The links between the peers, in the order listed, as the swarm has measured them (`survey.py`)."""
        listen = f"/ip4/{self.network.shape.addresses[self.owner_node]}/tcp/0"
        command = python_module("contrib.testbeds.survey", self.address, str(self.folder / "guest"), listen)
        with self.network.start("survey", self.owner_node, command) as asking:
            if asking.wait(START_S):
                raise ProgramFailed(f"the survey failed:\n{asking.tail()}")
        told: dict[str, Any] = json.loads(asking.lines[-1])
        place = [told["peers"].index(peer) for peer in self.ids]
        for name in ("latency_s", "seconds_per_byte"):
            told[name] = [[told[name][i][j] for j in place] for i in place]
        return told

    @property
    def ids(self) -> tuple[PeerId, ...]:
        """The peers' ids, in the order listed."""
        return tuple(PeerId(peer.wait_for(r"/tcp/\d+/p2p/(\w+)", START_S).group(1)) for peer in self.peers)

    def processor_seconds(self) -> float:
        """Processor time that the swarm's processes and their daemons have used so far, the emulator not counted."""
        return _processor_seconds([self.bootstrap, *self.peers])

    def emulator_seconds(self) -> float:
        """Processor time of the emulator."""
        return _processor_seconds([self.network.links])


def read_testbed(path: Path) -> Network:
    """A testbed with a node for the owner; rates are relative to this machine: 1 / (times slower)."""
    network = load_testbed(path, reference=1.0)
    return network if network.has_owner else _with_owner(network)


def slowness(network: Network, base: float) -> list[float]:
    """How many times slower than this machine each peer is; the fastest is `base` times slower."""
    rates = network.flops_per_s[:, 0]
    return [float(base * rates.max() / rate * (1 + LISTING_STEP * index)) for index, rate in enumerate(rates)]


@contextmanager
def emulated_swarm(
    folder: Path, bed: Network, base: float, rates_times: float = 1.0, options: Sequence[str] = ()
) -> Iterator[EmulatedSwarm]:
    """The peers of a testbed (`read_testbed`), in a swarm and in the order listed; they are ended after the block.

    base: how many times slower than this machine the fastest is. rates_times: of what peers measure of themselves.
    options: further ones of `slow_peer.py` for all peers.
    """
    with ExitStack() as running:
        running.enter_context(awake())
        network = running.enter_context(emulated_network(shape_of(bed), folder))
        owner = len(network.shape.addresses) - 1
        bootstrap = running.enter_context(_start_bootstrap(network, owner, folder / "bootstrap"))
        address = bootstrap.wait_for(ADDRESS, START_S).group()
        peers: list[Program] = []
        for node, slower in enumerate(slowness(bed, base)):
            pace = ("--slower", repr(slower), "--rates-times", repr(rates_times), *options)
            peers.append(running.enter_context(_start_peer(network, node, pace, folder, address)))
            if node == 0:  # it measures this machine for all, alone
                peers[0].wait_for("device cpu", START_S)
        wait_until_joined(peers)
        yield EmulatedSwarm(folder, network, bootstrap, address, peers)


def _start_bootstrap(network: EmulatedNetwork, node: int, state: Path) -> Program:
    command = python_module(
        "fusion_p2p.cli.main", "bootstrap", *_reachable(network, node), "--no-relay", "--state-dir", str(state)
    )
    return network.start("bootstrap", node, command)


def _start_peer(network: EmulatedNetwork, node: int, pace: Sequence[str], folder: Path, address: str) -> Program:
    command = python_module(
        "contrib.testbeds.slow_peer", *pace, "--rates", str(folder / RATES),
        "join", "--bootstrap", address, *_reachable(network, node), "--state-dir", str(folder / f"peer-{node}"),
        "--device", "cpu", "--threads", "1", "--memory-gib", "1",
    )  # fmt: skip
    return network.start(f"peer {node}", node, command)


def _reachable(network: EmulatedNetwork, node: int) -> tuple[str, ...]:
    return ("--listen", f"/ip4/{network.shape.addresses[node]}/tcp/0", "--no-nat")


def _with_owner(network: Network) -> Network:
    """One more node beside the first peer: its links are that peer's, and their own is that of the site's LAN."""
    nodes = np.append(np.arange(len(network.peers)), 0)
    alpha, beta = network.alpha_s[np.ix_(nodes, nodes)], network.beta_s[np.ix_(nodes, nodes)]
    neighbours = [node for node in range(1, len(network.peers)) if network.sites[node] == network.sites[0]]
    for matrix, original in ((alpha, network.alpha_s), (beta, network.beta_s)):
        matrix[0, -1] = matrix[-1, 0] = original[0, neighbours[0]] if neighbours else original[original > 0].min()
    return replace(network, sites=network.sites[nodes], alpha_s=alpha, beta_s=beta, has_owner=True)


def _processor_seconds(programs: Sequence[Program]) -> float:
    import psutil

    total = 0.0
    for pid in processes_of([program.session for program in programs]):
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total
