"""Peers that nobody can dial join and exchange data through the relay: real processes, real namespaces where root allows."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
MEBIBYTE = 1 << 20
START_S = 60.0


class Talker:
    """A child process whose lines are read with a deadline."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self._log = log
        self._errors = log.open("w")
        self._process = subprocess.Popen(
            [*arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
        )
        self._read = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self, timeout_s: float = START_S) -> str:
        deadline = time.monotonic() + timeout_s
        assert self._process.stdout is not None
        while b"\n" not in self._read:
            left_s = deadline - time.monotonic()
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, left_s))
            data = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            assert data, f"no line within {timeout_s:g} s; the process said: {self._log.read_text()[-2000:]}"
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()

    def answer(self, timeout_s: float = START_S, **order: object) -> dict[str, object]:
        """Give an order, when there is one, and read the JSON line that comes."""
        if order:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
        answer: dict[str, object] = json.loads(self.line(timeout_s))
        assert "error" not in answer, answer
        return answer

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()


@contextlib.contextmanager
def bootstrap(folder: Path, host: str, *options: str) -> Iterator[str]:
    """A bootstrap node with its relay; its address."""
    command = [sys.executable, "-m", "fusion_p2p.cli.main", "bootstrap", "--listen", f"/ip4/{host}/tcp/0", "--no-nat"]
    relay = ["--relay-listen", f"/ip4/{host}/tcp/0", "--state-dir", str(folder / "bootstrap")]
    talker = Talker([*command, *relay, *options], folder / "bootstrap.log")
    try:
        address = talker.line().split()[-1]
        while "join with" not in talker.line():
            pass
        yield address
    finally:
        talker.end()


@contextlib.contextmanager
def peer(folder: Path, name: str, bootstrap_address: str, *where: str, namespace: str = "") -> Iterator[Talker]:
    """A peer process: where it listens, and what it announces instead."""
    home = folder / name
    home.mkdir()
    command = [sys.executable, "-m", "tests.process.relay_peer", str(home), bootstrap_address, *where]
    talker = Talker([*(("ip", "netns", "exec", namespace) if namespace else ()), *command], folder / f"{name}.log")
    try:
        yield talker
    finally:
        talker.end()


@pytest.mark.row(4)
def test_a_peer_that_announces_what_nobody_can_dial_goes_through_the_relay(tmp_path: Path):
    """192.0.2.1 is reserved for documentation: as for a peer behind NAT, nobody gets there."""
    with bootstrap(tmp_path, "127.0.0.1") as address:
        loopback = "/ip4/127.0.0.1/tcp/0"
        with (
            peer(tmp_path, "direct", address, loopback) as direct,
            peer(tmp_path, "hidden", address, loopback, "/ip4/192.0.2.1/tcp/4001") as hidden,
        ):
            one, other = direct.answer(), hidden.answer()
            assert (one["reachability"], other["reachability"]) == ("direct", "relayed")
            assert all("/p2p-circuit/p2p/" in address for address in other["addresses"])  # type: ignore[attr-defined]
            both_ways(direct, one, hidden, other, num_bytes=2 * MEBIBYTE)


def both_ways(
    a: Talker, a_is: dict[str, object], b: Talker, b_is: dict[str, object], *, num_bytes: int
) -> list[dict[str, object]]:
    """Streams opened by either side; what each said."""
    answers = []
    for talker, target in ((a, b_is), (b, a_is)):
        order = {"to": target["peer"], "addresses": target["addresses"], "num_bytes": num_bytes, "piece_bytes": MEBIBYTE // 4}
        answers.append(talker.answer(60, **order))
        assert answers[-1]["sent"] == num_bytes
    return answers


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("tc") is None or shutil.which("ip") is None, reason="needs root, ip and tc"
)


