"""Turns a command's configuration class into its flags, so that a setting is declared in one place.

All values reach `config.resolve` as text: flags and environment variables are parsed by the same code, with the same sentences.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from fusion_p2p.config import ENVIRONMENT_PREFIX, CommonConfig, resolve, settings_of
from fusion_p2p.setting_values import help_of, is_repeatable, is_switch

C = TypeVar("C", bound=CommonConfig)

EPILOG = (
    "Every flag has an environment variable: --batch-size is FUSION_BATCH_SIZE. Flags win over it, it wins over --config FILE."
)


@dataclass(frozen=True, slots=True)
class Given:
    """What the user typed: flags by setting name (None: not given) and the --config file."""

    flags: Mapping[str, Any]
    file: Path | None

    def resolve(self, kind: type[C], *earlier: Path) -> C:
        """The configuration; `earlier` files lose against everything the user gave."""
        return resolve(kind, self.flags, os.environ, (*earlier, *((self.file,) if self.file else ())))

    def text(self, name: str) -> str | None:
        """A setting of one value before anything is resolved: its flag or its variable."""
        given = self.flags.get(name) or os.environ.get(ENVIRONMENT_PREFIX + name.upper())
        return None if given is None else str(given)


def add_command(app: typer.Typer, kind: type[CommonConfig], body: Callable[[Given], int]) -> None:
    """Register `body` as a command of its name with a flag for every setting of `kind`; it returns the exit code."""

    def command(**flags: Any) -> None:
        file = flags.pop("config", None)
        raise typer.Exit(body(Given(flags, file)))

    hints = settings_of(kind)
    parameters = [_parameter(field, hints[field.name]) for field in fields(kind)]
    file_flag = typer.Option(
        "--config", help="TOML file of settings; its keys are the flags' names with_underscores", metavar="FILE"
    )
    parameters.append(
        inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, file_flag])
    )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {}
    app.command(body.__name__, help=body.__doc__, short_help=(body.__doc__ or "").split(".")[0], epilog=EPILOG)(command)


def flags_of(name: str) -> tuple[str, ...]:
    """`batch_size` as the user types it; the unit at the end of `join_timeout_s` may be left out."""
    flag = "--" + name.replace("_", "-")
    return (flag, flag.removesuffix("-s")) if flag.endswith("-s") else (flag,)


def _parameter(field: Field[Any], annotation: Any) -> inspect.Parameter:
    flag, *more = flags_of(field.name)
    text = help_of(annotation) + _default_text(field.default)
    if is_switch(annotation):
        both = flag if field.default is False else f"{flag}/--no-{flag[2:]}"
        option: Any = Annotated[bool | None, typer.Option(both, help=text, show_default=False)]
    elif is_repeatable(annotation):
        option = Annotated[list[str] | None, typer.Option(flag, *more, help=text, metavar="TEXT", show_default=False)]
    else:
        option = Annotated[str | None, typer.Option(flag, *more, help=text, metavar="VALUE", show_default=False)]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)


def _default_text(default: Any) -> str:
    if default is MISSING or default is None or default is False or default == ():
        return ""
    return f" [{', '.join(default) if isinstance(default, tuple) else default}]"
