"""`package.module:factory`: the owner's own code, named on the command line; it runs on the owner's machine, nowhere else."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from fusion_p2p.errors import ConfigError

CODE_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, NameError, OSError, RuntimeError,
    SyntaxError, TypeError, ValueError,
)  # fmt: skip
"""What a user's code raises when it is wrong: said as one sentence, since it is not our fault."""


def is_factory(reference: str) -> bool:
    """Whether a setting names a factory rather than something built in or a file."""
    module, colon, name = reference.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def call_factory(reference: str, options: Mapping[str, Any], setting: str) -> Any:
    """Import the factory and call it. ConfigError that names the setting and what went wrong."""
    factory = load_factory(reference, setting)
    try:
        return factory(**options)
    except CODE_ERRORS as error:
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ConfigError(f"{setting} {reference}({given}) raised {_sentence(error)}") from error


def load_factory(reference: str, setting: str) -> Callable[..., Any]:
    """The callable that `package.module:factory` names; the current folder is searched first, as by `python -m`."""
    module_name, _, name = reference.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(
                f"{setting} {reference}: there is no module {error.name!r} in the current folder or installed"
            ) from None
        raise ConfigError(f"{setting} {reference}: importing {module_name} raised {_sentence(error)}") from error
    except CODE_ERRORS as error:
        raise ConfigError(f"{setting} {reference}: importing {module_name} raised {_sentence(error)}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        problem = "has no" if factory is None else f"has a {type(factory).__name__}, not a function, named"
        raise ConfigError(f"{setting} {reference}: module {module_name} {problem} {name!r}")
    return factory  # type: ignore[no-any-return]


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
