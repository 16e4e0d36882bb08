"""Reads the files of docker/ and bootstrap/ as their programs would, so that tests can check and run every line."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = ROOT / "docker" / "Dockerfile"
COMPOSE = ROOT / "docker" / "compose.yaml"
UNITS = {"bootstrap": ROOT / "bootstrap" / "fusion-bootstrap.service", "join": ROOT / "bootstrap" / "fusion-peer.service"}
ENVIRONMENTS = {"bootstrap": ROOT / "bootstrap" / "bootstrap.env", "join": ROOT / "bootstrap" / "peer.env"}


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile, with the number of the stage it belongs to (0 is the first FROM)."""

    stage: int
    name: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)


def dockerfile() -> list[Instruction]:
    """The instructions in order; continued lines joined, comments left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    instructions: list[Instruction] = []
    stage = -1
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, text = line.partition(" ")
        stage += name == "FROM"
        instructions.append(Instruction(stage, name, " ".join(text.split())))
    return instructions


def compose_services(**variables: str) -> dict[str, dict[str, Any]]:
    """The services of compose.yaml with `${NAME:?...}` filled in."""
    text = COMPOSE.read_text()
    for name, value in variables.items():
        start = text.index("${" + name)
        text = text[:start] + value + text[text.index("}", start) + 1 :]
    services: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return services


def unit(path: Path) -> list[tuple[str, str, str]]:
    """(section, directive, value) of every line of a systemd unit."""
    section, found = "", []
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            directive, _, value = line.partition("=")
            found.append((section, directive, value))
    return found


def directive(path: Path, name: str) -> str:
    """The value of a directive that occurs once."""
    (value,) = (value for _, directive, value in unit(path) if directive == name)
    return value


def environment_file(path: Path) -> dict[str, str]:
    """The variables of an EnvironmentFile."""
    pairs = (line.partition("=") for line in path.read_text().splitlines() if line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def substitute(text: str, values: dict[str, str]) -> str:
    """`${NAME}` and `$NAME` as docker replaces them."""
    return Template(text).safe_substitute(values)
