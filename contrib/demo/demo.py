"""`make demo`: a bootstrap node, three peers and an owner, each a process of its own, train a byte-level GPT-2 on this machine.

The text is the Python standard library's own source. At the end the validation loss (on files that were not trained on) stands
beside the entropy of a byte-bigram model of the same training text: a model below it has learnt more than which byte follows
which. Everything that was started is gone afterwards.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from contrib.benchmarks.report import MUST, RESULTS, print_figures, write_figures
from contrib.processes import ProgramFailed, fusion_peer, start_bootstrap, start_peer, wait_until_gone, wait_until_joined
from fusion_p2p.owner.bigram import bigram_nats
from fusion_p2p.owner.metrics import read_curves
from fusion_p2p.owner.text import stdlib_text

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".demo"
NUM_PEERS = 3
TRAIN_TIMEOUT_S = 900.0
MODEL = ("--model", "gpt2", "--layers", "4", "--width", "256", "--heads", "4", "--context", "128", "--dropout", "0")
"""3.3 million parameters with the 256 bytes as vocabulary."""
TRAINING = (
    "--scheduler", "equal-compute",  # every peer takes part, however small the model
    "--data", "stdlib-text", "--batch-size", "12", "--micro-batches", "4", "--steps", "300", "--optimiser", "adamw",
    "--learning-rate", "2e-3", "--warmup", "20", "--schedule", "cosine", "--beta2", "0.95", "--clip", "1.0",
    "--validate-every", "50", "--validation-batches", "16", "--checkpoint-every", "100",
)  # fmt: skip


def main() -> int:
    """Run the demo; 0 when everything that it promises came true."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    sessions: list[int] = []
    with swarm(sessions) as address:
        seconds = train(address, sessions)
    left = wait_until_gone(sessions, 10.0)
    figures = figures_of(FOLDER / "run", seconds, len(left))
    return 0 if show(figures) else 1


@contextmanager
def swarm(sessions: list[int]) -> Iterator[str]:
    """A bootstrap node and the peers, until the block ends; gives the address to join."""
    with ExitStack() as running:
        node, address = start_bootstrap(FOLDER / "bootstrap")
        running.enter_context(node)
        sessions.append(node.session)
        say(f"fusion-peer bootstrap      {address}")
        programs = [node]
        for number in range(1, NUM_PEERS + 1):
            peer = running.enter_context(start_peer(f"peer-{number}", FOLDER, address))
            programs.append(peer)
            sessions.append(peer.session)
            say(f"fusion-peer join           {peer.name}, process {peer.session}")
        try:
            wait_until_joined(programs[1:])
            yield address
        except ProgramFailed:
            for program in programs:
                say(f"{program.name} said last:\n{program.tail()}")
            raise


def train(address: str, sessions: list[int]) -> float:
    """Train through the command line; the seconds it took. ProgramFailed when the owner fails."""
    begin = time.monotonic()
    say("fusion-peer train          " + " ".join((*MODEL, *TRAINING)))
    arguments = (
        "train", "--bootstrap", address, "--listen", "/ip4/127.0.0.1/tcp/0", "--no-nat", "--state-dir", str(FOLDER / "owner"),
        "--peers", str(NUM_PEERS), "--run", str(FOLDER / "run"), *MODEL, *TRAINING,
    )  # fmt: skip
    with fusion_peer("owner", *arguments, attached=True) as owner:
        sessions.append(owner.session)
        code = owner.wait(TRAIN_TIMEOUT_S)
    if code:
        raise ProgramFailed(f"the owner ended with exit code {code}")
    return time.monotonic() - begin


def figures_of(run: Path, seconds: float, num_left: int) -> dict[str, float]:
    """What `bench-results/demo.json` keeps."""
    losses, validation = read_curves(run / "metrics.jsonl")
    of_training_text, of_held_out_text = bigram_nats(stdlib_text())
    return {
        "val_loss_last": validation[-1][1],
        "bigram_nats": of_training_text,
        "bigram_nats_held_out": of_held_out_text,
        "train_loss_first": losses[0][1],
        "train_loss_last": losses[-1][1],
        "steps": len(losses),
        "seconds_train": round(seconds, 1),
        "processes_left": num_left,
    }


def show(figures: dict[str, float]) -> bool:
    """Print and keep the figures; whether the demo kept its promises."""
    picture = RESULTS / "demo-loss.png"
    path = write_figures("demo", figures)
    shutil.copy(FOLDER / "run" / "loss.png", picture)
    good = print_figures("make demo", figures, MUST | {"val_loss_last": ("<", figures["bigram_nats"])})
    say(f"validation loss {figures['val_loss_last']:.3f} nats per byte, byte-bigram entropy {figures['bigram_nats']:.3f}")
    say(f"figures {path.relative_to(ROOT)}, loss curve {picture.relative_to(ROOT)}, run folder {FOLDER.name}/run")
    return good


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
