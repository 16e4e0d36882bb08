"""What the package declares: dependencies that are used, commands that exist, and import rules for every floor."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IMPORTED_AS = {
    "tomli-w": "tomli_w",
    "scikit-learn": "sklearn",
    "nvidia-ml-py": "pynvml",
    "annotated-types": "annotated_types",
    "prometheus-client": "prometheus_client",
}
BOUNDS_ONLY = {"protobuf", "grpcio-tools"}
"""Not imported: bounds that keep hivemind and libp2p installable together."""


def requirement_names(requirements: list[str]) -> list[str]:
    return [re.split(r"[<>=!\[; ]", requirement)[0] for requirement in requirements]


def imports_of_package() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "fusion_p2p").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    return found


def test_every_dependency_is_imported_somewhere():
    declared = requirement_names(PROJECT["project"]["dependencies"])
    imported = imports_of_package()
    unused = [name for name in declared if name not in BOUNDS_ONLY and IMPORTED_AS.get(name, name) not in imported]
    assert unused == []


def test_everything_imported_is_declared():
    extras = [name for names in PROJECT["project"]["optional-dependencies"].values() for name in names]
    declared = {IMPORTED_AS.get(name, name) for name in requirement_names(PROJECT["project"]["dependencies"] + extras)}
    assert imports_of_package() - declared - sys.stdlib_module_names - {"fusion_p2p"} == set()


def test_make_shows_every_target():
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=30).stdout
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"setup", "check", "format", "test", "demo", "bench-main"} <= set(targets)
    assert all(f"make {target} " in shown for target in targets)


def test_continuous_integration_uses_the_same_targets():
    script = (ROOT / ".ci" / "run").read_text()
    assert "set -euo pipefail" in script
    assert [line for line in script.splitlines() if line.startswith("make ")] == ["make setup", "make demo", "make test"]


def test_every_package_of_the_house_is_on_a_floor():
    floors = next(contract for contract in PROJECT["tool"]["importlinter"]["contracts"] if contract["type"] == "layers")
    placed = {name.strip() for layer in floors["layers"] for name in re.split(r"[|:]", layer)}
    packages = {path.name for path in (ROOT / "fusion_p2p").iterdir() if (path / "__init__.py").exists()}
    assert packages <= placed
