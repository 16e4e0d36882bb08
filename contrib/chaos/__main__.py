"""`make chaos`: a run on six real peers with two spares, under faults of every kind, against the same run undisturbed.

    python -m contrib.chaos --mean-between-faults 10 --faults 50 --seed 1 --codec none --codec topk:10

Cuts, replica groups, threads and codecs are the same in both runs: their final parameters must be, bit for bit. A policy that
changes codecs as it goes (`adaptive`) is compared by its validation loss.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from contrib.benchmarks.report import print_figures, write_figures
from contrib.chaos.places import Loopback, Place, nodes
from contrib.chaos.population import populated
from contrib.chaos.schedule import Fault, Kind, schedule
from contrib.chaos.trial import Outcome, differing, disturbed, figures_of, show, undisturbed
from contrib.processes import ProgramFailed
from contrib.testbeds.namespaces import why_not
from fusion_p2p.owner.metrics import read_curves

PEERS = 6
SPARES = 2
SLOWER = 8.0
"""Times that a task takes, by waiting: faults then hit the middle of steps, and peers do not compete for processors."""
STEP_S = 0.55
"""What an undisturbed step of slowed peers takes at least, here; shorter ones only mean more steps."""
NUM_NODES = 16
TIMEOUT_S = 1800.0
CODECS = ("none", "topk:10", "adaptive")
MODEL = (
    "--model", "gpt2", "--layers", "6", "--width", "64", "--heads", "4", "--context", "64", "--dropout", "0.1", "--no-tied",
    "--batch-size", "8", "--micro-batches", "4", "--learning-rate", "1e-3", "--warmup", "20", "--clip", "1.0", "--seed", "7",
    "--scheduler", "equal-compute", "--peers", str(PEERS), "--checkpoint-every", "50", "--validation-batches", "16",
)  # fmt: skip


def main() -> int:
    """Run the trials; 0 when everything holds."""
    given = arguments()
    outcomes: dict[str, Outcome] = {}
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="fusion-chaos-") as folder:
        for codec in given.codec or CODECS:
            place = Path(folder) / codec.replace(":", "-")
            try:
                outcomes[codec], compared = trial(place, codec, given)
            except ProgramFailed as error:
                keep(place, given.keep)
                print(f"\n{codec}: {error}", flush=True)
                return 1
            figures |= compared
            show(outcomes[codec], f"codec {codec}: what faults cost")
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
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--codec", action="append", help=f"of the run (repeatable); default: {', '.join(CODECS)}")
    parser.add_argument("--short", action="store_true", help="ten faults, one of each kind, five seconds apart")
    parser.add_argument("--loopback", action="store_true", help="all on loopback, without cut links: needs no root")
    parser.add_argument("--keep", type=Path, help="copy the run folders of a trial that failed there")
    given = parser.parse_args()
    if given.short:
        given.faults, given.mean_between_faults = min(given.faults, 10), min(given.mean_between_faults, 5.0)
    if not given.loopback and (reason := why_not()) is not None:
        parser.error(f"{reason}; --loopback runs without cut links")
    return given


def trial(folder: Path, codec: str, given: argparse.Namespace) -> tuple[Outcome, dict[str, float]]:
    """Both runs with one codec; what happened, and how the two compare."""
    folder.mkdir(parents=True)
    kinds = [kind for kind in Kind if kind is not Kind.CUT or not given.loopback]
    faults = schedule(given.seed, given.faults, given.mean_between_faults, kinds)
    steps = int(1.1 * faults[-1].at_s / STEP_S)
    wanted = (*MODEL, "--codec", codec, "--steps", str(steps), "--validate-every", str(steps))
    print(f"codec {codec}: {steps} steps undisturbed", flush=True)
    with populated(Loopback(), folder / "quiet", PEERS) as population:
        undisturbed(population, folder / "undisturbed", wanted, TIMEOUT_S)
    print(f"codec {codec}: the same, {len(faults)} faults, {given.mean_between_faults:g} s apart on average", flush=True)
    if given.loopback:
        outcome = under_faults(Loopback(), folder, wanted, faults)
    else:
        with nodes(NUM_NODES, folder) as place:
            outcome = under_faults(place, folder, wanted, faults)
    return outcome, compare(folder, codec)


def under_faults(place: Place, folder: Path, wanted: Sequence[str], faults: Sequence[Fault]) -> Outcome:
    """The disturbed run, with spares."""
    with populated(place, folder / "loud", PEERS + SPARES, slower=SLOWER, num_nodes=NUM_NODES) as population:
        return disturbed(population, folder / "disturbed", wanted, faults, TIMEOUT_S, partial(print, flush=True))


def compare(folder: Path, codec: str) -> dict[str, float]:
    """The end of both runs: bit for bit, or by the validation loss where codecs change as a run goes."""
    first, second = folder / "undisturbed", folder / "disturbed"
    if codec == "adaptive":
        losses = [read_curves(run / "metrics.jsonl")[1][-1][1] for run in (first, second)]
        return {"adaptive_loss_difference": abs(losses[1] / losses[0] - 1)}
    different = differing(first, second)
    if different:
        print(f"codec {codec}: {len(different)} tensors differ, such as {', '.join(different[:5])}")
    return {f"parameters_identical_{codec.replace(':', '_')}": float(not different)}


def keep(folder: Path, target: Path | None) -> None:
    """Copy what a failed trial has left."""
    if target is not None:
        shutil.copytree(folder, target / folder.name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.key*", "*.sock"))


if __name__ == "__main__":
    sys.exit(main())
