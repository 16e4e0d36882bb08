"""What the documents promise exists: links, make targets, flags, tests, and the surface of the command line."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from fusion_p2p.cli.flags import flags_of
from fusion_p2p.config import (
    BenchConfig,
    BootstrapConfig,
    CommonConfig,
    JoinConfig,
    PlanConfig,
    StatusConfig,
    TrainConfig,
    settings_of,
)

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path for path in ROOT.rglob("*.md") if not {".venv", "runs", ".demo", "build"} & set(path.relative_to(ROOT).parts)
)
ROWS = range(1, 41)
COMMANDS: dict[str, type[CommonConfig]] = {
    "bootstrap": BootstrapConfig, "join": JoinConfig, "train": TrainConfig, "status": StatusConfig,
    "plan": PlanConfig, "bench": BenchConfig,
}  # fmt: skip

COMMON_FLAGS = "network listen announce identity state-dir no-nat log-level debug"
JOB_FLAGS = (
    "bootstrap join-timeout-s model layers width heads context dropout tied option data data-option batch-size micro-batches "
    "optimiser momentum seed scheduler pipeline codec ratio recompute "
    "cut-embedding bottleneck keep-sparsifier finish cuts"
)
SURFACE = {
    "bootstrap": "bootstrap no-relay relay-listen relay-reservations relay-circuits relay-duration-s relay-mebibytes",
    "join": "bootstrap device threads memory-gib benchmark join-timeout-s metrics-port upload-mbit download-mbit monthly-gib "
    "hours on-battery drain-timeout-s",
    "train": f"{JOB_FLAGS} steps learning-rate schedule warmup beta1 beta2 epsilon weight-decay clip validate-every "
    "validation-batches checkpoint-every copies peers precision no-peers-timeout-s run resume",
    "plan": f"{JOB_FLAGS} testbed image json actions plot",
    "bench": "device threads benchmark precision json",
    "status": "bootstrap timeout-s json",
}
"""Every flag there is. A new one is added here on purpose; one that goes or changes its name breaks its users."""


@pytest.mark.parametrize("command", COMMANDS)
def test_surface_of_the_command_line_is_frozen(command: str):
    flags = {name.replace("_", "-") for name in settings_of(COMMANDS[command])}
    assert flags == {*COMMON_FLAGS.split(), *SURFACE[command].split()}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_documents_lead_somewhere(document: Path):
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_targets_and_flags_in_documents_exist(document: Path):
    text = document.read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets
    known = {flag for kind in COMMANDS.values() for name in settings_of(kind) for flag in flags_of(name)} | {
        "--config",
        "--help",
    }
    known |= {"--out", "--version", "--for"}
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        commands = re.findall(r"^[^#\n]*fusion-peer (?:[^\n]*\\\n)*[^\n]*", block, re.MULTILINE)
        used = set(re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", "\n".join(line for line in commands if "docker" not in line)))
        used -= {"--now", "--user"}
        assert used <= known, document


def test_readme_names_every_command():
    readme = (ROOT / "README.md").read_text()
    for command in (*COMMANDS, "export", "leave", "pause", "resume", "show"):
        assert f"| `{command}` |" in readme


def test_the_drawing_of_the_house_names_every_folder_and_module_of_the_package():
    (drawing,) = re.findall(r"^```\n(floor 5.*?)^```", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"\b(\w+)(?:/|\.py\b)", drawing))
    package = [path for path in (ROOT / "fusion_p2p").iterdir() if not path.name.startswith("__")]
    assert named == {path.stem for path in package if path.is_dir() or path.suffix == ".py"}


def test_changelog_is_kept():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changelog
    sections = set(re.findall(r"^### (\w+)$", changelog, re.MULTILINE))
    assert sections <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_no_text_names_a_path_of_somebodys_machine():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    if listed.returncode:
        pytest.skip("not a git checkout")
    private = re.compile(r"(?<![\w.~-])/(?:" + "|".join(["work", "root", "home/[a-z]+", "Users/[a-z]+"]) + r")/[\w.]")
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and path.suffix not in (".png", ".bin") and private.search(path.read_text(errors="replace")):
            found.append(name)
    assert found == []


def marked_tests() -> dict[int, set[str]]:
    """Row number -> `path::test` of the tests that carry its mark."""
    found: dict[int, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        module_rows = [
            int(row) for row in re.findall(r"row\((\d+)\)", "".join(re.findall(r"^pytestmark = .*$", text, re.MULTILINE)))
        ]
        for marks, test in re.findall(
            r"((?:^ *@[^\n]*\n(?:[ \]})][^@\n]*\n)*)*)^ *(?:async )?def (test_\w+)", text, re.MULTILINE
        ):
            for row in [*module_rows, *map(int, re.findall(r"row\((\d+)\)", marks))]:
                found.setdefault(row, set()).add(f"{path.relative_to(ROOT / 'tests')}::{test}")
    return found


def reported_tests() -> dict[int, set[str]]:
    """Row number -> tests named in FIELD_REPORTS.md."""
    lines = re.findall(r"^\| (\d+) \|[^|]*\|([^|]*)\|$", (ROOT / "tests" / "FIELD_REPORTS.md").read_text(), re.MULTILINE)
    return {int(row): set(re.findall(r"`([^`]+)`", tests)) for row, tests in lines}


@pytest.mark.parametrize("row", ROWS)
def test_every_field_report_has_a_test_that_carries_its_row(row: int):
    reported, marked = reported_tests().get(row, set()), marked_tests().get(row, set())
    assert reported, f"row {row} is not in FIELD_REPORTS.md"
    assert reported <= marked


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_named_in_documents_exist(document: Path):
    names = set(re.findall(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|md|toml|yaml|service|env))[`:]", document.read_text()))
    known = {"metrics.jsonl", "config.toml"}
    places = (ROOT, ROOT / "fusion_p2p", ROOT / "tests", document.parent)
    assert sorted(name for name in names - known if not any((place / name).exists() for place in places)) == []
