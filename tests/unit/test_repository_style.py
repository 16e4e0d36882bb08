"""The house style, as far as a machine can see it."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fusion_p2p"
MAX_FUNCTION_LINES = 60
MEDIAN_FUNCTION_LINES = 10
MAX_MODULE_LINES = 400
MAX_CLASS_LINES = 250
MAX_ARGUMENTS = 8
EMPTY_NAMES = ("utils", "helper", "manager", "handler", "misc", "common")


def modules() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *(ROOT / "contrib").rglob("*.py")])


def parsed() -> Iterator[tuple[Path, ast.Module]]:
    for path in modules():
        yield path.relative_to(ROOT), ast.parse(path.read_text())


def definitions(kind: type | tuple[type, ...]) -> Iterator[tuple[str, ast.AST]]:
    for path, tree in parsed():
        for node in ast.walk(tree):
            if isinstance(node, kind):
                yield f"{path}:{node.name}", node  # type: ignore[attr-defined]


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1  # type: ignore[attr-defined]


def test_functions_are_short():
    sizes = {name: lines_of(node) for name, node in definitions(FUNCTIONS)}
    assert {name: size for name, size in sizes.items() if size > MAX_FUNCTION_LINES} == {}
    assert statistics.median(sizes.values()) < MEDIAN_FUNCTION_LINES


def test_functions_take_few_arguments():
    def count(node: ast.AST) -> int:
        arguments = node.args  # type: ignore[attr-defined]
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        return sum(argument.arg not in ("self", "cls") for argument in named)

    assert {name: count(node) for name, node in definitions(FUNCTIONS) if count(node) > MAX_ARGUMENTS} == {}


def test_classes_and_modules_are_small():
    assert {name: lines_of(node) for name, node in definitions(ast.ClassDef) if lines_of(node) > MAX_CLASS_LINES} == {}
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules()}
    assert {path: size for path, size in sizes.items() if size > MAX_MODULE_LINES} == {}


def test_names_say_what_a_thing_is():
    names = [path.stem for path in modules()] + [name.rsplit(":")[-1].lower() for name, _ in definitions(ast.ClassDef)]
    assert [name for name in names if name.endswith(EMPTY_NAMES)] == []


def test_public_modules_and_classes_say_what_they_are_for():
    silent = [str(path) for path, tree in parsed() if path.name != "__init__.py" and not ast.get_docstring(tree)]
    assert silent == []


@pytest.mark.parametrize("heavy", ["torch", "hivemind", "libp2p", "numpy", "pydantic"])
def test_importing_the_command_line_pulls_in_nothing_heavy(heavy: str):
    code = f"import sys, fusion_p2p.cli.main; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
