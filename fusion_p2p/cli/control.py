"""`fusion-peer leave`, `pause`, `resume`, `show`: commands to a peer that runs on this machine, through its control socket."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fusion_p2p.config import ENVIRONMENT_PREFIX, CommonConfig
from fusion_p2p.errors import ConfigError
from fusion_p2p.time_of_day import parse_duration

Identity = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        envvar=ENVIRONMENT_PREFIX + "IDENTITY",
        show_envvar=False,
        help="key file of the peer; needed where several run",
    ),
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        envvar=ENVIRONMENT_PREFIX + "STATE_DIR",
        show_envvar=False,
        help="the peer's state directory; default: the user's",
    ),
]


def leave(identity: Identity = None, state_dir: StateDir = None) -> None:
    """Have this machine's peer hand its slices over and leave the swarm; ends when that is done."""
    _tell("leave", identity, state_dir)
    typer.echo("it has left")


def pause(
    duration: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="such as 30m or 2h; default: until `fusion-peer resume`")
    ] = None,
    identity: Identity = None,
    state_dir: StateDir = None,
) -> None:
    """Have this machine's peer hand its slices over and take no new ones for a while. A restart ends the pause."""
    _tell("pause", identity, state_dir, None if duration is None else parse_duration(duration).total_seconds())


def resume(identity: Identity = None, state_dir: StateDir = None) -> None:
    """Let this machine's peer work again."""
    _tell("resume", identity, state_dir)


def show(identity: Identity = None, state_dir: StateDir = None) -> None:
    """Say what this machine's peers do."""
    if identity is not None:
        _tell("show", identity, state_dir)
        return
    for text in _peers(CommonConfig(state_dir=state_dir).state_directory).values():
        typer.echo(text)


def _tell(name: str, identity: Path | None, state_dir: Path | None, for_s: float | None = None) -> None:
    """Say it to the one peer that is meant, and print what it answers."""
    from fusion_p2p.peer.control_socket import Command, ask, socket_path

    folder = CommonConfig(state_dir=state_dir).state_directory
    path = socket_path(folder, identity) if identity is not None else _only_one(folder)
    try:
        for answer in ask(path, Command(name, for_s)):
            typer.echo(answer.text)
    except (FileNotFoundError, ConnectionRefusedError):
        raise ConfigError(
            f"no peer with the identity {identity} runs with the state directory {folder}; is its --state-dir another one?"
        ) from None
    except PermissionError:
        raise ConfigError(f"{path} belongs to another user: only whoever started the peer may tell it what to do") from None


def _only_one(folder: Path) -> Path:
    peers = _peers(folder)
    if len(peers) > 1:
        raise ConfigError(f"{len(peers)} peers run here, choose one with --identity FILE: {'; '.join(peers.values())}")
    return next(iter(peers))


def _peers(folder: Path) -> dict[Path, str]:
    """The sockets of the peers that live, and what they say of themselves. ConfigError when there is none."""
    from fusion_p2p.peer.control_socket import running

    peers = running(folder)
    if not peers:
        raise ConfigError(f"no peer of this user runs with the state directory {folder}; `fusion-peer join` starts one")
    return peers
