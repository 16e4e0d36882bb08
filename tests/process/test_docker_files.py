"""Every RUN and CMD line of docker/ and every ExecStart of bootstrap/, run for real outside a container."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from contrib.processes import ADDRESS, Program, fusion_peer, start_bootstrap, wait_until_gone
from tests.deployment import (
    ENVIRONMENTS,
    ROOT,
    UNITS,
    Instruction,
    compose_services,
    directive,
    dockerfile,
    environment_file,
    substitute,
)

pytestmark = [pytest.mark.process, pytest.mark.slow]

PREFIXES = ("/opt/fusion", "/var/lib/fusion", "/src")
"""What a build writes outside the base system: mapped into a temporary root."""
PRELUDE = 'groupadd() { command groupadd --prefix "$ROOT" "$@"; }; useradd() { command useradd --prefix "$ROOT" "$@"; }; '


class Build:
    """Carries out a Dockerfile's instructions below a folder."""

    def __init__(self, root: Path, arguments: dict[str, str]) -> None:
        self.root = root
        self.values = dict(arguments)
        self.folder = root
        self.ran: list[str] = []
        (root / "etc").mkdir(parents=True)
        for name in ("passwd", "group", "shadow", "gshadow"):
            (root / "etc" / name).touch()

    def inside(self, text: str) -> str:
        """Paths of the image as paths below the root."""
        return re.sub(rf"(?<![\w.-])({'|'.join(PREFIXES)})(?![\w-])", lambda found: f"{self.root}{found.group(1)}", text)

    def follow(self, instruction: Instruction) -> None:
        """Do what docker would."""
        match instruction.name:
            case "ARG":
                name, _, default = instruction.text.partition("=")
                self.values.setdefault(name, default)
            case "ENV":
                self.values |= {
                    name: self.inside(value) for name, _, value in (word.partition("=") for word in instruction.words)
                }
            case "WORKDIR":
                self.folder = Path(self.inside(instruction.text))
                self.folder.mkdir(parents=True, exist_ok=True)
            case "COPY" if not instruction.text.startswith("--from="):
                self._copy(instruction.words)
            case "RUN":
                self._run(instruction.text)

    def _copy(self, words: list[str]) -> None:
        for source in words[:-1]:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, self.folder / words[-1], ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, self.folder / words[-1])

    def _run(self, text: str) -> None:
        command = self.inside(substitute(text, self.values))
        environment = {**os.environ, "ROOT": str(self.root), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        (self.root / "var/lib").mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["sh", "-ec", PRELUDE + command], cwd=self.folder, env=environment, capture_output=True, text=True, timeout=420
        )
        assert done.returncode == 0, f"RUN {text}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        self.ran.append(text)
        self._lend_packages()

    def _lend_packages(self) -> None:
        """Let a new environment see the packages of this one: gigabytes that pip then need not fetch and unpack again."""
        for packages in self.root.glob("opt/*/lib/python*/site-packages"):
            (packages / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")


@pytest.mark.root
@pytest.mark.timeout(300)
@pytest.mark.skipif(os.geteuid() != 0, reason="the image's build runs as root")
def test_every_run_line_builds_and_the_default_command_works(tmp_path: Path):
    build = Build(tmp_path / "image", {"TORCH": f"torch=={torch.__version__}"})
    for instruction in dockerfile():
        build.follow(instruction)
    assert build.ran == [instruction.text for instruction in dockerfile() if instruction.name == "RUN"]
    assert "fusion:x:10001:10001" in (build.root / "etc" / "passwd").read_text()
    assert (build.root / "var/lib/fusion").stat().st_uid == 10001

    (entry,) = (json.loads(line.text) for line in dockerfile() if line.name == "ENTRYPOINT")
    (default,) = (json.loads(line.text) for line in dockerfile() if line.name == "CMD")
    program = shutil.which(entry[0], path=build.values["PATH"])
    assert program == str(build.root / "opt/fusion/bin/fusion-peer")
    shown = subprocess.run([program, *entry[1:], *default], capture_output=True, text=True, timeout=30)
    assert shown.returncode == 0
    assert "bootstrap" in shown.stdout
    assert list(build.root.glob("opt/fusion/lib/python*/site-packages/fusion_p2p/cli/main.py"))


@pytest.fixture
def running() -> Iterator[list[Program]]:
    """Programs that are ended after the test, whatever happened."""
    programs: list[Program] = []
    yield programs
    for program in programs:
        program.end()


def on_loopback(arguments: list[str]) -> list[str]:
    """The arguments with the image's fixed ports replaced by free ones of this machine."""
    return [re.sub(r"^/ip4/0\.0\.0\.0/tcp/\d+$", "/ip4/127.0.0.1/tcp/0", argument) for argument in arguments]


def stops_within(program: Program, seconds: float) -> None:
    """SIGTERM ends it with exit code 0 in time, and nothing of it is left."""
    start = time.monotonic()
    program.process.send_signal(signal.SIGTERM)
    assert program.wait(seconds) == 0
    assert wait_until_gone([program.session], max(0.1, seconds - (time.monotonic() - start))) == []


@pytest.mark.timeout(180)
def test_compose_commands_start_and_find_each_other(tmp_path: Path, running: list[Program]):
    bootstrap, *options = compose_services(FUSION_BOOTSTRAP="x")["bootstrap"]["command"]
    node = fusion_peer("bootstrap", bootstrap, *on_loopback(options), environment={"FUSION_STATE_DIR": str(tmp_path / "node")})
    running.append(node)
    address = node.wait_for(ADDRESS, 60).group()
    service = compose_services(FUSION_BOOTSTRAP=address)["peer"]
    peer = fusion_peer(
        "peer", *service["command"], "--listen", "/ip4/127.0.0.1/tcp/0",
        environment={**service["environment"], "FUSION_STATE_DIR": str(tmp_path / "peer")},
    )  # fmt: skip
    running.append(peer)
    assert peer.wait_for(ADDRESS, 90).group() != address
    stops_within(peer, 30)
    stops_within(node, 30)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("command", UNITS)
def test_units_start_and_stop_as_systemd_would(command: str, tmp_path: Path, running: list[Program]):
    environment = environment_file(ENVIRONMENTS[command])
    environment |= dict(zip(environment, on_loopback(list(environment.values())), strict=True))
    environment |= {"FUSION_STATE_DIR": str(tmp_path / "state"), "FUSION_NO_NAT": "true"}
    if command == "join":
        node, address = start_bootstrap(tmp_path / "node")
        running.append(node)
        environment |= {"FUSION_BOOTSTRAP": address, "FUSION_LISTEN": "/ip4/127.0.0.1/tcp/0"}
    program = fusion_peer(command, *directive(UNITS[command], "ExecStart").split()[1:], environment=environment)
    running.append(program)
    program.wait_for(ADDRESS, 90)
    stops_within(program, float(directive(UNITS[command], "TimeoutStopSec").removesuffix("s")))
