"""The `fusion-peer` command. Importing this module pulls in nothing heavy: each command imports what it needs when it runs."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from types import TracebackType
from typing import Annotated

import typer
from typer.exceptions import TyperException
from typer.main import get_command

from fusion_p2p import PROTOCOL, __version__
from fusion_p2p.cli.bench import bench
from fusion_p2p.cli.bootstrap import bootstrap
from fusion_p2p.cli.control import leave, pause, resume, show
from fusion_p2p.cli.export import export
from fusion_p2p.cli.flags import add_command
from fusion_p2p.cli.join import join
from fusion_p2p.cli.plan import plan
from fusion_p2p.cli.running import INTERRUPTED, leave_now
from fusion_p2p.cli.status import status
from fusion_p2p.cli.train import train
from fusion_p2p.config import BenchConfig, BootstrapConfig, JoinConfig, PlanConfig, StatusConfig, TrainConfig
from fusion_p2p.errors import FusionError

app = typer.Typer(
    name="fusion-peer",
    help="Train neural networks over volunteers' machines.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
add_command(app, BootstrapConfig, bootstrap)
add_command(app, JoinConfig, join)
add_command(app, TrainConfig, train)
app.command(short_help="Write the trained weights as a safetensors file")(export)
add_command(app, StatusConfig, status)
add_command(app, PlanConfig, plan)
add_command(app, BenchConfig, bench)
for control in (leave, pause, resume, show):
    app.command(short_help=(control.__doc__ or "").split(".")[0])(control)


def print_version(wanted: bool) -> None:
    """The versions that decide whether two peers understand each other."""
    if not wanted:
        return
    from importlib.metadata import version

    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "hivemind", "libp2p"))
    typer.echo(f"fusion-p2p {__version__}, protocol {PROTOCOL}, python {sys.version.split()[0]}, {libraries}")
    raise typer.Exit


@app.callback()
def fusion_peer(
    version: Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True, help="print versions")] = False,
) -> None:
    """Train neural networks over volunteers' machines."""


def main(arguments: list[str] | None = None) -> None:
    """Run a command and end the process: one sentence on stderr for everything that goes wrong, and its exit code."""
    sys.excepthook = report_unexpected
    # At once: taking apart an interpreter that holds torch and hivemind takes a second, on a busy machine three.
    leave_now(exit_code_of(sys.argv[1:] if arguments is None else arguments))


def exit_code_of(arguments: list[str]) -> int:
    """Run a command; expected errors are printed and become their exit code."""
    try:
        # Not app(...): that would put typer's own excepthook in place of ours.
        return get_command(app)(arguments, prog_name="fusion-peer", standalone_mode=False) or 0
    except FusionError as error:
        return fail(str(error), error.exit_code)
    except TyperException as error:
        return fail(error.format_message().replace("\n", " "), 2)
    except BaseExceptionGroup as group:
        expected = first_expected(group)
        if expected is None:
            raise
        return fail(str(expected), expected.exit_code)
    except KeyboardInterrupt:
        return INTERRUPTED


def first_expected(group: BaseExceptionGroup[BaseException]) -> FusionError | None:
    """The first error raised on purpose in a group of nothing else; None when something unexpected is among them."""
    expected, unexpected = group.split(FusionError)
    if expected is None or unexpected is not None:
        return None
    leaf: BaseException = expected
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    return leaf if isinstance(leaf, FusionError) else None


def fail(sentence: str, exit_code: int) -> int:
    """Say what is wrong and give the exit code back. Peers' words may be part of it: nothing may reach the terminal raw."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in sentence)
    typer.echo(f"error: {shown}", err=True)
    return exit_code


def report_unexpected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """`sys.excepthook`: a sentence for the user; the traceback goes to the log, and to the terminal with --debug."""
    logging.getLogger("fusion_p2p").debug("unexpected error", exc_info=(kind, error, trace))
    if "--debug" in sys.argv or os.environ.get("FUSION_DEBUG") in ("1", "true"):
        traceback.print_exception(kind, error, trace)
    fail(f"unexpected {kind.__name__}: {str(error)[:300]} (a fault of fusion_p2p; --debug shows where)", 1)


if __name__ == "__main__":
    main()
