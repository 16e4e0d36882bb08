"""A swarm of real processes on loopback for benchmarks: one bootstrap node, one-thread peers, owners as needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from contrib.processes import Program, ProgramFailed, fusion_peer, start_bootstrap, start_peer, wait_until_joined


@dataclass
class Swarm:
    """Its address, its processes, and a folder for their state and for run folders."""

    folder: Path
    address: str
    bootstrap: Program
    peers: list[Program] = field(default_factory=list)

    def start_owner(self, name: str, *arguments: str) -> Program:
        """`fusion-peer train` into the run folder `name`, over all peers unless the arguments ask for another scheduler."""
        return fusion_peer(
            f"owner of {name}", "train", "--bootstrap", self.address, "--listen", "/ip4/127.0.0.1/tcp/0", "--no-nat",
            "--state-dir", str(self.folder / "owner"), "--run", str(self.folder / name),
            "--scheduler", "equal-compute", *arguments,
        )  # fmt: skip

    def train(self, name: str, arguments: Sequence[str], *, timeout_s: float = 600.0) -> Path:
        """Train to the end; the run folder. ProgramFailed with the last lines of owner and peers when it does not get there."""
        with self.start_owner(name, *arguments) as owner:
            code = owner.wait(timeout_s)
        if code:
            said = "\n".join(f"{program.name}:\n{program.tail(12)}" for program in (owner, *self.peers))
            raise ProgramFailed(f"{owner.name} ended with exit code {code}\n{said}")
        return self.folder / name


@contextmanager
def running_swarm(folder: Path, num_peers: int, *bootstrap_arguments: str) -> Iterator[Swarm]:
    """A bootstrap node and its peers, all in the swarm; they are ended after the block."""
    with ExitStack() as running:
        node, address = start_bootstrap(folder / "bootstrap", *bootstrap_arguments)
        running.enter_context(node)
        swarm = Swarm(folder, address, node)
        for number in range(1, num_peers + 1):
            swarm.peers.append(running.enter_context(start_peer(f"peer-{number}", folder, address)))
        wait_until_joined(swarm.peers)
        yield swarm
