"""The values that settings have: their types with units and limits, and reading them from text and TOML, strictly."""

from __future__ import annotations

import difflib
import json
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt

from fusion_p2p.errors import ConfigError

NO_LIMIT = 1e18
"""Upper bound of numbers that have none of their own: it keeps infinity and NaN out."""


@dataclass(frozen=True, slots=True)
class Help:
    """What a setting means, with its unit: shown by --help."""

    text: str


Seconds = Annotated[float, Gt(0), Le(86_400)]
Port = Annotated[int, Ge(1), Lt(1 << 16)]
PositiveInt = Annotated[int, Ge(1), Lt(1 << 31)]
Fraction = Annotated[float, Ge(0), Lt(1)]
NonNegative = Annotated[float, Ge(0), Le(NO_LIMIT)]
Positive = Annotated[float, Gt(0), Le(NO_LIMIT)]
Ratio = Annotated[float, Ge(1), Le(1e6)]


def parse_options(items: Sequence[str], where: str) -> dict[str, Any]:
    """NAME=VALUE items as keyword arguments; a VALUE is read as JSON where it is JSON, as a string otherwise."""
    options: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"{where}: {item!r} is not NAME=VALUE")
        if name in options:
            raise ConfigError(f"{where}: {name} is given twice")
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    return options


def is_repeatable(annotation: Any) -> bool:
    """Whether a setting holds several values."""
    return any(get_origin(member) is tuple for member in _members(annotation))


def is_switch(annotation: Any) -> bool:
    """Whether a setting is on or off."""
    return bool in _members(annotation)


def help_of(annotation: Any) -> str:
    """The text of a setting's `Help`."""
    return next((item.text for item in get_args(annotation) if isinstance(item, Help)), "")


def from_file(known: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The settings of a TOML file; `known` is the annotated type of every setting there is."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise ConfigError(f"{path}: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return {key: _validated(known[key], value, f"{path}: {key}") for key, value in table.items()}


def from_text(annotation: Any, given: Any, where: str) -> Any:
    """The value of a flag (a switch, a text, or a list of texts) or of a variable."""
    if isinstance(given, bool):
        return given
    if is_repeatable(annotation):
        items = given.split(",") if isinstance(given, str) else given
        return tuple(item.strip() for item in items if item.strip())
    if given.lower() == "none" and type(None) in _members(annotation):
        return None
    return _validated(annotation, given, where, text=True)


def _validated(annotation: Any, value: Any, where: str, *, text: bool = False) -> Any:
    """`value` as the annotation says: text is parsed, anything else must have the right type already."""
    from pydantic import TypeAdapter, ValidationError  # kept out of --help

    if value == "none" and type(None) in _members(annotation):
        return None
    adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    try:
        if text:
            return adapter.validate_strings(value)
        return adapter.validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        reason = first["msg"].removeprefix("Input ").replace("'", "")
        raise ConfigError(f"{where}: {str(value)[:80]!r} {reason}") from None


def _members(annotation: Any) -> Iterator[Any]:
    """The plain types of an annotation: annotations removed, unions flattened."""
    if get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation
