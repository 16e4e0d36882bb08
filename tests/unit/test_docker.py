"""docker/ and bootstrap/ without a container or a service manager: what can be wrong in the files themselves."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from fusion_p2p.config import BootstrapConfig, CommonConfig, JoinConfig, resolve, settings_of
from tests.deployment import (
    DOCKERFILE,
    ENVIRONMENTS,
    ROOT,
    UNITS,
    compose_services,
    directive,
    dockerfile,
    environment_file,
    unit,
)

CONFIGURATIONS: dict[str, type[CommonConfig]] = {"bootstrap": BootstrapConfig, "join": JoinConfig}
KNOWN_INSTRUCTIONS = {
    "FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD",
}  # fmt: skip
KNOWN_DIRECTIVES = {
    "Unit": {"Description", "Wants", "After", "StartLimitIntervalSec", "StartLimitBurst"},
    "Install": {"WantedBy"},
    "Service": {
        "Type", "EnvironmentFile", "ExecStart", "Restart", "RestartSec", "RestartPreventExitStatus", "KillSignal", "KillMode",
        "TimeoutStopSec", "DynamicUser", "StateDirectory", "StateDirectoryMode", "UMask", "LimitNOFILE", "MemoryMax",
        "TasksMax",
        "Nice", "CPUWeight", "IOWeight", "NoNewPrivileges", "CapabilityBoundingSet", "AmbientCapabilities", "ProtectSystem",
        "ProtectHome", "PrivateTmp", "PrivateDevices", "ProtectClock", "ProtectControlGroups", "ProtectHostname",
        "ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables", "ProtectProc", "RestrictAddressFamilies",
        "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID", "LockPersonality", "SystemCallArchitectures",
        "SystemCallFilter",
    },
}  # fmt: skip


def final_stage() -> dict[str, list[str]]:
    """The instructions of the image that is shipped, by name."""
    last = max(instruction.stage for instruction in dockerfile())
    found: dict[str, list[str]] = {}
    for instruction in dockerfile():
        if instruction.stage == last:
            found.setdefault(instruction.name, []).append(instruction.text)
    return found


def settings_in(arguments: list[str]) -> dict[str, str | list[str]]:
    """`--flag value` and `--switch` arguments by setting name."""
    flags: dict[str, str | list[str]] = {}
    for index, word in enumerate(arguments):
        if word.startswith("--"):
            following = arguments[index + 1 : index + 2]
            flags[word[2:].replace("-", "_")] = following[0] if following and not following[0].startswith("--") else "true"
    return flags


def test_dockerfile_has_only_instructions_that_the_tests_can_follow():
    assert {instruction.name for instruction in dockerfile()} <= KNOWN_INSTRUCTIONS


def test_every_copied_path_exists_and_is_in_the_build_context():
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copies = [instruction.words for instruction in dockerfile() if instruction.name == "COPY"]
    sources = {word for words in copies if not words[0].startswith("--from=") for word in words[:-1]}
    assert sources
    for source in sources:
        assert (ROOT / source).exists()
        assert source in allowed


def test_image_runs_a_command_of_the_project_without_privileges():
    stage = final_stage()
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert stage["ENTRYPOINT"] == ['["fusion-peer"]']
    assert "fusion-peer" in scripts
    assert stage["USER"] == ["10001:10001"]
    assert stage["STOPSIGNAL"] == ["SIGTERM"]


def test_both_stages_share_one_base_image_with_glibc():
    bases = {instruction.words[0] for instruction in dockerfile() if instruction.name == "FROM"}
    assert bases == {"python:3.11-slim-bookworm"}
    assert "TORCH_INDEX" in DOCKERFILE.read_text()


@pytest.mark.parametrize("service", ["bootstrap", "peer"])
def test_compose_commands_are_valid_configurations(service: str):
    address = "/ip4/192.0.2.1/tcp/31337/p2p/12D3KooWGQmdpzHXCqLno4mMxWXKNFQHASBeF99gTm2JR8Vu5Bdc"
    entry = compose_services(FUSION_BOOTSTRAP=address)[service]
    command, *arguments = entry["command"]
    config = resolve(CONFIGURATIONS[command], settings_in(arguments), entry.get("environment", {}))
    assert config.no_nat
    assert entry["init"] is True
    assert entry["cap_drop"] == ["ALL"]


def test_compose_publishes_the_ports_that_the_bootstrap_listens_on():
    entry = compose_services(FUSION_BOOTSTRAP="x")["bootstrap"]
    flags = settings_in(entry["command"][1:])
    listening = {str(flags[name]).rsplit("/", 1)[1] for name in ("listen", "relay_listen")}
    assert {port.split(":")[1] for port in entry["ports"]} == listening


@pytest.mark.parametrize("command", UNITS)
def test_unit_uses_known_directives_and_runs_the_command(command: str):
    for section, name, value in unit(UNITS[command]):
        assert name in KNOWN_DIRECTIVES[section], name
        assert value or name in ("CapabilityBoundingSet", "AmbientCapabilities")
    program, *arguments = directive(UNITS[command], "ExecStart").split()
    assert Path(program).name == "fusion-peer"
    assert arguments == [command]
    assert directive(UNITS[command], "NoNewPrivileges") == "yes"


@pytest.mark.parametrize("command", ENVIRONMENTS)
def test_environment_file_is_a_valid_configuration(command: str):
    variables = environment_file(ENVIRONMENTS[command])
    known = {"FUSION_" + name.upper() for name in settings_of(CONFIGURATIONS[command])}
    assert variables.keys() <= known
    config = resolve(CONFIGURATIONS[command], {}, variables)
    assert config.network == "fusion"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("command", UNITS)
def test_systemd_accepts_the_unit(command: str, tmp_path: Path):
    path = tmp_path / UNITS[command].name
    program = directive(UNITS[command], "ExecStart").split()[0]
    path.write_text(UNITS[command].read_text().replace(program, "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0
    assert done.stderr == ""
