"""`make chaos`: a run on six real peers with two spares, under faults of every kind, against the same run undisturbed.

    python -m contrib.chaos --mean-between-faults 10 --faults 50 --codec none --codec topk:10

Cuts, replica groups, threads and codecs are the same in both runs: their final parameters must be, bit for bit. A policy that
changes codecs as it goes (`adaptive`) is compared by its validation loss.

Under faults tasks are slowed by waiting, so that there are steps enough for all faults; after the last fault they are not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from contrib.benchmarks.report import RESULTS, print_figures, write_figures
from contrib.chaos.places import Loopback, nodes
from contrib.chaos.population import populated
from contrib.chaos.schedule import Fault, Kind, schedule
from contrib.chaos.trial import Outcome, differing, disturbed, figures_of, show, undisturbed
from contrib.processes import ProgramFailed
from contrib.testbeds.namespaces import why_not
from fusion_p2p.errors import FusionError
from fusion_p2p.owner.metrics import read_curves

PEERS = 6
SPARES = 2
SLOWER = 16.0
"""Times that a task takes, by waiting: faults then hit the middle of steps, and peers do not compete for processors."""
STEP_S = 1.0
"""What a step of slowed peers takes at least, here: so the run does not end before the faults do."""
SEED = 4
"""Of the faults: their 50 times add up to seven minutes, so that three codecs take some 35 minutes."""
NUM_NODES = 16
QUIET_S = 1800.0
AFTER_S = 900.0
"""For so long a run may go on after its last fault, on a busy machine."""
ADAPTIVE = "adaptive"
CODECS = ("none", "topk:10", ADAPTIVE)
MODEL = (
    "--model", "gpt2", "--layers", "6", "--width", "64", "--heads", "4", "--context", "64", "--dropout", "0.1", "--no-tied",
    "--batch-size", "8", "--micro-batches", "4", "--learning-rate", "1e-3", "--warmup", "20", "--clip", "1.0", "--seed", "7",
    "--scheduler", "equal-compute", "--peers", str(PEERS), "--checkpoint-every", "25", "--validation-batches", "16",
)  # fmt: skip
WORTH_KEEPING = ("*.log", "*.jsonl", "plan.json")


def main() -> int:
    """Run the trials; 0 when everything holds."""
    given = arguments()
    codecs: list[str] = given.codec or list(CODECS)
    faults = schedule(given.seed, given.faults, given.mean_between_faults, kinds(given))
    steps = int(faults[-1].at_s / STEP_S) + 1
    outcomes: list[Outcome | None] = []
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="fusion-chaos-") as name:
        folder = Path(name)
        print(f"{steps} steps undisturbed, with codecs {', '.join(codecs)}", flush=True)
        train_undisturbed(folder / "quiet", codecs, steps)
        for codec in codecs:
            outcome, compared = trial(folder, codec, steps, faults, given)
            outcomes.append(outcome)
            figures |= compared
            found = figures_of([outcome]) | compared
            print_figures(f"codec {codec}", found)
            print(f"codec {codec}: the logs of all processes are in {keep(folder, codec, given.keep)}", flush=True)
    identical = [value for name, value in figures.items() if name.startswith("parameters_identical_")]
    figures = figures_of(outcomes) | ({"parameters_identical": min(identical)} if identical else {}) | figures
    path = write_figures("chaos", figures)
    good = print_figures("make chaos", figures)
    print(f"figures {path}")
    return 0 if good else 1


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="make chaos FLAGS='...'", allow_abbrev=False)
    parser.add_argument("--mean-between-faults", type=float, default=10.0, help="seconds")
    parser.add_argument("--faults", type=int, default=50, help="how many; 50 are five of every kind and 15 newcomers")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--codec", action="append", help=f"of the run (repeatable); default: {', '.join(CODECS)}")
    parser.add_argument("--short", action="store_true", help="ten faults, one of each kind, five seconds apart")
    parser.add_argument("--loopback", action="store_true", help="all on loopback, without cut links: needs no root")
    parser.add_argument("--keep", type=Path, default=RESULTS / "chaos", help="folder for the logs of all processes")
    given = parser.parse_args()
    if given.short:
        given.faults, given.mean_between_faults = min(given.faults, 10), min(given.mean_between_faults, 5.0)
    if not given.loopback and (reason := why_not()) is not None:
        parser.error(f"{reason}; --loopback runs without cut links")
    return given


def kinds(given: argparse.Namespace) -> list[Kind]:
    """Of faults that can be done here."""
    return [kind for kind in Kind if kind is not Kind.CUT or not given.loopback]


def wanted(codec: str, steps: int) -> tuple[str, ...]:
    """How the owners of both runs are asked for the same."""
    return (*MODEL, "--codec", codec, "--steps", str(steps), "--validate-every", str(steps))


def train_undisturbed(folder: Path, codecs: Sequence[str], steps: int) -> None:
    """The runs to compare with, one after another on the same peers: as fast as these are, or as slow as under faults.

    What `adaptive` chooses depends on how long tasks take beside transfers, so for it both runs have to take equally long.
    """
    exact = [codec for codec in codecs if codec != ADAPTIVE]
    for slower, chosen in ((1.0, exact), (SLOWER, [codec for codec in codecs if codec == ADAPTIVE])):
        if not chosen:
            continue
        with populated(Loopback(), folder / f"peers-{slower:g}", PEERS, slower=slower) as population:
            for codec in chosen:
                try:
                    undisturbed(population, folder / name_of(codec), wanted(codec, steps), QUIET_S)
                except ProgramFailed as error:
                    print(f"codec {codec}: {error}", flush=True)


def trial(
    folder: Path, codec: str, steps: int, faults: Sequence[Fault], given: argparse.Namespace
) -> tuple[Outcome | None, dict[str, float]]:
    """The run with one codec under faults: what happened, None if it did not come to its end, and the comparison."""
    place, arguments = folder / name_of(codec), wanted(codec, steps)
    place.mkdir()
    print(f"codec {codec}: the same under {len(faults)} faults, {given.mean_between_faults:g} s apart on average", flush=True)
    try:
        with (
            contextlib.nullcontext(Loopback()) if given.loopback else nodes(NUM_NODES, place) as where,
            populated(where, place, PEERS + SPARES, slower=SLOWER, num_nodes=NUM_NODES) as population,
        ):
            outcome = disturbed(population, place / "run", arguments, faults, AFTER_S, partial(print, flush=True))
        show(outcome, f"codec {codec}: what faults cost")
        return outcome, compare(folder / "quiet" / name_of(codec), place / "run", codec)
    except (ProgramFailed, OSError, FusionError) as error:
        print(f"\ncodec {codec}: {error}", flush=True)
        return None, {} if codec == ADAPTIVE else {f"parameters_identical_{name_of(codec)}": 0.0}


def compare(first: Path, second: Path, codec: str) -> dict[str, float]:
    """The end of both runs: bit for bit, or by the validation loss where codecs change as a run goes."""
    if codec == ADAPTIVE:
        quiet, other = (read_curves(run / "metrics.jsonl")[1][-1][1] for run in (first, second))
        print(f"codec {codec}: validation loss {quiet:.4f} undisturbed, {other:.4f} under faults")
        for run in (first, second):
            print(f"  codecs of {run.parent.name}/{run.name}: {codecs_of(run)}")
        return {"adaptive_loss_difference": abs(other / quiet - 1)}
    different = differing(first, second)
    if different:
        print(f"codec {codec}: {len(different)} tensors differ, such as {', '.join(different[:5])}")
    return {f"parameters_identical_{name_of(codec)}": float(not different)}


def codecs_of(run: Path) -> str:
    """How often each codec was in the plan of an epoch that began."""
    starts = (json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines())
    found = Counter(codec for start in starts if start["kind"] == "start" for codec in start["codecs"])
    return ", ".join(f"{codec} {times}" for codec, times in found.most_common())


def name_of(codec: str) -> str:
    """A codec in the name of a figure or of a folder."""
    return codec.replace(":", "_")


def keep(folder: Path, codec: str, target: Path) -> Path:
    """Copy what a trial has left, but no states; where to."""
    kept = target / name_of(codec)
    shutil.rmtree(kept, ignore_errors=True)
    for source in sorted(path for pattern in WORTH_KEEPING for path in (folder / name_of(codec)).rglob(pattern)):
        copy = kept / source.relative_to(folder / name_of(codec))
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    return kept


if __name__ == "__main__":
    sys.exit(main())
