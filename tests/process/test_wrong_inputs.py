"""Wrong inputs, as a table: what is typed, the exit code, and what the one sentence says. No tracebacks."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fusion_p2p.cli.main import exit_code_of
from fusion_p2p.config import TrainConfig
from fusion_p2p.lock import FileLock
from fusion_p2p.owner.run_folder import RunFolder

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

PEER = "12D3KooWGBfGbUe8kHzUJ7bUG1oFyTzUPQHzjxLzWcEDKhHrYh5P"
NOBODY = f"/ip4/127.0.0.1/tcp/9/p2p/{PEER}"
"""A well-formed address where nobody listens: what is wrong must be found before it is dialled."""
FACTORIES = "tests.unit.factories_for_tests"
ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0


@dataclass(frozen=True)
class Case:
    """`{tmp}` in an argument is a folder that `places` has furnished."""

    name: str
    arguments: Sequence[str]
    exit_code: int
    fragment: str


def join(*arguments: str) -> tuple[str, ...]:
    return ("join", "--join-timeout", "3", *arguments)


def train(*arguments: str) -> tuple[str, ...]:
    small = ("--layers", "1", "--width", "8", "--heads", "2", "--context", "8", "--batch-size", "2", "--micro-batches", "1")
    return ("train", "--bootstrap", NOBODY, "--join-timeout", "3", *small, *arguments)


def own_model(*arguments: str) -> tuple[str, ...]:
    few = ("--batch-size", "2", "--micro-batches", "1", "--data", f"{FACTORIES}:points")
    return ("train", "--bootstrap", NOBODY, "--join-timeout", "3", *few, *arguments)


USAGE = [
    Case("no command", (), 2, "Missing command"),
    Case("unknown command", ("jion",), 2, "No such command 'jion'"),
    Case("unknown flag", train("--stepz", "3"), 2, "No such option: --stepz"),
    Case("flag without a value", ("train", "--steps"), 2, "requires an argument"),
    Case("word for a number", train("--steps", "many"), 2, "--steps: 'many' should be a valid integer"),
    Case("zero steps", train("--steps", "0"), 2, "--steps: '0' should be greater than or equal to 1"),
    Case("unknown optimiser", train("--optimiser", "lion"), 2, "--optimiser: 'lion' should be sgd, adam or adamw"),
    Case(
        "batch not divisible",
        train("--batch-size", "6", "--micro-batches", "4"),
        2,
        "batch_size 6 is not divisible by micro_batches 4",
    ),
    Case("no bootstrap", ("join",), 2, "join needs --bootstrap ADDRESS"),
    Case("missing configuration", ("train", "--config", "{tmp}/absent.toml"), 2, "cannot read the configuration"),
    Case("malformed configuration", ("train", "--config", "{tmp}/malformed.toml"), 2, "is not valid TOML"),
    Case("unknown key", ("train", "--config", "{tmp}/unknown.toml"), 2, "unknown key 'optimizer'; did you mean 'optimiser'?"),
    Case("wrong type", ("train", "--config", "{tmp}/wrong_type.toml"), 2, "steps: '3' should be a valid integer"),
]
ADDRESSES = [
    Case("ip for ip4", join("--bootstrap", f"/ip/192.0.2.7/tcp/31337/p2p/{PEER}"), 2, "/ip is unknown (did you mean /ip4)"),
    Case("no peer id", join("--bootstrap", "/ip4/192.0.2.7/tcp/31337"), 2, "does not end in /p2p/PEER_ID"),
    Case("a URL", join("--bootstrap", "https://example.org:31337"), 2, "is a URL; the form is /ip4/HOST/tcp/PORT/p2p/PEER_ID"),
    Case("port 0", join("--bootstrap", f"/ip4/192.0.2.7/tcp/0/p2p/{PEER}"), 2, "/tcp/0 is no port that can be dialled"),
    Case("a space", join("--bootstrap", f"{NOBODY} {NOBODY}"), 2, "contains a space"),
    Case("bad peer id", join("--bootstrap", "/ip4/192.0.2.7/tcp/31337/p2p/QmNot"), 2, "/p2p/QmNot is not a peer id"),
    Case(
        "name for a number",
        join("--bootstrap", f"/ip4/example.org/tcp/1/p2p/{PEER}"),
        2,
        "(for a name write /dns4/example.org)",
    ),
    Case("listen on a peer id", join("--bootstrap", NOBODY, "--listen", NOBODY), 2, "a listen address has no /p2p/"),
]
UNREACHABLE = [
    Case("nobody there", join("--bootstrap", NOBODY), 3, "127.0.0.1"),
    Case("unknown host", join("--bootstrap", f"/dns4/no-such-host.invalid/tcp/1/p2p/{PEER}"), 3, "no-such-host.invalid"),
]
FILES = [
    Case("missing text", train("--data", "{tmp}/absent.txt"), 2, "there is no such file or folder"),
    Case("short text", train("--data", "{tmp}/short.txt"), 2, "bytes to train on are fewer than context + 1"),
    Case("not a run folder", ("train", "--resume", "{tmp}"), 2, "is not a run folder: it has no config.toml"),
    Case("resume with another seed", ("train", "--resume", "{tmp}/run", "--seed", "9"), 2, "seed was 0 when this run began"),
    Case("run folder taken", own_model("--model", f"{FACTORIES}:regression", "--run", "{tmp}/run"), 2, "holds a run already"),
    Case("run folder in use", ("train", "--resume", "{tmp}/held", "--join-timeout", "3"), 2, "held is in use by process"),
    Case("export of nothing", ("export", "{tmp}/absent"), 2, "is not a run folder"),
    Case("export too early", ("export", "{tmp}/run"), 2, "has no checkpoint yet"),
    Case(
        "damaged identity",
        join("--bootstrap", NOBODY, "--identity", "{tmp}/short.txt"),
        2,
        "does not hold a 64-byte Ed25519 key",
    ),
    Case("identity in use", join("--bootstrap", NOBODY, "--identity", "{tmp}/used.key"), 2, "used.key is in use by process"),
    Case("state folder is a file", join("--bootstrap", NOBODY, "--state-dir", "{tmp}/short.txt"), 2, "cannot write"),
]
MODELS = [
    Case("unknown model", train("--model", "gpt9"), 2, "gpt9"),
    Case("unknown option", train("--option", "colour=red"), 2, "colour"),
    Case("heads do not divide width", train("--heads", "3"), 2, "3"),
    Case("no such module", own_model("--model", "no_such_module:build"), 2, "there is no module 'no_such_module'"),
    Case("no such factory", own_model("--model", f"{FACTORIES}:absent"), 2, "has no 'absent'"),
    Case("factory that raises", own_model("--model", f"{FACTORIES}:raising"), 2, "raised RuntimeError: no weights here"),
    Case("factory of a string", own_model("--model", f"{FACTORIES}:not_a_module"), 2, "returned a str, not a torch.nn.Module"),
    Case(
        "no such argument",
        own_model("--model", f"{FACTORIES}:regression", "--option", "speed=9"),
        2,
        "(speed=9) raised TypeError",
    ),
    Case("operator not known", own_model("--model", f"{FACTORIES}:untraceable"), 2, "slogdet"),
    Case(
        "shapes that do not fit",
        own_model("--model", f"{FACTORIES}:regression", "--option", "width=5"),
        2,
        "cannot be captured: RuntimeError",
    ),
    Case("data of another kind", train("--data", "digits"), 2, "gpt2"),
    Case("no such device", join("--bootstrap", NOBODY, "--device", "cuda:99"), 5, "cuda:99"),
    Case("not a device", join("--bootstrap", NOBODY, "--device", "toaster"), 2, "toaster"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that `{tmp}` stands for; what is held there is held by this process."""
    folder = tmp_path_factory.mktemp("wrong")
    for name, text in {
        "malformed.toml": "steps = ",
        "unknown.toml": "optimizer = 'adam'",
        "wrong_type.toml": "steps = '3'",
        "short.txt": "short",
    }.items():
        (folder / name).write_text(text)
    for name in ("run", "held"):
        with RunFolder.create(TrainConfig(bootstrap=(NOBODY,), run=folder / name)) as made:
            made.write_model(b"no graph", (), {})
    with FileLock(folder / "held" / "lock", "run"), FileLock(folder / "used.key.lock", "identity"):
        yield folder


