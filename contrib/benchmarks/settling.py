"""Whether a run settles: equal peers and spares, nobody comes or goes, and no slice moves, whatever is measured of them."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from contrib.chaos.places import Loopback
from contrib.chaos.population import populated
from contrib.chaos.watching import LedgerWatch

MEMBERS, SPARES = 4, 2
SECONDS = 180.0
START_S = 240.0
MODEL = (
    "--model", "gpt2", "--layers", "6", "--width", "128", "--heads", "4", "--context", "64", "--dropout", "0", "--no-tied",
    "--batch-size", "16", "--micro-batches", "4", "--steps", "1000000", "--validate-every", "0", "--checkpoint-every", "1000",
    "--scheduler", "equal-compute", "--peers", str(MEMBERS),
)  # fmt: skip


def measure() -> dict[str, float]:
    """Epochs that were begun after the first one, which are none but for a gain here, and the steps in that time."""
    with tempfile.TemporaryDirectory(prefix="fusion-settling-") as name:
        run = Path(name) / "run"
        with (
            populated(Loopback(), Path(name), MEMBERS + SPARES) as population,
            LedgerWatch(run) as watch,
            population.start_owner(run, MODEL) as owner,
        ):
            owner.wait_for(r"^step \d+", START_S)
            time.sleep(SECONDS)
            said = [noted.kind for noted in watch.noted]
    return {"moves_of_equal_peers": float(said.count("start") - 1), "settled_steps": float(said.count("commit"))}