@contextlib.contextmanager
def closed_home(name: str, number: int) -> Iterator[str]:
    """A network namespace that reaches 10.203.NUMBER.1 here, but lets no TCP connection in; its own address."""
    here, there, net = f"fp{number}h", f"fp{number}t", f"10.203.{number}"
    try:
        for command in (
            f"ip netns add {name}",
            f"ip link add {here} type veth peer name {there} netns {name}",
            f"ip addr add {net}.1/24 dev {here}",
            f"ip link set {here} up",
            f"ip -n {name} addr add {net}.2/24 dev {there}",
            f"ip -n {name} link set {there} up",
            f"ip -n {name} link set lo up",
            f"ip -n {name} route add default via {net}.1",
            f"ip -n {name} link add hole type veth peer name bottom",
            f"ip -n {name} link set hole up",
            f"tc -n {name} qdisc add dev {there} ingress",
            # SYN without ACK falls into a hole: nobody opens a connection into it, as behind a NAT
            f"tc -n {name} filter add dev {there} parent ffff: protocol ip prio 1 u32 match ip protocol 6 0xff "
            "match u8 0x02 0x12 at 33 action mirred egress redirect dev hole",
        ):
            subprocess.run(command.split(), check=True, capture_output=True, text=True)
        yield f"{net}.2"
    finally:
        subprocess.run(["ip", "link", "del", here], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@needs_root
@pytest.mark.root
@pytest.mark.slow
@pytest.mark.row(4)
@pytest.mark.row(5)
def test_two_homes_that_let_nobody_in_talk_through_a_relay_that_cuts_them_off(tmp_path: Path):
    """The relay resets every circuit after 3 MiB; each reset is a reconnect that goes on with the same piece."""
    with (
        closed_home("fusion-home-1", 1) as first_host,
        closed_home("fusion-home-2", 2) as second_host,
        bootstrap(tmp_path, "0.0.0.0", "--relay-mebibytes", "3") as address,
    ):
        port, name = address.split("/")[4], address.split("/")[-1]
        seen_by = [f"/ip4/10.203.{number}.1/tcp/{port}/p2p/{name}" for number in (1, 2)]
        with (
            peer(tmp_path, "one", seen_by[0], f"/ip4/{first_host}/tcp/0", namespace="fusion-home-1") as one,
            peer(tmp_path, "two", seen_by[1], f"/ip4/{second_host}/tcp/0", namespace="fusion-home-2") as two,
        ):
            one_is, two_is = one.answer(), two.answer()
            assert one_is["reachability"] == two_is["reachability"] == "relayed"
            for answer in both_ways(one, one_is, two, two_is, num_bytes=8 * MEBIBYTE):
                assert "/p2p-circuit" in str(answer["via"])
                assert int(str(answer["resets"])) >= 1


@needs_root
@pytest.mark.root
@pytest.mark.slow
@pytest.mark.row(5)
def test_a_model_trains_over_two_homes_that_let_nobody_in(tmp_path: Path):
    """`fusion-peer join` in both, `fusion-peer train` outside: all that the slices say to each other crosses the relay, which
    resets their connection every few steps; the run goes on at the same micro-batch.
    """
    with (
        closed_home("fusion-home-1", 1),
        closed_home("fusion-home-2", 2),
        bootstrap(tmp_path, "0.0.0.0", "--relay-mebibytes", "4") as address,
        contextlib.ExitStack() as stack,
    ):
        port, name = address.split("/")[4], address.split("/")[-1]
        for number in (1, 2):
            command = [
                *("ip", "netns", "exec", f"fusion-home-{number}", sys.executable, "-m", "fusion_p2p.cli.main", "join"),
                *("--bootstrap", f"/ip4/10.203.{number}.1/tcp/{port}/p2p/{name}", "--threads", "1", "--no-nat"),
                *("--state-dir", str(tmp_path / f"home-{number}")),
            ]
            home = Talker(command, tmp_path / f"home-{number}.log")
            stack.callback(home.end)
            while "reachable: " not in (said := home.line()):
                pass
            assert "reachable: relayed" in said
        train = [
            *(sys.executable, "-m", "fusion_p2p.cli.main", "train", "--bootstrap", f"/ip4/127.0.0.1/tcp/{port}/p2p/{name}"),
            *("--no-nat", "--state-dir", str(tmp_path / "owner"), "--run", str(tmp_path / "run"), "--peers", "2"),
            *("--layers", "2", "--width", "64", "--heads", "2", "--context", "64", "--batch-size", "8", "--micro-batches", "4"),
            *("--steps", "12", "--validate-every", "0", "--scheduler", "equal-compute"),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(train, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == list(range(1, 13))
    assert metrics[-1]["loss"] < metrics[0]["loss"]