def environment(folder: Path, name: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FUSION_")}
    ours = {"FUSION_STATE_DIR": str(folder / f"state-{name}"), "FUSION_NO_NAT": "true", "OMP_NUM_THREADS": "1"}
    return kept | ours | {"FUSION_LISTEN": "/ip4/127.0.0.1/tcp/0"}


def command(arguments: Sequence[str], protocol: int | None = None) -> list[str]:
    if protocol is None:
        return [sys.executable, "-m", "fusion_p2p.cli.main", *arguments]
    program = f"import fusion_p2p; fusion_p2p.PROTOCOL = {protocol}; from fusion_p2p.cli.main import main; main()"
    return [sys.executable, "-c", program, *arguments]


def refuse(arguments: Sequence[str], exit_code: int, fragment: str, folder: Path) -> None:
    """Run a command and check its code and its sentence."""
    words = [argument.replace("{tmp}", str(folder)) for argument in arguments]
    done = subprocess.run(
        command(words),
        cwd=ROOT,
        # A state folder of its own: peers remembered by another command would answer where none is expected.
        env=environment(Path(tempfile.mkdtemp(dir=folder)), "refused"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    check_refusal(done.returncode, done.stdout, done.stderr, exit_code, fragment)


def check_refusal(exit_code: int, out: str, err: str, expected_code: int, fragment: str) -> None:
    """One sentence on stderr that says what is expected, no traceback anywhere, and the code."""
    said = err.strip().splitlines()
    assert "Traceback" not in err + out
    assert exit_code == expected_code, err
    assert len(said) == 1, err
    assert said[0].startswith("error: ")
    assert fragment in said[0]


@pytest.fixture
def quiet_again() -> Iterator[None]:
    """Commands configure the root logger of their process; here that is ours."""
    root, package = logging.getLogger(), logging.getLogger("fusion_p2p")
    handlers, levels = root.handlers[:], (root.level, package.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    package.setLevel(levels[1])


@pytest.mark.row(7)
@pytest.mark.usefixtures("quiet_again")
@pytest.mark.parametrize("case", [*USAGE, *ADDRESSES, *FILES, *MODELS], ids=lambda case: case.name.replace(" ", "_"))
def test_wrong_input_is_one_sentence_and_its_exit_code(
    case: Case, places: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """In this process, so that torch is imported once; the commands below are processes of their own."""
    for key, value in environment(places, "refused").items():
        monkeypatch.setenv(key, value)
    exit_code = exit_code_of([argument.replace("{tmp}", str(places)) for argument in case.arguments])
    shown = capfd.readouterr()
    check_refusal(exit_code, shown.out, shown.err, case.exit_code, case.fragment)


@pytest.mark.row(1)
@pytest.mark.parametrize("case", [USAGE[2], MODELS[5], *UNREACHABLE], ids=lambda case: case.name.replace(" ", "_"))
def test_a_process_ends_with_its_sentence_and_exit_code(case: Case, places: Path):
    refuse(case.arguments, case.exit_code, case.fragment, places)


@contextmanager
def bootstrap_node(folder: Path, protocol: int | None = None) -> Iterator[str]:
    """A running bootstrap node; its address."""
    arguments = ("bootstrap", "--listen", "/ip4/127.0.0.1/tcp/0", "--no-relay")
    process = subprocess.Popen(
        command(arguments, protocol), cwd=ROOT, env=environment(folder, "bootstrap"), stdout=subprocess.PIPE, text=True
    )
    try:
        yield printed_address(process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def printed_address(process: subprocess.Popen[str]) -> str:
    """The first full address that a process prints."""
    deadline = time.monotonic() + 40.0
    while process.stdout is not None and time.monotonic() < deadline:
        ready, _, _ = select.select([process.stdout], [], [], 1.0)
        line = process.stdout.readline() if ready else ""
        words = [word for word in line.split() if word.startswith("/ip4/") and "/p2p/12D3Koo" in word]
        if words:
            return words[0]
        if ready and not line:
            break
    raise AssertionError("the bootstrap node printed no address")


@pytest.mark.row(9)
def test_a_port_that_is_taken_is_named(places: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refuse(("bootstrap", "--no-relay", "--listen", f"/ip4/127.0.0.1/tcp/{port}"), 2, f"port {port}", places)


@pytest.fixture(scope="module")
def node(places: Path) -> Iterator[str]:
    """The address of a bootstrap node that runs during the tests of this file."""
    with bootstrap_node(places) as address:
        yield address


def test_no_peers_is_said_after_the_time_allowed(places: Path, node: str):
    words = own_model("--model", f"{FACTORIES}:regression", "--run", "{tmp}/alone", "--no-peers-timeout", "3")
    refuse((*words, "--bootstrap", node), 3, "no peers", places)


@pytest.mark.row(6)
def test_another_protocol_version_is_refused_with_the_remedy(places: Path):
    with bootstrap_node(places, protocol=2) as address:
        refuse(join("--bootstrap", address), 4, "protocol", places)


@pytest.mark.row(1)
def test_another_peer_at_a_known_address_is_named(places: Path, node: str):
    refuse(join("--bootstrap", f"{node.rsplit('/', 1)[0]}/{PEER}"), 3, "other peer id", places)


def test_the_table_is_long_enough():
    assert len([*USAGE, *ADDRESSES, *UNREACHABLE, *FILES, *MODELS]) >= 40
